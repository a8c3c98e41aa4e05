"""NCCL's algorithms over any number of ranks, from whole captures of scripted jobs; and what looks alike."""

from __future__ import annotations

import json
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.matching import Job
from dpuflow.matching.buffers import STEP_SLOT
from dpuflow.matching.lanes import Lane, passed_on, unchanged
from dpuflow.matching.layouts import layout_of
from dpuflow.schedules.graph import dependencies, free_ranks
from dpuflow.schedules.nccl import binary_tree, double_tree, pat_dimensions, tree_all_reduce
from dpuflow.schema.rows import EXCHANGE, Op
from dpuflow.synth.case import write_case

if TYPE_CHECKING:
    from dpuflow.results import Analysis

ITERATIONS = 4


def analysed(folder: Path, op: str, nodes: int, channels: int, **more: Any) -> Analysis:
    """The result for a loop of the operation ``op``."""
    keys = settings(cluster={"nodes": nodes}, nccl={"channels": channels}, **more)
    captures = write_case(loop(op, keys, ITERATIONS), str(folder))
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


@pytest.mark.parametrize(
    ("op", "nodes", "channels", "told"),
    [
        ("op: all_reduce, algorithm: tree, bytes: 40000", 2, 2, ("all_reduce", "tree", 40_000)),
        ("op: all_reduce, algorithm: tree, bytes: 3000000", 3, 2, ("all_reduce", "tree", 3_000_000)),
        ("op: all_reduce, algorithm: tree, bytes: 9000000", 7, 4, ("all_reduce", "tree", 9_000_000)),
        ("op: all_reduce, algorithm: tree, bytes: 70000, protocol: ll", 8, 2, ("all_reduce", "tree", 70_000)),
        (
            "op: all_reduce, algorithm: tree, bytes: 30000, protocol: ll128",
            6,
            1,
            ("all_reduce", "tree", None),
        ),
        ("op: all_reduce, algorithm: tree, bytes: 100000", 64, 2, ("all_reduce", "tree", 100_000)),
        ("op: all_gather, algorithm: pat, bytes: 30000", 4, 1, ("all_gather", "pat", 30_000)),
        ("op: all_gather, algorithm: pat, bytes: 800000", 7, 2, ("all_gather", "pat", 800_000)),
        ("op: all_gather, algorithm: pat, bytes: 4000", 33, 1, ("all_gather", "pat", 4000)),
        ("op: reduce_scatter, algorithm: pat, bytes: 40000", 5, 1, ("reduce_scatter", "pat", 40_000)),
        ("op: reduce_scatter, algorithm: pat, bytes: 8388608", 8, 2, ("reduce_scatter", "pat", 8_388_608)),
        ("op: broadcast, bytes: 5000, root: 1", 2, 1, ("broadcast", "chain", 5000)),
        ("op: broadcast, bytes: 5000000, root: 4", 6, 4, ("broadcast", "chain", 5_000_000)),
        ("op: reduce, bytes: 5000000, root: 2", 5, 2, ("reduce", "chain", 5_000_000)),
        ("op: reduce_scatter, bytes: 6000000", 3, 2, ("reduce_scatter", "ring", 6_000_000)),
        ("op: reduce_scatter, bytes: 64000, protocol: ll", 4, 1, ("reduce_scatter", "ring", 64_000)),
        # Two full loops: an all_reduce has the same messages, but does not pass all of them on.
        ("op: all_gather, bytes: 4194304", 4, 1, ("all_gather", "ring", 4_194_304)),
        ("op: all_reduce, bytes: 8388608", 4, 1, ("all_reduce", "ring", 8_388_608)),
    ],
)
def test_recognised(
    op: str, nodes: int, channels: int, told: tuple[str, str, int | None], tmp_path: Path
) -> None:
    result = analysed(tmp_path, op, nodes, channels)
    found = Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives)
    assert found == {told: ITERATIONS}
    assert {len(c.ranks) for c in result.collectives} == {nodes}


def test_operations_of_several_kinds_on_the_same_connections(tmp_path: Path) -> None:
    """Rings and trees share the connections between neighbours; each operation has its own count."""
    op = (
        "op: all_reduce, bytes: 40000, algorithm: tree}, {op: all_gather, bytes: 100000},"
        " {op: broadcast, bytes: 700000, root: 1}, {op: reduce_scatter, bytes: 600000"
    )
    result = analysed(tmp_path, op, 4, 2)
    found = Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives)
    assert found == {
        ("all_reduce", "tree", 40_000): ITERATIONS,
        ("all_gather", "ring", 100_000): ITERATIONS,
        ("broadcast", "chain", 700_000): ITERATIONS,
        ("reduce_scatter", "ring", 600_000): ITERATIONS,
    }


def test_what_looks_alike_is_named(tmp_path: Path) -> None:
    """Without the first bytes of messages, and of two ranks with them, nothing tells these apart."""
    headers = {"snaplen": 76}  # up to the immediate of a WRITE ONLY
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    blind = analysed(tmp_path / "a", "op: reduce_scatter, bytes: 90000", 2, 1)
    assert {(str(c.op), tuple(c.op_alternatives)) for c in blind.collectives} == {
        ("all_gather", ("reduce_scatter",))
    }
    cut = analysed(tmp_path / "b", "op: reduce_scatter, bytes: 90000", 3, 1, observation=headers)
    assert all(c.op in ("all_gather", "unknown") for c in cut.collectives)


def test_ll128_says_what_its_lines_leave_open(tmp_path: Path) -> None:
    result = analysed(tmp_path, "op: all_reduce, bytes: 1000000, protocol: ll128", 4, 2)
    assert [(c.protocol, c.bytes) for c in result.collectives] == [("ll128", None)] * ITERATIONS
    for collective in result.collectives:
        assert collective.bytes_between is not None
        least, most = collective.bytes_between
        assert least <= 1_000_000 <= most
        assert most - least < 8 * 1920


@pytest.mark.parametrize("n", [*range(2, 40), 64, 100, 127, 128, 129])
def test_trees_span_all_ranks_and_most_are_leaves_somewhere(n: int) -> None:
    leaves: set[int] = set()
    for parents in double_tree(n):
        assert sum(parent < 0 for parent in parents) == 1
        for place in range(n):
            at, steps = place, 0
            while parents[at] >= 0:
                at, steps = parents[at], steps + 1
                assert steps <= n
        leaves |= {place for place in range(n) if place not in parents}
    assert n - len(leaves) <= (n % 2)
    assert binary_tree(4) == (-1, 2, 0, 2)
    assert sum(pat_dimensions(n).values()) == n - 1
    above = 1 << (n - 1).bit_length()
    assert sum(pat_dimensions(n, above).values()) == above - 1  # with gaps for ranks that there are not


def test_trees_free_ranks_are_leaves_and_what_comes_down_waits() -> None:
    tree = tree_all_reduce((binary_tree(4),))
    assert free_ranks(tree, 4) == {1, 3}
    needs = set(dependencies(tree, 4))
    assert (((0, 2), 0), ((2, 0), 0)) in needs  # the root sends down what came up
    assert (((2, 1), 0), ((0, 2), 0)) in needs


def lane(src: int, dst: int, samples: list[list[int]], first_ns: int = 0) -> Lane:
    count = len(samples[0])
    starts = first_ns + 1000 * np.arange(count)[None, :] + 1_000_000 * np.arange(len(samples))[:, None]
    sizes = np.full(count, 1000)
    return Lane(src, dst, STEP_SLOT, sizes, starts, starts + 500, np.array(samples, np.uint32))


def test_what_ranks_pass_on() -> None:
    came = [lane(0, 1, [[5, 6, 7]])]
    assert unchanged([(came, [lane(1, 2, [[5, 6, 7]])])]) is True
    assert unchanged([(came, [lane(1, 2, [[15, 16, 17]])])]) is False
    assert unchanged([(came, [lane(1, 2, [[5, 16, 17]])])]) is None
    assert unchanged([(came, [lane(1, 2, [[0, 0, 0]])])]) is None
    known, same = passed_on([(came, [lane(1, 2, [[9, 5, 16]])])], 1)[3]
    assert (known.tolist(), same.tolist()) == ([0, 1, 1], [0, 1, 0])
    # Zeros stay zeros whatever is done with them; ones do not.
    assert unchanged([([lane(0, 1, [[5, 5, 5]])], [lane(1, 2, [[5, 5, 5]])])]) is None
    assert unchanged([([lane(0, 1, [[5, 5, 5]])], [lane(1, 2, [[6, 6, 6]])])]) is False


def test_a_chain_that_nothing_tells_from_a_reduce() -> None:
    job = Job(EXCHANGE.zeros(0), np.arange(3))
    found = layout_of(job, [lane(0, 1, [[0]]), lane(1, 2, [[0]], 2000)], [0, 1, 2])
    assert found is not None
    assert (found.op, found.order, found.alike) == (Op.BROADCAST, [0, 1, 2], (Op.REDUCE,))
    passed = layout_of(job, [lane(0, 1, [[3]]), lane(1, 2, [[3]], 2000)], [0, 1, 2])
    assert passed is not None
    assert passed.alike == ()
    summed = layout_of(job, [lane(0, 1, [[3]]), lane(1, 2, [[4]], 2000)], [0, 1, 2])
    assert summed is not None
    assert (summed.op, summed.order[summed.root or 0]) == (Op.REDUCE, 2)


@pytest.mark.parametrize(
    ("op", "nodes", "fault"),
    [
        # Data streams through: what follows its own data at once shows no host's reaction.
        ("op: broadcast, bytes: 983820", 5, {"kind": "gpu_late", "rank": 3, "us": 200}),
        ("op: broadcast, bytes: 3000000, root: 1", 4, {"kind": "gpu_late", "rank": 2, "us": 50}),
        # A late host grants late: who waits for it is not late itself.
        ("op: all_reduce, bytes: 20000, protocol: ll", 5, {"kind": "slow_host", "rank": 2, "us": 1000}),
        ("op: all_reduce, bytes: 20000, protocol: ll", 2, {"kind": "slow_host", "rank": 1, "us": 50}),
        (
            "op: all_reduce, bytes: 900000, protocol: ll128",
            4,
            {"kind": "slow_receiver", "rank": 1, "us": 200},
        ),
        ("op: all_reduce, bytes: 500000, algorithm: tree", 5, {"kind": "gpu_late", "rank": 0, "us": 200}),
    ],
)
def test_what_is_said_of_lateness_holds(op: str, nodes: int, fault: dict[str, Any], tmp_path: Path) -> None:
    keys = settings(cluster={"nodes": nodes, "link_gbps": 25}, nccl={"channels": 2}, faults=[fault])
    captures = write_case(loop(op, keys, 24), str(tmp_path))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    truth = json.loads((tmp_path / "truth.json").read_text())["collectives"]
    assert len(result.collectives) == len(truth)
    by_address = sorted(result.endpoints, key=lambda end: ip_address(end.address))
    place = {end.id: number for number, end in enumerate(by_address)}
    for row, collective in zip(truth, result.collectives, strict=True):
        late = [enter - min(row["enter_ns"]) for enter in row["enter_ns"]]
        for rank in collective.ranks:
            number = place[rank.endpoint]
            if rank.bound == "exact":
                assert rank.lateness_ns is not None
                assert abs(rank.lateness_ns - late[number]) < 20_000, rank
            elif rank.bound == "at_least":
                assert rank.lateness_ns is not None
                assert rank.lateness_ns < late[number] + 20_000, rank
