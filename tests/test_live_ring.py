"""``kernels/ring`` against a twin written for the eye, on rings made by hand, and the blocks around."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpuflow.ingest import ingest
from dpuflow.kernels import ring as kernel
from dpuflow.live import blocks
from dpuflow.live.base import Interface
from dpuflow.schema_ring import COUNTER_NAMES, RING_PACKET

PAGE = 4096
SIZE = 1 << 14
BUSY, GIVEN_UP = 1 << 31, 1 << 30

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
    while filled := kernel.drain(consumer, producer, SIZE, out, 0, state, seen):
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


def test_a_limit_leaves_the_rest_in_the_ring() -> None:
    packets: Packets = [(bytes([k]) * 60, 0) for k in range(10)]
    found, state = drained(*ring_of(packets, 0), room=5000, left=4)
    assert found == naive(packets[:4])
    assert state[kernel.D_ENDS] == 2


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Section, interface, packets and statistics make a file that dpuflow reads, losses included."""
    frame = bytes(12) + b"\x08\x00" + bytes(50)
    found, _ = drained(*ring_of([(frame, 0)] * 6, 0), room=5000)
    interfaces = [Interface(f"eth{k}", k + 1, bytes(6)) for k in range(3)]
    counters = dict.fromkeys(COUNTER_NAMES, 0) | {"seen": 9, "captured": 2, "ring_full": 5}
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
    assert info.lost_packets == 15
    assert info.first_ns == 10**18
    assert info.comments[0] == "clock: x"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-i", "nowhere0"], "nowhere0: there is no such interface"),
        (["-i", "lo", "-i", "lo"], "an interface is named twice"),
        (["-i", "lo", "--host", "me"], "'me' is no IPv4 or IPv6 address"),
        (["-i", "lo", "--port", "70000"], "70000 is no port"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dpuflow", "capture", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
