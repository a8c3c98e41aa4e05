"""Algorithms as NCCL's kernels run them: for each rank and channel, which slices it receives and sends.

A ``Lane`` is one sequence of a thread block: stretches of slices, each received from ``recv`` ranks and
sent to ``send`` ranks. A slice needs its input and room in the sender's slots; nothing else holds it up.
Sources: NCCL 2.30 src/device/{all_reduce,all_gather,reduce_scatter,broadcast,reduce,sendrecv}.h,
src/graph/trees.cc.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.synth import sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dpuflow.synth.sizes import Protocol


class Stretch(NamedTuple):
    """``times`` times these slices (bytes of data), one after the other. Ranks are positions in the group.

    ``copies``: what is received is passed on as it is; else it is reduced with the rank's own.
    """

    recv: tuple[int, ...]
    send: tuple[int, ...]
    slices: tuple[int, ...]
    times: int = 1
    copies: bool = False


class Lane(NamedTuple):
    """One sequence of stretches on one channel of one rank."""

    channel: int
    stretches: tuple[Stretch, ...]
    point_to_point: bool = False
    planes: tuple[int, int] = (0, 0)
    """Which of several ways inside a node its inputs and outputs are on; the wire has one."""


def merged(channel: int, stretches: Iterable[Stretch], point_to_point: bool = False) -> Lane:
    """A lane of these stretches: put equal stretches that follow each other into one."""
    found = [
        Stretch(recv, send, slices, sum(each.times for each in alike), copies)
        for (recv, send, slices, copies), alike in groupby(
            stretches, key=lambda each: (each.recv, each.send, each.slices, each.copies)
        )
    ]
    return Lane(channel, tuple(found), point_to_point)


def ring_all_reduce(channel: int, ring: Sequence[int], size: int, protocol: Protocol) -> dict[int, Lane]:
    """Reduce-scatter and all-gather in one pass round the ring; ``size`` bytes on this channel."""
    n = len(ring)
    loops = sizes.ring_chunks(size, n, protocol)
    lanes = {}
    for place, rank in enumerate(ring):
        before, after = (ring[place - 1],), (ring[(place + 1) % n],)
        stretches = []
        for chunks in loops:
            cut = [sizes.slices(c, protocol, protocol.chunk_steps, protocol.slice_steps) for c in chunks]
            stretches.append(Stretch((), after, cut[place - 1]))
            stretches += [Stretch(before, after, cut[(place - j) % n]) for j in range(2, n + 1)]
            stretches += [Stretch(before, after, cut[(place - j) % n], copies=True) for j in range(1, n - 1)]
            stretches.append(Stretch(before, (), cut[(place + 1) % n]))
        lanes[rank] = merged(channel, stretches)
    return lanes


def ring_blocks(
    channel: int, ring: Sequence[int], size: int, protocol: Protocol, copies: bool
) -> dict[int, Lane]:
    """all_gather (``copies``) and reduce_scatter: ``size`` bytes a rank on this channel pass n - 1 hops."""
    n = len(ring)
    lanes = {}
    for place, rank in enumerate(ring):
        before, after = (ring[place - 1],), (ring[(place + 1) % n],)
        stretches = []
        for chunk in sizes.block_chunks(size, protocol, protocol.chunk_steps):
            cut = sizes.slices(chunk, protocol, protocol.chunk_steps, protocol.slice_steps)
            stretches += [
                Stretch((), after, cut),
                Stretch(before, after, cut, n - 2, copies),
                Stretch(before, (), cut),
            ]
        lanes[rank] = merged(channel, (s for s in stretches if s.times))
    return lanes


def chain(channel: int, order: Sequence[int], size: int, protocol: Protocol, copies: bool) -> dict[int, Lane]:
    """broadcast (``copies``; from the first of ``order``) and reduce (to the last) along a ring cut open."""
    lanes = {}
    for place, rank in enumerate(order):
        recv = (order[place - 1],) if place else ()
        send = (order[place + 1],) if place + 1 < len(order) else ()
        chunks = sizes.block_chunks(size, protocol, 1)
        cut = (sizes.slices(chunk, protocol, 1, 1) for chunk in chunks)
        lanes[rank] = merged(channel, (Stretch(recv, send, c, copies=copies) for c in cut))
    return lanes


def tree_all_reduce(
    channel: int, parents: dict[int, int | None], size: int, protocol: Protocol
) -> dict[int, list[Lane]]:
    """Up and down a tree given as rank -> parent; the two directions run side by side (runTreeSplit)."""
    children: dict[int, list[int]] = {rank: [] for rank in parents}
    for rank, parent in parents.items():
        if parent is not None:
            children[parent].append(rank)
    chunk_bytes = tree_chunk(size, protocol, len(parents))
    cut = [(min(chunk_bytes, size - at),) for at in range(0, size, chunk_bytes)]
    lanes = {}
    for rank, parent in parents.items():
        below = tuple(children[rank])
        if parent is None:
            lanes[rank] = [merged(channel, (Stretch(below, below, c) for c in cut))]
        else:
            up = merged(channel, (Stretch(below, (parent,), c) for c in cut))
            down = merged(channel, (Stretch((parent,), below, c, copies=True) for c in cut))
            lanes[rank] = [up, down]
    return lanes


UP, DOWN = 1, 2
"""Planes inside a node: to its heads and from them."""
NVLS_CHUNK: Final = 128 * sizes.KIB
"""NCCL_NVLS_CHUNKSIZE; half of it from four nodes on (calcCollChunking)."""


def nvls_tree_all_reduce(
    channel: int, nodes: Sequence[Sequence[int]], over: Sequence[int | None], size: int
) -> dict[int, list[Lane]]:
    """``size`` bytes on this channel over NVLink SHARP and a tree between nodes (src/transport/nvls.cc).

    Each GPU is head for its share: what its node's GPUs have of that is reduced inside the node, goes up and
    down a tree of the heads on its rail, and is multicast inside. ``nodes``: places node by node; ``over``:
    each node's parent.
    """
    unit = NVLS_CHUNK if len(nodes) < 4 else NVLS_CHUNK // 2
    heads = len(nodes[0])
    lanes: dict[int, list[Lane]] = {place: [] for places in nodes for place in places}
    share = sizes.round_up(-(-size // heads), 16)
    for rail in range(heads):
        own = max(0, min(share, size - rail * share))
        cut = [(min(unit, own - at),) for at in range(0, own, unit)]
        for node, places in enumerate(nodes):
            head, parent = places[rail], over[node]
            others = tuple(place for place in places if place != head)
            below = tuple(nodes[child][rail] for child, up in enumerate(over) if up == node)
            for place in others:
                gives = merged(channel, (Stretch((), (head,), c) for c in cut))
                gets = merged(channel, (Stretch((head,), (), c, copies=True) for c in cut))
                lanes[place] += [gives._replace(planes=(0, UP)), gets._replace(planes=(DOWN, 0))]
            if parent is None:
                parts = [merged(channel, (Stretch(others + below, below + others, c) for c in cut))]
            else:
                above = (nodes[parent][rail],)
                parts = [
                    merged(channel, (Stretch(others + below, above, c) for c in cut)),
                    merged(channel, (Stretch(above, below + others, c, copies=True) for c in cut)),
                ]
            lanes[head] += [part._replace(planes=(UP, DOWN)) for part in parts]
    return lanes


def tree_chunk(size: int, protocol: Protocol, ranks: int) -> int:
    """Bytes of one chunk on a tree's channel: LL128 cuts small operations finer (calcCollChunking)."""
    chunk = protocol.data
    if protocol.name == "ll128":
        depth = max(1, (ranks - 1).bit_length())
        while size < chunk * 8 * depth and chunk > 32 * sizes.KIB * 2:
            chunk //= 2
        chunk = max(1920, chunk // 1920 * 1920)
    return chunk


def binary_tree(n: int) -> list[int | None]:
    """Parent of each of ``n`` places in NCCL's first tree (ncclGetBtree)."""
    parents: list[int | None] = [None]
    for place in range(1, n):
        bit = place & -place
        up = (place ^ bit) | (bit << 1)
        parents.append(up if up < n else place ^ bit)
    return parents


def double_tree(n: int) -> tuple[list[int | None], list[int | None]]:
    """Both trees (ncclGetDtree): the second is the first mirrored, or shifted where ``n`` is odd."""
    first = binary_tree(n)

    def moved(place: int) -> int:
        return (place + 1) % n if n % 2 else n - 1 - place

    second: list[int | None] = [None] * n
    for place, parent in enumerate(first):
        second[moved(place)] = None if parent is None else moved(parent)
    return first, second


def all_to_all(
    order: Sequence[int], size: Callable[[int, int], int], channels: int, chunk: int, per_node: int = 1
) -> dict[int, list[Lane]]:
    """Every rank sends ``size(its place, the other's)`` bytes to each other one; a peer's parts go over
    channels of its own round.

    Sends and receives are separate thread groups: a rank's sends wait for nobody. Nodes of ``per_node`` GPUs
    make rounds of nodes, whose channels all of them use (ncclP2pChannelBaseForRound).
    """
    n = len(order)
    lanes: dict[int, list[Lane]] = {rank: [] for rank in order}
    for place, rank in enumerate(order):
        for delta in range(1, n):
            to, source = (place + delta) % n, (place - delta) % n
            away = (to // per_node - place // per_node) % -(-n // per_node)
            came = (place // per_node - source // per_node) % -(-n // per_node)
            lanes[rank] += _sends(order[to], size(place, to), channels, max(away - 1, 0), chunk)
            lanes[rank] += _receives(order[source], size(source, place), channels, max(came - 1, 0), chunk)
    return lanes


def send_recv(src: int, dst: int, size: int, channels: int, chunk: int) -> dict[int, list[Lane]]:
    """One send and its receive."""
    return {src: _sends(dst, size, channels, 0, chunk), dst: _receives(src, size, channels, 0, chunk)}


def _sends(to: int, size: int, channels: int, first: int, chunk: int) -> list[Lane]:
    """A lane for each part, on channels from ``first`` on."""
    return [
        merged(
            (first + i) % channels, (Stretch((), (to,), (c,)) for c in sizes.p2p_chunks(part, chunk)), True
        )
        for i, part in enumerate(sizes.p2p_parts(size, channels))
    ]


def _receives(source: int, size: int, channels: int, first: int, chunk: int) -> list[Lane]:
    return [
        merged(
            (first + i) % channels,
            (Stretch((source,), (), (c,)) for c in sizes.p2p_chunks(part, chunk)),
            True,
        )
        for i, part in enumerate(sizes.p2p_parts(size, channels))
    ]
