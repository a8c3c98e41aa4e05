"""The trace of a world, seen from one vantage point: packets in order of time, as columns.

Bursts are expanded packet by packet, some hundred thousand at a time, so that memory does not grow with the
length of a capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.synth.segments import ACK_CODE, DATA_CODE
from dpuflow.synth.trace import (
    ACK,
    ATOMIC,
    ATOMIC_ACK,
    CNP,
    CTS,
    LENGTH,
    READ,
    RESPONSE,
    SEGMENT_ACK,
    SEND,
    STREAM,
    WRITE,
    WRITE_IMM,
)
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.synth.world import Played

    Columns = dict[str, NDArray[np.int64]]

CODE: Final = {opcode.name: opcode.code for opcode in wire.OPCODES.values()} | {
    "SEGMENT": DATA_CODE,
    "SEGMENT_ACK": ACK_CODE,
}
_PLAIN: Final = ("RC_WRITE_MIDDLE", "RC_WRITE_LAST", "RC_WRITE_FIRST", "RC_WRITE_ONLY")
_NAMES: Final = {  # of a kind of message: its middle, last, first and only packet
    CTS: _PLAIN,
    WRITE: _PLAIN,
    WRITE_IMM: ("RC_WRITE_MIDDLE", "RC_WRITE_LAST_IMM", "RC_WRITE_FIRST", "RC_WRITE_ONLY_IMM"),
    SEND: ("RC_SEND_MIDDLE", "RC_SEND_LAST", "RC_SEND_FIRST", "RC_SEND_ONLY"),
    ATOMIC: ("RC_FETCH_ADD",) * 4,
    READ: ("RC_READ_REQUEST",) * 4,
    RESPONSE: (
        "RC_READ_RESPONSE_MIDDLE",
        "RC_READ_RESPONSE_LAST",
        "RC_READ_RESPONSE_FIRST",
        "RC_READ_RESPONSE_ONLY",
    ),
    LENGTH: ("SEGMENT",) * 4,
    STREAM: ("SEGMENT",) * 4,
}
_REPLIES: Final = {
    ACK: "RC_ACKNOWLEDGE",
    CNP: "CNP",
    ATOMIC_ACK: "RC_ATOMIC_ACKNOWLEDGE",
    SEGMENT_ACK: "SEGMENT_ACK",
}
CODES: Final = np.array([[CODE[name] for name in _NAMES[kind]] for kind in sorted(_NAMES)])
ACK_NO_LIMIT: Final = 0x1F
FIELDS: Final = (
    "stamp_ns",  # true time
    "code",
    "flow",
    "back",  # 1: a reply, against the flow's direction
    "received",  # 1: at its receiver's port, 0: at its sender's, 2: in the switch
    "psn",
    "payload",  # bytes
    "message",  # row of MESSAGES, -1 for replies
    "syndrome",
    "msn",
    "ask",  # the AckReq bit
    "marked",
    "identity",  # of its IP header
)
STREAM_FIELDS: Final = (
    "other",  # TCP: bytes that its sender had received (of a reply: had sent) the other way
    "tsval",
    "tsecr",
)
"""Only of worlds with TCP."""


def packets_at(played: Played, node: int | None, window: int = 200_000) -> Iterator[Columns]:
    """Blocks of packets at a node's ports (``node``) or in the switch (None), in order of true time."""
    events = _events(played, node)
    order = np.argsort(events["start"], kind="stable")
    events = {name: column[order] for name, column in events.items()}
    total = np.cumsum(events["count"])
    messages = played.trace.messages.read()
    replies = played.trace.replies.read()
    names = FIELDS + STREAM_FIELDS if played.streams.flows else FIELDS
    carry: Columns | None = None
    at = 0
    while at < len(order):
        done = int(total[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(total, done + window, "right")))
        some = {name: column[at:end] for name, column in events.items()}
        block = _expand(played, some, messages, replies)
        if carry is not None:
            block = {name: np.concatenate([carry[name], block[name]]) for name in names}
        order_in = np.argsort(block["stamp_ns"], kind="stable")
        whole = len(order_in)
        if end < len(order):
            whole = int(np.searchsorted(block["stamp_ns"][order_in], events["start"][end], "left"))
        carry = {name: column[order_in[whole:]] for name, column in block.items()}
        yield {name: column[order_in[:whole]] for name, column in block.items()}
        at = end


def _events(played: Played, node: int | None) -> Columns:
    """What passes the vantage point: rows of BURSTS and REPLIES with when and how fast."""
    bursts, replies = played.trace.bursts.read(), played.trace.replies.read()
    burst_identity, reply_identity = played.identities
    parts: list[Columns] = []

    def add(rows: NDArray[np.int64], reply: bool, side: str, received: int, shift: int = 0) -> None:
        table = replies if reply else bursts
        start = table[f"{side}_ns"][rows] + shift
        ones = np.ones(len(rows), np.int64)
        parts.append(
            {
                "start": start,
                "sent": table["tx_ns"][rows],
                "step_ps": 0 * ones if reply else table[f"{side}_step_ps"][rows],
                "end": start if reply else table[f"{side}_end_ns"][rows] + shift,
                "count": ones if reply else table["count"][rows],
                "first": 0 * ones if reply else table["first"][rows],
                "row": rows if reply else table["message"][rows],
                "flow": table["flow"][rows],
                "identity": (reply_identity if reply else burst_identity)[rows].astype(np.int64),
                "marked": 0 * ones if reply else table["marked"][rows],
                "reply": ones * reply,
                "received": ones * received,
            }
        )

    if node is None:
        # Frames as they reach the switch, half way: before queue, marks and losses.
        half = int(played.scenario.cluster.latency_us * 500)
        add(np.arange(len(bursts["flow"])), False, "tx", 2, half)
        add(np.arange(len(replies["flow"])), True, "tx", 2, half)
    else:
        sent, came, answered, heard = (
            order[slice(*np.searchsorted(nodes, [node, node + 1]))] for order, nodes in played.at_ports
        )
        add(sent, False, "tx", 0)
        add(came[bursts["rx_end_ns"][came] >= 0], False, "rx", 1)
        add(answered, True, "tx", 0)
        add(heard[replies["rx_ns"][heard] >= 0], True, "rx", 1)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def at_ports(played: Played) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows of BURSTS by sending node, with these nodes; by receiving node; the same of REPLIES."""
    src = np.array([flow.src.node for flow in played.flows], np.int64)
    dst = np.array([flow.dst.node for flow in played.flows], np.int64)
    found = []
    for table, ends in ((played.trace.bursts, (src, dst)), (played.trace.replies, (dst, src))):
        flow = table.read()["flow"]
        for end in ends:
            order = np.argsort(end[flow], kind="stable")
            found.append((order, end[flow[order]]))
    return found


def _expand(played: Played, events: Columns, messages: Columns, replies: Columns) -> Columns:
    """One row for each packet of the events."""
    count, streams = events["count"], played.streams
    of = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    reply = events["reply"][of].astype(bool)
    row = events["row"][of]
    message, answer = np.where(reply, 0, row), np.where(reply, row, 0)
    none = np.zeros(len(of), np.int64)

    def replied(name: str) -> NDArray[np.int64]:
        return np.where(reply, replies[name][answer], none) if len(replies["flow"]) else none

    sort, kind = messages["kind"][message], replied("kind")
    size = np.where(sort == READ, 0, messages["bytes"][message])  # a request carries nothing
    mtu = np.array([flow.mtu for flow in played.flows], np.int64)[events["flow"][of]]
    packets = np.maximum(1, -(-size // mtu))
    at = events["first"][of] + place
    last = at + 1 == packets
    answered = (sort == RESPONSE) & ~reply
    every = played.scenario.machine.ack_packets
    within = (messages["psn"][message] + at + 1) % every == 0 if every else np.zeros(len(of), bool)
    within &= sort < READ
    tells = kind == SEGMENT_ACK
    number = np.where(reply, replied("psn"), messages["psn"][message] + at)
    place_in_stream = np.where(reply, number, messages["va"][message] + at * mtu)
    syndrome = np.where(answered, ACK_NO_LIMIT, replied("syndrome"))
    acks = np.where(tells, syndrome, 0)  # rows of ACKS
    code = CODES[sort, 2 * (at == 0) + last]
    for answer_kind, name in _REPLIES.items():
        code = np.where(kind == answer_kind, CODE[name], code)
    if streams.flows:
        code = np.where(tells, ACK_CODE + streams.blocks[acks], code)
    found = {
        "stamp_ns": _stamps(events, of, place),
        "code": code,
        "flow": events["flow"][of],
        "back": reply.astype(np.int64),
        "received": events["received"][of],
        "psn": np.where((sort >= LENGTH) & ~reply | tells, place_in_stream, number & wire.PSN_MASK),
        "payload": np.where(reply, 0, np.where(last, size - (packets - 1) * mtu, mtu)),
        "message": np.where(reply, -1, row),
        "syndrome": syndrome,
        "msn": np.where(answered, messages["value"][message], replied("msn")) & wire.PSN_MASK,
        "ask": ((last | within) & ~reply & ~answered).astype(np.int64),
        "identity": events["identity"][of] + place,
        "marked": (place >= count[of] - events["marked"][of]).astype(np.int64),
    }
    if streams.flows:
        found |= streams.columns(events["flow"][of], tells, events["sent"][of], acks)
    return found


def _stamps(events: Columns, of: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.int64]:
    """When packets, each by its event and its place in that, have passed: the last one as its event ends."""
    end = events["end"][of]
    even = events["start"][of] + (place + 1) * events["step_ps"][of] // 1000
    return np.where(place + 1 == events["count"][of], end, np.minimum(even, end))
