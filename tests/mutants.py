"""Inputs that were changed one by one, each to be judged by itself: packets, HTTP requests, texts.

Everything takes a ``random.Random`` and nothing else is random, so a seed tells all.
"""

from __future__ import annotations

import struct
from functools import cache
from random import Random

import mutations
from naive_parse import Record, records

LINKS = (1, 1, 1, 1, 0, 12, 101, 108, 113, 228, 229, 276, 147)
HEADERS = 120  # bytes: where headers lie
ODD = (0, 1, 2, 4, 5, 7, 8, 0x0F, 0x10, 0x40, 0x45, 0x60, 0x6F, 0x7F, 0x80, 0xFE, 0xFF)
WORDS = (
    0, 1, 7, 8, 19, 20, 27, 28, 39, 40, 0x0800, 0x86DD, 0x8100, 0x8808, 0x8915, 0x88A8, 4789, 4791, 6081,
    0xFFFF,
)  # fmt: skip


@cache
def pool(link: int, more: tuple[bytes, ...] = ()) -> list[bytes]:
    """Packets to change: random ones, and Ethernet frames of the captures ``more``."""
    rng = Random(link)
    addresses = [rng.randbytes(4) for _ in range(3)], [rng.randbytes(16) for _ in range(3)]
    frames = [mutations.random_frame(rng, link, addresses, k % 4 > 0) for k in range(600)]
    real = [r.frame for raw in more for r in records(raw) if r.link == 1 and r.frame]
    return frames + (real if link == 1 else [])


def mutant(rng: Random, frames: list[bytes]) -> bytes:
    """One of the packets with one to four changes: bits, bytes, words, a piece out or in, another's tail."""
    data = bytearray(rng.choice(frames))
    for _ in range(1 + rng.getrandbits(2)):
        size = len(data)
        if not size:
            break
        at = int(rng.random() * min(size, HEADERS))
        dice = rng.random()
        if dice < 0.3:
            data[at] ^= 1 << rng.getrandbits(3)
        elif dice < 0.5:
            data[at] = rng.choice(ODD)
        elif dice < 0.65:
            data[at : at + 2] = rng.choice(WORDS).to_bytes(2, "big")
        elif dice < 0.75:
            data[at] = rng.getrandbits(8)
        elif dice < 0.85:
            del data[int(rng.random() * size) :]
        elif dice < 0.9:
            del data[at : at + rng.choice((1, 2, 4, 8, 20))]
        elif dice < 0.95:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 20)))
        else:
            other = rng.choice(frames)
            data[at:] = other[int(rng.random() * len(other)) :]
    return bytes(data)


def mutant_capture(rng: Random, count: int, more: tuple[bytes, ...] = ()) -> bytes:
    """A pcap of ``count`` packets, each changed by itself."""
    link = rng.choice(LINKS)
    frames = pool(link, more)
    return capture_of(link, (claimed(rng, mutant(rng, frames)) for _ in range(count)))


def claimed(rng: Random, frame: bytes) -> tuple[bytes, int]:
    """With a length on the wire; some were cut when they were captured."""
    claimed = len(frame)
    dice = rng.random()
    if dice < 0.1:
        frame = frame[: int(rng.random() * claimed)]
    elif dice < 0.15:
        claimed = rng.choice((0, claimed // 2, claimed + 4, 1 << 16, 1 << 20, 0xFFFFFFFF))
    return frame, claimed


def capture_of(link: int, packets: object) -> bytes:
    """A pcap of (bytes, length on the wire), a microsecond apart."""
    out = [struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, link)]
    for number, (frame, claimed) in enumerate(packets):  # type: ignore[call-overload]
        out += (struct.pack("<4I", 1, 1000 * number, len(frame), claimed), frame)
    return b"".join(out)


def alone(record: Record) -> bytes:
    """A capture of one packet of another."""
    return capture_of(record.link, [(record.frame, record.wire_len)])


# -- HTTP ---------------------------------------------------------------------------------------

REQUESTS = tuple(
    f"{line}\r\nHost: localhost\r\n{more}\r\n".encode()
    for line, more in (
        ("GET / HTTP/1.1", ""),
        (
            "GET /metrics HTTP/1.1",
            "Accept: text/plain;q=0.5, application/openmetrics-text; version=1.0.0\r\n",
        ),
        ("GET /api/v1/lateness HTTP/1.1", "Accept-Encoding: gzip\r\n"),
        ("GET /api/v1/collectives?limit=10&after=1.2.3&since_ns=1&op=all_reduce HTTP/1.1", ""),
        ("GET /api/v1/transfers?limit=2&after=0&verb=read HTTP/1.1", ""),
        ("GET /api/v1/windows/2 HTTP/1.1", ""),
        ("GET /api/v1/windows?limit=9 HTTP/1.1", ""),
        (
            "GET /api/v1/findings?state=all&min_severity=warning&condition=straggler HTTP/1.1",
            "Authorization: Bearer x\r\n",
        ),
        ("GET /api/v1/groups HTTP/1.0", "Connection: keep-alive\r\n"),
        ("GET /api/v1/network_cost HTTP/1.1", "Range: bytes=0-10\r\nIf-None-Match: *\r\n"),
        ("HEAD /healthz HTTP/1.1", "Expect: 100-continue\r\n"),
        ("POST /api/v1/groups HTTP/1.1", "Content-Length: 3\r\n"),
        ("POST /readyz HTTP/1.1", "Transfer-Encoding: chunked\r\n"),
        ("OPTIONS * HTTP/1.1", "Origin: http://a.example\r\n"),
        ("GET /api/v1/openapi.json HTTP/1.1", "Upgrade: websocket\r\nConnection: Upgrade\r\n"),
    )
)
PIECES = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"%00", b"%2e%2e/", b"../", b"%", b"?", b"&", b"=",
    b"#", b"\xff", b"-1", b"0", b"9" * 30, b"1e400", b"nan", b"\xc3\xa9", b"Host: b\r\n",
    b"Content-Length: 99999999999\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
    b"5\r\nhello\r\n0\r\n\r\n", b"[::1]", b"HTTP/9.9", b"A" * 5000, b"X: " + b"b" * 300 + b"\r\n",
    b"limit=", b"since_ns=", b"after=", b"state=",
)  # fmt: skip


def mutant_request(rng: Random) -> bytes:
    """A request with one to six changes."""
    return mutant_text(rng, rng.choice(REQUESTS), PIECES)


def mutant_text(rng: Random, good: bytes, pieces: tuple[bytes, ...]) -> bytes:
    """A text with one to six changes: pieces in, parts out or doubled, bytes set."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        size = len(data)
        if not size:
            break
        at, dice = int(rng.random() * size), rng.random()
        end = min(at + rng.choice((1, 1, 2, 5, 20, 100)), size)
        if dice < 0.35:
            data[at:at] = rng.choice(pieces)
        elif dice < 0.55:
            data[at:end] = rng.choice(pieces)
        elif dice < 0.7:
            del data[at:end]
        elif dice < 0.8:
            data[at:at] = data[at:end]
        elif dice < 0.9:
            data[at] = rng.getrandbits(8)
        elif dice < 0.95:
            data[at] ^= 1 << rng.getrandbits(3)
        else:
            del data[at:]
    return bytes(data)
