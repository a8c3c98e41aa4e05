"""NCCL's rings of which only some nodes were captured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from lane_views import view
from synth_worlds import loop, settings

import dpuflow
from dpuflow.matching import Job
from dpuflow.matching.buffers import LL, RING_SLOT
from dpuflow.matching.lanes import Lane, Layout
from dpuflow.matching.layouts import layout_of
from dpuflow.matching.rings import open_ring
from dpuflow.schema.rows import EXCHANGE, Op
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def analysed(folder: Path, op: str, only: list[int], nodes: int = 6, **keys: object) -> dpuflow.Analysis:
    more = settings(cluster={"nodes": nodes}, observation={"only": only}, **keys)
    captures = write_case(loop(op, more, iterations=8), folder)
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


@pytest.mark.parametrize("only", [[2], [2, 3], [0, 3], [1, 2, 4], [0, 1, 2, 3, 5]])
@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("op: all_reduce, bytes: 1000000", ("all_reduce", 1_000_000)),
        ("op: all_reduce, bytes: 20000000", ("all_reduce", 20_000_000)),  # two loops
        ("op: all_reduce, bytes: 65568, protocol: ll", ("all_reduce", 65_568)),
        ("op: all_reduce, bytes: 600000, protocol: ll128", ("all_reduce", None)),
        ("op: all_gather, bytes: 300000", ("all_gather", 300_000)),
        ("op: reduce_scatter, bytes: 600000, protocol: ll", ("reduce_scatter", 600_000)),
    ],
)
def test_rings_from_some_nodes(
    only: list[int], op: str, told: tuple[str, int | None], tmp_path: Path
) -> None:
    result = analysed(tmp_path, op, only)
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        (told[0], "ring", told[1]): 8
    }


def test_a_chain_from_one_node_is_no_ring(tmp_path: Path) -> None:
    result = analysed(tmp_path, "op: broadcast, bytes: 300000, protocol: ll", [2])
    assert Counter((str(c.op), c.bytes) for c in result.collectives) == {("broadcast", 300_000): 8}


TRAINING = """
name: test
cluster: {nodes: 6, link_gbps: 25}
nccl: {channels: 1}
job: {kind: training, pp: 2, steps: 10, microbatches: 2, layers: 1, buckets: 1, bucket_bytes: 3000000,
      pp_bytes: 3000000, forward_us: 100, optimizer_us: 100}
faults: [{kind: gpu_late, us: 1000, mode: rotating}]
observation: {only: [0]}
"""


def test_slots_given_back_date_nobody_who_may_have_sent(tmp_path: Path) -> None:
    """Whom a captured rank of a ring sends to passes on what it gets: its slots wait for what nobody saw."""
    captures = write_case(parse_scenario(TRAINING, "test.yaml"), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    behind = {end.address: end.id for end in result.endpoints}["10.0.0.2"]
    rings = [c for c in result.collectives if c.op == "all_reduce"]
    assert len(rings) == 10
    rows = [rank for c in rings for rank in c.ranks if rank.endpoint == behind]
    assert not any("slot" in (rank.why or "") for rank in rows)


# -- what sizes and content leave open ------------------------------------------------------------

SLICES = {RING_SLOT: 2, LL: 1}
LAST = 49_152
"""Bytes of a slice: the first of two has 32 KiB at least."""


def lanes(
    op: Op,
    ranks: int,
    loops: int,
    arcs: Sequence[Sequence[int]],
    *,
    slot: int = LL,
    last: int = LAST,
    seen: bool = True,
) -> list[Lane]:
    """What the hops of ``arcs`` carry in a ring of ``ranks``; slices of ``last`` bytes in the last loop."""
    n, slices = ranks, SLICES[slot]
    rounds = 2 if op == Op.ALL_REDUCE else 1
    steps = rounds * (n - 1)
    made = []
    for number, arc in enumerate(arcs):
        for place in range(len(arc) - 1):
            at = number * 100 + place
            sizes = np.repeat([[slot] * steps] * (loops - 1) + [[last] * steps], slices, axis=1).ravel()
            samples = []
            for lap in range(loops):
                for step in range(steps):
                    chunk = (at - step) % n
                    changes = step if op == Op.REDUCE_SCATTER else 0
                    if op == Op.ALL_REDUCE:
                        changes = min(step, n - 1)
                    samples.append(1 + chunk + 100 * changes + 10_000 * lap)
            starts = 1000 * np.arange(len(sizes)) + 10 * place
            samples = np.repeat(samples, slices) if seen else np.zeros(len(sizes))
            made.append(
                Lane(arc[place], arc[place + 1], slot, sizes, starts[None], starts[None] + 900,
                     samples.astype(np.uint32)[None])
            )  # fmt: skip
    return made


def told(made: list[Lane], captured: set[int], ranks: int = 0) -> Layout:
    ring = open_ring(view(made, captured, ranks))
    assert ring is not None
    return ring


@pytest.mark.parametrize("slot", [LL, RING_SLOT])
@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER])
@pytest.mark.parametrize(("ranks", "loops"), [(3, 1), (4, 1), (7, 1), (4, 3), (8, 2)])
def test_content_tells_operation_and_ranks(op: Op, ranks: int, loops: int, slot: int) -> None:
    ring = told(lanes(op, ranks, loops, [[5, 6, 7]], slot=slot), {6})
    assert (ring.op, ring.among, ring.alike) == (op, ranks, ())
    assert [end for end in ring.order if end >= 0] == [5, 6, 7]
    assert len(ring.order) == ranks
    block = SLICES[slot] * ((loops - 1) * slot + LAST)
    assert ring.size == (block if op == Op.ALL_GATHER else ranks * block)


def test_full_slots_leave_the_ranks_of_a_reduce_scatter_open() -> None:
    """13 ranks in one loop, 7 in two, 5 in three or 4 in four: nothing is ever passed on."""
    ring = told(lanes(Op.REDUCE_SCATTER, 4, 4, [[5, 6, 7]], last=LL), {6})
    assert (ring.op, ring.among, ring.size) == (Op.REDUCE_SCATTER, 0, None)
    assert told(lanes(Op.REDUCE_SCATTER, 4, 4, [[5, 6, 7]], last=LL), {6}, ranks=4).size == 16 * LL
    passed = told(lanes(Op.ALL_GATHER, 4, 4, [[5, 6, 7]], last=LL), {6})
    assert (passed.among, passed.size) == (4, 4 * LL)


def test_without_content_the_operation_is_unknown() -> None:
    ring = told(lanes(Op.ALL_REDUCE, 4, 1, [[5, 6, 7]], seen=False), {6})
    assert ring.op == Op.UNKNOWN
    assert set(ring.alike) == {Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER}
    assert ring.size is None


def test_arcs_of_one_ring() -> None:
    whole = told(lanes(Op.ALL_REDUCE, 6, 1, [[0, 1, 2], [3, 4, 5]]), {1, 4})
    assert (whole.among, whole.order) == (6, [0, 1, 2, 3, 4, 5])
    apart = told(lanes(Op.ALL_REDUCE, 9, 1, [[0, 1, 2], [3, 4, 5]]), {1, 4})
    assert (apart.op, apart.among, apart.order) == (Op.ALL_REDUCE, 9, [0, 1, 2, 3, 4, 5])  # how far: open
    assert open_ring(view(lanes(Op.ALL_REDUCE, 5, 1, [[0, 1, 2], [3, 4, 5]]), {1, 4})) is None  # too many


def test_arcs_that_do_not_meet_are_two_rings() -> None:
    made = lanes(Op.ALL_REDUCE, 6, 1, [[0, 1, 2], [3, 4, 5]])
    later = [
        lane._replace(starts=lane.starts + 10**6, arrivals=lane.arrivals + 10**6) if lane.src > 2 else lane
        for lane in made
    ]
    assert open_ring(view(later, {1, 4})) is None


def test_channels_that_look_alike_are_told_apart_by_content() -> None:
    one = lanes(Op.ALL_REDUCE, 4, 1, [[5, 6, 7]])
    other = [lane._replace(samples=lane.samples + 7_000_000) for lane in one]
    ring = told([one[0], other[0], other[1], one[1]], {6})
    assert (ring.op, ring.among, ring.size) == (Op.ALL_REDUCE, 4, 2 * 4 * LAST)


def test_no_ring() -> None:
    made = lanes(Op.ALL_REDUCE, 4, 1, [[5, 6, 7]])
    assert open_ring(view(made[:1], {5})) is None  # who sends only is at a chain's end
    assert open_ring(view(made, {5, 6})) is None
    uneven = [made[0], made[1]._replace(sizes=made[1].sizes // 2)]
    assert open_ring(view(uneven, {6})) is None


def test_a_chain_passes_on_what_has_come() -> None:
    """Where sizes fit no ring, nor does the time fit a chain, nothing is made of it."""
    job = Job(EXCHANGE.zeros(0), np.arange(3), frozenset({1}))
    sizes, starts = np.array([LL, LL, 100]), np.array([[1000, 2000, 3000]])
    some = np.array([[1, 2, 3]], np.uint32)
    came = Lane(0, 1, LL, sizes, starts, starts + 100, some)
    passed = Lane(1, 2, LL, sizes, starts + 500, starts + 600, some)
    chain = layout_of(job, [came, passed], [0, 1, 2])
    assert chain is not None
    assert chain.op == Op.BROADCAST
    before = passed._replace(starts=starts - 500)
    assert layout_of(job, [came, before], [0, 1, 2]) is None
