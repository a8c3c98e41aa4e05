"""How late each rank was by its own doing, and what that cost: the evidence that ranks are judged by.

In: lateness of every rank in every collective, and its causes. What counts as late is measured against the
group's own noise, never against a fixed time; a rank answers for what it worked longer than its peers, less
what the network may have kept it for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, closest_third, distinct, median_of, percentiles
from dpuflow.entries import AT_LEAST, AT_MOST, EXACT, Rule, against_others, latest_two
from dpuflow.entries.rows import INTERVAL_IN_SIGMAS, QUARTER_IN_SIGMAS, SIXTH_IN_SIGMAS
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.causes import BY_PEERS, CAUSES, COMPUTE, NETWORK, NONE, UNKNOWN
from dpuflow.verdicts.chance import SIGMAS, scatter_of_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries import Entries, Relative, Tail
    from dpuflow.matching import Instance
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.stages import Compared


FEWEST_IN_HEAPS = 16
"""Values that it takes to see two clusters: enough for quartiles of each."""
OFTEN: Final = 0.25
"""Share of its operations in which a rank works longer, if it does so at one place of its steps."""


class Charges(NamedTuple):
    """Per row of Entries: whether it is late, and the wait charged to it (rank-nanoseconds)."""

    late: Bools
    last: Bools
    wait_ns: Ints
    cost_ns: Floats  # what that is of each peer's time: the share of a job that a verdict weighs
    noise_ns: Ints  # of the row's group: what it takes to be called late
    error_ns: Ints  # half-width of a 95 % interval of the row's lateness
    offset_ns: Floats  # entry less the median of the other ranks' entries


def charge(entries: Entries, relative: Relative, group: Ints) -> Charges:
    """Mark late and last ranks and charge each collective's wait to its last rank.

    ``group`` numbers each collective's group. The last rank is charged, for every other rank whose entry
    was seen, the time between the second latest entry (or that rank's own, whichever is later) and its
    own: a rank that nobody saw may have entered last of all, and then waited for no one.
    """
    total = len(entries.endpoint)
    late, last = np.zeros(total, bool), np.zeros(total, bool)
    wait = np.zeros(total, np.int64)
    offset = against_others(entries, entries.enter_ns, relative.lateness_ns != NEVER)
    noise, error = _noise(entries, relative, offset, group[entries.collective])
    usable = np.isin(relative.bound, (EXACT, AT_LEAST))
    late[usable] = relative.lateness_ns[usable] > noise[usable]
    count = np.diff(entries.offsets)
    # Who waited for an input may have come last only by what its first message took: the last of the others
    # is charged, for these.
    waits = (entries.rule == Rule.AFTER_INPUT) & ~usable & (entries.granted_ns != NEVER)
    when = np.where(waits, NEVER, entries.enter_ns)
    # A rank of which only a lower bound is known is last, or nothing is known of what it waited.
    latest = np.maximum.reduceat(when, entries.offsets[:-1])[entries.collective] if total else when
    when[(entries.rule == Rule.UNSEEN) & (when < latest)] = NEVER
    seen = np.bincount(entries.collective[when != NEVER], minlength=len(count))
    whole = count >= 2
    top, second = (rows[whole] for rows in latest_two(entries, when))
    lead = when[top] - np.where(when[second] == NEVER, when[top], when[second])
    good = (when[second] != NEVER) & (lead > 0) & usable[top]
    last[top[good]] = True
    wait[top[good]] = lead[good] * (seen[whole][good] - 1)
    cost = wait / np.maximum(count - 1, 1)[entries.collective]
    return Charges(late, last, wait, cost, noise, error, offset)


def _noise(entries: Entries, relative: Relative, offset: Floats, of_row: Ints) -> tuple[Ints, Ints]:
    """Per row the lateness that its group's own noise explains, and its error, ns.

    Noise is the scatter of entries (``sigmas_of``), and at least what a rank's host usually needs to hand
    a message on.
    """
    sigma, floor = sigmas_of(entries, offset, relative.lateness_ns != NEVER, of_row)
    noise = np.maximum(SIGMAS * sigma, floor).round().astype(np.int64)
    return noise, np.maximum(INTERVAL_IN_SIGMAS * sigma, floor).round().astype(np.int64)


def sigmas_of(entries: Entries, values: Floats, usable: Bools, of_row: Ints) -> tuple[Floats, Floats]:
    """Per row one standard deviation of its group's noise, and its hosts' usual reaction, ns.

    Noise is how much each rank's ``values`` scatter about their own median, on the quieter side (a
    fault shows on one side only), taken as the median over ranks.
    """
    sigma, floor = np.zeros(len(values)), np.zeros(len(values))
    for each in distinct(of_row):
        whole = of_row == each
        mine = whole & usable
        rows = np.flatnonzero(mine)
        scatter = [scatter_of(values[rows[places]]) for places in classes(entries.endpoint[rows])]
        reactions = entries.reaction_ns[mine]
        reactions = reactions[reactions != NEVER]
        floor[whole] = float(median_of(reactions)) if len(reactions) else 0.0
        sigma[whole] = float(median_of(scatter)) if scatter else 0.0
    return sigma, floor


def reactions_apart(entries: Entries, usable: Bools, of_row: Ints) -> Floats:
    """Per row how far quartiles of its group's reactions in mid-operation lie apart, or how long these
    usually take, if that is less, ns; 0 without any."""
    apart = np.zeros(len(of_row))
    for each in distinct(of_row):
        reactions = entries.reaction_ns[(of_row == each) & usable & (entries.reaction_ns != NEVER)]
        if len(reactions):
            low, middle, high = percentiles(reactions, (25, 50, 75))
            apart[of_row == each] = min(high - low, middle)
    return apart


def scatter_of(values: Floats) -> float:
    """One standard deviation of a rank's ``values`` about their own median.

    A fault that sets in halfway, or goes round among few ranks, is no noise, yet parts the values into two
    heaps. They are two where the closest third of all values lies twice as close as quartiles do; then the
    wider heap counts. On a busy host heaps are too wide for that: where neighbours in time lie twice as close
    as quartiles do, an onset parts them, and the scatter of neighbours counts.
    """

    def of(part: Floats) -> float:
        low, middle, high = percentiles(part, (25, 50, 75))
        return min(middle - low, high - middle) / QUARTER_IN_SIGMAS

    whole, ordered = of(values), np.sort(values)
    if len(values) < FEWEST_IN_HEAPS:
        return whole
    third = -(-len(values) // 3)
    if closest_third(ordered) / SIXTH_IN_SIGMAS >= whole:  # its half width, times two
        beside = scatter_of_steps(values)
        return beside if 2 * beside < whole else whole
    widest = int(np.argmax(np.diff(ordered[third // 2 : -(third // 2)]))) + third // 2 + 1
    return min(whole, max(of(ordered[:widest]), of(ordered[widest:])))


class Own(NamedTuple):
    """Per row of Entries what the rank answers for itself."""

    amount_ns: Ints  # late by its own doing by this much; 0 within the noise
    excess_ns: Ints  # how much longer it worked than its peers; NEVER where not known
    later_ns: Ints  # the same, no more than it was late; NEVER where not known
    sigma_ns: Floats  # one standard deviation of its group's excess
    apart_ns: Floats  # by how much its group's hosts usually differ in when they react
    unproved: Bools  # nobody knows how late it was: none of it counts
    most_ns: Ints  # of those: it worked no longer than its peers by more; NEVER where not known
    usual: Bools  # compared with what peers usually work; how late it was is bounded only
    by_peers: Bools  # ... with that of several
    open_ns: Ints  # late by so much more, if not for the network, or messages that nobody read
    staged: Bools  # acts of pipeline stages, compared with like ones (``stages``)
    design_ns: Floats  # ... that may take so much longer by design
    beside: Ints  # ... number of what is compared beside replicas of the stage; -1: nothing


def with_stages(own: Own, causes: Causes, compared: Compared) -> tuple[Own, Causes]:
    """The same with what stages of pipelines took longer for their acts than their peers (``stages``)."""
    rows = compared.rows
    if not len(rows):
        return own, causes
    new = {name: getattr(own, name).copy() for name in ("amount_ns", "excess_ns", "later_ns", "sigma_ns")}
    staged, design, cause = own.staged.copy(), own.design_ns.copy(), causes.cause.copy()
    beside = own.beside.copy()
    beside[rows] = compared.like
    new["amount_ns"][rows], new["sigma_ns"][rows] = compared.amount_ns, compared.sigma_ns
    new["excess_ns"][rows] = new["later_ns"][rows] = compared.excess_ns
    staged[rows], design[rows] = True, compared.design_ns
    blamed = np.where(cause[rows] == COMPUTE, NONE, cause[rows])
    cause[rows] = np.where(compared.amount_ns > 0, COMPUTE, blamed)
    return own._replace(**new, staged=staged, design_ns=design, beside=beside), causes._replace(cause=cause)


def tied_rows(instances: Sequence[Instance], entries: Entries) -> Bools:
    """Rows of collectives that tie ranks together: not of point-to-point transfers."""
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    return tied[entries.collective] if len(instances) else np.zeros(0, bool)


def _often(entries: Entries, known: Bools, kind: Ints) -> Bools:
    """Rows of kinds of operations of which each rank has enough to tell how its work before them scatters."""
    kinds, ends = (int(of.max(initial=0)) + 1 for of in (kind, entries.endpoint))
    pair = (kind * ends + entries.endpoint)[known]
    count = np.bincount(pair, minlength=kinds * ends).reshape(kinds, ends)
    least = np.where(count > 0, count, len(kind)).min(axis=1) * (count > 0).any(axis=1)
    return np.asarray(least[kind] >= FEWEST_IN_HEAPS, np.bool_)


def _as_a_rule(entries: Entries, mine: Bools, known: Bools) -> Bools:
    """Those of ``mine`` whose rank has them so often that no stalls of its host explain them.

    That the network kept a rank for longer still does not clear it then: it worked longer, besides.
    """
    ends = entries.endpoint.astype(np.int64)
    count, every = (np.bincount(ends[rows], minlength=int(ends.max(initial=0)) + 1) for rows in (mine, known))
    return mine & (count >= OFTEN * every)[ends]


def own_lateness(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    causes: Causes,
    group: Ints,
    kind: Ints,
    excused_ns: Ints,
) -> Own:
    """How much of each rank's lateness is its own: it worked longer than its peers, beyond the noise.

    Less what the network may have kept it for (``excused_ns``, see ``links``). The noise is that of
    the work itself. Entries scatter by what peers of other groups handed on, too, and would hide a rank that
    is late once a step.
    """
    tied = tied_rows(instances, entries) & (causes.excess_ns != NEVER)
    known = tied & np.isin(relative.bound, (EXACT, AT_LEAST))
    # All its peers may have come late, too: but by their usual work it kept them.
    usual = tied & (causes.usual > 0) & entries.exact & (relative.bound == AT_MOST)
    known |= usual
    excess = np.where(known, causes.excess_ns, NEVER)
    longer, of_kind = excess.astype(np.float64), kind[entries.collective]
    sigma, floor = sigmas_of(entries, longer, known, group[entries.collective])
    often = _often(entries, known, of_kind)
    if often.any():  # work before one operation scatters otherwise than before another
        sigma = np.where(often, sigmas_of(entries, longer, known & often, of_kind * often)[0], sigma)
    lateness = np.where(usual, np.minimum(excess, relative.lateness_ns), relative.lateness_ns)
    amount, beyond = np.minimum(excess, lateness), np.maximum(SIGMAS * sigma, floor)
    told = np.array([CAUSES[c] in ("compute", "host", "none") for c in range(len(CAUSES))])
    mine = known & (lateness > beyond) & (told[causes.cause] | (causes.partly & (causes.cause == UNKNOWN)))
    mine &= (2 * excess >= lateness) | (amount > beyond)
    # What the network may have kept it for does not accuse a rank, and does not clear it either.
    excused = np.where(mine & known, np.minimum(excused_ns, amount), 0)
    amount = np.where(known, np.maximum(amount - excused_ns, 0), amount)
    mine &= (excused_ns == 0) | (amount > beyond)
    # Who waited for an input or an offer was there before, and who sent first may not have been late at all:
    # were these not counted, single incidents would make a habit.
    waited = np.isin(entries.rule, (Rule.AFTER_INPUT, Rule.ANSWER))
    unproved = tied & (waited | entries.exact) & ~known
    excess = np.where(unproved, np.where(waited, 0, causes.excess_ns), excess)
    amount = np.where(unproved, 0, amount)
    # It may have worked longer by far than its peers seem to show.
    unknown = causes.least & (excess != NEVER) & ~mine
    excess, amount = np.where(unknown, NEVER, excess), np.where(unknown, NEVER, amount)
    unproved &= ~unknown
    unread = np.where(known & (causes.unread_ns > beyond), causes.unread_ns, 0)
    unread = np.maximum(unread, np.where(excused > beyond, excused, 0))
    kept = known & (causes.cause == NETWORK) & (np.minimum(excess, lateness) > beyond)
    unread = np.maximum(unread, np.where(_as_a_rule(entries, kept, known), np.minimum(excess, lateness), 0))
    told = unproved & (causes.usual > 0) & (relative.bound == AT_MOST)
    most = np.where(told, np.maximum(causes.excess_ns, 0), NEVER)
    amount_ns = np.where(mine, amount, 0)
    by_peers, none = causes.usual == BY_PEERS, np.zeros(len(tied), bool)
    design, apart = np.zeros(len(tied)), reactions_apart(entries, known, group[entries.collective])
    beside = np.full(len(tied), -1)
    return Own(
        amount_ns, excess, amount, sigma, apart, unproved, most, usual, by_peers, unread, none, design, beside
    )


class Evidence(NamedTuple):
    """Collectives, when their ranks came, and what these answer for; by row of Entries where nothing else is
    said."""

    instances: Sequence[Instance]
    entries: Entries
    relative: Relative
    charges: Charges
    causes: Causes
    own: Own
    group: Ints  # of each collective
    step: Ints  # -1: in none (``find_steps``)
    worked_ns: int  # how long the job took without stalls (``find_work``)
    stalls: Tail | None = None  # how long hand-overs stall
    by_gpus: bool = (
        False  # all is sent by GPUs: where no hand-over is seen, incidents that are critical count
    )
    claimed: Relative | None = None  # lateness as entries tell it to readers; None: as in ``relative``
