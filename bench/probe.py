"""Runs dpuflow's reader in a process of its own and measures it from inside.

usage: python -m bench.probe parse FILE THREADS SMALL_FILE
       python -m bench.probe check FILE THREADS
       python -m bench.probe stages FILE,FILE,... THREADS [SMALL_FILE]

``parse`` reads the capture into blocks of columns and drops them; it prints CPU nanoseconds of the
process and of its busiest thread, and the peak of resident memory, as JSON. A pass over
SMALL_FILE loads the compiled kernels before the clock starts. ``check`` is not timed: it
prints the checksum of the fields (bench/checksum.py) and a digest of all columns. ``stages`` runs the
whole analysis of one or more vantage points and prints the CPU nanoseconds that each stage of it took, the
number of messages and the peak of resident memory; of SMALL_FILE first, so that kernels are loaded.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.schema.tables import Block

# As the command does: threads of NumPy's linear algebra would spin for some ms, as long as a million packets
# take to parse.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class _Reader:
    """``read_blocks`` over one file, and the addresses behind its endpoint rows."""

    def __init__(self, path: str, threads: int) -> None:
        from dpuflow.capture import open_capture
        from dpuflow.packets.records import read_blocks

        self._blocks = read_blocks(open_capture([path]), threads=threads)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def ipv4(self) -> Any:
        """The IPv4 address (as a number) of each endpoint row so far."""
        import numpy as np

        return self._blocks.endpoints["addr_lo"] & np.uint64(0xFFFFFFFF)


class _ThreadClock:
    """CPU time of every thread, those that end meanwhile too."""

    def __init__(self) -> None:
        self.ended_ns: list[int] = []
        run, ended = threading.Thread.run, self.ended_ns

        def timed_run(thread: threading.Thread) -> None:
            try:
                run(thread)
            finally:
                ended.append(time.thread_time_ns())

        threading.Thread.run = timed_run  # type: ignore[method-assign]
        self._main = time.thread_time_ns()

    def longest_ns(self) -> int:
        """CPU time of the thread that used most."""
        alive = [
            time.clock_gettime_ns(time.pthread_getcpuclockid(t.ident))
            for t in threading.enumerate()
            if t is not threading.main_thread() and t.ident is not None
        ]
        return max([time.thread_time_ns() - self._main, *alive, *self.ended_ns])


def _peak_bytes() -> int:
    """Peak of resident memory; getrusage would count the parent's, from before the exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def parse(path: str, threads: int, small: str) -> dict[str, int]:
    """CPU nanoseconds, packets and peak memory of one pass; ``small`` is read before."""
    for _ in _Reader(small, threads):
        pass
    clock = _ThreadClock()
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    packets = sum(block.rows for block in _Reader(path, threads))
    cpu, longest = time.process_time_ns() - cpu, clock.longest_ns()
    wall = time.perf_counter_ns() - wall
    return {
        "packets": packets,
        "cpu_ns": cpu,
        "longest_ns": longest,
        "wall_ns": wall,
        "peak_bytes": _peak_bytes(),
    }


def check(path: str, threads: int) -> dict[str, Any]:
    """Checksum of the common fields, and a digest of all that does not depend on the blocks' bounds."""
    from bench.checksum import Checksum

    total, digests = Checksum(), {}
    reader = _Reader(path, threads)
    for block in reader:
        total.add_columns(block.columns, block.rows, reader.ipv4())
        for name, values in block.columns.items():
            if name not in ("data_at", "flow"):  # a place in the block's bytes; a later stage's row
                digests.setdefault(name, blake2b()).update(values[: block.rows].tobytes())
        for name in ("reth", "aeth", "imm", "deth", "atomic", "tcp", "pause"):
            rows = getattr(block, name)
            for field in rows.dtype.names:
                values = rows[field] + block.first_frame if field == "packet" else rows[field]
                digests.setdefault(f"{name}.{field}", blake2b()).update(
                    values.astype(rows[field].dtype).tobytes()
                )
    digest = blake2b("".join(f"{k} {digests[k].hexdigest()} " for k in sorted(digests)).encode()).hexdigest()[
        :32
    ]
    return {"packets": total.packets, "checksum": str(total), "digest": digest}


# Stages of ``dpuflow.analyze``: module and function.
_STAGES = (
    ("dpuflow.analysis", "read_captures"),
    ("dpuflow.join", "join"),
    ("dpuflow.exchanges.build", "build_exchanges"),
    ("dpuflow.matching", "build_collectives"),
    ("dpuflow.entries", "build_entries"),
    ("dpuflow.verdicts", "infer"),
    ("dpuflow.assemble", "assemble"),
    ("dpuflow.findings.build", "build_findings"),
)


def stages(path: str, threads: int, small: str = "") -> dict[str, int]:
    """CPU nanoseconds of the stages, imports included; messages, memory."""
    import dpuflow
    from dpuflow.cli import COLLECT_AFTER

    gc.set_threshold(COLLECT_AFTER, 10, 10)  # as the command does
    spent: dict[str, int] = {}

    def timed(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.process_time_ns()
            try:
                return stage(*args, **options)
            finally:
                spent[name] = spent.get(name, 0) + time.process_time_ns() - start

        return run

    if small:
        dpuflow.analyze([small], threads=threads)
    for module_name, name in _STAGES:
        module = import_module(module_name)
        setattr(module, name, timed(name, getattr(module, name)))
    analyze = timed("analyze", dpuflow.analyze)
    files = path.split(",")
    result = analyze([dpuflow.Vantage(f"bench{n}", (file,)) for n, file in enumerate(files)], threads=threads)
    timed("write_json", dpuflow.write_json)(result, os.devnull)
    messages = sum(flow.messages for flow in result.flows)
    return {**spent, "messages": messages, "peak_bytes": _peak_bytes()}


def main(what: str, path: str, threads: str, *small: str) -> None:
    """The command line."""
    command: Callable[..., dict[str, Any]] = {"parse": parse, "check": check, "stages": stages}[what]
    print(json.dumps(command(path, int(threads), *small)))


if __name__ == "__main__":
    main(*sys.argv[1:])
