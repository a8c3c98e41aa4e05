"""Ranks without a capture of their own: what a peer's late credit or a slow way makes of their entries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.reports.json import json_lines
from dpuflow.scoring.truth import place_case
from dpuflow.synth.case import write_case

if TYPE_CHECKING:
    from pathlib import Path

SLACK_NS = 20_000
"""Beyond what hand-overs and ways differ by: a bound that is off by more is wrong."""


def violated(folder: Path, op: str, iterations: int, **keys: object) -> tuple[int, int, set[str]]:
    """Bounds of a scripted job that do not hold, all bounds and exact values; who is late by its own doing.

    A rank without a capture may be called late for an unknown cause: its node or its link.
    """
    captures = write_case(loop(op, settings(**keys), iterations=iterations), folder)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    analysis = json.loads("\n".join(json_lines(result)))
    truth, meta = (json.loads((folder / f"{name}.json").read_text()) for name in ("truth", "meta"))
    case = place_case(truth, meta, analysis, "test")
    wrong = count = 0
    for true, found in zip(case.collectives, analysis["collectives"], strict=True):
        for row in found["ranks"]:
            if row["lateness_ns"] is None:
                continue
            off = row["lateness_ns"] - true.lateness_ns[row["endpoint"]]
            count += 1
            wrong += off > SLACK_NS if row["bound"] == "at_least" else off < -SLACK_NS
            wrong += row["bound"] == "exact" and off > SLACK_NS
    late = {str(end.address) for end in result.endpoints for row in result.lateness
            if row.endpoint == end.id and row.verdict == "late" and row.cause != "unknown"}  # fmt: skip
    return wrong, count, late


@pytest.mark.parametrize("us", [40, 150])
def test_a_late_credit_blames_nobody_without_a_capture(us: int, tmp_path: Path) -> None:
    """The host of 10.0.0.4 posts its credits late: 10.0.0.3's data comes a way there and back after."""
    wrong, count, late = violated(
        tmp_path,
        "op: all_reduce, bytes: 22520, protocol: ll",
        18,
        cluster={"nodes": 5},
        nccl={"channels": 4},
        faults=[{"kind": "slow_host", "rank": 3, "us": us}],
        observation={"only": [3, 4]},
    )
    assert count
    assert wrong == 0
    assert "10.0.0.3" not in late


@pytest.mark.parametrize("node", [1, 2])
def test_a_slow_way_makes_bounds_of_what_it_brings(node: int, tmp_path: Path) -> None:
    """Of a rank whose link is slow nobody knows when what came late had left."""
    wrong, count, late = violated(
        tmp_path,
        "op: all_reduce, bytes: 65520, protocol: ll",
        60,
        cluster={"nodes": 6},
        nccl={"channels": 2},
        faults=[{"kind": "slow_link", "node": node, "gbps": 5}],
        observation={"only": [other for other in range(6) if other != node]},
    )
    assert count
    assert wrong == 0
    assert not late
