"""TRANSFER rows in, the same with one connection for the queue pairs that share a stream of messages out.

NCCL may use several queue pairs a connection and deals messages out to them in turn; clear-to-send entries
all go over the first one (net_ib, NCCL_IB_QPS_PER_CONNECTION). So a queue pair that carries data although it
was never granted any belongs to one of the same two endpoints that was granted more than it carried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema import Role, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.tables import Rows
CREDITS = 256
"""Entries that a receiver may have posted at most: a clear-to-send ring has so many rows (net_ib)."""


def one_line(transfers: Rows, part: NDArray[np.int64]) -> Rows:
    """``transfers``; a copy where rows ``part`` of striped queue pairs get the connection of the first."""
    line = transfers["connection"][part].astype(np.int64)
    grant = transfers["role"][part] == Role.GRANT
    written = (transfers["wire"][part] == Wire.ROCE_WRITE_IMM) & ~grant
    if not grant.any():
        return transfers
    lines = int(line.max()) + 1
    # Of both directions of a connection: NCCL's carry data one way.
    granted, carried = np.bincount(line[grant], minlength=lines), np.bincount(line[written], minlength=lines)
    bare = np.flatnonzero((carried > 0) & (granted == 0))
    if not len(bare):
        return transfers
    first = np.full(lines, -1)
    first[line[written][::-1]] = np.flatnonzero(written)[::-1]
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    used = np.flatnonzero(first >= 0)
    for each in used[np.argsort(first[used])].tolist():
        row = part[first[each]]
        pair = (int(transfers["src"][row]), int(transfers["dst"][row]))
        ends.setdefault(pair, ([], []))[int(granted[each] == 0)].append(each)
    to = np.arange(lines)
    for paid, unpaid in ends.values():
        if not paid or len(unpaid) % len(paid):
            continue
        left = {each: int(granted[each] - carried[each]) for each in paid}
        turn = [paid[k % len(paid)] for k in range(len(unpaid))]
        for each, owner in zip(unpaid, turn, strict=True):
            left[owner] -= int(carried[each])
        # Credits still out at the end are all that may be left over.
        if all(0 <= some <= CREDITS for some in left.values()):
            to[unpaid] = turn
    if (to == np.arange(lines)).all():
        return transfers
    out: Rows = transfers.copy()
    out["connection"][part] = to[line]
    return out
