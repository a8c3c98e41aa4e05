"""A bounded set of label values: which peers and groups have series of their own, and which share "other"."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Key = TypeVar("Key", bound="tuple[str, ...]")

OTHER: Final = "other"

IDLE_S: Final = 600.0
"""How long a name that was not seen keeps its place: twice Prometheus' look-back (5 min), so that a series
which returns is not taken for one that went on, and names do not take turns within the window of a rate()."""


class Bounded(Generic[Key]):
    """At most ``most`` keys hold a place at a time.

    A new key gets a free place, or that of the key not seen for longest if that one has been idle for
    ``idle_s``; otherwise it counts as "other" until a place is free. So no series falls: a key that gives
    up its place takes its series along (its counts are not added to "other", where they would look like
    traffic of that moment), and one that returns starts at 0, which Prometheus takes for a restart.
    """

    def __init__(
        self,
        most: int,
        forget: Callable[[Key], None],
        idle_s: float = IDLE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self._forget = forget
        self._idle_s = idle_s
        self._now = now
        self._seen: OrderedDict[Key, float] = OrderedDict()  # the one not seen for longest first
        self.evicted = 0

    def place(self, key: Key) -> Key | None:
        """``key`` where it holds a place, which counts as seeing it; None where it counts as "other"."""
        now = self._now()
        if key not in self._seen and len(self._seen) >= self.most:
            oldest = next(iter(self._seen), None)
            if oldest is None or now - self._seen[oldest] < self._idle_s:
                return None
            del self._seen[oldest]
            self._forget(oldest)
            self.evicted += 1
        self._seen[key] = now
        self._seen.move_to_end(key)
        return key

    def __contains__(self, key: object) -> bool:
        return key in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._seen))
