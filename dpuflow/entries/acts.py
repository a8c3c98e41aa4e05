"""Exchanges in; of every rank of every collective its first act, and what that may have waited for, out.

A rank enters a collective when it first acts of its own accord: offers data, sends it, or declares
itself ready to receive unasked. Such an act dates the entry exactly if nothing it could depend on
had reached the rank before, or if the algorithm's first step needs no input. A later act may have
waited for its input: the entry was then no later than that. An answer to a peer's offer bounds
likewise. A rank that never acts cannot be seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries.build import Rule
from dpuflow.entries.needs import started_ns
from dpuflow.entries.passing import reached_by_first
from dpuflow.entries.places import FAR, by_process
from dpuflow.entries.reached import last_event, reached_before, resumed_before
from dpuflow.entries.within import last_within
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.entries.places import Places


class Acts(NamedTuple):
    """By row of Entries, whose columns of the same names these are."""

    enter_ns: NDArray[np.int64]
    rule: NDArray[np.int64]
    act: NDArray[np.int64]
    after: NDArray[np.int64]
    unmoved_ns: NDArray[np.int64]
    moved_ns: NDArray[np.int64]
    resumed_ns: NDArray[np.int64]
    free_ns: NDArray[np.int64]
    credit_ns: NDArray[np.int64]
    grant: NDArray[np.int64]
    granted_ns: NDArray[np.int64]
    posted_ns: NDArray[np.int64]
    lag_ns: NDArray[np.int64]
    since_ns: NDArray[np.int64]
    sent: NDArray[np.bool_]
    send_at: NDArray[np.int64]
    """Which exchange's sending the first act is; -1 where it is something else."""


def first_acts(places: Places) -> Acts:
    """The first act of each rank; of processes that share an address those of the one that came last."""
    if all(instance.processes is None for instance in places.instances):
        free = np.zeros(len(places), bool)
        for number, instance in enumerate(places.instances):
            free[places.offsets[number] + np.array(instance.free_rows(), np.int64)] = True
        return _first_acts(places, free)
    apart = by_process(places)
    collective, endpoint = places.collective[apart.row], places.endpoint[apart.row]
    each = replace(
        places, sender=apart.sender, receiver=apart.receiver, collective=collective, endpoint=endpoint
    )
    acts = _first_acts(each, apart.free)
    order = np.lexsort((acts.enter_ns, apart.row))
    last = order[np.r_[apart.row[order][1:] != apart.row[order][:-1], True]]
    # Of one that is not seen nothing is told, nor of its endpoint.
    gone, sent = np.zeros((2, len(places)), bool)
    gone[apart.row[(acts.rule == Rule.UNSEEN) & apart.shares]] = True
    sent[apart.row[acts.sent]] = True
    latest = acts._replace(**{name: getattr(acts, name)[last] for name in Acts._fields})
    return latest._replace(
        rule=np.where(gone, int(Rule.UNSEEN), latest.rule),
        enter_ns=np.where(gone, NEVER, latest.enter_ns),
        sent=sent,
    )


def _first_acts(places: Places, free: NDArray[np.bool_]) -> Acts:
    """``free``: ranks whose first message needs no input."""
    picked, total = places.picked, len(places)

    offered = started_ns(picked)
    unasked = (picked["wire"] >= Wire.GLOO_DATA) & (picked["wire"] <= Wire.GLOO_RECV_READY)
    granted = picked["grant_ns"]
    # What an MPI library's receiver allows answers an offer; NCCL's credits do not.
    answers = (picked["op"] != Op.UNKNOWN) & ~unasked & (picked["wire"] != Wire.ROCE_WRITE_IMM)
    send_ns, send_at = places.earliest_of_all(places.sender, offered)
    ready_ns, ready_at = places.earliest(places.receiver, np.where(unasked, granted, NEVER))
    answer_ns, answer_at = places.earliest(places.receiver, np.where(answers, granted, NEVER))
    input_ns, _ = places.earliest(places.receiver, there_ns(picked))
    within = last_within(places)
    send_ns[within.rows], send_at[within.rows] = picked["data_ns"][within.at], within.at

    enter = np.minimum(np.minimum(send_ns, ready_ns), answer_ns)
    seen = enter != FAR
    by_send = seen & (send_ns == enter)
    by_answer = seen & ~by_send & (answer_ns == enter)
    by_ready = seen & (ready_ns == enter)
    # An input that was never seen may have come before.
    before_input = (send_ns <= input_ns) & (input_ns != FAR)
    unfree = np.where(before_input, int(Rule.NOTHING_BEFORE), int(Rule.AFTER_INPUT))
    rule = np.full(total, int(Rule.UNSEEN), np.int64)
    rule[by_send] = np.where(free, int(Rule.FREE_STEP), unfree)[by_send]
    lag = np.zeros(total, np.int64)
    since = np.full(total, NEVER)
    lag[within.rows], since[within.rows] = within.lag_ns, within.since_ns
    shown = np.where(within.exact, int(Rule.WITHIN), int(Rule.CREDIT))
    rule[within.rows] = np.where(within.inner & by_send[within.rows], shown, rule[within.rows])
    rule[by_answer] = Rule.ANSWER
    rule[by_ready] = Rule.READY

    first = np.where(picked["offer_ns"] != NEVER, picked["offer"], picked["data"])
    act = np.full(total, NONE32, np.int64)
    act[by_send] = first[send_at[by_send]]
    act[by_answer] = picked["grant"][answer_at[by_answer]]
    act[by_ready] = picked["grant"][ready_at[by_ready]]

    # Where data is not offered first, the grant is a credit that the first message may have waited for.
    unoffered = picked["offer_ns"] == NEVER
    credit = np.full(total, NEVER)
    credit[by_send] = np.where(unoffered, picked["grant_arrived_ns"], NEVER)[send_at[by_send]]
    grant = np.full(total, NONE32, np.int64)
    grant[by_send] = picked["grant"][send_at[by_send]]
    credits = np.where(unoffered & ~unasked, granted, NEVER)
    granted_ns, _ = places.earliest(places.receiver, credits)
    posted = np.full(total, NEVER)
    ahead = (credits != NEVER) & (credits < enter[places.receiver])
    np.maximum.at(posted, places.receiver[ahead], credits[ahead])

    waiting_at = np.where(rule == Rule.AFTER_INPUT, send_at, -1)
    answered_at = np.where(by_answer, answer_at, -1)
    reached, after = reached_before(places.needs, places.receiver, enter, answered_at, waiting_at)
    alone = (rule == Rule.AFTER_INPUT) & (reached == NEVER) & places.transfers
    last, shown = last_event(places.needs, places.endpoint, np.where(alone, enter, NEVER))
    reached, after = np.where(alone, last, reached), np.where(alone, shown, after)
    begun = reached_by_first(picked, places.receiver, enter, waiting_at, places.copied, reached, after)
    entered = np.where(seen, enter, NEVER)
    return Acts(
        enter_ns=entered,
        rule=rule,
        act=act,
        after=after,
        unmoved_ns=np.where(seen & (reached != NEVER), enter - reached, NEVER),
        moved_ns=np.where(seen & (begun != NEVER), enter - begun, NEVER),
        resumed_ns=resumed_before(places.needs, places.receiver, entered, waiting_at >= 0),
        free_ns=np.where(free & (send_ns != FAR), send_ns, NEVER),
        credit_ns=np.where(credit != NEVER, enter - credit, NEVER),
        grant=np.where(credit != NEVER, grant, NONE32),
        granted_ns=np.where(granted_ns != FAR, granted_ns, NEVER),
        posted_ns=np.where(seen, posted, NEVER),
        lag_ns=lag,
        since_ns=since,
        sent=send_ns != FAR,
        send_at=np.where(by_send, send_at, -1),
    )
