"""Where an operation may end and the next one begin on all connections of a communicator, told from times.

In: pipes whose messages nothing announces (NCCL over TCP). Out: cuts. A cut parts the messages of every pipe
in those before and those after. A rank begins an operation when it is through with the one before, so what
it sends after a cut it sends later than all that it sent, and got, before. Most messages of an operation
are on their way while others are sent, so that few cuts lie within one. Those that do have short pauses:
who waits for an input goes on as soon as it has come; between two operations every rank computes.

Times part no operations that follow each other without a pause. Counts do where all connections carry as many
messages (``counted_cuts``), and so do the sizes of those that stand apart (``chained_cuts``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from dpuflow.arrays import Ints
    from dpuflow.matching.credited import Pipe
    from dpuflow.matching.streams import Columns
    from dpuflow.schema.tables import Rows


T = TypeVar("T")

MOST_CUTS: Final = 4_000_000
"""Cuts times pipes that are kept, at most: 32 bytes each on their way."""


class Times(NamedTuple):
    """When each message of one pipe began to leave, and came; known at one end only, the other is put in.
    And when all of it had left: on a slow link that takes longer than many a pause."""

    starts: Ints
    arrivals: Ints
    ends: Ints


class Cuts(NamedTuple):
    """Cuts in order. The first one lies before all messages, the last one behind them."""

    at: Ints  # (cuts, pipes): messages of each pipe before it
    pauses: Ints  # (cuts, ranks): of each before its first message behind it; FAR: not known
    idle: Ints  # ... but for the time that its last one before it took to leave
    ranks: list[int]

    @property
    def gaps(self) -> Ints:
        """The least pause of any rank at each cut."""
        least: Ints = self.pauses.min(axis=1)
        return least


def times_of(exchanges: Rows, columns: Columns, pipes: Sequence[Pipe]) -> list[Times]:
    """The times of all pipes, each in the order of the stream: what comes late holds up what is behind it."""
    found = []
    for pipe in pipes:
        starts, arrivals = columns.starts[pipe.rows], columns.arrivals[pipe.rows]
        sent, came = starts != NEVER, arrivals != NEVER
        both = sent & came
        way = max(0, int(median_of((arrivals - starts)[both]))) if both.any() else 0
        starts = np.where(sent, starts, arrivals - way)
        arrivals = np.where(came, arrivals, starts + way)
        starts = np.maximum.accumulate(starts)
        ends = np.maximum(exchanges["data_end_ns"][pipe.rows], starts)
        found.append(Times(starts, np.maximum.accumulate(arrivals), np.maximum.accumulate(ends)))
    return found


def cuts_of(pipes: Sequence[Pipe], times: Sequence[Times]) -> Cuts:
    """Cuts of connected pipes: each holds what was sent by one time, as far as that has all that it needs."""
    ends = sorted({end for pipe in pipes for end in pipe[:2]})
    starts = np.concatenate([each.starts for each in times])
    arrivals = np.concatenate([each.arrivals for each in times])
    counts = [len(each.starts) for each in times]
    src = np.repeat([ends.index(pipe.src) for pipe in pipes], counts)
    dst = np.repeat([ends.index(pipe.dst) for pipe in pipes], counts)
    order = np.lexsort((starts, src))
    last = _closed(starts[order], arrivals[order], src[order], dst[order], len(ends))
    closed = np.empty_like(last)
    closed[order] = last
    marks = _far_apart(distinct(closed), np.sort(starts), MOST_CUTS // len(pipes))
    at = np.zeros((len(marks) + 1, len(pipes)), np.int64)
    low = 0
    for number, count in enumerate(counts):
        at[1:, number] = np.searchsorted(closed[low : low + count], marks, "right")
        low += count
    return _with_pauses(at, pipes, times)


def _far_apart(marks: Ints, times: Ints, most: int) -> Ints:
    """Of places in ``times`` at most so many, those behind which the next one is longest in coming."""
    if len(marks) <= most:
        return marks
    pause = times[np.minimum(marks + 1, len(times) - 1)] - times[marks]
    kept = np.sort(np.argsort(-pause, kind="stable")[:most])
    return np.union1d(marks[kept], marks[-1:])


def _with_pauses(at: Ints, pipes: Sequence[Pipe], times: Sequence[Times]) -> Cuts:
    """The cuts ``at``, but for those before which a rank had not been through with all."""
    cuts = cuts_at(at, pipes, times)
    sound = np.asarray((cuts.pauses >= 0).all(axis=1), np.bool_)
    sound[0] = sound[-1] = True
    return Cuts(at[sound], cuts.pauses[sound], cuts.idle[sound], cuts.ranks)


def cuts_at(
    at: Ints, pipes: Sequence[Pipe], times: Sequence[Times], near: AbstractSet[int] | None = None
) -> Cuts:
    """The cuts ``at`` with the pauses of ranks; ``near``: those that were captured, None for all."""
    ends = sorted({end for pipe in pipes for end in pipe[:2]})
    pauses, idle = np.full((2, len(at), len(ends)), FAR)
    for place, rank in enumerate(ends):
        if near is not None and rank not in near:
            continue
        before, sent = np.full((2, len(at)), NEVER)
        first = np.full(len(at), FAR)
        for number, (pipe, each) in enumerate(zip(pipes, times, strict=True)):
            behind = at[:, number]
            if pipe.src == rank:
                first = np.minimum(first, np.append(each.starts, FAR)[behind])
                before = np.maximum(before, np.r_[NEVER, each.starts][behind])
                sent = np.maximum(sent, np.r_[NEVER, each.ends][behind])
            if pipe.dst == rank:
                before = np.maximum(before, np.r_[NEVER, each.arrivals][behind])
        known = (first != FAR) & (before != NEVER)
        pauses[known, place] = (first - before)[known]
        idle[known, place] = np.maximum(first - np.maximum(before, sent), 0)[known]
    return Cuts(at, pauses, idle, ends)


def _closed(starts: Ints, arrivals: Ints, src: Ints, dst: Ints, ranks: int) -> Ints:
    """For each message the place in time of the last one that must lie before any cut behind it.

    Messages are in order of ``src`` and time. Before a cut behind a message lies all that its sender had
    sent, and all that its receiver sent until it came; and so on with these.
    """
    count = len(starts)
    bounds = np.searchsorted(src, np.arange(ranks + 1))
    upto = np.empty(count, np.int64)
    for rank in range(ranks):
        into = dst == rank
        low, high = bounds[rank], bounds[rank + 1]
        upto[into] = low + np.searchsorted(starts[low:high], arrivals[into], "left") - 1
    sends = upto >= bounds[dst]
    upto = np.where(sends, upto, np.arange(count))
    place = np.empty(count, np.int64)
    place[np.argsort(starts, kind="stable")] = np.arange(count)
    own = src * count  # keeps ranks apart
    last = place
    while True:
        more = np.maximum.accumulate(np.maximum(last, last[upto]) + own) - own
        if (more == last).all():
            return last
        last = more


def counted_cuts(pipes: Sequence[Pipe], times: Sequence[Times], sizes: Sequence[Ints]) -> Cuts:
    """The cuts behind as many messages of each pipe, or as many times what it has more, from the first on.

    Times tell nothing where ranks are early as a rule: what they send for the next operation may leave before
    others have sent all of this one. But captures that begin between two operations show all pipes from the
    same one on; their ends may be a few messages apart. ``sizes``: of each pipe's messages.
    """
    whole = alike_long(pipes)
    steps = int(np.gcd.reduce(whole))
    at = np.arange(steps + 1)[:, None] * (whole // steps) + ahead_of(sizes, whole)
    every = [len(each.starts) for each in times]
    at = np.unique(np.concatenate([[np.zeros_like(whole)], np.minimum(at, every), [every]]), axis=0)
    return _with_pauses(at, pipes, times)


def chained_cuts(
    pipes: Sequence[Pipe], times: Sequence[Times], sizes: Sequence[Ints], begins: Ints, ends: Ints
) -> Cuts:
    """The cuts of operations from ``begins`` to ``ends`` (parts, pipes), and of those that lie between these.

    Where one follows the other without a pause no time parts them: who is through sends for the next one
    while others are not. But those that stand apart show what is sent for one: where its messages are the
    next ones of all pipes, or the last ones before, they are another. ``sizes``: of each pipe's messages.
    """
    known: dict[bytes, tuple[Ints, list[Ints]]] = {}
    for begin, end in zip(begins, ends, strict=True):
        own = [each[a:b] for each, a, b in zip(sizes, begin.tolist(), end.tolist(), strict=True)]
        known.setdefault(np.concatenate([end - begin, *own]).tobytes(), (end - begin, own))
    longest = sorted(known.values(), key=lambda each: -int(each[0].sum()))
    last = np.array([len(each) for each in sizes])
    found = [np.zeros_like(last), last]
    for low, high in zip([np.zeros_like(last), *ends], [*begins, last], strict=True):
        found += [low, high, *_chain(low, high, sizes, longest)]
    at = np.unique(np.array(found), axis=0)
    cuts = cuts_at(at[(np.diff(at, axis=0, prepend=at[:1]) >= 0).all(axis=1)], pipes, times)
    # Sizes tell these, so that a late stamp or two do not speak against them.
    return cuts._replace(pauses=np.maximum(cuts.pauses, 1), idle=np.maximum(cuts.idle, 1))


def _chain(
    low: Ints, high: Ints, sizes: Sequence[Ints], known: Sequence[tuple[Ints, list[Ints]]]
) -> Iterator[Ints]:
    """The ends of ``known`` operations one behind the other from ``low`` on, and the beginnings of those
    before ``high``."""
    for forward in (True, False):
        while True:
            fits = (
                count
                for count, own in known
                if (low + count <= high).all() and _stands(sizes, low if forward else high - count, own)
            )
            step = next(fits, None)
            if step is None:
                break
            low, high = (low + step, high) if forward else (low, high - step)
            yield low if forward else high


def _stands(sizes: Sequence[Ints], at: Ints, own: Sequence[Ints]) -> bool:
    """Whether the messages ``own`` of each pipe stand at ``at``."""
    return all(
        np.array_equal(each[k : k + len(mine)], mine)
        for each, k, mine in zip(sizes, at.tolist(), own, strict=True)
    )


def ahead_of(sizes: Sequence[Ints], whole: Ints) -> Ints:
    """Messages of each pipe before those that all have: of a first operation that others had no part in.

    A barrier's tree shares connections with the ring of what follows.
    """
    found = np.zeros(len(sizes), np.int64)
    for n in distinct(whole).tolist():
        alike = np.flatnonzero(whole == n).tolist()
        known = min((sizes[k] for k in alike), key=len)
        for k in alike:
            # A rank may be ahead of the next one by its slots.
            more = range(min(len(sizes[k]) - len(known), NCCL_STEPS) + 1)
            found[k] = next((m for m in more if np.array_equal(sizes[k][m : m + len(known)], known)), 0)
    return found


def as_many(items: Iterable[T], messages: Callable[[T], int]) -> list[list[T]]:
    """``items`` in groups that have as many messages, but for what the end of a capture cut off; the fewest
    first."""
    found: list[list[T]] = []
    for item in sorted(items, key=messages):
        least = messages(found[-1][0]) if found else 0
        if found and messages(item) - least <= min(NCCL_STEPS, least // 2):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def alike_long(pipes: Sequence[Pipe]) -> Ints:
    """How many messages of each pipe count."""
    counts = [len(pipe.rows) for pipe in pipes]
    least = {count: alike[0] for alike in as_many(counts, int) for count in alike}
    return np.array([least[count] for count in counts])


def reactions(pipes: Sequence[Pipe], times: Sequence[Times], *, idle: bool = False) -> list[Ints]:
    """For each message of each pipe how long nothing had left or reached its sender before; FAR: nothing
    ever. ``idle``: but for the time that messages took to leave."""
    events: dict[int, list[Ints]] = {}
    for pipe, each in zip(pipes, times, strict=True):
        events.setdefault(pipe.src, []).append(each.starts)
        if idle:
            events[pipe.src].append(each.ends)
        events.setdefault(pipe.dst, []).append(each.arrivals)
    known = {end: np.sort(np.concatenate(parts)) for end, parts in events.items()}
    found = []
    for pipe, each in zip(pipes, times, strict=True):
        mine = known[pipe.src]
        at = np.searchsorted(mine, each.starts, "left")
        found.append(np.where(at > 0, each.starts - mine[np.maximum(at - 1, 0)], FAR))
    return found
