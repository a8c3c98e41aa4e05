"""Ceilings of CPU and memory: what the agent uses in, how much detail to take in and how much of it held.

What the traffic takes is reckoned from what a packet and a message were seen to take, and from how many
arrive since the last order was obeyed: what waited in the ring then, and what is held of it, was let in by
the orders before, and says nothing of this one. Detail is then what fits: packets, else messages folded in
the kernel, else those of a share of all pairs of hosts, in steps of 19 %. The pairs of a smaller share are
among those of any larger one, so what is kept stays whole. Memory is kept by how many messages are held, each
of which takes what it was seen to take. Two hard stops besides need no deciding: whoever owes CPU waits
(``Budget``), and nothing is taken in while memory is short (``pace``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from dpuflow.agent.budget import ANALYSIS_SHARE, LEAST

if TYPE_CHECKING:
    from dpuflow.agent.config import Limits as Settings
    from dpuflow.agent.usage import Memory

ROW_BYTES: Final = 2500
"""Memory of a message held, analysis included, until it has been seen what it takes."""
LEAST_ROW: Final = 600  # MESSAGE twice, TRANSFER and indices: an analysis takes no less
FEWEST_MESSAGES: Final = 2000
STEP: Final = 0.25
"""Sampling goes in steps of this exponent of two."""
TOO_MUCH: Final = 0.96
"""Of a ceiling: wanting more than this, something has to be left out;"""
AIM: Final = 0.88
"""then so much that this is used;"""
SPARE: Final = 0.78
"""wanting less, there is room for more."""
FULL: Final = 0.9
"""Of the ceiling of memory: what is held may bring the process so far."""
SPARSEST_S: Final = 4.0
"""Analyses further apart than this tell of a late rank too late; fewer messages are held then."""
ANALYSES: Final = 1.5
"""So often there has to be CPU to analyse each message: once, and half of them again with what follows. Were
it once alone, each analysis would find more to do than the one before, and come later."""
SMOOTH: Final = 0.3
"""Of what analysing a message takes now and took before, how much now counts: a busy machine doubles it."""
LOOKS_S: Final = 4.0
"""What is used is averaged over this long, the length of a pause between two analyses that cost much."""
SOON_S: Final = 3.0
"""More of the pairs are taken in again after so long with room for it,"""
LONGEST_RECOVERY: Final = 16
"""and after up to so many times ``limits.recover`` where that was too much before."""
SHORTEST_SPAN_S: Final = 2.0
OTHERS_S: Final = 10.0
"""What the rest of the process takes is averaged over this long, where that is less than it took of late."""
STALE_S: Final = 8.0
"""So long at most what was let in before an order is waited for to be read and analysed."""


@dataclass(frozen=True)
class Use:
    """What was used since the last look: shares of one core, packets, bytes, messages."""

    cpu: float
    capture_cpu: float
    rss: int  # resident, the most that there was
    own: int = 0  # of it what maps neither files nor the ring
    analysis_cpu: float = 0.0
    arrived: int = 0  # packets wanted that came to the ring, also those it had no room for
    taken: int = 0  # packets read from it
    lost: int = 0  # packets that the ring had no room for
    idle: bool = False  # nothing is being captured
    analysis_s: float = 0.0  # CPU seconds of the costliest analysis,
    messages: int = 0  # and how many messages were held then
    held_least: int = 0  # messages held after an analysis,
    held_most: int = 0  # and before one
    no_room: float = 0.0  # share of the time that nothing was taken in for want of memory
    overdrawn: bool = False  # the rest of the agent alone takes more than the ceiling leaves it
    switched: bool = False  # an order was obeyed only within it: what arrived is of two orders


@dataclass(frozen=True)
class Orders:
    """What is to be taken in, and how much of it held. ``reason`` says why that is less than configured."""

    mode: str
    sample: float  # one in 2^sample pairs of hosts is followed
    span_s: float
    most: int  # messages kept after an analysis
    room: int  # messages held at any time
    reason: str | None


class Governor:
    """Decides on detail. ``look`` is to be called about once a second."""

    def __init__(
        self, settings: Settings, mode: str, sample: float, span_s: float, folds: bool, base: Memory
    ) -> None:
        """``mode`` and ``sample`` as configured; ``folds``: the backend has messages mode; ``base``: what is
        resident at most before any message is held, the whole ring counting, and what of its own is now."""
        self.settings = settings
        self._modes = [mode, "messages"] if mode == "packets" and folds else [mode]
        self._mode = 0
        self._full_sample = self._sample = float(sample)
        self._most_sample = float(max(settings.max_sample, sample))
        self._span_s = self._full_span_s = span_s
        self._base = base
        self._row_bytes = float(ROW_BYTES)
        self._affordable: int | None = None  # messages that an analysis may cost; None: any number
        self._costly_s = self._analysis_s = 0.0
        self._message_s = 0.0  # CPU seconds that analysing a message took last
        self._came = self._taken = 0.0  # messages, and the packets that they were of, of late
        self._new = 0  # messages whose packets have not been counted yet
        self._looks: deque[tuple[float, Use]] = deque()
        self._overdrawn = False
        self._why = ""
        self._easy_s = 0.0  # for how long there has been room to spare
        self._failures = 0  # how often in a row what came back was too much
        self._since_eased_s = math.inf
        self._others = math.inf  # of a core, averaged over long
        self._rate = 0.0  # packets that arrived a second, of late
        self._backlog = 0  # packets that arrived and have not been read,
        self._behind = 0  # and of those that arrived before the last order
        self._stale_s = 0.0  # for how long yet what is held and was read may be of the order before

    @property
    def room(self) -> int:
        """Messages that memory has room for, beside what analysing them takes."""
        free = FULL * self.settings.memory - self._base.resident
        return max(round(free / self._row_bytes), FEWEST_MESSAGES)

    @property
    def orders(self) -> Orders:
        """As things stand."""
        room = self.room
        most = room // 2 if self._affordable is None else min(self._affordable, room // 2)
        parts = []
        if self._mode or self._sample > self._full_sample:
            kept = f"{0.5**self._sample:.2g} of the pairs of hosts" if self._sample else "messages"
            parts.append(f"{self._why}: {kept} only")
        if self._span_s < self._full_span_s:
            parts.append(f"short of memory: {self._span_s:g} s of traffic held")
        if self._affordable is not None and self._affordable < room // 2:
            parts.append(f"an analysis took {self._costly_s:.1f} s of CPU: {most} messages are held")
        if self._overdrawn:
            parts.append(
                f"work other than capture and analysis takes more than {self.settings.cpu:.1%} of a core"
            )
        reason = "; ".join(parts) or None
        return Orders(self._modes[self._mode], self._sample, self._span_s, most, room, reason)

    def look(self, use: Use, seconds: float) -> Orders:
        """Take in what was used during the last ``seconds``, and say what to do."""
        self._since_eased_s += seconds
        self._overdrawn = use.overdrawn
        self._new = 0 if use.messages else self._new + use.held_most - use.held_least
        if not use.messages and use.taken:  # no analysis took any away
            self._came += self._new - SMOOTH * self._came
            self._taken += use.taken - SMOOTH * self._taken
            self._new = 0
        self._hold(use)
        others = max(use.cpu - use.capture_cpu - use.analysis_cpu, 0.0)
        before = others if math.isinf(self._others) else self._others
        self._others = before + min(seconds / OTHERS_S, 1.0) * (others - before)
        use = self._of_this_order(use, seconds)
        if use.switched:
            return self.orders
        self._looks.append((seconds, use))
        while len(self._looks) > 1 and sum(each[0] for each in self._looks) > LOOKS_S + seconds / 2:
            self._looks.popleft()
        fits, why = self._fits()
        if fits < 1.0:
            self._easy_s = 0.0
            self._less(fits, why)
            return self.orders
        spare = use.idle or fits > AIM / SPARE
        self._easy_s = self._easy_s + seconds if spare and not use.lost else 0.0
        self._more(math.inf if use.idle else fits)
        return self.orders

    def _of_this_order(self, use: Use, seconds: float) -> Use:
        """What was used, less what has to do with what was let in before the last order.

        That is first read, and then analysed and let go of; until then memory may be short of it, and
        while nothing is read for that the ring fills.
        """
        self._backlog = max(self._backlog + use.arrived - use.lost - use.taken, 0)
        read = self._behind <= 0
        self._behind -= use.taken
        if self._stale_s <= 0:
            return use
        self._stale_s = 0.0 if read and use.messages else self._stale_s - seconds
        rss = use.rss if use.rss > self.settings.memory else 0
        return replace(use, no_room=0.0, rss=rss, lost=0 if use.no_room else use.lost)

    def _hold(self, use: Use) -> None:
        """How many messages may be held: by what each was seen to take, in memory and in CPU."""
        own = use.own - self._base.own
        if use.held_most > 4 * FEWEST_MESSAGES or use.rss > self.settings.memory:
            seen = max(own / max(use.held_most, 1), LEAST_ROW)
            # What was much once is so again; what was little is believed by and by.
            self._row_bytes = max(seen, self._row_bytes + 0.1 * (seen - self._row_bytes))
        full = use.rss > self.settings.memory * TOO_MUCH
        if full and self._span_s > SHORTEST_SPAN_S:
            self._span_s = max(self._span_s / 2, SHORTEST_SPAN_S)
        if use.messages <= FEWEST_MESSAGES:
            return
        self._analysis_s, seen_s = use.analysis_s, use.analysis_s / use.messages
        self._message_s += SMOOTH * (seen_s - self._message_s) if self._message_s else seen_s
        affordable_s = SPARSEST_S * ANALYSIS_SHARE * self.settings.cpu
        growing = SPARSEST_S * self._message_rate()  # what comes until the next analysis is part of it
        if use.analysis_s > affordable_s:
            fits = use.messages * affordable_s / use.analysis_s
            fewer = max(int(max(fits - growing, fits / 3)), FEWEST_MESSAGES)
            if self._affordable is None or fewer < self._affordable:
                self._affordable, self._costly_s, self._easy_s = fewer, use.analysis_s, 0.0
        elif self._affordable is not None and (
            (2 * self._affordable + growing) * self._message_s < affordable_s
        ):
            self._hold_more()

    def _hold_more(self) -> None:
        """Let an analysis be of twice as many messages."""
        assert self._affordable is not None
        self._affordable = 2 * self._affordable if 2 * self._affordable < self.room // 2 else None

    def _fits(self) -> tuple[float, str]:
        """How many times what is wanted now would fit, below 1 where it does not; and what is short.

        Between the two thresholds it is 1: nothing is to be done.
        """
        of_cpu, of_memory, of_ring = self._cpu_fits(), self._memory_fits(), self._ring_fits()
        if of_ring < min(of_cpu, of_memory):
            return of_ring, f"the ring lost {self._looks[-1][1].lost} packets"
        if of_memory < of_cpu:
            return of_memory, f"memory ({self.settings.memory >> 20} MiB) has room for {self.room} messages"
        return of_cpu, f"capture and analysis need more than {self.settings.cpu:.0%} of a core"

    def _ring_fits(self) -> float:
        """By what is lost for want of being read in time; what is full of an earlier order's empties now."""
        last = self._looks[-1][1]
        if not last.lost or not last.taken or (self._behind > 0 and last.arrived <= last.taken):
            return math.inf
        return AIM * last.taken / (last.arrived if self._behind > 0 else last.taken + last.lost)

    def _cpu_fits(self) -> float:
        """By CPU. Analyses may be further apart than configured: of them no more counts than their share.

        But each message is analysed once at least: where not even that fits, ever more would be held.
        """
        time_s = sum(seconds for seconds, _ in self._looks)
        limit = self.settings.cpu

        def mean(name: str) -> float:
            return sum(seconds * float(getattr(use, name)) for seconds, use in self._looks) / time_s

        arrived = sum(use.arrived for _, use in self._looks)
        taken = sum(use.taken for _, use in self._looks)
        if arrived and not taken:
            return 1.0  # nothing was read: what one costs is not known
        capture, analysis = mean("capture_cpu"), mean("analysis_cpu")
        # What the rest takes follows no orders: neither a second's file nor the start counts for long.
        others = min(max(mean("cpu") - capture - analysis, 0.0), self._others)
        capture *= arrived / taken if taken else 1.0
        once = ANALYSES * self._message_s * self._message_rate()
        share = ANALYSIS_SHARE * max(limit - others, LEAST * limit)  # as ``Budget`` divides
        wanted = others + capture + max(min(analysis, share), once)
        left = max(AIM * limit - others, LEAST * limit)
        # Whichever is more: both grow with what is taken in, or analysing has its share and grows no more.
        both = left / max(capture + analysis, 1e-6)
        capped = (left - share) / max(capture, 1e-6)
        fits = min(max(both, capped), left / max(capture + once, 1e-6))
        if wanted > TOO_MUCH * limit:
            return min(fits, TOO_MUCH)
        return fits if fits > AIM / SPARE else 1.0

    def _message_rate(self) -> float:
        """Messages a second, by the packets that come: those from the ring may have waited there for long."""
        if self._looks:
            time_s = sum(seconds for seconds, _ in self._looks)
            self._rate = sum(use.arrived for _, use in self._looks) / time_s
        # A message is a packet at least: on a busy machine some are held before their packets are counted.
        return self._rate * min(self._came / max(self._taken, 1.0), 1.0)

    def _memory_fits(self) -> float:
        """By memory: what comes between two analyses, beside what stays after them."""
        room, limit = self.room, self.settings.memory
        apart_s = max(self._analysis_s / (ANALYSIS_SHARE * self.settings.cpu), 1.0)
        fits = AIM * (room / 2) / max(self._message_rate() * apart_s, 1e-6)
        if SPARE <= AIM / fits <= TOO_MUCH:
            fits = 1.0
        over = max(use.rss for _, use in self._looks) / limit
        if over >= TOO_MUCH:
            fits = min(fits, TOO_MUCH / over)
        short = max(use.no_room for _, use in self._looks)
        if short:
            fits = min(fits, TOO_MUCH, 1 - short / 2)
        return fits

    def _less(self, fits: float, why: str) -> None:
        """Leave out so much that the rest fits."""
        if self._mode + 1 < len(self._modes):
            self._mode += 1
        elif self._sample < self._most_sample:
            steps = math.ceil(-math.log2(fits) / STEP)
            self._sample = min(self._sample + STEP * max(steps, 1), self._most_sample)
        else:
            return
        self._why = why
        self._ordered()
        if self._since_eased_s < 2 * self._wait_s(SOON_S):  # what came back was too much
            self._failures += 1
        self._since_eased_s = math.inf

    def _wait_s(self, first_s: float) -> float:
        """How long there must be room before more is taken in."""
        recover = self.settings.recover
        return float(min(min(first_s, recover) * 2.0**self._failures, LONGEST_RECOVERY * recover))

    def _more(self, fits: float) -> None:
        """Take in again what fits, if there has been room for long enough."""
        recover_s = self._wait_s(self.settings.recover)
        if self._sample > self._full_sample:
            if self._easy_s >= self._wait_s(SOON_S):
                steps = max(math.floor(min(math.log2(min(fits, 16.0)), 1.0) / STEP), 1)
                self._sample = max(self._sample - STEP * steps, self._full_sample)
                self._eased()
        elif self._easy_s >= recover_s:
            if self._affordable is not None:
                self._hold_more()
            elif self._span_s < self._full_span_s:
                self._span_s = min(2 * self._span_s, self._full_span_s)
            elif self._mode:
                self._mode, self._why = 0, ""
            else:
                self._failures = 0
            self._eased()

    def _eased(self) -> None:
        self._easy_s = self._since_eased_s = 0.0
        self._looks.clear()

    def _ordered(self) -> None:
        """Less is let in from now on; what was let in before is not held against it."""
        self._looks.clear()
        self._behind, self._stale_s = self._backlog, STALE_S
