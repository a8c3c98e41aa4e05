"""Captures of odd containers: read or refused by a sentence, in at most ten seconds of CPU a MiB."""

from __future__ import annotations

import gzip
import struct
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import zstandard

from dpuflow import analyze
from dpuflow.errors import DpuflowError
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines

MIB = 1 << 20
MACS = bytes(12)


def block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    size = len(body) + 12
    return struct.pack(order + "II", kind, size) + body + struct.pack(order + "I", size)


def section(order: str, options: bytes = b"") -> bytes:
    return block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1) + options)


def interface(order: str, link: int = 1, options: bytes = b"") -> bytes:
    return block(order, 1, struct.pack(order + "HHI", link, 0, 0) + options)


def packet(order: str, number: int, frame: bytes, options: bytes = b"") -> bytes:
    lengths = struct.pack(order + "5I", number, 0x5F000, number, len(frame), len(frame))
    return block(order, 6, lengths + frame + bytes(-len(frame) % 4) + options)


def udp(port: int, payload: bytes) -> bytes:
    return struct.pack(">HHHH", 49152, port, (8 + len(payload)) & 0xFFFF, 0) + payload


def ipv4(protocol: int, payload: bytes) -> bytes:
    size = (20 + len(payload)) & 0xFFFF
    return (
        struct.pack(">BBHHHBBH", 0x45, 0, size, 1, 0, 64, protocol, 0)
        + bytes([10, 0, 0, 1, 10, 0, 0, 2])
        + payload
    )


def ipv6(following: int, payload: bytes) -> bytes:
    return struct.pack(">IHBB", 6 << 28, len(payload) & 0xFFFF, following, 64) + bytes(31) + b"\2" + payload


def ethernet(kind: int, payload: bytes) -> bytes:
    return MACS + struct.pack(">H", kind) + payload


ROCE = ethernet(0x0800, ipv4(17, udp(4791, struct.pack(">BBHII", 4, 0, 0xFFFF, 7, 1) + bytes(1028))))
TUNNELS: tuple[Callable[[bytes], bytes], ...] = (
    lambda frame: ethernet(0x0800, ipv4(17, udp(4789, struct.pack(">II", 1 << 27, 7 << 8) + frame))),
    lambda frame: ethernet(
        0x86DD, ipv6(17, udp(6081, struct.pack(">BBHI", 2, 0, 0x6558, 0) + bytes(8) + frame))
    ),
    lambda frame: ethernet(
        0x0800,
        ipv4(
            47,
            struct.pack(">HHI", 0x1000, 0x22EB, 1)
            + struct.pack(">HHIHH", 0x2005, 1, 1, 0, 1)
            + bytes(8)
            + frame,
        ),
    ),  # ERSPAN III with a platform's own header
    lambda frame: frame[:12] + struct.pack(">HHHH", 0x88A8, 5, 0x8100, 6) + frame[12:],
)


def nested(depth: int) -> bytes:
    frame = ROCE
    for wrap, _ in zip(cycle(TUNNELS), range(depth), strict=False):
        frame = wrap(frame)
    return frame


def chain(length: int) -> bytes:
    """Extension headers of IPv6, each naming the next."""
    payload, following = ROCE[34:], 17
    for kind, _ in zip(cycle((0, 43, 44, 60, 135)), range(length), strict=False):
        payload = bytes([following, 0]) + bytes(6) + payload
        following = kind
    return ethernet(0x86DD, ipv6(following, payload))


def both_orders() -> bytes:
    parts = [section(o) + interface(o) + packet(o, 0, ROCE[:90]) for o in "<>"]
    return b"".join(parts) * (MIB // 2 // len(parts[0]) // 2)


def unlike_interfaces() -> bytes:
    links = b"".join(
        interface("<", k, struct.pack("<HHB3x", 9, 1, k % 28 if k % 2 else 0x80 | k % 64))
        for k in range(20_000)
    )
    return section("<") + links + b"".join(packet("<", k, ROCE[:90]) for k in range(0, 20_000, 20))


def options_beyond() -> bytes:
    """Options that claim more than their block holds, comments of escape sequences."""
    comment = struct.pack("<HH", 1, 12) + b"\x1b[2J\r\nLATE:\a"
    beyond = struct.pack("<HH", 2, 65535) + bytes(4)
    return (
        section("<", comment)
        + interface("<")
        + b"".join(packet("<", 0, ROCE[:90], comment + beyond) for _ in range(4000))
    )


def frames(made: list[bytes]) -> bytes:
    return section("<") + interface("<") + b"".join(packet("<", 0, frame) for frame in made)


CASES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "sections of nothing": ("pcapng", lambda: section("<") * (MIB // 28)),
    "sections of both byte orders": ("pcapng", both_orders),
    "interfaces of unlike links and clocks": ("pcapng", unlike_interfaces),
    "options beyond their block": ("pcapng", options_beyond),
    "tunnels in tunnels": (
        "pcapng",
        lambda: frames([nested(depth) for depth in (1, 2, 3, 4, 9, 40, 200)] * 5),
    ),
    "chains of extension headers": (
        "pcapng",
        lambda: frames([chain(n) for n in (1, 2, 8, 64, 1000, 8000)] * 5),
    ),
    "tags without end": (
        "pcapng",
        lambda: frames([MACS + b"\x81\0\0\5" * n for n in (1, 9, 1000, 16_000)] * 5),
    ),
    "gzip members of nothing": ("pcap.gz", lambda: gzip.compress(b"") * (MIB // 20)),
    "gzip, a name without end": ("pcap.gz", lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"A" * MIB),
    "zstd frames of nothing": ("pcap.zst", lambda: zstandard.compress(b"") * (MIB // 9)),
    "zstd, skipped frames": ("pcap.zst", lambda: struct.pack("<II", 0x184D2A50, 0) * (MIB // 8)),
    "zstd, 4 GiB to skip": ("pcap.zst", lambda: struct.pack("<II", 0x184D2A50, 0xFFFFFFFF) + bytes(MIB)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_read_or_refused_soon(name: str, tmp_path: Path) -> None:
    ending, make = CASES[name]
    file = tmp_path / f"odd.{ending}"
    file.write_bytes(make())
    started_s = time.process_time()
    try:
        result = analyze([str(file)])
        said = "\n".join([*json_lines(result), *text_lines(result)])
    except DpuflowError as error:
        said = str(error)
        assert "\n" not in said
    assert time.process_time() - started_s < 10 * max(file.stat().st_size / MIB, 1)
    assert "\x1b" not in said
    assert "\a" not in said


def test_packets_within_tunnels_and_of_each_interface_are_found(tmp_path: Path) -> None:
    """What the cases above are made of is read where it is not absurd."""
    file = tmp_path / "good.pcapng"
    file.write_bytes(
        b"".join(section(o) + interface(o) + packet(o, 0, nested(depth)) for o in "<>" for depth in range(5))
    )
    result = analyze([str(file)])
    assert [capture.packets for capture in result.captures] == [10]
    assert [flow.packets for flow in result.flows] == [10], (
        "of the innermost addresses, whatever is around them"
    )
