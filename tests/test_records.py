"""Blocks: the same with any number of threads, in order of time, with every frame's number."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import runs

from dpuflow.capture import open_capture
from dpuflow.capture.base import WINDOW
from dpuflow.packets.records import read_blocks
from dpuflow.schema.rows import NEVER, NONE32, Transport

SPARSE = ("reth", "aeth", "imm", "deth", "atomic", "tcp", "pause")


def everything(path: Path, threads: int) -> list[object]:
    """All that a reader gives, block by block, then its tables and info."""
    reader = read_blocks(open_capture([str(path)]), threads=threads)
    found: list[object] = []
    for block in reader:
        columns = {name: column[: block.rows].tobytes() for name, column in block.columns.items()}
        tables = {
            name: {f: t[f].tobytes() for f in t.dtype.names}
            for name in SPARSE
            for t in [getattr(block, name)]
        }
        first = int(block.columns["data_at"][0])
        found += [block.first_frame, block.rows, columns, tables, block.data[first : first + 8].tobytes()]
    return [*found, reader.flows.copy(), reader.endpoints.copy(), vars(reader.info)]


def assert_same(path: Path) -> list[object]:
    one = everything(path, 1)
    for threads in (2, 3):
        for mine, its in zip(one, everything(path, threads), strict=True):
            if isinstance(mine, np.ndarray):
                assert np.array_equal(mine, its)
            else:
                assert mine == its
    return one


def body(rng: Random, form: str, count: int = 4000) -> bytes:
    packets = runs.frames(rng, count, flows=3000)
    if form == "pcap":
        return runs.pcap(packets)[24:]
    return b"".join(runs.enhanced(*packet) for packet in packets)


def test_threads_in_classic_pcap(tmp_path: Path) -> None:
    rng, path = Random(3), tmp_path / "long.pcap"
    parts = [runs.pcap([])]
    while sum(map(len, parts)) < 7.5 * WINDOW:
        parts += [body(rng, "pcap")] * 3
    path.write_bytes(b"".join(parts))
    assert len(assert_same(path)) > 5 * 10


def test_threads_when_sections_and_statistics_come_between(tmp_path: Path) -> None:
    rng, path = Random(4), tmp_path / "long.pcapng"
    drops = runs.block(5, struct.pack("<III", 0, 0, 0) + runs.option(5, struct.pack("<Q", 7)) + bytes(4))
    parts = [runs.section(), runs.interface()]
    for k in range(60):
        parts += [body(rng, "pcapng")] * 2
        if k % 7 == 3:
            parts.append(drops)
        if k % 23 == 20:
            parts += [runs.section(), runs.interface(resolution=6), runs.interface()]
    path.write_bytes(b"".join(parts))
    assert path.stat().st_size > 8 * WINDOW
    info = assert_same(path)[-1]
    assert isinstance(info, dict)
    assert info["lost_packets"] == 7 * 3


def test_threads_when_payloads_look_like_records(tmp_path: Path) -> None:
    """The guess falls into a payload that is a chain of record headers itself."""
    now = 1_700_000_000
    fake = struct.pack("<4I", now, 5, 0, 60) * 3000
    frame = runs.roce(Random(5)) + fake
    record = struct.pack("<4I", now, 1, len(frame), len(frame)) + frame
    path = tmp_path / "fakes.pcap"
    path.write_bytes(runs.pcap([]) + record * (7 * WINDOW // len(record)))
    info = assert_same(path)[-1]
    assert isinstance(info, dict)
    assert info["packets"] == 7 * WINDOW // len(record)


def test_threads_at_a_damaged_record(tmp_path: Path) -> None:
    rng, path = Random(6), tmp_path / "damaged.pcap"
    good = body(rng, "pcap") * 40
    raw = runs.pcap([]) + good + struct.pack("<4I", 1, 1, 0xFFFFFFF0, 60) + good
    path.write_bytes(raw)
    info = assert_same(path)[-1]
    assert isinstance(info, dict)
    assert info["packets"] == 40 * 4000
    assert not info["complete"]
    assert info["warnings"] == [
        f"{path}: a record claims more captured bytes than any capture holds at byte {24 + len(good)};"
        " everything before it is kept"
    ]


def test_stopping_early_ends_the_threads(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "long.pcap"
    path.write_bytes(runs.pcap([]) + body(Random(7), "pcap") * 80)
    before = threading.active_count()
    blocks = iter(read_blocks(open_capture([str(path)]), threads=2))
    for _ in range(6):
        next(blocks)
    assert threading.active_count() == before + 2
    blocks.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_rows_in_order_of_time_with_their_frames(tmp_path: Path) -> None:
    packets = runs.frames(Random(8), 5000)
    path = tmp_path / "a.pcap"
    path.write_bytes(runs.pcap(packets))
    reader = read_blocks(open_capture([str(path)]))
    frames = []
    for block in reader:
        times = block.columns["time_ns"][: block.rows]
        numbers = block.columns["frame"][: block.rows]
        assert (np.diff(times) >= 0).all()
        assert [packets[k][2] for k in numbers] == times.tolist()
        for name in SPARSE:
            table = getattr(block, name)
            assert (np.diff(table["packet"].astype(np.int64)) >= 0).all()
        frames += numbers.tolist()
    assert sorted(frames) == list(range(5000))
    stamps = [stamp for _, _, stamp in packets]
    assert reader.info.disordered == sum(b < a for a, b in pairwise(stamps)) > 0
    assert (reader.info.first_ns, reader.info.last_ns) == (min(stamps), max(stamps))


def test_tables_keep_what_is_written_into_them(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(runs.pcap(runs.frames(Random(9), 40_000, flows=6000, oddity=0)))
    reader = read_blocks(open_capture([str(path)]))
    for block in reader:
        flows = np.bincount(block.columns["flow"][: block.rows], minlength=len(reader.flows))
        reader.flows["packets"] += flows.astype(np.uint64)
    assert int(reader.flows["packets"].sum()) == 40_000
    assert len(reader.flows) > 4096
    assert set(reader.flows["transport"].tolist()) == {int(Transport.ROCE)}
    assert set(reader.flows["peer"].tolist()) == {NONE32}
    assert set(reader.flows["first_ns"].tolist()) == {NEVER}
    sent = np.zeros(len(reader.endpoints), np.uint64)
    np.add.at(sent, reader.flows["src"], reader.flows["packets"])
    assert sent.tolist() == reader.endpoints["packets_out"].tolist()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    path = tmp_path / "long.pcap"
    path.write_bytes(runs.pcap([]) + body(Random(10), "pcap") * 30)
    for threads in (1, 2):
        seen: list[tuple[int, int | None]] = []
        for _ in read_blocks(open_capture([str(path)]), threads, lambda *a: seen.append(a)):  # noqa: B023
            pass
        done = [d for d, _ in seen]
        assert done == sorted(done)
        assert seen[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_does_not_follow_the_file(tmp_path: Path, threads: int) -> None:
    import subprocess
    import sys

    part = body(Random(11), "pcap")
    peaks = []
    for size in (50, 200):
        path = tmp_path / f"{size}.pcap"
        path.write_bytes(runs.pcap([]) + part * size)
        code = (
            "import sys\n"
            "from dpuflow.capture import open_capture\n"
            "from dpuflow.packets.records import read_blocks\n"
            "for _ in read_blocks(open_capture([sys.argv[1]]), threads=int(sys.argv[2])): pass\n"
            "print(*(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))\n"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(path), str(threads)], capture_output=True, text=True, check=True
        )
        peaks.append(int(out.stdout))
        path.unlink()
    assert peaks[1] - peaks[0] < 16 * 1024  # KiB, for some 70 MB more
