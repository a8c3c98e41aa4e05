"""Operations of connected pipes that nothing announces: cut where ranks paused, if the parts make sense.

In: pipes (NCCL's sockets). Out: collectives. Pauses within an operation may be as long as those before one
(all wait for a rank that is late), so no length of a pause is a boundary by itself: for one least length
after the other the cuts with such pauses are tried. Of these as many are left out as it takes for the parts
to make up operations that are possible, with their inputs before what needs them; what explains most counts,
and of equals where first messages paused longest against later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.collectives.credited import EXPLAINED
from dpuflow.collectives.layouts import Lane, layout_of
from dpuflow.collectives.model import Instance
from dpuflow.collectives.protocols import HELD, LINES, LL, RING_SLOT, STEP_SLOT
from dpuflow.collectives.quiet import Cuts, chain_cuts, counted_cuts, cuts_of, reactions, times_of
from dpuflow.collectives.schedules import free_ranks
from dpuflow.collectives.scoring import NO_CONTRAST
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Layout
    from dpuflow.collectives.pipes import Pipe
    from dpuflow.collectives.streams import Columns

    Ints = NDArray[np.int64]

TWICE: Final = 2
"""Times that a pause before an operation is longer than one within."""
STEP: Final = 2**0.5
"""From one least pause that is tried to the next."""
MERGED: Final = 8
"""Pauses within one operation, at most, that are as long as those before one: ranks wait for late ones."""
INNER: Final = 16
"""Cuts within what makes up no operation that are tried."""
GRAIN: Final = 0.02
"""What makes no difference between shares of messages that are explained."""
SAMPLE: Final = 16
"""Operations that show whether they make sense."""
MOST_KINDS: Final = 4000
"""Kinds of parts that are looked at, at most."""
RARE: Final = 0.1
"""Share of messages that may seem to leave before what they need has come: packets that came twice, late or
out of order."""
_FAR = np.iinfo(np.int64).max
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class _Part(NamedTuple):
    """Messages between two cuts."""

    begin: int
    end: int
    kind: int


class _Choice(NamedTuple):
    """Parts that are operations, and what speaks for them."""

    explained: float
    ordered: bool  # trees are those of NCCL over the default numbering
    contrast: float
    finer: bool  # more parts are better than fewer, if both explain as much
    parts: list[_Part]


def spoken(
    columns: Columns,
    pipes: Sequence[Pipe],
    position: Ints,
    nodes: Ints,
) -> list[Instance]:
    """The operations of connected ``pipes``, seen at all nodes; none where they do not make sense.

    ``position`` and ``nodes``: see ``structured_instances``.
    """
    return _Reader(columns, pipes, position, nodes).instances()


class _Reader:
    def __init__(
        self,
        columns: Columns,
        pipes: Sequence[Pipe],
        position: Ints,
        nodes: Ints,
    ) -> None:
        self.columns, self.pipes, self.position, self.nodes = columns, pipes, position, nodes
        self.ends = sorted({end for pipe in pipes for end in pipe[:2]})
        self.sizes = [columns.sizes[pipe.rows] for pipe in pipes]
        self.total = sum(map(len, self.sizes))
        self.times = times_of(columns, pipes)
        self.cuts = cuts_of(pipes, self.times)
        self._reactions = reactions(pipes, self.times)
        self._hashes = [_prefixes(sizes) for sizes in self.sizes]
        self._layouts: dict[int, dict[int, Layout]] = {}  # by kind: by slot
        self._limit = MOST_KINDS

    def instances(self) -> list[Instance]:
        """Of several ways to cut the one that reads best."""
        best = self._best()
        best = self._or_by(counted_cuts(self.pipes, self.times), best)
        along = chain_cuts(self.pipes, self.times)
        if along is not None:
            best = self._or_by(along, best)
        if best is not None:
            best = self._or_by(cuts_of(self.pipes, self.times, self._behind(best.parts)), best)
        if best is None or best.explained < EXPLAINED:
            self._limit = 2 * MOST_KINDS
            best = self._best(INNER) or best
        return self._made(best.parts) if best is not None and best.explained >= EXPLAINED else []

    def _or_by(self, cuts: Cuts, best: _Choice | None) -> _Choice | None:
        """``best``, or what ``cuts`` lead to, if that is better; then they are the cuts from here on."""
        before, known = self.cuts, self._layouts
        self.cuts, self._layouts = cuts, {}
        other = self._best()
        if other is not None and (best is None or _better(other, best)):
            return other
        self.cuts, self._layouts = before, known
        return best

    def _behind(self, parts: list[_Part]) -> dict[int, int]:
        """By how much each rank is usually later than the first one in an operation, ns."""
        begins = self.cuts.at[[part.begin for part in parts]]
        ends = self.cuts.at[[part.end for part in parts]]
        first = np.full((len(self.ends), len(parts)), _FAR)
        for number, pipe in enumerate(self.pipes):
            starts = np.append(self.times[number].starts, _FAR)[begins[:, number]]
            starts = np.where(ends[:, number] > begins[:, number], starts, _FAR)
            place = self.ends.index(pipe.src)
            first[place] = np.minimum(first[place], starts)
        late = np.where(first == _FAR, 0, first - first.min(axis=0))
        return {end: int(np.median(each)) for end, each in zip(self.ends, late, strict=True)}

    def _best(self, inner: int = 0) -> _Choice | None:
        """What parts of one kind or another explain most, of all least pauses. ``inner``: cuts with shorter
        ones that are tried within what makes up no operation."""
        best: _Choice | None = None
        tried: set[bytes] = set()
        gaps = self.cuts.gaps[1:-1]
        known = gaps[(gaps > 0) & (gaps != _FAR)]
        if not len(known):
            return None
        least = float(known.max())
        while least >= known.min() / STEP and len(self._layouts) < self._limit:
            chosen = np.flatnonzero(np.r_[True, gaps >= least, True])
            least /= STEP
            if chosen.tobytes() in tried:
                continue
            tried.add(chosen.tobytes())
            choice = self._choice(chosen, inner)
            if choice is not None and (best is None or _better(choice, best)):
                best = choice
        return best

    # -- parts -------------------------------------------------------------------------------

    def _choice(self, chosen: Ints, inner: int) -> _Choice | None:
        """Of the cuts numbered ``chosen`` those that part operations; ``inner`` as in ``_best``."""
        parts = self._parts(chosen, MERGED)
        if inner:
            parts = self._with_inner(chosen, parts, inner)
        parts = self._inner(parts)
        if not parts:
            return None
        contrast = self._contrast(parts)
        told = NO_CONTRAST if contrast is None else round(contrast, 2)
        # A chain's chunks each look like an operation, and a tree's if ranks send once in each.
        finer = contrast is not None and not any(self._is_chain(part.kind) for part in parts)
        ordered = sum(self._is_ordered(part.kind) for part in parts) > len(parts) / 2
        return _Choice(round(self._explained(parts), 2), ordered, told, finer, parts)

    def _with_inner(self, chosen: Ints, parts: list[_Part], inner: int) -> list[_Part]:
        """``parts``, and what others of the cuts make of what lies between these."""
        found: list[_Part] = []
        place = 0
        for part in [*parts, _Part(int(chosen[-1]), int(chosen[-1]), 0)]:
            while chosen[place] < part.begin:
                found += self._parts(self._within(int(chosen[place]), int(chosen[place + 1]), inner), inner)
                place += 1
            place = int(np.searchsorted(chosen, part.end))
            found += [part] if part.begin < part.end else []
        return found

    def _within(self, begin: int, end: int, inner: int) -> Ints:
        """The cuts from number ``begin`` to ``end``, of those between the ones with the longest pauses."""
        longest = begin + 1 + np.argsort(-self.cuts.gaps[begin + 1 : end], kind="stable")[:inner]
        return np.concatenate([[begin], np.sort(longest), [end]])

    def _parts(self, chosen: Ints, most: int) -> list[_Part]:
        """Operations between the cuts numbered ``chosen``, with ``most`` - 1 of these within at most."""
        at = self.cuts.at[chosen]
        count = len(chosen)
        reach = min(most, count - 1)
        kinds = np.zeros((count, reach + 1), np.uint64)
        weight = np.zeros((count, reach + 1), np.int64)
        for length in range(1, reach + 1):
            kinds[:-length, length], weight[:-length, length] = self._kinds(at[:-length], at[length:])
        taken = [0] * count
        table, weights = kinds.tolist(), weight.tolist()
        values: list[tuple[int, int]] = [(0, 0)] * count  # messages explained, parts
        for j in range(1, count):
            values[j] = values[j - 1]
            for length in range(1, min(reach, j) + 1):
                i = j - length
                kind = table[i][length]
                told = values[i][0] + weights[i][length], values[i][1] + 1
                if told > values[j] and self._reads(kind, chosen[i], chosen[j]):
                    values[j], taken[j] = told, length
        parts = []
        j = count - 1
        while j > 0:
            i = j - max(taken[j], 1)
            if taken[j]:
                parts.append(_Part(int(chosen[i]), int(chosen[j]), table[i][taken[j]]))
            j = i
        return parts[::-1]

    def _kinds(self, low: Ints, high: Ints) -> tuple[NDArray[np.uint64], Ints]:
        """A number for the sizes of all messages from each of the cuts ``low`` to that of ``high``, and how
        many they are."""
        kinds = np.zeros(len(low), np.uint64)
        with np.errstate(over="ignore"):
            for number, (prefix, power) in enumerate(self._hashes):
                a, b = low[:, number], high[:, number]
                own = prefix[b] - prefix[a] * power[b - a]
                kinds += (own + (b - a).astype(np.uint64)) * _MULTIPLIER ** np.uint64(number + 1)
        return kinds, (high - low).sum(axis=1)

    def _inner(self, parts: list[_Part]) -> list[_Part]:
        """``parts`` without those at the ends that may be what the captures cut, unlike any within."""
        inside = {part.kind for part in parts[1:-1]}
        return [part for part in parts if part.kind in inside]

    def _explained(self, parts: list[_Part]) -> float:
        """The share of messages in ``parts``, of those that captures need not have cut."""
        own = [int((self.cuts.at[p.end] - self.cuts.at[p.begin]).sum()) for p in parts]
        longest, first, last = max(own), parts[0].begin, parts[-1].end
        before = int(self.cuts.at[first].sum())
        behind = self.total - int(self.cuts.at[last].sum())
        asked = self.total - min(before, longest) - min(behind, longest)
        return sum(own) / max(asked, 1)

    def _contrast(self, parts: list[_Part]) -> float | None:
        """Share of (first message of an operation, later one) of a rank whose first one paused twice as long;
        of ranks that need no input in it. None where these send but once.

        A first message's pause counts from the last event before its cut: what reaches a rank before it
        begins tells nothing of it.
        """
        won, pairs = 0.0, 0
        free = {kind: self._free(kind) for kind in {part.kind for part in parts}}
        for place, rank in enumerate(self.cuts.ranks):
            mine = [part for part in parts if rank in free[part.kind]]
            if not mine:
                continue
            begins = self.cuts.at[[part.begin for part in mine]]
            ends = self.cuts.at[[part.end for part in mine]]
            first = self.cuts.pauses[[part.begin for part in mine], place]
            first = first[first != _FAR]
            sent = self._sent(rank, begins, ends)
            turn, start, pause = (np.concatenate([each[k] for each in sent]) for k in range(3))
            order = np.lexsort((start, turn))
            turn, pause = turn[order], np.minimum(pause[order], _FAR // TWICE)
            inside = np.r_[False, turn[1:] == turn[:-1]] & (turn >= 0)
            # Who begins a chain waits for nobody within, but copies: that may take as long as it likes.
            times = np.array([1 if self._is_chain(part.kind) else TWICE for part in mine])
            later = np.sort((times[turn] * pause)[inside])
            if len(first) and len(later):
                won += float(np.searchsorted(later, first).mean() / len(later)) * len(first)
                pairs += len(first)
        return won / pairs if pairs else None

    def _is_chain(self, kind: int) -> bool:
        return next(iter(self._layouts[kind].values())).algorithm.name == "chain"

    def _is_ordered(self, kind: int) -> bool:
        """Whether it is known which ranks' first messages need no input."""
        layout = next(iter(self._layouts[kind].values()))
        return bool(free_ranks(layout.algorithm, len(layout.order), layout.root or 0))

    def _free(self, kind: int) -> frozenset[int]:
        """The endpoints whose first message in parts of that kind needs no input, else all."""
        layout = next(iter(self._layouts[kind].values()))
        places = free_ranks(layout.algorithm, len(layout.order), layout.root or 0)
        return frozenset(layout.order[place] for place in places) or frozenset(layout.order)

    def _sent(self, rank: int, begins: Ints, ends: Ints) -> list[tuple[Ints, Ints, Ints]]:
        """Of each pipe out of ``rank``: the part of its messages, -1 without, when they left, after what
        pause."""
        found = [(np.zeros(0, np.int64),) * 3]
        for number, pipe in enumerate(self.pipes):
            if pipe.src == rank:
                at = np.arange(len(self.sizes[number]))
                part = np.searchsorted(begins[:, number], at, "right") - 1
                within = (part >= 0) & (at < ends[part, number])
                starts = self.times[number].starts
                found.append((np.where(within, part, -1), starts, self._reactions[number]))
        return found

    # -- what they are -----------------------------------------------------------------------

    def _reads(self, kind: int, begin: int, end: int) -> bool:
        if kind not in self._layouts:
            if len(self._layouts) >= self._limit:
                return False
            self._layouts[kind] = self._read([_Part(int(begin), int(end), kind)])
        return bool(self._layouts[kind])

    def _read(self, parts: Sequence[_Part]) -> dict[int, Layout]:
        """What ``parts`` of one kind are, by the slot that it takes for that."""
        lanes = self._lanes(parts)
        if {end for lane in lanes for end in lane[:2]} != set(self.ends):
            return {}  # all ranks take part in every operation
        slots = [RING_SLOT, STEP_SLOT]
        if not any((lane.sizes % LINES[LL]).any() for lane in lanes):
            slots.append(LL)
        found = {}
        for slot in slots:
            mine = [lane._replace(slot=slot) for lane in lanes]
            layout = layout_of(mine, self.position, self.nodes, self.ends)
            if layout is not None and _is_causal(layout, mine):
                found[slot] = layout
        return found

    def _lanes(self, parts: Sequence[_Part]) -> list[Lane]:
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
                    pipe.src, pipe.dst, 0, self.sizes[number][places[0]], self.columns.starts[rows],
                    self.columns.arrivals[rows], self.columns.samples[rows],
                )
            )  # fmt: skip
        return lanes

    def _made(self, parts: list[_Part]) -> list[Instance]:
        """The collectives of ``parts``."""
        alike: dict[int, list[_Part]] = {}
        for part in parts:
            alike.setdefault(part.kind, []).append(part)
        found: list[Instance] = []
        for kind, mine in alike.items():
            fits = self._read(mine) or self._layouts[kind]
            lanes = self._lanes(mine)
            layout, protocol, between = _of_protocol(fits, lanes)
            for part in mine:
                rows = np.concatenate(
                    [
                        pipe.rows[self.cuts.at[part.begin, n] : self.cuts.at[part.end, n]]
                        for n, pipe in enumerate(self.pipes)
                    ]
                )
                rows = rows[np.argsort(self.columns.starts[rows], kind="stable")]
                found.append(
                    Instance(
                        rows,
                        layout.op,
                        list(layout.order),
                        layout.algorithm,
                        root=layout.root,
                        size=layout.size,
                        ranks=layout.ranks,
                        seats=tuple(range(len(layout.order))) if layout.ranks else (),
                        nodes=tuple(self.nodes[layout.order].tolist()) if layout.ranks else (),
                        inside=layout.inside,
                        alike=layout.alike,
                        tails=layout.tails,
                        protocol=protocol,
                        between=between,
                    )
                )
        return found


def _better(one: _Choice, other: _Choice) -> bool:
    """What explains more is better, then what pauses bear out, then fewer kinds of operations.

    Of equals more operations are, since two may look like one of twice the bytes, unless parts of one look
    like operations.
    """
    mine, theirs = (
        (each.explained // GRAIN, each.ordered, each.contrast, -len({part.kind for part in each.parts}))
        for each in (one, other)
    )
    if mine != theirs:
        return mine > theirs
    fewer, more = sorted((one, other), key=lambda each: len(each.parts))
    return len(one.parts) != len(other.parts) and one is (more if more.finer else fewer)


def _prefixes(sizes: Ints) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Polynomial hashes of all beginnings of ``sizes``, and the powers of what they were made with."""
    prefix, power = np.zeros(len(sizes) + 1, np.uint64), np.ones(len(sizes) + 1, np.uint64)
    total, factor, mask = 0, 1, (1 << 64) - 1
    base = 0xD6E8FEB86659FD93
    for place, size in enumerate(sizes.tolist()):
        total = (total * base + size + 1) & mask
        factor = factor * base & mask
        prefix[place + 1], power[place + 1] = total, factor
    return prefix, power


def _is_causal(layout: Layout, lanes: Sequence[Lane]) -> bool:
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


def _of_protocol(
    fits: dict[int, Layout], lanes: Sequence[Lane]
) -> tuple[Layout, str | None, tuple[int, int] | None]:
    """The operation with its protocol and bytes, from how it reads with each slot that fits.

    With LL each message of a ring waits for the one before; with Simple two slices go together. A small
    operation of one message a rank tells nothing of its protocol, so its bytes are one or the other number.
    """
    simple = next((fits[slot] for slot in (RING_SLOT, STEP_SLOT) if slot in fits), None)
    lines = fits.get(LL)
    if lines is not None:
        size = None if lines.size is None else lines.size // LINES[LL] * HELD[LL]
        lines = lines._replace(size=size)
    if lines is None:
        assert simple is not None
        return simple, "simple", None
    if simple is None:
        return lines, "ll", None
    if lines.algorithm.name == "ring":
        return (lines, "ll", None) if _pass_on(lanes, 1) else (simple, "simple", None)
    between = (lines.size, simple.size) if simple.size and lines.size else None
    return simple._replace(size=None), None, between
