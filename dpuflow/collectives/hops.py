"""NCCL's rings over nodes of several GPUs with a NIC each, of which only some nodes were captured.

In: the lanes of one operation, which lead into and out of captured nodes. Out: operation, ranks, bytes and
the hops seen, or None. A ring passes a node's GPUs over NVLink: on the wire are its hops from node to node.

- Any hop passes all chunks of the buffer: it tells the bytes, and how many ranks there may be (``arcs``).
- What comes into a captured node leaves it as many steps later as it has GPUs: changed where any of these
  reduces it, the same where all pass it on (the first bytes of messages). That tells the operation.

Which GPUs without a capture share a node is not known and not needed: each one's first message is its own.
NCCL 2.30 src/graph/connect.cc (connectRings), src/device/all_reduce.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.collectives.arcs import AGREE, Fit, fits_of, passes, seen_hops
from dpuflow.collectives.rails import MOST_GPUS
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Lane
    from dpuflow.schedules.algorithms import Algorithm


class Hops(NamedTuple):
    """``size``: bytes of the buffer as on the wire, None where several numbers of ranks fit; then ``ranks``
    is 0. ``alike``: other operations that fit."""

    op: Op
    algorithm: Algorithm
    size: int | None
    alike: tuple[Op, ...]
    ranks: int


class _Node(NamedTuple):
    """The lanes into and out of a captured node, and how many of its GPUs were seen."""

    into: list[Lane]
    out: list[Lane]
    gpus: int


def open_node_ring(
    lanes: Sequence[Lane],
    members: Sequence[int],
    nodes: NDArray[np.int64],
    captured: AbstractSet[int],
    slot: int,
    ranks: int = 0,
    slices: int = 1,
) -> Hops | None:
    """The ring that goes into and out of the captured nodes.

    ``members``: all GPUs seen; ``nodes``: see ``structured_instances``; ``ranks``: how many there are, 0
    where that is not known; ``slices``: messages of a chunk, 0 where no ring has such slots.
    """
    around = _around(lanes, nodes, captured) if slices else None
    if around is None:
        return None
    each: list[dict[tuple[Op, int], Fit]] = []
    for lane in lanes:
        if lane.sizes.max(initial=0) > slot:
            return None
        each.append({fit[:2]: fit for fit in fits_of([[lane]], slices, slot, max(len(members), ranks))})
    common = [key for key in each[0] if all(key in fits for fits in each) and ranks in (0, key[1])]
    by_lane = {id(lane): fits for lane, fits in zip(lanes, each, strict=True)}
    found: list[tuple[int, Fit, int]] = []
    for key in common:
        # Every channel enters and leaves each node: all that comes in tells the bytes, and all that goes out.
        sides = [side for node in around for side in (node.into, node.out)]
        sizes = {sum(by_lane[id(lane)][key].size for lane in side) for side in sides}
        if len(sizes) == 1:
            loops = max(fits[key].loops for fits in each)
            found += [
                (held, Fit(*key, loops, min(sizes)), gpus)
                for gpus, held in _agreeing(around, by_lane, key, slices)
            ]
    best = max((held for held, _, _ in found), default=0)
    kept = list(dict.fromkeys(fit for held, fit, _ in found if held == best))
    return _told(kept, lanes, members) if kept else None


def _told(kept: list[Fit], lanes: Sequence[Lane], members: Sequence[int]) -> Hops:
    ops = sorted({fit.op for fit in kept})
    numbers, sizes = {fit.ranks for fit in kept}, {fit.size for fit in kept}
    places = {end: place for place, end in enumerate(members)}
    edges = tuple(sorted({(places[lane.src], places[lane.dst]) for lane in lanes}))
    steps = max((2 if fit.op == Op.ALL_REDUCE else 1) * fit.loops * (fit.ranks - 1) for fit in kept)
    op, alike = (ops[0], ()) if len(ops) == 1 else (Op.UNKNOWN, tuple(ops))
    known = numbers.pop() if len(numbers) == 1 else 0
    return Hops(op, seen_hops(op, edges, steps), sizes.pop() if len(sizes) == 1 else None, alike, known)


def _around(
    lanes: Sequence[Lane], nodes: NDArray[np.int64], captured: AbstractSet[int]
) -> list[_Node] | None:
    """The captured nodes; None where not as many channels lead into each of them as out of it."""
    found: dict[int, _Node] = {}
    ends: dict[int, set[int]] = {}
    for lane in lanes:
        if not captured & {lane.src, lane.dst} or nodes[lane.src] == nodes[lane.dst]:
            return None
        for end, into in ((lane.src, False), (lane.dst, True)):
            if end in captured:
                node = found.setdefault(int(nodes[end]), _Node([], [], 0))
                (node.into if into else node.out).append(lane)
                ends.setdefault(int(nodes[end]), set()).add(end)
    if len({len(side) for node in found.values() for side in (node.into, node.out)}) != 1:
        return None
    return [node._replace(gpus=len(ends[number])) for number, node in found.items()]


def _agreeing(
    around: Sequence[_Node],
    by_lane: Mapping[int, Mapping[tuple[Op, int], Fit]],
    key: tuple[Op, int],
    slices: int,
) -> Iterator[tuple[int, int]]:
    """Numbers of GPUs a node with which what nodes pass on agrees with ``key``; and how many messages do."""
    for gpus in range(max(node.gpus for node in around), MOST_GPUS + 1):
        if key[1] % gpus or key[1] <= gpus:
            continue
        held = kept = reduced = changed = 0
        for node in around:
            left = list(node.out)
            for came in node.into:
                fit = by_lane[id(came)][key]
                seen = [_passed(came, goes, fit, gpus, slices) for goes in left]
                best = max(range(len(seen)), key=lambda k: seen[k][0] - seen[k][3] + seen[k][2])
                left.pop(best)
                held, kept = held + seen[best][0], kept + seen[best][1]
                reduced, changed = reduced + seen[best][2], changed + seen[best][3]
        if held >= AGREE * kept and reduced >= AGREE * changed:
            yield gpus, held


def _passed(came: Lane, goes: Lane, fit: Fit, gpus: int, slices: int) -> tuple[int, int, int, int]:
    """Messages that the node passes on unchanged, of how many it should; that it changes, of how many."""
    lag = gpus * slices
    if len(came.sizes) != len(goes.sizes) or lag >= len(goes.sizes):
        return 0, 0, 0, 0
    before, after = came.samples[:, :-lag], goes.samples[:, lag:]
    known = (before > 0) & (after > 0) & (goes.sizes[lag:] > 0)
    same = known & (before == after)
    # Unchanged if all GPUs pass it on, the first of them in the step after it came.
    each = passes(fit)
    through = np.array([each[step - gpus + 1 : step + 1].all() for step in range(gpus, len(each))])
    through = np.repeat(through, slices)
    return (
        int(same[:, through].sum()),
        int(known[:, through].sum()),
        int((known & ~same)[:, ~through].sum()),
        int(known[:, ~through].sum()),
    )
