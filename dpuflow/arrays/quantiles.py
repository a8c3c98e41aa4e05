"""A share and degrees of freedom in, Student's quantile out."""

from __future__ import annotations

from math import pi, sqrt, tan
from statistics import NormalDist


def student(share: float, freedom: float) -> float:
    """From the normal quantile (Cornish and Fisher; Abramowitz and Stegun 26.7.5), exact for one and two."""
    if freedom == 1:
        return tan(pi * (share - 0.5))
    if freedom == 2:  # two have a closed form, too
        return (2 * share - 1) / sqrt(2 * share * (1 - share))
    x = NormalDist().inv_cdf(share)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return x + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))
