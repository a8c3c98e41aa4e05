"""A ring's own messages, in whatever part of them is seen, make that ring."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from lane_views import view

from dpuflow.matching.buffers import LL, RING_SLOT
from dpuflow.matching.lanes import Lane, Layout
from dpuflow.matching.rings import open_ring, ring
from dpuflow.schema.rows import Op

RINGS = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)


class Drawn(NamedTuple):
    """A ring over nodes with so many GPUs each; ``chunks``: what slices carry in the last loop, bytes."""

    op: Op
    nodes: int
    gpus: int
    channels: int
    loops: int
    slot: int
    chunks: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        slices = 2 if self.slot == RING_SLOT else 1
        full = (self.loops - 1) * slices * self.slot
        if self.op == Op.ALL_REDUCE:
            return self.channels * (full * self.ranks + slices * sum(self.chunks))
        return (
            self.channels * (full + slices * self.chunks[0]) * (self.ranks if self.op != Op.ALL_GATHER else 1)
        )


def drawn(seed: int, gpus: int = 1) -> Drawn:
    draw = random.Random(seed)
    nodes = draw.randrange(3, 7)
    op, slot = draw.choice(RINGS), draw.choice((LL, RING_SLOT))
    full, n = 16 * draw.randrange(2, 200), nodes * gpus
    full += 32_800 if slot == RING_SLOT else 0  # the first of two slices has 32 KiB at least
    chunks = [full] * n
    if op == Op.ALL_REDUCE:
        kept = draw.randrange(1, n + 1)
        chunks = [full] * kept + [0] * (n - kept)
        chunks[kept - 1] -= 16 * draw.randrange(2) if kept > 1 else 0
    return Drawn(op, nodes, gpus, draw.randrange(1, 3), draw.randrange(1, 4), slot, tuple(chunks))


def hops(made: Drawn, *, seen: bool = True) -> list[Lane]:
    """The lanes from node to node, with the bytes that are passed on or changed."""
    n, slices = made.ranks, 2 if made.slot == RING_SLOT else 1
    steps = (2 if made.op == Op.ALL_REDUCE else 1) * (n - 1)
    lanes = []
    for channel in range(made.channels):
        for node in range(made.nodes):
            at = made.gpus * (node + 1) - 1
            sizes, samples = [], []
            for loop in range(made.loops):
                for step in range(steps):
                    chunk = (at - step) % n
                    changes = {Op.ALL_REDUCE: min(step, n - 1), Op.REDUCE_SCATTER: step}.get(made.op, 0)
                    full = loop < made.loops - 1
                    sizes += [made.slot if full else made.chunks[chunk]] * slices
                    content = 1 + chunk + 100 * changes + 10_000 * loop + 1_000_000 * channel
                    samples += [content if seen else 0] * slices
            starts = 1000 * np.arange(len(sizes))[None] + node
            lanes.append(
                Lane(node, (node + 1) % made.nodes, made.slot, np.array(sizes), starts, starts + 500,
                     np.array(samples, np.uint32)[None])
            )  # fmt: skip
    return lanes


def is_it(found: Layout | None, made: Drawn, *, among: bool = True) -> None:
    assert found is not None, made
    assert (found.op, found.alike, found.size) == (made.op, (), made.size), made
    assert not among or found.among == made.ranks


@pytest.mark.parametrize("seed", range(60))
def test_a_ring_from_any_nodes(seed: int) -> None:
    made = drawn(seed)
    lanes = hops(made)
    is_it(ring(view(lanes)), made, among=False)
    first = seed % made.nodes
    for count in range(1, made.nodes - 1):
        near = {(first + place) % made.nodes for place in range(count)}
        is_it(open_ring(view([lane for lane in lanes if near & set(lane[:2])], near)), made)


@pytest.mark.parametrize("seed", range(40))
def test_gpus_behind_one_adapter_are_counted_by_the_chunks_or_by_what_comes_back(seed: int) -> None:
    made = drawn(seed, gpus=2 + seed % 3)
    if made.op == Op.REDUCE_SCATTER:
        made = made._replace(op=Op.ALL_GATHER)
    found = ring(view(hops(made)))
    is_it(found, made)
    assert found is not None
    assert found.ranks == made.ranks


@pytest.mark.parametrize("seed", range(20))
def test_without_content_what_else_it_may_be_is_said(seed: int) -> None:
    made = drawn(seed)
    found = ring(view(hops(made, seen=False)))
    assert found is not None
    assert made.op in (found.op, *found.alike)


def test_chunks_that_no_all_reduce_has() -> None:
    made = Drawn(Op.ALL_REDUCE, 3, 1, 1, 1, LL, (64, 64, 48))
    is_it(ring(view(hops(made))), made, among=False)
    assert ring(view(hops(made._replace(chunks=(64, 48, 32))))) is None  # two shorter ones
    lanes = hops(made)
    lanes[1].sizes[3] += 16  # the same chunk, longer on one way
    assert ring(view(lanes)) is None


def test_only_the_last_loop_may_be_short() -> None:
    made = Drawn(Op.ALL_GATHER, 3, 1, 1, 2, LL, (128, 128, 128))
    is_it(ring(view(hops(made))), made, among=False)
    swapped = [lane._replace(sizes=lane.sizes[::-1]) for lane in hops(made)]
    assert ring(view(swapped)) is None


def test_a_ring_starts_and_ends_somewhere() -> None:
    lanes = hops(drawn(3))
    assert ring(view(lanes[1:])) is None
    assert all(a.dst == b.src for a, b in pairwise(lanes[: drawn(3).nodes]))
