"""NCCL over TCP: messages of its sockets in, collectives out, and what is left over.

A message's size stands before it (``framing``); the sizes are those of NCCL's chunks and slices as over RoCE,
so ``layouts`` tells what an operation's messages make together. There are no clear-to-send entries, so where
operations begin is told by pauses. Pauses within an operation may be as long as those before one (all wait
for a rank that is late), so no length of a pause is a boundary by itself: for one least length after the
other the cuts with such pauses (``boundaries``) are tried. Of these as many are left out as it takes for the
parts to make up operations that are possible (``boundaries``); what explains most counts, and of equals where
first messages paused longest against later ones.

Where only some nodes were captured, what the pauses of the others were is not known: there the messages of
every connection repeat, and of the numbers of repetitions whose parts make up operations the one counts in
which ranks paused longest before their first message of an operation, against the later ones. Operations of
unlike bytes that follow each other without a pause are cut where all connections' sizes change
(``_in_sequence``).

Connections that together make up nothing may be of several communicators: a tree or ring beside others is
told by the number of its messages (``_beside``), what has the same ranks on other ways by these
(``_by_ways``). NCCL 2.30, src/transport/net_socket.cc.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import connected
from dpuflow.matching.boundaries import (
    Cuts,
    ahead_of,
    alike_long,
    as_many,
    chained_cuts,
    counted_cuts,
    cuts_at,
    cuts_of,
    reactions,
    times_of,
)
from dpuflow.matching.credited import Pipe, connections_of, joined
from dpuflow.matching.meanings import Meanings, Part, contrast_of
from dpuflow.matching.model import HALF, MOST, TWICE, placed
from dpuflow.matching.scoring import CLEAR, NO_CONTRAST
from dpuflow.matching.structured import may_be_sends, single_sends, uneven_calls, without_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from numpy.typing import NDArray

    from dpuflow.arrays import Ints
    from dpuflow.matching.boundaries import Times
    from dpuflow.matching.model import Instance, Job


LONGEST: Final = 4096
"""Messages of an operation on one connection at most, that are tried: 2 GiB of a tree's."""
MOST_GROUPS: Final = 3
"""Communicators that a rank is in: of tensor, data and pipeline or context parallelism."""
MOST_PLACES: Final = 64
"""Places of what repeats at which all sizes change, at most."""
SAMPLE: Final = 64
"""Operations that show where ranks pause, and places that show whether sizes repeat."""


def socket_instances(job: Job, rows: Ints) -> tuple[list[Instance], Ints]:
    """The collectives among ``rows``, messages of NCCL's sockets, and the rows that are part of none."""
    if not len(rows):
        return [], rows
    exchanges = job.exchanges
    dealt, at, end = connections_of(exchanges, rows)
    pipes = []
    for number, (low, high) in enumerate(zip(at.tolist(), end.tolist(), strict=True)):
        mine, first = dealt[low:high], exchanges[dealt[low]]
        none = np.zeros(0, np.int64)
        pipes.append((number, Pipe(int(first["src"]), int(first["dst"]), mine, 1, none.astype(bool), none)))
    found: list[Instance] = []
    left = []
    together = [[pipe for _, pipe in members] for members in joined(pipes, job.nodes)]
    for own in together if job.of(rows).near is None else _apart(together):
        seen = job.of(np.concatenate([pipe.rows for pipe in own]))
        if seen.near is None:
            calls, called = uneven_calls(seen, [((pipe.src, pipe.dst), pipe.rows) for pipe in own])
            found += calls
            own = [pipe for pipe in own if not np.isin(pipe.rows[:1], called).any()]
        for members, instances in _read(job, own) if own else ():
            found += [placed(instance, seen.near) for instance in instances or ()]
            left += [pipe.rows for pipe in members] if instances == [] else []
    return found, np.sort(np.concatenate(left)) if left else rows[:0]


def _read(job: Job, pipes: list[Pipe]) -> Iterator[tuple[list[Pipe], list[Instance] | None]]:
    """Connected ``pipes`` with the operations that they carry: as one communicator's, or as several that
    share ranks, none of which makes sense of all. None where these may be any number of operations: no other
    reading knows more."""
    seen = job.of(np.concatenate([pipe.rows for pipe in pipes]))
    sure = seen.near is None
    instances = (spoken(seen, pipes) if sure else []) or _repeated(seen, pipes, sure=sure)
    for part in _beside(pipes) if instances == [] and sure else ():
        told = spoken(job.of(np.concatenate([pipe.rows for pipe in part])), part)
        # Stages of a pipeline follow each other in order; a tree of NCCL over ranks in order has leaves.
        if told and (not _in_a_row(part) or all(each.free_rows() for each in told)):
            yield part, told
            own = {id(pipe.rows) for pipe in part}
            # What makes no operation beside a communicator of the same ranks they send each other.
            for members, read in _read(job, [pipe for pipe in pipes if id(pipe.rows) not in own]):
                yield members, read or single_sends(job, [(pipe[:2], pipe.rows) for pipe in members])
            return
    parts = _by_ways(pipes) if instances == [] and sure else []
    if len(parts) < 2:
        yield pipes, instances and without_answers(job.columns, job.exchanges, instances)
        return
    alike: dict[tuple[bytes, ...], list[list[Pipe]]] = {}
    for part in parts:
        sizes = tuple(sorted(job.columns.sizes[pipe.rows].tobytes() for pipe in part))
        alike.setdefault(sizes, []).append(part)
    for same in alike.values():
        yield from _alike(job, same)


def _beside(pipes: Sequence[Pipe]) -> list[list[Pipe]]:
    """Those of ``pipes`` that may be a communicator's beside others: trees and rings by the number of their
    messages."""
    alike = as_many(pipes, _messages)
    found = []
    for own in alike if len(alike) > 1 else ():
        for part in connected(own, lambda pipe: pipe[:2]):
            ways = {pipe[:2] for pipe in part}
            back = {(dst, src) for src, dst in ways} & ways
            alone = max(Counter(src for src, _ in ways).values()) == 1
            if (back == ways and len(ways) > TWICE) or (not back and alone):
                found.append(part)
    return found


def _messages(pipe: Pipe) -> int:
    return len(pipe.rows)


def _in_a_row(pipes: Sequence[Pipe]) -> bool:
    """Whether nobody sends to more than two others, both ways: so do the stages of a pipeline, too."""
    ways = {pipe[:2] for pipe in pipes}
    most = max(Counter(src for src, _ in ways).values())
    return most <= TWICE and any((dst, src) in ways for src, dst in ways)


def _alike(job: Job, parts: Sequence[list[Pipe]]) -> Iterator[tuple[list[Pipe], list[Instance]]]:
    """Communicators whose connections have the same messages, with their operations.

    They are replicas, and carry out the same. Where one's pauses tell that it repeats an operation, the
    others do so as often, whatever theirs look like.
    """
    own = [job.of(np.concatenate([pipe.rows for pipe in part])) for part in parts]
    read = [spoken(mine, part) or _repeated(mine, part) or [] for mine, part in zip(own, parts, strict=True)]
    often = max((len(each) for each in read if len({(i.op, i.size) for i in each}) == 1), default=0)
    told = []
    for mine, part, instances in zip(own, parts, read, strict=True):
        again = _repeated(mine, part, often) if often >= TWICE and len(instances) != often else []
        told.append(again or instances)
    # Beside other communicators two ranks are stages of a pipeline as well.
    if any(may_be_sends(job.columns, job.exchanges, instances) for instances in told):
        every = [pipe for part in parts for pipe in part]
        yield every, single_sends(job, [(pipe[:2], pipe.rows) for pipe in every])
    else:
        yield from zip(parts, told, strict=True)


def _by_ways(pipes: Sequence[Pipe]) -> list[list[Pipe]]:
    """``pipes`` of pairs of ranks, which send both ways, each by itself, and of rings, which do not.

    Empty where that makes no grid of communicators: ranks in more of them than there are ways to share a
    model, or each in a pair with each other one, as sends to everybody are.
    """
    ways = {pipe[:2] for pipe in pipes}
    pairs: dict[frozenset[int], list[Pipe]] = {}
    rings: list[Pipe] = []
    for pipe in pipes:
        both = (pipe.dst, pipe.src) in ways
        (pairs.setdefault(frozenset(pipe[:2]), []) if both else rings).append(pipe)
    parts = [*pairs.values(), *connected(rings, lambda pipe: pipe[:2])]
    often = Counter(end for part in parts for end in {end for pipe in part for end in pipe[:2]})
    paired = len({end for pair in pairs for end in pair})
    if max(often.values()) > MOST_GROUPS or (paired > 2 and 2 * len(pairs) == paired * (paired - 1)):
        return []
    return parts


def _apart(together: list[list[Pipe]]) -> list[list[Pipe]]:
    """Connected pipes of some nodes; those with as many messages are one communicator's: what lies
    between parts of a ring was not seen."""
    alike = as_many(together, lambda own: max(map(_messages, own)))
    return [[pipe for own in each for pipe in own] for each in alike]


def _repeated(
    job: Job, pipes: Sequence[Pipe], often: int = 0, *, sure: bool = False
) -> list[Instance] | None:
    """The operations of connected pipes, if they repeat one (``often``, if not 0); of several ways those that
    pauses bear out best. ``sure``: None where no way's pauses stand out."""
    times = times_of(job.exchanges, job.columns, pipes)
    pauses = [reactions(pipes, times, idle=idle) for idle in (False, True)]
    whole = alike_long(pipes)
    sizes = [job.columns.sizes[pipe.rows[:n]] for pipe, n in zip(pipes, whole.tolist(), strict=True)]
    least = int(whole.min())
    best: tuple[float, int] = (-1.0, 0)
    chosen: tuple[Meanings, list[Part]] | None = None
    every = dict.fromkeys(least // m for m in range(1, min(least // TWICE, LONGEST) + 1))
    for count in (often,) if often else every:
        lengths = whole // count
        if (whole - count * lengths >= lengths).any():
            continue
        if not all(_repeats(size, m) for size, m in zip(sizes, lengths.tolist(), strict=True)):
            continue
        cuts = cuts_at(np.arange(count + 1)[:, None] * lengths, pipes, times, job.near)
        meanings = Meanings(job, pipes, cuts)
        parts = [Part(number, number + 1, 0) for number in range(count)]
        if not meanings.reads(0, 0, 1):
            continue
        contrast = contrast_of(parts[:SAMPLE], times, pauses, meanings)
        worth = NO_CONTRAST if contrast is None else round(contrast, 2), count
        if worth > best:
            best, chosen = worth, (meanings, parts)
    if chosen and sure and best[0] < CLEAR:
        return None
    if chosen is None and not often:
        return _in_sequence(job, pipes, times, pauses)
    return _enough(chosen[0].made(chosen[1]), pipes) if chosen else []


def _enough(found: list[Instance], pipes: Sequence[Pipe]) -> list[Instance]:
    """``found``, none where they leave too much over."""
    return found if sum(len(i.rows) for i in found) >= MOST * sum(map(_messages, pipes)) else []


def _in_sequence(
    job: Job, pipes: Sequence[Pipe], times: Sequence[Times], pauses: Sequence[Sequence[Ints]]
) -> list[Instance]:
    """Operations of unlike bytes that follow each other without a pause, again and again in the same order.

    All connections carry as many messages of each, so that all sizes change where the next one begins. What
    is repeated begins after a pause; nothing else is asked of times.
    """
    sizes = [job.columns.sizes[pipe.rows] for pipe in pipes]
    whole = alike_long(pipes)
    if (whole != whole[0]).any():
        return []
    ahead = ahead_of(sizes, whole)
    total = int(min(len(each) - a for each, a in zip(sizes, ahead.tolist(), strict=True)))
    own = np.stack([each[a : a + total] for each, a in zip(sizes, ahead.tolist(), strict=True)])
    longest = min(total // (TWICE + 1), LONGEST)
    # Most of what does not repeat shows in a few places.
    some = np.linspace(0, max(total - longest - 1, 0), SAMPLE).astype(np.int64)
    shown = (m for m in range(1, longest + 1) if (own[:, some + m] == own[:, some]).all())
    period = next((m for m in shown if (own[:, m:] == own[:, :-m]).all()), 0)
    pairs = np.sort(np.stack([own[:, :-1], own[:, 1:]]), axis=0)[:, :, : period + 1]
    change = (pairs[:, :, :-2] != pairs[:, :, 2:]).any(axis=0).all(axis=0)
    places = [0, *(np.flatnonzero(change) + 2).tolist()]
    if not period or not TWICE <= len(places) <= MOST_PLACES:
        return []
    count = total // period
    begins = np.r_[(period * np.arange(count)[:, None] + places).ravel(), count * period]
    meanings = Meanings(job, pipes, cuts_at(ahead + begins[:, None], pipes, times, job.near))
    # The fewest operations that one period is made of, from the back.
    step = len(places)
    way: list[list[Part] | None] = [None] * step + [[]]
    for low in range(step - 1, -1, -1):
        for high in range(low + 1, step + 1):
            rest, kind = way[high], low * MOST_PLACES + high
            known = way[low]
            fewer = rest is not None and (known is None or len(rest) + 1 < len(known))
            if fewer and rest is not None and meanings.reads(kind, low, high):
                way[low] = [Part(low, high, kind), *rest]
    parts = [
        Part(k * step + low, k * step + high, kind) for k in range(count) for low, high, kind in way[0] or ()
    ]
    first = [part for part in parts if part.begin % step == 0][:SAMPLE]
    contrast = contrast_of(first, times, pauses, meanings) or 0.0
    return _enough(meanings.made(parts), pipes) if contrast >= MOST else []


def _repeats(sizes: Ints, length: int) -> bool:
    """Whether ``sizes`` repeat after ``length`` messages."""
    return bool((sizes[length:] == sizes[: max(len(sizes) - length, 0)]).all())


STEP: Final = 2**0.5
"""From one least pause that is tried to the next."""
MERGED: Final = 8
"""Pauses within one operation, at most, that are as long as those before one: ranks wait for late ones."""
GRAIN: Final = 0.02
"""What makes no difference between shares of messages that are explained."""
CHANCE: Final = 0.05
"""By how much the contrast of as good readings differs: twice the error of a share of some fifty pauses."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class _Choice(NamedTuple):
    """Parts that are operations, and what speaks for them."""

    explained: float
    ordered: bool  # trees are those of NCCL over the default numbering
    contrast: float
    finer: bool  # more parts are better than fewer, if both explain as much
    parts: list[Part]


class _Clear(NamedTuple):
    """The parts that pauses bear out best, and their cuts."""

    contrast: float
    parts: list[Part]
    cuts: Cuts


def spoken(job: Job, pipes: Sequence[Pipe]) -> list[Instance]:
    """The operations of connected ``pipes``, seen at all nodes; none where they do not make sense."""
    return _Reader(job, pipes).instances()


class _Reader:
    def __init__(self, job: Job, pipes: Sequence[Pipe]) -> None:
        self.pipes = pipes
        self.ends = sorted({end for pipe in pipes for end in pipe[:2]})
        self.total = sum(len(pipe.rows) for pipe in pipes)
        self.times = times_of(job.exchanges, job.columns, pipes)
        self.cuts = cuts_of(pipes, self.times)
        self.meanings = Meanings(job, pipes, self.cuts)
        self.clear: _Clear | None = None
        self._reactions = [reactions(pipes, self.times, idle=idle) for idle in (False, True)]
        self._hashes = [_prefixes(job.columns.sizes[pipe.rows]) for pipe in pipes]

    def instances(self) -> list[Instance]:
        """Of several ways to cut the one that reads best."""
        sizes = [self.meanings.columns.sizes[pipe.rows] for pipe in self.pipes]
        best = self._or_by(counted_cuts(self.pipes, self.times, sizes), self._best())
        if self.clear is not None and (best is None or best.explained < 1):
            begins, ends = (
                self.clear.cuts.at[[getattr(part, end) for part in self.clear.parts]]
                for end in ("begin", "end")
            )
            best = self._or_by(chained_cuts(self.pipes, self.times, sizes, begins, ends), best)
        if best is None or best.explained < MOST:
            return []
        # Any messages make operations of unlike sizes, or of ranks that nobody saw; then pauses have to tell.
        kinds = {part.kind for part in best.parts}
        told = len(kinds) == 1 and not any(map(self.meanings.hides, kinds))
        return self.meanings.made(best.parts) if told or best.contrast >= CLEAR else []

    def _or_by(self, cuts: Cuts, best: _Choice | None) -> _Choice | None:
        """``best``, or what ``cuts`` lead to, if that is better; then they are the cuts from here on."""
        before, known = self.cuts, self.meanings
        self.cuts, self.meanings = cuts, known.over(cuts)
        other = self._best()
        if other is not None and (best is None or _better(other, best)):
            return other
        self.cuts, self.meanings = before, known
        return best

    def _best(self) -> _Choice | None:
        """What parts of one kind or another explain most, of all least pauses."""
        choices = [choice for chosen in self._chosen() if (choice := self._choice(chosen)) is not None]
        most = [choice for choice in choices if choice.explained >= HALF]
        if most:
            # A few follow others without a pause: for these all others need not be cut finer, nor elsewhere.
            clear = max(most, key=lambda choice: (choice.contrast, choice.explained))
            if self.clear is None or clear.contrast > self.clear.contrast:
                self.clear = _Clear(clear.contrast, clear.parts, self.cuts)
            kinds = frozenset(part.kind for part in clear.parts)
            again = (self._choice(chosen, kinds) for chosen in self._chosen())
            choices += [choice for choice in again if choice is not None]
        best: _Choice | None = None
        for choice in choices:
            if best is None or _better(choice, best):
                best = choice
        return best

    def _chosen(self) -> Iterator[Ints]:
        """The numbers of cuts with a least pause or more, the longest first, while kinds may be looked at."""
        gaps = self.cuts.gaps[1:-1]
        known = gaps[(gaps > 0) & (gaps != FAR)]
        if not len(known):
            return
        tried: set[int] = set()
        least = float(known.max())
        while least >= known.min() / STEP and not self.meanings.full:
            chosen = np.flatnonzero(np.r_[True, gaps >= least, True])
            least /= STEP
            if len(chosen) not in tried:
                tried.add(len(chosen))
                yield chosen

    # -- parts -------------------------------------------------------------------------------

    def _choice(self, chosen: Ints, known: Set[int] = frozenset()) -> _Choice | None:
        """Of the cuts numbered ``chosen`` those that part operations, above all of ``known`` kinds."""
        parts = self._inner(self._parts(chosen, known))
        return self._weighed(parts) if parts else None

    def _weighed(self, parts: list[Part]) -> _Choice:
        """``parts`` with what speaks for them."""
        contrast = contrast_of(parts, self.times, self._reactions, self.meanings)
        told = NO_CONTRAST if contrast is None else round(contrast, 2)
        # A chain's chunks each look like an operation, and a tree's if ranks send once in each.
        finer = contrast is not None and not any(self.meanings.is_chain(part.kind) for part in parts)
        ordered = sum(bool(self.meanings.free(part.kind)) for part in parts) > len(parts) / 2
        return _Choice(round(self._explained(parts), 2), ordered, told, finer, parts)

    def _parts(self, chosen: Ints, known: Set[int] = frozenset()) -> list[Part]:
        """Operations between the cuts numbered ``chosen``, with few of these within (``MERGED``).

        Those explain most, then those of most parts; of kinds that are ``known`` first of all, and then no
        more parts than it takes.
        """
        finer = -1 if known else 1
        at = self.cuts.at[chosen]
        count = len(chosen)
        reach = min(MERGED, count - 1)
        kinds = np.zeros((count, reach + 1), np.uint64)
        weight = np.zeros((count, reach + 1), np.int64)
        for length in range(1, reach + 1):
            kinds[:-length, length], weight[:-length, length] = self._kinds(at[:-length], at[length:])
        taken = [0] * count
        table, weights = kinds.tolist(), weight.tolist()
        values = [(0, 0, 0)] * count  # messages of known kinds, messages explained, parts
        for j in range(1, count):
            values[j] = values[j - 1]
            for length in range(1, min(reach, j) + 1):
                i = j - length
                kind = table[i][length]
                own = weights[i][length] if kind in known else 0
                told = values[i][0] + own, values[i][1] + weights[i][length], values[i][2] + finer
                if told > values[j] and self.meanings.reads(kind, chosen[i], chosen[j]):
                    values[j], taken[j] = told, length
        parts = []
        j = count - 1
        while j > 0:
            i = j - max(taken[j], 1)
            if taken[j]:
                parts.append(Part(int(chosen[i]), int(chosen[j]), table[i][taken[j]]))
            j = i
        return parts[::-1]

    def _kinds(self, low: Ints, high: Ints) -> tuple[NDArray[np.uint64], Ints]:
        """A number for the sizes of all messages from each of the cuts ``low`` to that of ``high``, and how
        many they are."""
        kinds = np.zeros(len(low), np.uint64)
        with np.errstate(over="ignore"):
            for number, (prefix, power) in enumerate(self._hashes):
                a, b = low[:, number], high[:, number]
                own = prefix[b] - prefix[a] * power[b - a]
                kinds += (own + (b - a).astype(np.uint64)) * _MULTIPLIER ** np.uint64(number + 1)
        return kinds, (high - low).sum(axis=1)

    def _inner(self, parts: list[Part]) -> list[Part]:
        """``parts`` without those at the ends that may be what the captures cut, unlike any within.

        And without what runs several of the others together.
        """
        inside: dict[int, int] = {}
        for part in parts[1:-1]:
            inside[part.kind] = inside.get(part.kind, 0) + self._messages(part)
        for kind in self.meanings.at_odds(inside):
            del inside[kind]
        return [part for part in parts if part.kind in inside]

    def _messages(self, part: Part) -> int:
        return int((self.cuts.at[part.end] - self.cuts.at[part.begin]).sum())

    def _explained(self, parts: list[Part]) -> float:
        """The share of messages in ``parts``, of those that captures need not have cut."""
        own = [self._messages(part) for part in parts]
        longest, first, last = max(own), parts[0].begin, parts[-1].end
        before = int(self.cuts.at[first].sum())
        behind = self.total - int(self.cuts.at[last].sum())
        asked = self.total - min(before, longest) - min(behind, longest)
        return sum(own) / max(asked, 1)


def _better(one: _Choice, other: _Choice) -> bool:
    """What explains more is better, then what pauses bear out, then fewer kinds of operations.

    Of equals more operations are, since two may look like one of twice the bytes, unless parts of one look
    like operations.
    """
    mine, theirs = ((each.explained // GRAIN, each.ordered) for each in (one, other))
    if mine != theirs:
        return mine > theirs
    if abs(one.contrast - other.contrast) > CHANCE:
        return one.contrast > other.contrast
    few, many = (len({part.kind for part in each.parts}) for each in (one, other))
    if few != many:
        return few < many
    fewer, more = sorted((one, other), key=lambda each: len(each.parts))
    return len(one.parts) != len(other.parts) and one is (more if more.finer else fewer)


def _prefixes(sizes: Ints) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Polynomial hashes of all beginnings of ``sizes``, and the powers of what they were made with."""
    prefix, power = np.zeros(len(sizes) + 1, np.uint64), np.ones(len(sizes) + 1, np.uint64)
    total, factor, mask = 0, 1, (1 << 64) - 1
    base = 0xD6E8FEB86659FD93
    for place, size in enumerate(sizes.tolist()):
        total = (total * base + size + 1) & mask
        factor = factor * base & mask
        prefix[place + 1], power[place + 1] = total, factor
    return prefix, power
