"""TCP segments as columns in, frames out: Ethernet, IPv4, TCP (RFC 9293), its options, payload.

Every segment carries time stamps (RFC 7323), acknowledgments with holes before them what lies beyond these
(SACK, RFC 2018): the options that Linux agrees on unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schema.simulated import ACK_CODE, ACKS, SEGMENT_ACK
from dpuflow.synth.rows import internet_sum, put
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.synth.packets import Columns
    from dpuflow.synth.rows import Bytes, Numbers
    from dpuflow.synth.world import Played

LAST_CODE: Final = ACK_CODE + (len(ACKS) - 1) // 2
"""Of packets: an acknowledgment that tells as many ranges as ACKS has."""
TCP_AT: Final = 34
OPTIONS_AT: Final = 54
HEADERS: Final = 66
SENDER_WINDOW: Final = 0x4000
ACK_FLAG: Final = 0x10
PUSH_FLAG: Final = 0x08
STAMPS: Final = (1, 1, 8, 10)
"""Two bytes of padding, then the option for time stamps."""
TICK_NS: Final = 1_000_000
"""Of Linux's time stamps."""


def option_bytes(code: int) -> int:
    """Of what an acknowledgment tells of ranges."""
    return 4 + 8 * (code - ACK_CODE) if code > ACK_CODE else 0


class Ends(NamedTuple):
    """What connections have at their two ends: a row a packet, the sender's first."""

    ports: Numbers
    begins: Numbers  # first sequence numbers
    clocks: Numbers  # time stamps at time 0


def fill(head: Bytes, packets: Columns, code: int, ends: Ends, ranges: Numbers, rest: bytes) -> None:
    """Write the TCP headers into ``head``, which has Ethernet, IP and the first bytes of payload already.

    ``ranges``: rows of ACKS, for acknowledgments with any; ``rest``: what follows of the payload.
    """
    back = packets["back"] == 1
    put(head, TCP_AT, 2, ends.ports[:, 0])
    put(head, TCP_AT + 2, 2, ends.ports[:, 1])
    sequence = ends.begins[:, 0] + np.where(back, packets["other"], packets["psn"])
    acknowledged = ends.begins[:, 1] + np.where(back, packets["psn"], packets["other"])
    put(head, TCP_AT + 4, 4, sequence & 0xFFFFFFFF)
    put(head, TCP_AT + 8, 4, acknowledged & 0xFFFFFFFF)
    blocks = option_bytes(code)
    head[:, TCP_AT + 12] = (HEADERS + blocks - TCP_AT) // 4 << 4
    head[:, TCP_AT + 13] = np.where(packets["ask"] == 1, ACK_FLAG | PUSH_FLAG, ACK_FLAG)
    put(head, TCP_AT + 14, 2, np.where(back, packets["msn"], SENDER_WINDOW))
    head[:, OPTIONS_AT : OPTIONS_AT + 4] = STAMPS
    for i, name in enumerate(("tsval", "tsecr")):
        put(head, OPTIONS_AT + 4 + 4 * i, 4, ends.clocks[:, i] + packets[name] // TICK_NS & 0xFFFFFFFF)
    if blocks:
        head[:, HEADERS : HEADERS + 4] = (1, 1, 5, blocks - 2)
        for i in range((blocks - 4) // 4):
            put(head, HEADERS + 4 + 4 * i, 4, ends.begins[:, 1] + ranges[:, i] & 0xFFFFFFFF)
    size = head.shape[1] - TCP_AT + len(rest)
    total = internet_sum(head[:, 26:TCP_AT]) + internet_sum(head[:, TCP_AT:]) + wire.IPPROTO_TCP + size
    total += internet_sum(np.frombuffer(rest, np.uint8)[None, :])[0] if rest else 0
    while (total >> 16).any():
        total = (total & 0xFFFF) + (total >> 16)
    put(head, TCP_AT + 16, 2, ~total & 0xFFFF)


class Streams:
    """What each end of a TCP connection had sent, and what it had received and when, at any time."""

    def __init__(self, played: Played) -> None:
        self.flows = [flow.number for flow in played.flows if flow.stream]
        self._of_flow: dict[int, tuple[Known, Known, Known]] = {}
        if not self.flows:
            return
        replies, bursts = played.trace.replies.read(), played.trace.bursts.read()
        messages, acks = played.trace.messages.read(), played.trace.acks.read()
        mtu = np.array([flow.mtu for flow in played.flows], np.int64)
        row = bursts["message"]
        end = np.minimum((bursts["first"] + bursts["count"]) * mtu[bursts["flow"]], messages["bytes"][row])
        end = end + messages["va"][row]
        self.ranges = np.stack([acks[name] for name in ACKS[1:]], axis=1)
        """By row of ACKS, bytes."""
        self.blocks = (self.ranges[:, 1::2] > 0).sum(axis=1)
        self.echo_ns = acks["echo_ns"]
        none = Known(np.zeros(0, np.int64), np.zeros(0, np.int64))
        for flow in self.flows:
            partner = played.partners.get(flow)
            mine = np.flatnonzero((replies["flow"] == flow) & (replies["kind"] == SEGMENT_ACK))
            heard = mine[replies["rx_ns"][mine] >= 0]
            came, left = [replies["rx_ns"][heard]], [replies["tx_ns"][heard]]
            there = sent = none
            if partner is not None:
                tells = np.flatnonzero((replies["flow"] == partner) & (replies["kind"] == SEGMENT_ACK))
                there = Known(replies["tx_ns"][tells], replies["psn"][tells])
                theirs = np.flatnonzero(bursts["flow"] == partner)
                sent = Known(bursts["tx_end_ns"][theirs], end[theirs])
                theirs = theirs[bursts["rx_end_ns"][theirs] >= 0]
                came.append(bursts["rx_end_ns"][theirs])
                left.append(bursts["tx_ns"][theirs])
            heard_of = Known(np.concatenate(came), np.concatenate(left))
            self._of_flow[flow] = there, sent, heard_of

    def columns(self, flow: Numbers, reply: NDArray[np.bool_], sent_ns: Numbers, ack: Numbers) -> Columns:
        """For packets of ``flow``, or replies to it (rows ``ack`` of ACKS), sent at ``sent_ns``.

        ``other``: bytes of the other way that its sender knew of; ``tsval``, ``tsecr``: times of its own
        stamp and of the one it repeats.
        """
        other = np.zeros(len(flow), np.int64)
        echo = np.zeros(len(flow), np.int64)
        if self.flows and reply.any():
            echo[reply] = self.echo_ns[ack[reply]]
        order = np.argsort(flow, kind="stable")
        for each, (there, sent, heard) in self._of_flow.items():
            begin, end = np.searchsorted(flow[order], (each, each + 1))
            rows = order[begin:end]
            data, replies = rows[~reply[rows]], rows[reply[rows]]
            other[data] = there.by(sent_ns[data])
            other[replies] = sent.by(sent_ns[replies])
            echo[data] = heard.by(sent_ns[data])
        return {"other": other, "tsval": sent_ns, "tsecr": echo}


class Known:
    """The largest of some values whose times have come."""

    def __init__(self, times: Numbers, values: Numbers) -> None:
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._values = np.maximum.accumulate(values[order]) if len(order) else values

    def by(self, times: Numbers) -> Numbers:
        """The largest value by each time; 0 before the first."""
        if not len(self._times):
            return np.zeros(len(times), np.int64)
        place = np.searchsorted(self._times, times, "right") - 1
        return np.asarray(np.where(place >= 0, self._values[np.maximum(place, 0)], 0), np.int64)
