"""``kernels/ring`` against a twin written for the eye, on rings made by hand, and the blocks around."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpuflow.capture import open_capture
from dpuflow.ingest import ingest
from dpuflow.kernels import ring as kernel
from dpuflow.live import blocks, ebpf
from dpuflow.live.base import Interface
from dpuflow.live.ebpf import EbpfCapture
from dpuflow.live.nic import NIC_NAMES
from dpuflow.live.ring import Ring, _position
from dpuflow.packets.records import read_blocks
from dpuflow.schema.ring import (
    CELL_DATA,
    CELL_RECORD,
    CELL_TAIL,
    COUNTER_NAMES,
    RING_PACKET,
    RING_RUN,
    RingKind,
)
from dpuflow.schema.rows import BthFlag

PAGE = 4096
SIZE = 1 << 14
BUSY, GIVEN_UP = 1 << 31, 1 << 30
NEVER = (1 << 63) - 1

Packets = list[tuple[bytes, int]]  # data, and the header's flags


def ring_of(packets: Packets, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Consumer page and producer page with the ring, as the kernel would have written them from ``start``."""
    consumer, producer = np.zeros(PAGE, np.uint8), np.zeros(PAGE + 2 * SIZE, np.uint8)
    at = start
    for number, (data, flags) in enumerate(packets):
        head = RING_PACKET.zeros(1)
        head["time_ns"], head["wire_len"], head["captured"] = 10**18 + number, len(data) + 7, len(data)
        head["iface"], head["direction"], head["ends"] = number % 3, number % 3, number % 2
        head["flow_hash"] = number << 16
        sample = head.tobytes() + data + bytes(number % 5)
        record = struct.pack("<II", len(sample) | flags, 0) + sample
        for k, value in enumerate(record):
            producer[PAGE + (at + k) % SIZE] = value
        at += (len(record) + 7) // 8 * 8
    producer[PAGE + SIZE :] = producer[PAGE : PAGE + SIZE]
    consumer[:8] = np.frombuffer(struct.pack("<Q", start), np.uint8)
    producer[:8] = np.frombuffer(struct.pack("<Q", at), np.uint8)
    return consumer, producer


def naive(packets: Packets) -> bytes:
    """The blocks that should come out: those given up are left out, and the first busy one ends it."""
    out = b""
    for number, (data, flags) in enumerate(packets):
        if flags & BUSY:
            break
        if flags & GIVEN_UP:
            continue
        time = 10**18 + number
        body = struct.pack("<5I", number % 3, time >> 32, time & 0xFFFFFFFF, len(data), len(data) + 7)
        body += data + bytes(-len(data) % 4) + struct.pack("<HHII", 2, 4, number % 3, 0)
        size = struct.pack("<I", len(body) + 12)
        out += struct.pack("<I", 6) + size + body + size
    return out


def drained(
    consumer: np.ndarray, producer: np.ndarray, room: int, left: int = 1 << 60
) -> tuple[bytes, np.ndarray]:
    """All that comes out, in calls with ``room`` bytes each."""
    state = np.zeros(kernel.D_SIZE, np.int64)
    state[kernel.D_LEFT] = left
    seen = np.zeros(1 << 16, np.uint8)
    out, found = np.zeros(room + kernel.SLACK, np.uint8), b""
    cells, marks = np.zeros(8, np.uint8), np.zeros((0, 3), np.int64)
    end = kernel.positions(producer, cells, 8, marks)
    rings = (consumer, producer, SIZE, cells, 8, 0, marks, end)
    while filled := kernel.drain(*rings, NEVER, 0, NEVER, out, 0, state, seen):
        found += out[:filled].tobytes()
    return found, state


packets_made = st.lists(
    st.tuples(st.binary(min_size=14, max_size=200), st.sampled_from([0, 0, 0, 0, 0, GIVEN_UP, BUSY])),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(packets_made, st.integers(0, 4 * SIZE), st.integers(400, 2000))
def test_as_the_twin(packets: Packets, start: int, room: int) -> None:
    consumer, producer = ring_of(packets, start // 8 * 8)
    found, state = drained(consumer, producer, room)
    assert found == naive(packets)
    ready = [flags for _, flags in packets]
    ready = ready[: ready.index(BUSY)] if BUSY in ready else ready
    assert state[kernel.D_PACKETS] == ready.count(0)
    assert state[kernel.D_IFACES :].sum() == ready.count(0)


CELL = 1 << 12
STRIDE = CELL_DATA + CELL + CELL_RECORD
Stamped = list[tuple[int, bytes]]  # stamp, data


def cells_of(rings: list[Stamped], starts: list[int]) -> np.ndarray:
    """The CPUs' own rings, as the programs would have written them, each from its start."""
    area = np.zeros(STRIDE * len(rings), np.uint8)
    for number, (packets, start) in enumerate(zip(rings, starts, strict=True)):
        cell = area[number * STRIDE : (number + 1) * STRIDE]
        at = start
        for time, data in packets:
            head = RING_PACKET.zeros(1)
            head["time_ns"], head["wire_len"], head["captured"], head["iface"] = time, 1500, len(data), number
            record = head.tobytes() + data
            place = CELL_DATA + at % CELL
            cell[place : place + len(record)] = np.frombuffer(record, np.uint8)
            at += (len(record) + 7) // 8 * 8
        cell[CELL_TAIL : CELL_TAIL + 8] = np.frombuffer(struct.pack("<Q", start), np.uint8)
        cell[:8] = np.frombuffer(struct.pack("<Q", at), np.uint8)
    return area


def stamps(blocks_: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(blocks_):
        _, size, _, high, low, captured, _ = struct.unpack_from("<7I", blocks_, at)
        found.append((high << 32 | low, blocks_[at + 28 : at + 28 + captured]))
        at += size
    return found


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 1000), st.binary(min_size=14, max_size=128)), max_size=60
    ),
    st.lists(st.integers(0, 1 << 20), min_size=4, max_size=4),
    st.integers(400, 2000),
    st.integers(0, 70_000),
)
def test_rings_are_read_in_the_order_of_their_stamps(
    made: list[tuple[int, int, bytes]], starts: list[int], room: int, limit: int
) -> None:
    """Ring 4 is the kernel's, which stamps its packets from 10**18 on."""
    time, rings = 10**18, [[] for _ in range(5)]  # type: ignore[var-annotated]
    for which, gap, data in made:
        time += gap
        rings[which].append((time, data))
    area = cells_of(rings[:4], [start * 8 for start in starts])
    consumer, producer = ring_of([(data, 0) for _, data in rings[4]], 0)
    for number, at in enumerate(record_places(producer)):
        producer[at : at + 8] = np.frombuffer(struct.pack("<Q", rings[4][number][0]), np.uint8)
    state, seen = np.zeros(kernel.D_SIZE, np.int64), np.zeros(1 << 16, np.uint8)
    state[kernel.D_LEFT] = 1 << 60
    out, marks = np.zeros(room + kernel.SLACK, np.uint8), np.zeros((4, 3), np.int64)
    found: list[list[tuple[int, bytes]]] = []
    end = kernel.positions(producer, area, STRIDE, marks)
    for until in (10**18 + limit, NEVER):
        got = b""
        while filled := kernel.drain(
            consumer, producer, SIZE, area, STRIDE, CELL, marks, end, until, 0, NEVER, out, 0, state, seen
        ):
            got += out[:filled].tobytes()
        found.append(stamps(got))
    every = sorted((packet for ring in rings for packet in ring), key=lambda packet: packet[0])
    assert found[0] == [packet for packet in every if packet[0] < 10**18 + limit]
    assert found[0] + found[1] == every
    assert state[kernel.D_PACKETS] == len(every)


def test_a_stamp_that_cannot_be_holds_nothing_up() -> None:
    """Of a clock that was set: one from the future, one of long ago. They are taken as of the look."""
    look, limit = 10**18 + 1000, 10**18 + 900
    rings = [
        [(10**18 + 1, b"a" * 20), (10**18 + 10**10, b"b" * 20), (10**18 + 2, b"c" * 20)],
        [(5, b"d" * 20)],
    ]
    area = cells_of(rings, [0, 8])  # type: ignore[arg-type]
    consumer, producer = ring_of([], 0)
    state, seen = np.zeros(kernel.D_SIZE, np.int64), np.zeros(1 << 16, np.uint8)
    state[kernel.D_LEFT] = 1 << 60
    out, marks = np.zeros(4096, np.uint8), np.zeros((2, 3), np.int64)
    end = kernel.positions(producer, area, STRIDE, marks)
    filled = kernel.drain(
        consumer,
        producer,
        SIZE,
        area,
        STRIDE,
        CELL,
        marks,
        end,
        limit,
        10**18 - 1000,
        look,
        out,
        0,
        state,
        seen,
    )
    assert sorted(stamps(out[:filled].tobytes())) == [
        (10**18 + 1, b"a" * 20),
        (10**18 + 2, b"c" * 20),
        (limit - 1, b"b" * 20),
        (limit - 1, b"d" * 20),
    ]
    assert state[kernel.D_MISDATED] == 2


def test_who_stands_still_between_clock_and_ring_suspects_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread that reads may lose its CPU for milliseconds at any point."""
    now, stood_ns = [10**18], 10_000_000
    area = cells_of([[(10**18 - 10**6, b"a" * 20), (10**18 + 8_000_000, b"b" * 20)]], [0])
    reading = EbpfCapture.__new__(EbpfCapture)
    reading.ring = ring_over(area)
    reading.clock = SimpleNamespace(start=SimpleNamespace(real_ns=0))  # type: ignore[assignment]
    reading._wall = SimpleNamespace(look=lambda: None)  # type: ignore[assignment]
    reading._attached, reading._guard_ns = True, 20_000
    reading.tally = np.zeros(kernel.D_SIZE, np.int64)
    reading.tally[kernel.D_LEFT] = 1 << 60

    def clock() -> int:
        now[0] += stood_ns
        return now[0] - stood_ns

    monkeypatch.setattr(ebpf, "time", SimpleNamespace(monotonic_ns=clock))
    out, found = np.zeros(4096, np.uint8), b""
    for _ in range(3):
        found += out[: reading.read(out, 0)].tobytes()
    assert stamps(found) == [(10**18 - 10**6, b"a" * 20), (10**18 + 8_000_000, b"b" * 20)]
    assert reading.tally[kernel.D_MISDATED] == 0


def ring_over(area: np.ndarray) -> Ring:
    """A Ring of the cells in ``area`` and an empty ring of the kernel's, in ordinary memory."""
    made = Ring.__new__(Ring)
    made.size, made.cell_size, made._stride = SIZE, CELL, STRIDE
    made._mapped, made._cell_bytes = ring_of([], 0), area
    made._marks, made._seen = np.zeros((len(area) // STRIDE, 3), np.int64), np.zeros(1 << 16, np.uint8)
    made._peak = made._looked = 0
    made._ends = [(_position(read, 0), _position(written, 0)) for read, written in (made._mapped,)]
    made._ends += [
        (_position(area, at + CELL_TAIL), _position(area, at)) for at in range(0, len(area), STRIDE)
    ]
    return made


def record_places(producer: np.ndarray) -> list[int]:
    """Where the stamps of the kernel ring's records stand, the first lap alone."""
    end, at, found = int(producer[:8].view(np.uint64)[0]), 0, []
    while at < end:
        found.append(PAGE + at + 8)
        at += (int(producer[PAGE + at : PAGE + at + 4].view(np.uint32)[0]) + 15) // 8 * 8
    return found


def test_a_limit_leaves_the_rest_in_the_ring() -> None:
    packets: Packets = [(bytes([k]) * 60, 0) for k in range(10)]
    found, state = drained(*ring_of(packets, 0), room=5000, left=4)
    assert found == naive(packets[:4])
    assert state[kernel.D_ENDS] == 2


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    ("count", "marked", "psn"), [(1, 0, 5), (5, 2, 0xFFFFFE), (64, 64, 0), (3, 0, 1 << 23)]
)
def test_a_run_becomes_its_packets(version: int, count: int, marked: int, psn: int, tmp_path: Path) -> None:
    """Unfolded and read again, the packets say what the run says of them."""
    ip = {
        4: bytes.fromhex("4503111122220000401100000a0000010a000002"),
        6: bytes.fromhex("60300000111111400000") + bytes(30),
    }[version]
    ethernet = bytes(12) + (b"\x08\x00" if version == 4 else b"\x86\xdd")
    udp, bth = bytes.fromhex("c00012b7ffff0000"), bytes([6, 0x70, 0xFF, 0xFF, 0, 0, 0, 17, 0x80, 9, 9, 9])
    head = (ethernet + ip + udp + bth).ljust(104, b"\x55")
    bth_at = 14 + len(ip) + 8
    wire_len = bth_at + 12 + 1024 + 4
    packet, run = RING_PACKET.zeros(1), RING_RUN.zeros(1)
    packet["time_ns"], packet["wire_len"], packet["captured"] = 10**18 + 1000, wire_len, bth_at + 12
    packet["kind"], packet["direction"] = RingKind.RUN, 2
    run["first_ns"], run["psn"], run["count"], run["marked"] = 10**18, psn, count, marked
    run["opcode"], run["bth_at"], run["ip_at"] = 7, bth_at, 14
    sample = packet.tobytes() + run.tobytes() + head
    consumer, producer = np.zeros(PAGE, np.uint8), np.zeros(PAGE + 2 * SIZE, np.uint8)
    record = np.frombuffer(struct.pack("<II", len(sample), 0) + sample, np.uint8)
    producer[PAGE : PAGE + len(record)] = record
    producer[:8] = np.frombuffer(struct.pack("<Q", (len(record) + 7) // 8 * 8), np.uint8)
    found, state = drained(consumer, producer, room=1 << 16)
    assert state[kernel.D_PACKETS] == count
    assert state[kernel.D_BYTES] == count * wire_len
    file = tmp_path / "x.pcapng"
    file.write_bytes(
        blocks.section_block("x") + blocks.interface_block(Interface("e", 1, bytes(6)), 128, "x") + found
    )
    (block,) = read_blocks(open_capture([str(file)]))
    columns = {name: values[:count].tolist() for name, values in block.columns.items()}
    assert columns["psn"] == [(psn + k) & 0xFFFFFF for k in range(count)]
    assert columns["opcode"] == [7] * count
    assert columns["payload"] == [1024] * count
    assert columns["wire_len"] == [wire_len] * count
    assert columns["flags"] == [BthFlag.MIG_REQ] * count
    assert sum(tos & 3 == 3 for tos in columns["tos"]) == marked
    assert columns["direction"] == [2] * count
    assert columns["time_ns"] == [10**18 + 1000 * k // max(count - 1, 1) for k in range(count)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Section, interface, packets and statistics make a file that dpuflow reads, losses included."""
    frame = bytes(12) + b"\x08\x00" + bytes(50)
    found, _ = drained(*ring_of([(frame, 0)] * 6, 0), room=5000)
    interfaces = [Interface(f"eth{k}", k + 1, bytes(6)) for k in range(3)]
    counters = dict.fromkeys((*COUNTER_NAMES, *NIC_NAMES), 0) | {
        "seen": 9,
        "captured": 2,
        "ring_full": 5,
        "rx_missed_errors": 2,
    }
    file = tmp_path / "x.pcapng"
    parts = [
        blocks.section_block("clock: x"),
        *(blocks.interface_block(i, 128, "any") for i in interfaces),
        found,
    ]
    parts += [blocks.statistics_block(k, 10**18, 10**18, counters, 2) for k in range(3)]
    file.write_bytes(b"".join(parts))
    info = ingest([str(file)]).info
    assert info.complete
    assert info.packets == 6
    assert info.lost_packets == 21
    assert info.first_ns == 10**18
    assert info.comments[0] == "clock: x"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-i", "nowhere0"], "nowhere0: no such interface"),
        (["-i", "lo", "-i", "lo"], "an interface is named twice"),
        (["-i", "lo", "--host", "me"], "'me' is not an IPv4 or IPv6 address"),
        (["-i", "lo", "--port", "70000"], "70000 is not a port"),
        (["-i", "lo", "--filter", "not tcp"], "--filter: 'not' is not supported; supported: roce"),
        (["-i", "lo", "--filter", "qp 16777216"], "16777216 is not a QP"),
        (["-i", "lo", "--filter", "roce", "--qp", "7"], "--filter replaces --protocol"),
        (["-i", "lo", "--filter", "roce", "--protocol", "tcp"], "--filter replaces --protocol"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpuflow", "capture", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
