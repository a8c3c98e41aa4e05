"""Why a rank was late: its own doing, its host's, a receiver's, the network's, or handed on by a peer.

A rank enters a collective after it has left the one before and done its work. Its own time is what
lies between. A rank whose own time is no longer than its peers' was late because it left late: it
inherited the lateness. Where the collective it left shows retransmissions on its own messages, or
it has a link that is slow (``links``), the network made it late. Where it had all it needed, but its own
data could not leave, its receiver did. Of a rank without a capture of its own it is not seen when it left, so
it is not told what kept it (``waits``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import classes, distinct, key_numbers, median_of
from dpuflow.entries import AT_LEAST, AT_MOST, Rule, against_others, previous_row
from dpuflow.entries.rows import FEWEST
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.waits import left_any, seen_from_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries, Relative
    from dpuflow.matching import Instance
    from dpuflow.verdicts.bulk import Fed
    from dpuflow.verdicts.excess import Charges
    from dpuflow.verdicts.waits import Beside, Overlap

NONE, COMPUTE, NETWORK, UNKNOWN, RECEIVER, HOST = range(6)
CAUSES = ("none", "compute", "network", "unknown", "receiver", "host")
BY_PEER, BY_PEERS = 1, 2
"""Work is compared with what one peer, or several, do at the same place of other steps."""


class Causes(NamedTuple):
    """Per row of Entries: an index into CAUSES, and how much longer than its peers the rank worked.

    NONE also stands for lateness that a peer handed on: there is nothing to find at this rank.
    ``excess_ns`` is NEVER where there is nothing to compare: the rank was in no collective before, or
    came from a point-to-point transfer, which its peers leave at other times by design (pipelines).
    """

    cause: Ints
    excess_ns: Ints
    partly: Bools  # rows of collectives of which not all messages were captured
    least: Bools  # rows whose excess is a lower bound: peers had waited, and worked less than seen
    usual: Ints  # by what the excess is counted: BY_PEER, BY_PEERS; 0: by peers in the collective
    unread_ns: Ints  # so much of each rank's lateness is nobody's doing but for messages unread


class Waits(NamedTuple):
    """What else ranks may have waited for than their peers in the collective before; per row of Entries.

    ``fed``: what data from outside the collectives did (``bulk``). The own time of a rank that had waited for
    it begins when it is there; or when what else it may have waited for was done (``awaited``, and
    ``unread``: messages that nobody read, see ``waits``). ``kin`` is the row of the same group's collective
    before. ``overlap`` says whose work goes on beside their collectives: of these it also counts how long ago
    they had entered the one before, and not again what they were late by before. ``queued``: so long each
    first message may have waited in its own node (``queued_ns``), which is no work. ``alike``: of each row
    the kind of its collective (``kinds_of``), and its place in its step (``places_in_steps``).
    """

    fed: Fed
    awaited: Ints
    unread: Ints
    kin: Ints
    overlap: Overlap
    queued: Ints
    alike: tuple[Ints, Ints]


def causes_of(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    slow: Bools,
    waits: Waits,
) -> Causes:
    """Why each rank was late; ``slow`` marks rows whose endpoint has a slow link."""
    longer = _worked_longer(instances, entries, relative, waits)
    last, fed, beside = longer.last, waits.fed, seen_from_beside(instances, entries)
    # How much longer it worked is not seen of such a rank, only how much later it entered.
    excess = np.where(beside.rows & ~longer.staged & (last >= 0), beside.lead_ns, longer.excess_ns)
    troubled = (last >= 0) & ((entries.retransmitted[last] > 0) | slow[last])
    troubled |= waits.queued > 0
    known = excess != NEVER
    most, beyond = 2 * excess >= relative.lateness_ns, excess > charges.noise_ns
    # Most of it must be its own doing; of a rank that the network gave trouble more than noise explains, too.
    working = known & most & (beyond | ~troubled)
    working |= (last < 0) & (fed.ns == NEVER)  # nothing was there to wait for
    working &= ~fed.carrying
    # By its own last data, which left later than its peers' by at least half of what the rank was late.
    held = known & ~working & (troubled | ~beyond) & (longer.since_leave_ns > charges.noise_ns)
    held &= 2 * (longer.since_leave_ns - longer.since_gone_ns) >= relative.lateness_ns
    granted_late = _granted_late(entries, last, excess, working, instances)
    own = np.where(granted_late, HOST, COMPUTE)
    own = np.where(_unproved(entries, last, excess, troubled, beside), UNKNOWN, own)
    others = np.select([troubled, held, known], [NETWORK, RECEIVER, NONE], UNKNOWN)
    others = np.where(beside.rows, UNKNOWN, others)
    others = np.where((fed.held | fed.carrying) & known, NETWORK, others)
    causes = np.where(charges.late, np.where(working, own, others), NONE)
    # Its first message left as soon as it was allowed to: had it waited for that, the receiver was late.
    waited = (entries.rule == Rule.CREDIT) & (relative.bound == AT_MOST)
    causes[waited & (relative.lateness_ns > charges.noise_ns)] = RECEIVER
    least = longer.least | (beside.least & ~longer.staged)
    return Causes(causes, excess, beside.partly, least, longer.usual, _by_unread(longer, relative))


class _Longer(NamedTuple):
    """Per row by how much longer than its peers a rank worked, ns; NEVER where not known."""

    last: Ints  # the row of the collective that it had entered before, -1: none
    staged: Bools  # that was a point-to-point transfer
    excess_ns: Ints  # by the kindest reckoning
    since_leave_ns: Ints  # since it had left that
    since_gone_ns: Ints  # since its own last data had gone
    least: Bools  # as of Causes
    usual: Ints  # as of Causes
    unread_ns: Ints  # excess if it had not waited for messages that nobody read


def _by_unread(longer: _Longer, relative: Relative) -> Ints:
    """How much of each rank's lateness would be its own if it had not waited for unmatched messages."""
    known = (longer.unread_ns != NEVER) & (longer.excess_ns != NEVER) & (relative.lateness_ns != NEVER)
    most = np.minimum(longer.unread_ns, relative.lateness_ns)
    return np.where(known, np.maximum(most - np.maximum(longer.excess_ns, 0), 0), 0)


def _worked_longer(
    instances: Sequence[Instance], entries: Entries, relative: Relative, waits: Waits
) -> _Longer:
    """How much longer each rank worked before it entered.

    Whether a call returns before its last data has left the node depends on the library: a rank worked longer
    only if it did by either reckoning.
    """
    last = previous_row(entries)
    transfer = np.array([i.op == Op.SEND_RECV for i in instances], bool)
    staged = (last >= 0) & transfer[entries.collective[last]] if len(last) else last >= 0
    read_ns = np.maximum(waits.fed.ns, np.where(last >= 0, waits.awaited, NEVER))
    since_ns = np.maximum(read_ns, np.where(last >= 0, waits.unread, NEVER))
    # Who entered after it had left, nobody knows when, may have worked for any time.
    dated = (relative.bound != AT_LEAST) | entries.exact | (entries.rule == Rule.QUEUED)
    dated &= ~waits.fed.unseen
    left = _left(entries, last, waits.kin)
    earliest = _earliest(entries, left, instances)
    waited = (since_ns, read_ns)
    since_leave = _excess(entries, left, entries.leave_ns, waited, dated, earliest)
    since_idle = _excess(entries, left, entries.idle_ns, waited, dated, earliest)
    excess, unread = np.minimum(since_leave, since_idle), np.full(len(last), NEVER)
    if (since_ns > read_ns).any():
        read = (read_ns, read_ns)
        ends = (entries.leave_ns, entries.idle_ns)
        unread = np.minimum(*(_excess(entries, left, each, read, dated, earliest) for each in ends))
    until = np.maximum(since_ns, left_any(entries))
    excess = np.minimum(excess, _excess(entries, left, entries.leave_ns, (until, until), dated, earliest))
    if waits.overlap.rows.any():
        before, fed = _earliest(entries, last, instances), (waits.fed.ns, waits.fed.ns)
        since_enter = _excess(entries, last, entries.enter_ns, fed, dated, before)
        excess = np.where(waits.overlap.rows, np.minimum(excess, since_enter), excess)
        excess = waits.overlap.less_carried(excess, entries)
    excess[staged] = NEVER
    excess = np.where(excess > 0, np.maximum(excess - waits.queued, 0), excess)
    least, since_gone = _held_peers(entries), since_idle
    if any(i.placement.nodes for i in instances):
        # What the rest of its node still had to do was not its own data.
        gone = np.maximum(entries.leave_ns, entries.gone_ns)
        since_gone = _excess(entries, left, gone, waited, dated, _earliest(entries, left, []))
    done = np.where(entries.idle_ns != NEVER, np.maximum(entries.leave_ns, entries.idle_ns), NEVER)
    began = np.where(left >= 0, done[left], NEVER)
    first = np.maximum(np.where(left >= 0, entries.leave_ns[left], NEVER), read_ns)
    began = np.where(began != NEVER, [np.maximum(began, until), first], NEVER)
    excess, usual = _against_usual(entries, began, excess, least, waits.alike)
    return _Longer(last, staged, excess, since_leave, since_gone, least, usual, unread)


def _unproved(entries: Entries, last: Ints, excess: Ints, troubled: Bools, beside: Beside) -> Bools:
    """Rows of collectives seen in part, of ranks that links which nobody saw may have kept instead."""
    # A call may not return before the network has taken all of its data, to be seen at the other end.
    draining = (entries.acked_ns[last] != NEVER) & (2 * (entries.acked_ns - entries.idle_ns)[last] >= excess)
    return np.asarray(beside.partly & (beside.rows | troubled | draining), np.bool_)


def _left(entries: Entries, last: Ints, kin: Ints) -> Ints:
    """The row of the collective that each rank had left when its own time began.

    That is ``last``, the one that it entered last. Where for some rank of a collective that one was still
    going on beside it (buckets of gradients), all of its ranks compare by their own group's last, ``kin``.
    """
    seen = (last >= 0) & (entries.enter_ns != NEVER)
    beside = distinct(entries.collective[seen & (entries.leave_ns[last] > entries.enter_ns)])
    usable = (kin >= 0) & (entries.leave_ns[kin] <= entries.enter_ns)
    return np.where(np.isin(entries.collective, beside) & usable, kin, last)


def _dated_peers(entries: Entries) -> tuple[Ints, Ints]:
    """Per row how many of its rank's peers are dated, and how many there are."""
    sure = np.bincount(entries.collective[entries.exact], minlength=len(entries.offsets))
    return sure[entries.collective] - entries.exact, np.diff(entries.offsets)[entries.collective] - 1


def _held_peers(entries: Entries) -> Bools:
    """Rows of ranks whose peers all sent on a credit or an input, so that none of their entries shows.

    Where a root may run ahead of a late receiver (NCCL's slots), it works, and then waits for that one's
    credits. From outside it takes as long as the late one.
    """
    by_credit = entries.rule == Rule.CREDIT
    credited = np.bincount(entries.collective[by_credit], minlength=len(entries.offsets)) > 0
    return np.asarray(credited[entries.collective] & (_dated_peers(entries)[0] == 0) & ~by_credit, np.bool_)


def _against_usual(
    entries: Entries, since_ns: Ints, excess: Ints, least: Bools, alike: tuple[Ints, Ints]
) -> tuple[Ints, Ints]:
    """``excess``; of ranks with few dated peers, against what peers usually work in other steps.

    By the median of those that nothing held: who had waited for its input worked no longer than until that
    came. ``since_ns``: when each had begun to work at the latest, and at the earliest, as of peers. A
    root that runs ahead (``least``) works at its own pace until its slots are used up; where no peer
    ever was free it needed no longer than in the quickest. ``alike``: kind and place in the
    step, as what ranks do before another place may be other work. A single peer's can accuse, but clear
    nobody.
    """
    out, usual = excess.copy(), np.zeros(len(excess), np.int64)
    kind, place = alike
    by_credit = entries.rule == Rule.CREDIT
    known = (since_ns[0] != NEVER) & (entries.enter_ns >= since_ns[0]) & entries.told
    own, most = np.where(known, entries.enter_ns - since_ns, 0)
    free = known & entries.exact & ~least & ~by_credit
    dated, peers_of = _dated_peers(entries)
    rows = np.flatnonzero((2 * dated < peers_of) & known & (excess != NEVER) & ~by_credit)
    for places in classes(kind[rows], place[rows] + 1, entries.endpoint[rows]):
        mine = rows[places]
        peers = (kind == kind[mine[0]]) & (place == place[mine[0]])
        peers &= entries.endpoint != entries.endpoint[mine[0]]
        alone, held = most[free & peers], most[known & peers & by_credit & least[mine].any()]
        if len(alone) >= FEWEST:
            beyond = own[mine] - round(float(median_of(alone)))
            out[mine] = np.where(least[mine], np.maximum(excess[mine], beyond), beyond)
            # Of several peers a single one that is told may be late as well.
            lone = peers_of[mine[0]] > 1 and len(distinct(entries.endpoint[free & peers])) < 2
            usual[mine] = BY_PEER if lone else BY_PEERS
        elif len(held):
            beyond = np.maximum(excess[mine], own[mine] - int(held.min()))
            out[mine] = np.where(least[mine], beyond, excess[mine])
    return out, usual


def _granted_late(
    entries: Entries, last: Ints, excess: Ints, working: Bools, instances: Sequence[Instance]
) -> Bools:
    """Ranks that worked longer, and whose credits came later than their peers' by about as much.

    Where credits run ahead of the data (NCCL), the host posts them before the GPU is done. A host that is
    late with those, too, is what kept the rank; not one that posts them when the rank has left late. Nor is
    it one whose rank went on without entering: who waits for its host enters as soon after its credits as any
    rank ever did in such a collective, who computes does so later.
    """
    known: Bools = entries.granted_ns != NEVER
    if not known.any():
        return known
    behind = against_others(entries, entries.granted_ns, known)
    left = known & (last >= 0) & (entries.leave_ns[last] != NEVER)
    since = np.where(left, entries.granted_ns - np.where(left, entries.leave_ns[last], 0), 0)
    behind = np.where(left, np.minimum(behind, against_others(entries, since, left)), behind)
    late: Bools = known & working & (excess > 0) & (2 * behind >= excess)
    if not late.any():
        return late
    both = known & (entries.enter_ns != NEVER)
    ahead = np.where(both, entries.enter_ns - entries.granted_ns, NEVER)
    kind = key_numbers((i.op, i.size, len(i.order), i.order[0]) for i in instances)
    of_row, least = kind[entries.collective], np.full(len(instances), FAR)
    np.minimum.at(least, of_row[both], np.maximum(ahead[both], 0))
    late &= both & (2 * (ahead - least[of_row]) < excess)
    return late


def _earliest(entries: Entries, last: Ints, instances: Sequence[Instance]) -> Ints:
    """The earliest that each rank may have begun to work, where that is not known exactly; else NEVER.

    Who sent and got nothing may have left as soon as it had entered. A GPU that shares its node with others
    may have left with its own last packet, or as late as with the last one of its node.
    """
    before = np.maximum(last, 0)
    earliest = np.full(len(last), NEVER)
    if any(i.placement.nodes for i in instances):
        shared = np.array([bool(i.placement.nodes) for i in instances], bool)[entries.collective[before]]
        earliest[shared] = entries.leave_ns[before][shared]
    earliest = np.where(entries.buffered[before], entries.enter_ns[before], earliest)
    return np.where(last >= 0, earliest, NEVER)


def _excess(
    entries: Entries, last: Ints, left_ns: Ints, waited_ns: tuple[Ints, Ints], dated: Bools, earliest: Ints
) -> Ints:
    """How much longer each rank worked before a collective than the others of its group, ns.

    From leaving the one before, or from when what it had waited for was there: until when it may have, and
    until when it surely had (``waited_ns``). Of a rank that may have waited before its first message it is
    not known how long it worked, and who waited for the rank itself seems to have worked longer still: where
    others' entries are exact, only those count. ``earliest`` is since when it may have worked, where that is
    not one moment (``_earliest``). What excuses a rank accuses no other: its peers compare with the longest
    that it may have worked.
    """
    left = np.where(last >= 0, left_ns[last], NEVER) if len(last) else waited_ns[0]
    since = np.maximum(left, waited_ns[0])
    # Of a rank that nothing was seen of only a lower bound of its entry is known.
    known = dated & (entries.enter_ns != NEVER) & (since != NEVER) & (entries.rule != Rule.UNSEEN)
    if len(last):  # nor when it began that is not known to have left
        known &= (last < 0) | (left_ns[last] != NEVER)
    own = np.where(known, entries.enter_ns - np.where(known, since, 0), NEVER)
    sure = known & entries.exact
    several = np.bincount(entries.collective[sure], minlength=len(entries.offsets))[entries.collective] > 1
    sure &= several
    begun = np.maximum(np.where(earliest != NEVER, earliest, left), waited_ns[1])
    most = np.where(known & (begun != NEVER), entries.enter_ns - np.where(known, begun, 0), own)
    most = np.maximum(own, most)
    excess = np.where(sure, against_others(entries, most, sure), against_others(entries, most, known))
    excess -= most - own
    return np.where(known, excess, NEVER).astype(np.int64)
