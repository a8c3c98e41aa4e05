"""Congestion: marks by queue length, and a sender's rate after congestion notifications (DCQCN).

Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015: marking as RED does,
at most one CNP every 50 us and flow, rate cut by alpha / 2, fast recovery and additive increase by timer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from random import Random

CNP_NS: Final = 50_000.0
"""Between two CNPs of one flow, at least (the paper's N)."""
TIMER_NS: Final = 55_000.0
"""Between two steps up (the paper's T)."""
FAST: Final = 5
"""Steps of fast recovery before the target itself rises (the paper's F)."""
GAIN: Final = 1.0 / 256
"""Of alpha (the paper's g)."""
RISE: Final = 0.01
"""Additive increase as a share of the line rate (assumed)."""
SLOWEST: Final = 0.001
"""No flow gets slower than this share of the line rate."""


class Marking(NamedTuple):
    """A switch port's thresholds: below ``low_bytes`` no packet is marked, above ``high_bytes`` all are."""

    low_bytes: float
    high_bytes: float
    most: float  # share marked just below ``high_bytes``

    def marks(self, queued_bytes: float, packets: int, random: Random) -> int:
        """How many of ``packets`` are marked on reaching a queue of so many bytes."""
        if queued_bytes <= self.low_bytes:
            return 0
        if queued_bytes >= self.high_bytes:
            return packets
        share = self.most * (queued_bytes - self.low_bytes) / (self.high_bytes - self.low_bytes)
        return min(packets, int(packets * share + random.random()))


class Rate:
    """What DCQCN allows a flow, as a share of its line's rate."""

    def __init__(self) -> None:
        self.now = self._target = self._alpha = 1.0
        self._steps = 0
        self.cuts = 0

    def cut(self) -> None:
        """A CNP came."""
        self.cuts += 1
        self._target = self.now
        self._alpha = (1.0 - GAIN) * self._alpha + GAIN
        self.now = max(SLOWEST, self.now * (1.0 - self._alpha / 2))
        self._steps = 0

    def rise(self) -> bool:
        """A timer's step up; False when the line's rate is reached."""
        self._alpha *= 1.0 - GAIN
        self._steps += 1
        if self._steps > FAST:
            self._target = min(1.0, self._target + RISE)
        self.now = (self.now + self._target) / 2
        if self.now > 0.995:
            self.now = 1.0
        return self.now < 1.0
