"""Opening captures: formats by magic number, order of rotated files, stamps, losses, sentences."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace

import naive_parse
import numpy as np
import pytest
import runs

from dpuflow.capture import compressed, open_capture
from dpuflow.capture.base import Damage
from dpuflow.capture.compressed import unzstd
from dpuflow.errors import CaptureError, DpuflowError, FormatError, MissingError
from dpuflow.ingest import ingest
from dpuflow.packets.records import BlockReader, read_blocks

PACKETS = runs.frames(Random(1), 30, oddity=0)


def read(*files: Path | str) -> tuple[BlockReader, dict[str, list[int]]]:
    """The reader after iteration, and some columns of all packets."""
    reader = read_blocks(open_capture([str(f) for f in files]))
    found: dict[str, list[int]] = {"time_ns": [], "frame": [], "wire_len": [], "iface": [], "direction": []}
    for block in reader:
        for name, values in found.items():
            values += block.columns[name][: block.rows].tolist()
    return reader, found


def test_plain_and_compressed_give_the_same(tmp_path: Path) -> None:
    raw = runs.pcap(PACKETS)
    (tmp_path / "plain").write_bytes(raw)  # the name does not matter
    (tmp_path / "two.members").write_bytes(gzip.compress(raw[:700]) + gzip.compress(raw[700:]))
    plain, packed = read(tmp_path / "plain"), read(tmp_path / "two.members")
    assert plain[1] == packed[1]
    assert plain[0].info.packets == packed[0].info.packets == 30


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = runs.pcap(PACKETS)
    path = tmp_path / "a.pcap.zst"
    path.write_bytes(zstandard.compress(raw[:500]) + zstandard.compress(raw[500:]))
    assert read(path)[0].info.packets == 30
    packed = zstandard.compress(runs.pcap(runs.frames(Random(2), 9000, oddity=0)))
    path.write_bytes(packed[: len(packed) // 2])
    info = read(path)[0].info
    assert 1000 < info.packets < 9000
    assert not info.complete
    assert "zstd data is cut short" in info.warnings[0]


def test_a_zstd_bomb_is_unpacked_piece_by_piece() -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(bytes(1 << 28))
    assert len(packed) < 1 << 15
    pieces = [len(piece) for piece in unzstd(io.BytesIO(packed), b"")]
    assert sum(pieces) == 1 << 28
    assert max(pieces) <= 1 << 26


UNPACKED = """
import sys
from dpuflow.capture.compressed import unzstd
from dpuflow.capture.base import Damage
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
import zstandard
list(unzstd(open(sys.argv[1], "rb"), b""))  # what the library takes by itself
before, size = peak(), 0
try:
    for piece in unzstd(open(sys.argv[2], "rb"), b""):
        size += len(piece)
except Damage as damage:
    print(damage, file=sys.stderr)
print(size, peak() - before)
"""


@pytest.mark.parametrize("window", [0x40, 0x80, None], ids=["256 KiB", "64 MiB", "claims 1 GiB"])
def test_a_zstd_bomb_takes_no_more_than_its_window(tmp_path: Path, window: int | None) -> None:
    """1 GiB in 32 kB: reading holds at most 64 MiB more, unless its window is as large; it took 160 MiB."""
    zstandard = pytest.importorskip("zstandard")
    size, block = 1 << 30, 1 << 17
    head = b"\xa0" + size.to_bytes(4, "little") if window is None else bytes([0, window])
    blocks = [(block << 3 | 1 << 1).to_bytes(3, "little") + b"\0"] * (size // block)  # each a byte, repeated
    blocks[-1] = (block << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    (tmp_path / "small.zst").write_bytes(zstandard.compress(bytes(100)))
    (tmp_path / "bomb.zst").write_bytes(b"\x28\xb5\x2f\xfd" + head + b"".join(blocks))
    assert (tmp_path / "bomb.zst").stat().st_size < 1 << 17
    files = [str(tmp_path / name) for name in ("small.zst", "bomb.zst")]
    done = subprocess.run(
        [sys.executable, "-c", UNPACKED, *files], capture_output=True, text=True, check=True
    )
    read, grown = done.stdout.split()
    print(done.stdout, done.stderr)
    assert float(grown) <= (64 if window != 0x80 else 64 + 32)  # its window, and some pieces
    if window is None:
        assert int(read) == 0
        assert "needs a window above 64 MiB" in done.stderr
    else:
        assert int(read) == size


def test_zstd_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(MissingError, match="pip install zstandard"):
        open_capture([str(tmp_path / "a.zst")])


def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(runs.pcap(PACKETS))
    with path.open("rb", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        source = open_capture(["-"])
        assert source.vantage == "stdin"
        reader = read_blocks(source)
        assert sum(block.rows for block in reader) == 30


@pytest.mark.parametrize(
    ("magic", "tick"), [(0xA1B2C3D4, 1000), (0xA1B23C4D, 1)], ids=["microseconds", "nanoseconds"]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_byte_orders_and_resolutions(tmp_path: Path, order: str, magic: int, tick: int) -> None:
    data = PACKETS[0][0]
    raw = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 4000, 1)
    raw += struct.pack(order + "4I", 1_700_000_000, 123, len(data), 999) + data
    (tmp_path / "a").write_bytes(raw)
    found = read(tmp_path / "a")[1]
    assert found["time_ns"] == [1_700_000_000_000_000_000 + 123 * tick]
    assert found["wire_len"] == [999]


def test_kuznetzov_variant(tmp_path: Path) -> None:
    data = PACKETS[0][0]
    raw = struct.pack("<IHHiIII", 0xA1B2CD34, 2, 4, 0, 0, 4000, 1)
    raw += (struct.pack("<4IIHBB", 5, 7, len(data), 77, 3, 0, 0, 0) + data) * 20
    (tmp_path / "a").write_bytes(raw)
    reader, found = read(tmp_path / "a")
    assert found["time_ns"] == [5_000_007_000] * 20
    assert len(reader.flows) == 1


def test_rotated_files_in_order_of_their_first_stamps(tmp_path: Path) -> None:
    names = ["c.pcap", "a.pcapng", "b.pcap.gz"]
    (tmp_path / names[0]).write_bytes(runs.pcap(PACKETS[10:20]))
    (tmp_path / names[1]).write_bytes(runs.pcapng(PACKETS[20:]))
    (tmp_path / names[2]).write_bytes(gzip.compress(runs.pcap(PACKETS[:10])))
    source = open_capture([str(tmp_path / n) for n in names], vantage="leaf1", id=3)
    assert [Path(f).name for f in source.files] == ["b.pcap.gz", "c.pcap", "a.pcapng"]
    reader, found = read(*(tmp_path / n for n in names))
    assert found["frame"] == sorted(found["frame"]) or reader.info.disordered
    assert sorted(found["time_ns"]) == sorted(stamp for _, _, stamp in PACKETS)
    assert (source.vantage, source.id, reader.info.vantage) == ("leaf1", 3, "c")


@pytest.mark.parametrize(
    ("resolution", "ticks", "expected"),
    [
        (0, 3, 3_000_000_000),
        (6, 1_700_000_000_123_456, 1_700_000_000_123_456_000),
        (9, 1_700_000_000_123_456_789, 1_700_000_000_123_456_789),
        (12, 1_700_000_123_456_789_012, 1_700_000_123_456_789),
        (18, 12_345_678_901_234_567_890, 12_345_678_901),
        (0x80, 3, 3_000_000_000),
        (0x80 | 10, 1025, 1_000_976_562),
        (0x80 | 32, (5 << 32) + 1, 5_000_000_000),
        (0x80 | 60, (7 << 60) + (1 << 59) + 3, 7_500_000_000),
        (0x80 | 63, (1 << 63) + (1 << 62), 1_500_000_000),
    ],
)
@pytest.mark.parametrize("offset", [0, 100, -100])
def test_time_resolutions(tmp_path: Path, resolution: int, ticks: int, expected: int, offset: int) -> None:
    (data, length, _), path = PACKETS[0], tmp_path / "a.pcapng"
    blocks = runs.enhanced(data, length, ticks) * 20
    path.write_bytes(runs.section() + runs.interface(1, resolution, offset) + blocks)
    source = open_capture([str(path)])
    assert source.opened[0].first_ns == expected + offset * 10**9
    assert read(path)[1]["time_ns"] == [expected + offset * 10**9] * 20


def test_sections_interfaces_and_obsolete_packets(tmp_path: Path) -> None:
    data, length, _ = PACKETS[0]
    old = struct.pack(">HHIIII", 1, 5, 0, 4_000, len(data), length) + data
    raw = runs.section() + runs.interface(resolution=9)
    raw += runs.enhanced(data, length, 1_000, 0, runs.option(2, struct.pack("<I", 2)))
    raw += runs.section(">") + runs.interface(order=">") + runs.interface(resolution=6, order=">")
    raw += runs.block(2, old, ">") + runs.enhanced(data, length, 5_000, 1, order=">")
    raw += runs.block(3, struct.pack(">I", length) + data, ">")
    raw += runs.block(0x0BAD, b"custom", ">")
    path = tmp_path / "a.pcapng"
    path.write_bytes(raw)
    reader, found = read(path)
    assert found["time_ns"] == [1_000, 4_000_000, 5_000_000, 5_000_000]
    assert found["iface"] == [0, 1, 1, 0]
    assert found["direction"] == [2, 0, 0, 0]
    assert reader.info.lost_packets == 5
    assert reader.info.complete


def test_losses_and_comments(tmp_path: Path) -> None:
    data, length, _ = PACKETS[0]
    end = bytes(4)
    statistics = [
        runs.block(5, struct.pack("<III", n, 0, 0) + runs.option(5, struct.pack("<Q", lost)) + end)
        for n, lost in ((0, 3), (1, 4), (0, 10))  # counts are sums: the last of an interface holds
    ]
    commented = runs.option(1, "für später".encode()) + end
    raw = runs.section() + runs.interface() + runs.interface() + statistics[0]
    raw += runs.enhanced(data, length, 1, 0, commented) + statistics[1] + statistics[2]
    (tmp_path / "a.pcapng").write_bytes(raw)
    info = read(tmp_path / "a.pcapng")[0].info
    assert info.lost_packets == 14
    assert info.comments == ["für später"]
    (tmp_path / "b.pcap").write_bytes(runs.pcap(PACKETS))
    assert read(tmp_path / "b.pcap")[0].info.lost_packets is None


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (b"", "the file is empty"),
        (b"snoop\0\0\0\0\0\0\2", "Solaris snoop"),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\0\0", "xz"),
        (b"GMBU\0\0\0\0", "Network Monitor"),
        (b"hello, world", 'neither pcap nor pcapng .it starts with "hello, w".'),
        (b"abc", "neither pcap nor pcapng"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, start: bytes, sentence: str) -> None:
    path = tmp_path / "a.cap"
    path.write_bytes(start + bytes(40 if start else 0))
    with pytest.raises(FormatError, match=sentence) as caught:
        open_capture([str(path)])
    assert str(path) in str(caught.value)


def test_header_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(runs.pcap([])[:20])
    with pytest.raises(CaptureError, match="cut short at byte 20"):
        open_capture([str(path)])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DpuflowError, match="No such file"):
        open_capture([str(tmp_path / "none.pcap")])
    with pytest.raises(DpuflowError, match=r"[Ii]s a directory"):
        open_capture([str(tmp_path)])


def test_cut_and_damaged_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    packed = gzip.compress(runs.pcap(runs.frames(Random(2), 3000, oddity=0)))
    path = tmp_path / "a.pcap.gz"
    path.write_bytes(packed[: len(packed) // 2])
    info = read(path)[0].info
    assert 1000 < info.packets < 2000
    assert not info.complete
    assert str(path) in info.warnings[0]
    assert "cut short" in info.warnings[0]
    path.write_bytes(packed + b"garbage")
    info = read(path)[0].info
    assert info.packets == 3000
    assert not info.complete


@pytest.mark.parametrize("place", [-8, -1, 0.3, 0.7])
def test_damaged_gzip_keeps_all_before_the_damage(tmp_path: Path, place: float) -> None:
    """A wrong checksum at the end, and a flipped bit within: only what cannot be decompressed is gone."""
    raw = runs.pcap(runs.frames(Random(3), 6000, oddity=0))
    packed = bytearray(gzip.compress(raw))
    at = int(len(packed) * place) if 0 < place < 1 else int(place)
    packed[at] ^= 0x10
    path = tmp_path / "a.pcap.gz"
    path.write_bytes(packed)
    info = read(path)[0].info
    member, plain = zlib.decompressobj(wbits=31), bytearray()
    with suppress(zlib.error):  # byte by byte, it gives all that it can
        for byte in packed:
            plain += member.decompress(bytes([byte]))
    whole = next((n for n, (a, b) in enumerate(zip(plain, raw, strict=False)) if a != b), len(plain))
    kept = sum(1 for record in naive_parse.records(raw) if record.end <= whole)
    assert info.packets >= kept > 1000
    assert not info.complete
    assert (kept == 6000) == (place < 0)


def test_damaged_zstd_keeps_the_blocks_before(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = runs.pcap(runs.frames(Random(3), 6000, oddity=0))
    parts = [zstandard.compress(raw[at : at + 50_000]) for at in range(0, len(raw), 50_000)]
    broken = bytearray(b"".join(parts))
    broken[sum(map(len, parts[:-1]))] ^= 0xFF  # the last frame's magic
    path = tmp_path / "a.pcap.zst"
    path.write_bytes(broken)
    before = sum(1 for _ in naive_parse.records(raw[: (len(parts) - 1) * 50_000]))
    assert read(path)[0].info.packets == before > 1000


def test_zstd_may_start_with_a_skippable_frame(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.pcap.zst"
    path.write_bytes(struct.pack("<II", 0x184D2A50, 4) + bytes(4) + zstandard.compress(runs.pcap(PACKETS)))
    assert read(path)[0].info.packets == 30


def test_pipes_are_read_once(tmp_path: Path) -> None:
    """As a shell's <(zcat a.gz) gives them: several of one vantage point, and one that is empty."""
    parts = {"late": PACKETS[20:], "early": PACKETS[:20], "empty": None}
    for name, part in parts.items():
        os.mkfifo(tmp_path / name)
        text = b"" if part is None else runs.pcap(part)
        Thread(target=(tmp_path / name).write_bytes, args=(text,), daemon=True).start()
    tables = ingest([str(tmp_path / "late"), str(tmp_path / "early")])
    assert tables.info.packets == 30
    assert tables.info.first_ns == min(stamp for _, _, stamp in PACKETS)
    with pytest.raises(FormatError, match="the file is empty"):
        ingest([str(tmp_path / "empty")])


def test_vantage_is_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "node0.x.pcap.gz"
    path.write_bytes(gzip.compress(runs.pcap(PACKETS)))
    assert open_capture([str(path)]).vantage == "node0.x"


def test_reading_stops_at_a_version_that_is_not_known(tmp_path: Path) -> None:
    newer = bytearray(runs.section())
    newer[12] = 2
    path = tmp_path / "a.pcapng"
    path.write_bytes(runs.pcapng(PACKETS) + newer)
    info = read(path)[0].info
    assert info.packets == 30
    assert "pcapng version 2.0" in info.warnings[0]


def test_first_stamps_need_no_whole_packet() -> None:
    from dpuflow.capture.pcapfile import Pcap

    head = runs.pcap(PACKETS)[:30]
    assert Pcap(head).first_ns(np.frombuffer(head, np.uint8)) is None


@pytest.mark.parametrize("seed", range(40))
def test_damaged_gzip_gives_the_same_by_either_library(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the damage, whichever byte it hits; zlib-ng is there on common processors only."""
    faster = pytest.importorskip("zlib_ng.zlib_ng")
    choice = Random(seed)
    packed = bytearray(gzip.compress(runs.pcap(runs.frames(choice, 3000, oddity=0)), choice.randrange(1, 10)))
    at = choice.randrange(10, len(packed))
    packed[at] ^= choice.randrange(1, 256)
    found = []
    for library in (zlib, faster):
        monkeypatch.setattr(compressed, "zlib", library)
        out = bytearray()
        with suppress(Damage):
            for piece in compressed.gunzip(io.BytesIO(bytes(packed)), b""):
                out += piece
        found.append(bytes(out))
    assert found[0] == found[1]
