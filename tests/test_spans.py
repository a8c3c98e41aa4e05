"""Shares are of the job's own time: neither idle capture nor clocks that nothing ties change one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dpuflow
from dpuflow.analysis import analyze_tables, read_captures
from dpuflow.figures.spans import list_jobs
from dpuflow.schema.tables import CaptureTables

SECOND = 1_000_000_000


def captures_of(folder: Path) -> list[CaptureTables]:
    files = sorted(folder.glob("*.pcap.gz"))
    return read_captures([dpuflow.Vantage(f.name.split(".")[0], (str(f),)) for f in files], 2, None)


def begun_sooner(tables: CaptureTables, by_ns: int) -> CaptureTables:
    """The same capture with other traffic, which no message is read of, for so long before it."""
    assert tables.info.first_ns is not None
    return replace(tables, info=replace(tables.info, first_ns=tables.info.first_ns - by_ns))


@pytest.mark.parametrize(
    "name",
    [
        "tcp/net_slowlink_gloo_allreduce_256k_n4_node2",
        "nccl/m16-slowrecv-a2a-n4",
        "nccl/shared-nic-n4g2-late5",
    ],
)
def test_idle_capture_before_a_job_changes_no_severity(shared: Path, name: str) -> None:
    captures = captures_of(shared / "captures" / name)
    told = []
    for by_ns in (0, 5 * SECOND):
        result = analyze_tables([begun_sooner(each, by_ns) for each in captures]).analysis
        told.append(result.findings)
        assert any(f.cost_share for f in result.findings)
    for before, after in zip(*told, strict=True):
        assert (before.condition, before.severity) == (after.condition, after.severity)
        # Drifts are laid from another first packet: the last digits differ.
        for name_of in ("cost_ns", "cost_share"):
            assert getattr(before, name_of) == pytest.approx(getattr(after, name_of), rel=1e-5)


def test_a_slow_link_costs_a_share_of_the_job_not_of_its_set_up(shared: Path) -> None:
    """The captures span 4.37 s, the job 0.86 s."""
    captures = captures_of(shared / "captures/tcp/net_slowlink_gloo_allreduce_256k_n4_node2")
    result = analyze_tables(captures).analysis
    (job,) = list_jobs(result)
    assert job.endpoints == {end for group in result.groups for end in group.endpoints}
    assert 0.8e9 < job.span_ns < 0.9e9
    (finding,) = (row for row in result.findings if row.condition == "slow_link")
    assert finding.cost_ns is not None
    assert finding.cost_share == pytest.approx(finding.cost_ns / job.span_ns, rel=1e-3)
    assert finding.severity == "critical"
