"""Detectors in their order; what they find, each incident once; and what could not be judged.

A detector is a function from a ``Case`` to findings. One that fails is named in the result's limits and takes
none of the others with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.conditions import TABLE
from dpuflow.findings import about
from dpuflow.findings.answers import find_drained_batches, find_saturation, find_slow_answers
from dpuflow.findings.bulk import find_kv_bottlenecks
from dpuflow.findings.case import Case, NotJudgedError
from dpuflow.findings.churn import find_churn
from dpuflow.findings.clients import find_backlogs, find_client_losses, find_skews, find_starved_ranks
from dpuflow.findings.credit import find_slow_receivers, find_starvation
from dpuflow.findings.hang import find_hangs
from dpuflow.findings.hosts import (
    find_late_launches,
    find_slow_reads,
    find_starved_inputs,
)
from dpuflow.findings.listed import list_figures, list_requests
from dpuflow.findings.loads import find_bubbles, find_early_stops, find_load_skews, find_node_skews
from dpuflow.findings.losses import find_losses
from dpuflow.findings.marks import find_congestion
from dpuflow.findings.needs import NEEDS
from dpuflow.findings.passing import find_throttled_nodes
from dpuflow.findings.ranks import find_stragglers
from dpuflow.findings.shrinking import find_smaller_pages
from dpuflow.findings.slow import find_slow_links
from dpuflow.findings.standstills import find_late_credits, find_standstills
from dpuflow.findings.taken import find_capture_losses, find_untied
from dpuflow.results import Judged, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpuflow.matching import Instance
    from dpuflow.results import Analysis, Finding
    from dpuflow.schema.tables import CaptureTables, Joined, Rows
    from dpuflow.verdicts import Inferred

    Detector = Callable[[Case], Iterator[Finding]]

DETECTORS: Final[tuple[tuple[Detector, tuple[str, ...]], ...]] = (
    (find_hangs, ("hang", "desync")),
    (find_stragglers, ("straggler",)),
    (find_slow_links, ("slow_link", "credit_starvation")),
    (find_losses, ("packet_loss",)),
    (find_congestion, ("congestion",)),
    (find_starvation, ("credit_starvation",)),
    (find_slow_receivers, ("credit_starvation",)),
    (find_kv_bottlenecks, ("kv_transfer_bottleneck",)),
    (find_standstills, ("head_of_line",)),
    (find_late_credits, ("credit_starvation",)),
    (find_load_skews, ("load_skew",)),
    (find_early_stops, ("early_stop_skew",)),
    (find_bubbles, ("pipeline_bubble",)),
    (find_node_skews, ("node_skew", "host_cpu")),
    (find_smaller_pages, ("pinned_memory_shortage",)),
    (find_starved_inputs, ("input_starvation",)),
    (find_late_launches, ("launch_latency",)),
    (find_throttled_nodes, ("p2p_throttling",)),
    (find_slow_reads, ("pcie_saturation",)),
    (find_churn, ("registration_churn",)),
    (find_backlogs, ("admission_backlog",)),
    (find_starved_ranks, ("ingress_starvation",)),
    (find_skews, ("session_skew",)),
    (find_client_losses, ("ingress_loss", "egress_loss")),
    (find_slow_answers, ("egress_backlog", "egress_jitter")),
    (find_drained_batches, ("early_completion",)),
    (find_saturation, ("saturation",)),
    (find_capture_losses, ("capture_loss",)),
    (find_untied, ("clock_untied",)),
)
"""In the order in which findings are listed, with what each may find."""


def build_findings(
    captures: Sequence[CaptureTables],
    joined: Joined,
    exchanges: Rows,
    instances: Sequence[Instance],
    inferred: Inferred,
    result: Analysis,
) -> None:
    """Give ``result``, which has all but them, its findings and what was judged; numbered in their order."""
    case = Case(captures, joined, exchanges, instances, inferred, result)
    list_requests(case)
    list_figures(case)
    found, reasons = run_detectors(case, DETECTORS)
    told = explained(found)
    for number, finding in enumerate(told):
        finding.id = number
    result.findings = told
    result.judged = judged(case, {finding.condition for finding in found}, reasons)


def run_detectors(
    case: Case, detectors: Sequence[tuple[Detector, tuple[str, ...]]]
) -> tuple[list[Finding], dict[str, str]]:
    """What all find, and why conditions could not be judged."""
    found: list[Finding] = []
    reasons: dict[str, str] = {}
    for detector, conditions in detectors:
        try:
            # Of clients and what else is not there nothing can be found.
            if any(not unmet(case, name) for name in conditions):
                found += detector(case)
        except NotJudgedError as why:
            reasons |= dict.fromkeys(conditions, str(why))
        except Exception as error:  # whatever it is, the other findings stand
            reasons |= dict.fromkeys(conditions, "its detector failed (see limits)")
            case.result.limits.append(
                f"{' and '.join(conditions)} could not be judged: the detector failed"
                f" ({type(error).__name__}: {error})."
            )
    return found, reasons


def unmet(case: Case, name: str) -> str | None:
    """Why a condition cannot be judged in this case; None where what it needs is there."""
    return next((why for need in TABLE[name].needs if (why := NEEDS[need](case)) is not None), None)


def explained(found: Sequence[Finding]) -> list[Finding]:
    """The same with what another one is the cause of listed under that one: one incident, one finding."""
    swallowed: set[int] = set()
    by_cost = sorted(range(len(found)), key=lambda n: -(found[n].cost_share or 0.0))
    for number in by_cost:
        cause = found[number]
        explains = TABLE[cause.condition].explains
        for other, effect in enumerate(found):
            if other == number or {other, number} & swallowed or effect.condition not in explains:
                continue
            if _touches(cause, effect):
                own = Part(
                    effect.condition, effect.endpoints, effect.summary, effect.confidence, effect.evidence
                )
                cause.consists_of += [own, *effect.consists_of]
                back_up = effect.condition == _BEHIND and cause.condition in _BACK_UP
                more = back_up and (effect.cost_share or 0.0) > (cause.cost_share or 0.0)
                if cause.cost_share is None or more:  # what the incident cost
                    cause.cost_ns, cause.cost_share = effect.cost_ns, effect.cost_share
                    cause.severity = max(cause.severity, effect.severity, key=SEVERITIES.index)
                swallowed.add(other)
    return [finding for number, finding in enumerate(found) if number not in swallowed]


SEVERITIES: Final = ("info", "warning", "critical")
_OF_PATHS: Final = ("kv_transfer_bottleneck", "packet_loss", "head_of_line")
"""Whose endpoints all may be where the fault is."""
_BACK_UP: Final = ("congestion", "slow_link", "head_of_line")
"""What stops those who pass on: the ranks before them then find no credit."""
_BEHIND: Final = "credit_starvation"
_PAIR: Final = ("from", "to")
_OTHER_UNITS: Final = ("load_skew", "early_completion")
"""Whose costs are no time that ranks or requests lose: transfer of bytes, not work for them; places."""
TWICE: Final = 2
"""Times: as far as costs are told by different figures."""


def _touches(cause: Finding, effect: Finding) -> bool:
    """Whether what ``effect`` is about lies at the endpoints of ``cause``, at the same time."""
    if not _costs_enough(cause, effect):
        return False
    if effect.condition == _BEHIND and cause.condition in _BACK_UP:
        # Who cannot pass on what it has does not take more.
        return effect.endpoints[0] in cause.endpoints
    here = set(about(cause.condition, cause.endpoints))
    there = set(about(effect.condition, effect.endpoints))
    if cause.condition == "slow_link" and len(cause.endpoints) == len(_PAIR):  # one way, not a port
        src, dst = cause.endpoints
        if effect.condition == "kv_transfer_bottleneck":  # out of the same port, or into it
            if src != effect.endpoints[-1] and dst != effect.endpoints[0]:
                return False
        elif not {src, dst} <= set(effect.endpoints) or not there <= {src, dst}:
            return False
    elif not here & (set(effect.endpoints) if effect.condition in _OF_PATHS else there):
        return False
    times = (cause.start_ns, cause.end_ns, effect.start_ns, effect.end_ns)
    if None in times:
        return True
    begin, end, since, until = (time for time in times if time is not None)
    return begin <= until and since <= end


def _costs_enough(cause: Finding, effect: Finding) -> bool:
    """Whether most of what ``effect`` costs may be the doing of ``cause``, which then costs about as much."""
    if cause.condition in _OTHER_UNITS:
        return True
    if cause.cost_share is None and cause.condition not in _BACK_UP:
        return True
    return (effect.cost_share or 0.0) <= TWICE * (cause.cost_share or 0.0)


def judged(case: Case, found: set[str], reasons: dict[str, str]) -> list[Judged]:
    """Each condition's state: silence and blindness must not look alike."""
    rows = []
    for name, row in TABLE.items():
        if name in found:
            rows.append(Judged(name, "found"))
            continue
        reason = unmet(case, name) or reasons.get(row.told_as or name)
        if row.told_as in found:
            reason = f"reported as {row.told_as}: {row.why}"
        if reason is not None:
            rows.append(Judged(name, "not_judged", reason))
        elif name == "straggler":
            rows.append(_of_ranks(case))
        else:
            rows.append(Judged(name, "not_found"))
    return rows


def _of_ranks(case: Case) -> Judged:
    """Nobody late, as far as verdicts were given."""
    unknown = sum(row.verdict == "unknown" for row in case.result.lateness)
    total = len(case.result.lateness)
    if not total or unknown == total:
        return Judged("straggler", "not_judged", "no rank's times are known well enough for a verdict")
    reason = f"{unknown} of {total} endpoints could not be judged" if unknown else None
    return Judged("straggler", "not_found", reason)
