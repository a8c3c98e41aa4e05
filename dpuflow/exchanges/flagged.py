"""One-sided puts: WRITEs with a flag behind them, several EXCHANGE rows in, one out.

Who puts data into a peer's memory without being asked (NVSHMEM, DeepEP, NCCL's GIN) tells it by a flag: an
ATOMIC, or a WRITE of a word, behind the data on the same queue pair, which keeps their order (IBA volume 1,
9.5). The data up to a flag, over all queue pairs between two endpoints, is one put. Only what peers put to
each other both ways is joined: pages that go one way (a cache on its move) stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, MessageFlag, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

FLAG_BYTES: Final = 8
"""A flag is no more than the word that an ATOMIC changes (IBA volume 1, 9.4.5)."""
_FAR = np.iinfo(np.int64).max


def joined_puts(exchanges: Rows) -> Rows:
    """``exchanges`` (RoCE without keys) with each put as one row; the same array where there are none.

    Such a row has the time of its first data and of its last flag, the bytes of the data, and in ``tag`` how
    many messages it was.
    """
    wire, unasked = exchanges["wire"], exchanges["grant"] == NONE32
    atomic = wire == Wire.ROCE_ATOMIC
    candidate = unasked & ((wire == Wire.ROCE_WRITE) | atomic) & (exchanges["data"] != NONE32)
    if not candidate.any():
        return exchanges
    flag = candidate & (atomic | (exchanges["bytes"] <= FLAG_BYTES))
    if not flag.any() or flag.sum() == candidate.sum():
        return exchanges
    connection = exchanges["connection"].astype(np.int64)
    asked = np.bincount(connection, ~candidate & (wire != Wire.ROCE_READ)) > 0  # NCCL's, or SENDs
    rows = np.flatnonzero(candidate & ~asked[connection])
    rows = rows[_mutual(exchanges[rows], flag[rows])]
    if not len(rows):
        return exchanges
    rows, unit, data = _units(exchanges, rows, flag)
    made = _made(exchanges[rows], unit, flag[rows], data)
    kept = np.ones(len(exchanges), bool)
    kept[rows] = False
    out = np.concatenate([exchanges[kept], made])
    first = np.minimum(
        np.where(out["grant_ns"] == NEVER, _FAR, out["grant_ns"]),
        np.where(out["data_ns"] == NEVER, _FAR, out["data_ns"]),
    )
    return np.asarray(out[np.argsort(first, kind="stable")])


def _mutual(rows: Rows, flag: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether both endpoints of each row put data and flags to each other."""
    count = int(max(rows["src"].max(), rows["dst"].max())) + 1 if len(rows) else 1
    way = rows["src"].astype(np.int64) * count + rows["dst"]
    back = rows["dst"].astype(np.int64) * count + rows["src"]
    both = np.intersect1d(way[flag], way[~flag])
    return np.isin(way, both) & np.isin(back, both)


def _units(exchanges: Rows, rows: Ints, flag: NDArray[np.bool_]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """``rows`` in order, for each the number of its put, and whether it carries data.

    The k-th puts of all queue pairs from one endpoint to another are one, if they have as many flags.
    """
    src, dst = exchanges["src"][rows].astype(np.int64), exchanges["dst"][rows].astype(np.int64)
    line = exchanges["connection"][rows].astype(np.int64)
    order = np.lexsort((exchanges["order"][rows], line, dst, src))
    rows, src, dst, line = rows[order], src[order], dst[order], line[order]
    new_line = np.r_[True, (line[1:] != line[:-1]) | (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])]
    number = np.cumsum(new_line) - 1
    flags = flag[rows].astype(np.int64)
    before = np.cumsum(flags) - flags
    turn = before - before[new_line][number]  # flags of the same line before it
    way = np.cumsum(np.r_[True, (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])]) - 1
    total = np.bincount(number, flags)
    way_of = way[new_line]
    most, least = np.full(way_of.max() + 1, -1), np.full(way_of.max() + 1, _FAR)
    np.maximum.at(most, way_of, total.astype(np.int64))
    np.minimum.at(least, way_of, total.astype(np.int64))
    lane = np.where((most == least)[way], way, way_of.max() + 1 + number)
    _, unit = np.unique(lane * (int(turn.max()) + 1) + turn, return_inverse=True)
    return rows, unit.astype(np.int64), ~flag[rows]


def _made(rows: Rows, unit: Ints, flag: NDArray[np.bool_], data: NDArray[np.bool_]) -> Rows:
    """One row for each put, from the rows of its messages."""
    count = int(unit.max()) + 1
    out = EXCHANGE.zeros(count)
    first = np.full(count, len(rows))
    by_time = np.argsort(rows["data_ns"], kind="stable")
    place = np.empty(len(rows), np.int64)
    place[by_time] = np.arange(len(rows))
    np.minimum.at(first, unit, place)
    head = by_time[first]
    out[:] = rows[head]
    for name, least in (("data_ns", True), ("arrived_ns", True), ("data_end_ns", False),
                        ("arrived_end_ns", False), ("acked_ns", False), ("taken_ns", False)):  # fmt: skip
        seen = rows[name] != NEVER
        best = np.full(count, _FAR if least else NEVER)
        (np.minimum if least else np.maximum).at(best, unit[seen], rows[name][seen])
        out[name] = np.where(best == _FAR, NEVER, best)
    out["bytes"] = np.bincount(unit, np.where(data, rows["bytes"], 0), count)
    for name in ("packets", "retransmitted", "ecn_marked"):
        out[name] = np.bincount(unit, rows[name], count)
    out["connection"] = _least(rows["connection"], unit, count)
    out["flags"] = 0
    np.bitwise_or.at(out["flags"], unit, rows["flags"])
    out["flags"] |= np.where(np.bincount(unit, flag, count) == 0, MessageFlag.ENDS_AFTER, 0).astype(np.uint8)
    out["seen"] = 0xFF
    np.bitwise_and.at(out["seen"], unit, rows["seen"])
    out["wire"] = Wire.ROCE_WRITE
    out["tag"] = np.bincount(unit, minlength=count)
    order = np.lexsort((out["data_ns"], out["dst"], out["src"]))
    same = (np.diff(out["src"][order].astype(np.int64)) == 0) & (
        np.diff(out["dst"][order].astype(np.int64)) == 0
    )
    start = np.r_[True, ~same]
    turn = np.arange(count) - np.flatnonzero(start)[np.cumsum(start) - 1]
    out["order"][order] = turn
    # All queue pairs of a way are one connection from here on.
    lines = np.full(int(start.sum()), NONE32, np.uint32)
    np.minimum.at(lines, np.cumsum(start) - 1, out["connection"][order])
    out["connection"][order] = lines[np.cumsum(start) - 1]
    return out


def _least(values: NDArray[np.uint32], unit: Ints, count: int) -> NDArray[np.uint32]:
    least = np.full(count, NONE32, np.uint32)
    np.minimum.at(least, unit, values)
    return least
