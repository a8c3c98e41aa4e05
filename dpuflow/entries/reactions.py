"""How hosts react, entries in; which first acts had not waited for their input, which may have for a credit.

A rank that waits acts within its host's usual reaction; how long that is, the capture shows: of the group's
sends that had waited, of what others take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, percentile, percentiles
from dpuflow.entries.handover import middle_ranks
from dpuflow.entries.overdue import overdue
from dpuflow.entries.relative import medians
from dpuflow.entries.rules import FAR_BEYOND, FEWEST, Rule
from dpuflow.entries.tails import tail_ns
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.entries.blockers import Scene
    from dpuflow.entries.handover import Usual
    from dpuflow.entries.rows import Entries, Times


def released(
    entries: Entries,
    usual: Usual,
    of_row: NDArray[np.int64],
    tail: NDArray[np.float64],
    by_gpus: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Rows whose first act came far later than hosts react to what had reached their rank.

    Either by itself, or as a rule of its rank (``overdue``). GPUs (``by_gpus``) wait for slots and for the
    wire, as well: each of their acts counts alone, against the worst reaction (``tail``) where hosts stall.
    """
    waiting = np.isin(entries.rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.signs.unmoved_ns != NEVER)
    idle = _idle_ns(entries)
    nccl = np.isin(of_row, of_row[entries.reactions.between[0]])
    with np.errstate(invalid="ignore"):  # nothing is usual where nothing was measured
        instead = np.where(
            nccl,
            middle_ranks(entries, of_row, entries.reactions.between)[2],
            _slowest_of_others(entries, idle, waiting & ~nccl, of_row),
        )
        slowest = np.where(np.isnan(usual.slowest_ns), instead, usual.slowest_ns)
        if len(entries.reactions.waited[0]) < FEWEST:  # one or two tell nothing
            granted = entries.reactions.granted_data_ns
            answers = (entries.rule == Rule.ANSWER) & (len(granted) >= FEWEST)
            # Hosts that are busy now and then show it there: no answer that late is an entry by itself.
            slowest = np.where(answers, np.fmax(slowest, granted.max(initial=0) / FAR_BEYOND), slowest)
            told = nccl | answers
            slowest = np.where(told, slowest, np.fmax(slowest, instead))
            waiting &= told | ~_keeps_to_input(entries, waiting, of_row, slowest)
        limit = FAR_BEYOND * slowest
        # Of hosts that stall now and then so late an act is no evidence yet.
        worst = np.fmax(tail, _worst_of_others(entries, waiting & nccl, of_row))
        limit = np.where(nccl, np.fmax(limit, worst), limit)
        late = waiting & (idle > limit)
    habit = ~late & ~by_gpus & entries.whole & (entries.signs.unmoved_ns != NEVER)
    answers, sends = (habit & (entries.rule == rule) for rule in (Rule.ANSWER, Rule.AFTER_INPUT))
    late |= overdue(entries, answers, sends, of_row)
    return np.asarray(late, np.bool_)


def own_answers(entries: Entries, usual: Usual) -> NDArray[np.bool_]:
    """Rows of ranks that answered what lay there and then sent their own, which needed nothing, at once."""
    own = (entries.rule == Rule.ANSWER) & (entries.signs.free_ns != NEVER)
    with np.errstate(invalid="ignore"):
        return np.asarray(own & (entries.signs.free_ns - entries.enter_ns <= usual.most_ns), np.bool_)


def _idle_ns(entries: Entries) -> NDArray[np.int64]:
    """From the last thing that reached a rank to its first act: its input, or its credit, which may come long
    after that."""
    return np.where(
        entries.credit_ns != NEVER,
        np.minimum(entries.signs.unmoved_ns, entries.credit_ns),
        entries.signs.unmoved_ns,
    )


class Credited(NamedTuple):
    """By row of Entries."""

    rows: NDArray[np.bool_]  # the first message may have waited for its credit
    since_ns: NDArray[np.int64]  # then the rank entered no earlier than this; NEVER where nothing says so


def credited(scene: Scene, way_ns: NDArray[np.int64]) -> Credited:
    """First messages that left within the usual reaction to their credit, or as soon as one could.

    Only if the rank can have been there before: not if from leaving its last collective to the credit there
    was less time than any rank's work takes. ``way_ns``: a credit and what it allowed, as one end saw them,
    are apart by the way there and back as well.
    """
    entries, usual = scene.entries, scene.usual
    gated = np.isin(entries.rule, (Rule.FREE_STEP, Rule.NOTHING_BEFORE)) & (entries.credit_ns != NEVER)
    with np.errstate(invalid="ignore"):
        # A packet may be stamped when it has left; on a slow link that takes longer than the host needs.
        prompt = gated & (entries.credit_ns <= scene.prompt_ns + scene.packet_ns + way_ns)
    known, worked = entries.since_ns != NEVER, _since_ns(entries)
    room = worked - entries.credit_ns  # from leaving its last collective to the credit
    # Where no reaction was ever seen (messages that stream), that is all there is to go by.
    unmeasured = gated & np.isnan(usual.most_ns)
    # Had it waited for its credit, it would have sent soon after that; so it lay there while the rank worked.
    unheld = known & (FAR_BEYOND * room <= worked)
    least, alone = least_work_ns(entries, gated & ~prompt & (~unmeasured | unheld), scene.of_row)
    prompt |= unmeasured & known & ((least > 0) | alone)
    prompt &= ~known | (room >= least)
    return Credited(prompt, np.where(prompt & known, entries.since_ns + least, NEVER))


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
    if len(entries.reactions.granted_data_ns) >= FEWEST:
        out[:] = least[:] = percentile(entries.reactions.granted_data_ns, 95)
    elif len(entries.reactions.next_send_ns) >= FEWEST:
        # That wakes nobody up, so even far more than that is usual.
        out[:] = FAR_BEYOND * percentile(entries.reactions.next_send_ns, 95)
    for each in np.unique(of_row[waiting]):
        mine = np.flatnonzero(waiting & (of_row == each))
        for endpoint in np.unique(entries.endpoint[mine]):
            own = entries.endpoint[mine] == endpoint
            if (~own).sum() >= FEWEST:
                out[mine[own]] = percentile(idle_ns[mine[~own]], 95)
    return np.asarray(np.minimum(out, least), np.float64)


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
        worst = [tail_ns(entries.signs.moved_ns[rows]) for rows in own]
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
                    for times in (entries.signs.unmoved_ns, worked, longer)
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
    posted = np.where(left_ns != NEVER, entries.signs.posted_ns, NEVER)
    for since in (left_ns, posted):
        least, _ = least_work_ns(replace(entries, since_ns=since), entries.exact, of_row)
        out.append((since, least))
    known = out[1][1] > np.where(np.isnan(usual.most_ns), np.inf, usual.most_ns)
    out[1] = (np.where(known, posted, NEVER), out[1][1])
    return out
