"""Samples of tc as psample tells of them, from messages made here: this kernel has none."""

from __future__ import annotations

import socket
import struct
import time

import numpy as np
import pytest
from doca_card import mixed

from dpuflow.errors import MissingError, OptionError
from dpuflow.live.base import LARGEST_BLOCK, OUT_BYTES
from dpuflow.live.options import LiveOptions
from dpuflow.live.psample import SampleCapture, attributes, messages
from dpuflow.schema.ring import LOSSES

FAMILY, GROUP = 37, 9


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + bytes(-len(value) % 4)


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def sample(number: int, frame: bytes, iface: int, group: int = 55776, cut: int = 128, **more: int) -> bytes:
    """As drivers/net/psample has it: PSAMPLE_CMD_SAMPLE and its attributes."""
    body = attribute(0, struct.pack("=H", iface)) + attribute(5, struct.pack("=I", 100))
    body += attribute(2, struct.pack("=I", len(frame))) + attribute(3, struct.pack("=I", group))
    body += attribute(4, struct.pack("=I", number))
    if "stamp_ns" in more:
        body += attribute(9, b"") + attribute(13, struct.pack("=Q", more["stamp_ns"]))
    return message(FAMILY, b"\0\1\0\0" + body + attribute(6, frame[:cut]))


class Control:
    """A socket that answers for the family, and then has what was put into it."""

    def __init__(self, known: bool = True) -> None:
        group = attribute(1, attribute(1, b"packets\0") + attribute(2, struct.pack("=I", GROUP)))
        other = attribute(2, attribute(1, b"config\0") + attribute(2, struct.pack("=I", 8)))
        family = attribute(2, b"psample\0") + attribute(1, struct.pack("=H", FAMILY))
        answer = message(16, b"\1\2\0\0" + family + attribute(7, other + group))
        self.waiting: list[bytes | OSError] = [answer if known else message(2, struct.pack("=i", -2))]
        self.joined: list[int] = []

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.joined.clear()

    def send(self, data: bytes) -> None:
        assert b"psample\0" in data
        assert struct.unpack_from("=IH", data) == (len(data), 16)

    def recv(self, room: int) -> bytes:
        if not self.waiting:
            raise BlockingIOError
        first = self.waiting.pop(0)
        if isinstance(first, OSError):
            raise first
        return first

    def setsockopt(self, level: int, name: int, value: int) -> None:
        if level == 270:
            self.joined.append(value)

    def setblocking(self, on: bool) -> None:
        assert not on


def capture(control: Control, **options: object) -> SampleCapture:
    return SampleCapture(LiveOptions(("lo",), **options), control)  # type: ignore[arg-type]


def read(taken: SampleCapture) -> list[bytes]:
    """The packets' bytes."""
    out = np.zeros(OUT_BYTES + LARGEST_BLOCK, np.uint8)
    data, at, found = out[: taken.read(out, 0)].tobytes(), 0, []
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        assert kind == 6
        captured, length = struct.unpack_from("<II", data, at + 20)
        found.append(data[at + 28 : at + 28 + captured])
        assert length >= captured
        at += size
    return found


def test_samples_become_packets() -> None:
    lo = socket.if_nametoindex("lo")
    control = Control()
    taken = capture(control)
    assert control.joined == [GROUP]
    frames = [frame for _, frame in mixed(100) if frame[23] == 6][:20]
    control.waiting = [b"".join(sample(k, frame, lo) for k, frame in enumerate(frames))]
    assert read(taken) == [frame[:128] for frame in frames]
    counters = taken.counters()[0]
    assert counters["captured"] == counters["seen"] == 20
    assert sum(counters[name] for name in LOSSES) == 0


def test_what_is_lost_or_not_ours_is_told_apart() -> None:
    lo = socket.if_nametoindex("lo")
    control = Control()
    taken = capture(control, protocols=("tcp",))
    tcp = next(frame for _, frame in mixed(100) if frame[23] == 6)
    udp = next(frame for _, frame in mixed(100) if frame[23] == 17)
    control.waiting = [
        sample(2**32 - 2, tcp, lo),
        sample(5, tcp, lo, group=1) + sample(2**32 - 1, tcp, lo + 77),
        OSError(105, "No buffer space available"),
        sample(3, udp, lo) + sample(4, tcp, lo)[:-1],
        sample(4, tcp, lo),
    ]
    assert len(read(taken)) == 2
    counters = taken.counters()[0]
    assert counters["ring_full"] == 3  # 0, 1 and 2
    assert (counters["captured"], counters["not_wanted"]) == (2, 1)


def test_stamps() -> None:
    """The kernel's own where they are of now."""
    lo, frame = socket.if_nametoindex("lo"), mixed(10)[0][1]
    control = Control()
    taken = capture(control, protocols=("any",))
    now_ns = time.time_ns()
    control.waiting = [sample(1, frame, lo, stamp_ns=now_ns - 1000)]
    out = np.zeros(OUT_BYTES + LARGEST_BLOCK, np.uint8)
    taken.read(out, 0)
    high, low = struct.unpack_from("<II", out, 12)
    assert high << 32 | low == now_ns - 1000
    control.waiting = [sample(2, frame, lo, stamp_ns=5)]
    taken.read(out, 0)
    high, low = struct.unpack_from("<II", out, 12)
    assert high << 32 | low >= now_ns


def test_broken_messages_are_left_out() -> None:
    whole = sample(1, bytes(80), 1)
    for cut in range(len(whole)):
        for _, body in messages(whole[:cut]):
            list(attributes(body))
        list(attributes(whole[16:cut]))
    assert list(messages(struct.pack("=IHHII", 3, 0, 0, 0, 0))) == []


def test_without_psample() -> None:
    with pytest.raises(MissingError, match="this kernel has no psample"):
        capture(Control(known=False))
    with pytest.raises(OptionError, match="packets mode only"):
        capture(Control(), mode="messages")
