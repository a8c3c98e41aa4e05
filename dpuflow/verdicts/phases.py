"""The phases of collectives that go round twice: a reduce-scatter, then an all-gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.results import Phase
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

_IN_TWO: Final = ("ring", "segmented_ring", "rabenseifner")


def ring_phases(exchanges: Rows, instances: Sequence[Instance]) -> list[list[Phase]]:
    """Each collective's phases: of all_reduces along a ring the halves of every connection's bytes.

    Empty where the algorithm has no such phases or the collective was seen only in part.
    """
    from dpuflow.kernels.phases import FAR, halves

    asked = [
        i.op == Op.ALL_REDUCE and i.algorithm is not None and i.complete and i.algorithm.name in _IN_TWO
        for i in instances
    ]
    if not any(asked):
        return [[] for _ in instances]
    rows = np.concatenate([i.rows for i in instances])
    offsets = np.cumsum([0, *(len(i.rows) for i in instances)])
    whole, done = np.zeros((2, 2 * int(exchanges["connection"].max()) + 2), np.int64)
    out = np.empty((len(instances), 4), np.int64)
    halves(exchanges, rows, offsets, np.array(asked, np.uint8), whole, done, out)
    found = []
    for scatter, scattered, gather, gathered in out.tolist():
        halves_seen = (("reduce_scatter", scatter, scattered), ("all_gather", gather, gathered))
        found.append([Phase(name, start, end) for name, start, end in halves_seen if start != FAR])
    return found
