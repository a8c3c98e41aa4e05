"""Live capture: what the programs cost a packet, what the reader costs a record, what idling costs. As root.

Programs are run by the kernel on one RoCE packet over and over (bpf_prog_test_run), interleaved, and medians
are taken. N is the same program with a filter that nothing passes: it parses and stores nothing. The packet's
PSN never changes, so messages mode folds nothing here: that figure is its worst case.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.kernels import ring as kernel
from dpuflow.live import libbpf
from dpuflow.live.base import LARGEST_BLOCK, OUT_BYTES, object_path
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDS: Final = 300_000  # they fit into the ring
RING: Final = 64 << 20
NOBODY: Final = 0xFFFFFE  # a QP that no packet is for
IDLE_S: Final = 10

_PEER: Final = """
struct record { u64 a[8]; };
BPF_RINGBUF_OUTPUT(events, 8192);
int peer(struct xdp_md *ctx) {
    struct record *record = events.ringbuf_reserve(sizeof(*record));
    if (!record) return XDP_PASS;
    record->a[0] = bpf_ktime_get_ns();
    for (int k = 1; k < 8; k++) record->a[k] = k;
    events.ringbuf_submit(record, BPF_RB_NO_WAKEUP);
    return XDP_PASS;
}
"""


class _Run(ctypes.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p)),
        *(("size_in", ctypes.c_uint32), ("size_out", ctypes.c_uint32)),
        *(("ctx_in", ctypes.c_void_p), ("ctx_out", ctypes.c_void_p)),
        *((name, ctypes.c_uint32) for name in ("ctx_size_in", "ctx_size_out", "retval", "repeat")),
        *((name, ctypes.c_uint32) for name in ("duration", "flags", "cpu", "batch")),
    )


def repeat(fd: int, frame: bytes, times: int) -> int:
    """Nanoseconds a run of the program on ``frame``, as the kernel measures them."""
    data = ctypes.create_string_buffer(frame, len(frame))
    run = _Run(ctypes.sizeof(_Run), ctypes.addressof(data), None, len(frame), repeat=times)
    status = libbpf.library().bpf_prog_test_run_opts(ctypes.c_int(fd), ctypes.byref(run))
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return int(run.duration)


def write_middle(psn: int = 7, wire_len: int = 4174) -> bytes:
    """An RDMA WRITE MIDDLE packet with 4 KiB of payload, cut to what the kernel's test takes."""
    ethernet = bytes.fromhex("0200000000020200000000010800")
    ip = bytes.fromhex("4502000000004000401100000a0000010a000002")
    udp = bytes.fromhex("c00012b700000000")
    bth = bytes([7, 0, 0xFF, 0xFF, 0]) + (17).to_bytes(3, "big") + b"\0" + psn.to_bytes(3, "big")
    return (ethernet + ip + udp + bth).ljust(min(wire_len, 1514), b"\x55")


def missing() -> str | None:
    """Why the live part cannot be measured here, as a sentence; None where it can."""
    from dpuflow.errors import DpuflowError

    if os.geteuid() != 0:
        return "live capture is not measured: run as root (`sudo make bench`) for it"
    if not object_path("packets").is_file():
        return "live capture is not measured: its programs are not there; make them with `make bpf`"
    try:
        os.close(libbpf.create_ring(4096))
    except DpuflowError as error:
        return f"live capture is not measured: {error}"
    return None


def run_live(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure, say and return the figures, in ns."""
    ring = Ring(RING, RING)
    frame = write_middle()
    tally = np.zeros(kernel.D_SIZE, np.int64)
    tally[kernel.D_LEFT] = 1 << 60
    out = np.empty(OUT_BYTES + LARGEST_BLOCK, np.uint8)
    loaded = {}
    for name, program, options in (
        ("N", "dpuflow_xdp", LiveOptions(("lo",), qps=(NOBODY,))),
        ("packets, xdp", "dpuflow_xdp", LiveOptions(("lo",))),
        ("packets, tc", "dpuflow_in", LiveOptions(("lo",))),
        ("messages, xdp", "dpuflow_xdp", LiveOptions(("lo",), mode="messages")),
    ):
        settings = options.settings(0, 0)
        ring.set(settings)
        made = libbpf.Loaded(object_path(options.mode), (program,), settings, ring.maps())
        loaded[name] = (made, made.fds[program])
    samples: dict[str, list[float]] = {name: [] for name in (*loaded, "reader", "bcc callback")}
    peer = _bcc_peer(say)
    for _ in range(rounds):
        for name, (_, fd) in loaded.items():
            samples[name].append(repeat(fd, frame, RECORDS))
            before, start = int(tally[kernel.D_PACKETS]), time.process_time_ns()
            while ring.drain(out, 0, tally):
                pass
            if name.startswith("packets"):
                spent = time.process_time_ns() - start
                samples["reader"].append(spent / (int(tally[kernel.D_PACKETS]) - before))
        if peer is not None:
            samples["bcc callback"].append(peer())
    for made, _ in loaded.values():
        made.close()
    ring.close()
    figures = {name: median(values) for name, values in samples.items() if values}
    figures["idle share of a core"] = _idle()
    for name, value in figures.items():
        over = f", {value - figures['N']:.0f} over N" if name.split(",")[0] in ("packets", "messages") else ""
        say(f"{name:24} {value:10.4f}" if value < 1 else f"{name:24} {value:10.1f} ns{over}")
    if "bcc callback" in figures:
        say(
            f"the reader takes 1/{figures['bcc callback'] / figures['reader']:.0f} of bcc's callback a record"
        )
    return figures


def _bcc_peer(say: Callable[[str], None]) -> Callable[[], float] | None:
    """One round of bcc's ring buffer with a callback that reads five fields: ns a record."""
    try:
        from bcc import BPF

        from dpuflow.live.compiled import _header_flags

        module = BPF(text=_PEER, cflags=["-Wno-everything", *_header_flags()])
        fd = module.load_func("peer", BPF.XDP).fd
    except Exception as error:
        say(f"left out: bcc's callback ({error})")
        return None
    taken = 0

    def event(context: Any, data: Any, size: int) -> None:
        nonlocal taken
        record = module["events"].event(data)
        _ = record.a[0], record.a[1], record.a[2], record.a[3], record.a[4]
        taken += 1

    module["events"].open_ring_buffer(event)

    def once() -> float:
        nonlocal taken
        taken = 0
        repeat(fd, write_middle(), 50_000)
        start = time.process_time_ns()
        module.ring_buffer_consume()
        return (time.process_time_ns() - start) / max(taken, 1)

    return once


def _idle() -> float:
    """Share of a core that a capture takes on an interface without traffic, start-up apart."""
    command = [sys.executable, "-m", "dpuflow", "capture", "-i", "lo", "--protocol", "roce"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(1)
        before = _cpu_s(process.pid)
        time.sleep(IDLE_S)
        spent = _cpu_s(process.pid) - before
        process.terminate()
    return spent / IDLE_S


def _cpu_s(process: int) -> float:
    """CPU time that a process has had, user and system, to the nanosecond (/proc/PID/schedstat)."""
    with open(f"/proc/{process}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9
