"""The difference of two clocks from packets that both captures saw, in both directions.

In: stamps of the same packets at two places. Out: a Line. Of captures x and y, the difference of their
clocks is at most y - x for packets that go from x to y, and at least y - x for those that come back. Over
time the two clouds leave a strip free between them; the middle of the widest straight strip gives offset
and drift, half its width the error, since an uneven path cannot be told from an offset. Where a clock
steps or changes its rate no straight strip is as wide as those of shorter times: then time is cut in pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import median_of

if TYPE_CHECKING:
    Ints = np.typing.NDArray[np.int64]
    Floats = np.typing.NDArray[np.float64]

MAX_DRIFT: Final = 1e-3  # twice the 500 ppm by which kernels slew a clock at most
BINS: Final = 512  # time bins a pair's samples are thinned to; the envelope needs the extremes only
USUAL_DRIFT: Final = 50e-6  # IEEE 802.3 allows clocks 100 ppm, taken as two standard deviations


WINDOWS: Final = 128  # times by which pieces are told apart, at most
FEWEST: Final = 8  # samples of either direction in a window, on average
FEWEST_BROKEN: Final = 2  # where no straight line holds, and there are too few for windows of FEWEST
NOISE: Final = 2.0  # how much of the windows' own scatter a strip may lose and still be straight


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
    tilt: tuple[float, float] = (0.0, 0.0)  # slopes between which a line still passes between the clouds

    def at(self, x_ns: Ints) -> Floats:
        """Differences y - x - base at times of x's clock."""
        found: Floats = self.offset + self.slope * (x_ns - self.origin_ns).astype(np.float64)
        return found

    def rest(self, x_ns: Ints, y_ns: Ints) -> Floats:
        """By how much differences lie above the line."""
        return (y_ns - x_ns - self.base_ns).astype(np.float64) - self.at(x_ns)

    def crosses(self, other: Line) -> float | None:
        """The time on x's clock at which two lines give the same difference, ns since ``origin_ns``."""
        if self.slope == other.slope:
            return None
        step = (other.base_ns - self.base_ns) + other.offset - self.offset
        step += other.slope * (self.origin_ns - other.origin_ns)
        return step / (self.slope - other.slope)


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
    above = _extremes(time[forward], difference[forward], span, 1.0)
    below = _extremes(time[~forward], difference[~forward], span, -1.0)
    bins = len(above.ns) + len(below.ns)
    slope = _slope_of_middles(above, below, span)
    wait = _wait(above.beside(slope)) + _wait(-below.beside(slope))
    pull = wait / (2 * min(len(above.ns), len(below.ns)) * 2 * USUAL_DRIFT**2)  # ns for a squared slope of 1
    while True:
        slope = _widest(above, below, slope, pull, -drift)
        high, low = above.beside(slope), below.beside(slope)
        width = float(high.min() - low.max())
        dropped = bins - len(high) - len(low)
        if width >= 0.0 or 4 * dropped > bins:
            break
        middle = (median_of(high) + median_of(low)) / 2
        few = 1 + dropped // 8  # more at a time as it becomes clear that it is not a handful
        if middle - high.min() > low.max() - middle:
            above = above.at(np.argsort(high)[few:])
        else:
            below = below.at(np.argsort(-low)[few:])
        if not len(above.ns) or not len(below.ns):
            return None
    offset = float(high.min() + low.max()) / 2
    tilt = _tilt(above, below, slope)
    return Line(origin, base, offset, slope, abs(width), (0.0, span), dropped / bins, tilt)


class _Cloud(NamedTuple):
    """Differences of two clocks by packets one way."""

    t: Floats
    ns: Floats

    def beside(self, slope: float) -> Floats:
        """By how much they lie above a line through 0."""
        return self.ns - slope * self.t

    def at(self, rows: Ints) -> _Cloud:
        return _Cloud(self.t[rows], self.ns[rows])


def _strip(above: _Cloud, below: _Cloud, slope: float) -> float:
    """The room for lines of that slope between two clouds, ns."""
    return float(above.beside(slope).min() - below.beside(slope).max())


def _tilt(above: _Cloud, below: _Cloud, slope: float) -> tuple[float, float]:
    """The least and greatest slopes of lines that pass between the clouds (by bisection)."""
    ends = []
    for way in (-1.0, 1.0):
        inside, outside = 0.0, MAX_DRIFT
        while outside - inside > 1e-9:
            at = (inside + outside) / 2
            free = _strip(above, below, slope + way * at)
            inside, outside = (at, outside) if free >= 0 else (inside, at)
        ends.append(slope + way * inside)
    return ends[0], ends[1]


def _extremes(time: Floats, value: Floats, span: float, sign: float) -> _Cloud:
    """The smallest (sign 1) or largest (sign -1) value of each time bin, with its time."""
    number = np.minimum((time * (BINS / max(span, 1.0))).astype(np.int64), BINS - 1)
    least = np.full(BINS, np.inf)
    np.minimum.at(least, number, sign * value)
    at = np.flatnonzero(sign * value == least[number])
    at = at[np.unique(number[at], return_index=True)[1]]
    return _Cloud(time[at], value[at])


def _slope_of_middles(above: _Cloud, below: _Cloud, span: float) -> float:
    """A robust first slope: the median slope between middles of the strip in coarse bins (Theil-Sen)."""
    coarse = 32
    width = max(span, 1.0) / coarse
    a, b = ((each.t // width).astype(np.int64) for each in (above, below))
    high, low = np.full(coarse + 1, np.inf), np.full(coarse + 1, -np.inf)
    np.minimum.at(high, a, above.ns)
    np.maximum.at(low, b, below.ns)
    at = np.flatnonzero(np.isfinite(high) & np.isfinite(low))
    if len(at) < 3:
        return 0.0
    middle = (high[at] + low[at]) / 2
    i, j = np.triu_indices(len(at), 1)
    slope = float(median_of((middle[j] - middle[i]) / ((at[j] - at[i]) * width)))
    return min(max(slope, -MAX_DRIFT), MAX_DRIFT)


def _wait(delay: Floats) -> float:
    """Mean of the exponential part of ``delay``, from its median and lower tenth."""
    tenth, half = np.quantile(delay, [0.1, 0.5])
    return float(half - tenth) / math.log(0.9 / 0.5)


def _widest(above: _Cloud, below: _Cloud, start: float, pull: float = 0.0, usual: float = 0.0) -> float:
    """The slope at which the strip is widest, less ``pull`` times its squared distance from ``usual``.

    The width is concave in the slope: golden section.
    """

    def width(slope: float) -> float:
        return _strip(above, below, slope) - pull * (slope - usual) ** 2

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


def fit_lines(x_ns: Ints, y_ns: Ints, forward: np.typing.NDArray[np.bool_], drift: float = 0.0) -> list[Line]:
    """``fit_line``, in as few pieces as keep the strip about as wide as it is in short times; in order.

    The pieces' spans meet: each ends where the next begins. Empty where packets went one way only.
    """
    whole = fit_line(x_ns, y_ns, forward, drift)
    if whole is None:
        return []
    cuts, scatter = _cuts(x_ns, y_ns, forward, whole)
    if not cuts:
        return [whole]
    place = np.searchsorted(np.array(cuts), x_ns)
    lines: list[Line] = []
    parts: list[np.typing.NDArray[np.bool_]] = []
    for piece in range(len(cuts) + 1):
        part = place == piece
        line = fit_line(x_ns[part], y_ns[part], forward[part], drift) if part.any() else None
        if line is None:
            continue
        if lines:  # cut for nothing: one line does for both
            joint = part | parts[-1]
            one = fit_line(x_ns[joint], y_ns[joint], forward[joint], drift)
            least = min(line.width, lines[-1].width)
            if one is not None and not one.broken and one.width >= least - scatter:
                lines[-1], parts[-1] = one, joint
                continue
        lines.append(line)
        parts.append(part)
    for before, after in pairwise(lines):
        _meet(before, after, x_ns, y_ns, forward)
    return _refit(lines, x_ns, y_ns, forward, drift) if lines else [whole]


def _refit(
    lines: list[Line], x_ns: Ints, y_ns: Ints, forward: np.typing.NDArray[np.bool_], drift: float
) -> list[Line]:
    """The pieces fitted to the packets of their own spans: what a window held of the next piece is gone."""
    cuts = [line.origin_ns + round(line.span[0]) for line in lines[1:]]
    place = np.searchsorted(np.array(cuts, np.int64), x_ns, side="right")
    found = []
    for number, line in enumerate(lines):
        part = place == number
        new = fit_line(x_ns[part], y_ns[part], forward[part], drift) if part.any() else None
        if new is None or new.broken > line.broken:
            found.append(line)
            continue
        ends = [line.origin_ns + round(end) - new.origin_ns for end in line.span]
        new.span = (float(ends[0]), float(ends[1]))
        found.append(new)
    return found


def _cuts(
    x_ns: Ints, y_ns: Ints, forward: np.typing.NDArray[np.bool_], whole: Line
) -> tuple[list[int], float]:
    """Times on x's clock at which a straight strip no longer holds; what a strip may lose by chance, ns."""
    time = (x_ns - whole.origin_ns).astype(np.float64)
    rest = (y_ns - x_ns - whole.base_ns) - whole.offset - whole.slope * time
    fewer = min(int(forward.sum()), int((~forward).sum()))
    count = min(WINDOWS, fewer // FEWEST)
    if count < 3 and whole.broken:
        count = fewer // FEWEST_BROKEN
    if count < 3:
        return [], 0.0
    window, edges, middle = _windows(time, count)
    count = len(middle)
    slope = np.zeros(count)
    for _ in range(2):  # the second time with each window's own slope
        level = rest - slope[window] * (time - middle[window])
        above, below = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(above, window[forward], level[forward])
        np.maximum.at(below, window[~forward], level[~forward])
        known = np.flatnonzero(np.isfinite(above) & np.isfinite(below))
        if len(known) < 3:
            return [], 0.0
        slope = _local_slopes(middle, (above + below) / 2, known, count)
    whole_ones = known[above[known] >= below[known]]  # a step within a window leaves no strip in it
    known = whole_ones if len(whole_ones) >= 3 else known
    above, below, middle = above[known], below[known], middle[known]
    scatter = NOISE * float(median_of(np.abs(np.diff(above))) + median_of(np.abs(np.diff(below))))
    usual = float(median_of(above - below))

    def holds(first: int, stop: int) -> bool:
        at, high, low = middle[first:stop], above[first:stop], below[first:stop]
        floor = min(float((high - low).min()), usual) - scatter
        slope = _slope(at, high, low)
        return float((high - slope * at).min() - (low - slope * at).max()) >= floor

    if holds(0, len(known)):
        return [], 0.0
    cuts, first = [], 0
    while first < len(known):
        stop = first + 2
        while stop < len(known) and holds(first, stop + 1):
            stop += 1
        if stop < len(known):
            cuts.append(whole.origin_ns + round(float(edges[known[stop]])))
        first = stop
    return cuts, scatter


def _windows(time: Floats, count: int) -> tuple[Ints, Floats, Floats]:
    """The window of each sample; where windows begin, with the end; their mean times.

    Windows hold equally many packets, but none spans a pause four times as long as a window.
    """
    order = np.argsort(time, kind="stable")
    ordered = time[order]
    share = np.arange(len(time)) * count // len(time)
    length = median_of(np.diff(ordered[np.searchsorted(share, np.arange(count))]))
    number = np.cumsum(np.r_[False, (np.diff(share) > 0) | (np.diff(ordered) > 4 * length)])
    window = np.empty(len(time), np.int64)
    window[order] = number
    begins = ordered[np.searchsorted(number, np.arange(number[-1] + 1))]
    return window, np.r_[begins, ordered[-1]], np.bincount(number, ordered) / np.bincount(number)


def _local_slopes(time: Floats, value: Floats, known: Ints, count: int) -> Floats:
    """The slope around each of ``count`` windows: the median of those between five neighbours."""
    steps = np.diff(value[known]) / np.maximum(np.diff(time[known]), 1.0)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(steps, 2, mode="edge"), 4)
    slopes = np.clip(np.median(around, axis=1), -MAX_DRIFT, MAX_DRIFT)
    return np.interp(np.arange(count), known, slopes[: len(known)])


def _slope(time: Floats, high: Floats, low: Floats) -> float:
    """The slope of the widest strip between a few points (golden section: the width is concave)."""
    if len(time) < 2:
        return 0.0
    middle = (high + low) / 2
    start = float((middle[-1] - middle[0]) / max(time[-1] - time[0], 1.0))
    start = min(max(start, -MAX_DRIFT), MAX_DRIFT)
    return _widest(_Cloud(time, high), _Cloud(time, low), start)


def _meet(before: Line, after: Line, x_ns: Ints, y_ns: Ints, forward: np.typing.NDArray[np.bool_]) -> None:
    """Let one piece end and the next begin where the packets between change from one line to the other."""
    origin = before.origin_ns  # a double holds no epoch to the nanosecond
    low, high = before.span[1] / 2, after.origin_ns - origin + after.span[1] / 2
    near = np.flatnonzero((x_ns >= origin + round(low)) & (x_ns <= origin + round(high)))
    near = near[np.argsort(x_ns[near], kind="stable")]
    sign = np.where(forward[near], 1.0, -1.0)
    # By how much each packet would have arrived before it was sent, by either line.
    wrong = [np.maximum(0.0, -sign * line.rest(x_ns[near], y_ns[near])) for line in (before, after)]
    cost = np.r_[0.0, np.cumsum(wrong[0])] + np.r_[np.cumsum(wrong[1][::-1])[::-1], 0.0]
    least = np.flatnonzero(cost <= cost.min())
    bounds = np.r_[low, (x_ns[near] - origin).astype(np.float64), high]
    first, last = float(bounds[least[0]]), float(bounds[least[-1] + 1])
    # Where x was set forth nothing was seen for so long on its clock while y's went on: y's packets before
    # the cut must not lie behind it.
    at = np.array([origin + round(first)])
    ahead = float(before.base_ns - after.base_ns) + float((before.at(at) - after.at(at))[0])
    first = min(first + max(ahead, 0.0), last)
    crossing = before.crosses(after)
    cut = crossing if crossing is not None and first <= crossing <= last else (first + last) / 2
    before.span = (before.span[0], cut)
    after.span = (origin - after.origin_ns + cut, after.span[1])
