"""The agent's history: what was kept leads to the same collectives; bounds, crashes and full disks."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import pytest
from feeding import pieces
from test_agent_windows import FILES, NAMES, rows

from dpuflow.agent import history as module
from dpuflow.agent.config import History as Settings
from dpuflow.agent.config import Windows as WindowSettings
from dpuflow.agent.history import History
from dpuflow.agent.log import Log
from dpuflow.agent.stream import Counts, Stream
from dpuflow.agent.windows import Windows
from dpuflow.analysis import analyze
from dpuflow.cli import run
from dpuflow.errors import DpuflowError
from dpuflow.reports.top import sources
from dpuflow.reports.top.seen import seen_of
from dpuflow.schema.tables import CaptureTables, Vantage
from dpuflow.store.segments import list_segments

STEP_NS = 100_000_000
SETTLE_NS = 100_000_000


@cache
def snapshots(path: Path) -> list[tuple[CaptureTables, Counts, int]]:
    """What windows over a capture hand to a history: tables and counts at each step, and at the end."""
    stream, windows, now, steps = Stream("node0"), Windows(WindowSettings(settle=SETTLE_NS / 1e9)), 0, []
    for now, form, piece in pieces(path, STEP_NS):
        stream.feed(form, piece)
        taken = stream.snapshot(now)
        steps.append((taken.tables(), taken.counts(), now))
        stream.forget(windows.step(*steps[-1]).before_ns)
    taken = stream.snapshot(now)
    return [*steps, (taken.tables(), taken.counts(), now)]


def kept(path: Path, folder: Path, settings: Settings | None = None, last: bool = True) -> History:
    """Keep a history of a capture in ``folder``; without ``last`` as if killed."""
    settings = settings or Settings(directory=str(folder), segment=0.1, keep_age=86400.0 * 36500)
    history = History(settings, "node0", Log(stream=io.StringIO()))
    # A capture is read many times faster than it was made: no queue of a disk's would be long enough.
    history._waiting.maxsize = 0
    *steps, end = snapshots(path)
    for tables, counts, now in steps:
        history.take(tables, counts, now - SETTLE_NS)
    if last:
        history.take(*end, last=True)
    history.close()
    history._thread.join()
    return history


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the history of the first capture, for ``folder`` to copy."""
    made = tmp_path_factory.mktemp("history")
    kept(FILES[0], made)
    return made


@pytest.fixture
def folder(once: Path, tmp_path: Path) -> Path:
    """A history of the test's own, of the first capture."""
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_history_leads_to_the_same_collectives_as_the_packets(path: Path, tmp_path: Path) -> None:
    assert kept(path, tmp_path).stand.lost == 0
    segments = list_segments(str(tmp_path))
    assert len(segments) > 1
    from_history = analyze([Vantage("node0", tuple(s.path for s in segments))], threads=1)
    from_packets = analyze([Vantage("node0", (str(path),))], threads=1)
    assert sorted(rows(from_history), key=str) == sorted(rows(from_packets), key=str)
    ours, theirs = from_history.flows, from_packets.flows
    assert [(f.packets, f.bytes, f.retransmitted) for f in ours if f.packets] == [
        (f.packets, f.bytes, f.retransmitted) for f in theirs if f.packets
    ]


def test_a_kill_loses_what_was_not_settled_and_the_segment_in_progress(tmp_path: Path) -> None:
    path = FILES[0]
    kept(path, tmp_path, last=False)
    segments = list_segments(str(tmp_path))
    whole = analyze([Vantage("x", (str(path),))], threads=1)
    assert whole.end_ns is not None
    end_ns = segments[-1].end_ns
    assert whole.end_ns - end_ns < 100_000_000 + SETTLE_NS + 2 * STEP_NS
    found = analyze([Vantage("x", tuple(s.path for s in segments))], threads=1)
    safe = [row for row in rows(whole) if row[5] < end_ns]
    assert len(safe) > 10
    assert len(set(safe) - set(rows(found))) <= 1  # the last one may go on after the cut


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    half = tmp_path / "node0-20261121T120000Z-1-2.dpuflow.new"
    half.write_bytes(b"DPUFLOW\0half")
    kept(FILES[0], tmp_path)
    assert not half.exists()


def test_who_is_neither_the_agent_nor_of_its_group_reads_nothing(tmp_path: Path) -> None:
    """By the mask of the unit the folder 0750, each file 0640; by hand the folder keeps others out."""
    for mask, wanted in ((0o027, 0o640), (0o022, 0o644)):
        folder = tmp_path / f"history{mask:o}"
        before = os.umask(mask)
        try:
            kept(FILES[0], folder)
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o750
        modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
        assert modes.pop(".node0.lock") == 0o640
        assert len(modes) > 1
        assert set(modes.values()) == {wanted}


def test_small_segments_become_one_and_nothing_counts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MERGED", 3)
    path = FILES[0]
    kept(path, tmp_path)
    segments = list_segments(str(tmp_path))
    assert any(s.end_ns - s.start_ns > 250_000_000 for s in segments)
    found = analyze([Vantage("x", tuple(s.path for s in segments))], threads=1)
    assert sorted(rows(found), key=str) == sorted(
        rows(analyze([Vantage("x", (str(path),))], threads=1)), key=str
    )


def test_parts_that_outlive_their_merging_are_left_out(tmp_path: Path) -> None:
    for name in ("n-20260101T000000Z-100-900.dpuflow", "n-20260101T000000Z-100-400.dpuflow",
                 "n-20260101T000000Z-400-900.dpuflow", "n-20260101T000000Z-900-950.dpuflow"):  # fmt: skip
        (tmp_path / name).write_bytes(b"")
    assert [(s.start_ns, s.end_ns) for s in list_segments(str(tmp_path))] == [(100, 900), (900, 950)]


def test_the_oldest_go_beyond_size_and_age(tmp_path: Path) -> None:
    settings = Settings(directory=str(tmp_path), segment=0.1, keep_size=150_000, keep_age=86400.0 * 36500)
    history = kept(FILES[0], tmp_path, settings)
    sizes = [os.path.getsize(s.path) for s in list_segments(str(tmp_path))]
    assert 0 < sum(sizes) <= 150_000
    assert history.stand.bytes == sum(sizes)
    settings = Settings(directory=str(tmp_path), segment=0.1, keep_age=3600.0)
    kept(FILES[0], tmp_path, settings)  # captured long ago
    assert list_segments(str(tmp_path)) == []


def test_files_of_others_in_the_folder_stay(tmp_path: Path) -> None:
    """Captures kept beside the history, and another node's history, were deleted or merged with it."""
    far = "20200101T000000Z-1577836800000000000-1577836800100000000"
    others = ["mine.dpuflow", f"node1-{far}.dpuflow", "node1-mine.dpuflow.new"]
    for name in others:
        (tmp_path / name).write_bytes(b"not of this agent")
    kept(FILES[0], tmp_path, Settings(directory=str(tmp_path), segment=0.1, keep_size=1 << 20, keep_age=10))
    assert [name for name in others if not (tmp_path / name).exists()] == []


def test_a_full_disk_is_said_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails for a while: it is logged once each way, and what came meanwhile is written later."""
    real, failures = module.save_tables, iter(range(3))

    def full(tables: object, name: str, durable: bool = False) -> None:
        if next(failures, None) is not None:
            raise DpuflowError(f"{name}: {os.strerror(errno.ENOSPC)}")
        real(tables, name, durable)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_tables", full)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    # On a busy machine the thread begins when all has been handed over and the end asked for: it tries on.
    monkeypatch.setattr(History, "_ending", lambda self: False)
    said = io.StringIO()
    monkeypatch.setattr(Log, "__init__", _logs_to(said))
    history = kept(FILES[0], tmp_path)
    assert said.getvalue().count("history not written") == 1
    assert said.getvalue().count("writing history again") == 1
    assert history.stand.writing
    assert history.stand.lost == 0


def _logs_to(said: io.StringIO):  # type: ignore[no-untyped-def]
    original = Log.__init__

    def init(self: Log, *args: object, **more: object) -> None:
        original(self, stream=said)

    return init


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    (tmp_path / "file").write_text("")
    history = kept(FILES[0], tmp_path / "file" / "inside", Settings(directory=str(tmp_path / "file" / "in")))
    assert not history.stand.writing
    assert history.stand.lost > 0


def test_top_replays_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = list_segments(str(folder))
    now_s = 100.0
    monkeypatch.setattr(sources.time, "monotonic", lambda: now_s)
    replay = sources.Replay(str(folder), 10.0)
    first = replay.look()
    assert replay.look() is first  # nothing new
    now_s += (segments[-1].end_ns - segments[0].end_ns) / 1e9 / 20
    middle = replay.look()
    now_s += 3600
    last = replay.look()
    spans = [seen.span_ns or 0 for seen in (first, middle, last)]
    assert spans == sorted(set(spans))
    assert "10 times as quick" in middle.health[0]
    assert last.health[0].endswith(", its end")
    assert [each.row for each in last.ranks] == [each.row for each in seen_of(analyze([folder]), "x").ranks]


def test_diff_compares_spans_of_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segments = list_segments(str(folder))
    at = datetime.fromtimestamp(segments[len(segments) // 2].end_ns / 1e9, timezone.utc).isoformat()
    assert run(["diff", f"{folder}@..{at}", f"{folder}@{at}..", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]
    assert all(each["count_before"] and each["count_after"] for each in found["changes"])
    assert run(["diff", str(folder), f"{folder}@2001-01-01..2001-01-02"]) == 1
    assert "has nothing from that time" in capsys.readouterr().err


def test_analyze_reads_the_folder_and_a_part_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", str(folder), "--quiet", "--json", "-"]) == 0
    whole = json.loads(capsys.readouterr().out)
    (capture,) = whole["captures"]
    assert capture["vantage"] == "node0"
    segments = list_segments(str(folder))
    at = datetime.fromtimestamp(segments[2].end_ns / 1e9, timezone.utc).isoformat()
    assert run(["analyze", str(folder), "--until", at, "--quiet", "--json", "-"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert 0 < part["captures"][0]["packets"] < capture["packets"]
    assert run(["analyze", str(folder), "--since", "2001-01-01T00:00:00Z", "--until", "2001-01-02"]) == 1
    assert "has nothing from that time, only 20" in capsys.readouterr().err
    assert run(["analyze", str(FILES[0]), "--since", "2001-01-01"]) == 2
    assert "name its folder" in capsys.readouterr().err
    empty = folder / "empty"
    empty.mkdir()
    assert run(["analyze", str(empty)]) == 1
    assert "nor an agent's history" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "places"])
def test_a_damaged_segment_is_left_out_and_named(folder: Path, damage: str) -> None:
    segments = list_segments(str(folder))
    whole = analyze([Vantage("node0", tuple(s.path for s in segments))], threads=1)
    broken = Path(segments[len(segments) // 2].path)
    data = bytearray(broken.read_bytes())
    if damage == "empty":
        data.clear()
    elif damage == "cut":
        del data[-len(data) // 3 :]
    elif damage == "header":
        data[40:60] = bytes(20)
    else:  # flows, which the messages refer to
        start = 24 + int.from_bytes(data[12:16], "little")
        data[start + 64 : start + 1024] = b"\xff" * 960
    broken.write_bytes(data)
    result = folder / "x.json"
    assert run(["analyze", str(folder), "--quiet", "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    (capture,) = found["captures"]
    assert not capture["complete"]
    assert [w for w in capture["warnings"] if broken.name in w and w.startswith("left out: ")]
    assert 0 < len(found["collectives"]) < len(whole.collectives)


def test_a_folder_of_damaged_segments_alone_is_an_error(folder: Path) -> None:
    for segment in list_segments(str(folder)):
        Path(segment.path).write_bytes(Path(segment.path).read_bytes()[:100])
    assert run(["analyze", str(folder), "--quiet"]) == 1


def test_a_damaged_segment_is_put_aside_when_it_is_to_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MERGED", 10_000)
    kept(FILES[0], tmp_path)
    segments = list_segments(str(tmp_path))
    Path(segments[1].path).write_bytes(b"damaged")
    monkeypatch.setattr(module, "MERGED", 2)
    said = io.StringIO()
    monkeypatch.setattr(Log, "__init__", _logs_to(said))
    history = kept(FILES[1], tmp_path)
    assert history.stand.writing
    assert Path(segments[1].path + ".damaged").exists()
    assert "put aside" in said.getvalue()
