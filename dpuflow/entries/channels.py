"""The channels of rings that run over several connections between the same ranks.

In: an operation's exchanges, sorted by sender and connection. Out: those of each channel. What comes over one
connection goes on over another of the same channel; which one the times say: nothing leaves before it has
come, and always about as long after. NCCL, src/graph/connect.cc connectRings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.matching.model import MOST
from dpuflow.schedules.graph import arcs
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.tables import Rows


def started_ns(exchanges: Rows | Picked) -> Ints:
    """When the sender of each exchange first acted: offered its data, or sent it."""
    return np.where(exchanges["offer_ns"] != NEVER, exchanges["offer_ns"], exchanges["data_ns"])


def channels_of(
    picked: Picked, whole: Ints, algorithm: Algorithm, ranks: Sequence[int], one: Instance
) -> list[Ints]:
    """The messages of each channel, and of each loop over its buffers; empty where they cannot be told.

    ``whole``: (operations, messages), each operation's by sender, connection and time, all like ``one``.
    """
    n = len(ranks)
    steps, rest = divmod(len(arcs(algorithm, n, 0)[0].src), n)
    first = whole[0]
    count, more = divmod(len(distinct(picked["connection"][first])), n)
    if rest or more or count < 2 or whole.shape[1] % (n * count * steps):
        return []
    shaped = whole.reshape(len(whole), n, count, -1)
    line, src = picked["connection"][shaped], picked["src"][shaped]
    if (line != line[:1, :, :, :1]).any() or (src != src[:1, :, :1, :1]).any():
        return []
    cuts = shaped.shape[3] // steps  # messages of a step: slices, and loops
    slices = {"simple": 2, "ll": 1}.get(one.slicing.protocol or "", cuts)
    if cuts % slices:
        return []
    channel = _channels(picked, shaped, np.argsort(np.argsort(ranks)), slices)
    if channel is None:
        return []
    found = []
    for number in range(count):
        mine = shaped[:, np.arange(n), np.argmax(channel == number, axis=1)]
        loops = mine.reshape(len(whole), n, cuts // slices, -1)
        found += [loops[:, :, k].reshape(len(whole), -1) for k in range(cuts // slices)]
    return found


def _channels(picked: Picked, shaped: Ints, ring: Ints, slices: int) -> Ints | None:
    """The channel of each connection (senders, connections); None where they do not come round.

    ``ring``: rows of the senders one after the other.
    """
    starts, arrivals = started_ns(picked)[shaped], picked["arrived_end_ns"][shaped]
    largest = picked["bytes"][shaped[0]].max(axis=2)
    n, count = shaped.shape[1:3]
    channel = np.zeros((n, count), np.int64)
    channel[ring[0]] = np.arange(count)
    for place in range(1, n + 1):
        before, here = ring[place - 1], ring[place % n]
        alike = largest[before][:, None] == largest[here][None, :]
        goes_on = _goes_on(arrivals[:, before, :, :-slices], starts[:, here, :, slices:], alike)
        if goes_on is None:
            return None
        mine = np.empty(count, np.int64)
        mine[goes_on] = channel[before]
        if place == n:
            return channel if (mine == channel[here]).all() else None
        channel[here] = mine
    return None


def _goes_on(came: Ints, left: Ints, alike: Bools) -> Ints | None:
    """For each connection into a rank the one out of it that goes on with its messages.

    (operations, connections, messages): when each came, and when that which needs it left. Of one channel
    nothing leaves before it has come; and how long that took differs least, for another one's comes as much
    before as its own goes on later. ``alike``: whose largest messages are of one size, (into, out).
    """
    from dpuflow.kernels import passing

    count = came.shape[1]
    cost = np.full((count, count), np.inf)
    end = left.max(initial=0)
    longest = max(float(end - came[came != NEVER].min(initial=end)), 1.0)
    came = np.ascontiguousarray(came)
    left = np.ascontiguousarray(left.swapaxes(0, 1)).reshape(count, -1)
    known, before = np.empty((2, count, count), np.int64)
    passing.handed(came, left, known, before)
    early = before / np.maximum(known, 1)
    fits = alike & (known > 0) & (early <= 1 - MOST)
    # The quarters of what it took, as ``percentiles`` takes them.
    last = known[fits][:, None] - 1
    place = last * np.array([0.25, 0.75])
    below = place.astype(np.int64)
    places = np.stack([below, np.minimum(below + 1, last)], axis=2).reshape(-1, 4)
    found = np.empty_like(places)
    pairs = np.ascontiguousarray(np.argwhere(fits))
    passing.took(came, left, pairs, places, np.empty(left.shape[1], np.int64), found)
    (low, high), part = found.reshape(-1, 2, 2).transpose(2, 0, 1), place - below
    low, high = np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1 - part)).T
    cost[fits] = early[fits] + (high - low) / longest
    chosen = np.full(count, -1)
    for _ in range(count):
        into, out = divmod(int(np.argmin(cost)), count)
        if not np.isfinite(cost[into, out]):
            return None
        chosen[into] = out
        cost[into], cost[:, out] = np.inf, np.inf
    return chosen
