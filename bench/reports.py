"""What writing reports costs: `python -m bench.reports`, of scripted results; CPU, memory, size.

A job of steps of 40 ms in which rank 2 is 5 ms late. Times vary by chance and each entry names its packet, as
in results of real captures: what is regular would be stored in less. Memory is the process' most, the result
included. ``json_mb``: the result's JSON; ``first_paint_s``, ``tab_mib``: the page in Chromium, where there is
one.
"""

from __future__ import annotations

import contextlib
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
    ("html", 100_000, 64),  # 6.4 million entries: about 3 GiB of memory
    ("parquet", 15_625, 64),  # a million entries
)
MS: Final = 1_000_000
T0: Final = 1_795_251_363_000_000_000


def scripted(calls: int, ranks: int) -> Analysis:
    """An all_reduce of all ranks each step."""
    import numpy as np

    from dpuflow.results import Analysis, Collective, Endpoint, Group, Lateness, RankEntry

    result = Analysis(start_ns=T0, end_ns=T0 + calls * 40 * MS, groups=[Group(0, list(range(ranks)))])
    result.endpoints = [Endpoint(i, f"10.0.{i >> 8}.{i & 255}", [], None, i) for i in range(ranks)]
    chance = np.random.default_rng(1)
    frames = np.cumsum(chance.integers(200, 220, (calls, ranks)), axis=0)
    for number in range(calls):
        start = T0 + number * 40 * MS
        enters = chance.gamma(4, 100_000, ranks).astype(np.int64)
        enters[2] += 5 * MS
        late = (enters - enters.min()).tolist()
        leaves = (start + 10 * MS + chance.gamma(2, 50_000, ranks)).astype(np.int64).tolist()
        errors = chance.integers(30_000, 60_000, ranks).tolist()
        entries = [
            RankEntry(i, start + ns, leaves[i], ns, errors[i], "exact", "none",
                      f"first message of a step that needs no input (packet {frames[number, i]} of node{i})")
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
    from dpuflow.reports.json import write_json

    result = scripted(calls, ranks)
    write = getattr(import_module(f"dpuflow.reports.{REPORTS[report].module}"), REPORTS[report].writer)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"{report}.html" if report == "html" else report)
        began = time.process_time()
        write(result, str(target))
        took = time.process_time() - began
        files = [file for file in target.rglob("*") if file.is_file()] or [target]
        size = sum(file.stat().st_size for file in files)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        more = shown(target) if report == "html" else {}
        if report == "parquet":
            write_json(result, f"{folder}/result.json")
            more = {"json_mb": round(Path(folder, "result.json").stat().st_size / 1e6, 2)}
    return {"report": report, "collectives": calls, "ranks": ranks, "cpu_s": round(took, 2), "mib": most,
            "file_mb": round(size / 1e6, 2), **more}  # fmt: skip


def shown(page: Path) -> dict[str, float | int]:
    """When Chromium first paints a page, and the memory of its process with the page in it."""
    sys.path.insert(0, "tests")
    from browser import PROGRAM, chromium

    if PROGRAM is None:
        return {}
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.open(page)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        waited = f"new Promise(done => setTimeout(() => done({paint}), 3000))"
        painted = browser.value(waited)
        memory = max(_resident_mib(number) for number in _renderers())
    return {"first_paint_s": round((painted or float("nan")) / 1000, 2), "tab_mib": memory}


def _renderers() -> list[int]:
    """Processes of Chromium that hold a tab, of this process' own browser."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _resident_mib(number: int) -> int:
    said = Path(f"/proc/{number}/status").read_text()
    return int(said.partition("VmRSS:")[2].split()[0]) >> 10


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:  # each in a process of its own, as memory is the process' most
        for case in CASES:
            subprocess.run([sys.executable, "-m", "bench.reports", *map(str, case)], check=True)
