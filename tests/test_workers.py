"""``analyze --workers``: the result of one process, whatever becomes of the processes that read."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dpuflow
from dpuflow import keeping
from dpuflow.analysis import analyze
from dpuflow.cli import run
from dpuflow.errors import CaptureError, DpuflowError, FormatError
from dpuflow.schema.tables import Vantage
from dpuflow.vantages import vantages_of

TRACES = Path(__file__).resolve().parents[1] / "traces"
FILES = sorted(map(str, (TRACES / "mpi-iallreduce-n4").glob("node[012].pcap.gz")))
REDUCE = keeping._reduce


def files_of(trace: str) -> list[str]:
    return sorted(map(str, (TRACES / trace).glob("node*.pcap.gz")))


def bytes_of(captures: list[str], path: Path, workers: int) -> bytes:
    dpuflow.write_json(analyze(vantages_of(captures), workers=workers), str(path))
    return path.read_bytes()


@pytest.mark.parametrize("trace", ["nccl-ddp-n3", "gloo-groups-n6", "nccl-sockets-reduce-scatter-n4"])
def test_the_bytes_are_those_of_one_process(tmp_path: Path, trace: str) -> None:
    files = files_of(trace)
    cut = tmp_path / "cut.pcap.gz"
    cut.write_bytes(Path(files[1]).read_bytes()[:-2000])
    rotated = [f"--vantage=a={files[0]}", f"--vantage=b={cut}", *files[2:]]
    for number, workers in enumerate(("1", "2")):
        asked = ["--json", str(tmp_path / f"{number}.json"), "--quiet"]
        assert run(["analyze", *rotated, *asked, "--workers", workers]) == 0
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()


def test_column_files_and_standard_input_are_read_likewise(tmp_path: Path) -> None:
    assert run(["ingest", FILES[0], "-o", str(tmp_path / "tables"), "--workers", "1"]) == 0
    captures = [str(tmp_path / "tables" / "node0.dpuflow"), "-", *FILES[2:]]
    found = []
    for workers in ("1", "3"):
        command = [sys.executable, "-m", "dpuflow", "analyze", *captures, "--json", "-", "--workers", workers]
        with open(FILES[1], "rb") as given:
            found.append(subprocess.run(command, stdin=given, capture_output=True, check=True).stdout)
    assert found[0] == found[1]
    assert found[0]


def test_what_cannot_be_read_is_said_as_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pcap").write_text("no capture at all, but long enough to be looked at")
    said = []
    for workers in ("1", "2"):
        assert run(["analyze", FILES[0], str(tmp_path / "text.pcap"), "--workers", workers]) == 1
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "text.pcap" in said[0]


@pytest.mark.parametrize("error", [CaptureError("a.pcap", 7, "is cut"), FormatError("b", "is no capture")])
def test_errors_pass_from_process_to_process(error: DpuflowError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def killed_once(vantage: Vantage, file: str) -> bool:
    """As the kernel ends a process that has taken too much memory; not a second time."""
    mark = Path(os.environ["KILLED"])
    if vantage.name == "node1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return REDUCE(vantage, file)


def killed(vantage: Vantage, file: str) -> bool:
    """Whenever it reads this capture."""
    if vantage.name == "node1":
        os.kill(os.getpid(), signal.SIGKILL)
    return REDUCE(vantage, file)


def test_a_process_that_is_killed_is_made_up_for(tmp_path: Path, monkeypatch: Any) -> None:
    wanted = bytes_of(FILES, tmp_path / "one.json", 1)
    monkeypatch.setenv("KILLED", str(tmp_path / "mark"))
    monkeypatch.setattr(keeping, "_reduce", killed_once)
    assert bytes_of(FILES, tmp_path / "two.json", 2) == wanted
    assert (tmp_path / "mark").exists()


def test_what_no_process_can_read_is_left_out_and_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(keeping, "_reduce", killed)
    found = analyze(vantages_of(FILES), workers=3)
    rest = analyze(vantages_of([FILES[0], FILES[2]]))
    assert found.limits == [*rest.limits, f"node1 ({FILES[1]}) is left out: {keeping.KILLED}."]
    found.limits = rest.limits
    dpuflow.write_json(found, str(tmp_path / "found.json"))
    dpuflow.write_json(rest, str(tmp_path / "rest.json"))
    assert (tmp_path / "found.json").read_bytes() == (tmp_path / "rest.json").read_bytes()


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(keeping, "_reduce", killed)
    with pytest.raises(DpuflowError, match=r"node1 .* is left out: the process"):
        keeping.read_by_workers([Vantage("node1", FILES[1])], 2)
    assert len(keeping.read_by_workers(vantages_of(FILES), 2)[0]) == 2
    assert not list(tmp_path.iterdir())
