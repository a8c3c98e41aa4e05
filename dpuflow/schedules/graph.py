"""What an algorithm asks of a number of ranks: its messages, their sizes, and which need no input.

In: an ``Algorithm``, the ranks and a root. Out: its schedule for a buffer of one byte, so that sizes are to
be multiplied, what follows from it, and the same as arrays in the form that kernels compare streams with. All
is kept between calls as collectives repeat (``remembered``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter, or_
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dpuflow.schedules.remembered import remembered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schedules.trees import Send


V = TypeVar("V")


def lay_out(algorithm: Algorithm, n: int, root: int = 0) -> tuple[Send, ...]:
    """The schedule for a buffer of one byte, in order of steps: sizes are to be multiplied."""
    return tuple(sorted(algorithm.sends(n, 1.0, root), key=itemgetter(0)))


schedule = remembered(lay_out)
"""The same, kept. What goes through all numbers of ranks once lays them out: it would push out all others."""


@remembered
def edge_sizes(algorithm: Algorithm, n: int, root: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    """For each (src, dst) the sizes of its messages in order, for a buffer of one byte."""
    edges: dict[tuple[int, int], list[float]] = {}
    for send in schedule(algorithm, n, root):
        edges.setdefault((send.src, send.dst), []).append(send.size)
    return {edge: tuple(sizes) for edge, sizes in edges.items()}


Place = tuple[tuple[int, int], int]
"""A message of a schedule: its (src, dst) and how many that edge has sent before it."""


@remembered
def dependencies(
    algorithm: Algorithm, n: int, root: int = 0, of: frozenset[int] | None = None
) -> tuple[tuple[Place, Place], ...]:
    """Pairs (send, input): the send needs the input, the latest one that its rank gets in earlier steps.

    Only sends of the ranks ``of``, None for all.
    """
    seen: dict[tuple[int, int], int] = {}
    inputs: dict[int, list[tuple[int, Place]]] = {}
    sends: list[tuple[Send, Place]] = []
    for send in schedule(algorithm, n, root):
        edge = (send.src, send.dst)
        place = (edge, seen.get(edge, 0))
        seen[edge] = place[1] + 1
        if of is None or send.src in of:
            sends.append((send, place))
        if of is None or send.dst in of:
            inputs.setdefault(send.dst, []).append((send.step, place))
    pairs: list[tuple[Place, Place]] = []
    for send, place in sends:
        before = inputs.get(send.src, [])
        end = bisect_left(before, send.step, key=itemgetter(0))  # a schedule is in order of steps
        if end:
            begin = bisect_left(before, before[end - 1][0], key=itemgetter(0))
            pairs.extend((place, what) for _, what in before[begin:end])
    return tuple(pairs)


def fold(
    algorithm: Algorithm,
    n: int,
    root: int,
    start: Sequence[V],
    join: Callable[[V, V], V],
    link: Callable[[V], V] = lambda value: value,
    *,
    own: bool = False,
    back: bool = False,
    receivers: bool = False,
) -> tuple[dict[Place, V], list[V]]:
    """What each message's sender has by then, and what each rank has in the end, in a semiring.

    Ranks begin with ``start``. What a message's sender had before its step goes over the message by ``link``,
    and is joined to what the receiver has by ``join``; with ``own`` to what the sender has as well, as what a
    rank sends follows what it sent before. ``back``: from the last step to the first, receivers to senders.
    ``receivers``: what each message's receiver has by then, instead of its sender.
    """
    state, told = list(start), dict[Place, V]()
    seen: Counter[tuple[int, int]] = Counter()
    places: list[tuple[int, list[Place]]] = []
    for step, sends in groupby(schedule(algorithm, n, root), key=attrgetter("step")):
        places.append((step, []))
        for _, src, dst, _ in sends:
            places[-1][1].append(((src, dst), seen[src, dst]))
            seen[src, dst] += 1
    for _, sent in reversed(places) if back else places:
        held = {place: state[place[0][back]] for place in sent}
        told.update({place: state[place[0][back != receivers]] for place in sent})
        for place in sent:
            over = link(held[place])
            for end in place[0] if own else (place[0][not back],):
                state[end] = join(state[end], over)
    return told, state


@remembered
def free_ranks(algorithm: Algorithm, n: int, root: int = 0) -> frozenset[int]:
    """Ranks whose first message needs no input: nothing is sent to them in an earlier step."""
    if algorithm.starters is not None:
        return algorithm.starters(n, root)
    sent, got = dict[int, int](), dict[int, int]()
    for send in schedule(algorithm, n, root):
        sent.setdefault(send.src, send.step)
        got.setdefault(send.dst, send.step)
    return frozenset(rank for rank, step in sent.items() if got.get(rank, step) >= step)


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
def reach(algorithm: Algorithm, n: int, root: int = 0) -> tuple[frozenset[int], ...]:
    """For each rank whose entries what it has in the end depends on, its own included."""
    return tuple(fold(algorithm, n, root, [frozenset({rank}) for rank in range(n)], or_)[1])


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
def awaited(algorithm: Algorithm, n: int, root: int, rank: int) -> Mapping[tuple[int, int], int]:
    """For each edge how many of its messages must have arrived before ``rank`` has its last input."""
    told, _ = fold(algorithm, n, root, [each == rank for each in range(n)], or_, back=True)
    return Counter(edge for (edge, _), needed in told.items() if needed)


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
    counts: NDArray[np.int64]  # messages of each edge
    shares: NDArray[np.float64]  # sizes of all edges' messages for a buffer of one byte
    captured: frozenset[int] | None = None

    def __sizeof__(self) -> int:
        """With the arrays that are made when they are first asked for, for two inputs of a message."""
        return 1000 + 40 * self.ranks + 100 * len(self.edges) + 72 * len(self.shares)

    @cached_property
    def sends(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and edges that each rank sends on."""
        return _by_rank(self.ranks, (src for src, _ in self.edges))

    @cached_property
    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and edges that each rank receives on."""
        return _by_rank(self.ranks, (dst for _, dst in self.edges))

    @cached_property
    def needs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets by sending rank, and rows: edge and number of a send, and of the input it needs."""
        number = {edge: place for place, edge in enumerate(self.edges)}
        pairs = dependencies(self.algorithm, self.ranks, self.root, self.captured)
        at, order = _by_rank(self.ranks, (send[0][0] for send, _ in pairs))
        rows = [(number[send[0]], send[1], number[got[0]], got[1]) for send, got in pairs]
        return at, np.array(rows, np.int64).reshape(-1, 4)[order]

    @cached_property
    def free(self) -> NDArray[np.int64]:
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
    sizes = edge_sizes(algorithm, ranks, root)
    if captured is not None:
        sizes = {edge: each for edge, each in sizes.items() if not captured.isdisjoint(edge)}
    counts = np.array([len(each) for each in sizes.values()], np.int64)
    shares = np.array([share for each in sizes.values() for share in each], np.float64)
    return Plan(algorithm, ranks, root, tuple(sizes), counts, shares, captured)


def _by_rank(ranks: int, whose: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets, and the places of ``whose`` in order of rank."""
    of = np.fromiter(whose, np.int64)
    return np.searchsorted(np.sort(of), np.arange(ranks + 1)), np.argsort(of, kind="stable")
