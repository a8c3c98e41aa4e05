"""Entries in, lateness of every rank against the earliest of its collective out; helpers to compare ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.entries.acts import gpus_within
from dpuflow.entries.rows import FAR_BEYOND
from dpuflow.schema.rows import NEVER, NONE32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance

BOUNDS = ("exact", "at_most", "at_least", "unobservable")
EXACT, AT_MOST, AT_LEAST, UNOBSERVABLE = range(4)
TAIL: Final = float(np.log(200) / np.log(20))
"""What one in 200 exceeds over what one in 20 does, of an exponential tail, as waits for a processor have."""


class Relative(NamedTuple):
    """Lateness of each row of Entries: ``lateness_ns`` (NEVER where unobservable), its bound and error.

    ``error_ns`` is half of a 95 % interval, NEVER where nothing in the capture tells it. Bounds are the wider
    by what of it is hand-over.
    """

    lateness_ns: Ints
    bound: Ints  # index into BOUNDS
    error_ns: Ints
    enter_ns: Ints  # the entry that goes with it: of a lower bound that is not exact the earliest


def short_of_ranks(entries: Entries, instances: Sequence[Instance]) -> Bools:
    """Collectives of which some rank's entry cannot be told because nothing of it was captured."""
    hides = [i.hides_ranks and not gpus_within(i) for i in instances]
    short = np.array(
        [i.view.near is not None or hidden for i, hidden in zip(instances, hides, strict=True)], bool
    )
    exact = entries.exact
    for number in np.flatnonzero(short).tolist():
        rows = slice(*entries.offsets[number : number + 2].tolist())
        short[number] = hides[number] or not exact[rows].all()
    return short


def relate(entries: Entries, short: Bools | None = None, room_ns: Ints | int = 0) -> Relative:
    """Lateness against the earliest rank of each collective.

    Where a rank's entry is not exact it may have been the earliest of all, though never earlier
    than ``since_ns``; what follows for the others is a bound, not a value, unless both bounds are closer
    than the error, with the stalls that reactions show. A rank that cannot have entered before another one
    had is late by at least what lies between, exact or not. ``short`` marks collectives with ranks that no
    capture saw: any of these may have been the earliest, so what is known of the others are lower bounds. Of
    a collective that was seen only in part nothing follows. ``room_ns``: how long before its first act a rank
    may have entered at the worst (``margins.room``): lower bounds leave so much room.
    """
    count = np.diff(entries.offsets)
    if not len(count):
        none = np.zeros(0, np.int64)
        return Relative(none, none, none, none)
    exact = entries.exact
    seen = (entries.enter_ns != NEVER) & entries.told
    when = np.where(seen, entries.enter_ns, FAR)
    first = _least(entries, when)
    earliest = when[first]
    # Being early oneself makes nobody late but others.
    floor = np.minimum(_floor(entries, entries.margins.lag_ns), entries.enter_ns)
    known = exact[_least(entries, exact.astype(np.int64))]
    missing = np.zeros(len(exact), bool) if short is None else np.repeat(short, count)
    known &= ~missing
    floor = np.where(missing, NEVER, floor)
    narrow, slack, error = _errors_of_leads(entries, first)
    lead = entries.enter_ns - earliest
    most = np.where(floor != NEVER, entries.enter_ns - floor, NEVER)

    near = exact & (most != NEVER) & (error != NEVER) & (most - lead <= slack)
    off = _off_ns(entries, narrow)
    most_off = np.maximum(off, room_ns)
    least = exact & ((lead > most_off) | missing)
    # From the latest possible entry of the first of the others to its own earliest possible one, where a
    # message shows that: no call returns before its data is there.
    shown = np.where(entries.since_act != NONE32, entries.since_ns, NEVER)
    shown = np.where(exact, entries.enter_ns, shown)
    ahead = np.where(shown != NEVER, shown - _least_of_others(entries, when), NEVER)
    ahead = np.where(exact, lead, np.maximum(ahead, entries.margins.lead_ns))
    off = np.where(exact, most_off, off)
    held = ~exact & (ahead > off)
    least |= held
    seen |= held & (entries.enter_ns == NEVER) & ~missing  # but when it left what came before was
    bound = np.where(known | near, EXACT, np.where(least, AT_LEAST, AT_MOST))
    # Nor need the others have entered when their first messages left.
    lowest = np.minimum(_floor(entries, np.maximum(entries.margins.lag_ns, room_ns)), floor)
    widened = np.where(most != NEVER, entries.enter_ns - lowest + slack, NEVER)
    lateness = np.select([bound == EXACT, bound == AT_LEAST], [lead, np.maximum(ahead - off, 0)], widened)
    bound = np.where(seen & entries.whole & (lateness != NEVER), bound, UNOBSERVABLE)
    gone = bound == UNOBSERVABLE
    enter = np.where(held & (bound == AT_LEAST), shown, entries.enter_ns)
    return Relative(np.where(gone, NEVER, lateness), bound, np.where(gone, NEVER, error), enter)


def _floor(entries: Entries, room_ns: Ints) -> Ints:
    """When any other rank can have entered at the earliest: ``room_ns`` before acts that date one."""
    soonest = np.where(entries.exact, entries.enter_ns - room_ns, entries.since_ns)
    return _least_of_others(entries, soonest)


def _off_ns(entries: Entries, narrow: Ints) -> Ints:
    """How far acts may be from entries by the way and the hand-over (``narrow``): each errs by itself."""
    usual = np.minimum(entries.margins.usual_way_ns, entries.margins.way_ns)
    handed = np.hypot(entries.margins.way_ns - usual, np.maximum(narrow, 0))
    off = usual + np.hypot(handed, entries.margins.lag_ns).round().astype(np.int64)
    return np.asarray(off, np.int64)


def _errors_of_leads(entries: Entries, first: Ints) -> tuple[Ints, Ints, Ints]:
    """Of rows against the ``first`` of their collective: the scatter of hand-overs (NEVER if not known), that
    with stalls, at least 0, and how far the lead may be off in all."""
    narrow, clocks = _errors(entries, entries.margins.spread_ns, first)
    slack = np.maximum(_errors(entries, entries.margins.wide_ns, first)[0], narrow)
    apart = np.where(first == np.arange(len(first)), 0, entries.margins.lag_ns[first % len(first)])
    lag = np.hypot(entries.margins.lag_ns, apart)
    known, slack = slack != NEVER, np.maximum(slack, 0)
    error = np.hypot(slack, lag).round().astype(np.int64) + clocks
    # A rank without a capture of its own acted before that arrived, never after.
    error += entries.margins.way_ns + entries.margins.way_ns[first % len(first)]
    return narrow, slack, np.where(known, error, NEVER)


def among_dated(entries: Entries, relative: Relative) -> Relative:
    """``relative``, where who is dated for good is compared with the others that are.

    A rank that nobody dates may have been the earliest, and leaves but bounds of all others' lateness. Who
    works longer than its peers shows among those that are dated, where these are half of all at the least:
    later than the earliest of these it came. Not where threads hand messages over (``tail_ns``): their stalls
    look like lateness, no third shows it.
    """
    dated = entries.exact & entries.told & entries.whole & (entries.enter_ns != NEVER)
    number = np.bincount(entries.collective[dated], minlength=len(entries.offsets) - 1)
    enough = (number > 1) & (2 * number >= np.diff(entries.offsets))
    rows = dated & np.isin(relative.bound, (AT_MOST, AT_LEAST)) & enough[entries.collective]
    rows &= entries.margins.tail_ns <= 0
    if not rows.any():
        return relative
    first = np.minimum.reduceat(np.where(dated, entries.enter_ns, FAR), entries.offsets[:-1])
    lead = np.where(rows, entries.enter_ns - first[entries.collective], 0)
    told = np.where(relative.bound == AT_LEAST, relative.lateness_ns, 0)
    return relative._replace(
        lateness_ns=np.where(rows, np.maximum(lead, told), relative.lateness_ns),
        bound=np.where(rows, AT_LEAST, relative.bound),
    )


def cautious(entries: Entries, relative: Relative, short: Bools) -> Ints:
    """Lateness, with less claimed where not all ranks were seen (``short``, per collective).

    There a claim rests on two entries alone, and no third shows that a host acted late on its call. Of
    what is beyond the hand-over that one call in 200 takes, half is claimed, as if half of it were hand-over
    still; all that is beyond three times a slow reaction, too, for no host that is at it takes so long.
    """
    if not len(short):
        return relative.lateness_ns
    seen = (entries.enter_ns != NEVER) & entries.told
    first = _least(entries, np.where(seen, entries.enter_ns, FAR))
    usual = np.minimum(entries.margins.usual_way_ns, entries.margins.way_ns)

    way = entries.margins.way_ns - usual

    def off(spread: Floats, tail: float) -> Floats:
        off = _errors(entries, np.minimum(spread, 2.0**62).astype(np.int64), first)[0]
        return np.asarray(np.hypot(tail * way, np.maximum(off, 0)), np.float64)

    known = np.maximum(entries.margins.spread_ns, 0).astype(np.float64)
    slow = np.where(entries.margins.slow_ns != NEVER, FAR_BEYOND * entries.margins.slow_ns, np.inf)
    given = relative.lateness_ns + off(known, 1)  # what is left of the lead without either
    least = (given - off(TAIL * known, 1)) / 2
    sure = given - off(np.maximum(TAIL * known, slow), TAIL)
    claimed = (
        np.repeat(short, np.diff(entries.offsets)) & (relative.bound == AT_LEAST) & (relative.lateness_ns > 0)
    )
    told = np.where(claimed, relative.lateness_ns, 0)
    share = np.maximum(np.maximum(least, sure), 0) / np.maximum(told, 1)
    return np.where(claimed, _given_away(entries, told, share), relative.lateness_ns)


def claim(entries: Entries, relative: Relative, short: Bools) -> Relative:
    """``relative`` as reported: lower bounds leave room for the worst hand-over.

    A proxy thread that sleeps before it sends its rank's first message leaves the same packets as a rank that
    enters late. Causes and verdicts rest on what is likely, and weigh how often that happens (``excess``).
    """
    roomy = relate(entries, short, entries.margins.room_ns)
    claimed = (roomy.bound == AT_LEAST) & (relative.bound == AT_LEAST) & (relative.lateness_ns > 0)
    told = np.where(claimed, relative.lateness_ns, 0)
    share = np.where(claimed, roomy.lateness_ns, 0) / np.maximum(told, 1)
    lateness = np.where(claimed, _given_away(entries, told, share), roomy.lateness_ns)
    return roomy._replace(lateness_ns=lateness)


def _given_away(entries: Entries, told: Ints, share: Floats) -> Ints:
    """The ``share`` of what is ``told`` of each row. Whose claim is the largest of its collective keeps it
    so: all give away at least the share that it does."""
    starts, count = entries.offsets[:-1], np.diff(entries.offsets)
    most = np.repeat(np.maximum.reduceat(told, starts), count)
    of_most = np.repeat(np.maximum.reduceat(np.where((told == most) & (told > 0), share, 0), starts), count)
    return np.asarray((told * np.minimum(share, of_most)).round(), np.int64)


def _least(entries: Entries, values: Ints) -> Ints:
    """For each row that with the least of its collective's ``values``, of several the first."""
    starts, count, rows = entries.offsets[:-1], np.diff(entries.offsets), np.arange(len(values))
    least = np.repeat(np.minimum.reduceat(values, starts), count)
    return np.repeat(np.minimum.reduceat(np.where(values == least, rows, len(rows)), starts), count)


def _least_of_others(entries: Entries, values: Ints) -> Ints:
    """For each row the least value of the other rows of its collective; far in the future without others."""
    first = _least(entries, values)
    mine = first == np.arange(len(values))
    others = np.where(mine, FAR, values)
    return np.where(mine, others[_least(entries, others)], values[first])


def _errors(entries: Entries, spread_ns: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Errors of each entry's distance from its collective's earliest (row ``first``): hand-overs, clocks.

    ``spread_ns``: how far hand-overs differ, NEVER where not known. Clocks err steadily, not at random: their
    errors add to the rest.
    """
    first = np.minimum(first, len(entries.endpoint) - 1)
    own = np.maximum(spread_ns, entries.margins.held_ns).astype(np.float64)
    apart = np.where(first == np.arange(len(first)), 0, entries.margins.held_ns[first]).astype(np.float64)
    # Stamps may be centuries apart: what no longer fits is as good as the largest number.
    both = np.minimum(np.hypot(own, apart), 2.0**62).round().astype(np.int64)
    handed = np.where(spread_ns == NEVER, NEVER, both)
    clocks = np.where(
        entries.margins.clock != entries.margins.clock[first],
        entries.margins.clock_ns + entries.margins.clock_ns[first],
        0,
    )
    return handed, clocks


def previous_row(entries: Entries) -> Ints:
    """For each row that of the same rank's collective before, -1 for its first.

    In the order in which the rank entered them: where groups take turns, a peer may have begun a
    collective before the rank had finished one of another group. What a rank only receives may lie there long
    before it calls: not before it entered its group's collectives that came before, nor before it had what it
    received of these.
    """
    seen = entries.enter_ns != NEVER
    when = np.where(seen, entries.enter_ns, entries.leave_ns)
    if not seen.all():
        when = np.maximum(when, np.where(seen, NEVER, _latest_before(entries, when)))
    order = np.lexsort((entries.collective, when, entries.endpoint))
    before = np.full(len(order), -1, np.int64)
    same = entries.endpoint[order][1:] == entries.endpoint[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _latest_before(entries: Entries, when: Ints) -> Ints:
    """For each row the latest of its own time and those of its rank in its group's collectives before."""
    # Groups as sums of scrambled endpoint numbers (the constant of Fibonacci hashing).
    mixed = (entries.endpoint.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    group = np.repeat(np.add.reduceat(mixed, entries.offsets[:-1]), np.diff(entries.offsets))
    order = np.lexsort((entries.collective, group, entries.endpoint))
    same = (entries.endpoint[order][1:] == entries.endpoint[order][:-1]) & (
        group[order][1:] == group[order][:-1]
    )
    # What a rank only received it has taken once it has left what came before: calls come in order.
    shown = np.where(entries.enter_ns != NEVER, entries.enter_ns, entries.leave_ns)
    pieces = np.split(shown[order], np.flatnonzero(~same) + 1)
    out = np.empty(len(order), np.int64)
    out[order] = np.concatenate([np.maximum.accumulate(each) for each in pieces])
    return out


def places_of(collective: Ints, endpoint: NDArray[np.integer], entries: Entries) -> Ints:
    """The row of Entries of an endpoint in a collective, -1 without one."""
    width = int(max(entries.endpoint.max(initial=0), endpoint.max(initial=0))) + 1
    key, asked = entries.collective * width + entries.endpoint, collective * width + endpoint
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], asked)
    found = order[np.minimum(at, len(order) - 1)]
    return np.asarray(np.where(key[found] == asked, found, -1), np.int64)


def latest_two(entries: Entries, when_ns: Ints) -> tuple[Ints, Ints]:
    """By collective the row of its latest ``when_ns``, and that of the second latest, -1 without."""
    order, ends = np.lexsort((when_ns, entries.collective)), entries.offsets[1:] - 1
    return order[ends], np.where(np.diff(entries.offsets) > 1, order[ends - 1], -1)


def against_others(entries: Entries, values: Ints, mine: Bools) -> Floats:
    """Each row's value less the median of the other ranks' values in its collective; 0 outside ``mine``."""
    rows = np.flatnonzero(mine)
    if not len(rows):
        return np.zeros(len(mine))
    collective = entries.collective[rows]
    own = values[rows] - values[rows].min()  # a double holds no epoch to the nanosecond
    order = np.lexsort((own, collective))
    starts = np.flatnonzero(np.r_[True, collective[order][1:] != collective[order][:-1]])
    count = np.diff(np.r_[starts, len(order)])
    rank = np.arange(len(order)) - np.repeat(starts, count)
    low = np.repeat(starts, count)
    others = np.repeat(count, count) - 1
    ordered = own[order].astype(np.float64)

    def pick(place: Ints) -> Floats:
        # The place-th of the others: one further on where one's own place lies before it.
        place = np.clip(place, 0, np.maximum(others - 1, 0))
        return np.asarray(ordered[np.minimum(low + place + (place >= rank), len(order) - 1)], np.float64)

    median = (pick((others - 1) // 2) + pick(others // 2)) / 2
    out = np.zeros(len(mine), np.float64)
    out[rows[order]] = np.where(others > 0, ordered - median, 0.0)
    return out
