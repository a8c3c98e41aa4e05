"""Entries in, entries out: first messages that their connection or their adapter may have held back.

A connection that had to be opened, a message sent again, an operation before that was not yet acknowledged,
data of the same adapter right before: each makes of what dates an entry a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.entries import Entries, Rule
from dpuflow.lateness.waiting import FAR_BEYOND
from dpuflow.schema import NEVER, NONE32, MessageFlag, Seen, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.lateness.handover import Usual
    from dpuflow.ordering import Picked
    from dpuflow.tables import Rows

_FAR = np.iinfo(np.int64).max

NEXT = 1.5
"""Distances of packets within which one follows the other without a pause."""


def first_on_connection(entries: Entries, transfers: Rows | Picked) -> Entries:
    """A rank's first message over a connection that was opened since it left the collective before.

    Open MPI, UCX and libfabric connect when a rank first sends to another, and the message waits for that.
    Gloo and NCCL connect before any collective. ob1's hello shows that the capture holds a connection's
    beginning; over RoCE nothing does, so the first message that was captured counts.
    """
    wire = transfers["wire"]
    lazy = (wire == Wire.ROCE_SEND) | (wire == Wire.ROCE_SEND_IMM) | (wire == Wire.OB1_HELLO)
    lazy |= (wire == Wire.TAGGED) | (wire == Wire.TAGGED_OTHER)
    acted = np.flatnonzero(entries.act != NONE32)
    if not lazy.any() or not len(acted):
        return entries
    line = transfers["connection"].astype(np.int64)
    opened = np.full(int(line.max()) + 1, NEVER)
    rows = np.flatnonzero(lazy)
    lines, at = np.unique(line[rows], return_index=True)  # transfers are in order of time
    opened[lines] = transfers["sent_ns"][rows[at]]
    fresh = np.zeros(len(entries.act), bool)
    when = opened[line[entries.act[acted]]]
    started = np.full(int(entries.endpoint.max()) + 1, _FAR)
    np.minimum.at(started, entries.endpoint[acted], entries.enter_ns[acted])
    since, own = entries.since_ns[acted], entries.endpoint[acted]
    first = entries.enter_ns[acted] == started[own]
    fresh[acted] = (when != NEVER) & np.where(since != NEVER, when >= since, first)
    return entries.marked(fresh, Rule.CONNECTING, np.full(len(fresh), NONE32))


def repeated(entries: Entries, transfers: Rows | Picked, usual: Usual) -> Entries:
    """What was sent again and not captured at its sender may have been sent before it was first seen.

    A credit that was sent again came late: what follows it within its host's usual reaction, where one was
    ever seen, may have waited for it.
    """
    held = (entries.credit_ns != NEVER) & ~(entries.credit_ns > usual.most_ns)
    again = np.zeros((2, len(transfers) + 1), bool)
    again[:, :-1] = transfers["retransmitted"] > 0
    # Nor is it known when a WRITE left whose beginning its sender's capture missed.
    written = (transfers["wire"] == Wire.ROCE_WRITE_IMM) | (transfers["wire"] == Wire.ROCE_WRITE)
    again[0, :-1] |= written & ((transfers["flags"] & MessageFlag.GAP) != 0)
    again[0, :-1] &= (transfers["seen"] & Seen.AT_SENDER) == 0
    act, grant = (np.where(row == NONE32, len(transfers), row) for row in (entries.act, entries.grant))
    entries = entries.marked(again[0][act], Rule.REPEATED, np.full(len(act), NONE32))
    return entries.marked(again[1][grant] & held, Rule.CREDIT, entries.grant)


def unacked(entries: Entries, exchanges: Rows | Picked, usual: Usual) -> Entries:
    """NCCL takes up an operation on a connection when the one before is done: acknowledged, for a sender.

    So a first message may have waited for that, where the message before it had been sent again and it came
    within the usual reaction after the ACK. Where no reaction was ever seen, a few round trips stand for it.
    """
    again = (exchanges["retransmitted"] > 0) & (exchanges["wire"] == Wire.ROCE_WRITE_IMM)
    if not again.any():
        return entries
    line = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
    concerned = np.zeros(int(line.max()) + 1, bool)
    concerned[line[again]] = True
    order = np.flatnonzero(concerned[line])
    order = order[np.lexsort((exchanges["order"][order], line[order]))]
    behind = np.flatnonzero(again[order[:-1]] & (line[order[1:]] == line[order[:-1]]))
    acked = np.full(int(exchanges["data"][exchanges["data"] != NONE32].max()) + 2, NEVER)
    data = np.minimum(exchanges["data"][order[behind + 1]], len(acked) - 1)
    acked[data] = exchanges["acked_ns"][order[behind]]
    when = acked[np.minimum(entries.act, len(acked) - 1)]
    waited = entries.enter_ns - when
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[~again & (exchanges["acked_ns"] != NEVER)]
    trip = float(np.median(trips)) if len(trips) else np.inf
    soon = np.where(np.isnan(usual.most_ns), FAR_BEYOND * trip, usual.most_ns)
    held = (when != NEVER) & (waited >= 0) & (waited <= soon)
    return entries.marked(held, Rule.UNACKED, np.full(len(held), NONE32))


def behind_own_data(
    entries: Entries, exchanges: Rows | Picked, packet_ns: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Rows whose first message left right behind earlier data of its adapter, as packets follow each other.

    It may have waited in the adapter's queue, as on a slow link. So it may if it left while another message
    was leaving: packets of both take turns. Messages sent again do not leave at a stretch. Nor is it known
    of a put when it was posted if the one before it on its connection was not yet acknowledged: queue pairs
    send in order.
    """
    out = _before_ack(entries, exchanges)
    sent = _sent_by_gpus(exchanges)
    if not sent.any():
        return out
    src, begin, end = (exchanges[name][sent] for name in ("src", "data_ns", "data_end_ns"))
    again = exchanges["retransmitted"][sent] > 0
    for endpoint in np.unique(src):
        mine = src == endpoint
        rows = np.flatnonzero((entries.endpoint == endpoint) & (entries.enter_ns != NEVER) & (packet_ns > 0))
        if not len(rows):
            continue
        enter = entries.enter_ns[rows]
        ends = np.sort(end[mine])
        at = np.searchsorted(ends, enter, "left") - 1
        out[rows] |= (at >= 0) & (enter - ends[np.maximum(at, 0)] <= NEXT * packet_ns[rows])
        whole = np.flatnonzero(mine & ~again)
        whole = whole[np.argsort(begin[whole], kind="stable")]
        until = np.maximum.accumulate(end[whole])  # by the messages that began before each
        at = np.searchsorted(begin[whole], enter, "left") - 1
        if len(whole):
            out[rows] |= (at >= 0) & (enter <= until[np.maximum(at, 0)])
    return out


def _before_ack(entries: Entries, exchanges: Rows | Picked) -> NDArray[np.bool_]:
    """Rows whose first message is a put that left before the ACK of the one before it on its connection."""
    out = np.zeros(len(entries.rule), bool)
    rows = np.flatnonzero((exchanges["wire"] == Wire.ROCE_WRITE) & (exchanges["data"] != NONE32))
    if len(rows) < 2:
        return out
    line = 2 * exchanges["connection"][rows].astype(np.int64)
    line += exchanges["src"][rows] > exchanges["dst"][rows]
    order = np.lexsort((exchanges["order"][rows], line))
    before = np.flatnonzero(line[order[1:]] == line[order[:-1]])
    data = exchanges["data"][rows[order[1:][before]]].astype(np.int64)
    acked = np.full(int(data.max(initial=0)) + 2, NEVER)
    acked[data] = exchanges["acked_ns"][rows[order[:-1][before]]]
    return np.asarray(entries.enter_ns < acked[np.minimum(entries.act, len(acked) - 1)], np.bool_)


def _sent_by_gpus(exchanges: Rows | Picked) -> NDArray[np.bool_]:
    """Exchanges whose data was written one-sided (NCCL, puts, pages), as their senders' captures saw it."""
    wire = exchanges["wire"]
    sent = ((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.ROCE_WRITE)) & (exchanges["data_ns"] != NEVER)
    sent &= (exchanges["seen"] & Seen.AT_SENDER) != 0
    return np.asarray(sent, np.bool_)


def packet_times(entries: Entries, exchanges: Rows | Picked) -> NDArray[np.float64]:
    """For each row how long a packet of its endpoint takes to leave: their usual distance within a message.

    0 where none of these sent it, and where no message has several packets.
    """
    out = np.zeros(len(entries.rule))
    several = np.flatnonzero(_sent_by_gpus(exchanges) & (exchanges["packets"] > 1))
    gaps = exchanges["packets"][several].astype(np.int64) - 1
    steps = (exchanges["data_end_ns"][several] - exchanges["data_ns"][several]) / gaps
    src = exchanges["src"][several]
    for endpoint in np.unique(src):
        out[entries.endpoint == endpoint] = np.median(steps[src == endpoint])
    return out


def trip_ns(exchanges: Rows | Picked) -> float:
    """The median time from a message's end to its ACK; NaN without."""
    known = (exchanges["acked_ns"] != NEVER) & (exchanges["retransmitted"] == 0)
    known &= exchanges["data_end_ns"] != NEVER
    trips = (exchanges["acked_ns"] - exchanges["data_end_ns"])[known]
    return float(np.median(trips)) if len(trips) else float("nan")
