"""Stretches of time, int64 (2, n) from when to when: what they cover, where they overlap but once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class Covered:
    """Tells how much of the time before a moment some stretches cover."""

    def __init__(self, stretches: Ints) -> None:
        self._begin, end = stretches[:, np.argsort(stretches[0], kind="stable")]
        # Until when time is covered without a gap: when a stretch begins (before any: never), and after it.
        self._until = np.maximum.accumulate(np.r_[NEVER, end])
        lengths = np.maximum(end - np.maximum(self._begin, self._until[:-1]), 0)
        self._total = np.r_[0, np.cumsum(lengths)]

    def before(self, times: Ints) -> Ints:
        """How much up to each of ``times``."""
        begun = np.searchsorted(self._begin, times, side="right")
        # What of those begun lies beyond a time is one piece: it lasts until the latest of them ends.
        beyond = np.maximum(self._until[begun], times) - times
        covered: Ints = self._total[begun] - beyond
        return covered


def covered_between(times: Ints, stretches: Ints) -> Ints:
    """Of each span between one of ``times`` (ascending) and the next how much ``stretches`` cover; n - 1."""
    return np.diff(Covered(stretches).before(times))


def covered_ns(stretches: Ints, since: int | None = None, until: int | None = None) -> int:
    """How much of the time from ``since`` until ``until`` stretches cover; of all time without these."""
    if not stretches.shape[1]:
        return 0
    since = int(stretches[0].min()) if since is None else since
    until = int(stretches[1].max()) if until is None else until
    return int(covered_between(np.array([since, max(since, until)]), stretches).sum())
