"""What first acts may have waited for: a list of blockers, each weighed by how fast the group's hosts react.

In: entries as first acts date them, exchanges, how fast hosts react. Out: Blockers. An act dates its rank's
entry exactly when every possible blocker of it is rejected: it ended longer ago than reactions take, or after
the act. The first that stands is the reason why an entry is a bound, or not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import Places, classes, distinct, is_in, median_of, percentile
from dpuflow.entries.inputs import lines_of
from dpuflow.entries.relative import previous_row
from dpuflow.entries.rows import BY_GPUS, EXACT_RULES, FAR_BEYOND, FEWEST, QUICK, Rule
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.queues import Queued
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


NEXT = 1.5
"""Distances of packets within which one follows the other without a pause."""
_FRAMED_WRITES = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM)
_SENDS = (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)
_MEASURED = (*_FRAMED_WRITES, Wire.ROCE_READ, Wire.GLOO_DATA, Wire.OB1_PUT)
"""Data whose length its header, its request or its numbers tell (``messages.lost``)."""


class Blocker(NamedTuple):
    """One thing that first acts may have waited for, by row of Entries."""

    rule: Rule  # what the entry rests on where it stands
    until_ns: Ints  # it kept them until then; NEVER where there was no such thing
    limit_ns: Floats | float  # later than so long after that, they had not waited; NaN: never
    after: Ints  # TRANSFER row that shows it, NONE32 for none

    def stands(self, act_ns: Ints) -> Bools:
        """Rows whose act may have waited for it."""
        with np.errstate(invalid="ignore"):
            late = act_ns - self.until_ns > self.limit_ns
        return np.asarray((self.until_ns != NEVER) & ~late, np.bool_)


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
    packet_ns: Floats
    """For each row how long a packet of its endpoint takes to leave."""
    way_ns: Ints
    """How long the act may have been on its way to where it was stamped, 95 of 100 times ..."""
    usual_way_ns: Ints
    """... and usually."""

    @property
    def prompt_ns(self) -> Floats:
        """Within this after a thing that is seldom waited for, an act may have waited for it: the usual
        reaction (90 %), where none was ever seen a few round trips."""
        return np.where(np.isnan(self.law.most_ns), FAR_BEYOND * trip_ns(self.exchanges), self.law.most_ns)

    def none(self) -> Ints:
        """No TRANSFER row."""
        return np.full(len(self.entries.rule), NONE32)

    def certain(self, rule: Rule, rows: Bools, after: Ints | None = None) -> Blocker:
        """What kept the acts of ``rows`` until they came, for all that is known."""
        until = np.where(rows, self.entries.enter_ns, NEVER)
        return Blocker(rule, until, 0.0, self.none() if after is None else after)

    def credit(self, rows: Bools, limit_ns: Floats | float) -> Blocker:
        """The credits of ``rows``."""
        known = rows & (self.entries.credit_ns != NEVER)
        until = np.where(known, self.entries.enter_ns - self.entries.credit_ns, NEVER)
        return Blocker(Rule.CREDIT, until, limit_ns, self.entries.grant)


def find_blockers(scene: Scene, credited: Credited, queued: Queued) -> Iterator[Blocker]:
    """All blockers but inputs and offers, those that say most of an entry first."""
    again, regranted = sent_again(scene)
    yield missing_before(scene)
    yield scene.certain(Rule.OVERLAPS, before_leaving(scene), scene.entries.since_act)
    yield scene.credit(credited.rows, np.inf)
    yield scene.credit(*held_senders(scene))
    yield scene.certain(Rule.CONNECTING, first_on_connection(scene))
    yield scene.certain(Rule.REPEATED, again)
    yield scene.credit(regranted, scene.law.most_ns)
    yield scene.certain(Rule.QUEUED, queued.rows, queued.behind)
    yield behind_own_data(scene)


def solve(entries: Entries, inputs: Blocker, blockers: Iterable[Blocker]) -> tuple[Ints, Ints]:
    """Each row's rule, and the TRANSFER row that it may have waited for: the first blocker that stands.

    ``inputs``: of acts that came after an input, or answer an offer.
    """
    waited = (inputs.until_ns != NEVER) & ~inputs.stands(entries.enter_ns)
    rule = np.where(waited, int(inputs.rule), entries.rule)
    exact, after = np.isin(rule, EXACT_RULES), entries.after.copy()
    for blocker in blockers:
        rows = exact & blocker.stands(entries.enter_ns)
        rule[rows], after[rows] = blocker.rule, blocker.after[rows]
        exact &= ~rows
    return rule, after


def inputs_and_offers(scene: Scene) -> Blocker:
    """Inputs and credits that arrived before a rank's first act: once ruled out as its cause, the entry is as
    good as exact.

    By three times the slow reaction; where proxy threads and GPUs act, which wait for slots and for the wire
    as well, only beyond the worst. A credit may come long after the input.
    """
    entries, law = scene.entries, scene.law
    waiting = np.isin(entries.rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    credit = np.where(entries.credit_ns != NEVER, entries.credit_ns, FAR)
    idle = np.minimum(entries.unmoved_ns, credit)
    wire = np.append(scene.transfers["wire"], 0)[np.where(entries.act == NONE32, -1, entries.act)]
    limit = FAR_BEYOND * law.slow_ns
    limit = np.where(is_in(wire, BY_GPUS), np.fmax(limit, law.worst_ns), limit)
    return Blocker(Rule.LONG_AFTER, np.where(waiting, entries.enter_ns - idle, NEVER), limit, entries.after)


class Credited(NamedTuple):
    """By row of Entries."""

    rows: Bools  # the first message may have waited for its credit
    since_ns: Ints  # then the rank entered no earlier than this; NEVER where nothing says so


def credited(scene: Scene) -> Credited:
    """First messages that left within the usual reaction time to their credit, or as soon as possible.

    Only if the rank can have been there before: not if from leaving its last collective to the credit there
    was less time than any rank's work takes. ``way_ns``: a credit and what it allowed, as one end saw them,
    are apart by the way there and back as well.
    """
    entries, law = scene.entries, scene.law
    gated = np.isin(entries.rule, (Rule.FREE_STEP, Rule.NOTHING_BEFORE)) & (entries.credit_ns != NEVER)
    with np.errstate(invalid="ignore"):
        # A packet may be stamped when it has left; on a slow link that takes longer than the host needs.
        prompt = gated & (entries.credit_ns <= scene.prompt_ns + scene.packet_ns + scene.way_ns)
        # Much later than the first of all, and yet that soon after its credit, it would be by accident.
        first = np.minimum.reduceat(
            np.where(entries.enter_ns == NEVER, FAR, entries.enter_ns), entries.offsets[:-1]
        )
        late = entries.enter_ns - first[entries.collective] > FAR_BEYOND * law.worst_ns
        prompt |= gated & late & (entries.credit_ns <= law.worst_ns)
    known, worked = entries.since_ns != NEVER, _since_ns(entries)
    room = worked - entries.credit_ns  # from leaving its last collective to the credit
    # Where no reaction was ever seen (messages that stream), that is all there is to go by: but for what came
    # later than anything that may have waited for no more than a host.
    unmeasured = gated & np.isnan(law.most_ns) & ~(entries.credit_ns > law.worst_ns)
    # Had it waited for its credit, it would have sent soon after that; so it lay there while the rank worked.
    unheld = known & (FAR_BEYOND * room <= worked)
    least, alone = least_work_ns(entries, gated & ~prompt & (~unmeasured | unheld), scene.of_row)
    prompt |= unmeasured & known & ((least > 0) | alone)
    prompt &= ~known | (room >= least)
    return Credited(prompt, np.where(prompt & known, entries.since_ns + least, NEVER))


def missing_before(scene: Scene) -> Blocker:
    """The last data that ranks sent or received before packets of theirs are missing.

    Order tells what belongs to which operation, so a message that was not captured makes those after it seem
    to be the ones before them. What left long after all data that the rank had sent or received began
    something new, whatever was missed; what left within a reaction after it may belong to anything.
    Where the length of what was missed is known, nothing is taken for anything else.
    """
    entries, exchanges, transfers = scene.entries, scene.exchanges, scene.transfers
    until = np.full(len(entries.rule), NEVER)
    lossy = ((transfers["flags"] & MessageFlag.GAP) != 0) & ~np.isin(transfers["wire"], _MEASURED)
    # Where headers name messages, what is missing of one is no other's, and order tells nothing.
    sends = np.isin(transfers["wire"], _SENDS)
    named = distinct(transfers["connection"][sends & (transfers["op"] != Op.UNKNOWN)])
    lossy &= ~(sends & np.isin(transfers["connection"], named))
    since = np.full(int(max((transfers[end].max(initial=0) for end in ("src", "dst")), default=0)) + 1, FAR)
    for end in ("src", "dst"):
        np.minimum.at(since, transfers[end][lossy].astype(np.int64), transfers["sent_ns"][lossy])
    for endpoint in np.flatnonzero(since != FAR).tolist():
        sent, came = exchanges["src"] == endpoint, exchanges["dst"] == endpoint
        times = np.sort(np.r_[exchanges["data_end_ns"][sent], exchanges["arrived_end_ns"][came]])
        rows = entries.of[endpoint]
        rows = rows[entries.enter_ns[rows] != NEVER]
        rows = rows[np.maximum(entries.enter_ns, entries.leave_ns)[rows] >= since[endpoint]]
        at = np.searchsorted(times, entries.enter_ns[rows], "left") - 1
        until[rows] = np.where(at >= 0, times[np.maximum(at, 0)], NEVER) if len(times) else NEVER
    slow = scene.law.slow_ns
    limit = np.where(np.isnan(slow), scene.prompt_ns, FAR_BEYOND * slow)
    return Blocker(Rule.MISSING, until, limit, scene.none())


def before_leaving(scene: Scene) -> Bools:
    """Rows of ranks that seem to have entered before leaving their group's previous operation.

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
    both = distinct(np.r_[entries.collective[wrong], entries.collective[last[wrong]]])
    return np.asarray(np.isin(entries.collective, both) if lossy else wrong, np.bool_)


def held_senders(scene: Scene) -> tuple[Bools, float]:
    """Rows of NCCL's ranks that only send, and whose first message may have waited for a free slot.

    Nothing keeps them in an operation: they run ahead of those that receive. It left as soon after its
    credit as messages do that waited for one: within three times the quickest (5 %) of the connection where
    hosts are quickest. An operation is taken up when the receiver has taken the one before it.
    """
    entries, exchanges = scene.entries, scene.exchanges
    wire = (exchanges["wire"] == Wire.ROCE_WRITE_IMM) & (exchanges["data_ns"] != NEVER)
    rows = np.flatnonzero(wire & (exchanges["grant_arrived_ns"] != NEVER))
    # What a rank without a capture received was not seen: it need not be one that only sends.
    seen = np.array([i.was_captured(end) for i in scene.instances for end in i.order], bool)
    ahead = ~entries.fed & seen & (entries.credit_ns != NEVER)
    waited = (exchanges["data_ns"] - exchanges["grant_arrived_ns"])[rows]
    quick = [percentile(waited[at], QUICK) for at in classes(lines_of(exchanges)[rows]) if len(at) >= FEWEST]
    return ahead, FAR_BEYOND * min(quick, default=-np.inf)


def first_on_connection(scene: Scene) -> Bools:
    """A rank's first message over a connection opened after it left the previous collective.

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
    """Rows whose act may be a retransmission of one not seen; and rows whose credit was retransmitted.

    The former were sent again and not captured at their sender, or their beginning was missed there.
    """
    entries, transfers = scene.entries, scene.transfers
    again = np.zeros((2, len(transfers) + 1), bool)
    again[:, :-1] = transfers["retransmitted"] > 0
    again[0, :-1] |= np.isin(transfers["wire"], _FRAMED_WRITES) & (
        (transfers["flags"] & MessageFlag.GAP) != 0
    )
    again[0, :-1] &= (transfers["seen"] & Seen.AT_SENDER) == 0
    act, grant = (np.where(row == NONE32, len(transfers), row) for row in (entries.act, entries.grant))
    return again[0][act], again[1][grant]


def behind_own_data(scene: Scene) -> Blocker:
    """Earlier data of a rank's adapter that its first message may have followed back to back.

    It may have waited in the adapter's queue, as on a slow link. So it may if it left while another message
    was leaving: packets of both take turns. Messages sent again do not leave at a stretch. A rank that went
    on when its data was in the staging buffer may have entered before that left: its proxy thread sends what
    comes next when it is through with that. So it is when the last message is acknowledged (proxy.cc,
    progressOps), not where a socket has taken it: of one that is sent again that takes long.
    """
    entries, exchanges = scene.entries, scene.exchanges
    until, repeated = np.full((2, len(entries.rule)), NEVER)
    sent = sent_by_gpus(exchanges)
    src, begin, end, acked = (exchanges[name][sent] for name in ("src", "data_ns", "data_end_ns", "acked_ns"))
    again, rdma = exchanges["retransmitted"][sent] > 0, exchanges["wire"][sent] != Wire.NCCL_DATA
    places = Places(src)
    for endpoint in distinct(src).tolist():
        mine = places[endpoint]
        rows = entries.of[endpoint]
        rows = rows[(entries.enter_ns[rows] != NEVER) & (scene.packet_ns[rows] > 0)]
        enter, ends = entries.enter_ns[rows], np.sort(end[mine])
        at = np.searchsorted(ends, enter, "left") - 1
        until[rows] = np.where(at >= 0, ends[np.maximum(at, 0)], NEVER)
        whole = mine[~again[mine]]
        whole = whole[np.argsort(begin[whole], kind="stable")]
        # By the messages that began before each; nothing began before the first.
        last = np.r_[NEVER, np.maximum.accumulate(end[whole])]
        until[rows] = np.maximum(until[rows], last[np.searchsorted(begin[whole], enter, "left")])
        done = np.sort(np.r_[NEVER, acked[mine[again[mine] & rdma[mine]]]])
        repeated[rows] = done[np.searchsorted(done, enter, "left") - 1]
    limit = NEXT * scene.packet_ns
    last = previous_row(entries)
    ahead = ((last >= 0) & entries.buffered[last]) | (repeated > until)
    limit = np.where(ahead, np.fmax(limit, scene.prompt_ns), limit)
    until = np.minimum(np.maximum(until, repeated), entries.enter_ns)
    return Blocker(Rule.QUEUED, until, limit, scene.none())


def sent_by_gpus(exchanges: Rows | Picked) -> Bools:
    """Exchanges whose data GPUs sent (NCCL, puts, pages), as their senders' captures saw it."""
    sent = np.isin(exchanges["wire"], BY_GPUS) & (exchanges["data_ns"] != NEVER)
    return np.asarray(sent & ((exchanges["seen"] & Seen.AT_SENDER) != 0), np.bool_)


def packet_times(entries: Entries, exchanges: Rows | Picked) -> Floats:
    """For each row how long a packet of its endpoint takes to leave: their usual distance within a message.

    0 where none of these sent it, and where no message has several packets.
    """
    out = np.zeros(len(entries.rule))
    several = np.flatnonzero(sent_by_gpus(exchanges) & (exchanges["packets"] > 1))
    gaps = exchanges["packets"][several].astype(np.int64) - 1
    steps = (exchanges["data_end_ns"][several] - exchanges["data_ns"][several]) / gaps
    src = exchanges["src"][several]
    places = Places(src)
    for endpoint in distinct(src).tolist():
        out[entries.of[endpoint]] = median_of(steps[places[endpoint]])
    return out


def trip_ns(exchanges: Rows | Picked) -> float:
    """The median time from a message's end to its ACK; NaN without."""
    known = (exchanges["acked_ns"] != NEVER) & (exchanges["retransmitted"] == 0)
    known &= exchanges["data_end_ns"] != NEVER
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[known]
    return float(median_of(trips)) if len(trips) else float("nan")


def _since_ns(entries: Entries) -> Ints:
    """From leaving one collective to entering the next; 0 where nothing is known of that."""
    return np.where(entries.since_ns != NEVER, entries.enter_ns - entries.since_ns, 0)


def least_work_ns(entries: Entries, free: Bools, of_row: Ints) -> tuple[Ints, Bools]:
    """For each row the shortest time that a rank of its group needed between two collectives, 0 where
    unknown; and the rows where it is unknown because only one other rank was beyond doubt.

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
    for each in distinct(of_row[free]):
        rows = of_row == each
        sure = rows & free
        if sure.sum() >= FEWEST:
            ranks = distinct(entries.endpoint[sure])
            fair = rows & ((entries.endpoint == ranks[0]) | (len(ranks) > 1))
            out[fair] = worked[rows & known].min()
            alone |= rows & ~fair
    return out, alone
