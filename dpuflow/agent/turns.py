"""Who is answered when: so many requests of one address, and so much CPU for all that one listener does.

In: connections, requests, and the CPU they took. Out: waiting. Of one address requests beyond a rate wait for
their turn, those far beyond it are refused (429), and connections beyond it closed. What takes CPU beyond the
listener's share of ``limits.cpu``, handshakes included, has its thread rest until that is paid; what one rest
does not pay has requests refused, too. So nobody who reaches the agent can have the capture give up detail,
and who asks little is answered beside who asks much.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE: Final = "dpuflow.share"
"""In a request's scope: whose CPU it takes."""
BEGUN: Final = "dpuflow.begun"
"""There, once a call has been handed to another thread for it."""
SPENT: Final = "the API has used up its share of limits.cpu"
WAIT_S: Final = 2.0
"""For its turn a request waits so long at most, and before it is refused."""
ADDRESSES: Final = 4096
"""So many are remembered; one of which nothing was heard for longer may ask a burst again."""
CREDIT_S: Final = 10.0
"""A share that was not used is kept for so long: a page that asks for much at once has it."""
REST_S: Final = 1.0
"""At a time: the thread has clients to hear. What is owed beyond that is paid by the next rests."""


class Turns:
    """``rate`` requests or connections a second of an address, ``burst`` of them at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._next_s: OrderedDict[str, float] = OrderedDict()

    def wait(self, host: str, now_s: float, most_s: float = WAIT_S) -> float | None:
        """Seconds until what came now has its turn; None, and not counted, if that is over ``most_s``."""
        at_s = max(self._next_s.pop(host, 0.0), now_s - (self.burst - 1) / self.rate)
        wait_s = max(round(at_s - now_s, 6), 0.0)  # of times since a boot long ago
        refused = wait_s > most_s
        self._next_s[host] = at_s if refused else at_s + 1 / self.rate
        if len(self._next_s) > ADDRESSES:
            self._next_s.popitem(last=False)
        return None if refused else wait_s


class Share:
    """CPU of a thread that serves, and of calls that it hands to others, as a share of a core."""

    def __init__(self, share: Callable[[], float]) -> None:
        self._share = share
        self._credit_s = CREDIT_S * share()
        self._now_s = time.monotonic()
        self._used_s: float | None = None
        self._lock = threading.Lock()
        self._handed_s = self._seen_s = 0.0  # by threads that were handed calls: in all, and at the last look

    def look(self) -> None:
        """To be called by the serving thread before each piece of work: rest while anything is owed."""
        share, used_s, now_s = self._share(), time.thread_time() + self._handed_s, time.monotonic()
        spent_s = 0.0 if self._used_s is None else used_s - self._used_s
        earned_s = (now_s - self._now_s) * share
        self._credit_s = min(self._credit_s + earned_s, CREDIT_S * share) - spent_s
        self._used_s, self._now_s, self._seen_s = used_s, now_s, self._handed_s
        if self._credit_s < 0:
            time.sleep(min(-self._credit_s / share, REST_S))

    def count(self, spent_s: float) -> None:
        """A call that was handed to another thread has taken so much."""
        with self._lock:
            self._handed_s += spent_s

    def owes(self) -> bool:
        """More than a rest pays, as after a scrape of many pairs by a small share; any thread may ask."""
        share = self._share()
        earned_s = (time.monotonic() - self._now_s) * share
        return self._credit_s + earned_s - (self._handed_s - self._seen_s) < -REST_S * share
