"""The clock of a simulated world: what happens when, in order of time and, at one time, of being planned."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Engine:
    """Plans calls and makes them in order. Times are nanoseconds (float) from the start of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, time_ns: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at ``time_ns``, which must not lie in the past."""
        self._planned += 1
        heappush(self._heap, (time_ns, self._planned, call, args))

    def run(self) -> None:
        """Until nothing is planned any more."""
        heap = self._heap
        while heap:
            self.now, _, call, args = heappop(heap)
            call(*args)
