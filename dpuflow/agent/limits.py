"""Ceilings of CPU and memory: what the agent uses in, how much detail to take in and how often to look out.

Detail goes step by step: packets, then messages folded in the kernel, then sampling by pairs of hosts, half
as many with each step. It comes back the same way after some time with room to spare, and each time that was
too early the next try waits twice as long. Besides, two hard stops that need no deciding: whoever
owes CPU waits (``Budget``; a ring that overflows meanwhile is counted), and so does the capture when more
messages are held than memory has room for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.agent.budget import ANALYSIS_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.budget import Budget
    from dpuflow.agent.config import Limits as Settings

ROW_BYTES: Final = 1500
"""Memory that a message held takes, analysis included: MESSAGE twice, TRANSFER, EXCHANGE and indices."""
FEWEST_MESSAGES: Final = 2000
FULL: Final = 0.5
"""A ring this full is on its way to losing packets."""
SPARE: Final = 0.5
"""Detail comes back only below this share of the ceilings: taking in twice as much must fit."""
HELD: Final = 0.9
"""Capturing that has to wait for so much of the time wants more than it has."""
SPARSEST_S: Final = 4.0
"""Analyses further apart than this tell of a late rank too late; fewer messages are held then."""
ROOM_LOOK_S: Final = 0.02
ROOM_WAIT_S: Final = 2.0
"""For room in memory capturing waits no longer than this: what is held may all be needed."""
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
    held: float  # share of the time that capturing had to wait
    idle: bool = False  # nothing is being captured
    analysis_s: float = 0.0  # CPU seconds of the costliest analysis,
    messages: int = 0  # and how many messages were held then
    overdrawn: bool = False  # the rest of the agent alone takes more than the ceiling leaves it


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

    def __init__(
        self, settings: Settings, mode: str, sample: int, span_s: float, folds: bool, base: int
    ) -> None:
        """``mode`` and ``sample`` as configured; ``folds``: the backend has messages mode; ``base``: bytes
        that are taken before any message is held."""
        self.settings = settings
        levels = [(mode, sample)]
        if mode == "packets" and folds:
            levels.append(("messages", sample))
        folded = levels[-1][0]
        levels += [(folded, k) for k in range(sample + 1, max(settings.max_sample, sample) + 1)]
        self._levels = levels
        self._level = 0
        self._span_s = self._full_span_s = span_s
        self._most = self._room = max((settings.memory - base) // ROW_BYTES, FEWEST_MESSAGES)
        self._costly_s = 0.0
        self._overdrawn = False
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
        if self._most < self._room:
            parts.append(f"an analysis took {self._costly_s:.1f} s of CPU: {self._most} messages are held")
        if self._overdrawn:
            parts.append(f"all but capturing and analysing takes more than {self.settings.cpu:.1%} of a core")
        return Orders(mode, sample, self._span_s, self._most, "; ".join(parts) or None)

    def look(self, use: Use, seconds: float) -> Orders:
        """Take in what was used during the last ``seconds``, and say what to do."""
        self._since_eased_s += seconds
        self._overdrawn = use.overdrawn
        self._hold_fewer(use)
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
        # What the agent takes while it has nothing to do says nothing of how much more it could do.
        easy = use.idle or (use.cpu < SPARE * self.settings.cpu and use.held < SPARE)
        easy &= memory < 0.75 and use.ring < FULL / 2
        self._easy_s = self._easy_s + seconds if easy else 0.0
        less = self._level or self._span_s < self._full_span_s or self._most < self._room
        if self._easy_s >= self._wait_s and less:
            self._ease()
        return self.orders

    def _hold_fewer(self, use: Use) -> None:
        """Hold so few messages that analyses need not be further apart than SPARSEST_S."""
        affordable_s = SPARSEST_S * ANALYSIS_SHARE * self.settings.cpu
        if use.analysis_s > affordable_s and min(use.messages, self._most) > FEWEST_MESSAGES:
            fewer = int(use.messages * affordable_s / use.analysis_s)
            self._most, self._costly_s = max(min(fewer, self._most), FEWEST_MESSAGES), use.analysis_s
            self._easy_s = 0.0

    def _strain(self, use: Use) -> str | None:
        """What there is too much of, if anything."""
        if use.lost:
            return f"the ring lost {use.lost} packets"
        if use.held > HELD:
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
        if self._most < self._room:
            self._most = min(2 * self._most, self._room)
            return
        if self._span_s < self._full_span_s:
            self._span_s = min(2 * self._span_s, self._full_span_s)
            return
        self._level -= 1
        self._since_eased_s = 0.0
        if self._level == 0:
            self._why = ""


class Pace:
    """How long the thread that captures has to wait before its next piece: for CPU, or for room in memory."""

    def __init__(self, budget: Budget, held: Callable[[], int], most: int) -> None:
        self.most = most
        self._budget, self._held = budget, held
        self._full_s: float | None = None  # since when there is no room
        self._asked_s = time.monotonic()
        self._waits = False
        self._waited_s = 0.0

    def __call__(self) -> float:
        """Seconds to wait; 0 where the next piece may be taken at once."""
        now_s = time.monotonic()
        if self._waits:
            self._waited_s += now_s - self._asked_s
        wait_s = max(self._budget.capture_wait(), self._room_wait(now_s))
        self._asked_s, self._waits = now_s, wait_s > 0
        return wait_s

    def take_waited(self) -> float:
        """For how many seconds it had to wait since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _room_wait(self, now_s: float) -> float:
        if self._held() <= 2 * self.most:
            self._full_s = None
            return 0.0
        if self._full_s is None:
            self._full_s = now_s
        if now_s - self._full_s < ROOM_WAIT_S:
            return ROOM_LOOK_S
        self._full_s = None
        return 0.0
