"""The ceiling of CPU as credit: it grows with time, whatever the process uses is taken from it.

In: a share of one core. Out: how long capturing and analysing have to wait before their next piece of work.
What a piece costs is known only afterwards, so either may owe, and waits until that is paid: over any span of
time the process uses no more than share x span + CREDIT_S x share + the costliest piece of each, and over
long spans the share, whatever a piece costs. What else runs (API, metrics, log) is taken from the same
credit, but leaves them LEAST of it: more than that is owed by ``others``, and said.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANALYSIS_SHARE: Final = 0.6
"""Of the credit, what analysing may take; capturing has the rest, and what analysing leaves."""
CREDIT_S: Final = 0.25
"""Unused credit is kept for so long: a burst after idleness may take a core for this times the share."""
LEAST: Final = 0.25
"""Of the credit, what capturing and analysing have at least, whatever the rest of the process takes."""


class Budget:
    """Credit of two threads, one that captures and one that analyses. Safe to be asked from both."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.beside: Callable[[], float] = lambda: 0.0
        """CPU seconds of processes that belong to this one."""
        self.capture_s = 0.0
        """CPU seconds that the thread that captures has used in all."""
        self._lock = threading.Lock()
        self._now_s, self._process_s = time.monotonic(), time.process_time()
        self._told_s = 0.0  # of the process's CPU since then, what capture and analysis have accounted for
        self._capture = self._analysis = 0.0  # credit in CPU seconds; below 0: owed
        self._others = 0.0  # owed by the rest of the process
        self._analysing = False
        self._capture_thread_s: float | None = None

    def used_s(self) -> float:
        """CPU seconds that all of it has used."""
        return time.process_time() + self.beside()

    def capture_wait(self) -> float:
        """How many seconds capturing has to wait; to be asked by its thread before each piece of work."""
        used_s = time.thread_time()
        with self._lock:
            if self._capture_thread_s is not None:
                spent = used_s - self._capture_thread_s
                self._capture -= spent
                self._told_s += spent
                self.capture_s += spent
            self._capture_thread_s = used_s
            self._earn()
            return max(-self._capture, 0.0) / ((1 - ANALYSIS_SHARE) * self.share)

    @contextmanager
    def analysing(self) -> Iterator[None]:
        """Account for what this thread uses within the block."""
        with self._lock:
            self._earn()
            self._analysing = True
        used_s = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - used_s
            with self._lock:
                self._analysis -= spent
                self._told_s += spent
                self._analysing = False
                self._earn()

    def analysis_wait(self) -> float:
        """How many seconds analysing has to wait."""
        with self._lock:
            self._earn()
            return max(-self._analysis, 0.0) / (ANALYSIS_SHARE * self.share)

    def forgive(self) -> None:
        """Begin anew, owing nothing: what starting up has cost is no reason to be blind afterwards."""
        with self._lock:
            self._earn()
            self._capture, self._analysis = max(self._capture, 0.0), max(self._analysis, 0.0)
            self._others = 0.0

    def overdrawn(self) -> bool:
        """Whether the rest of the process alone takes so much that the ceiling is not kept."""
        return self._others > self.share

    def _earn(self) -> None:
        """Credit for the time since the last call, less what the rest of the process used."""
        now_s = time.monotonic()
        earned = (now_s - self._now_s) * self.share
        self._now_s = now_s
        if not self._analysing:  # else the analysis's own use could not be told from the rest
            process_s = self.used_s()
            self._others += process_s - self._process_s - self._told_s
            self._process_s, self._told_s = process_s, 0.0
            paid = min(self._others, (1 - LEAST) * earned)
            self._others -= paid
            earned -= paid
        analysis = self._analysis + ANALYSIS_SHARE * earned
        capture = self._capture + (1 - ANALYSIS_SHARE) * earned
        room = CREDIT_S * self.share
        # What one has no room for the other may have.
        spare = max(analysis - ANALYSIS_SHARE * room, 0.0)
        analysis, capture = analysis - spare, capture + spare
        spare = max(capture - (1 - ANALYSIS_SHARE) * room, 0.0)
        self._capture = capture - spare
        self._analysis = min(analysis + spare, ANALYSIS_SHARE * room)
