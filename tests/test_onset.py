"""What goes wrong from some time on is told from then, whatever was before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpuflow
from dpuflow.findings.onset import lasting
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario
from dpuflow.verdicts.chance import turn_of

MESSAGES = 400


def times(held: list[int], each_ns: int = 50) -> tuple[int, int]:
    """Messages come every 100 ns; those numbered in ``held`` were held for ``each_ns``."""
    ends = np.arange(1, MESSAGES + 1) * 100
    at = ends[held]
    return lasting(np.stack([at - each_ns, at]), ends, (0, 100 * MESSAGES))


def test_it_lasts_from_the_first_that_is_held_to_the_last() -> None:
    assert times([]) == (0, 100 * MESSAGES)
    assert times(list(range(100, 300, 2))) == (100 * 101 - 50, 100 * 299)


def test_a_single_one_long_before_or_after_is_no_part_of_it() -> None:
    alone, held = [7, 390], list(range(200, 300, 2))
    assert times([alone[0], *held, alone[1]]) == times(held)


def test_what_cost_something_before_belongs_to_it() -> None:
    """Held a third of the time, then most of it."""
    assert times([*range(0, 200, 6), *range(200, 400)], 100)[0] <= 100


@given(st.lists(st.booleans(), max_size=60))
def test_no_turn_is_found_but_where_hits_come_more_often(hits: list[bool]) -> None:
    turn = turn_of(np.array(hits, bool))
    if turn is not None:
        assert hits[turn]
        assert np.mean(hits[:turn]) < np.mean(hits[turn:])


def test_chance_makes_no_turn() -> None:
    random = np.random.default_rng(1)
    drawn = [turn_of(random.random(200) < share) for share in (0.05, 0.2, 0.5) for _ in range(300)]
    assert sum(turn is not None for turn in drawn) <= 9  # one in a hundred, of 900


LOOP = {"kind": "loop", "iterations": 30, "ops": [{"op": "all_reduce", "bytes": 1 << 20}]}
DECODE = {"kind": "decode", "tokens": 40, "layers": 4, "bytes": 32768}


@pytest.mark.parametrize(
    ("condition", "nodes", "job", "fault"),
    [
        ("slow_link", 4, LOOP, {"kind": "slow_link", "node": 2, "gbps": 5, "from_us": 3000}),
        # Most links of so small a ring are slow then; its messages are short ones.
        ("slow_link", 3, DECODE, {"kind": "slow_link", "node": 2, "gbps": 10, "from_us": 9000}),
        ("packet_loss", 4, LOOP, {"kind": "loss", "share": 0.01, "src": 2, "from_us": 5000}),
        (
            "congestion", 4, LOOP,
            {
                "kind": "cross_traffic", "node": 2, "gbps": 95, "at_us": 5000, "us": 3000, "every_us": 4000,
                "times": 200,
            },
        ),
        (
            "head_of_line", 4, LOOP,
            {"kind": "pause", "node": 2, "at_us": 5000, "us": 900, "every_us": 3000, "times": 200},
        ),
    ],
)  # fmt: skip
def test_the_onset_is_within_three_steps(
    tmp_path: Path, condition: str, nodes: int, job: dict[str, Any], fault: dict[str, Any]
) -> None:
    scenario = {"seed": 3, "cluster": {"nodes": nodes}, "job": job, "faults": [fault]}
    write_case(parse_scenario(json.dumps(scenario), "test"), str(tmp_path))
    truth = json.loads((tmp_path / "truth.json").read_text())
    result = dpuflow.analyze([str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))])
    found = {each.condition: each for each in result.findings}
    assert condition in found, [each.summary for each in result.findings]
    begun = sorted({row["iter"]: min(row["enter_ns"]) for row in truth["collectives"]}.values())
    start_ns = found[condition].start_ns
    assert start_ns is not None
    assert abs(start_ns - truth["conditions"][0]["from_ns"]) < 3 * np.median(np.diff(begun))
