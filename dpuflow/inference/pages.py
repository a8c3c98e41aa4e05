"""EXCHANGE rows in, bursts of pages out: what one endpoint WRITEs to another, or READs from it, in one go.

``bulk`` makes transfers of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.tables import Rows

    Ints = NDArray[np.int64]

LEAST: Final = 512
"""Bytes: NCCL's clear-to-send writes are no larger (eight entries of 64), and no pages even where nothing
else tells what they are."""
IDLE: Final = 4.0
"""Times what a page takes, alone and behind another, that nothing may be under way within a transfer: an
engine that has pages to move keeps some under way; a late completion makes it pause for about a page."""


def page_ways(exchanges: Rows, instances: Sequence[Instance]) -> Iterator[Ints]:
    """Rows of pages from one endpoint to another by one verb, in order of time."""
    wire = np.ascontiguousarray(exchanges["wire"])
    if not np.isin(wire, (Wire.ROCE_WRITE, Wire.ROCE_READ)).any():
        return
    free = np.ones(len(exchanges), bool)
    for instance in instances:
        free[instance.rows] = False
    # A WRITE that was asked for is NCCL's; a READ's request is its "grant". Puts have flags (``flagged``).
    write = (wire == Wire.ROCE_WRITE) & (exchanges["grant"] == NONE32) & (exchanges["tag"] == 0)
    free &= write | (wire == Wire.ROCE_READ)
    if not free.any():
        return
    free &= exchanges["src"] != exchanges["dst"]
    free &= (exchanges["data_ns"] != NEVER) & (exchanges["bytes"] > 0) & (exchanges["op"] == Op.UNKNOWN)
    # Connections whose every page has a SEND belong to a library that asks before it moves (rendezvous).
    connection = exchanges["connection"].astype(np.int64)
    sends = np.isin(wire, (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)) & (exchanges["data_ns"] != NEVER)
    size = int(connection.max()) + 1
    asking = np.bincount(connection[sends], minlength=size) >= np.bincount(connection[free], minlength=size)
    immediate = np.bincount(connection, wire == Wire.ROCE_WRITE_IMM, size) > 0
    rows = np.flatnonzero(free & ~asking[connection] & ~immediate[connection])
    if not len(rows):
        return
    src, dst = exchanges["src"][rows].astype(np.int64), exchanges["dst"][rows].astype(np.int64)
    read = wire[rows] == Wire.ROCE_READ
    order = np.lexsort((begin_ns(exchanges, rows), read, dst, src))
    rows, key = rows[order], np.stack([src, dst, read])[:, order]
    for way in np.split(rows, np.flatnonzero((np.diff(key) != 0).any(axis=0)) + 1):
        if np.median(exchanges["bytes"][way]) > LEAST:
            yield way


def begin_ns(exchanges: Rows, rows: Ints) -> Ints:
    """When each page was asked for, or sent."""
    asked, data = exchanges["grant_ns"][rows], exchanges["data_ns"][rows]
    # Where answers came in pieces (loss), requests and answers are no longer one to one.
    known = (exchanges["wire"][rows] == Wire.ROCE_READ) & (asked != NEVER) & (asked <= data)
    return np.where(known, asked, data)


def end_ns(exchanges: Rows, rows: Ints) -> Ints:
    """When each page was there."""
    there: Ints = exchanges["arrived_end_ns"][rows]
    return np.where(there != NEVER, there, exchanges["data_end_ns"][rows])


def cut_pieces(exchanges: Rows, rows: Ints, notices: Ints) -> Iterator[Ints]:
    """``rows`` cut where nothing was under way, or, if there are any, by ``notices``: times of SENDs on the
    pages' connections, each of which tells that all pages before it are done."""
    begin, end = begin_ns(exchanges, rows), end_ns(exchanges, rows)
    if len(notices):
        acked = exchanges["acked_ns"][rows]
        turn = np.searchsorted(notices, np.where(acked != NEVER, acked, end))
        order = np.lexsort((begin, turn))
        rows, cut = rows[order], np.diff(turn[order]) != 0
    else:
        gap = begin[1:] - np.maximum.accumulate(end)[:-1]
        # A page alone, and from one to the next: what a page takes in a full queue says nothing of pauses.
        usual = float((end - begin).min()) + float(np.median(np.diff(np.sort(end)))) if len(rows) > 1 else 0.0
        cut = gap > IDLE * usual
    yield from np.split(rows, np.flatnonzero(cut) + 1)


def notices_ns(exchanges: Rows, rows: Ints) -> Ints:
    """When SENDs left on the connections of ``rows``, in order."""
    lines = np.unique(exchanges["connection"][rows])
    sends = np.isin(exchanges["wire"], (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM))
    mine = np.flatnonzero(sends & np.isin(exchanges["connection"], lines))
    times = exchanges["data_ns"][mine]
    return np.sort(times[times != NEVER])
