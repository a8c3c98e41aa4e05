"""Ranks whose GPUs take long what they receive, and those that only wait for one."""

from __future__ import annotations

from pathlib import Path

import pytest

import dpuflow
from dpuflow.analysis import analyze_tables, read_captures


@pytest.mark.parametrize(
    ("case", "slow"),
    [
        ("m16-slowrecv-a2a-n4", [1]),  # nobody waits for its credits: it is late to the next all_to_all
        ("slow-receiver-sendrecv-n4", [2]),  # rank 1 is blocked by it, and grants late as well
        ("m02-fwd-pipe-2m-n4-clean", []),  # a stage posts its receives late, and nobody waits for that
    ],
)
@pytest.mark.parametrize("without", ["no such", "node0"])
def test_slow_receivers_are_named(shared: Path, case: str, slow: list[int], without: str) -> None:
    files = sorted((shared / "captures/nccl" / case).glob("node*.pcap.gz"))
    kept = [f for f in files if not f.name.startswith(without)]
    vantages = [dpuflow.Vantage(f.name.partition(".")[0], (str(f),)) for f in kept]
    result = analyze_tables(read_captures(vantages, 2, None)).analysis
    found = [f for f in result.findings if f.condition == "credit_starvation"]
    ips = [result.endpoints[f.endpoints[0]].address for f in found]
    assert [int(ip.rsplit(".", 1)[1]) - 11 for ip in ips] == slow
    assert all("slow to receive" in f.summary and f.evidence for f in found)
    blamed = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    assert not [row for row in blamed if row.cause in ("compute", "host")]
