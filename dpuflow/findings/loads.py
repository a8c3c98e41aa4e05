"""Operations in, findings about who has more to do, or stops, out: loads, replicas, stages, nodes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, NotJudgedError, make_finding
from dpuflow.findings.clients import FEWEST, SURELY, TWICE
from dpuflow.findings.hang import captured_until
from dpuflow.findings.ranks import kept_waiting
from dpuflow.quantities import duration, listed, name_of, node_name, percent
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding
    from dpuflow.verdicts.pipelines import Pipeline

    Floats = NDArray[np.float64]

LATE: Final = ("late", "intermittent")


def find_load_skews(case: Case) -> Iterator[Finding]:
    """One finding for each group whose all_to_alls bring one member more than its share.

    Only members are compared of whose messages all are seen: at their own nodes, or at all the others'.
    """
    captured = {end for ends in case.joined.local for end in ends}
    compared = hidden = False
    for group, everyone in enumerate(case.inferred.groups):
        members = [end for end in everyone if end in captured or captured.issuperset({*everyone} - {end})]
        numbers = [
            n
            for n in np.flatnonzero(case.inferred.group_of == group).tolist()
            if case.instances[n].op == Op.ALL_TO_ALL and case.instances[n].complete
        ]
        if len(numbers) < FEWEST or len(members) < FEWEST:
            hidden |= len(numbers) >= FEWEST and len(everyone) >= FEWEST
            continue
        compared = True
        got = _received(case, numbers, members)
        extra = got - got.mean(axis=1, keepdims=True)
        mean, error = extra.mean(axis=0), extra.std(axis=0) / np.sqrt(len(numbers))
        most = int(mean.argmax())
        surely = SURELY + float(np.sqrt(2 * np.log(len(members))))
        if not mean[most] > surely * error[most]:
            continue
        lost = float(mean[most]) * len(numbers) * _pace(case)
        share = min(lost / case.span_ns(members), 1.0)
        if share < SMALL_SHARE:
            continue
        name = name_of(case.result.endpoints[members[most]])
        yield make_finding(
            "load_skew",
            [members[most]],
            (case.joined.start_ns, case.joined.end_ns),
            Cost(round(lost), share),
            0.9,
            f"{name} receives {percent(got[:, most].sum() / got.sum())} of the data of {len(numbers)}"
            f" all_to_alls of {len(members)} ranks; an even share is {percent(1 / len(members))}:"
            f" {duration(round(lost))} more transfer time in total ({percent(share)} of the time).",
        )
    if hidden and not compared:
        raise NotJudgedError(f"what fewer than {FEWEST} members of a group receive was captured whole")


def _received(case: Case, numbers: list[int], members: list[int]) -> Floats:
    """Bytes that each member received in each of these operations."""
    place = np.full(len(case.joined.endpoints), -1)
    place[members] = np.arange(len(members))
    got = np.zeros((len(numbers), len(members)))
    for line, number in enumerate(numbers):
        rows = case.exchanges[case.instances[number].rows]
        at = place[rows["dst"]]
        got[line] = np.bincount(at[at >= 0], rows["bytes"][at >= 0].astype(float), len(members))
    return got


def _pace(case: Case) -> float:
    """ns a byte of the middle link."""
    pace = case.inferred.links.pace_ns[case.inferred.links.messages > 0]
    return float(median_of(pace)) if len(pace) else 0.0


def find_early_stops(case: Case) -> Iterator[Finding]:
    """One finding for each replica that stops while others like it go on.

    Replicas do the same: most operations of one are, by kind and size, operations of the other, too. Ranks
    that prefill are no replica of those that decode.
    """
    until = captured_until(case.joined)
    spans: dict[int, list[tuple[int, int]]] = {}
    kinds: dict[int, Counter[tuple[Op, int | None]]] = {}
    begun, ended_ns = case.spans_ns.tolist()
    for number, group in enumerate(case.inferred.group_of.tolist()):
        each = case.instances[number]
        if begun[number] != NEVER and each.op != Op.SEND_RECV:
            spans.setdefault(group, []).append((begun[number], ended_ns[number]))
            kinds.setdefault(group, Counter())[each.op, each.size] += 1
    ends = {group: max(end for _, end in each) for group, each in spans.items() if len(each) > FEWEST}
    for group, ended in ends.items():
        members = case.inferred.groups[group]
        peers = [
            other
            for other in ends
            if len(case.inferred.groups[other]) == len(members) > 1
            and not set(members) & set(case.inferred.groups[other])
            and 2 * sum(times for kind, times in kinds[group].items() if kind in kinds[other])
            > kinds[group].total()
        ]
        if not peers:
            continue
        last = min(ends[other] for other in peers)
        starts = np.sort([begin for begin, _ in spans[group]])
        quiet = min(last, *(until.get(end, NEVER) for end in members)) - ended
        share = quiet / max(ended + quiet - int(starts[0]), 1)
        if quiet <= TWICE * int(np.diff(starts).max()) or share < SMALL_SHARE:
            continue
        names = [name_of(case.result.endpoints[end]) for end in members]
        yield make_finding(
            "early_stop_skew",
            members,
            (ended, last),
            Cost(quiet * len(members), share),
            0.8,
            f"The replica of {listed(names, 4)} did nothing for {duration(quiet)} while"
            f" {'others' if len(peers) > 1 else 'the other one'} like it went on ({percent(share)} of its"
            f" time).",
        )


def find_bubbles(case: Case) -> Iterator[Finding]:
    """One finding for each pipeline whose stages wait for one that works longer."""
    shown = False
    for pipeline in case.inferred.pipelines:
        work, error = _stage_work(pipeline)
        known = np.flatnonzero(np.isfinite(work))
        if len(known) < FEWEST or pipeline.microbatches is None:
            continue
        shown = True
        most = int(known[work[known].argmax()])
        others = known[known != most]
        beyond = float(work[most] - median_of(work[others]))
        surely = SURELY + float(np.sqrt(2 * np.log(len(known))))
        noise = max(float(np.hypot(error[most], error[others].max())), float(np.std(work[others])))
        if not beyond > surely * noise:
            continue
        stages, several = len(pipeline.stages), pipeline.microbatches
        # With m microbatches over p stages a step takes (m + p - 1) times the slowest stage's work.
        length = (several + stages - 1) * float(work[most])
        share = min(several * beyond / max(length, 1.0), 1.0)
        if share < SMALL_SHARE:
            continue
        name = name_of(case.result.endpoints[pipeline.stages[most]])
        own = (stages - 1) / (several + stages - 1)
        yield make_finding(
            "pipeline_bubble",
            [pipeline.stages[most], *(end for n, end in enumerate(pipeline.stages) if n != most)],
            (case.joined.start_ns, case.joined.end_ns),
            Cost(round(share * case.span_ns(pipeline.stages) * (stages - 1)), share),
            0.8,
            f"{name} works {duration(round(float(work[most])))} for a microbatch, the other stages"
            f" {duration(round(float(median_of(work[others]))))}: they are idle for {percent(share)} of"
            f" the time because of it, beyond the schedule's own bubble of {percent(own)}.",
        )
    if not shown:
        raise NotJudgedError("the work of fewer than three stages of a pipeline shows")


def _stage_work(pipeline: Pipeline) -> tuple[Floats, Floats]:
    """What each stage works for a microbatch, all ways together, and the error; nan where a way is not"
    " told."""
    work, error = np.zeros((2, len(pipeline.stages)))
    for stage, ways in enumerate(pipeline.work):
        for way in ways:
            if way is None:
                continue
            told = way.own_ns[way.own_ns != NEVER].astype(float)
            if len(told) < FEWEST:
                work[stage] = np.nan
                continue
            work[stage] += median_of(told)
            error[stage] = np.hypot(error[stage], 1.25 * told.std() / np.sqrt(len(told)))
        if all(way is None for way in ways) or any(way is None for way in ways) != any(
            way is None for way in pipeline.work[len(pipeline.work) // 2]
        ):
            work[stage] = np.nan  # the ends send one way only
    return work, error


def find_node_skews(case: Case) -> Iterator[Finding]:
    """One finding where all judged ranks of a node are late and nobody else is."""
    rows = {row.endpoint: row for row in case.result.lateness if row.verdict != "unknown"}
    nodes: dict[int, list[int]] = {}
    for end in rows:
        node = case.result.endpoints[end].node
        if node is not None:
            nodes.setdefault(node, []).append(end)
    late = [end for end, row in rows.items() if row.verdict in LATE]
    for ends in nodes.values():
        if len(ends) < 2 or set(late) != set(ends) or len(rows) == len(ends):
            continue
        cost = kept_waiting(case.result, ends)
        host = all(rows[end].cause == "host" for end in ends)
        who = node_name([case.result.endpoints[end] for end in ends])
        rails = "grant credits and enter" if host else "enter"
        why = "what they share is slow"
        if not host:
            why = f"one of its GPUs holds up the others, or {why}"
        yield make_finding(
            "host_cpu" if host else "node_skew",
            ends,
            (case.joined.start_ns, case.joined.end_ns),
            cost,
            0.8,
            f"All ranks of {who} {rails} late, and none of another node: {why}. Their peers waited"
            f" {duration(cost.ns or 0)} of rank time for them.",
        )
