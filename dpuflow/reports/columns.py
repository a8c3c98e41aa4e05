"""The entries of a result as columns, for reports that draw or store many of them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, get_args

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.results.tokens import Bound

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.results import Analysis

NEVER: Final = -(1 << 62)
"""Stands for a time that is not known."""
BOUNDS: Final = get_args(Bound)
EXACT, AT_MOST, AT_LEAST, UNOBSERVABLE = range(4)


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """One element an entry: one endpoint in one collective, in the order of the result. Times in ns."""

    collective: NDArray[np.int64]
    endpoint: NDArray[np.int64]
    enter_ns: NDArray[np.int64]
    leave_ns: NDArray[np.int64]
    lateness_ns: NDArray[np.int64]
    bound: NDArray[np.int64]  # a place in BOUNDS


def entry_columns(result: Analysis) -> EntryColumns:
    """All entries of ``result``; those of incomplete collectives too."""
    sizes = np.array([len(each.ranks) for each in result.collectives], np.int64)
    rows = [entry for each in result.collectives for entry in each.ranks]
    count = len(rows)
    place = {bound: number for number, bound in enumerate(BOUNDS)}

    def times(name: str) -> NDArray[np.int64]:
        values = map(attrgetter(name), rows)
        return np.fromiter((NEVER if value is None else value for value in values), np.int64, count)

    return EntryColumns(
        collective=np.repeat(np.arange(len(sizes)), sizes),
        endpoint=np.fromiter(map(attrgetter("endpoint"), rows), np.int64, count),
        enter_ns=times("enter_ns"),
        leave_ns=times("leave_ns"),
        lateness_ns=times("lateness_ns"),
        bound=np.fromiter(map(place.__getitem__, map(attrgetter("bound"), rows)), np.int64, count),
    )


def logical_steps(result: Analysis) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The logical step of each collective, and how many steps the ranks took that have to do with it.

    A step is one more than the latest of those that its ranks did before it: what ranks do in the same
    place of their programs has the same step, whatever the clocks say (as in Isaacs et al., 2014). Ranks
    that no collective joins, directly or through others, have steps of their own. Where captures have no
    common clock, the order of the result stands for that of time.
    """
    common = len({clock.island for clock in result.clocks if clock.island is not None}) <= 1
    rows = result.collectives
    order = sorted(range(len(rows)), key=lambda place: rows[place].start_ns) if common else range(len(rows))
    done: dict[int, int] = {}
    steps = np.zeros(len(rows), np.int64)
    for place in order:
        ranks = [entry.endpoint for entry in rows[place].ranks]
        steps[place] = step = 1 + max((done.get(end, -1) for end in ranks), default=-1)
        done.update(dict.fromkeys(ranks, step))
    taken = np.zeros(len(result.groups), np.int64)
    group = np.array([each.group for each in rows], np.int64)
    np.maximum.at(taken, group, steps + 1)
    for together in connected(result.groups, lambda each: each.endpoints):
        numbers = [each.id for each in together]
        taken[numbers] = taken[numbers].max()
    return steps, taken[group]
