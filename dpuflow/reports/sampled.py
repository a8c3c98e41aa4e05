"""What a sample of packets shows honestly: who sent how much to whom, and what share of it was marked.

In: an ``Analysis`` of captures that hold one of so many packets (``CaptureInfo.sampled``). Out: lines of
text. Counts are times that number; the interval is that of a binomial count, 95 % (bytes: as their packets).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from dpuflow.quantities import percent, three_digits
from dpuflow.reports.layout import Paint, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis

MOST_ROWS: Final = 12
NORMAL: Final = 1.96
"""Standard deviations of a 95 % interval."""


def sampled_one_of(result: Analysis) -> float | None:
    """The middle one of the captures' numbers where all of them are samples, else None."""
    numbers = [capture.sampled for capture in result.captures]
    known = [number for number in numbers if number is not None]
    return median(known) if known and len(known) == len(numbers) else None


def share_interval(part: int, whole: int) -> tuple[float, float]:
    """Wilson's interval of a share of which ``part`` of ``whole`` were seen."""
    if not whole:
        return 0.0, 1.0
    share, square = part / whole, NORMAL**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = NORMAL / (1 + square / whole) * (share * (1 - share) / whole + square / (4 * whole**2)) ** 0.5
    return max(middle - half, 0.0), min(middle + half, 1.0)


def sampled_lines(result: Analysis, names: Names, paint: Paint) -> Iterator[str]:
    """A table of the largest ways, by endpoints; nothing where not all captures are samples."""
    one_of = sampled_one_of(result)
    if one_of is None:
        return
    times = [
        capture.last_ns - capture.first_ns
        for capture in result.captures
        if capture.first_ns is not None and capture.last_ns is not None
    ]
    span_ns = max(times, default=0)
    ways: dict[tuple[int, int], list[int]] = {}
    for flow in result.flows:
        way = ways.setdefault((flow.src, flow.dst), [0, 0, 0, 0])
        for place, number in enumerate((flow.packets, flow.bytes, flow.ecn_marked or 0, flow.cnp or 0)):
            way[place] += number
    rows = sorted(ways.items(), key=lambda way: -way[1][1])
    yield paint(f"Sampled, about 1 of {one_of:.3g} packets: estimates, 95 % sure", "bold")
    lines = table(
        ["from", "to", "payload", "rate, Gbit/s", "marked", "slowed (CNPs)"],
        [
            [
                names.short_of(src, 24),
                names.short_of(dst, 24),
                f"{_scaled(bytes_, one_of)}B +-{percent(NORMAL / max(packets, 1) ** 0.5)}",
                three_digits(8 * bytes_ * one_of / span_ns) if span_ns else "-",
                "{} to {}".format(*map(percent, share_interval(marked, packets))),
                f"{round(cnps * one_of):,}" if cnps else "-",
            ]
            for (src, dst), (packets, bytes_, marked, cnps) in rows[:MOST_ROWS]
        ],
        left=(0, 1),
    )
    yield paint(lines[0], "dim")
    yield from lines[1:]
    if len(rows) > MOST_ROWS:
        yield f"and {len(rows) - MOST_ROWS} more (the JSON has all flows)"


def _scaled(number: int, one_of: float) -> str:
    """``3.2 M``: a count times that number."""
    value = number * one_of
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{three_digits(value / unit)}{name}"
    return f"{round(value)} "
