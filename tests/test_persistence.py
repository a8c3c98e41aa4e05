"""What people are used to from other tools: widths, colour, exit statuses, tcpdump's options, manuals."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zstandard
from oracles import need_tshark
from scripted_results import job

from dpuflow import analysis
from dpuflow.cli import run
from dpuflow.cli.capture import _Megabytes, _Seconds
from dpuflow.cli.manpages import files
from dpuflow.cli.progress import ProgressLine
from dpuflow.cli.vantages import Moment
from dpuflow.errors import OptionError
from dpuflow.export import export_finding, frames
from dpuflow.live.output import Output, Rotation, format_of
from dpuflow.reports import html
from dpuflow.reports.text import write_text
from dpuflow.results import Analysis, Evidence

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "traces" / "gloo-allreduce-n4"


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result and the Lua script of a trace with a late rank."""
    folder = tmp_path_factory.mktemp("analysed")
    arguments = ["--json", str(folder / "r.json"), "--lua", str(folder / "r.lua"), "--quiet"]
    assert run(["analyze", str(TRACE), *arguments]) == 0
    return folder


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_lines_are_as_wide_as_the_terminal_and_filters_are_never_cut(columns: int) -> None:
    result = job(late_ms=10)
    filter = "ipv6.src == fe80::5054:ff:feaa:1 && ipv6.dst == fe80::5054:ff:feaa:2 && tcp.srcport == 37285"
    result.findings[0].evidence = [Evidence(2, (120, 161), filter)]
    stream = io.StringIO()
    write_text(result, stream, columns=columns)
    lines = stream.getvalue().splitlines()
    assert f"      {filter}" in lines
    others = [line for line in lines if filter not in line]
    assert max(map(len, others)) <= columns
    if columns == 200:
        assert max(map(len, others)) > 110


def test_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "70")
    stream = Terminal()
    write_text(job(late_ms=10), stream, color=False)
    widths = [len(line) for line in stream.getvalue().splitlines() if "tcp.port" not in line]
    assert 60 < max(widths) <= 70


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("-", "node2 was standard input, no file holds its packets"),
        ("live", "node2 was captured live, no file holds its packets"),
        ("n.dpuflow", "node2 holds messages, no packets"),
    ],
)
def test_what_wireshark_cannot_open_has_no_packet_number(file: str, said: str) -> None:
    result = job(late_ms=10)
    for capture in result.captures:
        capture.files = [file]
    stream = io.StringIO()
    write_text(result, stream)
    for text in (stream.getvalue(), html.page(result)):
        assert f"{said}; the filter" in text
        assert "packets 120" not in text
    assert f"Packets cannot be opened: {said}." in html.page(result)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (False, "stdin was standard input, no file holds its packets"),
        (True, "node2 holds messages, no packets"),
    ],
)
def test_evidence_that_no_file_holds_says_so(
    columns: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packets, file = TRACE / "node2.pcap.gz", "-"
    if columns:
        assert run(["ingest", str(packets), "-o", str(tmp_path)]) == 0
        file = str(tmp_path / "node2.dpuflow")
    with open(packets, "rb") as stream:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
        assert run(["analyze", file, "--quiet", "--json", str(tmp_path / "result.json")]) == 0
    found = json.loads((tmp_path / "result.json").read_text())["findings"]
    assert {each["unopenable"] for finding in found for each in finding["evidence"]} == {said}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[Analysis]:
    """The result that ``dpuflow analyze`` comes to."""
    answer = [job(late_ms=10)]
    monkeypatch.setattr(analysis, "analyze_marked", lambda *_, **__: (answer[0], []))
    return answer


def test_fail_on(scripted: list[Analysis]) -> None:
    assert run(["analyze", "a.pcap", "--quiet"]) == 0
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "late"]) == 3
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "warning"]) == 3
    scripted[0] = job()
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "warning"]) == 0
    scripted[0].findings = job(late_ms=10).findings
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "late"]) == 0
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "warning"]) == 3
    scripted[0].findings[0].severity = "info"
    assert run(["analyze", "a.pcap", "--quiet", "--fail-on", "warning"]) == 0


@pytest.mark.parametrize(("option", "coloured"), [("always", True), ("never", False), ("auto", False)])
def test_color(
    option: str, coloured: bool, scripted: list[Analysis], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["analyze", "a.pcap", "--color", option]) == 0
    assert ("\033[1;31m" in capsys.readouterr().out) == coloured


def test_times_and_sizes_are_read_as_people_write_them() -> None:
    seconds, size, moment = _Seconds(min=0), _Megabytes(), Moment()
    assert [seconds.convert(t, None, None) for t in ("10", "10s", "500ms", "5min")] == [10, 10, 0.5, 300]
    assert [size.convert(t, None, None) for t in ("100", "64Mi", "1G")] == [10**8, 64 << 20, 10**9]
    ago = time.time_ns() - moment.convert("-5m", None, None)
    assert ago == pytest.approx(300e9, rel=0.01)


def test_options_of_tcpdump_have_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "--help"]) == 0
    said = capsys.readouterr().out
    for short, long in (
        ("-c", "--count"), ("-D", "--list-interfaces"), ("-s", "--snaplen"), ("-G", "--rotate-time"),
        ("-C", "--rotate-size"), ("-W", "--files"), ("-w", "--write"), ("-i", "--interface"),
    ):  # fmt: skip
        assert f"{short}, {long}" in said
    assert run(["capture", "-D"]) == 0
    assert re.search(r"^\d+\.lo \[up", capsys.readouterr().out, re.MULTILINE)


def blocks(packets: int) -> tuple[bytes, bytes]:
    """A section with one Ethernet interface, and packet blocks."""

    def block(kind: int, body: bytes) -> bytes:
        return struct.pack("<II", kind, len(body) + 12) + body + struct.pack("<I", len(body) + 12)

    head = block(0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))
    head += block(1, struct.pack("<HHI", 1, 0, 128) + struct.pack("<HH", 9, 1) + b"\x09\0\0\0" + bytes(4))
    body = b""
    for number in range(packets):
        at = 1_795_251_363_000_000_001 + number
        body += block(6, struct.pack("<5I", 0, at >> 32, at & 0xFFFFFFFF, 61, 900) + bytes(61) + bytes(3))
    return head, body


@pytest.mark.parametrize(
    "name", ["x.pcap", "x.pcapng", "x.pcap.gz", "x.pcapng.gz", "x.pcapng.zst", "x.pcap.zst"]
)
def test_a_capture_is_what_its_name_says(name: str, tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class Piece:
        data: bytes

    head, body = blocks(3)
    output = Output(str(tmp_path / name), lambda: head, lambda: b"", Rotation())
    output.write(Piece(body))  # type: ignore[arg-type]
    output.note()
    output.close()
    data = (tmp_path / name).read_bytes()
    kind, packed = format_of(name)
    if packed:
        assert data.startswith(b"\x1f\x8b" if packed == "gz" else b"\x28\xb5\x2f\xfd")
        data = (
            gzip.decompress(data)
            if packed == "gz"
            else zstandard.ZstdDecompressor().decompressobj().decompress(data)
        )
    assert data[:4] == (b"\x4d\x3c\xb2\xa1" if kind == "pcap" else b"\x0a\x0d\x0d\x0a")
    need_tshark()
    (tmp_path / f"plain.{kind}").write_bytes(data)
    command = [
        "tshark",
        "-r",
        str(tmp_path / f"plain.{kind}"),
        "-T",
        "fields",
        "-e",
        "frame.time_epoch",
        "-e",
        "frame.len",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == [v for n in range(3) for v in (f"1795251363.00000000{n + 1}", "900")]


def test_messages_are_not_called_packets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "-i", "lo", "--mode", "messages", "-w", "x.pcapng"]) == 2
    assert "writes a column file: give it a name such as node0.dpuflow" in capsys.readouterr().err


def test_progress_goes_on_while_analysing() -> None:
    """A stage that begins in the first half second, and then says nothing more, is shown all the same."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ProgressLine(stream=stream) as progress:
        progress("matching", 2, 3)
        end = time.monotonic() + 10
        while "matching" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.05)
    assert "matching [" in stream.getvalue()


def test_manual_pages_and_completions_are_up_to_date() -> None:
    """``make help-text`` writes them again."""
    for path, text in files().items():
        assert path.read_text() == text, path


def test_completion_answers(tmp_path: Path) -> None:
    import os

    ask = os.environ | {
        "COMP_WORDS": "dpuflow analyze --col",
        "COMP_CWORD": "2",
        "_DPUFLOW_COMPLETE": "bash_complete",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dpuflow"], env=ask, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "plain,--color\n"


def test_a_findings_packets_are_exported_with_the_verdict(analysed: Path) -> None:
    target = analysed / "x.pcapng"
    assert run(["export", "straggler", "--from", str(analysed / "r.json"), "-w", str(target)]) == 0
    need_tshark()
    command = ["tshark", "-r", str(target), "-T", "fields", "-e", "frame.comment", "-e", "ip.src"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    result = json.loads((analysed / "r.json").read_text())
    (finding,) = [each for each in result["findings"] if each["condition"] == "straggler"]
    shown = {f"dpuflow: straggler; packet {e['packets'][0]} of node2\t10.77.0.3" for e in finding["evidence"]}
    assert shown <= set(lines)
    assert {line.split("\t")[1] for line in lines} == {"10.77.0.3"}
    said = subprocess.run(["capinfos", str(target)], capture_output=True, text=True, check=True).stdout
    assert finding["summary"] in said


@pytest.mark.parametrize(
    ("name", "magic"),
    [("x.pcap", b"\x4d\x3c\xb2\xa1"), ("x.pcapng", b"\n\r\r\n"), ("x.pcapng.gz", b"\x1f\x8b"),
     ("x.pcap.zst", b"\x28\xb5\x2f\xfd")],
)  # fmt: skip
def test_an_exported_file_is_what_its_name_says(name: str, magic: bytes, analysed: Path) -> None:
    """With all late entries' packets in it: those of each collective that the rank was late in by itself."""
    target = str(analysed / name)
    result = json.loads((analysed / "r.json").read_text())
    written = export_finding(result, "straggler", target)
    assert Path(target).read_bytes().startswith(magic)
    assert len(list(frames([target]))) == written >= 25
    assert len(result["findings"][0]["evidence"]) == 25


def test_a_finding_without_packets_says_so() -> None:
    result = job(late_ms=10)
    result.findings[0].evidence = []
    text = io.StringIO()
    write_text(result, text)
    assert "No packets to open: none shows it by itself." in text.getvalue()


def test_what_cannot_be_exported_is_said(analysed: Path) -> None:
    result = json.loads((analysed / "r.json").read_text())
    with pytest.raises(OptionError, match=r"no finding 'hang' in this result; it has: 0 \(straggler\)"):
        export_finding(result, "hang", "x")
    for capture in result["captures"]:
        capture["files"] = ["-"]
    with pytest.raises(OptionError, match="read from standard input"):
        export_finding(result, "0", "x")


def test_wireshark_shows_messages_and_collectives(analysed: Path) -> None:
    need_tshark()
    fields = ["-T", "fields", "-e", "frame.number", "-e", "dpuflow.operation", "-e", "dpuflow.collective"]
    command = ["tshark", "-X", "lua_script:r.lua", "-r", "node2.pcap.gz", *fields]
    # From 4.2 on Wireshark runs no scripts as root.
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as folder:
        for path in (analysed / "r.lua", TRACE / "node2.pcap.gz"):
            shutil.copyfile(path, f"{folder}/{path.name}")
            os.chmod(f"{folder}/{path.name}", 0o644)
        os.chmod(folder, 0o755)
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=folder,
            env=os.environ | {"HOME": folder}, **user,
        )  # fmt: skip
    assert "Lua" not in done.stderr
    seen = [line.split("\t") for line in done.stdout.splitlines()]
    ids = {int(of) for _, _, of in seen if of}
    result = json.loads((analysed / "r.json").read_text())
    assert ids == {each["id"] for each in result["collectives"]}
    assert {op for _, op, of in seen if of} == {"all_reduce", "barrier"}
