"""How quickly hosts hand messages on in mid-operation, each time that a capture shows it.

In: exchanges with their dependencies, when each rank entered. Out: ``Reactions``. A rank that had sent all it
could and waited for an input sends within its host's reaction once that is there; NCCL's grants a slot again
when its GPU has taken what was in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct, lower_medians, order_within
from dpuflow.entries.inputs import lines_of, messages_ahead
from dpuflow.entries.rows import FAR
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.places import Needs
    from dpuflow.entries.rows import Times
    from dpuflow.matching import Instance


def waited_sends(
    picked: Picked, needs: Needs, sender: Ints, receiver: Ints, enter: Ints
) -> tuple[Ints, Ints]:
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
        sender, receiver, *times, ready, _begun_before(picked, sender, start),
        needs.mapped.view(np.uint8), needs.split.view(np.uint8), enter, min(seen),
        np.empty(waits.KINDS * len(enter) + 1, np.int64), keys, order, room, own, after,
    )  # fmt: skip
    # A blocking exchange ends when both its halves have: the rank may have waited for its own send, too.
    return own[:found], after[:found]


def _begun_before(picked: Picked, sender: Ints, start: Ints) -> Ints:
    """When NCCL had begun the send before each on the same connection: its thread blocks do not wait for each
    other. NEVER for the first one there, and of other libraries."""
    wire, line = picked["wire"], lines_of(picked)
    rows = np.flatnonzero(((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)) & (start != NEVER))
    rows = rows[np.lexsort((start[rows], line[rows], sender[rows]))]
    same = (sender[rows[1:]] == sender[rows[:-1]]) & (line[rows[1:]] == line[rows[:-1]])
    before = np.full(len(picked), NEVER)
    before[rows[1:][same]] = start[rows[:-1][same]]
    return before


def _behind_own_data(picked: Picked, sender: Ints, start: Ints, ready: Ints) -> Ints:
    """NCCL's sends whose rank was still sending when their input came: they waited for the wire, not for
    that.

    NCCL's thread blocks fill slots while the network takes those before; a blocking caller has one at a time.
    """
    wire = picked["wire"]
    rows = np.flatnonzero(((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)) & (start != NEVER))
    rows = rows[order_within(start[rows], sender[rows])]
    if len(rows) < 2:
        return rows[:0]
    same = sender[rows[1:]] == sender[rows[:-1]]
    busy = same & (picked["data_end_ns"][rows[:-1]] > ready[rows[1:]])
    behind: Ints = rows[1:][busy]
    return behind


def granted_data_ns(picked: Picked, sender: Ints) -> Ints:
    """How long Open MPI's hosts take from a grant to the data that it allows, where the rank was sending
    nothing else: it is inside the call and was waiting for the grant.
    """
    wire, start, end = picked["wire"], picked["data_ns"], picked["data_end_ns"]
    granted = picked["grant_arrived_ns"]
    mine = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (start != NEVER)
    rows = np.flatnonzero(mine)
    rows = rows[order_within(start[rows], sender[rows])]
    lone = (granted[rows] != NEVER) & (picked["offer_ns"][rows] != NEVER) & (granted[rows] < start[rows])
    lone &= _alone(sender[rows], np.where(granted[rows] != NEVER, granted[rows], start[rows]), end[rows])
    # What is the first to fill a connection's window takes longer than any that follows.
    large = np.flatnonzero(lone)
    lone[large[np.unique(lines_of(picked)[rows[large]], return_index=True)[1]]] = False
    return np.asarray((start - granted)[rows[lone]], np.int64)


def _alone(sender: Ints, allowed: Ints, end: Ints) -> Bools:
    """Data before which its sender had sent all else that had been allowed by then.

    What was allowed later and left before it excuses nothing: then its own was left lying.
    """
    order = order_within(allowed, sender)
    out = np.ones(len(order), bool)
    for mine in np.split(order, np.flatnonzero(np.diff(sender[order])) + 1):
        out[mine[1:]] = np.maximum.accumulate(end[mine])[:-1] <= allowed[mine[1:]]
    return out


def is_gloo(wire: int) -> bool:
    """Whether messages of this ``wire`` are Gloo's."""
    return bool(Wire.GLOO_DATA <= wire <= Wire.GLOO_RECV_READY)


def typical(total: int, of: Ints, values: Ints) -> Ints:
    """The lower median of each row's values; NEVER for rows without."""
    return lower_medians(values, of, np.full(total, NEVER, np.int64))


def consumed(
    picked: Picked, instances: Sequence[Instance], of: Ints, receiver: Ints, enter: Ints
) -> tuple[Times, Times]:
    """From an input's arrival to the entry that grants its slot again: (row of Entries, ns) of every one
    seen.

    The GPU has then taken it, and the proxy thread has seen that: as much as a send that waits for its input
    takes, on ranks that were in the operation (``enter``, by row of Entries) when it came. The second of both
    is from an operation's last input to the first entry of the next one, which its host may have held up:
    at the most, then, and so much more as other inputs are larger. ``of`` and ``receiver``: collective, and
    row of Entries, of each of ``picked``.
    """
    depth = np.fromiter((messages_ahead(i) for i in instances), np.int64, len(instances))[of]
    rows = np.flatnonzero((depth > 0) & (picked["wire"] == Wire.ROCE_WRITE_IMM)) if len(picked) else depth
    line, to = lines_of(picked)[rows], receiver[rows]
    order = order_within(picked["order"][rows].astype(np.int64), line)
    rows, line, to = rows[order], line[order], to[order]
    turn, depth, size = picked["order"][rows].astype(np.int64), depth[rows], picked["bytes"][rows]
    granted, arrived = picked["grant_ns"][rows], picked["arrived_end_ns"][rows]
    inside = (arrived != NEVER) & (granted != NEVER) & (enter[to] != NEVER) & (enter[to] <= arrived)
    where, found = [], []
    for ahead in distinct(depth).tolist():
        same = (line[ahead:] == line[:-ahead]) & (to[ahead:] == to[:-ahead]) & (depth[ahead:] == ahead)
        at = np.flatnonzero(same & inside[:-ahead])
        at = at[granted[at + ahead] >= arrived[at]]
        where.append(to[at])
        found.append(granted[at + ahead] - arrived[at])
    none = np.zeros(0, np.int64)
    largest = np.zeros(len(enter), np.int64)
    np.maximum.at(largest, to, size.astype(np.int64))
    last = (line[1:] == line[:-1]) & (to[1:] != to[:-1]) & (turn[1:] == turn[:-1] + 1) & inside[:-1]
    at = np.flatnonzero(last)
    at = at[(granted[at + 1] >= arrived[at]) & (size[at] > 0)]
    more = largest[to[at]] / np.maximum(size[at], 1).astype(np.float64)
    between = (granted[at + 1] - arrived[at]) * more
    return (
        (np.concatenate([none, *where]), np.concatenate([none, *found])),
        (to[at], between.round().astype(np.int64)),
    )
