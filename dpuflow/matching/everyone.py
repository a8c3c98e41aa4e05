"""Point-to-point transfers of a job in, all_to_alls out: rounds in which every rank sends to every other one.

A library knows nothing of such rounds (isend and irecv of a mixture of experts). What tells them is that
every edge carries as many messages as every other, and that no rank begins a round before it has sent all of
the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.matching.model import Instance
from dpuflow.matching.streams import columns_of, edge_streams
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

FEWEST: Final = 3
"""Two ranks that answer each other are everyone, too."""
IN_ORDER: Final = 0.9
"""The share of rounds that every rank must keep apart: a message may be late or have another one's time."""
LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


def rounds_of_everyone(
    exchanges: Rows, rows: NDArray[np.int64], position: NDArray[np.int64]
) -> tuple[list[Instance], NDArray[np.int64]]:
    """The rounds among ``rows`` of one communicator, and the rows that are in none.

    ``position`` gives each endpoint's place in the default numbering of ranks.
    """
    streams = edge_streams(exchanges, rows)
    lanes = [each for _, each in streams.left()]
    ends = sorted({end for edge in streams.edges for end in edge}, key=lambda end: int(position[end]))
    n = len(ends)
    count = min(map(len, lanes))
    # The captures' ends may cut a round or two.
    if n < FEWEST or len(lanes) != n * (n - 1) or count < IN_ORDER * max(map(len, lanes)):
        return [], rows
    rounds = np.array([lane[:count] for lane in lanes])
    starts = columns_of(exchanges).starts[rounds]
    src = np.array([edge[0] for edge in streams.edges])
    apart = np.ones(count - 1, bool)
    for end in ends:
        mine = starts[src == end]
        apart &= mine.max(axis=0)[:-1] <= mine.min(axis=0)[1:]
    if not count or apart.sum() < IN_ORDER * (count - 1):
        return [], rows
    found = [
        Instance(each[np.argsort(when, kind="stable")], Op.ALL_TO_ALL, list(ends), LINEAR, confidence=0.9)
        for each, when in zip(rounds.T, starts.T, strict=True)
    ]
    return found, np.setdiff1d(rows, rounds)
