"""The clocks of several vantage points against one: trusted and checked, or estimated.

In: for pairs of captures the times at which each saw the same packets, in both directions. Out: one
Clock a capture and the map from its times to the reference's. Method: of two captures x and y, the
difference of their clocks is at most y - x for packets that go from x to y, and at least y - x for those
that come back. Over time the two clouds leave a strip free between them; the middle of the widest
straight strip gives offset and drift, half its width the error.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.errors import OptionError
from dpuflow.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.tables import CaptureInfo

    Ints = np.typing.NDArray[np.int64]
    Floats = np.typing.NDArray[np.float64]

MODES: Final = ("auto", "trust", "estimate")
MAX_DRIFT: Final = 1e-3  # twice the 500 ppm by which kernels slew a clock at most
BINS: Final = 512  # time bins a pair's samples are thinned to; the envelope needs the extremes only
USUAL_DRIFT: Final = 50e-6  # IEEE 802.3 allows clocks 100 ppm, taken as two standard deviations
EARLY_SHARE: Final = 0.01  # of packets may arrive before they were sent on a clock that is trusted
BROKEN_SHARE: Final = 0.05  # of the bins may contradict a straight line


@dataclass
class Samples:
    """Packets seen by captures ``x`` and ``y``: stamps of each on its own clock, and the way they went."""

    x: int
    y: int
    x_ns: Ints
    y_ns: Ints
    forward: np.typing.NDArray[np.bool_]  # True: from x to y


@dataclass
class ClockMap:
    """local = reference + offset_ns + drift * (reference - origin_ns)."""

    origin_ns: int
    offset_ns: int = 0
    drift: float = 0.0

    def to_reference(self, local_ns: Ints) -> Ints:
        """Times of this clock as times of the reference clock; NEVER stays NEVER."""
        if not self.offset_ns and not self.drift:
            return local_ns
        since = local_ns - (self.origin_ns + self.offset_ns)
        since -= np.rint(since * (self.drift / (1.0 + self.drift))).astype(np.int64)
        return np.where(local_ns == np.iinfo(np.int64).min, local_ns, since + self.origin_ns)


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


@dataclass
class Clocks:
    """What ``tie_clocks`` found out. ``maps[c]`` is None for a capture that is not tied."""

    clocks: list[Clock]
    maps: list[ClockMap | None]
    reference: int
    limits: list[str] = field(default_factory=list)


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


@dataclass
class Check:
    """How two clocks taken as one stand up: delays of packets either way on the raw stamps."""

    early: int  # packets that arrived before they were sent
    packets: int
    worst_ns: int  # by how much at most
    bound_ns: int  # the offset cannot be larger than this

    @property
    def passes(self) -> bool:
        """Whether hardly any packet arrived before it was sent."""
        return self.early <= EARLY_SHARE * self.packets


def check_pair(samples: Samples) -> Check:
    """Delays if both captures are on one clock."""
    delay = np.where(samples.forward, samples.y_ns - samples.x_ns, samples.x_ns - samples.y_ns)
    early = delay < 0
    sides = [delay[samples.forward], delay[~samples.forward]]
    # A hundredth of the smallest delays is left out: stamps of neighbours can be swapped.
    floors = [int(np.partition(s, len(s) // 100)[len(s) // 100]) for s in sides if len(s)]
    return Check(
        int(np.count_nonzero(early)),
        len(delay),
        int(-delay.min(initial=0)),
        max((abs(f) for f in floors), default=0),
    )


def tie_clocks(infos: Sequence[CaptureInfo], samples: Sequence[Samples], mode: str) -> Clocks:
    """Put all captures on the clock of the first that is tied to others.

    ``mode``: "trust": they are on one clock (checked); "estimate": offset and drift from the packets;
    "auto": trusted where the check passes. Raises OptionError for any other.
    """
    if mode not in MODES:
        raise OptionError(f"clock {mode!r} is none of {', '.join(MODES)}")
    checks = [check_pair(s) for s in samples]
    lines = [fit_line(s.x_ns, s.y_ns, s.forward) for s in samples]
    weights = [
        c.bound_ns if mode == "trust" else (None if line is None else line.width / 2)
        for c, line in zip(checks, lines, strict=True)
    ]
    parts = _parts(len(infos), samples, weights)
    largest = max(parts, key=len) if parts else [0]
    home = parts[0] if len(parts[0]) > 1 else largest
    reference = home[0]
    origin = infos[reference].first_ns or 0
    trusted = mode == "trust" or (mode == "auto" and all(c.passes for c in checks))
    found = Clocks(
        [Clock(c, False, "none", why="it shares no packets with the others") for c in range(len(infos))],
        [],
        reference,
    )
    maps: list[ClockMap | None] = [None] * len(infos)
    if trusted:
        error = _nearest(reference, samples, [float(c.bound_ns) for c in checks])[0]
        for capture in range(len(infos)) if mode == "trust" else home:
            maps[capture] = ClockMap(origin)
            bound = error.get(capture)
            found.clocks[capture] = Clock(
                capture,
                False,
                "trusted",
                0,
                0,
                None if bound is None else round(bound),
                _why_trusted(mode, bound),
            )
        found.limits += _failed(infos, samples, checks)
    else:
        _estimate(infos, samples, lines, home, maps, found)
    found.clocks[reference] = Clock(reference, True, "reference", 0, 0, 0, "")
    maps[reference] = ClockMap(origin)
    found.maps = maps
    for capture, place in enumerate(maps):
        if place is None:
            found.limits.append(
                f"{infos[capture].vantage} shares no packets with {infos[reference].vantage}: nothing ties "
                "its clock, so its messages are left out of the common time line."
            )
    return found


def _why_trusted(mode: str, bound: float | None) -> str:
    if bound is None:
        return "taken as synchronised; no packets in common to check it with"
    allowed = f"packets in common allow an offset of up to {bound / 1000:.1f} us"
    if mode == "trust":
        return f"taken as synchronised; {allowed}"
    return f"uncorrected, packets arrive after they were sent; {allowed}"


def _failed(infos: Sequence[CaptureInfo], samples: Sequence[Samples], checks: Sequence[Check]) -> list[str]:
    return [
        f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} do not agree: {c.early} of {c.packets} "
        f"packets arrive before they were sent, by up to {c.worst_ns / 1000:.1f} us."
        for s, c in zip(samples, checks, strict=True)
        if not c.passes
    ]


def _parts(captures: int, samples: Sequence[Samples], weights: Sequence[float | None]) -> list[list[int]]:
    """Captures in sets that packets tie together, each in order, the set of the first capture first."""
    parts = [{c} for c in range(captures)]
    for s, weight in zip(samples, weights, strict=True):
        a = next(p for p in parts if s.x in p)
        b = next(p for p in parts if s.y in p)
        if weight is not None and a is not b:
            a |= b
            parts.remove(b)
    return sorted((sorted(p) for p in parts), key=lambda p: p[0])


def _nearest(
    start: int, samples: Sequence[Samples], weights: Sequence[float | None]
) -> tuple[dict[int, float], dict[int, int]]:
    """Smallest sum of weights from ``start`` to each capture, and the pair that leads to it (Dijkstra)."""
    around: dict[int, list[tuple[int, int]]] = {}
    for number, s in enumerate(samples):
        if weights[number] is not None:
            around.setdefault(s.x, []).append((s.y, number))
            around.setdefault(s.y, []).append((s.x, number))
    distance: dict[int, float] = {}
    through: dict[int, int] = {}
    queue = [(0.0, start, -1)]
    while queue:
        d, capture, number = heapq.heappop(queue)
        if capture in distance:
            continue
        distance[capture], through[capture] = d, number
        for other, pair in around.get(capture, ()):
            weight = weights[pair]
            if other not in distance and weight is not None:
                heapq.heappush(queue, (d + weight, other, pair))
    return distance, through


def _estimate(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    lines: Sequence[Line | None],
    home: Sequence[int],
    maps: list[ClockMap | None],
    found: Clocks,
) -> None:
    """Offsets along the tightest paths first, then least squares over all pairs, twice."""
    reference, origin = found.reference, infos[found.reference].first_ns or 0
    weights = [None if line is None else line.width / 2 for line in lines]
    error, through = _nearest(reference, samples, weights)
    tied: dict[int, ClockMap] = {reference: ClockMap(origin)}
    for capture in error:  # in order of distance: the one before it is there
        number = through[capture]
        if number >= 0:
            line = lines[number]
            assert line is not None
            s = samples[number]
            tied[capture] = _follow(tied[s.x], line) if capture == s.y else _follow_back(tied[s.y], line)
    used = [s for s in samples if s.x in tied and s.y in tied]
    for _ in range(2):
        refit = [_residual(s, tied[s.x], tied[s.y], origin) for s in used]
        closure = _adjust(
            [(s, r) for s, r in zip(used, refit, strict=True) if r is not None], tied, reference
        )
    error = _nearest(reference, used, [None if r is None else r.width / 2 for r in refit])[0]
    for capture in home:
        place = maps[capture] = tied[capture]
        found.clocks[capture] = Clock(
            capture,
            False,
            "estimated",
            place.offset_ns,
            round(place.drift * 1e9),
            round(max(error.get(capture, 0.0), closure.get(capture, 0.0))),
            "from the smallest delays of packets both ways; an asymmetry of the path cannot be seen",
        )
    for s, r in zip(used, refit, strict=True):
        if r is not None and r.broken > BROKEN_SHARE:
            found.limits.append(
                f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} do not differ by a straight "
                f"line: {100 * r.broken:.0f} % of the time contradicts it; one stepped or changed its rate."
            )


def _follow(at_x: ClockMap, line: Line) -> ClockMap:
    """The map of y from that of x."""
    x0 = at_x.origin_ns + at_x.offset_ns
    shift = line.base_ns + round(line.offset + line.slope * float(x0 - line.origin_ns))
    return ClockMap(at_x.origin_ns, at_x.offset_ns + shift, (1 + line.slope) * (1 + at_x.drift) - 1)


def _follow_back(at_y: ClockMap, line: Line) -> ClockMap:
    """The map of x from that of y."""
    since = float(at_y.origin_ns + at_y.offset_ns - line.base_ns - line.origin_ns) - line.offset
    x0 = line.origin_ns + round(since / (1 + line.slope))
    return ClockMap(at_y.origin_ns, x0 - at_y.origin_ns, (1 + at_y.drift) / (1 + line.slope) - 1)


def _residual(s: Samples, x: ClockMap, y: ClockMap, origin: int) -> Line | None:
    """What is left between two captures after their maps, as a line over reference time from ``origin``."""
    line = fit_line(x.to_reference(s.x_ns), y.to_reference(s.y_ns), s.forward, y.drift - x.drift)
    if line is None:
        return None
    ahead = float(line.origin_ns - origin)
    offset = line.base_ns + line.offset - line.slope * ahead
    return Line(origin, 0, offset, line.slope, line.width, (ahead, ahead + line.span[1]), line.broken)


def _adjust(
    fits: Sequence[tuple[Samples, Line]], tied: dict[int, ClockMap], reference: int
) -> dict[int, float]:
    """Least squares over all pairs; changes ``tied``; how far each capture's loops stay open, ns."""
    unknown = {c: n for n, c in enumerate(c for c in tied if c != reference)}
    size = len(unknown)
    if not size:
        return {}
    scale = max(abs(t) for _, line in fits for t in line.span) or 1.0
    rows = np.zeros((2 * len(fits), 2 * size))
    right, weight = np.zeros(2 * len(fits)), np.zeros(2 * len(fits))
    for n, (s, line) in enumerate(fits):
        for end in (0, 1):
            t = line.span[end]
            for capture, sign in ((s.y, 1.0), (s.x, -1.0)):
                if capture in unknown:
                    rows[2 * n + end, 2 * unknown[capture]] = sign
                    rows[2 * n + end, 2 * unknown[capture] + 1] = sign * t / scale
            right[2 * n + end] = line.offset + line.slope * t
            weight[2 * n + end] = 1.0 / max(line.width, 1.0)
    solved = np.linalg.lstsq(rows * weight[:, None], right * weight, rcond=None)[0]
    open_by = np.abs(rows @ solved - right)
    for capture, n in unknown.items():
        place = tied[capture]
        tied[capture] = ClockMap(
            place.origin_ns,
            place.offset_ns + round(solved[2 * n]),
            place.drift + float(solved[2 * n + 1]) / scale,
        )
    closure: dict[int, float] = {}
    for n, (s, _) in enumerate(fits):
        worst = float(open_by[2 * n : 2 * n + 2].max())
        for capture in (s.x, s.y):
            closure[capture] = min(closure.get(capture, np.inf), worst)
    return closure
