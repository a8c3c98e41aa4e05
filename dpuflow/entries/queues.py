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

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.entries.handover import is_gloo
from dpuflow.entries.rules import FAR_BEYOND, FEWEST
from dpuflow.schema.rows import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


class Queued(NamedTuple):
    """Per row of Entries."""

    rows: NDArray[np.bool_]  # may have queued
    behind: NDArray[np.int64]  # TRANSFER row whose arrival let it start; NONE32 for none
    called_ns: NDArray[
        np.int64
    ]  # it was called no earlier than this: the rank's last call that did not queue ...
    called: NDArray[np.int64]  # ... of which this TRANSFER row is the first act; NONE32 for none
    lead_ns: NDArray[
        np.int64
    ]  # so much later than a peer, if their calls follow each other alike; else NEVER


class _Calls(NamedTuple):
    """A rank's calls of one communicator after the other (``pieces``), in order of time; by call."""

    order: NDArray[np.int64]  # rows of Entries
    pieces: list[slice]
    lane: NDArray[np.int64]  # of each row of Entries its communicator
    enter: NDArray[np.int64]
    done: NDArray[np.int64]  # the rank has all that it needs; who receives nothing is never known to be open
    idle: NDArray[np.int64]  # ... and its own data has left as well: a worker is free

    def overlap(self) -> bool:
        """Whether any call began before all those of its rank before it were done."""
        return any(
            bool((self.enter[p][1:] < np.maximum.accumulate(self.done[p])[:-1]).any()) for p in self.pieces
        )

    def workers(self) -> NDArray[np.int64]:
        """How many calls each communicator carries out at a time, at least."""
        busy = np.zeros(len(self.order), np.int64)
        for piece in self.pieces:
            busy[piece] = _open_before(self.enter[piece], self.done[piece])
        workers = np.zeros(int(self.lane.max()) + 1, np.int64)
        np.maximum.at(workers, self.lane[self.order], busy + 1)
        return workers


def queued_rows(
    entries: Entries,
    exchanges: Rows,
    instances: Sequence[Instance],
    law: Law,
) -> Queued:
    """Rows that may have queued.

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
    calls = _calls(entries, _lanes(exchanges, instances)[entries.collective])
    if not calls.overlap():
        return out
    workers = calls.workers()
    several = [p for p in calls.pieces if workers[calls.lane[calls.order[p.start]]] > 1]
    calls = calls._replace(pieces=several)
    full, may, first = _full(calls, workers, law)
    # Of calls that most peers had to queue a rank's own has, too.
    which = entries.collective[calls.order]
    number = np.bincount(which, minlength=len(instances))
    full |= may & (2 * np.bincount(which[full], minlength=len(instances)) >= number)[which]
    turn = np.zeros(total, np.int64)  # how many calls ago the last one was that did not queue
    gap = np.full(total, NEVER, np.int64)  # from call to call, where neither queued and the first went on
    for piece in calls.pieces:
        rows, enter, number = calls.order[piece], calls.enter[piece], np.arange(piece.stop - piece.start)
        out.rows[rows] = full[piece]
        out.behind[rows] = entries.last[calls.order[first[piece]]]
        last = np.r_[-1, np.maximum.accumulate(np.where(may[piece], -1, number))[:-1]]
        out.called_ns[rows] = np.where(last >= 0, enter[last], NEVER)
        out.called[rows] = np.where(last >= 0, entries.act[rows[last]], NONE32)
        turn[rows] = np.where(last >= 0, number - last, 0)
        goes_on = np.r_[False, enter[1:] < calls.done[piece][:-1]] & ~may[piece] & (last == number - 1)
        gap[rows[goes_on]] = np.diff(enter, prepend=0)[goes_on]
    _leads(out, entries, calls.lane, turn, gap)
    return out


def _calls(entries: Entries, lane: NDArray[np.int64]) -> _Calls:
    """The calls of communicators (``lane``, -1: of none)."""
    good = np.flatnonzero((lane >= 0) & (entries.enter_ns != NEVER))
    order = good[np.lexsort((entries.enter_ns[good], entries.endpoint[good], lane[good]))]
    done = np.where(entries.fed, entries.leave_ns, entries.enter_ns)[order]
    keys = np.stack([lane[order], entries.endpoint[order]])
    starts = np.flatnonzero(np.r_[True, (np.diff(keys, axis=1) != 0).any(axis=0)][: len(order)])
    pieces = [slice(a, b) for a, b in itertools.pairwise([*starts.tolist(), len(order)])]
    idle = np.maximum(entries.idle_ns[order], done)
    return _Calls(order, pieces, lane, entries.enter_ns[order], done, idle)


def _full(
    calls: _Calls, workers: NDArray[np.int64], law: Law
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """Calls at which all workers were busy, those at which they may have been, and of the calls before each
    the first one to end (its place among ``calls``)."""
    order = calls.order
    slack = np.nan_to_num(law.most_ns[order], nan=0.0) * 2
    # A busy host starts what had queued as late as it reacts at its slowest.
    far = np.maximum(slack, np.nan_to_num(law.slow_ns[order], nan=0.0) * FAR_BEYOND)
    far = np.maximum(far, np.nan_to_num(law.worst_ns[order], nan=0.0))
    full, may = np.zeros((2, len(order)), bool)
    first = np.zeros(len(order), np.int64)
    for piece in calls.pieces:
        room = int(workers[calls.lane[order[piece.start]]])
        full[piece], _ = _was_full(calls.enter[piece], calls.idle[piece], slack[piece], room)
        may[piece], ended = _was_full(calls.enter[piece], calls.idle[piece], far[piece], room)
        first[piece] = ended + piece.start
        for place in range(piece.start + 1, piece.stop):
            full[place] |= may[place] and full[place - 1]  # the calls before it queue still
    return full, may, first


def _leads(
    queued: Queued,
    entries: Entries,
    lane: NDArray[np.int64],
    turn: NDArray[np.int64],
    gap: NDArray[np.int64],
) -> None:
    """Fill in ``lead_ns``: a rank's distance from its peers at the last call that did not queue.

    Less what ranks differ by from one such call to the next (95 %), as often as they have called since; it
    adds as squares.
    """
    for each in np.unique(lane[queued.rows]).tolist():
        mine = np.flatnonzero((lane == each) & (gap != NEVER))
        apart: list[int] = []
        for collective in np.unique(entries.collective[mine]).tolist():
            own = np.sort(gap[mine[entries.collective[mine] == collective]])
            apart += [int(b - a) for place, a in enumerate(own) for b in own[place + 1 :]]
        if len(apart) < FEWEST:
            continue
        margin = float(np.percentile(apart, 95))
        known = np.flatnonzero((lane == each) & queued.rows & (queued.called_ns != NEVER))
        for collective in np.unique(entries.collective[known]).tolist():
            rows = known[entries.collective[known] == collective]
            for row in rows:
                # Who has not called as often since may have more work before this call.
                fair = rows[(turn[rows] == turn[row]) & (rows != row)]
                if len(fair):
                    lead = queued.called_ns[row] - queued.called_ns[fair].min() - margin * np.sqrt(turn[row])
                    queued.lead_ns[row] = round(max(float(lead), 0.0))


def _lanes(exchanges: Rows, instances: Sequence[Instance]) -> NDArray[np.int64]:
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
        meets.append([(ranks, context, line) for line in np.unique(lines[instance.rows]).tolist()])
    for own, members in enumerate(connected(range(len(owner)), meets.__getitem__)):
        lane[[owner[place] for place in members]] = own
    return lane


def _open_before(enter: NDArray[np.int64], done: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of a rank's collectives were open when each one began; in order of ``enter``."""
    ended = np.searchsorted(np.sort(done), enter, side="right")
    begun = np.searchsorted(enter, enter, side="left")
    return np.asarray(np.maximum(begun - ended, 0), np.int64)


def _was_full(
    enter: NDArray[np.int64], idle: NDArray[np.int64], slack: NDArray[np.float64], room: int
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether ``room`` earlier ones were open until shortly before each began; the first of them to end."""
    by_end = np.argsort(idle, kind="stable")
    gone = np.searchsorted(idle[by_end], enter - slack, side="left")
    begun = np.searchsorted(enter, enter, side="left")
    return begun - gone >= room, by_end[np.minimum(gone, len(by_end) - 1)]
