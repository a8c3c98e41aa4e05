"""Entries in, entries out: what else the act that dates an entry may have waited for.

A rule says what kind of act it was (``entries``). Here each act is weighed against what the capture shows
of its host and its group: how fast its hosts react, whether calls queue, whether all messages can have been
seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.behind import date_behind, read_alike
from dpuflow.lateness.entries import Entries, Rule
from dpuflow.lateness.handover import (
    FEWEST,
    middle_ranks,
    posting_ns,
    receiving_ns,
    spreads,
    usual_reactions,
)
from dpuflow.lateness.likely import likely_entries
from dpuflow.lateness.overdue import at_own_pace, overdue
from dpuflow.lateness.queues import queued_rows
from dpuflow.lateness.relative import medians
from dpuflow.lateness.slots import date_by_slots, held_senders, late_to_inputs
from dpuflow.lateness.tails import tail_ns, tails, worst_ns
from dpuflow.ordering import Picked
from dpuflow.schema import NEVER, NONE32, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness.handover import Usual
    from dpuflow.tables import Joined, Rows

_FAR = np.iinfo(np.int64).max
_BY_GPUS = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM, Wire.NCCL_DATA)

NEXT = 1.5
"""Distances of packets within which one follows the other without a pause."""
FAR_BEYOND = 3.0
"""Times the slowest usual reaction (95th percentile) after which a rank had not been waiting."""


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
    usual = usual_reactions(entries, of_row)
    clock, clock_ns = _clocks(entries, joined)
    entries = _undated(replace(entries, clock=clock, clock_ns=clock_ns), instances)
    packet_ns = _packet_ns(entries, columns)
    sends_after = entries.rule == Rule.AFTER_INPUT
    entries = settle(entries, usual, of_row, packet_ns, FAR_BEYOND * _trip_ns(columns))
    late = late_to_inputs(entries, columns, instances)
    entries = replace(entries, rule=np.where(late, int(Rule.LONG_AFTER), entries.rule))
    entries = _mark(entries, held_senders(entries, columns, instances), Rule.CREDIT, entries.grant)
    entries = _as_a_habit(entries, joined, of_row)
    entries = _first_on_connection(entries, joined.columns)
    entries = _repeated(entries, joined.columns, usual)
    entries = _unacked(entries, columns, usual)
    queued = queued_rows(entries, exchanges, instances, usual)
    entries = _mark(entries, queued.rows, Rule.QUEUED, queued.behind)
    waited = entries.rule == Rule.QUEUED
    since = np.where(waited, queued.called_ns, entries.since_ns)
    # A rank cannot have been held up before it was there: not before it left its last collective.
    there = np.where(since != NEVER, entries.enter_ns - since, _FAR)
    held = np.minimum(receiving_ns(columns, entries, usual), there)
    way, usual_way = _ways(entries, joined, instances)
    way += posting_ns(exchanges, instances, entries)
    held = np.minimum(held, np.nan_to_num(usual.slowest_ns, nan=0.0)).astype(np.int64)
    entries = replace(
        entries,
        since_ns=since,
        since_act=np.where(waited, queued.called, entries.since_act),
        lead_ns=np.where(waited, queued.lead_ns, NEVER),
        stalled_ns=_stalled(entries, usual),
        way_ns=way,
        usual_way_ns=usual_way,
        held_ns=held,
        lag_ns=np.where(sends_after, _taking_up_ns(entries, usual, there), 0),
        slow_ns=np.where(np.isnan(usual.slowest_ns), NEVER, np.nan_to_num(usual.slowest_ns)).astype(np.int64),
    )
    heard = read_alike(exchanges, instances, entries)
    entries = likely_entries(date_behind(entries, heard, usual), heard)
    behind_own = _behind_own_data(entries, columns, packet_ns)
    entries = _mark(entries, behind_own, Rule.QUEUED, np.full(len(behind_own), NONE32))
    # Two clocks may be off either way, by that much an input seems to come late.
    wrong = entries.early_ns > 2 * entries.clock_ns.max(initial=0)
    entries = replace(entries, rule=np.where(wrong, int(Rule.CONTRADICTED), entries.rule))
    entries = replace(
        entries,
        spread_ns=spreads(exchanges, instances, entries, usual, of_row),
        tail_ns=worst_ns(entries, exchanges, instances, of_row),
    )
    entries = date_by_slots(entries, columns, instances)
    clock, clock_ns = _clocks(entries, joined)
    return replace(entries, clock=clock, clock_ns=clock_ns)


def _trip_ns(exchanges: Rows | Picked) -> float:
    """The median time from a message's end to its ACK; NaN without."""
    known = (exchanges["acked_ns"] != NEVER) & (exchanges["retransmitted"] == 0)
    known &= exchanges["data_end_ns"] != NEVER
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[known]
    return float(np.median(trips)) if len(trips) else float("nan")


def settle(
    entries: Entries,
    usual: Usual,
    of_row: NDArray[np.int64],
    packet_ns: NDArray[np.float64] | float = 0.0,
    trips_ns: float = float("nan"),
) -> Entries:
    """Weigh what reached a rank before it acted against how fast its hosts usually react.

    A rank that waits for an input or a credit acts on it within its host's usual reaction. One that
    acts far later had not entered when the input came: its entry is exact. One that sends within that
    reaction to its credit may have waited for the credit, but only if it can have been there before: not if
    from leaving its last collective to the credit there was less time than any rank's work takes. Where no
    reaction was ever seen, a few round trips (``trips_ns``) stand for it.
    """
    rule = entries.rule.copy()
    waiting = np.isin(rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    with np.errstate(invalid="ignore"):  # nothing is usual where nothing was measured
        nccl = np.isin(of_row, of_row[entries.between[0]])
        instead = np.where(
            nccl,
            middle_ranks(entries, of_row, entries.between)[2],
            _slowest_of_others(entries, waiting & ~nccl, of_row),
        )
        slowest = np.where(np.isnan(usual.slowest_ns), instead, usual.slowest_ns)
        if len(entries.waited) < FEWEST:  # one or two tell nothing
            slowest = np.where(nccl, slowest, np.fmax(slowest, instead))
            waiting &= nccl | ~_keeps_to_input(entries, waiting, of_row, slowest)
        limit = FAR_BEYOND * slowest
        limit = np.fmin(limit, _quickest_of_others(entries, waiting & ~usual.by_sends, of_row))
        # Of hosts that stall now and then so late an act is no evidence yet.
        worst = np.fmax(tails(entries, of_row), _worst_of_others(entries, waiting & nccl, of_row))
        limit = np.where(nccl, np.fmax(limit, worst), limit)
        # Its input may have come long before its credit.
        idle = np.where(
            entries.credit_ns != NEVER, np.minimum(entries.unmoved_ns, entries.credit_ns), entries.unmoved_ns
        )
        rule[waiting & (idle > limit)] = Rule.LONG_AFTER
        # Who enters late may answer what lies there before it sends its own, which needed nothing.
        own = (entries.rule == Rule.ANSWER) & (entries.free_ns != NEVER)
        rule[own & (entries.free_ns - entries.enter_ns <= usual.most_ns)] = Rule.FREE_STEP
        gated = np.isin(rule, (Rule.FREE_STEP, Rule.NOTHING_BEFORE)) & (entries.credit_ns != NEVER)
        # A packet may be stamped when it has left; on a slow link that takes longer than the host needs.
        soon = np.where(np.isnan(usual.most_ns), trips_ns, usual.most_ns)
        prompt = gated & (entries.credit_ns <= soon + packet_ns)
    known = entries.since_ns != NEVER
    room = _since_ns(entries) - entries.credit_ns  # from leaving its last collective to the credit
    # Where no reaction was ever seen (messages that stream), that is all there is to go by.
    unmeasured = gated & np.isnan(usual.most_ns)
    # Had it waited for its credit, it would have sent soon after that; so it lay there while the rank worked.
    unheld = known & (FAR_BEYOND * room <= _since_ns(entries))
    least, alone = _least_work_ns(entries, gated & ~prompt & (~unmeasured | unheld), of_row)
    # Of a first collective only a credit that came after others had begun can have made the rank late.
    prompt |= unmeasured & np.where(known, (least > 0) | alone, _credited_late(entries, gated))
    prompt &= ~known | (room >= least)
    worked = prompt & (entries.since_ns != NEVER)
    entries = replace(
        entries,
        since_ns=np.where(worked, entries.since_ns + least, entries.since_ns),
        since_act=np.where(worked, NONE32, entries.since_act),  # no message shows how long work takes
    )
    return _mark(replace(entries, rule=rule), prompt, Rule.CREDIT, entries.grant)


def _as_a_habit(entries: Entries, joined: Joined, of_row: NDArray[np.int64]) -> Entries:
    """Date entries by first acts that are long after their input as a rule (``overdue``).

    Not those of GPUs (NCCL), whose data streams: they wait for slots, and for the wire, as well.
    """
    wire = np.append(joined.columns["wire"], 0)
    mine = ~np.isin(wire[np.where(entries.act == NONE32, -1, entries.act)], _BY_GPUS)
    mine &= (entries.unmoved_ns != NEVER) & entries.whole
    answers, sends = (mine & (entries.rule == rule) for rule in (Rule.ANSWER, Rule.AFTER_INPUT))
    late = overdue(entries, answers, sends, of_row) | at_own_pace(entries, answers | sends, of_row)
    return replace(entries, rule=np.where(late, int(Rule.LONG_AFTER), entries.rule))


def _taking_up_ns(entries: Entries, usual: Usual, there: NDArray[np.int64]) -> NDArray[np.int64]:
    """How long before its first message a rank may have entered that found its input there.

    It takes that up as one does that waits, so its message follows by a reaction; where data that had stopped
    went on before that, by what lies between. 0 for others; ``there``: no longer than since it left its last.
    """
    slow = np.where(usual.by_sends, np.nan_to_num(usual.slowest_ns, nan=0.0), 0.0).astype(np.int64)
    read = np.where(entries.resumed_ns != NEVER, entries.enter_ns - entries.resumed_ns, 0)
    found = entries.rule == Rule.LONG_AFTER
    return np.where(found, np.minimum(np.maximum(slow, read), there), 0)


def _credited_late(entries: Entries, gated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows ``gated`` whose credit came longer after the first sign of all than their message after it.

    A sign is an entry, or a host's own credits for others: it has launched the operation.
    """
    if not len(gated):
        return gated
    signs = [np.where(times != NEVER, times, _FAR) for times in (entries.enter_ns, entries.granted_ns)]
    when = np.minimum(*signs)
    first = np.minimum.reduceat(when, entries.offsets[:-1])[entries.collective]
    return gated & (entries.enter_ns - entries.credit_ns - first > entries.credit_ns)


def _slowest_of_others(
    entries: Entries, waiting: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For rows ``waiting`` how long the other ranks of the group take from an input to their first act, 95 %.

    It stands for the usual reaction where none was measured (data streams through), but no longer than hosts
    take from a grant to the data it allows: some of these ranks were late themselves. With too few of them it
    is that; and where there are no grants either, what hosts take from send to send. NaN with too few of all.
    """
    out, least = np.full(len(waiting), np.nan), np.full(len(waiting), np.inf)
    if len(entries.granted_data_ns) >= FEWEST:
        out[:] = least[:] = np.percentile(entries.granted_data_ns, 95)
    elif len(entries.next_send_ns) >= FEWEST:
        # That wakes nobody up, so even far more than that is usual.
        out[:] = FAR_BEYOND * np.percentile(entries.next_send_ns, 95)
    for each in np.unique(of_row[waiting]):
        mine = np.flatnonzero(waiting & (of_row == each))
        for endpoint in np.unique(entries.endpoint[mine]):
            own = entries.endpoint[mine] == endpoint
            if (~own).sum() >= FEWEST:
                out[mine[own]] = np.percentile(entries.unmoved_ns[mine[~own]], 95)
    return np.asarray(np.minimum(out, least), np.float64)


def _quickest_of_others(
    entries: Entries, waiting: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For rows ``waiting`` of NCCL from how long after an input on a first act has not waited for it.

    From what the quickest other rank of the group, by its median, takes from an input to its first act: ranks
    that wait for nothing are no quicker. Most of it is the same each time (a slice is copied), so what counts
    is how far the slow ones (95 %) lie beyond the median. NaN where no other rank has enough of them.
    """
    out = np.full(len(waiting), np.nan)
    for each in np.intersect1d(of_row[waiting], of_row[entries.between[0]]):
        mine = np.flatnonzero(waiting & (of_row == each))
        own = {end: mine[entries.endpoint[mine] == end] for end in np.unique(entries.endpoint[mine]).tolist()}
        usual = [
            (*np.percentile(entries.moved_ns[rows], (50, 95)).tolist(), end)
            for end, rows in own.items()
            if len(rows) >= FEWEST
        ]
        for end, rows in own.items():
            others = [(middle, most) for middle, most, other in usual if other != end]
            if others:
                middle, most = min(others)
                out[rows] = most + FAR_BEYOND * (most - middle)
    return out


def _worst_of_others(
    entries: Entries, waiting: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For rows ``waiting`` what the group's other ranks take from an input to their first act at the worst.

    Of the middle one of them: ranks that are late themselves take longer. NaN with too few of all.
    """
    out = np.full(len(waiting), np.nan)
    for each in np.unique(of_row[waiting]):
        mine = np.flatnonzero(waiting & (of_row == each))
        ends = entries.endpoint[mine]
        worst = {end: tail_ns(entries.moved_ns[mine[ends == end]]) for end in np.unique(ends).tolist()}
        for end in worst:
            others = sorted(ns for other, ns in worst.items() if other != end and not np.isnan(ns))
            if others:
                out[mine[ends == end]] = others[(len(others) - 1) // 2]
    return out


def _keeps_to_input(
    entries: Entries,
    waiting: NDArray[np.bool_],
    of_row: NDArray[np.int64],
    slowest: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Rows ``waiting`` of ranks whose first acts keep to their input, and not to when they left before.

    Who comes late works for a time of its own; who waits acts a time of its host's after the input: either
    scatters less than the other, by quartiles, as that holds the times of the others, too. Not where work
    scatters by no more than the slowest reaction. Some steps are more work for all: it counts against that of
    known peers, if it scatters less so.
    """
    out = np.zeros(len(waiting), bool)
    known = waiting & (entries.since_ns != NEVER)
    worked = _since_ns(entries)
    peers = medians(entries, worked, entries.exact & (entries.since_ns != NEVER))[entries.collective]
    longer = worked - np.nan_to_num(peers, nan=0.0).astype(np.int64)
    for each in np.unique(of_row[known]):
        mine = np.flatnonzero(known & (of_row == each))
        for endpoint in np.unique(entries.endpoint[mine]):
            rows = mine[entries.endpoint[mine] == endpoint]
            if len(rows) >= FEWEST:
                after, work, beside = (
                    float(np.subtract(*np.percentile(times[rows], (75, 25))))
                    for times in (entries.unmoved_ns, worked, longer)
                )
                own = min(work, beside)
                # Of its first collective it is not known when it had left: it is no other rank there.
                whole = np.flatnonzero(waiting & (of_row == each) & (entries.endpoint == endpoint))
                out[whole] = (after < own) & (own > slowest[whole])
    return out


def _stalled(entries: Entries, usual: Usual) -> NDArray[np.int64]:
    """How long each rank sat on an input in mid-operation, at most, where that is far beyond what is usual.

    It had entered and sent all it could; the delay is its own, and later messages of others inherit it.
    Where packets of its messages were sent again, the network may have kept it.
    """
    out = np.zeros(len(entries.endpoint), np.int64)
    limit = FAR_BEYOND * usual.slowest_ns[entries.waited]
    far = entries.waited_ns > np.where(np.isnan(limit), np.inf, limit)
    np.maximum.at(out, entries.waited[far], entries.waited_ns[far])
    return np.where(entries.retransmitted > 0, 0, out)


def _ways(
    entries: Entries, joined: Joined, instances: Sequence[Instance]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For rows of ranks without a capture of their own: how long their first act may have been on its way.

    It is dated by its arrival. No longer, in 95 of 100 cases, than the way to that rank and back, from a
    message to its ACK. Over TCP receivers hold ACKs back (RFC 1122, 4.2.3.2), so there the shortest counts.
    The second: how long it usually was, half of the median way there and back.
    """
    out, usual = np.zeros((2, len(entries.endpoint)), np.int64)
    near = {end for i in instances for end in i.near or ()}
    if not near:
        return out, usual
    transfers = joined.transfers
    held = bool(len(transfers)) and int(transfers["wire"].max()) >= Wire.GLOO_HELLO
    levels = (0, 0) if held else (95, 50)
    measured = (transfers["acked_ns"] != NEVER) & ((transfers["seen"] & Seen.AT_SENDER) != 0)
    measured &= transfers["retransmitted"] == 0
    trips, to = (transfers["acked_ns"] - transfers["sent_end_ns"])[measured], transfers["dst"][measured]
    partly = np.repeat([i.near is not None for i in instances], np.diff(entries.offsets))
    for endpoint in np.unique(entries.endpoint[partly]):
        mine = trips[to == endpoint]
        mine = mine if len(mine) >= FEWEST else trips
        if endpoint not in near and len(mine):
            slow, middle = np.maximum(np.percentile(mine, levels), 0).round().astype(np.int64).tolist()
            rows = partly & (entries.endpoint == endpoint)
            out[rows], usual[rows] = slow, middle // 2
    return out, usual


def _undated(entries: Entries, instances: Sequence[Instance]) -> Entries:
    """Make bounds of entries of ranks that may have acted before the first act that was seen of them.

    What such a rank is seen to send may have waited for an input that nobody saw, or not be its first:
    then how long after an input it came says nothing either.
    """
    sends, grants = np.zeros((2, len(entries.rule)), bool)
    for number, instance in enumerate(instances):
        if instance.near is not None or instance.inside:
            by_send, by_grant = instance.undated_rows()
            sends[entries.offsets[number] + np.array(by_send, np.int64)] = True
            grants[entries.offsets[number] + np.array(by_grant, np.int64)] = True
    declared = np.isin(entries.rule, (Rule.READY, Rule.ANSWER))
    undated = np.where(declared, grants, sends)
    entries = _mark(entries, undated, Rule.PARTLY, entries.after)
    return replace(
        entries,
        unmoved_ns=np.where(undated, NEVER, entries.unmoved_ns),
        free_ns=np.where(sends, NEVER, entries.free_ns),
    )


def _since_ns(entries: Entries) -> NDArray[np.int64]:
    """From leaving one collective to entering the next; 0 where nothing is known of that."""
    return np.where(entries.since_ns != NEVER, entries.enter_ns - entries.since_ns, 0)


def _least_work_ns(
    entries: Entries, free: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each row the least time that a rank of its group needed between two collectives, 0 without; and
    rows of which that is not known because one other rank alone was free of doubt.

    From the rows ``free`` of any doubt, if there are enough. Those of a single rank speak for itself alone:
    it may be the slow one that the others wait for. A rank that a credit had held up would have been there
    before the credit, and so have needed less than lies between leaving and the credit. Nobody needed more
    than from leaving to entering: where a rank in doubt was quicker than all that are free of it, that
    counts.
    """
    out, alone = np.zeros(len(free), np.int64), np.zeros(len(free), bool)
    known = entries.since_ns != NEVER
    free = free & known
    worked = _since_ns(entries)
    for each in np.unique(of_row[free]):
        rows = of_row == each
        sure = rows & free
        if sure.sum() >= FEWEST:
            ranks = np.unique(entries.endpoint[sure])
            fair = rows & ((entries.endpoint == ranks[0]) | (len(ranks) > 1))
            out[fair] = worked[rows & known].min()
            alone |= rows & ~fair
    return out, alone


def _mark(entries: Entries, rows: NDArray[np.bool_], rule: Rule, after: NDArray[np.int64]) -> Entries:
    """Give exact entries among ``rows`` another rule, and what they may have waited for."""
    rows = rows & entries.exact
    return replace(
        entries,
        rule=np.where(rows, int(rule), entries.rule),
        after=np.where(rows, after, entries.after),
    )


def _first_on_connection(entries: Entries, transfers: Rows | Picked) -> Entries:
    """A rank's first message over a connection that was opened since it left the collective before.

    Open MPI, UCX and libfabric connect when a rank first sends to another, and the message waits for that.
    Gloo and NCCL connect before any collective. ob1's hello shows that the capture holds a connection's
    beginning; over RoCE nothing does, so the first message that was captured counts.
    """
    wire = transfers["wire"]
    lazy = (wire == Wire.ROCE_SEND) | (wire == Wire.ROCE_SEND_IMM) | (wire == Wire.OB1_HELLO)
    lazy |= (wire == Wire.TAGGED) | (wire == Wire.TAGGED_OTHER)
    acted = np.flatnonzero(entries.act != NONE32)
    if not lazy.any() or not len(acted):
        return entries
    line = transfers["connection"].astype(np.int64)
    opened = np.full(int(line.max()) + 1, NEVER)
    rows = np.flatnonzero(lazy)
    lines, at = np.unique(line[rows], return_index=True)  # transfers are in order of time
    opened[lines] = transfers["sent_ns"][rows[at]]
    fresh = np.zeros(len(entries.act), bool)
    when = opened[line[entries.act[acted]]]
    started = np.full(int(entries.endpoint.max()) + 1, _FAR)
    np.minimum.at(started, entries.endpoint[acted], entries.enter_ns[acted])
    since, own = entries.since_ns[acted], entries.endpoint[acted]
    first = entries.enter_ns[acted] == started[own]
    fresh[acted] = (when != NEVER) & np.where(since != NEVER, when >= since, first)
    return _mark(entries, fresh, Rule.CONNECTING, np.full(len(fresh), NONE32))


def _repeated(entries: Entries, transfers: Rows | Picked, usual: Usual) -> Entries:
    """What was sent again and not captured at its sender may have been sent before it was first seen.

    A credit that was sent again came late: what follows it within its host's usual reaction, where one was
    ever seen, may have waited for it.
    """
    held = (entries.credit_ns != NEVER) & ~(entries.credit_ns > usual.most_ns)
    again = np.zeros((2, len(transfers) + 1), bool)
    again[:, :-1] = transfers["retransmitted"] > 0
    again[0, :-1] &= (transfers["seen"] & Seen.AT_SENDER) == 0
    act, grant = (np.where(row == NONE32, len(transfers), row) for row in (entries.act, entries.grant))
    entries = _mark(entries, again[0][act], Rule.REPEATED, np.full(len(act), NONE32))
    return _mark(entries, again[1][grant] & held, Rule.CREDIT, entries.grant)


def _behind_own_data(
    entries: Entries, exchanges: Rows | Picked, packet_ns: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Rows whose first message left right behind earlier data of its adapter, as packets follow each other.

    It may have waited in the adapter's queue, as on a slow link. So it may if it left while another message
    was leaving: packets of both take turns. Messages sent again do not leave at a stretch.
    """
    out = np.zeros(len(entries.rule), bool)
    sent = _sent_by_gpus(exchanges)
    if not sent.any():
        return out
    src, begin, end = (exchanges[name][sent] for name in ("src", "data_ns", "data_end_ns"))
    again = exchanges["retransmitted"][sent] > 0
    for endpoint in np.unique(src):
        mine = src == endpoint
        rows = np.flatnonzero((entries.endpoint == endpoint) & (entries.enter_ns != NEVER) & (packet_ns > 0))
        if not len(rows):
            continue
        enter = entries.enter_ns[rows]
        ends = np.sort(end[mine])
        at = np.searchsorted(ends, enter, "left") - 1
        out[rows] = (at >= 0) & (enter - ends[np.maximum(at, 0)] <= NEXT * packet_ns[rows])
        whole = np.flatnonzero(mine & ~again)
        whole = whole[np.argsort(begin[whole], kind="stable")]
        until = np.maximum.accumulate(end[whole])  # by the messages that began before each
        at = np.searchsorted(begin[whole], enter, "left") - 1
        if len(whole):
            out[rows] |= (at >= 0) & (enter <= until[np.maximum(at, 0)])
    return out


def _sent_by_gpus(exchanges: Rows | Picked) -> NDArray[np.bool_]:
    """Exchanges whose data was written one-sided (NCCL, puts, pages), as their senders' captures saw it."""
    wire = exchanges["wire"]
    sent = ((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.ROCE_WRITE)) & (exchanges["data_ns"] != NEVER)
    sent &= (exchanges["seen"] & Seen.AT_SENDER) != 0
    return np.asarray(sent, np.bool_)


def _packet_ns(entries: Entries, exchanges: Rows | Picked) -> NDArray[np.float64]:
    """For each row how long a packet of its endpoint takes to leave: their usual distance within a message.

    0 where none of these sent it, and where no message has several packets.
    """
    out = np.zeros(len(entries.rule))
    several = np.flatnonzero(_sent_by_gpus(exchanges) & (exchanges["packets"] > 1))
    gaps = exchanges["packets"][several].astype(np.int64) - 1
    steps = (exchanges["data_end_ns"][several] - exchanges["data_ns"][several]) / gaps
    src = exchanges["src"][several]
    for endpoint in np.unique(src):
        out[entries.endpoint == endpoint] = np.median(steps[src == endpoint])
    return out


def _unacked(entries: Entries, exchanges: Rows | Picked, usual: Usual) -> Entries:
    """NCCL takes up an operation on a connection when the one before is done: acknowledged, for a sender.

    So a first message may have waited for that, where the message before it had been sent again and it came
    within the usual reaction after the ACK. Where no reaction was ever seen, a few round trips stand for it.
    """
    again = (exchanges["retransmitted"] > 0) & (exchanges["wire"] == Wire.ROCE_WRITE_IMM)
    if not again.any():
        return entries
    line = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
    concerned = np.zeros(int(line.max()) + 1, bool)
    concerned[line[again]] = True
    order = np.flatnonzero(concerned[line])
    order = order[np.lexsort((exchanges["order"][order], line[order]))]
    behind = np.flatnonzero(again[order[:-1]] & (line[order[1:]] == line[order[:-1]]))
    acked = np.full(int(exchanges["data"][exchanges["data"] != NONE32].max()) + 2, NEVER)
    data = np.minimum(exchanges["data"][order[behind + 1]], len(acked) - 1)
    acked[data] = exchanges["acked_ns"][order[behind]]
    when = acked[np.minimum(entries.act, len(acked) - 1)]
    waited = entries.enter_ns - when
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[~again & (exchanges["acked_ns"] != NEVER)]
    trip = float(np.median(trips)) if len(trips) else np.inf
    soon = np.where(np.isnan(usual.most_ns), FAR_BEYOND * trip, usual.most_ns)
    held = (when != NEVER) & (waited >= 0) & (waited <= soon)
    return _mark(entries, held, Rule.UNACKED, np.full(len(held), NONE32))


def _clocks(entries: Entries, joined: Joined) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The capture that stamped each act, and how far its clock may be off the reference.

    Where nothing of a rank was seen, the one that stamped what it left before.
    """
    tied = [clock.error_ns if clock.tied_ns is None else clock.tied_ns for clock in joined.clocks]
    errors = np.array([error or 0 for error in tied], np.int64)
    acted = entries.act != NONE32
    clock = np.zeros(len(entries.endpoint), np.int64)
    clock[acted] = joined.transfers["capture"][entries.act[acted]]
    left = ~acted & (entries.since_act != NONE32)
    clock[left] = joined.transfers["arrival_capture"][entries.since_act[left]]
    return clock, errors[clock] if len(errors) else np.zeros_like(clock)
