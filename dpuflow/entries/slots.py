"""NCCL's ranks that only receive: when they had entered, as the slots show that their GPUs gave back.

Entries and exchanges in, entries out. A receiver's host grants slots before its GPU has come to the
operation, and one more for each slot that the GPU has emptied (NCCL 2.30, src/transport/net.cc
recvProxyProgress). So the clear-to-send entry for the message that takes a slot again proves that the rank
had entered; and where the slot had been full for far longer than while the rank waits for data, that it had
not entered before. An operation of fewer messages than slots shows the same in the next one's first entry: it
comes when all of this one is taken, but not before the host has launched the next, so only where the rank had
granted slots for a still later one by then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, percentile
from dpuflow.entries.build import Entries, Rule
from dpuflow.entries.handover import FEWEST
from dpuflow.entries.passing import SLOTS, lines_of, messages_ahead
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.matching import Instance

    Ints = NDArray[np.int64]

_FAR = np.iinfo(np.int64).max
FAR_BEYOND = 3.0
"""Times the quickest, beyond which a slot had not been waited for."""
SLOW = 95.0
QUICK = 5.0
"""Percent of the slots: as often as that at least a rank waits for data, or nothing is said of it."""


def _may_send(instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Rows of ranks without a capture that may have sent what was not seen.

    When such a rank gives a slot back may depend on what it sends. Of a transfer everything was seen.
    """
    return np.array(
        [
            i.near is not None and end not in i.near and i.op != Op.SEND_RECV
            for i in instances
            for end in i.order
        ],
        bool,
    )


class Lines(NamedTuple):
    """What a rank received in one collective over one connection; arrays are parallel."""

    row: Ints  # of Entries
    line: Ints  # the connection's direction
    messages: Ints  # how many, and ...
    depth: Ints  # ... how many are granted ahead
    full_ns: Ints  # what a slot's next grant had to wait for had arrived: the first message, or the last one
    given_ns: Ints  # that grant, NEVER where it was not seen ...
    grant: Ints  # ... and its TRANSFER row
    inside: NDArray[np.bool_]  # it is of the same collective
    next_row: Ints  # the row of Entries that the grant is for


def date_by_slots(
    entries: Entries, exchanges: Picked, instances: Sequence[Instance], of_row: Ints
) -> Entries:
    """Date ranks that nothing else dates by the first slot that they gave back.

    ``of_row``: the group of each row.
    """
    silent = (entries.rule == Rule.UNSEEN) & entries.fed & ~_may_send(instances)
    if not silent.any():
        return entries
    lines, samples = _lines(entries, exchanges, instances, silent)
    if not len(lines.row):
        return entries
    seen = (lines.given_ns != NEVER) & (lines.given_ns >= lines.full_ns)
    latest = np.full(len(silent), _FAR)
    np.minimum.at(latest, lines.row[seen], lines.given_ns[seen])
    sure = seen & (lines.inside | _launched(entries, lines, latest, of_row))
    quick = _quick(lines, sure, samples)
    posted = _unsteady(exchanges, instances)
    scatter, worst = (_of_hosts(entries.endpoint[lines.row], posted, level) for level in (SLOW, 100.0))
    # Its GPU empties the slots one after the other, none more slowly than what it waits for.
    slots = np.where(lines.inside, 1, lines.messages)
    waited = lines.given_ns - lines.full_ns
    late = sure & (waited > np.maximum(FAR_BEYOND, slots) * quick + FAR_BEYOND * worst)
    # Of several connections the first that shows it counts, as a first message does.
    dated = np.full(len(silent), _FAR)
    np.minimum.at(dated, lines.row[late], lines.given_ns[late])
    # What shows that it had entered before then: it was not late, or not by so much.
    at = np.flatnonzero(late & (lines.given_ns == dated[lines.row]) & (dated == latest)[lines.row])
    row = lines.row[at]
    exact = lines.inside[at] | (lines.messages[at] == 1)
    rule, enter = entries.rule.copy(), entries.enter_ns.copy()
    act, after, moved = entries.act.copy(), entries.after.copy(), entries.unmoved_ns.copy()
    since, since_act = entries.since_ns.copy(), entries.since_act.copy()
    rule[row] = np.where(exact, int(Rule.GIVEN_BACK), int(Rule.GIVEN_LATE))
    enter[row], act[row], after[row] = lines.given_ns[at], lines.grant[at], entries.last[row]
    moved[row] = waited[at]
    soonest = lines.given_ns[at] - (slots * quick)[at].astype(np.int64)
    later = ~exact & (soonest > since[row])
    since[row[later]], since_act[row[later]] = soonest[later], lines.grant[at[later]]
    apart = entries.spread_ns.copy()
    apart[row] = scatter[at].astype(np.int64)  # of transfers little else shows how hand-overs differ
    leave = np.where(entries.leave_ns != NEVER, np.maximum(entries.leave_ns, enter), entries.leave_ns)
    return replace(
        entries, rule=rule, enter_ns=enter, act=act, after=after, unmoved_ns=moved, since_ns=since,
        since_act=since_act, spread_ns=apart, leave_ns=leave, idle_ns=np.maximum(entries.idle_ns, leave),
    )  # fmt: skip


def late_to_inputs(entries: Entries, exchanges: Picked, instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Rows of NCCL's ranks that pass on what they receive, and came far later than their input.

    Later than three times the quickest (5 %) of the rank's own first messages come after their inputs in its
    group: as often at least it waits for them.
    """
    out = np.zeros(len(entries.rule), bool)
    passing = (entries.rule == Rule.AFTER_INPUT) & (entries.unmoved_ns != NEVER) & (entries.moved_ns != NEVER)
    passing &= entries.granted_ns != NEVER
    rows = np.flatnonzero(passing)
    if not len(rows):
        return out
    members = np.array([hash(tuple(sorted(i.order))) for i in instances], np.int64)[entries.collective[rows]]
    worst = _of_hosts(entries.endpoint[rows], _unsteady(exchanges, instances), 100.0)
    order = np.lexsort((members, entries.endpoint[rows]))
    new = (np.diff(members[order]) != 0) | (np.diff(entries.endpoint[rows[order]]) != 0)
    for at in np.split(order, np.flatnonzero(new) + 1):
        if len(at) >= FEWEST:
            mine = rows[at]
            limit = FAR_BEYOND * (percentile(entries.moved_ns[mine], QUICK) + worst[at])
            idle = entries.unmoved_ns[mine]
            credit = entries.credit_ns[mine]
            out[mine] = np.where(credit != NEVER, np.minimum(idle, credit), idle) > limit
    return out


def _lines(
    entries: Entries, exchanges: Picked, instances: Sequence[Instance], silent: NDArray[np.bool_]
) -> tuple[Lines, tuple[Ints, Ints]]:
    """What ranks ``silent`` received, connection by connection; and (line, ns) of slots that were given back
    by ranks that were in the operation for certain when they were filled."""
    rows, of, line, begin, depth = _in_turn(exchanges, instances)
    to = _rows_of(entries, of, exchanges["dst"][rows].astype(np.int64))
    turn = exchanges["order"][rows].astype(np.int64)
    granted, arrived = exchanges["grant_ns"][rows], exchanges["arrived_end_ns"][rows]
    if not len(begin):
        none = np.zeros(0, np.int64)
        nothing = Lines(none, none, none, none, none, none, none, none.astype(bool), none)
        return nothing, (none, none)
    count = np.diff(np.r_[begin, len(rows)])
    inside = (count > depth) & (depth > 0)
    following = np.minimum(begin + np.where(inside, depth, count), len(rows) - 1)
    # Messages that came after a slot had been given back within the operation were waited for.
    place = np.arange(len(rows)) - np.repeat(begin, count)
    again = np.minimum(np.arange(len(rows)) + np.repeat(depth, count), len(rows) - 1)
    known = np.repeat(inside & (granted[following] != NEVER), count)
    known &= (place + np.repeat(depth, count) < np.repeat(count, count)) & (granted[again] >= arrived)
    known &= (arrived != NEVER) & (arrived >= np.repeat(granted[following], count))
    samples = (line[known], (granted[again] - arrived)[known])

    good = (line[following] == line[begin]) & (turn[following] - turn[begin] == following - begin)
    good &= (depth > 0) & (following > begin) & (turn[begin + count - 1] - turn[begin] == count - 1)
    full = np.where(inside, arrived[begin], np.maximum.reduceat(arrived, begin))
    good &= (full != NEVER) & (np.minimum.reduceat(arrived, begin) != NEVER)
    given = np.where(good, granted[following], NEVER)
    grant = exchanges["grant"][rows].astype(np.int64)[following]
    mine = silent[to[begin]]
    every = Lines(to[begin], line[begin], count, depth, full, given, grant, inside, to[following])
    return Lines._make(column[mine] for column in every), samples


def _of_transfer(instance: Instance) -> int:
    """Messages that are granted ahead where the protocol is not told: of sends and receives, a slot each."""
    return SLOTS if instance.op == Op.SEND_RECV else 0


def _rows_of(entries: Entries, of: Ints, endpoint: Ints) -> Ints:
    """Rows of Entries of ranks of collectives."""
    width = int(entries.endpoint.max()) + 1
    key = entries.collective * width + entries.endpoint
    order = np.argsort(key)
    return np.asarray(order[np.searchsorted(key[order], of * width + endpoint)], np.int64)


def _launched(entries: Entries, lines: Lines, latest: Ints, of_row: Ints) -> NDArray[np.bool_]:
    """Whether the host had launched the operation that each grant is for by then.

    It had if it had granted slots for one that it launched later: that the rank came to after it. Where ranks
    are ever in operations of two groups at once (buckets of gradients beside a pipeline) they come to them in
    another order than they launched them in; then only operations of the same group count.
    """
    enter = np.where(entries.exact, entries.enter_ns, NEVER)
    granted = np.where(enter != NEVER, entries.granted_ns, NEVER)
    out = np.zeros(len(lines.row), bool)
    group = of_row if _beside(entries, of_row) else np.zeros_like(of_row)
    for at in classes(entries.endpoint, group):
        rows = at[granted[at] != NEVER]
        mine = np.flatnonzero(np.isin(lines.next_row, at))
        if not len(rows) or not len(mine):
            continue
        rows = rows[np.argsort(enter[rows], kind="stable")]
        # The earliest of its later grants, in order of its entries.
        soonest = np.minimum.accumulate(granted[rows][::-1])[::-1]
        following = lines.next_row[mine]
        # When it had come to the next operation at the latest.
        by = np.where(entries.exact[following], entries.enter_ns[following], latest[following])
        place = np.searchsorted(enter[rows], by, "right")
        there = (by != _FAR) & (place < len(rows))
        out[mine] = there & (soonest[np.minimum(place, len(rows) - 1)] < lines.given_ns[mine])
    return out


def _beside(entries: Entries, of_row: Ints) -> bool:
    """Whether any rank was ever in operations of two groups at once."""
    known = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    for at in classes(entries.endpoint):
        rows = at[known[at]]
        rows = rows[np.argsort(entries.enter_ns[rows], kind="stable")]
        for places in classes(of_row[rows]):
            own, others = rows[places], np.delete(rows, places)
            left = np.maximum.accumulate(entries.leave_ns[own])
            place = np.searchsorted(entries.enter_ns[own], entries.enter_ns[others], "right") - 1
            if ((place >= 0) & (left[np.maximum(place, 0)] > entries.enter_ns[others])).any():
                return True
    return False


def _quick(lines: Lines, sure: NDArray[np.bool_], samples: tuple[Ints, Ints]) -> NDArray[np.float64]:
    """For each line how long a slot is full while its rank waits for data: the quickest (5 %) of its slots.

    NaN where too few were seen. A rank that always comes late, or is slow to grant, so has no quick ones.
    """
    line = np.concatenate([samples[0], lines.line[sure]])
    waited = np.concatenate([samples[1], (lines.given_ns - lines.full_ns)[sure]])
    out = np.full(len(lines.row), np.nan)
    order = np.argsort(line, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(line[order])) + 1):
        if len(at) >= FEWEST:
            out[lines.line == line[at[0]]] = percentile(waited[at], QUICK)
    return out


def _unsteady(exchanges: Picked, instances: Sequence[Instance]) -> tuple[Ints, Ints]:
    """How evenly hosts post entries that wait for nothing.

    (receiver, ns) of every two in a row that are granted together when a connection takes up a collective.
    """
    rows, _, _, begin, depth = _in_turn(exchanges, instances)
    count = np.diff(np.r_[begin, len(rows)])
    place = np.arange(len(rows)) - np.repeat(begin, count)
    granted = exchanges["grant_ns"][rows]
    together = (place[1:] > 0) & (place < np.repeat(depth, count))[1:]
    together &= (granted[1:] != NEVER) & (granted[:-1] != NEVER)
    apart = np.abs(granted[1:] - granted[:-1])[together]
    return exchanges["dst"][rows[1:]].astype(np.int64)[together], apart


def _in_turn(exchanges: Picked, instances: Sequence[Instance]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Rows of NCCL's exchanges connection by connection, in order; each one's collective and connection.

    Then the places where either changes, and how many messages are granted ahead from there on, 0 where that
    is not known.
    """
    ahead = [0 if i.nodes else messages_ahead(i) or _of_transfer(i) for i in instances]
    counts = np.fromiter((len(i.rows) for i in instances), np.int64, len(instances))
    of = np.full(len(exchanges), -1, np.int64)
    of[np.concatenate([i.rows for i in instances])] = np.repeat(np.arange(len(instances)), counts)
    rows = np.flatnonzero((exchanges["wire"] == Wire.ROCE_WRITE_IMM) & (of >= 0))
    line = lines_of(exchanges)[rows]
    order = np.lexsort((exchanges["order"][rows], line))
    rows, line = rows[order], line[order]
    of = of[rows]
    begin = np.flatnonzero(np.r_[True, (line[1:] != line[:-1]) | (of[1:] != of[:-1])])[: len(rows)]
    return rows, of, line, begin, np.array(ahead, np.int64)[of[begin]]


def _of_hosts(endpoint: Ints, posted: tuple[Ints, Ints], level: float) -> NDArray[np.float64]:
    """For each endpoint a percentile of its distances, of those of all hosts where it has too few; NaN
    without any."""
    out = np.full(len(endpoint), np.nan)
    whose, apart = posted
    if len(apart) >= FEWEST:
        out[:] = percentile(apart, level)
    for each in np.unique(endpoint):
        own = apart[whose == each]
        if len(own) >= FEWEST:
            out[endpoint == each] = percentile(own, level)
    return out
