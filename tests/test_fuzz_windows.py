"""Random captures longer than the reader's window: records and blocks across its borders.

One thread or two, plain or compressed, the rows are those of the plain parser.
"""

from __future__ import annotations

import gzip
import struct
from random import Random

import mutations
import pytest
from naive_parse import read, records
from readings import differences, problems, read_bytes, read_file

from dpuflow.capture.base import WINDOW

pytestmark = pytest.mark.long


def long_capture(seed: int) -> bytes:
    """Random captures one after the other until they are longer than two windows."""
    rng = Random(seed)
    if seed % 2:  # sections of pcapng, each a file of its own, with long blocks between
        parts, size = [], 0
        while size < 2 * WINDOW + WINDOW // 3:
            raw = mutations.random_capture(rng, 300)
            if raw[:4] == b"\x0a\x0d\x0d\x0a":
                filler = (
                    rng.choice((0, 40, 70_000, 4 * (WINDOW // 4), WINDOW // 2)) if rng.random() < 0.1 else 0
                )
                order = "<" if raw[8:12] == b"\x4d\x3c\x2b\x1a" else ">"
                length = struct.pack(order + "I", filler + 12)
                block = struct.pack(order + "I", 0x0BAD) + length + bytes(filler) + length
                parts.append(raw + block)
                size += len(parts[-1])
        return b"".join(parts)
    raw = b""
    while len(raw) < 1000 or raw[:4] in (b"\x0a\x0d\x0d\x0a", b"\xd4\xc3\xb2\xa1"):
        raw = mutations.random_capture(rng, 400)
    pieces = [raw[record.start : record.end] for record in records(raw)]
    header = raw[:24]
    order = "<" if header[0] in (0x4D, 0xD4, 0x34) else ">"
    extra = 8 if header[:4] in (b"\x34\xcd\xb2\xa1", b"\xa1\xb2\xcd\x34") else 0
    out, size = [header], 24
    while size < 2 * WINDOW + WINDOW // 3:
        piece = rng.choice(pieces)
        if rng.random() < 0.001:  # the longest record there may be
            length = rng.choice((65_535, 262_144, 262_143))
            piece = struct.pack(order + "4I", 7, 7, length, length) + bytes(extra) + rng.randbytes(length)
        out.append(piece)
        size += len(piece)
    return b"".join(out)


@pytest.mark.parametrize("seed", range(4))
def test_longer_than_the_window(tmp_path, seed):
    raw = long_capture(seed)
    rows, whole = read(raw)
    assert whole
    assert len(rows) > 5000
    reading = read_bytes(raw)
    assert problems(reading) == []
    assert differences(reading, rows) == []
    plain, packed = tmp_path / "guarded.pcap", tmp_path / "guarded.pcap.gz"
    plain.write_bytes(raw)
    packed.write_bytes(gzip.compress(raw, 1))
    assert read_file(plain).same(reading)
    assert read_file(plain, threads=2).same(reading)
    assert read_file(packed, threads=2).same(reading)


@pytest.mark.parametrize("seed", range(2))
def test_damage_far_into_the_file(tmp_path, seed):
    """What comes before is kept, with one thread and with two, wherever the damage lies."""
    rng = Random(seed)
    good = long_capture(seed)
    spans = [(record.start, record.end) for record in records(good)]
    for place in (0.2, 0.49, 0.51, 0.9):
        number = int(place * len(spans))
        bad = bytearray(good)
        start = spans[number][0]
        bad[start + 4 : start + 16] = rng.randbytes(12) if seed else b"\xff" * 12
        rows, whole = read(bytes(bad))
        path = tmp_path / "guarded.pcap"
        path.write_bytes(bad)
        one, two = read_file(path), read_file(path, threads=2)
        assert one.info.packets == len(rows) >= number
        assert one.info.complete == whole
        assert two.same(one)
        assert problems(one) == []
        cut = good[: start + 9]
        path.write_bytes(cut)
        one = read_file(path, threads=2)
        assert (one.info.packets, one.info.complete) == (number, False)
