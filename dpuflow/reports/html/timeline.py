"""The whole job in one picture: of the ranks' time, how much was waited for whom, how much moved data.

In: the entries. Out: one band, left to right; a stack of shares for each of ``BINS`` slices of time. A rank
waits from its own enter to the last one's, and moves data from then until it leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.findings.ranks import units_of
from dpuflow.quantities import duration, listed
from dpuflow.reports.columns import AT_LEAST, EXACT, NEVER
from dpuflow.reports.html.figures import position
from dpuflow.reports.html.markup import Markup, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.reports.columns import EntryColumns
    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Lateness
    from dpuflow.schema.tables import CaptureInfo

BINS: Final = 600
MOST_NAMED: Final = 3
"""Endpoints with a colour of their own; the others share one."""
TICKS: Final = 5
MOST_LANES: Final = 8


def timeline(result: Analysis, entries: EntryColumns, names: Names) -> Markup:
    """The band with its legend, or why there is none."""
    islands = {clock.island for clock in result.clocks if clock.island is not None}
    if len(islands) > 1:
        return tag("div", tag("p", APART), _lanes(result), class_="timeline")
    if not result.collectives or not len(entries.endpoint):
        return tag("p", "No collectives were found, so there is no time line of them.", class_="said")
    begin = min(each.start_ns for each in result.collectives)
    end = max(each.end_ns for each in result.collectives)
    named = [row.together or [row.endpoint] for row in units_of(_worst(result))][:MOST_NAMED]
    shares = _shares(result, entries, named, begin, max(end, begin + 1))
    kinds = [f"w{place}" for place in range(len(named))] + ["w9", "moves"]
    words = [f"waiting for {names.unit(each[0])}" for each in named]
    words += ["waiting for others" if named else "waiting for the last rank", "moving data"]
    shown = [(kind, word, row) for kind, word, row in zip(kinds, words, shares, strict=True) if row.any()]
    said = f"Time line of {duration(end - begin)}: of all ranks' time " + ", ".join(
        f"{row.mean():.1%} {word}" for _, word, row in shown
    )
    band = tag(
        "svg", tag("title", said), *_areas([(kind, row) for kind, _, row in shown]),
        viewBox=f"0 0 {BINS} 1000", preserveAspectRatio="none", class_="band", role="img", aria_label=said,
    )  # fmt: skip
    return tag("div", _legend(shown), band, _axis(begin, end), class_="timeline")


APART: Final = (
    "Nothing ties the clocks of these captures, so there is no common time line. Each lane is the"
    " captures of one clock."
)


def _worst(result: Analysis) -> list[Lateness]:
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    return sorted(late, key=lambda row: -(row.caused_wait_ns or 0))


def _shares(
    result: Analysis, entries: EntryColumns, named: Sequence[Sequence[int]], begin: int, end: int
) -> list[NDArray[np.float64]]:
    """Of all ranks' time in each slice, the share of each kind. ``named``: endpoints that are told as one."""
    last_enter, last_end = _lasts(result, entries)
    ends = np.array([each.end_ns for each in result.collectives], np.int64)
    known = (entries.enter_ns != NEVER) & (last_enter[entries.collective] != NEVER)
    who, of = entries.endpoint[known], entries.collective[known]
    enter = entries.enter_ns[known] - begin
    all_in = last_enter[of] - begin
    leave = np.where(entries.leave_ns[known] == NEVER, ends[of], entries.leave_ns[known]) - begin
    edges = np.linspace(0, end - begin, BINS + 1)
    ranks = max(len(np.unique(who)), 1)
    whole = ranks * (end - begin) / BINS
    charged = last_end[of]
    of_unit = [np.isin(charged, each) for each in named]
    rows = [_covered(enter[mine], all_in[mine], edges) / whole for mine in of_unit]
    others = ~np.any([*of_unit, np.zeros(len(charged), bool)], axis=0)
    rows.append(_covered(enter[others], all_in[others], edges) / whole)
    rows.append(_covered(np.minimum(np.maximum(enter, all_in), leave), leave, edges) / whole)
    total = np.maximum(sum(rows, np.zeros(BINS)), 1.0)  # collectives of one rank may overlap
    return [row / total for row in rows]


def _lasts(result: Analysis, entries: EntryColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When the last rank of each collective entered, and which; NEVER where no time is a measurement."""
    count = len(result.collectives)
    usable = ((entries.bound == EXACT) | (entries.bound == AT_LEAST)) & (entries.enter_ns != NEVER)
    last = np.full(count, NEVER)
    np.maximum.at(last, entries.collective[usable], entries.enter_ns[usable])
    who = np.full(count, -1)
    latest = usable & (entries.enter_ns == last[entries.collective])
    who[entries.collective[latest]] = entries.endpoint[latest]
    return last, who


def _covered(
    begin: NDArray[np.int64], end: NDArray[np.int64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much of each slice between ``edges`` the intervals cover, summed over them, ns."""
    end = np.maximum(begin, end)
    return np.diff(_until(begin, edges) - _until(end, edges))


def _until(times: NDArray[np.int64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over ``times`` of how long each lies before an edge."""
    times = np.sort(times).astype(np.float64)
    before = np.searchsorted(times, edges)
    total = np.concatenate([[0.0], np.cumsum(times)])
    covered: NDArray[np.float64] = before * edges - total[before]
    return covered


def _areas(rows: Sequence[tuple[str, NDArray[np.float64]]]) -> list[Markup]:
    """A path for each kind, one upon the other, the first at the bottom."""
    floor = np.zeros(BINS)
    paths = []
    for kind, row in rows:
        top = floor + row
        paths.append(tag("path", d=_outline(1000 - 1000 * floor, 1000 - 1000 * top), class_=kind))
        floor = top
    return paths


def _outline(floor: NDArray[np.float64], top: NDArray[np.float64]) -> str:
    """Rectangles of slices that are alike, as one path."""
    low, high = np.rint(floor).astype(int), np.rint(top).astype(int)
    steps = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
    parts = []
    for begin, end in zip(np.r_[0, steps].tolist(), np.r_[steps, BINS].tolist(), strict=True):
        if low[begin] > high[begin]:
            parts.append(f"M{begin} {low[begin]}V{high[begin]}H{end}V{low[begin]}z")
    return "".join(parts)


def _legend(shown: Sequence[tuple[str, str, NDArray[np.float64]]]) -> Markup:
    items = [tag("li", tag("i", class_=f"key {kind}"), word) for kind, word, _ in shown]
    items.append(tag("li", tag("i", class_="key rest"), "own work, or not seen"))
    return tag("ul", *items, class_="legend")


def _axis(begin: int, end: int) -> Markup:
    """Times since the first collective."""
    texts = []
    for place in range(TICKS):
        share = place / (TICKS - 1)
        anchor = "start" if place == 0 else "end" if place == TICKS - 1 else "middle"
        words = duration((end - begin) * share) if place else "0"
        texts.append(tag("text", words, x=position(share), y=13, text_anchor=anchor))
    return tag("svg", *texts, class_="axis", aria_hidden="true")


def _lanes(result: Analysis) -> Markup:
    """Islands side by side, each by its own clock."""
    islands: dict[int | None, list[CaptureInfo]] = {}
    for clock in result.clocks:
        islands.setdefault(clock.island, []).append(result.captures[clock.capture])
    spans = []
    for rows in islands.values():
        lasting = [e.last_ns - e.first_ns for e in rows if e.first_ns is not None and e.last_ns is not None]
        spans.append(([each.vantage for each in rows], max(lasting, default=0)))
    longest = max(took for _, took in spans)
    items = []
    for named, took in spans[:MOST_LANES]:
        bar = tag("svg", tag("rect", width=position(took / max(longest, 1)), height=6), class_="bar lane")
        items.append(tag("li", tag("span", f"{listed(named, 4)}: {duration(took)}"), bar))
    left = len(spans) - len(items)
    if left:
        items.append(tag("li", f"and {left:,} more"))
    return tag("ul", *items, class_="lanes")
