"""Messages of several senders that NCCL posts together: TRANSFER rows in, each bunch one row out.

With PXN a NIC sends for all GPUs of its node. What one of another node expects of several of them in one call
it grants by one WRITE of as many clear-to-send entries (nreqs, up to eight), and they come as so many WRITEs
and a WRITE WITH IMMEDIATE behind them whose payload is their sizes, 4 bytes each (NCCL 2.30,
src/transport/net_ib/p2p.cc ncclIbMultiSend). All are posted when the last of the senders is ready. From here
on they are one message: it left with the first packet of any, is there when the sizes are, and has all bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER, NONE32, Role, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

SIZE: Final = 4
"""Bytes that tell one message's size."""
MOST: Final = 8
"""NCCL_NET_IB_MAX_RECVS."""


def bunched(transfers: Rows, part: Ints) -> tuple[Rows, Ints]:
    """``transfers`` and ``part`` with each bunch made one row, that of its first message.

    ``part`` are rows of DATA and GRANT in order of time. The same objects where there is none.
    """
    wire, size = transfers["wire"][part], transfers["bytes"][part]
    data = transfers["role"][part] != Role.GRANT
    ends = (
        data & (wire == Wire.ROCE_WRITE_IMM) & (size % SIZE == 0) & (size >= 2 * SIZE) & (size <= MOST * SIZE)
    )
    if not ends.any() or not (data & (wire == Wire.ROCE_WRITE)).any():
        return transfers, part
    key = 2 * transfers["connection"][part].astype(np.int64)
    key += transfers["src"][part] > transfers["dst"][part]
    mine = np.flatnonzero(data)
    mine = mine[np.argsort(key[mine], kind="stable")]
    plain = (wire[mine] == Wire.ROCE_WRITE).astype(np.int64)
    # How many WRITEs stand right before each message on its queue pair.
    place = np.arange(len(mine))
    new = np.r_[True, (plain[:-1] == 0) | (np.diff(key[mine]) != 0)]
    begin = np.maximum.accumulate(np.where(new, place, 0))
    run = place - begin
    found = np.flatnonzero(ends[mine] & (run >= 2) & (run * SIZE == size[mine]))
    if not len(found):
        return transfers, part
    transfers, kept = transfers.copy(), np.ones(len(part), bool)
    for at in found.tolist():
        places = mine[begin[at] : at + 1]
        rows = part[places]
        transfers[rows[0]] = _one(transfers[rows])
        kept[places[1:]] = False
    return transfers, part[kept]


def _one(rows: Rows) -> np.void:
    """The row of a bunch: its messages in order, and behind them that of their sizes."""
    out: np.void = rows[0].copy()
    end = rows[-1]
    for name in ("sent_end_ns", "arrived_end_ns", "acked_ns", "taken_ns", "tag", "wire"):
        out[name] = end[name]
    for name in ("sent_ns", "arrived_ns"):
        known = rows[name][rows[name] != NEVER]
        out[name] = known.min() if len(known) else NEVER
    out["bytes"] = rows["bytes"][:-1].sum()
    for name in ("packets", "retransmitted", "ecn_marked"):
        out[name] = rows[name].sum()
    out["flags"] = np.bitwise_or.reduce(rows["flags"])
    out["seen"] = np.bitwise_and.reduce(rows["seen"])
    return out


def requested(transfers: Rows, exchanges: Rows) -> Ints:
    """Of how many senders' messages each exchange is, 1 where it is a single one.

    Told by the first of them, for they are as large where all send to all.
    """
    found = np.ones(len(exchanges), np.int64)
    mine = np.flatnonzero((exchanges["wire"] == Wire.ROCE_WRITE_IMM) & (exchanges["data"] != NONE32))
    data = exchanges["data"][mine]
    first = transfers["bytes"][data]
    several = (transfers["wire"][data] == Wire.ROCE_WRITE) & (first > 0) & (exchanges["bytes"][mine] > first)
    mine, first = mine[several], first[several]
    found[mine] = np.clip(np.rint(exchanges["bytes"][mine] / first).astype(np.int64), 2, MOST)
    return found
