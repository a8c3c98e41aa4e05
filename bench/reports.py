"""What writing reports costs: `python -m bench.reports`, of scripted results; CPU, memory, size.

A job of steps of 40 ms in which rank 2 is 5 ms late. Memory is the process' most, the result included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dpuflow.results import Analysis

CASES: Final = (
    ("perfetto", 7800, 64),  # a million slices
    ("html", 40, 5000),
    ("html", 20_000, 64),
    ("parquet", 7800, 64),
)
MS: Final = 1_000_000


def scripted(calls: int, ranks: int) -> Analysis:
    """An all_reduce of all ranks each step."""
    from dpuflow.results import Analysis, Collective, Endpoint, Group, Lateness, RankEntry

    result = Analysis(start_ns=0, end_ns=calls * 40 * MS, groups=[Group(0, list(range(ranks)))])
    result.endpoints = [Endpoint(i, f"10.0.{i >> 8}.{i & 255}", [], None, i) for i in range(ranks)]
    for number in range(calls):
        start = number * 40 * MS + 1
        late = [(i % 7) * 100_000 + (5 * MS if i == 2 else 0) for i in range(ranks)]
        entries = [
            RankEntry(i, start + ns, start + 10 * MS, ns, 50_000, "exact", "none",
                      f"its first message, packet {number * ranks + i}")
            for i, ns in enumerate(late)
        ]  # fmt: skip
        call = Collective(number, 0, "all_reduce", "ring", [], None, 1 << 20, ranks << 21, start,
                          start + 10 * MS, 0.99, True, [], entries)  # fmt: skip
        result.collectives.append(call)
    result.lateness = [
        Lateness(i, calls, float(i == 2), float(i == 2), 0, 0, (i == 2) * calls * 5 * MS * ranks,
                 "late" if i == 2 else "on_time", "compute" if i == 2 else "none")
        for i in range(ranks)
    ]  # fmt: skip
    return result


def measure(report: str, calls: int, ranks: int) -> dict[str, float | int | str]:
    """One report of one result, in this process."""
    from importlib import import_module

    from dpuflow.cli.reporting import REPORTS

    result = scripted(calls, ranks)
    write = getattr(import_module(f"dpuflow.reports.{REPORTS[report].module}"), REPORTS[report].writer)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, report)
        began = time.process_time()
        write(result, str(target))
        took = time.process_time() - began
        files = [file for file in target.rglob("*") if file.is_file()] or [target]
        size = sum(file.stat().st_size for file in files)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"report": report, "collectives": calls, "ranks": ranks, "cpu_s": round(took, 2), "mib": most,
            "file_mb": round(size / 1e6, 2)}  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:  # each in a process of its own, as memory is the process' most
        for case in CASES:
            subprocess.run([sys.executable, "-m", "bench.reports", *map(str, case)], check=True)
