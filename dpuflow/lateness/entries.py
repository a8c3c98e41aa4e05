"""Collectives in, enter and leave of every rank out, with the rule that dates each entry.

A rank enters a collective when it first acts of its own accord: offers data, sends it, or declares
itself ready to receive unasked. Such an act dates the entry exactly if nothing it could depend on
had reached the rank before, or if the algorithm's first step needs no input. A later act may have
waited for its input: the entry was then no later than that. An answer to a peer's offer bounds
likewise. A rank that never acts cannot be seen. What else an act may have waited for is weighed in
``doubts``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.exchanges import there_ns
from dpuflow.lateness.handover import handled_ns, typical, waited_sends
from dpuflow.lateness.leaving import as_acknowledged
from dpuflow.lateness.needs import build_needs, started_ns
from dpuflow.lateness.passing import SLOTS, consumed, reached_by_first
from dpuflow.lateness.reached import reached_before, resumed_before
from dpuflow.lateness.relative import previous_row
from dpuflow.lateness.staging import filled_ns, kept_until_ns, slot_free_ns
from dpuflow.lateness.tails import tails
from dpuflow.schema import NEVER, NONE32, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness.passing import Times
    from dpuflow.ordering import Picked
    from dpuflow.tables import Rows

_FAR = np.iinfo(np.int64).max
_EAGER = (Wire.OB1_MATCH, Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)
CREDIT_TRIPS = 3.0
"""Round trips of messages within which data may have left because its credit had come."""
_TABLE = 32  # words a row that a table may take instead of a search


class Rule(IntEnum):
    """What an entry rests on; RULES has the sentences."""

    UNSEEN = 0
    READY = 1  # exact: declared itself ready to receive, unasked
    NOTHING_BEFORE = 2  # exact: sent before anything had arrived
    FREE_STEP = 3  # exact: the algorithm's first step of this rank needs no input
    AFTER_INPUT = 4  # at most: its first message may have waited for an input
    ANSWER = 5  # at most: it only answered an offer
    LONG_AFTER = 6  # exact: its first message came so long after any input that it had not waited for one
    CREDIT = 7  # at most: its first message left soon after its credit had come
    QUEUED = 8  # at most: it may have queued behind another collective of the same group
    CONNECTING = 9  # at most: its first message opened a connection
    REPEATED = 10  # at most: the first time it was sent may not have been seen
    PARTLY = 11  # at most: not all messages of this rank can have been seen
    UNACKED = 14  # at most: it left soon after the late ACK of the message before it on its connection
    CONTRADICTED = 12  # unobservable: what was put together cannot be one collective
    BEHIND = 13  # exact but for the way: a peer's message had waited for this rank alone
    GIVEN_BACK = 16  # exact: a slot given back long after it was filled (``slots``)
    GIVEN_LATE = 17  # at most: the same, of the last of several slots
    WAITED = 15  # at most: a message shows that it had entered; it may have waited for others nobody saw


RULES: dict[Rule, tuple[str, str]] = {
    Rule.UNSEEN: ("unobservable", "sent nothing in this collective that was seen"),
    Rule.READY: ("exact", "first ready-to-receive message, sent unasked"),
    Rule.NOTHING_BEFORE: ("exact", "first message, sent before any input had arrived"),
    Rule.FREE_STEP: ("exact", "first message of a step that needs no input"),
    Rule.AFTER_INPUT: ("at_most", "first message, which may have waited for its input"),
    Rule.ANSWER: ("at_most", "first answer to a peer's offer"),
    Rule.LONG_AFTER: ("exact", "first message, long after its input had arrived"),
    Rule.CREDIT: ("at_most", "first message, sent soon after its credit had come"),
    Rule.QUEUED: ("at_most", "first message, which may have queued behind the collective before"),
    Rule.CONNECTING: ("at_most", "first message, which may have waited for its connection"),
    Rule.REPEATED: ("at_most", "first message, of which only a repetition or its later packets were seen"),
    Rule.PARTLY: ("at_most", "first message that was seen; others may have come before"),
    Rule.UNACKED: ("at_most", "first message, sent soon after the late acknowledgment of the one before it"),
    Rule.CONTRADICTED: ("unobservable", "messages of this collective came before what they need"),
    Rule.WAITED: (
        "at_most",
        "first message that shows it had entered; it, or one that it waited for, held it back",
    ),
    Rule.GIVEN_BACK: ("exact", "first slot given back, long after the data in it had arrived"),
    Rule.GIVEN_LATE: ("at_most", "slots given back, long after the data in them had arrived"),
    Rule.BEHIND: ("exact", "first message that shows it had entered; it had waited for this rank alone"),
}
"""Rule -> (bound, why)."""

EXACT_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "exact")


@dataclass
class Entries:
    """One row per (collective, rank), as parallel arrays in order of collectives.

    ``enter_ns`` NEVER where unobservable; ``act`` is the TRANSFER row of the message that fixed it and
    ``after`` that of what it may have waited for, NONE32 for none.
    ``offsets[i]:offsets[i + 1]`` are the rows of collective i.
    """

    collective: NDArray[np.int64]
    endpoint: NDArray[np.int64]
    enter_ns: NDArray[np.int64]
    leave_ns: NDArray[np.int64]  # all it needed was there; without input: all was sent (NCCL: can have been)
    idle_ns: NDArray[np.int64]  # besides, its last data had left the node (if sent again: was acknowledged),
    # of NCCL's its last slot was free to be filled
    rule: NDArray[np.int64]
    act: NDArray[np.int64]
    after: NDArray[np.int64]
    retransmitted: NDArray[np.int64]  # packets sent again on exchanges to or from the rank
    reaction_ns: NDArray[np.int64]  # median time from an input to the send that had waited for it
    unmoved_ns: NDArray[np.int64]  # from the last thing that reached the rank to its first act
    resumed_ns: NDArray[np.int64]  # data had stopped coming and went on before its first act; NEVER if not
    moved_ns: NDArray[np.int64]  # unmoved_ns at the most, where it is not known which of several it was
    free_ns: NDArray[np.int64]  # its first send, where the algorithm needs no input for it; else NEVER
    credit_ns: NDArray[np.int64]  # from the credit of its first message to that message; NEVER without one
    whole: NDArray[np.bool_]  # the captures hold the collective from its beginning to its end
    offsets: NDArray[np.int64]
    sent: NDArray[np.bool_]  # the rank sent or offered data
    buffered: NDArray[np.bool_]  # ... and what it sent needed nothing of its peers: it may have left at once
    fed: NDArray[np.bool_]  # the rank received data: leave_ns is when it had all of it ...
    last: NDArray[np.int64]  # ... and this TRANSFER row brought the last of it; NONE32 for none
    grant: NDArray[np.int64]  # TRANSFER row of the credit of credit_ns, NONE32 for none
    granted_ns: NDArray[np.int64]  # the rank's first credit for data that is not offered; NEVER without one
    waited: NDArray[np.int64]  # one element a send that had waited for its input: its rank's row here ...
    waited_ns: NDArray[np.int64]  # ... and how long after that input it came
    granted_data_ns: NDArray[np.int64]  # not by rows: from grants to the data that had waited for them ...
    next_send_ns: NDArray[np.int64]  # ... and from send to send (``handled_ns``)
    taken: Times  # the same of inputs whose slot it granted again (NCCL)
    between: Times  # ... and of an operation's last input, at the most (``passing.consumed``)
    since_ns: NDArray[np.int64]  # it entered no earlier than this; NEVER where nothing says so ...
    since_act: NDArray[np.int64]  # ... and the TRANSFER row that shows it; NONE32 where none does
    lead_ns: NDArray[np.int64]  # at least so much later than a peer, by calls before (``queues``); else NEVER
    clock: NDArray[np.int64]  # number of the capture that stamped the act ...
    clock_ns: NDArray[np.int64]  # ... and how far its clock may be off the reference
    spread_ns: NDArray[np.int64]  # how far hand-overs of the group differ, 95 %; NEVER where not known
    slow_ns: NDArray[np.int64]  # its hosts' slow reactions, 95 %; NEVER where none was seen
    tail_ns: NDArray[np.int64]  # what a hand-over takes at the worst (``tails``); 0 where nothing tells
    stalled_ns: NDArray[
        np.int64
    ]  # in mid-operation: the longest it sat on an input, far beyond what is usual
    held_ns: NDArray[np.int64]  # how long receiving may have held up the first act
    lag_ns: NDArray[np.int64]  # it may have entered so much before its first act (it found its input there)
    way_ns: NDArray[np.int64]  # how long the act may have been on its way to where it was stamped
    acked_ns: NDArray[np.int64]  # all its data had been acknowledged, as far as that was seen; NEVER without
    usual_way_ns: NDArray[np.int64]  # ... and how long it usually is
    by_ns: NDArray[np.int64]  # nothing dates it, but it had entered by then; NEVER where nothing shows it ...
    by_act: NDArray[np.int64]  # ... TRANSFER row of the message that does ...
    likely_ns: NDArray[np.int64]  # ... and when it, or one that it waits for, is likely to have entered
    early_ns: NDArray[np.int64]  # a tenth of the collective's sends came more than this before their input

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Rows whose entry is exact."""
        return np.isin(self.rule, EXACT_RULES)

    @property
    def told(self) -> NDArray[np.bool_]:
        """Rows whose entry is exact or a bound."""
        return np.isin(self.rule, (Rule.UNSEEN, Rule.CONTRADICTED), invert=True)

    def marked(self, rows: NDArray[np.bool_], rule: Rule, after: NDArray[np.int64]) -> Entries:
        """With another rule for exact entries among ``rows``, and what they may have waited for."""
        rows = rows & self.exact
        return replace(
            self, rule=np.where(rows, int(rule), self.rule), after=np.where(rows, after, self.after)
        )


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

    needs = build_needs(exchanges, instances)
    picked, of = needs.picked, needs.collective
    lookup = _Lookup(collective, endpoint)
    sender, receiver = lookup(of, picked["src"]), lookup(of, picked["dst"])

    offered = started_ns(picked)
    unasked = (picked["wire"] >= Wire.GLOO_DATA) & (picked["wire"] <= Wire.GLOO_RECV_READY)
    grant = picked["grant_ns"]
    ready = np.where(unasked, grant, NEVER)
    # What an MPI library's receiver allows answers an offer; NCCL's credits do not.
    answers = (picked["op"] != Op.UNKNOWN) & ~unasked & (picked["wire"] != Wire.ROCE_WRITE_IMM)
    answer = np.where(answers, grant, NEVER)
    send_ns, send_at = _earliest(total, sender, offered)
    ready_ns, ready_at = _earliest(total, receiver, ready)
    answer_ns, answer_at = _earliest(total, receiver, answer)
    there = there_ns(picked)
    input_ns, _ = _earliest(total, receiver, there)

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
    credit = np.where(send_at >= 0, paid[send_at], NEVER) if len(picked) else send_at
    granted = picked["grant"][send_at] if len(picked) else send_at
    first = np.where(picked["offer_ns"] != NEVER, picked["offer"], picked["data"])
    act[by_send] = first[send_at[by_send]]
    act[by_answer] = picked["grant"][answer_at[by_answer]]
    act[by_ready] = picked["grant"][ready_at[by_ready]]

    credits = np.where((picked["offer_ns"] == NEVER) & ~unasked, grant, NEVER)
    granted_ns, _ = _earliest(total, receiver, credits)
    act_at = np.where(rule == Rule.AFTER_INPUT, send_at, -1)
    reached, after = reached_before(needs, receiver, enter, np.where(by_answer, answer_at, -1), act_at)
    copied = np.fromiter((i.op == Op.BROADCAST for i in instances), bool, len(instances))[of]
    begun = reached_by_first(picked, receiver, enter, act_at, copied, reached, after)

    leave = np.full(total, NEVER, np.int64)
    np.maximum.at(leave, receiver, there)
    last = np.full(total, NONE32, np.int64)
    ends = (there != NEVER) & (there == leave[receiver])
    last[receiver[ends]] = picked["data"][ends]
    sent = np.full(total, NEVER, np.int64)
    # What arrived from a rank without a capture of its own may have left as early as its first packet.
    far = np.fromiter(
        (i.near is not None and e not in i.near for i in instances for e in i.order), bool, total
    )
    sending = far[sender] & (picked["data_ns"] != NEVER) if total else np.zeros(0, bool)
    np.maximum.at(sent, sender, np.where(sending, picked["data_ns"], picked["data_end_ns"]))
    # Data sent again is not done with until it is acknowledged. Other ACKs may come at leisure.
    resent = picked["retransmitted"] > 0
    np.maximum.at(sent, sender[resent], picked["acked_ns"][resent])
    # Who lets its peer read goes on when it hears that it has.
    heard = np.full(total, NEVER, np.int64)
    let = (picked["wire"] == Wire.ROCE_READ) & (picked["op"] != Op.UNKNOWN)
    let |= (picked["wire"] == Wire.TAGGED_DONE) & (picked["acked_ns"] != NEVER)
    np.maximum.at(heard, sender[let], picked["acked_ns"][let])
    np.maximum(sent, heard, out=sent)
    acked = np.full(total, NEVER, np.int64)
    np.maximum.at(acked, sender, picked["acked_ns"])
    again = np.zeros(total, np.int64)
    np.add.at(again, sender, picked["retransmitted"].astype(np.int64))
    np.add.at(again, receiver, picked["retransmitted"].astype(np.int64))
    cut = (picked["flags"] & (MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER)) != 0
    whole = np.fromiter((i.complete for i in instances), bool, len(instances))
    whole[of[cut]] = False
    entered = np.where(seen, enter, NEVER)
    fed = leave != NEVER
    leave = np.where(fed, np.maximum(leave, heard), leave)
    done = _of_nodes(instances, offsets, picked, of, sender, leave)
    # Who gets no input has left when its last data has, by NCCL sooner: when that was in the staging buffer.
    # So it may have with who passes on what it received: its first message left when its credit had come.
    unfed = seen & ((leave == NEVER) | (rule == Rule.AFTER_INPUT))
    staged = unfed[sender] & (picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["grant_ns"] != NEVER)
    gone, freed = sent.copy(), np.full(total, NEVER)
    own = np.zeros(total, bool)
    if staged.any():
        rows = np.flatnonzero(staged)
        np.maximum.at(freed, sender[rows], slot_free_ns(picked, of, rows))
        gone[sender[rows]] = np.maximum(entered, freed)[sender[rows]]
        own[sender[rows]] = by_send[sender[rows]]
    # NCCL's rank is done with what it sends when that is in the staging buffer, long before a slow link is.
    filled = filled_ns(picked, instances, of, sender, total)
    waited, waited_ns = waited_sends(picked, needs, sender, receiver, entered)
    to_data, to_send = handled_ns(picked, sender, receiver)
    held_up = np.zeros(total, bool)
    held_up[sender[(picked["offer_ns"] != NEVER) | ~np.isin(picked["wire"], _EAGER)]] = True
    taken, between = consumed(picked, instances, of, receiver, entered)
    entries = Entries(
        collective=collective,
        endpoint=endpoint,
        enter_ns=entered,
        leave_ns=np.maximum(np.where(leave == NEVER, gone, leave), entered),
        idle_ns=np.maximum(np.maximum(done, np.minimum(sent, filled)), entered),
        rule=rule,
        act=act,
        after=after,
        retransmitted=again,
        reaction_ns=typical(total, waited, waited_ns),
        unmoved_ns=np.where(seen & (reached != NEVER), enter - reached, NEVER),
        resumed_ns=resumed_before(needs, receiver, entered, act_at >= 0),
        moved_ns=np.where(seen & (begun != NEVER), enter - begun, NEVER),
        free_ns=np.where(free & (send_ns != _FAR), send_ns, NEVER),
        credit_ns=np.where(by_send & (credit != NEVER), enter - credit, NEVER),
        whole=whole[collective],
        offsets=offsets,
        sent=send_ns != _FAR,
        buffered=(send_ns != _FAR) & ~fed & ~held_up & ~far,
        fed=fed,
        last=last,
        grant=np.where(by_send & (credit != NEVER), granted, NONE32),
        granted_ns=np.where(granted_ns != _FAR, granted_ns, NEVER),
        waited=waited,
        waited_ns=waited_ns,
        granted_data_ns=to_data,
        next_send_ns=to_send,
        taken=taken,
        between=between,
        since_ns=np.full(total, NEVER),
        since_act=np.full(total, NONE32, np.int64),
        lead_ns=np.full(total, NEVER),
        spread_ns=np.full(total, NEVER),
        slow_ns=np.full(total, NEVER),
        tail_ns=np.zeros(total, np.int64),
        stalled_ns=np.zeros(total, np.int64),
        held_ns=np.zeros(total, np.int64),
        lag_ns=np.zeros(total, np.int64),
        way_ns=np.zeros(total, np.int64),
        acked_ns=acked,
        usual_way_ns=np.zeros(total, np.int64),
        by_ns=np.full(total, NEVER),
        by_act=np.full(total, NONE32, np.int64),
        likely_ns=np.full(total, NEVER),
        # Where another algorithm fits as well, it is that one.
        early_ns=np.array(
            [0 if i.alternatives else e for i, e in zip(instances, needs.early_ns.tolist(), strict=True)],
            np.int64,
        )[collective],
        clock=np.zeros(total, np.int64),
        clock_ns=np.zeros(total, np.int64),
    )
    before = _left_before(
        entries, *_gone(entries, picked, np.where(own, send_at, -1)), np.maximum(freed, leave)
    )
    there = np.where(seen, entered, entries.leave_ns)  # who was not seen to enter had by then
    at = previous_row(entries)
    shown = np.where((at >= 0) & fed[at], last[at], NONE32)
    entries = replace(entries, since_ns=np.where(before <= there, before, NEVER), since_act=shown)
    return as_acknowledged(entries, picked, sender, receiver)


def _gone(
    entries: Entries, picked: Picked, send_at: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Rows whose first message may have lain there long, as its rank had gone on; others' earliest leaving.

    ``send_at``: of rows that leave when their slots are filled the first message, -1 for others. It was kept
    if it left soon, in round trips or the worst hand-over, after what may have kept it; else it had been
    filled no more than such a hand-over before.
    """
    left = entries.leave_ns.copy()
    held = np.zeros(len(left), bool)
    rows = np.flatnonzero(send_at >= 0)
    if not len(rows):
        return held, left
    trips = (picked["acked_ns"] - picked["data_end_ns"])[picked["acked_ns"] != NEVER]
    worst = float(np.nan_to_num(tails(entries, np.zeros(len(left), np.int64))[0], nan=0.0))
    soon = max(CREDIT_TRIPS * float(np.median(trips)), worst) if len(trips) else np.inf
    kept = kept_until_ns(picked, send_at[rows])
    held[rows] = (kept != NEVER) & (entries.enter_ns[rows] - kept <= soon)
    left[rows] -= round(worst)
    return held, left


def _left_before(
    entries: Entries, held: NDArray[np.bool_], left_ns: NDArray[np.int64], freed: NDArray[np.int64]
) -> NDArray[np.int64]:
    """When each rank had left what it did before, at the earliest (``left_ns``).

    Of rows ``held`` something else kept the first message than the rank: it had left when the slots were free
    and its input was there (``freed``), and not before it left what came before that.
    """
    last = previous_row(entries)
    left = np.where(held, freed, np.maximum(left_ns, freed))
    rows = np.flatnonzero(held & (last >= 0))
    for _ in range(SLOTS):  # several in a row
        left[rows] = np.maximum(left[rows], left[last[rows]])
    return np.where(last >= 0, left[last], NEVER)


def _of_nodes(
    instances: Sequence[Instance],
    offsets: NDArray[np.int64],
    picked: Picked,
    of: NDArray[np.int64],
    sender: NDArray[np.int64],
    leave: NDArray[np.int64],
) -> NDArray[np.int64]:
    """When ranks that share nodes with others can have left at the latest; at the earliest into ``leave``.

    Most of what such a rank receives comes over NVLink. It has not left before it sent its last; nor long
    after the last data of its whole node had come or left, for all of its GPUs pass on every channel.
    """
    railed = [number for number, instance in enumerate(instances) if instance.nodes]
    if not railed:
        return leave
    mine = np.isin(of, railed)
    np.maximum.at(leave, sender[mine], picked["data_ns"][mine])
    latest: NDArray[np.int64] = leave.copy()
    for number in railed:
        rows, nodes = slice(*offsets[number : number + 2].tolist()), np.array(instances[number].nodes)
        for node in np.unique(nodes):
            latest[rows][nodes == node] = latest[rows][nodes == node].max()
    return latest


class _Lookup:
    """Finds the row of (collective, endpoint)."""

    def __init__(self, collective: NDArray[np.int64], endpoint: NDArray[np.int64]) -> None:
        self.width = int(endpoint.max(initial=0)) + 1
        key = collective * self.width + endpoint
        self.order = np.argsort(key)
        self.keys = key[self.order]
        self.rows: NDArray[np.int64] | None = None
        if len(key) and self.keys[-1] < _TABLE * len(key):  # little room for what is quicker
            self.rows = np.zeros(int(self.keys[-1]) + 1, np.int64)
            self.rows[key] = np.arange(len(key))

    def __call__(self, collective: NDArray[np.int64], endpoint: NDArray[np.uint32]) -> NDArray[np.int64]:
        key = collective * self.width + endpoint.astype(np.int64)
        if self.rows is not None:
            return self.rows[key]
        return np.asarray(self.order[np.searchsorted(self.keys, key)], np.int64)


def _earliest(
    total: int, rows: NDArray[np.int64], times: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each of ``total`` rows the earliest of its times (far future without), and which one it is."""
    from dpuflow.kernels import ordering

    best = np.full(total, _FAR)
    where = np.full(total, -1, np.int64)
    ordering.earliest(times, rows, best, where)
    return best, where
