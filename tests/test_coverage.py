"""What verdicts rest on: how many times were told, and which lateness would have been named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from dpuflow.analysis import analyze
from dpuflow.entries import EXACT
from dpuflow.results import Analysis
from dpuflow.schema.rows import NEVER
from dpuflow.schema.tables import Vantage
from dpuflow.verdicts.coverage import (
    HIDDEN,
    Coverage,
    _at_every_place,
    _detectable_ns,
    _mostly_told,
    _usual_at_most,
)
from dpuflow.verdicts.excess import Evidence
from dpuflow.verdicts.judgement import Judgement

MS = 1_000_000


def analysed(shared: Path, case: str, without: tuple[str, ...] = ()) -> Analysis:
    files = sorted((shared / "captures" / case).glob("node*.pcap.gz"))
    nodes = [(file.name.partition(".")[0], str(file)) for file in files]
    return analyze([Vantage(name, (file,)) for name, file in nodes if name not in without])


def said(result: Analysis) -> dict[str, tuple[str, str]]:
    return {result.endpoints[r.endpoint].address: (r.verdict, r.cause) for r in result.lateness}


def test_what_half_of_the_times_hide_cannot_be_excluded() -> None:
    """Thirty steps of 10 ms: what shows in the fifteenth best told is what would have been named."""
    hidden = np.arange(1, 31) * MS / 2.0
    assert _detectable_ns(hidden, 30, 30, 300 * MS, 1.0) == 7.5 * MS
    # As many again were recognised in part alone: all thirty must tell.
    assert _detectable_ns(hidden, 60, 30, 300 * MS, 1.0) == 15 * MS
    assert _detectable_ns(hidden, 62, 30, 300 * MS, 1.0) is None
    hidden[10:] = HIDDEN
    assert _detectable_ns(hidden, 30, 30, 300 * MS, 1.0) is None


def test_lateness_before_one_operation_of_a_step_shows_there_alone() -> None:
    """Of two operations a step the second is bounded by 3 ms: so much hides, whatever the first tells."""
    place = np.tile([0, 1], 15)
    hidden = np.where(place == 0, MS / 10, 3.0 * MS)
    assert _at_every_place(MS // 5, hidden, place) == 3 * MS
    assert _at_every_place(None, hidden, place) is None
    assert _at_every_place(MS // 5, hidden, np.full(30, -1)) == MS // 5  # no steps
    # Where nothing is ever told, that is counted with what is not told.
    assert _at_every_place(MS // 5, np.where(place == 0, MS / 10, float(HIDDEN)), place) == MS // 5


@pytest.mark.parametrize(("alike", "told"), [(True, False), (False, True)])
def test_a_late_rank_must_be_told_in_operations_like_those_it_was_late_in(alike: bool, told: bool) -> None:
    """Three operations a step, of which the first is told each time: that of others nothing is is no choice
    of its lateness; of operations all alike the third that is told may be."""
    steps, place = 20, np.tile([0, 1, 2], 20)
    first, none = place == 0, np.full(60, NEVER)
    own = SimpleNamespace(
        amount_ns=np.where(first, 5 * MS, 0), most_ns=none, excess_ns=np.where(first, 5 * MS, NEVER),
        usual=np.zeros(60, bool), staged=np.zeros(60, bool),
    )  # fmt: skip
    relative = SimpleNamespace(bound=np.where(first, EXACT, 3), lateness_ns=np.where(first, 5 * MS, NEVER))
    evidence = cast(
        Evidence, SimpleNamespace(own=own, relative=relative, entries=SimpleNamespace(of=[np.arange(60)]))
    )
    judgement = cast(Judgement, SimpleNamespace(endpoint=0, usual_ns={}))
    seen = Coverage(steps, 0, 2 * steps, None, 30 * MS)
    assert _mostly_told(judgement, seen, evidence, np.zeros(60, np.int64) if alike else place) is told


def test_what_costs_too_little_to_be_named_is_not_excluded() -> None:
    assert _detectable_ns(np.full(30, 1000.0), 30, 30, 300 * MS, 1.0) == MS // 10


def test_what_a_rank_usually_worked_longer_has_an_upper_end() -> None:
    """Of 30 times the 21st: were it usually longer, 21 would hardly lie below (one capture of twenty)."""
    times = np.arange(30)[::-1] * MS
    assert _usual_at_most(times) == 20 * MS
    assert _usual_at_most(times - 25 * MS) == 0
    assert _usual_at_most(times[:4]) == HIDDEN


def test_two_clean_ranks_on_busy_hosts_are_cleared_by_how_often_each_was_first(shared: Path) -> None:
    result = analysed(shared, "roce/nccl-ar-n2-256k-clean")
    assert [row.verdict for row in result.lateness] == ["on_time", "on_time"]
    assert all(0 < (row.detectable_ns or 0) < 6 * MS for row in result.lateness)


def test_three_incidents_in_24_calls_are_not_called_late_throughout(shared: Path) -> None:
    """By truth ranks 0 to 3 were made late three, four, two and four times, at random."""
    rows = analysed(shared, "tcp/m_bcast_roots_n4_random").lateness
    assert {row.verdict for row in rows} == {"unknown"}


def test_an_all_clear_excludes_what_is_critical() -> None:
    assert Coverage(30, 0, 0, MS, 10 * MS).clears
    assert not Coverage(30, 0, 0, MS + 1, 10 * MS).clears
    assert not Coverage(30, 0, 0, None, 10 * MS).clears


@pytest.mark.parametrize("case", ["tcp/g_moe_n5_random", "tcp/m_bcast_roots_n4_random"])
def test_who_was_hardly_seen_is_not_on_time(shared: Path, case: str) -> None:
    result = analysed(shared, case)
    for row in result.lateness:
        told = row.told.exact + row.told.bounded
        assert row.verdict != "on_time" or told >= row.told.untold, row


def test_every_all_clear_says_what_it_would_have_named(shared: Path) -> None:
    result = analysed(shared, "tcp/gloo_allreduce_256k_n4_none")
    assert {row.verdict for row in result.lateness} == {"on_time"}
    for row in result.lateness:
        assert row.detectable_ns is not None
        assert 0 < row.detectable_ns < MS
        assert row.told.exact == 23


@pytest.mark.parametrize(
    ("case", "missing"),
    [("roce/ar-ring-n4-128k-late2-5ms", "node0"), ("roce/ar-ring-n4-128k-late2-5ms", "node3")],
)
def test_a_node_left_out_is_not_accused(shared: Path, case: str, missing: str) -> None:
    """Rank 2 is late. What its neighbours send late they had waited for, and no capture shows it."""
    found = said(analysed(shared, case, (missing,)))
    late = {end for end, (verdict, _) in found.items() if verdict in ("late", "intermittent")}
    assert late == {"192.168.50.12"}


def test_a_late_rank_without_a_capture_is_not_late_by_its_own_doing(shared: Path) -> None:
    found = said(analysed(shared, "roce/ar-ring-n4-128k-late2-5ms", ("node2",)))
    assert found["192.168.50.12"][1] not in ("compute", "host")
    assert not [each for each in found.values() if each[1] in ("compute", "host")]
