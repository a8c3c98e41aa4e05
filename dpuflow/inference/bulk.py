"""Bulk one-sided transfers: pages that one endpoint WRITEs into another's memory, or READs from it.

In: EXCHANGE rows that no collective was made of, and entries of ranks. Out: transfers, and which entries had
waited for one. Transfer engines move the KV caches of disaggregated inference so (Mooncake, NIXL): pages of
one size at scattered addresses, one way, without an immediate and without clear-to-send entries. What the
bytes are shows in no packet; that a rank which had been idle takes part in collectives again as soon as they
are there is what speaks for a cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from dpuflow.inference.pages import begin_ns, cut_pieces, end_ns, notices_ns, page_ways
from dpuflow.schema import NEVER, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness import Entries
    from dpuflow.tables import Rows

    Ints = NDArray[np.int64]

FEWEST: Final = 2
"""Pages: a single WRITE or READ is no burst of pages."""
OTHERS: Final = 3.0
"""A path is slow if its pages take so many times as long as those of the middle path: as of links."""
TWICE: Final = 2
"""Times a usual pause: a transfer that ends in one of the longer pauses had not been waited for."""
FEWEST_PAUSES: Final = 3
"""So many of an endpoint's pauses between collectives tell which one is usual."""


@dataclass(frozen=True)
class Bulk:
    """One transfer. Times are on the reference clock; ``rows`` of EXCHANGE, in order.

    ``busy_ns``: how long some page was under way. ``row``: of Entries, the receiver's first entry after it,
    -1 for none; ``idle_ns``: since when the receiver had done nothing else, where it had waited for the
    transfer, else NEVER. ``last`` of those that the receiver waited for at the same time. ``slow``: the path
    was."""

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


def find_bulk(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> list[Bulk]:
    """All bulk transfers, in order of their start."""
    found: list[Bulk] = []
    for rows in page_ways(exchanges, instances):
        notices = notices_ns(exchanges, rows)
        pieces = list(cut_pieces(exchanges, rows, notices))
        if not len(notices):
            pieces = list(_merged(exchanges, pieces, entries, instances))
        found += (each for piece in pieces for each in _made(exchanges, piece))
    if not found:
        return found
    found = _awaited(found, instances, entries)
    whole = _by_waits(found)
    if len(whole) < len(found):
        found = _awaited(whole, instances, entries)
    found = _named(_slow(found))
    return sorted(found, key=lambda each: (each.start_ns, each.src, each.dst))


def fed_rows(transfers: Sequence[Bulk], entries: Entries) -> tuple[Ints, NDArray[np.bool_]]:
    """Per row of Entries when the last transfer that it had waited for was there (NEVER without), and whether
    the network had held that one up."""
    fed = np.full(len(entries.endpoint), NEVER)
    held = np.zeros(len(fed), bool)
    for each in transfers:
        if each.waited and each.last:
            fed[each.row] = each.end_ns
            held[each.row] = each.path is not None
    return fed, held


def _merged(
    exchanges: Rows, pieces: Sequence[Ints], entries: Entries, instances: Sequence[Instance]
) -> Iterator[Ints]:
    """``pieces`` of one way; those between which the receiver, who takes part in collectives, entered none
    are one: a cache that is moved layer by layer, while the receiver waits for the whole."""
    tied = _tied(instances, entries, int(exchanges["dst"][pieces[0][0]]))
    enter, left = entries.enter_ns[tied], entries.leave_ns[tied]
    together: list[Ints] = []
    for piece in pieces:
        if together and len(enter):
            until = end_ns(exchanges, together[-1]).max()
            place = int(np.searchsorted(enter, until))
            idle = not place or left[place - 1] <= until
            if idle and place < len(enter) and place == np.searchsorted(enter, begin_ns(exchanges, piece)[0]):
                together.append(piece)
                continue
        if together:
            yield np.concatenate(together)
        together = [piece]
    yield np.concatenate(together)


def _made(exchanges: Rows, rows: Ints) -> Iterator[Bulk]:
    if len(rows) < FEWEST:
        return
    begin, end = begin_ns(exchanges, rows), end_ns(exchanges, rows)
    until = np.maximum.accumulate(end)
    idle = np.maximum(begin[1:] - until[:-1], 0).sum()
    sizes, counts = np.unique(exchanges["bytes"][rows], return_counts=True)
    most = int(np.argmax(counts))
    cut = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP
    yield Bulk(
        src=int(exchanges["src"][rows[0]]),
        dst=int(exchanges["dst"][rows[0]]),
        read=bool(exchanges["wire"][rows[0]] == Wire.ROCE_READ),
        rows=rows,
        start_ns=int(begin[0]),
        end_ns=int(until[-1]),
        bytes=int(exchanges["bytes"][rows].sum()),
        page_bytes=int(sizes[most]) if 2 * counts[most] >= len(rows) else None,
        busy_ns=int(until[-1] - begin[0] - idle),
        retransmitted=int(exchanges["retransmitted"][rows].sum()),
        ecn_marked=int(exchanges["ecn_marked"][rows].sum()),
        complete=not bool((exchanges["flags"][rows] & cut).any()),
        message=int(exchanges["data"][rows[-1]]),
    )


def _tied(instances: Sequence[Instance], entries: Entries, endpoint: int) -> Ints:
    """Rows of Entries by which an endpoint entered collectives, in order of time."""
    single = np.fromiter((i.op == Op.SEND_RECV for i in instances), bool, len(instances))
    mine = np.flatnonzero((entries.endpoint == endpoint) & (entries.enter_ns != NEVER))
    mine = mine[~single[entries.collective[mine]]]
    order: Ints = mine[np.argsort(entries.enter_ns[mine], kind="stable")]
    return order


def _awaited(transfers: Sequence[Bulk], instances: Sequence[Instance], entries: Entries) -> list[Bulk]:
    """``transfers`` with the entry that followed each, and whether the receiver had waited for it.

    It had if the transfer ended in a pause between two of its collectives that is longer than its pauses
    without one (nineteen in twenty); where it has hardly any of these, if most of the pause was the
    transfer."""
    found: list[Bulk] = []
    for dst in sorted({each.dst for each in transfers}):
        mine = [each for each in transfers if each.dst == dst]
        rows = _tied(instances, entries, dst)
        enter = entries.enter_ns[rows]
        left = np.maximum.accumulate(np.r_[NEVER, entries.leave_ns[rows]])[:-1] if len(rows) else enter
        after = np.searchsorted(enter, [each.end_ns for each in mine])
        taken = np.zeros(len(rows) + 1, bool)
        taken[after] = True
        pause = (enter - left)[(left != NEVER) & ~taken[:-1]]
        usual = TWICE * float(np.percentile(pause, 95)) if len(pause) >= FEWEST_PAUSES else None
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
            others = [o.end_ns for o, at in zip(mine, after.tolist(), strict=True) if at == place]
            found.append(
                replace(
                    each,
                    row=int(rows[place]),
                    idle_ns=idle if waited else NEVER,
                    last=each.end_ns == max(others),
                )
            )
    return found


def _by_waits(transfers: Sequence[Bulk]) -> list[Bulk]:
    """``transfers`` with the parts of one cache put together.

    Where a cache is moved layer by layer the receiver may still be at work when the first layers come. How
    large the whole is shows from one wait of the receiver to the next: as many bytes, most times. Parts of a
    way that always add up to that are wholes.
    """
    ways: dict[tuple[int, int, bool], list[Bulk]] = {}
    for each in sorted(transfers, key=lambda each: each.start_ns):
        ways.setdefault((each.src, each.dst, each.read), []).append(each)
    sums: Counter[int] = Counter()
    own: dict[tuple[int, int, bool], int] = {}
    for way, mine in ways.items():
        ends = [place + 1 for place, each in enumerate(mine) if each.waited]
        these = Counter(sum(e.bytes for e in mine[a:b]) for a, b in pairwise([0, *ends]))
        size, times = these.most_common(1)[0] if these else (0, 0)
        if times >= FEWEST_PAUSES and 2 * times > these.total():
            own[way] = size
            sums[size] += times
    usual = sums.most_common(1)[0][0] if sums else 0
    found: list[Bulk] = []
    for way, mine in ways.items():
        found += _wholes(mine, own.get(way, usual))
    return found


def _wholes(parts: Sequence[Bulk], size: int) -> list[Bulk]:
    """``parts`` put together to so many bytes each; as they are if they do not add up to that."""
    found: list[Bulk] = []
    begin = total = 0
    for place, each in enumerate(parts):
        total += each.bytes
        if total == size:
            found.append(_together(parts[begin : place + 1]))
            begin, total = place + 1, 0
        elif total > size:
            return list(parts)
    return found + list(parts[begin:])


def _together(parts: Sequence[Bulk]) -> Bulk:
    """One transfer from several that follow each other on one way."""
    if len(parts) == 1:
        return parts[0]
    pages = {each.page_bytes for each in parts}
    return replace(
        parts[-1],
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
    pace = {way: float(np.median(values)) for way, values in paces.items()}
    found = []
    for each in transfers:
        others = [value for way, value in pace.items() if way != (each.src, each.dst)]
        slow = bool(others) and pace[each.src, each.dst] >= OTHERS * float(np.median(others))
        found.append(replace(each, slow=slow))
    return found


def _named(transfers: Sequence[Bulk]) -> list[Bulk]:
    """Mark what are caches likely: of ways for which the receiver waited, and on which nothing goes back."""
    ways = {(each.src, each.dst) for each in transfers}
    waited = {(each.src, each.dst) for each in transfers if each.waited}
    caches = {way for way in waited if way[::-1] not in ways}
    return [replace(each, cache=(each.src, each.dst) in caches) for each in transfers]
