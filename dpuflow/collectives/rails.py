"""NCCL's rings and trees over nodes of several GPUs, each with a NIC of its own: what of them is on the wire.

In: the lanes of one operation, and which endpoints are of one node. Out: a layout, or None. A ring passes all
GPUs of a node over NVLink, which no packet shows: on the wire are its hops from the last GPU of a node to the
first of the next one. NCCL 2.30 src/graph/connect.cc (connectRings), src/device/all_reduce.h.

- The chunks of a hop tell how many ranks the ring has: they pass all of them. Each channel may leave a node
  at another GPU, whose first message is its own and dates it, whatever the others do.
- Trees reach a node's other GPUs behind the one with the link: what it sends up may have waited for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.components import connected
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Lane

    Ints = NDArray[np.int64]

MOST_GPUS: Final = 16
"""GPUs of a node, at most."""


def rails_of(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes that are connected by endpoints."""
    return connected(lanes, lambda lane: lane[:2])


def node_cycles(lanes: Sequence[Lane], nodes: Ints) -> list[list[int]] | None:
    """The lanes of each channel along its ring of nodes; None where they make none."""
    members = sorted({int(nodes[end]) for lane in lanes for end in lane[:2]})
    n = len(members)
    channels, rest = divmod(len(lanes), n)
    if rest or n < 2:
        return None
    ways: dict[int, list[int]] = {}
    for number in sorted(range(len(lanes)), key=lambda i: lanes[i].kind):
        ways.setdefault(int(nodes[lanes[number].src]), []).append(number)
    if any(len(ways.get(node, ())) != channels for node in members):
        return None
    cycles = []
    for _ in range(channels):
        cycle: list[int] = []
        at, seen = members[0], {members[0]}
        while len(cycle) < n:
            left = [i for i in ways[at] if int(nodes[lanes[i].dst]) not in seen or len(cycle) == n - 1]
            # Messages of one channel are as many everywhere, and of the same bytes but for roundings.
            like = lanes[cycle[0]].kind if cycle else None
            left = [i for i in left if like is None or lanes[i].kind[0] == like[0]]
            if not left:
                return None
            aim = like[1] if like is not None else lanes[left[0]].kind[1]
            best = min(left, key=lambda i: abs(lanes[i].kind[1] - aim))
            ways[at].remove(best)
            cycle.append(best)
            at = int(nodes[lanes[best].dst])
            seen.add(at)
        if at != members[0]:
            return None
        cycles.append(cycle)
    return cycles


class RailRing(NamedTuple):
    """A ring over nodes of several GPUs: an all_reduce, or what may be a reduce_scatter as well."""

    op: Op  # ALL_GATHER stands for both
    ranks: int
    size: int  # bytes as on the wire; of an ALL_GATHER one rank's block
    loops: int
    channels: int
    behind: int  # what came to a node leaves it so many messages later, if it is passed on
    period: int  # messages of a loop's round through all ranks


def rail_ring(lanes: Sequence[Lane], nodes: Ints, slot: int, slices: int, among: int = 0) -> RailRing | None:
    """The ring whose hops between nodes are ``lanes``; ``among``: how many ranks it has, 0: not known.

    ``slices``: messages of a chunk (Simple cuts it in two, prims_simple.h), 0 where no ring has such slots.
    """
    cycles = node_cycles(lanes, nodes) if slices else None
    if cycles is None:
        return None
    hops = [np.stack([lanes[i].sizes for i in cycle]) for cycle in cycles]
    if any(sizes.max() > slot for sizes in hops):
        return None
    count = len(cycles[0])
    seen: dict[int, set[int]] = {}
    for lane in lanes:
        for end in lane[:2]:
            seen.setdefault(int(nodes[end]), set()).add(end)
    usual = max(len(ends) for ends in seen.values())
    # Where all chunks are full several numbers fit: a NIC for each GPU is the rule. Fewer ranks than
    # endpoints are several rings.
    for gpus in range(usual, MOST_GPUS + 1):
        if among not in (0, count * gpus):
            continue
        parts = [_parts(sizes, count, gpus, slot, slices) for sizes in hops]
        reduced = [part[0] for part in parts if part is not None and part[0] is not None]
        gathered = [part[1] for part in parts if part is not None and part[1] is not None]
        for op, found in ((Op.ALL_REDUCE, reduced), (Op.ALL_GATHER, gathered)):
            if len(found) == len(hops):
                size, loops = sum(size for size, _ in found), max(loops for _, loops in found)
                ranks = count * gpus
                return RailRing(op, ranks, size, loops, len(hops), gpus * slices, (ranks - 1) * slices)
    return None


def _parts(
    sizes: Ints, count: int, gpus: int, slot: int, slices: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None] | None:
    """(bytes, loops) of one channel as an all_reduce's, as an all_gather's; None for what it cannot be."""
    n = count * gpus
    if n < 2:
        return None
    rounds, rest = divmod(sizes.shape[1], (n - 1) * slices)
    if rest or not rounds:
        return None
    chunks = sizes.reshape(count, rounds, n - 1, slices)
    if slices == 2 and (chunks[..., 1] > chunks[..., 0]).any():
        return None
    reduced = _reduced(chunks, gpus, slot) if rounds % 2 == 0 else None
    gathered = None
    full = (chunks[:, :-1] == slot).all()
    if full and (chunks == chunks[:1, :, :1]).all() and chunks[0, -1, 0, 0]:
        gathered = int(chunks[0, :, 0].sum()), rounds
    return (None if reduced is None else (reduced, rounds // 2)), gathered


def _reduced(chunks: Ints, gpus: int, slot: int) -> int | None:
    """The buffer as on the wire, bytes, if these are what nodes' last GPUs send in an all_reduce."""
    count, rounds, _, slices = chunks.shape
    n, loops = count * gpus, rounds // 2
    loop = chunks.reshape(count, loops, 2 * (n - 1), slices)
    if not (loop[:, :-1] == slot).all():
        return None
    # In step k rank p sends chunk p - 1 - k; a node's last GPU is the last of its ranks.
    place = gpus * np.arange(1, count + 1) - 1
    label = (place[:, None] - 1 - np.arange(2 * (n - 1))) % n
    tail = np.full((n, slices), -1)
    tail[label] = loop[:, -1]
    whole = tail.sum(axis=1)
    short = (whole != whole.max()) & (whole > 0)
    if (tail < 0).any() or (tail[label] != loop[:, -1]).any() or not whole.max() or short.sum() > 1:
        return None
    full: int = (loops - 1) * n * slices * slot
    return full + int(tail.sum())
