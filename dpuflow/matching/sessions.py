"""EXCHANGE rows of jobs that followed each other between the same ranks in, those of each job out.

A job opens connections of its own. Where none is used both before and after a moment, and some pair of ranks
has one on either side, the job before it is over: its messages are no job's beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows


def sessions(exchanges: Rows, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """``rows`` cut where all connections were made anew; one array a job, in order, together all of ``rows``.

    ``rows`` are row numbers of EXCHANGE of one communicator, ascending, and so in order of their first sign.
    """
    if not len(rows):
        return [rows]
    connection, of = np.unique(exchanges["connection"][rows], return_inverse=True)
    if len(connection) < 2:
        return [rows]
    of = of.reshape(-1)
    place = np.arange(len(rows))
    first, last = np.full(len(connection), len(rows)), np.full(len(connection), -1)
    np.minimum.at(first, of, place)
    np.maximum.at(last, of, place)
    src, dst = exchanges["src"][rows[first]].tolist(), exchanges["dst"][rows[first]].tolist()
    cuts, pairs, end = [0], set[frozenset[int]](), -1
    for number in np.argsort(first, kind="stable").tolist():
        if end >= 0 and first[number] > end and _met(pairs, number, first, src, dst):
            cuts.append(int(first[number]))
            pairs.clear()
        pairs.add(frozenset((src[number], dst[number])))
        end = max(end, int(last[number]))
    return [rows[low:high] for low, high in zip(cuts, [*cuts[1:], len(rows)], strict=True)]


def _met(
    pairs: set[frozenset[int]],
    number: int,
    first: NDArray[np.int64],
    src: list[int],
    dst: list[int],
) -> bool:
    """Whether a pair that had a connection before ``number`` began has another one afterwards."""
    later = np.flatnonzero(first >= first[number]).tolist()
    return any(frozenset((src[k], dst[k])) in pairs for k in later)
