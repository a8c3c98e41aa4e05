"""Exchanges in; of every rank of every collective its first act, and what that may have waited for, out.

A rank enters a collective when it first acts of its own accord: offers data, sends it, or declares
itself ready to receive unasked. Such an act dates the entry exactly if nothing it could depend on
had reached the rank before, or if the algorithm's first step needs no input. A later act may have
waited for its input: the entry was then no later than that. An answer to a peer's offer bounds
likewise. A rank that never acts cannot be seen.

Of GPUs behind one adapter the last counts. A ring passes all of a node's, and one of them is at the exit.
In step k of its first loop that one sends what the GPU k places before it was the first to send: it needs
so many GPUs of its node, and nothing from another node. So the first messages of these steps show one GPU
after the other: each had entered by then, and where a message came long after the one before it and after
its credit, it had waited for that GPU alone (NCCL 2.30, src/device/all_reduce.h runRing).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import median_of
from dpuflow.entries.channels import started_ns
from dpuflow.entries.inputs import last_event, reached_before
from dpuflow.entries.places import by_process
from dpuflow.entries.rows import AT_ONCE, FAR_BEYOND, Rule
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.arrays import Bools, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.places import Places
    from dpuflow.matching import Instance


class Acts(NamedTuple):
    """By row of Entries, whose columns of the same names these are."""

    enter_ns: Ints
    rule: Ints
    act: Ints
    after: Ints
    credit_ns: Ints
    granted_ns: Ints
    unmoved_ns: Ints
    free_ns: Ints
    grant: Ints
    lag_ns: Ints
    since_ns: Ints
    sent: Bools
    send_at: Ints
    """Which exchange's sending the first act is; -1 where it is something else."""


def first_acts(places: Places) -> Acts:
    """The first act of each rank; of processes that share an address those of the one that came last."""
    if all(instance.placement.processes is None for instance in places.instances):
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
    latest = Acts(**{name: column[last] for name, column in acts._asdict().items()})
    return latest._replace(
        rule=np.where(gone, int(Rule.UNSEEN), latest.rule),
        enter_ns=np.where(gone, NEVER, latest.enter_ns),
        sent=sent,
    )


class _Earliest(NamedTuple):
    """Of each row of Places when it first sent, was ready for an unasked message, answered an offer, and when
    its first input was there (FAR: never seen); ``_at`` is by which exchange."""

    send_ns: Ints
    send_at: Ints
    ready_ns: Ints
    ready_at: Ints
    answer_ns: Ints
    answer_at: Ints
    input_ns: Ints

    @property
    def enter_ns(self) -> Ints:
        """The earliest act of all."""
        return np.minimum(np.minimum(self.send_ns, self.ready_ns), self.answer_ns)

    def chosen(self) -> tuple[Bools, Bools, Bools]:
        """Rows whose first act is a send, an answer, or that it was ready."""
        enter = self.enter_ns
        seen = enter != FAR
        by_send = seen & (self.send_ns == enter)
        return by_send, seen & ~by_send & (self.answer_ns == enter), seen & (self.ready_ns == enter)


def _first_acts(places: Places, free: Bools) -> Acts:
    """``free``: ranks whose first message needs no input."""
    picked = places.picked
    within = last_within(places)
    first = _earliest(places, within)
    enter, by_answer = first.enter_ns, first.chosen()[1]
    seen = enter != FAR
    rule = _rules(first, within, free)
    lag, since = np.zeros(len(places), np.int64), np.full(len(places), NEVER)
    lag[within.rows], since[within.rows] = within.lag_ns, within.since_ns
    credit, granted_ns = _credits(places, first)

    waiting_at = np.where(rule == Rule.AFTER_INPUT, first.send_at, -1)
    answered_at = np.where(by_answer, first.answer_at, -1)
    reached, after = reached_before(places.needs, places.receiver, enter, answered_at, waiting_at)
    alone = (rule == Rule.AFTER_INPUT) & (reached == NEVER) & places.transfers
    last, shown = last_event(places.needs, places.endpoint, np.where(alone, enter, NEVER))
    reached, after = np.where(alone, last, reached), np.where(alone, shown, after)
    entered = np.where(seen, enter, NEVER)
    granted, grant = credit != NEVER, np.full(len(places), NONE32, np.int64)
    grant[granted] = picked["grant"][first.send_at[granted]]
    return Acts(
        enter_ns=entered,
        rule=rule,
        act=_act_rows(picked, first),
        after=after,
        credit_ns=np.where(credit != NEVER, enter - credit, NEVER),
        granted_ns=np.where(granted_ns != FAR, granted_ns, NEVER),
        unmoved_ns=np.where(seen & (reached != NEVER), enter - reached, NEVER),
        free_ns=np.where(free & (first.send_ns != FAR), first.send_ns, NEVER),
        grant=grant,
        lag_ns=lag,
        since_ns=since,
        sent=first.send_ns != FAR,
        send_at=np.where(first.chosen()[0], first.send_at, -1),
    )


def _unasked(picked: Picked) -> Bools:
    """Exchanges whose receivers say that they are ready, whoever sends: Gloo's."""
    return (picked["wire"] >= Wire.GLOO_DATA) & (picked["wire"] <= Wire.GLOO_RECV_READY)


def _earliest(places: Places, within: Within) -> _Earliest:
    picked, granted = places.picked, places.picked["grant_ns"]
    unasked = _unasked(picked)
    # What an MPI library's receiver allows answers an offer; NCCL's credits do not.
    answers = (picked["op"] != Op.UNKNOWN) & ~unasked & (picked["wire"] != Wire.ROCE_WRITE_IMM)
    send_ns, send_at = places.earliest_of_all(places.sender, started_ns(picked))
    send_ns[within.rows], send_at[within.rows] = picked["data_ns"][within.at], within.at
    return _Earliest(
        send_ns,
        send_at,
        *places.earliest(places.receiver, np.where(unasked, granted, NEVER)),
        *places.earliest(places.receiver, np.where(answers, granted, NEVER)),
        places.earliest(places.receiver, there_ns(picked))[0],
    )


def _rules(first: _Earliest, within: Within, free: Bools) -> Ints:
    """What each first act is."""
    by_send, by_answer, by_ready = first.chosen()
    # An input that was never seen may have come before.
    before_input = (first.send_ns <= first.input_ns) & (first.input_ns != FAR)
    unfree = np.where(before_input, int(Rule.NOTHING_BEFORE), int(Rule.AFTER_INPUT))
    rule = np.full(len(free), int(Rule.UNSEEN), np.int64)
    rule[by_send] = np.where(free, int(Rule.FREE_STEP), unfree)[by_send]
    shown = np.where(within.exact, int(Rule.WITHIN), int(Rule.CREDIT))
    rule[within.rows] = np.where(within.inner & by_send[within.rows], shown, rule[within.rows])
    rule[by_answer] = Rule.ANSWER
    rule[by_ready] = Rule.READY
    return rule


def _act_rows(picked: Picked, first: _Earliest) -> Ints:
    """The TRANSFER row of each first act; NONE32 for none."""
    by_send, by_answer, by_ready = first.chosen()
    sent = np.where(picked["offer_ns"] != NEVER, picked["offer"], picked["data"])
    act = np.full(len(by_send), NONE32, np.int64)
    act[by_send] = sent[first.send_at[by_send]]
    act[by_answer] = picked["grant"][first.answer_at[by_answer]]
    act[by_ready] = picked["grant"][first.ready_at[by_ready]]
    return act


def _credits(places: Places, first: _Earliest) -> tuple[Ints, Ints]:
    """When the credit that the first message may have waited for was there, and when the rank gave its first
    one (FAR: never seen).

    Where data is not offered first, the grant is such a credit.
    """
    picked, by_send = places.picked, first.chosen()[0]
    unoffered = picked["offer_ns"] == NEVER
    credit = np.full(len(by_send), NEVER)
    credit[by_send] = np.where(unoffered, picked["grant_arrived_ns"], NEVER)[first.send_at[by_send]]
    credits = np.where(unoffered & ~_unasked(picked), picked["grant_ns"], NEVER)
    return credit, places.earliest(places.receiver, credits)[0]


class Within(NamedTuple):
    """Rows of Places whose last GPU shows: what dates it."""

    rows: Ints
    at: Ints  # which exchange
    exact: Bools  # it had waited for a GPU alone; else for its credit, perhaps
    inner: Bools  # that GPU is not the one at the exit
    lag_ns: Ints  # so much before or after that it may have entered
    since_ns: Ints  # ... but no earlier than this; NEVER where nothing shows it


class _Lane(NamedTuple):
    """The first messages of a lane's first steps."""

    row: int  # that sends them
    at: Ints  # which exchanges
    apart: Ints  # how long after the step before, of all but the first
    idle: Ints  # ... and after all else that they may have waited for
    lay_ns: int  # how long the first one's credit lay there


def gpus_within(instance: Instance) -> int:
    """How many GPUs each adapter serves where a ring shows each of them; 0 where none does so.

    Of a node with several adapters none is known by the ring's steps: that GPU may be behind any of them.
    """
    ring = instance.algorithm is not None and instance.algorithm.name == "ring"
    view, n = instance.view, len(instance.order)
    known = view.near is None and instance.hides_ranks and not view.inside and not view.apart
    if not (ring and known and instance.complete) or n < 2 or instance.placement.ranks % n:
        return 0
    if len(set(instance.placement.nodes)) < n:
        return 0
    return instance.placement.ranks // n


def last_within(places: Places) -> Within:
    """When the last GPU behind each adapter had entered, where more shows than when that at the exit had."""
    base = np.r_[0, np.cumsum([len(i.rows) for i in places.instances])]
    lanes = []
    for number, instance in enumerate(places.instances):
        gpus = gpus_within(instance)
        if gpus:
            steps = (instance.placement.ranks - 1) * (2 if instance.op == Op.ALL_REDUCE else 1)
            slices = 2 if instance.slicing.protocol == "simple" else 1
            mine = np.arange(base[number], base[number + 1])
            lanes += list(_lanes(places.picked, places.sender, mine, gpus, steps, slices))
    if not lanes:
        none = np.zeros(0, np.int64)
        return Within(none, none, none > 0, none > 0, none, none)
    apart, idle = (
        FAR_BEYOND * median_of(np.concatenate([getattr(lane, name) for lane in lanes]))
        for name in ("apart", "idle")
    )
    found: dict[int, tuple[int, ...]] = {}
    for lane in lanes:
        entry = _entry(places.picked["data_ns"], lane, float(apart), float(idle))
        # One kernel works on all channels: the GPU had entered when the first of them shows it.
        found[lane.row] = min(found.get(lane.row, entry), entry)
    rows = np.array(sorted(found), np.int64)
    _, waited, at, inner, lag, since = np.array([found[row] for row in rows.tolist()], np.int64).T
    return Within(rows, at, waited == 0, inner > 0, lag, since)


def _lanes(picked: Picked, sender: Ints, mine: Ints, gpus: int, steps: int, slices: int) -> Iterator[_Lane]:
    mine = mine[np.lexsort((picked["order"][mine], picked["connection"][mine], sender[mine]))]
    line = picked["connection"][mine].astype(np.int64) * len(picked) + sender[mine]
    for lane in np.split(mine, np.flatnonzero(np.diff(line)) + 1):
        if len(lane) % (steps * slices):
            continue
        at = lane[: gpus * slices : slices]
        before = lane[slices - 1 : (gpus - 1) * slices : slices]
        start, end = picked["data_ns"][at], picked["data_end_ns"][before]
        credits = picked["grant_arrived_ns"][at]
        if len(at) == gpus and (start != NEVER).all() and (end != NEVER).all():
            held = np.maximum(end, credits[1:])
            yield _Lane(int(sender[at[0]]), at, np.diff(start), np.maximum(start[1:] - held, 0),
                        int(start[0] - credits[0]) if credits[0] != NEVER else 0)  # fmt: skip


def _entry(data_ns: Ints, lane: _Lane, apart: float, idle: float) -> tuple[int, ...]:
    """When the last GPU had entered, whether its message may have waited for a credit, which exchange that
    is, whether it is another GPU than that at the exit, how far that may be off, and since when it may be."""
    when, waited, which, inner, lag = int(data_ns[lane.at[0]]), False, int(lane.at[0]), False, 0
    sure = when if lane.lay_ns > idle else NEVER
    for at, since, free in zip(lane.at[1:].tolist(), lane.apart.tolist(), lane.idle.tolist(), strict=True):
        lag += since
        if since > apart:
            # What leaves at once when its credit is there had waited for that.
            soon = free <= max(idle, AT_ONCE * since)
            when, waited, which, inner, lag = int(data_ns[at]), soon, at, True, 0
            sure = sure if waited else when
    return when, waited, which, inner, lag, sure
