"""The graph of pairs of clocks: each pair's lines in, one map a capture out, with its error.

Pairs are fitted by ``envelope``; the tightest paths give first maps, then least squares over all pairs
make the loops close; what stays open is part of the error.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.join.clockmap import ClockMap, follow, follow_back
from dpuflow.join.envelope import USUAL_DRIFT, Line, fit_line, fit_lines
from dpuflow.schema.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.join.clockmap import Ints, Samples
    from dpuflow.schema.tables import CaptureInfo

    Floats = np.typing.NDArray[np.float64]

NEIGHBOURS: Final = 8  # pairs of a capture that are fitted; more cost time and add little
BROKEN_SHARE: Final = 0.05  # of the bins may contradict a straight line
NOTHING: Final = 1e15  # ns: the doubt of pairs that contradict theirs


@dataclass
class Clocks:
    """What ``tie_clocks`` found out. ``maps[c]`` is None for a capture whose clock is not understood.

    ``islands``: captures that packets tie together, the reference of each first.
    """

    clocks: list[Clock]
    maps: list[ClockMap | None]
    islands: list[list[int]] = field(default_factory=list)
    slack_ns: int = 0  # the largest error of a clock while it shares packets
    limits: list[str] = field(default_factory=list)


def parts_of(captures: int, samples: Sequence[Samples]) -> list[list[int]]:
    """Captures in sets that packets tie together, each in order, the set of the first capture first."""
    parts = [{c} for c in range(captures)]
    for s in samples:
        a = next(p for p in parts if s.x in p)
        b = next(p for p in parts if s.y in p)
        if a is not b:
            a |= b
            parts.remove(b)
    return sorted((sorted(p) for p in parts), key=lambda p: p[0])


def _enough(captures: int, samples: Sequence[Samples]) -> list[Samples]:
    """Of many pairs those with the most packets: some a capture, and what holds the graph together."""
    degree = [0] * captures
    parts = list(range(captures))
    chosen = []
    for s in sorted(samples, key=lambda s: -len(s.x_ns)):
        joins = parts[s.x] != parts[s.y]
        if joins:
            old, new = parts[s.y], parts[s.x]
            parts = [new if p == old else p for p in parts]
        if joins or min(degree[s.x], degree[s.y]) < NEIGHBOURS:
            chosen.append(s)
            degree[s.x] += 1
            degree[s.y] += 1
    return chosen


def nearest(
    start: int, samples: Sequence[Samples], weights: Sequence[float]
) -> tuple[dict[int, float], dict[int, int]]:
    """Smallest sum of weights from ``start`` to each capture, and the pair that leads to it (Dijkstra)."""
    around: dict[int, list[tuple[int, int]]] = {}
    for number, s in enumerate(samples):
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
            if other not in distance:
                heapq.heappush(queue, (d + weights[pair], other, pair))
    return distance, through


MOST_DRIFT: Final = 0.1
"""No clock runs so much faster than another."""


class _Pair(NamedTuple):
    """Two captures with packets in common, the lines that fit, and how far off these may be, ns."""

    samples: Samples
    lines: list[Line]
    doubt: float


def estimate(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    reference: int,
    found: Clocks,
) -> None:
    """Offsets along the surest paths first, then least squares over all pairs, twice."""
    origin = infos[reference].first_ns or 0
    ends = (origin, infos[reference].last_ns or origin)
    chosen = _enough(len(infos), [s for s in samples if s.forward.any() and not s.forward.all()])
    lines = [(s, fit_lines(s.x_ns, s.y_ns, s.forward)) for s in chosen]
    # Stamps of any time fit lines of any slope: no clock runs so.
    fitted = [(s, of) for s, of in lines if of and max(abs(line.slope) for line in of) < MOST_DRIFT]
    pairs, tied = _along_surest(_with_doubts(fitted), reference, origin)
    samples = [pair.samples for pair in pairs]
    for _ in range(2):
        refit = [_residual(s, tied[s.x], tied[s.y], origin) for s in samples]
        closure = _adjust(pairs, refit, tied, reference)
    within, error = _errors(pairs, refit, reference, ends)
    for capture in sorted(set(tied) - {reference}):
        place = found.maps[capture] = tied[capture]
        span = _shared_span(capture, samples, refit, origin)
        bend = max((abs(j) for _, j in place.jumps() if abs(j) <= within[capture]), default=0.0)
        extra = closure.get(capture, 0.0) + bend
        found.slack_ns = max(found.slack_ns, round(within[capture] + extra))
        found.clocks[capture] = Clock(
            capture,
            False,
            "estimated",
            place.offset_ns,
            round(place.mean_drift(*span) * 1e9),
            round(error[capture] + extra),
            _how_estimated(place, origin, span, within[capture]),
            round(within[capture] + extra),
        )
    found.limits += _misfits(infos, samples, refit)


def _shared_span(
    capture: int, samples: Sequence[Samples], rest: Sequence[Line], origin: int
) -> tuple[float, float]:
    """From when to when a capture shares packets with others."""
    near = [r.span for s, r in zip(samples, rest, strict=True) if capture in (s.x, s.y)]
    return min(t[0] for t in near) + origin, max(t[1] for t in near) + origin


def _misfits(infos: Sequence[CaptureInfo], samples: Sequence[Samples], rest: Sequence[Line]) -> Iterator[str]:
    """Sentences on pairs that no line fits."""
    for s, r in zip(samples, rest, strict=True):
        if r.broken > BROKEN_SHARE:
            yield (
                f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} do not fit one "
                f"line: {100 * r.broken:.0f} % of the time contradicts it (was one set, or stepped?)."
            )


def _along_surest(
    pairs: Sequence[_Pair], reference: int, origin: int
) -> tuple[list[_Pair], dict[int, ClockMap]]:
    """First maps, each along the path with the least doubt; and the pairs of captures that have one."""
    samples = [pair.samples for pair in pairs]
    through = nearest(reference, samples, [pair.doubt for pair in pairs])[1]
    tied: dict[int, ClockMap] = {reference: ClockMap(origin)}
    for capture, number in through.items():  # in order of distance: the one before it is there
        if number >= 0:
            s, of, _ = pairs[number]
            tied[capture] = follow(tied[s.x], of) if capture == s.y else follow_back(tied[s.y], of)
    # A pair that no line fits may have been what tied others to the reference: these stay untied.
    return [pair for pair in pairs if pair.samples.x in tied], tied


def _errors(
    pairs: Sequence[_Pair], rest: Sequence[Line], reference: int, ends: tuple[int, int]
) -> tuple[dict[int, float], dict[int, float]]:
    """How far off captures' clocks may be, ns: while they share packets, and from end to end."""
    samples = [pair.samples for pair in pairs]
    half = [r.width / 2 + _bend(pair.lines) for pair, r in zip(pairs, rest, strict=True)]
    beyond = [_beyond(pair.lines, r, ends[0], ends) for pair, r in zip(pairs, rest, strict=True)]
    within = nearest(reference, samples, half)[0]
    return within, nearest(reference, samples, [h + b for h, b in zip(half, beyond, strict=True)])[0]


def _beyond(lines: Sequence[Line], rest: Line, origin: int, ends: tuple[int, int]) -> float:
    """How far off a pair's lines may be at the reference's ends, where no packets are shared, ns.

    Within the packets half the strip covers a line; beyond them all slopes are possible that pass between
    the clouds, as far as clocks differ at all.
    """
    loose = [
        min(max(line.slope - line.tilt[0], line.tilt[1] - line.slope), 4 * USUAL_DRIFT)
        for line in (lines[0], lines[-1])
    ]
    before, after = max(rest.span[0], 0.0), max(ends[1] - origin - rest.span[1], 0.0)
    return max(before * loose[0], after * loose[1])


def _bend(lines: Sequence[Line]) -> float:
    """How far off one straight line may be in the middle of a clock that did not always run like this, ns.

    No clock that runs freely is so fast: it is slewed, and hardly for all of the capture. A line through both
    rates is off by a quarter of what they make at most.
    """
    line = lines[0]
    slewed = len(lines) == 1 and abs(line.slope) > 2 * USUAL_DRIFT
    return abs(line.slope) * (line.span[1] - line.span[0]) / 4 if slewed else 0.0


def _how_estimated(place: ClockMap, origin: int, span: tuple[float, float], error: float) -> str:
    """The sentence that goes with an estimated clock."""
    begin, end = ((t - origin) / 1e9 for t in span)
    text = (
        f"from the least delays of packets both ways, {begin:.1f} to {end:.1f} s after the first packet of "
        "the reference; an uneven path cannot be seen"
    )
    steps = [(at, jump) for at, jump in place.jumps() if abs(jump) > 2 * error]
    if len(place.later) > len(steps):
        text += f"; its rate changed, so it is followed in {len(place.later) + 1} pieces"
    for at, jump in steps[:3]:
        text += f"; it was set by {jump / 1000:+.1f} us {(at - origin) / 1e9:.1f} s after that packet"
    return text + (f" and {len(steps) - 3} more times" if len(steps) > 3 else "")


def _with_doubts(fitted: Sequence[tuple[Samples, list[Line]]]) -> list[_Pair]:
    """Pairs with how far off their lines may be: half the widest strip, and what clocks may do meanwhile.

    While a pair shares no packets although its captures share some with others, its clocks may drift: the
    mean over all of their packets counts. What no line fits ties nothing that anything else does.
    """
    times: dict[int, list[Ints]] = {}
    for s, _ in fitted:
        times.setdefault(s.x, []).append(s.x_ns)
        times.setdefault(s.y, []).append(s.y_ns)
    every = {capture: np.sort(np.concatenate(parts)) for capture, parts in times.items()}
    pairs = []
    for s, of in fitted:
        away = max(_mean_distance(every[c], own) for c, own in ((s.x, s.x_ns), (s.y, s.y_ns)))
        broken = max(line.broken for line in of) > BROKEN_SHARE
        doubt = max(line.width for line in of) / 2 + USUAL_DRIFT * away + (NOTHING if broken else 0.0)
        pairs.append(_Pair(s, of, doubt))
    return pairs


def _mean_distance(every: Ints, own: Ints) -> float:
    """The mean time from those in ``every`` to the nearest in ``own``, ns."""
    own = np.sort(own)
    after = np.searchsorted(own, every)
    to_next = own[np.minimum(after, len(own) - 1)] - every
    to_last = every - own[np.maximum(after - 1, 0)]
    return float(np.minimum(np.abs(to_next), np.abs(to_last)).mean())


def _residual(s: Samples, x: ClockMap, y: ClockMap, origin: int) -> Line:
    """What is left between two captures after their maps, as a line over reference time from ``origin``."""
    line = fit_line(
        x.to_reference(s.x_ns),
        y.to_reference(s.y_ns),
        s.forward,
        0.0 if x.later or y.later else y.drift - x.drift,
    )
    if line is None or abs(line.slope) > MOST_DRIFT:  # stamps of which nothing fits any more say nothing
        return Line(origin, 0, 0.0, 0.0, NOTHING, (0.0, float(np.ptp(s.x_ns))), 1.0)
    ahead = float(line.origin_ns - origin)
    offset = line.base_ns + line.offset - line.slope * ahead
    return Line(origin, 0, offset, line.slope, line.width, (ahead, ahead + line.span[1]), line.broken)


def _equations(
    fits: Sequence[tuple[_Pair, Line]], unknown: dict[int, int], scale: float
) -> tuple[Floats, Floats, Floats]:
    """What each pair's line says at its ends of the offsets and drifts (``scale`` ns) that are unknown.

    Rows of coefficients, right sides, weights.
    """
    rows = np.zeros((2 * len(fits), 2 * len(unknown)))
    right, weight = np.zeros(2 * len(fits)), np.zeros(2 * len(fits))
    for n, (pair, line) in enumerate(fits):
        for row, t in enumerate(line.span, 2 * n):
            for capture, sign in ((pair.samples.y, 1.0), (pair.samples.x, -1.0)):
                if capture in unknown:
                    rows[row, 2 * unknown[capture]] = sign
                    rows[row, 2 * unknown[capture] + 1] = sign * t / scale
            right[row] = line.offset + line.slope * t
            weight[row] = 1.0 / max(pair.doubt, 1.0)
    return rows, right, weight


def _adjust(
    pairs: Sequence[_Pair], rest: Sequence[Line], tied: dict[int, ClockMap], reference: int
) -> dict[int, float]:
    """Least squares over all pairs that a line fits, each with its doubt; changes ``tied``.

    ``rest``: what is left between each pair after the maps so far. Returns how far each capture's loops stay
    open, ns.
    """
    fits = [(pair, r) for pair, r in zip(pairs, rest, strict=True) if r.broken <= BROKEN_SHARE]
    unknown = {c: n for n, c in enumerate(c for c in tied if c != reference)}
    if not unknown or not fits:
        return {}
    scale = max(abs(t) for _, line in fits for t in line.span) or 1.0
    rows, right, weight = _equations(fits, unknown, scale)
    rows *= weight[:, None]
    solved = np.linalg.lstsq(rows.T @ rows, rows.T @ (right * weight), rcond=None)[0]
    open_by = np.abs(rows @ solved - right * weight) / weight
    for capture, n in unknown.items():
        moved = tied[capture].moved(float(solved[2 * n]), float(solved[2 * n + 1]) / scale)
        if abs(moved.drift) <= MOST_DRIFT:  # else what is there of its pairs leaves that open
            tied[capture] = moved
    closure: dict[int, float] = {}
    for (pair, _), worst in zip(fits, open_by.reshape(-1, 2).max(axis=1).tolist(), strict=True):
        for capture in (pair.samples.x, pair.samples.y):
            closure[capture] = min(closure.get(capture, np.inf), worst)
    return closure
