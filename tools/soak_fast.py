"""Hours of an agent's work in minutes: packets of many jobs are fed to it as fast as it analyses them.

    soak_fast.py HOURS [--gap TIMES] [--step SECONDS] [--trace]        (or: soak.py --fast HOURS)
    soak_fast.py HOURS --only stream [--gap TIMES]
    soak_fast.py HOURS --only api

What runs is the agent's own service with history, metrics, API and an event stream, all but the thread
that captures: the bundled captures are played one after the other and two at a time, with other peers, queue
pairs and times at each round. Time in it is the packets': API and metrics are asked every 15 s of it, as a
scraper would, and free memory goes back to the kernel every minute of it, as it does live. Prints memory,
CPU and figures for every tenth of an hour, and at the end how far the last quarter's are from the third's;
with --gap jobs are so many times further apart, with --step it analyses every so many seconds (as
``windows.step``), which is what takes the CPU; with --trace it is told what Python has allocated, too.
With --only hours take minutes: "stream" reads and lets go without analysing, "api" gives the process of the
API a window a second of a job whose peers change every minute.
Needs neither root nor namespaces.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import gzip
import heapq
import http.client
import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

from dpuflow.agent.board import Board, Health, Traffic, Window  # noqa: E402
from dpuflow.agent.config import Api, Capture, Config, History, Limits, Windows  # noqa: E402
from dpuflow.agent.log import Log  # noqa: E402
from dpuflow.agent.outside import Outside  # noqa: E402
from dpuflow.agent.service import Service  # noqa: E402
from dpuflow.agent.stream import Stream  # noqa: E402
from dpuflow.agent.usage import TRIM_S, give_back, restrain_allocator  # noqa: E402
from dpuflow.analysis import analyze  # noqa: E402
from dpuflow.capture.pcapfile import open_file  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.results import Analysis

    Ints = NDArray[np.int64]
    Bytes = NDArray[np.uint8]

S = 1_000_000_000


class Recorded:
    """A capture to be played again with other peers, queue pairs and times."""

    def __init__(self, path: Path) -> None:
        """``path``: classic little-endian pcap with stamps in ns, compressed."""
        raw = gzip.decompress(path.read_bytes())
        assert raw[:4] == b"\x4d\x3c\xb2\xa1", path
        self.form = open_file(str(path)).format
        self.data = np.frombuffer(raw, np.uint8)
        at, starts = 24, []
        while at + 16 <= len(raw):
            starts.append(at)
            at += 16 + int.from_bytes(raw[at + 8 : at + 12], "little")
        self.bounds = np.array([*starts, at])
        self.starts = self.bounds[:-1]
        words = self._words(self.starts, "<u4", 2)
        self.times = words[:, 0].astype(np.int64) * S + words[:, 1]
        frames = self.starts + 16
        kind = self._words(frames + 12, ">u2", 1)[:, 0]
        self.ends = np.concatenate([frames[kind == 0x0800] + 26, frames[kind == 0x0800] + 30])
        self.addresses = self._words(self.ends, ">u4", 1)[:, 0]
        found, counts = np.unique(self.addresses, return_counts=True)
        self.own = found[counts.argmax()]  # in every packet of its node's capture
        port = self._words(frames[kind == 0x0800] + 36, ">u2", 1)[:, 0]
        self.qps = frames[kind == 0x0800][port == 4791] + 47

    def _words(self, at: Ints, kind: str, count: int) -> NDArray[Any]:
        size = np.dtype(kind).itemsize
        rows = self.data[at[:, None] + np.arange(size * count)]
        return np.ascontiguousarray(rows).view(kind)

    def played(self, start_ns: int, draw: random.Random) -> Iterator[tuple[int, Bytes]]:
        """(time, record) of each packet, from ``start_ns`` on."""
        data = self.data.copy()
        theirs = self.addresses[self.addresses != self.own]
        for old in np.unique(theirs):
            new = (10 << 24) | draw.randrange(1 << 24)
            where = self.ends[self.addresses == old]
            data[where[:, None] + np.arange(4)] = np.frombuffer(new.to_bytes(4, "big"), np.uint8)
        shift = draw.randrange(1 << 16)
        numbers = (data[self.qps].astype(np.int64) << 16) | (data[self.qps + 1].astype(np.int64) << 8)
        numbers |= data[self.qps + 2]
        numbers = np.where(numbers > 1, (numbers + shift) & 0xFFFFFF, numbers)
        for byte, by in enumerate((16, 8, 0)):
            data[self.qps + byte] = numbers >> by & 0xFF
        times = self.times - self.times[0] + start_ns
        stamps = np.stack([times // S, times % S], axis=1).astype("<u4").view(np.uint8)
        data[self.starts[:, None] + np.arange(8)] = stamps
        for number, at in enumerate(times.tolist()):
            yield at, data[self.bounds[number] : self.bounds[number + 1]]


def jobs(
    captures: list[Recorded], start_ns: int, draw: random.Random, gap: float
) -> Iterator[tuple[int, Bytes]]:
    """Jobs for ever, in the order of time; every third begins while the one before runs."""
    running: list[tuple[int, int, Bytes, Iterator[tuple[int, Bytes]]]] = []
    next_ns, count = start_ns, 0
    while True:
        while not running or (count % 3 == 2 and len(running) < 2):
            made = draw.choice(captures).played(next_ns, draw)
            at, record = next(made)
            count += 1
            heapq.heappush(running, (at, count, record, made))
        at, number, record, made = heapq.heappop(running)
        yield at, record
        following = next(made, None)
        if following is not None:
            heapq.heappush(running, (following[0], number, following[1], made))
        next_ns = at + round(draw.choice([0.2, 2, 10, 40]) * gap * S)


def ask(port: int, path: str) -> bytes:
    """What the agent's server answers."""
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asking.request("GET", path)
    body = asking.getresponse().read()
    asking.close()
    return body


def listen(port: int) -> None:
    """A client of the event stream, in a thread."""

    def run() -> None:
        asking = http.client.HTTPConnection("127.0.0.1", port)
        asking.request("GET", "/api/v1/events")
        answer = asking.getresponse()
        while answer.read1(1 << 16):
            pass

    threading.Thread(target=run, daemon=True).start()


def memory() -> tuple[float, float]:
    """Resident anonymous memory now, and the most there was in all, MiB."""
    status = Path("/proc/self/status").read_text()
    found = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    return int(found["RssAnon"]) / 1024, int(found["VmHWM"]) / 1024


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 (mallinfo(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def parts() -> str:
    """Where memory is, MiB: blocks in glibc's heaps, what lies free there, blocks mapped apart, Python's
    own objects and their arenas."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return ""
    ask.restype = _Mallinfo
    found = ask()
    heap, free, mapped = (getattr(found, name) / 2**20 for name in ("uordblks", "fordblks", "hblkhd"))
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()  # type: ignore[attr-defined]  # it writes to stderr
        os.dup2(kept, 2)
        os.close(kept)
        file.seek(0)
        text = file.read().decode()
    sizes = {
        line.split("=")[0]: line.rsplit("=", 1)[1].replace(",", "")
        for line in text.splitlines()
        if "=" in line
    }
    arenas, used = (
        next((int(size) for name, size in sizes.items() if what in name), 0) / 2**20  # none told while traced
        for what in ("bytes/arena", "bytes in allocated blocks")
    )
    return (
        f"heap {heap:.1f} + {free:.1f} free, mapped {mapped:.1f}, Python {used:.1f} in arenas of {arenas:.1f}"
    )


def soak(hours: float, gap: float, step_s: int, trace: bool) -> None:
    """Run for so many hours of the packets' time; ``step_s`` divides 15."""
    folder = Path(tempfile.mkdtemp(prefix="dpuflow-soak-"))
    log = io.StringIO()
    config = Config(
        capture=Capture(interfaces=["lo"]),
        api=Api(listen="127.0.0.1:0"),
        limits=Limits(cpu=64.0),  # as fast as it goes
        windows=Windows(step=step_s),
        history=History(directory=str(folder / "history"), keep_size=64 << 20, keep_age=1e9),
    )
    restrain_allocator()  # as Service.start does
    service = Service(config, Log("warning", "text", stream=log))
    from dpuflow.agent import outlets

    service.outlets = outlets.start(service.board, config)
    assert service.outlets.server is not None
    port = service.outlets.server.address[1]
    service._start_history()
    listen(port)
    captures = [Recorded(path) for path in sorted((HERE / "traces").glob("*/node0.pcap.gz"))]
    form = captures[0].form
    draw = random.Random(1)
    first_ns = now_ns = time.time_ns()
    packets = jobs(captures, first_ns, draw, gap)
    at, record = next(packets)
    began_s, marks, cpus, number = time.monotonic(), [], [], 0
    cpu_s, fed = time.process_time(), 0
    before: tracemalloc.Snapshot | None = None
    if trace:
        tracemalloc.start(8)
    try:
        while now_ns - first_ns < hours * 3600 * S:
            now_ns += step_s * S
            piece = []
            while at < now_ns:
                piece.append(record)
                at, record = next(packets)
            number += len(piece)
            if piece:
                with service.lock:
                    service.stream.feed(form, np.concatenate(piece))
            service.source.read_until_ns = now_ns
            service.safe_step()
            service.look()
            seconds = (now_ns - first_ns) // S
            if seconds % TRIM_S == 0:
                give_back()
            if seconds % 15 == 0:
                for path in ("/metrics", "/api/v1/lateness", "/api/v1/collectives?limit=100"):
                    ask(port, path)
            if seconds % 360 == 0:
                anonymous, most = memory()
                marks.append(anonymous)
                spent_s, cpu_s = time.process_time() - cpu_s, time.process_time()
                cpus.append(1e6 * spent_s / max(number - fed, 1))
                fed = number
                health = service.health()
                print(
                    f"{seconds / 3600:5.1f} h  anonymous {anonymous:6.1f} MiB  most in all {most:6.1f}"
                    f"  CPU {spent_s:5.1f} s, {cpus[-1]:4.0f} us a packet"
                    f"  packets {number}  collectives {health.collectives}  held {health.held_messages}"
                    f" messages, {health.held_flows} flows  {parts()}"
                    f"  {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
                if trace and seconds % 3600 == 0:
                    before = compared(before)
    finally:
        service.close()
        said = log.getvalue()
        shutil.rmtree(folder)
    print(f"anonymous memory: first {marks[0]:.1f}, most {max(marks):.1f}, last {marks[-1]:.1f} MiB")
    quarters("anonymous memory", "MiB", marks)
    quarters("CPU", "us a packet", cpus)
    print(f"errors {service.board.health().errors}")
    if said:
        print(said[-2000:])


def quarters(name: str, unit: str, figures: list[float]) -> None:
    """How far the last quarter's mean is from the third's."""
    quarter = max(len(figures) // 4, 1)
    third, last = (statistics.fmean(figures[-n * quarter :][:quarter]) for n in (2, 1))
    print(f"{name}: third quarter {third:.1f}, last {last:.1f} {unit} ({last / third - 1:+.1%})")


def soak_stream(hours: float, gap: float) -> None:
    """Packets read, messages and flows let go as windows do, without analyses."""
    captures = [Recorded(path) for path in sorted((HERE / "traces").glob("*/node0.pcap.gz"))]
    form, longest_ns = captures[0].form, round(Windows().longest * S)
    first_ns = now_ns = time.time_ns()
    packets = jobs(captures, first_ns, random.Random(1), gap)
    at, record = next(packets)
    stream, sizes, flows = Stream("soak"), [], []
    while now_ns - first_ns < hours * 3600 * S:
        now_ns += 5 * S
        piece = []
        while at < now_ns:
            piece.append(record)
            at, record = next(packets)
        if piece:
            stream.feed(form, np.concatenate(piece))
        seconds = (now_ns - first_ns) // S
        if seconds % 20 == 0:
            tables = stream.snapshot(now_ns).tables()
            stream.forget(np.full(len(tables.flows), now_ns - longest_ns))
            stream.forget_flows(tables, now_ns, longest_ns)
        if seconds % 60 == 0:
            give_back()
        if seconds % 360 == 0:
            sizes.append(memory()[0])
            flows.append(float(stream.held_flows()))
            print(
                f"{seconds / 3600:5.1f} h  anonymous {sizes[-1]:6.1f} MiB  {flows[-1]:.0f} flows", flush=True
            )
    quarters("anonymous memory", "MiB", sizes)
    quarters("flows", "", flows)


def renamed(result: Analysis, number: int, start_ns: int, draw: random.Random) -> Analysis:
    """The result with some collectives of its own at another time; peers are others each minute."""
    ends = [
        replace(
            each, address=(name := f"10.{number // 60 % 256}.{number // 15360}.{each.id}"), addresses=[name]
        )
        for each in result.endpoints
    ]
    picked = []
    for at, each in enumerate(draw.choices(result.collectives, k=draw.choice([0, 5, 15, 30]))):
        by_ns = start_ns - each.start_ns + at * 1_000_000
        ranks = [replace(r, enter_ns=None if r.enter_ns is None else r.enter_ns + by_ns) for r in each.ranks]
        picked.append(
            replace(each, id=at, start_ns=each.start_ns + by_ns, end_ns=each.end_ns + by_ns, ranks=ranks)
        )
    return replace(result, endpoints=ends, collectives=picked, flows=[])


def soak_api(hours: float) -> None:
    """The process of the API: what it holds of windows, series, findings and events."""
    job = analyze([str(path) for path in sorted((HERE / "traces/gloo-allreduce-n4").glob("node*.pcap.gz"))])
    board = Board()
    log = Log("warning", "text", stream=io.StringIO())
    outside = Outside(board, Config(api=Api(listen="127.0.0.1:0")), log)
    board.keep(1)
    draw, began_ns, sizes = random.Random(1), time.time_ns(), []
    try:
        for number in range(1, round(3600 * hours) + 1):
            start_ns = began_ns + number * S
            result = renamed(job, number, start_ns, draw)
            ends = [each.address for each in result.endpoints]
            sent = tuple(
                Traffic(a, b, "tcp", 100, 10**6) for a, b in zip(ends, [*ends[1:], ends[0]], strict=True)
            )
            late = frozenset((each.id, 1) for each in result.collectives)
            board.publish(Window(number, start_ns, start_ns + S, result, late, sent))
            board.report(Health(time_ns=start_ns))
            while len(outside._subscription._events) > 100:
                time.sleep(0.01)
            if number % 360 == 0:
                status = Path(f"/proc/{outside.pid}/status").read_text()
                sizes.append(int(status.partition("RssAnon:")[2].split()[0]) / 1024)
                print(f"{number / 3600:5.1f} h  anonymous {sizes[-1]:6.1f} MiB", flush=True)
    finally:
        outside.close()
    quarters("anonymous memory", "MiB", sizes)


def compared(before: tracemalloc.Snapshot | None) -> tracemalloc.Snapshot:
    """What Python has allocated more than at the last time."""
    gc.collect()
    now = tracemalloc.take_snapshot()
    print(f"   traced {sum(s.size for s in now.statistics('filename')) / 2**20:.1f} MiB")
    rows = now.compare_to(before, "traceback") if before else now.statistics("traceback")
    for row in rows[:12]:
        size = getattr(row, "size_diff", row.size) / 1024
        frames = list(row.traceback)[:-5:-1]
        print(f"   {size:8.0f} KiB  {' < '.join(f'{f.filename[-30:]}:{f.lineno}' for f in frames)}")
    return now


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("hours", type=float)
    options.add_argument("--gap", type=float, default=1.0)
    options.add_argument("--step", type=int, choices=[1, 3, 5], default=1)
    options.add_argument("--only", choices=["stream", "api"])
    options.add_argument("--trace", action="store_true")
    given = options.parse_args()
    if given.only == "stream":
        soak_stream(given.hours, given.gap)
    elif given.only == "api":
        soak_api(given.hours)
    else:
        soak(given.hours, given.gap, given.step, given.trace)
    os._exit(0)
