"""Captures made to take as much memory as their bytes can: each shape strains another table of the analysis.

Classic pcap, Ethernet, stamps in ns. ``SHAPES`` maps a name to a function of a size and a ``random.Random``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    Frames = Iterator[tuple[bytes, int]]  # a frame as captured, and its length on the wire

START_NS = 1_700_000_000 * 10**9
SEND_ONLY, WRITE_FIRST, WRITE_MIDDLE, WRITE_ONLY, READ_REQUEST, ACK = 0x04, 0x06, 0x07, 0x0A, 0x0C, 0x11


def capture(frames: Frames, gap_ns: int = 1000) -> bytes:
    """A pcap of the frames, ``gap_ns`` apart."""
    out = [struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262144, 1)]
    for k, (frame, wire) in enumerate(frames):
        time = START_NS + k * gap_ns
        out.append(struct.pack("<4I", time // 10**9, time % 10**9, len(frame), wire) + frame)
    return b"".join(out)


def ipv4(src: int, dst: int, protocol: int, payload: bytes, length: int | None = None) -> bytes:
    """An Ethernet frame; ``length``: what its IP header claims."""
    total = 20 + len(payload) if length is None else length
    head = struct.pack(">BBHHHBBHII", 0x45, 2, total & 0xFFFF, 0, 0x4000, 64, protocol, 0, src, dst)
    return bytes(12) + b"\x08\0" + head + payload


def roce(src: int, dst: int, opcode: int, qp: int, psn: int, rest: bytes = b"", claimed: int = 0) -> bytes:
    """A RoCEv2 packet of ``claimed`` bytes of payload, none of which was captured."""
    bth = struct.pack(">BBHII", opcode, 0, 0xFFFF, qp & 0xFFFFFF, psn & 0xFFFFFF) + rest
    size = 8 + len(bth) + claimed + 4
    udp = struct.pack(">HHHH", 49152 + qp % 16384, 4791, size, 0)
    return ipv4(src, dst, 17, udp + bth, 20 + size)


def tcp(
    src: int, dst: int, ports: tuple[int, int], seq: int, data: bytes, claimed: int | None = None
) -> bytes:
    """A TCP segment; ``claimed``: bytes of data by its IP header."""
    length = None if claimed is None else 40 + claimed
    head = struct.pack(">HHIIBBHHH", *ports, seq & 0xFFFFFFFF, 1, 5 << 4, 0x18, 1000, 0, 0)
    return ipv4(src, dst, 6, head + data, length)


def _write(src: int, dst: int, qp: int, psn: int, size: int) -> tuple[bytes, int]:
    frame = roce(src, dst, WRITE_ONLY, qp, psn, struct.pack(">QII", psn << 12, 1, size), size)
    return frame, len(frame) + size


def strangers(size: int, rng: Random) -> Frames:
    """Every packet from and to addresses never seen before."""
    for k in range(size // 90):
        yield _write(10 << 24 | 2 * k, 10 << 24 | 2 * k + 1, k, k, 4096)


def hub(size: int, rng: Random) -> Frames:
    """One endpoint that talks to all others once."""
    for k in range(size // 90):
        yield _write(10 << 24, 10 << 24 | k + 1, k, k, 4096)


def circle(size: int, rng: Random) -> Frames:
    """A ring of as many ranks as there are packets in a round."""
    ranks = max(size // 90 // 4, 3)
    for k in range(4 * ranks):
        a = k % ranks
        yield _write(10 << 24 | a, 10 << 24 | (a + 1) % ranks, a, k // ranks, 4096)


def mesh(size: int, rng: Random) -> Frames:
    """Everybody to everybody, round by round."""
    ranks = max(int((size / 90) ** 0.5), 3)
    for step in range(1, ranks):
        for a in range(ranks):
            yield _write(10 << 24 | a, 10 << 24 | (a + step) % ranks, step * ranks + a, 0, 4096)


def chatter(size: int, rng: Random) -> Frames:
    """Two endpoints, a message a packet."""
    for k in range(size // 84):
        a = k & 1
        frame = roce(10 << 24 | a, 10 << 24 | 1 - a, SEND_ONLY, 5 + a, k // 2, b"", 64)
        yield frame, len(frame) + 64


def anyone(size: int, rng: Random) -> Frames:
    """A thousand endpoints, any to any, of any size."""
    psn: dict[tuple[int, int], int] = {}
    for _ in range(size // 90):
        a, b = rng.randrange(1000), rng.randrange(1000)
        psn[a, b] = psn.get((a, b), 0) + 1
        yield _write(10 << 24 | a, 10 << 24 | b, a * 1000 + b, psn[a, b], rng.choice((0, 64, 4096)))


def leaps(size: int, rng: Random) -> Frames:
    """Sequence numbers that leap by millions: what was lost between is not known."""
    for k in range(size // 84):
        opcode = rng.choice((WRITE_FIRST, WRITE_MIDDLE, SEND_ONLY, READ_REQUEST))
        extra = struct.pack(">QII", k, 1, rng.choice((0xFFFFFFFF, 1 << 30))) if opcode in (6, 12) else b""
        yield roce(10 << 24, 10 << 24 | 1, opcode, 5, k * 4_000_000, extra, 1024), 1100


def requests(size: int, rng: Random) -> Frames:
    """READ requests of 2 GiB and more, none answered."""
    for k in range(size // 90):
        head = struct.pack(">QII", k << 32, 1, 0xFFFFFFFF)
        yield roce(10 << 24, 10 << 24 | 1, READ_REQUEST, 5, k * 1_000_000, head), 90


def _stream(size: int, message: bytes, piece: int = 1400) -> Frames:
    seq, count = 1, piece // len(message)
    for _ in range(max(size // (70 + piece), 1)):
        data = message * count
        frame = tcp(10 << 24, 10 << 24 | 1, (4000, 5000), seq, data)
        seq += len(data)
        yield frame, len(frame)


def small_nccl(size: int, rng: Random) -> Frames:
    """NCCL's sockets: messages of four bytes that say they hold nothing, hundreds a packet."""
    yield (frame := tcp(10 << 24, 10 << 24 | 1, (4000, 5000), 1, bytes(4))), len(frame)
    for k in range(max(size // 1470, 1)):
        frame = tcp(10 << 24, 10 << 24 | 1, (4000, 5000), 5 + 1400 * k, bytes(1400))
        yield frame, len(frame)


def small_gloo(size: int, rng: Random) -> Frames:
    """Gloo's announcements, 48 bytes each."""
    return _stream(size, struct.pack("<6Q", 48, 2, 5 << 24, 0, 4096, 0))


def small_gloo_data(size: int, rng: Random) -> Frames:
    """Gloo's messages without data."""
    return _stream(size, struct.pack("<6Q", 48, 1, 5 << 24, 0, 0, 0))


def small_ob1(size: int, rng: Random) -> Frames:
    """Open MPI's match headers without data."""
    return _stream(size, struct.pack("<BBHI", 65, 1, 0, 14) + struct.pack("<BBHiiH", 65, 0, 1, 0, 5, 1))


def small_ucx(size: int, rng: Random) -> Frames:
    """UCX's active messages of eight bytes."""
    return _stream(size, struct.pack("<BI", 2, 8) + bytes(8))


def cut_segments(size: int, rng: Random) -> Frames:
    """Segments of 64 KiB of which only headers were captured, in a stream of small messages."""
    message = struct.pack("<6Q", 48, 2, 5 << 24, 0, 4096, 0)
    seq = 1
    for _ in range(max(size // 110, 1)):
        frame = tcp(10 << 24, 10 << 24 | 1, (4000, 5000), seq, message, 64_000)
        seq += 64_000
        yield frame, 64_054


def cut_nccl(size: int, rng: Random) -> Frames:
    """The same of NCCL's sockets."""
    seq = 1
    for k in range(max(size // 76, 1)):
        data = bytes(4) if k % 2 else struct.pack("<I", 8)
        frame = tcp(10 << 24, 10 << 24 | 1, (4000, 5000), seq, data, 64_000)
        seq += 64_000
        yield frame, 64_054


def cut_ob1(size: int, rng: Random) -> Frames:
    """Open MPI's numbers leap by what fits into segments of 64 KiB, of which only headers were captured."""
    hello = struct.pack("<BBHI", 65, 1, 0, 14) + struct.pack("<BBHiiH", 65, 0, 1, 0, 5, 0)
    yield (frame := tcp(10 << 24 | 1, 10 << 24, (5000, 4000), 1, hello)), len(frame)
    seq = number = 0
    for _ in range(max(size // 170, 1)):
        message = struct.pack("<BBHI", 65, 1, 0, 14) + struct.pack("<BBHiiH", 65, 0, 1, 0, 5, number & 0xFFFF)
        yield (frame := tcp(10 << 24, 10 << 24 | 1, (4000, 5000), seq, message)), len(frame)
        seq += len(message)
        yield tcp(10 << 24, 10 << 24 | 1, (4000, 5000), seq, b"", 2700 * 22), 54 + 2700 * 22
        seq, number = seq + 2700 * 22, number + 1 + 2700


def holes(size: int, rng: Random) -> Frames:
    """Segments behind a hole that is never filled, on many connections."""
    for k in range(size // 130):
        data = struct.pack("<6Q", 48, 2, 5 << 24, 0, 4096, 0)
        port = 1000 + k % 500
        frame = tcp(10 << 24, 10 << 24 | 1, (port, 5000), 1000 + (k // 500) * 60_000, data)
        yield frame, len(frame)


def connections(size: int, rng: Random) -> Frames:
    """A connection a packet, with the beginnings of any framing."""
    starts = (
        struct.pack("<6Q", 48, 2, 5 << 24, 0, 4096, 0), struct.pack("<QI", 0x564AB9F2FC4B9D6C, 3) + bytes(4),
        struct.pack("<BBHI", 65, 1, 0, 14) + bytes([65]) + bytes(13), bytes(40), rng.randbytes(20),
    )  # fmt: skip
    for k in range(size // 110):
        frame = tcp(rng.randrange(2**32), rng.randrange(2**32), (k & 0xFFFF, k >> 16), k, starts[k % 5])
        yield frame, len(frame)


def nothing(size: int, rng: Random) -> Frames:
    """Records without a byte of a frame."""
    for _ in range(size // 16):
        yield b"", 60


def pauses(size: int, rng: Random) -> Frames:
    """PFC frames."""
    for _ in range(size // 50):
        frame = bytes(12) + b"\x88\x08" + struct.pack(">HH8H", 0x101, 255, *[65535] * 8)
        yield frame, 60


def zero_lengths(size: int, rng: Random) -> Frames:
    """IP headers whose total length is 0, as offload leaves them, in records that claim 4 GiB."""
    message = struct.pack("<6Q", 48, 2, 5 << 24, 0, 4096, 0)
    for k in range(size // 110):
        frame = tcp(10 << 24, 10 << 24 | 1, (4000, 5000), 1 + k * 40, message, -40)
        yield frame, 0xFFFFFFFF if k % 2 else 200_000


SHAPES: dict[str, Callable[[int, Random], Frames]] = {
    each.__name__: each
    for each in (
        strangers, hub, circle, mesh, chatter, anyone, leaps, requests, small_nccl, small_gloo,
        small_gloo_data,
        small_ob1, small_ucx, cut_segments, cut_nccl, cut_ob1, holes, connections, nothing, pauses,
        zero_lengths,
    )
}  # fmt: skip
