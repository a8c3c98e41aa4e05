"""Sets of connections in lockstep in, the operations of their communicator out: turn by turn.

Of the sets that have operations left those make up the next turn that no other begins within (``Sends``),
and that make up an algorithm of NCCL (``Operations``): all of them if they do, else fewer.
An operation may seem to begin in its own middle, where receivers were slow; then several parts of it make up
one turn, on some sets perhaps more than on others. What fits nothing is left out.

Turns that look alike, with the same messages of the same sizes on the same sets, are recognised once
(``layouts``), by what one of them shows; all of them together show more.

A rank carries out the operations of a communicator one after the other, on all connections: so at every
rank all first messages of a turn come before those of the next, and nothing of the next begins before the
rank is through with this one. What NCCL has put into the slots of a connection may leave later than that
(src/include/device.h, NCCL_STEPS).
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from itertools import combinations, product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import layout_of
from dpuflow.matching.model import MOST
from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.credited import Lockstep
    from dpuflow.matching.lanes import Layout
    from dpuflow.matching.model import Instance, Job


MOST_SETS: Final = 6
"""Sets in lockstep whose combinations are tried."""
LONGEST: Final = NCCL_STEPS
"""So many places where an operation may begin are skipped at most: what uses up the slots."""
UNEVEN: Final = 3
"""On some sets alone, with other numbers of messages, so many: few pipes may be slow at the same message by
chance, twice at most."""
MOST_UNEVEN: Final = 4
"""Sets at once of which that is tried: their combinations grow with the power of their number."""
MOST_TRIES: Final = 1000
"""So many turns that fit nothing are looked at, beside one for each place where an operation may begin: where
sets fit nothing there is no end of combinations."""

SLOWER: Final = 4
"""Times as many are skipped where the number of ranks is known: the fewer parts fit, the less it takes to try
more, and receivers that are slow all along give their slots one by one."""
MOST_NUMBERS: Final = 4
"""Numbers of ranks that are tried, those of most messages."""

Alike = dict["Kinds", list["Turn"]]
"""Turns that look alike."""


class Reading:
    """Reads the operations of connected pipes, given the sets of them that are in lockstep."""

    def __init__(self, job: Job, sets: list[Lockstep]) -> None:
        self._longest = LONGEST
        self._sets, self._sends = sets, Sends(sets, job.columns.starts)
        self._operations = Operations(job, sets)
        count = sum(int(each.bounds[-1] - each.bounds[0]) * len(each.pipes) for each in sets)
        self._most_over = (1 - MOST) * count  # messages that may be left over
        self._barren: set[tuple[object, ...]] = set()  # parts that make up no uneven turn
        self._most = self._tries = MOST_TRIES + sum(map(len, sets))  # that may still fit nothing
        self._seen: Counter[Kinds] = Counter()  # how often turns of these kinds came
        self._skipped = False  # whether anything fitted nothing

    def instances(self) -> list[Instance]:
        """All operations that are understood."""
        alike = self._alike()
        if self._skipped and len(alike) > 1:
            self._seen = Counter({kinds: len(turns) for kinds, turns in alike.items()})
            alike = self._alike()
        every, enough = self._operations, MOST * self._messages(alike)
        self._longest *= SLOWER
        best = -1, 0
        for among in self._numbers_of_ranks(alike):
            self._operations, self._barren, self._tries = every.of_ranks(among), set(), self._most
            again = self._alike()
            worth = self._held(again), self._messages(again)
            if worth[1] >= enough and worth > best:
                best, alike, found = worth, again, self._operations
        self._operations = every if best[0] < 0 else found
        return [instance for turns in alike.values() for instance in self._operations.made(turns)]

    def _numbers_of_ranks(self, alike: Alike) -> list[int]:
        """How many ranks rings seem to have, those first that most messages speak for, if operations of one
        communicator seem to have been of several numbers: parts of one may look like one of others."""
        count: Counter[int] = Counter()
        for kinds, turns in alike.items():
            layout = self._operations.layout(turns[0])
            count[layout.among if layout else 0] += self._messages({kinds: turns})
        del count[0]
        found = sorted(count, key=lambda ranks: (count[ranks], ranks), reverse=True)
        return found[:MOST_NUMBERS] if len(found) > 1 else []

    def _held(self, alike: Alike) -> int:
        """How many messages were seen to be what their sender had got, as these turns have it."""
        layouts = ((self._operations.layout(turns[0]), len(turns)) for turns in alike.values())
        return sum(layout.held * count for layout, count in layouts if layout)

    def _messages(self, alike: Alike) -> int:
        """How many messages these turns have."""
        return sum(
            self._operations.messages(part) * len(self._sets[part[0]].pipes) * len(turns)
            for turns in alike.values()
            for part in turns[0]
        )

    def _alike(self) -> Alike:
        alike: Alike = {}
        self._skipped = False
        for turn in self._turns():
            kinds = self._operations.kinds_of(turn)
            alike.setdefault(kinds, []).append(turn)
            self._seen[kinds] += 1
        return alike

    def _turns(self) -> Iterator[Turn]:
        """Turns in order, each with all sets that take part; what fits nothing is left out."""
        if self._sends.is_even():
            numbers = range(len(self._sets))
            even = [tuple((number, j, j + 1) for number in numbers) for j in range(len(self._sets[0]))]
            if all(map(self._operations.layout, even)):
                yield from even
                return
        at, over = [0] * len(self._sets), self._most_over
        usual: tuple[int, ...] = ()
        while left := self._sends.left(at):
            turn = self._next(at, left[:MOST_SETS], usual)
            if turn is None:
                # What begins first fits nothing: go on behind it.
                self._skipped = True
                part = left[0], at[left[0]], at[left[0]] + 1
                if part[-1] < len(self._sets[left[0]]):  # the last one may have been cut off
                    over -= self._operations.messages(part) * len(self._sets[left[0]].pipes)
                if over < 0:
                    return  # nobody will ask for the rest
                at[left[0]] += 1
                continue
            for number, _, end in turn:
                at[number] = end
            usual = tuple(number for number, _, _ in turn)
            yield turn

    def _next(self, at: list[int], left: list[int], usual: tuple[int, ...]) -> Turn | None:
        """The next turn: as many sets as make up an operation that none of the others began within."""
        choices = [c for size in range(len(left), 0, -1) for c in combinations(sorted(left), size)]
        if usual in choices and self._sends.is_over(usual, at, left):
            choices.insert(0, usual)
        # What begins on some sets within an operation on others is a part of it; so it goes by the times.
        apart = [chosen for chosen in choices if self._sends.is_apart(chosen, at, left)]
        for possible in (apart, choices) if len(apart) < len(choices) else (choices,):
            turn = self._even(possible, at, left) or self._uneven(possible, at)
            if turn is not None:
                return turn
        return None

    def _even(self, choices: Sequence[tuple[int, ...]], at: list[int], left: list[int]) -> Turn | None:
        """A turn of one of ``choices`` in which all sets have as many of their operations."""
        for chosen in choices:
            if self._sends.is_next(chosen, at, left):
                turn = tuple((number, at[number], at[number] + 1) for number in chosen)
                if self._fits(turn):
                    return self._longer(turn, at)
        # A receiver that is slow on all connections at once may look like a beginning.
        for length in range(2, self._longest + 1):
            if all(at[number] + length <= len(self._sets[number]) for number in left):
                turn = tuple((number, at[number], at[number] + length) for number in sorted(left))
                if self._fits(turn):
                    return turn
        return None

    def _fits(self, turn: Turn) -> bool:
        """Whether ``turn`` is an operation; not of kinds that are new once too many fitted nothing."""
        known = self._operations.is_known(turn)
        if not known and self._tries <= 0:
            return False
        fits = bool(self._operations.layout(turn))
        self._tries -= not (known or fits)
        return fits

    def _longer(self, turn: Turn, at: list[int]) -> Turn:
        """``turn``, or what begins with it and came more often: its parts may look like operations."""
        best, kinds_of = turn, self._operations.kinds_of
        if self._seen[kinds_of(turn)] < max(self._seen.values(), default=0):
            for length in range(2, self._longest + 1):
                more = tuple((number, at[number], at[number] + length) for number, _, _ in turn)
                if any(end > len(self._sets[number]) for number, _, end in more):
                    break
                if self._seen[kinds_of(more)] > self._seen[kinds_of(best)]:
                    best = more
        return best

    def _uneven(self, choices: Sequence[tuple[int, ...]], at: list[int]) -> Turn | None:
        """A turn of one of ``choices`` that has several parts of an operation, on some sets more than on
        others."""
        choices = [chosen for chosen in choices if len(chosen) > 1]
        parts = {number: self._parts(number, at[number]) for number in sorted(set().union(*choices))}
        # What fitted nothing once does not fit when it comes again.
        kinds = ((self._operations.kind_of(part), part[2] - part[1]) for n in parts for part in parts[n])
        alike = (*choices, *kinds)
        if alike in self._barren or self._tries <= 0:
            return None
        for chosen in choices:
            for turn in self._mixed([parts[number] for number in chosen]):
                if self._fits(turn):
                    return turn
                if self._tries <= 0:
                    return None
        self._barren.add(alike)
        return None

    def _parts(self, number: int, begin: int) -> list[Part]:
        """What may be an operation's part on the set, the shortest first: all with the same buffers."""
        each = self._sets[number]
        slots = each.slots[begin : begin + self._longest]
        same = (slots == slots[0]).tolist()
        length = same.index(False) if False in same else len(same)
        return [(number, begin, begin + k) for k in range(1, length + 1)]

    def _mixed(self, parts: list[list[Part]]) -> Iterator[Turn]:
        """Turns of one of the ``parts`` of each set, not all of one: those of as many messages first (rings
        have that), then all of the shortest parts."""
        by_length = [{self._operations.messages(part): part for part in mine} for mine in parts]
        for messages in sorted(set(by_length[0]).intersection(*by_length[1:])):
            turn = tuple(each[messages] for each in by_length)
            if any(end - begin > 1 for _, begin, end in turn):
                yield turn
        if len(parts) <= MOST_UNEVEN:
            for turn in product(*(mine[:UNEVEN] for mine in parts)):
                if len({end - begin for _, begin, end in turn}) > 1:
                    yield turn


class Kinds(NamedTuple):
    """Turns that look alike: which sets take part, and for each the kind of its messages."""

    sets: tuple[int, ...]
    kinds: tuple[int, ...]


class Operations:
    """The operations of one communicator's sets."""

    def __init__(self, job: Job, sets: Sequence[Lockstep]) -> None:
        self.sets, self.among = sets, 0  # ``among``: how many ranks its rings have, 0 where that is not known
        self._job, self._columns = job, job.columns
        self._ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        self._sizes = [self._columns.sizes[each.rows] for each in sets]
        # Message by message, so that what an operation carried lies together.
        self._content = [np.ascontiguousarray(sizes.T) for sizes in self._sizes]
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._kind_of: dict[Part, int] = {}
        self._found: dict[Kinds, tuple[Turn, Layout | None]] = {}  # as seen in one turn

    def messages(self, part: Part) -> int:
        """How many messages each connection of the set has in ``part``."""
        number, begin, end = part
        return int(self.sets[number].bounds[end] - self.sets[number].bounds[begin])

    def kind_of(self, part: Part) -> int:
        """A number for the messages of ``part``: their sizes, and what their entries announced."""
        if part not in self._kind_of:
            number, begin, end = part
            each = self.sets[number]
            content = self._content[number][each.bounds[begin] : each.bounds[end]].tobytes()
            key = number, content + int(each.slots[begin]).to_bytes(8, "little")
            self._kind_of[part] = self._numbers.setdefault(key, len(self._numbers))
        return self._kind_of[part]

    def kinds_of(self, turn: Turn) -> Kinds:
        """What all turns that look like ``turn`` share."""
        return Kinds(tuple(part[0] for part in turn), tuple(map(self.kind_of, turn)))

    def is_known(self, turn: Turn) -> bool:
        """Whether a turn that looks like it was looked at before."""
        return self.kinds_of(turn) in self._found

    def layout(self, turn: Turn) -> Layout | None:
        """What ``turn`` is, if it is one operation; all that look alike are the same."""
        kinds = self.kinds_of(turn)
        if kinds not in self._found:
            self._found[kinds] = turn, self._recognised([turn])
        return self._found[kinds][1]

    def of_ranks(self, among: int) -> Operations:
        """The same, with rings of ``among`` ranks only; kinds have the same numbers."""
        other = copy(self)
        other.among, other._found = among, {}
        return other

    def made(self, turns: list[Turn]) -> Iterator[Instance]:
        """The collectives of ``operations``, which look alike."""
        one, layout = self._found[self.kinds_of(turns[0])]
        if turns != [one]:  # all of them show more
            every = self._recognised(turns)
            # What one of them may be by itself not all of them are.
            partly = every is None and self._job.near is not None
            if partly or (every and layout and every.named != layout.named):
                yield from self._told_apart(turns)
                return
            layout = every or layout
        yield from self._instances(turns, layout)

    def _told_apart(self, turns: list[Turn]) -> Iterator[Instance]:
        """The same where they are not all one operation: an all_gather and a reduce_scatter have the same
        messages, only their content tells them apart."""
        same: dict[object, list[Turn]] = {}
        for turn in turns:
            own = self._recognised([turn])
            same.setdefault(own and own.named, []).append(turn)
        for mine in same.values():
            yield from self._instances(mine, self._recognised(mine))

    def _recognised(self, turns: Sequence[Turn]) -> Layout | None:
        return layout_of(self._job, self._lanes(turns), self._ends, self.among)

    def _lanes(self, turns: Sequence[Turn]) -> list[Lane]:
        lanes = []
        for place, (number, begin, end) in enumerate(turns[0]):
            each = self.sets[number]
            low, high = each.bounds[begin], each.bounds[end]
            # (connections, turns, messages), laid out in that order, as kernels want it.
            rows = np.ascontiguousarray(each.rows[:, self._places(turns, place)])
            starts, arrivals = self._columns.starts[rows], self._columns.arrivals[rows]
            samples, sizes = self._columns.samples[rows], self._sizes[number][:, low:high]
            slot = int(each.slots[begin])
            lanes += [
                Lane(pipe.src, pipe.dst, slot, *parts)
                for pipe, *parts in zip(each.pipes, sizes, starts, arrivals, samples, strict=True)
            ]
        return lanes

    def _places(self, turns: Sequence[Turn], place: int) -> Ints:
        """Which messages of the set at ``place`` each of ``operations`` has: (turns, messages)."""
        part = turns[0][place]
        begins = self.sets[part[0]].bounds[[turn[place][1] for turn in turns]]
        return np.asarray(begins[:, None] + np.arange(self.messages(part)), np.int64)

    def _instances(self, turns: list[Turn], layout: Layout | None) -> Iterator[Instance]:
        """The collectives of ``operations``, each of which is the operation of ``layout``."""
        if layout is None:
            return
        columns = []
        for place, (number, _, _) in enumerate(turns[0]):
            mine = self.sets[number].rows[:, self._places(turns, place)]
            columns.append(mine.transpose(1, 0, 2).reshape(len(turns), -1))
        rows = np.concatenate(columns, axis=1)
        rows = np.take_along_axis(rows, np.argsort(self._columns.starts[rows], axis=1, kind="stable"), 1)
        yield from (layout.made(mine, self._job.nodes) for mine in rows)


Part = tuple[int, int, int]
"""The number of a set, and from the how-manieth of its operations to the how-manieth."""
Turn = tuple[Part, ...]
"""For each set that takes part its part."""


class Sends:
    """When ranks sent on each of several sets, by its operations.

    ``at[k]`` is the number of set ``k``'s next operation; ``left`` are sets that have one, ``chosen`` some of
    them.
    """

    def __init__(self, sets: Sequence[Lockstep], starts: Ints) -> None:
        self._count = [len(each) for each in sets]
        ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        place = {end: number for number, end in enumerate(ends)}
        # Of each set: (operations, ranks); far in the future and NEVER of ranks that do not send on it.
        self._first, self._last, self._filled = (
            [np.full((len(each), len(ends)), fill) for each in sets] for fill in (FAR, NEVER, NEVER)
        )
        self._half: list[Ints] = []  # of each operation: half of its messages had left somewhere
        for number, each in enumerate(sets):
            begin, end = each.bounds[:-1], each.bounds[1:]
            first, last, filled, half = (
                starts[each.rows[:, at]]
                for at in (begin, end - 1, np.maximum(end - 1 - NCCL_STEPS, begin), (begin + end) // 2)
            )
            first = np.where(first == NEVER, FAR, first)
            self._half.append(half.min(axis=0))
            for row, pipe in enumerate(each.pipes):
                column = place[pipe.src]
                for times, found, outer in (
                    (self._first[number], first[row], np.minimum),
                    (self._last[number], last[row], np.maximum),
                    (self._filled[number], filled[row], np.maximum),
                ):
                    outer(times[:, column], found, out=times[:, column])
        self._begun = [first.min(axis=1) for first in self._first]

    def left(self, at: Sequence[int]) -> list[int]:
        """Sets that have operations left, in order of when the next one begins."""
        left = [number for number, here in enumerate(at) if here < self._count[number]]
        return sorted(left, key=lambda number: int(self._begun[number][at[number]]))

    def is_even(self) -> bool:
        """Whether all sets have as many operations, each one's first messages before those of the next."""
        if len(set(self._count)) != 1:
            return False
        every = np.stack(self._first)
        latest = np.where(every == FAR, NEVER, every).max(axis=0)
        return len(every) == 1 or bool((latest[:-1] <= every.min(axis=0)[1:]).all())

    def is_next(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether no rank sent on other sets, or again on these, before it had begun on all of ``chosen``."""
        every = np.stack([self._first[number][at[number]] for number in chosen])
        latest = np.where(every == FAR, NEVER, every).max(axis=0)
        later = [self._first[number][at[number]] for number in left if number not in chosen]
        later += [self._first[n][at[n] + 1] for n in chosen if at[n] + 1 < self._count[n]]
        return all(bool((when >= latest).all()) for when in later)

    def is_over(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether no rank sent on other sets before its last message on ``chosen``."""
        return self._is_through(self._last, chosen, at, left)

    def is_apart(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether nothing begins on other sets within the operation on ``chosen``: it would be a part of it.

        That is before the rank was through with it, but for what lay in its slots; or anywhere before any
        connection was half through, for no rank ends an operation before all others have begun it.
        """
        half = min(int(self._half[number][at[number]]) for number in chosen)
        others = [int(self._begun[number][at[number]]) for number in left if number not in chosen]
        return min(others, default=half) >= half and self._is_through(self._filled, chosen, at, left)

    def _is_through(
        self, times: list[Ints], chosen: Sequence[int], at: Sequence[int], left: Sequence[int]
    ) -> bool:
        every = np.stack([times[number][at[number]] for number in chosen]).max(axis=0)
        later = [self._first[number][at[number]] for number in left if number not in chosen]
        return all(bool((when >= every).all()) for when in later)
