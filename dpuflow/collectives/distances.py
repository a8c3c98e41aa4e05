"""NCCL's PAT of which only some nodes were captured: which operation, how many ranks, how many bytes.

In: the lanes of one operation at captured nodes. Out: a layout, or None where they are no PAT. A rank passes
blocks to ranks a power of two away, as many as numbers of ranks have it as lowest bit, and gets as many from
as far. Only one number has the highest power as lowest bit, so that peer gets one block; all of them together
are the other ranks' blocks. So each captured rank tells the bytes of a block, and how many ranks there are.

Which of two peers that get as much is further away stays open, and with it which rank is where. An all_gather
sends far first, a reduce_scatter to its neighbour: with three ranks both are alike. Of ranks without a
capture no entry is dated: what they are seen to send need not be their first message.
NCCL 2.30 src/include/collectives.h (PatAGAlgorithm, PatRSAlgorithm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schedules.nccl import pat_dimensions, seen_pat
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Lane
    from dpuflow.schedules.algorithms import Algorithm


class Pat(NamedTuple):
    """What the lanes are. ``order``: endpoints; ranks that were not seen are negative numbers. ``alike``:
    other operations that fit."""

    op: Op
    algorithm: Algorithm
    order: list[int]
    size: int
    alike: tuple[Op, ...]
    ranks: int


def open_pat(
    lanes: Sequence[Lane], members: list[int], captured: AbstractSet[int], ranks: int = 0
) -> Pat | None:
    """The PAT of which ``lanes`` are what the ``captured`` ones of ``members`` pass on and get.

    ``ranks``: how many there are, 0 where that is not known.
    """
    own = sorted(captured & set(members), key=members.index)
    if not own or not all(captured & set(lane[:2]) for lane in lanes):
        return None
    forth = [(lane.src, lane.dst, int(lane.sizes.sum())) for lane in lanes]
    back = [(dst, src, size) for src, dst, size in forth]
    told = {_blocks(way, rank) for rank in own for way in (forth, back)}
    if len(told) != 1:
        return None
    found = told.pop()
    if found is None:
        return None
    n, block = found
    if ranks not in (0, n) or len(members) > n:
        return None
    ops = _operations(lanes, own) if n > len(pat_dimensions(n)) + 1 else (Op.ALL_GATHER, Op.REDUCE_SCATTER)
    places = {end: place for place, end in enumerate(members)}
    carried: dict[tuple[int, int], int] = {}
    for src, dst, size in forth:
        pair = places[src], places[dst]
        carried[pair] = carried.get(pair, 0) + size
    edges = tuple((src, dst, size // block) for (src, dst), size in sorted(carried.items()))
    order = members + [-1 - place for place in range(len(members), n)]
    algorithm = seen_pat(ops[0], edges, frozenset(places[end] for end in own))
    size = block if ops[0] == Op.ALL_GATHER else n * block
    return Pat(ops[0], algorithm, order, size, ops[1:], n)


def _blocks(carried: Sequence[tuple[int, int, int]], rank: int) -> tuple[int, int] | None:
    """Ranks and bytes of a block, by what is ``carried`` between a rank and its peers one way: (rank, peer,
    bytes)."""
    by_peer: dict[int, int] = {}
    for own, peer, size in carried:
        if own == rank:
            by_peer[peer] = by_peer.get(peer, 0) + size
    block = min(by_peer.values(), default=0)
    if len(by_peer) < 2 or not block or any(size % block for size in by_peer.values()):
        return None
    counts = sorted(size // block for size in by_peer.values())
    n = 1 + sum(counts)
    return (n, block) if counts == sorted(pat_dimensions(n).values()) else None


def _operations(lanes: Sequence[Lane], own: Sequence[int]) -> tuple[Op, ...]:
    """The operation, by whether captured ranks send first to those who get least: they are the far ones."""
    far_first = []
    for rank in own:
        first: dict[int, NDArray[np.int64]] = {}
        size: dict[int, int] = {}
        for lane in lanes:
            if lane.src == rank:
                begins = lane.starts[:, 0]
                first[lane.dst] = np.minimum(first.get(lane.dst, begins), begins)
                size[lane.dst] = size.get(lane.dst, 0) + int(lane.sizes.sum())
        next_one = max(size, key=lambda peer: size[peer])
        others = np.min([when for peer, when in first.items() if peer != next_one], axis=0)
        far_first.append(float((first[next_one] > others).mean()))
    return (Op.ALL_GATHER,) if np.mean(far_first) > 0.5 else (Op.REDUCE_SCATTER,)
