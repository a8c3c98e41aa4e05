"""The first lines of the text report: the answer to "who was late?", in ten seconds.

In: an ``Analysis``. Out: a headline and, for each late endpoint, how often, by how much, at what cost,
how sure, why and since when. Numbers are the result's own; nothing is judged anew here.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING

from dpuflow.quantities import (
    count,
    duration,
    entry_times,
    in_steps,
    late_by,
    late_in,
    listed,
    percent,
    rank_seconds,
)
from dpuflow.reports.layout import Paint, wrap
from dpuflow.reports.sampled import sampled_one_of
from dpuflow.verdicts.pauses import worked_ns
from dpuflow.verdicts.persistence import CRITICAL_SHARE, is_material

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.reports.names import Names
    from dpuflow.results import Account, Analysis, Lateness

FEWEST_TIMES = 3
"""As of the verdict "intermittent": fewer are no habit."""
MOST_INCIDENTS = 2
"""Endpoints whose single incidents an all-clear tells."""
MOST_LATE = 4
"""Late endpoints told in full; the table has the others."""
LEAST_PART = 0.005
"""Parts of a step below this share are not told."""
STEADILY = 2 / 3
"""From this share of collectives on a rank is said to be late steadily."""

CAUSES = {
    "compute": "compute: it had its inputs and did not send",
    "receiver": "receiver: its peer granted no credit or window",
    "network": "network: its data was in flight, but slow, lost or ECN-marked",
    "host": "host: even its receive credits came late",
    "none": "none",
    "unknown": "cannot be told from these packets",
}

_ABOUT_THE_CAPTURE = {
    "straggler",
    "hang",
    "desync",
    "clock_untied",
    "capture_loss",
}  # these speak of no fault of their own


def verdict_lines(result: Analysis, names: Names, paint: Paint) -> Iterator[str]:
    """Headline and details."""
    late = sorted(
        (row for row in result.lateness if row.verdict in ("late", "intermittent")),
        key=lambda row: (row.verdict != "late", -(row.caused_wait_ns or 0), row.endpoint),
    )
    text, style = _headline(result, late, names)
    for line in wrap(text).splitlines():
        yield paint(line, style)
    for row in _perhaps(result)[:MOST_LATE]:
        yield wrap(_perhaps_sentence(result, row, names), "  ", "    ")
    if not late:
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "but")
        yield from _spread(result)
        yield from _what_to_add(result)
    if len(late) > 1 and all(row.steadiness == "rotating" for row in late):
        yield from _in_turn(late, names)
    else:
        for row in late[:MOST_LATE]:
            yield from _late(result, row, names, alone=len(late) == 1)
    if len(late) > MOST_LATE:
        yield f"  and {len(late) - MOST_LATE} more, in the table below"
    if late:
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "also")


def _headline(result: Analysis, late: list[Lateness], names: Names) -> tuple[str, str]:
    stuck = [finding for finding in result.findings if finding.condition in ("desync", "hang")]
    if stuck:
        return f"{stuck[0].condition.upper()}: {stuck[0].summary}", "bad"
    if late:
        told = [row for row in late if row.cause != "unknown"]
        style = "bad" if told and told[0].verdict == "late" else "warn"
        if len(told) == len(late):
            return _late_headline(told, names), style
        unclear = listed([names.short(row.endpoint) for row in late if row.cause == "unknown"])
        add = "cannot be told from the nodes captured. Add the captures of the other nodes."
        if told:
            return (
                f"{_late_headline(told, names)} Messages of {unclear} came late, too: whether it or the"
                f" network kept them {add}"
            ), style
        return f"MESSAGES OF {unclear} CAME LATE. Whether it or the network kept them {add}", style
    if not result.pipelines and not any(c.op != "send_recv" for c in result.collectives):
        one_of = sampled_one_of(result)
        if one_of is not None:
            return (
                f"NO VERDICT: about 1 in {one_of:.3g} packets was captured (sampling), too few to follow"
                " messages. Rates and ECN marks are below."
            ), "warn"
        if result.collectives:
            text = "NO VERDICT: transfers but no collectives were found, so nobody can be called late."
        else:
            text = "NO VERDICT: no collectives were found, so nobody can be called late."
        return text + _add_captures(result), "warn"
    perhaps = _perhaps(result)
    if perhaps:
        who = listed([names.short(row.endpoint) for row in perhaps], 3, "or")
        return (
            f"{who}, OR ONE THAT {'IT WAITS' if len(perhaps) == 1 else 'THEY WAIT'} FOR, CAME LATE. Which of"
            f" them, and why, cannot be told from the nodes captured.{_add_captures(result)}"
        ), "warn"
    return _clear_headline(result, names)


def _clear_headline(result: Analysis, names: Names) -> tuple[str, str]:
    """Where nobody is said to be late: how far that goes, and of whom it is not said."""
    blind = [row for row in result.lateness if row.verdict == "unknown"]
    limit = max((row.detectable_ns or 0 for row in result.lateness if row not in blind), default=0)
    beyond = f" by more than {duration(limit)} a step" if limit else ""
    if blind and len(blind) == len(result.lateness):
        return f"COULD NOT BE JUDGED: {_why_blind(result, blind)}.{_add_captures(result)}", "warn"
    if blind:
        who = listed([names.short(row.endpoint) for row in blind])
        # By at least the noise of the group, yet of a rank that others may have kept (``judgement.doubt``).
        behind = [names.short(row.endpoint) for row in blind if row.collectives and row.last_share]
        why = "entered late, too rarely or not provably by its own doing."
        waited = f" {listed(behind)} {why}" if behind else ""
        once = _incidents(result, names, [row.endpoint for row in blind])
        if once:
            return (
                f"NOBODY SEEN LATE of its own doing as a rule{beyond}, but {who} could not be judged: {once},"
                f" and too little was captured to call that a habit or none.{_add_captures(result)}"
            ), "warn"
        return (
            f"NOBODY SEEN LATE of its own doing{beyond}, but {who} could not be judged:"
            f" {_why_blind(result, blind)}.{waited}{_add_captures(result)}"
        ), "warn"
    hidden = max((each.unexplained_share for each in result.accounts), default=0.0)
    if hidden >= CRITICAL_SHARE:
        return (
            f"NOBODY SEEN LATE of its own doing{beyond}, but {percent(hidden)} of the time is unexplained."
            f"{_add_captures(result)}"
        ), "warn"
    if _partly(result):
        return (f"NOBODY SEEN LATE{beyond}, but not every rank was captured.{_add_captures(result)}"), "warn"
    once = _incidents(result, names)
    if once:
        return f"NOBODY WAS LATE OF ITS OWN DOING as a rule{beyond}; {once}.", "good"
    return f"NOBODY WAS LATE OF ITS OWN DOING{beyond}.", "good"


def _incidents(result: Analysis, names: Names, of_all: Sequence[int] = ()) -> str:
    """What was no habit: ``rank 2 once by 9 ms and rank 0 twice, by up to 4 ms``; the worst first.

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
    told: list[str] = []
    if not late.keys() >= set(of_all):
        return ""
    late = {endpoint: times for endpoint, times in late.items() if not of_all or endpoint in of_all}
    for endpoint, times in sorted(late.items(), key=lambda item: -max(item[1]))[:MOST_INCIDENTS]:
        often = {1: "once by", 2: "twice, by up to"}.get(len(times), f"{len(times):,} times, by up to")
        told.append(f"{names.short(endpoint)} {often} {duration(max(times))}")
    more = f", and {len(late) - len(told)} more" if len(late) > len(told) else ""
    return listed(told) + more if told else ""


def _why_blind(result: Analysis, blind: list[Lateness]) -> str:
    """Why nothing is said of these ranks: most of their times are not told, or too much would be hidden."""
    hidden = [row.detectable_ns for row in blind if row.detectable_ns is not None]
    if 2 * len(hidden) > len(blind):
        step = [steps.step_ns for steps in result.steps]
        of = f" (a step takes {duration(median(step))})" if step else ""
        return f"lateness below {duration(median(hidden))} a step would go unnoticed{of}"
    told = sum(row.told.exact + row.told.bounded for row in blind)
    total = told + sum(row.told.untold for row in blind)
    if 2 * told >= total > 0:
        return "too few of their entry times are known closely enough"
    cut = sum(not each.complete for each in result.collectives if each.op != "send_recv")
    known = f"only {told:,}" if told else "none"
    text = f"{known} of their {total:,} entry times {'are' if told > 1 else 'is'} known"
    text += f", {count(cut, 'collective')} only partly captured" if cut else ""
    lost = any(finding.condition == "capture_loss" for finding in result.findings)
    return text + (", the captures lost packets" if lost else "")


def _perhaps(result: Analysis) -> list[Lateness]:
    """Endpoints that came last, or wait for one that did, at a cost: a habit, and 1 % of the time."""
    import numpy as np

    end = max((c.end_ns for c in result.collectives), default=0)
    span = worked_ns(np.array([c.start_ns for c in result.collectives], np.int64), end)
    cost = {row.endpoint: row.perhaps_last * (row.perhaps_ns or 0) for row in result.lateness}
    found = [
        row
        for row in result.lateness
        if row.verdict not in ("late", "intermittent")
        and row.perhaps_last >= FEWEST_TIMES
        and is_material(cost[row.endpoint], span)
    ]
    most = max((cost[row.endpoint] for row in found), default=0)
    # Others that wait for the same one come late more seldom, or by less.
    return sorted(
        (row for row in found if 2 * cost[row.endpoint] >= most), key=lambda row: -cost[row.endpoint]
    )


def _perhaps_sentence(result: Analysis, row: Lateness, names: Names) -> str:
    """``rank 2, or one that it waits for: the last in 27 of 30 collectives, by 5.10 ms (median)``."""
    total = sum(
        collective.complete and any(entry.endpoint == row.endpoint for entry in collective.ranks)
        for collective in result.collectives
        if collective.op != "send_recv"
    )
    return (
        f"{names.short(row.endpoint)}, or one that it waits for: the last in {row.perhaps_last:,} of"
        f" {count(total, 'collective')}, by {duration(row.perhaps_ns or 0)} (median); these"
        " captures cannot tell which"
    )


def _accounts(result: Analysis, names: Names) -> Iterator[str]:
    """``step 31.2 ms: 18.4 ms work, 9.9 ms waiting for rank 3, 2.1 ms transfer, 800 us unexplained``.

    Of accounts whose steps are as long, to 1 % (rails of one job), the first stands for all.
    """
    shown: list[Account] = []
    alike: Counter[int] = Counter()
    for each in result.accounts:
        near = (n for n, one in enumerate(shown) if 100 * abs(one.step_ns - each.step_ns) <= one.step_ns)
        place = next(near, len(shown))
        shown += [each] if place == len(shown) else []
        alike[place] += 1
    for place, each in enumerate(shown[:MOST_LATE]):
        late = {row.endpoint for row in result.lateness if row.verdict in ("late", "intermittent")}
        waited = {end: ns for end, ns in each.waited.items() if int(end) in late and ns > 0}
        parts = each.parts
        told = [(sum(parts.work.values()) - sum(waited.values()), "work")]
        told += [(ns, f"waiting for {names.short(int(end))}") for end, ns in waited.items()]
        told += [
            (parts.library, "library"),
            (parts.transfer, "transfer"),
            (parts.network, "network"),
            (parts.credit, "waiting for credit"),
            (sum(parts.in_node.values()), "inside nodes"),
            (parts.unexplained, "unexplained"),
        ]
        text = ", ".join(f"{duration(ns)} {what}" for ns, what in told if ns >= LEAST_PART * each.step_ns > 0)
        share = percent(each.exposed_ns / max(each.step_ns, 1))
        others = f" ({count(alike[place] - 1, 'other group')} alike)" if alike[place] > 1 else ""
        yield wrap(
            f"step {duration(each.step_ns)}, {share} of it communication: {text}{others}", "  ", "    "
        )


def _partly(result: Analysis) -> bool:
    """Whether some ranks were seen in part only: those may have been late unseen."""
    return any(row.relative_to is not None for row in result.lateness)


def _add_captures(result: Analysis) -> str:
    """What to do where captures at some nodes only are why so little can be told."""
    if _partly(result) or any(line.startswith("Not captured at their own nodes") for line in result.limits):
        return " Add the captures of the other nodes."
    return ""


def _late_headline(late: list[Lateness], names: Names) -> str:
    persistent = [row for row in late if row.verdict == "late"]
    rotating = [row for row in late if row.steadiness == "rotating"]
    if len(rotating) == len(late) > 1:
        return f"LATE IN TURN: {listed([names.short(row.endpoint) for row in late])}."
    if persistent:
        who = [names.long(row.endpoint) for row in persistent]
        rest = [names.short(row.endpoint) for row in late if row not in persistent]
        return f"LATE: {listed(who, 4)}." + (f" Now and then also {listed(rest)}." if rest else "")
    return f"LATE NOW AND THEN: {listed([names.long(row.endpoint) for row in late], 4)}."


def _spread(result: Analysis) -> Iterator[str]:
    """How far apart the ranks entered where nobody was late."""
    spreads = []
    for collective in result.collectives:
        known = [e.lateness_ns for e in collective.ranks if e.bound == "exact" and e.lateness_ns is not None]
        if collective.complete and collective.op != "send_recv" and len(known) > 1:
            spreads.append(max(known))
    if spreads:
        where = count(len(spreads), "collective")
        said = f"in {where} the last rank entered {duration(median(spreads))} after the first (median)"
        yield wrap(said, "  ", "    ")


def _what_to_add(result: Analysis) -> Iterator[str]:
    """Where of some endpoints nothing can be told, whether more captures would help."""
    blind = sum(row.verdict == "unknown" for row in result.lateness)
    endpoints = len({endpoint for group in result.groups for endpoint in group.endpoints})
    if blind and len(result.captures) < endpoints:
        yield wrap(
            f"{count(len(result.captures), 'capture')} for {count(endpoints, 'endpoint')}: a capture on each"
            " node shows when its rank entered",
            "  ",
            "    ",
        )


def _in_turn(late: list[Lateness], names: Names) -> Iterator[str]:
    """One line for each rank, and what they have in common."""
    for row in late[:MOST_LATE]:
        text = f"{names.short(row.endpoint)}: late in {late_in(row)} collectives"
        if row.caused_wait_ns is not None:
            text += f"; the others waited {rank_seconds(row.caused_wait_ns)} for it"
        yield wrap(text, "  ", "    ")
    sure = [row.confidence for row in late if row.confidence is not None]
    if sure:
        least = " at the least" if len(set(sure)) > 1 else ""
        yield wrap(f"confidence: {percent(min(sure))}{least}, of each of them", "  ", "    ")
    yield wrap(
        "a different rank each time: look for what all of them do in turn (garbage collection, uneven input,"
        " checkpoints), not for a bad machine",
        "  ",
        "    ",
    )


def _late(result: Analysis, row: Lateness, names: Names, alone: bool) -> Iterator[str]:
    if not alone:
        yield f"  {names.long(row.endpoint)}"
    indent = "  " if alone else "    "
    stage = _stage(result, row)
    counted = () if stage else (_how_often(result, row), _how_much(result, row), _cost(result, row))
    for sentence in filter(
        None,
        (
            stage,
            *counted,
            _without(result, row),
            f"likely cause: {CAUSES[row.cause]}" if row.cause != "none" else "",
            _sure(result, row, counted=not stage),
            _relative(row, names),
        ),
    ):
        yield wrap(sentence, indent, indent + "  ")


def _stage(result: Analysis, row: Lateness) -> str:
    """Of a slow stage of a pipeline: what it works for a microbatch, and what the others do."""
    for pipeline in result.pipelines:
        if row.endpoint not in pipeline.stages:
            continue
        place = pipeline.stages.index(row.endpoint)
        where = f"stage {place + 1} of {len(pipeline.stages)}"
        if row.endpoint not in pipeline.late:
            incidents = in_steps(pipeline, row.endpoint)
            if incidents and not row.collectives:
                return f"{where} {incidents}"
            continue
        parts = []
        for way, times in (("forward", pipeline.forward_ns), ("backward", pipeline.backward_ns)):
            others = [t for at, t in enumerate(times) if at != place and t is not None]
            if times[place] is not None and others:
                parts.append(f"{way} {duration(times[place])}, the others {duration(median(others))}")
        if not parts:  # it was compared with the same stage of other pipelines
            continue
        return ", ".join(
            [f"{where} works longer for each microbatch: {'; '.join(parts)}", *_since(result, row)]
        )
    return ""


def _how_often(result: Analysis, row: Lateness) -> str:
    parts = []
    if row.late_share is not None:
        parts.append(f"late in {late_in(row)} collectives ({percent(row.late_share)})")
    if row.last_share is not None:
        parts.append(f"the last in {round(row.last_share * row.collectives):,}")
    if row.steadiness == "persistent":
        # Less often than that it is late once in a step, or from its onset on.
        parts.append(
            "steadily" if (row.late_share or 0) >= STEADILY or row.since_ns else "in step after step"
        )
    elif row.steadiness is not None:
        parts.append("in turn with others" if row.steadiness == "rotating" else "now and then")
    return ", ".join([*parts, *_since(result, row)])


def _since(result: Analysis, row: Lateness) -> list[str]:
    if row.since_ns is not None:
        when = datetime.fromtimestamp(row.since_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        after = (
            ""
            if result.start_ns is None
            else f", {duration(row.since_ns - result.start_ns)} into the capture"
        )
        return [f"since {when}.{row.since_ns // 10**6 % 1000:03} UTC{after}"]
    return ["from the start"] if row.steadiness == "persistent" else []


def _how_much(result: Analysis, row: Lateness) -> str:
    if row.late_ns is None:
        return ""
    text = f"when late, by {late_by(row)} (median)"
    if row.late_bound == "at_least":
        return text
    errors = [
        entry.error_ns
        for collective in result.collectives
        if collective.complete
        for entry in collective.ranks
        if entry.endpoint == row.endpoint and entry.bound == "exact" and entry.error_ns is not None
    ]
    text += f", {duration(row.late_most_ns)} at most"
    return text + (f"; each +-{duration(median(errors))}" if errors else "")


def _cost(result: Analysis, row: Lateness) -> str:
    if row.caused_wait_ns is None:
        return ""
    text = f"cost: the others waited {rank_seconds(row.caused_wait_ns)} for it"
    endpoints = len({endpoint for group in result.groups for endpoint in group.endpoints})
    # Before its first and after its last collective the job computes nothing together: no time to lose.
    begin = min((c.start_ns for c in result.collectives), default=0)
    span = max((c.end_ns for c in result.collectives), default=0) - begin
    if not endpoints or span <= 0:
        return text
    share = percent(row.caused_wait_ns / (endpoints * span))
    return f"{text}, {share} of the job's time ({count(endpoints, 'endpoint')} x {duration(span)})"


def _without(result: Analysis, row: Lateness) -> str:
    for what_if in result.what_if:
        if what_if.endpoint == row.endpoint:
            without, step = duration(what_if.step_without_ns), duration(what_if.step_ns)
            # A root that runs ahead takes no step longer; its receivers wait all the same.
            return f"without it a step would take {without} instead of {step}" if without != step else ""
    return ""


def _sure(result: Analysis, row: Lateness, counted: bool) -> str:
    """Confidence of the verdict, and what lowers it; ``counted``: by collectives."""
    bounds = Counter(
        entry.bound
        for collective in result.collectives
        if collective.complete and collective.op != "send_recv"
        for entry in collective.ranks
        if entry.endpoint == row.endpoint
    )
    parts = [percent(row.confidence)] if row.confidence is not None else []
    if bounds and counted:
        parts.append(
            entry_times(*(bounds[bound] for bound in ("exact", "at_least", "at_most", "unobservable")))
        )
    if any(capture.lost_packets for capture in result.captures):
        parts.append("the captures lost packets")
    return "confidence: " + "; ".join(parts) if parts else ""


def _relative(row: Lateness, names: Names) -> str:
    if not row.relative_to:
        return ""
    who = listed([names.short(end) for end in row.relative_to])
    return f"measured against {who} only; the others were not captured"


def _other_faults(result: Analysis, names: Names, lead: str) -> Iterator[str]:
    """Faults that are nobody's lateness, and where: in the first lines, as they may be the answer."""
    faults = [
        finding
        for finding in result.findings
        if finding.severity != "info" and finding.condition not in _ABOUT_THE_CAPTURE
    ]
    parts = []
    for condition in dict.fromkeys(finding.condition for finding in faults):
        alike = [finding for finding in faults if finding.condition == condition]
        where = listed([names.short(endpoint) for endpoint in alike[0].endpoints], 3)
        where = f"{len(alike)} times" if len(alike) > 1 else where
        parts.append(condition.replace("_", " ") + (f" ({where})" if where else ""))
    if parts:
        yield wrap(f"{lead}: {listed(parts)}; see the findings", "  ", "    ")
