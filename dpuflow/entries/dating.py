"""Collectives in; enter and leave of every rank, what dates each entry for good, and its error, out.

First what messages show of each rank by itself: first acts, leaves, and how fast hosts go on in between. Then
each act is weighed against what the capture shows of its host and its group: the law of reactions, and all
that it may have waited for (``blockers``); last how far entries may be off (``margins``), and who else may
have been the last (``heard``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked
from dpuflow.entries.acts import first_acts
from dpuflow.entries.blockers import Scene, credited, find_blockers, inputs_and_offers, packet_times, solve
from dpuflow.entries.calling import called, without_calls
from dpuflow.entries.heard import likely_entries
from dpuflow.entries.leaving import as_acknowledged, last_acts, left_before, nonblocking
from dpuflow.entries.margins import clocks, margins_of, ways
from dpuflow.entries.places import build_places
from dpuflow.entries.queues import queued_rows
from dpuflow.entries.reactions import consumed, granted_data_ns, law_of, typical, waited_sends
from dpuflow.entries.rows import FAR_BEYOND, Reactions, Rule, blank
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries.places import Places
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows


def build_entries(exchanges: Rows, instances: Sequence[Instance]) -> Entries:
    """Enter and leave of every rank of every collective, on the reference clock."""
    places = build_places(exchanges, instances)
    picked, sender, receiver = places.picked, places.sender, places.receiver
    acts = first_acts(places)
    leaves = last_acts(places, acts)
    waited = waited_sends(picked, places.needs, sender, receiver, acts.enter_ns)
    beside = nonblocking(places)[places.collective]
    waited = (waited[0][~beside[waited[0]]], waited[1][~beside[waited[0]]])
    taken, between = consumed(picked, instances, places.of, receiver, acts.enter_ns)
    blanks = blank(places.collective, places.endpoint, places.offsets)
    entries = replace(
        blanks,
        enter_ns=acts.enter_ns,
        leave_ns=leaves.leave_ns,
        idle_ns=leaves.idle_ns,
        gone_ns=leaves.gone_ns,
        acked_ns=leaves.acked_ns,
        credit_ns=acts.credit_ns,
        granted_ns=acts.granted_ns,
        reaction_ns=typical(len(places), *waited),
        rule=acts.rule,
        act=acts.act,
        after=acts.after,
        last=leaves.last,
        retransmitted=_sent_again(places),
        whole=_whole(places),
        fed=leaves.fed,
        buffered=acts.sent & ~leaves.fed & ~leaves.far,
        early_ns=_early_ns(places),
        unmoved_ns=np.where(beside, NEVER, acts.unmoved_ns),
        free_ns=acts.free_ns,
        grant=acts.grant,
        lag_ns=acts.lag_ns,
        reactions=Reactions(waited, granted_data_ns(picked, sender), taken, between),
    )
    since_ns, since_act = left_before(entries, places, leaves, acts.send_at)
    bounded = acts.rule == Rule.CREDIT  # it had waited for one GPU of its node at least
    since_ns = np.where(bounded, np.maximum(since_ns, acts.since_ns), since_ns)
    leave, idle = as_acknowledged(entries, places)
    return replace(entries, since_ns=since_ns, since_act=since_act, leave_ns=leave, idle_ns=idle)


def _sent_again(places: Places) -> Ints:
    """Per row how many packets to and from the rank were retransmitted."""
    again = np.zeros(len(places), np.int64)
    for end in (places.sender, places.receiver):
        np.add.at(again, end, places.picked["retransmitted"].astype(np.int64))
    return again


def _whole(places: Places) -> Bools:
    cut = (places.picked["flags"] & (MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER)) != 0
    whole = np.fromiter((i.complete for i in places.instances), bool, len(places.instances))
    whole[places.of[cut]] = False
    return whole[places.collective]


def _early_ns(places: Places) -> Ints:
    """Where another algorithm fits as well, it is that one."""
    early = places.needs.early_ns.tolist()
    kept = [0 if i.alternatives else e for i, e in zip(places.instances, early, strict=True)]
    return np.array(kept, np.int64)


def weigh(
    entries: Entries, exchanges: Rows, joined: Joined, instances: Sequence[Instance], group: Ints
) -> Entries:
    """Entries with every doubt that the capture gives reason for, and with the error of each.

    ``group`` numbers each collective's group.
    """
    of_row = group[entries.collective]
    # Of a job without operations hardly a column is asked for.
    columns = Picked.exchanges(exchanges) if len(of_row) else Picked(exchanges)
    law = law_of(entries, of_row)
    entries = _undated(entries, instances)
    entries = replace(entries, rule=np.where(_own_answers(entries, law), int(Rule.FREE_STEP), entries.rule))
    scene = Scene(
        entries, columns, joined.columns, instances, of_row, law, packet_times(entries, columns),
        *ways(entries, joined),
    )  # fmt: skip
    dated, lead_ns = _solved(scene, joined)
    by_call = dated.rule == Rule.CALLED
    if by_call.any():
        entries = without_calls(entries, by_call, of_row)
        law = law_of(entries, of_row)
        scene = replace(scene, entries=entries, law=law)
        dated, lead_ns = _solved(scene, joined)
    dated = replace(dated, margins=margins_of(scene, dated, joined, lead_ns))
    return replace(dated, heard=likely_entries(dated, exchanges, instances, law))


def _solved(scene: Scene, joined: Joined) -> tuple[Entries, Ints]:
    """Entries with the rule that each rests on by all its blockers, and since when it may be.

    Then so much later than a peer each is by calls before it (``queues``).
    """
    entries = scene.entries
    credit, queued = credited(scene), queued_rows(entries, scene.exchanges, scene.instances, scene.law)
    rule, after = solve(entries, inputs_and_offers(scene), find_blockers(scene, credit, queued))
    # Two clocks may be off either way, by that much an input seems to come late.
    early_ns = entries.early_ns[entries.collective]
    rule[early_ns > 2 * clocks(entries, joined)[1].max(initial=0)] = Rule.CONTRADICTED

    waited, allowed = rule == Rule.QUEUED, (rule == Rule.CREDIT) & (credit.since_ns != NEVER)
    waited &= queued.rows
    # Where packets are missing nothing shows when it had left what came before either.
    untold = rule == Rule.MISSING
    since = np.select([waited, allowed, untold], [queued.called_ns, credit.since_ns, NEVER], entries.since_ns)
    # No message shows how long work takes.
    since_act = np.select([waited, allowed], [queued.called, NONE32], entries.since_act)
    stalled = _stalled(entries, scene.law)
    by_call = called(scene, rule)
    rule = np.where(by_call.rows, int(Rule.CALLED), rule)
    dated = replace(
        entries,
        enter_ns=by_call.enter_ns,
        rule=rule,
        act=by_call.act,
        after=after,
        since_ns=since,
        since_act=since_act,
        stalled_ns=stalled,
        lag_ns=np.where(by_call.rows, by_call.error_ns, entries.lag_ns),
    )
    return dated, np.where(waited, queued.lead_ns, NEVER)


def _stalled(entries: Entries, law: Law) -> Ints:
    """The longest that each rank held an input in mid-operation, where that is far beyond the usual.

    It had entered and sent all it could; the delay is its own, and later messages of others inherit it.
    Where packets of its messages were sent again, the network may have kept it.
    """
    out, (rows, waited_ns) = np.zeros(len(entries.endpoint), np.int64), entries.reactions.waited
    limit = FAR_BEYOND * law.slow_ns[rows]
    far = waited_ns > np.where(np.isnan(limit), np.inf, limit)
    np.maximum.at(out, rows[far], waited_ns[far])
    return np.where(entries.retransmitted > 0, 0, out)


def _undated(entries: Entries, instances: Sequence[Instance]) -> Entries:
    """Turn entries into bounds where the rank may have acted before the first of its acts that was captured.

    What such a rank is seen to send may have waited for an input that nobody saw, or not be its first:
    then how long after an input it came says nothing either.
    """
    sends, grants = np.zeros((2, len(entries.rule)), bool)
    for number, instance in enumerate(instances):
        if instance.view.near is not None or instance.view.inside or instance.view.blind:
            by_send, by_grant = instance.undated_rows()
            sends[entries.offsets[number] + np.array(by_send, np.int64)] = True
            grants[entries.offsets[number] + np.array(by_grant, np.int64)] = True
    undated = np.where(np.isin(entries.rule, (Rule.READY, Rule.ANSWER)), grants, sends)
    return replace(
        entries,
        rule=np.where(undated & entries.exact, int(Rule.PARTLY), entries.rule),
        unmoved_ns=np.where(undated, NEVER, entries.unmoved_ns),
        free_ns=np.where(sends, NEVER, entries.free_ns),
    )


def _own_answers(entries: Entries, law: Law) -> Bools:
    """Rows of ranks that answered waiting inputs and then at once sent their own data, which needs none."""
    own = (entries.rule == Rule.ANSWER) & (entries.free_ns != NEVER)
    with np.errstate(invalid="ignore"):
        return np.asarray(own & (entries.free_ns - entries.enter_ns <= law.most_ns), np.bool_)
