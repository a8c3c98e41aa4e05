"""Ranks that nothing dates beside ranks that are late: real captures; incidents beside a habit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dpuflow.analysis import analyze
from dpuflow.schema.rows import NEVER
from dpuflow.schema.tables import Vantage
from dpuflow.verdicts import judgement
from dpuflow.verdicts.chance import standing_of
from dpuflow.verdicts.units import Units, comes_again, world_of

TRACES = Path(__file__).resolve().parent.parent / "traces"
MS = 1_000_000


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("mpi-barrier-n7", "172.29.7.15"),
        ("mpi-allreduce-two-parts-n4", "172.29.7.13"),
        ("gloo-reduce-n6", "10.77.0.5"),
    ],
)
def test_a_late_rank_beside_ranks_that_waited_for_it(name: str, late: str) -> None:
    """Of the root (and of who passes results on) only what it sent after its inputs is seen; a reduction of
    no known algorithm is whole, as all of them have its messages."""
    files = sorted((TRACES / name).glob("node*.pcap.gz"))
    result = analyze([Vantage(file.name.partition(".")[0], (str(file),)) for file in files])
    said = {
        result.endpoints[row.endpoint].address: row for row in result.lateness if row.endpoint is not None
    }
    assert (said[late].verdict, said[late].cause, said[late].steadiness) == ("late", "compute", "persistent")
    assert {row.verdict for address, row in said.items() if address != late} <= {"on_time", "unknown"}


def test_a_rank_that_works_beside_a_non_blocking_collective_is_not_late() -> None:
    """Its library hands nothing on until it is called again: that an input lay there is no lateness."""
    files = sorted((TRACES / "mpi-iallreduce-n4").glob("node*.pcap.gz"))
    result = analyze([Vantage(file.name.partition(".")[0], (str(file),)) for file in files])
    assert {row.verdict for row in result.lateness} <= {"on_time", "unknown"}
    beside = [each for each in result.collectives if each.bytes == 2000]
    told = [rank.lateness_ns or 0 for each in beside for rank in each.ranks if rank.bound == "at_least"]
    assert len(beside) == 28
    assert max(told) < 2 * MS


def _units(amounts_ns: list[int]) -> Units:
    rows = np.arange(len(amounts_ns))
    amounts, none = np.array(amounts_ns, np.int64), np.zeros(len(rows), np.int64)
    return Units(rows, none, amounts, amounts, amounts, rows, none)


ONCE, TWICE = [7 * MS] + [0] * 29, [0, 7 * MS] * 2 + [0] * 26


@pytest.mark.parametrize(
    ("mine", "beside", "again"),
    [(TWICE, [7 * MS] * 30, False), (TWICE, [*TWICE[1:], 0], True), (ONCE, TWICE, False)],
)
def test_incidents_are_a_habit_beside_others_like_them(
    mine: list[int], beside: list[int], again: bool
) -> None:
    """Not beside a rank that is late every time; beside one that had some, too; never a single one."""
    units = {0: _units(beside), 1: _units(mine), 2: _units([0] * 30), 3: _units([0] * 30)}
    nobody = standing_of(np.zeros(0, np.int64), np.zeros(0, np.int64))
    world = world_of(units, nobody, np.arange(30), 600 * MS, 600 * MS)
    assert comes_again(units[1], world) is again


@pytest.mark.parametrize(
    ("incidents", "together", "said"), [(3, False, "on_time"), (3, True, "unknown"), (2, True, "on_time")]
)
def test_incidents_that_cost_little_clear_nobody_where_all_together_are_a_habit(
    incidents: int, together: bool, said: str
) -> None:
    mine = _units([MS] * incidents + [0] * 27)
    nobody = standing_of(np.arange(30), np.full(30, NEVER))
    world = world_of({0: mine, 1: _units([0] * 30)}, nobody, np.arange(30), 9_000 * MS, 9_000 * MS)
    world.together = together
    own = SimpleNamespace(excess_ns=np.zeros(30, np.int64), later_ns=np.zeros(30), apart_ns=np.zeros(30))
    assert judgement._on_time_or_unknown(mine, cast(Any, own), world) == said
