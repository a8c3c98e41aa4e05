"""What the connections of one operation of NCCL make together: a ring, a chain, trees, PAT; and its bytes.

In: for each connection that takes part its messages, over all operations that look the same. Out: operation,
algorithm, the ranks in order and the bytes of the buffer as on the wire, or None where no algorithm of NCCL
has such messages: they are held against each algorithm as it would be seen (``lanes.View``).

PAT, at all nodes or at some: a rank passes blocks to ranks a power of two away, as many as numbers of ranks
have it as lowest bit, and gets as many from as far. Only one number has the highest power as lowest bit, so
that peer gets one block; all of them together are the other ranks' blocks. So each captured rank tells the
bytes of a block, and how many ranks there are. An all_gather sends far first, a reduce_scatter to its
neighbour: with three ranks both are alike. Where only some nodes were captured it stays open which of two
peers that get as much is further away, and with it which rank is where; and of ranks without a capture no
entry is dated. NCCL 2.30 src/include/collectives.h (PatAGAlgorithm, PatRSAlgorithm).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import in_a_row
from dpuflow.matching.branches import chain, trees, trees_by_rail
from dpuflow.matching.buffers import RING, STEP
from dpuflow.matching.lanes import Layout, View, grouped
from dpuflow.matching.rings import open_ring, ring
from dpuflow.schedules.nccl import pat, pat_dimensions, seen_pat
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpuflow.matching.lanes import Lane
    from dpuflow.matching.model import Job


def layout_of(job: Job, lanes: Sequence[Lane], ends: Sequence[int], among: int = 0) -> Layout | None:
    """What the connected ``lanes`` make together.

    ``ends`` are all endpoints of the communicator that were seen, ``among`` how many ranks it has, 0 where
    that is not known.
    """
    slots = {lane.slot for lane in lanes}
    if len(slots) > 1 or not slots <= job.buffers.keys():
        return None
    slot = slots.pop()
    if any(lane.sizes.max(initial=0) > slot for lane in lanes):
        return None
    view = View(job, lanes, ends, among)
    return next(filter(None, (shape(view) for shape in _shapes(view))), None)


def _shapes(view: View) -> Iterator[Callable[[View], Layout | None]]:
    """What the lanes may be, what is told best first."""
    if view.shared:
        yield ring if view.whole else open_ring
        if view.kind != RING:
            if view.whole:
                yield chain
            yield trees_by_rail
        return
    if view.near is not None:
        yield open_ring
    if view.kind == RING:
        yield ring
    elif view.kind != STEP:
        yield from (trees, ring, chain)
    elif len(view.members) == 2 or not view.whole:
        # Two ranks' PAT has the messages of a tree; what comes down a tree waits.
        yield from (trees, pat_of, chain)
    else:
        yield from (pat_of, trees, chain)


Carried = Counter[tuple[int, int]]
"""Bytes from each endpoint to each other one."""
BOTH = (Op.ALL_GATHER, Op.REDUCE_SCATTER)


def pat_of(view: View) -> Layout | None:
    """The PAT whose messages the lanes are, as captured ranks see them."""
    own = [end for end in view.members if view.is_captured(end)]
    if not own or not all(view.is_captured(lane.src) or view.is_captured(lane.dst) for lane in view.lanes):
        return None
    carried: Carried = Counter()
    for lane in view.lanes:
        carried[lane[:2]] += int(lane.sizes.sum())
    back = Counter({(dst, src): size for (src, dst), size in carried.items()})
    told = {_blocks(way, rank) for rank in own for way in (carried, back)}
    found = told.pop()
    if told or found is None:
        return None
    n, block = found
    if view.whole:
        return _whole(view, carried, block)
    if view.among not in (0, n) or len(view.members) > n or n < 3:
        return None
    ops = BOTH if n == len(pat_dimensions(n)) + 1 else (BOTH[not _far_first(view, own)],)
    place = {end: number for number, end in enumerate(view.members)}
    edges = sorted((place[src], place[dst], size // block) for (src, dst), size in carried.items())
    return Layout(
        ops[0],
        seen_pat(ops[0], tuple(edges), frozenset(place[end] for end in own)),
        view.members + [-1 - number for number in range(len(place), n)],
        block if ops[0] == Op.ALL_GATHER else n * block,
        alike=ops[1:],
        tails=0,
        among=n,
    )


def _whole(view: View, carried: Carried, block: int) -> Layout | None:
    """The same with the order of the ranks, where all of it was seen."""
    n = len(view.members)
    orders = [view.members]
    around = _around(carried, view.members)
    if around is not None:
        # Numbered otherwise: the other way round all_gather looks like reduce_scatter, but sends far first.
        orders += [around, around[::-1]]
    for order in orders:
        fits = [op for op in BOTH if carried == _passed(op, order, block)]
        first = BOTH[not _far_first(view, order)] if len(fits) == 1 else None
        if len(fits) == 2 or (fits and order is view.members) or first in fits:
            size = block if fits[0] == Op.ALL_GATHER else block * n
            return Layout(fits[0], pat(fits[0], n), order, size, alike=tuple(fits[1:]))
    return None


def _blocks(carried: Carried, rank: int) -> tuple[int, int] | None:
    """Ranks and bytes of a block, by what a rank sends."""
    sizes = sorted(size for (own, _), size in carried.items() if own == rank)
    if not sizes or not sizes[0] or any(size % sizes[0] for size in sizes):
        return None
    counts = [size // sizes[0] for size in sizes]
    n = 1 + sum(counts)
    return (n, sizes[0]) if counts == sorted(pat_dimensions(n).values()) else None


def _passed(op: Op, order: list[int], block: int) -> Carried:
    """Bytes that each pair carries in PAT."""
    n, away = len(order), -1 if op == Op.ALL_GATHER else 1
    found: Carried = Counter()
    for distance, blocks in pat_dimensions(n).items():
        for place, end in enumerate(order):
            found[end, order[(place + away * distance) % n]] += blocks * block
    return found


def _around(carried: Carried, members: list[int]) -> list[int] | None:
    """The ranks in the order of who sends most to whom, where that goes round: distance 1."""
    most = max(carried.values())
    order, closed = in_a_row(members[0], {src: dst for (src, dst), size in carried.items() if size == most})
    return order if closed and len(order) == len(members) else None


def _far_first(view: View, ranks: Sequence[int]) -> bool:
    """Whether ranks send to others before the one that gets most, which is their neighbour."""
    told = []
    for lanes in grouped((lane for lane in view.lanes if lane.src in ranks), lambda lane: lane.src).values():
        peers = grouped(lanes, lambda lane: lane.dst).values()
        first = [np.min([lane.starts[:, 0] for lane in each], axis=0) for each in peers]
        near = int(np.argmax([sum(int(lane.sizes.sum()) for lane in each) for each in peers]))
        others = np.min([when for number, when in enumerate(first) if number != near], axis=0)
        told.append(float((first[near] > others).mean()))
    return float(np.mean(told)) > 0.5
