"""Twins of captures change what they say and nothing else; the judge weighs what is said by truth alone."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_results import MS, job
from test_score import as_json, meta_of, truth_of

from bench.robustness.against import changes
from bench.robustness.cases import Capture, Subject, case_names
from bench.robustness.judge import Outcome, _unexplained, judge
from bench.robustness.records import read_records, write_records
from bench.robustness.table import lines
from bench.robustness.truth import own_lateness, read_truth, scatter
from bench.robustness.twins import TWINS, make_twin, step_of, twin_named
from dpuflow.results import Analysis
from dpuflow.scoring.truth import place_case

NODES = 3
PACKETS = 4000


def mac(node: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, node])


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """Three nodes; each captures what it sends to the next one and what the one before sends to it."""
    random = np.random.default_rng(1)
    captures = []
    for node in range(NODES):
        stamps = np.cumsum(random.integers(100, 20_000, PACKETS)) + 10**18
        content = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 128, 1)
        for at, stamp in enumerate(stamps.tolist()):
            ways = (node, (node + 1) % NODES) if at % 2 else ((node - 1) % NODES, node)
            frame = mac(ways[1]) + mac(ways[0]) + bytes(40 + at % 64)
            content += struct.pack("<IIII", *divmod(stamp, 10**9), len(frame), 1500) + frame
        file = tmp_path / f"node{node}.pcap"
        file.write_bytes(content)
        captures.append(Capture(f"node{node}", f"node{node}", node, read_records(file)))
    return Subject("made/up", tuple(captures), {}, {}, 0)


def test_records_are_written_as_they_were_read(subject: Subject, tmp_path: Path) -> None:
    for capture in subject.captures:
        write_records(capture.records, tmp_path / "again.pcap")
        assert (tmp_path / "again.pcap").read_bytes()[24:] == (
            tmp_path / f"{capture.name}.pcap"
        ).read_bytes()[24:]
        assert capture.own.tolist() == [bool(at % 2) for at in range(PACKETS)]


def test_a_twin_is_the_same_again_and_changes_something(subject: Subject) -> None:
    for twin in TWINS:
        one, other = (make_twin(subject, twin, {1}) for _ in range(2))
        assert [c.records.stamp_ns.tolist() for c in one] == [c.records.stamp_ns.tolist() for c in other]
        assert (one == subject.captures) == (twin.name == "whole"), twin.name
        assert all(len(c.records) for c in one)
    assert make_twin(subject, twin_named("without-late"), set()) == subject.captures


@pytest.mark.parametrize("name", ["late-0.2%", "late-2%", "late-long", "jitter-8us"])
def test_stamps_are_late_never_early_and_keep_their_order_in_a_direction(subject: Subject, name: str) -> None:
    moved = 0
    for before, after in zip(subject.captures, make_twin(subject, twin_named(name), ()), strict=True):
        assert (np.diff(after.records.stamp_ns) >= 0).all()
        for way in (False, True):
            was, now = (c.records.take(c.own == way) for c in (before, after))
            assert (now.start == was.start).all()  # the same packets in the same order
            late = now.stamp_ns - was.stamp_ns
            assert late.min() >= 0
            assert late.max() <= 200_000
            moved += int((late > 0).sum())
    assert moved


def test_packets_that_are_lost_are_lost_where_it_says(subject: Subject) -> None:
    def left(name: str) -> list[int]:
        return sorted(PACKETS - len(c.records) for c in make_twin(subject, twin_named(name), {1}))

    assert left("lost-1%-node")[:2] == [0, 0]
    assert all(10 < gone < 90 for gone in left("lost-1%-all"))
    assert left(f"single-{PACKETS + 7}") == [0, 0, 1]
    (node1,) = [c for c in make_twin(subject, twin_named(f"single-{PACKETS + 7}"), ()) if c.node == 1]
    assert node1.records.start[7] == subject.captures[1].records.start[8]
    assert [c.node for c in make_twin(subject, twin_named("without-late"), {1})] == [0, 2]
    assert 1 in [c.node for c in make_twin(subject, twin_named("without-other"), {1})]
    assert len(make_twin(subject, twin_named("alone"), ())) == 1
    assert max(c.records.length.max() for c in make_twin(subject, twin_named("snap-96"), ())) == 96


def test_who_comes_out_of_order_still_comes_before_its_receiver_answers(subject: Subject) -> None:
    for before, after in zip(subject.captures, make_twin(subject, twin_named("reordered"), ()), strict=True):
        was = dict(zip(before.records.start.tolist(), before.records.stamp_ns.tolist(), strict=True))
        sent = before.records.take(before.own).start.tolist()
        assert sent == after.records.take(after.own).start.tolist()
        late = {
            s: t - was[s]
            for s, t in zip(after.records.start.tolist(), after.records.stamp_ns.tolist(), strict=True)
        }
        assert 0 < sum(ns > 0 for ns in late.values()) < 60
        assert all(0 <= ns <= 20_000 for ns in late.values())


def test_a_clock_step_is_known(subject: Subject) -> None:
    made = make_twin(subject, twin_named("step-10ms"), ())
    step = step_of(subject.captures, made)
    assert step is not None
    assert abs(step.by_ns) == 10 * MS
    assert step_of(subject.captures, make_twin(subject, twin_named("late-long"), ())) is None


def judged(
    result: Analysis,
    said: str = "LATE",
    twin: str = "whole",
    unwatched: frozenset[int] = frozenset(),
    **meta: Any,
) -> Outcome:
    """What is made of ``result`` where rank 2 was late by 10 ms in each of its collectives."""
    happened = job(late_ms=10)
    description = meta_of(**meta)
    truth = truth_of(happened)
    if meta.get("fault", {}).get("compute", True) is None:
        truth = truth_of(job())
        for row in truth["collectives"]:
            row["injected_ns"] = [0] * 4
    analysis = as_json(result)
    case = place_case(truth, description, analysis, "made up")
    known = replace(read_truth(case, description, None, 0), unwatched=unwatched)
    return judge(Outcome("made up", twin, said=said), analysis, case, known, 0)


def naming(endpoint: int, verdict: str = "late", cause: str = "compute") -> Analysis:
    result = job(late_ms=10)
    for row in result.lateness:
        row.verdict, row.cause, row.steadiness = "on_time", "none", None
        if row.endpoint == endpoint:
            row.verdict, row.cause = verdict, cause  # type: ignore[assignment]
    return result


def test_what_a_verdict_is_worth() -> None:
    assert judged(naming(2)).verdict == "right"
    assert judged(naming(2, "intermittent", "host")).verdict == "right"
    assert judged(naming(2, "unknown", "unknown")).verdict == "untold"
    assert judged(naming(2, "late", "network")).verdict == "untold"
    assert judged(naming(2, "unknown", "unknown"), "NOBODY WAS LATE BY ITS OWN DOING.").verdict == "cleared"
    assert judged(naming(9)).verdict == "cleared"
    assert judged(naming(1)).verdict == "accused"
    assert judged(naming(1, "late", "unknown")).verdict == "cleared"


def test_of_a_node_without_a_capture_it_is_enough_that_it_came_late() -> None:
    said, left_out = "MESSAGES OF rank 2 CAME LATE.", frozenset([2])
    assert judged(naming(2, "late", "unknown"), said, unwatched=left_out).verdict == "right"
    assert judged(naming(2, "late", "unknown"), said).verdict == "untold"
    assert judged(naming(2, "late", "unknown"), unwatched=left_out).verdict == "untold"
    assert judged(naming(1, "late", "unknown"), said, unwatched=left_out).verdict != "right"


def test_faults_of_others_and_none() -> None:
    nobody: dict[str, Any] = {"compute": None, "network": None}
    assert judged(naming(9), fault=nobody).verdict == "right"
    assert judged(naming(1), fault=nobody).verdict == "accused"
    network = {**nobody, "network": [{"kind": "loss"}]}
    assert judged(naming(9), fault=network).verdict == "untold"
    assert judged(naming(1), fault=network).verdict == "accused"
    assert judged(naming(1, "late", "network"), fault=network).verdict == "untold"
    assert judged(naming(9), fault=network).fault == "network"


def test_lateness_that_others_caused_is_not_ones_own() -> None:
    """Endpoint 1 enters late each time, as it left late; endpoint 2 once, having worked longer."""
    result = job()
    truth = truth_of(result)
    for k, row in enumerate(truth["collectives"]):
        row["injected_ns"] = [0] * 4
        row["enter_ns"][1] += 5 * MS
        row["leave_ns"][1] += 5 * MS
        if k == 5:
            row["enter_ns"][2] += 4 * MS
    case = place_case(truth, meta_of(), as_json(result), "made up")
    own = own_lateness(case.collectives)
    assert own[1][0] > 4.8 * MS
    assert max(own[1][1:]) < 0.5 * MS
    assert own[2][5] > 3 * MS
    assert scatter(case.collectives) < 1 * MS


def test_what_changed_is_told_worse_ones_last() -> None:
    before = [
        {**vars(Outcome("a", "whole", verdict="right", said="LATE: b")), "found": 3},
        {**vars(Outcome("a", "alone", verdict="cleared", said="NOBODY"))},
    ]
    after = [
        Outcome("a", "whole", verdict="accused", said="LATE: c", rows=["2: late, compute"], found=2),
        Outcome("a", "alone", verdict="untold", said="NO VERDICT"),
        Outcome("b", "alone", verdict="untold"),
    ]
    told = "\n".join(changes(before, after))
    astray = [replace(after[0], exact=4, held=3)]
    assert "a whole: found 3 -> 2, astray 0 -> 1" in "\n".join(changes(before, astray))
    assert "2 twins in common of 2 then and 3 now" in told
    assert "figures worse: 1\n  a whole: found 3 -> 2" in told
    assert "verdicts better: 1\n  a alone: cleared -> untold" in told
    assert told.index("verdicts better") < told.index("verdicts worse: 1\n  a whole: right -> accused")
    assert "    was: LATE: b []\n    now: LATE: c [2: late, compute]" in told
    assert any(line.startswith("all") for line in lines(after))


def test_shared_cases_are_listed(shared: Path) -> None:
    names = case_names(["nccl/rails-*", "nccl-allreduce-n2"], count=2, seed=5)
    assert names == [
        "nccl/rails-n2g8-ring-late11",
        "nccl/rails-n2g8-ring-late11@nodes",
        "traces/nccl-allreduce-n2",
    ]
    assert case_names(["draw/*"], count=2, seed=5) == ["draw/5", "draw/6"]


def test_unexplained_time_is_that_of_all_steps_of_whole_captures() -> None:
    def account(steps: int, share: float) -> dict[str, object]:
        return {"steps": steps, "step_ns": 1000, "unexplained_share": share}

    assert _unexplained([account(30, 0.1), account(10, 0.3)]) == pytest.approx(0.15)
    assert _unexplained([]) is None
    outcomes = [
        Outcome("tcp/a", "whole", fault="nobody", unexplained=0.02),
        Outcome("tcp/a", "lost-1%-all", fault="nobody", unexplained=0.9),
        Outcome("tcp/b", "whole", fault="network", unexplained=0.8),
        Outcome("tcp/c", "whole", fault="throughout"),
    ]
    (line,) = [line for line in lines(outcomes) if line.startswith("unexplained")]
    assert line == "unexplained time of 1 whole captures without hidden causes: median 2.0 %, p95 2.0 %"
