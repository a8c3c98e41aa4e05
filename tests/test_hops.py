"""NCCL over nodes of several GPUs of which only some were captured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.reports.json import json_lines
from dpuflow.scoring.truth import place_case
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Scenario, parse_scenario

SLACK_NS = 20_000


def analysed(scenario: Scenario, folder: Path) -> dpuflow.Analysis:
    captures = write_case(scenario, folder)
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


def wrong_bounds(result: dpuflow.Analysis, folder: Path) -> int:
    """Bounds and exact values of collectives that do not hold; all collectives must be told, in order."""
    analysis = json.loads("\n".join(json_lines(result)))
    truth, meta = (json.loads((folder / f"{name}.json").read_text()) for name in ("truth", "meta"))
    case, wrong = place_case(truth, meta, analysis, "test"), 0
    for true, found in zip(case.collectives, analysis["collectives"], strict=True):
        for row in found["ranks"]:
            if row["lateness_ns"] is not None:
                off = row["lateness_ns"] - true.lateness_ns[row["endpoint"]]
                wrong += row["bound"] != "at_most" and off > SLACK_NS
                wrong += row["bound"] != "at_least" and off < -SLACK_NS
    return wrong


@pytest.mark.parametrize(
    ("nodes", "gpus", "channels", "only"),
    [(2, 4, 4, [1]), (3, 2, 4, [0]), (3, 8, 8, [0, 1]), (4, 2, 2, [1, 3]), (5, 2, 2, [0, 2]), (4, 4, 2, [2])],
)
@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("op: all_reduce, bytes: 1920000", ("all_reduce", 1_920_000)),
        ("op: all_reduce, bytes: 1999984", ("all_reduce", 1_999_984)),  # chunks of several sizes
        ("op: all_reduce, bytes: 61440, protocol: ll", ("all_reduce", 61_440)),
        ("op: all_gather, bytes: 96000", ("all_gather", 96_000)),
        ("op: reduce_scatter, bytes: 1920000", ("reduce_scatter", 1_920_000)),
    ],
)
def test_rings_over_nodes_seen_in_part(
    nodes: int, gpus: int, channels: int, only: list[int], op: str, told: tuple[str, int], tmp_path: Path
) -> None:
    late = only[0] * gpus
    more = settings(
        cluster={"nodes": nodes, "gpus_per_node": gpus},
        nccl={"channels": channels},
        observation={"only": only},
        faults=[{"kind": "gpu_late", "rank": late, "us": 200}],
    )
    result = analysed(loop(op, more, iterations=16), tmp_path)
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        (told[0], "ring", told[1]): 16
    }
    assert wrong_bounds(result, tmp_path) == 0


def test_a_captured_gpu_that_is_late_is_named(tmp_path: Path) -> None:
    """One node of three is captured: what each of its GPUs sends first is its own."""
    more = settings(
        cluster={"nodes": 3, "gpus_per_node": 4},
        nccl={"channels": 4},
        observation={"only": [1]},
        faults=[{"kind": "gpu_late", "rank": 6, "us": 300}],
    )
    result = analysed(loop("op: all_reduce, bytes: 960000", more, iterations=16), tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    guilty = {end.id for end in result.endpoints if end.address == meta["nodes"][6]["ip"]}
    assert {row.endpoint for row in result.lateness if row.verdict == "late"} == guilty


@pytest.mark.parametrize("late", [0, 3])
def test_trees_over_nodes_seen_in_part(late: int, tmp_path: Path) -> None:
    """The trees of all rails are one operation's, and a node's GPUs wait for each other: bounds only."""
    more = settings(
        cluster={"nodes": 3, "gpus_per_node": 2},
        nccl={"channels": 2},
        observation={"only": [0, 1]},
        faults=[{"kind": "gpu_late", "rank": late, "us": 200}],
    )
    result = analysed(loop("op: all_reduce, bytes: 400000, algorithm: tree", more, iterations=8), tmp_path)
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        ("all_reduce", "tree", 400_000): 8
    }
    assert "exact" not in {rank.bound for c in result.collectives for rank in c.ranks}
    assert wrong_bounds(result, tmp_path) == 0


def test_what_is_not_understood_is_not_told_in_parts(tmp_path: Path) -> None:
    """Of two connections too many places look like beginnings. What the others carry is no communicator's of
    its own: four operations were told of each that there was."""
    more = settings(
        cluster={"nodes": 3, "gpus_per_node": 8},
        nccl={"channels": 8},
        observation={"only": [0, 1]},
        faults=[{"kind": "gpu_late", "rank": 0, "us": 200}],
    )
    result = analysed(loop("op: all_reduce, bytes: 1920000", more, iterations=8), tmp_path)
    assert {(str(c.op), c.bytes) for c in result.collectives} <= {("all_reduce", 1_920_000)}
    assert len(result.collectives) <= 8


RAILS = """
name: test
cluster: {nodes: 4, gpus_per_node: 2}
nccl: {channels: 2}
job: {kind: training, tp: 2, steps: 10, layers: 1, buckets: 1, bucket_bytes: 1200000, forward_us: 200,
      optimizer_us: 100}
faults: [{kind: gpu_late, rank: 2, us: 400}]
observation: {only: [1, 2]}
"""


def test_a_communicator_for_each_rail(tmp_path: Path) -> None:
    """Data parallel groups go along the rails: rings of four ranks each, nothing over NVLink."""
    scenario = parse_scenario(RAILS, "test.yaml")
    result = analysed(scenario, tmp_path)
    found = Counter((str(c.op), c.bytes, len(c.ranks)) for c in result.collectives)
    assert found == {("all_reduce", 1_200_000, 4): 20}
