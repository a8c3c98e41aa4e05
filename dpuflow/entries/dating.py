"""Entries by first acts in; what dates each entry for good, and its error, out.

A rule says what kind of act dates an entry (``entries``). Here each act is weighed against what the capture
shows of its host and its group: how fast they react (``reactions``), and all that it may have waited for
(``blockers``); then ranks that nothing dated yet are, by what others show of them; then errors follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked
from dpuflow.entries.blockers import Scene, credited, find_blockers, inputs_rejected, packet_times, solve
from dpuflow.entries.heard import likely_entries
from dpuflow.entries.margins import (
    by_proxies,
    by_threads,
    clocks,
    late_stamps,
    receiving_ns,
    room,
    spreads,
    ways,
)
from dpuflow.entries.queues import queued_rows
from dpuflow.entries.reactions import law_of
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import FAR_BEYOND, Rule
from dpuflow.schema.rows import NEVER, NONE32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows


def weigh(
    entries: Entries,
    exchanges: Rows,
    joined: Joined,
    instances: Sequence[Instance],
    group: NDArray[np.int64],
) -> Entries:
    """Entries with every doubt that the capture gives reason for, and with the error of each.

    ``group`` numbers each collective's group.
    """
    of_row = group[entries.collective]
    columns = Picked.exchanges(exchanges)
    law, left = law_of(entries, of_row), entries.since_ns
    entries = _undated(entries, instances)
    packet_ns = packet_times(entries, columns)
    scene = Scene(entries, columns, joined.columns, instances, of_row, law, packet_ns)
    entries = _solved(scene, exchanges, joined)
    entries = likely_entries(entries, exchanges, instances, law)
    threads = by_threads(entries, exchanges, instances)
    proxies = by_proxies(entries, exchanges, instances)
    spread_ns = spreads(entries, threads, law, of_row)
    worst_ns = np.nan_to_num(law.worst_ns, nan=0.0).round().astype(np.int64)
    tail_ns = np.where(proxies, worst_ns, 0)
    entries = replace(entries, margins=replace(entries.margins, spread_ns=spread_ns, tail_ns=tail_ns))
    clock, clock_ns = clocks(entries, joined)
    # Open MPI's caller sends itself: nobody has to wake up for it.
    room_ns = room(entries, left, law, of_row)
    room_ns[~proxies & ~threads] = 0
    room_ns = np.maximum(room_ns, late_stamps(joined)[clock] if len(joined.clocks) else 0)
    # One captured rank is compared with what came to it: bounds hold without, and with it most tell nothing.
    alone = np.array([i.view.near is not None and len(i.view.near) == 1 for i in instances], bool)[
        entries.collective
    ]
    apart_ns = np.nan_to_num(law.apart_ns, nan=0.0).round().astype(np.int64)
    spread_ns = entries.margins.spread_ns
    margins = replace(
        entries.margins,
        wide_ns=np.where(proxies, np.maximum(spread_ns, apart_ns), spread_ns),
        clock=clock,
        clock_ns=clock_ns,
        room_ns=np.where(alone & proxies, 0, room_ns),
    )
    return replace(entries, margins=margins)


def _solved(scene: Scene, exchanges: Rows, joined: Joined) -> Entries:
    """Entries with the rule that each rests on by all its blockers, since when it may be, and how far off."""
    entries, law = scene.entries, scene.law
    way, usual_way = ways(entries, joined)
    late = inputs_rejected(scene)
    credit = credited(scene, way)
    queued = queued_rows(entries, exchanges, scene.instances, law)
    rule, after = solve(entries, late, list(find_blockers(scene, credit, queued)))
    # Two clocks may be off either way, by that much an input seems to come late.
    early_ns = entries.early_ns[entries.collective]
    rule[early_ns > 2 * clocks(entries, joined)[1].max(initial=0)] = Rule.CONTRADICTED

    waited, allowed = rule == Rule.QUEUED, (rule == Rule.CREDIT) & (credit.since_ns != NEVER)
    waited &= queued.rows
    # Where packets are missing nothing shows when it had left what came before either.
    untold = rule == Rule.MISSING
    since = np.select([waited, allowed, untold], [queued.called_ns, credit.since_ns, NEVER], entries.since_ns)
    # A rank cannot have been held up before it was there: not before it left its last collective.
    there = np.where(since != NEVER, entries.enter_ns - since, FAR)
    slow = np.nan_to_num(law.slow_ns, nan=0.0).astype(np.int64)
    held = np.minimum(np.minimum(receiving_ns(scene.exchanges, entries, law), there), slow)
    sends_after = (entries.rule == Rule.AFTER_INPUT) & late
    margins = replace(
        entries.margins,
        lead_ns=np.where(waited, queued.lead_ns, NEVER),
        way_ns=way,
        usual_way_ns=usual_way,
        held_ns=held,
        lag_ns=np.where(sends_after, _taking_up_ns(entries, law, there), entries.margins.lag_ns),
        slow_ns=np.where(np.isnan(law.slow_ns), NEVER, slow),
    )
    # No message shows how long work takes.
    since_act = np.select([waited, allowed], [queued.called, NONE32], entries.since_act)
    stalled = _stalled(entries, law)
    return replace(
        entries, rule=rule, after=after, since_ns=since, since_act=since_act, stalled_ns=stalled,
        margins=margins,
    )  # fmt: skip


def _taking_up_ns(entries: Entries, law: Law, there: NDArray[np.int64]) -> NDArray[np.int64]:
    """How long before its first message a rank may have entered that found its input there.

    It takes that up as one does that waits, so its message follows by a reaction. 0 for others; ``there``: no
    longer than since it left its last.
    """
    slow = np.where(law.by_sends, np.nan_to_num(law.slow_ns, nan=0.0), 0.0).astype(np.int64)
    return np.minimum(slow, there)


def _stalled(entries: Entries, law: Law) -> NDArray[np.int64]:
    """How long each rank sat on an input in mid-operation, at most, where that is far beyond what is usual.

    It had entered and sent all it could; the delay is its own, and later messages of others inherit it.
    Where packets of its messages were sent again, the network may have kept it.
    """
    out, (rows, waited_ns) = np.zeros(len(entries.endpoint), np.int64), entries.reactions.waited
    limit = FAR_BEYOND * law.slow_ns[rows]
    far = waited_ns > np.where(np.isnan(limit), np.inf, limit)
    np.maximum.at(out, rows[far], waited_ns[far])
    return np.where(entries.retransmitted > 0, 0, out)


def _undated(entries: Entries, instances: Sequence[Instance]) -> Entries:
    """Make bounds of entries of ranks that may have acted before the first act that was seen of them.

    What such a rank is seen to send may have waited for an input that nobody saw, or not be its first:
    then how long after an input it came says nothing either.
    """
    sends, grants = np.zeros((2, len(entries.rule)), bool)
    for number, instance in enumerate(instances):
        if instance.view.near is not None or instance.view.inside:
            by_send, by_grant = instance.undated_rows()
            sends[entries.offsets[number] + np.array(by_send, np.int64)] = True
            grants[entries.offsets[number] + np.array(by_grant, np.int64)] = True
    declared = np.isin(entries.rule, (Rule.READY, Rule.ANSWER))
    undated = np.where(declared, grants, sends)
    entries = entries.marked(undated, Rule.PARTLY, entries.after)
    return replace(
        entries,
        signs=replace(
            entries.signs,
            unmoved_ns=np.where(undated, NEVER, entries.signs.unmoved_ns),
        ),
    )
