"""Give every node of recorded cases a clock of its own, and measure how well the clocks are found again.

usage: python tools/skew_cases.py CASE...     (folders with meta.json, truth.json and captures on one clock)

A line a case and shape of clock: the error that 99 % of all messages keep to, and that at the reference's
first packet, the largest of all clocks; the largest error that was stated, how many clocks lie within what
was stated of them, and the median lateness error beside that on one clock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

if TYPE_CHECKING:
    from dpuflow.schema.tables import CaptureTables, Joined

    Times = np.typing.NDArray[np.float64]

Shape = Callable[["Times", int, float], "Times"]
"""(times since the first message, number of the node, time to the last; ns) -> its clock's lead, ns."""


def linear(time: Times, node: int, span: float) -> Times:
    """Up to a second and 50 ppm away."""
    sign = 1 if node % 2 else -1
    return sign * (1e9 / node + time * 50e-6)


def bent(time: Times, node: int, span: float) -> Times:
    """In mid-capture the drift turns from 50 ppm one way to 50 ppm the other way."""
    bend = span * (0.35 + 0.1 * (node % 4))
    return linear(time, node, span) - np.sign(node % 2 - 0.5) * np.maximum(time - bend, 0) * 100e-6


def stepped(time: Times, node: int, span: float) -> Times:
    """Set by 3 ms once."""
    return linear(time, node, span) + np.where(time > span * (0.3 + 0.1 * (node % 4)), 3e6, 0.0)


def warm(time: Times, node: int, span: float) -> Times:
    """A rate that swings by 10 ppm to either side, twice in a capture, as with temperature."""
    turn = 4 * np.pi / span
    return linear(time, node, span) + 10e-6 / turn * np.sin(turn * time + node)


SHAPES: dict[str, Shape] = {"linear": linear, "bent": bent, "stepped": stepped, "warm": warm}


def skew(captures: list[CaptureTables], shape: Shape) -> tuple[list[CaptureTables], list[int]]:
    """Copies of captures with clocks of their own, the first as it was; their leads at the first packet."""
    from dpuflow.schema.rows import NEVER

    times = np.concatenate([t.messages["first_ns"] for t in captures])
    start, span = int(times.min()), float(times.max() - times.min())  # what no packet shows nobody can find
    out, lead = [captures[0]], [0]
    for node, tables in enumerate(captures[1:], 1):

        def moved(time: Any, node: int = node) -> Any:
            ahead = shape((time - start).astype(np.float64), node, span)
            return np.where(time == NEVER, NEVER, time + np.rint(ahead).astype(np.int64))

        new = deepcopy(tables)
        for name in ("first_ns", "last_ns", "acked_ns"):
            new.messages[name] = moved(new.messages[name])
        for name in ("first_ns", "last_ns"):
            new.flows[name] = moved(new.flows[name])
        new.info.first_ns, new.info.last_ns = moved(
            np.array([tables.info.first_ns, tables.info.last_ns])
        ).tolist()
        out.append(new)
        lead.append(int(moved(np.array([captures[0].info.first_ns]))[0]) - (captures[0].info.first_ns or 0))
    return out, lead


def clock_errors(
    captures: list[CaptureTables], joined: Joined, lead: list[int]
) -> list[tuple[int, int, int]]:
    """Of each clock but the first: error that 99 % of messages keep, at the first packet, stated; ns."""
    found = []
    rows = joined.transfers
    for capture, clock in enumerate(joined.clocks):
        if capture and clock.offset_ns is not None and clock.error_ns is not None:
            true = captures[capture].messages["first_ns"]
            sent, got = rows["capture"] == capture, rows["arrival_capture"] == capture
            off = np.abs(
                np.concatenate(
                    [
                        rows["sent_ns"][sent] - true[rows["message"][sent]],
                        rows["arrived_ns"][got] - true[rows["arrival_message"][got]],
                    ]
                )
            )
            found.append(
                (
                    int(np.quantile(off, 0.99)) if len(off) else 0,
                    abs(clock.offset_ns - lead[capture]),
                    clock.error_ns,
                )
            )
    return found


def lateness_error_ns(captures: list[CaptureTables], case: str, clock: str) -> int | None:
    """Median error of lateness against the case's truth."""
    import dpuflow.analysis
    from dpuflow.reports.json import json_lines
    from dpuflow.scoring.score import score_case
    from dpuflow.scoring.truth import read_case

    with mock.patch.object(dpuflow.analysis, "read_captures", return_value=captures):
        result = json.loads("".join(json_lines(dpuflow.analysis.analyze([], clock=clock))))
    value = score_case(result, read_case(case, result)).figures()["lateness_error_median_ns"]
    return value if isinstance(value, int) else None


def read(case: str) -> list[CaptureTables]:
    """The captures of a case's nodes."""
    from dpuflow.ingest import ingest

    nodes = json.loads((Path(case) / "meta.json").read_text())["nodes"]
    return [ingest([str(Path(case) / n["capture"])], n["capture"], i, 1) for i, n in enumerate(nodes)]


def main(cases: list[str], reader: Callable[[str], list[CaptureTables]] = read) -> None:
    """Print the table."""
    from dpuflow.join import join

    print(
        f"{'case':45} {'clocks':8} {'messages':>9} {'at first':>9} {'stated':>9} within  lateness/one clock"
    )
    held = dict.fromkeys(SHAPES, (0, 0))
    for case in cases:
        captures = reader(case)
        usual = lateness_error_ns(deepcopy(captures), case, "trust")
        for name, shape in SHAPES.items():
            new, lead = skew(captures, shape)
            found = clock_errors(captures, join(deepcopy(new), clock="estimate"), lead)
            worst = [max(column) / 1000 for column in zip(*found, strict=True)] or [float("nan")] * 3
            within = sum(max(off, first) <= stated for off, first, stated in found)
            held[name] = held[name][0] + within, held[name][1] + len(found)
            late = lateness_error_ns(new, case, "estimate")
            shown = [f"{value / 1000:.1f}" if value is not None else "-" for value in (late, usual)]
            print(
                f"{Path(case).name:45} {name:8} {worst[0]:7.1f}us {worst[1]:7.1f}us {worst[2]:7.1f}us "
                f"{within}/{len(found)}  {shown[0]:>7} / {shown[1]} us",
                flush=True,
            )
    for name, (within, clocks) in held.items():
        print(f"{'all':45} {name:8} {within} of {clocks} clocks within the error stated")


if __name__ == "__main__":
    main(sys.argv[1:])
