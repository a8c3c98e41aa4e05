"""Stages of pipelines side by side: the one that computes longer is named, not those that wait with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import dpuflow
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

SLOW = pytest.param("socket", marks=pytest.mark.long)
JOB = """
cluster: {{nodes: {nodes}, link_gbps: {gbps}}}
nccl: {{transport: {transport}}}
job: {{kind: training, pp: {stages}, microbatches: 4, layers: 2, steps: 12, tp_bytes: 0, buckets: 1,
      bucket_bytes: 300000, pp_bytes: {size}}}
faults: [{fault}]
"""


def analysed(folder: Path, **values: object) -> tuple[Analysis, list[str]]:
    values = {"nodes": 6, "gbps": 100, "stages": 2, "size": 300_000, "transport": "ib", **values}
    captures = write_case(parse_scenario(JOB.format(**values), "test.yaml"), str(folder))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    address = {e.id: e.address for e in result.endpoints}
    late = [address[row.endpoint] for row in result.lateness if row.verdict in ("late", "intermittent")]
    return result, late


@pytest.mark.parametrize("transport", ["ib", "socket"])
@pytest.mark.parametrize("rank", [1, 4])
def test_the_stage_that_computes_longer(rank: int, transport: str, tmp_path: Path) -> None:
    """Its neighbour in the pipeline sends later, too, and comes later to its gradients: it had waited."""
    fault = f"{{kind: gpu_late, rank: {rank}, us: 2500, from_iteration: 4}}"
    result, late = analysed(tmp_path, fault=fault, transport=transport)
    assert late == [f"10.0.0.{rank + 1}"]
    row = next(row for row in result.lateness if row.verdict == "late")
    assert (row.cause, row.steadiness) == ("compute", "persistent")
    steps = sorted(c.start_ns for c in result.collectives if c.op == "all_reduce")
    assert row.since_ns is not None
    assert steps[4] < row.since_ns < steps[-4]


@pytest.mark.parametrize("transport", ["ib", SLOW])
def test_three_stages(transport: str, tmp_path: Path) -> None:
    fault = "{kind: gpu_late, rank: 3, us: 2500}"
    _, late = analysed(tmp_path, stages=3, fault=fault, transport=transport)
    assert late == ["10.0.0.4"]


def test_a_slow_link_is_no_stage_that_computes_longer(tmp_path: Path) -> None:
    result, _ = analysed(tmp_path, size=3_000_000, fault="{kind: slow_link, node: 1, gbps: 20}")
    blamed = [row for row in result.lateness if row.cause in ("compute", "host") and row.verdict == "late"]
    assert not blamed


@pytest.mark.parametrize("transport", ["ib", SLOW])
def test_nobody(transport: str, tmp_path: Path) -> None:
    _, late = analysed(tmp_path, fault="", transport=transport)
    assert not late


@pytest.mark.parametrize("transport", ["ib", SLOW])
def test_what_the_groups_are_for(transport: str, tmp_path: Path) -> None:
    result, _ = analysed(tmp_path, fault="", transport=transport)
    assert {len(group.endpoints): group.kind for group in result.groups} == {2: "pp", 3: "dp"}


def test_ranks_of_a_stage_that_reduce_between_its_transfers_are_no_replicas(tmp_path: Path) -> None:
    job = JOB.replace("tp_bytes: 0", "tp: 2, tp_bytes: 100000")
    captures = write_case(
        parse_scenario(
            job.format(nodes=4, gbps=100, stages=2, size=300_000, transport="ib", fault=""), "test.yaml"
        ),
        str(tmp_path),
    )
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    reducing = {c.group for c in result.collectives if c.op == "all_reduce"}
    assert reducing
    assert "dp" not in {result.groups[number].kind for number in reducing}


def test_who_is_late_beside_its_replicas_is_not_said_to_work_longer_than_other_stages(tmp_path: Path) -> None:
    result, late = analysed(tmp_path, fault="{kind: gpu_late, rank: 4, us: 2500}")
    assert late == ["10.0.0.5"]
    told = "\n".join(text_lines(result))
    assert "takes longer per microbatch: ," not in told
    assert "late in" in told
