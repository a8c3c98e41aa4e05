"""A dump of PyTorch's Flight Recorder in, the rank's collectives out: when the host called them."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from dpuflow.recorded.calls import BYTES, Call, Recorded, bytes_of, op_of


def read_flight(file: str, dump: dict[str, Any]) -> Recorded:
    """Entries in order; the rank is the number that the file's name ends in, as torchfrtrace has it."""
    number = re.search(r"(\d+)(\.\w+)?$", file)
    calls = [call for each in dump["entries"] if (call := _call(each)) is not None]
    return Recorded(file, "a dump of PyTorch's Flight Recorder", int(number[1]) if number else None, calls)


def _call(entry: dict[str, Any]) -> Call | None:
    op = op_of(str(entry.get("profiling_name", "")))
    if op is None:
        return None
    sent, received = (_count(entry.get(name)) for name in ("input_sizes", "output_sizes"))
    types = entry.get("input_dtypes") or entry.get("output_dtypes") or [""]
    size = bytes_of(op, sent, received, BYTES.get(str(types[0]).lower()))
    begin = entry.get("time_discovered_started_ns") or entry.get("time_created_ns")
    return Call(op, size, begin, entry.get("time_discovered_completed_ns"))


def _count(sizes: list[list[int]] | None) -> int | None:
    return sum(prod(shape) for shape in sizes) if sizes else None
