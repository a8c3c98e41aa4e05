"""Ranks of one node that are late together, as one incident.

In: an ``Analysis``. Out: the same, where such ranks know of each other (``Lateness.together``) and share one
finding. GPUs of a node wait for each other inside it, which no packet shows: where one is late its node's
others are, each in the collectives of its own rail.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dpuflow.arrays.components import connected
from dpuflow.findings.build import SEVERITIES
from dpuflow.findings.case import severity_of
from dpuflow.findings.ranks import kept_waiting, late_in_turn, late_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dpuflow.results import Analysis, Finding, Lateness

OWN: Final = ("compute", "host")
"""Causes that are a rank's own doing."""


def fold_nodes(result: Analysis) -> Analysis:
    """``result`` with the ranks told that are late together, and one straggler finding a node."""
    units = list(_together(result))
    if not units:
        return result
    mates = {end: unit for unit in units for end in unit}
    lateness = [replace(row, together=mates.get(row.endpoint, [])) for row in result.lateness]
    result = replace(result, lateness=lateness)
    findings = list(_findings(result, {row.endpoint: row for row in lateness}))
    return replace(result, findings=[replace(row, id=number) for number, row in enumerate(findings)])


def _together(result: Analysis) -> Iterator[list[int]]:
    """Endpoints of one node that were late in the same operations by as much, two or more."""
    node = {endpoint.id: endpoint.node for endpoint in result.endpoints}
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent") and row.cause in OWN]
    late = [row for row in late if row.node is None and node[row.endpoint] is not None]
    times = _late_times(result)
    by_node: defaultdict[tuple[int | None, str], list[Lateness]] = defaultdict(list)
    for row in late:
        by_node[node[row.endpoint], row.verdict].append(row)
    for rows in by_node.values():
        alike = [(a, b) for a in rows for b in rows if _alike(a, b, times)]
        for pairs in connected(alike, lambda pair: [row.endpoint for row in pair]):
            unit = sorted({row.endpoint for pair in pairs for row in pair})
            if len(unit) > 1:
                yield unit


def _late_times(result: Analysis) -> dict[int, tuple[int, frozenset[int]]]:
    """Of each endpoint how many complete collectives it took part in, and which of them, counted in their
    order, it was late in by its own doing: rails may have clocks that nothing ties."""
    seen: defaultdict[int, int] = defaultdict(int)
    late: defaultdict[int, set[int]] = defaultdict(set)
    for collective in result.collectives:
        for entry in collective.ranks if collective.op != "send_recv" else ():
            if entry.cause in OWN and entry.bound in ("exact", "at_least"):
                late[entry.endpoint].add(seen[entry.endpoint])
            seen[entry.endpoint] += 1
    return {end: (count, frozenset(late[end])) for end, count in seen.items()}


def _alike(a: Lateness, b: Lateness, times: Mapping[int, tuple[int, frozenset[int]]]) -> bool:
    """Whether most of what either was late in both were, by amounts that cannot be told apart."""
    (count, mine), (others, theirs) = times[a.endpoint], times[b.endpoint]
    apart_ns = abs((a.late_ns or 0) - (b.late_ns or 0))
    exact = a.late_bound == b.late_bound == "exact"
    as_much = not exact or apart_ns <= max(a.detectable_ns or 0, b.detectable_ns or 0)
    return count == others and as_much and 2 * len(mine & theirs) > len(mine | theirs)


def _findings(result: Analysis, rows: Mapping[int, Lateness]) -> Iterator[Finding]:
    """Stragglers of one node as one; the sentence on those late in turn by nodes."""
    told: set[int] = set()
    stragglers = [finding for finding in result.findings if finding.condition == "straggler"]
    for finding in result.findings:
        if finding.condition != "straggler":
            yield finding
        elif len(finding.endpoints) > 1:
            mine = [rows[end] for end in finding.endpoints if end in rows]
            turning = mine and all(row.steadiness == "rotating" and row.node is None for row in mine)
            yield replace(finding, summary=late_in_turn(mine, result)) if turning else finding
        elif finding.endpoints[0] not in told:
            together = rows[finding.endpoints[0]].together if finding.endpoints[0] in rows else []
            same = [one for one in stragglers if len(one.endpoints) == 1 and one.endpoints[0] in together]
            told.update(one.endpoints[0] for one in same)
            yield _one(same, result, rows) if len(same) > 1 else finding


def _one(same: Sequence[Finding], result: Analysis, rows: Mapping[int, Lateness]) -> Finding:
    """One finding of those of a node's ranks; ``same``: the costliest first."""
    ends = [end for finding in same for end in finding.endpoints]
    cost = kept_waiting(result, ends)
    waited_ns = max(cost.ns or 0, sum(finding.cost_ns or 0 for finding in same))
    share = max([cost.share, *(finding.cost_share or 0.0 for finding in same)])
    severities = (severity_of(cost.share), *(finding.severity for finding in same))
    return replace(
        same[0],
        endpoints=ends,
        severity=max(severities, key=SEVERITIES.index),
        confidence=min(finding.confidence for finding in same),
        summary=late_together([rows[end] for end in ends], result, waited_ns),
        cost_ns=waited_ns,
        cost_share=share,
        evidence=[each for finding in same for each in finding.evidence[:1]],
    )
