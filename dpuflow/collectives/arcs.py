"""NCCL's rings of which only some nodes were captured: which operation, how many ranks, how many bytes.

In: the lanes of one operation, which lead into and out of captured nodes. Out: a layout, or None where they
are no ring. A captured rank sends to the next one and hears from the one before; whom these send to and hear
from was not seen. So a ring shows as arcs: ranks in a row whose first and last one were not captured.

- Each hop passes all chunks of the buffer, so one hop tells the bytes. All loops but the last fill the
  slots, so where the last one begins tells how many steps it takes: n - 1, or twice as many (all_reduce).
- What leaves a captured rank in a step is what came in the step before, changed where it is reduced and
  the same where it is passed on (the first bytes of messages). In an all_reduce of n ranks it is reduced in
  n - 1 steps, then passed on in n - 2; in an all_gather always passed on, in a reduce_scatter never.

What that leaves open stays open: several numbers of ranks make ``size`` None, several operations
``Op.UNKNOWN`` with those that fit in ``alike``. NCCL 2.30 src/device/all_reduce.h, all_gather.h,
reduce_scatter.h.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schedules.algorithms import Algorithm
from dpuflow.schedules.nccl import looped_ring
from dpuflow.schedules.sending import Send
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Lane

AGREE: Final = 0.9
"""Share of messages that must be passed on, or changed, as the operation has it: those that were sent again
or lost from a capture may be told wrongly."""

FEW: Final = 32
"""Operations whose first bytes tell which lanes are of one channel."""


class Ring(NamedTuple):
    """What the arcs are. ``order``: endpoints by position; ranks that were not seen are negative numbers.

    ``ranks``: how many they are, 0 where several numbers fit. ``size``: bytes of the buffer as on the wire,
    None where several numbers of ranks fit; ``alike``: other operations that fit; ``tails``: parts of the
    buffer that may end within a slot.
    """

    op: Op
    algorithm: Algorithm
    order: list[int]
    size: int | None
    alike: tuple[Op, ...]
    tails: int
    ranks: int


class Fit(NamedTuple):
    """A way to read one channel: an operation of so many ranks, in so many loops, and the bytes it has."""

    op: Op
    ranks: int
    loops: int
    size: int


def open_ring(
    lanes: Sequence[Lane], captured: AbstractSet[int], slot: int, ranks: int = 0, slices: int = 1
) -> Ring | None:
    """The ring that ``lanes`` are part of; ``captured`` are the endpoints all of whose messages are there,
    ``slices`` messages of a chunk, 0 where no ring has such slots.

    None where they go round, where some captured rank does not both send and receive, or where they have
    sizes that no ring (of so many ``ranks``, if given) has.
    """
    arcs = _arcs({lane[:2] for lane in lanes}, captured)
    channels = _channels(lanes, arcs, slices) if arcs is not None and slices else None
    if arcs is None or channels is None:
        return None
    seen = sum(map(len, arcs))
    fits: dict[tuple[Op, int], list[Fit]] | None = None
    for channel in channels:
        if any(lane.sizes.max(initial=0) > slot for row in channel for lane in row):
            return None
        found = {fit[:2]: [fit] for fit in fits_of(channel, slices, slot, seen) if ranks in (0, fit.ranks)}
        if fits is not None:
            found = {key: fits[key] + found[key] for key in fits.keys() & found.keys()}
        fits = found
    if not fits or (len(arcs) > 1 and not meet(lanes, arcs)):
        return None
    kept = _by_content(list(fits.values()), channels, slices)
    if not kept:
        return None
    return _told(kept, arcs, len(channels))


def _told(kept: list[list[Fit]], arcs: list[list[int]], channels: int) -> Ring:
    """The ring, given all ways to read it."""
    ops = sorted({fits[0].op for fits in kept})
    sizes = {sum(fit.size for fit in fits) for fits in kept}
    ranks = {fits[0].ranks for fits in kept}
    known = ranks.pop() if len(ranks) == 1 else 0
    fits = kept[0]
    op, n, loops = fits[0].op, fits[0].ranks, max(fit.loops for fit in fits)
    hops = sum(map(len, arcs)) - len(arcs)
    seen = [end for arc in arcs for end in arc]
    tails = channels * (1 if op == Op.ALL_GATHER else n)
    if len(ops) == 1 and known and (len(arcs) == 1 or (len(arcs) == 2 and len(seen) == n)):
        order = seen + [-1 - place for place in range(len(seen), n)]
        return Ring(op, looped_ring(op, loops), order, sizes.pop(), (), tails, known)
    # How far the arcs are apart is not known, so only what goes along them is laid out.
    edges = tuple((a, b) for arc in arcs for a, b in pairwise([seen.index(end) for end in arc]))
    steps = max((2 if fit.op == Op.ALL_REDUCE else 1) * fit.loops * (fit.ranks - 1) for fit in fits)
    assert len(edges) == hops
    alike: tuple[Op, ...] = ()
    if len(ops) > 1:
        op, alike = Op.UNKNOWN, tuple(ops)
    return Ring(
        op, seen_hops(op, edges, steps), seen, sizes.pop() if len(sizes) == 1 else None, alike, tails, known
    )


@lru_cache(maxsize=256)
def seen_hops(op: Op, edges: tuple[tuple[int, int], ...], steps: int) -> Algorithm:
    """The part of a ring that goes along ``edges`` of positions, for so many steps."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for step in range(steps):
            for src, dst in edges:
                yield Send(step, src, dst, size / steps)

    everyone = frozenset(src for src, _ in edges)
    return Algorithm(op, "ring", sends, lambda n, t: t / len(edges), starters=lambda n, _: everyone)


# -- arcs and channels -------------------------------------------------------------------------


def _arcs(pairs: AbstractSet[tuple[int, int]], captured: AbstractSet[int]) -> list[list[int]] | None:
    """Ranks in a row, as ``pairs`` lead from one to the next; None where they are no open ring."""
    after, before = dict(pairs), {dst: src for src, dst in pairs}
    if len(after) < len(pairs) or len(before) < len(pairs):
        return None
    inner = captured & (after.keys() | before.keys())
    heads = sorted(after.keys() - before.keys())
    if not inner or not inner <= (after.keys() & before.keys()) or not heads:
        return None
    if any(src not in captured and dst not in captured for src, dst in pairs):
        return None
    arcs = []
    for head in heads:
        arc = [head]
        while arc[-1] in after:
            arc.append(after[arc[-1]])
        arcs.append(arc)
    return arcs if sum(map(len, arcs)) == len(after.keys() | before.keys()) else None


def _channels(lanes: Sequence[Lane], arcs: list[list[int]], slices: int) -> list[list[list[Lane]]] | None:
    """For each channel, and each arc, its lanes in order; None where pairs have other numbers of messages."""
    by_pair: dict[tuple[int, int], list[Lane]] = {}
    for lane in sorted(lanes, key=lambda lane: lane.kind):
        by_pair.setdefault(lane[:2], []).append(lane)
    if len({tuple(len(lane.sizes) for lane in mine) for mine in by_pair.values()}) > 1:
        return None
    for arc in arcs:
        for before, after in pairwise(pairwise(arc)):
            by_pair[after] = _matched(by_pair[before], by_pair[after], slices)
    count = len(next(iter(by_pair.values())))
    return [[[by_pair[pair][k] for pair in pairwise(arc)] for arc in arcs] for k in range(count)]


def _matched(came: list[Lane], goes: list[Lane], slices: int) -> list[Lane]:
    """``goes`` in the order of the lanes that ``came`` whose data they pass on: channels may look alike."""
    if len(came) == 1:
        return goes
    alike = np.zeros((len(came), len(goes)), np.int64)
    for i, one in enumerate(came):
        for j, other in enumerate(goes):
            if len(one.sizes) == len(other.sizes):
                before, after = one.samples[:FEW, :-slices], other.samples[:FEW, slices:]
                alike[i, j] = ((before == after) & (before > 0) & (other.sizes[slices:] > 0)).sum()
    found: dict[int, int] = {}
    for place in np.argsort(-alike, axis=None, kind="stable").tolist():
        i, j = divmod(place, len(goes))
        if alike[i, j] and i not in found and j not in found.values():
            found[i] = j
    left = [j for j in range(len(goes)) if j not in found.values()]
    return [goes[found[i] if i in found else left.pop(0)] for i in range(len(came))]


def meet(lanes: Sequence[Lane], arcs: list[list[int]]) -> bool:
    """Whether no arc is through before all others have begun: nobody leaves before all have entered."""
    begins, ends = [], []
    for arc in arcs:
        mine = [lane for lane in lanes if lane.src in arc]
        begins.append(np.min([lane.starts[:, 0] for lane in mine], axis=0))
        arrived = np.array([lane.arrivals[:, -1] for lane in mine])
        ends.append(np.where(arrived == NEVER, np.iinfo(np.int64).max, arrived).max(axis=0))
    return bool((np.max(begins, axis=0) < np.min(ends, axis=0)).all())


# -- sizes -------------------------------------------------------------------------------------


def fits_of(channel: list[list[Lane]], slices: int, slot: int, seen: int) -> Iterator[Fit]:
    """All that the sizes of a channel's messages can be."""
    lanes = [lane for arc in channel for lane in arc]
    steps, rest = divmod(len(lanes[0].sizes), slices)
    if rest or not steps:
        return
    chunks = np.stack([lane.sizes for lane in lanes]).reshape(len(lanes), steps, slices)
    if slices == 2 and (chunks[..., 1] > chunks[..., 0]).any():
        return
    for ranks in range(max(seen, 3), steps + 2):
        rounds, rest = divmod(steps, ranks - 1)
        if rest:
            continue
        size = _gathered(chunks.reshape(len(lanes), rounds, ranks - 1, slices), slot)
        if size is not None:
            yield Fit(Op.ALL_GATHER, ranks, rounds, size)
            yield Fit(Op.REDUCE_SCATTER, ranks, rounds, size * ranks)
        if rounds % 2 == 0:
            at = np.cumsum([0, *map(len, channel)])
            parts = [chunks[low:high] for low, high in pairwise(at.tolist())]
            size = _reduced(parts, ranks, rounds // 2, slot)
            if size is not None:
                yield Fit(Op.ALL_REDUCE, ranks, rounds // 2, size)


def _gathered(chunks: NDArray[np.int64], slot: int) -> int | None:
    """One rank's block as on the wire, bytes: a loop's chunks are alike. (lanes, loops, chunks, slices)"""
    if (
        not (chunks == chunks[:1, :, :1]).all()
        or not (chunks[:, :-1] == slot).all()
        or not chunks[0, -1, 0, 0]
    ):
        return None
    return int(chunks[0, :, 0].sum())


def _reduced(arcs: Sequence[NDArray[np.int64]], ranks: int, loops: int, slot: int) -> int | None:
    """The buffer as on the wire, bytes: each chunk passes twice, and a step later on the next hop.

    ``arcs`` are (lanes in a row, steps, slices).
    """
    wholes = set()
    for chunks in arcs:
        loop = chunks.reshape(len(chunks), loops, 2 * (ranks - 1), -1)
        last = loop[:, -1]
        if not (loop[:, :-1] == slot).all() or (last[1:, 1:] != last[:-1, :-1]).any():
            return None
        if (last[:, ranks:] != last[:, : ranks - 2]).any():
            return None
        # In n steps a rank sends every chunk once.
        whole = last[:, :ranks].sum(axis=2)
        short = (whole != whole.max()) & (whole > 0)
        if whole.max() <= 0 or (short.sum(axis=1) > 1).any():
            return None
        wholes |= set(whole.sum(axis=1).tolist())
    if len(wholes) > 1:
        return None
    full: int = (loops - 1) * ranks * arcs[0].shape[2] * slot
    return full + int(wholes.pop())


# -- content -----------------------------------------------------------------------------------


def _by_content(fits: list[list[Fit]], channels: list[list[list[Lane]]], slices: int) -> list[list[Fit]]:
    """Those of ``fits`` (one of each channel) that agree best with what ranks pass on."""
    seen = []
    for channel in channels:
        hops = [hop for arc in channel for hop in pairwise(arc)]
        came = np.stack([each.samples for each, _ in hops])[:, :, :-slices]
        goes = np.stack([each.samples for _, each in hops])[:, :, slices:]
        # An empty slice has no bytes to compare.
        some = np.stack([each.sizes[slices:] for _, each in hops])[:, None, :] > 0
        known = (came > 0) & (goes > 0) & some
        seen.append((known.sum(axis=(0, 1)), (known & (came == goes)).sum(axis=(0, 1))))
    best: list[list[Fit]] = []
    most = -1
    for each in fits:
        right = 0
        agree = True
        for fit, (known, same) in zip(each, seen, strict=True):
            through = np.repeat(passes(fit), slices)[slices:]
            kept, changed = known[through].sum(), known[~through].sum()
            held, reduced = same[through].sum(), (known - same)[~through].sum()
            agree &= bool(held >= AGREE * kept and reduced >= AGREE * changed)
            right += int(held + reduced)
        if agree and right >= most:
            best, most = [*(best if right == most else []), each], right
    return best


def passes(fit: Fit) -> NDArray[np.bool_]:
    """For each step of a rank, whether it passes on unchanged what came in the step before."""
    d = fit.ranks - 1
    if fit.op == Op.ALL_REDUCE:
        return np.tile(np.arange(2 * d) > d, fit.loops)
    if fit.op == Op.ALL_GATHER:
        return np.tile(np.arange(d) > 0, fit.loops)
    return np.zeros(d * fit.loops, bool)
