"""Who of a collective's ranks had worked longest: each rank's place among its peers, and what chance does.

In: how much longer than its peers each rank worked (``own``). Out: its standing in each collective, and for
any of its collectives the chance that a rank that is like all others stands as high. Nothing is assumed
of how long work takes or scatters: of ranks that are alike each place is as likely as any (Friedman, 1937).
"""

from __future__ import annotations

from math import erfc, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Standing(NamedTuple):
    """Per row of Entries; of ranks that are alike ``place`` is 0 on average."""

    place: NDArray[np.float64]  # -1/2: worked shortest of its collective's ranks, 1/2: longest
    ranks: NDArray[np.int64]  # that are compared there; below 2 nothing is said of the row

    def chance(self, rows: NDArray[np.int64]) -> float:
        """How often a rank like all others would stand as high in these rows, or higher."""
        rows = rows[self.ranks[rows] >= 2]
        return _beyond(float(self.place[rows].sum()), self.ranks[rows])


def standing_of(collective: NDArray[np.int64], excess_ns: NDArray[np.int64]) -> Standing:
    """The standing of each row by ``excess_ns`` among those of its collective; NEVER: not compared."""
    place, ranks = np.zeros(len(collective)), np.zeros(len(collective), np.int64)
    known = np.flatnonzero(excess_ns != NEVER)
    if not len(known):
        return Standing(place, ranks)
    order = known[np.lexsort((excess_ns[known], collective[known]))]
    of, value = collective[order], excess_ns[order]
    fresh = np.r_[True, of[1:] != of[:-1]]
    first = np.flatnonzero(fresh)
    count = np.diff(np.r_[first, len(order)])
    begin, many = np.repeat(first, count), np.repeat(count, count)
    # Of equal ones each stands in their middle.
    heads = np.flatnonzero(fresh | np.r_[True, value[1:] != value[:-1]])
    equal = np.diff(np.r_[heads, len(order)])
    middle = np.repeat(heads + (equal - 1) / 2, equal)
    place[order] = (middle - begin) / np.maximum(many - 1, 1) - 0.5
    ranks[order] = many
    return Standing(place, ranks)


def _beyond(total: float, ranks: NDArray[np.int64]) -> float:
    """The chance that places drawn at random among so many ranks sum up to ``total`` or more.

    By the normal distribution, from half a step below: places come in steps.
    """
    if not len(ranks):
        return 1.0
    variance = float(((ranks + 1) / (12 * (ranks - 1))).sum())
    return 0.5 * erfc((total - 0.5 / float(ranks.max() - 1)) / sqrt(2 * variance))
