"""Collectives in, enter and leave of every rank out: first acts, leaves, and how fast hosts go on in between.

What else a first act may have waited for is weighed in ``dating``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.entries.acts import first_acts
from dpuflow.entries.handover import consumed, granted_data_ns, typical, waited_sends
from dpuflow.entries.leaving import as_acknowledged, last_acts, left_before
from dpuflow.entries.places import build_places
from dpuflow.entries.rows import Reactions, blank
from dpuflow.entries.rules import Rule
from dpuflow.schema.rows import NEVER, MessageFlag, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.places import Places
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

_EAGER = (Wire.OB1_MATCH, Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)


def build_entries(exchanges: Rows, instances: Sequence[Instance]) -> Entries:
    """Enter and leave of every rank of every collective, on the reference clock."""
    places = build_places(exchanges, instances)
    picked, sender, receiver = places.picked, places.sender, places.receiver
    acts = first_acts(places)
    leaves = last_acts(places, acts)
    waited = waited_sends(picked, places.needs, sender, receiver, acts.enter_ns)
    taken, between, ended = consumed(picked, instances, places.of, receiver, acts.enter_ns)
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
        buffered=acts.sent & ~leaves.fed & ~_held_up(places) & ~leaves.far,
        early_ns=_early_ns(places),
        signs=acts.signs,
        margins=replace(blanks.margins, lag_ns=acts.lag_ns),
        reactions=Reactions(waited, granted_data_ns(picked, sender), taken, between, ended),
    )
    since_ns, since_act = left_before(entries, places, leaves, acts.send_at)
    bounded = acts.rule == Rule.CREDIT  # it had waited for one GPU of its node at least
    since_ns = np.where(bounded, np.maximum(since_ns, acts.since_ns), since_ns)
    leave, idle = as_acknowledged(entries, places)
    return replace(entries, since_ns=since_ns, since_act=since_act, leave_ns=leave, idle_ns=idle)


def _sent_again(places: Places) -> NDArray[np.int64]:
    """By row how many packets to and from the rank were sent again."""
    again = np.zeros(len(places), np.int64)
    for end in (places.sender, places.receiver):
        np.add.at(again, end, places.picked["retransmitted"].astype(np.int64))
    return again


def _whole(places: Places) -> NDArray[np.bool_]:
    cut = (places.picked["flags"] & (MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER)) != 0
    whole = np.fromiter((i.complete for i in places.instances), bool, len(places.instances))
    whole[places.of[cut]] = False
    return whole[places.collective]


def _held_up(places: Places) -> NDArray[np.bool_]:
    """Ranks that sent what their peers had to allow."""
    held_up = np.zeros(len(places), bool)
    offered = places.picked["offer_ns"] != NEVER
    held_up[places.sender[offered | ~np.isin(places.picked["wire"], _EAGER)]] = True
    return held_up


def _early_ns(places: Places) -> NDArray[np.int64]:
    """Where another algorithm fits as well, it is that one."""
    early = places.needs.early_ns.tolist()
    kept = [0 if i.alternatives else e for i, e in zip(places.instances, early, strict=True)]
    return np.array(kept, np.int64)
