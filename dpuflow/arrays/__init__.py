"""What all stages do with arrays: sort by class, put together what meets. Knows no record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

FAR: Final = (1 << 63) - 1
"""After all times; more than any number."""

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
