"""Each late endpoint in the report: how often, since when, by how much, at what cost, why and how sure.

In: an ``Analysis`` and those of its rows that are late. Out: lines. Ranks of one node that are late together
are told as one.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from statistics import median
from typing import TYPE_CHECKING

from dpuflow.findings.ranks import stage_steps, units_of
from dpuflow.quantities import (
    duration,
    entry_times,
    in_steps,
    late_by,
    late_in,
    listed,
    percent,
    rank_seconds,
)
from dpuflow.reports.layout import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Finding, Lateness

MOST_LATE = 4
"""Late endpoints told in full; the table has the others."""
STEADILY = 2 / 3
"""From this share of collectives on a rank is said to be late steadily."""

CAUSES = {
    "compute": "compute: it had its inputs and did not send",
    "receiver": "receiver: its peer granted no credit or window",
    "network": "network: its data was in flight, but slow, lost or ECN-marked",
    "host": "host: even its receive credits came late",
    "none": "none",
    "unknown": "not visible in these packets",
}


def late_lines(result: Analysis, late: list[Lateness], names: Names) -> Iterator[str]:
    """All of ``late``, the worst first."""
    units = units_of(late)
    if len(late) > 1 and all(row.steadiness == "rotating" for row in late):
        yield from _in_turn(result, late, names)
        return
    for row in units[:MOST_LATE]:
        yield from _late(result, row, names, alone=len(units) == 1)
    yield from _more(units)


def _in_turn(result: Analysis, late: list[Lateness], names: Names) -> Iterator[str]:
    """One line for each rank, and what they have in common."""
    units = units_of(late)
    for row in units[:MOST_LATE]:
        word = "late together" if row.together else "late"
        often = stage_steps(row, result) or f"{word} in {_times(result, row)}"
        text = f"{names.unit(row.endpoint)}: {often}"
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
        since[0] if since else "",
        _waited(result, sum(row.caused_wait_ns or 0 for row in late) or None, late),
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
            "its ranks are late in the same operations: one of its GPUs may be holding up the others inside"
            " the node"
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
        parts, compared = [], False
        for way, times in (("forward", pipeline.forward_ns), ("backward", pipeline.backward_ns)):
            own = times[place]
            others = [t for at, t in enumerate(times) if at != place and t is not None]
            if own is None or not others:
                continue
            compared, usual = True, median(others)
            if own > usual:  # what ends stages wait for may look like their work
                parts.append(f"{way} {duration(own)} (others {duration(usual)})")
        if not compared:  # but with the same stage of other pipelines
            continue
        each = (
            f" per microbatch: {', '.join(parts)}"
            if parts
            else " in a step than those it can be compared with"
        )
        return ", ".join([f"{where} takes longer{each}", *_since(result, row)])
    return ""


def _how_often(result: Analysis, row: Lateness) -> str:
    parts = []
    if row.late_share is not None:
        together = "together " if row.together else ""
        parts.append(f"late {together}in {_times(result, row)} ({percent(row.late_share)}){_own(row)}")
    if row.last_share is not None:
        parts.append(f"arrived last in {round(row.last_share * row.collectives):,}")
    if row.steadiness == "persistent":
        # Less often than that it is late once in a step, or from its onset on.
        parts.append("steadily" if (row.late_share or 0) >= STEADILY or row.since_ns else "once a step")
    elif row.steadiness is not None:
        parts.append("in turn with others" if row.steadiness == "rotating" else "now and then")
    return ", ".join([*parts, *_since(result, row)])


def _own(row: Lateness) -> str:
    """``, in 19 by its own doing``, where its inputs made it late in some others."""
    own, late = (round((share or 0) * row.collectives) for share in (row.own_share, row.late_share))
    return f", in {own:,} by its own doing" if 0 < own < late else ""


def _since(result: Analysis, row: Lateness) -> list[str]:
    if row.since_ns is not None:
        return [f"since {moment(result, row.since_ns)}"]
    if row.steadiness == "persistent":
        return ["from the start"]
    found, start = _straggler(result, row), _start_ns(result)
    if found is None or found.start_ns is None or found.end_ns is None or start is None:
        return []
    begin, end = (duration(at - start) for at in (found.start_ns, found.end_ns))
    return [f"between {begin} and {end} after the capture began"]


def moment(result: Analysis, since_ns: int) -> str:
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
    told = ("straggler", "node_skew", "host_cpu")
    return next((f for f in result.findings if f.condition in told and row.endpoint in f.endpoints), None)


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
    return text + (f"; error +-{duration(median(errors))} (median)" if errors else "")


def _waited(result: Analysis, wait_ns: int | None, late: Sequence[Lateness]) -> str:
    """``cost: 25 % of the job's time; the others waited 0.7 rank-seconds for it``: the finding's share."""
    if wait_ns is None:
        return ""
    found = _straggler(result, late[0])
    taken = found.cost_share if found is not None else None
    if found is not None and len(late) > 1:  # of those that are late together none alone makes a difference
        wait_ns = max(wait_ns, found.cost_ns or 0)
    share = "" if taken is None else f"{percent(taken)} of the job's time; "
    return f"cost: {share}the others waited {rank_seconds(wait_ns)} for {'it' if len(late) == 1 else 'them'}"


def _without(result: Analysis, row: Lateness) -> str:
    for what_if in result.what_if:
        if what_if.endpoint == row.endpoint:
            less = what_if.step_ns - what_if.step_without_ns
            # A root that runs ahead takes no step longer; its receivers wait all the same.
            return f"without it a step would be {duration(less)} shorter" if less > 0 else ""
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
