"""Collectives in, enter and leave of every rank out, with the bound that the packets justify.

A rank enters a collective when it first acts of its own accord: offers data, sends it, or declares
itself ready to receive unasked. Such an act dates the entry exactly if nothing it could depend on
had reached the rank before, or if the algorithm's first step needs no input. A later act may have
waited for its input: the entry was then no later than that. An answer to a peer's offer bounds
likewise. A rank that never acts cannot be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema import NEVER, NONE32, MessageFlag, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.tables import Rows

_FAR = np.iinfo(np.int64).max


class Rule(IntEnum):
    """What an entry rests on; RULES has the sentences."""

    UNSEEN = 0
    READY = 1  # exact: declared itself ready to receive, unasked
    NOTHING_BEFORE = 2  # exact: sent before anything had arrived
    FREE_STEP = 3  # exact: the algorithm's first step of this rank needs no input
    AFTER_INPUT = 4  # at most: its first message may have waited for an input
    ANSWER = 5  # at most: it only answered an offer
    CREDIT = 7  # at most: its first message left as soon as its credit had come
    LONG_AFTER = 6  # exact: its first message came so long after any input that it had not waited for one


RULES: dict[Rule, tuple[str, str]] = {
    Rule.UNSEEN: ("unobservable", "sent nothing in this collective that was seen"),
    Rule.READY: ("exact", "first ready-to-receive message, sent unasked"),
    Rule.NOTHING_BEFORE: ("exact", "first message, sent before any input had arrived"),
    Rule.FREE_STEP: ("exact", "first message of a step that needs no input"),
    Rule.AFTER_INPUT: ("at_most", "first message, which may have waited for its input"),
    Rule.ANSWER: ("at_most", "first answer to a peer's offer"),
    Rule.CREDIT: ("at_most", "first message, sent as soon as its credit had come"),
    Rule.LONG_AFTER: ("exact", "first message, long after its input had arrived"),
}
"""Rule -> (bound, why)."""


@dataclass
class Entries:
    """One row per (collective, rank), as parallel arrays in order of collectives.

    ``enter_ns`` NEVER where unobservable; ``act`` is the TRANSFER row of the message that fixed it,
    NONE32 for none.
    ``offsets[i]:offsets[i + 1]`` are the rows of collective i.
    """

    collective: NDArray[np.int64]
    endpoint: NDArray[np.int64]
    enter_ns: NDArray[np.int64]
    leave_ns: NDArray[np.int64]  # all it needed was there; for a rank without input: all was sent
    idle_ns: NDArray[np.int64]  # besides, its last data had left the node, or was acknowledged if sent again
    rule: NDArray[np.int64]
    act: NDArray[np.int64]
    retransmitted: NDArray[np.int64]  # packets sent again on exchanges to or from the rank
    reaction_ns: NDArray[np.int64]  # median time from an input to the send that follows it
    unmoved_ns: NDArray[np.int64]  # from the last thing that reached the rank to its first act
    credit_ns: NDArray[np.int64]  # from the credit of its first message to that message; NEVER without one
    whole: NDArray[np.bool_]  # the captures hold the collective from its beginning to its end
    offsets: NDArray[np.int64]

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Rows whose entry is exact."""
        return np.isin(self.rule, (Rule.READY, Rule.NOTHING_BEFORE, Rule.FREE_STEP, Rule.LONG_AFTER))


def build_entries(exchanges: Rows, instances: Sequence[Instance]) -> Entries:
    """Enter and leave of every rank of every collective, on the reference clock."""
    offsets = np.zeros(len(instances) + 1, np.int64)
    offsets[1:] = np.cumsum([len(instance.order) for instance in instances])
    total = int(offsets[-1])
    collective = np.repeat(np.arange(len(instances)), np.diff(offsets))
    endpoint = np.fromiter((e for i in instances for e in i.order), np.int64, total)
    free = np.zeros(total, bool)
    for number, instance in enumerate(instances):
        free[offsets[number] + np.array(instance.free_rows(), np.int64)] = True

    rows = np.concatenate([i.rows for i in instances]) if instances else np.zeros(0, np.int64)
    of = np.repeat(np.arange(len(instances)), [len(i.rows) for i in instances]) if instances else rows
    picked = exchanges[rows]
    lookup = _Lookup(collective, endpoint)
    sender, receiver = lookup(of, picked["src"]), lookup(of, picked["dst"])

    offered = np.where(picked["offer_ns"] != NEVER, picked["offer_ns"], picked["data_ns"])
    unasked = (picked["wire"] >= Wire.GLOO_DATA) & (picked["wire"] <= Wire.GLOO_RECV_READY)
    grant = picked["grant_ns"]
    ready = np.where(unasked, grant, NEVER)
    answer = np.where((picked["wire"] >= Wire.OB1_MATCH) & (picked["wire"] <= Wire.OB1_OTHER), grant, NEVER)
    send_ns, send_at = _earliest(total, sender, offered)
    ready_ns, ready_at = _earliest(total, receiver, ready)
    answer_ns, answer_at = _earliest(total, receiver, answer)
    input_ns, _ = _earliest(total, receiver, picked["arrived_end_ns"])

    rule = np.full(total, Rule.UNSEEN, np.int64)
    enter = np.minimum(np.minimum(send_ns, ready_ns), answer_ns)
    act = np.full(total, NONE32, np.int64)
    seen = enter != _FAR
    by_send = seen & (send_ns == enter)
    by_answer = seen & ~by_send & (answer_ns == enter)
    by_ready = seen & (ready_ns == enter)
    rule[by_send] = np.where(
        free[by_send],
        Rule.FREE_STEP,
        np.where(
            # An input that was never seen may have come before.
            (send_ns[by_send] <= input_ns[by_send]) & (input_ns[by_send] != _FAR),
            Rule.NOTHING_BEFORE,
            Rule.AFTER_INPUT,
        ),
    )
    rule[by_answer] = Rule.ANSWER
    rule[by_ready] = Rule.READY
    # Where data is not offered first, the grant is a credit that the first message may have waited for.
    paid = np.where(picked["offer_ns"] == NEVER, picked["grant_arrived_ns"], NEVER)
    credit = np.where(send_at >= 0, paid[send_at], NEVER) if len(rows) else send_at
    first = np.where(picked["offer_ns"] != NEVER, picked["offer"], picked["data"])
    act[by_send] = first[send_at[by_send]]
    act[by_answer] = picked["grant"][answer_at[by_answer]]
    act[by_ready] = picked["grant"][ready_at[by_ready]]

    reached = np.full(total, NEVER, np.int64)
    for name in ("arrived_end_ns", "offer_arrived_ns"):
        before = (picked[name] != NEVER) & (picked[name] <= enter[receiver])
        np.maximum.at(reached, receiver[before], picked[name][before])

    leave = np.full(total, NEVER, np.int64)
    np.maximum.at(leave, receiver, picked["arrived_end_ns"])
    sent = np.full(total, NEVER, np.int64)
    np.maximum.at(sent, sender, picked["data_end_ns"])
    # Data sent again is not done with until it is acknowledged. Other ACKs may come at leisure.
    resent = picked["retransmitted"] > 0
    np.maximum.at(sent, sender[resent], picked["acked_ns"][resent])
    again = np.zeros(total, np.int64)
    np.add.at(again, sender, picked["retransmitted"].astype(np.int64))
    np.add.at(again, receiver, picked["retransmitted"].astype(np.int64))
    cut = (picked["flags"] & (MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER)) != 0
    whole = np.fromiter((i.complete for i in instances), bool, len(instances))
    whole[of[cut]] = False
    return Entries(
        collective,
        endpoint,
        np.where(seen, enter, NEVER),
        np.maximum(np.where(leave == NEVER, sent, leave), np.where(seen, enter, NEVER)),
        np.maximum(np.maximum(leave, sent), np.where(seen, enter, NEVER)),
        rule,
        act,
        again,
        _reactions(total, sender, receiver, offered, picked["arrived_end_ns"], enter),
        np.where(seen & (reached != NEVER), enter - reached, NEVER),
        np.where(by_send & (credit != NEVER), enter - credit, NEVER),
        whole[collective],
        offsets,
    )


class _Lookup:
    """Finds the row of (collective, endpoint)."""

    def __init__(self, collective: NDArray[np.int64], endpoint: NDArray[np.int64]) -> None:
        self.width = int(endpoint.max(initial=0)) + 1
        key = collective * self.width + endpoint
        self.order = np.argsort(key)
        self.keys = key[self.order]

    def __call__(self, collective: NDArray[np.int64], endpoint: NDArray[np.uint32]) -> NDArray[np.int64]:
        key = collective * self.width + endpoint.astype(np.int64)
        return np.asarray(self.order[np.searchsorted(self.keys, key)], np.int64)


def _earliest(
    total: int, rows: NDArray[np.int64], times: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of ``total`` rows the earliest of its times (far future without), and which one it is."""
    best = np.full(total, _FAR)
    where = np.full(total, -1, np.int64)
    seen = np.flatnonzero(times != NEVER)
    order = seen[np.lexsort((times[seen], rows[seen]))]
    if len(order):
        first = np.r_[True, rows[order][1:] != rows[order][:-1]]
        best[rows[order][first]] = times[order][first]
        where[rows[order][first]] = order[first]
    return best, where


def _reactions(
    total: int,
    sender: NDArray[np.int64],
    receiver: NDArray[np.int64],
    offered: NDArray[np.int64],
    arrived: NDArray[np.int64],
    enter: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Median time from an input's arrival to the rank's next send, ns; NEVER without inputs.

    Only inputs that came after the rank had entered count: what lay there before waited for it.

    This is how fast the rank's host hands a message on when it has nothing to wait for: the
    yardstick for how far its first message lags its entry.
    """
    who = np.concatenate([sender, receiver])
    when = np.concatenate([offered, arrived])
    send = np.concatenate([np.ones(len(sender), bool), np.zeros(len(receiver), bool)])
    seen = (when != NEVER) & (when >= enter[who])
    who, when, send = who[seen], when[seen], send[seen]
    order = np.lexsort((when, who))
    who, when, send = who[order], when[order], send[order]
    follows = np.flatnonzero(send[1:] & ~send[:-1] & (who[1:] == who[:-1])) + 1
    gap, of = when[follows] - when[follows - 1], who[follows]
    order = np.lexsort((gap, of))
    gap, of = gap[order], of[order]
    out = np.full(total, NEVER, np.int64)
    if len(of):
        starts = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
        counts = np.diff(np.r_[starts, len(of)])
        out[of[starts]] = gap[starts + (counts - 1) // 2]
    return out


FAR_BEYOND = 3.0
"""Times the slowest usual reaction (95th percentile) after which a rank had not been waiting."""


FEWEST = 8
"""Reactions it takes to know what is usual in a group."""


def settle(entries: Entries, group: NDArray[np.int64]) -> Entries:
    """Weigh what reached a rank before it acted against how fast its hosts usually react.

    A rank that waits for an input or a credit acts on it within its host's usual reaction. One that
    acts far later had not entered when the input came: its entry is exact. One that sends as soon as
    its credit has come may have waited for that. ``group`` numbers each collective's group.
    """
    rule = entries.rule.copy()
    of_row = group[entries.collective]
    open_rows = np.isin(rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    known = entries.reaction_ns != NEVER
    gated = np.isin(rule, (Rule.FREE_STEP, Rule.NOTHING_BEFORE)) & (entries.credit_ns != NEVER)
    for each in np.unique(of_row[open_rows | gated]).tolist():
        mine = of_row == each
        reactions = entries.reaction_ns[mine & known]
        if len(reactions) < FEWEST:
            reactions = entries.reaction_ns[known]  # of all groups: their ranks run on the same hosts
        if len(reactions):
            slowest = float(np.percentile(reactions, 95))
            rule[mine & open_rows & (entries.unmoved_ns > FAR_BEYOND * slowest)] = Rule.LONG_AFTER
            rule[mine & gated & (entries.credit_ns < float(np.median(reactions)))] = Rule.CREDIT
    return replace(entries, rule=rule)


def doubt(entries: Entries, instances: Sequence[Instance]) -> Entries:
    """Make bounds of entries of ranks that may have acted before the first act that was seen of them.

    What such a rank is seen to send may have waited for an input that nobody saw, or not be its first:
    then how long after an input it came says nothing either.
    """
    sends, grants = np.zeros((2, len(entries.rule)), bool)
    for number, instance in enumerate(instances):
        if instance.near is not None:
            by_send, by_grant = instance.undated_rows()
            sends[entries.offsets[number] + np.array(by_send, np.int64)] = True
            grants[entries.offsets[number] + np.array(by_grant, np.int64)] = True
    if not (sends.any() or grants.any()):
        return entries
    declared = np.isin(entries.rule, (Rule.READY, Rule.ANSWER))
    undated = np.where(declared, grants, sends)
    return replace(
        entries,
        rule=np.where(entries.exact & undated, Rule.AFTER_INPUT, entries.rule),
        unmoved_ns=np.where(undated, NEVER, entries.unmoved_ns),
    )


BOUNDS = ("exact", "at_most", "at_least", "unobservable")
EXACT, AT_MOST, AT_LEAST, UNOBSERVABLE = range(4)


@dataclass
class Relative:
    """Lateness of each row of Entries: ``lateness_ns`` (NEVER where unobservable) and its bound."""

    lateness_ns: NDArray[np.int64]
    bound: NDArray[np.int64]  # index into BOUNDS


def short_of_ranks(entries: Entries, instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Collectives of which some rank's entry cannot be told because its messages were not captured."""
    short = np.array([i.near is not None for i in instances], bool)
    for number in np.flatnonzero(short).tolist():
        instance, rows = instances[number], slice(*entries.offsets[number : number + 2].tolist())
        short[number] = instance.ranks > len(instance.order) or not entries.exact[rows].all()
    return short


def relate(entries: Entries, short: NDArray[np.bool_] | None = None) -> Relative:
    """Lateness against the earliest rank of each collective.

    Where a rank's entry is not exact it may have been the earliest of all, though never earlier
    than it left its collective before; what follows for the others is a bound, not a value. ``short``
    marks collectives with ranks that no capture saw: any of these may have been the earliest, so what is
    known of the others are lower bounds. Of a collective that was seen only in part nothing follows.
    """
    starts = entries.offsets[:-1]
    count = np.diff(entries.offsets)
    if not len(starts):
        none = np.zeros(0, np.int64)
        return Relative(none, none)

    def over(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(np.minimum.reduceat(values, starts), count)

    exact = entries.exact
    seen = entries.enter_ns != NEVER
    earliest = over(np.where(seen, entries.enter_ns, _FAR))
    before = previous_leave(entries)
    floor = over(np.where(exact, entries.enter_ns, np.where(before <= entries.enter_ns, before, NEVER)))
    known = over(exact.astype(np.int64)) == 1
    missing = np.zeros(len(exact), bool) if short is None else np.repeat(short, count)
    known &= ~missing
    floor = np.where(missing, NEVER, floor)
    lead = entries.enter_ns - earliest
    most = np.where(floor != NEVER, entries.enter_ns - floor, NEVER)

    bound = np.where(known, EXACT, np.where(exact & ((lead > 0) | missing), AT_LEAST, AT_MOST))
    lateness = np.where(bound == AT_MOST, most, lead)
    bound = np.where(seen & entries.whole & (lateness != NEVER), bound, UNOBSERVABLE)
    return Relative(np.where(bound == UNOBSERVABLE, NEVER, lateness), bound)


def previous_row(entries: Entries) -> NDArray[np.int64]:
    """For each row that of the same rank's collective before, -1 for its first.

    In the order in which the rank entered them: where groups take turns, a peer may have begun a
    collective before the rank had finished one of another group.
    """
    when = np.where(entries.enter_ns != NEVER, entries.enter_ns, entries.leave_ns)
    order = np.lexsort((entries.collective, when, entries.endpoint))
    before = np.full(len(order), -1, np.int64)
    same = entries.endpoint[order][1:] == entries.endpoint[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def previous_leave(entries: Entries) -> NDArray[np.int64]:
    """When each rank left the collective it was in before this one; NEVER for its first."""
    before = previous_row(entries)
    return np.where(before >= 0, entries.leave_ns[before], NEVER)


def against_others(
    entries: Entries, values: NDArray[np.int64], mine: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Each row's value less the median of the other ranks' values in its collective; 0 outside ``mine``."""
    rows = np.flatnonzero(mine)
    if not len(rows):
        return np.zeros(len(mine))
    collective = entries.collective[rows]
    own = values[rows] - values[rows].min()  # a double holds no epoch to the nanosecond
    order = np.lexsort((own, collective))
    starts = np.flatnonzero(np.r_[True, collective[order][1:] != collective[order][:-1]])
    count = np.diff(np.r_[starts, len(order)])
    rank = np.arange(len(order)) - np.repeat(starts, count)
    low = np.repeat(starts, count)
    others = np.repeat(count, count) - 1
    ordered = own[order].astype(np.float64)

    def pick(place: NDArray[np.int64]) -> NDArray[np.float64]:
        # The place-th of the others: one further on where one's own place lies before it.
        place = np.clip(place, 0, np.maximum(others - 1, 0))
        return np.asarray(ordered[np.minimum(low + place + (place >= rank), len(order) - 1)], np.float64)

    median = (pick((others - 1) // 2) + pick(others // 2)) / 2
    out = np.zeros(len(mine), np.float64)
    out[rows[order]] = ordered - median
    return out
