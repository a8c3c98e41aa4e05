"""The results of several islands of clocks in, one result out.

In: for each island what its captures alone show. Endpoints, flows and captures are common to all. Out: one
``Analysis``. Parts of one operation become one collective, with all its ranks; lateness stays that against
the earliest rank of the same island. Where NICs stand for their nodes, the node is named.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dpuflow.figures import list_all_reduce_what_if, list_attribution, list_operations, list_tax
from dpuflow.findings.build import explained
from dpuflow.findings.clients import find_skew_of
from dpuflow.findings.ranks import late_in_turn, unit_name
from dpuflow.quantities import sentence
from dpuflow.results import Group, Judged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dpuflow.results import Analysis, Collective, Endpoint, Finding, Lateness, RankEntry
    from dpuflow.results.tokens import Verdict

T = TypeVar("T")

_BY_BOUND = ("exact", "at_least", "at_most", "unobservable")
_BY_VERDICT = ("late", "intermittent", "on_time", "unknown")


def merged(islands: Sequence[Analysis], ties: Sequence[Sequence[int]], of_nodes: Sequence[bool]) -> Analysis:
    """One result of all islands, the first one's collectives first.

    ``ties``: of each island's collectives the number of the operation that it is a part of, -1 for none;
    ``of_nodes``: whether in those of an island a NIC stands for its node.
    """
    first = islands[0]
    if len(islands) == 1:
        return first
    node = {endpoint.id: endpoint.node for endpoint in first.endpoints}
    groups, collectives = _collectives(islands, ties, of_nodes, node)
    leading = _leading(ties)
    chosen = _lateness(islands, of_nodes, node)
    steps = [islands[n] for n in leading]  # others have the same ones
    whole = replace(
        first,
        endpoints=_endpoints(islands),
        groups=groups,
        collectives=collectives,
        lateness=[unit for _, _, unit in chosen],
        edges=_rows(islands, "edges"),
        what_if=_rows([islands[n] for n in leading if not of_nodes[n]], "what_if"),
        steps=_rows(steps, "steps"),
        accounts=[
            replace(row, group=_group_of(each.groups[row.group].endpoints, groups))
            for each in steps
            for row in each.accounts
        ],
        pipelines=_rows(islands, "pipelines"),
        transfers=[replace(row, id=n) for n, row in enumerate(_rows(islands, "transfers"))],
        requests=[replace(row, id=n) for n, row in enumerate(_rows(islands, "requests"))],
        loss_tax=_rows(steps, "loss_tax"),
        decode=_rows(steps, "decode"),
        network_cost=_rows(islands, "network_cost"),
        limits=list(_limits(islands)),
    )
    whole.operations, whole.attribution = list(list_operations(whole)), list(list_attribution(whole))
    whole.all_reduce_what_if = list(list_all_reduce_what_if(whole))
    whole.tax = list(list_tax(whole))
    found = list(_findings(islands, chosen, whole))
    skew = find_skew_of(whole, (0, max((row.last_ns or 0 for row in whole.requests), default=0)))
    if skew is not None:
        found = explained([row for row in found if row.condition != "session_skew"] + [skew])
        found = [replace(row, id=number) for number, row in enumerate(found)]
    return replace(whole, findings=found, judged=list(_judged(islands, found, whole.groups)))


def _rows(islands: Sequence[Analysis], name: str) -> list[Any]:
    """The rows of that name of all these islands."""
    return [row for each in islands for row in getattr(each, name)]


def _judged(
    islands: Sequence[Analysis], found: Sequence[Finding], groups: Sequence[Group]
) -> Iterator[Judged]:
    """Of each condition what the island says that saw most of it."""
    told = {row.condition for row in found} | {part.condition for row in found for part in row.consists_of}
    for rows in zip(*(each.judged for each in islands), strict=True):
        best = next(
            (row for state in ("not_found", "not_judged") for row in rows if row.state == state), rows[0]
        )
        stops = best.condition in ("early_stop_skew", "decode_early_stop")
        if stops and best.state == "not_judged" and _alike(groups):
            best = replace(best, reason=_NOT_COMPARED)
        yield Judged(best.condition, "found") if best.condition in told else best


_NOT_COMPARED: Final = (
    "replicas that share no packets stop at times on clocks that nothing ties (--clock trust compares them"
    " where all are synchronised)"
)


def _alike(groups: Sequence[Group]) -> bool:
    """Whether two groups have as many members, and none of them in both."""
    ends = [set(each.endpoints) for each in groups if len(each.endpoints) > 1]
    return any(len(a) == len(b) and not a & b for a in ends for b in ends)


def numbers_of(ties: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each island's collectives their numbers in the one result: in order, an operation's parts as one."""
    seen: dict[tuple[int, int], int] = {}
    return [
        [seen.setdefault((-1, tie) if tie >= 0 else (island, row), len(seen)) for row, tie in enumerate(tied)]
        for island, tied in enumerate(ties)
    ]


def _group_of(members: Sequence[int], groups: Sequence[Group]) -> int:
    """The group of all islands that has these members of one."""
    return next(group.id for group in groups if set(members) <= set(group.endpoints))


def _leading(ties: Sequence[Sequence[int]]) -> list[int]:
    """Islands but those all of whose operations others before them have parts of: the steps are the same."""
    told: set[int] = set()
    found = []
    for number, mine in enumerate(ties):
        if not mine or -1 in mine or not told.issuperset(mine):
            found.append(number)
        told |= set(mine)
    return found


def _endpoints(islands: Sequence[Analysis]) -> list[Endpoint]:
    """With the name and the rank that some island knows; no ranks where two islands number them otherwise."""
    labels = {
        row.id: row.label for each in reversed(islands) for row in each.endpoints if row.label is not None
    }
    ranks = {row.id: row.rank for each in reversed(islands) for row in each.endpoints if row.rank is not None}
    if len(set(ranks.values())) < len(ranks):
        ranks = {row.id: row.rank for row in islands[0].endpoints if row.rank is not None}
    return [replace(row, rank=ranks.get(row.id), label=labels.get(row.id)) for row in islands[0].endpoints]


def _collectives(
    islands: Sequence[Analysis],
    ties: Sequence[Sequence[int]],
    of_nodes: Sequence[bool],
    node: dict[int, int | None],
) -> tuple[list[Group], list[Collective]]:
    parts: dict[int, list[tuple[int, Collective]]] = {}
    for number, (each, numbers_) in enumerate(zip(islands, numbers_of(ties), strict=True)):
        for row, of_result in zip(each.collectives, numbers_, strict=True):
            parts.setdefault(of_result, []).append((number, row))
    groups: list[Group] = []
    numbers: dict[tuple[object, ...], int] = {}
    found: list[Collective] = []
    for mine in parts.values():
        island, row = mine[0]
        ends = [islands[n].groups[part.group].endpoints for n, part in mine]
        members = list(dict.fromkeys(end for own in ends for end in own))
        key = (island, row.group) if len(mine) == 1 else tuple(members)
        group = numbers.setdefault(key, len(groups))
        if group == len(groups):
            kinds = {islands[n].groups[part.group].kind for n, part in mine}
            groups.append(Group(group, members, kinds.pop() if len(kinds) == 1 else None))
        whole = row if len(mine) == 1 else _one([part for _, part in mine], of_nodes[island], node)
        found.append(replace(whole, id=len(found), group=group))
    return groups, found


def _one(parts: Sequence[Collective], of_nodes: bool, node: dict[int, int | None]) -> Collective:
    """One collective of its parts. Where NICs stand for nodes each part has bytes of its own."""
    first = parts[0]
    sizes = [part.bytes for part in parts]
    size = _sum(sizes) if of_nodes else first.bytes if len(set(sizes)) == 1 else None
    return replace(
        first,
        bytes=size,
        bytes_between=None if size is not None else first.bytes_between,
        wire_bytes=sum(part.wire_bytes for part in parts),
        start_ns=min(part.start_ns for part in parts),
        end_ns=max(part.end_ns for part in parts),
        confidence=min(part.confidence for part in parts),
        complete=all(part.complete for part in parts),
        ranks=_ranks(parts, of_nodes, node),
    )


def _sum(sizes: Sequence[int | None]) -> int | None:
    """None where one is not known."""
    return None if None in sizes else sum(size or 0 for size in sizes)


def _ranks(parts: Sequence[Collective], of_nodes: bool, node: dict[int, int | None]) -> list[RankEntry]:
    """The entries of all parts: of an endpoint, or of a node, the one that tells most."""
    ranks: dict[int, list[RankEntry]] = {}
    for rank in (rank for part in parts for rank in part.ranks):
        own = node[rank.endpoint] if of_nodes else None
        said = _untold(rank) if of_nodes and own is None else replace(rank, node=own)
        ranks.setdefault(rank.endpoint if own is None else own, []).append(said)
    return [_best(ranks[end]) for end in sorted(ranks)]


def _untold(rank: RankEntry) -> RankEntry:
    """Of a GPU of a node that nobody captured: its message may have waited for any other of that node."""
    why = "its node was not captured, and each of that node's GPUs may have kept its message"
    return replace(rank, enter_ns=None, lateness_ns=None, error_ns=None, bound="unobservable", why=why)


def _best(entries: Sequence[RankEntry]) -> RankEntry:
    """Of several NICs that stand for one node the entry that tells most."""

    def told(entry: RankEntry) -> tuple[int, int, int]:
        late, error = entry.lateness_ns or 0, entry.error_ns
        by_bound = -late if entry.bound == "at_least" else late if entry.bound == "at_most" else 0
        return _BY_BOUND.index(entry.bound), by_bound, 1 << 62 if error is None else error

    return min(entries, key=told)


def _lateness(
    islands: Sequence[Analysis], of_nodes: Sequence[bool], node: dict[int, int | None]
) -> list[tuple[int, Lateness, Lateness]]:
    """One row an endpoint, or a node, with its island and what it is there: of several the one that knows it
    in most collectives, and among those the verdict that most of them give."""
    rows: dict[int, list[tuple[int, Lateness]]] = {}
    for number, (each, by_node) in enumerate(zip(islands, of_nodes, strict=True)):
        for row in each.lateness:
            own = node[row.endpoint] if by_node else None
            rows.setdefault(row.endpoint if own is None else own, []).append((number, row))
    found = []
    for unit in sorted(rows):
        most = max(row.collectives for _, row in rows[unit])
        sure = [(number, row) for number, row in rows[unit] if 2 * row.collectives >= most]
        votes = Counter(row.verdict for _, row in sure)

        def said(row: Lateness, votes: Counter[Verdict] = votes) -> tuple[int, int, int]:
            return votes[row.verdict], -_BY_VERDICT.index(row.verdict), row.collectives

        number, best = max(sure, key=lambda each: said(each[1]))
        own = node[best.endpoint] if of_nodes[number] else None
        found.append((number, best, best if own is None else _of_node(islands[0], best, own)))
    return found


def _of_node(first: Analysis, row: Lateness, node: int) -> Lateness:
    return replace(row, endpoint=node, node=node, address=first.endpoints[node].address)


def _findings(
    islands: Sequence[Analysis], chosen: Sequence[tuple[int, Lateness, Lateness]], whole: Analysis
) -> Iterator[Finding]:
    """Those of flows and captures, which all islands know of, once; of who is late in turn one."""
    units = {(number, row.endpoint): unit for number, row, unit in chosen}
    told: set[tuple[str, tuple[int, ...], str]] = set()
    found: list[Finding] = []
    turns: list[tuple[Finding, list[Lateness]]] = []
    for number, row in ((number, row) for number, each in enumerate(islands) for row in each.findings):
        if row.condition != "straggler":
            key = (row.condition, tuple(row.endpoints), row.summary)
            found += [] if key in told else [row]
            told.add(key)
            continue
        mine = [units[number, end] for end in row.endpoints if (number, end) in units]
        if any(unit.steadiness == "rotating" for unit in mine):
            turns.append((row, mine))
        elif mine:
            here = unit_name(whole, replace(mine[0], node=None, endpoint=row.endpoints[0]))
            summary = sentence(row.summary.replace(here, unit_name(whole, mine[0])))
            found.append(replace(row, endpoints=_ends_of(mine[0], whole), summary=summary))
    if turns:
        found.insert(0, _in_turn(turns, whole))
    yield from (replace(row, id=number) for number, row in enumerate(found))


def _ends_of(unit: Lateness, whole: Analysis) -> list[int]:
    """The endpoints of what is judged as one."""
    if unit.node is None:
        return [unit.endpoint]
    # An endpoint with several GPUs behind it is a node of its own.
    return [end.id for end in whole.endpoints if end.node == unit.node] or [unit.node]


def _in_turn(turns: Sequence[tuple[Finding, Sequence[Lateness]]], whole: Analysis) -> Finding:
    """One finding of those of several islands that ranks are late in turn."""
    parts = [part for part, _ in turns]
    worst = max(parts, key=lambda part: part.cost_ns or 0)  # no time is taken across two clocks
    every = chain.from_iterable(mine for _, mine in turns)
    late = sorted(every, key=lambda unit: -(unit.caused_wait_ns or 0))
    return replace(
        parts[0],
        endpoints=list(dict.fromkeys(chain.from_iterable(_ends_of(unit, whole) for unit in late))),
        start_ns=worst.start_ns,
        end_ns=worst.end_ns,
        severity=max((part.severity for part in parts), key=("info", "warning", "critical").index),
        confidence=min(part.confidence for part in parts),
        summary=late_in_turn(late, whole) if len(late) > 1 else parts[0].summary,
        cost_ns=sum(unit.caused_wait_ns or 0 for unit in late),
        cost_share=max(_told(part.cost_share for part in parts), default=None),
        evidence=[part.evidence[0] for part in parts if part.evidence],
    )


def _told(values: Iterable[T | None]) -> list[T]:
    """Those that are known."""
    return [value for value in values if value is not None]


def _limits(islands: Sequence[Analysis]) -> Iterator[str]:
    """What all say once; what one says alone with its name, once for all that say it with other numbers."""
    common = set.intersection(*(set(each.limits) for each in islands))
    yield from (sentence for sentence in islands[0].limits if sentence in common)
    whole = islands[0]
    names = {
        clock.island: capture.vantage
        for capture, clock in zip(whole.captures, whole.clocks, strict=True)
        if clock.reference
    }
    alike: dict[str, list[tuple[int, str]]] = {}
    for number, each in enumerate(islands):
        for text in each.limits:
            if text not in common:
                alike.setdefault(re.sub(r"[0-9][0-9.,]*", "#", text), []).append((number, text))
    for said in alike.values():
        number, text = said[0]
        others = len({island for island, _ in said} - {number})
        more = f" and, with other numbers, of {others} more" if others else ""
        yield f"On the clock of {names.get(number, names[0])}{more}: {text}"
