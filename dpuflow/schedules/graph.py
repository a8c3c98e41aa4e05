"""What an algorithm asks of a number of ranks: its messages, their sizes, and which need no input.

In: an ``Algorithm``, the ranks and a root. Out: its schedule for a buffer of one byte, so that sizes are to
be multiplied, what follows from it, and the same as arrays in the form that kernels compare streams with. All
is kept between calls as collectives repeat (``remembered``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter, or_
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import cut_at, spans
from dpuflow.schedules.remembered import remembered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpuflow.arrays import Floats, Ints
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schedules.trees import Send


V = TypeVar("V")


def lay_out(algorithm: Algorithm, n: int, root: int = 0) -> tuple[Send, ...]:
    """The schedule for a buffer of one byte, in order of steps: sizes are to be multiplied."""
    return tuple(sorted(algorithm.sends(n, 1.0, root), key=itemgetter(0)))


schedule = remembered(lay_out)
"""The same, kept. What goes through all numbers of ranks once lays them out: it would push out all others."""


class Laid(NamedTuple):
    """A schedule as columns, in order of steps; ``edges`` in that of their first messages."""

    step: Ints
    src: Ints
    dst: Ints
    size: Floats  # of a buffer of one byte
    edge: Ints
    turn: Ints  # messages of its edge before it
    edges: tuple[tuple[int, int], ...]


@remembered
def laid(algorithm: Algorithm, n: int, root: int = 0) -> Laid:
    """The schedule's columns."""
    sends = list(algorithm.sends(n, 1.0, root))
    step, src, dst = (np.fromiter(map(itemgetter(k), sends), np.int64, len(sends)) for k in range(3))
    size = np.fromiter(map(itemgetter(3), sends), np.float64, len(sends))
    order = np.argsort(step, kind="stable")
    step, src, dst, size = step[order], src[order], dst[order], size[order]
    _, first, of = np.unique(src * n + dst, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    edge = np.argsort(by_first)[of]
    by_edge, count = np.argsort(edge, kind="stable"), np.bincount(edge)
    turn = np.empty_like(edge)
    turn[by_edge] = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count)
    begins = first[by_first]
    return Laid(
        step, src, dst, size, edge, turn, tuple(zip(src[begins].tolist(), dst[begins].tolist(), strict=True))
    )


@remembered
def edge_sizes(algorithm: Algorithm, n: int, root: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    """For each (src, dst) the sizes of its messages in order, for a buffer of one byte."""
    every = laid(algorithm, n, root)
    sizes = every.size[np.argsort(every.edge, kind="stable")]
    parts = cut_at(sizes, np.cumsum(np.bincount(every.edge))[:-1])
    return {edge: tuple(part.tolist()) for edge, part in zip(every.edges, parts, strict=False)}


Place = tuple[tuple[int, int], int]
"""A message of a schedule: its (src, dst) and how many that edge has sent before it."""


def arcs(
    algorithm: Algorithm, n: int, root: int = 0, of: frozenset[int] | None = None
) -> tuple[Laid, Ints, Ints]:
    """The schedule, and of each arc in it the row of the send and that of the input that it needs: what its
    rank gets in the latest step before that has any.

    Only sends of the ranks ``of``, None for all.
    """
    every = laid(algorithm, n, root)
    first = int(every.step.min(initial=0))
    width = int(every.step.max(initial=0)) - first + 1
    inputs = np.argsort(every.dst, kind="stable")
    came = every.dst[inputs] * width + every.step[inputs] - first
    sends = np.arange(len(every.src)) if of is None else np.flatnonzero(np.isin(every.src, list(of)))
    none = every.src[sends] * width
    end = np.searchsorted(came, none + every.step[sends] - first)
    some = end > np.searchsorted(came, none)
    sends, end = sends[some], end[some]
    begin = np.searchsorted(came, came[end - 1])
    return every, np.repeat(sends, end - begin), inputs[spans(begin, end - begin)]


@remembered
def dependencies(
    algorithm: Algorithm, n: int, root: int = 0, of: frozenset[int] | None = None
) -> tuple[tuple[Place, Place], ...]:
    """Pairs (send, input) of ``arcs``."""
    every, sends, inputs = arcs(algorithm, n, root, of)
    places = [
        (every.edges[edge], turn) for edge, turn in zip(every.edge.tolist(), every.turn.tolist(), strict=True)
    ]
    return tuple((places[a], places[b]) for a, b in zip(sends.tolist(), inputs.tolist(), strict=True))


def fold(
    algorithm: Algorithm,
    n: int,
    root: int,
    start: Sequence[V],
    join: Callable[[V, V], V],
    link: Callable[[V], V] = lambda value: value,
    *,
    own: bool = False,
    receivers: bool = False,
) -> tuple[dict[Place, V], list[V]]:
    """What each message's sender has by then, and what each rank has in the end, in a semiring.

    Ranks begin with ``start``. What a message's sender had before its step goes over the message by ``link``,
    and is joined to what the receiver has by ``join``; with ``own`` to what the sender has as well, as what a
    rank sends follows what it sent before. ``receivers``: what each message's receiver has by then, instead
    of its sender.
    """
    state, told = list(start), dict[Place, V]()
    seen: Counter[tuple[int, int]] = Counter()
    for _, sends in groupby(schedule(algorithm, n, root), key=attrgetter("step")):
        before = state.copy()
        for _, src, dst, _ in sends:
            told[(src, dst), seen[src, dst]] = before[dst if receivers else src]
            seen[src, dst] += 1
            over = link(before[src])
            for end in (src, dst) if own else (dst,):
                state[end] = join(state[end], over)
    return told, state


@remembered
def free_ranks(algorithm: Algorithm, n: int, root: int = 0) -> frozenset[int]:
    """Ranks whose first message needs no input: nothing is sent to them in an earlier step."""
    if algorithm.starters is not None:
        return algorithm.starters(n, root)
    every = laid(algorithm, n, root)
    ranks, first = np.unique(every.src, return_index=True)
    sent = every.step[first]
    got = np.full(n, FAR)
    np.minimum.at(got, every.dst, every.step)
    return frozenset(ranks[got[ranks] >= sent].tolist())


@remembered
def needed_between(
    algorithm: Algorithm, home: tuple[int, ...], root: int = 0
) -> Mapping[int, frozenset[int]]:
    """Of ranks at ``home`` those whose entries each one's first message to another home depends on."""
    n, first = len(home), dict[int, frozenset[int]]()
    told, _ = fold(algorithm, n, root, [frozenset({rank}) for rank in range(n)], or_)
    for ((src, dst), _), ranks in told.items():
        if home[src] != home[dst]:
            first.setdefault(src, ranks)
    return first


@remembered
def depths(
    algorithm: Algorithm, n: int, root: int = 0, *, receivers: bool = False
) -> Mapping[Place, Mapping[int, int]]:
    """For each message how many links lie, at most, between it and each rank's entry that it depends on.

    A link is a message that is waited for, or a rank's own message of the step before. ``receivers``: between
    that and the receiver's being ready for the message.
    """

    def most(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
        return one | {rank: max(links, one.get(rank, 0)) for rank, links in other.items()}

    def further(links: dict[int, int]) -> dict[int, int]:
        return {rank: count + 1 for rank, count in links.items()}

    start: list[dict[int, int]] = [{rank: 0} for rank in range(n)]
    return fold(algorithm, n, root, start, most, further, own=True, receivers=receivers)[0]


@remembered
def first_acts(algorithm: Algorithm, n: int, root: int) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
    """What a rank does first: to whom it sends before all else, and from whom it receives in its first step.

    Ranks that receive before they send are not among the former, those that send before they receive not
    among the latter.
    """
    first: dict[int, int] = {}
    sends: dict[int, int] = {}
    inputs: dict[int, set[int]] = {}
    for send in schedule(algorithm, n, root):
        first.setdefault(send.dst, send.step)
        if first.setdefault(send.src, send.step) == send.step:
            sends.setdefault(send.src, send.dst)
        if first[send.dst] == send.step:
            inputs.setdefault(send.dst, set()).add(send.src)
    return sends, {rank: frozenset(peers) for rank, peers in inputs.items()}


@remembered
def free_sends(algorithm: Algorithm, n: int, root: int, rank: int) -> dict[int, int]:
    """Whom a rank sends how many messages that need no input: those of steps before its first input."""
    sends: dict[int, int] = {}
    mine = schedule(algorithm, n, root)
    first = min((s.step for s in mine if s.dst == rank), default=None)
    for send in mine:
        if send.src == rank and (first is None or send.step <= first):
            sends[send.dst] = sends.get(send.dst, 0) + 1
    return sends


@dataclass(frozen=True)
class Plan:
    """One collective of an algorithm: its edges in the order of ``edge_sizes``, and what they carry.

    Where only the messages of the ranks ``captured`` are seen, it has their edges only, and asks of no
    other rank when it sends. Ranks are positions. Lists by rank have offsets: rank r's part is
    ``x[x_at[r]:x_at[r + 1]]``.
    """

    algorithm: Algorithm
    ranks: int
    root: int
    edges: tuple[tuple[int, int], ...]
    counts: Ints  # messages of each edge
    shares: Floats  # sizes of all edges' messages for a buffer of one byte
    captured: frozenset[int] | None = None

    def __sizeof__(self) -> int:
        """With the arrays that are made when they are first asked for, for two inputs of a message."""
        return 1000 + 40 * self.ranks + 100 * len(self.edges) + 72 * len(self.shares)

    @cached_property
    def sends(self) -> tuple[Ints, Ints]:
        """Offsets and edges that each rank sends on."""
        return _by_rank(self.ranks, np.array([src for src, _ in self.edges], np.int64))

    @cached_property
    def inputs(self) -> tuple[Ints, Ints]:
        """Offsets and edges that each rank receives on."""
        return _by_rank(self.ranks, np.array([dst for _, dst in self.edges], np.int64))

    @cached_property
    def needs(self) -> tuple[Ints, Ints]:
        """Offsets by sending rank, and rows: edge and number of a send, and of the input it needs."""
        every, sends, inputs = arcs(self.algorithm, self.ranks, self.root, self.captured)
        place = {edge: number for number, edge in enumerate(self.edges)}
        number = np.array([place.get(edge, -1) for edge in every.edges], np.int64)
        at, order = _by_rank(self.ranks, every.src[sends])
        rows = [number[every.edge[sends]], every.turn[sends], number[every.edge[inputs]], every.turn[inputs]]
        return at, np.stack(rows, axis=1)[order]

    @cached_property
    def free(self) -> Ints:
        """Ranks whose first message needs no input."""
        ranks = free_ranks(self.algorithm, self.ranks, self.root)
        return np.array(sorted(ranks if self.captured is None else ranks & self.captured), np.int64)

    @cached_property
    def messages(self) -> int:
        """Messages of one collective, not cut into segments."""
        return int(self.counts.sum())

    @cached_property
    def most_events(self) -> int:
        """Messages that the busiest rank sends and receives, not cut into segments."""
        events = np.zeros(self.ranks, np.int64)
        np.add.at(events, np.array(self.edges).ravel(), np.repeat(self.counts, 2))
        return int(events.max())


@remembered
def plan(algorithm: Algorithm, ranks: int, root: int, captured: frozenset[int] | None = None) -> Plan:
    """The schedule's arrays; ``root`` is a position, ``captured`` are positions (None: all)."""
    every = laid(algorithm, ranks, root)
    mine = np.ones(len(every.edges), bool)
    if captured is not None:
        mine = np.array([not captured.isdisjoint(edge) for edge in every.edges], bool)
    by_edge = np.argsort(every.edge, kind="stable")
    counts = np.bincount(every.edge, minlength=len(mine))[mine]
    shares = every.size[by_edge[mine[every.edge[by_edge]]]]
    edges = tuple(edge for edge, own in zip(every.edges, mine.tolist(), strict=True) if own)
    return Plan(algorithm, ranks, root, edges, counts, shares, captured)


def _by_rank(ranks: int, of: Ints) -> tuple[Ints, Ints]:
    """Offsets, and the places of ranks ``of`` in their order."""
    return np.searchsorted(np.sort(of), np.arange(ranks + 1)), np.argsort(of, kind="stable")
