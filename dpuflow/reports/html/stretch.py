"""The worst stretch of the job twice: in time, and in logical steps (as Ravel draws them).

In: the collectives about the one in which a rank was latest. Out: two pictures, rows and colours the same.
In time lateness is seen to grow and to be handed on; in logical steps what belongs together stands together.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from dpuflow.quantities import duration
from dpuflow.reports.html.figures import position
from dpuflow.reports.html.markup import Markup, tag
from dpuflow.reports.html.opened import worst_collectives, worst_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Collective, RankEntry

BESIDE: Final = 6
"""Logical steps on either side of the worst one."""
MOST_ROWS: Final = 16
ROW: Final = 20


def stretch(result: Analysis, steps: NDArray[np.int64], limits: Sequence[int], names: Names) -> Markup | str:
    """Both pictures, or nothing where no lateness is told or no clock is common."""
    apart = len({clock.island for clock in result.clocks if clock.island is not None}) > 1
    middle = next(iter(worst_collectives(result)), None)
    if apart or middle is None or worst_ns(middle) <= 0:
        return ""
    about = int(steps[middle.id])
    near = [each for each in result.collectives if abs(int(steps[each.id]) - about) <= BESIDE]
    latest = sorted(middle.ranks, key=lambda entry: -(entry.lateness_ns or 0))
    met = dict.fromkeys(entry.endpoint for entry in latest)
    for each in near:  # in a chain of sends the ranks that met these, and so on
        if any(entry.endpoint in met for entry in each.ranks):
            met.update(dict.fromkeys(entry.endpoint for entry in each.ranks))
    ends = sorted(list(met)[:MOST_ROWS], key=lambda end: (result.endpoints[end].rank or 0, end))
    cells = [
        (each, entry, ends.index(entry.endpoint))
        for each in near for entry in each.ranks if entry.endpoint in ends
    ]  # fmt: skip
    shown = [each for each, _, _ in cells]
    begin = min(each.start_ns for each in shown)
    span = max(max(each.end_ns for each in shown) - begin, 1)
    first = min(int(steps[each.id]) for each in shown)
    columns = max(int(steps[each.id]) for each in shown) - first + 1
    labels = [
        tag("text", names.short_of(end, 18), x=0, y=row * ROW + 14) for row, end in enumerate(ends)
    ]  # fmt: skip
    height = len(ends) * ROW
    names_beside = tag("svg", *labels, height=height, class_="labels", aria_hidden="true")
    parts: list[object] = [tag("h3", f"Around {middle.op} {middle.id}, in time ({duration(span)})")]
    for word, drawn in (
        ("in time", [_in_time(each, entry, row, begin, span, limits) for each, entry, row in cells]),
        ("in logical steps", [_in_steps(int(steps[each.id]) - first, columns, entry, row, limits)
                              for each, entry, row in cells]),
    ):  # fmt: skip
        if word != "in time":
            parts.append(tag("h3", f"The same in logical steps ({first} to {first + columns - 1})"))
        picture = tag("svg", *drawn, height=height, class_="stretch", role="img",
                      aria_label=f"Collectives of {len(ends)} ranks {word}")  # fmt: skip
        parts.append(tag("div", names_beside, picture, class_="heatbox"))
    left = len(met) - len(ends)
    parts.append(tag("p", f"Of {len(met)} ranks {len(ends)} are shown.", class_="said") if left else "")
    return tag("div", *parts)


def _colour(entry: RankEntry, limits: Sequence[int]) -> str:
    """The heat map's colour; a bound is outlined."""
    if entry.lateness_ns is None:
        return "unseen"
    return f"h{bisect_right(limits, entry.lateness_ns)}{'' if entry.bound == 'exact' else ' bounded'}"


def _in_time(
    each: Collective, entry: RankEntry, row: int, begin: int, span: int, limits: Sequence[int]
) -> Markup:
    """From entering to leaving."""
    enter = each.start_ns if entry.enter_ns is None else entry.enter_ns
    leave = each.end_ns if entry.leave_ns is None else entry.leave_ns
    left, right = (enter - begin) / span, (max(leave, enter) - begin) / span
    width = position(max(right, left + 0.002) - max(left, 0.0))
    return tag("rect", x=position(left), y=row * ROW + 3, width=width, height=14,
               class_=f"cell {_colour(entry, limits)}")  # fmt: skip


def _in_steps(step: int, columns: int, entry: RankEntry, row: int, limits: Sequence[int]) -> Markup:
    """A cell of one step's width."""
    return tag("rect", x=position((step + 0.04) / columns), y=row * ROW + 3, width=position(0.92 / columns),
               height=14, class_=f"cell {_colour(entry, limits)}")  # fmt: skip
