"""Stamps that contradict the order of the file: packets that are stamped far from those around them.

In: the stamps of one block after another, in the file's order. Out: the same, but for those that cannot be,
which get the stamp of the packet before. A file has packets in order of time, but for noise. What leaves that
order and comes back is a wrong stamp; what leaves it and stays is a clock that was set, which ``join`` sees
to; a leap ahead that nothing takes back is a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.arrays import Bools, Ints

NOISE_NS: Final = 1_000_000_000
"""No queue or buffer of a capture holds packets back for longer."""
STAYS: Final = 32
"""More packets in a row than this on another time are on a clock that was set."""
_BACK: Final = 64  # runs of stamps, so many before one at most may be wrong
_FEW: Final = 32  # at an end, where nothing comes back, one in so many may be wrong


class FileOrder:
    """Follows the stamps of one file. ``wrong``: how many were replaced, the furthest by ``most_ns``.

    ``late``: (frame, its stamp, the right one) of packets that proved wrong once they had been passed on.
    """

    def __init__(self) -> None:
        self.wrong = self.most_ns = 0
        self.late: list[tuple[int, int, int]] = []
        self._last_ns: int | None = None  # of what is sure
        self._leapt: Ints = np.zeros(0, np.int64)  # stamps at the end of the last block, after a leap ahead
        self._frames: Ints = self._leapt  # their frames

    @property
    def unsure(self) -> int:
        """How many packets at the end of the last block may have leapt ahead wrongly."""
        return len(self._leapt)

    @property
    def last_ns(self) -> int | None:
        """The last stamp, once the file has ended: a leap that nothing has taken back was a pause."""
        return int(self._leapt.max()) if len(self._leapt) else self._last_ns

    def mend(self, times: NDArray[np.generic], first_frame: int, disordered: bool) -> None:
        """Replace in ``times``, one block's, those that cannot be; ``disordered``: some run backwards."""
        found: Ints = times.view(np.int64)
        before = self._last_ns
        if disordered or (before is not None and int(found[0]) < before - NOISE_NS):
            known = np.zeros(0, np.int64) if before is None else np.full(STAYS + 1, before)
            every = np.concatenate([known, self._leapt, found])
            bad = astray(every)
            if bad.any():
                self._replace(every, bad, len(known), found)
        leapt = _leap(found)
        self._leapt = found[len(found) - leapt :].copy()
        self._frames = first_frame + np.arange(len(found) - leapt, len(found))
        if leapt < len(found):
            self._last_ns = int(found[len(found) - leapt - 1])

    def _replace(self, every: Ints, bad: Bools, known: int, found: Ints) -> None:
        sure = np.maximum.accumulate(np.where(bad, -1, np.arange(len(every))))
        sure[sure < 0] = int(np.argmin(bad))  # nothing is sure before: the first that is
        right = every[sure]
        off = np.abs(every - right)[bad]
        self.wrong += len(off)
        self.most_ns = max(self.most_ns, int(off.max()))
        ends = known + len(self._leapt)
        for at in np.flatnonzero(bad[known:ends]).tolist():
            self.late.append((int(self._frames[at]), int(every[known + at]), int(right[known + at])))
        found[:] = right[ends:]


def _leap(times: Ints) -> int:
    """How many packets at the end, ``STAYS`` at most, come after a leap ahead."""
    tail = times[-STAYS - 1 :]
    if int(tail[-1]) - int(tail[0]) <= NOISE_NS:
        return 0
    leaps = np.flatnonzero(np.diff(tail) > NOISE_NS)
    return len(tail) - 1 - int(leaps[0]) if len(leaps) else 0


def astray(times: Ints) -> Bools:
    """Which stamps contradict the order: the fewest without which it holds, but for clocks that were set."""
    bad = np.zeros(len(times), bool)
    steps = np.diff(times)
    if not len(steps) or int(steps.min()) >= -NOISE_NS:
        return bad
    starts = np.r_[0, np.flatnonzero(np.abs(steps) > NOISE_NS) + 1]
    sizes = np.diff(np.r_[starts, len(times)])
    ends = np.maximum.reduceat(times, starts)
    stay = np.flatnonzero(sizes > STAYS)
    set_back = times[starts[stay[1:]]] < ends[stay[:-1]] - NOISE_NS
    cuts = np.r_[0, stay[1:][set_back], len(starts)]
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        if high - low < 2:
            continue
        out = ~_longest(times[starts[low:high]], ends[low:high], sizes[low:high])
        left = int(sizes[low:high][~out].sum())
        if int(sizes[low:high][out].sum()) > left:
            continue  # no order to speak of
        inner = np.flatnonzero(~out)
        for at in np.flatnonzero(out).tolist():
            first, size = int(starts[low + at]), int(sizes[low + at])
            if inner[0] < at < inner[-1] or _FEW * size <= left:
                bad[first : first + size] = True
    return bad


def _longest(starts: Ints, ends: Ints, sizes: Ints) -> Bools:
    """The runs of stamps that follow each other in time and have most packets; a leap costs half a one."""
    total = sizes.astype(np.float64)
    reach = ends.copy()
    before = np.full(len(starts), -1)
    for at in range(1, len(starts)):
        low = max(0, at - _BACK)
        gaps = starts[at] - reach[low:at]
        worth = np.where(gaps >= -NOISE_NS, total[low:at] - 0.5 * (gaps > NOISE_NS), 0.0)
        best = int(np.argmax(worth))
        if worth[best] > 0:
            before[at] = low + best
            total[at] += worth[best]
            reach[at] = max(reach[at], reach[low + best])
    kept = np.zeros(len(starts), bool)
    at = int(np.argmax(total))
    while at >= 0:
        kept[at] = True
        at = int(before[at])
    return kept
