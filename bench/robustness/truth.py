"""Who was late by truth alone: who was made late, whether that can be asked for, and who was late by itself.

In: a placed ``Case`` (dpuflow/scoring/truth.py) and its meta.json. Out: a ``Truth``. Nothing of an analysis
is read beyond the numbers that it gives endpoints and its reference clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from bench.accuracy.measure import shows

if TYPE_CHECKING:
    from dpuflow.scoring.truth import Case, TrueCollective
    from dpuflow.synth.scenario import Scenario

Fault = Literal["throughout", "now and then", "network", "receiver", "nobody"]

MATERIAL: Final = 0.01
"""A verdict takes 1 % of the time (docs/theory/verdicts.md); scoring leaves out 30 % about a threshold."""
ASKED: Final = 1.3 * MATERIAL
BORNE: Final = 0.5 * MATERIAL
"""From half of what a verdict takes on, a rank's own lateness is no invention."""
SIGMAS: Final = 3.0
ASKED_SIGMAS: Final = 5.0
"""Lateness now and then is asked for beyond this many of what ranks scatter by."""
MAD: Final = 1.4826
LEAST_SCATTER_NS: Final = 1_000.0


@dataclass(frozen=True)
class Truth:
    """What a verdict is judged by. Endpoints are the analysis' own; negative ones it does not list."""

    fault: Fault
    made_late: frozenset[int]
    """Endpoints that were made late in some collective."""
    asked: bool
    """Whether they were late by enough to be told; where nobody was, whether there are collectives."""
    late_by_itself: frozenset[int]
    """Endpoints whose own lateness, beyond what ranks scatter by, cost at least ``BORNE`` of the time."""
    often: dict[int, float]
    """Of those made late: the share of their collectives in which they were, where that stands out."""
    late_ns: int
    """What counts as late: a third of what was put in; 1 ms where nothing was."""
    unwatched: frozenset[int] = frozenset()
    """Endpoints whose node's capture the twin left out."""


def read_truth(case: Case, meta: dict[str, Any], scenario: Scenario | None, slack_ns: float) -> Truth:
    """The truth of a case that holds all of its collectives."""
    counted = [each for each in case.collectives if not each.warm_up]
    made_late = frozenset(end for each in counted for end in each.injected)
    scatter_ns = scatter(counted)
    own = own_lateness(counted)
    span_ns = _span_ns(counted)
    put_in = {
        end: [c.lateness_ns[end] for c in counted if end in c.injected and end in c.enter_ns]
        for end in made_late
    }
    fault = _fault(case, meta, made_late)
    asked = bool(counted) and (not made_late or sum(map(sum, put_in.values())) >= ASKED * span_ns)
    typical_ns = median([ns for each in put_in.values() for ns in each] or [0])
    if fault == "now and then":
        asked = asked and typical_ns >= ASKED_SIGMAS * scatter_ns
    if scenario is not None and made_late:
        asked = asked and shows(scenario, case, slack_ns)
    cost = {end: sum(ns for ns in late if ns > SIGMAS * scatter_ns) for end, late in own.items()}
    took_part = {end: sum(end in c.enter_ns for c in counted) for end in made_late}
    return Truth(
        fault=fault,
        made_late=made_late,
        asked=asked,
        late_by_itself=frozenset(end for end, ns in cost.items() if ns >= BORNE * span_ns and ns > 0),
        often={
            end: len(put_in[end]) / took_part[end]
            for end in sorted(made_late)
            if asked and took_part[end] and median(put_in[end] or [0]) >= ASKED_SIGMAS * scatter_ns
        },
        late_ns=max(10_000, round(typical_ns / 3)) if made_late else 1_000_000,
    )


def own_lateness(collectives: list[TrueCollective]) -> dict[int, list[float]]:
    """For each endpoint by how much it came after its peers for having worked longer than they did.

    The lesser of two distances to the median of the others: that of its entry, and that of the time since it
    left its last collective. So what it was kept for by others or by the network is not its own. Of transfers
    between two nothing: a receiver that waits is no measure of its sender.
    """
    worked = _worked(collectives)
    found: dict[int, list[float]] = {}
    for each, own in zip(collectives, worked, strict=True):
        if each.op != "send_recv" and len(each.enter_ns) > 1:
            longer = _after_others(own)
            for end, after in _after_others(each.lateness_ns).items():
                found.setdefault(end, []).append(max(0.0, min(after, longer.get(end, after))))
    return found


def _span_ns(collectives: list[TrueCollective]) -> int:
    """How long the job took, by the rank that was at it longest: ranks may be on clocks of their own."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for each in collectives:
        for end, at in each.enter_ns.items():
            first[end] = min(at, first.get(end, at))
            last[end] = max(each.leave_ns[end], last.get(end, at))
    return max((last[end] - at for end, at in first.items()), default=0)


def _worked(collectives: list[TrueCollective]) -> list[dict[int, int]]:
    """For each collective how long before it each rank had left the last one that it had entered before."""
    entered: dict[int, list[tuple[int, int]]] = {}
    for number, each in enumerate(collectives):
        for end, at in each.enter_ns.items():
            entered.setdefault(end, []).append((at, number))
    worked: list[dict[int, int]] = [{} for _ in collectives]
    for end, calls in entered.items():
        left: int | None = None
        for at, number in sorted(calls):
            if left is not None:
                worked[number][end] = at - left
            own = collectives[number].leave_ns[end]
            left = own if left is None else max(left, own)
    return worked


def scatter(collectives: list[TrueCollective]) -> float:
    """The standard deviation of entries about the median of their peers' where nobody was made late; of
    those not made late, where somebody always was. Robust; at least ``LEAST_SCATTER_NS``."""
    every = [each for each in collectives if each.op != "send_recv" and len(each.enter_ns) > 1]
    quiet = [each for each in every if not each.injected]
    off = [
        abs(ns)
        for each in quiet or every
        for end, ns in _after_others(
            {e: ns for e, ns in each.lateness_ns.items() if e not in each.injected}
        ).items()
    ]
    return max(LEAST_SCATTER_NS, MAD * median(off)) if off else LEAST_SCATTER_NS


def _after_others(times: dict[int, int]) -> dict[int, float]:
    """Each one's distance to the median of all others."""
    if len(times) < 2:
        return {}
    return {end: at - median([t for other, t in times.items() if other != end]) for end, at in times.items()}


def _fault(case: Case, meta: dict[str, Any], made_late: frozenset[int]) -> Fault:
    fault = meta.get("fault") or {}
    if made_late:
        kind = (case.compute_fault or {}).get("kind")
        return "throughout" if kind in ("persistent", "two") else "now and then"
    kinds = {row.get("kind") for row in fault.get("network") or [] if isinstance(row, dict)}
    if fault.get("receiver") or kinds == {"slow_receiver"}:
        return "receiver"
    return "network" if fault.get("network") else "nobody"
