"""Sets of connections in lockstep in, the operations of their communicator out: turn by turn.

Of the sets that have operations left those make up the next turn that no other begins within
(``operations``), and that make up an algorithm of NCCL (``operations``): all of them if they do, else fewer.
An operation may seem to begin in its own middle, where receivers were slow; then several parts of it make up
one turn, on some sets perhaps more than on others. What fits nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import TYPE_CHECKING, Final

from dpuflow.matching.levels import MOST
from dpuflow.matching.operations import Operations, Sends
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.operations import Kinds, Part, Turn
    from dpuflow.matching.pipes import Lockstep

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
        if not self._operations.is_known(turn):
            if self._tries <= 0:
                return False
            self._tries -= not self._operations.layout(turn)
        return bool(self._operations.layout(turn))

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
