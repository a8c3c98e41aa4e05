"""Collectives of one communicator in the order of its ranks' programs: EXCHANGE rows with operations in.

Blocking collectives leave a rank no choice: all that it sends in one comes before all that it sends in the
next, and it goes on only when it has what the first one owes it. So the earliest message that is left belongs
to the next collective of its sender, and what belongs to it there is what every rank sends next. That
holds whatever operations, roots and sizes follow each other, and where no tag of theirs was captured; a
message that fits nowhere costs its operation.

Some operations Open MPI's tags do not name as they were called: its linear and non-overlapping all_reduce
is a reduce and a broadcast, its linear all_gather a gather and a broadcast, its non-overlapping
reduce_scatter a reduce and a scatter, each with the tags of its parts. What tells them is that the second
part always follows the first: same root, matching bytes, and the root goes on as soon as it has its last
input, as from one step of an algorithm to the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.matching.model import MOST, RARE, TWICE, Instance, InstanceView
from dpuflow.matching.recognise import ELEMENT_BYTES, MOST_RANKS, VARIED, expected_edges, whole_size
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import dependencies, edge_sizes, schedule
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Job
    from dpuflow.matching.shared_addresses import Processes
    from dpuflow.schedules.trees import Send
    from dpuflow.schema.tables import Rows


Edge = tuple[int, int]
BLOCKS = {Op.REDUCE_SCATTER: 1, Op.ALL_GATHER: 0}
"""Of these each block is one rank's: that of an edge's receiver (1), or its sender (0)."""
LOST = 512
"""After so many messages of one kind in a row that fit nowhere no beginning is looked for among them."""


class Reading(NamedTuple):
    """How the next collective may look: the ``rows`` of each edge; ``size`` None: parts differ."""

    algorithm: Algorithm
    root: int
    rows: dict[Edge, list[int]]
    size: float | None
    hidden: frozenset[Edge] = frozenset()
    """Edges whose messages no capture holds any more."""

    @property
    def taken(self) -> list[int]:
        """All its rows."""
        return [row for rows in self.rows.values() for row in rows]


def read_processes(job: Job, rows: Ints, processes: Processes) -> list[Instance]:
    """The collectives among ``rows`` of ranks that share addresses; ``order`` of each are the ranks."""
    return _Program(job, rows, processes).run()


def read_unnamed(job: Job, rows: Ints) -> list[Instance]:
    """The collectives among ``rows``, all messages of some ranks, that nobody names; none of many ranks."""
    program = _Program(job, rows)
    return program.run() if len(program.order) <= MOST_RANKS else []


def in_program_order(job: Job, cut: Sequence[Instance]) -> Sequence[Instance]:
    """The collectives of one communicator all of whose messages were captured.

    They stay as they were ``cut``, operation by operation, where that keeps the order of the programs; else
    they are read in that order, if that tells all of them, or where the cut keeps it of too few for lost
    messages to be the reason.
    """
    rows = np.sort(np.concatenate([instance.rows for instance in cut]))
    before = sorted(cut, key=lambda instance: int(instance.rows[0]))
    held = _Program(job, rows).in_order(before)
    if held == len(rows):
        return cut
    read = _Program(job, rows).run()
    told = sum(len(each.rows) for each in read if each.algorithm is not None)
    return read if told == len(rows) or (told > held and held < MOST * len(rows)) else cut


class _Program:
    """What each rank sends, in order, and on which edge."""

    def __init__(self, job: Job, rows: Ints, processes: Processes | None = None) -> None:
        picked, columns = job.exchanges[rows], job.columns
        self.processes = processes
        if processes is None:
            self.order = job.ordered(distinct(np.stack([picked["src"], picked["dst"]])).tolist())
            place = {end: number for number, end in enumerate(self.order)}
            self.src = [place[end] for end in picked["src"].tolist()]
            self.dst = [place[end] for end in picked["dst"].tolist()]
        else:
            self.order = list(range(processes.ranks))
            self.src, self.dst = ([processes.at[row][end] for row in rows.tolist()] for end in (0, 1))
        self.rows = rows
        self.op = picked["op"].tolist()
        self.size = columns.sizes[rows].tolist()
        self.start = columns.starts[rows].tolist()
        self.there = columns.arrivals[rows].tolist()
        # When each rank's own capture ended, before others' did: what two such exchange then nobody sees.
        self.ended = [FAR] * len(self.order) if processes is not None else _ended_ns(job, rows, self.order)
        self.blind_ns = sorted(self.ended)[1] if len(self.order) > 1 else FAR
        self.free = [True] * len(rows)
        self.lanes: dict[Edge, list[int]] = {}
        for number in np.argsort(picked["order"], kind="stable").tolist():
            self.lanes.setdefault((self.src[number], self.dst[number]), []).append(number)
        self.at = dict.fromkeys(self.lanes, 0)
        self.sent: list[list[int]] = [[] for _ in self.order]  # by rank, in order of time
        self.in_time = sorted(range(len(rows)), key=lambda number: self.start[number])
        for number in self.in_time:
            self.sent[self.src[number]].append(number)
        self.begin = [0] * len(self.order)  # of each rank's sends: the first that is left
        self.events: list[list[int]] = [[] for _ in self.order]  # by rank, in order: its sends, its inputs
        for number in range(len(rows)):
            self.events[self.src[number]].append(self.start[number])
            self.events[self.dst[number]].append(self.there[number])
        for events in self.events:
            events.sort()
        self.varied: frozenset[Op] = frozenset()  # operations whose parts may be of any size
        self.usual: dict[int, list[Algorithm]] = {}  # of each operation: what ran, the latest first

    def run(self) -> list[Instance]:
        """All collectives, and what is left over as incomplete ones.

        Parts of any size would fit a reading that is off by a message, too. So they are asked for only of
        operations whose messages are no equal parts of a buffer.
        """
        begun = self.free.copy(), dict(self.at), list(self.begin)
        found = self._read()
        count, told = (Counter[Op](), Counter[Op]())
        for instance in found:
            count[instance.op] += len(instance.rows)
            told[instance.op] += len(instance.rows) * (instance.algorithm is not None)
        self.varied = VARIED & {op for op in count if told[op] < RARE * count[op]}
        if count[Op.UNKNOWN] and len(self.order) > 2:
            # Of what nobody names, what every rank has to do with every other may be parts of any size.
            self.varied |= {Op.UNKNOWN}
        if self.varied:
            self.free, self.at, self.begin = begun
            self.usual = {}
            found = self._read()
        return found

    def _read(self) -> list[Instance]:
        found: list[Instance] = []
        stray: list[int] = []
        for number in self.in_time:
            if not self.free[number]:
                continue
            readings = self._readings(number) if len(stray) < LOST else ()
            if readings:
                found += self._stray(stray)
                found.append(self._instance(readings))
                stray = []
                self._take(readings[0].taken)
                self._note(Op(self.op[number]), readings[0].algorithm)
            else:
                if stray and self.op[stray[-1]] != self.op[number]:
                    found += self._stray(stray)
                    stray = []
                stray.append(number)
                self._take([number])
        return found + self._stray(stray)

    def _edges(
        self, algorithm: Algorithm, root: int, hidden: frozenset[Edge] = frozenset()
    ) -> Mapping[Edge, tuple[float, ...]]:
        """The schedule's edges that are seen, with the sizes of their messages."""
        seen = None if self.processes is None else self.processes.apart
        edges = expected_edges(algorithm, range(len(self.order)), root, seen)
        return {edge: edges[edge] for edge in edges.keys() - hidden} if hidden else edges

    def _hidden(self, number: int) -> frozenset[Edge]:
        """Edges of which nothing is seen any more when message ``number`` begins."""
        if self.start[number] < self.blind_ns:
            return frozenset()
        gone = [rank for rank, ended in enumerate(self.ended) if ended <= self.start[number]]
        edges = ((a, b) for a in gone for b in gone if a != b)
        return frozenset(edge for edge in edges if self.at.get(edge, 0) == len(self.lanes.get(edge, ())))

    def _note(self, op: Op, algorithm: Algorithm) -> None:
        usual = self.usual.setdefault(int(op), [])
        if algorithm in usual:
            usual.remove(algorithm)
        usual.insert(0, algorithm)

    def _readings(self, number: int) -> list[Reading]:
        """What the collective may be that message ``number`` begins, nothing against it; the likeliest first.

        What ran before is asked first; others only where that does not fit.
        """
        n, op, edge = len(self.order), Op(self.op[number]), (self.src[number], self.dst[number])
        usual = self.usual.get(int(op), [])
        doubtful: list[tuple[int, Reading]] = []
        for known in (True, False):
            for sized in (True, False) if op in self.varied else (True,):
                found = [
                    (self._against(reading), reading)
                    for algorithm, root in _candidates(op, n, edge)
                    if (algorithm in usual) == known and (sized or algorithm.op in VARIED)
                    for reading in self._laid(algorithm, root, number, sized=sized)
                ]
                sure = [reading for against, reading in found if not against]
                if sure:
                    # Of several the one that leaves least over: parts of a larger one fit as well. Then the
                    # one that is done first: a later call's messages fit another algorithm's edges.
                    most = max(len(reading.taken) for reading in sure)
                    sure = [reading for reading in sure if len(reading.taken) == most]
                    return sorted(
                        sure, key=lambda r: (self._done(r), usual.index(r.algorithm) if known else 0)
                    )
                doubtful += found if known else []
        # A message or two may have been given another one's time.
        doubtful.sort(key=lambda each: each[0] / len(each[1].taken))
        return [r for against, r in doubtful[:1] if against <= max(1, RARE * len(r.taken))]

    def _done(self, reading: Reading) -> int:
        """When the last of its messages begins."""
        return int(max(self.start[row] for row in reading.taken))

    def _laid(self, algorithm: Algorithm, root: int, number: int, *, sized: bool) -> Iterator[Reading]:
        """The schedule laid over what the edges carry next, if operation and sizes agree."""
        hidden = self._hidden(number)
        edges = self._edges(algorithm, root, hidden)
        mine = edges.get((self.src[number], self.dst[number]))
        if mine is None:  # seen, though between ranks that seem to share a node
            return
        for cuts in self._cuts(number, len(mine)) if algorithm.cuts and sized else (1,):
            rows: dict[Edge, list[int]] = {}
            for edge, shares in edges.items():
                lane, at = self.lanes.get(edge, []), self.at.get(edge, 0)
                rows[edge] = lane[at : at + len(shares) * cuts]
                if len(rows[edge]) < len(shares) * cuts or any(
                    self.op[row] != self.op[number] for row in rows[edge]
                ):
                    break
            else:
                if number not in rows[self.src[number], self.dst[number]]:
                    continue
                size = self._size(edges, rows, algorithm.op) if sized else 0.0
                if size is not None and (sized or self._by_blocks(algorithm.op, rows)):
                    yield Reading(algorithm, root, rows, size if sized else None, hidden)

    def _cuts(self, number: int, messages: int) -> list[int]:
        """Segments a message may have: up to where an edge's sizes change or its sender pauses, or none."""
        edge = self.src[number], self.dst[number]
        lane = self.lanes[edge][self.at[edge] :]
        size, op, run = self.size[number], self.op[number], 0
        while run < len(lane) and self.op[lane[run]] == op and self.size[lane[run]] == size:
            run += 1
        tries = [messages]
        # The last segment may be shorter; but who rests until then as before the first sends another buffer.
        shorter = run < len(lane) and self.op[lane[run]] == op and self.size[lane[run]] < size
        if shorter and TWICE * self._rest(number, lane[run]) <= self._rest(number, number):
            tries.append(run + 1)
        pauses = np.diff([self.start[row] for row in lane[:run]])
        long = np.flatnonzero(2 * pauses >= pauses.max(initial=0))
        if len(long) and 2 * len(long) < len(pauses):
            tries.append(int(long[0]) + 1)
        return sorted({segments // messages for segments in tries if segments % messages == 0}, reverse=True)

    def _rest(self, after: int, until: int) -> int:
        """For how long, at the most, nothing had left or reached a rank before what it sent after one of its
        messages until another; before that one, if it is the same, and ever before the first."""
        events = self.events[self.src[after]]
        low, high = (bisect_left(events, self.start[row]) for row in (after, until))
        if after == until:
            low, high = (low - 1, low) if low else (0, len(events))
        return max((b - a for a, b in pairwise(events[low : high + 1])), default=0)

    def _size(
        self, edges: Mapping[Edge, tuple[float, ...]], rows: dict[Edge, list[int]], op: Op
    ) -> float | None:
        """The buffer of one rank, bytes, None where what was sent are no shares of one."""
        total = sum(self.size[row] for each in rows.values() for row in each)
        shares = sum(map(sum, edges.values()))
        if (op == Op.BARRIER) != (total == 0):
            return None
        size = total / shares if shares else 0.0
        for edge, own in edges.items():
            cuts = len(rows[edge]) // len(own)
            for turn, share in enumerate(own):
                carried = sum(self.size[row] for row in rows[edge][turn * cuts : (turn + 1) * cuts])
                if abs(carried - share * size) > ELEMENT_BYTES * cuts:
                    return None
        return size

    def _by_blocks(self, op: Op, rows: Mapping[Edge, list[int]]) -> bool:
        """Whether blocks of any size make these messages: of a reduce_scatter each rank's, which all others
        send it, of an all_gather each rank's, which it sends to all others."""
        if op not in BLOCKS or any(len(each) > 1 for each in rows.values()):
            return True
        sizes: dict[int, set[int]] = {}
        for edge, (row,) in rows.items():
            sizes.setdefault(edge[BLOCKS[op]], set()).add(self.size[row])
        return all(max(each) - min(each) <= ELEMENT_BYTES for each in sizes.values())

    def in_order(self, instances: Sequence[Instance]) -> int:
        """How many messages are in collectives of known algorithm that keep the programs' order."""
        place = {int(row): number for number, row in enumerate(self.rows)}
        held = 0
        for instance in instances:
            taken = [place[row] for row in instance.rows.tolist()]
            if instance.algorithm is not None and not self._astray(taken):
                held += len(taken)
            self._take(taken)
        return held

    def _against(self, reading: Reading) -> int:
        """How many of its messages speak against it: out of order, or sent before what they need."""
        edges = self._edges(reading.algorithm, reading.root, reading.hidden)
        early = set()
        for (edge, turn), (before, turn_before) in dependencies(
            reading.algorithm, len(self.order), reading.root
        ):
            if edge not in edges or before not in edges:
                continue
            cuts = len(reading.rows[edge]) // len(edges[edge])
            send = reading.rows[edge][turn * cuts]
            needed = self.there[reading.rows[before][turn_before * cuts]]
            if needed != NEVER and self.start[send] < needed:
                early.add(send)
        return len(early) + self._astray(reading.taken)

    def _astray(self, rows: Sequence[int]) -> int:
        """How many of ``rows`` came after something that is left beside them, though their ranks sent it."""
        taken = set(rows)
        first: dict[int, int] = {}  # of each rank: when it sent the first of what is left
        for rank in {end for row in rows for end in (self.src[row], self.dst[row])}:
            left = (row for row in self.sent[rank][self.begin[rank] :] if self.free[row] and row not in taken)
            following = next(left, None)
            first[rank] = FAR if following is None else self.start[following]
        late = 0
        for row in rows:
            late += self.start[row] > first[self.src[row]] or self.there[row] > first[self.dst[row]]
        return late

    def _take(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.free[row] = False
        for edge in {(self.src[row], self.dst[row]) for row in rows}:
            lane = self.lanes[edge]
            while self.at[edge] < len(lane) and not self.free[lane[self.at[edge]]]:
                self.at[edge] += 1
        for rank in {self.src[row] for row in rows}:
            sent = self.sent[rank]
            while self.begin[rank] < len(sent) and not self.free[sent[self.begin[rank]]]:
                self.begin[rank] += 1

    def _instance(self, readings: Sequence[Reading]) -> Instance:
        best = readings[0]
        names = dict.fromkeys(
            r.algorithm.name for r in readings[1:] if r.algorithm.name != best.algorithm.name
        )
        size = None if best.size is None else whole_size(best.size, [self.size[row] for row in best.taken])
        root = best.root if best.algorithm.rooted else None
        ops = dict.fromkeys(r.algorithm.op for r in readings)
        every = self._edges(best.algorithm, best.root)
        missed = every.keys() & best.hidden
        share = 1 - sum(len(every[edge]) for edge in missed) / sum(map(len, every.values()))
        view = InstanceView(blind=frozenset(src for src, _ in missed))
        return Instance(
            self._sorted(best.taken), best.algorithm.op, list(self.order), best.algorithm, list(names), root,
            size, confidence=share, alike=tuple(ops)[1:], view=view,
        )  # fmt: skip

    def _stray(self, rows: Sequence[int]) -> list[Instance]:
        if not rows:
            return []
        op = Op(self.op[rows[0]])
        return [Instance(self._sorted(rows), op, list(self.order), complete=False, confidence=0.3)]

    def _sorted(self, rows: Sequence[int]) -> Ints:
        return self.rows[sorted(rows, key=lambda row: (self.start[row], row))]


def _ended_ns(job: Job, rows: Ints, order: Sequence[int]) -> list[int]:
    """When the captures of ranks ended, ns: where later messages of theirs were seen elsewhere alone. Where
    none are the rank may have been quiet (``FAR``)."""
    if job.until is None:
        return [FAR] * len(order)
    picked, start = job.exchanges[rows], job.columns.starts[rows]
    latest = np.full(len(job.until), NEVER)
    for end in ("src", "dst"):
        np.maximum.at(latest, picked[end], start)
    ended = (job.until != NEVER) & (job.until < latest)
    return [int(ns) for ns in np.where(ended, job.until, FAR)[order]]


def _candidates(op: Op, n: int, edge: Edge) -> tuple[tuple[Algorithm, int], ...]:
    """Algorithms of ``op`` with their roots that have a message on this edge."""
    return tuple(_by_edge(op, n).get(edge, ()))


@remembered
def _by_edge(op: Op, n: int) -> dict[Edge, list[tuple[Algorithm, int]]]:
    """For each edge the algorithms of ``op`` and their roots that have a message on it: all in one go, for
    the schedules of many ranks do not stay in memory from one edge to the next."""
    found: dict[Edge, list[tuple[Algorithm, int]]] = {}
    for algorithm in ALGORITHMS:
        if op in (Op.UNKNOWN, algorithm.op) and algorithm.fits(n):
            for root in range(n) if algorithm.rooted else (0,):
                for edge in edge_sizes(algorithm, n, root):
                    found.setdefault(edge, []).append((algorithm, root))
    return found


PARTS = {
    (Op.REDUCE, Op.BROADCAST): Op.ALL_REDUCE,
    (Op.GATHER, Op.BROADCAST): Op.ALL_GATHER,
    (Op.REDUCE, Op.SCATTER): Op.REDUCE_SCATTER,
}
"""First and second part, and what they make."""


def composed(exchanges: Rows, instances: Sequence[Instance]) -> list[Instance]:
    """``instances`` of one communicator, with pairs that make up one composed operation merged.

    Between the parts of one the root has nothing else to do, and goes on at once unless it comes late: now
    and then it takes but a fraction of what ranks take from one operation to the next. Where it never does it
    may work there, or always come late: then each part has ``alike`` what they would be together.
    """
    order = sorted(range(len(instances)), key=lambda i: int(instances[i].rows[0]))
    chain = [instances[i] for i in order]
    for (first, second), op in PARTS.items():
        heads = [k for k, instance in enumerate(chain) if instance.op == first]
        pairs = [k for k in heads if k + 1 < len(chain) and _fits(chain[k], chain[k + 1], second)]
        at_root = {k: _pauses(exchanges, chain[k], chain[k + 1]).get(chain[k].root_endpoint) for k in pairs}
        if len(pairs) < max(TWICE, MOST * len(heads)) or _acts_between(exchanges, chain, at_root):
            continue
        own = [until - since for since, until in filter(None, at_root.values())]
        others = [
            until - since
            for k, then in pairwise(pairs)
            for since, until in _pauses(exchanges, chain[k + 1], chain[then]).values()
        ]
        at_once = own and others and np.quantile(own, RARE) <= RARE * median_of(others)
        for k in reversed(pairs):
            a, b = chain[k : k + 2]
            apart = [replace(a, alike=(*a.alike, op)), replace(b, alike=(*b.alike, op))]
            chain[k : k + 2] = [_joined(a, b, op)] if at_once else apart
    return chain


def _fits(a: Instance, b: Instance, second: Op) -> bool:
    """Whether ``b`` takes from the root what ``a`` brought there."""
    if b.op != second or a.order != b.order or a.root is None or a.root != b.root:
        return False
    if a.algorithm is None or b.algorithm is None or a.size is None or b.size is None:
        return False
    n = a.rank_count
    return a.size * (n if a.op == Op.GATHER else 1) == b.size * (n if second == Op.SCATTER else 1)


def _pauses(exchanges: Rows, first: Instance, then: Instance) -> dict[int | None, tuple[int, int]]:
    """Endpoints that heard something in ``first`` and said something in ``then``, with when the last of the
    former had come, and when the first of the latter left."""
    heard, said = exchanges[first.rows], exchanges[then.rows]
    began = np.where(said["offer_ns"] != NEVER, said["offer_ns"], said["data_ns"])
    pauses: dict[int | None, tuple[int, int]] = {}
    for end in first.order:
        since = int(heard["arrived_end_ns"][heard["dst"] == end].max(initial=NEVER))
        sent = began[(said["src"] == end) & (began != NEVER)]
        if len(sent) and since != NEVER:
            pauses[end] = since, int(sent.min())
    return pauses


def _acts_between(
    exchanges: Rows, chain: Sequence[Instance], at_root: Mapping[int, tuple[int, int] | None]
) -> bool:
    """Whether roots send or get anything else between two parts, as a rule. ``at_root``: by place in
    ``chain`` the time between an operation's parts."""
    busy = 0
    for root in {chain[k].root_endpoint for k in at_root}:
        here = exchanges[(exchanges["src"] == root) | (exchanges["dst"] == root)]
        times = np.sort(np.where(here["src"] == root, here["data_ns"], here["arrived_end_ns"]))
        spans = [span for k, span in at_root.items() if span and chain[k].root_endpoint == root]
        since, until = np.array(spans, np.int64).reshape(-1, 2).T
        busy += int((np.searchsorted(times, until) > np.searchsorted(times, since, side="right")).sum())
    return 2 * busy > len(at_root)


def _joined(a: Instance, b: Instance, op: Op) -> Instance:
    assert a.algorithm is not None
    assert b.algorithm is not None
    algorithm = one_after_the_other(a.algorithm, b.algorithm, op)
    rows, placement = np.concatenate([a.rows, b.rows]), a.placement
    order = np.argsort(rows)
    if a.placement.processes is not None and b.placement.processes is not None:
        both = np.concatenate([a.placement.processes, b.placement.processes], axis=1)
        placement = replace(placement, processes=both[:, order])
    return replace(
        a,
        rows=rows[order],
        op=op,
        algorithm=algorithm,
        alternatives=[],
        complete=a.complete and b.complete,
        confidence=min(a.confidence, b.confidence),
        view=replace(a.view, blind=a.view.blind & b.view.blind),
        placement=placement,
    )


@lru_cache(maxsize=256)
def one_after_the_other(a: Algorithm, b: Algorithm, op: Op) -> Algorithm:
    """The schedule of ``a``, then that of ``b``, with the root of both, for a buffer as ``a`` counts it."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        last = 0
        for send in schedule(a, n, root):
            last = max(last, send.step)
            yield send._replace(size=send.size * size)
        share = size * n if a.op == Op.GATHER else size / n if b.op == Op.SCATTER else size
        for send in schedule(b, n, root):
            yield send._replace(step=send.step + last + 1, size=send.size * share)

    name = a.name if a.name == b.name else "unknown"
    return Algorithm(op, name, sends, rooted=True)
