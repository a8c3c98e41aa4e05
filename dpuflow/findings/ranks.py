"""Judgements of ranks in, findings about those that are late by their own doing out.

Advice never blames hardware for lateness alone: packets show when a rank was late, not what it was doing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.figures.spans import jobs_with, list_jobs
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import SHOWN, message_evidence
from dpuflow.quantities import (
    duration,
    in_steps,
    late_by,
    late_in,
    listed,
    name_of,
    node_name,
    rank_seconds,
)
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Analysis, Evidence, Finding, Lateness
    from dpuflow.schema.tables import CaptureTables, Joined
    from dpuflow.verdicts import Inferred
    from dpuflow.verdicts.stages import Stage


MOST_SHOWN: Final = 64
"""Late entries whose packets are named: as many as one would look through."""


def find_stragglers(case: Case) -> Iterator[Finding]:
    """One finding a late rank; those that are late in turn share one, for so do their causes."""
    # Whoever a node without a capture may have been kept by, lateness alone is no finding against it.
    late = [
        r
        for r in case.result.lateness
        if r.verdict in ("late", "intermittent") and r.cause not in ("network", "unknown")
    ]
    late.sort(key=lambda row: -(row.caused_wait_ns or 0))
    turns = [row for row in late if row.steadiness == "rotating"]
    for row in late:
        if row.steadiness != "rotating":
            since = row.since_ns, _began(case.inferred, _late_rows(case.inferred, row), row)
            yield _finding(case, [row], *since)
    if turns:
        yield _finding(case, turns)


def _finding(
    case: Case, together: Sequence[Lateness], since_ns: int | None = None, begin_ns: int | None = None
) -> Finding:
    """``since_ns``: the onset, if there is one; ``begin_ns``: from when on its share of the time counts."""
    inferred, result, joined = case.inferred, case.result, case.joined
    rows = np.concatenate([_late_rows(inferred, row) for row in together])
    steadiness = together[0].steadiness or "transient"
    ends = [row.endpoint for row in together]
    saved = [1 - w.step_without_ns / max(w.step_ns, 1) for w in result.what_if if w.endpoint in ends]
    # Of bounded lateness the path may not say what it cost; what peers waited does.
    taken = min(sum(saved) or _share(inferred, rows, case.job_ns(ends), begin_ns), 1.0)
    waited = sum(row.caused_wait_ns or 0 for row in together)
    if steadiness == "persistent" and together[0].late_bound == "at_least":
        kept = kept_waiting(result, ends)
        taken, waited = max(taken, kept.share), max(waited, kept.ns or 0)
    begins = since_ns if since_ns is not None else _first(inferred.entries.enter_ns[rows], joined.start_ns)
    ends_ns = max(int(inferred.entries.leave_ns[rows].max()), 0) if len(rows) else joined.end_ns
    return make_finding(
        "straggler",
        ends,
        (begins, ends_ns),
        Cost(waited or round(taken * case.span_ns(ends) * (len(result.lateness) - 1)), taken),
        min(row.confidence or 0.0 for row in together),
        _summary(together, inferred, result, waited),
        advice=_ADVICE[steadiness],
        alternatives=[*_by_kind(together[0], result), *_ALTERNATIVES[steadiness]],
        evidence=_evidence(case.captures, joined, inferred, rows),
    )


def _first(times_ns: NDArray[np.int64], otherwise: int) -> int:
    seen = times_ns[times_ns != NEVER]
    return int(seen.min()) if len(seen) else otherwise


def _late_rows(inferred: Inferred, row: Lateness) -> NDArray[np.int64]:
    """Rows of Entries in which the rank was late by its own doing; else in which it was late; else all."""
    entries = inferred.entries
    whole: NDArray[np.int64] = entries.of[row.endpoint]
    whole = whole[(entries.enter_ns[whole] != NEVER) & entries.whole[whole]]
    for late in (inferred.own.amount_ns > 0, inferred.charges.late):
        if late[whole].any():
            return whole[late[whole]]
    return whole


def _began(inferred: Inferred, rows: NDArray[np.int64], row: Lateness) -> int | None:
    """From when on a rank is steadily late: what lies before, start-up and warm-up, dilutes no share."""
    if row.steadiness != "persistent":
        return None
    seen = inferred.entries.enter_ns[rows]
    first = _first(seen, 0)
    return max(row.since_ns, first) if row.since_ns is not None else first


def _share(
    inferred: Inferred, rows: NDArray[np.int64], job_ns: tuple[int, int], begin_ns: int | None = None
) -> float:
    """Of their peers' time in the job, from ``begin_ns`` on if given, the share waited for these."""
    entries = inferred.entries
    begin = job_ns[0] if begin_ns is None else begin_ns
    span = job_ns[1] - begin
    rows = rows[entries.enter_ns[rows] >= begin]
    return min(float(inferred.charges.cost_ns[rows].sum()) / max(span, 1), 1.0)


def _summary(together: Sequence[Lateness], inferred: Inferred, result: Analysis, waited_ns: int) -> str:
    if len(together) > 1:
        return late_in_turn(together, result)
    (row,) = together
    names = [unit_name(result, row)]
    for stage in inferred.stages:
        if stage.endpoint == row.endpoint and stage.verdict == "late" and not stage.replicated:
            return (
                f"{names[0]} is a slow stage of its pipeline: it works {duration(stage.excess_ns)} a step"
                f" longer than {_peers(result, stage)}, and the stages after it wait."
            )
    if incidents := stage_steps(row, result):
        return f"{names[0]} is a stage of a pipeline that {incidents}; the stages after it wait."
    by = f", by {late_by(row)} (median)," if row.late_ns is not None else ""
    return (
        f"{names[0]} entered {late_in(row)} collectives late{by} and its peers"
        f" waited {rank_seconds(waited_ns)} for it."
    )


def stage_steps(row: Lateness, result: Analysis) -> str:
    """In how many steps a stage of a pipeline that enters no collective worked longer; empty of others."""
    mine = [] if row.collectives else [each for each in result.pipelines if row.endpoint in each.stages]
    return next(filter(None, (in_steps(each, row.endpoint) for each in mine)), "")


def kept_waiting(result: Analysis, ends: Collection[int]) -> Cost:
    """What ranks waited for ``ends``, who are late together, in operations that some of these entered last.

    None of them alone makes a difference. Rails may run side by side: the share is of one's operations.
    """
    waited = 0
    by_rail: defaultdict[frozenset[int], int] = defaultdict(int)
    for each in result.collectives:
        rail = frozenset(rank.endpoint for rank in each.ranks if rank.endpoint in ends)
        seen = [(rank, rank.enter_ns) for rank in each.ranks if rank.enter_ns is not None]
        mine = [ns for rank, ns in seen if rank.endpoint in rail and rank.bound != "at_most"]
        others = [(rank.bound == "at_most", ns) for rank, ns in seen if rank.endpoint not in rail]
        if mine and others and each.op != "send_recv":
            # Whose first act waited for these may have come any time before: if all did, with the first.
            sure = [ns for at_most, ns in others if not at_most] or [min(others)[1]]
            apart = max(max(mine) - max(sure), 0)
            by_rail[rail] += apart
            waited += apart * (len(each.ranks) - len(rail))
    jobs = jobs_with(list_jobs(result), ends)
    span = max((job.end_ns for job in jobs), default=1) - min((job.start_ns for job in jobs), default=0)
    return Cost(waited, min(max(by_rail.values(), default=0) / max(span, 1), 1.0))


def late_in_turn(rows: Sequence[Lateness], result: Analysis) -> str:
    """The sentence on several that are late in turn."""
    units = units_of(rows)
    stages = [f"{unit_name(result, row)} {steps}" for row in units if (steps := stage_steps(row, result))]
    if len(stages) == len(units):
        return f"Late in turn: {listed(stages)}; the stages after them wait."
    told = [f"{unit_name(result, row)} {late_in(row)}" for row in units]
    waited = sum(row.caused_wait_ns or 0 for row in rows)
    wait = f"their peers waited {rank_seconds(waited)} for them" if waited else "those after them wait"
    each = "each rank's" if any(row.together for row in units) else "their"
    who = listed(told)
    return f"Late in turn, in so many of {each} collectives: {who}; {wait}."


def late_together(rows: Sequence[Lateness], result: Analysis, waited_ns: int) -> str:
    """The sentence on ranks of one node that are late in the same operations."""
    waited = rank_seconds(waited_ns)
    by = f", by {late_by(rows[0])} (median)," if rows[0].late_ns is not None else ""
    return (
        f"{unit_name(result, rows[0])} entered {late_in(rows[0])} collectives of each rank late together{by}"
        f" and their peers waited {waited} for them. One of the node's GPUs may be holding up the others."
    )


def units_of(rows: Sequence[Lateness]) -> list[Lateness]:
    """Of ranks of one node that were late together the first one, and all others."""
    told: set[int] = set()
    found = []
    for row in rows:
        if row.endpoint not in told:
            found.append(row)
        told.update(row.together)
    return found


def unit_name(result: Analysis, row: Lateness) -> str:
    """What a row speaks of: an endpoint, one that nobody knows of a node's GPUs, or several of a node."""
    if row.node is not None:
        return f"a GPU of node {result.endpoints[row.node].address}"
    if row.together:
        return node_name([result.endpoints[end] for end in row.together])
    return name_of(result.endpoints[row.endpoint])


def _peers(result: Analysis, stage: Stage) -> str:
    if len(stage.peers) > 2:
        return f"the {len(stage.peers)} others that can be compared"
    return " and ".join(name_of(result.endpoints[peer]) for peer in stage.peers)


_ADVICE = {
    "persistent": (
        "First compare this rank's work with its peers' (shard and batch sizes, data loading), then power"
        " and thermal limits; then move the rank to another GPU and see whether the lateness moves with"
        " it."
    ),
    "rotating": (
        "The lateness moves from rank to rank: look for what every rank does in turn (garbage"
        " collection, checkpointing, evaluation, uneven input lengths) rather than for a bad GPU."
    ),
    "transient": (
        "Look at what else ran on this rank's host at the times of the late collectives (data loading,"
        " checkpoints, other jobs) before suspecting the GPU."
    ),
}
_ALTERNATIVES = {
    "persistent": ["longer input on this rank", "a slower or throttled GPU or host"],
    "rotating": ["garbage collection", "uneven input lengths", "checkpointing in turn"],
    "transient": ["input stalls", "garbage collection on this rank", "scheduling noise on the host"],
}
_KINDS = {
    "pp": "a stage with more or heavier layers than the others (stage imbalance)",
    "tp": "an uneven shard of the tensor parallel group",
    "dp": "a larger or longer batch on this replica",
    "ep": "experts on this rank that more tokens are routed to",
}


def _by_kind(row: Lateness, result: Analysis) -> list[str]:
    """What would explain it in the groups that the rank belongs to."""
    kinds = {group.kind for group in result.groups if row.endpoint in group.endpoints and group.kind}
    if row.steadiness == "rotating":
        return []
    return [_KINDS[kind] for kind in ("pp", "tp", "dp", "ep") if kind in kinds] or (
        ["an uneven shard or stage"] if row.steadiness == "persistent" else []
    )


def _evidence(
    captures: Sequence[CaptureTables], joined: Joined, inferred: Inferred, rows: NDArray[np.int64]
) -> list[Evidence]:
    """The messages by which the rank entered: first those of where it was latest, then the others; each in
    order of time."""
    rows = rows[inferred.entries.act[rows] < len(joined.transfers)]
    amount = np.maximum(inferred.own.amount_ns[rows], 0)
    by_amount = rows[np.argsort(-amount, kind="stable")[:MOST_SHOWN]]
    shown = np.concatenate([np.sort(by_amount[:SHOWN]), np.sort(by_amount[SHOWN:])])
    return message_evidence(captures, joined, inferred.entries.act[shown].tolist())
