"""NCCL's ranks that pass on what they receive: which input their first message needs, how fast they take it.

In: the exchanges of all collectives. Out: when the inputs of first acts had come, and times from an input to
the clear-to-send entry that gives its slot back (NCCL 2.30, src/transport/net.cc recvProxyProgress).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import order_within
from dpuflow.schema.rows import NEVER, Op, Wire
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

_FAR = np.iinfo(np.int64).max
SLOTS: Final = NCCL_STEPS
"""Slots of a staging buffer. A message takes one, of Simple's rings
two."""


def reached_by_first(
    picked: Picked,
    receiver: NDArray[np.int64],
    enter: NDArray[np.int64],
    act_at: NDArray[np.int64],
    copied: NDArray[np.bool_],
    reached: NDArray[np.int64],
    after: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Of NCCL's ranks that send only what they received, correct what had reached them before their first
    act.

    No message of NCCL's algorithms needs more of any connection than its first so many: the first one sent
    needs at most the first of each. So what streams in behind that held nobody up. Which channel's it was is
    known where data is passed on as it is (``copied``), by its first bytes; else ``reached`` becomes the
    latest of those before the act, and the result is the earliest of them. ``act_at``: the message of the
    act, -1 for ranks that are not concerned.
    """
    earliest: NDArray[np.int64] = reached.copy()
    wire = picked["wire"]
    nccl = (wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)
    rows = np.flatnonzero(nccl & (act_at[receiver] >= 0)) if len(picked) else np.zeros(0, np.int64)
    line, to = picked["connection"][rows], receiver[rows]
    order = np.lexsort((picked["order"][rows], line, to))
    rows, line, to = rows[order], line[order], to[order]
    first = np.r_[True, (line[1:] != line[:-1]) | (to[1:] != to[:-1])][: len(rows)]
    rows, to = rows[first], to[first]
    when = picked["arrived_end_ns"][rows]
    there = (when != NEVER) & (when <= enter[to])
    rows, to, when = rows[there], to[there], when[there]
    sample = picked["context"]
    same = copied[rows] & (sample[rows] > 0) & (sample[rows] == sample[act_at[to]])
    told = np.zeros(len(reached), bool)
    told[to[same]] = True
    use = same | ~told[to]
    rows, to, when = rows[use], to[use], when[use]
    latest = np.full(len(reached), NEVER)
    np.maximum.at(latest, to, when)
    soonest = np.full(len(reached), _FAR)
    np.minimum.at(soonest, to, when)
    reached[to], earliest[to] = latest[to], soonest[to]
    ends = when == latest[to]
    after[to[ends]] = picked["data"][rows[ends]]
    return earliest


Times = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Rows of Entries, and ns."""


def consumed(
    picked: Picked,
    instances: Sequence[Instance],
    of: NDArray[np.int64],
    receiver: NDArray[np.int64],
    enter: NDArray[np.int64],
) -> tuple[Times, Times, Times]:
    """From an input's arrival to the entry that grants its slot again: (row of Entries, ns) of every one
    seen.

    The GPU has then taken it, and the proxy thread has seen that: as much as a send that waits for its input
    takes, on ranks that were in the operation (``enter``, by row of Entries) when it came. The second of both
    is from an operation's last input to the first entry of the next one, which its host may have held up:
    at the most, then, and so much more as other inputs are larger. The third is that of the last of all
    inputs of its rank, which waits for no other. ``of`` and ``receiver``: collective, and row of Entries, of
    each of ``picked``.
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
    for ahead in np.unique(depth).tolist():
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
    latest = np.full(len(enter), NEVER)
    np.maximum.at(latest, to, arrived)
    ends = at[arrived[at] == latest[to[at]]]
    return (
        (np.concatenate([none, *where]), np.concatenate([none, *found])),
        (to[at], between.round().astype(np.int64)),
        (to[ends], granted[ends + 1] - arrived[ends]),
    )


def lines_of(exchanges: Rows | Picked) -> NDArray[np.int64]:
    """Numbers the directions of connections."""
    line: NDArray[np.int64] = 2 * exchanges["connection"].astype(np.int64)
    line += exchanges["src"] > exchanges["dst"]
    return line


def messages_ahead(instance: Instance) -> int:
    """How many messages a receiver grants ahead of those its GPU has taken; 0 where that is not known.

    Of the pairs of an all_to_all a slot a message, as of single transfers: no protocol is told of these.
    """
    if instance.protocol is None or instance.algorithm is None:
        return SLOTS if instance.op == Op.ALL_TO_ALL and not instance.nodes else 0
    return SLOTS // 2 if instance.protocol == "simple" and instance.algorithm.name == "ring" else SLOTS
