"""Counters of all flows as they were some time ago, kept for a span of times.

In: the counters at ever later times. Out: those of the oldest time that is kept. Most flows of a long-lived
agent are idle: what did not move between two times is kept once, with the later one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.agent.stream import Counts

MOST: Final = 16
"""Times that are kept."""


class _Then(NamedTuple):
    """Counters of the flows that moved until the next time; ``born``: flows there were had lower numbers."""

    counts: Counts
    born: int


class Baseline:
    """``note`` with growing times, ``before`` for what all counters were at the oldest of them."""

    def __init__(self) -> None:
        self._times: list[_Then] = []

    def note(self, counts: Counts, apart_ns: float, cut_ns: int) -> None:
        """Keep these counters if the last are older by ``apart_ns``; of those before the cut the last."""
        times = self._times
        if not times or counts.time_ns - times[-1].counts.time_ns >= apart_ns:
            if times:
                last = times.pop()
                times.append(last._replace(counts=_moved(last.counts, counts)))
            times.append(_Then(counts, int(counts.flow[-1]) + 1 if len(counts.flow) else 0))
        while len(times) > 1 and times[1].counts.time_ns <= cut_ns:
            del times[0]
        if len(times) > MOST:
            for at in range(1, MOST // 2):
                older = times[at]
                times[at] = older._replace(counts=_with(older.counts, times.pop(at + 1).counts))

    def before(self, now: Counts) -> Counts | None:
        """The counters at the oldest time, of those flows that still are."""
        if not self._times:
            return None
        oldest = self._times[0]
        there = now.flow < oldest.born
        flow, values = now.flow[there], now.values[there]  # what has not moved is what it was
        moved = np.concatenate([each.counts.flow for each in self._times])
        known, first = np.unique(moved, return_index=True)
        at = np.searchsorted(flow, known)
        found = at < len(flow)
        found[found] = flow[at[found]] == known[found]
        values[at[found]] = np.concatenate([each.counts.values for each in self._times])[first[found]]
        return replace(oldest.counts, flow=flow, values=values)

    def shift(self, step_ns: int) -> None:
        """The clock was set by so much."""
        for at, (counts, born) in enumerate(self._times):
            self._times[at] = _Then(replace(counts, time_ns=counts.time_ns + step_ns), born)


def _moved(then: Counts, now: Counts) -> Counts:
    """The counters of ``then`` that are others now."""
    at = np.searchsorted(now.flow, then.flow)
    other = at < len(now.flow)
    other[other] = now.flow[at[other]] == then.flow[other]
    other[other] = (now.values[at[other]] != then.values[other]).any(axis=1)
    return _only(then, other)


def _with(older: Counts, newer: Counts) -> Counts:
    """``older``, and what did not move until ``newer``."""
    more = _only(newer, ~np.isin(newer.flow, older.flow))
    flow = np.concatenate([older.flow, more.flow])
    order = np.argsort(flow, kind="stable")
    return replace(older, flow=flow[order], values=np.concatenate([older.values, more.values])[order])


def _only(counts: Counts, rows: NDArray[np.bool_]) -> Counts:
    return replace(counts, flow=counts.flow[rows], values=counts.values[rows])
