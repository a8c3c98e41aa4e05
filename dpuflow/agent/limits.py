"""Ceilings of CPU and memory: what the agent uses in, how much detail to take in and how often to look out.

Detail goes step by step: packets, then messages folded in the kernel, then sampling by pairs of hosts, half
as many with each step. It comes back the same way after some time with room to spare, and each time that was
too early the next try waits twice as long. Besides, two hard stops that need no deciding: the thread that
captures waits when it has used its share (the ring then overflows, which is counted), or when more messages
are held than memory has room for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.config import Limits as Settings

ROW_BYTES: Final = 1500
"""Memory that a message held takes, analysis included: MESSAGE twice, TRANSFER, EXCHANGE and indices."""
BASE_BYTES: Final = 200 << 20
"""What the agent takes before it holds anything: interpreter, NumPy, kernels, API, a ring not full."""
FEWEST_MESSAGES: Final = 2000
ANALYSIS_SHARE: Final = 0.6
"""Of the CPU ceiling, what analysing may take; capturing has the rest, and what analysing leaves."""
FULL: Final = 0.5
"""A ring this full is on its way to losing packets."""
SPARE: Final = 0.5
"""Detail comes back only below this share of the ceilings: taking in twice as much must fit."""
SLICE_S: Final = 0.1
LONGEST_RECOVERY: Final = 16  # times the configured time
SHORTEST_SPAN_S: Final = 2.0


@dataclass(frozen=True)
class Use:
    """What was used since the last look: shares of one core; ``ring``: the fullest that the ring was."""

    cpu: float
    capture_cpu: float
    rss: int
    ring: float
    lost: int  # packets that the ring had no room for
    waited: bool  # the capture had to wait


@dataclass(frozen=True)
class Orders:
    """What is to be taken in, and how much of it held. ``reason`` says why that is less than configured."""

    mode: str
    sample: int
    span_s: float
    most: int  # messages held
    reason: str | None


class Governor:
    """Decides on detail. ``look`` is to be called about once a second."""

    def __init__(self, settings: Settings, mode: str, sample: int, span_s: float, folds: bool) -> None:
        """``mode`` and ``sample`` as configured; ``folds``: the backend has messages mode."""
        self.settings = settings
        levels = [(mode, sample)]
        if mode == "packets" and folds:
            levels.append(("messages", sample))
        folded = levels[-1][0]
        levels += [(folded, k) for k in range(sample + 1, max(settings.max_sample, sample) + 1)]
        self._levels = levels
        self._level = 0
        self._span_s = self._full_span_s = span_s
        self._why = ""
        self._strained_s = 0.0  # for how long there has been too little
        self._easy_s = 0.0  # for how long there has been room to spare
        self._wait_s = settings.recover
        self._since_eased_s = float("inf")

    @property
    def orders(self) -> Orders:
        """As things stand."""
        mode, sample = self._levels[self._level]
        parts = []
        if self._level:
            kept = mode if not sample else f"one in {1 << sample} pairs of hosts"
            parts.append(f"{self._why}: {kept} only")
        if self._span_s < self._full_span_s:
            parts.append(f"memory is short: {self._span_s:g} s of traffic are held")
        room = max(self.settings.memory - BASE_BYTES, 0) // ROW_BYTES
        return Orders(mode, sample, self._span_s, max(room, FEWEST_MESSAGES), "; ".join(parts) or None)

    def look(self, use: Use, seconds: float) -> Orders:
        """Take in what was used during the last ``seconds``, and say what to do."""
        self._since_eased_s += seconds
        memory = use.rss / self.settings.memory
        short = self._strain(use)
        if memory > 0.9 and self._span_s > SHORTEST_SPAN_S:
            self._span_s = max(self._span_s / 2, SHORTEST_SPAN_S)
            self._easy_s = 0.0
        elif memory > 1.0:
            short = f"{use.rss >> 20} MiB of memory are used, {self.settings.memory >> 20} allowed"
        if short is not None:
            self._strained_s += seconds
            self._easy_s = 0.0
            if self._strained_s >= 2.0 or use.lost:
                self._give_up(short)
            return self.orders
        self._strained_s = 0.0
        easy = use.cpu < SPARE * self.settings.cpu and memory < 0.75 and use.ring < FULL / 2
        self._easy_s = self._easy_s + seconds if easy else 0.0
        if self._easy_s >= self._wait_s and (self._level or self._span_s < self._full_span_s):
            self._ease()
        return self.orders

    def _strain(self, use: Use) -> str | None:
        """What there is too much of, if anything."""
        if use.lost:
            return f"the ring lost {use.lost} packets"
        if use.waited:
            return f"capturing wants more than {self.settings.cpu:.0%} of a core"
        if use.ring > FULL:
            return f"the ring was {use.ring:.0%} full"
        if use.cpu > 1.1 * self.settings.cpu and use.capture_cpu > (1 - ANALYSIS_SHARE) * self.settings.cpu:
            return f"{use.cpu:.0%} of a core are used, {self.settings.cpu:.0%} allowed"
        return None

    def _give_up(self, why: str) -> None:
        """One step less of detail."""
        self._strained_s = 0.0
        if self._level + 1 >= len(self._levels):
            return
        self._level += 1
        self._why = why
        if self._since_eased_s < 2 * self._wait_s:  # what came back was too much
            self._wait_s = min(2 * self._wait_s, LONGEST_RECOVERY * self.settings.recover)

    def _ease(self) -> None:
        """One step more of detail."""
        self._easy_s = 0.0
        if self._span_s < self._full_span_s:
            self._span_s = min(2 * self._span_s, self._full_span_s)
            return
        self._level -= 1
        self._since_eased_s = 0.0
        if self._level == 0:
            self._why = ""


class Pace:
    """Keeps the thread that captures within its share of a core, and of memory; called after each piece."""

    def __init__(self, share: float, held: Callable[[], int], most: int) -> None:
        self.share, self.most = share, most
        self._held = held
        self._slice_s = 0.0
        self._used_s = 0.0
        self.waited = False
        self.used_s = 0.0  # CPU of that thread in all

    def __call__(self) -> None:
        """Wait if the share of this slice of time is used up."""
        now_s, used_s = time.monotonic(), time.thread_time()
        self.used_s = used_s
        if now_s - self._slice_s >= SLICE_S:
            self._slice_s, self._used_s = now_s, used_s
        elif used_s - self._used_s > self.share * SLICE_S:
            self.waited = True
            time.sleep(max(self._slice_s + SLICE_S - now_s, 0.0))
        tries = 0
        while self._held() > 2 * self.most and tries < 100:
            self.waited = True
            time.sleep(0.02)
            tries += 1


def pause_after(analysis_s: float, share: float, step_s: float) -> float:
    """How long after the beginning of an analysis that took ``analysis_s`` of CPU the next one may begin."""
    return max(step_s, analysis_s / max(ANALYSIS_SHARE * share, 1e-3))
