"""How long the thread that captures has to wait before its next piece: for CPU, or for room in memory.

In: the budget of CPU, messages held and how many there is room for, resident memory and its ceiling. Out:
seconds. While there is no room nothing is taken in; where that lasts, the older half of the messages goes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from dpuflow.agent.usage import Memory, memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.budget import Budget

BRINK: Final = 0.96
"""Of the ceiling of memory: a piece of packets and what an analysis may yet take fit above it."""
LOOK_S: Final = 0.02
PATIENCE_S: Final = 2.0
"""For an analysis to let go of what it needs no more."""


class Pace:
    """Asked by the thread that captures. ``room``: messages there is room for; ``memory``: bytes allowed."""

    def __init__(
        self, budget: Budget, held: Callable[[], int], shed: Callable[[], None], room: int, memory: int
    ) -> None:
        """``shed`` lets go of what is oldest."""
        self.room, self.memory = room, memory
        self.peak = Memory()  # the most that there was since somebody set it back
        self._budget, self._held, self._shed = budget, held, shed
        self._full_s: float | None = None  # since when there is no room
        self._asked_s = time.monotonic()
        self._waits = False
        self._waited_s = 0.0

    def __call__(self) -> float:
        """Seconds to wait; 0 where the next piece may be taken at once."""
        now_s = time.monotonic()
        if self._waits:
            self._waited_s += now_s - self._asked_s
        room_s = self._room_wait(now_s)
        self._asked_s, self._waits = now_s, room_s > 0
        return max(self._budget.capture_wait(), room_s)

    def take_waited(self) -> float:
        """For how many seconds it had to wait for room since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _room_wait(self, now_s: float) -> float:
        resident, own = memory()
        self.peak = Memory(max(self.peak.resident, resident), max(self.peak.own, own))
        if self._held() < self.room and resident < BRINK * self.memory:
            self._full_s = None
            return 0.0
        if self._full_s is None:
            self._full_s = now_s
        if now_s - self._full_s >= PATIENCE_S:
            self._full_s = now_s
            self._shed()
        return LOOK_S
