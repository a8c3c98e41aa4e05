"""Captures that hold nothing to analyse, or the same twice: one sentence, and an exit status that says so."""

from __future__ import annotations

import gzip
import shutil
import struct
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
