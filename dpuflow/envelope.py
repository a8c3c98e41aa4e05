"""The difference of two clocks from packets that both captures saw, in both directions.

In: stamps of the same packets at two places. Out: a Line. Of captures x and y, the difference of their
clocks is at most y - x for packets that go from x to y, and at least y - x for those that come back. Over
time the two clouds leave a strip free between them; the middle of the widest straight strip gives offset
and drift, half its width the error, since an uneven path cannot be told from an offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    Ints = np.typing.NDArray[np.int64]
    Floats = np.typing.NDArray[np.float64]

MAX_DRIFT: Final = 1e-3  # twice the 500 ppm by which kernels slew a clock at most
BINS: Final = 512  # time bins a pair's samples are thinned to; the envelope needs the extremes only
USUAL_DRIFT: Final = 50e-6  # IEEE 802.3 allows clocks 100 ppm, taken as two standard deviations


@dataclass
class Line:
    """difference y - x = base_ns + offset + slope * (t - origin_ns), t on x's clock; all ns."""

    origin_ns: int
    base_ns: int
    offset: float
    slope: float
    width: float  # of the strip: the smallest sum of both one-way delays
    span: tuple[float, float] = (0.0, 0.0)  # first and last sample, ns since origin
    broken: float = 0.0  # share of the bins that contradict the line


def fit_line(x_ns: Ints, y_ns: Ints, forward: np.typing.NDArray[np.bool_], drift: float = 0.0) -> Line | None:
    """The middle of the widest strip between the two clouds of differences y - x; None without both.

    Delays taken as a floor plus exponential waits make the widest strip the most likely one; against few
    samples stands that clocks hardly drift (USUAL_DRIFT). ``drift`` has been taken out of y - x before.
    Samples that leave no strip at all (mismatched packets, a clock that jumped) are dropped, the worst
    first; ``broken`` tells how many it took.
    """
    if not forward.any() or forward.all():
        return None
    origin = int(x_ns.min())
    base = int(y_ns[0]) - int(x_ns[0])
    time = (x_ns - origin).astype(np.float64)
    difference = (y_ns - x_ns - base).astype(np.float64)
    span = float(time.max())
    above_t, above = _extremes(time[forward], difference[forward], span, 1.0)
    below_t, below = _extremes(time[~forward], difference[~forward], span, -1.0)
    bins = len(above) + len(below)
    slope = _slope_of_middles(above_t, above, below_t, below, span)
    wait = _wait(above - slope * above_t) + _wait(slope * below_t - below)
    pull = wait / (2 * min(len(above), len(below)) * 2 * USUAL_DRIFT**2)  # ns for a squared slope of 1
    while True:
        slope = _widest(above_t, above, below_t, below, slope, pull, -drift)
        high, low = above - slope * above_t, below - slope * below_t
        width = float(high.min() - low.max())
        dropped = bins - len(above) - len(below)
        if width >= 0.0 or 4 * dropped > bins:
            break
        middle = (np.median(high) + np.median(low)) / 2
        few = 1 + dropped // 8  # more at a time as it becomes clear that it is not a handful
        if middle - high.min() > low.max() - middle:
            keep = np.argsort(high)[few:]
            above_t, above = above_t[keep], above[keep]
        else:
            keep = np.argsort(-low)[few:]
            below_t, below = below_t[keep], below[keep]
        if not len(above) or not len(below):
            return None
    offset = float(high.min() + low.max()) / 2
    return Line(origin, base, offset, slope, abs(width), (0.0, span), dropped / bins)


def _extremes(time: Floats, value: Floats, span: float, sign: float) -> tuple[Floats, Floats]:
    """The smallest (sign 1) or largest (sign -1) value of each time bin, with its time."""
    number = np.minimum((time * (BINS / max(span, 1.0))).astype(np.int64), BINS - 1)
    least = np.full(BINS, np.inf)
    np.minimum.at(least, number, sign * value)
    at = np.flatnonzero(sign * value == least[number])
    at = at[np.unique(number[at], return_index=True)[1]]
    return time[at], value[at]


def _slope_of_middles(above_t: Floats, above: Floats, below_t: Floats, below: Floats, span: float) -> float:
    """A robust first slope: the median slope between middles of the strip in coarse bins (Theil-Sen)."""
    coarse = 32
    width = max(span, 1.0) / coarse
    a, b = (above_t // width).astype(np.int64), (below_t // width).astype(np.int64)
    high, low = np.full(coarse + 1, np.inf), np.full(coarse + 1, -np.inf)
    np.minimum.at(high, a, above)
    np.maximum.at(low, b, below)
    at = np.flatnonzero(np.isfinite(high) & np.isfinite(low))
    if len(at) < 3:
        return 0.0
    middle = (high[at] + low[at]) / 2
    i, j = np.triu_indices(len(at), 1)
    slope = float(np.median((middle[j] - middle[i]) / ((at[j] - at[i]) * width)))
    return min(max(slope, -MAX_DRIFT), MAX_DRIFT)


def _wait(delay: Floats) -> float:
    """Mean of the exponential part of ``delay``, from its median and lower tenth."""
    tenth, half = np.quantile(delay, [0.1, 0.5])
    return float(half - tenth) / math.log(0.9 / 0.5)


def _widest(
    above_t: Floats, above: Floats, below_t: Floats, below: Floats, start: float, pull: float, usual: float
) -> float:
    """The slope at which the strip is widest, less ``pull`` times its squared distance from ``usual``.

    The width is concave in the slope: golden section.
    """

    def width(slope: float) -> float:
        free = float((above - slope * above_t).min() - (below - slope * below_t).max())
        return free - pull * (slope - usual) ** 2

    ratio = (5**0.5 - 1) / 2
    low, high = start - MAX_DRIFT, start + MAX_DRIFT
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = width(a), width(b)
    while high - low > 1e-11:
        if at_a < at_b:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = width(b)
        else:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = width(a)
    return (low + high) / 2
