"""The NIC's stamps: mapped to wall time by the programs, and counted where there is none.

No interface here has a clock of its own: another clock of the kernel stands for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from network import Pair, inside
from readings_live import blocks_of, options_of, packets_of
from send import frames

from dpuflow.errors import MissingError
from dpuflow.kernels import ring as ring_kernel
from dpuflow.live import libbpf, phc
from dpuflow.live import wall as wall_module
from dpuflow.live.base import object_path
from dpuflow.live.capture import LiveCapture
from dpuflow.live.clock import ClockReading, read_clocks
from dpuflow.live.options import LiveOptions
from dpuflow.live.phc import NicClock
from dpuflow.live.ring import Ring
from dpuflow.live.wall import WallMap

AHEAD_NS = 37_000_000_000
TSTAMP, HWTSTAMP = 152, 184  # offsets in struct __sk_buff
SK_BUFF = 192
SO_TIMESTAMPNS = 35


class _Run(ctypes.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p)),
        *(("size_in", ctypes.c_uint32), ("size_out", ctypes.c_uint32)),
        *(("ctx_in", ctypes.c_void_p), ("ctx_out", ctypes.c_void_p)),
        *((name, ctypes.c_uint32) for name in ("ctx_size_in", "ctx_size_out", "retval", "repeat")),
        *((name, ctypes.c_uint32) for name in ("duration", "flags", "cpu", "batch")),
    )


def pass_through(fd: int, frame: bytes, nic_ns: int, kernel_ns: int = 0) -> None:
    """Run the tc program on a packet that the NIC has stamped, or the kernel."""
    data, context = ctypes.create_string_buffer(frame, len(frame)), ctypes.create_string_buffer(SK_BUFF)
    struct.pack_into("<Q", context, TSTAMP, kernel_ns)
    struct.pack_into("<Q", context, HWTSTAMP, nic_ns)
    run = _Run(
        ctypes.sizeof(_Run), ctypes.addressof(data), None, len(frame), repeat=1,
        ctx_in=ctypes.addressof(context), ctx_size_in=SK_BUFF,
    )  # fmt: skip
    assert libbpf.library().bpf_prog_test_run_opts(fd, ctypes.byref(run)) == 0


class AheadClock(NicClock):
    """The monotonic clock, as a NIC that runs 37 s ahead and 50 ppm fast would show it."""

    def _read(self) -> tuple[int, int, int]:
        now = time.monotonic_ns()
        return nic_of(now), now, 0


def nic_of(kernel_ns: int) -> int:
    return kernel_ns + AHEAD_NS + kernel_ns // 20_000


@pytest.fixture
def clock(programs: None) -> Iterator[NicClock]:
    made = AheadClock("lo", "/dev/test", time.CLOCK_MONOTONIC)
    yield made
    made.close()


def test_stamps_are_mapped_and_those_of_no_clock_are_counted(clock: NicClock, nccl: list[Path]) -> None:
    ring = Ring(1 << 16, 1 << 14)
    settings = LiveOptions(("lo",), protocols=("any",)).settings(0, 0)
    ring.set(settings)
    settings["hardware"] = 1
    maps = ring.maps() | {"phc": clock.fd}
    loaded = libbpf.Loaded(object_path(), ("dpuflow_in", "dpuflow_out"), settings, maps)
    for _ in range(3):
        time.sleep(0.05)
        clock.sample()
    tally = np.zeros(ring_kernel.D_SIZE, np.int64)
    tally[ring_kernel.D_LEFT] = 1 << 60
    out = np.zeros(1 << 16, np.uint8)

    def stamp(program: str, nic_ns: int) -> int:
        pass_through(loaded.fds[program], frames(nccl[0])[0], nic_ns)
        assert ring.drain(out, 0, tally) > 0
        return int(tally[ring_kernel.D_LAST])

    now = time.monotonic_ns()
    for before in (0, 1_000, 5_000_000, 20_000_000_000):
        # Far back it counts how well the rate is known, from readings over 0.15 s here.
        assert abs(stamp("dpuflow_in", nic_of(now - before)) - (now - before)) <= 1_000 + before // 10_000
    assert libbpf.read_counters(loaded.counters_fd)["no_stamp"] == 0
    for strange in (0, 1, nic_of(now) + (1 << 40)):
        assert now <= stamp("dpuflow_in", strange) <= time.monotonic_ns()
    assert now <= stamp("dpuflow_out", nic_of(now - 5_000_000_000)) <= time.monotonic_ns()
    counters = libbpf.read_counters(loaded.counters_fd)
    assert (counters["no_stamp"], counters["captured"], counters["seen"]) == (3, 8, 8)
    loaded.close()
    ring.close()


def test_a_clock_that_was_set_begins_anew(clock: NicClock, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(0.02)
    clock.sample()
    assert clock.steps == 0
    monkeypatch.setattr(clock, "_read", lambda: (nic_of(time.monotonic_ns()) + 10**9, time.monotonic_ns(), 0))
    clock.sample()
    assert clock.steps == 1
    clock.sample()
    assert clock.steps == 1


def test_a_clock_that_is_gone_goes_on_as_it_did(clock: NicClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> tuple[int, int, int]:
        raise OSError(19, "No such device")

    monkeypatch.setattr(clock, "_read", gone)
    clock.sample()
    assert clock.steps == 0


@pytest.mark.parametrize("hook", ["xdp", "tcx"])
@pytest.mark.parametrize("mode", ["packets", "messages"])
def test_a_driver_without_stamps_leaves_them_to_the_kernel(
    pair: Pair, nccl: list[Path], monkeypatch: pytest.MonkeyPatch, hook: str, mode: str
) -> None:
    """veth answers the programs' question with no stamp; at XDP they are bound to it."""

    def of(name: str) -> NicClock:
        return AheadClock(name, "/dev/test", time.CLOCK_MONOTONIC)

    monkeypatch.setattr(NicClock, "of", of)
    options = LiveOptions(("east",), protocols=("any",), hook=hook, mode=mode, timestamps="hardware")
    with inside(pair.b):
        capture = LiveCapture(options)
        try:
            start_ns = time.time_ns()
            sent = pair.send(pair.a, "west", *nccl)
            for _ in capture.pieces(duration_s=0.5):
                pass
            (counters,), head = capture.summary().counters, capture.head()
        finally:
            capture.close()
    assert counters["seen"] == counters["no_stamp"] == sent
    assert start_ns < capture.backend.tally[ring_kernel.D_LAST] < time.time_ns()
    comment = options_of(blocks_of(head)[1][1][8:])[1].decode()
    assert comment.startswith("received packets are stamped by the NIC's clock /dev/test, which was ")


def test_what_a_nic_lacks_is_said(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(timestamps: str) -> Callable[[], None]:
        return LiveCapture(LiveOptions(("east",), timestamps=timestamps)).close

    with inside(pair.b):
        with pytest.raises(MissingError, match="east: the NIC has no PTP hardware clock"):
            capture("hardware")
        monkeypatch.setattr(phc, "clock_of", lambda name: 0)
        with pytest.raises(MissingError, match="hwstamp_ctl -i east -r 1"):
            capture("hardware")
        capture("auto")()
        capture("kernel")()


def test_the_kernels_stamp_is_taken_where_it_has_made_one(programs: None, nccl: list[Path]) -> None:
    ring, wall = Ring(1 << 16, 1 << 14), WallMap()
    settings = LiveOptions(("lo",), protocols=("any",)).settings(0, 0)
    ring.set(settings)
    maps = ring.maps() | {"wall": wall.fd}
    loaded = libbpf.Loaded(object_path(), ("dpuflow_in", "dpuflow_out"), settings, maps)
    tally = np.zeros(ring_kernel.D_SIZE, np.int64)
    tally[ring_kernel.D_LEFT] = 1 << 60
    out = np.zeros(1 << 16, np.uint8)

    def stamp(program: str, kernel_ns: int) -> int:
        pass_through(loaded.fds[program], frames(nccl[0])[0], 0, kernel_ns)
        assert ring.drain(out, 0, tally) > 0
        return int(tally[ring_kernel.D_LAST])

    clocks = read_clocks()
    before = time.monotonic_ns() - 5_000_000
    assert abs(stamp("dpuflow_in", before + clocks.real_ns) - before) < 1_000_000
    # None was made; what goes out has the time it is to leave there; the program does not know the clock.
    now = time.monotonic_ns()
    assert now <= stamp("dpuflow_in", 0) <= time.monotonic_ns()
    assert now <= stamp("dpuflow_out", before + clocks.real_ns) <= time.monotonic_ns()
    unaware = libbpf.Loaded(object_path(), ("dpuflow_in",), settings, ring.maps())
    pass_through(unaware.fds["dpuflow_in"], frames(nccl[0])[0], 0, before + clocks.real_ns)
    ring.drain(out, 0, tally)
    assert now <= tally[ring_kernel.D_LAST] <= time.monotonic_ns()
    for made in (loaded, unaware, wall, ring):
        made.close()


def test_the_programs_are_told_when_the_clock_is_set(programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    made = WallMap(lambda: reader)
    told = mmap.mmap(made.fd, mmap.PAGESIZE)
    first = struct.unpack_from("=Q", told)[0]
    assert abs(first - (time.time_ns() - time.monotonic_ns())) < 1_000_000_000
    made.wait(0.001)
    assert struct.unpack_from("=Q", told)[0] == first
    monkeypatch.setattr(wall_module, "read_clocks", lambda: ClockReading(first + 7, 0, 0))
    os.write(writer, bytes(8))
    made.wait(10)
    assert struct.unpack_from("=Q", told)[0] == first + 7
    told.close()
    made.close()
    os.close(writer)


def test_without_the_kernels_word_its_stamps_are_not_taken(programs: None) -> None:
    def refused() -> int:
        raise OSError(38, "timerfd_create")

    made = WallMap(refused)
    told = mmap.mmap(made.fd, mmap.PAGESIZE)
    assert struct.unpack_from("=Q", told)[0] == 0
    made.wait(0.001)
    told.close()
    made.close()


@pytest.mark.parametrize("hook", ["tcx", "clsact"])
def test_stamps_are_tcpdumps_where_the_kernel_stamps(
    pair: Pair, nccl: list[Path], tmp_path: Path, hook: str
) -> None:
    """With a socket that asks for stamps, as chronyd has one, each packet has one stamp for all who look."""
    ours, theirs = tmp_path / "ours.pcapng", tmp_path / "theirs.pcap"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        with (
            pair.tcpdump(pair.b, "east", theirs, "-s", "128", "--nano"),
            pair.capturing(pair.b, "-i", "east", "-w", str(ours), "--hook", hook, "--protocol", "any"),
        ):
            sent = pair.send(pair.a, "west", *nccl, rate=20000)
    # One that dpkt reads without loss: seconds and nanoseconds, in a file of the latter's magic.
    data = theirs.read_bytes()
    assert data[:4] == b"\x4d\x3c\xb2\xa1"
    at, expected = 24, []
    while at < len(data):
        seconds, more, captured = struct.unpack_from("<III", data, at)
        expected.append(seconds * 10**9 + more)
        at += 16 + captured
    found = [packet.time_ns for packet in packets_of(ours)]
    assert len(found) == len(expected) == sent
    # Apart by what reading the two clocks may be off, the same for all. By their stamps, as on a busy machine
    # one CPU may get to its packets long after another one.
    apart = [mine - theirs for mine, theirs in zip(sorted(found), sorted(expected), strict=True)]
    assert max(apart) - min(apart) == 0
    assert abs(apart[0]) < 1_000_000
