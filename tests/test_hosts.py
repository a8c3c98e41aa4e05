"""What nodes' own buses and hosts do, played and told: each is a shadow, and says what else it may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dpuflow
from dpuflow.conditions import TABLE
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


def played(folder: Path, scenario: dict[str, Any], *faults: dict[str, Any]) -> Analysis:
    write_case(parse_scenario(json.dumps(scenario | {"faults": list(faults)}), "test"), str(folder))
    return dpuflow.analyze([str(path) for path in sorted(folder.glob("*.pcap.gz"))])


def told(result: Analysis) -> list[str]:
    return [row.condition for row in result.findings if row.severity != "info"]


def state(result: Analysis, condition: str) -> str:
    return next(row.state for row in result.judged if row.condition == condition)


LOOP = {
    "seed": 3,
    "cluster": {"nodes": 2},
    "job": {"kind": "loop", "iterations": 20, "ops": [{"op": "all_reduce", "bytes": 65536}]},
}
SERVICE = {
    "seed": 3,
    "cluster": {"nodes": 2},
    "job": {"kind": "service", "layers": 2, "layer_us": 200, "prefill_us": 800, "bytes": 4096},
    "clients": {"hosts": 3, "sessions": 1, "requests": 8, "tokens": 10, "think_us": 60_000},
}
NODES = {
    "seed": 3,
    "cluster": {"nodes": 3, "gpus_per_node": 4, "nics_per_node": 2},
    "job": {"kind": "loop", "iterations": 12, "ops": [{"op": "all_gather", "bytes": 4 << 20}]},
}


@pytest.mark.parametrize("factor", [1, 3])
def test_ranks_that_pause_longer_all_together(tmp_path: Path, factor: int) -> None:
    result = played(tmp_path, LOOP, {"kind": "slow_gpu", "factor": factor, "from_iteration": 10})
    assert told(result) == (["launch_latency"] if factor > 1 else [])
    assert state(result, "launch_latency") == ("found" if factor > 1 else "not_found")
    for finding in result.findings:
        assert finding.cost_share == pytest.approx(0.46, rel=0.2)  # 4 of 6 ms, of half of the steps
        assert any("work that grew" in other for other in finding.alternatives)


@pytest.mark.parametrize("us", [0, 20_000])
def test_prompts_that_lie_there_while_ranks_stand_still(tmp_path: Path, us: int) -> None:
    result = played(tmp_path, SERVICE, {"kind": "slow_input", "us": us, "from_us": 250_000})
    assert ("input_starvation" in told(result)) == (us > 0)
    assert state(result, "launch_latency") == "not_judged"  # a service also pauses for want of prompts


@pytest.mark.parametrize("gbyte_s", [400.0, 1.0])
def test_a_node_that_passes_on_slowly(tmp_path: Path, gbyte_s: float) -> None:
    result = played(tmp_path, NODES, {"kind": "nvlink", "node": 1, "gbyte_s": gbyte_s})
    slow = [each.endpoints for each in result.findings if each.condition == "p2p_throttling"]
    assert len(slow) == (gbyte_s < 100)
    assert all(result.endpoints[end].address == "10.0.0.2" for ends in slow for end in ends)


@pytest.mark.parametrize("gbyte_s", [1.0, 3.0])
def test_a_node_that_a_steps_path_passes_often_is_not_slow(tmp_path: Path, gbyte_s: float) -> None:
    """Node 0 is; the path goes through node 1 more often, which was named where node 0 is a little slow."""
    nodes = {
        "cluster": {"nodes": 3, "gpus_per_node": 4, "nics_per_node": 1},
        "job": {"kind": "loop", "iterations": 12, "ops": [{"op": "all_reduce", "bytes": 4 << 20}]},
    }
    result = played(tmp_path, nodes, {"kind": "nvlink", "node": 0, "gbyte_s": gbyte_s})
    (found,) = (each for each in result.findings if each.condition == "p2p_throttling")
    assert {result.endpoints[end].address for end in found.endpoints} == {"10.0.0.1"}
    # 4.86 ms for 0.67 an operation, and 1.59; steps are 2 ms longer.
    assert found.cost_share == pytest.approx({1.0: 0.61, 3.0: 0.26}[gbyte_s], rel=0.15)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "gpu_late", "rank": 6, "us": 500},
        {"kind": "slow_gpu", "rank": 6, "factor": 1.5},
        {"kind": "slow_link", "node": 1, "gbps": 10},
    ],
)
def test_a_late_gpu_or_a_slow_link_is_no_node_that_passes_on_slowly(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    result = played(tmp_path, NODES, fault)
    assert state(result, "p2p_throttling") == "not_found"


def test_a_shadow_told_as_another_condition_is_not_there_without_that(tmp_path: Path) -> None:
    for row in TABLE.values():
        assert not row.told_as or row.why
    result = played(tmp_path, SERVICE)
    if state(result, "egress_backlog") == "not_found":
        assert state(result, "output_bottleneck") == "not_found"


def test_an_answer_behind_other_data_and_jitter_within_the_clocks_error_are_nobodys_fault(
    tmp_path: Path,
) -> None:
    """READs of KV caches behind what the node sends; holds of microseconds on clocks no better than that."""
    job = {"kind": "prefill_decode", "mode": "read"}
    scenario = {"seed": 1, "cluster": {"nodes": 8}, "job": job}
    result = played(tmp_path, scenario, {"kind": "gpu_late", "rank": 1, "us": 300})
    assert set(told(result)) == {"straggler", "kv_transfer_bottleneck"}
    assert [row.address for row in result.lateness if row.verdict == "late"] == ["10.0.0.2"]


@pytest.mark.parametrize("us", [0, 400])
def test_a_node_that_is_slow_to_answer_reads(tmp_path: Path, us: int) -> None:
    job = {"kind": "prefill_decode", "mode": "read", "requests": 16}
    scenario = {"seed": 1, "cluster": {"nodes": 4}, "job": job}
    result = played(tmp_path, scenario, {"kind": "slow_pcie", "node": 1, "us": us})
    assert state(result, "pcie_saturation") == ("found" if us else "not_found")
    for finding in (row for row in result.findings if row.condition == "pcie_saturation"):
        assert [result.endpoints[end].address for end in finding.endpoints] == ["10.0.0.2"]
        assert any("memory" in other for other in finding.alternatives)


def test_ranks_that_prefill_are_no_replica_of_those_that_decode(tmp_path: Path) -> None:
    """They are done with the last prompt long before its answer is."""
    job = {"kind": "prefill_decode", "requests": 3, "tokens": 30, "prefill_us": 1000, "kv_bytes": 1 << 20}
    result = played(tmp_path, {"seed": 3, "cluster": {"nodes": 4}, "job": job})
    assert state(result, "early_stop_skew") == "not_found"


def test_a_replica_that_stops_is_told_where_clocks_are_one(tmp_path: Path) -> None:
    """Replicas share no packets: where nothing else says that their clocks are one, nobody can tell."""
    job = {"kind": "decode", "tp": 2, "tokens": 30, "layers": 4, "bytes": 16384}
    scenario = {"seed": 3, "cluster": {"nodes": 4}, "job": job}
    unknown = played(tmp_path, scenario, {"kind": "early_stop", "rank": 2, "iteration": 12})
    (row,) = (row for row in unknown.judged if row.condition == "early_stop_skew")
    assert row.state == "not_judged"
    assert "--clock trust" in (row.reason or "")
    files = [str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))]
    (finding,) = (row for row in dpuflow.analyze(files, clock="trust").findings if row.severity != "info")
    assert finding.condition == "early_stop_skew"
    assert {finding.endpoints[0], finding.endpoints[1]} == {2, 3}
    assert finding.cost_share == pytest.approx(18 / 30, rel=0.02)  # was 1.5 times its time
