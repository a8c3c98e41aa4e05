"""What the messages between two cuts are: operations by the layouts of their sizes, and how far pauses bear
that out.

In: parts of pipes between cuts (``boundaries``). Out: collectives. Parts of one kind hold the same sizes.
Nothing of an operation leaves before what it needs has come; that shows which of NCCL's protocols ran. How
often a rank's first message in an operation paused longer than its later ones tells a good way to cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.matching.buffers import LINES_OF_8, LL, RING_SLOT, STEP_SLOT
from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import layout_of
from dpuflow.matching.model import RARE, TWICE
from dpuflow.matching.scoring import NO_CONTRAST
from dpuflow.schedules.graph import free_ranks
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.boundaries import Cuts, Times
    from dpuflow.matching.credited import Pipe
    from dpuflow.matching.lanes import Layout
    from dpuflow.matching.model import Instance, Job


def contrast_of(
    parts: Sequence[Part], times: Sequence[Times], pauses: Sequence[Sequence[Ints]], meanings: Meanings
) -> float | None:
    """Share of (first message of an operation, later one) of a rank whose first one paused twice as long;
    of ranks that need no input in it. None where these send but once.

    Operations without a later message say nothing for a way to cut: each is worth ``NO_CONTRAST``.
    A first message's pause counts from the last event before its cut: what reaches a rank before it begins
    tells nothing of it. But where all ranks but one go on as soon as an input has come, they had begun before
    the cut, and waited for that one: such a part wins nothing (one of two ranks may go on so by chance).
    ``pauses``: of each pipe's messages, ns, as ``reactions`` has them, by both of its counts: what takes long
    to leave has pauses between messages that are none, and may hide those between operations.
    """
    counts = zip(pauses, (meanings.cuts.pauses, meanings.cuts.idle), strict=True)
    told = [_contrast(parts, times, later, first, meanings) for later, first in counts]
    return max((each for each in told if each is not None), default=None)


def _contrast(
    parts: Sequence[Part], times: Sequence[Times], pauses: Sequence[Ints], firsts: Ints, meanings: Meanings
) -> float | None:
    """The same by one count of pauses; ``firsts``: those of cuts."""
    cuts, pipes = meanings.cuts, meanings.pipes
    won, asked, compared = 0.0, 0, 0
    free = {kind: meanings.free(kind) or cuts.ranks for kind in {part.kind for part in parts}}
    waited = np.zeros((2, len(parts)), np.int64)  # ranks that need no input, and went on with one at once
    for place, rank in enumerate(cuts.ranks):
        at = [number for number, part in enumerate(parts) if rank in free[part.kind]]
        mine = [parts[number] for number in at]
        if not mine:
            continue
        begins = cuts.at[[part.begin for part in mine]]
        ends = cuts.at[[part.end for part in mine]]
        first = firsts[[part.begin for part in mine], place]
        first = first[first != FAR]
        sent = _sent(rank, begins, ends, pipes, times, pauses)
        turn, start, pause = (np.concatenate([each[k] for each in sent]) for k in range(3))
        order = np.lexsort((start, turn))
        turn, pause = turn[order], np.minimum(pause[order], FAR // TWICE)
        inside = np.r_[False, turn[1:] == turn[:-1]] & (turn >= 0)
        # Who begins a chain waits for nobody within, but copies: that may take as long as it likes.
        least = np.array([1 if meanings.is_chain(part.kind) else TWICE for part in mine])
        later = np.sort((least[turn] * pause)[inside])
        waited[0, at] += 1
        if len(later):
            waited[1, at] += _since_input(rank, begins, ends, pipes, times) <= later[len(later) // 2]
        if len(first):
            told = min(len(first), len(later))  # the others have no later message to be held against
            share = float(np.searchsorted(later, first).mean() / len(later)) if told else 0.0
            won += share * told + NO_CONTRAST * (len(first) - told)
            asked, compared = asked + len(first), compared + told
    if not compared:
        return None
    within = float(np.mean(waited[1] >= np.maximum(waited[0] - 1, TWICE)))
    return won / asked * (1 - within)


def _since_input(rank: int, begins: Ints, ends: Ints, pipes: Sequence[Pipe], times: Sequence[Times]) -> Ints:
    """For each part how long ago its last input had come when ``rank`` first sent in it; FAR: none had."""
    first, last = np.full(len(begins), FAR), np.full(len(begins), NEVER)
    for number, pipe in enumerate(pipes):
        if pipe.src == rank:
            begun = ends[:, number] > begins[:, number]
            starts = np.append(times[number].starts, FAR)[begins[:, number]]
            first = np.where(begun, np.minimum(first, starts), first)
    for number, pipe in enumerate(pipes):
        if pipe.dst == rank:
            came = np.searchsorted(times[number].arrivals, first, "right") - 1
            known = (came >= begins[:, number]) & (came < ends[:, number])
            last = np.where(known, np.maximum(last, times[number].arrivals[came]), last)
    return np.where((first != FAR) & (last != NEVER), first - last, FAR)


def _sent(
    rank: int, begins: Ints, ends: Ints, pipes: Sequence[Pipe], times: Sequence[Times], pauses: Sequence[Ints]
) -> list[tuple[Ints, Ints, Ints]]:
    """Of each pipe out of ``rank``: the part of its messages, -1 without, when they left, after what
    pause."""
    found = [(np.zeros(0, np.int64),) * 3]
    for number, pipe in enumerate(pipes):
        if pipe.src == rank:
            at = np.arange(len(pipe.rows))
            part = np.searchsorted(begins[:, number], at, "right") - 1
            within = (part >= 0) & (at < ends[part, number])
            starts = times[number].starts
            found.append((np.where(within, part, -1), starts, pauses[number]))
    return found


MOST_KINDS: Final = 4000
"""Kinds of parts that are looked at, at most."""


class Part(NamedTuple):
    """Messages between two cuts."""

    begin: int
    end: int
    kind: int


class Meanings:
    """What parts of connected ``pipes`` between ``cuts`` are, by their kinds, each looked at once."""

    def __init__(self, job: Job, pipes: Sequence[Pipe], cuts: Cuts) -> None:
        self.job, self.pipes, self.cuts, self.columns = job, pipes, cuts, job.columns
        self.ends = sorted({end for pipe in pipes for end in pipe[:2]})
        self._layouts: dict[int, dict[int, Layout]] = {}  # by kind: by slot
        self._longest: dict[int, int] = {}  # by kind: bytes of its longest message

    def over(self, cuts: Cuts) -> Meanings:
        """The same for other cuts, of which no kind was looked at yet."""
        return Meanings(self.job, self.pipes, cuts)

    @property
    def full(self) -> bool:
        """Whether as many kinds were looked at as may be."""
        return len(self._layouts) >= MOST_KINDS

    def reads(self, kind: int, begin: int, end: int) -> bool:
        """Whether parts of that kind, as that from cut ``begin`` to ``end``, are operations."""
        if kind not in self._layouts:
            if self.full:
                return False
            part = Part(int(begin), int(end), kind)
            self._layouts[kind] = self._read([part])
            self._longest[kind] = max((int(lane.sizes.max()) for lane in self._lanes([part])), default=0)
        return bool(self._layouts[kind])

    def is_chain(self, kind: int) -> bool:
        """Whether parts of that kind are passed on from one rank to the next."""
        return next(iter(self._layouts[kind].values())).algorithm.name == "chain"

    def hides(self, kind: int) -> bool:
        """Whether parts of that kind are of more ranks than endpoints."""
        return any(layout.ranks > len(self.ends) for layout in self._layouts[kind].values())

    def at_odds(self, kinds: Mapping[int, int]) -> set[int]:
        """Of ``kinds``, each with its messages, those that run others together: at odds with most of them.

        A communicator has as many ranks in each operation, and messages as long are of one protocol.
        """
        simple = {self._longest[kind] for kind in kinds if self._layouts[kind].keys() - {LL}}
        lines = {
            kind for kind in kinds if self._layouts[kind].keys() == {LL} and self._longest[kind] in simple
        }
        ranks: dict[int, dict[int, int]] = {}  # of rings: how many there would be, and who says so
        for kind, messages in kinds.items():
            layout = next(iter(self._layouts[kind].values()))
            if layout.algorithm.name == "ring" and kind not in lines:
                ranks.setdefault(layout.ranks, {})[kind] = messages
        usual = max(ranks, key=lambda count: sum(ranks[count].values()), default=0)
        return lines.union(*(mine for count, mine in ranks.items() if count != usual))

    def free(self, kind: int) -> frozenset[int]:
        """The endpoints whose first message in parts of that kind needs no input; none: not known."""
        layout = next(iter(self._layouts[kind].values()))
        places = free_ranks(layout.algorithm, len(layout.order), layout.root or 0)
        return frozenset(layout.order[place] for place in places)

    def made(self, parts: list[Part]) -> list[Instance]:
        """The collectives of ``parts``."""
        alike: dict[int, list[Part]] = {}
        for part in parts:
            alike.setdefault(part.kind, []).append(part)
        found: list[Instance] = []
        for kind, mine in alike.items():
            # Of some nodes' messages what one of them may be by itself not all of them are.
            fits = self._read(mine) or (self._layouts[kind] if self.job.near is None else {})
            if not fits:
                continue
            layout, protocol, between = of_protocol(fits)
            for part in mine:
                rows = np.concatenate(
                    [
                        pipe.rows[self.cuts.at[part.begin, n] : self.cuts.at[part.end, n]]
                        for n, pipe in enumerate(self.pipes)
                    ]
                )
                rows = rows[np.argsort(self.columns.starts[rows], kind="stable")]
                made = layout.made(rows, self.job.nodes)
                slicing = replace(made.slicing, protocol=protocol, between=between)
                found.append(replace(made, slicing=slicing))
        return found

    def _read(self, parts: Sequence[Part]) -> dict[int, Layout]:
        """What ``parts`` of one kind are, by the slot that it takes for that."""
        lanes = self._lanes(parts)
        if {end for lane in lanes for end in lane[:2]} != set(self.ends):
            return {}  # all ranks take part in every operation
        slots = [RING_SLOT, STEP_SLOT]
        if not any((lane.sizes % LINES_OF_8.line).any() for lane in lanes):
            slots.append(LL)
        found = {}
        for slot in slots:
            mine = [lane._replace(slot=slot) for lane in lanes]
            layout = layout_of(self.job, mine, self.ends)
            # LL sends no two slices: each message of a ring waits for the one before.
            if layout is not None and (slot != LL or layout.algorithm.name != "ring" or _pass_on(mine, 1)):
                found[slot] = layout
        return found

    def _lanes(self, parts: Sequence[Part]) -> list[Lane]:
        lanes = []
        begins = self.cuts.at[[part.begin for part in parts]]
        ends = self.cuts.at[[part.end for part in parts]]
        for number, pipe in enumerate(self.pipes):
            length = int(ends[0, number] - begins[0, number])
            if not length:
                continue
            places = begins[:, number, None] + np.arange(length)
            rows = pipe.rows[places]
            lanes.append(
                Lane(
                    pipe.src, pipe.dst, 0, self.columns.sizes[rows[0]], self.columns.starts[rows],
                    self.columns.arrivals[rows], self.columns.samples[rows],
                )
            )  # fmt: skip
        return lanes


SAMPLE: Final = 16
"""Operations that show whether they make sense."""


def _pass_on(lanes: Sequence[Lane], behind: int) -> bool:
    """Whether every rank sends message i + ``behind`` after message i has come.

    Which of several channels with as many bytes goes on as which is not known, so the first of them that
    leaves is held against the first that came, and so on.
    """
    into: dict[tuple[int, tuple[int, int]], list[Lane]] = {}
    for lane in lanes:
        into.setdefault((lane.dst, lane.kind), []).append(lane)
    out: dict[tuple[int, tuple[int, int]], list[Lane]] = {}
    for lane in lanes:
        out.setdefault((lane.src, lane.kind), []).append(lane)
    early = seen = 0
    for key, came in into.items():
        goes = out.get(key, [])
        if len(goes) != len(came):
            continue  # of a chain
        count = came[0].arrivals.shape[1] - behind
        before = np.sort([lane.arrivals[:SAMPLE, :count] for lane in came], axis=0)
        then = np.sort([lane.starts[:SAMPLE, behind:] for lane in goes], axis=0)
        known = (before[0] != NEVER) & (then[0] != NEVER)
        seen += len(came) * int(known.sum())
        early += int(((then < before) & known).sum())
    return early <= RARE * seen


def of_protocol(fits: dict[int, Layout]) -> tuple[Layout, str | None, tuple[int, int] | None]:
    """The operation with its protocol and bytes, from how it reads with each slot that fits.

    A small operation of one message a rank tells nothing of its protocol, so its bytes are one or the other
    number.
    """
    simple = next((fits[slot] for slot in (RING_SLOT, STEP_SLOT) if slot in fits), None)
    lines = fits.get(LL)
    if lines is not None:
        lines = lines._replace(size=None if lines.size is None else LINES_OF_8.data(lines.size))
    if lines is None:
        assert simple is not None
        return simple, "simple", None
    if simple is None:
        return lines, "ll", None
    if lines.algorithm.name == "ring":
        return lines, "ll", None
    between = (lines.size, simple.size) if simple.size and lines.size else None
    # Of two ranks who only sends when it has got something hands on a sum, or comes later: trees claim less.
    chosen = lines if simple.algorithm.name == "ring" else simple
    ops = dict.fromkeys((*simple.alike, *(layout.op for layout in fits.values())))
    return chosen._replace(size=None, alike=tuple(op for op in ops if op != chosen.op)), None, between
