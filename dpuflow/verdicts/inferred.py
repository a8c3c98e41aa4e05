"""Exchanges, collectives and their ranks' entries in; who was late, why, since when and at what cost out.

The stages of inference in their order, each a function from arrays to arrays. What they came to is kept
whole, so that the result, the findings and the agent draw on the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import key_numbers
from dpuflow.entries import (
    among_dated,
    bound_above,
    claim,
    over_sockets,
    previous_row,
    relate,
    short_of_ranks,
    stalls,
    weigh,
)
from dpuflow.identity.endpoints import uncaptured
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.accounts import Known, account_for
from dpuflow.verdicts.bulk import fed_rows, find_bulk
from dpuflow.verdicts.causes import Waits, causes_of
from dpuflow.verdicts.coverage import coverage_of, doubt_untold, unread_shares, with_confidence
from dpuflow.verdicts.edges import measure_edges
from dpuflow.verdicts.excess import Evidence, charge, own_lateness, tied_rows, with_stages
from dpuflow.verdicts.judgement import doubt, judge, sooner_ns
from dpuflow.verdicts.links import excused_ns, find_queues, held_up, measure_links, queued_ns, slow_rows
from dpuflow.verdicts.parallelism import find_tokens, group_kinds
from dpuflow.verdicts.pauses import Work, find_work
from dpuflow.verdicts.pipelines import find_pipelines
from dpuflow.verdicts.receivers import slow_receivers, taken_before, taken_until
from dpuflow.verdicts.stages import compare_stages
from dpuflow.verdicts.steps import find_steps, places_in_steps
from dpuflow.verdicts.units import kinds_of
from dpuflow.verdicts.waits import (
    busy_elsewhere,
    find_overlap,
    group_before,
    left_before,
    never_captured,
    unread_until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Bounded, Entries, Relative
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows
    from dpuflow.verdicts.accounts import Account
    from dpuflow.verdicts.bulk import Bulk
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.coverage import Coverage
    from dpuflow.verdicts.edges import Measured
    from dpuflow.verdicts.excess import Charges, Own
    from dpuflow.verdicts.judgement import Judgement
    from dpuflow.verdicts.links import Links, Queue
    from dpuflow.verdicts.parallelism import Kind, Tokens
    from dpuflow.verdicts.pipelines import Pipeline
    from dpuflow.verdicts.receivers import SlowReceiver
    from dpuflow.verdicts.stages import Stage
    from dpuflow.verdicts.steps import Steps
    from dpuflow.verdicts.waits import Overlap


class Inferred(NamedTuple):
    """What the stages came to. Rows are those of ``entries`` where nothing else is said."""

    entries: Entries
    short: Bools  # per collective: not all of its ranks were seen
    relative: Relative
    bounded: Bounded  # the same with bounds that claim nothing: for readers
    charges: Charges
    causes: Causes
    own: Own
    links: Links
    queues: dict[int, Queue]
    groups: list[list[int]]  # endpoints of each group, in order of its first collective
    kinds: list[Kind | None]  # per group
    group_of: Ints  # per collective
    steps: list[Steps]
    accounts: list[Account]  # one a job
    tokens: list[Tokens | None]  # per job's steps
    pipelines: list[Pipeline]
    stages: list[Stage]
    judgements: list[Judgement]
    told: dict[int, Coverage]  # of endpoints in collectives
    edges: list[Measured]
    bulk: list[Bulk]
    work: Work  # how long the job took without stalls, and these
    receivers: list[SlowReceiver]


class Read(NamedTuple):
    """Messages, the collectives that they make, and when the ranks of these came; and what messages tell of
    the network, and of what goes on beside the collectives."""

    joined: Joined
    exchanges: Rows
    instances: Sequence[Instance]
    entries: Entries
    dated: Entries  # the same without those that nothing dates
    short: Bools  # per collective: not all of its ranks were seen
    relative: Relative  # among entries that are dated
    groups: list[list[int]]  # endpoints of each, in order of its first collective
    group_of: Ints  # per collective
    kind: Ints  # per collective: its operation, size and group
    steps: list[Steps]
    step: Ints  # of each row of Entries; -1: in none
    far: frozenset[int]  # endpoints in collectives that have no capture of their own
    links: Links
    held_up: Bools  # of each exchange (``links``)
    queues: dict[int, Queue]
    queued: Ints  # per row of Entries (``queued_ns``)
    bulk: list[Bulk]
    taken: Ints  # per row (``taken_until``)
    overlap: Overlap


def infer(joined: Joined, exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Inferred:
    """Run the stages. ``instances``: collectives over ``exchanges``; ``entries``: when their ranks came."""
    read = _read(joined, exchanges, instances, entries)
    work = find_work(read.entries, read.step)
    pipelines = find_pipelines(instances, read.entries, read.step, read.taken)
    evidence, stages = _evidence(read, pipelines, work.ns)
    bounded, told, judgements = _judgements(read, evidence, stages)
    fed = [int(read.entries.collective[each.row]) for each in read.bulk if each.waited]
    tokens = [find_tokens(each, read.step, instances, read.entries, fed) for each in read.steps]
    decoding = [each for each, found in zip(read.steps, tokens, strict=True) if found is not None]
    return Inferred(
        entries=read.entries,
        short=read.short,
        relative=read.relative,
        bounded=bounded,
        charges=evidence.charges,
        causes=evidence.causes,
        own=evidence.own,
        links=read.links,
        queues=read.queues,
        groups=read.groups,
        kinds=group_kinds(read.groups, read.group_of, instances, read.steps, pipelines, decoding),
        group_of=read.group_of,
        steps=read.steps,
        accounts=_accounts(read, evidence, pipelines, judgements),
        tokens=tokens,
        pipelines=pipelines,
        stages=stages,
        judgements=judgements,
        told=told,
        edges=measure_edges(joined, exchanges, instances, read.entries),
        bulk=read.bulk,
        work=work,
        receivers=slow_receivers(exchanges, instances, read.dated, read.taken, work.ns),
    )


def _read(joined: Joined, exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Read:
    """Entries weighed, against the earliest of their collective, by group and by step; links, queues and
    transfers beside the collectives."""
    groups, group_of = _groups(instances)
    entries = weigh(entries, exchanges, joined, instances, group_of)
    short = short_of_ranks(entries, instances)
    relative = among_dated(entries, relate(entries, short))
    dated = replace(entries, enter_ns=relative.enter_ns)
    steps, step = find_steps(instances, entries, group_of)
    links = measure_links(exchanges, instances)
    queues = find_queues(exchanges, joined.columns["sent_ns"], instances, entries)
    kind = kinds_of(instances, group_of)
    return Read(
        joined, exchanges, instances, entries, dated, short, relative, groups, group_of, kind, steps, step,
        never_captured(instances) | uncaptured(joined),
        links, held_up(exchanges, links), queues, queued_ns(queues, entries),
        find_bulk(exchanges, instances, entries), taken_until(exchanges, instances, entries),
        find_overlap(kind, dated, previous_row(dated), group_of, step),
    )  # fmt: skip


def _waits(read: Read) -> Waits:
    """What ranks may have waited for besides their peers."""
    exchanges, instances, entries, dated = read.exchanges, read.instances, read.entries, read.dated
    kin = group_before(dated, read.group_of)
    taken = taken_before(instances, dated, read.taken)
    # Who entered nobody knows how long before it acted may have entered before it had taken its inputs, too.
    sure = np.where(dated.exact, taken, NEVER)
    return Waits(
        fed_rows(read.bulk, entries, read.far),
        np.maximum(left_before(dated, kin), sure),
        np.maximum(unread_until(exchanges, instances, entries), taken),
        kin,
        read.overlap,
        read.queued,
        (read.kind[entries.collective], places_in_steps(read.step, entries.endpoint)),
    )


def _evidence(read: Read, pipelines: Sequence[Pipeline], worked_ns: int) -> tuple[Evidence, list[Stage]]:
    """What each rank answers for, and how stages of pipelines compare."""
    exchanges, instances, entries, dated = read.exchanges, read.instances, read.entries, read.dated
    relative, group_of = read.relative, read.group_of
    charges = charge(dated, relative, group_of)
    slow = slow_rows(read.links, entries)
    causes = causes_of(instances, dated, relative, charges, slow, _waits(read))
    excused = excused_ns(exchanges, instances, dated, read.held_up)
    own = own_lateness(instances, dated, relative, causes, group_of, read.kind, excused)
    compared, stages = compare_stages(pipelines, instances, entries)
    own, causes = with_stages(own, causes, compared)
    stalled = stalls(entries, exchanges, instances, group_of[entries.collective])
    evidence = Evidence(
        instances,
        dated,
        relative,
        charges,
        causes,
        own,
        group_of,
        read.step,
        worked_ns,
        stalled,
        over_sockets(exchanges, instances),
    )
    return evidence, stages


def _judgements(
    read: Read, evidence: Evidence, stages: Sequence[Stage]
) -> tuple[Bounded, dict[int, Coverage], list[Judgement]]:
    """Verdicts, weighed by what was seen; and bounds of lateness and coverage, which they are weighed by.

    Stages get the verdicts of their endpoints.
    """
    joined, instances, entries = read.joined, read.instances, read.entries
    claimed = claim(entries, read.relative, read.short)
    bounded = bound_above(entries, claimed, instances, read.short, evidence.charges.noise_ns)
    evidence = evidence._replace(claimed=bounded.relative)
    judgements = doubt(
        judge(evidence, [stage.endpoint for stage in stages]), busy_elsewhere(instances), read.far
    )
    seen = evidence._replace(entries=entries, relative=among_dated(entries, bounded.relative))
    shares = unread_shares(joined, read.exchanges, instances, read.bulk)
    told = coverage_of(seen, tied_rows(instances, entries), shares, read.queued)
    judgements = doubt_untold(judgements, told, seen)
    judgements = with_confidence(judgements, told, seen, joined.captures)
    verdicts = {judgement.endpoint: judgement.verdict for judgement in judgements}
    for stage in stages:
        stage.verdict = verdicts.get(stage.endpoint, "unknown")
    return bounded, told, judgements


def _accounts(
    read: Read,
    evidence: Evidence,
    pipelines: Sequence[Pipeline],
    judgements: Sequence[Judgement],
) -> list[Account]:
    """Where the time of each job's steps went."""
    known = Known(
        evidence.causes,
        read.held_up,
        np.array([i.op == Op.SEND_RECV for i in read.instances], bool),
        read.overlap.rows,
        sooner_ns(judgements, evidence.own),
        read.kind,
        read.group_of,
    )
    return account_for(read.exchanges, read.instances, read.dated, read.steps, pipelines, known)


def _groups(instances: Sequence[Instance]) -> tuple[list[list[int]], Ints]:
    """Groups in order of their first collective, and each collective's group."""
    members = [tuple(sorted(i.order)) for i in instances]
    return [list(each) for each in dict.fromkeys(members)], key_numbers(members)
