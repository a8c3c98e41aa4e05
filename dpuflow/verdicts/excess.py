"""Causes of lateness in, what each rank answers for itself out: it worked longer than its peers.

Less what the network may have kept it for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries import AT_LEAST, AT_MOST, EXACT, Rule
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.causes import AT_PLACE, CAUSES, COMPUTE, NONE, UNKNOWN, Causes
from dpuflow.verdicts.costs import sigmas_of
from dpuflow.verdicts.persistence import SIGMAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries, Relative
    from dpuflow.matching import Instance
    from dpuflow.verdicts.stages import Compared


class Own(NamedTuple):
    """Per row of Entries what the rank answers for itself."""

    amount_ns: NDArray[np.int64]  # late of its own doing by this much; 0 within the noise
    excess_ns: NDArray[np.int64]  # how much longer it worked than its peers; NEVER where not known
    later_ns: NDArray[np.int64]  # the same, no more than it was late; NEVER where not known
    sigma_ns: NDArray[np.float64]  # one standard deviation of its group's excess
    unproved: NDArray[np.bool_]  # nobody knows how late it was: none of it counts
    most_ns: NDArray[np.int64]  # of those: it worked no longer than its peers by more; NEVER where not known
    usual: NDArray[np.bool_]  # compared with what peers usually work; how late it was is bounded only
    at_place: NDArray[np.bool_]  # rows compared with what peers work at the same place of a step
    unread_ns: NDArray[np.int64]  # late by so much more, if not for messages that nobody read
    staged: NDArray[np.bool_]  # acts of pipeline stages, compared with like ones (``stages``)
    design_ns: NDArray[np.float64]  # ... that may take so much longer by design


def with_stages(own: Own, causes: Causes, compared: Compared) -> tuple[Own, Causes]:
    """The same with what stages of pipelines took longer for their acts than their peers (``stages``)."""
    rows = compared.rows
    if not len(rows):
        return own, causes
    new = {name: getattr(own, name).copy() for name in ("amount_ns", "excess_ns", "later_ns", "sigma_ns")}
    staged, design, cause = own.staged.copy(), own.design_ns.copy(), causes.cause.copy()
    new["amount_ns"][rows], new["sigma_ns"][rows] = compared.amount_ns, compared.sigma_ns
    new["excess_ns"][rows] = new["later_ns"][rows] = compared.excess_ns
    staged[rows], design[rows] = True, compared.design_ns
    blamed = np.where(cause[rows] == COMPUTE, NONE, cause[rows])
    cause[rows] = np.where(compared.amount_ns > 0, COMPUTE, blamed)
    return own._replace(**new, staged=staged, design_ns=design), causes._replace(cause=cause)


def tied_rows(instances: Sequence[Instance], entries: Entries) -> NDArray[np.bool_]:
    """Rows of collectives that tie ranks together: not of point-to-point transfers."""
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    return tied[entries.collective] if len(instances) else np.zeros(0, bool)


def own_lateness(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    causes: Causes,
    group: NDArray[np.int64],
    excused_ns: NDArray[np.int64] | None = None,
) -> Own:
    """How much of each rank's lateness is its own: it worked longer than its peers, beyond the noise.

    Less what the network may have kept it for (``excused_ns``, see ``network_delay``). The noise is that of
    the work itself. Entries scatter by what peers of other groups handed on, too, and would hide a rank that
    is late once a step.
    """
    tied = tied_rows(instances, entries) & (causes.excess_ns != NEVER)
    known = tied & np.isin(relative.bound, (EXACT, AT_LEAST))
    # All its peers may have come late, too: but by their usual work it kept them.
    usual = tied & (causes.usual > 0) & entries.exact & (relative.bound == AT_MOST)
    known |= usual
    excess = np.where(known, causes.excess_ns, NEVER)
    sigma, floor = sigmas_of(entries, excess.astype(np.float64), known, group[entries.collective])
    lateness = np.where(usual, np.minimum(excess, relative.lateness_ns), relative.lateness_ns)
    amount, beyond = np.minimum(excess, lateness), np.maximum(SIGMAS * sigma, floor)
    told = np.array([CAUSES[c] in ("compute", "host", "none") for c in range(len(CAUSES))])
    mine = known & (lateness > beyond) & (told[causes.cause] | (causes.partly & (causes.cause == UNKNOWN)))
    mine &= (2 * excess >= lateness) | (amount > beyond)
    if excused_ns is not None:
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
    told = unproved & (causes.usual > 0) & (relative.bound == AT_MOST)
    most = np.where(told, np.maximum(causes.excess_ns, 0), NEVER)
    amount_ns = np.where(mine, amount, 0)
    at_place, none = causes.usual == AT_PLACE, np.zeros(len(tied), bool)
    design = np.zeros(len(tied))
    return Own(amount_ns, excess, amount, sigma, unproved, most, usual, at_place, unread, none, design)
