"""Captures that hold nothing to analyse, or the same twice: one sentence, and an exit status that says so."""

from __future__ import annotations

import gzip
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import dpuflow
from dpuflow.cli.commands import dpuflow as command
from dpuflow.errors import FormatError

JOB = Path(__file__).resolve().parents[1] / "traces/mpi-barrier-n7"
NODES = sorted(map(str, JOB.glob("node*.pcap.gz")))


def pcap(path: Path, link: int, packets: int) -> str:
    records = b"".join(struct.pack("<IIII", 1_700_000_000 + i, 0, 60, 60) + bytes(60) for i in range(packets))
    path.write_bytes(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, link) + records)
    return str(path)


@pytest.mark.parametrize(
    ("link", "name"), [(127, "ieee802_11_radiotap"), (242, "ipoib"), (299, "linktype_299")]
)
@pytest.mark.parametrize("beside", [[], NODES], ids=["alone", "beside others"])
def test_a_link_type_that_is_not_read(tmp_path: Path, link: int, name: str, beside: list[str]) -> None:
    file = pcap(tmp_path / "odd.pcap", link, 5)
    done = CliRunner().invoke(command, ["analyze", *beside, file])
    assert isinstance(done.exception, FormatError)
    assert done.exception.exit_status == 1
    told = f"{file}: link type {name} cannot be read: capture Ethernet"
    assert str(done.exception) == told


def test_captures_without_a_packet(tmp_path: Path) -> None:
    files = [pcap(tmp_path / f"node{i}.pcap", 1, 0) for i in range(3)]
    for given in (files[:1], files):
        done = CliRunner().invoke(command, ["analyze", *given])
        assert done.exit_code == 0
        told = "NO VERDICT: no packet was captured. Is it the interface of the job?"
        assert done.output.splitlines()[0] == told


def test_one_capture_without_a_packet_is_named(tmp_path: Path) -> None:
    empty = pcap(tmp_path / "node7.pcap", 1, 0)
    without, beside = dpuflow.analyze(NODES), dpuflow.analyze([*NODES, empty])
    told = "No packet was captured by node7: is it the interface of the job?"
    assert set(beside.limits) - set(without.limits) == {told}
    assert [(row.address, row.verdict) for row in beside.lateness] == [
        (row.address, row.verdict) for row in without.lateness
    ]


def test_the_same_file_given_twice_is_refused() -> None:
    done = CliRunner().invoke(command, ["analyze", NODES[0], NODES[0]])
    assert done.exit_code == 2
    assert f"The file {NODES[0]!r} is given twice." in done.output


@pytest.mark.parametrize("packed", [True, False], ids=["copied", "unpacked"])
def test_a_copy_under_another_name_counts_once_and_names_nothing(tmp_path: Path, packed: bool) -> None:
    copy = tmp_path / ("backup.pcap.gz" if packed else "backup.pcap")
    if packed:
        shutil.copy(NODES[0], copy)
    else:
        copy.write_bytes(gzip.decompress(Path(NODES[0]).read_bytes()))
    without, beside = dpuflow.analyze(NODES), dpuflow.analyze([*NODES, str(copy)])
    told = "backup is a copy of node0: the same packets with the same time stamps. It counts once."
    assert set(beside.limits) - set(without.limits) == {told}
    assert beside.lateness == without.lateness
    assert beside.endpoints == without.endpoints


def test_a_piece_of_a_capture_beside_the_whole_changes_no_verdict(tmp_path: Path) -> None:
    piece = tmp_path / "piece.pcap"
    whole = gzip.decompress(Path(NODES[0]).read_bytes())
    piece.write_bytes(whole[: len(whole) * 2 // 3])
    without, beside = dpuflow.analyze(NODES), dpuflow.analyze([*NODES, str(piece)])
    assert [(row.address, row.verdict, row.late_share) for row in beside.lateness] == [
        (row.address, row.verdict, row.late_share) for row in without.lateness
    ]


def rewritten(source: Path, target: Path, wanted: Callable[[bytes], bytes | None]) -> str:
    """A capture's packets as ``wanted`` gives them; None leaves one out."""
    raw = gzip.decompress(source.read_bytes())
    made, at = [raw[:24]], 24
    while at < len(raw):
        (kept,) = struct.unpack_from("<I", raw, at + 8)
        if (frame := wanted(raw[at + 16 : at + 16 + kept])) is not None:
            made.append(raw[at : at + 16] + frame)
        at += 16 + kept
    target.write_bytes(b"".join(made))
    return str(target)


def test_a_capture_of_other_traffic_alone_asks_for_the_interface(tmp_path: Path) -> None:
    """TCP made UDP: what a newcomer captures at the wrong interface."""
    udp = rewritten(Path(NODES[0]), tmp_path / "dns.pcap", lambda f: f[:23] + b"\x11" + f[24:])
    said = CliRunner().invoke(command, ["analyze", udp]).output
    first = said.splitlines()[0]
    assert first.startswith("NO VERDICT: none of ")
    assert first.endswith(" packets is RoCE or TCP. Is it the interface of the job?")


def test_a_capture_of_one_direction_says_so(tmp_path: Path) -> None:
    mine = socket.inet_aton(dpuflow.analyze(NODES[0]).endpoints[0].address)
    file = rewritten(Path(NODES[0]), tmp_path / "sent.pcap", lambda f: f if f[26:30] == mine else None)
    said = [each for each in dpuflow.analyze(file).limits if "only one direction" in each]
    assert len(said) == 1
    assert said[0].startswith("sent: only one direction of the traffic was captured")
    assert not any("only one direction" in each for each in dpuflow.analyze(NODES[0]).limits)
