"""What the collectives of one communicator might look like, and how far each guess explains its messages.

A hypothesis (algorithm, numbering of ranks, root, segments a message) says how many messages of which
size each edge carries per collective; it holds as far as counts and sizes agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching.recognise import ELEMENT_BYTES, Contact, orders, placements
from dpuflow.matching.streams import HOLE
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import Plan, plan
from dpuflow.schedules.remembered import remembered
from dpuflow.schedules.trees import Send, split_binary, synced_up
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Job
    from dpuflow.matching.streams import Edge, Streams

SEGMENTED = frozenset((Op.UNKNOWN, Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE))
"""Operations whose messages may be segments: of a library that names its operations only these (Open MPI,
ompi/mca/coll/base); what nobody names may be cut whatever it is."""
SAMPLE = 1024
"""Messages on which hypotheses are compared; the best one then takes all that it explains."""
LAID_OUT = 1 << 18
"""Messages between uncaptured ranks that a schedule may have: a ring of 360 ranks. Traffic from thousands of
addresses would need schedules of as many messages as the addresses squared,"""
LOOKED_AT = 4 * LAID_OUT
"""and of all those that are tried at once."""

Shape = tuple[Algorithm, tuple[int, ...], int]
"""Algorithm, numbering of the ranks, root."""


@dataclass(frozen=True)
class Hypothesis:
    """How each collective of a run might look; ``cuts`` segments per message of the schedule.

    ``near``: the endpoints all of whose messages were captured, None for everyone. In ``order`` negative
    numbers stand for ranks that no capture saw (``partial``).
    """

    algorithm: Algorithm
    order: tuple[int, ...]
    root: int
    cuts: int
    near: frozenset[int] | None = None

    @cached_property
    def plan(self) -> Plan:
        """The schedule as arrays, ranks by position."""
        return _plan(self.algorithm, self.order, self.root, self.near)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """(src, dst) endpoints, in the order of the plan's edges."""
        order = self.order
        return tuple((order[src], order[dst]) for src, dst in self.plan.edges)

    @property
    def messages(self) -> int:
        """Messages of one collective."""
        return self.cuts * self.plan.messages


def _plan(algorithm: Algorithm, order: tuple[int, ...], root: int, near: frozenset[int] | None) -> Plan:
    captured = None if near is None else frozenset(at for at, end in enumerate(order) if end in near)
    return plan(algorithm, len(order), root, captured)


class Proposer:
    """Names the hypotheses that streams might follow, and measures how far they do.

    ``op`` is the operation that the library names, UNKNOWN where it names none; ``endpoints`` the
    ranks in the default numbering.
    """

    def __init__(self, job: Job, op: Op, endpoints: Sequence[int]) -> None:
        from dpuflow.kernels import hypotheses

        self.op = op
        self.near = job.near
        self.sizes, self.starts, self.arrivals, _ = job.columns
        self.endpoints = endpoints
        self._kernels = hypotheses
        self._shapes: dict[frozenset[Edge], tuple[list[tuple[int, ...]], list[Hypothesis]]] = {}
        self._alike: tuple[int, Ints, Ints] | None = None
        self._earliest: tuple[int, int] = (-1, -1)

    def propose(self, streams: Streams) -> Iterator[Hypothesis]:
        """All that could hold from here: whole messages first, then messages in segments."""
        for base in self.shapes(streams):
            yield base
            if base.algorithm.cuts and self.op in SEGMENTED:
                for cuts in self.segments(streams, base):
                    yield replace(base, cuts=cuts)

    def shapes(self, streams: Streams) -> list[Hypothesis]:
        """Algorithms, numberings and roots whose edges are among the streams'.

        Of unknown operation, only what explains every edge is worth a try.
        """
        edges = streams.present
        if edges not in self._shapes:
            # Rounded up, so that channels of one group ask for the same.
            most = 1 << len(streams.rows).bit_length()
            tries, forms = _shapes(self.op, self.endpoints, edges, self.near, most)
            self._shapes[edges] = tries, [Hypothesis(*shape, 1, self.near) for shape in forms]
            if self.near is not None:
                placed = placements(self.op, self._contacts(streams), self.near)
                self._shapes[edges][1].extend(
                    base
                    for base in (Hypothesis(*shape, 1, self.near) for shape in placed)
                    if _may_be(edges, base, len(streams.rows))
                    and edges.issuperset(base.edges)
                    and (self.op != Op.UNKNOWN or len(base.edges) == len(edges))
                )
        tries, shapes = self._shapes[edges]
        phased = [
            Hypothesis(algorithm, order, root, 1, self.near)
            for algorithm in self._phased(streams)
            for order in tries
            for root in (range(len(order)) if algorithm.rooted else (0,))
            if _is_among(edges, (algorithm, order, root), self.near, len(streams.rows))[0]
        ]
        return shapes + phased

    def _contacts(self, streams: Streams) -> list[Contact]:
        """The streams' edges in order of their first message, as the captured ends saw it."""
        found = []
        for (src, dst), rows in streams.left():
            times = self.starts if self.near and src in self.near else self.arrivals
            found.append((int(times[rows[int(np.argmax(rows != HOLE))]]), src, dst, len(rows)))
        return [Contact(src, dst, count) for _, src, dst, count in sorted(found)]

    def _phased(self, streams: Streams) -> Iterator[Algorithm]:
        """What the sizes suggest of algorithms that cut one phase into segments and another not.

        The segmented ring's reduce_scatter sends parts of a block; a split binary tree's halves come down in
        segments.
        """
        n = len(self.endpoints)
        longest = int((streams.end - streams.at).max())  # no more segments than messages on an edge
        if self.op == Op.GATHER:
            two = streams.at + 1 < streams.end
            first, second = (self.sizes[streams.rows[streams.at[two] + k]] for k in (0, 1))
            parts = {(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True) if a > 0 and b > 0}
            for a, b in sorted(parts)[:1]:
                yield synced_gather(a / (a + b))
        if self.op in (Op.UNKNOWN, Op.BROADCAST) and n > 2:
            here = streams.at < streams.end
            first = self.sizes[streams.rows[streams.at[here]]]
            half, segment = int(first.max()), int(first[first > 0].min(initial=int(first.max())))
            if 0 < segment < half <= segment * longest:
                yield split_tree(segment / half)
        if self.op in (Op.UNKNOWN, Op.ALL_REDUCE) and n > 1:
            here = streams.at < streams.end
            head = int(self.sizes[streams.rows[streams.at[here]]].max())
            largest = self._kernels.largest(streams.rows, streams.at, streams.end, self.sizes, 64 * n)
            phases = round(largest / head) if head > 0 else 1
            if phases > 1 and (phases + 1) * (n - 1) <= longest:
                yield segmented_ring(phases)

    def segments(self, streams: Streams, base: Hypothesis) -> list[int]:
        """Segments per message worth trying: up to a shorter last one, or what divides the first sizes.

        The first collective's messages are of one size, so their number on an edge, up to where the
        size changes, is a multiple of its segments.
        """
        alike, shorter = self._heads(streams)
        lanes = streams.lanes(base.edges)
        whole = gcd(*(alike[lanes] // base.plan.counts).tolist())
        tries = {*_divisors(whole), *(alike[lanes[shorter[lanes] > 0]] + 1).tolist()}
        return sorted(tries - {1})

    def _heads(self, streams: Streams) -> tuple[Ints, Ints]:
        """For each stream its messages before the size changes, and whether it gets smaller there."""
        if self._alike is None or self._alike[0] != streams.version:
            alike, shorter = np.zeros((2, len(streams.edges)), np.int64)
            self._kernels.heads(streams.rows, streams.at, streams.end, self.sizes, SAMPLE, alike, shorter)
            self._alike = streams.version, alike, shorter
        return self._alike[1:]

    def run_length(self, streams: Streams, hypothesis: Hypothesis, most: int | None = None) -> int:
        """How many collectives in a row the hypothesis explains from here.

        ``most`` bounds the messages looked at, though never to fewer than four collectives.
        """
        if self._earliest[0] != streams.version:
            first = self._kernels.earliest(streams.rows, streams.at, streams.end, self.starts)
            self._earliest = streams.version, first
        lanes = streams.lanes(hypothesis.edges)
        if self._earliest[1] not in lanes:
            return 0  # the first message of all must belong to the first collective
        kind = self._kernels.SIZED if self.op == Op.UNKNOWN else 0
        if hypothesis.algorithm.op == Op.BARRIER:
            kind = self._kernels.BARRIER
        length: int = self._kernels.run_length(
            streams.rows, streams.at, streams.end, lanes, hypothesis.plan.counts, hypothesis.plan.shares,
            hypothesis.cuts, self.sizes, kind, self._uneven(hypothesis),
            streams.count if most is None else max(4, most // hypothesis.messages),
        )  # fmt: skip
        return length

    def _uneven(self, hypothesis: Hypothesis) -> int:
        """By how many bytes a segment may differ from its share.

        Libraries that name their operations round each rank's block to an element. NCCL rounds all blocks but
        the last up to 16 bytes, twice that on the wire in its LL protocol: the last one lacks what the
        others have too much.
        """
        if self.op != Op.UNKNOWN:
            return ELEMENT_BYTES
        return max(ELEMENT_BYTES, 2 * ELEMENT_BYTES * len(hypothesis.order) // hypothesis.cuts)


def _shapes(
    op: Op, endpoints: Sequence[int], edges: frozenset[Edge], near: frozenset[int] | None, most: int
) -> tuple[list[tuple[int, ...]], list[Shape]]:
    """Numberings of the endpoints; algorithms, numberings and roots that fit their edges with no more than
    ``most`` messages."""
    at = {end: place for place, end in enumerate(endpoints)}
    among = frozenset((at[src], at[dst]) for src, dst in edges)
    seen = None if near is None else frozenset(at[end] for end in near if end in at)
    tries, forms = _placed_shapes(op, len(endpoints), among, seen, most)
    named = {order: tuple(endpoints[place] for place in order) for order in tries}
    return list(named.values()), [(algorithm, named[order], root) for algorithm, order, root in forms]


@remembered
def _placed_shapes(
    op: Op, n: int, edges: frozenset[Edge], near: frozenset[int] | None, most: int
) -> tuple[list[tuple[int, ...]], list[Shape]]:
    """The same by place among the endpoints: groups and channels alike ask for it once."""
    tries = orders(edges, range(n))
    rooted = _rooted(op, n, None if near is not None else len(edges))
    room, found = LOOKED_AT, []
    for order in tries:
        for algorithm, root in rooted:
            shape = algorithm, order, root
            fits, unseen = _is_among(edges, shape, near, most, min(room, LAID_OUT))
            room -= unseen
            if fits:
                own = len(Hypothesis(*shape, 1, near).edges)
                if own == len(edges) or (own and op != Op.UNKNOWN):
                    found.append(shape)
    return tries, found


@remembered
def _rooted(op: Op, n: int, edges: int | None) -> list[tuple[Algorithm, int]]:
    """Algorithms and roots for ``n`` ranks with as many edges; of a known operation no more; None: any."""
    found = []
    for algorithm in (a for a in ALGORITHMS if op in (Op.UNKNOWN, a.op) and a.fits(n)):
        roots = range(n) if algorithm.rooted else range(1)
        # Roots differ by no more than an edge a rank: most algorithms need not be laid out for each.
        if edges is None:
            found += [(algorithm, root) for root in roots]
        elif _has_edges(op, algorithm, n, 0, range(edges - n, edges + n + 1)):
            tried = range(1) if algorithm.turned else roots
            fits = [_has_edges(op, algorithm, n, root, range(edges, edges + 1)) for root in tried]
            found += [(algorithm, root) for root in roots if fits[root % len(fits)]]
    return found


def _has_edges(op: Op, algorithm: Algorithm, n: int, root: int, wanted: range) -> bool:
    """Whether it has as many edges; of a known operation it may have fewer."""
    # Rounded up, so that channels of about as many edges ask for the same.
    own = _edge_count(algorithm, n, root, 1 << wanted[-1].bit_length())
    return own in wanted or (own < wanted.start and op != Op.UNKNOWN)


@remembered
def _edge_count(algorithm: Algorithm, n: int, root: int, most: int) -> int:
    """How many edges the algorithm has, or more than ``most``; of many ranks no schedule is kept."""
    if algorithm.edges is not None:
        return algorithm.edges(n, root)
    found: set[Edge] = set()
    for send in algorithm.sends(n, 1.0, root):
        found.add((send.src, send.dst))
        if len(found) > most:
            break
    return len(found)


def _is_among(
    edges: frozenset[Edge], shape: Shape, near: frozenset[int] | None, most: int, room: int = LAID_OUT
) -> tuple[bool, int]:
    """Whether a hypothesis can be, and on how many messages that nobody saw it was looked.

    It can if all edges that would have been seen are among these, with no more than ``most`` messages on
    them, beside no more than ``room`` unseen ones. Most have an edge early on that is not. What needs more
    messages than there are is never laid out: rings of many ranks have as many as the ranks squared.
    """
    unseen, (algorithm, order, root) = 0, shape
    for send in algorithm.sends(len(order), 1.0, root):
        if (order[send.src], order[send.dst]) in edges:
            most -= 1
            if most < 0:
                return False, unseen
        elif near is None or order[send.src] in near or order[send.dst] in near or unseen >= room:
            return False, unseen
        else:
            unseen += 1
    return True, unseen


def _may_be(edges: frozenset[Edge], hypothesis: Hypothesis, most: int) -> bool:
    """As ``_is_among`` tells, at less cost: of numberings in which few ranks are near many are tried."""
    order, near = hypothesis.order, hypothesis.near or ()
    seats = frozenset(at for at, end in enumerate(order) if end in near)
    among, messages = _of_seats(hypothesis.algorithm, len(order), hypothesis.root, seats)
    return messages <= most and all((order[src], order[dst]) in edges for src, dst in among)


@remembered
def _of_seats(algorithm: Algorithm, n: int, root: int, seats: frozenset[int]) -> tuple[tuple[Edge, ...], int]:
    """Edges of these positions, and how many messages they carry."""
    counts: dict[Edge, int] = {}
    for send in algorithm.sends(n, 1.0, root):
        if send.src in seats or send.dst in seats:
            edge = (send.src, send.dst)
            counts[edge] = counts.get(edge, 0) + 1
    return tuple(counts), sum(counts.values())


@remembered
def _divisors(whole: int) -> list[int]:
    """Its divisors from 2 to 4096."""
    return [d for d in range(2, min(whole, 4096) + 1) if whole % d == 0]


@lru_cache(maxsize=256)
def synced_gather(segment: float) -> Algorithm:
    """Gather of blocks that the root asks for, a first segment of this share of a block before the rest."""
    return Algorithm(Op.GATHER, "linear", synced_up(segment), rooted=True)


@lru_cache(maxsize=256)
def split_tree(segment: float) -> Algorithm:
    """Broadcast by a split binary tree whose halves come down in segments of this share of a half."""
    return Algorithm(Op.BROADCAST, "tree", split_binary(segment), rooted=True)


@lru_cache(maxsize=256)
def segmented_ring(phases: int) -> Algorithm:
    """Ring all_reduce whose reduce_scatter goes round once for each of ``phases`` parts of a block."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for step in range(phases * (n - 1)):
            for rank in range(n):
                yield Send(step, rank, (rank + 1) % n, size / n / phases)
        for step in range(n - 1):
            for rank in range(n):
                yield Send(phases * (n - 1) + step, rank, (rank + 1) % n, size / n)

    return Algorithm(Op.ALL_REDUCE, "segmented_ring", sends)
