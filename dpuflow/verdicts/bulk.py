"""Bulk one-sided transfers: pages that one endpoint WRITEs into another's memory, or READs from it.

In: EXCHANGE rows that no collective was made of, and entries of ranks. Out: transfers, and which entries had
waited for one. Transfer engines move the KV caches of disaggregated inference so (Mooncake, NIXL): pages of
one size at scattered addresses, one way, without an immediate and without clear-to-send entries. What the
bytes are shows in no packet; that a rank which had been idle takes part in collectives again as soon as they
are there is what speaks for a cache."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import cut_at
from dpuflow.arrays.quantiles import middle, middle_of_others
from dpuflow.schema.rows import NEVER, MessageFlag, Op, Wire
from dpuflow.verdicts.pages import begin_ns, cut_pieces, end_ns, notices_ns, page_ways, parts_of, so_far

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

FEWEST: Final = 2
"""Pages: a single WRITE or READ is no burst of pages."""
OTHERS: Final = 3.0
"""A path is slow if its pages take so many times as long as those of the middle path: as of links."""
TWICE: Final = 2
"""Times a usual pause: a transfer that ends in one of the longer pauses had not been waited for."""
FEWEST_PAUSES: Final = 3
"""So many of an endpoint's pauses between collectives tell which one is usual."""


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


class Fed(NamedTuple):
    """What transfers did to each row of Entries: when the last one that it had waited for was there (NEVER
    without), whether the network had held that one up, and whether its endpoint still had pages to send on a
    slow path as it entered: an adapter whose queue stands still keeps everything else, too."""

    ns: Ints
    held: NDArray[np.bool_]
    carrying: NDArray[np.bool_]


def find_bulk(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> list[Bulk]:
    """All bulk transfers, in order of their start."""
    tied, sent = _tied(instances, entries), notices_ns(exchanges)
    ways = page_ways(exchanges, instances)
    notices = [sent(rows) for rows in ways]
    # Together where the receiver waited for all of it; notices have told.
    pieces = [
        piece
        for rows, told, mine in zip(ways, notices, cut_pieces(exchanges, ways, notices), strict=True)
        for piece in (
            mine if len(told) else _merged(exchanges, mine, entries, tied(int(exchanges["dst"][rows[0]])))
        )
    ]
    found = _awaited([each for each in _made(exchanges, pieces) if each is not None], tied, entries)
    together = _by_siblings(exchanges, _by_waits(found))
    found = _awaited(together, tied, entries) if len(together) != len(found) else found
    return sorted(_named(_slow(found)), key=lambda each: (each.start_ns, each.src, each.dst))


def fed_rows(transfers: Sequence[Bulk], entries: Entries) -> Fed:
    """What transfers did to each row of Entries."""
    fed = np.full(len(entries.endpoint), NEVER)
    held, carrying = np.zeros((2, len(fed)), bool)
    slow: dict[int, list[tuple[int, int]]] = {}
    for each in transfers:
        if each.last and each.waited:
            fed[each.row] = each.end_ns
            held[each.row] = each.path is not None
        if each.slow and each.start_ns <= each.end_ns:
            slow.setdefault(each.src, []).append((each.start_ns, each.end_ns))
    for src, spans in slow.items():
        mine = entries.of[src]
        begin, end = np.sort(np.array(spans).T)
        begun = np.searchsorted(begin, entries.enter_ns[mine], "right")
        carrying[mine] = begun > np.searchsorted(end, entries.enter_ns[mine], "left")
    return Fed(fed, held, carrying)


def _merged(exchanges: Rows, pieces: list[Ints], entries: Entries, tied: Ints) -> list[Ints]:
    """``pieces`` of one way; those between which the receiver, who takes part in collectives, entered none
    (``tied``) are one: a cache that is moved layer by layer, while the receiver waits for all of it."""
    if not len(tied) or len(pieces) < 2:
        return pieces
    enter, left = entries.enter_ns[tied], entries.leave_ns[tied]
    rows, first = np.concatenate(pieces), np.cumsum([0, *(len(piece) for piece in pieces[:-1])])
    until = np.maximum.reduceat(end_ns(exchanges, rows), first)[:-1]
    place = np.searchsorted(enter, until)
    idle = (place == 0) | (left[place - 1] <= until)
    following = np.searchsorted(enter, begin_ns(exchanges, rows[first[1:]]))
    alone = ~idle | (place == len(enter)) | (place != following)
    return cut_at(rows, first[1:][alone])


def _made(exchanges: Rows, pieces: Sequence[Ints]) -> list[Bulk | None]:
    """What each of ``pieces`` is, all laid out at once; None of one page."""
    chosen = [number for number, piece in enumerate(pieces) if len(piece) >= FEWEST]
    made: list[Bulk | None] = [None] * len(pieces)
    if not chosen:
        return made
    counts = np.array([len(pieces[number]) for number in chosen])
    first, last = np.cumsum(counts) - counts, np.cumsum(counts) - 1
    rows, piece = np.concatenate([pieces[n] for n in chosen]), np.repeat(np.arange(len(counts)), counts)
    begin = begin_ns(exchanges, rows)
    order = np.lexsort((begin, piece))
    rows, begin = rows[order], begin[order]
    until = so_far(end_ns(exchanges, rows), piece)
    pause = np.maximum(np.r_[0, begin[1:] - until[:-1]], 0)
    pause[first] = 0
    size = exchanges["bytes"][rows]
    cut = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP
    total, retransmitted, marked, partial = (
        np.add.reduceat(values, first, dtype=np.uint64).tolist()
        for values in (
            size, exchanges["retransmitted"][rows], exchanges["ecn_marked"][rows],
            exchanges["flags"][rows] & cut != 0,
        )
    )  # fmt: skip
    ends = [exchanges[name][rows[first]].tolist() for name in ("src", "dst")]
    read = (exchanges["wire"][rows[first]] == Wire.ROCE_READ).tolist()
    times = begin[first].tolist(), until[last].tolist(), np.add.reduceat(pause, first).tolist()
    message = exchanges["data"][rows[last]].tolist()
    columns = zip(chosen, *ends, read, cut_at(rows, first[1:]), *times, total, _usual(size, piece),
                  retransmitted, marked, partial, message, strict=True)  # fmt: skip
    for number, src, dst, by_read, these, start, stop, idle, nbytes, page, resent, ecn, gaps, data in columns:
        busy = stop - start - idle  # stamps may be centuries apart
        made[number] = Bulk(
            src, dst, by_read, these, start, stop, nbytes, page, busy, resent, ecn, not gaps, data
        )
    return made


def _usual(size: Rows, piece: Ints) -> list[int | None]:
    """The size that at least half the pages of each piece have; the least of several, None without."""
    order = np.lexsort((size, piece))
    size, piece = size[order], piece[order]
    run = np.flatnonzero(np.r_[True, (np.diff(piece) != 0) | (size[1:] != size[:-1])])
    times = np.diff(np.r_[run, len(size)])
    best = np.lexsort((-times, piece[run]))
    best = best[np.r_[True, np.diff(piece[run[best]]) != 0]]
    usual = 2 * times[best] >= np.bincount(piece)
    return [
        page if told else None for page, told in zip(size[run[best]].tolist(), usual.tolist(), strict=True)
    ]


def _tied(instances: Sequence[Instance], entries: Entries) -> Callable[[int], Ints]:
    """What tells the rows of Entries by which an endpoint entered collectives, in order of time."""
    single = np.fromiter((i.op == Op.SEND_RECV for i in instances), bool, len(instances))
    mine = np.flatnonzero(entries.enter_ns != NEVER)
    mine = mine[~single[entries.collective[mine]]]
    mine = mine[np.lexsort((entries.enter_ns[mine], entries.endpoint[mine]))]
    endpoint = entries.endpoint[mine]

    def told(end: int) -> Ints:
        rows: Ints = mine[np.searchsorted(endpoint, end) : np.searchsorted(endpoint, end, "right")]
        return rows

    return told


def _awaited(transfers: Sequence[Bulk], tied: Callable[[int], Ints], entries: Entries) -> list[Bulk]:
    """``transfers`` with the entry that followed each, and whether the receiver had waited for it.

    It had if the transfer ended in a pause between two of its collectives that is longer than its pauses
    without one (nineteen in twenty); where it has hardly any of these, if most of the pause was the
    transfer."""
    found: list[Bulk] = []
    of: dict[int, list[Bulk]] = {}
    for each in transfers:
        of.setdefault(each.dst, []).append(each)
    for dst in sorted(of):
        mine = of[dst]
        rows = tied(dst)
        enter = entries.enter_ns[rows]
        left = np.maximum.accumulate(np.r_[NEVER, entries.leave_ns[rows]])[:-1] if len(rows) else enter
        after = np.searchsorted(enter, [each.end_ns for each in mine])
        taken = np.zeros(len(rows) + 1, bool)
        taken[after] = True
        pause = (enter - left)[(left != NEVER) & ~taken[:-1]]
        usual = TWICE * float(np.percentile(pause, 95)) if len(pause) >= FEWEST_PAUSES else None
        ends: dict[int, int] = {}  # of the transfers that each entry followed, the last
        for each, place in zip(mine, after.tolist(), strict=True):
            ends[place] = max(ends.get(place, NEVER), each.end_ns)
        for each, place in zip(mine, after.tolist(), strict=True):
            if place == len(rows):
                found.append(each)
                continue
            idle = max(each.start_ns, int(left[place]))
            waits = int(enter[place]) - int(left[place]) if left[place] != NEVER else None
            waited = idle < each.end_ns
            if usual is not None and waits is not None:
                waited &= waits > usual
            else:
                waited &= 2 * (each.end_ns - idle) >= int(enter[place]) - idle
            found.append(
                each._replace(
                    row=int(rows[place]),
                    idle_ns=idle if waited else NEVER,
                    left_ns=int(left[place]),
                    last=each.end_ns == ends[place],
                )
            )
    return found


def _by_waits(transfers: list[Bulk]) -> list[Bulk]:
    """``transfers`` with the parts of one cache put together.

    Where a cache is moved layer by layer the receiver may still be at work when the first layers come. How
    large the whole is shows from one wait of the receiver to the next: as many bytes, most times. Transfers
    of a way that add up to that are wholes.
    """
    ways: dict[tuple[int, int, bool], list[Bulk]] = {}
    for each in sorted(transfers, key=lambda each: each.start_ns):
        ways.setdefault((each.src, each.dst, each.read), []).append(each)
    sums: Counter[int] = Counter()
    for mine in ways.values():
        ends = [place + 1 for place, each in enumerate(mine) if each.waited]
        these = Counter(sum(e.bytes for e in mine[a:b]) for a, b in pairwise([0, *ends]))
        size, times = these.most_common(1)[0] if these else (0, 0)
        if times >= FEWEST_PAUSES and 2 * times > these.total():
            sums[size] += times
    usual = sums.most_common(1)[0][0] if sums else 0
    return [each for mine in ways.values() for each in _wholes(mine, usual) or mine]


def _by_siblings(exchanges: Rows, transfers: list[Bulk]) -> list[Bulk]:
    """``transfers``, with those that nothing parts cut as on other ways. ``transfers`` if nothing changes.

    Ranks that share a model each hand on their part of the same requests, so all have as many bytes to move,
    in transfers of the same sizes one after the other. Where pages queue (a slow link) no pause tells.
    """
    ways: dict[tuple[int, int, bool], list[Bulk]] = {}
    for each in sorted(transfers, key=lambda each: each.start_ns):
        ways.setdefault((each.src, each.dst, each.read), []).append(each)
    sizes: dict[int, list[int]] = {}  # of a way's transfers, by the bytes of all: of the way that has most
    for mine in ways.values():
        these = [each.bytes for each in mine]
        sizes[sum(these)] = max(sizes.get(sum(these), []), these, key=len)
    cut: dict[tuple[int, int, bool], list[Ints]] = {}
    for way, mine in ways.items():
        told = sizes[sum(each.bytes for each in mine)]
        if len(told) >= FEWEST_PAUSES and len(told) > len(mine):
            rows = np.concatenate([each.rows for each in mine])
            rows = rows[np.argsort(begin_ns(exchanges, rows), kind="stable")]
            parts = parts_of(exchanges, rows, np.array(told))
            if parts is not None:
                cut[way] = parts
    if not cut:
        return transfers
    made = iter(_made(exchanges, [part for parts in cut.values() for part in parts]))
    found: list[Bulk] = []
    for way, mine in ways.items():
        again = (next(made) for _ in cut.get(way, ()))
        found += (each for each in again if each is not None) if way in cut else mine
    return found


def _wholes(parts: Sequence[Bulk], size: int) -> list[Bulk]:
    """``parts`` put together to so many bytes each; none if they do not add up to that.

    A page that was seen twice, or not at all, leaves one of them a little longer or shorter.
    """
    if not size:
        return []
    found: list[Bulk] = []
    slack = min(each.bytes for each in parts) / 2
    begin = total = exact = 0
    for place, each in enumerate(parts):
        total += each.bytes
        if total > size + slack:
            return []
        if total >= size - slack:
            found.append(_together(parts[begin : place + 1]))
            exact += total == size
            begin, total = place + 1, 0
    return found + list(parts[begin:]) if 2 * exact >= len(found) else []


def _together(parts: Sequence[Bulk]) -> Bulk:
    """One transfer from several that follow each other on one way."""
    if len(parts) == 1:
        return parts[0]
    pages = {each.page_bytes for each in parts}
    return parts[-1]._replace(
        rows=np.concatenate([each.rows for each in parts]),
        start_ns=parts[0].start_ns,
        bytes=sum(each.bytes for each in parts),
        page_bytes=parts[0].page_bytes if len(pages) == 1 else None,
        busy_ns=sum(each.busy_ns for each in parts),
        retransmitted=sum(each.retransmitted for each in parts),
        ecn_marked=sum(each.ecn_marked for each in parts),
        complete=all(each.complete for each in parts),
    )


def _slow(transfers: Sequence[Bulk]) -> list[Bulk]:
    """Mark transfers over ways whose pages take three times as long, byte for byte, as the middle way's."""
    paces: dict[tuple[int, int], list[float]] = {}
    for each in transfers:
        paces.setdefault((each.src, each.dst), []).append(each.busy_ns / max(each.bytes, 1))
    pace = {way: middle(sorted(values)) for way, values in paces.items()}
    ordered = sorted(pace.values())
    # Pages of one packet take no time at one place.
    slow = {way for way, own in pace.items() if own > 0 and own >= OTHERS * middle_of_others(ordered, own)}
    return [each._replace(slow=True) if (each.src, each.dst) in slow else each for each in transfers]


def _named(transfers: Sequence[Bulk]) -> list[Bulk]:
    """Mark what are caches likely: of ways for which the receiver waited, and on which nothing goes back."""
    ways = {(each.src, each.dst) for each in transfers}
    waited = {(each.src, each.dst) for each in transfers if each.waited}
    caches = {way for way in waited if way[::-1] not in ways}
    return [each._replace(cache=True) if (each.src, each.dst) in caches else each for each in transfers]
