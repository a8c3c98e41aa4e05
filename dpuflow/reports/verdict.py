"""The first lines of the text report: the answer to "who was late?", in ten seconds.

In: an ``Analysis``. Out: a headline and, for each late endpoint, how often, by how much, at what cost,
how sure, why and since when. Numbers are the result's own; nothing is judged anew here.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from dpuflow.quantities import (
    count,
    duration,
    listed,
    percent,
    rank_seconds,
)
from dpuflow.reports.headline import (
    faults_of,
    headline,
    late_headline,
    main_fault,
    of_nobody,
    perhaps_late,
    stuck_in,
)
from dpuflow.reports.late import MOST_LATE, late_lines, moment
from dpuflow.reports.layout import Paint, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.reports.names import Names
    from dpuflow.results import Account, Analysis, Finding, Lateness

LEAST_PART = 0.005
"""Parts of a step below this share are not told."""
MUCH = 2
"""The longest steps are told where they take so many times a typical one."""


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
        if main_fault(result) is not None:
            yield wrap(of_nobody(result, names)[0], "  ", "    ")
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "but")
        yield from _spread(result)
        yield from _what_to_add(result)
    yield from late_lines(result, late, names)
    if late:
        yield from _accounts(result, names)
        yield from _other_faults(result, names, "also")


def _perhaps_sentence(result: Analysis, row: Lateness, names: Names) -> str:
    """``rank 2, or one that it waits for: the last in 27 of 30 collectives, likely by 5.10 ms``."""
    total = sum(
        collective.complete and any(entry.endpoint == row.endpoint for entry in collective.ranks)
        for collective in result.collectives
        if collective.op != "send_recv"
    )
    return (
        f"{names.short(row.endpoint)}, or one that it waits for: the last in {row.perhaps_last:,} of"
        f" {count(total, 'collective')}, likely by {duration(row.perhaps_ns or 0)}; these captures cannot"
        " tell which"
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
        members = set(result.groups[each.group].endpoints)
        slow = max((row.p99_ns for row in result.steps if members & set(row.endpoints)), default=0)
        text += f"; the longest steps {duration(slow)}" if slow >= MUCH * each.step_ns else ""
        others = f" (the same in {count(alike[place] - 1, 'other group')})" if alike[place] > 1 else ""
        yield wrap(
            f"typical step {duration(each.step_ns)}: {text} ({share} exposed communication){others}",
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
        yield f"since: {moment(result, finding.start_ns)}"
    if finding.cost_ns is not None:
        yield f"cost: the others have waited {rank_seconds(finding.cost_ns)} for it until the captures end"
    if finding.condition == "hang":
        yield (
            "likely cause: not visible in these packets; its process is stopped, waits for something"
            " else, or runs another operation: its stack shows which"
        )
    yield f"confidence: {percent(finding.confidence)}"


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
        under = dict.fromkeys(part.condition for each in alike for part in each.consists_of)
        beside = [name.replace("_", " ") for name in under if name != condition]
        told += [f"with {listed(beside, 3)}"] if beside else []
        parts.append(f"{condition.replace('_', ' ')} ({', '.join(filter(None, told))})")
    if parts:
        yield wrap(f"{lead}: {listed(parts)}; see the findings", "  ", "    ")
