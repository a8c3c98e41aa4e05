"""What clear-to-send entries announced, where that is less than the slot that they name.

In: EXCHANGE rows, bytes and addresses of their entries. Out: bytes of the slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching.buffers import STEP_SLOT
from dpuflow.matching.model import MOST
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from dpuflow.arrays import Ints
    from dpuflow.schema.tables import Rows


def whole_slots(exchanges: Rows, announced: Ints, granted_at: Ints) -> Ints:
    """``announced`` with a step's slot where an entry for PAT announced no more than its operation needs.

    Up to 2.28 that is all ranks' blocks of a channel, if these are less than a slot (enqueue.cc
    calcCollChunking, net.cc recvProxyProgress). The addresses are those of slots, taken in turn.
    """
    found: Ints = announced.copy()
    rows = np.flatnonzero((announced > 0) & (granted_at >= 0))
    if not len(rows):
        return found
    line = 2 * exchanges["connection"][rows].astype(np.int64)
    line += exchanges["src"][rows] > exchanges["dst"][rows]
    order = np.lexsort((exchanges["order"][rows], line))
    rows, line = rows[order], line[order]
    begins = np.flatnonzero(np.r_[True, np.diff(line) != 0])
    same = np.r_[line[1:] == line[:-1], False]
    steps = np.diff(granted_at[rows], append=0)
    in_turn = np.add.reduceat(same & (steps % (NCCL_STEPS * STEP_SLOT) == STEP_SLOT), begins)
    turns, most = np.add.reduceat(same, begins), np.maximum.reduceat(announced[rows], begins)
    short = (turns > 1) & (in_turn >= MOST * turns) & (most < STEP_SLOT)
    found[rows[np.repeat(short, np.diff(np.r_[begins, len(rows)]))]] = STEP_SLOT
    return found
