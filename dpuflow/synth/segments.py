"""TCP segments as columns in, frames out: Ethernet, IPv4, TCP without options (RFC 9293), payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow import wire
from dpuflow.synth.rows import internet_sum, put
from dpuflow.synth.trace import SEGMENT_ACK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.synth.packets import Columns
    from dpuflow.synth.rows import Bytes, Numbers
    from dpuflow.synth.world import Played

DATA_CODE: Final = 0x100
ACK_CODE: Final = 0x101
"""What packets' ``code`` says of segments: beyond all operation codes of RoCE."""
TCP_AT: Final = 34
HEADERS: Final = 54
SENDER_WINDOW: Final = 0x4000
ACK_FLAG: Final = 0x10
PUSH_FLAG: Final = 0x08


def fill(
    head: Bytes, packets: Columns, ports: Numbers, begins: Numbers, sizes: Numbers, payload: bytes
) -> None:
    """Write the TCP header, and after it the size of the next message where ``sizes`` (-1: not here) has it.

    Ethernet and IP are there already. ``ports``: source and destination of each packet; ``begins``: first
    sequence number of its own direction and of the other one; ``payload``: what follows ``head`` elsewhere.
    """
    back = packets["back"] == 1
    put(head, TCP_AT, 2, ports[:, 0])
    put(head, TCP_AT + 2, 2, ports[:, 1])
    sequence = begins[:, 0] + np.where(back, packets["other"], packets["psn"])
    acknowledged = begins[:, 1] + np.where(back, packets["psn"], packets["other"])
    put(head, TCP_AT + 4, 4, sequence & 0xFFFFFFFF)
    put(head, TCP_AT + 8, 4, acknowledged & 0xFFFFFFFF)
    head[:, TCP_AT + 12] = 5 << 4
    head[:, TCP_AT + 13] = np.where(packets["ask"] == 1, ACK_FLAG | PUSH_FLAG, ACK_FLAG)
    put(head, TCP_AT + 14, 2, np.where(back, packets["msn"], SENDER_WINDOW))
    body = head[:, HEADERS:]
    if body.shape[1]:
        body[:] = np.frombuffer(payload, np.uint8)[: body.shape[1]]
        sized = sizes >= 0
        body[sized] = sizes[sized].astype("<u4").view(np.uint8).reshape(-1, 4)
        payload = b""
    rest = internet_sum(np.frombuffer(payload, np.uint8)[None, :])[0] if payload else 0
    size = head.shape[1] - TCP_AT + len(payload)
    total = internet_sum(head[:, 26:TCP_AT]) + internet_sum(head[:, TCP_AT:]) + wire.IPPROTO_TCP + size + rest
    while (total >> 16).any():
        total = (total & 0xFFFF) + (total >> 16)
    put(head, TCP_AT + 16, 2, ~total & 0xFFFF)


class Streams:
    """What each end of a connection that carries streams both ways had sent and received by when."""

    def __init__(self, played: Played) -> None:
        self._partners = played.partners
        self._received: dict[
            int, tuple[Numbers, Numbers]
        ] = {}  # by flow: times of its ACKs, bytes then there
        self._sent: dict[int, tuple[Numbers, Numbers]] = {}
        if not played.partners:
            return
        replies, bursts = played.trace.replies.read(), played.trace.bursts.read()
        messages = played.trace.messages.read()
        mtu = np.array([flow.mtu for flow in played.flows], np.int64)
        row = bursts["message"]
        end = np.minimum((bursts["first"] + bursts["count"]) * mtu[bursts["flow"]], messages["bytes"][row])
        end = end + messages["va"][row]
        for flow in played.partners:
            acks = np.flatnonzero((replies["flow"] == flow) & (replies["kind"] == SEGMENT_ACK))
            self._received[flow] = _in_order(replies["tx_ns"][acks], replies["psn"][acks])
            mine = np.flatnonzero(bursts["flow"] == flow)
            self._sent[flow] = _in_order(bursts["tx_end_ns"][mine], end[mine])

    def other(self, flow: Numbers, reply: NDArray[np.bool_], sent_ns: Numbers) -> Numbers:
        """For each packet of ``flow``, or reply to it, the bytes of the other way that its sender knew of."""
        out = np.zeros(len(flow), np.int64)
        for each, partner in self._partners.items():
            for known, rows in (
                (self._received[partner], np.flatnonzero((flow == each) & ~reply)),
                (self._sent[partner], np.flatnonzero((flow == each) & reply)),
            ):
                times, counts = known
                place = np.searchsorted(times, sent_ns[rows], "right") - 1
                if len(times):
                    out[rows] = np.where(place >= 0, counts[np.maximum(place, 0)], 0)
        return out


def _in_order(times: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    order = np.argsort(times, kind="stable")
    return times[order], np.maximum.accumulate(counts[order]) if len(order) else counts
