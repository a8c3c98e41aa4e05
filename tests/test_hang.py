"""A rank that never enters the last operation, though captures go on."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

from dpuflow.analysis import analyze
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.tables import Vantage

CASE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
MS = 1_000_000
LATE_NS = min(json.loads((CASE / "truth.json").read_text())["collectives"][15]["enter_ns"]) + 5 * MS
"""5 ms into an operation that rank 2 enters 10 ms late."""


def stopped(tmp_path: Path, at_ns: int, go_on: bool) -> Analysis:
    """The bundled job without the packets after ``at_ns``, but for the very last one of each node."""
    vantages = []
    for file in sorted(CASE.glob("node*.pcap.gz")):
        raw, place, records = gzip.decompress(file.read_bytes()), 24, []
        while place < len(raw):
            second, part, kept = struct.unpack_from("<III", raw, place)
            records.append((second * 10**9 + part, raw[place : place + 16 + kept]))
            place += 16 + kept
        chosen = [record for time, record in records if time < at_ns] + [records[-1][1]] * go_on
        out = tmp_path / file.name.removesuffix(".gz")
        out.write_bytes(raw[:24] + b"".join(chosen))
        vantages.append(Vantage(out.name.partition(".")[0], (str(out),)))
    return analyze(vantages)


def test_who_never_enters_is_named(tmp_path: Path) -> None:
    result = stopped(tmp_path, LATE_NS, go_on=True)
    (hang,) = (finding for finding in result.findings if finding.condition == "hang")
    assert [result.endpoints[end].address for end in hang.endpoints] == ["10.77.0.3"]
    assert next(text_lines(result)).startswith("HANG: 10.77.0.3 (node2) has not entered all_reduce")


def test_captures_that_end_in_mid_operation_show_no_hang(tmp_path: Path) -> None:
    result = stopped(tmp_path, LATE_NS, go_on=False)
    assert "hang" not in {finding.condition for finding in result.findings}
