"""Captures of TCP with all that names the application taken out: payload zeroed, ports renumbered.

What is left is structure: who sends how many bytes to whom, when, and where writes end.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

_RECORD = struct.Struct("<IIII")


def blind(source: Path, target: Path, ports: dict[tuple[bytes, bytes], tuple[int, int]]) -> None:
    """Rewrite the classic little-endian Ethernet pcap ``source`` (.gz or not) to ``target``, plain.

    ``ports`` keeps the new port numbers of each connection, so that all captures of a case agree.
    """
    data = bytearray((gzip.open if source.suffix == ".gz" else open)(source, "rb").read())
    at = 24
    while at < len(data):
        captured = _RECORD.unpack_from(data, at)[2]
        at += _RECORD.size
        _blind(data, at, at + captured, ports)
        at += captured
    target.write_bytes(data)


def _blind(data: bytearray, at: int, end: int, ports: dict[tuple[bytes, bytes], tuple[int, int]]) -> None:
    ip = at + 14
    if data[at + 12 : ip] != b"\x08\x00" or data[ip + 9] != 6:
        return
    tcp = ip + 4 * (data[ip] & 15)
    ends = [
        bytes(data[ip + 12 : ip + 16] + data[tcp : tcp + 2]),
        bytes(data[ip + 16 : ip + 20] + data[tcp + 2 : tcp + 4]),
    ]
    low, high = sorted(ends)
    count = len(ports)
    numbers = ports.setdefault((low, high), (20000 + count, 61000 - count))
    struct.pack_into(">HH", data, tcp, *(numbers if ends[0] == low else numbers[::-1]))
    payload = tcp + 4 * (data[tcp + 12] >> 4)
    # Bytes beyond the IP length are the frame's padding.
    total = struct.unpack_from(">H", data, ip + 2)[0]
    end = min(end, ip + total) if total else end
    if payload < end:
        data[payload:end] = bytes(end - payload)
