"""Lines of NCCL's or RCCL's Inspector (JSON) in, the rank's collectives out; times where it was verbose.

Up to 4.0 a communicator's latest collective alone is written at each dump, so lines may be missing: each
function has sequence numbers of its own, which tell. What lies between two gaps is laid beside the captures.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from dpuflow.recorded.calls import Call, Recorded, op_of

if TYPE_CHECKING:
    from collections.abc import Iterable

MARK: Final = b'"inspector_output_format_version"'
"""What the first line of each such file has."""
VERSIONS: Final = "v4."
MOST_BYTES: Final = 1 << 48
"""More is what an element type that the Inspector does not know comes out as."""


def read_inspector(file: str, lines: Iterable[str]) -> list[Recorded]:
    """One for each process; its rank is that in its largest communicator."""
    ranks: dict[tuple[str, int], tuple[int, int]] = {}
    runs: dict[tuple[str, int], list[list[Call]]] = {}
    last: dict[tuple[tuple[str, int], str, str], int] = {}
    header: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            header, told = row.get("header") or header, row.get("metadata") or told
            version = str(told["inspector_output_format_version"])
            done = row.get("coll_perf")
            if not version.startswith(VERSIONS):
                raise ValueError(f"version {version} of NCCL's Inspector ({VERSIONS}x are read)")
            if done is None:  # point-to-point operations, what was dropped
                continue
            process = (str(told["hostname"]), int(told["pid"]))
            ranks[process] = max(ranks.get(process, (0, 0)), (int(header["n_ranks"]), int(header["rank"])))
            series, count = (process, str(header["id"]), str(done["coll"])), int(done["coll_sn"])
            call = _call(done, int(header["n_ranks"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            said = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {number}: {said}") from None
        own = runs.setdefault(process, [[]])
        if last.setdefault(series, count - 1) != count - 1:
            own.append([])
        last[series] = count
        if call is not None:
            own[-1].append(call)
    return [
        Recorded(file, "lines of NCCL's Inspector", ranks[process][1], _in_order(max(own, key=len)))
        for process, own in runs.items()
    ]


def _call(done: dict[str, Any], ranks: int) -> Call | None:
    op = op_of(str(done["coll"]))
    if op is None:
        return None
    size: int | None = int(done["coll_msg_size_bytes"])
    if size is not None and op == "reduce_scatter":  # NCCL counts what one rank receives
        size *= ranks
    kernels = (done.get("event_trace_ts") or {}).get("kernel_events") or []
    begins = [int(each["kernel_start_ts"]) for each in kernels if each.get("kernel_start_ts")]
    ends = [int(each["kernel_stop_ts"]) for each in kernels if each.get("kernel_stop_ts")]
    return Call(
        op,
        size if size is not None and 0 <= size < MOST_BYTES else None,
        min(begins) * 1000 if begins else None,
        max(ends) * 1000 if ends else None,
    )


def _in_order(calls: list[Call]) -> list[Call]:
    """By their begin where all are known: several communicators are written one after the other."""
    if any(call.begin_ns is None for call in calls):
        return calls
    return sorted(calls, key=lambda call: call.begin_ns or 0)
