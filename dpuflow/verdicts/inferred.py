"""Exchanges, collectives and their ranks' entries in; who was late, why, since when and at what cost out.

The stages of inference in their order, each a function from arrays to arrays. What they came to is kept
whole, so that the result, the findings and the agent draw on the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries import (
    among_dated,
    bound_above,
    claim,
    previous_row,
    relate,
    short_of_ranks,
    stalls,
    weigh,
)
from dpuflow.identity.endpoints import uncaptured
from dpuflow.schema.rows import Op
from dpuflow.verdicts.accounts import Known, account_for
from dpuflow.verdicts.bulk import fed_rows, find_bulk
from dpuflow.verdicts.causes import Waits, causes_of
from dpuflow.verdicts.costs import charge
from dpuflow.verdicts.coverage import coverage_of, doubt_untold, unread_shares, with_confidence
from dpuflow.verdicts.edges import measure_edges
from dpuflow.verdicts.excess import own_lateness, tied_rows, with_replicas
from dpuflow.verdicts.judgement import add_stages, doubt, judge, sooner_ns
from dpuflow.verdicts.links import measure_links, slow_rows
from dpuflow.verdicts.network_delay import excused_ns, find_queues, held_up, queued_ns
from dpuflow.verdicts.other_waits import group_before, left_before, unread_until
from dpuflow.verdicts.overlap import find_overlap
from dpuflow.verdicts.parallelism import find_tokens, group_kinds
from dpuflow.verdicts.partial_capture import busy_elsewhere, never_captured
from dpuflow.verdicts.pauses import Work, find_work
from dpuflow.verdicts.pipelines import find_pipelines
from dpuflow.verdicts.receivers import registered_rows, slow_receivers, taken_before, taken_until
from dpuflow.verdicts.replicas import compare_replicas
from dpuflow.verdicts.stages import compare_stages
from dpuflow.verdicts.steps import find_steps
from dpuflow.verdicts.units import kinds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Bounded, Entries, Relative
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows
    from dpuflow.verdicts.accounts import Account
    from dpuflow.verdicts.bulk import Bulk
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.costs import Charges
    from dpuflow.verdicts.coverage import Coverage
    from dpuflow.verdicts.edges import Measured
    from dpuflow.verdicts.excess import Own
    from dpuflow.verdicts.judgement import Judgement
    from dpuflow.verdicts.links import Links
    from dpuflow.verdicts.network_delay import Queue
    from dpuflow.verdicts.parallelism import Kind, Tokens
    from dpuflow.verdicts.pipelines import Pipeline
    from dpuflow.verdicts.receivers import SlowReceiver
    from dpuflow.verdicts.stages import Stage
    from dpuflow.verdicts.steps import Steps


class Inferred(NamedTuple):
    """What the stages came to. Rows are those of ``entries`` where nothing else is said."""

    entries: Entries
    short: NDArray[np.bool_]  # per collective: not all of its ranks were seen
    relative: Relative
    bounded: Bounded  # the same with bounds that claim nothing: for readers
    charges: Charges
    causes: Causes
    own: Own
    links: Links
    queues: dict[int, Queue]
    groups: list[list[int]]  # endpoints of each group, in order of its first collective
    kinds: list[Kind | None]  # per group
    group_of: NDArray[np.int64]  # per collective
    steps: list[Steps]
    accounts: list[Account]  # one a job
    tokens: list[Tokens | None]  # per job's steps
    pipelines: list[Pipeline]
    stages: list[Stage]
    compared: frozenset[int]  # endpoints that were judged against replicas of their stage
    judgements: list[Judgement]
    told: dict[int, Coverage]  # of endpoints in collectives
    edges: list[Measured]
    bulk: list[Bulk]
    work: Work  # how long the job took without stalls, and these
    receivers: list[SlowReceiver]


def infer(joined: Joined, exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Inferred:
    """Run the stages. ``instances``: collectives over ``exchanges``; ``entries``: when their ranks came."""
    groups, group_of = _groups(instances)
    entries = weigh(entries, exchanges, joined, instances, group_of)
    short = short_of_ranks(entries, instances)
    relative = among_dated(entries, relate(entries, short))
    dated = replace(entries, enter_ns=relative.enter_ns)
    charges = charge(dated, relative, group_of)
    links = measure_links(exchanges, instances)
    bulk = find_bulk(exchanges, instances, entries)
    kin = group_before(dated, group_of)
    taken = taken_until(exchanges, instances, entries)
    steps, step = find_steps(instances, entries, group_of)
    queues = find_queues(exchanges, joined.columns["sent_ns"], instances, entries)
    queued = queued_ns(queues, entries)
    unread = unread_until(exchanges, instances, entries)
    waits = Waits(
        fed_rows(bulk, entries) if bulk else None,
        partial(registered_rows, exchanges, joined.transfers, instances, entries),
        np.maximum(np.maximum(unread, left_before(dated, kin)), taken_before(instances, dated, taken)),
        kin,
        find_overlap(instances, dated, previous_row(dated), group_of, step),
        queued,
    )
    causes = causes_of(instances, dated, relative, charges, slow_rows(links, entries), waits)
    held = held_up(exchanges, links)
    excused = excused_ns(exchanges, instances, dated, held)
    pipelines = find_pipelines(instances, entries, step, taken)
    replicas = compare_replicas(instances, entries, pipelines)
    own = own_lateness(instances, dated, relative, causes, group_of, excused)
    own, causes = with_replicas(own, causes, replicas)

    work = find_work(entries, step)
    stalled = stalls(entries, exchanges, instances, group_of[entries.collective])
    stages = [stage for each in pipelines for stage in compare_stages(each, entries, work.ns, stalled)]
    judgements = judge(instances, dated, relative, charges, causes, own, group_of, step, work.ns, stalled)
    judgements = doubt(judgements, busy_elsewhere(instances), never_captured(instances) | uncaptured(joined))
    claimed = claim(entries, relative, short)
    bounded = bound_above(entries, claimed, instances, short, charges.noise_ns)
    tied, shares = tied_rows(instances, entries), unread_shares(joined, exchanges, instances, bulk)
    seen = among_dated(entries, bounded.relative)
    told = coverage_of(instances, entries, seen, own, tied, step, shares, work.ns, queued)
    judgements = doubt_untold(judgements, told, own, entries, seen)
    # Stages of one pipeline differ by design; what was compared with its replicas needs no such comparison.
    compared = frozenset(entries.endpoint[replicas.rows].tolist())
    judgements = add_stages(judgements, [stage for stage in stages if stage.endpoint not in compared])
    staged = frozenset(stage.endpoint for stage in stages if stage.verdict == "on_time") - compared
    judgements = with_confidence(
        judgements, told, instances, entries, seen, own, joined.captures, work.ns, staged
    )
    verdicts = {judgement.endpoint: judgement.verdict for judgement in judgements}
    for stage in stages:
        stage.verdict = verdicts[stage.endpoint] if stage.endpoint in compared else stage.verdict

    sooner = sooner_ns(judgements, stages, own)
    kind = kinds_of(instances, group_of)
    beside = waits.overlap.rows if waits.overlap is not None else np.zeros(len(step), bool)
    transfers = np.array([i.op == Op.SEND_RECV for i in instances], bool)
    known = Known(causes, held, transfers, beside, sooner, kind, group_of)
    tokens = [find_tokens(each, step, instances, entries) for each in steps]
    decoding = [each for each, told in zip(steps, tokens, strict=True) if told is not None]
    return Inferred(
        entries=entries,
        short=short,
        relative=relative,
        bounded=bounded,
        charges=charges,
        causes=causes,
        own=own,
        links=links,
        queues=queues,
        groups=groups,
        kinds=group_kinds(groups, group_of, instances, steps, pipelines, decoding),
        group_of=group_of,
        steps=steps,
        accounts=account_for(exchanges, instances, dated, steps, pipelines, known),
        tokens=tokens,
        pipelines=pipelines,
        stages=stages,
        compared=compared,
        judgements=judgements,
        told=told,
        edges=measure_edges(joined, exchanges, instances, entries),
        bulk=bulk,
        work=work,
        receivers=slow_receivers(exchanges, instances, dated, taken, work.ns),
    )


def _groups(instances: Sequence[Instance]) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Groups in order of their first collective, and each collective's group."""
    numbers: dict[tuple[int, ...], int] = {}
    of = [numbers.setdefault(tuple(sorted(i.order)), len(numbers)) for i in instances]
    return [list(members) for members in numbers], np.array(of, np.int64)
