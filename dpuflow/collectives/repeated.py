"""Collectives of streams that nothing names (TCP without a known framing): what repeats.

In: EXCHANGE rows of bursts. Out: collectives whose operation is not known. A training or serving job does
the same again and again, so between two collectives, where nothing is under way, each direction of each
connection has carried a multiple of one number of bytes. Several periods and places to cut fit; right is
where ranks had been silent although nothing kept them, and where they act unasked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.model import Instance
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.tables import Rows

    Ints = NDArray[np.int64]

BULK = 0.9
"""Sizes that make up this share of a connection's bytes are its own; rarer ones are accidents."""
FEWEST = 4
"""Repetitions from which on what repeats is no accident."""
PERIODS = 32
"""Periods worth a try: the most frequent distances between long silences."""
AHEAD = 48
"""How many long silences a period may span."""
USUAL = 0.9
"""A place that this share of all periods has is part of the pattern."""
EXPLAINED = 0.5
"""A pattern that leaves more than half of the bytes over has not understood them."""
TWICE = 2
"""What happened once may be an accident: a wrong cut, a question and its answer."""
CHANCE = 0.5
"""What a pattern is worth whose ranks act but once, so that there is nothing to compare."""
SELDOM = 0.1
"""How often a rank must act unasked at a place that begins something: mostly another one is quicker. At a
place where all wait for a late rank, it alone does."""
WORSE = 0.05
"""What finer cuts may cost in silences before them: coincidences."""


def repeated_instances(exchanges: Rows, rows: Ints, position: Ints) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE: bursts in order of time, whose operation is unknown.

    ``position`` gives each endpoint's place in the default numbering of ranks. What does not repeat is
    left out.
    """
    found: list[Instance] = []
    for clusters in _connected(exchanges, _clusters(exchanges, rows)):
        apart = [_Pattern(exchanges, cluster) for cluster in clusters]
        # The steps of one algorithm may differ in size, and so may communicators.
        explained = sum(pattern.explained for pattern in apart)
        if len(clusters) > 1 and explained < EXPLAINED * sum(int(pattern.size.sum()) for pattern in apart):
            whole = _Pattern(exchanges, np.sort(np.concatenate(clusters)))
            apart = [whole] if whole.explained > explained else apart
        for pattern in apart:
            found.extend(pattern.instances(position))
    return found


def _connected(exchanges: Rows, clusters: Sequence[Ints]) -> list[list[Ints]]:
    """``clusters`` that have endpoints in common."""
    groups: list[tuple[set[int], list[Ints]]] = []
    for cluster in clusters:
        ends = {*exchanges["src"][cluster].tolist(), *exchanges["dst"][cluster].tolist()}
        met = [group for group in groups if group[0] & ends]
        groups = [group for group in groups if not group[0] & ends]
        groups.append((ends.union(*(g[0] for g in met)), [*(c for g in met for c in g[1]), cluster]))
    return [group for _, group in groups]


def _clusters(exchanges: Rows, rows: Ints) -> list[Ints]:
    """``rows`` by connections that carry bursts of the same sizes and meet in endpoints."""
    connection = exchanges["connection"][rows].astype(np.int64)
    order = np.argsort(connection, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(connection[order])) + 1) if len(rows) else []
    parent = list(range(len(parts)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[int, int], int] = {}
    for number, part in enumerate(parts):
        size, count = np.unique(exchanges["bytes"][part].astype(np.int64), return_counts=True)
        volume = size * count
        best = np.argsort(-volume, kind="stable")
        enough = int(np.searchsorted(np.cumsum(volume[best]), BULK * volume.sum())) + 1
        for own in size[best[:enough]][count[best[:enough]] > 1].tolist():
            for end in (int(exchanges["src"][part[0]]), int(exchanges["dst"][part[0]])):
                parent[find(number)] = find(first.setdefault((own, end), number))
    joined: dict[int, list[Ints]] = {}
    for number, part in enumerate(parts):
        joined.setdefault(find(number), []).append(part)
    return [np.sort(np.concatenate(some)) for some in joined.values()]


@dataclass
class _Worth:
    """How well cuts fall where ranks paused; ``unasked``: ranks that act unasked first, as a share."""

    silence: float
    unasked: float


class _Pattern:
    """The bursts of one cluster, and where they repeat."""

    def __init__(self, exchanges: Rows, rows: Ints) -> None:
        rows = rows[np.argsort(exchanges["data_ns"][rows], kind="stable")]
        picked = exchanges[rows]
        self.rows = rows
        self.ends, ends = np.unique(np.stack([picked["src"], picked["dst"]]), return_inverse=True)
        self.src, self.dst = ends.reshape(2, -1)
        self.sent, self.over = picked["data_ns"], picked["data_end_ns"]
        self.there = np.where(picked["arrived_end_ns"] != NEVER, picked["arrived_end_ns"], self.over)
        self.size = picked["bytes"].astype(np.int64)
        way = picked["connection"].astype(np.int64) << 1 | (picked["src"] > picked["dst"])
        ways, way = np.unique(way, return_inverse=True)
        # Bytes of all ways in one number: equal sums stand for equal bytes on every way.
        weight = np.random.default_rng(len(ways)).integers(1, 1 << 62, len(ways), np.int64)
        self.sums = np.concatenate([[0], np.cumsum(self.size * weight[way.reshape(-1)])])
        self.busy = np.maximum.accumulate(self.there)
        free = np.r_[True, self.busy[:-1] <= self.sent[1:], True]
        self.quiet = np.flatnonzero(free)  # nothing is under way before these bursts; the last is the end
        self.at = dict(zip(self.sums[self.quiet].tolist(), self.quiet.tolist(), strict=True))
        self.pause = self._pauses()
        self.slow = _slowest_usual(self.pause)
        worth, self.cuts = self._best()
        self.explained = worth * int(self.size.sum())  # bytes

    def _pauses(self) -> Ints:
        """For each burst how long nothing had happened at its sender, ns."""
        pause = np.zeros(len(self.rows), np.int64)
        for rank in range(len(self.ends)):
            mine = np.flatnonzero(self.src == rank)
            events = np.sort(np.concatenate([self.over[mine], self.there[self.dst == rank], self.sent[mine]]))
            before = np.searchsorted(events, self.sent[mine]) - 1
            pause[mine] = np.where(before >= 0, self.sent[mine] - events[before], 0)
        return pause

    def _best(self) -> tuple[float, list[tuple[int, int]]]:
        """The cuts of the best period, and what they are worth."""
        if len(self.ends) < 2 or len(self.quiet) < FEWEST:
            return 0.0, []
        return max(
            (self._cuts(period) for period in self._periods()), key=lambda each: each[0], default=(0.0, [])
        )

    def instances(self, position: Ints) -> list[Instance]:
        """The collectives, in order of time."""
        cuts = self.cuts
        free = self._free(cuts)
        found = []
        for (a, b), unasked in zip(cuts, free, strict=True):
            members = np.unique(np.concatenate([self.src[a:b], self.dst[a:b]])).tolist()
            members.sort(key=lambda rank: int(position[self.ends[rank]]))
            order = [int(self.ends[rank]) for rank in members]
            places = frozenset(place for place, rank in enumerate(members) if rank in unasked)
            if len(places) < 2 or (len(members) == 2 and b - a < 2 * TWICE):
                continue  # who only answers is a server
            op = Op.SEND_RECV if len(members) == 2 < len(self.ends) and self._one_way(a, b) else Op.UNKNOWN
            found.append(Instance(self.rows[a:b], op, order, confidence=0.7, free=places))
        return found

    def _one_way(self, a: int, b: int) -> bool:
        """Whether one rank sent (nearly) all bytes of a block."""
        sent = np.bincount(self.src[a:b], self.size[a:b])
        return bool(sent.max() >= BULK * sent.sum())

    def _free(self, cuts: Sequence[tuple[int, int]]) -> list[set[int]]:
        """For each block the ranks whose first burst needs no input.

        Where it left before anything had reached the rank, in some blocks, it needs no input in all that
        are alike: the same bytes on all ways, and the same first burst. So it does where it mostly comes
        later than what answers something usually does.
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
        free = {act for act in times if early[act] >= TWICE or 2 * slow[act] > times[act] >= FEWEST}
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

    def _chains(self, period: int) -> list[list[int]]:
        """Quiet places that follow each other at the distance ``period``."""
        chains = []
        for start in self.quiet.tolist():
            here = int(self.sums[start])
            if _wrapped(here - period) in self.at:
                continue
            chain = [start]
            while (following := self.at.get(_wrapped(here + period))) is not None and following > chain[-1]:
                chain.append(following)
                here = _wrapped(here + period)
            if len(chain) > 1:
                chains.append(chain)
        return chains

    def _cuts(self, period: int) -> tuple[float, list[tuple[int, int]]]:
        """The best cuts of this period, as pairs of places, and what they are worth."""
        chains = self._chains(period)
        judged = []
        for chain in chains:
            of = self._worth(np.array(chain))
            judged.append((of.silence + of.unasked * WORSE, len(chain), chain))
        if not judged:
            return 0.0, []
        # Where the pattern was disturbed it goes on in another chain.
        judged.sort(key=lambda each: -each[0] * each[1])
        taken: list[list[int]] = []
        for _, _, chain in judged:
            if all(chain[-1] <= other[0] or chain[0] >= other[-1] for other in taken):
                taken.append(chain)
        taken = [chain for chain in taken if len(chain) > 2]
        blocks = sum(len(chain) - 1 for chain in taken)
        if blocks < FEWEST:
            return 0.0, []
        taken.sort()
        refined = self._refined(taken, period)
        share = sum(int(self.size[chain[0] : chain[-1]].sum()) for chain in taken) / max(
            int(self.size.sum()), 1
        )
        if share < EXPLAINED:
            return 0.0, []
        total = sum(len(chain) - 1 for chain in refined)
        worth = sum(self._worth(np.array(chain)).silence * (len(chain) - 1) for chain in refined) / total
        cuts = [(a, b) for chain in self._extended(refined) for a, b in pairwise(chain)]
        return worth * share, cuts

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

    def _refined(self, chains: list[list[int]], period: int) -> list[list[int]]:
        """Further places that (nearly) every period has, if ranks pause and act unasked there too."""
        blocks = sum(len(chain) - 1 for chain in chains)
        places: dict[int, list[int]] = {}
        quiet = self.quiet
        for chain in chains:
            for a, b in pairwise(chain):
                for q in quiet[np.searchsorted(quiet, a) + 1 : np.searchsorted(quiet, b)].tolist():
                    places.setdefault(_wrapped(int(self.sums[q]) - int(self.sums[a])), []).append(q)
        usual = [found for found in places.values() if len(found) >= USUAL * blocks]
        usual.sort(key=lambda found: -float(np.median(self.sent[found] - self.busy[np.array(found) - 1])))
        enough = self._overall(chains) - WORSE
        best, finer = chains, chains
        for found in usual[:AHEAD]:
            more = [sorted({*chain, *(q for q in found if chain[0] < q < chain[-1])}) for chain in finer]
            if self._openers(more, found) > 1:
                finer = more
                # Ranks pause at the places not yet cut as well, so worth may come with the last one only.
                if self._overall(finer) >= enough:
                    best = finer
        return best

    def _overall(self, chains: Sequence[list[int]]) -> float:
        total = sum(len(chain) - 1 for chain in chains)
        return sum(self._worth(np.array(chain)).silence * (len(chain) - 1) for chain in chains) / total

    def _openers(self, chains: Sequence[list[int]], places: Sequence[int]) -> int:
        """How many ranks act unasked, now and then, in the blocks that begin at ``places``."""
        ranks = len(self.ends)
        times = np.zeros(ranks, np.int64)
        for chain in chains:
            cuts = np.array(chain)
            which, unasked = self._unasked(cuts)
            mine = unasked & np.isin(cuts[which // ranks], places)
            times += np.bincount(which[mine] % ranks, minlength=ranks)
        return int((times >= max(TWICE, SELDOM * len(places))).sum())

    def _unasked(self, cuts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """For each block and rank that acts in it (block * ranks + rank) whether it first does so unasked."""
        a, b = int(cuts[0]), int(cuts[-1])
        block = np.searchsorted(cuts, np.arange(a, b), side="right") - 1
        ranks = len(self.ends)
        which, first = np.unique(block * ranks + self.src[a:b], return_index=True)
        arrived = np.full((len(cuts) - 1) * ranks, np.iinfo(np.int64).max)
        np.minimum.at(arrived, block * ranks + self.dst[a:b], self.there[a:b])
        alone = self.sent[a:b][first] <= arrived[which]
        return which, alone & (self.pause[a:b][first] > self.slow)

    def _worth(self, cuts: Ints) -> _Worth:
        """``silence``: the share of ranks and blocks whose first burst came after a pause twice as long as
        any later one. A first burst's pause counts from the rank's last event in the blocks before.
        """
        a, b = int(cuts[0]), int(cuts[-1])
        count, ranks = len(cuts) - 1, len(self.ends)
        block = np.searchsorted(cuts, np.arange(a, b), side="right") - 1
        key = block * ranks + self.src[a:b]
        which, first = np.unique(key, return_index=True)
        later = np.full(count * ranks, -1)
        rest = np.ones(b - a, bool)
        rest[first] = False
        np.maximum.at(later, key[rest], self.pause[a:b][rest])
        last = np.full(count * ranks, NEVER)
        np.maximum.at(last, key, self.over[a:b])
        np.maximum.at(last, block * ranks + self.dst[a:b], self.there[a:b])
        last = np.maximum.accumulate(last.reshape(count, ranks), axis=0)
        before = np.concatenate([np.full((1, ranks), NEVER), last[:-1]]).reshape(-1)[which]
        known = (before != NEVER) & (later[which] >= 0)
        wins = self.sent[a:b][first][known] - before[known] > 2 * later[which][known]
        _, unasked = self._unasked(cuts)
        return _Worth(float(wins.mean()) if len(wins) else CHANCE, float(unasked.mean()))


def _slowest_usual(pauses: Ints) -> float:
    """The 95th percentile of what is usual among ``pauses``, ns: of a log-normal with their quartiles.

    Most bursts answer something at once; what waits for nothing may be many, and far beyond.
    """
    logs = np.log(np.maximum(pauses, 1))
    low, middle = np.percentile(logs, [25, 50])
    return float(np.exp(middle + (middle - low) * 1.645 / 0.674))


def _wrapped(value: int) -> int:
    """``value`` as 64 bits hold it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
