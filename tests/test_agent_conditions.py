"""An agent beside a job to which one thing after another happens: each is told once, from when it began, and
closed; nothing else is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from feeding import pieces

from dpuflow.agent.config import Windows as Settings
from dpuflow.agent.stream import Stream
from dpuflow.agent.tracker import Tracker
from dpuflow.agent.windows import Windows
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

S = 1_000_000_000
US = 1_000_000  # in a second
FAULTS = [
    {
        "kind": "gpu_late", "mode": "transient", "rank": 1, "us": 60_000, "from_iteration": 50,
        "iterations": 60,
    },
    {"kind": "loss", "share": 0.03, "src": 1, "from_us": 30 * US, "until_us": 38 * US},
    {"kind": "slow_link", "node": 1, "gbps": 0.1, "where": "up", "from_us": 50 * US, "until_us": 58 * US},
    {
        "kind": "cross_traffic", "node": 1, "gbps": 99, "at_us": 70 * US, "us": 50_000, "every_us": 60_000,
        "times": 133,
    },
    {"kind": "hang", "rank": 0, "iteration": 750, "us": 20 * US},
]  # fmt: skip
SCENARIO = {
    "seed": 5,
    "cluster": {"nodes": 2, "ecn_kib": 64},
    "nccl": {"timeout": 14},
    "job": {
        "kind": "loop", "iterations": 760, "compute_us": 100_000,
        "ops": [{"op": "all_reduce", "bytes": 1 << 18}],
    },
    "faults": FAULTS,
    "observation": {"only": [1]},
}  # fmt: skip
SETTINGS = Settings(span=5.0, longest=10.0)
STEP_NS = S // 10
TOLD_NS = 10 * S


@pytest.mark.long
def test_each_of_five_conditions_opens_and_closes_once(tmp_path: Path) -> None:
    write_case(parse_scenario(json.dumps(SCENARIO), "test"), str(tmp_path))
    truth = json.loads((tmp_path / "truth.json").read_text())["conditions"]
    stream, windows, tracker = Stream("x"), Windows(SETTINGS), Tracker(1.5, 5.0, 60.0)
    opened: dict[str, tuple[str, int, int]] = {}
    closed: list[str] = []
    for now, form, piece in pieces(tmp_path / "node1.pcap.gz", S):
        stream.feed(form, piece)
        taken = stream.snapshot(now)
        settled = windows.step(taken.tables(), taken.counts(), now)
        stream.forget(settled.before_ns)
        for state in tracker.step(settled.analysis, now):
            opened.setdefault(state.id, (state.condition, state.since_ns, now))
            closed += [] if state.active else [state.condition]
    assert [condition for condition, _, _ in opened.values()] == [row["condition"] for row in truth]
    # Of a job that stands still nothing is held any more after SETTINGS.longest.
    assert closed == [row["condition"] for row in truth]
    for (_, since_ns, told_ns), row in zip(opened.values(), truth, strict=True):
        assert abs(since_ns - row["from_ns"]) < 3 * STEP_NS, row
        assert told_ns - row["from_ns"] < TOLD_NS, row
