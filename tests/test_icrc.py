"""The ICRC against captures whose CRCs an adapter or an independent program has written."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from dpuflow.packets.icrc import icrc_of

# Frame 1 of the set was captured on a ConnectX-4 Lx: a CNP (public test vector of Scapy's roce module).
CNP = bytes.fromhex("e41d2dc9a0d3e41d2dc99c4308004510003c6f19400040119b4d0a0a0a0b0a0a0a0c")


def frames(path: Path) -> list[bytes]:
    """The frames of a little-endian classic pcap, read without dpuflow's reader."""
    data, at, found = path.read_bytes(), 24, []
    while at + 16 <= len(data):
        (size,) = struct.unpack_from("<I", data, at + 8)
        found.append(data[at + 16 : at + 16 + size])
        at += 16 + size
    return found


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("rxe-cm-write-read/roce_capture_read-write-ecn.pcap", 12),
        ("rxe-cm-write-read/test.pcap", 12),
        ("huawei-roce-send-imm/roce.pcap", 105),
        ("roce-hex-scapy/roce_uts.pcap", 5),
    ],
)
def test_every_whole_packet_of_the_public_captures(shared: Path, name: str, whole: int) -> None:
    results = [icrc_of(frame) for frame in frames(shared / "captures/public" / name)]
    known = [r for r in results if r is not None]
    assert len(known) == whole
    assert [r for r in known if not r.ok] == []
