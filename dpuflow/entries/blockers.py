"""What first acts may have waited for: a list of blockers, each weighed by how fast the group's hosts react.

In: entries as first acts date them, exchanges, how fast hosts react. Out: Blockers. An act dates its rank's
entry exactly when every possible blocker of it is rejected: it ended longer ago than reactions take, or after
the act. The first that stands is the reason why an entry is a bound, or not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, percentile
from dpuflow.entries.inputs import lines_of
from dpuflow.entries.relative import previous_row
from dpuflow.entries.rows import BY_GPUS, EXACT_RULES, FAR, FAR_BEYOND, FEWEST, QUICK, Rule
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.queues import Queued
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

NEXT = 1.5
"""Distances of packets within which one follows the other without a pause."""
_FRAMED_WRITES = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM)
_SENDS = (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)
_MEASURED = (*_FRAMED_WRITES, Wire.ROCE_READ, Wire.GLOO_DATA, Wire.OB1_PUT)
"""Data whose length its header, its request or its numbers tell (``messages.lost``)."""


class Blocker(NamedTuple):
    """One thing that first acts may have waited for, by row of Entries."""

    rule: Rule  # what the entry rests on where it stands
    stands: Bools
    after: Ints  # TRANSFER row that shows it, NONE32 for none


@dataclass(frozen=True)
class Scene:
    """All that blockers are read from."""

    entries: Entries
    exchanges: Picked
    transfers: Rows | Picked
    instances: Sequence[Instance]
    of_row: Ints
    """The group of each row."""
    law: Law
    packet_ns: NDArray[np.float64]
    """For each row how long a packet of its endpoint takes to leave."""
    way_ns: Ints
    """How long the act may have been on its way to where it was stamped, 95 of 100 times ..."""
    usual_way_ns: Ints
    """... and usually."""

    @property
    def prompt_ns(self) -> NDArray[np.float64]:
        """Within this after a thing that is seldom waited for, an act may have waited for it: the usual
        reaction (90 %), where none was ever seen a few round trips."""
        return np.where(np.isnan(self.law.most_ns), FAR_BEYOND * trip_ns(self.exchanges), self.law.most_ns)

    def none(self) -> Ints:
        """No TRANSFER row."""
        return np.full(len(self.entries.rule), NONE32, np.int64)


def find_blockers(scene: Scene, credited: Credited, queued: Queued) -> Iterator[Blocker]:
    """All blockers but inputs and offers, those that say most of an entry first."""
    entries = scene.entries
    yield Blocker(Rule.MISSING, missing_before(scene), scene.none())
    yield Blocker(Rule.OVERLAPS, before_leaving(scene), entries.since_act)
    yield Blocker(Rule.CREDIT, credited.rows | held_senders(scene), entries.grant)
    yield Blocker(Rule.CONNECTING, first_on_connection(scene), scene.none())
    again, regranted = sent_again(scene)
    yield Blocker(Rule.REPEATED, again, scene.none())
    yield Blocker(Rule.CREDIT, regranted, entries.grant)
    yield Blocker(Rule.QUEUED, queued.rows, queued.behind)
    yield Blocker(Rule.QUEUED, behind_own_data(entries, scene.exchanges, scene.packet_ns), scene.none())


def solve(entries: Entries, released: Bools, blockers: Sequence[Blocker]) -> tuple[Ints, Ints]:
    """Each row's rule, and the TRANSFER row that it may have waited for. ``released``: rows whose input or
    offer is rejected."""
    rule = np.where(released, int(Rule.LONG_AFTER), entries.rule)
    exact, after = np.isin(rule, EXACT_RULES), entries.after.copy()
    for blocker in blockers:
        rows = exact & blocker.stands
        rule[rows], after[rows] = blocker.rule, blocker.after[rows]
        exact &= ~rows
    return rule, after


def inputs_rejected(scene: Scene) -> Bools:
    """Rows whose first act came far later than hosts react to what had reached their rank: it had not waited.

    Where proxy threads and GPUs act, which wait for slots and for the wire as well, only beyond the worst
    reaction.
    """
    entries, law = scene.entries, scene.law
    waiting = np.isin(entries.rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    credit = np.where(entries.credit_ns != NEVER, entries.credit_ns, FAR)
    idle = np.minimum(entries.unmoved_ns, credit)  # its credit may come long after its input
    wire = np.append(scene.transfers["wire"], 0)[np.where(entries.act == NONE32, -1, entries.act)]
    limit = FAR_BEYOND * law.slow_ns
    limit = np.where(np.isin(wire, BY_GPUS), np.fmax(limit, law.worst_ns), limit)
    with np.errstate(invalid="ignore"):  # nothing is usual where nothing was measured
        return np.asarray(waiting & (idle > limit), np.bool_)


class Credited(NamedTuple):
    """By row of Entries."""

    rows: NDArray[np.bool_]  # the first message may have waited for its credit
    since_ns: NDArray[np.int64]  # then the rank entered no earlier than this; NEVER where nothing says so


def credited(scene: Scene) -> Credited:
    """First messages that left within the usual reaction to their credit, or as soon as one could.

    Only if the rank can have been there before: not if from leaving its last collective to the credit there
    was less time than any rank's work takes. ``way_ns``: a credit and what it allowed, as one end saw them,
    are apart by the way there and back as well.
    """
    entries, law = scene.entries, scene.law
    gated = np.isin(entries.rule, (Rule.FREE_STEP, Rule.NOTHING_BEFORE)) & (entries.credit_ns != NEVER)
    with np.errstate(invalid="ignore"):
        # A packet may be stamped when it has left; on a slow link that takes longer than the host needs.
        prompt = gated & (entries.credit_ns <= scene.prompt_ns + scene.packet_ns + scene.way_ns)
    known, worked = entries.since_ns != NEVER, _since_ns(entries)
    room = worked - entries.credit_ns  # from leaving its last collective to the credit
    # Where no reaction was ever seen (messages that stream), that is all there is to go by.
    unmeasured = gated & np.isnan(law.most_ns)
    # Had it waited for its credit, it would have sent soon after that; so it lay there while the rank worked.
    unheld = known & (FAR_BEYOND * room <= worked)
    least, alone = least_work_ns(entries, gated & ~prompt & (~unmeasured | unheld), scene.of_row)
    prompt |= unmeasured & known & ((least > 0) | alone)
    prompt &= ~known | (room >= least)
    return Credited(prompt, np.where(prompt & known, entries.since_ns + least, NEVER))


def missing_before(scene: Scene) -> Bools:
    """Rows of ranks that packets are missing of, from there on: which message was the first is not known.

    Order tells what belongs to which operation, so a message that was not captured makes those after it seem
    to be the ones before them. What left long after all data that the rank had sent or received began
    something new, whatever was missed; what left within a reaction after it may belong to anything.
    Where the length of what was missed is known, nothing is taken for anything else.
    """
    entries, exchanges, transfers = scene.entries, scene.exchanges, scene.transfers
    out = np.zeros(len(entries.rule), bool)
    lossy = ((transfers["flags"] & MessageFlag.GAP) != 0) & ~np.isin(transfers["wire"], _MEASURED)
    # Where headers name messages, what is missing of one is no other's, and order tells nothing.
    sends = np.isin(transfers["wire"], _SENDS)
    named = np.unique(transfers["connection"][sends & (transfers["op"] != Op.UNKNOWN)])
    lossy &= ~(sends & np.isin(transfers["connection"], named))
    if not lossy.any():
        return out
    since = np.full(int(max(transfers[end].max() for end in ("src", "dst"))) + 1, FAR)
    for end in ("src", "dst"):
        np.minimum.at(since, transfers[end][lossy].astype(np.int64), transfers["sent_ns"][lossy])
    with np.errstate(invalid="ignore"):
        level = np.where(np.isnan(scene.law.slow_ns), scene.prompt_ns, FAR_BEYOND * scene.law.slow_ns)
        for endpoint in np.flatnonzero(since != FAR).tolist():
            sent, came = exchanges["src"] == endpoint, exchanges["dst"] == endpoint
            times = np.sort(np.r_[exchanges["data_end_ns"][sent], exchanges["arrived_end_ns"][came]])
            times = times[np.searchsorted(times, NEVER, "right") :]
            rows = np.flatnonzero((entries.endpoint == endpoint) & (entries.enter_ns != NEVER))
            rows = rows[np.maximum(entries.enter_ns, entries.leave_ns)[rows] >= since[endpoint]]
            if len(times) and len(rows):
                at = np.searchsorted(times, entries.enter_ns[rows], "left") - 1
                idle = entries.enter_ns[rows] - times[np.maximum(at, 0)]
                out[rows] = (at >= 0) & ~(idle > level[rows])
    return out


def before_leaving(scene: Scene) -> Bools:
    """Rows of ranks that seem to have entered before they had left their group's operation before.

    A library that works on several at once does so at most ranks; one rank alone cannot have: its messages
    were taken for others.
    """
    entries = scene.entries
    last = previous_row(entries)
    of, before = scene.of_row, np.maximum(last, 0)
    transfer = np.array([i.op == Op.SEND_RECV for i in scene.instances], bool)[entries.collective]
    known = (last >= 0) & (of[before] == of) & ~transfer & (entries.enter_ns != NEVER) & entries.fed[before]
    early = known & (entries.enter_ns < entries.leave_ns[before])
    if not early.any():
        return np.zeros(len(early), bool)
    count = np.add.reduceat(np.stack([early, known]).astype(np.int64), entries.offsets[:-1], axis=1)
    wrong = early & (2 * count[0] < count[1])[entries.collective]
    # Where packets are missing, others than these have been taken for both operations' messages as well.
    lossy = ((scene.transfers["flags"] & MessageFlag.GAP) != 0).any()
    both = np.unique(np.r_[entries.collective[wrong], entries.collective[last[wrong]]])
    return np.asarray(np.isin(entries.collective, both) if lossy else wrong, np.bool_)


def held_senders(scene: Scene) -> Bools:
    """Rows of NCCL's ranks that only send whose first message may have waited for its slot.

    Nothing keeps them in an operation: they run ahead of those that receive. It left as soon after its
    credit as messages do that waited for one: within three times the quickest (5 %) of the connection where
    hosts are quickest. An operation is taken up when the receiver has taken the one before it.
    """
    entries, exchanges = scene.entries, scene.exchanges
    out = np.zeros(len(entries.rule), bool)
    wire = (exchanges["wire"] == Wire.ROCE_WRITE_IMM) & (exchanges["data_ns"] != NEVER)
    rows = np.flatnonzero(wire & (exchanges["grant_arrived_ns"] != NEVER))
    # What a rank without a capture received was not seen: it need not be one that only sends.
    seen = np.array([i.was_captured(end) for i in scene.instances for end in i.order], bool)
    ahead = ~entries.fed & seen & (entries.credit_ns != NEVER)
    if not len(rows) or not ahead.any():
        return out
    waited = (exchanges["data_ns"] - exchanges["grant_arrived_ns"])[rows]
    quick = [percentile(waited[at], QUICK) for at in classes(lines_of(exchanges)[rows]) if len(at) >= FEWEST]
    return ahead & (entries.credit_ns <= FAR_BEYOND * min(quick)) if quick else out


def first_on_connection(scene: Scene) -> Bools:
    """A rank's first message over a connection that was opened since it left the collective before.

    Open MPI, UCX and libfabric connect when a rank first sends to another, and the message waits for that.
    Gloo and NCCL connect before any collective. ob1's hello shows that the capture holds a connection's
    beginning; over RoCE nothing does, so the first message that was captured counts.
    """
    entries, transfers = scene.entries, scene.transfers
    wire = transfers["wire"]
    lazy = np.isin(wire, (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM, Wire.OB1_HELLO, Wire.TAGGED, Wire.TAGGED_OTHER))
    acted = np.flatnonzero(entries.act != NONE32)
    fresh = np.zeros(len(entries.act), bool)
    if not lazy.any() or not len(acted):
        return fresh
    line = transfers["connection"].astype(np.int64)
    opened = np.full(int(line.max()) + 1, NEVER)
    rows = np.flatnonzero(lazy)
    lines, at = np.unique(line[rows], return_index=True)  # transfers are in order of time
    opened[lines] = transfers["sent_ns"][rows[at]]
    when = opened[line[entries.act[acted]]]
    started = np.full(int(entries.endpoint.max()) + 1, FAR)
    np.minimum.at(started, entries.endpoint[acted], entries.enter_ns[acted])
    since, own = entries.since_ns[acted], entries.endpoint[acted]
    first = entries.enter_ns[acted] == started[own]
    fresh[acted] = (when != NEVER) & np.where(since != NEVER, when >= since, first)
    return fresh


def sent_again(scene: Scene) -> tuple[Bools, Bools]:
    """Rows whose act may have been sent before it was first seen; and rows whose credit was sent again.

    The former were sent again and not captured at their sender, or their beginning was missed there. What
    follows a credit that came late within its host's usual reaction may have waited for it.
    """
    entries, transfers = scene.entries, scene.transfers
    again = np.zeros((2, len(transfers) + 1), bool)
    again[:, :-1] = transfers["retransmitted"] > 0
    again[0, :-1] |= np.isin(transfers["wire"], _FRAMED_WRITES) & (
        (transfers["flags"] & MessageFlag.GAP) != 0
    )
    again[0, :-1] &= (transfers["seen"] & Seen.AT_SENDER) == 0
    act, grant = (np.where(row == NONE32, len(transfers), row) for row in (entries.act, entries.grant))
    prompt = (entries.credit_ns != NEVER) & ~(entries.credit_ns > scene.law.most_ns)
    return again[0][act], again[1][grant] & prompt


def behind_own_data(entries: Entries, exchanges: Rows | Picked, packet_ns: NDArray[np.float64]) -> Bools:
    """Rows whose first message left right behind earlier data of its adapter, as packets follow each other.

    It may have waited in the adapter's queue, as on a slow link. So it may if it left while another message
    was leaving: packets of both take turns. Messages sent again do not leave at a stretch.
    """
    out = np.zeros(len(entries.rule), bool)
    sent = sent_by_gpus(exchanges)
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
        out[rows] |= (at >= 0) & (enter - ends[np.maximum(at, 0)] <= NEXT * packet_ns[rows])
        whole = np.flatnonzero(mine & ~again)
        whole = whole[np.argsort(begin[whole], kind="stable")]
        until = np.maximum.accumulate(end[whole])  # by the messages that began before each
        at = np.searchsorted(begin[whole], enter, "left") - 1
        if len(whole):
            out[rows] |= (at >= 0) & (enter <= until[np.maximum(at, 0)])
    return out


def sent_by_gpus(exchanges: Rows | Picked) -> Bools:
    """Exchanges whose data was written one-sided (NCCL, puts, pages), as their senders' captures saw it."""
    sent = np.isin(exchanges["wire"], _FRAMED_WRITES) & (exchanges["data_ns"] != NEVER)
    return np.asarray(sent & ((exchanges["seen"] & Seen.AT_SENDER) != 0), np.bool_)


def packet_times(entries: Entries, exchanges: Rows | Picked) -> NDArray[np.float64]:
    """For each row how long a packet of its endpoint takes to leave: their usual distance within a message.

    0 where none of these sent it, and where no message has several packets.
    """
    out = np.zeros(len(entries.rule))
    several = np.flatnonzero(sent_by_gpus(exchanges) & (exchanges["packets"] > 1))
    gaps = exchanges["packets"][several].astype(np.int64) - 1
    steps = (exchanges["data_end_ns"][several] - exchanges["data_ns"][several]) / gaps
    src = exchanges["src"][several]
    for endpoint in np.unique(src):
        out[entries.endpoint == endpoint] = np.median(steps[src == endpoint])
    return out


def trip_ns(exchanges: Rows | Picked) -> float:
    """The median time from a message's end to its ACK; NaN without."""
    known = (exchanges["acked_ns"] != NEVER) & (exchanges["retransmitted"] == 0)
    known &= exchanges["data_end_ns"] != NEVER
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[known]
    return float(np.median(trips)) if len(trips) else float("nan")


def _since_ns(entries: Entries) -> NDArray[np.int64]:
    """From leaving one collective to entering the next; 0 where nothing is known of that."""
    return np.where(entries.since_ns != NEVER, entries.enter_ns - entries.since_ns, 0)


def least_work_ns(
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
