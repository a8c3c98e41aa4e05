"""Captures that begin in mid-job, as an agent's do: cut to a window, and what of the truth lies within it.

In: the case folder of a scenario. Out: the same with its captures cut, and the truth that then counts.
"""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dpuflow.scoring.truth import Case
    from dpuflow.synth.observe import Capture

MID_JOB: Final = 2000
"""Numbers from here on are the scenarios without it, cut."""
KINDS: Final = ("together", "apart", "within", "one_later")
"""How nodes' captures begin and end: at one time; within a tenth of the job; in the middle of an operation;
all with the job but one node's."""

Span = tuple[int, int]


def windows(number: int, truth: dict[str, Any], nodes: int) -> tuple[str, list[Span]]:
    """How scenario ``number`` is cut: the kind, and from when to when each node captures (truth's clock)."""
    random = Random(f"mid-job/{number}")
    kind = KINDS[number % len(KINDS)]
    calls = sorted((_enters(row)[0], _leaves(row)[-1]) for row in truth["collectives"])
    first, last = calls[0][0], max(end for _, end in calls)
    length = last - first
    begin, end = random.uniform(0.2, 0.45), random.uniform(0.75, 0.95)

    def at(share: float) -> int:
        return first + round(share * length)

    if kind == "apart":
        return kind, [
            (at(begin + random.uniform(0, 0.1)), at(end - random.uniform(0, 0.1))) for _ in range(nodes)
        ]
    if kind == "within":
        one, other = calls[round(begin * (len(calls) - 1))], calls[round(end * (len(calls) - 1))]
        return kind, [(sum(one) // 2, sum(other) // 2)] * nodes
    if kind == "one_later":
        later = random.randrange(nodes)
        return kind, [
            (at(begin) if node == later else first - length, last + length) for node in range(nodes)
        ]
    return kind, [(at(begin), at(end))] * nodes


def cut(folder: Path, captures: Sequence[Capture], epoch_ns: int, spans: Sequence[Span]) -> None:
    """Leave of each node's capture in ``folder`` what came within its span (of a switch's: the first one).

    Captures are not compressed.
    """
    for capture in captures:
        low, high = capture.clock.local(np.array(spans[capture.node or 0], np.int64) - epoch_ns).tolist()
        path = folder / capture.name
        content = path.read_bytes()
        kept, at = [content[:24]], 24
        while at < len(content):
            seconds, ns, length, _ = struct.unpack_from("<4I", content, at)
            if low <= seconds * 10**9 + ns <= high:
                kept.append(content[at : at + 16 + length])
            at += 16 + length
        path.write_bytes(b"".join(kept))


def within(truth: dict[str, Any], spans: Sequence[Span]) -> dict[str, Any]:
    """The truth of the collectives that all nodes captured from the first entering to the last leaving."""
    low, high = max(begin for begin, _ in spans), min(end for _, end in spans)
    rows = [row for row in truth["collectives"] if _enters(row)[0] >= low and _leaves(row)[-1] <= high]
    return {**truth, "collectives": rows}


def as_captured(case: Case, whole: int) -> bool:
    """Make the fault of ``case`` what it is within the window; whether it still can be asked for.

    What lasted for a part of the job may fill the window, or lie outside; of what then is neither only an
    onset is left. ``whole``: collectives of the job.
    """
    fault = case.compute_fault
    if fault is None or len(case.collectives) == whole:
        return True
    late = [bool(each.injected) for each in case.collectives]
    if not any(late):
        case.compute_fault = None
        return True
    lasting = fault["kind"] == "transient" or bool(fault.get("from_iter"))
    if lasting and all(late):
        case.compute_fault = {**fault, "kind": "persistent", "from_iter": 0}
        return True
    return not lasting or (fault["kind"] != "transient" and late[-1])


def _enters(row: dict[str, Any]) -> list[int]:
    return sorted(time for time in row["enter_ns"] if time is not None)


def _leaves(row: dict[str, Any]) -> list[int]:
    return sorted(time for time in row["leave_ns"] if time is not None)
