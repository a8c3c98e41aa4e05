"""Captures at a NIC each whose clocks nothing ties: every rail is told, and what goes over several is one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

import dpuflow
from dpuflow.analysis import analyze_tables, read_captures
from dpuflow.islands.analyse import Read, _shift
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines
from dpuflow.schema.rows import NEVER, Op
from dpuflow.schema.tables import CaptureTables
from dpuflow.scoring.score import Score, score_case
from dpuflow.scoring.truth import read_case


def captures_of(folder: Path, without: str = "no such") -> list[CaptureTables]:
    files = [f for f in sorted(folder.glob("*.pcap.gz")) if not f.name.startswith(without)]
    return read_captures([dpuflow.Vantage(f.name.split(".")[0], (str(f),)) for f in files], 2, None)


def set_apart(tables: CaptureTables, by_ns: int) -> CaptureTables:
    """The same capture by a clock that is ahead by so much."""

    def moved(rows: np.ndarray[tuple[int], np.dtype[np.void]]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        rows = rows.copy()
        for name in ("first_ns", "last_ns", "acked_ns"):
            if name in (rows.dtype.names or ()):
                rows[name] += np.where(rows[name] == NEVER, 0, by_ns)
        return rows

    info = tables.info
    assert info.first_ns is not None
    assert info.last_ns is not None
    info = replace(info, first_ns=info.first_ns + by_ns, last_ns=info.last_ns + by_ns)
    return replace(tables, info=info, messages=moved(tables.messages), flows=moved(tables.flows))


def scored(result: dpuflow.Analysis, folder: Path) -> Score:
    import json

    analysis = json.loads("\n".join(json_lines(result)))
    return score_case(analysis, read_case(str(folder), analysis))


def test_one_communicator_a_rail(shared: Path) -> None:
    """Data parallel by rail: 4 rails of 4 nodes, a clock a NIC, ranks late in turn on each."""
    folder = shared / "captures/nccl/hybrid-tp4dp4-rails-late"
    worked = analyze_tables(captures_of(folder), marked=True)
    result = worked.analysis
    assert sorted({clock.island for clock in result.clocks}) == [0, 1, 2, 3]
    assert len([clock for clock in result.clocks if clock.reference]) == 4
    score = scored(result, folder)
    assert (score.true, score.found, score.invented, score.op_right, score.bytes_right) == (80, 80, 0, 80, 80)
    assert (score.last_asked, score.last_right, score.bounds_violated) == (52, 52, 0)
    assert score.exact == score.ranks
    (finding,) = (row for row in result.findings if row.condition == "straggler")
    assert finding.cost_ns == sum(
        row.caused_wait_ns or 0 for row in result.lateness if row.verdict in ("late", "intermittent")
    )
    assert score.intervals_held == score.intervals
    assert max(score.clock_errors_ns) < 10_000
    assert score.verdict_notes == []
    assert Counter(finding.condition for finding in result.findings) == {"straggler": 1}
    assert sum("islands" in text for text in result.limits) == 1
    report = " ".join(" ".join(text_lines(result)).split())
    assert report.count("exposed communication)") == 1  # rails alike stand once
    assert "(the same in 3 other groups)" in report
    # Packets of every rail have their collectives beside them, not those of the first rail alone.
    clocks = {clock.capture: clock.island for clock in result.clocks}
    islands = dict.fromkeys(clocks.values(), frozenset[int]())
    for number, marks in enumerate(worked.marks):
        islands[clocks[number]] |= {m.collective for of in marks.flows.values() for m in of} - {None}
    assert sorted(number for own in islands.values() for number in own) == list(
        range(len(result.collectives))
    )


@pytest.mark.parametrize("apart_ns", [0, 7_654_321, -40_000_000_000])
def test_a_ring_over_all_rails_is_one_operation(shared: Path, apart_ns: int) -> None:
    """16 ranks, 8 rails of two nodes: alone a rail looks like 15 small operations of two ranks."""
    folder = shared / "captures/nccl/rails-n2g8-ring-late11"
    captures = captures_of(folder)
    result = analyze_tables([set_apart(t, apart_ns * int(t.info.vantage[-1])) for t in captures]).analysis
    kinds = Counter((c.op, c.algorithm, c.bytes, len(c.ranks)) for c in result.collectives)
    assert kinds == {("all_reduce", "ring", 262_144, 16): 10}
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    assert [(result.endpoints[r.endpoint].address, r.verdict, r.cause) for r in late] == [
        ("10.163.4.12", "late", "compute")
    ]
    assert late[0].relative_to is not None
    assert len(late[0].relative_to) == 1  # the rank on the same rail: no other shares its clock
    for each in result.collectives:
        assert each.end_ns - each.start_ns < 10_000_000  # laid beside each other


def test_a_ring_over_rails_of_nodes_known_by_name_on_one_clock(shared: Path) -> None:
    folder = shared / "captures/nccl/rails-n2g8-ring-late11"
    result = analyze_tables(captures_of(folder), clock="trust").analysis
    score = scored(result, folder)
    assert (score.found, score.invented, score.bytes_right, score.last_right) == (10, 0, 10, 10)
    assert score.verdict_notes == []


BESIDE = pytest.mark.xfail(strict=True, reason="messages of a node without a capture are said to come late")


@pytest.mark.parametrize("without", ["no such", pytest.param("node3", marks=BESIDE)])
def test_trees_over_nodes_name_the_node(shared: Path, without: str) -> None:
    """64 NICs, a clock each; a random GPU is late. Which GPU of its node it is shows in no packet."""
    folder = shared / "captures/nccl/large-n8g8-tree-decode"
    result = analyze_tables(captures_of(folder, without)).analysis
    score = scored(result, folder)
    assert score.bounds_violated == 0
    assert score.verdict_notes == []
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    assert late
    assert all(row.node is not None for row in late)
    if without == "no such":
        assert (score.true, score.found, score.invented) == (40, 40, 0)
        assert (score.op_right, score.bytes_right) == (40, 40)
        assert (score.last_right, score.last_asked) == (21, 21)
        assert {row.node for row in result.lateness} == {row.endpoint for row in result.lateness}
        assert len(result.lateness) == 8
        text = "\n".join(json_lines(result))
        assert '"endpoint": null' in text
        assert all(finding.summary.count("rank ") == 0 for finding in result.findings)


def test_no_time_is_taken_across_clocks_that_nothing_ties(shared: Path) -> None:
    """How far clocks of rails are apart changes no word of the verdict; ranks have their captures' names."""
    captures = captures_of(shared / "captures/nccl/hybrid-tp4dp4-rails-late")
    told = []
    for apart_ns in (0, 3_000_000_000):
        moved = [set_apart(each, apart_ns * int(each.info.vantage[-1])) for each in captures]
        result = analyze_tables(moved).analysis
        assert len({clock.island for clock in result.clocks}) == 4
        assert {each.label for each in result.endpoints} == {each.info.vantage for each in captures}
        told.append(" ".join(text_lines(result)).partition("Observed")[0])
    assert told[0] == told[1]
    assert "into the capture" not in told[0]
    assert "cost: 36 % of the job's time" in " ".join(told[0].split())


def operations(at_ns: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Read:
    """An island with one all_reduce by a tree at each of these times."""
    tree = SimpleNamespace(name="tree")
    instances = [
        SimpleNamespace(op=Op.ALL_REDUCE, algorithm=tree, size=4096, rows=np.array([k]))
        for k in range(len(at_ns))
    ]
    exchanges = np.array([(at,) for at in at_ns.tolist()], [("data_ns", "i8")])
    return cast("Read", SimpleNamespace(instances=instances, exchanges=exchanges))


def test_operations_that_are_alike_are_told_by_the_times_between_them() -> None:
    """NICs whose captures begin and end apart, each by a clock of its own."""
    rng = np.random.default_rng(3)
    at = np.cumsum(rng.integers(1_000_000, 9_000_000, 40))
    here, even = operations(at), np.arange(40) * 3_000_000

    def there(first: int, last: int) -> Read:
        return operations(at[first:last] + rng.integers(0, 2_000, last - first) - 77_000_000_000)

    assert [_shift(here, there(*part)) for part in ((0, 40), (3, 40), (0, 37), (2, 36))] == [0, 3, 0, 2]
    assert _shift(there(5, 40), operations(at[:38])) == -5
    assert _shift(operations(at[:36]), there(4, 40)) == 4  # as many on both, and not the same
    # Where one step is as long as any other nothing tells: as many are the same, fewer may be any.
    assert _shift(operations(even), operations(even + 5)) == 0
    assert _shift(operations(even), operations(even[:38] + 5)) is None
    assert _shift(here, there(0, 20)) is None  # less than half of them: another job, perhaps
