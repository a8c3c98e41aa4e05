"""Collectives of libraries that do not number them (Open MPI): cut from the order of messages.

Ranks of one communicator carry out the same collectives in the same order, so each edge's messages
are those of the first collective, then of the second, and so on. A hypothesis (algorithm, numbering
of ranks, segments a message) says how many messages of which size each edge has per collective; it
holds as far as counts and sizes agree. Where several hold, time decides: a collective begins where
ranks pause although they wait for nothing; inside one, a send follows its input. Idle time alone
never cuts: a rank that waits for a late peer is idle too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.model import Instance
from dpuflow.collectives.recognise import ELEMENT_BYTES, orders
from dpuflow.collectives.schedules import (
    ALGORITHMS,
    Algorithm,
    Send,
    dependencies,
    edge_sizes,
    free_ranks,
    schedule,
)
from dpuflow.schema import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.tables import Rows

Streams = dict[tuple[int, int], "NDArray[np.int64]"]
"""(src, dst) -> EXCHANGE rows in order; HOLE where a message is known to be missing."""

HOLE = -1
ALIGNMENTS = 512
"""Messages to drop at most in search of a collective's beginning: several collectives of a few ranks."""
TRIES = 24
"""Of these, the offsets to try: behind the first long pauses, and the longest."""
SAMPLE = 1024
"""Messages on which hypotheses are compared; the best one then takes all that it explains."""
NEAR = 0.9
"""An offset that comes this near the best one is taken if it drops less."""
NO_CONTRAST = 0.75
"""What a hypothesis with one send a rank is worth, which has no inner places to compare: half way
between chance and certainty, so that a coarser one must show pauses to win."""
CHANCE = 0.5
"""What a hypothesis is worth that nothing speaks for or against."""
CLEAR = 0.95
"""A hypothesis with this contrast and causality leaves nothing to improve."""


@dataclass(frozen=True)
class Columns:
    """What cutting needs of every exchange; the last element stands for HOLE: no size, no times."""

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]  # the sender's first act
    arrivals: NDArray[np.int64]


def columns_of(exchanges: Rows) -> Columns:
    """The columns of EXCHANGE rows, one element longer for HOLE."""
    offered = exchanges["offer_ns"] != NEVER
    return Columns(
        np.append(exchanges["bytes"].astype(np.int64), -1),
        np.append(np.where(offered, exchanges["offer_ns"], exchanges["data_ns"]), NEVER),
        np.append(exchanges["arrived_end_ns"], NEVER),
    )


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


@lru_cache(maxsize=4096)
def _edges(
    algorithm: Algorithm, order: tuple[int, ...], root: int
) -> dict[tuple[int, int], tuple[float, ...]]:
    units = edge_sizes(algorithm, len(order), root)
    return {(order[s], order[d]): sizes for (s, d), sizes in units.items()}


def sequenced_instances(
    exchanges: Rows, rows: NDArray[np.int64], position: NDArray[np.int64]
) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE, all of one communicator.

    ``position`` gives each endpoint's place in the default numbering of ranks. Messages that fit no
    algorithm become incomplete collectives of their own.
    """
    found: list[Instance] = []
    # ob1 numbers each edge's messages from 0 or 1: so a capture that has the first ones saw the beginning.
    heads = rows[exchanges["order"][rows] == 0]
    whole = bool((_numbers(exchanges, heads) & (exchanges["sub"][heads] <= 1)).all())
    columns = columns_of(exchanges)
    for op, streams in _numbered(exchanges, edge_streams(exchanges, rows)).items():
        found.extend(cut_streams(columns, streams, op, position, settled=whole))
    return found


Habits = dict[int, tuple["Algorithm", int, list[str]]]
"""Ranks -> the algorithm and segments that fitted last, and the alternatives: tried first next time."""


def cut_streams(
    columns: Columns,
    streams: Streams,
    op: Op,
    position: NDArray[np.int64],
    *,
    settled: bool = False,
    habits: Habits | None = None,
) -> list[Instance]:
    """The collectives of one communicator's streams; ``op`` UNKNOWN: of any operation.

    ``settled`` says that the streams begin where a collective begins. ``habits`` is what was found
    on other channels of the same job; it is brought up to date.
    """
    segmenter = _Segmenter(columns, streams, op, position)
    segmenter.habits = {} if habits is None else habits
    return segmenter.run(settled=settled)


class _Segmenter:
    """Cuts the streams of one communicator and operation into collectives, from the front."""

    def __init__(self, columns: Columns, streams: Streams, op: Op, position: NDArray[np.int64]) -> None:
        self.op = op
        self.streams = streams
        ends = {end for edge in streams for end in edge}
        self.endpoints = sorted(ends, key=lambda e: int(position[e]))
        self.sizes, self.starts, self.arrivals = columns.sizes, columns.starts, columns.arrivals
        self.habits: Habits = {}
        self.shapes: dict[frozenset[tuple[int, int]], list[Hypothesis]] = {}

    def run(self, *, settled: bool) -> list[Instance]:
        """Cut all; ``settled``: the streams begin where a collective begins."""
        found: list[Instance] = []
        stray: list[int] = []
        while self.streams:
            drop, chosen = self._align(settled)
            if chosen is None and self.op != Op.UNKNOWN and (blocks := self._equal_blocks()):
                found.extend(self._stray(stray))
                found.extend(self._unnamed(block) for block in blocks)
                stray = []
                continue
            stray.extend(self._drop(drop))
            if chosen is None:
                continue
            if stray:
                found.extend(self._stray(stray))
                stray = []
            hypothesis, alternatives = chosen
            self.habits[len(hypothesis.order)] = (hypothesis.algorithm, hypothesis.cuts, alternatives)
            found.extend(self._take(hypothesis, self._length(hypothesis), alternatives))
            settled = True
            left = sum(len(rows) for rows in self.streams.values())
            if self.op == Op.UNKNOWN and left < _messages(hypothesis):
                # The capture ends within a collective; half an all_reduce would pass for an all_gather.
                stray.extend(self._drop(left))
        if stray:
            found.extend(self._stray(stray))
        return found

    def _align(self, settled: bool) -> tuple[int, tuple[Hypothesis, list[str]] | None]:
        """How many messages to drop before cutting, and the hypothesis that holds from there.

        A capture may begin within a collective, and a lost message may break one. Then equal sizes
        fit at any offset, and the right one is where the cuts fall on pauses (``_contrast``).
        """
        usual = self._as_usual()
        if usual is not None:
            return 0, usual
        whole, ahead = dict(self.streams), self._ahead()
        tried: list[tuple[float, int, list[tuple[Hypothesis, int]]]] = []
        for drop in self._offsets(ahead):
            self.streams = dict(whole)
            self._drop(drop, ahead)
            if not self.streams:
                break
            runs = [(h, n) for h in self._hypotheses() if (n := self._length(h, SAMPLE)) > 0]
            if runs:
                hypothesis, count = self._best(runs)
                score = self._score(hypothesis, count)
                tried.append((score * min(count, 4), drop, runs))
                if (settled and drop == 0) or self._is_clear(hypothesis, count):
                    break
                if drop >= len(hypothesis.order) and drop > _messages(hypothesis):
                    break  # every offset within one collective has been tried
        self.streams = whole
        if not tried:
            # What is not named and not understood here will not be further on.
            every = sum(len(rows) for rows in whole.values())
            return every if self.op == Op.UNKNOWN else min(every, ALIGNMENTS), None
        best = max(score for score, _, _ in tried)
        drop, runs = next((drop, runs) for score, drop, runs in tried if score >= NEAR * best)
        self.streams = dict(whole)
        self._drop(drop, ahead)
        hypothesis, count = self._best(runs)
        self.streams = whole
        alternatives = [
            h.algorithm.name
            for h, n in runs
            if n == count and h.cuts == hypothesis.cuts and h.algorithm.name != hypothesis.algorithm.name
        ]
        return drop, (hypothesis, list(dict.fromkeys(alternatives)))

    def _as_usual(self) -> tuple[Hypothesis, list[str]] | None:
        """What fitted another channel, if nothing here speaks against it."""
        habit = self.habits.get(len(self.endpoints))
        if habit is None:
            return None
        algorithm, cuts, alternatives = habit
        for hypothesis in self._hypotheses():
            if (hypothesis.algorithm, hypothesis.cuts) == (algorithm, cuts):
                count = self._length(hypothesis, SAMPLE)
                if count and self._is_clear(hypothesis, count, NO_CONTRAST):
                    return hypothesis, alternatives
        return None

    def _equal_blocks(self) -> list[NDArray[np.int64]]:
        """The collectives of an algorithm that no schedule describes, if every edge repeats itself.

        As many as the edge with the fewest messages can tell: each edge carries a fixed number of
        messages a collective, the same sizes every time. What is left over at the end is dropped.
        """
        fewest = min(len(rows) for rows in self.streams.values())
        for count in range(fewest, 1, -1):
            per = {edge: len(rows) // count for edge, rows in self.streams.items()}
            if any(len(rows) - count * per[edge] >= per[edge] for edge, rows in self.streams.items()):
                continue
            parts = [rows[: count * per[edge]].reshape(count, -1) for edge, rows in self.streams.items()]
            sizes = [np.where(part == HOLE, -1, self.sizes[part]) for part in parts]
            if all(((size == size.max(axis=0)) | (size < 0)).all() for size in sizes):
                self.streams = {}
                blocks = [row[row != HOLE] for row in np.concatenate(parts, axis=1)]
                return [block for block in blocks if len(block)]
        return []

    def _unnamed(self, rows: NDArray[np.int64]) -> Instance:
        rows = rows[np.argsort(self.starts[rows], kind="stable")]
        return Instance(rows, self.op, list(self.endpoints), confidence=0.7)

    def _ahead(self) -> list[tuple[int, int]]:
        """The edges of the next messages, in order of time."""
        edges = list(self.streams)
        heads = [self.streams[edge][:ALIGNMENTS] for edge in edges]
        times = [np.maximum.accumulate(self.starts[rows]) for rows in heads]
        which = np.repeat(np.arange(len(edges)), [len(rows) for rows in heads])
        order = np.argsort(np.concatenate(times), kind="stable")[:ALIGNMENTS]
        return [edges[i] for i in which[order].tolist()]

    def _offsets(self, ahead: Sequence[tuple[int, int]]) -> list[int]:
        """Numbers of messages to drop that are worth a try: where a sender had paused longest."""
        at = dict.fromkeys(self.streams, 0)
        rows = np.empty(len(ahead), np.int64)
        for i, edge in enumerate(ahead):
            rows[i] = self.streams[edge][at[edge]]
            at[edge] += 1
        src = np.array([edge[0] for edge in ahead])
        dst = np.array([edge[1] for edge in ahead])
        pause = np.zeros(len(ahead), np.int64)
        for rank in np.unique(src).tolist():
            mine = np.flatnonzero((src == rank) & (rows != HOLE))
            events = np.sort(np.concatenate([self.starts[rows[mine]], self.arrivals[rows[dst == rank]]]))
            before = np.searchsorted(events, self.starts[rows[mine]]) - 1
            pause[mine] = np.where(before >= 0, self.starts[rows[mine]] - events[before], 0)
        # A stream of a few collectives has few places to begin at.
        tries = min(TRIES, len(ahead) // len(self.endpoints)) // 2
        first = np.flatnonzero(2 * pause[1:] >= pause[1:].max(initial=0))[:tries] + 1
        longest = np.argsort(-pause[1:], kind="stable")[:tries] + 1
        return [0, *np.unique(np.concatenate([first, longest])).tolist()]

    # -- hypotheses --------------------------------------------------------------------------

    def _hypotheses(self) -> Iterator[Hypothesis]:
        """All that could hold from here: whole messages first, then messages in segments."""
        for base in self._shapes():
            yield base
            if base.algorithm.cuts:
                for cuts in self._cuts(base.counts):
                    yield replace(base, cuts=cuts)

    def _shapes(self) -> list[Hypothesis]:
        """Algorithms, numberings and roots whose edges are among the streams'.

        Of unknown operation, only what explains every edge is worth a try.
        """
        edges = frozenset(self.streams)
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
            for algorithm in self._phased(len(self.endpoints))
            if (base := Hypothesis(algorithm, order, 0, 1)).counts.keys() <= edges
        ]
        return self.shapes[edges] + phased

    def _phased(self, n: int) -> Iterator[Algorithm]:
        """The segmented ring that the sizes suggest: its reduce_scatter's messages are parts of a block."""
        if self.op in (Op.UNKNOWN, Op.ALL_REDUCE) and n > 1:
            head = max(int(self.sizes[rows[0]]) for rows in self.streams.values())
            largest = max(int(self.sizes[rows[: 64 * n]].max()) for rows in self.streams.values())
            phases = round(largest / head) if head > 0 else 1
            longest = max(len(rows) for rows in self.streams.values())
            if phases > 1 and (phases + 1) * (n - 1) <= longest:
                yield segmented_ring(phases)

    def _cuts(self, counts: dict[tuple[int, int], tuple[float, ...]]) -> list[int]:
        """Segments per message worth trying: up to a shorter last one, or what divides the first sizes.

        The first collective's messages are of one size, so their number on an edge, up to where the
        size changes, is a multiple of its segments.
        """
        tries: set[int] = set()
        whole = 0
        for edge, unit in counts.items():
            seen = self.sizes[self.streams[edge][:SAMPLE]]
            largest = seen[int(np.argmax(seen >= 0))]
            changes = np.flatnonzero((seen != largest) & (seen >= 0))
            alike = int(changes[0]) if len(changes) else len(self.streams[edge])
            whole = gcd(whole, alike // len(unit))
            if len(changes) and seen[alike] < largest:
                tries.add(alike + 1)
        tries |= {d for d in range(2, min(whole, 4096) + 1) if whole % d == 0}
        return sorted(tries - {1})

    def _length(self, hypothesis: Hypothesis, most: int | None = None) -> int:
        """How many collectives in a row the hypothesis explains from here.

        ``most`` bounds the messages looked at, though never to fewer than four collectives.
        """
        counts = hypothesis.counts
        if self._earliest() not in counts:
            return 0  # the first message of all must belong to the first collective
        blocks = {}
        for edge, sizes in counts.items():
            per = len(sizes) * hypothesis.cuts
            whole = len(self.streams[edge]) // per
            if whole == 0:
                return 0
            blocks[edge] = (per, whole)
        count = min(whole for _, whole in blocks.values())
        if most is not None:
            count = min(count, max(4, most // _messages(hypothesis)))
        shares = {
            edge: self.sizes[self.streams[edge][: count * per]].reshape(count, per)
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

    def _best(self, runs: list[tuple[Hypothesis, int]]) -> tuple[Hypothesis, int]:
        """The hypothesis that explains most; among equals the one whose cuts fall where ranks pause."""

        def explained(hypothesis: Hypothesis, count: int) -> int:
            # What no longer fitted into the sample tells nothing.
            return min(count * _messages(hypothesis), SAMPLE * 3 // 4)

        most = max(explained(h, n) for h, n in runs)
        equal = [(h, n) for h, n in runs if 2 * explained(h, n) > most]
        if len(equal) == 1:
            return equal[0]

        # Of equal ones the finest: it assumes least about what belongs together.
        return max(equal, key=lambda r: (round(self._score(*r) * explained(*r) / most, 2), r[1]))

    def _contrast(self, hypothesis: Hypothesis, count: int) -> float:
        """Share of (first send, later send) pairs of a rank in which the first paused twice as long.

        A first send's pause counts from the rank's last event in the collective before, a later one's
        from its last event in the same collective. Only ranks whose first send needs no input are
        asked: the others pause for their peers.
        """
        blocks = {
            edge: self.streams[edge][: count * len(sizes) * hypothesis.cuts].reshape(count, -1)
            for edge, sizes in hypothesis.counts.items()
        }
        wins = total = 0.0
        alone = True
        for place in free_ranks(hypothesis.algorithm, len(hypothesis.order), hypothesis.root):
            rank = hypothesis.order[place]
            sent = np.concatenate(
                [self.starts[rows] for (src, _), rows in blocks.items() if src == rank], axis=1
            )
            inputs = [self.arrivals[rows] for (_, dst), rows in blocks.items() if dst == rank]
            heard = np.concatenate(inputs, axis=1) if inputs else sent[:, :0]
            first, later = _pauses(sent, heard)
            wins += float(np.searchsorted(np.sort(later), first // 2).sum())
            total += len(first) * len(later)
            alone &= not len(later)
        return wins / total if total else NO_CONTRAST if alone else CHANCE

    def _causality(self, hypothesis: Hypothesis, count: int) -> tuple[float, float]:
        """How well inputs explain when messages were sent: two shares.

        First, of the sends that need an input, those that left after it. Second, of these, those that
        left before any other input arrived: where two hypotheses hold, the one whose inputs are what
        the sends really waited for is the tighter. Both stamps are of the sender's own node, so no
        clock error enters.
        """
        held = last = asked = 0
        cuts, order = hypothesis.cuts, hypothesis.order
        blocks = {
            edge: self.streams[edge][: count * len(sizes) * cuts].reshape(count, -1, cuts)
            for edge, sizes in hypothesis.counts.items()
        }
        heard: dict[int, list[NDArray[np.int64]]] = {}
        for (_, dst), rows in blocks.items():
            heard.setdefault(dst, []).append(self.arrivals[rows].reshape(count, -1))
        inputs = {rank: np.concatenate(parts, axis=1) for rank, parts in heard.items()}
        for send, needed in dependencies(hypothesis.algorithm, len(order), hypothesis.root):
            sent, got = (blocks[order[src], order[dst]][:, at, :] for (src, dst), at in (send, needed))
            sent_ns, got_ns = self.starts[sent], self.arrivals[got]
            known = (sent_ns != NEVER) & (got_ns != NEVER)
            after = known & (sent_ns >= got_ns)
            asked += int(known.sum())
            held += int(after.sum())
            others = inputs[order[send[0][0]]][:, None, :]
            between = (others > got_ns[:, :, None]) & (others <= sent_ns[:, :, None])
            last += int((after & ~between.any(axis=2)).sum())
        return (held / asked, last / max(held, 1)) if asked else (1.0, CHANCE)

    def _is_clear(self, hypothesis: Hypothesis, count: int, contrast: float = CLEAR) -> bool:
        """Whether cuts fall on pauses and sends follow their inputs as well as one can wish."""
        if self._contrast(hypothesis, count) < contrast:
            return False
        return self._causality(hypothesis, count)[0] >= CLEAR

    def _score(self, hypothesis: Hypothesis, count: int) -> float:
        contrast, (held, tight) = self._contrast(hypothesis, count), self._causality(hypothesis, count)
        if hypothesis.algorithm.rooted:
            tight = contrast  # segments stream down a tree: more inputs are there than the next send needs
        return held * (contrast + tight) / 2

    # -- taking ------------------------------------------------------------------------------

    def _take(self, hypothesis: Hypothesis, count: int, alternatives: list[str]) -> list[Instance]:
        counts = hypothesis.counts
        blocks = []
        for edge, sizes in counts.items():
            per = len(sizes) * hypothesis.cuts
            blocks.append(self.streams[edge][: count * per].reshape(count, per))
            self._advance(edge, count * per)
        together = np.concatenate(blocks, axis=1)
        # What each message of a collective is of the buffer, in the order of ``together``.
        cuts = hypothesis.cuts
        share = np.concatenate([np.repeat(np.array(sizes) / cuts, cuts) for sizes in counts.values()])
        opening = self._opening(hypothesis)
        algorithm = hypothesis.algorithm
        found = []
        for block in together:
            slot = block != HOLE
            blind = frozenset(opening[~slot].tolist()) - {-1}
            holes = int((~slot).sum())
            block = block[block != HOLE]
            block = block[np.argsort(self.starts[block], kind="stable")]
            size = float(self.sizes[block].sum()) / share[slot].sum() if share[slot].any() else 0.0
            found.append(
                Instance(
                    block,
                    algorithm.op,
                    list(hypothesis.order),
                    algorithm,
                    alternatives,
                    hypothesis.root if algorithm.rooted else None,
                    round(size),
                    confidence=1.0 if not holes else len(block) / (len(block) + holes),
                    blind=blind,
                )
            )
        return found

    def _opening(self, hypothesis: Hypothesis) -> NDArray[np.int64]:
        """For each message of a block the position that opens with it, -1 for later ones."""
        order, cuts = hypothesis.order, hypothesis.cuts
        first: dict[int, int] = {}
        for send in schedule(hypothesis.algorithm, len(order), hypothesis.root):
            first.setdefault(send.src, send.step)
        steps = {
            (order[send.src], order[send.dst]): send.src
            for send in reversed(schedule(hypothesis.algorithm, len(order), hypothesis.root))
            if send.step == first[send.src]
        }
        parts = []
        for edge, sizes in hypothesis.counts.items():
            part = np.full(len(sizes) * cuts, -1)
            part[0] = steps.get(edge, -1)
            parts.append(part)
        return np.concatenate(parts)

    def _earliest(self) -> tuple[int, int]:
        return min(self.streams, key=self._head_ns)

    def _head_ns(self, edge: tuple[int, int]) -> int:
        """When the edge's next message that was seen began."""
        rows = self.streams[edge]
        return int(self.starts[rows[int(np.argmax(rows != HOLE))]])

    def _drop(self, count: int, ahead: Sequence[tuple[int, int]] | None = None) -> list[int]:
        """Take away the next ``count`` messages in order of time; returns their rows."""
        rows: list[int] = []
        while count > len(rows) and self.streams:
            by: dict[tuple[int, int], int] = {}
            for edge in (ahead or self._ahead())[: count - len(rows)]:
                by[edge] = by.get(edge, 0) + 1
            ahead = None
            for edge, some in by.items():
                rows.extend(self.streams[edge][:some].tolist())
                self._advance(edge, some)
        return rows

    def _advance(self, edge: tuple[int, int], by: int) -> None:
        rest = self.streams[edge][by:]
        if len(rest):
            self.streams[edge] = rest
        else:
            del self.streams[edge]

    def _stray(self, rows: list[int]) -> list[Instance]:
        rows = [row for row in rows if row != HOLE]
        if not rows:
            return []
        return [
            Instance(np.array(rows, np.int64), self.op, list(self.endpoints), complete=False, confidence=0.3)
        ]


def _messages(hypothesis: Hypothesis) -> int:
    """Messages of one collective."""
    return hypothesis.cuts * sum(len(sizes) for sizes in hypothesis.counts.values())


def edge_streams(exchanges: Rows, rows: NDArray[np.int64]) -> Streams:
    """``rows`` by (src, dst), each in order."""
    picked = exchanges[rows]
    edge = (picked["src"].astype(np.int64) << 32) | picked["dst"]
    in_order = np.lexsort((picked["order"], edge))
    edge = edge[in_order]
    bounds = np.flatnonzero(np.r_[True, edge[1:] != edge[:-1], True])
    return {
        (int(edge[low] >> 32), int(edge[low] & 0xFFFFFFFF)): rows[in_order[low:high]]
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    }


def _numbers(exchanges: Rows, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the library numbers the messages of each pair of ranks and communicator."""
    wire = exchanges["wire"][rows]
    return np.asarray((wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER), bool)


def _numbered(exchanges: Rows, streams: Streams) -> dict[Op, Streams]:
    """Each operation's streams. Numbers that ob1 gave out but nobody saw become HOLEs.

    A hole goes to the operation of the message before it, or of the one after where none is.
    """
    found: dict[Op, Streams] = {}
    for edge, rows in streams.items():
        number = exchanges["sub"][rows].astype(np.int64)
        if not _numbers(exchanges, rows).all():
            number = np.arange(len(rows))
        skipped = (np.diff(number, prepend=number[:1] - 1) - 1) % (1 << 16)
        # A jump by more than what could hide is a new start, not a hole.
        skipped = np.where(skipped > len(rows), 0, skipped)
        ops = exchanges["op"][rows]
        own = np.repeat(rows, skipped + 1)
        whose = np.repeat(np.r_[ops[:1], ops[:-1]], skipped + 1)
        last = np.cumsum(skipped + 1) - 1
        hole = np.ones(len(own), bool)
        hole[last] = False
        own[hole] = HOLE
        whose[last] = ops
        for op in np.unique(whose).tolist():
            found.setdefault(Op(op), {})[edge] = own[whose == op]
    return found


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


def _pauses(sent: NDArray[np.int64], heard: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How long one rank had been without any event before its first and its later sends, ns.

    Rows are collectives; ``sent`` and ``heard`` are when it sent and when inputs arrived, NEVER where
    not known. The first collective's first send is left out: what came before it was not seen.
    """
    times = np.concatenate([sent, heard], axis=1)
    is_send = np.concatenate([np.ones(sent.shape, bool), np.zeros(heard.shape, bool)], axis=1)
    order = np.lexsort((is_send, times), axis=1)
    times, is_send = np.take_along_axis(times, order, 1), np.take_along_axis(is_send, order, 1)
    begin = np.where(sent == NEVER, np.iinfo(np.int64).max, sent).min(axis=1)
    first = begin[1:] - times[:-1, -1]
    gaps = times[:, 1:] - times[:, :-1]
    known = is_send[:, 1:] & (times[:, :-1] != NEVER) & (times[:, 1:] > begin[:, None])
    return np.maximum(first, 0), gaps[known]
