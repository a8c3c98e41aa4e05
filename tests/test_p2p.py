"""NCCL's sends and receives, from captures of scripted jobs: transfers, parts, calls of all with all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Scenario, parse_scenario


def analysed(scenario: Scenario, folder: Path) -> Analysis:
    captures = write_case(scenario, str(folder))
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


def told(result: Analysis) -> Counter[tuple[str, int | None]]:
    return Counter((str(c.op), c.bytes) for c in result.collectives)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (1, {}),
        (100_000, {}),  # 32 KiB a chunk
        (1 << 20, {"nccl": {"channels": 4}}),  # four parts side by side
        (9_000_001, {"nccl": {"channels": 4}}),
        (3 << 20, {"nccl": {"channels": 1}}),  # chunks all alike
        (3 << 20, {"faults": [{"kind": "slow_receiver", "rank": 0, "us": 50}]}),
        # Eight chunks lie at the receiver before it comes: its ninth entry waits for none of the next part.
        (3 << 20, {"faults": [{"kind": "gpu_late", "rank": 0, "us": 3000}]}),
        (1_100_000, {"nccl": {"channels": 1}, "faults": [{"kind": "gpu_late", "rank": 0, "us": 3000}]}),
        (700_000, {"nccl": {"channels": 2, "qps_per_connection": 2}}),
    ],
)
def test_transfers(size: int, more: dict[str, object], tmp_path: Path) -> None:
    scenario = loop(f"op: send_recv, root: 2, peer: 0, bytes: {size}", settings(**more), iterations=9)
    result = analysed(scenario, tmp_path)
    assert told(result) == {("send_recv", size): 9}
    two, nought = (next(e.id for e in result.endpoints if e.address == a) for a in ("10.0.0.3", "10.0.0.1"))
    assert {tuple(r.endpoint for r in c.ranks) for c in result.collectives} == {(two, nought)}


@pytest.mark.parametrize("nodes", [2, 3, 6])
@pytest.mark.parametrize("fault", [None, "gpu_late", "slow_host"])
def test_all_with_all(nodes: int, fault: str | None, tmp_path: Path) -> None:
    """Also of two ranks of which one is always later than the other's data: it had consumed none of it."""
    faults = [{"kind": fault, "rank": 1, "us": 700}] if fault else []
    size = 24_000 * nodes
    scenario = loop(
        f"op: all_to_all, bytes: {size}", settings(cluster={"nodes": nodes}, faults=faults), iterations=12
    )
    assert told(analysed(scenario, tmp_path)) == {("all_to_all", size): 12}


@pytest.mark.parametrize("seed", [1, 665])
def test_calls_of_one_message_each_among_many_on_a_busy_host(seed: int, tmp_path: Path) -> None:
    """No entry shows where a transfer ends; all of them were taken for one."""
    cluster = {"nodes": 8, "link_gbps": 1, "latency_us": 30, "mtu": 1024}
    more = settings(seed=seed, cluster=cluster, machine={"profile": "host"})
    job = "{kind: loop, iterations: 12, compute_us: 20000, ops: [{op: all_to_all, bytes: 262144}]}"
    assert told(analysed(parse_scenario(f"name: x\njob: {job}\n{more}", "x"), tmp_path)) == {
        ("all_to_all", 262_144): 12
    }


def test_what_other_gpus_may_have_handed_over_is_no_pipeline(tmp_path: Path) -> None:
    """With PXN each adapter sends for all GPUs of its node, to the receiver on its rail.

    Where each GPU's sends have connections of their own nothing else tells whose they are.
    """
    size = 1 << 20
    more = settings(
        cluster={"nodes": 2, "gpus_per_node": 4}, nccl={"pxn": True, "shared_comms": False, "channels": 2}
    )
    result = analysed(loop(f"op: all_to_all, bytes: {size}", more, iterations=12), tmp_path)
    assert {c.op for c in result.collectives} == {"send_recv"}
    assert any("PXN" in limit for limit in result.limits)
    assert not result.pipelines
    assert not any(rank.bound == "exact" for c in result.collectives for rank in c.ranks)


def test_two_ranks_that_are_late_in_turn_still_make_one_call(tmp_path: Path) -> None:
    """A late one frees its slots one by one, and its parts look like several."""
    scenario = loop(
        "op: all_to_all, bytes: 3687416",
        settings(
            seed=163,
            cluster={"nodes": 2, "link_gbps": 400},
            nccl={"channels": 2},
            faults=[{"kind": "gpu_late", "mode": "rotating", "us": 200}],
        ),
        iterations=20,
    )
    assert told(analysed(scenario, tmp_path)) == {("all_to_all", 3687416): 20}


@pytest.mark.parametrize("batches", [1, 4])
def test_two_stages_answer_each_other(batches: int, tmp_path: Path) -> None:
    """What comes back is as large and as often, and yet no call of all with all."""
    scenario = parse_scenario(
        f"""
cluster: {{nodes: 2}}
job: {{kind: training, pp: 2, steps: 10, microbatches: {batches}, layers: 1, pp_bytes: 400000}}
""",
        "test.yaml",
    )
    result = analysed(scenario, tmp_path)
    assert told(result) == {("send_recv", 400_000): 20 * batches}
    assert {g.kind for g in result.groups} == {"pp"}


def test_experts_and_stages(tmp_path: Path) -> None:
    """Tensor, expert and data parallel groups of the same ranks, and transfers between their stages."""
    scenario = parse_scenario(
        """
cluster: {nodes: 8}
job: {kind: training, tp: 2, pp: 2, steps: 5, microbatches: 2, layers: 2, buckets: 1, bucket_bytes: 600000,
      tp_bytes: 300000, ep_bytes: 200000, pp_bytes: 500000}
""",
        "test.yaml",
    )
    result = analysed(scenario, tmp_path)
    assert told(result) == {
        ("send_recv", 500_000): 5 * 2 * 2 * 4,
        ("all_to_all", 200_000): 5 * 2 * 2 * 2 * 4 * 2,
        ("all_reduce", 300_000): 5 * 2 * 2 * 2 * 4,
        ("all_reduce", 600_000): 5 * 4,
    }


def test_channels_that_lost_packets_hold_up_are_one_transfer(tmp_path: Path) -> None:
    """One channel waits 64 ms for the ACK that was lost, the others go on with the next operation or two:
    its parts do not overlap with theirs, and were told as transfers of their own."""
    keys = settings(
        cluster={"nodes": 4, "link_gbps": 400},
        nccl={"channels": 4, "qps_per_connection": 8, "timeout": 14},
        faults=[{"kind": "loss", "src": 1, "dst": 2, "share": 0.005}],
    )
    result = analysed(loop("op: all_to_all, bytes: 5871376", keys, iterations=24), tmp_path)
    assert told(result) == {("all_to_all", 5_871_376): 24}
    assert not {"late", "intermittent"} & {each.verdict for each in result.lateness}


@pytest.mark.parametrize("part", [64 << 10, 128 << 10])
def test_few_chunks_for_each_of_many_peers(part: int, tmp_path: Path) -> None:
    """The second chunk to each leaves after the first of all others have come: no ring of two does that."""
    more = settings(cluster={"nodes": 8}, faults=[{"kind": "gpu_late", "rank": 1, "us": 300}])
    scenario = loop(f"op: all_to_all, bytes: {8 * part}", more, iterations=10)
    result = analysed(scenario, tmp_path)
    assert told(result) == {("all_to_all", 8 * part): 10}
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [1]


SHAPES = {
    "m16-slowrecv-a2a-n4": (8, {"all_to_all"}),
    "slow-receiver-sendrecv-n4": (27, {"send_recv"}),
    "m02-fwd-pipe-2m-n4-clean": (72, {"send_recv"}),
    "pp-infer-registered-n6-random": (140, {"send_recv"}),
}
"""Another simulator's: how many operations, and which."""


@pytest.mark.parametrize("case", SHAPES)
def test_another_simulators_sends_and_receives(case: str, shared: Path) -> None:
    """Slow receivers, a balanced pipeline and registered buffers: all is found, and no innocent accused."""
    folder = shared / "captures" / "nccl" / case
    result = dpuflow.analyze(
        [dpuflow.Vantage(file.name, (str(file),)) for file in sorted(folder.glob("node*.pcap.gz"))]
    )
    count, ops = SHAPES[case]
    assert len(result.collectives) == count
    assert {c.op for c in result.collectives} == ops
    assert not [row.endpoint for row in result.lateness if row.verdict == "late"]
    if case.endswith("random"):
        assert sum(row.verdict == "intermittent" for row in result.lateness) > 1
