"""Collectives that queue inside the library behind others of the same group (DDP's buckets).

In: entries of all collectives. Out: which of them may have been called before they show on the wire.

A blocking caller cannot have two collectives of one group open at once. Where a rank ever has, calls are
handed to workers of the library, as many as were ever seen busy together. One that starts as another ends,
while all workers had been busy, may have been called long before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.handover import is_gloo
from dpuflow.schema import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness.entries import Entries
    from dpuflow.lateness.handover import Usual
    from dpuflow.tables import Rows


def queued_rows(
    entries: Entries, exchanges: Rows, instances: Sequence[Instance], usual: Usual
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """Rows that may have queued; the TRANSFER row whose arrival let each start; the earliest it was called.

    A group's calls come in order, so none was called before the last one of its rank that did not queue.
    """
    total = len(entries.endpoint)
    queued = np.zeros(total, bool)
    behind = np.full(total, NONE32, np.int64)
    called = np.full(total, NEVER, np.int64)
    lane = _lanes(exchanges, instances)[entries.collective]
    # Open while the rank has not yet received all it needs; who receives nothing is never known to be.
    done = np.where(entries.fed, entries.leave_ns, entries.enter_ns)
    good = np.flatnonzero((lane >= 0) & (entries.enter_ns != NEVER))
    order = good[np.lexsort((entries.enter_ns[good], entries.endpoint[good], lane[good]))]
    if not len(order):
        return queued, behind, called
    enter, done = entries.enter_ns[order], done[order]
    # A worker is free once it has all it needs, or once its own data has left as well: that is the later.
    idle = np.maximum(entries.idle_ns[order], done)
    new = np.r_[
        True,
        (lane[order][1:] != lane[order][:-1]) | (entries.endpoint[order][1:] != entries.endpoint[order][:-1]),
    ]
    starts = np.flatnonzero(new)
    if not (enter[1:] < np.maximum.accumulate(done)[:-1])[~new[1:]].any():
        return queued, behind, called  # quickly: nothing overlaps anywhere
    pieces = [slice(a, b) for a, b in zip(starts, np.r_[starts[1:], len(order)], strict=True)]
    busy = np.zeros(len(order), np.int64)
    for piece in pieces:
        busy[piece] = _open_before(enter[piece], done[piece])
    workers = np.zeros(int(lane.max()) + 1, np.int64)
    np.maximum.at(workers, lane[order], busy + 1)
    slack = np.nan_to_num(usual.most_ns[order], nan=0.0) * 2
    for piece in pieces:
        room = int(workers[lane[order[piece.start]]])
        if room > 1:
            full, first = _was_full(enter[piece], idle[piece], slack[piece], room)
            rows = order[piece]
            queued[rows] = full
            behind[rows] = entries.last[rows[first]]
            free = np.where(full, NEVER, enter[piece])
            called[rows] = np.r_[NEVER, np.maximum.accumulate(free)[:-1]]
    return queued, behind, called


def _lanes(exchanges: Rows, instances: Sequence[Instance]) -> NDArray[np.int64]:
    """Numbers the communicators: same ranks, same context, connections in common.

    -1 for single transfers, and where the caller itself carries out its collectives: only Gloo's users hand
    them to threads.
    """
    lane = np.full(len(instances), -1, np.int64)
    parent: list[int] = []
    named: dict[tuple[object, ...], int] = {}

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i] = parent[parent[i]]
        return i

    contexts, lines, wires = exchanges["context"], exchanges["connection"], exchanges["wire"]
    for number, instance in enumerate(instances):
        if instance.op == Op.SEND_RECV or not len(instance.rows) or not is_gloo(wires[instance.rows[0]]):
            continue
        ranks, context = frozenset(instance.order), int(contexts[instance.rows[0]])
        own = len(parent)
        parent.append(own)
        lane[number] = own
        for line in np.unique(lines[instance.rows]).tolist():
            other = named.setdefault((ranks, context, line), own)
            parent[find(own)] = find(other)
    return np.array([find(i) if i >= 0 else -1 for i in lane.tolist()], np.int64)


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
