"""EXCHANGE rows in, bursts of pages out: what one endpoint WRITEs to another, or READs from it, in one go.

``bulk`` makes transfers of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import cut_at, distinct, medians, numbered, order_within
from dpuflow.matching.calls import LEAST, unannounced
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

    Cut = tuple[Ints, Ints]
    """Rows, and the places where they are cut."""


TOGETHER: Final = 1 << 17
"""Pages that are laid out at a time: more would not fit into the cache, and take memory."""
IDLE: Final = 4.0
"""Times what a page takes, alone and behind another, that nothing may be under way within a transfer: an
engine that has pages to move keeps some under way; a late completion makes it pause for about a page."""


def page_ways(exchanges: Rows, instances: Sequence[Instance]) -> list[Ints]:
    """Rows of pages from one endpoint to another by one verb, in order of time."""
    wire = np.ascontiguousarray(exchanges["wire"])
    if not np.isin(wire, (Wire.ROCE_WRITE, Wire.ROCE_READ)).any():
        return []
    free = np.ones(len(exchanges), bool)
    for instance in instances:
        free[instance.rows] = False
    # A WRITE that was asked for is NCCL's; a READ's request is its "grant". Puts have flags (``flagged``).
    write = (wire == Wire.ROCE_WRITE) & (exchanges["grant"] == NONE32) & (exchanges["tag"] == 0)
    free &= write | (wire == Wire.ROCE_READ)
    if not free.any():
        return []
    free &= exchanges["src"] != exchanges["dst"]
    free &= (exchanges["data_ns"] != NEVER) & (exchanges["bytes"] > 0) & (exchanges["op"] == Op.UNKNOWN)
    rows = unannounced(exchanges, np.flatnonzero(free))
    if not len(rows):
        return []
    src, dst = exchanges["src"][rows].astype(np.int64), exchanges["dst"][rows].astype(np.int64)
    way = numbered(src, dst, (wire[rows] == Wire.ROCE_READ).astype(np.int64))
    order = order_within(begin_ns(exchanges, rows), way)
    rows, way = rows[order], way[order]
    new = way[1:] != way[:-1]
    large = medians(exchanges["bytes"][rows], np.cumsum(np.r_[0, new])) > LEAST
    parts = cut_at(rows, np.flatnonzero(new) + 1)
    return [way for way, pages in zip(parts, large.tolist(), strict=True) if pages]


def so_far(values: Ints, piece: Ints) -> Ints:
    """The largest of ``values`` so far within each piece; pieces follow one another, numbered from 0."""
    if not len(values):
        return values
    least = int(values.min())
    step = int(values.max()) - least + 1
    if step * (int(piece[-1]) + 1) < 1 << 63:
        raised = piece * step - least
        return np.maximum.accumulate(values + raised) - raised
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    return values[order[np.maximum.accumulate(piece * len(values) + place) - piece * len(values)]]


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


def at_once(counts: Sequence[int]) -> Iterator[slice]:
    """Parts of so many rows, some at a time, of ``TOGETHER`` rows at the most unless one has more."""
    bounds, total = [0], 0
    for place, count in enumerate(counts):
        if total + count > TOGETHER and place > bounds[-1]:
            bounds.append(place)
            total = 0
        total += count
    return (slice(a, b) for a, b in pairwise([*bounds, len(counts)]) if b > a)


def cut_pieces(exchanges: Rows, ways: Sequence[Ints], notices: Sequence[Ints]) -> Iterator[Cut]:
    """Each of ``ways`` cut where nothing was under way, or, if it has any, by its ``notices``: times of SENDs
    on the pages' connections, each of which tells that all pages before it are done."""
    mine = [rows for rows, told in zip(ways, notices, strict=True) if not len(told)]
    quiet = (cut for some in at_once([*map(len, mine)]) for cut in _by_pauses(exchanges, mine[some]))
    for rows, told in zip(ways, notices, strict=True):
        yield _by_notices(exchanges, rows, told) if len(told) else next(quiet)


def _by_notices(exchanges: Rows, rows: Ints, notices: Ints) -> Cut:
    acked = exchanges["acked_ns"][rows]
    alike = alike_parts(exchanges, rows, len(notices))
    if alike is not None:
        return alike
    turn = np.searchsorted(notices, np.where(acked != NEVER, acked, end_ns(exchanges, rows)))
    order = np.lexsort((begin_ns(exchanges, rows), turn))
    return rows[order], np.flatnonzero(np.diff(turn[order])) + 1


def _by_pauses(exchanges: Rows, ways: Sequence[Ints]) -> Iterator[Cut]:
    """``ways`` in order of time, each cut where nothing was under way; times of all laid out at once."""
    rows, count = np.concatenate(ways), np.array([len(way) for way in ways])
    way, first = np.repeat(np.arange(len(ways)), count), np.cumsum(count) - count
    begin, end = begin_ns(exchanges, rows), end_ns(exchanges, rows)
    gap = begin[1:] - so_far(end, way)[:-1]
    # A page alone, and from one to the next: what a page takes in a full queue says nothing of pauses.
    usual = np.minimum.reduceat(end - begin, first).astype(float)
    within = np.diff(way) == 0
    several = count > 1
    if several.any():
        apart = np.diff(end[order_within(end, way)])[within]
        usual[several] += medians(apart, np.repeat(np.arange(int(several.sum())), (count - 1)[several]))
    usual[~several] = 0.0
    at = np.flatnonzero((gap > IDLE * usual[way[:-1]]) & within) + 1
    return zip(ways, cut_at(at - first[way[at]], np.searchsorted(at, first[1:])), strict=True)


def alike_parts(exchanges: Rows, rows: Ints, count: int) -> Cut | None:
    """``rows`` as ``count`` parts of as many bytes, or None where they do not add up to that.

    A notice stands behind what was queued before it, which may be pages of the next transfer: then it comes
    when they are done, too.
    """
    total = int(exchanges["bytes"][rows].sum())
    if total % count or count >= len(rows):
        return None
    return parts_of(exchanges, rows, np.full(count, total // count))


def parts_of(exchanges: Rows, rows: Ints, sizes: Ints) -> Cut | None:
    """``rows`` as parts of ``sizes`` bytes, one after the other; None where they do not add up to these.

    In the order in which they were sent, or were posted to queue pairs that take turns.
    """
    ends = np.cumsum(sizes)
    for by_turns in (False, True):
        ordered = rows[_turns(exchanges, rows)] if by_turns else rows
        sums = np.cumsum(exchanges["bytes"][ordered].astype(np.int64))
        at = np.minimum(np.searchsorted(sums, ends), len(sums) - 1)
        if (sums[at] == ends).all() and ends[-1] == sums[-1]:
            return ordered, at[:-1] + 1
    return None


def _turns(exchanges: Rows, rows: Ints) -> Ints:
    """What sorts ``rows`` by how many came before on their queue pair, then by which pair came first."""
    connection = exchanges["connection"][rows].astype(np.int64)
    by_pair = np.lexsort((exchanges["order"][rows], connection))
    first = np.flatnonzero(np.r_[True, np.diff(connection[by_pair]) != 0])
    turn = np.empty(len(rows), np.int64)
    turn[by_pair] = np.arange(len(rows)) - np.repeat(first, np.diff(np.r_[first, len(rows)]))
    _, first, pair = np.unique(connection, return_index=True, return_inverse=True)
    return np.lexsort((first[pair], turn))


def notices_ns(exchanges: Rows) -> Callable[[Ints], Ints]:
    """What tells when SENDs left on the connections of some rows, in order of time."""
    sends = np.isin(exchanges["wire"], (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM))
    mine = np.flatnonzero(sends & (exchanges["data_ns"] != NEVER))
    connection, times = exchanges["connection"][mine], exchanges["data_ns"][mine]
    order = np.argsort(connection, kind="stable")
    connection, times = connection[order], times[order]

    def told(rows: Ints) -> Ints:
        if not len(times):
            return times
        lines = distinct(exchanges["connection"][rows])
        begin, end = (np.searchsorted(connection, lines, side) for side in ("left", "right"))
        return np.sort(np.concatenate([times[a:b] for a, b in zip(begin, end, strict=True)]))

    return told
