"""Ranks by steps: how late each rank was in each collective, a measurement unlike a bound.

In: the entries. Out: one picture in logical steps, and below it the worst stretch in time. A full cell is a
measurement; the lower half alone an upper bound, the upper half alone a lower bound. Beyond ``MOST_ROWS`` and
``MOST_COLUMNS`` ranks and steps share cells: each shows the worst of what it stands for, measurements before
bounds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.quantities import count, duration
from dpuflow.reports.columns import AT_LEAST, AT_MOST, EXACT, NEVER, logical_steps
from dpuflow.reports.html.markup import Markup, figure, tag
from dpuflow.reports.html.stretch import stretch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.reports.columns import EntryColumns
    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis

MOST_ROWS: Final = 96
MOST_COLUMNS: Final = 240
LABELLED: Final = 24
"""Rows that each have a label; of more only some."""
CLASSES: Final = 6
USUAL: Final = 0.95
"""This share of the cells sets the colours: a rank that was late to start the job must not pale the rest."""
_SERIES: Final = [digit * 10**power for power in range(12) for digit in (1, 3)]
_HALVES: Final = {EXACT: (0, 10), AT_LEAST: (0, 4), AT_MOST: (6, 10)}
"""From where to where a cell of ten units is filled, by bound."""


def heat_map(result: Analysis, entries: EntryColumns, names: Names) -> Markup:
    """The picture with its key, or why there is none."""
    known = (entries.lateness_ns != NEVER) & np.isin(entries.bound, (EXACT, AT_LEAST, AT_MOST))
    if not known.any():
        return figure("Lateness, rank by step", "No entry time of any rank is known.", key="heat")
    ranks = by_rank(result, entries)
    steps, taken = logical_steps(result)
    width = int(taken.max())
    rows, columns = min(len(ranks), MOST_ROWS), min(width, MOST_COLUMNS)
    place = np.zeros(len(result.endpoints), np.int64)
    place[ranks] = np.arange(len(ranks))
    row = place[entries.endpoint[known]] * rows // len(ranks)
    column = (steps * columns // taken)[entries.collective[known]]
    value, bound = _cells(
        row * columns + column, entries.lateness_ns[known], entries.bound[known], rows * columns
    )
    shape = (rows, columns)
    limits = class_limits(int(np.quantile(value[value >= 0], USUAL)))
    classes = np.searchsorted(limits, value, side="right").reshape(shape)
    picture = tag(
        "svg", *_paths(classes, bound.reshape(shape)),
        viewBox=f"0 0 {columns} {rows * 10}", preserveAspectRatio="none", class_=f"heat rows-{_height(rows)}",
        role="img", tabindex="0",
        aria_label=f"Heat map of {rows} rows and {columns} columns; arrow keys read cells",
    )  # fmt: skip
    labels = [names.short_of(ranks[-(-number * len(ranks) // rows)], 18) for number in range(rows)]
    data = {
        "rows": labels,
        "columns": [f"{number * 100 // columns} % of its steps" for number in range(columns)]
        if len(np.unique(taken)) > 1
        else [f"step {-(-number * width // columns)}" for number in range(columns)],
        "values": value.tolist(),
        "bounds": bound.tolist(),
    }
    plot = tag("div", row_labels(labels), picture, class_="heatbox")
    said = "Darker is later. Full cells are measured; half cells are bounds." + _grouped(
        len(ranks), rows, width, columns
    )
    return figure(
        "Lateness, rank by step", said, _key(limits), plot, tag("p", class_="readout", aria_live="polite"),
        tag("script", Markup(json.dumps(data).replace("<", "\\u003c")), type="application/json",
            id="heat-data"),
        stretch(result, steps, limits, names),
        key="heat",
    )  # fmt: skip


def by_rank(result: Analysis, entries: EntryColumns) -> list[int]:
    """Endpoints that have entries: by rank, then those without one as they are listed."""
    there = np.unique(entries.endpoint).tolist()
    return sorted(
        there, key=lambda end: (result.endpoints[end].rank is None, result.endpoints[end].rank or 0, end)
    )


def _grouped(ranks: int, rows: int, steps: int, columns: int) -> str:
    said = [f" Left to right: {count(steps, 'logical step')}, so that what ranks did in the same place of"]
    said.append(" their programs stands in one column, whatever the time")
    if columns < steps:
        said.append(f", about {steps / columns:.3g} to a column")
    if rows < ranks:
        said.append(f"; {count(ranks, 'rank')}, about {ranks / rows:.3g} to a row")
    if columns < steps or rows < ranks:
        said.append(". A cell shows the worst of those that it stands for")
    return "".join(said) + "."


def _cells(
    cell: NDArray[np.int64], lateness: NDArray[np.int64], bound: NDArray[np.int64], count_: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Largest lateness and its bound in each cell, measurements and lower bounds first; -1: none."""
    weak = bound == AT_MOST
    value, kind = np.full(count_, -1, np.int64), np.full(count_, -1, np.int64)
    for chosen in (weak, ~weak):  # the latter overwrite
        at = np.flatnonzero(chosen)
        at = at[np.argsort(lateness[at], kind="stable")]
        value[cell[at]], kind[cell[at]] = lateness[at], bound[at]
    return value, kind


def class_limits(usual_ns: int) -> list[int]:
    """Where the colours change: the steps 1, 3, 10, 30 ... that end below the usual largest lateness."""
    top = next((place for place, limit in enumerate(_SERIES) if limit >= usual_ns), len(_SERIES) - 1)
    return _SERIES[max(top - CLASSES + 1, 0) : max(top, 1)]


def _paths(classes: NDArray[np.int64], bound: NDArray[np.int64]) -> list[Markup]:
    """One path for each colour and bound; neighbours in a row that are alike are one rectangle."""
    parts: dict[tuple[int, int], list[str]] = {}
    rows, columns = classes.shape
    alike = classes * 4 + bound + 1
    for row in range(rows):
        steps = np.flatnonzero(np.diff(alike[row])) + 1
        for begin, end in zip(np.r_[0, steps].tolist(), np.r_[steps, columns].tolist(), strict=True):
            kind = int(bound[row, begin])
            if kind < 0:
                continue
            top, bottom = _HALVES[kind]
            text = f"M{begin} {row * 10 + top}H{end}V{row * 10 + bottom}H{begin}z"
            parts.setdefault((int(classes[row, begin]), kind), []).append(text)
    return [
        tag("path", d="".join(texts), class_=f"h{number}") for (number, _), texts in sorted(parts.items())
    ]


def _height(rows: int) -> str:
    return "few" if rows <= 8 else "some" if rows <= LABELLED else "many"


def row_labels(labels: list[str]) -> Markup:
    """Names beside rows; where there are many only as many as can be read."""
    step = -(-len(labels) // LABELLED)
    texts = [
        tag(
            "text",
            label,
            x="100%",
            y=f"{(number + 0.5) / len(labels) * 100:.2f}%",
            dy="0.35em",
            text_anchor="end",
        )
        for number, label in enumerate(labels)
        if number % step == 0
    ]
    return tag("svg", *texts, class_=f"labels rows-{_height(len(labels))}", aria_hidden="true")


def _key(limits: list[int]) -> Markup:
    """Which colour is how late, and what half cells are."""
    words = [f"below {duration(limits[0])}"] if limits else []
    words += (
        [f"to {duration(limit)}" for limit in limits[1:]] + [f"from {duration(limits[-1])}"] if limits else []
    )
    items = [tag("li", tag("i", class_=f"key h{place}"), word) for place, word in enumerate(words)]
    for kind, word in ((AT_LEAST, "at least this late"), (AT_MOST, "at most this late")):
        items.append(tag("li", tag("i", class_=f"key half{kind}"), word))
    items.append(tag("li", tag("i", class_="key none"), "not known"))
    return tag("ul", *items, class_="legend")
