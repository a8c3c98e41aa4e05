"""Entries in, entries out: whether first acts had waited for their input or credit, by how hosts react.

A rank that waits acts within its host's usual reaction; how long that is, the capture shows: of the group's
sends that had waited, of what others take, of how closely a rank keeps to its input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.entries import Entries, Rule
from dpuflow.lateness.handover import FEWEST, middle_ranks
from dpuflow.lateness.relative import medians
from dpuflow.lateness.tails import tail_ns
from dpuflow.ordering import classes, percentile, percentiles
from dpuflow.schema import NEVER, NONE32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.lateness.handover import Usual
    from dpuflow.lateness.passing import Times

_FAR = np.iinfo(np.int64).max

FAR_BEYOND = 3.0
"""Times the slowest usual reaction (95th percentile) after which a rank had not been waiting."""


def settle(
    entries: Entries,
    usual: Usual,
    of_row: NDArray[np.int64],
    tail: NDArray[np.float64],
    packet_ns: NDArray[np.float64] | float = 0.0,
    trips_ns: float = float("nan"),
) -> Entries:
    """Weigh what reached a rank before it acted against how fast its hosts usually react.

    A rank that waits for an input or a credit acts on it within its host's usual reaction. One that
    acts far later had not entered when the input came: its entry is exact. One that sends within that
    reaction to its credit may have waited for the credit, but only if it can have been there before: not if
    from leaving its last collective to the credit there was less time than any rank's work takes. Where no
    reaction was ever seen, a few round trips (``trips_ns``) stand for it. ``tail``: see ``tails``.
    """
    rule = entries.rule.copy()
    waiting = np.isin(rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    # Its input may have come long before its credit.
    idle = np.where(
        entries.credit_ns != NEVER, np.minimum(entries.unmoved_ns, entries.credit_ns), entries.unmoved_ns
    )
    with np.errstate(invalid="ignore"):  # nothing is usual where nothing was measured
        nccl = np.isin(of_row, of_row[entries.between[0]])
        instead = np.where(
            nccl,
            middle_ranks(entries, of_row, entries.between)[2],
            _slowest_of_others(entries, idle, waiting & ~nccl, of_row),
        )
        slowest = np.where(np.isnan(usual.slowest_ns), instead, usual.slowest_ns)
        if len(entries.waited) < FEWEST:  # one or two tell nothing
            slowest = np.where(nccl, slowest, np.fmax(slowest, instead))
            waiting &= nccl | ~_keeps_to_input(entries, waiting, of_row, slowest)
        limit = FAR_BEYOND * slowest
        limit = np.fmin(limit, _quickest_of_others(entries, waiting & ~usual.by_sends, of_row))
        # Of hosts that stall now and then so late an act is no evidence yet.
        worst = np.fmax(tail, _worst_of_others(entries, waiting & nccl, of_row))
        limit = np.where(nccl, np.fmax(limit, worst), limit)
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
    return replace(entries, rule=rule).marked(prompt, Rule.CREDIT, entries.grant)


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
    entries: Entries, idle_ns: NDArray[np.int64], waiting: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For rows ``waiting`` how long the group's other ranks take to their first act (``idle_ns``), 95 %.

    From an input, or from a credit that came after it.

    It stands for the usual reaction where none was measured (data streams through), but no longer than hosts
    take from a grant to the data it allows: some of these ranks were late themselves. With too few of them it
    is that; and where there are no grants either, what hosts take from send to send. NaN with too few of all.
    """
    out, least = np.full(len(waiting), np.nan), np.full(len(waiting), np.inf)
    if len(entries.granted_data_ns) >= FEWEST:
        out[:] = least[:] = percentile(entries.granted_data_ns, 95)
    elif len(entries.next_send_ns) >= FEWEST:
        # That wakes nobody up, so even far more than that is usual.
        out[:] = FAR_BEYOND * percentile(entries.next_send_ns, 95)
    for each in np.unique(of_row[waiting]):
        mine = np.flatnonzero(waiting & (of_row == each))
        for endpoint in np.unique(entries.endpoint[mine]):
            own = entries.endpoint[mine] == endpoint
            if (~own).sum() >= FEWEST:
                out[mine[own]] = percentile(idle_ns[mine[~own]], 95)
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
        own = [mine[places] for places in classes(entries.endpoint[mine])]
        usual = [
            (*percentiles(entries.moved_ns[rows], (50, 95)), rank)
            for rank, rows in enumerate(own)
            if len(rows) >= FEWEST
        ]
        for rank, rows in enumerate(own):
            others = [(middle, most) for middle, most, other in usual if other != rank]
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
        own = [mine[places] for places in classes(entries.endpoint[mine])]
        worst = [tail_ns(entries.moved_ns[rows]) for rows in own]
        for rank, rows in enumerate(own):
            others = sorted(ns for other, ns in enumerate(worst) if other != rank and not np.isnan(ns))
            if others:
                out[rows] = others[(len(others) - 1) // 2]
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
                    high - low
                    for times in (entries.unmoved_ns, worked, longer)
                    for low, high in (percentiles(times[rows], (25, 75)),)
                )
                own = min(work, beside)
                # Of its first collective it is not known when it had left: it is no other rank there.
                whole = np.flatnonzero(waiting & (of_row == each) & (entries.endpoint == endpoint))
                out[whole] = (after < own) & (own > slowest[whole])
    return out


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


def begun(
    entries: Entries, left_ns: NDArray[np.int64], usual: Usual, of_row: NDArray[np.int64]
) -> list[Times]:
    """From when on each rank can have worked for its entry, NEVER where not known, and the least that this
    was ever seen to take in its group.

    When it had left its collective before; and when its last credit before its first message left, where no
    such message ever came within a usual reaction after that. A thread that had slept posts its credits and
    sends what lies there at one go; of a group in which that never happened credits come before the work.
    """
    out = []
    posted = np.where(left_ns != NEVER, entries.posted_ns, NEVER)
    for since in (left_ns, posted):
        least, _ = _least_work_ns(replace(entries, since_ns=since), entries.exact, of_row)
        out.append((since, least))
    known = out[1][1] > np.where(np.isnan(usual.most_ns), np.inf, usual.most_ns)
    out[1] = (np.where(known, posted, NEVER), out[1][1])
    return out
