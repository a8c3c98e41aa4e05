"""Two results compared: what changed is claimed, what did not is not, and ranks are found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scripted_results import T0, collective
from scripted_results import job as scripted

from dpuflow.arrays.quantiles import student
from dpuflow.cli import run
from dpuflow.differences import compare, match
from dpuflow.reports.diff import diff_lines
from dpuflow.reports.json import write_json
from dpuflow.reports.parquet import write_parquet
from dpuflow.results import Analysis, Steps

MS = 1_000_000


def noisy(seed: int, *, slower: float = 0.0, steps: int = 21, step_ms: float = 40.0) -> Analysis:
    """Ranks that work ``step_ms`` with 1 % of noise; rank 2 longer by the share ``slower``."""
    chance = np.random.default_rng(seed)
    result = scripted()
    result.collectives = []
    at = 0.0
    for number in range(steps):
        enters = step_ms * (1 + 0.01 * chance.standard_normal(4))
        enters[2] += step_ms * slower
        call = collective(number, list(enters), start_ms=at)
        at += enters.max() + 3 + 0.1 * chance.standard_normal()
        call.end_ns = round(T0 + at * MS)
        for entry in call.ranks:
            entry.leave_ns, entry.error_ns = call.end_ns, 5_000
        result.collectives.append(call)
    first, last = result.collectives[0], result.collectives[-1]
    result.steps = [Steps([0, 1, 2, 3], steps - 1, 1, 43 * MS, 45 * MS, first.start_ns, last.end_ns)]
    return result


def test_jobs_that_are_alike_differ_in_one_of_twenty_at_most() -> None:
    claims = sum(
        any(each.state in ("better", "worse") for each in compare(noisy(2 * n), noisy(2 * n + 1)).changes)
        for n in range(100)
    )
    assert claims <= 10  # 5 are expected at most, and chance may double that


def test_a_rank_that_is_five_per_cent_slower_is_seen_in_twenty_steps() -> None:
    seen = 0
    for number in range(60):
        changes = compare(noisy(number), noisy(1000 + number, slower=0.05)).changes
        seen += any(
            each.kind == "lateness" and each.name == "rank 2" and each.state == "worse" for each in changes
        )
    assert seen >= 57


def test_a_slower_rank_is_better_the_other_way_round() -> None:
    one, two = noisy(1), noisy(2, slower=0.2)
    there = {(e.kind, e.name): (e.state, e.difference_ns) for e in compare(one, two).changes}
    back = {(e.kind, e.name): (e.state, e.difference_ns) for e in compare(two, one).changes}
    assert there["lateness", "rank 2"][0] == "worse"
    opposite = {"worse": "better", "better": "worse"}
    for key, (state, difference) in there.items():
        assert back[key][0] == opposite.get(state, state)
        assert difference is not None
        assert back[key][1] == -difference


def test_ranks_are_found_again_under_other_addresses() -> None:
    one, two = noisy(1), noisy(2)
    for each in two.endpoints:
        each.address = f"10.9.9.{each.id}"
        each.rank = 3 - each.id
    pairs, how = match(one.endpoints, two.endpoints)
    assert (pairs, how) == ({0: 3, 1: 2, 2: 1, 3: 0}, "rank")
    for result in (one, two):
        for each in result.endpoints:
            each.rank = None
    assert match(one.endpoints, two.endpoints)[1] == "place in the list"
    for each in (*one.endpoints, *two.endpoints):
        each.label = f"node{each.id}"
    assert match(one.endpoints, two.endpoints)[1] == "label"


def test_findings_come_and_go() -> None:
    found = compare(scripted(late_ms=10), scripted(late_ms=10, late_rank=1))
    states = {(each.condition, each.name): each.state for each in found.findings}
    assert states == {("straggler", "rank 2"): "gone", ("straggler", "rank 1"): "new"}
    assert any("findings gone: straggler (rank 2)" in line for line in diff_lines(found))


def test_nothing_in_common_and_too_little_is_said() -> None:
    assert next(diff_lines(compare(Analysis(), noisy(1)))).startswith("NOTHING TO COMPARE")
    found = compare(noisy(1, steps=3), noisy(2, steps=3))
    assert {each.state for each in found.changes} == {"too_few"}
    assert next(diff_lines(found)) == "NO DIFFERENCE that these captures could show."


@pytest.mark.parametrize(
    ("share", "freedom", "table"),
    [
        *((0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182)),
        *((0.975, 10, 2.228), (0.975, 30, 2.042), (0.995, 19, 2.861)),
    ],
)
def test_students_quantile_is_that_of_the_tables(share: float, freedom: float, table: float) -> None:
    assert student(share, freedom) == pytest.approx(table, rel=0.01)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write_json(noisy(1), str(one))
    write_json(noisy(2, slower=0.2), str(two))
    assert run(["diff", str(one), str(two), "--fail-on", "5"]) == 3
    assert capsys.readouterr().out.startswith("CHANGED: ")
    assert run(["diff", str(two), str(one), "--fail-on", "5"]) == 0
    assert run(["diff", str(one), str(one)]) == 0
    assert "NO DIFFERENCE" in capsys.readouterr().out
    assert run(["diff", str(one), str(two), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "dpuflow.diff/1"
    assert run(["diff", str(one), str(tmp_path / "none.json")]) == 1
    assert run(["diff", str(one), str(two), "--json", str(two)]) == 2


def test_jobs_of_a_data_set_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the tables: make setup installs it")
    jobs, flat = tmp_path / "jobs", tmp_path / "flat"
    for number, slower in enumerate((0.0, 0.2)):
        result = noisy(number, slower=slower)
        result.start_ns = T0 + number * 86_400 * 10**9
        write_parquet(result, str(jobs), append=True)
    write_parquet(noisy(0), str(flat))
    files = [tmp_path / f"{number}.json" for number in (0, 1)]
    for number, file in enumerate(files):
        write_json(noisy(number, slower=0.2 * number), str(file))
    assert run(["diff", *map(str, files)]) == 0
    expected = capsys.readouterr().out
    assert "worse: lateness, rank 2" in expected
    assert run(["diff", f"{jobs}@20261121", f"{jobs}@20261122T"]) == 0
    assert capsys.readouterr().out == expected
    assert run(["diff", str(flat), str(files[1])]) == 0
    assert capsys.readouterr().out == expected
    for named, said in (
        (str(jobs), "holds 2 jobs, and none is named"), (f"{jobs}@2026", "2 jobs begin with '2026'"),
        (f"{jobs}@2027", "0 jobs begin with '2027'"), (f"{flat}@2026", "holds one result"),
    ):  # fmt: skip
        assert run(["diff", named, str(flat)]) == 1
        told = capsys.readouterr().err
        assert said in told
        assert told.count("\n") == 1
    assert run(["report", f"{jobs}@20261122", "--markdown", "-"]) == 0
    assert "rank 2" in capsys.readouterr().out


def test_folders_of_captures_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    captures = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
    assert run(["diff", str(captures), str(captures)]) == 0
    assert capsys.readouterr().out.startswith("NO DIFFERENCE")
    assert run(["diff", f"{captures}@yesterday", str(captures)]) == 2
    assert "SINCE..UNTIL, not 'yesterday'" in capsys.readouterr().err
    assert run(["diff", f"{captures}@-5m..", str(captures)]) == 1
    assert "holds captures, no agent's history: no span of it can be chosen" in capsys.readouterr().err
