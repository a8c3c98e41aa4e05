"""What turns are: turns of sets of connections in, operations and their collectives out.

Turns that look alike, with the same messages of the same sizes on the same sets, are recognised once
(``layouts``), by what one of them shows; all of them together show more.

Turns: which operations of several sets of connections may be one, by when each rank sent.

In: sets of connections in lockstep (``pipes``). A rank carries out the operations of a communicator one after
the other, on all connections: so at every rank all first messages of a turn come before those of the next,
and nothing of the next begins before the rank is through with this one. What NCCL has put into the slots of a
connection may leave later than that (src/include/device.h, NCCL_STEPS).
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import layout_of
from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.lanes import Layout
    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.pipes import Lockstep


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
            if every is None and self._job.near is not None:
                return  # what one of them may be by itself not all of them are
            if every and layout and every.named != layout.named:
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
            rows = each.rows[:, self._places(turns, place)]  # (connections, turns, messages)
            starts, arrivals = self._columns.starts[rows], self._columns.arrivals[rows]
            samples, sizes = self._columns.samples[rows], self._sizes[number][:, low:high]
            slot = int(each.slots[begin])
            lanes += [
                Lane(pipe.src, pipe.dst, slot, *parts)
                for pipe, *parts in zip(each.pipes, sizes, starts, arrivals, samples, strict=True)
            ]
        return lanes

    def _places(self, turns: Sequence[Turn], place: int) -> NDArray[np.int64]:
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


STAGED: Final = NCCL_STEPS
"""Messages of a connection that may leave when their rank is through with the operation."""
_FAR: Final = np.iinfo(np.int64).max

Part = tuple[int, int, int]
"""The number of a set, and from the how-manieth of its operations to the how-manieth."""
Turn = tuple[Part, ...]
"""For each set that takes part its part."""


class Sends:
    """When ranks sent on each of several sets, by its operations.

    ``at[k]`` is the number of set ``k``'s next operation; ``left`` are sets that have one, ``chosen`` some of
    them.
    """

    def __init__(self, sets: Sequence[Lockstep], starts: NDArray[np.int64]) -> None:
        self._count = [len(each) for each in sets]
        ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        place = {end: number for number, end in enumerate(ends)}
        # Of each set: (operations, ranks); far in the future and NEVER of ranks that do not send on it.
        self._first, self._last, self._filled = (
            [np.full((len(each), len(ends)), fill) for each in sets] for fill in (_FAR, NEVER, NEVER)
        )
        self._half: list[NDArray[np.int64]] = []  # of each operation: half of its messages had left somewhere
        for number, each in enumerate(sets):
            begin, end = each.bounds[:-1], each.bounds[1:]
            first, last, filled, half = (
                starts[each.rows[:, at]]
                for at in (begin, end - 1, np.maximum(end - 1 - STAGED, begin), (begin + end) // 2)
            )
            first = np.where(first == NEVER, _FAR, first)
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
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
        return len(every) == 1 or bool((latest[:-1] <= every.min(axis=0)[1:]).all())

    def is_next(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether no rank sent on other sets, or again on these, before it had begun on all of ``chosen``."""
        every = np.stack([self._first[number][at[number]] for number in chosen])
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
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
        self,
        times: list[NDArray[np.int64]],
        chosen: Sequence[int],
        at: Sequence[int],
        left: Sequence[int],
    ) -> bool:
        every = np.stack([times[number][at[number]] for number in chosen]).max(axis=0)
        later = [self._first[number][at[number]] for number in left if number not in chosen]
        return all(bool((when >= every).all()) for when in later)
