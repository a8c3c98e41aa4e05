"""Packets that wait in their own node, before its tap, and ranks that are out of step: real captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpuflow.analysis import analyze
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.tables import Vantage

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent / "traces"


def analysed(folder: Path) -> Analysis:
    files = sorted(folder.glob("node*.pcap.gz"))
    return analyze([Vantage(file.name.partition(".")[0], (str(file),)) for file in files])


def test_a_rank_behind_a_full_egress_queue_is_not_accused() -> None:
    """Another program fills the token bucket that node 2 sends through: nobody computes late."""
    result = analysed(TRACES / "gloo-egress-queue-n4")
    assert {row.verdict for row in result.lateness} <= {"on_time", "unknown"}
    (slow,) = (finding for finding in result.findings if finding.condition == "slow_link")
    assert [result.endpoints[end].address for end in slow.endpoints] == ["10.98.0.3"]
    assert "queue in its host, before the capture point" in slow.summary


def test_nor_is_it_cleared_of_what_the_queue_hides() -> None:
    result = analysed(TRACES / "gloo-egress-queue-n4")
    (row,) = (each for each in result.lateness if result.endpoints[each.endpoint].address == "10.98.0.3")
    assert row.detectable_ns is None or row.detectable_ns > 3_000_000


@pytest.mark.parametrize("name", ["gloo-allreduce-n4", "mpi-allreduce-n4", "nccl-allreduce-n2"])
def test_no_queue_where_there_is_none(name: str) -> None:
    findings = analysed(TRACES / name).findings
    assert not [
        finding for finding in findings if "queue in its host, before the capture point" in finding.summary
    ]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("op", "runs all_gather, "),
        ("size", "runs all_reduce with messages of 1,024 bytes instead of 2,048, "),
    ],
)
def test_a_rank_out_of_step_is_the_first_line(name: str, runs: str) -> None:
    """Gloo: rank 2 calls something else than its peers, who wait in an all_reduce."""
    result = analysed(HERE / "captures" / f"desync-{name}")
    (found,) = (finding for finding in result.findings if finding.condition == "desync")
    assert [result.endpoints[end].address for end in found.endpoints] == ["10.98.0.3"]
    assert runs in found.summary
    assert next(text_lines(result)).startswith("DESYNC: ")
