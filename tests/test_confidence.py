"""How sure a verdict is: by what was told of the rank, and by what would have been hidden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_judgement import MS, judged

import dpuflow
from dpuflow.schema.tables import CaptureInfo
from dpuflow.verdicts.coverage import (
    EVEN,
    MOST,
    STAGES,
    Coverage,
    _detectable_ns,
    _shows,
    kept_share,
    with_confidence,
)
from dpuflow.verdicts.judgement import Judgement

TRACES = Path(__file__).parents[1] / "traces"


def coverage(shown: float) -> Coverage:
    return Coverage(round(100 * shown), 0, 100 - round(100 * shown), 1000, 100_000, shown)


@pytest.mark.parametrize(
    ("shown", "cost", "named"),
    [(1.0, 0.0, 1.0), (0.75, 0.3, 1.0), (0.6, 0.0, 0.7), (0.3, 0.0, EVEN), (1.0, 1.2, EVEN)],
)
def test_who_would_have_been_named_by_what_would_have_shown(shown: float, cost: float, named: float) -> None:
    assert _shows(coverage(shown), cost) == pytest.approx(named)


def test_stages_without_collectives_may_differ_by_design() -> None:
    assert _shows(None, 0.0) == STAGES


def test_packets_that_the_capture_lost_lower_it() -> None:
    whole = CaptureInfo(0, "node0", [], packets=900)
    assert kept_share([whole]) == 1.0
    assert kept_share([whole, CaptureInfo(1, "node1", [], packets=0, lost_packets=100)]) == 0.9
    assert kept_share([]) == 1.0


def test_only_what_is_claimed_has_a_confidence() -> None:
    files = sorted((TRACES / "gloo-allreduce-n4").glob("node*.pcap.gz"))
    vantages = [dpuflow.Vantage(f.name.partition(".")[0], (str(f),)) for f in files]
    whole = dpuflow.analyze(vantages)
    late = [row for row in whole.lateness if row.verdict == "late"]
    assert [row.endpoint for row in late] == [2]
    assert all((row.confidence or 0) > 0.95 for row in whole.lateness)
    finding = next(each for each in whole.findings if each.condition == "straggler")
    assert finding.confidence == late[0].confidence
    # Of a rank without a capture only its messages are known to be late.
    part = dpuflow.analyze([v for v in vantages if v.name != "node2"])
    assert {(row.verdict, row.confidence) for row in part.lateness if row.endpoint == 2} == {("late", None)}


def test_two_ranks_that_were_late_twice_each_have_no_habit() -> None:
    turns = {(0, 7), (1, 14), (0, 20), (1, 33)}

    def verdicts(times: int) -> set[str]:
        found = judged(lambda rank, turn: 6 * MS * ((rank, turn) in turns), n=2, times=times)
        return {each.verdict for each in found}

    # Late in a tenth of all, now and then, they would have shown as few in 40 units; not in 120.
    assert verdicts(40) == {"unknown"}
    assert verdicts(120) == {"on_time"}


@pytest.mark.parametrize(
    ("ranks", "shown", "sure"), [(2, 1.0, MOST), (2, 0.7, MOST / 1.1), (8, 0.7, MOST * 7 / 7.1)]
)
def test_most_ranks_are_on_time_whatever_is_seen_of_them(ranks: int, shown: float, sure: float) -> None:
    """One of them is late: of two that is this one as often as the other, of eight hardly ever."""
    assert cleared(shown, ranks).confidence == pytest.approx(sure, abs=0.001)


@pytest.mark.parametrize(("shown", "said"), [(0.75, "on_time"), (0.55, "unknown")])
def test_an_all_clear_that_is_as_good_as_a_guess_is_none(shown: float, said: str) -> None:
    found = cleared(shown, 2)
    assert found.verdict == said
    assert (found.confidence is None) == (said == "unknown")


@pytest.mark.parametrize("lost", [0, 60])
def test_a_verdict_that_is_as_good_as_a_guess_is_none(lost: int) -> None:
    """Six of ten packets were lost by the capture: whoever it names was named by four."""
    late, captures = judged({2: 8 * MS}), [CaptureInfo(0, "node0", [], packets=100 - lost, lost_packets=lost)]
    seen: Any = SimpleNamespace(
        instances=[SimpleNamespace(confidence=1.0)],
        entries=SimpleNamespace(of=[np.zeros(0, np.int64)] * 4, collective=np.zeros(0, np.int64)),
        own=SimpleNamespace(amount_ns=np.zeros(0, np.int64), design_ns=np.zeros(0)),
        worked_ns=1_000_000,
    )
    found = with_confidence([replace(late[2], usual_ns={})], {}, seen, captures)[0]
    assert (found.verdict, found.confidence) == (("unknown", None) if lost else ("late", STAGES))


def cleared(shown: float, ranks: int) -> Judgement:
    """What is said of a rank on time of whose times this share would have shown it late."""
    on_time = Judgement(0, 4, 0.0, 0.0, 0, 0, 0, "on_time", "none", None, None)
    seen: Any = SimpleNamespace(
        instances=[SimpleNamespace(confidence=1.0)] * 4,
        entries=SimpleNamespace(of=[np.arange(4)], collective=np.arange(4)),
        own=SimpleNamespace(amount_ns=np.zeros(4, np.int64), design_ns=np.zeros(4)),
        worked_ns=1_000_000,
    )
    told = {0: Coverage(4, 0, 0, 100, 250_000, shown)}
    return with_confidence([on_time] * ranks, told, seen, [])[0]


def test_a_slow_stage_is_slow_for_each_microbatch() -> None:
    """What would show of one message's work is so many times as much of a step's."""
    hidden = np.full(32, 50_000.0)
    assert _detectable_ns(hidden, 32, 8, 1_000_000, 1.0) == 50_000
    assert _detectable_ns(hidden, 32, 8, 1_000_000, 4.0) == 200_000
