"""Where exactly a clock was set: of all times that shared packets allow the one that its own stamps show.

In: clocks that were estimated, a pair's packets at a time (``clockgraph``). Out: the same maps, their steps
moved. A pair that shares few packets leaves room for a step between two of them, in which messages with
others would move by all of the step. The packets that the capture shares with any other narrow it, and a
clock that is set forth has no stamps for so long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.join.clockmap import ClockMap
from dpuflow.join.unwound import DISORDER_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpuflow.join.clockgraph import Clocks
    from dpuflow.join.clockmap import Samples

    Ints = np.typing.NDArray[np.int64]


def settle_steps(found: Clocks, samples: Sequence[Samples], stamps: Callable[[int], Ints]) -> None:
    """Move the steps of ``found.maps``; ``stamps``: a capture's, sorted, on its own clock."""
    for island in found.islands:
        for capture in island:
            place, error_ns = found.maps[capture], found.clocks[capture].tied_ns or 0
            least = max(2 * error_ns, DISORDER_NS)  # less may be a bend of a clock that is slewed
            if place is None or not any(abs(jump) > least for _, jump in place.jumps()):
                continue
            shared = _shared(capture, samples, found.maps)
            pieces = place.pieces
            for number, (_, jump) in enumerate(place.jumps(), 1):
                if abs(jump) > least:
                    paused = stamps(capture if jump > 0 else island[0])
                    begin = _begin(pieces, number, jump, shared, paused, error_ns)
                    was, offset, drift = pieces[number]
                    pieces[number] = begin, offset + round(drift * (begin - was)), drift
            if pieces == sorted(pieces):
                found.maps[capture] = ClockMap(*pieces[0], pieces[1:])


def _shared(
    capture: int, samples: Sequence[Samples], maps: Sequence[ClockMap | None]
) -> tuple[Ints, Ints, np.typing.NDArray[np.bool_]]:
    """Packets that it shares with any other capture: its stamps in order, the other's on the reference clock,
    and whether it was nearer their sender."""
    own, other, out = [], [], []
    for each in samples:
        for mine, its, mine_ns, its_ns, sent in (
            (each.x, each.y, each.x_ns, each.y_ns, each.forward),
            (each.y, each.x, each.y_ns, each.x_ns, ~each.forward),
        ):
            place = maps[its]
            if mine == capture and place is not None:
                own.append(mine_ns)
                other.append(place.to_reference(its_ns))
                out.append(sent)
    order = np.argsort(np.concatenate(own), kind="stable")
    return np.concatenate(own)[order], np.concatenate(other)[order], np.concatenate(out)[order]


def _begin(
    pieces: Sequence[tuple[int, int, float]],
    number: int,
    jump: float,
    shared: tuple[Ints, Ints, np.typing.NDArray[np.bool_]],
    paused: Ints,
    error_ns: int,
) -> int:
    """When piece ``number`` begins, on the reference clock."""
    own, other, out = shared
    begin, offset, _ = pieces[number]
    # By either piece: by how much each packet would have arrived before it was sent, and how long it took.
    # What is on the wrong side of a step did the one or took so long.
    early, took = [], []
    for piece in pieces[number - 1 : number + 1]:
        way = ClockMap(*piece).to_reference(own) - other
        early.append(np.maximum(np.where(out, way, -way) - error_ns, 0))
        took.append(np.abs(way))
    impossible, length_ns = (
        np.r_[0, np.cumsum(a)] + np.r_[np.cumsum(b[::-1])[::-1], 0] for a, b in (early, took)
    )
    possible = impossible == impossible.min()
    least = np.flatnonzero(possible & (length_ns == length_ns[possible].min()))
    edges = np.r_[min(begin + offset, own[0]), own, max(begin + offset, own[-1])]
    first, last = int(edges[least[0]]) + 1 - offset, int(edges[least[-1] + 1]) - offset
    # Between its ends a step leaves no stamps: none of this clock's, or none of the reference.
    shift = offset if jump > 0 else 0
    length = abs(round(jump))
    gaps = np.flatnonzero(np.diff(paused) >= length - error_ns)
    ends = np.maximum(paused[gaps] + length, paused[gaps + 1]) - shift
    ends = ends[(ends >= first) & (ends <= last)]
    begin = min(max(begin, first), last)
    return int(ends[np.argmin(np.abs(ends - begin))]) if len(ends) else begin
