"""Captures behind a mirror's tunnel, cut before what the analysis needs of NCCL: said, not guessed."""

from __future__ import annotations

import gzip
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from feeding import pieces

import dpuflow
from dpuflow.agent.stream import Stream
from dpuflow.analysis import analyze_tables
from dpuflow.reports.headline import headline
from dpuflow.reports.names import Names
from dpuflow.store.columns import load_tables
from dpuflow.vantages import vantages_of

if TYPE_CHECKING:
    from pathlib import Path

    from dpuflow.results import Analysis

CASE = "captures/nccl/tree-ll-n16-midrun-random"
TUNNEL = 50  # bytes of either


def outer(tunnel: str, length: int) -> bytes:
    """Headers of ERSPAN II or VXLAN over IPv4 in front of a frame."""
    inside = length + TUNNEL - 14
    erspan = tunnel == "erspan"
    sizes = (0x45, 0, inside, 0, 0, 64, 47 if erspan else 17, 0)
    ip = struct.pack(">BBHHHBBH4s4s", *sizes, b"\x0a\x63\0\1", b"\x0a\x63\0\2")
    head = b"\x02\0\0\0\0\1\x02\0\0\0\0\2\x08\0" + ip
    if erspan:
        return head + struct.pack(">HHIII", 0x1000, 0x88BE, 0, 0x10010000, 0)
    return head + struct.pack(">HHHHII", 50000, 4789, inside - 20, 0, 1 << 27, 7 << 8)


def wrap(source: Path, target: Path, tunnel: str, snap: int, truncated: bool = False) -> None:
    """The captures of ``source`` as a mirror would send them; ``truncated``: by the mirror itself."""
    for file in sorted(source.glob("*.pcap.gz")):
        data = gzip.decompress(file.read_bytes())
        out, at = [data[:16] + struct.pack("<II", snap, 1)], 24
        while at < len(data):
            seconds, part, kept, length = struct.unpack_from("<IIII", data, at)
            frame = (outer(tunnel, length) + data[at + 16 : at + 16 + kept])[:snap]
            stated = len(frame) if truncated else length + TUNNEL
            out.append(struct.pack("<IIII", seconds, part, len(frame), stated) + frame)
            at += 16 + kept
        (target / file.stem).write_bytes(b"".join(out))


def analysed(folder: Path) -> tuple[Analysis, str, str]:
    """The result, its first line, and its limits."""
    result = dpuflow.analyze(vantages_of([str(folder)]))
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    return result, headline(result, late, Names(result))[0], " ".join(result.limits)


@pytest.mark.parametrize(("tunnel", "truncated"), [("erspan", False), ("vxlan", False), ("erspan", True)])
def test_cut_entries_are_said(shared: Path, tmp_path: Path, tunnel: str, truncated: bool) -> None:
    wrap(shared / CASE, tmp_path, tunnel, 128, truncated)
    result, first, limits = analysed(tmp_path)
    assert not result.collectives
    assert "at least 132 bytes" in first
    assert "node0.pcap" in limits
    assert "at least 132 bytes" in limits
    assert "7,920" in limits


@pytest.mark.parametrize(("tunnel", "snap"), [("erspan", 132), ("erspan", 192), ("vxlan", 192)])
def test_the_length_that_is_named_does(shared: Path, tmp_path: Path, tunnel: str, snap: int) -> None:
    wrap(shared / CASE, tmp_path, tunnel, snap)
    plain, verdict, _ = analysed(shared / CASE)
    result, first, limits = analysed(tmp_path)
    assert first == verdict or snap < 192  # the ranks' numbers lie further behind
    assert [(c.op, c.algorithm, c.bytes) for c in result.collectives] == [
        (c.op, c.algorithm, c.bytes) for c in plain.collectives
    ]
    assert [(row.verdict, row.median_ns) for row in result.lateness] == [
        (row.verdict, row.median_ns) for row in plain.lateness
    ]
    assert "snap length" not in limits


def test_column_files_keep_it(shared: Path, tmp_path: Path) -> None:
    from dpuflow.ingest import ingest
    from dpuflow.store.columns import save_tables

    wrap(shared / CASE, tmp_path, "erspan", 128)
    save_tables(ingest([str(tmp_path / "node0.pcap")]), str(tmp_path / "node0.dpuflow"))
    assert load_tables(str(tmp_path / "node0.dpuflow")).info.snaplen_needed == 132


def test_the_agent_says_it_too(shared: Path, tmp_path: Path) -> None:
    wrap(shared / CASE, tmp_path, "vxlan", 128)
    stream, now = Stream("x"), 0
    for now, form, piece in pieces(tmp_path / "node0.pcap", 10**9):  # noqa: B007
        stream.feed(form, piece)
    tables = stream.snapshot(now).tables()
    assert tables.info.snaplen_needed == 132
    assert any("at least 132 bytes" in limit for limit in analyze_tables([tables]).analysis.limits)
    stream.forget(np.full(stream.held_flows(), now + 1))
    assert stream.snapshot(now).tables().info.snaplen_needed == 0
