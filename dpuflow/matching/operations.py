"""What turns are: turns of sets of connections in, operations and their collectives out.

Turns that look alike, with the same messages of the same sizes on the same sets, are recognised once
(``layouts``), by what one of them shows; all of them together show more.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import layout_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.lanes import Layout
    from dpuflow.matching.model import Instance
    from dpuflow.matching.pipes import Lockstep
    from dpuflow.matching.streams import Columns
    from dpuflow.matching.turns import Part, Turn


class Kinds(NamedTuple):
    """Turns that look alike: which sets take part, and for each the kind of its messages."""

    sets: tuple[int, ...]
    kinds: tuple[int, ...]


class Operations:
    """The operations of one communicator's sets.

    ``position``, ``nodes``, ``near`` and ``buffers``: see ``layout_of``.
    """

    def __init__(
        self,
        columns: Columns,
        sets: Sequence[Lockstep],
        position: NDArray[np.int64],
        nodes: NDArray[np.int64],
        near: frozenset[int] | None,
        buffers: Mapping[int, Buffer],
    ) -> None:
        self.sets, self.among = sets, 0  # ``among``: how many ranks its rings have, 0 where that is not known
        self._columns, self._position, self._nodes, self._near = columns, position, nodes, near
        self._buffers = buffers
        self._ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        self._sizes = [columns.sizes[each.rows] for each in sets]
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
        """The collectives of ``turns``, which look alike."""
        one, layout = self._found[self.kinds_of(turns[0])]
        if turns != [one]:  # all of them show more
            every = self._recognised(turns)
            if every is None and self._near is not None:
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
        lanes = self._lanes(turns)
        return layout_of(
            lanes, self._position, self._nodes, self._ends, self._near, self.among, self._buffers
        )

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
        """Which messages of the set at ``place`` each of ``turns`` has: (turns, messages)."""
        part = turns[0][place]
        begins = self.sets[part[0]].bounds[[turn[place][1] for turn in turns]]
        return np.asarray(begins[:, None] + np.arange(self.messages(part)), np.int64)

    def _instances(self, turns: list[Turn], layout: Layout | None) -> Iterator[Instance]:
        """The collectives of ``turns``, each of which is the operation of ``layout``."""
        if layout is None:
            return
        columns = []
        for place, (number, _, _) in enumerate(turns[0]):
            mine = self.sets[number].rows[:, self._places(turns, place)]
            columns.append(mine.transpose(1, 0, 2).reshape(len(turns), -1))
        rows = np.concatenate(columns, axis=1)
        rows = np.take_along_axis(rows, np.argsort(self._columns.starts[rows], axis=1, kind="stable"), 1)
        yield from (layout.made(mine, self._nodes) for mine in rows)
