"""How far each entry may be off: hand-overs, clocks, the way to where the act was stamped.

In: entries that are dated, exchanges, the law of reactions. Out: ``Margins``
(docs/theory/entries.md, "Lateness").

Between a call and its first packet lies the library's hand-over. It is common to all ranks and cancels in
lateness; its scatter does not. Two things in a capture show that scatter. Ranks that had sent all they could
and waited for an input send within their host's reaction once it is there. And entries of ranks that nothing
made late scatter by it, and by how unevenly they compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import (
    Picked,
    classes,
    closest_third,
    distinct,
    median_of,
    order_within,
    percentile,
    percentiles,
)
from dpuflow.entries.blockers import least_work_ns
from dpuflow.entries.inputs import lines_of
from dpuflow.entries.reactions import is_gloo, tail_ns
from dpuflow.entries.relative import against_others
from dpuflow.entries.rows import (
    BEYOND,
    BY_GPUS,
    FEWEST,
    INTERVAL_IN_SIGMAS,
    QUARTER_IN_SIGMAS,
    QUICK,
    SIXTH_IN_SIGMAS,
    Margins,
    Rule,
)
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, NONE32, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries.blockers import Scene
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows


MEDIAN_COSTS = np.pi / 2
"""Variance of the median of n normal values, times n, over theirs."""
_BOTH = Seen.AT_SENDER | Seen.AT_RECEIVER


def margins_of(scene: Scene, dated: Entries, joined: Joined, lead_ns: Ints) -> Margins:
    """How far entries may be off, as ``dated``; ``scene`` has them as first acts show them.

    ``lead_ns``: so much later than a peer each is by the calls before it, NEVER where these tell nothing.
    """
    law, of_row, exchanges = scene.law, scene.of_row, scene.exchanges
    slow = np.nan_to_num(law.slow_ns, nan=0.0).astype(np.int64)
    # A rank cannot have been held up before it was there: not before it left its last collective.
    there = np.where(dated.since_ns != NEVER, dated.enter_ns - dated.since_ns, FAR)
    held = np.minimum(np.minimum(receiving_ns(exchanges, dated, law), there), slow)
    # Who finds its input there takes it up as one does that waits, so its message follows by a reaction.
    found = (scene.entries.rule == Rule.AFTER_INPUT) & (dated.rule == Rule.LONG_AFTER)
    lag = np.where(found, np.minimum(np.where(law.by_sends, slow, 0), there), dated.lag_ns)
    threads, proxies = (
        by_threads(dated, exchanges, scene.instances),
        by_proxies(dated, exchanges, scene.instances),
    )
    asleep = of_wires(dated, exchanges, scene.instances, lambda wire: wire == Wire.NCCL_DATA)
    spread = spreads(dated, held, threads, asleep, law, of_row)
    apart = np.nan_to_num(law.apart_ns, nan=0.0).round().astype(np.int64)
    clock, clock_ns = clocks(dated, joined)
    # Open MPI's caller sends itself: nobody has to wake up for it.
    room_ns = np.where(proxies | threads, room(dated, scene.entries.since_ns, law, of_row), 0)
    room_ns = np.maximum(room_ns, late_stamps(joined)[clock] if len(joined.clocks) else 0)
    # One captured rank is compared with what came to it: bounds hold without, and with it most tell nothing.
    alone = [i.view.near is not None and len(i.view.near) == 1 for i in scene.instances]
    return Margins(
        clock=clock,
        clock_ns=clock_ns,
        lag_ns=lag,
        held_ns=held,
        way_ns=scene.way_ns,
        usual_way_ns=scene.usual_way_ns,
        room_ns=np.where(np.array(alone, bool)[dated.collective] & proxies, 0, room_ns),
        tail_ns=np.where(proxies, np.nan_to_num(law.worst_ns, nan=0.0).round().astype(np.int64), 0),
        spread_ns=spread,
        wide_ns=np.where(proxies, np.maximum(spread, apart), spread),
        slow_ns=np.where(np.isnan(law.slow_ns), NEVER, slow),
        lead_ns=lead_ns,
    )


def of_wires(
    entries: Entries, exchanges: Rows | Picked, instances: Sequence[Instance], fits: Callable[[int], bool]
) -> Bools:
    """Rows whose collective's messages are of a wire that ``fits``."""
    wires = exchanges["wire"]
    fit = [len(i.rows) > 0 and fits(int(wires[i.rows[0]])) for i in instances]
    return np.asarray(np.array(fit, bool)[entries.collective], bool)


def by_proxies(entries: Entries, exchanges: Rows | Picked, instances: Sequence[Instance]) -> Bools:
    """Rows whose first and later messages are sent by one thread, as NCCL's proxy does.

    In Open MPI the caller itself sends, an entry wakes nobody up, and reactions say nothing of it; Gloo wakes
    other threads for a call than for a message.
    """
    return of_wires(entries, exchanges, instances, lambda wire: wire in BY_GPUS)


def by_threads(entries: Entries, exchanges: Rows | Picked, instances: Sequence[Instance]) -> Bools:
    """Rows whose calls wake a thread of the library, as Gloo's do and an unknown library's may."""
    return of_wires(entries, exchanges, instances, lambda wire: is_gloo(wire) or wire == Wire.TCP_BURST)


def spreads(entries: Entries, held_ns: Ints, threads: Bools, asleep: Bools, law: Law, of_row: Ints) -> Ints:
    """Per row how far two hand-overs of its group differ, in 95 of 100 cases, ns; NEVER where not known.

    Entries scatter by the hand-over, but also by what ranks really differ by; so do the times from leaving
    one collective to entering the next, less what a peer handed on. The smaller of the two counts.
    Reactions bound it from above. Where the caller itself sends, as in Open MPI, an entry wakes nobody up,
    and the median reaction, which does, is more than its scatter. Where a call wakes a ``thread`` of the
    library and that wakes another, two hand-overs scatter as reactions do. NCCL's proxy thread is awake in
    mid-operation and may be ``asleep`` before (src/proxy.cc ncclProxyGetPostedOps): over sockets, where it
    shares processors with the kernel's work, the worst reaction alone bounds that. ``held_ns``: how long
    receiving may have held up each entry.
    """
    usable = entries.exact & entries.whole
    work = usable & (entries.since_ns != NEVER)
    worked = np.where(work, entries.enter_ns - entries.since_ns, NEVER)
    # Where one entry alone is known (one node's capture, often) it has nothing to scatter against.
    usable, alone = _with_others(entries, usable), work & ~_with_others(entries, work)
    offsets = (
        (usable, against_others(entries, entries.enter_ns, usable)),
        (work, np.where(alone, worked.astype(np.float64), against_others(entries, worked, work))),
    )
    out = np.full(len(entries.endpoint), NEVER)
    for each in distinct(of_row):
        mine = of_row == each
        found = [_scatter_ns(entries, held_ns, offset, known & mine, alone) for known, offset in offsets]
        bound = float(np.fmin.reduce(found))
        first = int(np.flatnonzero(mine)[0])
        middle, most = float(law.median_ns[first]), float(law.most_ns[first])
        if not np.isnan(middle):
            low, high = (2 * middle, 2 * most) if threads[first] else (0.0, middle)
            high = float(law.worst_ns[first]) if asleep[first] else high
            bound = high if np.isnan(bound) else min(max(bound, low), high)
        if not np.isnan(bound):
            out[mine] = round(bound)
    return out


def _with_others(entries: Entries, mine: Bools) -> Bools:
    """Those of ``mine`` whose collective has others of them."""
    count = np.bincount(entries.collective[mine], minlength=len(entries.offsets))
    return mine & (count[entries.collective] > 1)


def _scatter_ns(entries: Entries, held_ns: Ints, offset: Floats, mine: Bools, alone: Bools) -> float:
    """How far two entries of a group differ by chance, 95 %, from each rank's scatter about its own median.

    On the quieter side, for a fault shows on one side only, and by quartiles; as the median over ranks. What
    a rank works by itself (``alone``) differs by what it works on, and comes in heaps: the closest third of
    it counts. NaN where no rank has enough entries.
    """
    sigma = []
    rows = np.flatnonzero(mine)
    ranks = classes(entries.endpoint[rows])
    for places in ranks:
        own = rows[places]
        quiet = own[held_ns[own] == 0]
        own = quiet if len(quiet) >= FEWEST else own
        if len(own) >= FEWEST:
            low, middle, high = percentiles(offset[own], (25, 50, 75))
            quarter = min(middle - low, high - middle) / QUARTER_IN_SIGMAS
            heap = closest_third(offset[own]) / 2 / SIXTH_IN_SIGMAS if alone[own].all() else np.inf
            sigma.append(min(quarter, heap))
    if not sigma:
        return float("nan")
    # An offset scatters by the rank's own hand-over and by that of the others' median; two ranks by two.
    others = max(len(ranks) - 1, 1)
    return float(INTERVAL_IN_SIGMAS * np.sqrt(2 / (1 + MEDIAN_COSTS / others)) * median_of(sigma))


def receiving_ns(exchanges: Rows | Picked, entries: Entries, law: Law) -> Ints:
    """For each row how long its host had been receiving data without a break when the rank first acted.

    A break is longer than the usual reaction. 0 where the host had been quiet for longer than even its
    slow reactions; and where no send was seen to wait for an input: GPUs do not wait for their host then.
    """
    held = np.zeros(len(entries.endpoint), np.int64)
    if not law.by_sends.any():
        return held
    known = np.flatnonzero((exchanges["data_ns"] != NEVER) & (exchanges["arrived_end_ns"] != NEVER))
    to = exchanges["dst"][known].astype(np.int64)
    order = order_within(exchanges["arrived_ns"][known], to)
    to, known = to[order], known[order]
    begins, ends = exchanges["arrived_ns"][known], there_ns(exchanges)[known]
    for endpoint in distinct(entries.endpoint).tolist():
        rows = entries.of[endpoint]
        rows = rows[entries.enter_ns[rows] != NEVER]
        low, high = np.searchsorted(to, (endpoint, endpoint + 1))
        if low == high or not len(rows) or not law.by_sends[rows].any():
            continue
        begin, end = begins[low:high], np.maximum.accumulate(ends[low:high])
        broken = np.r_[True, begin[1:] > end[:-1] + law.median_ns[rows].min()]
        first = np.flatnonzero(broken)
        begin, end = begin[first], end[np.r_[first[1:] - 1, len(end) - 1]]
        enter = entries.enter_ns[rows]
        at = np.searchsorted(begin, enter) - 1
        busy = (at >= 0) & (enter <= end[at] + law.slow_ns[rows])
        held[rows] = np.where(busy, enter - begin[at], 0)
    return held


def room(entries: Entries, left_ns: Ints, law: Law, of_row: Ints) -> Ints:
    """Per row how long before its first act the rank may have entered in the worst case, ns.

    As much as a hand-over takes at the worst beyond the quickest (5 %), for these all ranks need; nor more
    than the group's work scatters by at the worst, hand-over included. And not before it can have done the
    least that its group was ever seen to need since it left its collective before (``left_ns``).
    """
    scatter = _work_scatter_ns(entries, left_ns, of_row)
    out = np.nan_to_num(np.fmin(law.worst_ns - law.quick_ns, scatter), nan=0.0).round().astype(np.int64)
    least, _ = least_work_ns(replace(entries, since_ns=left_ns), entries.exact, of_row)
    known = (left_ns != NEVER) & (entries.enter_ns != NEVER)
    worked = np.where(known, entries.enter_ns - np.where(known, left_ns, 0) - least, FAR)
    return np.asarray(np.clip(worked, 0, out), np.int64)


def _work_scatter_ns(entries: Entries, left_ns: Ints, of_row: Ints) -> Floats:
    """By row how much longer than in the median ranks of the group work at the worst; NaN of too few."""
    out = np.full(len(of_row), np.nan)
    rows = np.flatnonzero(entries.exact & entries.whole & (left_ns != NEVER))
    longer = (entries.enter_ns - left_ns)[rows]
    for mine in classes(of_row[rows], entries.endpoint[rows]):
        longer[mine] -= round(float(median_of(longer[mine])))
    for mine in classes(of_row[rows]):
        out[of_row == of_row[rows[mine[0]]]] = tail_ns(np.maximum(longer[mine], 0))
    return out


def ways(entries: Entries, joined: Joined) -> tuple[Ints, Ints]:
    """For rows of ranks without a capture of their own: how long their first act may have been in flight.

    It is dated by its arrival. No longer, in 95 of 100 cases, than the way to that rank and back, from a
    message to its ACK. Over TCP receivers hold ACKs back (RFC 1122, 4.2.3.2), so there the shortest counts.
    The second: how long it usually was, half of the median way there and back.
    """
    out, usual = np.zeros((2, len(entries.endpoint)), np.int64)
    own = {end for local in joined.local for end in local}
    if not own or joined.at_a_switch:
        return out, usual
    # What set a job up over TCP says nothing of how long its own messages take.
    job = joined.columns["wire"] != Wire.NCCL_SETUP
    transfers = Picked(joined.transfers, None if job.all() else np.flatnonzero(job))
    held = bool(len(transfers)) and int(transfers["wire"].max()) >= Wire.GLOO_HELLO
    levels = (0, 0) if held else (95, 50)
    measured = (transfers["acked_ns"] != NEVER) & ((transfers["seen"] & Seen.AT_SENDER) != 0)
    measured &= transfers["retransmitted"] == 0
    trips, to = (transfers["acked_ns"] - transfers["sent_end_ns"])[measured], transfers["dst"][measured]
    order = np.argsort(to, kind="stable")
    trips, to = trips[order], to[order]
    for endpoint in np.setdiff1d(entries.endpoint, list(own)).tolist():
        mine = trips[np.searchsorted(to, endpoint) : np.searchsorted(to, endpoint, "right")]
        mine = mine if len(mine) >= FEWEST else trips
        if not len(mine):
            continue
        rows = entries.of[endpoint]
        slow, middle = np.maximum(np.percentile(mine, levels), 0).round().astype(np.int64).tolist()
        out[rows], usual[rows] = slow, middle // 2
    return out, usual


def clocks(entries: Entries, joined: Joined) -> tuple[Ints, Ints]:
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


def late_stamps(joined: Joined) -> Ints:
    """How late each capture stamps what leaves, all but BEYOND of the times.

    A message whose sending is stamped late seems to arrive sooner than any way takes: as much less than the
    quick ones (5 %) of its connection's direction take.
    """
    columns, out = joined.columns, np.zeros(len(joined.clocks), np.int64)
    rows = np.flatnonzero((columns["seen"] & _BOTH) == _BOTH)
    way = columns["arrived_ns"][rows] - columns["sent_ns"][rows]
    early = np.zeros(len(rows))
    for at in classes(lines_of(columns)[rows]):
        if len(at) >= FEWEST:
            early[at] = np.maximum(percentile(way[at], QUICK) - way[at], 0)
    for at in classes(columns["capture"][rows].astype(np.int64)):
        out[columns["capture"][rows[at[0]]]] = round(percentile(early[at], 100 * (1 - BEYOND)))
    return out
