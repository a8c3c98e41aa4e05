"""The first lines of the text report: the answer to "who was late?", in ten seconds.

In: an ``Analysis``. Out: a headline and, for each late endpoint, how often, by how much, at what cost,
how sure, why and since when. Numbers are the result's own; nothing is judged anew here.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING

from dpuflow.figures.spans import jobs_with, list_jobs
from dpuflow.findings.ranks import units_of
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
from dpuflow.reports.headline import (
    faults_of,
    headline,
    late_headline,
    main_fault,
    perhaps_late,
    stuck_in,
    why_blind,
)
from dpuflow.reports.layout import Paint, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.reports.names import Names
    from dpuflow.results import Account, Analysis, Finding, Lateness

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


def verdict_lines(result: Analysis, names: Names, paint: Paint) -> Iterator[str]:
    """Headline and details."""
    late = sorted(
        (row for row in result.lateness if row.verdict in ("late", "intermittent")),
        key=lambda row: (row.verdict != "late", -(row.caused_wait_ns or 0), row.endpoint),
    )
    text, style = headline(result, late, names)
    if style == "good" and faults_of(result):
        style = "warn"  # nobody is late, yet all is not well
    for line in wrap(text).splitlines():
        yield paint(line, style)
    stuck = stuck_in(result)
    if stuck is not None:
        yield from (wrap(sentence, "  ", "    ") for sentence in _stuck(result, stuck))
        if late:
            yield wrap(f"before that: {late_headline(late, names)}", "  ", "    ")
    for row in perhaps_late(result)[:MOST_LATE]:
        yield wrap(_perhaps_sentence(result, row, names), "  ", "    ")
    if not late:
        if main_fault(result) is not None and result.lateness:
            why = why_blind(result, result.lateness)
            yield wrap(f"who was late could not be judged: {why}", "  ", "    ")
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "but")
        yield from _spread(result)
        yield from _what_to_add(result)
    if len(late) > 1 and all(row.steadiness == "rotating" for row in late):
        yield from _in_turn(result, late, names)
    else:
        units = units_of(late)
        for row in units[:MOST_LATE]:
            yield from _late(result, row, names, alone=len(units) == 1)
        yield from _more(units)
    if late:
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "also")


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
        told += [(ns, f"waiting for {names.unit(int(end))}") for end, ns in waited.items()]
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
        others = f" (the same in {count(alike[place] - 1, 'other group')})" if alike[place] > 1 else ""
        yield wrap(
            f"step {duration(each.step_ns)} in the mean, {share} of it communication: {text}{others}",
            "  ",
            "    ",
        )


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


def _stuck(result: Analysis, finding: Finding) -> Iterator[str]:
    """Of a job that stands still: since when, at what cost, why and how sure."""
    if finding.start_ns is not None:
        yield f"since: {_moment(result, finding.start_ns)}"
    if finding.cost_ns is not None:
        yield f"cost: the others have waited {rank_seconds(finding.cost_ns)} for it until the captures end"
    if finding.condition == "hang":
        yield (
            "likely cause: cannot be told from these packets; its process is stopped, waits for something"
            " else, or runs another operation: its stack shows which"
        )
    yield f"confidence: {percent(finding.confidence)}"


def _in_turn(result: Analysis, late: list[Lateness], names: Names) -> Iterator[str]:
    """One line for each rank, and what they have in common."""
    units = units_of(late)
    for row in units[:MOST_LATE]:
        word = "late together" if row.together else "late"
        text = f"{names.unit(row.endpoint)}: {word} in {_times(result, row)}"
        if row.late_ns is not None:
            text += f", by {late_by(row)} (median)"
        waited = _caused_ns(result, row)
        if waited is not None:
            text += f"; the others waited {rank_seconds(waited)} for {_it(row)}"
        yield wrap(text, "  ", "    ")
    yield from _more(units)
    since = _since(result, late[0])  # they share a finding
    sure = [row.confidence for row in late if row.confidence is not None]
    least = " at the least" if len(set(sure)) > 1 else ""
    causes = {row.cause for row in late}
    for sentence in (
        f"in turn, {since[0]}" if since else "",
        _waited(result, sum(row.caused_wait_ns or 0 for row in late), late),
        f"likely cause: {CAUSES[causes.pop()]}" if len(causes) == 1 else "",
        f"confidence: {percent(min(sure))}{least}, of each of them" if sure else "",
        "a different rank each time: look for what all of them do in turn (garbage collection, uneven input,"
        " checkpoints), not for a bad machine",
    ):
        if sentence:
            yield wrap(sentence, "  ", "    ")


def _rows_of(result: Analysis, row: Lateness) -> list[Lateness]:
    """The rows of a node's ranks that were late together, or the row alone."""
    return [each for each in result.lateness if each.endpoint in row.together] or [row]


def _times(result: Analysis, row: Lateness) -> str:
    """``6 of 20 collectives``, of ranks that were late together ``5 to 6 of the 20 collectives of each``."""
    if not row.together:
        return f"{late_in(row)} collectives"
    often = [round((each.late_share or 0) * each.collectives) for each in _rows_of(result, row)]
    least = f"{min(often):,} to " if min(often) < max(often) else ""
    return f"{least}{max(often):,} of the {row.collectives:,} collectives of each"


def _caused_ns(result: Analysis, row: Lateness) -> int | None:
    """What others waited for it, or for those of its node together."""
    waits = [each.caused_wait_ns for each in _rows_of(result, row) if each.caused_wait_ns is not None]
    return sum(waits) if waits else None


def _it(row: Lateness) -> str:
    return "them" if row.together else "it"


def _more(late: Sequence[Lateness]) -> Iterator[str]:
    if len(late) > MOST_LATE:
        yield f"  and {len(late) - MOST_LATE} more, in the table below"


def _late(result: Analysis, row: Lateness, names: Names, alone: bool) -> Iterator[str]:
    if not alone:
        yield f"  {names.unit(row.endpoint, long=True)}"
    indent = "  " if alone else "    "
    stage = _stage(result, row)
    counted = () if stage else (
        _how_often(result, row), _how_much(result, row),
        _waited(result, _caused_ns(result, row), _rows_of(result, row)),
    )  # fmt: skip
    for sentence in filter(
        None,
        (
            stage,
            *counted,
            _without(result, row),
            "its ranks are late in the same operations: one of its GPUs may keep the others, inside the node"
            if row.together
            else "",
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
        together = "together " if row.together else ""
        parts.append(f"late {together}in {_times(result, row)} ({percent(row.late_share)})")
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
        return [f"since {_moment(result, row.since_ns)}"]
    if row.steadiness == "persistent":
        return ["from the start"]
    found, start = _straggler(result, row), _start_ns(result)
    if found is None or found.start_ns is None or found.end_ns is None or start is None:
        return []
    return [f"from {duration(found.start_ns - start)} to {duration(found.end_ns - start)} into the capture"]


def _moment(result: Analysis, since_ns: int) -> str:
    """``2026-11-21 08:56:03.080 UTC, 80 ms into the capture``."""
    start = _start_ns(result)
    when = datetime.fromtimestamp(since_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    after = "" if start is None else f", {duration(since_ns - start)} into the capture"
    return f"{when}.{since_ns // 10**6 % 1000:03} UTC{after}"


def _start_ns(result: Analysis) -> int | None:
    """When the captures begin; None where nothing ties their clocks: each has a time of its own."""
    islands = {clock.island for clock in result.clocks if clock.island is not None}
    return result.start_ns if len(islands) <= 1 else None


def _straggler(result: Analysis, row: Lateness) -> Finding | None:
    """What is said of it among the findings."""
    return next(
        (f for f in result.findings if f.condition == "straggler" and row.endpoint in f.endpoints), None
    )


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


def _waited(result: Analysis, wait_ns: int | None, late: Sequence[Lateness]) -> str:
    """``cost: the others waited 0.7 rank-seconds for it, 18 % of the job's time (4 endpoints x 958 ms)``."""
    if wait_ns is None:
        return ""
    text = f"cost: the others waited {rank_seconds(wait_ns)} for {'it' if len(late) == 1 else 'them'}"
    jobs = jobs_with(list_jobs(result), [row.endpoint for row in late])
    endpoints = sum(len(job.endpoints) for job in jobs)
    total = sum(len(job.endpoints) * job.span_ns for job in jobs)
    if not endpoints:
        return text
    each = f"({count(endpoints, 'endpoint')} x {duration(total // endpoints)})"
    return f"{text}, {percent(wait_ns / total)} of the job's time {each}"


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
    faults = [fault for fault in faults_of(result) if fault is not main_fault(result)]
    parts = []
    for condition in dict.fromkeys(finding.condition for finding in faults):
        alike = [finding for finding in faults if finding.condition == condition]
        where = listed([names.short(endpoint) for endpoint in alike[0].endpoints], 3)
        taken = max(finding.cost_share or 0.0 for finding in alike)
        told = [f"{len(alike)} times" if len(alike) > 1 else where]
        told += [f"{percent(taken)} of the time"] if taken > 0 else []
        told += [f"{percent(alike[0].confidence)} sure"] if len(alike) == 1 else []
        parts.append(f"{condition.replace('_', ' ')} ({', '.join(filter(None, told))})")
    if parts:
        yield wrap(f"{lead}: {listed(parts)}; see the findings", "  ", "    ")
