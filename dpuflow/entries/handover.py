"""How quickly hosts hand messages on: sends that had waited for an input, and the scatter of entries.

In: exchanges with their dependencies, entries. Out: the usual reaction of each group's hosts, and how far
the packets of an entry may lie from the call (docs/inference/lateness.md, "Error").

Between a call and its first packet lies the library's hand-over. It is common to all ranks and cancels in
lateness; its scatter does not. Two things in a capture show that scatter. Ranks that had sent all they could
and waited for an input send within their host's reaction once it is there. And entries of ranks that nothing
made late scatter by it, and by how unevenly they compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, classes, lower_medians, order_within, percentiles
from dpuflow.entries.inputs import lines_of
from dpuflow.entries.relative import against_others
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import FEWEST
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.needs import Needs
    from dpuflow.entries.rows import Entries, Times
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

_LEVELS = (50, 90, 95)
PAIRED = 1000
"""Of more values than these only so many quantiles are compared with each other."""
NINETY_FIVE = 1.96
"""Half of the interval that holds 95 % of a normal distribution, in standard deviations."""
QUARTER = 0.6745
"""Median to quartile of a normal distribution, in standard deviations."""
MEDIAN_COSTS = np.pi / 2
"""Variance of the median of n normal values, times n, over theirs."""


def waited_sends(
    picked: Picked,
    needs: Needs,
    sender: NDArray[np.int64],
    receiver: NDArray[np.int64],
    enter: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sends whose rank had done all it could and waited for an input: (row of Entries, time since it came).

    ``picked`` are the exchanges of ``needs``; ``sender``, ``receiver`` and ``enter`` refer to rows of
    Entries. Where the algorithm is known the input is the one that the send needs; else the last thing
    that happened before the send must be an input. What came before the rank had entered counts for
    nothing: it waited for the rank.
    """
    from dpuflow.kernels import waits

    start = np.where(picked["offer_ns"] != NEVER, picked["offer_ns"], picked["data_ns"])
    ready = np.full(len(picked), NEVER)
    there = there_ns(picked)
    np.maximum.at(ready, needs.send, there[needs.input])
    # Without an offer the data may have waited for its credit; that is as good as an input.
    credit = np.where(picked["offer_ns"] == NEVER, picked["grant_arrived_ns"], NEVER)
    ready = np.where(ready != NEVER, np.maximum(ready, credit), NEVER)
    ready[_behind_own_data(picked, sender, start, ready)] = NEVER

    count = len(picked)
    times = (there, picked["data_end_ns"], start)
    seen = [int(t[t != NEVER].min(initial=FAR)) for t in times]
    own, after = np.empty((2, count), np.int64)
    keys, order, room = np.empty((3, 3 * count), np.int64)
    found = waits.waited(
        sender, receiver, *times, ready, needs.mapped.view(np.uint8), needs.split.view(np.uint8),
        enter, min(seen), np.empty(waits.KINDS * len(enter) + 1, np.int64), keys, order, room, own, after,
    )  # fmt: skip
    # A blocking exchange ends when both its halves have: the rank may have waited for its own send, too.
    return own[:found], after[:found]


def _behind_own_data(
    picked: Picked, sender: NDArray[np.int64], start: NDArray[np.int64], ready: NDArray[np.int64]
) -> NDArray[np.int64]:
    """NCCL's sends whose rank was still sending when their input came: they waited for the wire, not for it.

    NCCL's thread blocks fill slots while the network takes those before; a blocking caller has one at a time.
    """
    wire = picked["wire"]
    rows = np.flatnonzero(((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)) & (start != NEVER))
    rows = rows[order_within(start[rows], sender[rows])]
    if len(rows) < 2:
        return rows[:0]
    same = sender[rows[1:]] == sender[rows[:-1]]
    busy = same & (picked["data_end_ns"][rows[:-1]] > ready[rows[1:]])
    behind: NDArray[np.int64] = rows[1:][busy]
    return behind


def handled_ns(
    picked: Picked, sender: NDArray[np.int64], receiver: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How fast Open MPI's hosts go on where it is not by an input that they waited for: two lists of ns.

    From a grant to the data that it allows, where nothing else of the rank was leaving: it is in the call,
    and had waited for that. And from one eager send of a collective to the rank's next one, where nothing had
    come in between: no waiting, but all the work of a message.
    """
    wire, start, end = picked["wire"], picked["data_ns"], picked["data_end_ns"]
    mine = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (start != NEVER)
    rows = np.flatnonzero(mine)
    rows = rows[order_within(start[rows], sender[rows])]
    if not len(rows):
        return rows, rows
    granted, before = picked["grant_arrived_ns"], np.r_[rows[:1], rows[:-1]]
    same = np.r_[False, sender[rows[1:]] == sender[rows[:-1]]]
    lone = (granted[rows] != NEVER) & (picked["offer_ns"][rows] != NEVER) & (granted[rows] < start[rows])
    lone &= _alone(sender[rows], np.where(granted[rows] != NEVER, granted[rows], start[rows]), end[rows])
    # What is the first to fill a connection's window takes longer than any that follows.
    large = np.flatnonzero(lone)
    lone[large[np.unique(lines_of(picked)[rows[large]], return_index=True)[1]]] = False
    arrived = picked["arrived_end_ns"]
    came = np.flatnonzero(arrived != NEVER)
    came = came[order_within(arrived[came], receiver[came])]
    eager = same & (wire[before] == Wire.OB1_MATCH) & (wire[rows] == Wire.OB1_MATCH)
    eager &= start[rows] >= end[before]
    eager &= _last_within(receiver[came], arrived[came], sender[rows], start[rows]) <= start[before]
    return (start - granted)[rows[lone]], start[rows[eager]] - end[before[eager]]


def _alone(
    sender: NDArray[np.int64], allowed: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Data before which its sender had sent all else that had been allowed by then.

    What was allowed later and left before it excuses nothing: then its own was left lying.
    """
    order = order_within(allowed, sender)
    out = np.ones(len(order), bool)
    for mine in np.split(order, np.flatnonzero(np.diff(sender[order])) + 1):
        out[mine[1:]] = np.maximum.accumulate(end[mine])[:-1] <= allowed[mine[1:]]
    return out


def _last_within(
    of: NDArray[np.int64], times: NDArray[np.int64], who: NDArray[np.int64], until: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each of ``who`` the last of its ``times`` (sorted within ``of``) up to ``until``, else NEVER."""
    if not len(of):
        return np.full(len(who), NEVER)
    zero = int(min(times.min(), until.min()))
    span = int(max(times.max(), until.max())) - zero + 1
    at = np.searchsorted(of * span + (times - zero), who * span + (until - zero), side="right") - 1
    at_least = np.maximum(at, 0)
    return np.where((at >= 0) & (of[at_least] == who), times[at_least], NEVER)


def is_gloo(wire: int) -> bool:
    """Whether messages of this ``wire`` are Gloo's."""
    return bool(Wire.GLOO_DATA <= wire <= Wire.GLOO_RECV_READY)


def may_hand_over(wire: int) -> bool:
    """Whether a call is, or may be, handed to a thread of the library before its first message."""
    return is_gloo(wire) or wire == Wire.TCP_BURST


def typical(total: int, of: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lower median of each row's values; NEVER for rows without."""
    out = np.full(total, NEVER, np.int64)
    lower_medians(values, of, out)
    return out


class Usual(NamedTuple):
    """Per row of Entries what its group's hosts usually need from an input to the send that waited for it.

    NaN where nothing was measured in the whole capture.
    """

    median_ns: NDArray[np.float64]
    most_ns: NDArray[np.float64]  # nine in ten stay below
    slowest_ns: NDArray[np.float64]  # 95 %
    by_sends: NDArray[np.bool_]  # measured from sends, not only from slots given back


def usual_reactions(entries: Entries, of_row: NDArray[np.int64]) -> Usual:
    """What is usual in each row's group (``of_row``); in all groups where the own one shows too little.

    Where no rank of a group was seen to send as soon as its input came, as data streams, what counts is how
    long its middle rank takes to give an input's slot back: one that is slow at that is a fault of its own.
    """
    out = np.full((3, len(entries.endpoint)), np.nan)
    by_sends = np.full(len(entries.endpoint), len(entries.reactions.waited[0]) > 0)
    known = entries.reactions.waited[1]  # their ranks run on the same hosts
    if len(known) < FEWEST <= len(entries.reactions.granted_data_ns):  # one or two may be no reactions at all
        known = np.concatenate([known, entries.reactions.granted_data_ns])
    if len(known):
        out[:] = _column(known)
    taken = middle_ranks(entries, of_row, entries.reactions.taken)
    streams = ~np.isnan(taken[0])
    out[:, streams], by_sends[streams] = taken[:, streams], False
    group = of_row[entries.reactions.waited[0]]
    for each in np.unique(group):
        values = entries.reactions.waited[1][group == each]
        if len(values) >= FEWEST:
            out[:, of_row == each] = _column(values)
            by_sends[of_row == each] = True
    return Usual(out[0], out[1], out[2], by_sends)


def middle_ranks(entries: Entries, of_row: NDArray[np.int64], times: Times) -> NDArray[np.float64]:
    """Per row the 50, 90, 95 % of ``times`` of the middle rank of its group, NaN without: (3, rows)."""
    out = np.full((3, len(entries.endpoint)), np.nan)
    ranks: dict[int, list[NDArray[np.float64]]] = {}
    for group, own in by_rank(entries, of_row, times):
        ranks.setdefault(group, []).append(_column(own))
    for group, found in ranks.items():
        found.sort(key=lambda own: float(own[0, 0]))
        out[:, of_row == group] = found[(len(found) - 1) // 2]
    return out


def by_rank(
    entries: Entries, of_row: NDArray[np.int64], times: Times
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each group (``of_row``) with those of ``times`` that one of its ranks took; of ranks with enough."""
    rows, ns = times
    group, end = of_row[rows], entries.endpoint[rows]
    for places in classes(group, end):
        if len(places) >= FEWEST:
            yield int(group[places[0]]), ns[places]


def _column(values: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.array(percentiles(values, _LEVELS))[:, None]


def receiving_ns(exchanges: Rows | Picked, entries: Entries, usual: Usual) -> NDArray[np.int64]:
    """For each row how long its host had been receiving data without a break when the rank first acted.

    A break is longer than the usual reaction. 0 where the host had been quiet for longer than even its
    slow reactions; and where no send was seen to wait for an input: GPUs do not wait for their host then.
    """
    held = np.zeros(len(entries.endpoint), np.int64)
    if not usual.by_sends.any():
        return held
    known = np.flatnonzero((exchanges["data_ns"] != NEVER) & (exchanges["arrived_end_ns"] != NEVER))
    to = exchanges["dst"][known].astype(np.int64)
    order = order_within(exchanges["arrived_ns"][known], to)
    to, known = to[order], known[order]
    begins, ends = exchanges["arrived_ns"][known], there_ns(exchanges)[known]
    for endpoint in np.unique(entries.endpoint):
        rows = np.flatnonzero((entries.endpoint == endpoint) & (entries.enter_ns != NEVER))
        low, high = np.searchsorted(to, (endpoint, endpoint + 1))
        if low == high or not len(rows) or not usual.by_sends[rows].any():
            continue
        begin, end = begins[low:high], np.maximum.accumulate(ends[low:high])
        broken = np.r_[True, begin[1:] > end[:-1] + usual.median_ns[rows].min()]
        first = np.flatnonzero(broken)
        begin, end = begin[first], end[np.r_[first[1:] - 1, len(end) - 1]]
        enter = entries.enter_ns[rows]
        at = np.searchsorted(begin, enter) - 1
        busy = (at >= 0) & (enter <= end[at] + usual.slowest_ns[rows])
        held[rows] = np.where(busy, enter - begin[at], 0)
    return held


def spreads(
    exchanges: Rows,
    instances: Sequence[Instance],
    entries: Entries,
    usual: Usual,
    of_row: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Per row how far two hand-overs of its group differ, in 95 of 100 cases, ns; NEVER where not known.

    Entries scatter by the hand-over, but also by what ranks really differ by; so do the times from leaving
    one collective to entering the next, less what a peer handed on. The smaller of the two counts.
    Reactions bound it from above. Where the caller itself sends, as in Open MPI, an entry wakes nobody up,
    and the median reaction, which does, is more than its scatter. In Gloo a call is handed to a thread of
    the library and that wakes another: two hand-overs, each of which scatters as reactions do. A library that
    nothing names may do so, too.
    """
    wires = exchanges["wire"]
    gloo = [len(i.rows) > 0 and may_hand_over(int(wires[i.rows[0]])) for i in instances]
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
    for each in np.unique(of_row):
        mine = of_row == each
        found = [_scatter_ns(entries, offset, known & mine) for known, offset in offsets]
        bound = float(np.fmin.reduce(found))
        first = int(np.flatnonzero(mine)[0])
        middle, most = float(usual.median_ns[first]), float(usual.most_ns[first])
        if not np.isnan(middle):
            threads = gloo[entries.collective[first]]
            low, high = (2 * middle, 2 * most) if threads else (0.0, middle)
            bound = high if np.isnan(bound) else min(max(bound, low), high)
        if not np.isnan(bound):
            out[mine] = round(bound)
    return out


def wide_spreads(entries: Entries, handed: NDArray[np.bool_], of_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """``spread_ns``, or where a thread like NCCL's proxy serves all alike (``handed``) what reactions show.

    By quartiles nothing is seen of hosts that stall now and then. Where one thread hands on what was to be
    sent first and what had waited for an input, how far two reactions differ, in 95 of 100 cases, is how far
    two entries do.
    """
    out: NDArray[np.int64] = entries.margins.spread_ns.copy()
    for each in np.unique(of_row[handed]):
        mine = handed & (of_row == each)
        apart = apart_ns(_reactions(entries, of_row, each))
        if not np.isnan(apart):
            out[mine] = np.maximum(out[mine], round(apart))
    return out


def _reactions(entries: Entries, of_row: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """How long the group's ranks took from an input to what had waited for it, as ``usual_reactions``."""
    waited: NDArray[np.int64] = entries.reactions.waited[1]
    sample: NDArray[np.int64] = waited[of_row[entries.reactions.waited[0]] == group]
    if len(sample) >= FEWEST:
        return sample
    rows, ns = entries.reactions.taken
    here = of_row[rows] == group
    ends, values = entries.endpoint[rows[here]], ns[here]
    ranks = [values[ends == end] for end in np.unique(ends)]
    ranks = sorted((own for own in ranks if len(own) >= FEWEST), key=np.median)
    return ranks[(len(ranks) - 1) // 2] if ranks else waited


def apart_ns(values: NDArray[np.int64]) -> float:
    """How far two of ``values`` differ at the most in 95 of 100 cases; NaN of too few."""
    if len(values) < FEWEST:
        return float("nan")
    some = values.astype(np.float64)
    if len(some) > PAIRED:
        some = np.quantile(some, (np.arange(PAIRED) + 0.5) / PAIRED)
    one, other = np.triu_indices(len(some), 1)
    return float(np.percentile(np.abs(some[one] - some[other]), 95))


def _with_others(entries: Entries, mine: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Those of ``mine`` whose collective has others of them."""
    count = np.bincount(entries.collective[mine], minlength=len(entries.offsets))
    return mine & (count[entries.collective] > 1)


def _scatter_ns(entries: Entries, offset: NDArray[np.float64], mine: NDArray[np.bool_]) -> float:
    """How far two entries of a group differ by chance, 95 %, from each rank's scatter about its own median.

    On the quieter side, for a fault shows on one side only, and by quartiles; as the median over ranks. NaN
    where no rank has enough entries.
    """
    sigma = []
    rows = np.flatnonzero(mine)
    ranks = classes(entries.endpoint[rows])
    for places in ranks:
        own = rows[places]
        quiet = own[entries.margins.held_ns[own] == 0]
        own = quiet if len(quiet) >= FEWEST else own
        if len(own) >= FEWEST:
            low, middle, high = percentiles(offset[own], (25, 50, 75))
            sigma.append(min(middle - low, high - middle) / QUARTER)
    if not sigma:
        return float("nan")
    # An offset scatters by the rank's own hand-over and by that of the others' median; two ranks by two.
    others = max(len(ranks) - 1, 1)
    return float(NINETY_FIVE * np.sqrt(2 / (1 + MEDIAN_COSTS / others)) * np.median(sigma))
