"""Ranks of one node that are late in the same operations: one incident, named by the node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripted_results import MS, collective, job

import dpuflow
from dpuflow.findings.nodes import fold_nodes
from dpuflow.quantities import rank_seconds
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis, Endpoint, Lateness
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

LATE_IN = ((1, 4, 7), (1, 4, 7), (2, 5, 8), (0, 3, 6))
"""Of each endpoint (two of node a, two of node b) the steps in which it is late by 5 ms."""


def two_nodes(
    late_in: tuple[tuple[int, ...], ...] = LATE_IN, *, ms: tuple[float, ...] = (5, 5, 5, 5)
) -> Analysis:
    """Two rails of two nodes: groups (0, 2) and (1, 3); who is late now and then as ``late_in`` says."""
    result = job(iterations=1)
    endpoints = [
        Endpoint(i, f"10.{i % 2}.0.{1 + i // 2}", [], None, i, None, node=2 * (i // 2), host="ab"[i // 2])
        for i in range(4)
    ]
    collectives = []
    for step in range(9):
        for rail in range(2):
            row = collective(len(collectives), [0.0, 0.0], start_ms=40 * step)
            for entry, end in zip(row.ranks, (rail, 2 + rail), strict=True):
                entry.endpoint = end
                if step in late_in[end]:
                    entry.lateness_ns, entry.cause = round(ms[end] * MS), "compute"
            collectives.append(row)
    lateness = [
        Lateness(
            end, 9, len(steps) / 9, 0.3, 0, 5 * MS, 15 * MS, "intermittent", "compute", "transient",
            detectable_ns=MS, late_ns=round(ms[end] * MS), late_bound="exact",
        )
        for end, steps in enumerate(late_in)
    ]  # fmt: skip
    return replace(result, endpoints=endpoints, collectives=collectives, lateness=lateness, findings=[])


def units(result: Analysis) -> list[list[int]]:
    return [row.together for row in fold_nodes(result).lateness]


def test_the_same_steps() -> None:
    assert units(two_nodes()) == [[0, 1], [0, 1], [], []]


def test_gpus_of_which_only_the_node_is_known_are_one_unit_already() -> None:
    """Trees show a node's GPUs as one: none of its endpoints took part in a collective by itself."""
    result = two_nodes()
    for row in result.collectives:
        row.ranks = [replace(entry, endpoint=None, node=entry.endpoint % 2) for entry in row.ranks]
    lateness = [replace(row, node=row.endpoint) for row in result.lateness]
    assert units(replace(result, lateness=lateness)) == [[], [], [], []]


def test_other_amounts_are_others() -> None:
    assert units(two_nodes(ms=(5, 9, 5, 5))) == [[], [], [], []]


def test_other_nodes_are_others() -> None:
    result = two_nodes()
    for endpoint in result.endpoints:
        endpoint.node = None
    assert units(result) == [[], [], [], []]


def test_most_steps_are_enough() -> None:
    assert units(two_nodes(((1, 4, 7), (1, 4), (2,), (0,))))[:2] == [[0, 1], [0, 1]]
    assert units(two_nodes(((1, 4, 7), (1, 5, 8), (2,), (0,))))[:2] == [[], []]


SLOW_GPU = """\
seed: 5
cluster: {nodes: 3, gpus_per_node: 2}
job: {kind: training, steps: 10, tp: 2, overlap: false, bucket_bytes: 262144, tp_bytes: 65536, layers: 2}
faults: [{kind: gpu_late, rank: 2, us: 1500}]
"""


def test_a_slow_gpu_keeps_its_node(tmp_path: Path) -> None:
    """Tensor parallel in the node: its other GPU is as late, and the node is told once."""
    captures = write_case(parse_scenario(SLOW_GPU, "slow-gpu"), str(tmp_path))
    result = dpuflow.analyze(
        [dpuflow.Vantage(c.name.split(".")[0], (str(tmp_path / c.name),)) for c in captures]
    )
    ends = [row.endpoint for row in result.lateness if row.verdict == "late"]
    assert sorted(result.endpoints[end].rank or 0 for end in ends) == [2, 3]
    assert all(row.together == sorted(ends) for row in result.lateness if row.endpoint in ends)
    assert [f.condition for f in result.findings if f.severity == "critical"] == ["node_skew"]
    said = "\n".join(text_lines(result))
    assert said.startswith("LATE: node1 (ranks 2 and 3).\n  late together in ")
    assert "waiting for node1 (ranks 2 and 3)" in " ".join(said.split())


@pytest.mark.parametrize(("kind", "told"), [("gpu_late", "straggler"), ("slow_host", "host_cpu")])
def test_what_a_node_costs_whose_ranks_are_late_together(tmp_path: Path, kind: str, told: str) -> None:
    """Each of them comes no later than its mate: one by one they cost nothing."""
    gpus, of = (4, (4, 5, 6, 7)) if told == "straggler" else (2, (2, 3))
    job = "{kind: loop, iterations: 16, ops: [{op: all_reduce, bytes: 4194304}]}"
    faults = ", ".join(f"{{kind: {kind}, rank: {rank}, us: 500}}" for rank in of)
    cluster = f"{{nodes: 3, gpus_per_node: {gpus}}}"
    scenario = f"name: x\nseed: 11\ncluster: {cluster}\njob: {job}\nfaults: [{faults}]\n"
    captures = write_case(parse_scenario(scenario, "x"), str(tmp_path))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    (found,) = result.findings
    assert (found.condition, found.severity) == (told, "critical")
    assert 0.1 < (found.cost_share or 0) < 0.25  # 0.5 ms of 2.9
    assert (found.cost_ns or 0) > 16_000_000
    assert rank_seconds(found.cost_ns or 0) in "".join(text_lines(result))


def test_one_finding_a_node_where_each_rail_has_a_clock_of_its_own(shared: Path) -> None:
    folder = shared / "captures/nccl/hybrid-tp4dp4-rails-late"
    result = dpuflow.analyze(sorted(folder.glob("*.pcap.gz")))
    (found,) = (f for f in result.findings if f.condition == "straggler")
    assert "node1 (ranks 4 to 7) 6 of 20, node0 (ranks 0 to 3) 4 of 20" in found.summary


def test_stragglers_of_a_node_are_one_finding() -> None:
    result = two_nodes()
    one = replace(job(late_ms=5).findings[0], severity="warning", cost_ns=30 * MS, cost_share=0.03)
    result.findings = [
        replace(one, endpoints=[0]),
        replace(one, endpoints=[1], severity="critical", cost_ns=40 * MS, cost_share=0.04, confidence=0.9),
        replace(one, endpoints=[2]),
    ]
    first, second = fold_nodes(result).findings
    assert (first.endpoints, first.severity, first.cost_ns) == ([0, 1], "critical", 70 * MS)
    assert (first.cost_share, first.confidence, second.endpoints) == (0.04, 0.9, [2])
    assert first.summary.startswith("a (ranks 0 and 1) entered 3 of 9 collectives of each rank late together")
