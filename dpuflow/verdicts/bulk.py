"""Bulk one-sided transfers: pages that one endpoint WRITEs into another's memory, or READs from it.

In: EXCHANGE rows that no collective was made of, and entries of ranks. Out: transfers, and which entries had
waited for one. Transfer engines move the KV caches of disaggregated inference so (Mooncake, NIXL): pages of
one size at scattered addresses, one way, without an immediate and without clear-to-send entries. What the
bytes are shows in no packet; that a rank which had been idle takes part in collectives again as soon as they
are there is what speaks for a cache."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import (
    Places,
    cut_at,
    first_alike,
    is_in,
    medians,
    numbered,
    order_within,
    percentile,
    spans,
)
from dpuflow.schema.rows import NEVER, MessageFlag, Op, Wire
from dpuflow.verdicts.links import SLOW_FACTOR
from dpuflow.verdicts.pages import (
    alike_parts,
    at_once,
    begin_ns,
    cut_pieces,
    end_ns,
    notices_ns,
    page_ways,
    parts_of,
    so_far,
)
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.pages import Cut


FEWEST: Final = 2
"""Pages: a single WRITE or READ is no burst of pages."""
FEWEST_PAUSES: Final = 3
"""So many of an endpoint's pauses between collectives show what is usual."""


class Bulk(NamedTuple):
    """One transfer. Times are on the reference clock; ``rows`` of EXCHANGE, in order.

    ``busy_ns``: how long some page was under way. ``row``: of Entries, the receiver's first entry after it,
    -1 for none; ``idle_ns``: since when the receiver had done nothing else while it was under way, where it
    had waited for the transfer, else NEVER; ``left_ns``: when it had left its last collective before.
    ``last`` of those that the receiver waited for at the same time. ``slow``: the path was."""

    src: int
    dst: int
    read: bool
    rows: Ints
    start_ns: int
    end_ns: int
    bytes: int
    page_bytes: int | None
    busy_ns: int
    retransmitted: int
    ecn_marked: int
    complete: bool
    message: int  # TRANSFER row of its last page
    row: int = -1
    idle_ns: int = NEVER
    left_ns: int = NEVER
    last: bool = False
    slow: bool = False
    cache: bool = False

    @property
    def waited(self) -> bool:
        """Whether the receiver had nothing to do but wait for it."""
        return self.idle_ns != NEVER

    @property
    def path(self) -> Literal["slow", "lossy", "marked"] | None:
        """What the network did to it; None for nothing that shows."""
        if self.retransmitted:
            return "lossy"
        return "slow" if self.slow else "marked" if self.ecn_marked else None

    @property
    def exposed_ns(self) -> int:
        """How long the receiver was idle while the transfer was under way, at the most."""
        return min(self.busy_ns, self.end_ns - self.idle_ns) if self.waited else 0


def columns(transfers: Sequence[Bulk], *names: str) -> Ints:
    """Some of their fields that are numbers, a row each."""
    fields = [map(itemgetter(Bulk._fields.index(name)), transfers) for name in names]
    return np.stack([np.fromiter(field, np.int64, len(transfers)) for field in fields])


_NUMBERS: Final = (
    "src", "dst", "start_ns", "end_ns", "bytes", "page_bytes", "busy_ns", "retransmitted", "ecn_marked",
    "message", "row", "idle_ns", "left_ns",
)  # fmt: skip
_YES_OR_NO: Final = ("read", "complete", "last", "slow", "cache")
_TABLE: Final = np.dtype(
    [*((name, "i8") for name in (*_NUMBERS, "at", "end")), *((name, "?") for name in _YES_OR_NO)]
)
"""A row a transfer, of the same names; its pages are ``rows[at:end]``; ``page_bytes`` 0 for None."""


class Found(NamedTuple):
    """Transfers as a table, and EXCHANGE rows of their pages: while much is still to be told of many."""

    table: Rows
    rows: Ints

    def at(self, places: Ints | Bools) -> Found:
        """Some of them, or all in another order."""
        return Found(self.table[places], self.rows)

    def ways(self, *columns: str) -> list[Ints]:
        """Columns that tell ways apart."""
        return [self.table[name].astype(np.int64) for name in columns]

    def listed(self) -> list[Bulk]:
        """One object for each."""
        table = self.table
        told = [table[name].tolist() for name in _NUMBERS + _YES_OR_NO]
        of = dict(zip(_NUMBERS + _YES_OR_NO, told, strict=True))
        bounds = zip(table["at"].tolist(), table["end"].tolist(), strict=True)
        of["rows"] = [self.rows[at:end] for at, end in bounds]
        of["page_bytes"] = [nbytes or None for nbytes in of["page_bytes"]]
        return [Bulk(*row) for row in zip(*(of[name] for name in Bulk._fields), strict=True)]


class Fed(NamedTuple):
    """What transfers did to each row of Entries: when the last one that it had waited for was there (NEVER
    without), whether the network had held that one up, and whether its endpoint still had pages to send on a
    slow path as it entered: an adapter whose queue stands still keeps everything else, too. ``unseen``: whose
    peers waited for pages, and that has no capture of its own: it may have waited for others that nobody saw.
    """

    ns: Ints
    held: Bools
    carrying: Bools
    unseen: Bools


def find_bulk(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> list[Bulk]:
    """All bulk transfers, in order of their start."""
    tied, found = _tied(instances, entries), _pieced(exchanges, instances, entries)
    if not len(found.table):
        return []
    found = _awaited(found, tied, entries)
    together = _by_siblings(exchanges, _by_waits(found))
    if len(together.table) != len(found.table):
        found = _awaited(together, tied, entries)
    del together
    found = _named(_slow(found))
    return found.at(np.lexsort([found.table[name] for name in ("dst", "src", "start_ns")])).listed()


def _pieced(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Found:
    """Pages that one endpoint moved to another in one go, as far as notices, pauses and entries tell."""
    tied, sent = _tied(instances, entries), notices_ns(exchanges)
    ways = page_ways(exchanges, instances)
    notices = [sent(rows) for rows in ways]
    receivers = exchanges["dst"][np.array([rows[0] for rows in ways], np.int64)].tolist()
    # Together where the receiver waited for all of it; notices have told.
    cuts = [
        cut if len(told) else _by_entries(exchanges, cut, entries, tied(end))
        for end, told, cut in zip(receivers, notices, cut_pieces(exchanges, ways, notices), strict=True)
    ]
    return _made(exchanges, cuts)[0] if cuts else Found(np.zeros(0, _TABLE), np.zeros(0, np.int64))


def fed_rows(transfers: Sequence[Bulk], entries: Entries, far: frozenset[int] = frozenset()) -> Fed:
    """What transfers did to each row of Entries; ``far``: endpoints without a capture of their own."""
    fed = np.full(len(entries.endpoint), NEVER)
    held, carrying = np.zeros((2, len(fed)), bool)
    slow: dict[int, list[tuple[int, int]]] = {}
    for each in transfers:
        if each.last and each.waited:
            fed[each.row] = each.end_ns
            held[each.row] = each.path is not None
        if each.slow and each.start_ns <= each.end_ns:
            slow.setdefault(each.src, []).append((each.start_ns, each.end_ns))
    for src, times in slow.items():
        mine = entries.of[src]
        begin, end = np.sort(np.array(times).T)
        begun = np.searchsorted(begin, entries.enter_ns[mine], "right")
        carrying[mine] = begun > np.searchsorted(end, entries.enter_ns[mine], "left")
    unseen = np.isin(entries.collective, entries.collective[fed != NEVER])
    unseen &= np.isin(entries.endpoint, np.array(sorted(far), np.int64))
    return Fed(fed, held, carrying, unseen)


def _merged(exchanges: Rows, cut: Cut, entries: Entries, tied: Ints) -> Cut:
    """Pieces of one way; those between which the receiver, who takes part in collectives, entered none
    (``tied``) are one: a cache that is moved layer by layer, while the receiver waits for all of it."""
    rows, at = cut
    enter, left = entries.enter_ns[tied], entries.leave_ns[tied]
    until = np.maximum.reduceat(end_ns(exchanges, rows), np.r_[0, at])[:-1]
    place = np.searchsorted(enter, until)
    idle = (place == 0) | (left[place - 1] <= until)
    following = np.searchsorted(enter, begin_ns(exchanges, rows[at]))
    return rows, at[~idle | (place == len(enter)) | (place != following)]


def _by_entries(exchanges: Rows, cut: Cut, entries: Entries, tied: Ints) -> Cut:
    """Pieces of one way, as parts of as many bytes if its receiver goes on (``tied``) as soon as each is
    there; else as ``_merged`` has them.

    Who is handed caches faster than the path moves them has always some under way, and no pause parts them.
    """
    if not len(tied):
        return cut
    merged = _merged(exchanges, cut, entries, tied) if len(cut[1]) else cut
    rows, at = merged
    if len(rows) < FEWEST_PAUSES * FEWEST:
        return merged
    nbytes = np.add.reduceat(exchanges["bytes"][rows], np.r_[0, at], dtype=np.int64)
    if len(nbytes) >= FEWEST_PAUSES and (nbytes == nbytes[0]).all():
        return merged
    begin, until = begin_ns(exchanges, rows).min(), end_ns(exchanges, rows).max()
    enter, left = entries.enter_ns[tied], np.maximum.accumulate(entries.leave_ns[tied])
    mine = np.flatnonzero((enter > begin) & (np.r_[begin, left[:-1]] < until))
    pause = enter[mine] - np.maximum(np.r_[begin, left[:-1]][mine], begin)
    longest = -np.sort(-pause)
    # Waits are longer than any other pause.
    drops = longest[:-1] > TWICE * np.maximum(longest[1:], 0)
    for count in (np.flatnonzero(drops) + 1).tolist():
        if count < FEWEST_PAUSES or count > len(rows) // FEWEST:
            continue
        parts = alike_parts(exchanges, rows, count)
        if parts is None:
            continue
        waits = np.sort(np.argsort(-pause, kind="stable")[:count])
        there = np.maximum.reduceat(end_ns(exchanges, parts[0]), np.r_[0, parts[1]])
        behind = enter[mine][waits] - there
        if (behind >= 0).all() and (TWICE * behind <= pause[waits]).all():
            return parts
    return merged


def _made(exchanges: Rows, cuts: Sequence[Cut]) -> tuple[Found, Ints]:
    """What the pieces of more than one page are, and which ones these are."""
    lengths, pieces = (np.fromiter(map(len, part), np.int64, len(cuts)) for part in zip(*cuts, strict=True))
    rows, at = (np.concatenate(part) for part in zip(*cuts, strict=True))
    way = np.cumsum(lengths) - lengths
    counts = np.diff(np.r_[np.sort(np.r_[way, at + np.repeat(way, pieces)]), len(rows)])
    chosen = np.flatnonzero(counts >= FEWEST)
    rows, counts = rows[np.repeat(counts >= FEWEST, counts)], counts[chosen]
    table, before = np.zeros(len(counts), _TABLE), 0
    for some in at_once(counts.tolist()):
        own = rows[before:][: counts[some].sum()]
        laid = _laid(exchanges, own, counts[some])
        table[some], own[:] = laid.table, laid.rows
        table["at"][some] += before
        table["end"][some] += before
        before += len(own)
    return Found(table, rows), chosen


def _laid(exchanges: Rows, rows: Ints, counts: Ints) -> Found:
    """What pieces of so many ``rows`` each are."""
    table = np.zeros(len(counts), _TABLE)
    first, last = np.cumsum(counts) - counts, np.cumsum(counts) - 1
    piece = np.repeat(np.arange(len(counts)), counts)
    begin = begin_ns(exchanges, rows)
    order = order_within(begin, piece)
    rows, begin = rows[order], begin[order]
    until = so_far(end_ns(exchanges, rows), piece)
    pause = np.maximum(np.r_[0, begin[1:] - until[:-1]], 0)
    pause[first] = 0
    size = exchanges["bytes"][rows].astype(np.int64)
    cut = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP
    for name, values in (
        ("bytes", size), ("retransmitted", exchanges["retransmitted"][rows]),
        ("ecn_marked", exchanges["ecn_marked"][rows]),
    ):  # fmt: skip
        table[name] = np.add.reduceat(values, first, dtype=np.int64)
    table["complete"] = ~np.logical_or.reduceat(exchanges["flags"][rows] & cut != 0, first)
    for name, values in (("src", exchanges["src"]), ("dst", exchanges["dst"])):
        table[name] = values[rows[first]]
    table["read"] = exchanges["wire"][rows[first]] == Wire.ROCE_READ
    table["start_ns"], table["end_ns"], table["at"], table["end"] = begin[first], until[last], first, last + 1
    table["busy_ns"] = table["end_ns"] - table["start_ns"] - np.add.reduceat(pause, first)
    table["page_bytes"], table["message"] = _usual(size, piece), exchanges["data"][rows[last]]
    table["row"], table["idle_ns"], table["left_ns"] = -1, NEVER, NEVER
    return Found(table, rows)


def _usual(size: Ints, piece: Ints) -> Ints:
    """The size that at least half the pages of each piece have; the least of several, 0 without."""
    order = order_within(size, piece)
    size, piece = size[order], piece[order]
    run = np.flatnonzero(np.r_[True, (piece[1:] != piece[:-1]) | (size[1:] != size[:-1])])
    times = np.diff(np.r_[run, len(size)])
    best = order_within(-times, piece[run])
    best = best[np.r_[True, np.diff(piece[run[best]]) != 0]]
    return np.where(2 * times[best] >= np.bincount(piece), size[run[best]], 0)


def _tied(instances: Sequence[Instance], entries: Entries) -> Callable[[int], Ints]:
    """What tells the rows of Entries by which an endpoint entered collectives, in order of time."""
    single = np.fromiter((i.op == Op.SEND_RECV for i in instances), bool, len(instances))
    mine = np.flatnonzero(entries.enter_ns != NEVER)
    mine = mine[~single[entries.collective[mine]]]
    mine = mine[np.argsort(entries.enter_ns[mine], kind="stable")]
    places = Places(entries.endpoint[mine])
    return lambda end: mine[places[end]]


def _awaited(transfers: Found, tied: Callable[[int], Ints], entries: Entries) -> Found:
    """``transfers``, by receiver, with the entry that followed each, and whether the receiver had waited.

    It had if the transfer ended in a pause between two of its collectives that is longer than its pauses
    without one (nineteen in twenty); where it has hardly any of these, if most of the pause was the
    transfer."""
    found = transfers.at(np.argsort(transfers.table["dst"], kind="stable"))
    for mine in cut_at(found.table, np.flatnonzero(np.diff(found.table["dst"])) + 1):
        rows = tied(int(mine["dst"][0]))
        if not len(rows):
            continue
        enter = entries.enter_ns[rows]
        left = np.maximum.accumulate(np.r_[NEVER, entries.leave_ns[rows]])[:-1]
        after = np.searchsorted(enter, mine["end_ns"])
        taken = np.zeros(len(rows) + 1, bool)
        taken[after] = True
        pause = (enter - left)[(left != NEVER) & ~taken[:-1]]
        usual = TWICE * percentile(pause, 95) if len(pause) >= FEWEST_PAUSES else None
        ends = np.full(len(taken), NEVER)  # of the transfers that each entry followed, the last
        np.maximum.at(ends, after, mine["end_ns"])
        followed = after < len(rows)
        after, end = after[followed], mine["end_ns"][followed]
        idle = np.maximum(mine["start_ns"][followed], left[after])
        waited = 2 * (end - idle) >= enter[after] - idle
        if usual is not None:
            waited = np.where(left[after] != NEVER, enter[after] - left[after] > usual, waited)
        waited &= idle < end
        mine["row"][followed], mine["left_ns"][followed] = rows[after], left[after]
        mine["idle_ns"][followed], mine["last"][followed] = np.where(waited, idle, NEVER), end == ends[after]
    return found


def _by_way(transfers: Found) -> tuple[Found, Ints]:
    """``transfers`` by sender, receiver and verb, each in order of their start, ways in that of their first
    ones; and where each way begins."""
    ordered = transfers.at(np.argsort(transfers.table["start_ns"], kind="stable"))
    way = first_alike(*ordered.ways("src", "dst", "read"))
    order = np.argsort(way, kind="stable")
    return ordered.at(order), np.flatnonzero(np.r_[True, np.diff(way[order]) != 0])


def _by_waits(transfers: Found) -> Found:
    """``transfers`` with the parts of one cache put together.

    Where a cache is moved layer by layer the receiver may still be at work when the first layers come. How
    large the whole is shows from one wait of the receiver to the next: as many bytes, most times. Transfers
    of a way that add up to that are wholes.
    """
    found, first = _by_way(transfers)
    waited, nbytes = found.table["idle_ns"] != NEVER, found.table["bytes"]
    bounds = list(pairwise([*first.tolist(), len(nbytes)]))
    sums: Counter[int] = Counter()
    for way in np.flatnonzero(np.add.reduceat(waited, first, dtype=np.int64) >= FEWEST_PAUSES).tolist():
        begin, end = bounds[way]
        ends = np.flatnonzero(waited[begin:end]) + 1
        parts = np.add.reduceat(nbytes[begin : begin + ends[-1]], np.r_[0, ends[:-1]])
        these = Counter(parts.tolist())
        size, times = these.most_common(1)[0]
        if times >= FEWEST_PAUSES and 2 * times > these.total():
            sums[size] += times
    if not sums:
        return found
    usual, each = sums.most_common(1)[0][0], nbytes.tolist()
    return _together(
        found, np.array([begin + at for begin, end in bounds for at in _wholes(each[begin:end], usual)])
    )


def _by_siblings(exchanges: Rows, transfers: Found) -> Found:
    """``transfers``, with those that nothing parts cut as on other ways. ``transfers`` if nothing changes.

    Ranks that share a model each hand on their part of the same requests, so all have as many bytes to move,
    in transfers of the same sizes one after the other. Where pages queue (a slow link) no pause tells.
    """
    found, first = _by_way(transfers)
    count = np.diff(np.r_[first, len(found.table)])
    total = numbered(np.add.reduceat(found.table["bytes"], first))
    # Of all ways that move as many bytes: the one that has most transfers.
    model = np.zeros(int(total.max()) + 1, np.int64)
    by_count = np.lexsort((-np.arange(len(count)), count))
    model[total[by_count]] = by_count
    most = count[model[total]]
    short = np.flatnonzero((most >= FEWEST_PAUSES) & (most > count))
    pages = found.table["end"] - found.table["at"]
    of_way = np.add.reduceat(pages, first)
    cut: dict[int, Cut] = {}
    for some in at_once(of_way[short].tolist()):
        ways, like = short[some], model[total[short[some]]]
        mine = spans(first[ways], count[ways])
        rows = found.rows[spans(found.table["at"][mine], pages[mine])]
        rows = rows[order_within(begin_ns(exchanges, rows), np.repeat(np.arange(len(ways)), of_way[ways]))]
        told = found.table["bytes"][spans(first[like], count[like])]
        # As many bytes on both: so sums over all ways are alike.
        sums, ends = np.cumsum(exchanges["bytes"][rows].astype(np.int64)), np.cumsum(told)
        at = np.searchsorted(sums, ends)
        until, told_until = np.cumsum(of_way[ways]), np.cumsum(count[like])
        good = np.logical_and.reduceat(sums[at] == ends, told_until - count[like]).tolist()
        begin = until - of_way[ways]
        at = at - np.repeat(begin, count[like])
        for way, fits, own, size, places in zip(
            ways.tolist(), good, cut_at(rows, begin[1:]), cut_at(told, told_until[:-1]),
            cut_at(at, told_until[:-1]), strict=True,
        ):  # fmt: skip
            parts = (own, places[:-1] + 1) if fits else parts_of(exchanges, own, size)
            if parts is not None:
                cut[way] = parts
    if not cut:
        return transfers
    made, chosen = _made(exchanges, list(cut.values()))
    made.table["at"] += len(found.rows)
    made.table["end"] += len(found.rows)
    way = np.repeat(np.arange(len(count)), count)
    kept = ~np.isin(way, list(cut))
    again = np.repeat(list(cut), [len(at) + 1 for _, at in cut.values()])[chosen]
    table = np.concatenate([found.table[kept], made.table])
    order = np.argsort(np.r_[way[kept], again], kind="stable")
    return Found(table[order], np.r_[found.rows, made.rows])


def _wholes(parts: Sequence[int], size: int) -> Sequence[int]:
    """Where those begin that parts of so many bytes, put together to ``size`` each, make; all ``parts`` if
    they do not add up to that.

    A page that was seen twice, or not at all, leaves one of them a little longer or shorter.
    """
    begins: list[int] = []
    slack = min(parts) / 2
    begin = total = exact = 0
    for place, nbytes in enumerate(parts):
        total += nbytes
        if total > size + slack:
            return range(len(parts))
        if total >= size - slack:
            begins.append(begin)
            exact += total == size
            begin, total = place + 1, 0
    return [*begins, *range(begin, len(parts))] if 2 * exact >= len(begins) else range(len(parts))


def _together(parts: Found, first: Ints) -> Found:
    """One transfer from those that follow each other from each of ``first`` on."""
    table, last = parts.table, np.r_[first[1:], len(parts.table)] - 1
    pages = table["end"] - table["at"]
    rows, end = parts.rows[spans(table["at"], pages)], np.cumsum(pages)
    found = table[last]
    found["start_ns"], found["at"], found["end"] = table["start_ns"][first], (end - pages)[first], end[last]
    for name in ("bytes", "busy_ns", "retransmitted", "ecn_marked"):
        found[name] = np.add.reduceat(table[name], first)
    found["complete"] = np.logical_and.reduceat(table["complete"], first)
    least, most = (end.reduceat(table["page_bytes"], first) for end in (np.minimum, np.maximum))
    found["page_bytes"] = np.where(least == most, least, 0)
    return Found(found, rows)


def _slow(transfers: Found) -> Found:
    """Mark transfers over paths whose pages take three times as long per byte as the median path's."""
    table = transfers.table.copy()
    way = numbered(*transfers.ways("src", "dst"))
    pace = table["busy_ns"] / np.maximum(table["bytes"], 1)
    way = np.unique(way, return_inverse=True)[1].reshape(-1)
    own = medians(pace, way)
    ordered, left = np.sort(own), len(own) - 1
    at = np.searchsorted(ordered, own)
    # The middle of all ways but this one.
    low, high = (place + (place >= at) for place in ((left - 1) // 2, left // 2))
    others = (ordered[low] + ordered[high]) / 2 if left else np.full(1, np.inf)
    # Pages of one packet take no time at one place.
    slow = (own > 0) & (own >= SLOW_FACTOR * others)
    table["slow"] = slow[way]
    return Found(table, transfers.rows)


def _named(transfers: Found) -> Found:
    """Mark likely KV caches: the receiver waited for them, and nothing goes back on their paths."""
    table = transfers.table.copy()
    way, back = (table[a] << 32 | table[b] for a, b in (("src", "dst"), ("dst", "src")))
    waited = table["idle_ns"] != NEVER
    table["cache"] = is_in(way, way[waited & ~is_in(back, way)])
    return Found(table, transfers.rows)
