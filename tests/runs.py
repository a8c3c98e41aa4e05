"""Captures of long runs of usual RoCE packets with odd ones between, as bytes, for the readers' tests."""

from __future__ import annotations

import struct
from random import Random

from dpuflow.wire import headers as wire

MAPPED = bytes(10) + b"\xff\xff"


def roce(rng: Random, flows: int = 40, *, options: bool = False) -> bytes:
    """An Ethernet frame with a RoCEv2 packet over IPv4, payload and ICRC of random bytes."""
    opcode = (
        rng.choice(sorted(wire.OPCODES)) if rng.random() < 0.2 else rng.choice((6, 7, 7, 7, 8, 10, 17, 129))
    )
    size = sum(n for bit, n in wire.HEADER_BYTES.items() if wire.OPCODES[opcode].headers & bit)
    pad, payload, flow = rng.randrange(4), rng.randrange(0, 60), rng.randrange(flows)
    bth = struct.pack(
        ">BBHII", opcode, rng.randrange(16) << 4 & 0xC0 | pad << 4, 0xFFFF,
        rng.randrange(4) << 30 | (flow * 7 + 3), rng.randrange(1 << 24) | rng.randrange(2) << 31,
    )  # fmt: skip
    body = bth + rng.randbytes(size + payload + pad + 4)
    udp = struct.pack(">4H", 49152 + flow, 4791, 8 + len(body), 0) + body
    header = 6 if options else 5
    ip = struct.pack(
        ">BBHHHBBH4s4s", 0x40 | header, rng.randrange(256), 4 * header + len(udp), 1, 0x4000, 64, 17, 0,
        bytes((10, 0, flow >> 8 & 255, flow & 255)), bytes((10, 1, 0, flow % 5)),
    ) + bytes(4 * header - 20)  # fmt: skip
    return b"\2\0\0\0\1\1" + b"\2\0\0\0\0" + bytes((flow % 7,)) + b"\x08\x00" + ip + udp


def odd(rng: Random, flows: int) -> tuple[bytes, int]:
    """A frame that is not usual in one way, and how many of its bytes are captured."""
    frame = bytearray(roce(rng, flows, options=rng.random() < 0.2))
    kept = len(frame)
    match rng.randrange(7):
        case 0:
            kept = rng.randrange(kept)
        case 1:
            frame[39] ^= 1 << rng.randrange(7)  # UDP length
        case 2:
            frame[17] ^= 1 << rng.randrange(7)  # total length
        case 3:
            frame[42] = rng.choice((0x15, 0x1F, 0x61, 0xE0, 0xFF))  # opcode
        case 4:
            frame[43] |= 1  # BTH version
        case 5:
            frame[12:14] = b"\x81\x00\x00\x05\x08\x00"
            kept = len(frame)
        case _:
            frame[23] = rng.choice((1, 6))  # ICMP, TCP
    return bytes(frame), kept


def frames(rng: Random, count: int, flows: int = 40, oddity: float = 0.01) -> list[tuple[bytes, int, int]]:
    """Captured bytes, wire length and stamp of ``count`` packets; now and then time goes back a little."""
    found, now = [], 1_700_000_000_000_000_000
    for _ in range(count):
        frame, kept = odd(rng, flows) if rng.random() < oddity else (roce(rng, flows), 1 << 20)
        now += rng.randrange(1000) - (500 if rng.random() < 0.01 else 0)
        found.append((frame[: min(kept, rng.choice((96, 96, 96, 128, 4000)))], len(frame), now))
    return found


def over_ipv6(frame: bytes) -> bytes:
    """The same frame with an IPv6 header for its IPv4 one: same class and protocol."""
    ip = frame[14:34]
    header = struct.pack(">IHBB", 6 << 28 | ip[1] << 20 | 0x5A5A5, len(frame) - 34, ip[9], 64)
    ends = b"".join(b"\xfd" + bytes(13) + end[2:] for end in (ip[12:16], ip[16:20]))
    return frame[:12] + b"\x86\xdd" + header + ends + frame[34:]


def pcap(packets: list[tuple[bytes, int, int]], order: str = "<") -> bytes:
    """Classic pcap with nanoseconds, Ethernet."""
    parts = [struct.pack(order + "IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 4000, 1)]
    for data, length, now in packets:
        parts.append(struct.pack(order + "4I", now // 10**9, now % 10**9, len(data), length) + data)
    return b"".join(parts)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    """A pcapng block around ``body``, padded."""
    body += bytes(-len(body) % 4)
    size = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + size + body + size


def section(order: str = "<") -> bytes:
    """A section header."""
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def option(code: int, value: bytes, order: str = "<") -> bytes:
    """An option, padded."""
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def interface(link: int = 1, resolution: int = 9, offset: int = 0, order: str = "<", snap: int = 0) -> bytes:
    """An interface description with time resolution and offset in seconds."""
    options = option(9, bytes((resolution,)), order) + option(14, struct.pack(order + "q", offset), order)
    return block(1, struct.pack(order + "HHI", link, 0, snap) + options + bytes(4), order)


def enhanced(
    data: bytes, length: int, ticks: int, number: int = 0, options: bytes = b"", order: str = "<"
) -> bytes:
    """An enhanced packet block."""
    head = struct.pack(order + "5I", number, ticks >> 32, ticks & 0xFFFFFFFF, len(data), length)
    return block(6, head + data + bytes(-len(data) % 4) + options, order)


def pcapng(packets: list[tuple[bytes, int, int]], interfaces: int = 1) -> bytes:
    """One section; packet k on interface k mod ``interfaces``."""
    parts = [section()] + [interface() for _ in range(interfaces)]
    parts += [enhanced(data, length, now, k % interfaces) for k, (data, length, now) in enumerate(packets)]
    return b"".join(parts)
