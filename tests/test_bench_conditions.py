"""What conditions cost scripted jobs, as far as chance lets it be known; what is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.conditions.draw import draw
from bench.conditions.others import Told
from bench.conditions.outcome import Outcome
from bench.conditions.summary import asked, matrix
from bench.conditions.truth import Cost, lasted, play

if TYPE_CHECKING:
    from pathlib import Path

HEALTHY_HOST = 3050


def test_what_chance_may_have_cost_is_neither_there_nor_not() -> None:
    assert Cost(0.05, 0.01).there
    assert not Cost(0.05, 0.02).there
    assert Cost(0.05, 0.02).unsure
    assert not Cost(0.002, 0.001).unsure
    assert Cost(0.0, 0.01).unsure


def test_another_draw_is_the_same_job_with_other_times(tmp_path: Path) -> None:
    took = []
    for number, again in enumerate((0, 0, 1)):
        scenario = draw(HEALTHY_HOST).scenario
        scenario["machine"]["draw"] = again
        folder = tmp_path / str(number)
        folder.mkdir()
        play(scenario, str(folder))
        took.append(lasted(str(folder))[0])
    assert took[0] == took[1] != took[2]
    assert abs(took[2] - took[0]) < 0.2 * took[0]


def outcome(number: int, true: dict[str, list[int]], told: list[str], unsure: set[str]) -> Outcome:
    found = [(name, "warning", [0]) for name in told]
    return Outcome(number, true, found, [], [], {name: Cost(0.1) for name in true}, {}, unsure)


def test_what_may_be_chance_counts_neither_as_missed_nor_as_invented() -> None:
    lines = matrix([
        outcome(1, {"congestion": [0]}, ["congestion"], set()),
        outcome(2, {}, ["packet_loss"], {"packet_loss"}),
        outcome(3, {}, [], {"congestion"}),
        outcome(4, {}, ["straggler"], set()),
    ])  # fmt: skip
    assert lines[2:4] == ["| congestion | 1 | 1 | 1 | 0 | 0 | 0 |", "| straggler | 0 | 0 | 0 | 0 | 0 | 1 |"]
    assert "1 of 2 told above info are there; 1 of 1 healthy jobs" in lines[-1]


def test_each_measure_stands_beside_what_is_wanted() -> None:
    late = outcome(1, {"straggler": [0]}, ["straggler"], set())
    late.partly = {"half": {"straggler", "load_skew"}, "one": set()}
    taken = outcome(2, {"straggler": [0]}, ["slow_link"], set())
    sound = outcome(3, {}, [], set())
    sound.partly = {"half": {"load_skew"}, "one": set()}
    stopped = outcome(4, {"hang": [1]}, ["hang"], set())
    stopped.missing = {"all nodes": "right", "one": "not named"}
    others = [
        Told("p2p_throttling", "alternative"),
        Told("pcie_saturation", "missed"),
        Told("congestion", "right", 0.5),
        Told("slow_link", "wrong", 7.0),
        Told("slow_link", None),
        Told("decode, a pause", "right"),
    ]
    rows = [line.strip("| ").split(" | ") for line in asked([late, taken, sound, stopped], others)]
    here = {row[0]: row[-1] for row in rows}
    assert here["recall, direct conditions"] == "2 of 3 (67 %)"
    assert here["precision, direct conditions, above info"] == "2 of 3 (67 %)"
    assert here["network taken for a late GPU, or the other way"] == "1 of 2 (50 %)"
    assert here["captured at half of the nodes: precision"] == "1 of 3 (33 %)"
    assert here["captured at half of the nodes: sound jobs with a finding above info"] == "1 of 1 (100 %)"
    assert here["hang: missing rank, captured at all nodes"] == "1 right"
    assert here["hang: missing rank, captured at one node beside it"] == "1 not named"
    assert here["indirect: it, or what else it may be, named"] == "1 of 2 (50 %)"
    assert here["onset within 3 steps"] == "1 of 2 (50 %)"
    assert here["decode, a pause"] == "1 right"


def test_who_is_out_of_step_hangs_as_far_as_its_peers_nodes_show() -> None:
    apart = outcome(1, {"desync": [0]}, ["desync"], set())
    apart.partly = {"half": {"hang"}, "one": {"hang", "straggler"}}
    here = dict(line.strip("| ").split(" | ")[::2] for line in asked([apart], []))
    assert here["captured at half of the nodes: precision"] == "1 of 1 (100 %)"
    assert here["captured at one node: precision"] == "1 of 2 (50 %)"
