"""What ranks are judged by: the record that judging, coverage and confidence read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.entries import Entries, Relative, Tail
    from dpuflow.matching import Instance
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.costs import Charges
    from dpuflow.verdicts.excess import Own


class Evidence(NamedTuple):
    """Collectives, when their ranks came, and what these answer for; by row of Entries where nothing else is
    said."""

    instances: Sequence[Instance]
    entries: Entries
    relative: Relative
    charges: Charges
    causes: Causes
    own: Own
    group: NDArray[np.int64]  # of each collective
    step: NDArray[np.int64]  # -1: in none (``find_steps``)
    worked_ns: int  # how long the job took without stalls (``find_work``)
    stalls: Tail | None = None  # how long hand-overs stall
