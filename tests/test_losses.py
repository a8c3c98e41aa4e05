"""Losses that hold a job up for seconds: what they cost is told, and nobody is late by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dpuflow
from dpuflow.results import Finding
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


def found(folder: Path, job: dict[str, Any], share: float, seed: int) -> dict[str, Finding]:
    """Findings of a job of which rank 1 loses a share of what it sends, acknowledgments among it."""
    faults = [{"kind": "loss", "share": share, "src": 1}]
    scenario = {"seed": seed, "cluster": {"nodes": 4}, "job": job, "faults": faults}
    write_case(parse_scenario(json.dumps(scenario), "test"), str(folder))
    result = dpuflow.analyze([str(path) for path in sorted(folder.glob("*.pcap.gz"))])
    return {each.condition: each for each in result.findings}


@pytest.mark.parametrize("seed", [2, 11])
def test_who_waits_for_a_lost_acknowledgment_is_not_late(tmp_path: Path, seed: int) -> None:
    """Its next operation's data stands behind what it sends again once a timeout is over."""
    job = {"kind": "decode", "tokens": 20, "layers": 2, "bytes": 16384}
    told = found(tmp_path, job, 0.03, seed)
    assert "straggler" not in told
    assert told["packet_loss"].severity == "critical"


def test_a_single_loss_that_takes_seconds_is_told_by_its_cost(tmp_path: Path) -> None:
    """One flow lost one packet, whose timeout is longer than all the rest; the others lost more, and little
    time."""
    job = {"kind": "loop", "iterations": 20, "ops": [{"op": "all_gather", "bytes": 65536}]}
    lost = found(tmp_path, job, 0.002, 4)["packet_loss"]
    assert lost.severity == "critical"
    assert lost.cost_share is not None
    assert lost.cost_share > 0.9
