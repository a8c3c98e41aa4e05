"""One collective as the reconstruction passes it on: which exchanges, which algorithm, which places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.collectives.schedules import Algorithm
    from dpuflow.schema import Op


@dataclass(slots=True)
class Instance:
    """One collective. ``rows`` are EXCHANGE rows in order of their first sign.

    ``order`` lists the endpoints by their position in the algorithm; ``root`` is a position.
    ``size`` is the buffer of one rank in bytes, None where the packets do not tell. ``blind`` are the
    positions whose first message is known to be missing.
    """

    rows: NDArray[np.int64]
    op: Op
    order: list[int]
    algorithm: Algorithm | None = None
    alternatives: list[str] = field(default_factory=list)
    root: int | None = None
    size: int | None = None
    complete: bool = True
    confidence: float = 1.0
    blind: frozenset[int] = frozenset()
