"""Findings from window to window: told once, the same id while they last, over after a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpuflow.agent.tracker import Tracker
from dpuflow.results import Analysis, Endpoint, Finding
from dpuflow.results.tokens import Severity

S = 1_000_000_000


def analysis(*findings: tuple[str, list[int], Severity]) -> Analysis:
    made = [
        Finding(
            str(n), condition, f"docs/report.md#{condition}", ends, 5 * S, None, severity, 0.9, "late", "look"
        )
        for n, (condition, ends, severity) in enumerate(findings)
    ]
    ends = [Endpoint(n, f"10.0.0.{n}", [f"10.0.0.{n}"], rank=n, label=f"node{n}") for n in range(6)]
    return Analysis(endpoints=ends, findings=made)


LATE = ("straggler", [2], "warning")


def test_runbook_links_are_absolute_wherever_dpuflow_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link() -> str:
        (state,) = Tracker(0, 1, 1, None).step(analysis(LATE), 1)
        return state.finding.runbook

    docs = Path(__file__).parents[1] / "docs"
    assert link() == f"{docs.as_uri()}/report.md#straggler"
    monkeypatch.setattr("dpuflow.agent.tracker.__file__", str(tmp_path / "dpuflow/agent/tracker.py"))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert link() == "file:///usr/share/doc/dpuflow/report.md#straggler"  # the Debian package
    installed = tmp_path / "share/doc/dpuflow"
    installed.mkdir(parents=True)
    (installed / "report.md").touch()
    assert link() == f"{installed.as_uri()}/report.md#straggler"  # a wheel


def test_a_finding_opens_lasts_and_closes() -> None:
    tracker = Tracker(confirm_s=1.5, hold_s=3.0, idle_s=60.0)
    assert tracker.step(analysis(LATE), 10 * S) == ()
    assert tracker.step(analysis(LATE), 11 * S) == ()
    (opened,) = tracker.step(analysis(LATE), 12 * S)
    assert (opened.active, opened.addresses, opened.ranks, opened.labels) == (
        True, ("10.0.0.2",), (2,), ("node2",),
    )  # fmt: skip
    assert (opened.since_ns, opened.first_ns) == (5 * S, 12 * S)
    assert tracker.step(analysis(LATE), 13 * S) == ()
    assert tracker.step(analysis(), 15 * S) == ()
    (closed,) = tracker.step(analysis(), 17 * S)
    assert (closed.id, closed.active, closed.last_ns) == (opened.id, False, 13 * S)
    assert tracker.active == {}


def test_what_is_found_once_is_not_told() -> None:
    tracker = Tracker(1.5, 3.0, 60.0)
    for second in range(20):
        assert tracker.step(analysis(LATE) if second % 2 else analysis(), second * S) == ()


def test_findings_outlast_a_silence() -> None:
    tracker = Tracker(0.0, 3.0, 60.0)
    tracker.step(analysis(LATE), 10 * S)
    assert tracker.step(None, 60 * S) == ()
    (closed,) = tracker.step(None, 71 * S)
    assert not closed.active


def test_severity_rises_at_once_and_falls_after_a_while() -> None:
    tracker = Tracker(0.0, 5.0, 60.0)
    tracker.step(analysis(LATE), 10 * S)
    worse = ("straggler", [2], "critical")
    (told,) = tracker.step(analysis(worse), 11 * S)  # type: ignore[arg-type]
    assert told.severity == "critical"
    assert [tracker.step(analysis(LATE), n * S) for n in (12, 13, 14, 15)] == [()] * 4
    (told,) = tracker.step(analysis(LATE), 16 * S)
    assert told.severity == "warning"


def test_who_sends_tells_findings_apart_and_who_is_late_in_turn_does_not() -> None:
    tracker = Tracker(0.0, 5.0, 60.0)
    both = tracker.step(analysis(("packet_loss", [0, 1], "info"), ("packet_loss", [1, 0], "info")), 10 * S)
    assert len({state.id for state in both}) == 2
    for second in range(11, 15):
        again = analysis(("packet_loss", [1, 0], "info"), ("packet_loss", [0, 1], "info"))
        assert tracker.step(again, second * S) == ()
    turns = Tracker(0.0, 5.0, 60.0)
    (first,) = turns.step(analysis(("straggler", [0, 1, 2], "warning")), 10 * S)
    (changed,) = turns.step(analysis(("straggler", [2, 1, 0, 3], "warning")), 11 * S)
    assert changed.id == first.id
    (other,) = turns.step(analysis(("straggler", [4, 5], "warning")), 12 * S)
    assert other.id != first.id


def test_a_clock_step_closes_nothing() -> None:
    tracker = Tracker(0.0, 3.0, 60.0)
    tracker.step(analysis(LATE), 10 * S)
    tracker.shift(3600 * S)
    assert tracker.step(analysis(LATE), 3611 * S) == ()
