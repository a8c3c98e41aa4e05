"""A share and degrees of freedom in, Student's quantile out; medians of all but one."""

from __future__ import annotations

from bisect import bisect_left
from math import inf, pi, sqrt, tan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def student(share: float, freedom: float) -> float:
    """From the normal quantile (Cornish and Fisher; Abramowitz and Stegun 26.7.5), exact for one and two."""
    if freedom == 1:
        return tan(pi * (share - 0.5))
    if freedom == 2:  # two have a closed form, too
        return (2 * share - 1) / sqrt(2 * share * (1 - share))
    from statistics import NormalDist  # brings fractions and decimals

    x = NormalDist().inv_cdf(share)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def middle(ordered: Sequence[float]) -> float:
    """The median."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def middle_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of ``ordered`` but for one that is ``own``; infinity where there is no other."""
    at = bisect_left(ordered, own)
    low, high = (place + (place >= at) for place in ((len(ordered) - 2) // 2, (len(ordered) - 1) // 2))
    return (ordered[low] + ordered[high]) / 2 if len(ordered) > 1 else inf
