"""Collectives of libraries that do not number them (Open MPI): cut from the order of messages.

Ranks of one communicator carry out the same collectives in the same order, so each edge's messages
are those of the first collective, then of the second, and so on. The hypothesis (``hypotheses``) that
explains most counts and sizes is cut by; where several do, time decides (``scoring``). Idle time alone
never cuts: a rank that waits for a late peer is idle too.

The list of operations has no word for prefix operations (MPI_Scan, MPI_Exscan), so they are ``unknown``. Open
MPI passes partial results from each rank to the next (ompi/mca/coll/base: linear): on the wire that is a
chain, in which each sends what needs its input. What is of another shape is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, spans
from dpuflow.framing import MPI_SCAN_TAGS
from dpuflow.matching.hypotheses import SAMPLE, Proposer
from dpuflow.matching.model import MOST, TWICE, Instance, InstanceView, placed
from dpuflow.matching.program import in_program_order, read_processes
from dpuflow.matching.recognise import whole_size
from dpuflow.matching.scoring import Scorer
from dpuflow.matching.shared_addresses import Processes, shares_addresses
from dpuflow.matching.streams import HOLE, edge_streams, has_numbers, numbered_streams
from dpuflow.schedules.graph import schedule
from dpuflow.schema.rows import MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.hypotheses import Hypothesis
    from dpuflow.matching.model import Job
    from dpuflow.matching.streams import Edge, Streams
    from dpuflow.schema.tables import Rows

IN_A_ROW = 4
"""So many of the same collectives in a row are followed by it once more."""
ALIGNMENTS = 512
"""Messages to drop at most in search of a collective's beginning: several collectives of a few ranks."""
TRIES = 24
"""Of these, the offsets to try: behind the first long pauses, and the longest."""
EARLY = 4
"""So many messages a rank at the front have their own longest pauses tried."""


def sequenced_instances(job: Job, rows: Ints) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE, all of one communicator.

    Messages that fit no algorithm become incomplete collectives of their own.
    """
    found: list[Instance] = []
    exchanges, near = job.exchanges, job.near
    if near is None and shares_addresses(job, rows):
        processes = Processes(job, rows)
        if processes.ranks <= len(rows):  # else a hello names a rank that there cannot be
            return [processes.instance(each) for each in read_processes(job, rows, processes)]
    # ob1 numbers each edge's messages from 0 or 1: so a capture that has the first ones saw the beginning.
    heads = rows[exchanges["order"][rows] == 0]
    opening = (exchanges["flags"][heads] & MessageFlag.OPENING) != 0
    whole = bool((opening | (has_numbers(exchanges, heads) & (exchanges["sub"][heads] <= 1))).all())
    parts = numbered_streams(exchanges, edge_streams(exchanges, rows))
    begins = {op: streams.at.copy() for op, streams in parts.items()}
    places = Places()
    for op, streams in parts.items():
        found.extend(cut_streams(job, streams, op, settled=whole, places=places))
    if near is None:
        return list(in_program_order(job, found))
    if len(places.taken) < 2:
        return found
    # A communicator has one numbering of its ranks: the one that explains most of all of its collectives.
    usual = max(places.fitting, key=lambda order: (*places.fitting[order], -len(order)))
    found = []
    for op, streams in parts.items():
        streams.back_to(begins[op])
        found.extend(cut_streams(job, streams, op, settled=whole, places=Places(usual=usual)))
    return found


def scan_rows(exchanges: Rows) -> Ints:
    """The rows of EXCHANGE that carry a prefix operation's tag."""
    wire = exchanges["wire"]
    ob1 = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (exchanges["op"] == Op.UNKNOWN)
    tags = np.array([tag % (1 << 32) for tag in MPI_SCAN_TAGS], np.uint32)
    return np.flatnonzero(ob1 & np.isin(exchanges["tag"], tags)) if ob1.any() else np.zeros(0, np.int64)


def scan_instances(job: Job, rows: Ints) -> list[Instance]:
    """The prefix operations among ``rows`` of one communicator; the rest as ``sequenced_instances``."""
    exchanges = job.exchanges
    return [
        replace(instance, op=Op.UNKNOWN, alternatives=[])
        for streams in numbered_streams(exchanges, edge_streams(exchanges, rows)).values()
        for instance in cut_streams(job, streams, Op.BROADCAST)
        if instance.algorithm is not None and (instance.algorithm.name == "chain" or len(instance.order) == 2)
    ]


@dataclass
class Places:
    """How the ranks of a communicator may be numbered of which only some were captured."""

    usual: tuple[int, ...] | None = None  # this is known to hold
    # Numbering -> messages of collectives that it explains, and what time says of that.
    fitting: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)
    taken: set[tuple[int, ...]] = field(default_factory=set)  # by which collectives were cut

    def note(self, chosen: Hypothesis, fitting: Iterable[tuple[Hypothesis, int, float]]) -> None:
        """Add what a choice tells: (hypothesis, messages it explains, its score) of all that fitted."""
        self.taken.add(chosen.order)
        best: dict[tuple[int, ...], tuple[int, float]] = {}
        for hypothesis, messages, score in fitting:
            best[hypothesis.order] = max(best.get(hypothesis.order, (0, 0.0)), (messages, score))
        for order, (messages, score) in best.items():
            before = self.fitting.get(order, (0, 0.0))
            self.fitting[order] = before[0] + messages, before[1] + messages * score


def cut_streams(
    job: Job, streams: Streams, op: Op, *, settled: bool = False, places: Places | None = None
) -> list[Instance]:
    """The collectives of one communicator's streams; ``op`` UNKNOWN: of any operation.

    ``settled`` says that the streams begin where a collective begins. ``places`` is what was found on other
    operations of the same communicator; it is brought up to date.
    """
    segmenter = _Segmenter(job, streams, op)
    segmenter.places = places or Places()
    return segmenter.run(settled=settled)


class _Chosen(NamedTuple):
    """A hypothesis, with names of other algorithms, and other operations, that fit as well."""

    hypothesis: Hypothesis
    names: list[str]
    alike: tuple[Op, ...]


class _Segmenter:
    """Cuts the streams of one communicator and operation into collectives, from the front."""

    def __init__(self, job: Job, streams: Streams, op: Op) -> None:
        self.op = op
        self.streams = streams
        self.endpoints = job.ordered(end for edge in streams.edges for end in edge)
        columns = job.columns
        self.sizes, self.starts, self.arrivals = columns.sizes, columns.starts, columns.arrivals
        self.proposer = Proposer(job, op, self.endpoints)
        self.scorer = Scorer(columns)
        self.places = Places()

    def run(self, *, settled: bool) -> list[Instance]:
        """Cut all; ``settled``: the streams begin where a collective begins."""
        found: list[Instance] = []
        stray: list[Ints] = []
        tail = 0
        while self.streams:
            drop, chosen = self._align(settled)
            # A job ends in one that one rank makes larger, and others have begun the next: it is not what a
            # part of that looks like.
            if self.op == Op.UNKNOWN and self.streams.count < tail and np.sum(drop):
                drop, chosen = self.streams.count, None
            stray.append(self._drop(drop))
            if chosen is None:
                continue
            if stray:
                found.extend(self._stray(stray))
                stray = []
            hypothesis = chosen.hypothesis
            count = self.proposer.run_length(self.streams, hypothesis)
            found.extend(self._take(chosen, count))
            settled = True
            tail = TWICE * hypothesis.messages if count >= IN_A_ROW else 0
            left = self.streams.count
            if self.op == Op.UNKNOWN and left < hypothesis.messages:
                # The capture ends within a collective; half an all_reduce would pass for an all_gather.
                stray.append(self._drop(left))
        if stray:
            found.extend(self._stray(stray))
        return found

    def _align(self, settled: bool) -> tuple[Ints | int, _Chosen | None]:
        """What to drop before cutting (``_drop``), and the hypothesis that holds from there.

        A capture may begin within a collective, and a lost message may break one. Then equal sizes
        fit at any offset, and the right one is where the cuts fall on pauses (``_contrast``).
        """
        whole = self.streams.at.copy()
        tried: list[tuple[float, int, Hypothesis, int, list[tuple[Hypothesis, int]]]] = []
        beginnings = self._beginnings()
        for which, beginning in enumerate(beginnings):
            self.streams.back_to(whole)
            self.streams.take(slice(None), beginning)
            drop = int(beginning.sum())
            if not self.streams:
                break
            runs = [
                (h, n)
                for h in self.proposer.propose(self.streams)
                if (n := self.proposer.run_length(self.streams, h, SAMPLE)) > 0
            ]
            if runs:
                hypothesis, count = self.scorer.best(self.streams, runs, self.places.usual)
                score = self.scorer.score(self.streams, hypothesis, count)
                tried.append((score * min(count, 4), which, hypothesis, count, runs))
                if (settled and drop == 0) or self.scorer.is_clear(self.streams, hypothesis, count):
                    break
                if drop >= len(hypothesis.order) and drop > hypothesis.messages:
                    break  # every offset within one collective has been tried
        self.streams.back_to(whole)
        if not tried:
            # What is not named and not understood here will not be further on.
            every = self.streams.count
            return every if self.op == Op.UNKNOWN else min(every, ALIGNMENTS), None
        best, _, like, *_ = max(tried, key=lambda each: each[0])
        which, hypothesis, count, runs = next(
            (which, hypothesis, count, runs)
            for score, which, hypothesis, count, runs in tried
            if score >= MOST * best and (hypothesis.algorithm, hypothesis.cuts) == (like.algorithm, like.cuts)
        )
        if hypothesis.near is not None:
            self.streams.take(slice(None), beginnings[which])
            self.places.note(hypothesis, self.scorer.fitting(self.streams, runs, count * hypothesis.messages))
            self.streams.back_to(whole)
        own, others = hypothesis.algorithm, [h for h, n in runs if n == count and h.cuts == hypothesis.cuts]
        names = dict.fromkeys(h.algorithm.name for h in others if h.algorithm.name != own.name)
        ops = dict.fromkeys(h.algorithm.op for h in others if h.algorithm.name == own.name)
        alike = tuple(op for op in ops if op not in (own.op, Op.BARRIER))  # a barrier's messages are empty
        return beginnings[which], _Chosen(hypothesis, list(names), alike)

    def _ahead(self) -> list[tuple[int, int]]:
        """The edges of the next messages, in order of time."""
        rows, at, end = self.streams.rows, self.streams.at, self.streams.end
        left = np.flatnonzero(at < end)
        first = self.starts[rows[at[left]]]
        if len(left) > ALIGNMENTS:  # what begins later than so many others is not among the next
            left = left[first <= np.partition(first, ALIGNMENTS - 1)[ALIGNMENTS - 1]]
        times = [
            np.maximum.accumulate(self.starts[rows[low : min(high, low + ALIGNMENTS)]])
            for low, high in zip(at[left].tolist(), end[left].tolist(), strict=True)
        ]
        which = np.repeat(left, list(map(len, times)))
        order = np.argsort(np.concatenate(times), kind="stable")[:ALIGNMENTS]
        return [self.streams.edges[i] for i in which[order].tolist()]

    def _beginnings(self) -> list[Ints]:
        """What to drop of each stream so that a collective may begin behind it: where a sender paused.

        The fewest messages first, none at all before all others.
        """
        ahead = self._ahead()
        at = self.streams.at.tolist()
        lanes = np.array([self.streams.number[edge] for edge in ahead])
        rows = np.empty(len(ahead), np.int64)
        for i, lane in enumerate(lanes.tolist()):
            rows[i] = self.streams.rows[at[lane]]
            at[lane] += 1
        pause = self._pauses(ahead, rows)
        # A stream of a few collectives has few places to begin at.
        tries = min(TRIES, len(ahead) // len(self.endpoints)) // 2
        first = np.flatnonzero(2 * pause[1:] >= pause[1:].max(initial=0))[:tries] + 1
        longest = np.argsort(-pause[1:], kind="stable")[:tries] + 1
        # Later pauses may be longer; yet a few messages may be all that a collective lacks here.
        early = np.argsort(-pause[1 : 1 + EARLY * len(self.endpoints)], kind="stable")[: tries // 2] + 1
        found = {(0,) * len(at): np.zeros(len(at), np.int64)}
        for place in distinct(np.concatenate([first, longest, early])).tolist():
            beginning = np.bincount(lanes[:place], minlength=len(at))
            found.setdefault(tuple(beginning.tolist()), beginning)
        return sorted(found.values(), key=lambda beginning: int(beginning.sum()))

    def _pauses(self, edges: Sequence[Edge], rows: Ints) -> Ints:
        """How long before each of these messages (HOLEs: 0) its sender had sent or got none of the others."""
        src, dst = np.array(edges).T
        mine = np.flatnonzero(rows != HOLE)
        rank = np.concatenate([src[mine], dst])
        time = np.concatenate([self.starts[rows[mine]], self.arrivals[rows]])
        order = np.lexsort((time, rank))
        rank, time = rank[order], time[order]
        # Of those at the same time the first one's predecessor was before all of them.
        first = np.r_[True, (rank[1:] != rank[:-1]) | (time[1:] != time[:-1])]
        before = np.maximum.accumulate(np.where(first, np.arange(len(rank)), 0)) - 1
        since = np.empty(len(rank), np.int64)
        since[order] = np.where((before >= 0) & (rank[before] == rank), time - time[before], 0)
        pause = np.zeros(len(rows), np.int64)
        pause[mine] = since[: len(mine)]
        return pause

    # -- taking ------------------------------------------------------------------------------

    def _take(self, chosen: _Chosen, count: int) -> list[Instance]:
        hypothesis = chosen.hypothesis
        plan, cuts, algorithm, streams = hypothesis.plan, hypothesis.cuts, hypothesis.algorithm, self.streams
        lanes, per = streams.lanes(hypothesis.edges), plan.counts * hypothesis.cuts
        starts = streams.at[lanes].tolist()
        parts = zip(starts, per.tolist(), strict=True)
        together = np.concatenate(
            [streams.rows[at : at + count * n].reshape(count, n) for at, n in parts], axis=1
        )
        streams.take(lanes, count * per)
        # What each message of a collective is of the buffer, in the order of ``together``.
        share = np.repeat(plan.shares / cuts, cuts)
        whole = (together != HOLE).all(axis=1).tolist()
        known = self.sizes[together].sum(axis=1) / share.sum() if share.any() else np.zeros(count)
        in_time = np.take_along_axis(together, np.argsort(self.starts[together], axis=1, kind="stable"), 1)
        root = hypothesis.root if algorithm.rooted else None
        found = []
        for number, block in enumerate(in_time):
            if whole[number]:
                size, confidence, blind = float(known[number]), 1.0, frozenset[int]()
            else:
                slot = together[number] != HOLE
                blind = frozenset(self._opening(hypothesis)[~slot].tolist()) - {-1}
                block = block[block != HOLE]
                size = float(self.sizes[block].sum()) / share[slot].sum() if share[slot].any() else 0.0
                confidence = len(block) / len(slot)
            order = list(hypothesis.order)
            buffer = whole_size(size, self.sizes[block].tolist()) if size != round(size) else round(size)
            instance = Instance(block, algorithm.op, order, algorithm, chosen.names, root, buffer,
                                confidence=confidence, alike=chosen.alike,
                                view=InstanceView(blind=blind))  # fmt: skip
            found.append(placed(instance, hypothesis.near))
        return found

    def _opening(self, hypothesis: Hypothesis) -> Ints:
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
        for edge, count in zip(hypothesis.edges, hypothesis.plan.counts.tolist(), strict=True):
            part = np.full(count * cuts, -1)
            part[0] = steps.get(edge, -1)
            parts.append(part)
        return np.concatenate(parts)

    def _drop(self, what: Ints | int) -> Ints:
        """Take away so many of each stream, or of all the next ones in order of time; returns their rows."""
        if not isinstance(what, int):
            gone = self.streams.rows[spans(self.streams.at, what)]
            self.streams.take(slice(None), what)
            return gone
        count = what
        if count >= self.streams.count:
            left = self.streams.end - self.streams.at
            every = self.streams.rows[spans(self.streams.at, left)]
            self.streams.take(slice(None), left)
            return every[np.argsort(self.starts[every], kind="stable")]
        rows: list[int] = []
        while count > len(rows) and self.streams:
            by: dict[tuple[int, int], int] = {}
            for edge in self._ahead()[: count - len(rows)]:
                by[edge] = by.get(edge, 0) + 1
            for edge, some in by.items():
                lane = self.streams.number[edge]
                at = int(self.streams.at[lane])
                rows.extend(self.streams.rows[at : at + some].tolist())
                self.streams.take(lane, some)
        return np.array(rows, np.int64)

    def _stray(self, dropped: list[Ints]) -> list[Instance]:
        rows = np.concatenate(dropped)
        rows = rows[rows != HOLE]
        if not len(rows):
            return []
        return [Instance(rows, self.op, list(self.endpoints), complete=False, confidence=0.3)]
