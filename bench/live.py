"""Live capture: what the programs cost a packet, what the reader costs a record, what idling costs. As root.

Programs are run by the kernel on one RoCE packet over and over (bpf_prog_test_run), interleaved, and medians
are taken. N is the same program with a filter that nothing passes: it parses and stores nothing. "Stamped"
packets have the kernel's stamp before the program runs. The packet's
PSN never changes, so messages mode folds nothing here: that figure is its worst case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.lossless import lossless_lines, run_lossless
from bench.testrun import bench_programs, cpu_s, repeat, write_middle
from dpuflow.kernels import ring as kernel
from dpuflow.live import libbpf
from dpuflow.live.base import LARGEST_BLOCK, OUT_BYTES, object_path
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import Ring
from dpuflow.live.wall import WallMap

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDS: Final = 80_000  # they fit into the rings
CELL: Final = 16 << 20  # as with the default --buffer on two CPUs
RING: Final = 64 << 20
SHORT: Final = 20_000
CONTENDED_S: Final = 2
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
    from dpuflow.errors import DpuflowError

    rings, wall = {"own": Ring(1 << 16, CELL), "kernel's": Ring(RING)}, WallMap()
    frame = write_middle()
    tally = np.zeros(kernel.D_SIZE, np.int64)
    tally[kernel.D_LEFT] = 1 << 60
    out = np.empty(OUT_BYTES + LARGEST_BLOCK, np.uint8)
    loaded: dict[str, tuple[libbpf.Loaded, int, Ring]] = {}
    for name, program, which, options in (
        ("N", "dpuflow_xdp", "own", LiveOptions(("lo",), qps=(NOBODY,))),
        ("packets, xdp", "dpuflow_xdp", "own", LiveOptions(("lo",))),
        ("packets, tc", "dpuflow_in", "own", LiveOptions(("lo",))),
        ("packets, tc, stamped", "dpuflow_in", "own", LiveOptions(("lo",))),
        ("packets, kernel's ring alone", "dpuflow_xdp", "kernel's", LiveOptions(("lo",))),
        ("messages, xdp", "dpuflow_xdp", "own", LiveOptions(("lo",), mode="messages")),
    ):
        settings = options.settings(0, 0)
        rings[which].set(settings)
        settings["atomic"] = 1
        maps = rings[which].maps() | ({"wall": wall.fd} if name.endswith("stamped") else {})
        made = libbpf.Loaded(object_path(options.mode), (program,), settings, maps)
        loaded[name] = (made, made.fds[program], rings[which])
    stamps = {f"stamp, {name}": fd for name, fd in bench_programs().items() if name != "source"}
    samples: dict[str, list[float]] = {name: [] for name in (*loaded, "reader", "bcc callback", *stamps)}
    peer = _bcc_peer(say)
    for _ in range(rounds):
        for name, (_, fd, ring) in loaded.items():
            stamp_ns = time.time_ns() if name.endswith("stamped") else 0
            samples[name].append(repeat(fd, frame, RECORDS, stamp_ns))
            before, start = int(tally[kernel.D_PACKETS]), time.process_time_ns()
            while ring.drain(out, 0, tally):
                pass
            if name in ("packets, xdp", "packets, tc"):
                spent = time.process_time_ns() - start
                samples["reader"].append(spent / (int(tally[kernel.D_PACKETS]) - before))
        for name, fd in stamps.items():
            samples[name].append(repeat(fd, frame, RECORDS))
        if peer is not None:
            samples["bcc callback"].append(peer())
    for name in ("packets, xdp", "packets, kernel's ring alone"):
        samples[f"{name}, two CPUs"] = [_contended(*loaded[name][1:], frame)]
    for made, _, _ in loaded.values():
        made.close()
    for ring in rings.values():
        ring.close()
    wall.close()
    figures = {name: median(values) for name, values in samples.items() if values}
    figures["idle share of a core"] = _idle()
    for name, value in figures.items():
        base = "stamp, no_stamp" if name.startswith("stamp, ") else "N"
        over = (
            f", {value - figures[base]:.0f} over {base.split()[-1]}" if "," in name and name != base else ""
        )
        say(f"{name:38} {value:10.4f}" if value < 1 else f"{name:38} {value:10.1f} ns{over}")
    if "bcc callback" in figures:
        say(
            f"the reader takes 1/{figures['bcc callback'] / figures['reader']:.0f} of bcc's callback a record"
        )
    try:
        lossless = run_lossless(rounds)
    except DpuflowError as error:
        say(str(error))
        return figures
    for line in lossless_lines(lossless):
        say(line)
    return figures | {f"one core, {name}": each["ns"] for name, each in lossless.items()}


def _contended(fd: int, ring: Ring, frame: bytes) -> float:
    """Nanoseconds a run on the slower of two CPUs that run the program at a time.

    Of many short runs the upper tenth, as the two are not always given a CPU at the same time.
    """
    import ctypes

    cpus = sorted(os.sched_getaffinity(0))[:2]
    pipes = []
    for cpu in cpus:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.sched_setaffinity(0, {cpu})
            end, runs = time.monotonic() + CONTENDED_S, []
            while time.monotonic() < end:
                runs.append(repeat(fd, frame, SHORT))
                ring.discard()
            os.write(writer, bytes(ctypes.c_double(sorted(runs)[len(runs) * 9 // 10])))
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
    values = []
    for reader in pipes:
        values.append(ctypes.c_double.from_buffer_copy(os.read(reader, 8)).value)
        os.close(reader)
    for _ in cpus:
        os.wait()
    return max(values)


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
        before = cpu_s(process.pid)
        time.sleep(IDLE_S)
        spent = cpu_s(process.pid) - before
        process.terminate()
    return spent / IDLE_S
