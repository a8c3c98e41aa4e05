"""Collectives of streams that nothing names (TCP without a known framing): what repeats.

In: EXCHANGE rows of bursts. Out: collectives whose operation is not known. A training or serving job does
the same again and again, so between two collectives, where nothing is under way, each direction of each
connection has carried a multiple of one number of bytes. Several periods and places to cut fit; right is
where ranks had been silent although nothing kept them, and where they act unasked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.matching.model import HALF, MOST, RARE, TWICE, Instance, InstanceView
from dpuflow.matching.scoring import CHANCE
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Floats, Ints
    from dpuflow.matching.model import Job
    from dpuflow.schema.tables import Rows


FEWEST = 4
"""Repetitions from which on what repeats is no accident."""
PERIODS = 32
"""Periods worth a try: the most frequent distances between long silences."""
AHEAD = 48
"""How many long silences a period may span."""
WORSE = 0.05
"""What finer cuts may cost in silences before them: coincidences."""


def repeated_instances(job: Job, rows: Ints) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE: bursts in order of time, whose operation is unknown.

    What does not repeat is left out.
    """
    exchanges = job.exchanges
    found: list[Instance] = []
    for clusters in _connected(exchanges, _clusters(exchanges, rows)):
        apart = [_Pattern(exchanges, cluster) for cluster in clusters if len(cluster) + 1 >= FEWEST]
        # The steps of one algorithm may differ in size, and so may communicators.
        explained = sum(pattern.explained for pattern in apart)
        every = sum(int(exchanges["bytes"][cluster].sum()) for cluster in clusters)
        if len(clusters) > 1 and explained < HALF * every:
            whole = _Pattern(exchanges, np.sort(np.concatenate(clusters)))
            apart = [whole] if whole.explained > explained else apart
        larger = any(len(pattern.ends) > 2 for pattern in apart)
        for pattern in apart:
            # NCCL's collectives ``sockets`` reads: what is left of two ranks beside larger ones, or along a
            # line of which all is seen, are sends.
            in_line = pattern.in_line and job.near is None
            sends = pattern.nccl and (larger if len(pattern.ends) == 2 else in_line)
            found.extend(pattern.instances(job.position, sends=sends))
    return found


def _connected(exchanges: Rows, clusters: Sequence[Ints]) -> list[list[Ints]]:
    """``clusters`` that have endpoints in common."""
    ends = [{*exchanges["src"][each].tolist(), *exchanges["dst"][each].tolist()} for each in clusters]
    return [[clusters[k] for k in some] for some in connected(range(len(clusters)), ends.__getitem__)]


def _clusters(exchanges: Rows, rows: Ints) -> list[Ints]:
    """``rows`` by connections that carry bursts of the same sizes and meet in endpoints."""
    connection = exchanges["connection"][rows].astype(np.int64)
    order = np.argsort(connection, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(connection[order])) + 1) if len(rows) else []
    meets: list[list[tuple[int, int]]] = []
    for part in parts:
        size, count = np.unique(exchanges["bytes"][part].astype(np.int64), return_counts=True)
        volume = size * count
        best = np.argsort(-volume, kind="stable")
        enough = int(np.searchsorted(np.cumsum(volume[best]), MOST * volume.sum())) + 1
        sizes = size[best[:enough]][count[best[:enough]] > 1].tolist()
        ends = int(exchanges["src"][part[0]]), int(exchanges["dst"][part[0]])
        meets.append([(own, end) for own in sizes for end in ends])
    joined = connected(range(len(parts)), meets.__getitem__)
    return [np.sort(np.concatenate([parts[number] for number in some])) for some in joined]


def _weights(count: int) -> Ints:
    """As good as drawn at random (splitmix64; Steele, Lea and Flood, 2014), without numpy.random's start."""
    mixed: NDArray[np.uint64] = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    weights: Ints = (mixed >> np.uint64(2)).astype(np.int64)
    return weights


def _one_group(instances: Sequence[Instance]) -> bool:
    """Whether (nearly) all have the same ranks, as a communicator's collectives do, and its sends do not."""
    members = Counter(tuple(instance.order) for instance in instances if instance.op == Op.UNKNOWN)
    return max(members.values(), default=0) >= MOST * members.total()


class _Pattern:
    """The bursts of one cluster, and where they repeat."""

    def __init__(self, exchanges: Rows, rows: Ints) -> None:
        from dpuflow.kernels import repeats

        self._kernels = repeats
        rows = rows[np.argsort(exchanges["data_ns"][rows], kind="stable")]
        picked = exchanges[rows]
        self.rows = rows
        self.ends, ends = np.unique(np.stack([picked["src"], picked["dst"]]), return_inverse=True)
        self.src, self.dst = np.ascontiguousarray(ends.reshape(2, -1))
        self.sent = np.ascontiguousarray(picked["data_ns"])
        self.over = np.ascontiguousarray(picked["data_end_ns"])
        self.there = np.where(picked["arrived_end_ns"] != NEVER, picked["arrived_end_ns"], self.over)
        self.size = picked["bytes"].astype(np.int64)
        self.nccl = bool((picked["wire"] == Wire.NCCL_DATA).all())
        links = np.unique(np.sort(np.stack([self.src, self.dst]), axis=0), axis=1)
        self.in_line = links.shape[1] < len(self.ends)  # or a tree: its connections make no circle
        way = picked["connection"].astype(np.int64) << 1 | (picked["src"] > picked["dst"])
        ways, way = np.unique(way, return_inverse=True)
        # Bytes of all ways in one number: equal sums stand for equal bytes on every way.
        weight = _weights(len(ways))
        self.sums = np.concatenate([[0], np.cumsum(self.size * weight[way.reshape(-1)])])
        self.busy = np.maximum.accumulate(self.there)
        free = np.r_[True, self.busy[:-1] <= self.sent[1:], True]
        self.quiet = np.flatnonzero(free)  # nothing is under way before these bursts; the last is the end
        self.at = dict(zip(self.sums[self.quiet].tolist(), self.quiet.tolist(), strict=True))
        self.by_sum = np.argsort(self.sums[self.quiet], kind="stable")  # numbers of quiet places
        self.pause = self._pauses()
        self.slow = _slowest_usual(self.pause)
        worth, self.cuts = self._best()
        self.explained = worth * int(self.size.sum())  # bytes

    def _pauses(self) -> Ints:
        """For each burst how long nothing had happened at its sender, ns."""
        times = np.concatenate([self.sent, self.over, self.there])
        ranks = np.concatenate([self.src, self.src, self.dst])
        order = np.lexsort((times, ranks))
        times, ranks = times[order], ranks[order]
        # Of equal times of a rank the first one, and the event before that.
        new = np.flatnonzero(np.r_[True, (times[1:] != times[:-1]) | (ranks[1:] != ranks[:-1])])
        before = np.repeat(new, np.diff(np.r_[new, len(times)])) - 1
        pause = np.where((before >= 0) & (ranks[before] == ranks), times - times[before], 0)
        mine = order < len(self.sent)
        pauses = np.empty(len(self.sent), np.int64)
        pauses[order[mine]] = pause[mine]
        return pauses

    def _best(self) -> tuple[float, list[tuple[int, int]]]:
        """The cuts of the best period, and what they are worth."""
        if len(self.ends) < 2 or len(self.quiet) < FEWEST:
            return 0.0, []
        return max(
            (self._cuts(period) for period in self._periods()), key=lambda each: each[0], default=(0.0, [])
        )

    def instances(self, position: Ints, *, sends: bool = False) -> list[Instance]:
        """The collectives, in order of time. ``sends``: two may be stages of a pipeline;
        who comes late after its peer's message may be working on that."""
        cuts = self.cuts
        free = self._free(cuts, by_pause=not sends)
        found = []
        for (a, b), unasked in zip(cuts, free, strict=True):
            members = distinct(np.concatenate([self.src[a:b], self.dst[a:b]])).tolist()
            members.sort(key=lambda rank: int(position[self.ends[rank]]))
            order = [int(self.ends[rank]) for rank in members]
            places = frozenset(place for place, rank in enumerate(members) if rank in unasked)
            if len(places) < 2 or (len(members) == 2 and b - a < 2 * TWICE):
                continue  # who only answers is a server
            op = Op.SEND_RECV if len(members) == 2 < len(self.ends) and self._one_way(a, b) else Op.UNKNOWN
            found.append(Instance(self.rows[a:b], op, order, confidence=0.7, view=InstanceView(free=places)))
        return found if not self.nccl or _one_group(found) else []

    def _one_way(self, a: int, b: int) -> bool:
        """Whether one rank sent (nearly) all bytes of a block."""
        sent = np.bincount(self.src[a:b], self.size[a:b])
        return bool(sent.max() >= MOST * sent.sum())

    def _free(self, cuts: Sequence[tuple[int, int]], *, by_pause: bool) -> list[set[int]]:
        """For each block the ranks whose first burst needs no input.

        Where it left before anything had reached the rank, in some blocks, it needs no input in all that
        are alike: the same bytes on all ways, and the same first burst. So it does where it mostly comes
        later than what answers something usually does (``by_pause``).
        """
        opening: list[dict[int, tuple[int, int, int, int]]] = []
        early: Counter[tuple[int, int, int, int]] = Counter()
        slow: Counter[tuple[int, int, int, int]] = Counter()
        times: Counter[tuple[int, int, int, int]] = Counter()
        for a, b in cuts:
            bytes_all = _wrapped(int(self.sums[b]) - int(self.sums[a]))
            ranks, first = np.unique(self.src[a:b], return_index=True)
            acts: dict[int, tuple[int, int, int, int]] = {}
            for rank, at in zip(ranks.tolist(), first.tolist(), strict=True):
                acts[rank] = (bytes_all, rank, int(self.dst[a + at]), int(self.size[a + at]))
                inputs = self.there[a:b][self.dst[a:b] == rank]
                early[acts[rank]] += bool((inputs >= self.sent[a + at]).all())
                slow[acts[rank]] += bool(self.pause[a + at] > self.slow)
                times[acts[rank]] += 1
            opening.append(acts)
        free = {
            act for act in times if early[act] >= TWICE or (by_pause and 2 * slow[act] > times[act] >= FEWEST)
        }
        return [{rank for rank, act in acts.items() if act in free} for acts in opening]

    def _silence(self) -> Ints:
        """How long nothing at all had been under way before each quiet place, ns."""
        inner = self.quiet[1:-1]
        silence: Ints = np.r_[0, self.sent[inner] - self.busy[inner - 1], 0]
        return silence

    def _periods(self) -> list[int]:
        """Distances in ``sums`` worth a try: the most frequent ones between long silences."""
        silence = self._silence()
        longest = np.sort(np.argsort(-silence, kind="stable")[: max(64, len(silence) // 8)])
        sums = self.sums[self.quiet[longest]]
        distances: Counter[int] = Counter()
        for lag in range(1, min(AHEAD, len(sums))):
            distances.update((sums[lag:] - sums[:-lag]).tolist())
        return [d for d, times in distances.most_common(PERIODS) if times >= FEWEST - 1]

    def _chains(self, period: int) -> _Chains:
        """Quiet places that follow each other at the distance ``period``."""
        sums = self.sums[self.quiet]
        known = sums[self.by_sum]
        ahead, back = sums + np.int64(period), sums - np.int64(period)
        at = np.searchsorted(known, ahead, side="right") - 1
        following = np.where((at >= 0) & (known[at] == ahead), self.by_sum[at], -1)
        at = np.searchsorted(known, back, side="right") - 1
        preceded = ((at >= 0) & (known[at] == back)).astype(np.uint8)
        places, bounds = np.empty(len(sums), np.int64), np.empty(len(sums) + 1, np.int64)
        count = self._kernels.chains(following, preceded, places, bounds)
        return _Chains(self.quiet[places[: bounds[count]]], bounds[: count + 1])

    def _cuts(self, period: int) -> tuple[float, list[tuple[int, int]]]:
        """The best cuts of this period, as pairs of places, and what they are worth."""
        chains = self._chains(period)
        if not len(chains):
            return 0.0, []
        facts, _ = self._facts(chains)
        worth = _silence(facts) + facts[:, self._kernels.UNASKED] / facts[:, self._kernels.ACTS] * WORSE
        # Where the pattern was disturbed it goes on in another chain. Those taken do not overlap.
        begins: list[int] = []
        taken: list[Ints] = []
        firsts, lasts = chains.places[chains.bounds[:-1]], chains.places[chains.bounds[1:] - 1]
        for number in np.argsort(-worth * np.diff(chains.bounds), kind="stable").tolist():
            first, last = int(firsts[number]), int(lasts[number])
            place = bisect_left(begins, first)
            if (place == 0 or taken[place - 1][-1] <= first) and (
                place == len(begins) or last <= begins[place]
            ):
                begins.insert(place, first)
                taken.insert(place, chains[number])
        taken = [chain for chain in taken if len(chain) > 2]
        blocks = sum(len(chain) - 1 for chain in taken)
        if blocks < FEWEST:
            return 0.0, []
        explained = sum(int(self.size[chain[0] : chain[-1]].sum()) for chain in taken)
        share = explained / max(int(self.size.sum()), 1)
        if share < HALF:
            return 0.0, []
        refined = self._refined(taken)
        cuts = [
            (a, b)
            for chain in self._extended([chain.tolist() for chain in refined])
            for a, b in pairwise(chain)
        ]
        return self._overall(refined) * share, cuts

    def _extended(self, chains: list[list[int]]) -> list[list[int]]:
        """The chains with what is like one of their blocks before and behind them."""
        known = {
            _wrapped(int(self.sums[b]) - int(self.sums[a])) for chain in chains for a, b in pairwise(chain)
        }
        for number, chain in enumerate(chains):
            least = chains[number - 1][-1] if number else 0
            most = chains[number + 1][0] if number + 1 < len(chains) else len(self.rows)
            while before := [
                at
                for block in known
                if (at := self.at.get(_wrapped(int(self.sums[chain[0]]) - block), -1)) >= least
                and at < chain[0]
            ]:
                chain.insert(0, max(before))
            while after := [
                at
                for block in known
                if chain[-1] < (at := self.at.get(_wrapped(int(self.sums[chain[-1]]) + block), -1)) <= most
            ]:
                chain.append(min(after))
        return chains

    def _refined(self, chains: list[Ints]) -> list[Ints]:
        """Further places that (nearly) every period has, if ranks pause and act unasked there too."""
        blocks = sum(len(chain) - 1 for chain in chains)
        inner, since = [], []
        for chain in chains:
            here = self.quiet[np.searchsorted(self.quiet, chain[0]) : np.searchsorted(self.quiet, chain[-1])]
            block = chain[np.searchsorted(chain, here, side="right") - 1]
            inner.append(here[here != block])
            since.append(self.sums[inner[-1]] - self.sums[block[here != block]])
        places = np.concatenate(inner)
        _, first, which, times = np.unique(
            np.concatenate(since), return_index=True, return_inverse=True, return_counts=True
        )
        parts = np.split(places[np.argsort(which, kind="stable")], np.cumsum(times)[:-1])
        usual = [parts[k] for k in np.argsort(first).tolist() if times[k] >= MOST * blocks]
        usual.sort(key=lambda found: -float(median_of(self.sent[found] - self.busy[found - 1])))
        enough = self._overall(chains) - WORSE
        best, finer = chains, chains
        for found in usual[:AHEAD]:
            more = [np.union1d(chain, found[(found > chain[0]) & (found < chain[-1])]) for chain in finer]
            if self._openers(more, found) > 1:
                finer = more
                # Ranks pause at the places not yet cut as well, so worth may come with the last one only.
                if self._overall(finer) >= enough:
                    best = finer
        return best

    def _overall(self, chains: Sequence[Ints]) -> float:
        """The mean silence of all blocks."""
        every = _Chains.of(chains)
        blocks = np.diff(every.bounds) - 1
        silence = _silence(self._facts(every)[0])
        return float(sum((silence * blocks).tolist())) / int(blocks.sum())

    def _openers(self, chains: Sequence[Ints], places: Ints) -> int:
        """How many ranks act unasked, now and then, in the blocks that begin at ``places``."""
        _, times = self._facts(_Chains.of(chains), places)
        return int((times >= max(TWICE, RARE * len(places))).sum())

    def _facts(self, chains: _Chains, marked: Ints | None = None) -> tuple[Ints, Ints]:
        """``kernels.repeats.blocks`` of the chains: its facts, and its times for ``marked`` places."""
        ranks = len(self.ends)
        marks = np.zeros(len(self.rows) + 1, np.uint8)
        if marked is not None:
            marks[marked] = 1
        facts, times = np.empty((len(chains), 4), np.int64), np.zeros(ranks, np.int64)
        self._kernels.blocks(
            chains.places, chains.bounds, self.src, self.dst, self.sent, self.over, self.there, self.pause,
            self.slow, marks, np.empty((6, ranks), np.int64), np.empty(ranks, np.int64), facts, times,
        )  # fmt: skip
        return facts, times


@dataclass
class _Chains:
    """Places to cut at: chain k is ``places[bounds[k]:bounds[k + 1]]``."""

    places: Ints
    bounds: Ints

    @classmethod
    def of(cls, chains: Sequence[Ints]) -> _Chains:
        return cls(np.concatenate(chains), np.cumsum([0, *map(len, chains)]))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> Ints:
        return self.places[self.bounds[number] : self.bounds[number + 1]]


def _silence(facts: Ints) -> Floats:
    """Of each chain the share of ranks and blocks whose first burst came after a pause twice as long as
    any later one. A first burst's pause counts from the rank's last event in the blocks before.
    """
    known, silent = facts[:, 0], facts[:, 1]
    return np.where(known > 0, silent / np.maximum(known, 1), CHANCE)


def _slowest_usual(pauses: Ints) -> int:
    """The 95th percentile of what is usual among ``pauses``, ns: of a log-normal with their quartiles.

    Most bursts answer something at once; what waits for nothing may be many, and far beyond.
    """
    logs = np.log(np.maximum(pauses, 1))
    low, middle = np.percentile(logs, [25, 50])
    return int(min(np.exp(middle + (middle - low) * 1.645 / 0.674), FAR // 2))


def _wrapped(value: int) -> int:
    """``value`` as 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
