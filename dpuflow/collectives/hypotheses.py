"""What the collectives of one communicator might look like, and how far each guess explains its messages.

A hypothesis (algorithm, numbering of ranks, root, segments a message) says how many messages of which
size each edge carries per collective; it holds as far as counts and sizes agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.recognise import ELEMENT_BYTES, orders
from dpuflow.collectives.schedules import ALGORITHMS, Algorithm, Send, edge_sizes
from dpuflow.collectives.streams import HOLE
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.streams import Columns, Streams

SAMPLE = 1024
"""Messages on which hypotheses are compared; the best one then takes all that it explains."""


@dataclass(frozen=True)
class Hypothesis:
    """How each collective of a run might look; ``cuts`` segments per message of the schedule."""

    algorithm: Algorithm
    order: tuple[int, ...]
    root: int
    cuts: int

    @property
    def counts(self) -> dict[tuple[int, int], tuple[float, ...]]:
        """(src, dst) endpoints -> sizes of the schedule's messages for a buffer of one byte."""
        return _edges(self.algorithm, self.order, self.root)

    @property
    def messages(self) -> int:
        """Messages of one collective."""
        return self.cuts * sum(len(sizes) for sizes in self.counts.values())


@lru_cache(maxsize=4096)
def _edges(
    algorithm: Algorithm, order: tuple[int, ...], root: int
) -> dict[tuple[int, int], tuple[float, ...]]:
    units = edge_sizes(algorithm, len(order), root)
    return {(order[s], order[d]): sizes for (s, d), sizes in units.items()}


class Proposer:
    """Names the hypotheses that streams might follow, and measures how far they do.

    ``op`` is the operation that the library names, UNKNOWN where it names none; ``endpoints`` the
    ranks in the default numbering.
    """

    def __init__(self, columns: Columns, op: Op, endpoints: Sequence[int]) -> None:
        self.op = op
        self.endpoints = endpoints
        self.sizes, self.starts = columns.sizes, columns.starts
        self.shapes: dict[frozenset[tuple[int, int]], list[Hypothesis]] = {}

    def propose(self, streams: Streams) -> Iterator[Hypothesis]:
        """All that could hold from here: whole messages first, then messages in segments."""
        for base in self._shapes(streams):
            yield base
            if base.algorithm.cuts:
                for cuts in self._cuts(streams, base.counts):
                    yield replace(base, cuts=cuts)

    def _shapes(self, streams: Streams) -> list[Hypothesis]:
        """Algorithms, numberings and roots whose edges are among the streams'.

        Of unknown operation, only what explains every edge is worth a try.
        """
        edges = frozenset(streams)
        if edges not in self.shapes:
            n = len(self.endpoints)
            fixed = [a for a in ALGORITHMS if self.op in (Op.UNKNOWN, a.op) and a.fits(n)]
            self.shapes[edges] = [
                base
                for order in orders(edges, self.endpoints)
                for algorithm in fixed
                for root in (range(n) if algorithm.rooted else (0,))
                if (base := Hypothesis(algorithm, order, root, 1)).counts.keys() <= edges
                and (self.op != Op.UNKNOWN or len(base.counts) == len(edges))
            ]
        phased = [
            base
            for order in orders(edges, self.endpoints)
            for algorithm in self._phased(streams, len(self.endpoints))
            if (base := Hypothesis(algorithm, order, 0, 1)).counts.keys() <= edges
        ]
        return self.shapes[edges] + phased

    def _phased(self, streams: Streams, n: int) -> Iterator[Algorithm]:
        """The segmented ring that the sizes suggest: its reduce_scatter's messages are parts of a block."""
        if self.op in (Op.UNKNOWN, Op.ALL_REDUCE) and n > 1:
            head = max(int(self.sizes[rows[0]]) for rows in streams.values())
            largest = max(int(self.sizes[rows[: 64 * n]].max()) for rows in streams.values())
            phases = round(largest / head) if head > 0 else 1
            longest = max(len(rows) for rows in streams.values())
            if phases > 1 and (phases + 1) * (n - 1) <= longest:
                yield segmented_ring(phases)

    def _cuts(self, streams: Streams, counts: dict[tuple[int, int], tuple[float, ...]]) -> list[int]:
        """Segments per message worth trying: up to a shorter last one, or what divides the first sizes.

        The first collective's messages are of one size, so their number on an edge, up to where the
        size changes, is a multiple of its segments.
        """
        tries: set[int] = set()
        whole = 0
        for edge, unit in counts.items():
            seen = self.sizes[streams[edge][:SAMPLE]]
            largest = seen[int(np.argmax(seen >= 0))]
            changes = np.flatnonzero((seen != largest) & (seen >= 0))
            alike = int(changes[0]) if len(changes) else len(streams[edge])
            whole = gcd(whole, alike // len(unit))
            if len(changes) and seen[alike] < largest:
                tries.add(alike + 1)
        tries |= {d for d in range(2, min(whole, 4096) + 1) if whole % d == 0}
        return sorted(tries - {1})

    def run_length(self, streams: Streams, hypothesis: Hypothesis, most: int | None = None) -> int:
        """How many collectives in a row the hypothesis explains from here.

        ``most`` bounds the messages looked at, though never to fewer than four collectives.
        """
        counts = hypothesis.counts
        if self._earliest(streams) not in counts:
            return 0  # the first message of all must belong to the first collective
        blocks = {}
        for edge, sizes in counts.items():
            per = len(sizes) * hypothesis.cuts
            whole = len(streams[edge]) // per
            if whole == 0:
                return 0
            blocks[edge] = (per, whole)
        count = min(whole for _, whole in blocks.values())
        if most is not None:
            count = min(count, max(4, most // hypothesis.messages))
        shares = {
            edge: self.sizes[streams[edge][: count * per]].reshape(count, per)
            for edge, (per, _) in blocks.items()
        }
        # The buffer's size, from the messages whose own size is known.
        known = np.add.reduce([np.where(share >= 0, share, 0).sum(axis=1) for share in shares.values()])
        units = np.add.reduce(
            [
                ((share >= 0) * np.repeat(np.array(counts[edge]) / hypothesis.cuts, hypothesis.cuts)).sum(
                    axis=1
                )
                for edge, share in shares.items()
            ]
        )
        size = known / np.maximum(units, 1e-12)
        good = np.ones(count, bool)
        if hypothesis.algorithm.op == Op.BARRIER:
            good &= known == 0
        elif self.op == Op.UNKNOWN:
            good &= known > 0
        for edge, share in shares.items():
            expected = np.array(counts[edge])[None, :] * size[:, None]
            parts = share.reshape(count, len(counts[edge]), hypothesis.cuts)
            hole = (parts < 0).any(axis=2)
            close = np.abs(parts.sum(axis=2) - expected) <= ELEMENT_BYTES * hypothesis.cuts
            good &= (close | hole).all(axis=1)
            if hypothesis.cuts > 1:  # segments are equal but for a shorter last one
                first = parts.max(axis=2, keepdims=True)
                alike = (parts[:, :, :-1] == first) | (parts[:, :, :-1] < 0)
                good &= alike.all(axis=(1, 2)) & (parts[:, :, -1] <= first[:, :, 0]).all(axis=1)
        good &= np.add.reduce([(share >= 0).sum(axis=1) for share in shares.values()]) > 0
        bad = np.flatnonzero(~good)
        return int(bad[0]) if len(bad) else count

    def _earliest(self, streams: Streams) -> tuple[int, int]:
        return min(streams, key=lambda edge: self._head_ns(streams[edge]))

    def _head_ns(self, rows: NDArray[np.int64]) -> int:
        """When the edge's next message that was seen began."""
        return int(self.starts[rows[int(np.argmax(rows != HOLE))]])


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

    return Algorithm(Op.ALL_REDUCE, "segmented_ring", sends, lambda n, t: t / (2 * (n - 1)))
