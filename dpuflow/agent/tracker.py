"""Findings from window to window: which are the same, since when, and which are over.

In: an analysis of what is held, at each step. Out: FindingStates that opened, changed or closed.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.agent.board import FindingState

if TYPE_CHECKING:
    from dpuflow.results import Analysis, Finding

ALIKE: Final = 0.5
"""Findings of a condition that share more than this of their endpoints are one: who is late in turn
changes from window to window."""
MUCH: Final = 0.25
"""A change of confidence by less is no news."""


class Tracker:
    """The findings that are active.

    ``confirm_s``: how long a condition must have been found before it is told; ``hold_s``: how long it lasts
    without being found again, ``idle_s`` where nothing was captured meanwhile. ``runbooks``: the URL
    of a page of runbooks; "": links stay as they are; None: to the pages that came with dpuflow.
    """

    def __init__(self, confirm_s: float, hold_s: float, idle_s: float, runbooks: str | None = "") -> None:
        self.confirm_s, self.hold_s, self.idle_s = confirm_s, hold_s, idle_s
        self.runbooks = runbooks
        self._doubted: dict[tuple[str, frozenset[str]], int] = {}  # found, not told: since when
        self.active: dict[str, FindingState] = {}
        self._severe_ns: dict[str, int] = {}  # when each was last as severe as it is said to be

    def step(self, analysis: Analysis | None, until_ns: int) -> tuple[FindingState, ...]:
        """What changed with ``analysis``; None where nothing came, so that nothing was analysed."""
        told: list[FindingState] = []
        if analysis is not None:
            seen: set[str] = set()
            doubted: dict[tuple[str, frozenset[str]], int] = {}
            for finding in analysis.findings:
                addresses = tuple(analysis.endpoints[end].address for end in finding.endpoints)
                known = self._same(finding.condition, addresses, seen)
                if known is None:
                    what = (finding.condition, frozenset(addresses))
                    doubted[what] = self._doubted.get(what, until_ns)
                    if until_ns - doubted[what] < self.confirm_s * 1e9:
                        continue
                state = self._state(analysis, finding, addresses, known, until_ns)
                if known is None or _news(known, state):
                    told.append(state)
                self.active[state.id] = state
                seen.add(state.id)
            self._doubted = doubted
        limit_s = self.hold_s if analysis is not None else self.idle_s
        for state in list(self.active.values()):
            if until_ns - state.last_ns > limit_s * 1e9:
                told.append(replace(state, active=False))
                del self.active[state.id]
                self._severe_ns.pop(state.id, None)
        return tuple(told)

    def shift(self, step_ns: int) -> None:
        """The clock was set by so much."""
        for state in list(self.active.values()):
            self.active[state.id] = replace(state, last_ns=state.last_ns + step_ns)
        self._severe_ns = {ident: at + step_ns for ident, at in self._severe_ns.items()}
        self._doubted = {what: at + step_ns for what, at in self._doubted.items()}

    def _same(self, condition: str, addresses: tuple[str, ...], seen: set[str]) -> FindingState | None:
        """The active finding that this is, if any; not one that has been ``seen`` in this step.

        The order of endpoints matters: who sent comes first, who received last.
        """
        alike = [s for s in self.active.values() if s.condition == condition and s.id not in seen]
        for state in alike:
            if state.addresses == addresses:
                return state
        ours = set(addresses)
        for state in alike:
            theirs = set(state.addresses)
            ends = {addresses[:1], addresses[-1:]} & {state.addresses[:1], state.addresses[-1:]}
            in_turn = condition == "straggler" and min(len(ours), len(theirs)) > 1
            if (ends or in_turn) and len(ours & theirs) > ALIKE * len(ours | theirs):
                return state
        return None

    def _state(
        self,
        analysis: Analysis,
        finding: Finding,
        addresses: tuple[str, ...],
        known: FindingState | None,
        until_ns: int,
    ) -> FindingState:
        ends = {analysis.endpoints[end].address: analysis.endpoints[end] for end in finding.endpoints}
        since_ns = finding.start_ns if finding.start_ns is not None else until_ns
        if known is not None:
            since_ns = known.since_ns
        name = f"{finding.condition} {' '.join(addresses)} {since_ns}"
        ident = known.id if known else f"{finding.condition}-{zlib.crc32(name.encode()):08x}"
        severity = finding.severity
        if known is None or _rank(severity) >= _rank(known.severity):
            self._severe_ns[ident] = until_ns
        elif until_ns - self._severe_ns.get(known.id, 0) < self.hold_s * 1e9:
            severity = known.severity  # it may only be less for a moment
        return FindingState(
            id=ident,
            condition=finding.condition,
            addresses=addresses,
            severity=severity,
            since_ns=since_ns,
            first_ns=known.first_ns if known else until_ns,
            last_ns=until_ns,
            active=True,
            finding=replace(finding, runbook=self._link(finding)),
            labels=tuple(ends[address].label for address in addresses),
            ranks=tuple(ends[address].rank for address in addresses),
        )

    def _link(self, finding: Finding) -> str:
        """Where to read on: absolute, so that it leads there from any alert."""
        if self.runbooks:
            return f"{self.runbooks}#{finding.condition}"
        return finding.runbook if self.runbooks == "" else finding.runbook.replace("docs", pages_here(), 1)


def pages_here() -> str:
    """The URL of the folder of pages that came with dpuflow: in a checkout, a wheel, the Debian package."""
    shared = "share/doc/dpuflow"
    folders = [Path(__file__).parents[2] / "docs", Path(sys.prefix, shared), Path("/usr", shared)]
    return next((each for each in folders if (each / "report.md").is_file()), folders[-1]).as_uri()


def _rank(severity: str) -> int:
    return ("info", "warning", "critical").index(severity)


def _news(before: FindingState, now: FindingState) -> bool:
    """Whether subscribers should hear of it again: severity, endpoints, advice or much of the confidence."""
    return (
        before.severity != now.severity
        or before.addresses != now.addresses
        or before.finding.advice != now.finding.advice
        or abs(before.finding.confidence - now.finding.confidence) >= MUCH
    )
