"""The clocks of several vantage points against one: trusted and checked, or estimated.

In: for pairs of captures the times at which each saw the same packets, in both directions. Out: one
Clock a capture and the map from its times to the reference's. Pairs are fitted by ``envelope``; the
graph of pairs is solved by the tightest paths, then by least squares, so that loops close.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.envelope import USUAL_DRIFT, Line, fit_line, fit_lines
from dpuflow.errors import OptionError
from dpuflow.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.tables import CaptureInfo

    Ints = np.typing.NDArray[np.int64]

MODES: Final = ("auto", "trust", "estimate")
NEIGHBOURS: Final = 8  # pairs of a capture that are fitted; more cost time and add little
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
    """local = reference + offset_ns + drift * (reference - origin_ns), in pieces.

    ``offset_ns`` and ``drift`` are those of the first piece. ``later``: where each further piece begins on
    the reference clock, its offset there and its drift.
    """

    origin_ns: int
    offset_ns: int = 0
    drift: float = 0.0
    later: list[tuple[int, int, float]] = field(default_factory=list)

    @property
    def pieces(self) -> list[tuple[int, int, float]]:
        """Where each begins (the first: its origin), offset there, drift."""
        return [(self.origin_ns, self.offset_ns, self.drift), *self.later]

    def to_reference(self, local_ns: Ints) -> Ints:
        """Times of this clock as times of the reference clock; NEVER stays NEVER."""
        if not self.offset_ns and not self.drift and not self.later:
            return local_ns
        out = _straight(local_ns, *self.pieces[0])
        for begin, offset, drift in self.later:  # where the clock was set back, the later piece holds
            after = local_ns >= begin + offset
            out[after] = _straight(local_ns[after], begin, offset, drift)
        return np.where(local_ns == np.iinfo(np.int64).min, local_ns, out)

    def offset_at(self, reference_ns: float) -> float:
        """Local minus reference at a time of the reference clock."""
        begin, offset, drift = self.pieces[0]
        for piece in self.later:
            if reference_ns >= piece[0]:
                begin, offset, drift = piece
        return offset + drift * (reference_ns - begin)

    def jumps(self) -> list[tuple[int, float]]:
        """Where one piece meets the next, and by how much its offset changes there, ns."""
        return [
            (after[0], after[1] - (before[1] + before[2] * (after[0] - before[0])))
            for before, after in pairwise(self.pieces)
        ]

    def mean_drift(self, start_ns: float, end_ns: float) -> float:
        """The drift over a time, steps left out."""
        begins = np.array([start_ns, *(min(max(p[0], start_ns), end_ns) for p in self.later), end_ns])
        length = np.diff(begins)
        drifts = np.array([p[2] for p in self.pieces])
        return float((length * drifts).sum() / length.sum()) if length.sum() > 0 else self.drift


def _straight(local_ns: Ints, origin_ns: int, offset_ns: int, drift: float) -> Ints:
    since = local_ns - (origin_ns + offset_ns)
    since -= np.rint(since * (drift / (1.0 + drift))).astype(np.int64)
    return np.asarray(since + origin_ns, np.int64)


@dataclass
class Clocks:
    """What ``tie_clocks`` found out. ``maps[c]`` is None for a capture that is not tied."""

    clocks: list[Clock]
    maps: list[ClockMap | None]
    reference: int
    slack_ns: int = 0  # the largest error of a clock while it shares packets
    limits: list[str] = field(default_factory=list)


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


def tie_clocks(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    mode: str,
    copies: Mapping[int, int] | None = None,
) -> Clocks:
    """Put all captures on the clock of the first that is tied to others.

    ``copies``: captures that were given twice, with the one each is a copy of; these have no samples.

    ``mode``: "trust": they are on one clock (checked); "estimate": offset and drift from the packets;
    "auto": trusted where the check passes. Raises OptionError for any other.
    """
    if mode not in MODES:
        raise OptionError(f"clock {mode!r} is none of {', '.join(MODES)}")
    checks = [check_pair(s) for s in samples]
    ties = [mode == "trust" or bool(s.forward.any() and not s.forward.all()) for s in samples]
    parts = _parts(len(infos), [s for s, tie in zip(samples, ties, strict=True) if tie])
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
        found.slack_ns = round(max(error.values()))
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
        _estimate(infos, [s for s in samples if s.x in home and s.y in home], maps, found)
        if mode == "auto":
            _say_why(found.clocks, checks)
    found.clocks[reference] = Clock(reference, True, "reference", 0, 0, 0, "")
    maps[reference] = ClockMap(origin)
    found.maps = maps
    for copy, first in (copies or {}).items():
        maps[copy] = maps[first]
        same = found.clocks[first]
        method = "trusted" if same.reference else same.method
        found.clocks[copy] = replace(
            same, capture=copy, reference=False, method=method, why="the same packets at the same times"
        )
        found.limits.append(
            f"{infos[copy].vantage} is a copy of {infos[first].vantage}: the same packets with the same time "
            "stamps. It counts once."
        )
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


def _say_why(clocks: Sequence[Clock], checks: Sequence[Check]) -> None:
    """Why the stamps were not taken as they are, in each estimated clock's ``why``."""
    early, packets = sum(c.early for c in checks), sum(c.packets for c in checks)
    for clock in clocks:
        if clock.method == "estimated":
            clock.why += (
                f"; as stamped, {early} of {packets} packets of two captures would arrive before they were "
                f"sent, by up to {max(c.worst_ns for c in checks) / 1000:.1f} us"
            )


def _failed(infos: Sequence[CaptureInfo], samples: Sequence[Samples], checks: Sequence[Check]) -> list[str]:
    return [
        f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} do not agree: {c.early} of {c.packets} "
        f"packets arrive before they were sent, by up to {c.worst_ns / 1000:.1f} us."
        for s, c in zip(samples, checks, strict=True)
        if not c.passes
    ]


def _parts(captures: int, samples: Sequence[Samples]) -> list[list[int]]:
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


def _nearest(
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


def _estimate(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    maps: list[ClockMap | None],
    found: Clocks,
) -> None:
    """Offsets along the surest paths first, then least squares over all pairs, twice."""
    info = infos[found.reference]
    reference, origin = found.reference, info.first_ns or 0
    chosen = _enough(len(infos), [s for s in samples if s.forward.any() and not s.forward.all()])
    pieces = [fit_lines(s.x_ns, s.y_ns, s.forward) for s in chosen]
    pairs = [(s, of) for s, of in zip(chosen, pieces, strict=True) if of]
    samples, lines = [s for s, _ in pairs], [of for _, of in pairs]
    doubts = _doubts(samples, lines)
    through = _nearest(reference, samples, doubts)[1]
    tied: dict[int, ClockMap] = {reference: ClockMap(origin)}
    for capture, number in through.items():  # in order of distance: the one before it is there
        if number >= 0:
            s, of = samples[number], lines[number]
            tied[capture] = _follow(tied[s.x], of) if capture == s.y else _follow_back(tied[s.y], of)
    for _ in range(2):
        refit = [_residual(s, tied[s.x], tied[s.y], origin) for s in samples]
        fits = [
            (s, r, doubt)
            for s, r, doubt in zip(samples, refit, doubts, strict=True)
            if r.broken <= BROKEN_SHARE
        ]
        closure = _adjust(fits, tied, reference)
    ends = (origin, info.last_ns or origin)
    beyond = [_beyond(of, r, origin, ends) for of, r in zip(lines, refit, strict=True)]
    error = _nearest(reference, samples, [r.width / 2 + b for r, b in zip(refit, beyond, strict=True)])[0]
    within = _nearest(reference, samples, [r.width / 2 for r in refit])[0]
    for capture in sorted(set(tied) - {reference}):
        place = maps[capture] = tied[capture]
        near = [r.span for s, r in zip(samples, refit, strict=True) if capture in (s.x, s.y)]
        span = min(t[0] for t in near) + origin, max(t[1] for t in near) + origin
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
    for s, r in zip(samples, refit, strict=True):
        if r.broken > BROKEN_SHARE:
            found.limits.append(
                f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} are not understood: "
                f"{100 * r.broken:.0f} % of the time contradicts what was found of them."
            )


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


def _doubts(samples: Sequence[Samples], lines: Sequence[list[Line]]) -> list[float]:
    """How far off each pair's lines may be, ns: half their widest strip, and what clocks may do meanwhile.

    While a pair shares no packets although its captures share some with others, its clocks may drift: the
    mean over all of their packets counts.
    """
    times: dict[int, list[Ints]] = {}
    for s in samples:
        times.setdefault(s.x, []).append(s.x_ns)
        times.setdefault(s.y, []).append(s.y_ns)
    every = {capture: np.sort(np.concatenate(parts)) for capture, parts in times.items()}
    doubts: list[float] = []
    for s, of in zip(samples, lines, strict=True):
        away = max(_mean_distance(every[c], own) for c, own in ((s.x, s.x_ns), (s.y, s.y_ns)))
        doubts.append(max(line.width for line in of) / 2 + USUAL_DRIFT * away)
    return doubts


def _mean_distance(every: Ints, own: Ints) -> float:
    """The mean time from those in ``every`` to the nearest in ``own``, ns."""
    own = np.sort(own)
    after = np.searchsorted(own, every)
    to_next = own[np.minimum(after, len(own) - 1)] - every
    to_last = every - own[np.maximum(after - 1, 0)]
    return float(np.minimum(np.abs(to_next), np.abs(to_last)).mean())


def _follow(at_x: ClockMap, lines: Sequence[Line]) -> ClockMap:
    """The map of y from that of x and the pieces of their difference."""
    begins = [line.origin_ns + round(line.span[0]) for line in lines[1:]]  # on x's clock
    ends = [begin + offset for begin, offset, _ in at_x.later]
    cuts = sorted({*begins, *ends})
    pieces = []
    for number in range(len(cuts) + 1):
        # Any time within the piece tells which pieces of both it is made of.
        since = cuts[number - 1] if number else (cuts[0] - 1 if cuts else lines[0].origin_ns)
        line = lines[bisect_right(begins, since)]
        begin, offset, drift = at_x.pieces[bisect_right(ends, since)]
        at_ns = begin if not number else begin + round((since - begin - offset) / (1 + drift))
        x_ns = at_ns + offset + round(drift * (at_ns - begin))
        shift = line.base_ns + round(line.offset + line.slope * float(x_ns - line.origin_ns))
        pieces.append((at_ns, x_ns - at_ns + shift, (1 + line.slope) * (1 + drift) - 1))
    return ClockMap(*pieces[0], pieces[1:])


def _follow_back(at_y: ClockMap, lines: Sequence[Line]) -> ClockMap:
    """The map of x from that of y."""
    return _follow(at_y, [_turned(line) for line in lines])


def _turned(line: Line) -> Line:
    """The same difference, x - y as a line over y's clock."""
    origin = line.origin_ns + line.base_ns + round(line.offset)
    slope = 1 / (1 + line.slope) - 1
    span = tuple(line.span[k] * (1 + line.slope) for k in (0, 1))
    return Line(origin, -line.base_ns - round(line.offset), 0.0, slope, line.width, (span[0], span[1]))


def _residual(s: Samples, x: ClockMap, y: ClockMap, origin: int) -> Line:
    """What is left between two captures after their maps, as a line over reference time from ``origin``."""
    line = fit_line(
        x.to_reference(s.x_ns),
        y.to_reference(s.y_ns),
        s.forward,
        0.0 if x.later or y.later else y.drift - x.drift,
    )
    assert line is not None  # packets went both ways
    ahead = float(line.origin_ns - origin)
    offset = line.base_ns + line.offset - line.slope * ahead
    return Line(origin, 0, offset, line.slope, line.width, (ahead, ahead + line.span[1]), line.broken)


def _adjust(
    fits: Sequence[tuple[Samples, Line, float]], tied: dict[int, ClockMap], reference: int
) -> dict[int, float]:
    """Least squares over all pairs, each with its doubt; changes ``tied``.

    Returns how far each capture's loops stay open, ns.
    """
    unknown = {c: n for n, c in enumerate(c for c in tied if c != reference)}
    size = len(unknown)
    if not size or not fits:
        return {}
    scale = max(abs(t) for _, line, _ in fits for t in line.span) or 1.0
    rows = np.zeros((2 * len(fits), 2 * size))
    right, weight = np.zeros(2 * len(fits)), np.zeros(2 * len(fits))
    for n, (s, line, doubt) in enumerate(fits):
        for end in (0, 1):
            t = line.span[end]
            for capture, sign in ((s.y, 1.0), (s.x, -1.0)):
                if capture in unknown:
                    rows[2 * n + end, 2 * unknown[capture]] = sign
                    rows[2 * n + end, 2 * unknown[capture] + 1] = sign * t / scale
            right[2 * n + end] = line.offset + line.slope * t
            weight[2 * n + end] = 1.0 / max(doubt, 1.0)
    rows *= weight[:, None]
    solved = np.linalg.lstsq(rows.T @ rows, rows.T @ (right * weight), rcond=None)[0]
    open_by = np.abs(rows @ solved - right * weight) / weight
    for capture, n in unknown.items():
        place = tied[capture]
        offset, drift = float(solved[2 * n]), float(solved[2 * n + 1]) / scale
        tied[capture] = ClockMap(
            place.origin_ns,
            place.offset_ns + round(offset),
            place.drift + drift,
            [
                (begin, old + round(offset + drift * (begin - place.origin_ns)), slope + drift)
                for begin, old, slope in place.later
            ],
        )
    closure: dict[int, float] = {}
    for n, (s, _, _) in enumerate(fits):
        worst = float(open_by[2 * n : 2 * n + 2].max())
        for capture in (s.x, s.y):
            closure[capture] = min(closure.get(capture, np.inf), worst)
    return closure
