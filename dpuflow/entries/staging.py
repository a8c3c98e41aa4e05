"""When ranks that wait for nothing had left: NCCL's senders, which are done when their slots are filled.

In: the exchanges of all collectives. Out: when slots were free again, and until when something else may have
kept a rank's first message. A GPU fills slots of its staging buffer and goes on; the proxy thread sends them
when a credit is there and the connection's turn has come (NCCL 2.30, src/transport/net.cc sendProxyProgress).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import order_within
from dpuflow.entries.passing import SLOTS, lines_of, messages_ahead
from dpuflow.schema.rows import NEVER, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.matching import Instance

_FAR = np.iinfo(np.int64).max


def filled_ns(
    picked: Picked,
    instances: Sequence[Instance],
    of: NDArray[np.int64],
    sender: NDArray[np.int64],
    total: int,
) -> NDArray[np.int64]:
    """For each of ``total`` rows when the last slot that its rank filled was free.

    NEVER where none had to be; far in the future for ranks of collectives whose slots are not known. ``of``
    and ``sender``: collective, and row of Entries, of each of ``picked``.
    """
    depth = np.fromiter((messages_ahead(i) for i in instances), np.int64, len(instances))[of]
    writes = (picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["grant_ns"] != NEVER)
    known = (depth > 0) & (writes | (picked["wire"] == Wire.NCCL_DATA))
    out = np.full(total, NEVER)
    out[sender[~known]] = _FAR
    for ahead in np.unique(depth[known]).tolist():
        rows = np.flatnonzero(known & (depth == ahead))
        np.maximum.at(out, sender[rows], slot_free_ns(picked, of, rows, ahead))
    return out


def slot_free_ns(
    picked: Picked, of: NDArray[np.int64], rows: NDArray[np.int64], slots: int = SLOTS
) -> NDArray[np.int64]:
    """When the slot of each message was free again, as the ACK (or leaving) of the one in it before shows.

    NEVER where it had been free from the start: the GPU filled it some time after entering. ``slots``: of so
    many messages.
    """
    line, start = picked["connection"][rows].astype(np.int64), picked["data_ns"][rows]
    order = order_within(start, of[rows])
    order = order[order_within(np.zeros_like(order), line[order])]
    ordered, before = rows[order], order[:-slots]
    free = np.full(len(rows), NEVER)
    same = (line[order][slots:] == line[before]) & (of[ordered[slots:]] == of[rows[before]])
    emptied = rows[before[same]]
    # A socket has taken a message when it leaves (src/transport/net_socket.cc): nobody waits for its ACK.
    socket = picked["wire"][emptied] == Wire.NCCL_DATA
    free[order[slots:][same]] = np.where(socket, picked["data_end_ns"][emptied], picked["acked_ns"][emptied])
    return free


def kept_until_ns(picked: Picked, sends: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of ``sends``, places in ``picked``, until when something else than its rank may have kept it.

    Its credit; its connection's turn, which comes when the message before it is acknowledged; the data that
    its adapter was sending. NEVER where there was none of these.
    """
    out: NDArray[np.int64] = picked["grant_arrived_ns"][sends].copy()
    data = np.flatnonzero((picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["data_ns"] != NEVER))
    if not len(data):
        return out
    line = lines_of(picked)[data]
    before = np.full(len(picked), NEVER)
    order = order_within(picked["order"][data].astype(np.int64), line)
    same = line[order[1:]] == line[order[:-1]]
    before[data[order[1:][same]]] = picked["acked_ns"][data[order[:-1][same]]]
    out = np.maximum(out, before[sends])
    # Messages of an adapter leave side by side, so what ended last need not have begun last. One that was
    # sent again keeps it until it is acknowledged.
    src = picked["src"][data].astype(np.int64)
    order = order_within(picked["data_ns"][data], src)
    starts = np.flatnonzero(np.r_[True, np.diff(src[order]) != 0])
    ended = picked["data_end_ns"][data[order]]
    again = picked["retransmitted"][data[order]] > 0
    ended = np.where(again, np.maximum(ended, picked["acked_ns"][data[order]]), ended)
    until = np.concatenate([np.maximum.accumulate(each) for each in np.split(ended, starts[1:])])
    first = np.zeros(len(order), bool)
    first[starts] = True
    before[:] = NEVER
    before[data[order[1:]]] = np.where(first[1:], NEVER, until[:-1])
    return np.asarray(np.maximum(out, np.minimum(before[sends], picked["data_ns"][sends])), np.int64)
