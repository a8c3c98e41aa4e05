"""Whole captures as the reader gives them, in file order, with what must hold for any of them.

``read_bytes`` parses bytes that end right before a page nobody may touch, so that a read beyond the
file's end ends the process; ``problems`` lists what contradicts itself, ``differences`` what differs from
the rows of ``naive_parse``.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from naive_parse import Row

from dpuflow.capture import open_capture
from dpuflow.capture.base import SLACK, WINDOW, CaptureFile, CaptureSource
from dpuflow.capture.pcapfile import Pcap
from dpuflow.capture.pcapng import Pcapng
from dpuflow.packets.records import read_blocks
from dpuflow.schema.rows import FIRST_SKIP, NONE32, PACKET, Kind
from dpuflow.schema.tables import CaptureInfo

SPARSE = ("reth", "aeth", "imm", "deth", "atomic", "tcp", "pause")
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Reading:
    """All packets of a capture in file order; ``sparse[...]["packet"]`` is the frame number."""

    columns: dict[str, np.ndarray]
    data: list[bytes]
    sparse: dict[str, np.ndarray]
    flows: np.ndarray
    endpoints: np.ndarray
    info: CaptureInfo

    def same(self, other: Reading) -> bool:
        """Whether both hold the same packets, flows, endpoints and counts."""
        mine, its = (
            vars(self.info) | {"files": 0, "warnings": 0},
            vars(other.info) | {"files": 0, "warnings": 0},
        )
        return (
            mine == its
            and len(self.info.warnings) == len(other.info.warnings)
            and self.data == other.data
            and all(np.array_equal(self.columns[k], other.columns[k]) for k in self.columns if k != "data_at")
            and all(np.array_equal(self.sparse[k], other.sparse[k]) for k in SPARSE)
            and np.array_equal(self.flows, other.flows)
            and np.array_equal(self.endpoints, other.endpoints)
        )


class Guarded:
    """A file's bytes, each window of them ending where a page begins that cannot be read."""

    on_disk = None
    name = "guarded"

    def __init__(self, raw: bytes) -> None:
        self.raw, self.damage = raw, None
        self.size: int | None = len(raw)
        room = (min(len(raw), WINDOW + SLACK) + _PAGE - 1) // _PAGE * _PAGE
        self._map = mmap.mmap(-1, room + _PAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._end = room
        address = self._bytes.ctypes.data + room
        assert _libc.mprotect(ctypes.c_void_p(address), _PAGE, 0) == 0

    def window(self, start: int, stop: int) -> np.ndarray:
        part = np.frombuffer(self.raw[start:stop], np.uint8)
        place = self._bytes[self._end - len(part) : self._end]
        place[:] = part
        return place

    def done(self) -> int:
        return 0

    def close(self) -> None:
        pass


def read_bytes(raw: bytes, threads: int = 1) -> Reading:
    """Read a whole pcap or pcapng file; its magic number must be right."""
    opened = Pcapng() if raw[:4] == b"\x0a\x0d\x0d\x0a" else Pcap(raw[:24])
    file = CaptureFile("guarded", Guarded(raw), opened, None)
    return read_source(CaptureSource(0, "guarded", ["guarded"], [file]), threads=threads)


def read_file(*names: Path | str, threads: int = 1) -> Reading:
    """Read files the usual way."""
    return read_source(open_capture([str(name) for name in names]), threads=threads)


def read_source(source: CaptureSource, most: int | None = None, threads: int = 1) -> Reading:
    """Read a capture; with ``most``, only blocks until that many packets are there."""
    reader = read_blocks(source, threads)
    columns: dict[str, list[np.ndarray]] = {f.name: [] for f in PACKET.fields}
    sparse: dict[str, list[np.ndarray]] = {name: [] for name in SPARSE}
    data: list[bytes] = []
    rows = 0
    for block in reader:
        n = block.rows
        assert n > 0
        assert block.first_frame == rows
        frame = block.columns["frame"][:n].copy()
        times = block.columns["time_ns"][:n]
        assert (times[1:] >= times[:-1]).all(), "a block's rows are in order of time"
        assert np.array_equal(np.sort(frame), np.arange(rows, rows + n)), "every frame once"
        back = np.argsort(frame)
        for name, kept in columns.items():
            kept.append(block.columns[name][:n][back].copy())
        starts = block.columns["data_at"][:n][back].astype(np.int64)
        ends = starts + block.columns["data_len"][:n][back]
        assert (ends <= len(block.data)).all(), "payload lies in the block's bytes"
        data += [bytes(block.data[a:b]) for a, b in zip(starts, ends, strict=True)]
        for name in SPARSE:
            table = getattr(block, name).copy()
            assert (np.diff(table["packet"].astype(np.int64)) > 0).all(), f"{name} rows in order of packets"
            assert (table["packet"] < n).all()
            table["packet"] = frame[table["packet"]]
            sparse[name].append(table[np.argsort(table["packet"])])
        rows += n
        if most is not None and rows >= most:
            break
    return Reading(
        {k: np.concatenate([*v, np.zeros(0, _type(k))]) for k, v in columns.items()},
        data,
        {k: np.concatenate(v) if v else np.zeros(0, [("packet", "u4")]) for k, v in sparse.items()},
        reader.flows.copy(), reader.endpoints.copy(), reader.info,
    )  # fmt: skip


def _type(name: str) -> str:
    return next(f.type for f in PACKET.fields if f.name == name)


def problems(reading: Reading) -> list[str]:
    """Sentences on what contradicts itself; none for any capture, however broken."""
    found: list[str] = []

    def must(holds: object, sentence: str) -> None:
        if not holds:
            found.append(sentence)

    info, columns, kind = reading.info, reading.columns, reading.columns["kind"]
    rows = len(kind)
    must(info.packets == rows, "packets counted are not the rows given")
    kinds = np.bincount(kind, minlength=256)
    must(set(np.nonzero(kinds)[0]) <= {int(k) for k in Kind} - {0}, "a row has no Kind")
    skipped = {k.name.lower(): int(kinds[k]) for k in Kind if k >= FIRST_SKIP and kinds[k]}
    must(info.skipped == skipped, f"skipped {info.skipped} is not {skipped}")
    must(info.bytes == int(columns["wire_len"].sum()), "bytes are not the sum of the lengths")
    must(info.complete == (not info.warnings), "incomplete without a warning, or the reverse")
    if rows:
        must(info.first_ns == columns["time_ns"].min(), "first_ns")
        must(info.last_ns == columns["time_ns"].max(), "last_ns")
    times = columns["time_ns"]
    must(info.disordered == np.count_nonzero(times[1:] < times[:-1]), "disordered")

    carried = (kind < FIRST_SKIP) & (kind != Kind.PAUSE)
    must((columns["flow"][~carried] == NONE32).all(), "a skipped packet has a flow")
    must((columns["flow"][carried] < len(reading.flows)).all(), "a flow that is not there")
    must((columns["src"][carried] < len(reading.endpoints)).all(), "an endpoint that is not there")
    if not found and rows:
        flow = reading.flows[columns["flow"][carried]]
        for name in ("src", "dst", "dest_qp"):
            must((flow[name] == columns[name][carried]).all(), f"{name} is not its flow's")
        seen = np.unique(columns["flow"][carried], return_counts=True)[0]
        must(len(seen) == len(reading.flows), "a flow without packets")
        for name, column in (("packets_out", "src"), ("packets_in", "dst")):
            counted = np.bincount(columns[column][carried], minlength=len(reading.endpoints))
            must(np.array_equal(counted, reading.endpoints[name]), name)
        keys = reading.endpoints[["addr_hi", "addr_lo"]]
        must(len(np.unique(keys)) == len(keys), "an address twice")
    must(sum(np.count_nonzero(kind == k) for k in (Kind.TCP,)) == len(reading.sparse["tcp"]), "tcp rows")
    must(np.count_nonzero(kind == Kind.PAUSE) == len(reading.sparse["pause"]), "pause rows")
    return found


PLAIN = ("time_ns", "wire_len", "iface", "direction", "kind")
PARSED = ("sport", "dport", "tos", "opcode", "flags", "dest_qp", "psn", "payload")


def differences(reading: Reading, rows: list[Row], most: int = 5) -> list[str]:
    """What the reader gives otherwise than the plain parser, packet by packet."""
    found: list[str] = []
    if len(rows) != reading.info.packets:
        found.append(f"{reading.info.packets} packets, expected {len(rows)}")
    address = [int(e["addr_hi"]) << 64 | int(e["addr_lo"]) for e in reading.endpoints]
    sparse = {
        name: dict(zip(table["packet"].tolist(), table, strict=True))
        for name, table in reading.sparse.items()
    }
    columns = {name: values.tolist() for name, values in reading.columns.items()}
    for i, row in enumerate(rows[: reading.info.packets]):
        names = PLAIN if row.kind >= FIRST_SKIP or row.kind == Kind.PAUSE else PLAIN + PARSED
        for name in names:
            expected = getattr(row, name) & (0xFFFFFFFF if name == "payload" else -1)
            if columns[name][i] != expected:
                found.append(
                    f"packet {i} ({row.kind.name}): {name} is {columns[name][i]}, expected {expected}"
                )
        if names != PLAIN:
            for name in ("src", "dst"):
                if address[columns[name][i]] != getattr(row, name):
                    found.append(f"packet {i}: {name} is {address[columns[name][i]]:x}")
            if reading.data[i] != row.data:
                found.append(
                    f"packet {i}: payload bytes {reading.data[i][:20]!r}, expected {row.data[:20]!r}"
                )
        for name in SPARSE:
            given, expected = sparse[name].get(i), row.sparse.get(name)
            if (given is None) != (expected is None):
                found.append(f"packet {i}: {name} is {given}, expected {expected}")
            elif expected is not None:
                seen = {key: given[key].tolist() for key in expected}
                if seen != expected:
                    found.append(f"packet {i}: {name} is {seen}, expected {expected}")
        if len(found) >= most:
            break
    return found
