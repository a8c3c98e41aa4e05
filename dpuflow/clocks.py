"""The clocks of several vantage points against one: trusted and checked, or estimated.

In: for pairs of captures the times at which each saw the same packets, in both directions. Out: one
Clock a capture and the map from its times to the reference's. Pairs are fitted by ``envelope``; the
graph of pairs is solved by the tightest paths, then by least squares, so that loops close.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.envelope import Line, fit_line
from dpuflow.errors import OptionError
from dpuflow.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

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
class Clocks:
    """What ``tie_clocks`` found out. ``maps[c]`` is None for a capture that is not tied."""

    clocks: list[Clock]
    maps: list[ClockMap | None]
    reference: int
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


def tie_clocks(infos: Sequence[CaptureInfo], samples: Sequence[Samples], mode: str) -> Clocks:
    """Put all captures on the clock of the first that is tied to others.

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
    maps: list[ClockMap | None],
    found: Clocks,
) -> None:
    """Offsets along the tightest paths first, then least squares over all pairs, twice."""
    reference, origin = found.reference, infos[found.reference].first_ns or 0
    both = [s for s in samples if s.forward.any() and not s.forward.all()]
    samples = _enough(len(infos), both)
    lines = [fit_line(s.x_ns, s.y_ns, s.forward) for s in samples]
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
    samples = [s for s in samples if s.x in tied and s.y in tied]
    for _ in range(2):
        refit = [_residual(s, tied[s.x], tied[s.y], origin) for s in samples]
        closure = _adjust(
            [(s, r) for s, r in zip(samples, refit, strict=True) if r is not None], tied, reference
        )
    error = _nearest(reference, samples, [None if r is None else r.width / 2 for r in refit])[0]
    for capture in sorted(set(tied) - {reference}):
        place = maps[capture] = tied[capture]
        near = [r.span for s, r in zip(samples, refit, strict=True) if r and capture in (s.x, s.y)]
        begin = min((t[0] for t in near), default=0.0) / 1e9
        end = max((t[1] for t in near), default=0.0) / 1e9
        found.clocks[capture] = Clock(
            capture,
            False,
            "estimated",
            place.offset_ns,
            round(place.drift * 1e9),
            round(max(error.get(capture, 0.0), closure.get(capture, 0.0))),
            f"from the least delays of packets both ways, {begin:.1f} to {end:.1f} s after the first "
            "packet of the reference; an uneven path cannot be seen",
        )
    for s, r in zip(samples, refit, strict=True):
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
    rows *= weight[:, None]
    solved = np.linalg.lstsq(rows.T @ rows, rows.T @ (right * weight), rcond=None)[0]
    open_by = np.abs(rows @ solved - right * weight) / weight
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
