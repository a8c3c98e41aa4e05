"""A pcapng file read independently of dpuflow: packets and the named counters of its statistics blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Packet:
    data: bytes
    wire_len: int
    time_ns: int
    interface: int
    direction: int


def blocks_of(data: bytes) -> list[tuple[int, bytes]]:
    """Type and body of each block; both lengths must agree and the last block be whole."""
    at, found = 0, []
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        assert size % 4 == 0
        assert struct.unpack_from("<I", data, at + size - 4)[0] == size, f"block at {at}"
        found.append((kind, data[at + 8 : at + size - 4]))
        at += size
    assert at == len(data)
    return found


def options_of(body: bytes) -> dict[int, bytes]:
    at, found = 0, {}
    while True:
        code, size = struct.unpack_from("<HH", body, at)
        if code == 0:
            return found
        found[code] = body[at + 4 : at + 4 + size]
        at += 4 + size + -size % 4


def packets_of(file: Path) -> list[Packet]:
    packets = []
    for kind, body in blocks_of(file.read_bytes()):
        if kind == 6:
            interface, high, low, captured, length = struct.unpack_from("<5I", body)
            data = body[20 : 20 + captured]
            flags = options_of(body[20 + captured + -captured % 4 :])
            (direction,) = struct.unpack("<I", flags[2])
            packets.append(Packet(data, length, high << 32 | low, interface, direction))
    return packets


def counters_of(file: Path) -> list[dict[str, int]]:
    """Of each interface the last statistics, by name."""
    last: dict[int, dict[str, int]] = {}
    for kind, body in blocks_of(file.read_bytes()):
        if kind == 5:
            (number,) = struct.unpack_from("<I", body)
            named = options_of(body[12:])[1].decode()
            last[number] = {name: int(count) for name, count in (part.split() for part in named.split(", "))}
    return [last[number] for number in sorted(last)]
