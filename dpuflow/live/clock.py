"""The kernel's monotonic clock, in which packets are stamped, against wall time and TAI.

CLOCK_MONOTONIC runs at the same rate as CLOCK_REALTIME, corrections by NTP and PTP included, and never jumps:
their difference changes only when somebody sets the wall clock (clock_gettime(2)). Stamps are therefore wall
time as it was when the capture began, and a later step is told, not followed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

_TRIES: Final = 20
STEP_NS: Final = 1_000_000  # far above the error of a reading, far below what stepping a clock is done for


@dataclass(frozen=True)
class ClockReading:
    """Wall time and TAI minus the monotonic clock; ``error_ns`` is half of the time the reading took."""

    real_ns: int
    tai_ns: int
    error_ns: int


def read_clocks() -> ClockReading:
    """The quickest of some readings, as that one was least disturbed."""
    best: ClockReading | None = None
    for _ in range(_TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        real = time.clock_gettime_ns(time.CLOCK_REALTIME)
        tai = time.clock_gettime_ns(time.CLOCK_TAI)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        middle, error = (before + after) // 2, (after - before + 1) // 2
        if best is None or error < best.error_ns:
            best = ClockReading(real - middle, tai - middle, error)
    assert best is not None
    return best


class StampClock:
    """The offset that stamps get, and whether the wall clock has been set since."""

    stepped = "timestamps keep to the old time"

    def __init__(self) -> None:
        self.start = read_clocks()
        self.last = self.start

    def check(self) -> int:
        """How far the wall clock has been set since the start, in ns; 0 within the readings' noise."""
        self.last = read_clocks()
        step = self.last.real_ns - self.start.real_ns
        return step if abs(step) > self.noise_ns else 0

    @property
    def noise_ns(self) -> int:
        """What two readings may differ by while nobody sets the clock."""
        return STEP_NS + self.start.error_ns + self.last.error_ns

    def text(self) -> str:
        """How stamps relate to wall time, for the file."""
        return (
            f"clock: CLOCK_MONOTONIC + {self.start.real_ns} ns, which was CLOCK_REALTIME within"
            f" {self.start.error_ns} ns at the start; {self._ahead()}"
        )

    def _ahead(self) -> str:
        seconds = round((self.start.tai_ns - self.start.real_ns) / 1e9)
        return f"TAI is {seconds} s ahead of it{'' if seconds else ' (not set in the kernel)'}"


class WallClock(StampClock):
    """The same where the kernel stamps with CLOCK_REALTIME, which follows whoever sets it."""

    stepped = "so did the timestamps"

    def text(self) -> str:
        """How stamps relate to wall time, for the file."""
        return f"clock: CLOCK_REALTIME, by the kernel; {self._ahead()}"
