"""Captures kept as column files: the analysis is the same, what is there is not read again, damage is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import dpuflow
from dpuflow.cli import run
from dpuflow.errors import OptionError
from dpuflow.keeping import keep_captures
from dpuflow.schema.tables import Vantage
from dpuflow.vantages import vantages_of

TRACE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
FILES = sorted(map(str, TRACE.glob("node*.pcap.gz")))


def result_of(captures: list[str], path: Path) -> dict[str, object]:
    dpuflow.write_json(dpuflow.analyze(vantages_of(captures)), str(path))
    found = json.loads(path.read_text())
    for capture in found["captures"]:
        del capture["file"], capture["files"]
    for finding in found["findings"]:
        for evidence in finding["evidence"]:
            del evidence["unopenable"]  # of column files
    return dict(found)


def test_the_analysis_of_column_files_is_that_of_the_captures(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    assert run(["ingest", *FILES, "-o", str(folder), "--workers", "2"]) == 0
    assert sorted(os.listdir(folder)) == [f"node{n}.dpuflow" for n in range(4)]
    kept = result_of([str(folder)], tmp_path / "kept.json")
    assert kept == result_of(FILES, tmp_path / "read.json")


def test_what_is_there_is_not_read_again(tmp_path: Path) -> None:
    mine = tmp_path / "node0.pcap.gz"
    mine.write_bytes(Path(FILES[0]).read_bytes())
    vantages, folder = [Vantage("a", str(mine)), Vantage("b", FILES[1])], str(tmp_path / "tables")

    def again() -> list[bool]:
        return [kept.fresh for kept in keep_captures(vantages, folder)]

    assert again() == [True, True]
    first = [(tmp_path / "tables" / f"{name}.dpuflow").read_bytes() for name in "ab"]
    assert again() == [False, False]
    os.utime(mine, ns=(1, 1))  # another capture, as far as can be told
    assert again() == [True, False]
    os.truncate(tmp_path / "tables" / "b.dpuflow", 1000)
    assert again() == [False, True]
    damaged = bytearray(first[1])
    damaged[-200] ^= 1  # in its messages, which could be left out
    (tmp_path / "tables" / "b.dpuflow").write_bytes(damaged)
    assert again() == [False, True]
    same = (tmp_path / "tables" / "b.dpuflow").read_bytes() == first[1]
    assert same


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_capture_that_cannot_be_read_is_named_and_the_others_are(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.pcap").write_bytes(b"no capture at all, but long enough to be looked at")
    folder = tmp_path / "tables"
    files = [str(tmp_path / "broken.pcap"), FILES[0], str(tmp_path / "none.pcap")]
    assert run(["ingest", *files, "-o", str(folder), "--workers", workers]) == 1
    told = capsys.readouterr().err
    assert "broken.pcap" in told
    assert "none.pcap" in told
    assert "2 of 3 captures could not be read" in told
    assert "[Errno" not in told
    assert os.listdir(folder) == ["node0.dpuflow"]


def test_two_of_one_name_and_its_own_input_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"both be written to x-y\.dpuflow"):
        list(keep_captures([Vantage("x/y", FILES[0]), Vantage("x-y", FILES[1])], str(tmp_path)))
    assert run(["ingest", FILES[0], "-o", str(tmp_path)]) == 0
    assert run(["ingest", str(tmp_path), "-o", str(tmp_path)]) == 2
