"""The first line of the text report: who was late, or how far an all-clear goes.

In: an ``Analysis`` and who of it is late. Out: one line and its colour.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from dpuflow.findings.ranks import units_of
from dpuflow.quantities import count, duration, listed, often, percent
from dpuflow.reports.sampled import sampled_one_of
from dpuflow.verdicts.chance import CRITICAL_SHARE, LATE_SHARE, is_material
from dpuflow.verdicts.judgement import LATE
from dpuflow.verdicts.pauses import worked_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Finding, Lateness

ABOUT_LATENESS = ("straggler", "node_skew", "hang", "desync", "clock_untied", "capture_loss")
"""Findings that are no fault beside lateness: they speak of late ranks or of the capture itself."""
SURE = 2 / 3
"""What is wrong once in three times is no answer."""
STUCK = ("desync", "hang")
"""Findings of a job that stands still."""
FEWEST_TIMES = 3
"""As of the verdict "intermittent": fewer are no habit."""
MOST_INCIDENTS = 2
"""Endpoints whose single incidents an all-clear tells."""


def stuck_in(result: Analysis) -> Finding | None:
    """Why the job stands still, if it does."""
    return next((each for each in result.findings if each.condition in STUCK), None)


def headline(result: Analysis, late: list[Lateness], names: Names) -> tuple[str, str]:
    stuck = stuck_in(result)
    if stuck is not None:
        return f"{stuck.condition.upper()}: {stuck.summary}", "bad"
    if late:
        told = [row for row in late if row.cause != "unknown"]
        style = "bad" if told and told[0].verdict == "late" else "warn"
        if len(told) == len(late):
            return late_headline(told, names), style
        unclear = listed([names.short(row.endpoint) for row in late if row.cause == "unknown"])
        add = "cannot be known from the nodes captured. Add the captures of the other nodes."
        if told:
            return (
                f"{late_headline(told, names)} Messages of {unclear} came late, too: whether it or the"
                f" network delayed them {add}"
            ), style
        return f"MESSAGES OF {unclear} CAME LATE. Whether it or the network delayed them {add}", style
    fault = main_fault(result)
    if fault is not None:
        return f"{fault.condition.replace('_', ' ').upper()}: {fault.summary}", "bad"
    return of_nobody(result, names)


def of_nobody(result: Analysis, names: Names) -> tuple[str, str]:
    """Where nobody is late: how far that goes, or why nothing is said."""
    if not result.pipelines and not any(c.op != "send_recv" for c in result.collectives):
        one_of = sampled_one_of(result)
        if one_of is not None:
            return (
                f"NO VERDICT: about 1 in {one_of:.3g} packets was captured (sampling), too few to follow"
                " messages. Rates and ECN marks are below."
            ), "warn"
        if result.captures and not any(capture.packets for capture in result.captures):
            return "NO VERDICT: no packet was captured. Is it the interface of the job?", "warn"
        seen = sum(capture.packets for capture in result.captures)
        if seen and sum(sum(capture.skipped.values()) for capture in result.captures) >= seen:
            return (
                f"NO VERDICT: none of {count(seen, 'packet')} is RoCE or TCP. Is it the interface of the job?"
            ), "warn"
        if result.collectives:
            text = "NO VERDICT: transfers but no collectives were found, so nobody can be called late."
        else:
            text = "NO VERDICT: no collectives were found, so nobody can be called late."
        return text + _add_captures(result), "warn"
    if not result.lateness:
        return "NO VERDICT: no rank's lateness could be determined.", "warn"
    perhaps = perhaps_late(result)
    if perhaps:
        who = listed([names.short(row.endpoint) for row in perhaps], 3, "or")
        return (
            f"{who}, OR ONE THAT {'IT WAITS' if len(perhaps) == 1 else 'THEY WAIT'} FOR, CAME LATE. Which of"
            f" them, and why, does not show in these captures.{_add_captures(result)}"
        ), "warn"
    return _clear_headline(result, names)


def faults_of(result: Analysis) -> list[Finding]:
    """Findings above info that are nobody's lateness, the gravest first as the result lists them."""
    return [f for f in result.findings if f.severity != "info" and f.condition not in ABOUT_LATENESS]


def main_fault(result: Analysis) -> Finding | None:
    """The critical fault that is the answer where nobody is late by its own doing."""
    if any(row.verdict in ("late", "intermittent") for row in result.lateness) or stuck_in(result):
        return None
    sure = (f for f in faults_of(result) if f.severity == "critical" and f.confidence >= SURE)
    return next(sure, None)


def late_headline(late: list[Lateness], names: Names) -> str:
    """Who is late, and how steadily; ranks of one node that are late together as one."""
    late = units_of(late)
    persistent = [row for row in late if row.verdict == "late"]
    rotating = [row for row in late if row.steadiness == "rotating"]
    if len(rotating) == len(late) > 1:
        return f"LATE IN TURN: {listed([names.unit(row.endpoint) for row in late])}."
    if persistent:
        who = [names.unit(row.endpoint, long=True) for row in persistent]
        rest = [names.unit(row.endpoint) for row in late if row not in persistent]
        return f"LATE: {listed(who, 4)}." + (f" Now and then also {listed(rest)}." if rest else "")
    return f"LATE NOW AND THEN: {listed([names.unit(row.endpoint, long=True) for row in late], 4)}."


def _clear_headline(result: Analysis, names: Names) -> tuple[str, str]:
    """Where nobody is said to be late: how far that goes, and of whom it is not said."""
    blind = [row for row in result.lateness if row.verdict == "unknown"]
    limit = max((row.detectable_ns or 0 for row in result.lateness if row not in blind), default=0)
    beyond = f" (lateness over {duration(limit)} a step would show)" if limit else ""
    if blind and len(blind) == len(result.lateness):
        return f"COULD NOT BE JUDGED: {_why_blind(result, blind, names)}.{_add_captures(result)}", "warn"
    if blind:
        who = listed([names.short(row.endpoint) for row in blind])
        # By at least the noise of the group, yet of a rank that others may have kept (``judgement.doubt``).
        # Not again of those that incidents are the reason for.
        behind = [
            names.short(row.endpoint)
            for row in blind
            if row.collectives and row.last_share and row.unjudged not in ("incidents", "excused")
        ]
        own = "its" if len(behind) == 1 else "their"
        why = f"came last at times, but too rarely, or not provably by {own} own doing."
        waited = f" {listed(behind)} {why}" if behind else ""
        once = _incidents(result, [row.endpoint for row in blind])
        if once:
            one = len(blind) == 1
            times = [f"{'it' if one else names.short(end)} was late {each}" for end, each in once.items()]
            why = "too little was captured to tell whether that recurs"
            if any(row.unjudged == "excused" for row in blind):
                why = "the network may explain that"
            waited, reason = "", f"{listed(times)}; {why}"
        else:
            reason = _why_blind(result, blind, names)
        add = _add_captures(result)
        if 2 * len(blind) > len(result.lateness):
            others = f"None of the others was seen late by its own doing{beyond}."
            return f"MOST COULD NOT BE JUDGED ({who}): {reason}.{waited} {others}{add}", "warn"
        but = f"but {who} could not be judged: {reason}.{waited}"
        return f"NOBODY SEEN LATE by its own doing{beyond}, {but}{add}", "warn"
    hidden = max((each.unexplained_share for each in result.accounts), default=0.0)
    if hidden >= CRITICAL_SHARE:
        return (
            f"NOBODY SEEN LATE by its own doing{beyond}, but {percent(hidden)} of the time is unexplained."
            f"{_add_captures(result)}"
        ), "warn"
    if _partly(result):
        return (f"NOBODY SEEN LATE{beyond}, but not every rank was captured.{_add_captures(result)}"), "warn"
    once = _incidents(result)
    if once:
        told = [f"{names.short(end)} {each}" for end, each in once.items()][:MOST_INCIDENTS]
        told += [f"{len(once) - len(told)} more"] if len(once) > len(told) else []
        return (
            f"NOBODY WAS LATE BY ITS OWN DOING{beyond}, except for isolated incidents: {listed(told)}.",
            "good",
        )
    return f"NOBODY WAS LATE BY ITS OWN DOING{beyond}.", "good"


def _incidents(result: Analysis, of_all: Sequence[int] = ()) -> dict[int, str]:
    """What was no habit, by endpoint: ``once (9 ms)``, ``twice (up to 4 ms)``; the worst first.

    Of each endpoint the times beyond what would have been named, had it come step after step; nothing where
    one ``of_all`` has none.
    """
    limit = {row.endpoint: row.detectable_ns for row in result.lateness if row.detectable_ns}
    late: dict[int, list[int]] = {}
    for collective in result.collectives:
        for entry in collective.ranks if collective.complete else ():
            known = entry.bound in ("exact", "at_least") and entry.cause in ("compute", "host")
            if known and (entry.lateness_ns or 0) > limit.get(entry.endpoint, 1 << 62):
                late.setdefault(entry.endpoint, []).append(entry.lateness_ns or 0)
    if not late.keys() >= set(of_all):
        return {}
    told = {}
    for endpoint, times in sorted(late.items(), key=lambda item: -max(item[1])):
        if not of_all or endpoint in of_all:
            told[endpoint] = (
                f"{often(len(times))} ({'up to ' if len(times) > 1 else ''}{duration(max(times))})"
            )
    return told


def _why_blind(result: Analysis, blind: list[Lateness], names: Names) -> str:
    """Why nothing is said of these ranks: incidents that may be chance, most of their times are not told, or
    too much would be hidden."""
    ends = {row.endpoint for row in blind}
    excused = sum(row.unjudged == "excused" for row in blind)
    rare = excused + sum(row.unjudged == "incidents" for row in blind)
    once = {end: each for end, each in _incidents(result).items() if end in ends}
    if 2 * rare > len(blind):
        which = [f"{names.short(end)} {each}" for end, each in once.items()][:MOST_INCIDENTS]
        which += [f"{len(once) - len(which)} more"] if len(once) > len(which) else []
        by = "the network" if 2 * excused > rare else "host stalls"
        if not which:  # beyond the noise in no single operation
            return (
                f"{'its' if len(blind) == 1 else 'their'} work took longer at times, which {by} may explain"
            )
        return f"late at times, which {by} may explain: {listed(which)}"
    beyond = [row for row in blind if row.unjudged in (None, "hidden")]
    hidden = [row.detectable_ns for row in beyond if row.detectable_ns is not None]
    if 2 * len(hidden) > len(blind):
        step = [steps.step_ns for steps in result.steps]
        of = f" (a step takes {duration(median(step))})" if step else ""
        return f"lateness below {duration(median(hidden))} a step would go unnoticed{of}"
    whose = "its" if len(blind) == 1 else "their"
    told = sum(row.told.exact + row.told.bounded for row in blind)
    total = told + sum(row.told.untold for row in blind)
    tied = any(each.op != "send_recv" for each in result.collectives)
    if tied and ends <= {stage for each in result.pipelines for stage in each.stages}:
        return "stages of a pipeline may differ by design, and too few are alike to tell"
    if 2 * told >= total > 0:
        return f"too few of {whose} entry times are known closely enough"
    cut = sum(not each.complete for each in result.collectives if each.op != "send_recv")
    mine = [c for c in result.collectives if any(entry.endpoint in ends for entry in c.ranks)]
    read = sum(entry.endpoint in ends for c in mine if c.op != "send_recv" for entry in c.ranks)
    if 2 * read < total:  # the rest is reckoned from bytes
        return f"most of {whose} data was not matched to a collective"
    if all(each.op == "send_recv" for each in mine):
        return f"{whose} messages are sends and receives, which do not show who was late"
    known = f"only {told:,}" if told else "none"
    text = f"{known} of {whose} {total:,} entry times {'are' if told > 1 else 'is'} known"
    text += f", {count(cut, 'collective')} only partly captured" if cut else ""
    lost = any(finding.condition == "capture_loss" for finding in result.findings)
    return text + (", the captures lost packets" if lost else "")


def perhaps_late(result: Analysis) -> list[Lateness]:
    """Endpoints that came last, or wait for one that did, at a cost: a habit, and 1 % of the time.

    Where nobody is to blame so are those that were kept by one that is not judged, at a critical cost.
    """
    import numpy as np

    end = max((c.end_ns for c in result.collectives), default=0)
    span = worked_ns(np.array([c.start_ns for c in result.collectives], np.int64), end)
    rows = [_kept(result, row, span) for row in result.lateness]
    cost = {row.endpoint: row.perhaps_last * (row.perhaps_ns or 0) for row in rows}
    found = [
        row
        for row in rows
        if row.verdict not in LATE
        and row.perhaps_last >= FEWEST_TIMES
        and is_material(cost[row.endpoint], span)
    ]
    most = max((cost[row.endpoint] for row in found), default=0)
    # Others that wait for the same one come late more seldom, or by less.
    return sorted(
        (row for row in found if 2 * cost[row.endpoint] >= most), key=lambda row: -cost[row.endpoint]
    )


def _kept(result: Analysis, row: Lateness, span_ns: int) -> Lateness:
    """The row with how often it was the last by what it was handed, where a rank that is not judged may have
    done that: as a rule, at a critical cost, and mostly not by its own doing.

    Stages of a pipeline end a step one after the other by design.
    """
    others = [each.verdict for each in result.lateness if each.endpoint != row.endpoint]
    times = round((row.last_share or 0.0) * row.collectives)
    handed = 2 * (row.own_share or 0.0) < (row.late_share or 0.0) and (row.last_share or 0.0) >= LATE_SHARE
    # Each of those that were seen to wait for it; how late it is told to be is a bound only.
    waiting = len(others) if row.relative_to is None else len(row.relative_to)
    waited_ns = (row.caused_wait_ns or 0) / max(waiting, 1)
    critical = waited_ns >= CRITICAL_SHARE * span_ns > 0
    staged = any(row.endpoint in each.stages for each in result.pipelines)
    if row.perhaps_last or staged or not (handed and critical and "unknown" in others) or {*LATE} & {*others}:
        return row
    return replace(row, perhaps_last=times, perhaps_ns=round(waited_ns / max(times, 1)))


def _partly(result: Analysis) -> bool:
    """Whether some ranks were seen in part only: those may have been late unseen."""
    return any(row.relative_to is not None for row in result.lateness)


def _add_captures(result: Analysis) -> str:
    """What to do where captures at some nodes only, or cut ones, are why so little can be told."""
    cut = next((line for line in result.limits if line.startswith("Raise the snap length")), None)
    if cut is not None:
        return f" NCCL's clear-to-send entries were cut off: {cut[0].lower()}{cut[1:].partition(':')[0]}."
    if _partly(result) or any(line.startswith("Not captured at their own nodes") for line in result.limits):
        return " Add the captures of the other nodes."
    return ""
