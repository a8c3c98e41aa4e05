"""What a clock's times are on another: packets that two captures share in, a map in pieces out."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.join.envelope import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    Ints = np.typing.NDArray[np.int64]


class Samples(NamedTuple):
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

    def moved(self, offset_ns: float, drift: float) -> ClockMap:
        """A clock that is so much ahead of this one at its origin, and runs so much faster."""
        later = [
            (begin, old + round(offset_ns + drift * (begin - self.origin_ns)), slope + drift)
            for begin, old, slope in self.later
        ]
        return ClockMap(self.origin_ns, self.offset_ns + round(offset_ns), self.drift + drift, later)

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


def follow(at_x: ClockMap, lines: Sequence[Line]) -> ClockMap:
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


def follow_back(at_y: ClockMap, lines: Sequence[Line]) -> ClockMap:
    """The map of x from that of y."""
    return follow(at_y, [_turned(line) for line in lines])


def _turned(line: Line) -> Line:
    """The same difference, x - y as a line over y's clock."""
    origin = line.origin_ns + line.base_ns + round(line.offset)
    slope = 1 / (1 + line.slope) - 1
    span = tuple(line.span[k] * (1 + line.slope) for k in (0, 1))
    return Line(origin, -line.base_ns - round(line.offset), 0.0, slope, line.width, (span[0], span[1]))
