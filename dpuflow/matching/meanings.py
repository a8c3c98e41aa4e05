"""What the messages between two cuts are: the layouts of their sizes that their times bear out.

In: pipes that nothing announces (NCCL's sockets), cuts, and parts between these. Parts of one kind hold the
same sizes. Out: whether a kind is an operation of all ranks, who of them needs no input first, collectives.

Nothing of an operation leaves before what it needs has come; that shows which of NCCL's protocols ran, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.matching.buffers import LINES_OF_8, LL, RING_SLOT, STEP_SLOT
from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import layout_of
from dpuflow.matching.levels import RARE
from dpuflow.schedules.graph import free_ranks
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.boundaries import Cuts
    from dpuflow.matching.lanes import Layout
    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.pipes import Pipe

    Ints = NDArray[np.int64]


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
            self._layouts[kind] = self._read([Part(int(begin), int(end), kind)])
        return bool(self._layouts[kind])

    def is_chain(self, kind: int) -> bool:
        """Whether parts of that kind are passed on from one rank to the next."""
        return next(iter(self._layouts[kind].values())).algorithm.name == "chain"

    def is_ordered(self, kind: int) -> bool:
        """Whether it is known which ranks' first messages need no input."""
        layout = next(iter(self._layouts[kind].values()))
        return bool(free_ranks(layout.algorithm, len(layout.order), layout.root or 0))

    def free(self, kind: int) -> frozenset[int]:
        """The endpoints whose first message in parts of that kind needs no input, else all."""
        layout = next(iter(self._layouts[kind].values()))
        places = free_ranks(layout.algorithm, len(layout.order), layout.root or 0)
        return frozenset(layout.order[place] for place in places) or frozenset(layout.order)

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
            lanes = self._lanes(mine)
            layout, protocol, between = of_protocol(fits, lanes)
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
            if layout is not None and (self.job.near is not None or is_causal(layout, mine)):
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
_FAR = np.iinfo(np.int64).max


def is_causal(layout: Layout, lanes: Sequence[Lane]) -> bool:
    """Whether what the operation's messages need had come before they left."""
    name = layout.algorithm.name
    if name == "chain":
        return _pass_on(lanes, 0)
    if name == "tree":
        return not _in_turns(lanes)
    if name != "ring" or layout.ranks:
        return True
    return _pass_on(lanes, 2 if lanes[0].slot == RING_SLOT else 1)


def _in_turns(lanes: Sequence[Lane]) -> bool:
    """Whether all ranks wait somewhere for all that comes before they send more: as if it were several
    operations. A tree's ranks go on with the next chunk while the one before is on its way."""
    (count, *others) = {len(lane.sizes) for lane in lanes}
    if others:
        return False
    ends = {end for lane in lanes for end in lane[:2]}
    waited = np.ones(count - 1, bool)
    for end in ends:
        came = np.max([lane.arrivals[0] for lane in lanes if lane.dst == end], axis=0)
        goes = [np.where(lane.starts[0] == NEVER, _FAR, lane.starts[0]) for lane in lanes if lane.src == end]
        waited &= np.min(goes, axis=0)[1:] > came[:-1]
    return bool(waited.any())


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


def of_protocol(
    fits: dict[int, Layout], lanes: Sequence[Lane]
) -> tuple[Layout, str | None, tuple[int, int] | None]:
    """The operation with its protocol and bytes, from how it reads with each slot that fits.

    With LL each message of a ring waits for the one before; with Simple two slices go together. A small
    operation of one message a rank tells nothing of its protocol, so its bytes are one or the other number.
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
        return (lines, "ll", None) if _pass_on(lanes, 1) else (simple, "simple", None)
    between = (lines.size, simple.size) if simple.size and lines.size else None
    return simple._replace(size=None), None, between
