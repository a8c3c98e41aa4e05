"""What the connections of one operation of NCCL make together: a ring, a chain, trees, PAT; and its bytes.

In: for each connection that takes part its messages, over all operations that look the same. Out: operation,
algorithm, the ranks in order and the bytes of the buffer as on the wire, or None where no algorithm of NCCL
has such messages. Sources: NCCL 2.30 src/enqueue.cc (calcCollChunking), src/device/*.h, src/graph/trees.cc.

- A ring goes round in loops. In each a rank's chunk fills the slots that are announced, but for the last
  loop: what is left is cut into equal chunks, rounded up (16 bytes), so that the last chunks are shorter, or
  empty. All ranks send the same chunk with the same sizes. Empty slices are sent as well.
- Trees and chains pass chunks of one size, but for the last one. On a tree's edge what comes down waits for
  what went up. Which ranks are next to each other follows from their number (``nccl.double_tree``).
- What is passed on keeps its bytes, what is reduced does not. Where messages' first bytes were captured,
  that tells all_gather from reduce_scatter on a ring, and broadcast from reduce, which look alike else.
- PAT passes blocks over distances that are powers of two: so many as numbers of ranks have it as lowest bit.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.collectives.arcs import open_ring
from dpuflow.collectives.branches import chunked, open_trees, waits, whole_trees
from dpuflow.collectives.buffers import DEFAULT, RING, STEP
from dpuflow.collectives.contents import ALL, NOTHING, PASSED, passed_between, passed_on
from dpuflow.collectives.distances import open_pat
from dpuflow.collectives.hops import open_node_ring
from dpuflow.collectives.rails import rail_ring, rails_of
from dpuflow.schedules.nccl import (
    BROADCAST_CHAIN,
    REDUCE_CHAIN,
    looped_ring,
    pat,
    pat_dimensions,
)
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.collectives.buffers import Buffer
    from dpuflow.schedules.algorithms import Algorithm


class Lane(NamedTuple):
    """One connection's part in operations that look alike. Times are (operations, messages)."""

    src: int
    dst: int
    slot: int
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    arrivals: NDArray[np.int64]
    samples: NDArray[np.uint32]  # of the first bytes; 0 where they were not captured

    @property
    def kind(self) -> tuple[int, int]:
        """What tells channels apart: the number of messages, and their bytes."""
        return len(self.sizes), int(self.sizes.sum())


class Layout(NamedTuple):
    """An operation. ``order`` lists endpoints by position; ``alike``: operations with the same packets.

    ``ranks`` is how many took part where nodes have several GPUs, else 0; ``inside`` says that a first
    message may have waited for others of its node. ``size`` is None where the packets leave it open, and
    ``order`` has negative numbers for ranks that no capture saw; ``among``: how many ranks a ring
    has that was not seen whole: at some nodes, or as nodes have several GPUs.
    ``tails``: so many parts of the buffer may end within a slot; all others fill theirs. 0: not known.
    """

    op: Op
    algorithm: Algorithm
    order: list[int]
    size: int | None
    root: int | None = None
    alike: tuple[Op, ...] = ()
    ranks: int = 0
    inside: bool = False
    tails: int = 1
    among: int = 0

    @property
    def named(self) -> tuple[Op, tuple[Op, ...]]:
        """What it is said to be, with what it may be as well."""
        return self.op, self.alike


def layout_of(
    lanes: Sequence[Lane],
    position: NDArray[np.int64],
    nodes: NDArray[np.int64],
    ends: Sequence[int],
    near: AbstractSet[int] | None = None,
    among: int = 0,
    buffers: Mapping[int, Buffer] = DEFAULT,
) -> Layout | None:
    """What the connected ``lanes`` make together.

    ``position``, ``near`` and ``nodes``: see ``structured_instances``; ``ends`` are all endpoints of the
    communicator that were seen, ``among`` how many ranks it has, 0 where that is not known;
    ``buffers`` says what slots are.
    """
    slots = {lane.slot for lane in lanes}
    if len(slots) > 1 or not slots <= buffers.keys():
        return None
    slot = slots.pop()
    kind = buffers[slot]
    if any(lane.sizes.max(initial=0) > slot for lane in lanes):
        return None
    members = sorted({end for lane in lanes for end in lane[:2]}, key=lambda end: int(position[end]))
    shared = len({int(nodes[end]) for end in ends}) < len(ends)
    if shared and near is not None and not near >= set(members):
        return _railed_in_part(lanes, members, nodes, slot, near, among, kind)
    if shared:
        return _railed(lanes, sorted(ends, key=lambda end: int(position[end])), nodes, slot, among, kind)
    if near is not None:
        ring = open_ring(lanes, near, slot, among, kind.slices)
        if ring is not None:
            return Layout(*ring[:4], alike=ring.alike, tails=ring.tails, among=ring.ranks)
        if not near >= set(members):
            trees = open_trees(lanes, members, near)
            if trees is not None:
                return Layout(Op.ALL_REDUCE, trees.algorithm, members, trees.size, tails=trees.channels)
            told = open_pat(lanes, members, near, among) if kind == STEP else None
            if told is not None:
                return Layout(*told[:4], alike=told.alike, tails=0, among=told.ranks)
    found = _by_endpoints(lanes, members, kind)
    if found is not None and near is not None and not near >= set(members):
        if found.algorithm.name == "tree":
            return None  # it takes all edges for seen
        if found.algorithm.name == "chain":
            return found if _passes_at_once(lanes, near) else None
    # NICs that several GPUs share: more ranks than endpoints.
    return found or _railed(lanes, members, nodes, slot, among, kind)


def _railed_in_part(
    lanes: Sequence[Lane],
    members: list[int],
    nodes: NDArray[np.int64],
    slot: int,
    near: AbstractSet[int],
    among: int,
    kind: Buffer,
) -> Layout | None:
    """The same, seen at some of the nodes."""
    ring = open_node_ring(lanes, members, nodes, near, slot, among, kind.slices)
    if ring is not None:
        ranks = max(ring.ranks, len(members))
        return Layout(
            ring.op, ring.algorithm, members, ring.size, None, ring.alike, ranks, tails=0, among=ring.ranks
        )
    trees = open_trees(lanes, members, near) if kind != RING else None
    if trees is None:
        return None
    rails = rails_of(lanes)
    parts = [open_trees(rail, sorted({end for lane in rail for end in lane[:2]}), near) for rail in rails]
    at = {frozenset(int(nodes[end]) for lane in rail for end in lane[:2] if end in near) for rail in rails}
    if len(at) > 1 or None in parts:
        return None
    sizes = [part.size for part in parts if part is not None]
    size = None if None in sizes else sum(size or 0 for size in sizes)
    tails = sum(part.channels for part in parts if part is not None)
    return Layout(Op.ALL_REDUCE, trees.algorithm, members, size, ranks=len(members), inside=True, tails=tails)


def _railed(
    lanes: Sequence[Lane],
    members: list[int],
    nodes: NDArray[np.int64],
    slot: int,
    among: int,
    kind: Buffer,
) -> Layout | None:
    """The same over nodes of several GPUs."""
    ring = rail_ring(lanes, nodes, slot, kind.slices, among)
    if ring is not None:
        op, ranks, size = ring.op, max(ring.ranks, len(members)), ring.size
        alike: tuple[Op, ...] = ()
        if op == Op.ALL_GATHER:
            passed = passed_between(lanes, nodes, ring.behind, ring.period)
            alike = () if passed == ALL else (Op.REDUCE_SCATTER,)
            if passed == NOTHING:
                op, alike, size = Op.REDUCE_SCATTER, (), ring.ranks * size
        tails = ring.channels * (1 if op == Op.ALL_GATHER else ring.ranks)
        return Layout(
            op, looped_ring(op, ring.loops), members, size,
            alike=alike, ranks=ranks, tails=tails, among=ring.ranks,
        )  # fmt: skip
    if kind == RING:
        return None
    several = len({int(nodes[end]) for end in members}) < len(members)
    chain = _node_chain(lanes, members, nodes) if several else None
    if chain is not None:
        return chain
    # A tree's links to other nodes are all at one GPU of each node: so each rail has trees of its own.
    rails = rails_of(lanes)
    ends = [sorted({end for lane in rail for end in lane[:2]}) for rail in rails]
    if len({frozenset(int(nodes[end]) for end in rail) for rail in ends}) > 1:
        return None
    trees = [tree for rail, own in zip(rails, ends, strict=True) if (tree := _trees(rail, own)) is not None]
    if len(trees) < len(rails):
        return None
    size, tails = sum(tree.size or 0 for tree in trees), sum(tree.tails for tree in trees)
    return trees[0]._replace(order=members, size=size, ranks=len(members), inside=True, tails=tails)


def _of_nodes(hops: Sequence[tuple[Lane, Lane]], nodes: NDArray[np.int64]) -> list[tuple[Lane, Lane]]:
    """``hops`` with nodes for endpoints: which channel goes on at which GPU only the content tells."""

    def of(lane: Lane) -> Lane:
        return lane._replace(src=int(nodes[lane.src]), dst=int(nodes[lane.dst]))

    return [(of(came), of(goes)) for came, goes in hops]


def _node_chain(lanes: Sequence[Lane], members: list[int], nodes: NDArray[np.int64]) -> Layout | None:
    """Broadcast or reduce along a path of nodes; each channel reaches and leaves them at GPUs of its own.

    Where the root is not the first of its node that a channel comes to, the path ends in its node again.
    """
    by: dict[int, list[Lane]] = {}
    for lane in sorted(lanes, key=lambda lane: lane.kind):
        by.setdefault(int(nodes[lane.src]), []).append(lane)
    after = {node: int(nodes[own[0].dst]) for node, own in by.items()}
    if len({(int(nodes[lane.src]), int(nodes[lane.dst])) for lane in lanes}) > len(by) or not chunked(lanes):
        return None
    heads = sorted(set(after) - set(after.values())) or [
        min(by, key=lambda node: int(np.median([lane.starts[:, 0].min() for lane in by[node]])))
    ]
    order = heads[:1]
    while order[-1] in after and after[order[-1]] not in order:
        order.append(after[order[-1]])
    kinds = [lane.kind for lane in by[order[0]]]
    back = Counter(lane.kind for lane in by.get(order[-1], ()))
    if len(order) != len(set(after) | set(after.values())) or not back <= Counter(kinds):
        return None
    if any([lane.kind for lane in by[node]] != kinds for node in order[:-1]) or len(order) < 2:
        return None
    hops = [hop for a, b in pairwise(order[:-1]) for hop in zip(by[a], by[b], strict=True)]
    # A ring's first messages wait for nothing. Which channels are the same is not known.
    first = {node: np.min([lane.starts[:, 0] for lane in own], axis=0) for node, own in by.items()}
    came = {node: np.min([lane.arrivals[:, 0] for lane in own], axis=0) for node, own in by.items()}
    if any((first[b] > came[a]).mean() < PASSED for a, b in pairwise(order[:-1])):
        return None
    passed = passed_on(_of_nodes(hops, nodes), 0)
    place = {node: number for number, node in enumerate(order)}
    reduces = passed == NOTHING
    ends = sorted(members, key=lambda end: place[int(nodes[end])], reverse=reduces)
    size = sum(size for _, size in kinds)
    op, algorithm = (Op.REDUCE, REDUCE_CHAIN) if reduces else (Op.BROADCAST, BROADCAST_CHAIN)
    alike = () if passed in (ALL, NOTHING) else (Op.REDUCE,)
    # Which of its node's GPUs is the root shows in no packet.
    return Layout(op, algorithm, ends, size, None, alike, len(members), inside=True, tails=len(kinds))


def _by_endpoints(lanes: Sequence[Lane], members: list[int], kind: Buffer) -> Layout | None:
    if kind == RING:
        return _ring(lanes, members, kind.slices)
    shapes: list[Callable[[Sequence[Lane], list[int]], Layout | None]]
    shapes = [_trees, partial(_ring, slices=kind.slices), _chain]
    if kind == STEP:
        # Two ranks' PAT has the messages of a tree; what comes down a tree waits.
        shapes = [_trees, _pat, _chain] if len(members) == 2 else [_pat, _trees, _chain]
    for shape in shapes:
        found = shape(lanes, members)
        if found is not None:
            return found
    return None


def _passes_at_once(lanes: Sequence[Lane], captured: AbstractSet[int]) -> bool:
    """Whether what leaves captured ranks in the middle of a chain had come before: a ring's first messages
    wait for nothing, so not all of a ring's do."""
    for came in lanes:
        mine = [goes for goes in lanes if goes.src == came.dst and goes.kind == came.kind]
        if came.dst in captured and mine and not any(waits(goes, came) for goes in mine):
            return False
    return True


# -- rings -----------------------------------------------------------------------------------


def _ring(lanes: Sequence[Lane], members: list[int], slices: int) -> Layout | None:
    n, slot = len(members), lanes[0].slot
    cycles = _cycles(lanes, members)
    if cycles is None:
        return None
    reduced, gathered, loops = [], [], 0
    for cycle in cycles:
        if len({len(lanes[i].sizes) for i in cycle}) > 1:
            return None
        sizes = np.stack([lanes[i].sizes for i in cycle])
        rounds, rest = divmod(sizes.shape[1], (n - 1) * slices)
        if rest or sizes.max() > slot:
            return None
        # (ranks, rounds of n - 1 chunks, chunks, slices)
        chunks = sizes.reshape(n, rounds, n - 1, slices)
        if slices == 2 and (chunks[..., 1] > chunks[..., 0]).any():
            return None
        reduced.append(_reduced(chunks, slot) if rounds % 2 == 0 else None)
        gathered.append(_gathered(chunks, slot))
        loops = max(loops, rounds)
    order = [lanes[i].src for i in cycles[0]]
    hops = [(lanes[a], lanes[b]) for c in cycles for a, b in zip(c, c[1:] + c[:1], strict=True)]
    passed = passed_on(hops, slices, (n - 1) * slices)
    whole = None if None in gathered else sum(part for part in gathered if part is not None)
    if None not in reduced and (whole is None or passed not in (NOTHING, ALL)):
        others = (Op.ALL_GATHER, Op.REDUCE_SCATTER) if whole is not None and passed is None else ()
        size, tails = sum(part for part in reduced if part is not None), n * len(cycles)
        algorithm = looped_ring(Op.ALL_REDUCE, loops // 2)
        return Layout(Op.ALL_REDUCE, algorithm, order, size, alike=others, tails=tails)
    if whole is None:
        return None
    if passed == NOTHING:
        algorithm = looped_ring(Op.REDUCE_SCATTER, loops)
        return Layout(Op.REDUCE_SCATTER, algorithm, order, n * whole, tails=n * len(cycles))
    alike = () if passed == ALL else (Op.REDUCE_SCATTER,)
    return Layout(
        Op.ALL_GATHER, looped_ring(Op.ALL_GATHER, loops), order, whole, alike=alike, tails=len(cycles)
    )


def _cycles(lanes: Sequence[Lane], members: list[int]) -> list[list[int]] | None:
    """The lanes of each channel, along its ring from the first of ``members`` on; None without rings."""
    n = len(members)
    channels, rest = divmod(len(lanes), n)
    if rest or n < 2:
        return None
    place = {end: number for number, end in enumerate(members)}
    # Channels may go round differently: the next rank first, then those further on.
    ahead = [((place[lane.dst] - place[lane.src]) % n, lane.kind) for lane in lanes]
    ways: dict[int, list[int]] = {}
    for number in sorted(range(len(lanes)), key=lambda i: ahead[i]):
        ways.setdefault(lanes[number].src, []).append(number)
    cycles = []
    for _ in range(channels):
        cycle: list[int] = []
        at, seen = members[0], {members[0]}
        while len(cycle) < n:
            left = (i for i in ways.get(at, ()) if lanes[i].dst not in seen or len(cycle) == n - 1)
            best = next(left, None)
            if best is None:
                return None
            ways[at].remove(best)
            cycle.append(best)
            at = lanes[best].dst
            seen.add(at)
        if at != members[0]:
            return None
        cycles.append(cycle)
    return cycles


def _reduced(chunks: NDArray[np.int64], slot: int) -> int | None:
    """The buffer as on the wire, bytes, if these are an all_reduce's chunks: twice round a loop."""
    n, rounds, _, slices = chunks.shape
    loops = rounds // 2
    loop = chunks.reshape(n, loops, 2 * (n - 1), slices)
    if not (loop[:, :-1] == slot).all():  # all loops but the last fill their slots
        return None
    # In step k rank p sends chunk p - 1 - k.
    label = (np.arange(n)[:, None] - 1 - np.arange(2 * (n - 1))) % n
    tail = np.full((n, slices), -1)
    tail[label] = loop[:, -1]
    if (tail[label] != loop[:, -1]).any() or not _rounded(tail.sum(axis=1)):
        return None
    full: int = (loops - 1) * n * slices * slot
    return full + int(tail.sum())


def _rounded(chunks: NDArray[np.int64]) -> bool:
    """Whether chunks, by ring position, are equal but for one shorter one and empty ones."""
    full = chunks == chunks.max()
    return bool(chunks.max() > 0 and (~full & (chunks > 0)).sum() <= 1)


def _gathered(chunks: NDArray[np.int64], slot: int) -> int | None:
    """One rank's block as on the wire, bytes, if these are an all_gather's chunks: all the same in a loop."""
    alike = (chunks == chunks[:1, :, :1]).all()
    if not alike or not (chunks[:, :-1] == slot).all() or not chunks[0, -1, 0, 0]:
        return None
    return int(chunks[0, :, 0].sum())


# -- chunk by chunk: chains and trees ----------------------------------------------------------


def _chain(lanes: Sequence[Lane], members: list[int]) -> Layout | None:
    """Broadcast, or reduce the other way round: every rank but the last sends to the next one."""
    after = {lane.src: lane.dst for lane in lanes}
    pairs = {lane[:2] for lane in lanes}
    heads = [end for end in members if end not in after.values()]
    if len(pairs) != len(after) or len(pairs) != len(members) - 1 or len(heads) != 1 or not chunked(lanes):
        return None
    order = [heads[0]]
    while order[-1] in after:
        order.append(after[order[-1]])
    kinds = [sorted(lane.kind for lane in lanes if lane[:2] == pair) for pair in pairs]
    if len(order) != len(members) or any(each != kinds[0] for each in kinds):
        return None
    size = sum(size for _, size in kinds[0])
    by = {
        end: [lane for lane in sorted(lanes, key=lambda lane: lane.kind) if lane.src == end] for end in order
    }
    hops = [hop for a, b in pairwise(order[:-1]) for hop in zip(by[a], by[b], strict=True)]
    passed = passed_on(hops, 0)
    if passed == NOTHING:
        return Layout(Op.REDUCE, REDUCE_CHAIN, order[::-1], size, 0, tails=len(kinds[0]))
    alike = () if passed == ALL else (Op.REDUCE,)
    return Layout(Op.BROADCAST, BROADCAST_CHAIN, order, size, 0, alike, tails=len(kinds[0]))


def _trees(lanes: Sequence[Lane], members: list[int]) -> Layout | None:
    found = whole_trees(lanes, members)
    if found is None:
        return None
    return Layout(Op.ALL_REDUCE, found.algorithm, members, found.size, tails=found.channels)


# -- PAT -------------------------------------------------------------------------------------


def _pat(lanes: Sequence[Lane], members: list[int]) -> Layout | None:
    n = len(members)
    total = sum(int(lane.sizes.sum()) for lane in lanes)
    if total % (n * (n - 1)):
        return None
    block = total // (n * (n - 1))
    carried: dict[tuple[int, int], int] = {}
    for lane in lanes:
        carried[lane[:2]] = carried.get(lane[:2], 0) + int(lane.sizes.sum())
    orders = [members]
    around = _around(carried, members)
    if around is not None:
        # Numbered otherwise: the other way round all_gather looks like reduce_scatter, but sends far first.
        orders += [around, around[::-1]]
    for order in orders:
        fits = [op for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) if carried == _passed(op, order, block)]
        if (
            len(fits) == 2
            or (fits and order is members)
            or (fits and fits[0] == (Op.ALL_GATHER if _far_first(lanes, order) else Op.REDUCE_SCATTER))
        ):
            op = fits[0]
        else:
            continue
        size = block if op == Op.ALL_GATHER else block * n
        return Layout(op, pat(op, n), order, size, alike=tuple(fits[1:]))
    return None


def _passed(op: Op, order: list[int], block: int) -> dict[tuple[int, int], int]:
    """Bytes that each pair carries in PAT."""
    n, away = len(order), -1 if op == Op.ALL_GATHER else 1
    found: dict[tuple[int, int], int] = {}
    for distance, blocks in pat_dimensions(n).items():
        for place, end in enumerate(order):
            pair = (end, order[(place + away * distance) % n])
            found[pair] = found.get(pair, 0) + blocks * block
    return found


def _around(carried: dict[tuple[int, int], int], members: list[int]) -> list[int] | None:
    """The ranks in the order of who sends most to whom, where that goes round: distance 1."""
    most = max(carried.values())
    after = {src: dst for (src, dst), size in carried.items() if size == most}
    order = [members[0]]
    while (then := after.get(order[-1])) is not None and then not in order:
        order.append(then)
    return order if len(order) == len(members) and then == members[0] else None


def _far_first(lanes: Sequence[Lane], order: list[int]) -> bool:
    """Whether ranks send further than to their neighbours first."""
    n = len(order)
    place = {end: number for number, end in enumerate(order)}
    first: dict[int, NDArray[np.int64]] = {}
    for lane in lanes:
        distance = (place[lane.dst] - place[lane.src]) % n
        near = min(distance, n - distance)
        starts = lane.starts[:, 0]
        first[near] = np.minimum(first[near], starts) if near in first else starts
    return bool((first[1] > np.min([when for near, when in first.items() if near > 1], axis=0)).mean() > 0.5)
