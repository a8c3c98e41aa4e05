"""Where the CPU time of ``dpuflow analyze`` goes: start-up by imported package, by kernel, by function.

In the list of functions all kernels together are ``_ready.py _enter``.
"""

from __future__ import annotations

import json
import pstats
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

from bench.measure import ROOT, dpuflow, python, run

_TOP: Final = 25
_IMPORT: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def _imports(path: Path) -> dict[str, float]:
    """Milliseconds of import by top-level package, largest first."""
    # -X importtime writes to standard error.
    analyze = python("-X", "importtime", "-m", "dpuflow", "analyze", "--quiet", str(path))
    shell = ["sh", "-c", 'exec "$@" 2>&1', "sh", *analyze]
    spent: dict[str, float] = defaultdict(float)
    for own, module in _IMPORT.findall(run(shell).output):
        spent[module.split(".")[0]] += int(own) / 1000
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def _functions(path: Path, folder: Path) -> list[tuple[str, int, float, float]]:
    """(function, calls, own seconds, seconds with callees), largest own time first, one thread."""
    out = folder / "profile.out"
    # Not as the command, which ends without the interpreter's leave once it has written its result.
    run(python("-m", "cProfile", "-o", str(out), "-m", "bench.profile", "analyze", str(path),
               "--threads", "1", "--json", str(folder / "result.json")), keep_output=False)  # fmt: skip
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(str(out)).stats.items():  # type: ignore[attr-defined]
        where = file.replace(str(ROOT) + "/", "")
        rows.append((f"{where}:{line} {name}" if line else name, calls, own, total))
    return sorted(rows, key=lambda row: -row[2])


def profile_analysis(file: Path | None, packets: int) -> str:
    """A text: whole command, imports, functions."""
    from bench.generate import write_captures  # brings Numba, which the command does without

    with tempfile.TemporaryDirectory(prefix="dpuflow-profile-") as name:
        folder = Path(name)
        if file is None:
            file = folder / "capture.pcap"
            write_captures(packets, pcap=file)
        run(dpuflow("analyze", str(file), "--quiet"))  # fills the page cache and the kernels' cache
        whole = run(dpuflow("analyze", str(file), "--quiet")).cpu_ns / 1e6
        lines = [f"whole command: {whole:,.0f} ms CPU", "", "imports, ms by package:"]
        lines += [f"  {ms:8.1f}  {package}" for package, ms in list(_imports(file).items())[:12]]
        kernels = json.loads(run(python("-m", "bench.kernels", str(file))).output)
        lines += ["", "compiled kernels, one thread:", "   CPU ms     calls  kernel"]
        lines += [f"{ns / 1e6:9.1f}{calls:10,}  {name}" for name, (calls, ns) in list(kernels.items())[:_TOP]]
        functions = _functions(file, folder)
        dpuflow_s = sum(own for where, _, own, _ in functions if where.startswith("dpuflow/"))
        lines += ["", f"functions, one thread, under cProfile ({dpuflow_s:.2f} s own time in dpuflow/):"]
        lines += ["   own ms   all ms     calls  function"]
        lines += [
            f"{own * 1e3:9.1f}{total * 1e3:9.1f}{calls:10,}  {where}"
            for where, calls, own, total in functions[:_TOP]
        ]
        return "\n".join(lines)


if __name__ == "__main__":
    from dpuflow.cli import run as run_command

    sys.exit(run_command(sys.argv[1:]))
