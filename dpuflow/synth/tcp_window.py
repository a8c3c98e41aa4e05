"""TCP's congestion window, in segments: slow start, CUBIC, and how it shrinks while losses are sent again.

RFC 6928 (first window), RFC 9438 (CUBIC), RFC 6937 (proportional rate reduction): what Linux does.
"""

from __future__ import annotations

from math import inf
from typing import Final

FIRST: Final = 10.0
LEAST: Final = 2.0
BETA: Final = 0.7
"""What is left of the window after a loss."""
CURVE: Final = 0.4
"""CUBIC's C, segments a cubed second."""
FRIENDLY: Final = 3 * (1 - BETA) / (1 + BETA)
"""Segments a round trip by which CUBIC grows at least, as Reno would with this BETA."""


class Window:
    """How many segments may be on their way."""

    def __init__(self) -> None:
        self.size = FIRST
        self._threshold = inf
        self.until: int | None = None  # recovering: up to which segment; None: not
        self.slowly = False  # after a timeout: by slow start
        self._most = 0.0
        self._turn_s = 0.0  # CUBIC's K: when it is back at the window before the loss
        self._epoch_ns: float | None = None
        self._reno = 0.0
        self._delivered = self._sent = 0
        self._flight = 1

    def grow(self, delivered: int, now_ns: float, rtt_ns: float) -> None:
        """So many segments were acknowledged, and the window was what held the sender up."""
        if self.size < self._threshold:
            self.size = min(self.size + delivered, max(self._threshold, self.size))
            return
        if self._epoch_ns is None:
            self._epoch_ns = now_ns
            self._most = max(self._most, self.size)
            self._turn_s = ((self._most - self.size) / CURVE) ** (1 / 3)
            self._reno = self.size
        after_s = (now_ns - self._epoch_ns + rtt_ns) / 1e9 - self._turn_s
        self._reno += FRIENDLY * delivered / self.size
        wanted = max(self._most + CURVE * after_s**3, self._reno)
        if wanted > self.size:
            self.size += min(delivered * (wanted - self.size) / self.size, delivered / 2)

    def _cut(self) -> None:
        self._most, self._epoch_ns = self.size, None
        self._threshold = max(LEAST, self.size * BETA)

    def lose(self, until: int, flight: int) -> None:
        """Something is lost; all that was sent so far ends with segment ``until``."""
        self._cut()
        self.until, self.slowly = until, False
        self._delivered = self._sent = 0
        self._flight = max(1, flight)

    def time_out(self, until: int) -> None:
        """Nothing was acknowledged for the length of a timeout."""
        if not self.slowly:
            self._cut()
        self.until, self.slowly = until, True
        self.size = 1.0

    def again(self, segments: int) -> None:
        """So many were sent while recovering."""
        self._sent += segments

    def reduce(self, delivered: int, flight: int) -> None:
        """An acknowledgment while recovering; ``flight`` segments are thought to be on their way."""
        if self.slowly:
            self.size += delivered
            return
        self._delivered += delivered
        if flight > self._threshold:
            more = -(-self._delivered * self._threshold // self._flight) - self._sent
        else:
            more = min(self._threshold - flight, max(self._delivered - self._sent, delivered) + 1)
        self.size = flight + max(more, 0.0 if self._sent else 1.0)

    def recovered(self) -> None:
        """All is there."""
        if not self.slowly:
            self.size = self._threshold
        self.until = None
        self.slowly = False

    def rest(self, timeouts: float) -> None:
        """Nothing was sent for so many timeouts: what the network bears is not known any more (RFC 5681)."""
        while timeouts >= 1 and self.size > FIRST:
            self.size = max(FIRST, self.size / 2)
            timeouts -= 1
