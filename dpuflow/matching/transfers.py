"""NCCL's transfers from one rank to another: parts that go side by side over several channels are one.

In: the parts that each connection carries (``parts``). Out: the transfers of each pair of endpoints, in order
of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.matching.parts import ALIKE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.parts import Parts
    from dpuflow.matching.streams import Edge

    Ints = NDArray[np.int64]


class Transfers(NamedTuple):
    """The transfers from one endpoint to another within one communicator, in order; arrays are parallel."""

    edge: Edge
    rows: list[Ints]  # EXCHANGE rows of each
    start_ns: Ints
    end_ns: Ints  # all of it had arrived
    size: Ints
    whole: NDArray[np.bool_]  # neither end is cut off by the capture
    next_ns: Ints  # first entry for the transfer after it; NEVER where there is none
    begun: bool  # seen from the connection's first message on

    def part(self, low: int, high: int) -> Transfers:
        """Those from number ``low`` to before ``high``."""
        return Transfers(
            self.edge,
            self.rows[low:high],
            self.start_ns[low:high],
            self.end_ns[low:high],
            self.size[low:high],
            self.whole[low:high].copy(),
            self.next_ns[low:high],
            self.begun,
        )


def transfers_of(lanes: Sequence[Parts]) -> list[Transfers]:
    """What connections from one endpoint to another carry: parts that go side by side are one transfer."""
    left = sorted(lanes, key=lambda lane: (-len(lane.start_ns), int(lane.start_ns[0])))
    found: list[Transfers] = []
    while left:
        base, rest = left[0], []
        merged = [(base, np.arange(len(base.start_ns)))]
        for lane in left[1:]:
            turn = _beside(lane, base)
            if turn is None:
                rest.append(lane)
            else:
                merged.append((lane, turn))
        found.append(_whole(merged))
        left = rest
    return found


def _beside(lane: Parts, base: Parts) -> Ints | None:
    """For each part of ``lane`` that of ``base`` which it goes beside; None where they do not go together."""
    if len(lane.start_ns) == len(base.start_ns):
        turn = np.arange(len(lane.start_ns))
        over = _overlap(lane, base, turn)
        # A channel that waits for an ACK that was lost falls behind the others by as much as slots hold.
        if (lane.lossy or base.lossy) and 2 * (over >= 0).sum() > len(over):
            return turn
    else:
        later = np.searchsorted(base.start_ns, lane.start_ns)
        tries = np.stack([np.clip(later + k, 0, len(base.start_ns) - 1) for k in (-1, 0)])
        over = np.stack([_overlap(lane, base, turn) for turn in tries])
        best = np.argmax(over, axis=0)
        turn, over = tries[best, np.arange(len(best))], over.max(axis=0)
        if (np.diff(turn) <= 0).any():
            return None
    return turn if (over >= 0).mean() >= ALIKE else None


def _overlap(lane: Parts, base: Parts, turn: Ints) -> Ints:
    """How long each part was under way together with that of ``base``, ns; below 0 where not at all."""
    start = np.maximum(lane.start_ns, base.start_ns[turn])
    return np.asarray(np.minimum(lane.end_ns, base.end_ns[turn]) - start, np.int64)


def _whole(merged: Sequence[tuple[Parts, Ints]]) -> Transfers:
    """Transfers of parts that go together, each with its place among the transfers."""
    base = merged[0][0]
    begun = all(int(lane.number[0]) == 1 for lane, _ in merged)
    count = len(base.start_ns)
    start, end = base.start_ns.copy(), base.end_ns.copy()
    size, whole, following = base.size.copy(), base.whole.copy(), base.next_ns.copy()
    rows = [[base.piece(k)] for k in range(count)]
    for lane, turn in merged[1:]:
        np.minimum.at(start, turn, lane.start_ns)
        np.maximum.at(end, turn, lane.end_ns)
        np.add.at(size, turn, lane.size)
        whole[turn] &= lane.whole
        for number, place in enumerate(turn.tolist()):
            rows[place].append(lane.piece(number))
    together = [np.sort(np.concatenate(each)) if len(each) > 1 else each[0] for each in rows]
    return Transfers(base.edge, together, start, end, size, whole, following, begun)
