"""Operations of NCCL's net_ib, cut where its clear-to-send entries say that one begins.

In: connections and what each message's clear-to-send entry announced. Out: collectives, and the connections
that carry something else. One mechanism serves rings, chains, trees and PAT; no pause and no guess of sizes
enters:

1. Connections that carry the same operations are in lockstep: the same numbers of messages, and the places
   where an operation may begin are the same on all of them (``pipes``).
2. Each rank carries out the operations of a communicator one after the other, on all connections. So the
   turns of several sets in lockstep go together if at every rank all first messages of a turn come before
   those of the next one.
3. What takes part in a turn must make up one algorithm of NCCL with sizes that it can have (``layouts``).
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.collectives.buffers import DEFAULT
from dpuflow.collectives.communicators import communicators, completed, without
from dpuflow.collectives.layouts import Lane, layout_of
from dpuflow.collectives.model import Instance, placed
from dpuflow.collectives.pipes import begun_together, in_lockstep, in_turn, pipes_of
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.buffers import Buffer
    from dpuflow.collectives.layouts import Layout
    from dpuflow.collectives.pipes import Lockstep, Pipe
    from dpuflow.collectives.streams import Columns
    from dpuflow.tables import Rows

EXPLAINED: Final = 0.9
"""What leaves more than a tenth of the messages over has not understood them."""
MOST_SETS: Final = 6
"""Sets in lockstep whose combinations are tried."""
LONGEST: Final = 8
"""So many places where an operation may begin are skipped at most: NCCL_STEPS, what uses up the slots."""
UNEVEN: Final = 3
"""On some sets alone, so many: few pipes may be slow at the same message by chance, twice at most."""
MOST_UNEVEN: Final = 4
"""Sets at once of which that is tried: their combinations grow with the power of their number."""
MOST_TRIES: Final = 10_000
"""So many uneven turns are tried in all: where sets fit nothing there is no end of combinations."""
_FAR = np.iinfo(np.int64).max

Turn = tuple[tuple[int, int, int], ...]
"""For each set that takes part: its number, and its bounds from the how-manieth to the how-manieth."""


def credited_instances(
    exchanges: Rows,
    columns: Columns,
    connections: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    announced: NDArray[np.int64],
    position: NDArray[np.int64],
    near: frozenset[int] | None,
    nodes: NDArray[np.int64],
    until: NDArray[np.int64] | None = None,
    buffers: Mapping[int, Buffer] = DEFAULT,
) -> tuple[list[Instance], NDArray[np.bool_]]:
    """Collectives, and whether each connection is understood, or can be nothing else.

    ``connections`` are rows of ``exchanges`` by connection, where each one's begin and where they end;
    ``announced``: bytes that the entry of each row allowed, 0 where it was not seen; ``position``,
    ``near``, ``nodes``, ``until`` and ``buffers`` as in ``structured_instances``.
    """
    dealt, at, end = connections
    told = np.zeros(len(at), bool)
    found: list[Instance] = []
    if not announced.any():
        return found, told
    pipes = pipes_of(exchanges, dealt, at, end, announced, until)
    usable = [
        (number, pipe)
        for number, pipe in enumerate(pipes)
        if pipe is not None and set(pipe.slots.tolist()) <= buffers.keys()
    ]
    for members in _alike(joined(usable, nodes), near):
        joint = [pipe for _, pipe in members]
        in_part = near is not None and _in_part(joint, near, nodes)
        sets = in_lockstep(joint)
        own, instances = _by_communicators(columns, sets, position, nodes, near, buffers)
        if len(own) < len(members):
            finer = _finer(columns, joint)
            if len(finer) > len(sets):
                more = _by_communicators(columns, finer, position, nodes, near, buffers)
                own, instances = max((own, instances), more, key=lambda read: _explained(read[1]))
        found += [placed(instance, near) for instance in instances]
        told[[number for number, pipe in members if in_part or id(pipe.rows) in own]] = True
    return found, told


def _in_part(pipes: Sequence[Pipe], near: frozenset[int], nodes: NDArray[np.int64]) -> bool:
    """Whether nodes have several GPUs and not all were captured: which of the other GPUs share a node is not
    known then. What is not understood here (trees) nothing else makes sense of either."""
    ends = {end for pipe in pipes for end in pipe[:2]}
    return not ends <= near and len({int(nodes[end]) for end in ends}) < len(ends)


def _apart(
    parts: list[list[Lockstep]], nodes: NDArray[np.int64], near: frozenset[int] | None
) -> list[list[Lockstep]]:
    """``parts`` that may be communicators: where not all nodes were captured not those with several GPUs of a
    node. These are rather a part of what was not understood."""
    ends = ({end for each in part for pipe in each.pipes for end in pipe[:2]} for part in parts)
    own = (near is None or len({int(nodes[end]) for end in mine}) == len(mine) for mine in ends)
    return [part for part, alone in zip(parts, own, strict=True) if alone]


def _alike(
    groups: Iterable[list[tuple[int, Pipe]]], near: frozenset[int] | None
) -> Iterator[list[tuple[int, Pipe]]]:
    """``groups`` of connected pipes; where not all nodes were captured, those with as many messages are one:
    what lies between parts of a ring was not seen."""
    if near is None:
        yield from groups
        return
    found: dict[frozenset[int], list[tuple[int, Pipe]]] = {}
    for members in groups:
        found.setdefault(frozenset(pipe.stop for _, pipe in members), []).extend(members)
    yield from found.values()


def _finer(columns: Columns, pipes: Sequence[Pipe]) -> list[Lockstep]:
    """``pipes`` in lockstep, more of them apart: operations that have as many messages, each on pipes of its
    own, may look like one. What is cut too often goes together again in turns."""
    alike: dict[int, list[Pipe]] = {}
    for pipe in pipes:
        alike.setdefault(int(columns.sizes[pipe.rows].max()), []).append(pipe)
    sets = [each for mine in alike.values() for each in in_lockstep(mine, strict=True)]
    return [part for each in sets for part in in_turn(each, columns.starts)]


def _explained(instances: Sequence[Instance]) -> int:
    """How many messages they have."""
    return sum(len(each.rows) for each in instances)


def _by_communicators(
    columns: Columns,
    sets: list[Lockstep],
    position: NDArray[np.int64],
    nodes: NDArray[np.int64],
    near: frozenset[int] | None,
    buffers: Mapping[int, Buffer],
) -> tuple[set[int], list[Instance]]:
    """Pipes that are understood, by the identity of their rows, and what they carry."""
    own: set[int] = set()
    found: list[Instance] = []
    # One communicator; several, each with its own endpoints; or with its own nodes.
    for kind in (None, np.arange(len(nodes)), nodes):
        left = without(sets, own)
        parts = [left] if kind is None else _apart(communicators(left, kind), nodes, near)
        for part, instances in _understood(columns, parts, position, nodes, near, buffers):
            found += instances
            own |= {id(pipe.rows) for each in part for pipe in each.pipes}
    left = without(sets, own)
    rest = _apart(completed(left), nodes, near)
    for part, instances in _understood(columns, rest, position, nodes, near, buffers):
        found += instances
        own |= {id(pipe.rows) for each in part for pipe in each.pipes}
    return own, found


def _understood(
    columns: Columns,
    parts: list[list[Lockstep]],
    position: NDArray[np.int64],
    nodes: NDArray[np.int64],
    near: frozenset[int] | None,
    buffers: Mapping[int, Buffer],
) -> list[tuple[list[Lockstep], list[Instance]]]:
    """Communicators, each given by its sets, with their operations, where these explain enough."""
    found = []
    for part in filter(None, parts):
        whole = begun_together(part, columns)
        instances = Reading(columns, whole, position, nodes, near, buffers).instances()
        # Of operations that the capture's ends cut, no more is asked.
        count = sum(int(each.bounds[-1] - each.bounds[0]) * len(each.pipes) for each in whole)
        if instances and sum(len(i.rows) for i in instances) >= EXPLAINED * count:
            found.append((part, instances))
    return found


def joined(pipes: Sequence[tuple[int, Pipe]], nodes: NDArray[np.int64]) -> Iterator[list[tuple[int, Pipe]]]:
    """Pipes that are connected by endpoints, or by nodes: inside one NVLink connects them."""
    label: dict[int, int] = {}

    def root(end: int) -> int:
        while label.setdefault(end, end) != end:
            label[end] = label[label[end]]
            end = label[end]
        return end

    for _, pipe in pipes:
        label[root(int(nodes[pipe.src]))] = root(int(nodes[pipe.dst]))
    groups: dict[int, list[tuple[int, Pipe]]] = {}
    for number, pipe in pipes:
        groups.setdefault(root(int(nodes[pipe.src])), []).append((number, pipe))
    yield from groups.values()


class _Kinds(NamedTuple):
    """Turns that look alike: which sets take part, and for each the kind of its messages."""

    sets: tuple[int, ...]
    kinds: tuple[int, ...]


class Reading:
    """Reads the operations of connected pipes, given the sets of them that are in lockstep."""

    def __init__(
        self,
        columns: Columns,
        sets: list[Lockstep],
        position: NDArray[np.int64],
        nodes: NDArray[np.int64],
        near: frozenset[int] | None = None,
        buffers: Mapping[int, Buffer] = DEFAULT,
    ) -> None:
        self.columns, self.sets, self.position, self.nodes = columns, sets, position, nodes
        self.near, self.among, self.buffers = near, 0, buffers
        self.ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        self.sizes = [columns.sizes[each.rows] for each in sets]
        # Message by message, so that what an operation carried lies together.
        self._content = [np.ascontiguousarray(sizes.T) for sizes in self.sizes]
        sends = [self._sends(each) for each in sets]
        self.first, self.last = [first for first, _ in sends], [last for _, last in sends]
        self._kinds: dict[tuple[int, bytes], int] = {}
        self._parts: dict[tuple[int, int, int], int] = {}  # the kind of each part of a turn
        self._layouts: dict[_Kinds, tuple[Turn, list[Layout] | None]] = {}  # as seen in one turn
        self._barren: set[tuple[tuple[int, int], ...]] = set()  # parts that make up no uneven turn
        self._tries = MOST_TRIES  # uneven turns that may still be tried
        self.seen: Counter[_Kinds] = Counter()  # how often turns of these kinds came
        self.skipped = False  # whether anything fitted nothing

    def instances(self) -> list[Instance]:
        """All operations that are understood."""
        alike = self._alike()
        if self.skipped and len(alike) > 1:
            self.seen = Counter({kinds: len(turns) for kinds, turns in alike.items()})
            alike = self._alike()
        if self.near is not None and self._is_uneven(alike):
            alike = self._alike()
        found: list[Instance] = []
        for kinds, turns in alike.items():
            found += self._made(kinds, turns)
        return found

    def _is_uneven(self, alike: dict[_Kinds, list[Turn]]) -> bool:
        """Whether operations of one communicator seem to have been of several numbers of ranks: parts of one
        may look like one of fewer. From then on only the number counts that most messages speak for."""
        count: Counter[int] = Counter()
        for kinds, turns in alike.items():
            for layout in self._layouts[kinds][1] or ():
                messages = sum(
                    int(self.sets[n].bounds[end] - self.sets[n].bounds[begin]) * len(self.sets[n].pipes)
                    for n, begin, end in turns[0]
                )
                count[layout.among] += messages * len(turns)
        del count[0]
        if len(count) < 2:
            return False
        self.among = max(count, key=lambda ranks: (count[ranks], ranks))
        self._layouts = {}
        return True

    def _alike(self) -> dict[_Kinds, list[Turn]]:
        alike: dict[_Kinds, list[Turn]] = {}
        self.skipped = False
        for turn in self._turns():
            kinds = self._kinds_of(turn)
            alike.setdefault(kinds, []).append(turn)
            self.seen[kinds] += 1
        return alike

    # -- turns -------------------------------------------------------------------------------

    def _sends(self, each: Lockstep) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When each endpoint first and last sent on the set in each of its operations; far in the future and
        NEVER without."""
        first = np.full((len(each), len(self.ends)), _FAR)
        last = np.full((len(each), len(self.ends)), NEVER)
        begins = self.columns.starts[each.rows[:, each.bounds[:-1]]]
        begins = np.where(begins == NEVER, _FAR, begins)
        ends = self.columns.starts[each.rows[:, each.bounds[1:] - 1]]
        for pipe, begin, end in zip(each.pipes, begins, ends, strict=True):
            place = self.ends.index(pipe.src)
            first[:, place] = np.minimum(first[:, place], begin)
            last[:, place] = np.maximum(last[:, place], end)
        return first, last

    def _turns(self) -> Iterator[Turn]:
        """Turns in order, each with all sets that take part; what fits nothing is left out."""
        if self._is_even():
            even = [
                tuple((number, j, j + 1) for number in range(len(self.sets)))
                for j in range(len(self.sets[0]))
            ]
            if all(self._layout(self._kinds_of(turn), turn) for turn in even):
                yield from even
                return
        at = [0] * len(self.sets)
        usual: tuple[int, ...] = ()
        while any(here < len(each) for here, each in zip(at, self.sets, strict=True)):
            turn = self._next(at, usual)
            if turn is None:
                # What begins first fits nothing: go on behind it.
                self.skipped = True
                left = [number for number, each in enumerate(self.sets) if at[number] < len(each)]
                at[min(left, key=lambda number: int(self.first[number][at[number]].min()))] += 1
                continue
            for number, _, end in turn:
                at[number] = end
            usual = tuple(number for number, _, _ in turn)
            yield turn

    def _is_even(self) -> bool:
        """Whether all sets have as many operations, each one's first messages before those of the next."""
        if not self.sets or len({len(each) for each in self.sets}) > 1:
            return False
        if len(self.sets) == 1:
            return True
        every = np.stack(self.first)
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
        return bool((latest[:-1] <= every.min(axis=0)[1:]).all())

    def _next(self, at: list[int], usual: tuple[int, ...]) -> Turn | None:
        """The next turn: as many sets as make up an operation that none of the others began within."""
        left = [number for number, each in enumerate(self.sets) if at[number] < len(each)]
        left = sorted(left, key=lambda number: int(self.first[number][at[number]].min()))[:MOST_SETS]
        choices = [c for size in range(len(left), 0, -1) for c in combinations(sorted(left), size)]
        if usual in choices and self._is_over(usual, at, left):
            choices.insert(0, usual)
        for chosen in choices:
            if self._is_next(chosen, at, left):
                turn = tuple((number, at[number], at[number] + 1) for number in chosen)
                if self._layout(self._kinds_of(turn), turn):
                    return self._longer(turn, at)
        # A receiver that is slow on all connections at once may look like a beginning.
        for length in range(2, LONGEST + 1):
            chosen = tuple(sorted(left))
            if all(at[number] + length <= len(self.sets[number]) for number in chosen):
                turn = tuple((number, at[number], at[number] + length) for number in chosen)
                if self._layout(self._kinds_of(turn), turn):
                    return turn
        return self._uneven([c for c in choices if len(c) <= MOST_UNEVEN], at)

    def _uneven(self, choices: Sequence[tuple[int, ...]], at: list[int]) -> Turn | None:
        """A turn of one of ``choices`` in which some sets have more of their operations than others."""
        parts = {
            number: [
                (number, at[number], at[number] + length)
                for length in range(1, UNEVEN + 1)
                if self._is_whole(number, at[number], at[number] + length)
            ]
            for number in {number for chosen in choices for number in chosen}
        }
        # What fitted nothing once does not fit when it comes again.
        alike = tuple((self._kind_of(part), part[2] - part[1]) for n in sorted(parts) for part in parts[n])
        if alike in self._barren or self._tries <= 0:
            return None
        for chosen in choices:
            for turn in product(*(parts[number] for number in chosen)):
                uneven = len({end - begin for _, begin, end in turn}) > 1
                self._tries -= uneven
                if uneven and self._layout(self._kinds_of(turn), turn):
                    return turn
        self._barren.add(alike)
        return None

    def _is_whole(self, number: int, begin: int, end: int) -> bool:
        """Whether the set goes so far, with the same buffers."""
        each = self.sets[number]
        return end <= len(each) and bool((each.slots[begin:end] == each.slots[begin]).all())

    def _longer(self, turn: Turn, at: list[int]) -> Turn:
        """``turn``, or what begins with it and came more often: its parts may look like operations."""
        best = turn
        if self.seen[self._kinds_of(turn)] < max(self.seen.values(), default=0):
            for length in range(2, LONGEST + 1):
                more = tuple((number, at[number], at[number] + length) for number, _, _ in turn)
                if any(end > len(self.sets[number]) for number, _, end in more):
                    break
                if self.seen[self._kinds_of(more)] > self.seen[self._kinds_of(best)]:
                    best = more
        return best

    def _is_next(self, chosen: tuple[int, ...], at: list[int], left: list[int]) -> bool:
        """Whether no rank sent on other sets, or again on these, before it had begun on all of ``chosen``."""
        every = np.stack([self.first[number][at[number]] for number in chosen])
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
        later = [self.first[number][at[number]] for number in left if number not in chosen]
        later += [
            self.first[number][at[number] + 1] for number in chosen if at[number] + 1 < len(self.sets[number])
        ]
        return all(bool((when >= latest).all()) for when in later)

    def _is_over(self, chosen: tuple[int, ...], at: list[int], left: list[int]) -> bool:
        """Whether no rank sent on other sets before its last message on ``chosen``: else it is one operation
        on more sets than these, for a rank is through with one before it begins the next."""
        every = np.stack([self.last[number][at[number]] for number in chosen]).max(axis=0)
        later = [self.first[number][at[number]] for number in left if number not in chosen]
        return all(bool((when >= every).all()) for when in later)

    # -- what they are -------------------------------------------------------------------------

    def _kinds_of(self, turn: Turn) -> _Kinds:
        return _Kinds(tuple(number for number, _, _ in turn), tuple(map(self._kind_of, turn)))

    def _kind_of(self, part: tuple[int, int, int]) -> int:
        if part not in self._parts:
            number, begin, end = part
            each = self.sets[number]
            low, high = each.bounds[begin], each.bounds[end]
            content = self._content[number][low:high].tobytes() + int(each.slots[begin]).to_bytes(8, "little")
            self._parts[part] = self._kinds.setdefault((number, content), len(self._kinds))
        return self._parts[part]

    def _layout(self, kinds: _Kinds, turn: Turn) -> list[Layout] | None:
        """What ``turn`` is, if it is one operation; all that look alike are the same."""
        if kinds not in self._layouts:
            self._layouts[kinds] = turn, self._recognise(self._lanes([turn]))
        return self._layouts[kinds][1]

    def _recognise(self, lanes: list[Lane]) -> list[Layout] | None:
        found = layout_of(lanes, self.position, self.nodes, self.ends, self.near, self.among, self.buffers)
        return None if found is None else [found]

    def _lanes(self, turns: Sequence[Turn]) -> list[Lane]:
        lanes = []
        for place, (number, begin, end) in enumerate(turns[0]):
            each = self.sets[number]
            low, high = each.bounds[begin], each.bounds[end]
            places = each.bounds[[turn[place][1] for turn in turns], None] + np.arange(high - low)
            rows = each.rows[:, places]  # (connections, turns, messages)
            starts, arrivals = self.columns.starts[rows], self.columns.arrivals[rows]
            samples, sizes = self.columns.samples[rows], self.sizes[number][:, low:high]
            slot = int(each.slots[begin])
            lanes += [
                Lane(pipe.src, pipe.dst, slot, *parts)
                for pipe, *parts in zip(each.pipes, sizes, starts, arrivals, samples, strict=True)
            ]
        return lanes

    def _made(self, kinds: _Kinds, turns: list[Turn]) -> Iterator[Instance]:
        """The collectives of turns that look alike."""
        one, layouts = self._layouts[kinds]
        if turns != [one]:  # all of them show more
            every = self._recognise(self._lanes(turns))
            if every is None and self.near is not None:
                return  # what one of them may be by itself not all of them are
            layouts = every or layouts
        assert layouts is not None
        rows = np.concatenate([self._rows(place, turns) for place in range(len(kinds.sets))], axis=1)
        rows = np.take_along_axis(rows, np.argsort(self.columns.starts[rows], axis=1, kind="stable"), 1)
        for layout in layouts:
            for mine in rows:
                yield Instance(
                    mine,
                    layout.op,
                    list(layout.order),
                    layout.algorithm,
                    root=layout.root,
                    size=layout.size,
                    ranks=layout.ranks,
                    seats=tuple(range(len(layout.order))) if layout.ranks else (),
                    nodes=tuple(self.nodes[layout.order].tolist()) if layout.ranks else (),
                    inside=layout.inside,
                    alike=layout.alike,
                    tails=layout.tails,
                )

    def _rows(self, place: int, turns: list[Turn]) -> NDArray[np.int64]:
        """Rows of EXCHANGE of one set in each of ``turns``: (turns, messages)."""
        number, begin, end = turns[0][place]
        each = self.sets[number]
        count = int(each.bounds[end] - each.bounds[begin])
        places = np.array([each.bounds[turn[place][1]] for turn in turns])[:, None] + np.arange(count)
        rows: NDArray[np.int64] = each.rows[:, places].transpose(1, 0, 2).reshape(len(turns), -1)
        return rows
