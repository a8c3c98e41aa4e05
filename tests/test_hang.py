"""A rank that never enters the last operation, though captures go on."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from collective_worlds import HOP, World, algorithm_of, captured, run_job

from dpuflow.analysis import analyze, analyze_tables, read_captures
from dpuflow.entries import build_entries
from dpuflow.exchanges.build import build_exchanges
from dpuflow.findings.unfinished import _overtaken, find_stopped
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.rows import NEVER, Op
from dpuflow.schema.tables import Vantage

CASE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
MS = 1_000_000
LATE_NS = min(json.loads((CASE / "truth.json").read_text())["collectives"][15]["enter_ns"]) + 5 * MS
"""5 ms into an operation that rank 2 enters 10 ms late."""


def ends(record: bytes) -> bool:
    """Whether a record of the bundled job is a TCP segment with FIN."""
    return len(record) > 63 and record[28:30] == b"\x08\x00" and bool(record[63] & 1)


def stopped(tmp_path: Path, at_ns: int, go_on: bool, closes_s: int | None = None) -> Analysis:
    """The bundled job without the packets after ``at_ns``, but for the very last one of each node, or those
    that close a connection, ``closes_s`` later than they did."""
    vantages = []
    for file in sorted(CASE.glob("node*.pcap.gz")):
        raw, place, records = gzip.decompress(file.read_bytes()), 24, []
        while place < len(raw):
            second, part, kept = struct.unpack_from("<III", raw, place)
            records.append((second * 10**9 + part, raw[place : place + 16 + kept]))
            place += 16 + kept
        chosen = [record for time, record in records if time < at_ns]
        for time, record in records if closes_s is not None else ():
            if time >= at_ns and ends(record):
                chosen.append(struct.pack("<I", time // 10**9 + (closes_s or 0)) + record[4:])
        chosen += [records[-1][1]] * go_on
        out = tmp_path / file.name.removesuffix(".gz")
        out.write_bytes(raw[:24] + b"".join(chosen))
        vantages.append(Vantage(out.name.partition(".")[0], (str(out),)))
    return analyze(vantages)


def test_who_never_enters_is_named(tmp_path: Path) -> None:
    result = stopped(tmp_path, LATE_NS, go_on=True)
    (hang,) = (finding for finding in result.findings if finding.condition == "hang")
    assert [result.endpoints[end].address for end in hang.endpoints] == ["10.77.0.3"]
    assert next(text_lines(result)).startswith("HANG: 10.77.0.3 (node2) has not entered all_reduce")


@pytest.mark.parametrize("closes_s", [0, 60])
def test_a_job_that_closes_its_connections_at_once_does_not_hang(closes_s: int, tmp_path: Path) -> None:
    """A watchdog ends one that hung, after a while."""
    result = stopped(tmp_path, LATE_NS, go_on=closes_s == 0, closes_s=closes_s)
    assert ("hang" in {finding.condition for finding in result.findings}) == (closes_s > 0)


def test_captures_that_end_in_mid_operation_show_no_hang(tmp_path: Path) -> None:
    result = stopped(tmp_path, LATE_NS, go_on=False)
    assert "hang" not in {finding.condition for finding in result.findings}


def test_where_an_agent_left_pairs_out_none_is_told(tmp_path: Path) -> None:
    """Pairs that it no longer follows look the same."""
    stopped(tmp_path, LATE_NS, go_on=True)
    vantages = [Vantage(file.stem, (str(file),)) for file in sorted(tmp_path.iterdir())]
    captures = read_captures(vantages, 1, None)
    captures[1].info.skipped["sampled_out"] = 7
    result = analyze_tables(captures).analysis
    assert "hang" not in {finding.condition for finding in result.findings}
    states = {row.condition: row for row in result.judged}
    for name in ("hang", "desync"):
        assert states[name].state == "not_judged"
        assert states[name].reason is not None
        assert "left out some pairs" in states[name].reason


@pytest.mark.parametrize("waits", [False, True])
def test_a_job_that_is_over_waits_for_nobody(waits: bool) -> None:
    """After the last all_reduce each rank sends one more message, and the captures go on. Only where one was
    granted and never came is anybody waited for."""
    world = World("rendezvous")
    done = run_job(world, algorithm_of(Op.ALL_REDUCE, "ring"), 1 << 20, [0, 1, 2, 3], 5)
    after = max(done[-1].leave_ns.values())
    for rank in range(4):
        world._message(Op.ALL_REDUCE, rank, (rank + 1) % 4, 64, after + HOP, after + HOP, 0, 0)
    if waits:
        world.rows.pop()  # the data of rank 3's
    transfers = world.transfers()
    exchanges = build_exchanges(transfers)
    instances = world.instances(exchanges)
    _, joined = captured(transfers, 4)
    entries = build_entries(exchanges, instances)
    inferred = SimpleNamespace(entries=entries, groups=[[0, 1, 2, 3]], group_of=np.zeros(5, np.int64))
    case: Any = SimpleNamespace(exchanges=exchanges, instances=instances, inferred=inferred, joined=joined)
    found = list(find_stopped(case, dict.fromkeys(range(4), joined.end_ns + 10_000 * MS)))
    assert [(each.missing, each.waiting) for each in found] == ([([], [0, 1, 2, 3])] if waits else [])


def test_what_its_sender_has_left_behind_stopped_nothing() -> None:
    """Rank 1 sent a message of no known operation, then data of one that was finished; rank 2 sent nothing
    after its own. What was only granted may still be waited for."""
    exchanges = np.array(
        [(1, 70), (2, 50), (1, 60), (2, 60), (1, NEVER)], [("src", np.uint32), ("data_ns", np.int64)]
    )
    rows = np.array([2, 3, 4])
    assert _overtaken(exchanges, rows, [np.array([0, 1])]).tolist() == [True, False, False]
    # A slow channel still sends what was begun before that: it may be of the next one.
    begun = np.array([(1, 50), (1, 70), (1, 60)], exchanges.dtype)
    assert not _overtaken(begun, np.array([2]), [np.array([0, 1])]).any()
