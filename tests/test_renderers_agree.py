"""Every number of page, trace, tables and ticket is the JSON's: of real captures, walked one by one."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_results import job
from test_html import Reader, place_of
from test_loading import rich_job, text_of

import dpuflow
from dpuflow.reports.html import page
from dpuflow.reports.markdown import markdown_lines
from dpuflow.reports.parquet import write_parquet
from dpuflow.results import Analysis

TRACES = Path(__file__).resolve().parents[1] / "traces"
INSTANT = 3


def captured(name: str) -> Analysis:
    return dpuflow.analyze(sorted(TRACES.joinpath(name).glob("node*.pcap.gz")))


@pytest.fixture(scope="module", params=["gloo-allreduce-n4", "nccl-allreduce-n2", "scripted", "rich"])
def result(request: pytest.FixtureRequest) -> Analysis:
    made = {"scripted": lambda: job(late_ms=5), "rich": rich_job}
    return made[request.param]() if request.param in made else captured(request.param)


@pytest.fixture(scope="module")
def value(result: Analysis) -> Any:
    return json.loads(text_of(result))


def test_the_page(result: Analysis, value: Any) -> None:
    shown = Reader(page(result)).data
    assert shown
    for at, exact, _ in shown:
        assert float(exact) == pytest.approx(place_of(value, at), abs=0), at


def test_the_tables(result: Analysis, value: Any, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the tables: make setup installs it")
    write_parquet(result, str(tmp_path))
    lists = {key: rows for key, rows in value.items() if isinstance(rows, list)}
    lists["entries"] = [{"collective": c["id"], **e} for c in lists["collectives"] for e in c["ranks"]]
    lists["limits"] = [{"limits": sentence} for sentence in lists["limits"]]
    assert {file.stem for file in tmp_path.iterdir()} == set(lists)
    for name, rows in lists.items():
        table = pq.read_table(tmp_path / f"{name}.parquet").to_pylist(maps_as_pydicts="strict")
        assert len(table) == len(rows), name
        for shown, there in zip(table, rows, strict=True):
            for key in shown.keys() & there.keys():
                assert alike(shown[key], there[key]), (name, key)
            assert not there.keys() - shown.keys() - {"ranks", "file"}, name  # "file" is the first of "files"


def alike(shown: Any, there: Any) -> bool:
    """JSON rounds shares to a millionth."""
    if isinstance(there, dict):
        return all(alike(shown.get(key), item) for key, item in there.items())
    if isinstance(there, list):
        return len(shown) == len(there) and all(map(alike, shown, there))
    return bool(shown == (pytest.approx(there, abs=1e-6) if isinstance(there, float) else there))


def test_the_trace(result: Analysis, value: Any, tmp_path: Path) -> None:
    perfetto = pytest.importorskip(
        "test_perfetto", reason="perfetto decodes the traces: make setup installs it"
    )
    read = perfetto.Read(result, tmp_path)
    walked = 0
    for track, begin, end, name, notes in read.slices():
        where = read.tracks[track].name
        row = None
        if "bound" in notes:
            row, times = entry_of(value, begin, notes), ("enter_ns", "leave_ns")
        elif where.endswith("phases"):
            row = next(p for p in value["collectives"][notes["id"]]["phases"] if p["start_ns"] == begin)
            notes, times = {}, ("start_ns", "end_ns")
            assert row["name"] == name
        elif where.startswith("group "):
            row, times = value["collectives"][notes["id"]], ("start_ns", "end_ns")
            assert row["op"] == name
        elif where.endswith("transfers"):
            row, times = value["transfers"][notes["id"]], ("start_ns", "end_ns")
        if row is not None:
            assert [begin, end] == [row[key] for key in times]
            walked += 1 + same_notes(notes, row)
    for at, event, name, notes in read.events:
        if event.type == INSTANT:
            row = value["findings"][notes["id"]]
            assert (name, at) == (
                row["condition"],
                value["start_ns"] if row["start_ns"] is None else row["start_ns"],
            )
            walked += same_notes(notes, row)
    assert walked > 100


def entry_of(value: Any, begin: int, notes: dict[str, Any]) -> Any:
    rows = value["collectives"][notes["collective"]]["ranks"]
    return next(e for e in rows if e["enter_ns"] == begin and e["why"] == notes["why"])


def same_notes(notes: dict[str, Any], row: Any) -> int:
    """How many notes have a key in the row, all of which say the same."""
    keys = notes.keys() & row.keys()
    for key in keys:
        there = str(row[key]).lower() if isinstance(row[key], bool) else row[key]
        assert alike(notes[key], there), key
    return len(keys)


def test_the_ticket_and_the_terminal(result: Analysis) -> None:
    """The numbers of a rank's row in the ticket stand in its row of the terminal's table."""
    text = io.StringIO()
    dpuflow.write_text(result, text, columns=200)
    lines = text.getvalue().splitlines()
    rows = [line for line in markdown_lines(result) if re.match(r"\| (rank|\d+\.)", line)]
    assert rows
    for row in rows:
        who, *cells = [cell.strip().replace("\\", "") for cell in row.strip("| ").split("|")]
        (line,) = [line for line in lines if line.startswith(f"{who} ")]
        for cell in cells:
            assert cell in line or cell.replace("at least ", ">=") in line, (cell, line)
