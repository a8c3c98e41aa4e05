"""Packets sent again, told apart: those that were lost, or whose acknowledgment was, and needless ones.

RoCE goes back to the first packet that is missing and repeats all from there (InfiniBand volume 1, 9.7.2),
and a host short of time acknowledges so late that the sender begins again. What the receiver's own capture
holds twice was there the first time; if its acknowledgment came as quickly as others do, nothing was lost.
Where a receiver asks again by NAK it lacked one packet at least, wherever that was lost. It asks for all but
the last one that it was sent: so where only the sender was captured packets were lost as often as it asked,
unless so few messages came again that each may have lost its last packet. TCP's needless repeats are counted
where its packets are read (D-SACK).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.join.common import number_connections
from dpuflow.schema.rows import NEVER, NONE32, Seen, Transport, Wire
from dpuflow.verdicts.chance import RARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables, Joined, Rows

    Ints = NDArray[np.int64]

TWICE = 2
"""What the slowest of a few was may be half of what is usual for the slowest of many."""


class Repeats(NamedTuple):
    """What was sent again."""

    lost: Ints  # of each flow: packets that were sent again because the receiver lacked them
    needless: Ints  # rows of TRANSFER, in order, of which nothing was lost
    answered_ns: int  # an acknowledgment that takes longer comes of a repetition

    def without(self, rows: Ints, again: Ints) -> Ints:
        """``again``, the packets of ``rows`` that were sent again, 0 where none of them was lost."""
        if not len(self.needless):
            return again
        at = np.minimum(np.searchsorted(self.needless, rows), len(self.needless) - 1)
        return np.where(self.needless[at] == rows, 0, again)


def find_repeats(captures: Sequence[CaptureTables], joined: Joined) -> Repeats:
    """Of all flows and messages."""
    flows = joined.flows
    again = flows["retransmitted"].astype(np.int64)
    lost = again - flows["spurious"].astype(np.int64)
    rows = np.flatnonzero(joined.columns["retransmitted"])
    part = joined.transfers[rows]
    of_roce = (part["wire"] >= Wire.ROCE_SEND) & (part["wire"] <= Wire.ROCE_SEND_IMM)
    of_roce &= (part["seen"] & (Seen.AT_SENDER | Seen.AT_RECEIVER)) != 0
    rows, part = rows[of_roce], part[of_roce]
    flow = _flows_of(joined, part["connection"].astype(np.int64), part["src"].astype(np.int64))
    asked = _asked_again(flows)
    twice = np.zeros(len(rows), np.int64)
    for capture, tables in enumerate(captures):
        mine = part["arrival_capture"] == capture
        twice[mine] = tables.messages["retransmitted"][part["arrival_message"][mine]]
    # One that is lost comes a timeout later, far beyond what any other takes.
    slowest = TWICE * _slowest_answer(joined) if len(part) else 0
    told = part["acked_ns"] - part["taken_ns"] <= slowest
    told &= (part["acked_ns"] != NEVER) & (part["taken_ns"] != NEVER)
    had = np.where(told, np.minimum(twice, part["retransmitted"]), 0)
    known = flow >= 0
    ends = part["seen"] & (Seen.AT_SENDER | Seen.AT_RECEIVER)
    alone = (ends == Seen.AT_RECEIVER) | ((ends == Seen.AT_SENDER) & _not_last(flows, flow, asked))
    alone &= known
    had[alone] = part["retransmitted"][alone]
    spared = np.bincount(flow[known], had[known], len(flows)).astype(np.int64)
    roce = flows["transport"] == Transport.ROCE
    lost = np.where(roce, np.maximum(again - spared, np.minimum(again, asked)), lost)
    # Where a receiver asked again, which message it was for is not known.
    sound = known & (had == part["retransmitted"]) & (lost[np.maximum(flow, 0)] == 0)
    return Repeats(np.maximum(lost, 0), rows[sound], slowest)


def _not_last(flows: Rows, flow: Ints, asked: Ints) -> NDArray[np.bool_]:
    """For each message that came again, with its ``flow``: whether its sender's did so unasked more often
    than chance, once in a thousand times, makes all of them lose their last packets.

    Of lost packets as many are a message's last as of all packets.
    """
    again = np.bincount(flow[flow >= 0], minlength=len(flows))
    unasked = np.maximum(again - asked, 0)
    last = flows["messages"] / np.maximum(flows["packets"].astype(np.float64), 1)
    chance = np.bincount(flows["src"], unasked * np.log(np.clip(last, 1e-9, 1)))
    return np.asarray(chance[flows["src"][flow]] < np.log(RARE), np.bool_)


def _slowest_answer(joined: Joined) -> int:
    """The longest that an acknowledgment was on its way, of messages that were not sent again."""
    others = joined.transfers[np.flatnonzero(joined.columns["retransmitted"] == 0)]
    known = (others["acked_ns"] != NEVER) & (others["taken_ns"] != NEVER)
    return int((others["acked_ns"] - others["taken_ns"])[known].max(initial=0))


def _asked_again(flows: Rows) -> Ints:
    """NAKs for each flow's packets: its opposite counts them."""
    peer = flows["peer"].astype(np.int64)
    paired = peer != NONE32
    found = np.zeros(len(flows), np.int64)
    found[paired] = flows["nak"][peer[paired]]
    return found


def _flows_of(joined: Joined, connection: Ints, src: Ints) -> Ints:
    """Rows of FLOW by connection and sender; -1 where there is none."""
    flows = joined.flows
    if not len(flows) or not len(src):
        return np.full(len(src), -1)
    ends = len(joined.endpoints)
    key = number_connections(flows).astype(np.int64) * ends + flows["src"].astype(np.int64)
    order = np.argsort(key, kind="stable")
    wanted = connection * ends + src
    at = np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)
    return np.where(key[order][at] == wanted, order[at], -1)
