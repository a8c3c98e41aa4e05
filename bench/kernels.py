"""CPU time of each compiled kernel in one analysis: ``python -m bench.kernels FILE`` writes JSON.

Kernels that Numba itself has loaded, because there is no library of them, are not seen here.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any

import dpuflow
from dpuflow.kernels._ready import Kernel


def kernel_times(path: str) -> dict[str, tuple[int, int]]:
    """Kernel -> (calls, CPU nanoseconds of the calling thread), one thread, largest first."""
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    enter = Kernel._enter

    def timed(kernel: Kernel, words: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return enter(kernel, words)
        finally:
            entry = spent[kernel.name.removeprefix("dpuflow_kernels_")]
            entry[0] += 1
            entry[1] += time.thread_time_ns() - start

    Kernel._enter = timed  # type: ignore[method-assign]
    try:
        dpuflow.analyze([dpuflow.Vantage("bench", (path,))], threads=1)
    finally:
        Kernel._enter = enter  # type: ignore[method-assign]
    return {name: (n, ns) for name, (n, ns) in sorted(spent.items(), key=lambda item: -item[1][1])}


if __name__ == "__main__":
    print(json.dumps(kernel_times(sys.argv[1])))
