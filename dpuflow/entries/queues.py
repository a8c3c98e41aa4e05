"""Collectives that queue inside the library behind others of the same group (DDP's buckets).

In: entries of all collectives. Out: which of them may have been called before they show on the wire, and what
bounds that call.

A blocking caller cannot have two collectives of one group open at once. Where a rank ever has, calls are
handed to workers of the library, as many as were ever seen busy together. One that starts as another ends,
while all workers had been busy, may have been called long before: not before the rank's last call that did
not queue. Ranks that call one after the other in one go (buckets of a backward pass) stay as far apart as
they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import classes, distinct, key_numbers, order_within
from dpuflow.entries.reactions import is_gloo
from dpuflow.entries.rows import FAR_BEYOND, FEWEST
from dpuflow.schema.rows import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


class Queued(NamedTuple):
    """Per row of Entries."""

    rows: Bools  # may have queued
    behind: Ints  # TRANSFER row whose arrival let it start; NONE32 for none
    called_ns: Ints  # it was called no earlier than this: the rank's last call that did not queue ...
    called: Ints  # ... of which this TRANSFER row is the first act; NONE32 for none
    lead_ns: Ints  # so much later than a peer, if their calls follow each other alike; else NEVER


def queued_rows(
    entries: Entries, exchanges: Rows | Picked, instances: Sequence[Instance], law: Law
) -> Queued:
    """Rows that may have queued: all workers were busy until no longer before than the law allows.

    A group's calls come in order, so none was called before the last one of its rank that did not queue.
    Ranks that do the same work from one call to the next stay as far apart as they were at that one.
    """
    total = len(entries.endpoint)
    out = Queued(
        np.zeros(total, bool),
        np.full(total, NONE32, np.int64),
        np.full(total, NEVER, np.int64),
        np.full(total, NONE32, np.int64),
        np.full(total, NEVER, np.int64),
    )
    lane = _lanes(exchanges, instances)[entries.collective]
    # Who receives nothing is never known to be open.
    done = np.where(entries.fed, entries.leave_ns, entries.enter_ns)
    pieces = _calls(entries, lane)
    workers = np.ones(int(lane.max(initial=0)) + 1, np.int64)
    kind = key_numbers((i.op, i.size) for i in instances)[entries.collective]
    ahead = np.zeros(len(instances), bool)  # kinds of calls that were ever made while another was open
    for rows in pieces:
        busy = _open_before(entries.enter_ns[rows], done[rows])
        ahead[kind[rows[busy > 0]]] = True
        workers[lane[rows[0]]] = max(int(workers[lane[rows[0]]]), int(busy.max()) + 1)
    turn = np.zeros(total, np.int64)  # how many calls ago the last one was that did not queue
    gap = np.full(total, NEVER, np.int64)  # from call to call, where neither queued and the first went on
    slack = np.nan_to_num(np.fmax(FAR_BEYOND * law.slow_ns, law.worst_ns), nan=0.0)
    for rows in pieces:
        room = int(workers[lane[rows[0]]])
        if room < 2:
            continue
        enter, number = entries.enter_ns[rows], np.arange(len(rows))
        idle = np.maximum(entries.idle_ns[rows], done[rows])  # its own data has left as well
        full, first = _was_full(enter, idle, slack[rows], room)
        out.rows[rows], out.behind[rows] = full, entries.last[rows[first]]
        last = np.r_[-1, np.maximum.accumulate(np.where(full, -1, number))[:-1]]
        out.called_ns[rows] = np.where(last >= 0, enter[last], NEVER)
        out.called[rows] = np.where(last >= 0, entries.act[rows[last]], NONE32)
        # One that began when all others were done may have been called by who had waited for them.
        alone = full & ~ahead[kind[rows]] & (_open_before(enter, idle) == 0)
        waited = np.maximum.accumulate(np.where(alone, number, -1))
        turn[rows] = np.where((last >= 0) & (waited < last), number - last, 0)
        goes_on = np.r_[False, enter[1:] < done[rows][:-1]] & ~full & (last == number - 1)
        gap[rows[goes_on]] = np.diff(enter, prepend=0)[goes_on]
    _leads(out, entries, lane, turn, gap)
    return out


def _calls(entries: Entries, lane: Ints) -> list[Ints]:
    """Each rank's calls of each communicator (``lane``, -1: of none), in order of time."""
    good = np.flatnonzero((lane >= 0) & (entries.enter_ns != NEVER))
    good = good[order_within(entries.enter_ns[good], lane[good])]
    return [good[at] for at in classes(lane[good], entries.endpoint[good])]


def _leads(queued: Queued, entries: Entries, lane: Ints, turn: Ints, gap: Ints) -> None:
    """Fill in ``lead_ns``: a rank's distance from its peers at the last call that did not queue.

    Less what ranks differ by from one such call to the next (95 %), as often as they have called since; it
    adds as squares.
    """
    for each in distinct(lane[queued.rows]).tolist():
        mine = np.flatnonzero((lane == each) & (gap != NEVER))
        apart: list[int] = []
        for collective in distinct(entries.collective[mine]).tolist():
            own = np.sort(gap[mine[entries.collective[mine] == collective]])
            apart += [int(b - a) for place, a in enumerate(own) for b in own[place + 1 :]]
        if len(apart) < FEWEST:
            continue
        margin = float(np.percentile(apart, 95))
        known = np.flatnonzero((lane == each) & queued.rows & (turn > 0))
        for collective in distinct(entries.collective[known]).tolist():
            rows = known[entries.collective[known] == collective]
            for row in rows:
                # Who has not called as often since may have more work before this call.
                fair = rows[(turn[rows] == turn[row]) & (rows != row)]
                if len(fair):
                    lead = queued.called_ns[row] - queued.called_ns[fair].min() - margin * np.sqrt(turn[row])
                    queued.lead_ns[row] = round(max(float(lead), 0.0))


def _lanes(exchanges: Rows | Picked, instances: Sequence[Instance]) -> Ints:
    """Numbers the communicators: same ranks, same context, connections in common.

    -1 for single transfers, and where the caller itself carries out its collectives: only Gloo's users hand
    them to threads.
    """
    lane = np.full(len(instances), -1, np.int64)
    meets: list[list[tuple[object, ...]]] = []
    owner: list[int] = []
    contexts, lines, wires = exchanges["context"], exchanges["connection"], exchanges["wire"]
    for number, instance in enumerate(instances):
        if instance.op == Op.SEND_RECV or not len(instance.rows) or not is_gloo(wires[instance.rows[0]]):
            continue
        ranks, context = frozenset(instance.order), int(contexts[instance.rows[0]])
        owner.append(number)
        meets.append([(ranks, context, line) for line in distinct(lines[instance.rows]).tolist()])
    for own, members in enumerate(connected(range(len(owner)), meets.__getitem__)):
        lane[[owner[place] for place in members]] = own
    return lane


def _open_before(enter: Ints, done: Ints) -> Ints:
    """How many of a rank's collectives were open when each one began; in order of ``enter``."""
    ended = np.searchsorted(np.sort(done), enter, side="right")
    begun = np.searchsorted(enter, enter, side="left")
    return np.asarray(np.maximum(begun - ended, 0), np.int64)


def _was_full(enter: Ints, idle: Ints, slack: Floats, room: int) -> tuple[Bools, Ints]:
    """Whether ``room`` earlier ones were open until shortly before each began; the first of them to end."""
    by_end = np.argsort(idle, kind="stable")
    gone = np.searchsorted(idle[by_end], enter - slack, side="left")
    begun = np.searchsorted(enter, enter, side="left")
    return begun - gone >= room, by_end[np.minimum(gone, len(by_end) - 1)]
