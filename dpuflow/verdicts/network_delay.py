"""Where the network kept ranks: messages that were held up, and packets that wait between host and tap.

In: exchanges, collectives, entries. Out: for how long the network may have kept each rank of each collective,
and for each endpoint behind a queue how long its acknowledgments take. A packet that is sent again need not
hold anything up: hosts that acknowledge late make their peers repeat what has arrived. What counts is how
long messages with repeated packets were under way beyond the usual, and that excuses the ranks of their own
collective, and of the next one that these enter, by as much: of that time, on that path, by that amount.

The kernel, or the NIC, acknowledges data as it comes, whatever the rank computes; an ACK that leaves its own
node late had waited behind what else the node sends (a shaper, an egress queue that other programs fill),
and so had the rank's first message. Only ACKs within an operation count: between two of them one may be held
back until there is data to send it with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes
from dpuflow.arrays.stretches import covered_ns
from dpuflow.entries import places_of, previous_row
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.links import FEWEST, SLOW_FACTOR
from dpuflow.verdicts.persistence import is_material

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.links import Links


def excused_ns(
    exchanges: Rows, instances: Sequence[Instance], entries: Entries, held_up: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Per row of Entries: so long, between its rank's last leave and its entry, messages from or to that rank
    were ``held_up`` (see there). Of that path and that time alone: what is held up later, or between others,
    kept no rank from entering."""
    out = np.zeros(len(entries.endpoint), np.int64)
    if not instances or not held_up.any():
        return out
    held, rows = held_stretches(exchanges, np.concatenate([i.rows for i in instances]), held_up)
    src, dst = exchanges["src"][rows], exchanges["dst"][rows]
    last = previous_row(entries)
    since = np.where(last >= 0, entries.leave_ns[last], NEVER)
    # Who enters before it has left another group's collective works on both since it entered that one.
    since = np.where((last >= 0) & (since > entries.enter_ns), entries.enter_ns[last], since)
    for mine in classes(entries.endpoint):
        endpoint = entries.endpoint[mine[0]]
        path = (src == endpoint) | (dst == endpoint)
        for row in mine[entries.enter_ns[mine] != NEVER].tolist() if path.any() else []:
            out[row] = covered_ns(held[:, path], since[row], entries.enter_ns[row])
    return out


def held_up(exchanges: Rows, links: Links) -> NDArray[np.bool_]:
    """Messages of which packets were sent again, or marked by a queue, and those over slow links."""
    found = np.asarray((exchanges["retransmitted"] > 0) | (exchanges["ecn_marked"] > 0), np.bool_)
    for src, dst in zip(links.src[links.slow].tolist(), links.dst[links.slow].tolist(), strict=True):
        found |= (exchanges["src"] == src) & (exchanges["dst"] == dst)
    return found


def held_stretches(
    exchanges: Rows, at: NDArray[np.int64], held_up: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When messages that were ``held_up``, of those in rows ``at``, were under way beyond the usual time for
    a byte of these: stretches from and until, and their rows."""
    known = (exchanges["data_ns"][at] != NEVER) & (exchanges["arrived_end_ns"][at] != NEVER)
    at = at[known & (exchanges["packets"][at] > 0)]
    sizes, end = exchanges["bytes"][at].astype(np.float64), exchanges["arrived_end_ns"][at]
    took, again = end - exchanges["data_ns"][at], held_up[at]
    if not again.any():
        return np.zeros((2, 0), np.int64), at[:0]
    pace = took / np.maximum(sizes, 1)
    usual = float(np.median(pace[~again])) if not again.all() else float(pace.min())
    beyond = np.maximum(took - usual * sizes, 0).astype(np.int64)
    again &= beyond > 0
    return np.stack([end - beyond, end])[:, again], at[again]


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
        if (
            instance.placement.processes is None and not instance.hides_ranks
        ):  # else others at the endpoint are not in it
            of[instance.rows] = number
    known = (of >= 0) & (exchanges["retransmitted"] == 0)
    for name in ("taken_ns", "arrived_end_ns"):
        known &= exchanges[name] != NEVER
    # An ACK that a message carries may have waited for that message.
    at = np.flatnonzero(known)
    if not len(at):
        return {}
    at = at[~np.isin(exchanges["taken_ns"][at], sent_ns)]
    came, taken = exchanges["arrived_end_ns"][at], exchanges["taken_ns"][at]
    row = places_of(of[at], exchanges["dst"][at], entries)
    inside = (row >= 0) & (came >= entries.enter_ns[row]) & (taken <= entries.leave_ns[row])
    took, end, where = (taken - came)[inside], entries.endpoint[row[inside]], of[at][inside]
    seen = [e for e in np.unique(end).tolist() if np.count_nonzero(end == e) >= FEWEST]
    told = {e: np.percentile(took[end == e], (90, 95)) for e in seen}
    known = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    span_ns = int(np.ptp(entries.leave_ns[known])) if known.any() else 0
    found = {}
    for endpoint, (usual, most) in told.items():
        others = [float(each[0]) for e, each in told.items() if e != endpoint]
        # A single peer may be the quick one.
        if len(others) < 2:
            continue
        least = SLOW_FACTOR * float(np.median(others))
        slow = (end == endpoint) & (took > least)
        # A host that stalls once is late with many at a time.
        worst = np.zeros(len(instances), np.int64)
        np.maximum.at(worst, where[slow], took[slow])
        often = np.count_nonzero(worst) >= FEWEST and is_material(int(worst.sum()), span_ns)
        if usual > least and often:
            found[endpoint] = Queue(round(usual), round(most), round(float(np.median(others))))
    return found


def queued_ns(queues: dict[int, Queue], entries: Entries) -> NDArray[np.int64]:
    """Per row of Entries how long its first message may have waited in its node's queue; 0 where in none."""
    found = np.zeros(len(entries.endpoint), np.int64)
    for endpoint, queue in queues.items():
        found[entries.endpoint == endpoint] = queue.most_ns
    return found
