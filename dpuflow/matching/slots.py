"""What clear-to-send entries announced, where that is less than the slot that they name.

In: EXCHANGE rows, bytes and addresses of their entries. Out: bytes of the slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import is_in
from dpuflow.matching.buffers import DEFAULT, RING_SLOT, STEP_SLOT
from dpuflow.matching.model import MOST
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from dpuflow.arrays import Ints
    from dpuflow.schema.tables import Rows


def whole_slots(exchanges: Rows, announced: Ints, granted_at: Ints) -> Ints:
    """``announced`` with a step's slot where an entry for PAT announced no more than its operation needs.

    Up to 2.28 that is all ranks' blocks of a channel, if these are less than a slot (enqueue.cc
    calcCollChunking, net.cc recvProxyProgress). The addresses are those of slots, taken in turn; those of
    other protocols count (net.cc: a connection has one step for all of its buffers).
    """
    found: Ints = announced.copy()
    rows = np.flatnonzero((announced > 0) & (granted_at >= 0))
    line = 2 * exchanges["connection"][rows].astype(np.int64)
    line += exchanges["src"][rows] > exchanges["dst"][rows]
    order = np.lexsort((exchanges["order"][rows], line))
    rows, line = rows[order], line[order]
    taken = np.cumsum(np.where(announced[rows] == RING_SLOT, 2, 1))
    some = np.flatnonzero(~is_in(announced[rows], list(DEFAULT)))
    if not len(some):
        return found
    rows, line, taken = rows[some], line[some], taken[some]
    begins = np.flatnonzero(np.r_[True, np.diff(line) != 0])
    same = np.r_[line[1:] == line[:-1], False]
    steps = np.diff(granted_at[rows], append=0) - np.diff(taken, append=0) * STEP_SLOT
    in_turn = np.add.reduceat(same & (steps % (NCCL_STEPS * STEP_SLOT) == 0), begins)
    turns, most = np.add.reduceat(same, begins), np.maximum.reduceat(announced[rows], begins)
    short = (turns > 1) & (in_turn >= MOST * turns) & (most < STEP_SLOT)
    found[rows[np.repeat(short, np.diff(np.r_[begins, len(rows)]))]] = STEP_SLOT
    return found
