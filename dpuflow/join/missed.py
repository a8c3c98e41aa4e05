"""Messages of NCCL's connections that a capture missed and another one saw: their times at the missing end.
So are those that were under way when captures began.

In: TRANSFER rows in order of sent_ns. Out: the same rows, in order of what is now sent_ns.
Without this a message that its sender's own capture missed seems to leave when it arrived, behind those that
followed it. The packets of a queue pair leave and arrive in order of their PSNs (InfiniBand volume 1, 9.7.2):
its sender's stamp of the next message bounds its sending, and what the receiver's capture saw before and
after it bounds its arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.schema.rows import NEVER, MessageFlag, Seen, Wire
from dpuflow.wire.headers import PSN_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables, Rows

_ROUND = 1 << PSN_BITS
_MISSED = np.uint8(MessageFlag.GAP | MessageFlag.HIDDEN)
_WRITES = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM)


def date_missed(captures: Sequence[CaptureTables], transfers: Rows) -> Rows:
    """The rows with the times of messages that one end's capture missed, sorted by ``sent_ns`` again.

    Where the sender's capture missed a WRITE or its beginning, ``sent_ns`` is the latest that it can be, and
    loses AT_SENDER. Where the receiver's missed it, its arrival is its sending and the connection's usual
    way, between what arrived before and after.
    """
    missed = (transfers["flags"] & MessageFlag.GAP) != 0
    # Of several captures some saw nothing of what others saw leave.
    under_way = (transfers["seen"] & Seen.AT_SENDER) == 0 if len(captures) > 1 else missed
    if not missed.any() and not under_way.any():
        return transfers
    write = np.isin(transfers["wire"], _WRITES)
    missed &= write
    under_way &= write
    if not missed.any() and not under_way.any():
        return transfers
    _unstamped(captures, transfers)
    line = 2 * transfers["connection"].astype(np.int64) + (transfers["src"] > transfers["dst"])
    stamped, lossy, late = (np.zeros(int(line.max()) + 1, bool) for _ in range(3))
    stamped[line[write & ~under_way]] = True
    lossy[line[missed]] = True
    late[line[under_way]] = True
    rows = np.flatnonzero((lossy | (late & stamped))[line] & write)
    rows = rows[np.argsort(line[rows], kind="stable")]
    for mine in np.split(rows, np.flatnonzero(np.diff(line[rows])) + 1) if len(rows) else ():
        seq = transfers["seq"][mine].astype(np.int64)
        step = seq[1:] - seq[:-1]
        psn = np.r_[0, np.cumsum(((step + _ROUND // 2) & (_ROUND - 1)) - _ROUND // 2)]
        mine = mine[np.argsort(psn, kind="stable")]
        _date_sending(transfers, mine)
        if lossy[line[mine[0]]]:
            _date_arrival(transfers, mine)
    return transfers[np.argsort(transfers["sent_ns"], kind="stable")] if len(rows) else transfers


def _unstamped(captures: Sequence[CaptureTables], transfers: Rows) -> None:
    """Take AT_SENDER from WRITEs whose first packet the sender's capture missed."""
    for capture, tables in enumerate(captures):
        lost = (tables.messages["flags"] & _MISSED) == _MISSED
        lost &= np.isin(tables.messages["wire"], _WRITES)
        if lost.any():
            rows = np.flatnonzero(transfers["capture"] == capture)
            rows = rows[lost[transfers["message"][rows]]]
            transfers["seen"][rows] &= np.uint8(255 - Seen.AT_SENDER)


def _date_sending(transfers: Rows, mine: NDArray[np.int64]) -> None:
    """Nothing left after what follows it on its queue pair (``mine``: rows in order of PSN)."""
    stamped = (transfers["seen"][mine] & Seen.AT_SENDER) != 0
    if not stamped.any():
        return  # its sender was not captured: all its times are of one place
    if stamped.all():
        return
    place = np.arange(len(mine))
    sent, end = transfers["sent_ns"][mine], transfers["sent_end_ns"][mine]
    least = np.minimum.accumulate((sent - place)[::-1])[::-1] + place
    until = np.r_[least[1:] - 1, np.iinfo(np.int64).max]
    transfers["sent_ns"][mine] = np.where(stamped, sent, least)
    transfers["sent_end_ns"][mine] = np.where(stamped, end, np.maximum(np.minimum(end, until), least))


def _date_arrival(transfers: Rows, mine: NDArray[np.int64]) -> None:
    """What the receiver's capture missed took the usual way, between its neighbours."""
    stamped = (transfers["seen"][mine] & Seen.AT_RECEIVER) != 0
    both = mine[stamped & ((transfers["seen"][mine] & Seen.AT_SENDER) != 0)]
    if stamped.all() or not len(both):
        return
    way = int(median_of(transfers["arrived_end_ns"][both] - transfers["sent_end_ns"][both]))
    for k in np.flatnonzero(~stamped).tolist():
        row = transfers[mine[k]]
        for name in ("arrived_ns", "arrived_end_ns"):
            row[name] += max(way, 0)
            if int(row["acked_ns"]) != NEVER:
                row[name] = min(int(row[name]), int(row["acked_ns"]))
            if k + 1 < len(mine) and stamped[k + 1]:
                row[name] = min(int(row[name]), int(transfers["arrived_ns"][mine[k + 1]]))
            if k:
                row[name] = max(int(row[name]), int(transfers["arrived_end_ns"][mine[k - 1]]))
