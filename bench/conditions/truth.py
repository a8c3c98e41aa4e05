"""What a condition cost a job: the same job, with the same seed, without it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.conditions.draw import CLIENT, STOPS, draw
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

NEGLIGIBLE = 0.01
"""Of the job's time, or its requests': what costs less is nothing to tell of."""

if TYPE_CHECKING:
    from bench.conditions.draw import Drawn


def play(scenario: dict[str, Any], folder: str) -> None:
    """Write its captures and truth."""
    write_case(parse_scenario(yaml.safe_dump(scenario), scenario["name"]), folder)


def costs(number: int, drawn: Drawn, folder: str) -> dict[str, float]:
    """By condition: of the job's time, or of the time that requests were open, what it took.

    Each is taken away alone. What is played in ``folder`` is the job with all of them.
    """
    found = {}
    with_all = lasted(folder)
    for name in drawn.conditions:
        if name in STOPS:  # all of the time since then
            found[name] = 1.0
            continue
        with tempfile.TemporaryDirectory() as other:
            play(draw(number, without=name).scenario, other)
            without = lasted(other)
        which = 1 if name in CLIENT and name != "ingress_starvation" else 0
        found[name] = max(0.0, 1 - without[which] / with_all[which])
    return found


def waited(folder: str) -> dict[str, list[int]]:
    """Conditions that a job has by its nature: decoding that waits for caches a hundredth of the time."""
    truth = json.loads((Path(folder) / "truth.json").read_text())
    waits = [(each["to"], each["wait_before_first_token_ns"] or 0) for each in truth["transfers"]]
    ends = sorted({end for end, _ in waits})
    span, _ = lasted(folder)
    if sum(ns for _, ns in waits) < NEGLIGIBLE * span * max(len(ends), 1):
        return {}
    return {"kv_transfer_bottleneck": ends}


def lasted(folder: str) -> tuple[float, float]:
    """How long the job took, and how long one of its requests was open (mean), ns."""
    truth = json.loads((Path(folder) / "truth.json").read_text())
    times = [
        (min(filter(None, each["enter_ns"])), max(filter(None, each["leave_ns"])))
        for each in truth["collectives"]
        if any(each["enter_ns"]) and any(each["leave_ns"])
    ]
    times += [(each["start_ns"], each["end_ns"]) for each in truth["transfers"]]
    job = max(end for _, end in times) - min(begin for begin, _ in times) if times else 0
    requests = [each["last_ns"] - each["sent_ns"] for each in truth.get("requests", [])]
    return float(job), sum(requests) / max(len(requests), 1)
