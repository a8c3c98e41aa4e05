"""The command line: exit statuses, one sentence for every error, whole files, quick help."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import pytest
from scripted_results import job

from dpuflow import analysis
from dpuflow.cli import INTERRUPTED, PIPE_CLOSED, run
from dpuflow.cli.commands import COMMANDS, dpuflow
from dpuflow.cli.helptext import PATH, render_help
from dpuflow.cli.progress import ProgressLine
from dpuflow.cli.vantages import vantages_from
from dpuflow.errors import CaptureError, MissingError, OptionError
from dpuflow.schema.tables import Vantage

DPUFLOW = [sys.executable, "-m", "dpuflow"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``analyze`` answers with a scripted result and notes what it was asked."""
    noted: list[dict[str, Any]] = []

    def analyze(vantages: list[Vantage], **options: Any) -> Any:
        noted.append({"vantages": vantages, **options})
        return job(late_ms=10), []

    monkeypatch.setattr(analysis, "analyze_marked", analyze)
    return noted


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def analyze(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(analysis, "analyze_marked", analyze)


def test_names_of_files_steer_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a\x1b[2J\x9b31m\u202e.pcap"
    file.write_bytes(b"no capture")
    assert run(["analyze", str(file)]) == 1
    assert run(["ingest", str(file), "-o", str(tmp_path / "out")]) == 1
    trace = Path(__file__).resolve().parents[1] / "traces" / "nccl-allreduce-n2" / "node0.pcap.gz"
    file.write_bytes(gzip.decompress(trace.read_bytes())[:-9])
    for more in ([], ["--json", str(tmp_path / "a.json")]):
        assert run(["analyze", str(file), *more]) == 0
    assert run(["ingest", str(file), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not set(text) & set("\x1b\x9b\u202e")
    assert "a\ufffd[2J" in printed.err


def test_help_is_what_click_would_print() -> None:
    """Line breaks apart, which differ between versions of click; ``make help-text`` writes it again."""
    assert PATH.read_text().split() == render_help().split()


def test_help_names_every_command_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"{name} " in text
        assert what in text
        command = dpuflow.get_command(click.Context(dpuflow), name)
        assert command is not None
        assert command.help
        assert run([name, "--help"]) == 0
        assert "Examples:" in capsys.readouterr().out


def cpu_s(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_at_most_four_bare_pythons() -> None:
    bare, help_ = [], []
    for _ in range(7):
        bare.append(cpu_s([sys.executable, "-c", "pass"]))
        help_.append(cpu_s([*DPUFLOW, "--help"]))
    assert median(help_) <= 4 * median(bare)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dpuflow ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["analyze"], "Name at least one CAPTURE"),
        (["analyze", "a", "--clock", "never"], "'never' is not one of"),
        (["analyze", "a", "--threads", "0"], "--threads"),
        (["analyze", "a", "--vantage", "b"], "'b' is not NAME=FILE"),
        (["analyze", "a", "--vantage", "b=c,,d"], "'b=c,,d' is not NAME=FILE"),
        (["analyze", "a", "a"], "The file 'a' is given twice"),
        (["analyze", "-", "--vantage", "x=-"], "The file '-' is given twice"),
        (["analyze", "x.pcap", "--vantage", "x=b"], "The vantage point 'x' is given twice"),
        (["score"], "Give pairs"),
        (["score", "a", "b", "c"], "Give pairs"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["/a/node0.pcap.gz"], ["node0"]),
        (["x.pcapng.zst", "y.PCAP", "z"], ["x", "y", "z"]),
        (["-", "b.pcap"], ["stdin", "b"]),
        (["run/a/eth0.pcap", "run/b/eth0.pcap", "c.pcap"], ["a/eth0", "b/eth0", "c"]),
        (["1/x/c.pcap", "2/x/c.pcap"], ["1/x/c", "2/x/c"]),
        ([".pcap"], [".pcap"]),
    ],
)
def test_vantage_points_are_named_after_files(files: list[str], names: list[str]) -> None:
    assert [v.name for v in vantages_from(tuple(files), ())] == names


def test_options_reach_the_library(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.yaml"
    ranks.write_text("10.0.0.1: 5\n")
    arguments = ["a.pcap", "--vantage", "sw=b,c", "--clock", "trust", "--threads", "2", "--ranks", str(ranks)]
    assert run(["analyze", *arguments]) == 0
    (call,) = calls
    assert call["vantages"] == [Vantage("a", ("a.pcap",)), Vantage("sw", ("b", "c"))]
    assert (call["clock"], call["threads"], call["ranks"]["10.0.0.1"].rank) == ("trust", 2, 5)


def test_verdict_and_json_file(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    assert run(["analyze", "a", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("LATE: rank 2")
    assert json.loads(file.read_text())["schema"] == "dpuflow.analysis/1"
    assert run(["analyze", "a", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())
    assert run(["analyze", "a", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            CaptureError("a.pcap", 24, "the record is longer\nthan the file"),
            "a.pcap: the record is longer than the file at byte 24",
        ),
        (MissingError("install zstandard"), "install zstandard"),
        (FileNotFoundError(2, "No such file or directory", "a.pcap"), "a.pcap: No such file or directory"),
        (MemoryError(), "out of memory"),
    ],
)
def test_errors_are_one_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, sentence: str
) -> None:
    failing(monkeypatch, error)
    assert run(["analyze", "a.pcap"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"dpuflow: {sentence}\n")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, AssertionError("a broken promise"))
    with pytest.raises(AssertionError):
        run(["analyze", "a.pcap"])


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert run(["analyze", "a.pcap"]) == INTERRUPTED
    assert capsys.readouterr().err.strip() == "dpuflow: interrupted"


def test_ctrl_c_while_reading(tmp_path: Path) -> None:
    """A pipe that nobody writes to: the process sits in reading it."""
    pipe, target = tmp_path / "pipe.pcap", tmp_path / "result.json"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*DPUFLOW, "analyze", str(pipe), "--json", str(target)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A shell starts its background jobs, and a suite among them, with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    writer = os.open(pipe, os.O_RDWR)  # opening both ways never blocks
    try:
        os.write(writer, bytes.fromhex("4d3cb2a1020004000000000000000000ffff000001000000"))
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        os.close(writer)
        process.kill()
    assert (process.returncode, out, err.decode().strip()) == (INTERRUPTED, b"", "dpuflow: interrupted")
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"]])
def test_a_reader_that_went_away_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*DPUFLOW, *arguments], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*DPUFLOW, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "dpuflow: No space left on device\n")


def test_streams_that_the_caller_has_closed(tmp_path: Path) -> None:
    """As a daemon's are: standard input is empty, and what would be printed goes nowhere."""
    capture, target = tmp_path / "a.pcap", tmp_path / "result.json"
    capture.write_bytes(bytes.fromhex("4d3cb2a1020004000000000000000000ffff000001000000"))
    shell = '"$0" -m dpuflow analyze '
    done = subprocess.run(
        ["sh", "-c", f"{shell} - <&-", sys.executable], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "dpuflow: -: the file is empty\n")
    done = subprocess.run(
        ["sh", "-c", f'{shell} "$1" --json "$2" <&- >&- 2>&-', sys.executable, str(capture), str(target)],
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(target.read_text())["captures"][0]["packets"] == 0
    for option in ("--json", "--html", "--perfetto", "--markdown"):  # asked for there, it cannot be
        done = subprocess.run(
            ["sh", "-c", f'{shell} "$1" {option} - >&-', sys.executable, str(capture)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, "dpuflow: standard output: is closed\n")


@pytest.mark.parametrize("option", ["--json", "--html", "--lua"])
def test_a_pattern_behind_an_option_replaces_no_capture(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``--json node*.pcap.gz``: the shell makes the first of them the result's file."""
    files = sorted((Path(__file__).parents[1] / "traces" / "gloo-allreduce-n4").glob("node[01].pcap.gz"))
    copies = [Path(shutil.copy(file, tmp_path)) for file in files]
    assert run(["analyze", option, *map(str, copies)]) == 2
    assert f"{str(copies[0])!r} is a capture and would be overwritten" in capsys.readouterr().err
    assert copies[0].read_bytes() == files[0].read_bytes()


@pytest.mark.parametrize("name", ["a.pcap", "./a.pcap", "link"])
def test_a_result_never_replaces_its_capture(
    name: str,
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pcap").write_text("packets")
    Path("link").symlink_to("a.pcap")
    assert run(["analyze", "--vantage", "x=b.pcap,a.pcap", "--json", name]) == 2
    assert f"'{name}' is an input and would be overwritten" in capsys.readouterr().err
    assert run(["analyze", "a.pcap", "--json", ""]) == 2
    assert "the name of the file is empty" in capsys.readouterr().err
    assert Path("a.pcap").read_text() == "packets"
    assert calls == []
    assert run(["score", "a.pcap", ".", "--json", name]) == 2


@pytest.mark.parametrize("options", [["--quiet"], ["--json", "-"]])
def test_without_a_verdict_damage_is_still_said(
    options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(bytes.fromhex("4d3cb2a1020004000000000000000000ffff000001000000") + bytes(7))
    assert run(["analyze", str(path), *options]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith(f"dpuflow: {path}: ")
    assert "cut short" in printed
    assert "at byte 24" in printed


def test_a_missing_capture_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DPUFLOW, "analyze", str(tmp_path / "none.pcap")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dpuflow: ")
    assert str(tmp_path / "none.pcap") in done.stderr
    assert done.stderr.count("\n") == 1


def test_score_prints_a_table_or_json(
    calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from test_score import meta_of, truth_of

    (tmp_path / "truth.json").write_text(json.dumps(truth_of(job(late_ms=10))))
    (tmp_path / "meta.json").write_text(json.dumps(meta_of()))
    result = str(tmp_path / "result.json")
    assert run(["analyze", "a", "--quiet", "--json", result]) == 0
    assert run(["score", result, str(tmp_path)]) == 0
    header, row, held = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["case", "true", "found"]
    assert row.split()[:3] == ["made_up", "10", "100"]
    assert held.startswith("error_ns: 100 % of 40 exact entries")
    assert run(["score", result, str(tmp_path), "--json", "-", "--margin-ms", "20"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["last_asked"] == 0
    assert run(["score", result, str(tmp_path / "nowhere")]) == 1
    assert "nowhere/truth.json: No such file" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_after_a_while_and_is_wiped() -> None:
    now = [0.0]
    stream = Terminal()
    with ProgressLine(stream=stream, clock=lambda: now[0]) as progress:
        progress("reading", 1, 10)
        assert stream.getvalue() == ""
        now[0] = 1.0
        progress("reading", 5, 10)
        progress("reading", 6, 10)  # too soon after
        now[0] = 2.0
        progress("joining", 1234, 0)
    lines = stream.getvalue().split("\r")
    assert lines[1] == f"reading [{'#' * 15}{'.' * 15}]  50%"
    assert lines[2].rstrip() == "joining 1,234"
    assert lines[3:] == [" " * len("joining 1,234"), ""]
    assert len(lines[2]) == len(lines[1])


@pytest.mark.parametrize(("enabled", "stream"), [(False, Terminal()), (True, io.StringIO())])
def test_progress_is_silent_when_not_wanted(enabled: bool, stream: io.StringIO) -> None:
    with ProgressLine(enabled, stream, clock=iter(range(0, 100, 10)).__next__) as progress:
        progress("reading", 1, 2)
    assert stream.getvalue() == ""


def test_nothing_to_analyse_is_said_so() -> None:
    with pytest.raises(OptionError, match="at least one vantage point"):
        analysis.analyze([])


@pytest.mark.parametrize(
    ("last", "status"), [("0", 0), ("(_ for _ in ()).throw(KeyboardInterrupt)", INTERRUPTED)]
)
def test_a_ctrl_c_at_the_very_end_ends_like_any_other(last: str, status: int) -> None:
    """After the last line there is nothing to interrupt; before it, it is said in one sentence."""
    script = (
        "import atexit, os, signal, time, dpuflow.cli as cli\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.05)))\n"
        f"cli.run = lambda arguments: {last}\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("target", "name"), [("/dev/full", "/dev/full"), ("-", "standard output")])
def test_a_full_disk_names_what_could_not_be_written(target: str, name: str) -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from scripted_results import job\n"
        "from dpuflow.errors import DpuflowError\n"
        "import dpuflow, dpuflow.cli as cli\n"
        f"cli._command = lambda arguments: dpuflow.write_json(job(), {target!r}) or 0\n"
        "sys.exit(cli.run([]))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == f"dpuflow: {name}: No space left on device\n"
