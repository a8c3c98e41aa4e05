"""NCCL over TCP: sizes before messages, and the operations that they make."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from bench.accuracy.midjob import KINDS, cut, windows, within
from bench.robustness.cases import draw
from dpuflow.reports.text import text_lines
from dpuflow.synth.case import write_case
from dpuflow.synth.observe import epoch_ns
from dpuflow.synth.scenario import Loop, Scenario, parse_scenario

SOCKETS = {"transport": "socket"}
TRACES = Path(__file__).parents[1] / "traces"


@pytest.mark.parametrize(
    ("op", "nodes", "channels", "told"),
    [
        ("op: all_reduce, bytes: 999996", 3, 2, ("all_reduce", "ring", 999_996, "simple")),
        ("op: all_reduce, bytes: 7000", 5, 1, ("all_reduce", "ring", 7000, "simple")),
        ("op: all_reduce, bytes: 65536, protocol: ll", 4, 1, ("all_reduce", "ring", 65536, "ll")),
        (
            "op: all_reduce, bytes: 2500000, algorithm: tree",
            6,
            2,
            ("all_reduce", "tree", 2_500_000, "simple"),
        ),
        ("op: all_gather, bytes: 100000", 4, 2, ("all_gather", "ring", 100_000, "simple")),
        ("op: all_gather, bytes: 40000, algorithm: pat", 5, 1, ("all_gather", "pat", 40_000, "simple")),
        ("op: broadcast, bytes: 1500000, root: 2", 4, 2, ("broadcast", "chain", 1_500_000, "simple")),
    ],
)
def test_operations(
    op: str, nodes: int, channels: int, told: tuple[str, str, int, str], tmp_path: Path
) -> None:
    more = settings(cluster={"nodes": nodes}, nccl=SOCKETS | {"channels": channels})
    captures = write_case(loop(op, more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes, c.protocol) for c in result.collectives)
    assert found == {told: 8}


@pytest.mark.parametrize("only", [[2], [0, 3], [1, 2, 4], [0, 1, 2, 3, 5]])
@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("op: all_reduce, bytes: 960000", ("all_reduce", "ring", 960_000, "simple")),
        ("op: all_gather, bytes: 100000", ("all_gather", "ring", 100_000, "simple")),
        ("op: reduce_scatter, bytes: 600000", ("reduce_scatter", "ring", 600_000, "simple")),
        (
            "op: all_reduce, bytes: 2500000, algorithm: tree",
            ("all_reduce", "tree", 2_500_000, "simple"),
        ),
    ],
)
def test_operations_from_some_nodes(
    only: list[int], op: str, told: tuple[str, str, int, str], tmp_path: Path
) -> None:
    """A captured rank's hops tell the rest, as over RoCE: sizes, and first bytes of what is passed on."""
    more = settings(cluster={"nodes": 6}, nccl=SOCKETS | {"channels": 2}, observation={"only": only})
    captures = write_case(loop(op, more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes, c.protocol) for c in result.collectives)
    assert found == {told: 8}


def test_what_follows_without_a_pause_is_told_by_its_sizes(tmp_path: Path) -> None:
    """Hosts that stall pause longer within operations than between two of a step."""
    late = {"kind": "gpu_late", "rank": 2, "us": 5000}
    more = settings(
        seed=1,
        cluster={"nodes": 4},
        nccl=SOCKETS | {"channels": 2},
        machine={"stall_share": 0.05, "stall_us": 3000},
        faults=[late],
    )
    ops = "op: all_reduce, bytes: 159424}, {op: all_reduce, bytes: 318848"
    captures = write_case(loop(ops, more, iterations=12), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives)
    assert found == {("all_reduce", "ring", 159_424): 12, ("all_reduce", "ring", 318_848): 12}
    assert [row.address for row in result.lateness if row.verdict == "late"] == ["10.0.0.3"]


def test_first_bytes_tell_operations_apart(tmp_path: Path) -> None:
    """Every node captured: a reduce_scatter's messages have the sizes of an all_gather's."""
    more = settings(cluster={"nodes": 4}, nccl=SOCKETS | {"channels": 1})
    captures = write_case(loop("op: reduce_scatter, bytes: 400000", more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert {(str(c.op), c.bytes, tuple(map(str, c.op_alternatives))) for c in result.collectives} == {
        ("reduce_scatter", 400_000, ())
    }


PROGRAMS = {
    "rings": (["op: all_reduce, bytes: 999996"], 3, 2),
    "lines": (["op: all_reduce, bytes: 65536, protocol: ll"], 4, 1),
    "trees": (["op: all_reduce, bytes: 2500000, algorithm: tree"], 6, 2),
    "blocks": (["op: all_gather, bytes: 40000, algorithm: pat"], 5, 1),
    "chain": (["op: broadcast, bytes: 1500000, root: 2"], 4, 2),
    "several": (
        [
            "op: all_reduce, bytes: 40960, algorithm: tree",
            "op: all_gather, bytes: 20480, gap_us: 100",
            "op: all_reduce, bytes: 163840, gap_us: 100",
            "op: broadcast, bytes: 81920, gap_us: 100",
        ],
        4,
        2,
    ),
    "sharded": (["op: all_gather, bytes: 65536", "op: reduce_scatter, bytes: 524288, gap_us: 150"], 4, 1),
}
JOB = """
name: test
seed: {seed}
job: {{kind: loop, iterations: 14, compute_us: 400, jitter_us: 5, ops: [{ops}]}}
faults: [{{kind: gpu_late, rank: 1, us: {late}, mode: {mode}}}]
"""


def program(name: str, seed: int, late: int, mode: str) -> Scenario:
    ops, nodes, channels = PROGRAMS[name]
    job = JOB.format(seed=seed, ops=", ".join(f"{{{op}}}" for op in ops), late=late, mode=mode)
    more = settings(
        cluster={"nodes": nodes},
        nccl=SOCKETS | {"channels": channels},
        observation={"compress": False, "clocks": {"offset_us": 1e5, "drift_ppm": 10, "jitter_ns": 20}},
    )
    return parse_scenario(job + more, "test.yaml")


@pytest.mark.parametrize(
    ("name", "begins", "late", "mode"),
    [
        (name, begins, *fault)
        for number, name in enumerate(PROGRAMS)
        for begins, fault in ((None, (600, "random")), (number % 4, (300 * (number % 2), "persistent")))
    ],
)
def test_programs(name: str, begins: int | None, late: int, mode: str, tmp_path: Path) -> None:
    """Whole, and captured from mid-job on: at one time, apart, from within an operation, one node later."""
    scenario = program(name, 3, late, mode)
    captures = write_case(scenario, tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    most = len(truth["collectives"])
    if begins is not None:
        kind, spans = windows(begins, truth, scenario.cluster.nodes)
        assert kind == KINDS[begins]
        cut(tmp_path, captures, epoch_ns(scenario), spans)
        truth = within(truth, spans)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert len(truth["collectives"]) >= 4
    found = [c for c in result.collectives if c.complete]
    for true in truth["collectives"]:
        enter = [time for time in true["enter_ns"] if time is not None]
        leave = max(time for time in true["leave_ns"] if time is not None)
        inside = [c for c in found if min(enter) <= c.start_ns and c.end_ns <= leave + 200_000]
        assert any(
            true["op"] in (str(c.op), *map(str, c.op_alternatives)) and str(c.algorithm) == true["algorithm"]
            for c in inside
        ), (true["seq"], [(str(c.op), str(c.algorithm), c.bytes) for c in found])
    assert all(str(c.op) != "unknown" for c in found)
    assert len(found) <= most


@pytest.mark.parametrize("seed", range(3))
def test_messages_apart_are_no_operations_of_their_own(seed: int, tmp_path: Path) -> None:
    """Trees of two ranks, a message each way and lane: the finest cuts leave hardly a message to compare."""
    job = (
        f"name: test\nseed: {seed}\n"
        "job: {kind: loop, iterations: 40, compute_us: 20, jitter_us: 0.5, ops: ["
        "{op: all_reduce, bytes: 65536, algorithm: tree, protocol: ll}, "
        "{op: all_reduce, bytes: 65536, algorithm: tree, protocol: ll, gap_us: 20}]}\n"
        "faults: [{kind: gpu_late, rank: 0, us: 50, mode: persistent}]\n"
    )
    more = settings(
        cluster={"nodes": 2, "link_gbps": 25},
        nccl=SOCKETS | {"channels": 2},
        observation={"compress": False, "clocks": {"offset_us": 1e5, "drift_ppm": 10, "jitter_ns": 20}},
    )
    captures = write_case(parse_scenario(job + more, "test.yaml"), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert Counter((str(c.op), str(c.algorithm)) for c in result.collectives) == {("all_reduce", "tree"): 80}
    assert [row.address for row in result.lateness if row.verdict == "late"] == ["10.0.0.1"]


def test_sizes_beyond_the_snap_length_are_inferred() -> None:
    """Real NCCL: sizes that follow data in one segment are told by what stands there elsewhere."""
    files = sorted((TRACES / "nccl-sockets-reduce-scatter-n4").glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    told = Counter((str(c.op), str(c.algorithm), c.bytes, c.protocol) for c in result.collectives)
    assert told == {("reduce_scatter", "ring", 2 << 20, "simple"): 40}
    late = [row.endpoint for row in result.lateness if row.verdict == "late"]
    assert [str(end.address) for end in result.endpoints if end.id in late] == ["10.88.0.4"]


TREE = "op: all_reduce, bytes: 65536, algorithm: tree, protocol: ll"


@pytest.mark.parametrize(
    ("ops", "compute_us", "late_us", "told"),
    [
        # The root of a tree of two hands on as soon as it has got something, as in an all_gather nobody need.
        ([TREE, f"{TREE}, gap_us: 20"], 20, 200, set()),
        (["op: all_gather, bytes: 65536"], 400, 2000, {"10.0.0.2"}),
    ],
)
def test_who_answers_at_once_is_not_late(
    ops: list[str], compute_us: int, late_us: int, told: set[str], tmp_path: Path
) -> None:
    """Of two ranks the second comes late to each operation, and the first sends what it needs after that."""
    program = ", ".join(f"{{{op}}}" for op in ops)
    job = f"""
name: test
job: {{kind: loop, iterations: 40, compute_us: {compute_us}, jitter_us: 0.5, ops: [{program}]}}
faults: [{{kind: gpu_late, rank: 1, us: {late_us}}}]
"""
    cluster = {"nodes": 2, "link_gbps": 25, "latency_us": 5}
    scenario = parse_scenario(job + settings(cluster=cluster, nccl=SOCKETS), "test.yaml")
    captures = write_case(scenario, tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    address = {each.id: each.address for each in result.endpoints}
    late = {address[row.endpoint] for row in result.lateness if row.verdict in ("late", "intermittent")}
    assert told <= late <= {"10.0.0.2"}


@pytest.mark.parametrize(
    ("nodes", "rank", "us", "size", "forward_us"), [(4, 3, 1000, 105_472, 125), (3, 0, 200, 367_200, 37.5)]
)
def test_the_wait_for_a_late_rank_parts_no_operations(
    nodes: int, rank: int, us: int, size: int, forward_us: float, tmp_path: Path
) -> None:
    """Buckets follow each other without a pause, so the longest pause lies behind what ranks send before
    they wait for the late one."""
    job = {
        "kind": "training", "steps": 20, "layers": 4, "buckets": 2, "bucket_bytes": size, "overlap": True,
        "forward_us": forward_us, "optimizer_us": forward_us, "jitter_us": 5,
    }  # fmt: skip
    late = {"kind": "gpu_late", "rank": rank, "us": us, "from_iteration": 7}
    cluster = {"nodes": nodes, "link_gbps": 25.0 if nodes == 4 else 100.0}
    values = {
        "seed": 81038,
        "cluster": cluster,
        "nccl": SOCKETS | {"channels": 2},
        "job": job,
        "faults": [late],
    }
    scenario = parse_scenario("name: buckets\n" + settings(**values), "buckets.yaml")
    captures = write_case(scenario, tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives)
    assert found == {("all_reduce", "ring", size): 40}
    assert [row.address for row in result.lateness if row.verdict == "late"] == [f"10.0.0.{rank + 1}"]


def test_incidents_that_matter_together_clear_nobody_one_by_one(tmp_path: Path) -> None:
    """A different rank is late by 50 us in two of five collectives: 1.4 % of the time, less than 1 % each."""
    more = settings(
        seed=81016,
        cluster={"nodes": 3, "link_gbps": 25},
        nccl=SOCKETS | {"channels": 4, "protocol": "simple"},
        faults=[{"kind": "gpu_late", "mode": "random", "us": 50, "share": 0.4}],
    )
    ops = [{"op": "all_gather", "bytes": 44664, "algorithm": "pat"}]
    job = {"kind": "loop", "iterations": 18, "compute_us": 1000, "jitter_us": 5, "ops": ops}
    captures = write_case(parse_scenario("name: test\n" + settings(job=job) + more, "test.yaml"), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert "unknown" in {row.verdict for row in result.lateness}
    assert not any(line.startswith("NOBODY WAS LATE") for line in text_lines(result))


def test_trees_of_two_that_follow_each_other_are_cut_where_their_ranks_rest(tmp_path: Path) -> None:
    """A message takes about as long to leave as ranks rest between two operations: what the root sends for
    one and the leaf for the next was read as an all_gather, and the leaf was accused for the root."""
    tree = {"op": "all_reduce", "bytes": 1 << 16, "algorithm": "tree", "protocol": "ll"}
    job = {
        "kind": "loop", "iterations": 40, "compute_us": 20, "jitter_us": 0.5,
        "ops": [tree, tree | {"gap_us": 20}],
    }  # fmt: skip
    values = {
        "cluster": {"nodes": 2, "link_gbps": 25, "latency_us": 5},
        "nccl": SOCKETS | {"channels": 1, "protocol": "simple"},
        "faults": [{"kind": "gpu_late", "rank": 0, "us": 50}],
    }
    captures = write_case(parse_scenario("name: t\n" + settings(job=job, **values), "t.yaml"), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert {(c.op, c.algorithm) for c in result.collectives} == {("all_reduce", "tree")}
    assert len(result.collectives) == 80
    late = {row.address for row in result.lateness if row.verdict in ("late", "intermittent")}
    assert late <= {"10.0.0.1"}


@pytest.mark.long
def test_ranks_that_nobody_saw_take_clear_pauses(tmp_path: Path) -> None:
    """On a slow link ranks rest within operations as between them: 28 steps were three rings of 52 ranks."""
    drawn = draw(82005)
    assert isinstance(drawn.job, Loop)
    captures = write_case(replace(drawn, job=replace(drawn.job, iterations=28)), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert {(c.op, c.bytes) for c in result.collectives} <= {("all_reduce", 1 << 16)}
