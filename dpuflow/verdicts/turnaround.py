"""Whose packets wait between host and tap: a shaper, an egress queue that other programs fill.

In: exchanges, collectives, entries. Out: for each such endpoint how long its acknowledgments take. The
kernel, or the NIC, acknowledges data as it comes, whatever the rank computes; an ACK that leaves its own
node late had waited behind what else the node sends, and so had the rank's first message. Only ACKs within
an operation count: between two of them one may be held back until there is data to send it with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries import places_of
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.links import FEWEST, SLOW_FACTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


class Queue(NamedTuple):
    """How long the acknowledgments of an endpoint take, ns: nine in ten no longer than ``usual_ns``, 19 in 20
    no longer than ``most_ns``; of the other endpoints' in the median nine in ten take ``others_ns``."""

    usual_ns: int
    most_ns: int
    others_ns: int


def find_queues(
    exchanges: Rows, sent_ns: NDArray[np.int64], instances: Sequence[Instance], entries: Entries
) -> dict[int, Queue]:
    """The endpoints whose acknowledgments take far longer than their peers'; ``sent_ns`` of all messages."""
    of = np.full(len(exchanges), -1)
    for number, instance in enumerate(instances):
        of[instance.rows] = number
    known = (of >= 0) & (exchanges["retransmitted"] == 0)
    for name in ("taken_ns", "arrived_end_ns"):
        known &= exchanges[name] != NEVER
    # An ACK that a message carries may have waited for that message.
    at = np.flatnonzero(known & ~np.isin(exchanges["taken_ns"], sent_ns))
    came, taken = exchanges["arrived_end_ns"][at], exchanges["taken_ns"][at]
    row = places_of(of[at], exchanges["dst"][at], entries)
    inside = (row >= 0) & (came >= entries.enter_ns[row]) & (taken <= entries.leave_ns[row])
    took, end = (taken - came)[inside], entries.endpoint[row[inside]]
    seen = [e for e in np.unique(end).tolist() if np.count_nonzero(end == e) >= FEWEST]
    told = {e: np.percentile(took[end == e], (90, 95)) for e in seen}
    found = {}
    for endpoint, (usual, most) in told.items():
        others = [float(each[0]) for e, each in told.items() if e != endpoint]
        # A single peer may be the quick one.
        if len(others) > 1 and usual > SLOW_FACTOR * max(np.median(others), 1.0):
            found[endpoint] = Queue(round(usual), round(most), round(float(np.median(others))))
    return found


def queued_ns(queues: dict[int, Queue], entries: Entries) -> NDArray[np.int64]:
    """Per row of Entries how long its first message may have waited in its node's queue; 0 where in none."""
    found = np.zeros(len(entries.endpoint), np.int64)
    for endpoint, queue in queues.items():
        found[entries.endpoint == endpoint] = queue.most_ns
    return found
