"""What the agent has used since the last look: CPU by part, memory, packets, messages held.

In: the budget, the pace, the source, the stream, what each analysis took. Out: a ``Use`` for the governor.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from dpuflow.agent.limits import Use
from dpuflow.agent.usage import Memory, memory

if TYPE_CHECKING:
    from dpuflow.agent.budget import Budget
    from dpuflow.agent.pace import Pace
    from dpuflow.agent.source import Source
    from dpuflow.agent.stream import Stream


class _Used(NamedTuple):
    """What was used since the start, as of some moment: CPU seconds, but for changes of mode, and packets."""

    at_s: float
    cpu_s: float
    capture_s: float = 0.0
    analysis_s: float = 0.0
    arrived: int = 0
    taken: int = 0
    lost: int = 0
    switches: int = 0


class Meter:
    """``look`` about once a second, ``analysed`` after each analysis."""

    def __init__(self, budget: Budget, pace: Pace, source: Source, stream: Stream) -> None:
        self._budget, self._pace, self._source, self._stream = budget, pace, source, stream
        self._before = _Used(time.monotonic(), budget.used_s())
        self._analysis_s = 0.0
        self._costliest = (0.0, 0)  # CPU seconds of an analysis, messages held then
        self._held = (0, 0)  # messages held: the least after an analysis, the most before one

    def analysed(self, spent_s: float, held: int) -> None:
        """An analysis of ``held`` messages has taken ``spent_s`` of CPU."""
        self._analysis_s += spent_s
        self._costliest = max(self._costliest, (spent_s, held))
        self._held = (min(self._held[0], self._stream.held()), max(self._held[1], held))

    def look(self) -> tuple[Use, float]:
        """What was used since the last look, and how many seconds that was."""
        before, losses = self._before, self._source.state.losses
        self._before = now = _Used(
            time.monotonic(), self._budget.used_s() - self._source.switch_s,
            self._budget.capture_s - self._source.switch_s, self._analysis_s,
            sum(losses.get(name, 0) for name in ("captured", "folded")), self._source.taken(),
            losses.get("ring_full", 0), self._source.switches,
        )  # fmt: skip
        seconds = max(now.at_s - before.at_s, 1e-3)
        now_held = memory()
        status, held, lost = self._source.state.status, self._stream.held(), now.lost - before.lost
        use = Use(
            cpu=(now.cpu_s - before.cpu_s) / seconds,
            capture_cpu=(now.capture_s - before.capture_s) / seconds,
            analysis_cpu=(now.analysis_s - before.analysis_s) / seconds,
            rss=max(self._pace.peak.resident, now_held.resident),
            own=max(self._pace.peak.own, now_held.own),
            arrived=now.arrived - before.arrived + lost,
            taken=now.taken - before.taken,
            lost=lost,
            idle=status is not None and status.packet_rate == 0,
            analysis_s=self._costliest[0],
            messages=self._costliest[1],
            held_least=min(self._held[0], held),
            held_most=max(self._held[1], held),
            no_room=min(self._pace.take_waited() / seconds, 1.0),
            overdrawn=self._budget.overdrawn(),
            switched=now.switches > before.switches or not self._source.obeyed(),
        )
        self._costliest, self._held, self._pace.peak = (0.0, 0), (held, held), Memory()
        return use, seconds
