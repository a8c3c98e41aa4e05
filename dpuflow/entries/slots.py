"""What clear-to-send entries show of NCCL's ranks: slots of a buffer are granted again once they are empty.

Entries and exchanges in; entries dated by slots, and acts that came far later than their input, out. A
receiver's host grants slots before its GPU has come to the operation, and one more for each slot that the GPU
has emptied (NCCL 2.30, src/transport/net.cc recvProxyProgress). So the entry for the message that takes a
slot again proves that the rank had entered; and where the slot had been full for far longer than while the
rank waits for data, that it had not entered before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import classes, percentile
from dpuflow.entries.inputs import SLOTS, lines_of, messages_ahead
from dpuflow.entries.relative import places_of
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import FAR_BEYOND, FEWEST, QUICK, SLOW, Rule
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.rows import Entries, Times
    from dpuflow.matching import Instance

    Ints = NDArray[np.int64]


def date_by_slots(entries: Entries, exchanges: Picked, instances: Sequence[Instance]) -> Entries:
    """Date ranks that nothing else dates by the first slot that they gave back.

    It had been full for far longer than the quick ones (5 %) of its connection are, whose ranks waited for
    data: first slots, and those that were filled after these.
    """
    # When a rank without a capture gives a slot back may depend on what it sends. Of a transfer all was seen.
    may_send = [not i.was_captured(e) and i.op != Op.SEND_RECV for i in instances for e in i.order]
    silent = (entries.rule == Rule.UNSEEN) & entries.fed & ~np.array(may_send, bool)
    if not silent.any():
        return entries
    rows, of, line, begin, depth = _in_turn(exchanges, instances)
    run = np.repeat(np.arange(len(begin)), np.diff(np.r_[begin, len(rows)]))
    at = np.flatnonzero((depth[run] > 0) & (np.arange(len(rows)) + depth[run] < len(rows)))
    at = at[run[at + depth[run[at]]] == run[at]]  # the message that takes the same slot again
    again = at + depth[run[at]]
    granted, arrived = exchanges["grant_ns"][rows], exchanges["arrived_end_ns"][rows]
    turn = exchanges["order"][rows].astype(np.int64)
    seen = (arrived[at] != NEVER) & (granted[again] >= arrived[at]) & (turn[again] - turn[at] == again - at)
    at, again = at[seen], again[seen]
    waited = granted[again] - arrived[at]
    given = np.full(len(begin), FAR)
    first = at == begin[run[at]]
    given[run[at[first]]] = granted[again[first]]
    quick = np.full(len(at), np.nan)
    known = np.flatnonzero(first | (arrived[at] >= given[run[at]]))
    for same in classes(line[at[known]]):
        if len(same) >= FEWEST:
            quick[known[same]] = percentile(waited[known[same]], QUICK)
    to = places_of(of[at], exchanges["dst"][rows[at]], entries)
    posted = _unsteady(exchanges, instances)
    worst = _of_hosts(entries.endpoint[to], posted, 100)
    first &= silent[to]
    # Of several connections the first that shows it counts, as a first message does.
    soonest = np.full(len(silent), FAR)
    np.minimum.at(soonest, to[first], granted[again[first]])
    late = first & (waited > FAR_BEYOND * (quick + worst)) & (granted[again] == soonest[to])
    row, again = to[late], again[late]
    rule, enter, act, after = (getattr(entries, n).copy() for n in ("rule", "enter_ns", "act", "after"))
    rule[row], enter[row], after[row] = Rule.GIVEN_BACK, granted[again], entries.last[row]
    act[row] = exchanges["grant"][rows[again]]
    spread = entries.margins.spread_ns.copy()  # of transfers little else shows how hand-overs differ
    spread[row] = _of_hosts(entries.endpoint[row], posted, SLOW).astype(np.int64)
    leave = np.where(entries.leave_ns != NEVER, np.maximum(entries.leave_ns, enter), entries.leave_ns)
    idle = np.where(entries.idle_ns != NEVER, np.maximum(entries.idle_ns, leave), NEVER)
    return replace(
        entries, rule=rule, enter_ns=enter, act=act, after=after, leave_ns=leave,
        idle_ns=idle, margins=replace(entries.margins, spread_ns=spread),
    )  # fmt: skip


def late_to_inputs(entries: Entries, exchanges: Picked, instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Rows of NCCL's ranks that pass on what they receive, and came far later than their input.

    Later than three times the quickest (5 %) of the rank's own first messages come after their inputs in its
    group: as often at least it waits for them.
    """
    out = np.zeros(len(entries.rule), bool)
    passing = (
        (entries.rule == Rule.AFTER_INPUT)
        & (entries.signs.unmoved_ns != NEVER)
        & (entries.signs.moved_ns != NEVER)
    )
    passing &= entries.granted_ns != NEVER
    rows = np.flatnonzero(passing)
    if not len(rows):
        return out
    members = np.array([hash(tuple(sorted(i.order))) for i in instances], np.int64)[entries.collective[rows]]
    worst = _of_hosts(entries.endpoint[rows], _unsteady(exchanges, instances), 100)
    order = np.lexsort((members, entries.endpoint[rows]))
    new = (np.diff(members[order]) != 0) | (np.diff(entries.endpoint[rows[order]]) != 0)
    for at in np.split(order, np.flatnonzero(new) + 1):
        if len(at) >= FEWEST:
            mine = rows[at]
            limit = FAR_BEYOND * (percentile(entries.signs.moved_ns[mine], QUICK) + worst[at])
            idle = entries.signs.unmoved_ns[mine]
            credit = entries.credit_ns[mine]
            out[mine] = np.where(credit != NEVER, np.minimum(idle, credit), idle) > limit
    return out


def _unsteady(exchanges: Picked, instances: Sequence[Instance]) -> Times:
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
    is not known: of sends and receives, whose protocol is not told, a slot each.
    """
    ahead = [
        0 if i.placement.nodes else messages_ahead(i) or SLOTS * (i.op == Op.SEND_RECV) for i in instances
    ]
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


def _of_hosts(endpoint: Ints, posted: Times, level: float) -> NDArray[np.float64]:
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
