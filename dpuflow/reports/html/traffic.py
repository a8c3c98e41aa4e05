"""Who sends how much to whom: a matrix, and of few endpoints a ring of arrows.

In: the flows. Out: one section. More than ``MOST_ENDPOINTS`` endpoints share rows and columns; the
largest ways are told in numbers.
"""

from __future__ import annotations

from math import cos, pi, sin
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.quantities import count, listed, size
from dpuflow.reports.html.markup import Markup, figure, grid, tag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis

MOST_ENDPOINTS: Final = 64
MOST_IN_RING: Final = 24
MOST_WAYS: Final = 12
MOST_GROUPS: Final = 32


def traffic(result: Analysis, names: Names) -> Markup:
    """The section; nothing is drawn where there are no flows."""
    if not result.flows:
        return figure("Groups and traffic", "No flows were found.", key="traffic")
    ends = len(result.endpoints)
    ways = {"bytes": np.zeros(len(result.flows), np.int64)}
    src = np.array([flow.src for flow in result.flows], np.int64)
    dst = np.array([flow.dst for flow in result.flows], np.int64)
    ways["bytes"] = np.array([flow.bytes for flow in result.flows], np.int64)
    matrix, per_cell = _matrix(src, dst, ways["bytes"], ends)
    said = "Bytes on the wire from the row's endpoint to the column's; darker is more."
    said += f" {count(ends, 'endpoint')}, {per_cell} to a row and column." if per_cell > 1 else ""
    parts = [tag("div", _picture(matrix, names, per_cell), circle(result, names), class_="pair")]
    parts += [_largest(result, src, dst, ways["bytes"], names), _groups(result, names)]
    return figure("Groups and traffic", said, *parts, key="traffic")


def _matrix(
    src: NDArray[np.int64], dst: NDArray[np.int64], nbytes: NDArray[np.int64], ends: int
) -> tuple[NDArray[np.int64], int]:
    per_cell = max(-(-ends // MOST_ENDPOINTS), 1)
    side = -(-ends // per_cell)
    matrix = np.zeros((side, side), np.int64)
    np.add.at(matrix, (src // per_cell, dst // per_cell), nbytes)
    return matrix, per_cell


def _picture(matrix: NDArray[np.int64], names: Names, per_cell: int) -> Markup:
    side, most = len(matrix), int(matrix.max())
    cells = []
    for row, column in zip(*(axis.tolist() for axis in np.nonzero(matrix)), strict=True):
        value = int(matrix[row, column])
        number = 5 - min(int(np.log2(max(most / value, 1))), 4)
        who = f"{names.short(row * per_cell)} to {names.short(column * per_cell)}: {size(value)}"
        title = [tag("title", who)] if side <= MOST_IN_RING else []
        shape = {"x": column, "y": row, "width": 1, "height": 1, "class_": f"h{number}"}
        cells.append(tag("g", *title, tag("rect", **shape)))
    frame = tag("rect", x=0, y=0, width=side, height=side, class_="frame")
    said = f"Traffic matrix, {side} by {side}; the largest pairs are in the table"
    return tag(
        "svg", frame, *cells, viewBox=f"0 0 {side} {side}", class_="matrix", role="img", aria_label=said
    )


def circle(result: Analysis, names: Names, collective: int | None = None) -> Markup | str:
    """Who sends to whom, drawn: everybody, or the ranks of ``collective``; too many are not."""
    chosen = _circled(result, collective)
    src = np.array([flow.src for flow in result.flows], np.int64)
    dst = np.array([flow.dst for flow in result.flows], np.int64)
    nbytes = np.array([flow.bytes for flow in result.flows], np.int64)
    among, _ = _matrix(*_among(chosen, src, dst, nbytes, len(result.endpoints)), len(chosen))
    return _ring(among, chosen, names)


def _circled(result: Analysis, collective: int | None) -> list[int]:
    """Everybody, or the members of the busiest group that is small enough."""
    if collective is not None:
        ends = [entry.endpoint for entry in result.collectives[collective].ranks]
        return ends if len(ends) <= MOST_IN_RING else []
    if len(result.endpoints) <= MOST_IN_RING:
        return list(range(len(result.endpoints)))
    calls = np.bincount([each.group for each in result.collectives], minlength=len(result.groups))
    fit = [each for each in result.groups if 2 < len(each.endpoints) <= MOST_IN_RING]
    return list(max(fit, key=lambda each: int(calls[each.id])).endpoints) if fit else []


def _among(
    chosen: list[int], src: NDArray[np.int64], dst: NDArray[np.int64], nbytes: NDArray[np.int64], ends: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The flows between those, by their places."""
    place = np.full(ends, -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    both = (place[src] >= 0) & (place[dst] >= 0)
    return place[src[both]], place[dst[both]], nbytes[both]


def _ring(matrix: NDArray[np.int64], chosen: list[int], names: Names) -> Markup | str:
    """Endpoints in a circle, each beside whom it sends most to; an arrow for each way."""
    side = len(matrix)
    most = int(matrix.max()) if side else 0
    if side <= 2 or not most:
        return ""
    order = [0]
    while len(order) < side:
        left = [each for each in range(side) if each not in order]
        order.append(max(left, key=lambda each: int(matrix[order[-1], each])))
    place = {}
    for number, end in enumerate(order):
        angle = 2 * pi * number / side - pi / 2
        place[end] = (200 + 120 * cos(angle), 160 + 120 * sin(angle))
    lines = []
    for row, column in zip(*(axis.tolist() for axis in np.nonzero(matrix)), strict=True):
        share = matrix[row, column] / most
        if share >= 0.02 and row != column:
            (x1, y1), (x2, y2) = place[row], place[column]
            bend = f"{(x1 + x2) / 2 + (y2 - y1) / 6:.0f} {(y1 + y2) / 2 - (x2 - x1) / 6:.0f}"
            d = f"M{x1:.0f} {y1:.0f}Q{bend} {x2:.0f} {y2:.0f}"
            lines.append(tag("path", d=d, stroke_width=f"{0.5 + 3 * share:.1f}", class_="way",
                             marker_end="url(#arrow)"))  # fmt: skip
    for end, (x, y) in place.items():
        lines.append(tag("circle", cx=f"{x:.0f}", cy=f"{y:.0f}", r=6, class_="end"))
        anchor = "middle" if abs(x - 200) < 30 else "start" if x > 200 else "end"
        outward = (14 if x > 200 else -14) if anchor != "middle" else 0
        down = y + (5 if anchor != "middle" else 24 if y > 160 else -14)
        where = {"x": f"{x + outward:.0f}", "y": f"{down:.0f}", "text_anchor": anchor}
        lines.append(tag("text", names.short_of(chosen[end], 16), **where))
    said = f"{side} endpoints in a circle; an arrow for each direction with 2 % of the largest or more"
    shape = {"viewBox": "0 0 10 10", "refX": 16, "refY": 5, "markerWidth": 9, "markerHeight": 9}
    tip = tag("path", d="M0 0L10 5L0 10z", class_="end")
    head = tag("marker", tip, **shape, markerUnits="userSpaceOnUse", orient="auto", id="arrow")
    return tag(
        "svg", tag("defs", head), *lines, viewBox="0 0 400 320", class_="ring", role="img", aria_label=said
    )


def _largest(
    result: Analysis, src: NDArray[np.int64], dst: NDArray[np.int64], nbytes: NDArray[np.int64], names: Names
) -> Markup:
    ways, number = np.unique(src * len(result.endpoints) + dst, return_inverse=True)
    total = np.bincount(number, nbytes, len(ways))
    rows = []
    for way in np.argsort(-total, kind="stable")[:MOST_WAYS].tolist():
        a, b = divmod(int(ways[way]), len(result.endpoints))
        flows = [result.flows[each] for each in np.flatnonzero(number == way).tolist()]
        again, marked = sum(f.retransmitted for f in flows), sum(f.ecn_marked for f in flows)
        figures = [
            size(int(total[way])),
            f"{len(flows):,}",
            f"{sum(f.packets for f in flows):,}",
            f"{again:,}",
        ]
        rows.append([names.short(a), names.short(b), *figures, f"{marked:,}"])
    more = f": the largest {len(rows):,} of {len(ways):,}" if len(rows) < len(ways) else ""
    heads = ["from", "to", "bytes", "flows", "packets", "retransmitted", "ECN-marked"]
    return grid(heads, rows, caption=f"Pairs by bytes{more}")


def _groups(result: Analysis, names: Names) -> Markup:
    calls = np.bincount([each.group for each in result.collectives], minlength=len(result.groups))
    order = np.argsort(-calls, kind="stable")[:MOST_GROUPS].tolist()
    rows = [
        [f"group {each}", result.groups[each].kind or "-",
         listed([names.short(end) for end in result.groups[each].endpoints], 8), f"{int(calls[each]):,}"]
        for each in order
    ]  # fmt: skip
    left = len(result.groups) - len(order)
    caption = "Groups" + (f"; {left:,} with fewer operations are in the JSON only" if left else "")
    return grid(["group", "kind", "endpoints", "operations"], rows, caption=caption)
