"""When ranks that wait for nothing had left: NCCL's senders, which are done when their slots are filled.

In: the exchanges of all collectives and when their ranks first acted. Out: when slots were free again, and of
which ranks the first message shows nothing of when they filled it. A GPU fills slots of its staging buffer and goes
on; the proxy thread sends them when a credit is there and the connection's turn has come (NCCL 2.30,
src/transport/net.cc sendProxyProgress).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.passing import SLOTS
from dpuflow.ordering import order_within
from dpuflow.schema import NEVER, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.ordering import Picked


def slot_free_ns(picked: Picked, of: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the slot of each message was free again, as the ACK of the one that had been in it shows.

    NEVER where it had been free from the start: the GPU filled it some time after entering.
    """
    line, start = picked["connection"][rows].astype(np.int64), picked["data_ns"][rows]
    order = np.lexsort((start, line, of[rows]))
    ordered, before = rows[order], order[:-SLOTS]
    free = np.full(len(rows), NEVER)
    same = (line[order][SLOTS:] == line[before]) & (of[ordered[SLOTS:]] == of[rows[before]])
    free[order[SLOTS:][same]] = picked["acked_ns"][rows[before[same]]]
    return free


def kept_until_ns(picked: Picked, sends: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of ``sends``, places in ``picked``, until when something else than its rank may have kept it.

    Its credit; its connection's turn, which comes when the message before it is acknowledged; the data that
    its adapter was sending. NEVER where there was none of these.
    """
    out = picked["grant_arrived_ns"][sends].copy()
    data = np.flatnonzero((picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["data_ns"] != NEVER))
    if not len(data):
        return out
    line = 2 * picked["connection"][data].astype(np.int64) + (picked["src"][data] > picked["dst"][data])
    before = np.full(len(picked), NEVER)
    order = order_within(picked["order"][data].astype(np.int64), line)
    same = line[order[1:]] == line[order[:-1]]
    before[data[order[1:][same]]] = picked["acked_ns"][data[order[:-1][same]]]
    out = np.maximum(out, before[sends])
    # Messages of an adapter leave side by side, so what ended last need not have begun last.
    src = picked["src"][data].astype(np.int64)
    order = order_within(picked["data_ns"][data], src)
    starts = np.flatnonzero(np.r_[True, np.diff(src[order]) != 0])
    ended = picked["data_end_ns"][data[order]]
    until = np.concatenate([np.maximum.accumulate(each) for each in np.split(ended, starts[1:])])
    first = np.zeros(len(order), bool)
    first[starts] = True
    before[:] = NEVER
    before[data[order[1:]]] = np.where(first[1:], NEVER, until[:-1])
    return np.asarray(np.maximum(out, np.minimum(before[sends], picked["data_ns"][sends])), np.int64)
