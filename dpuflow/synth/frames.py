"""Packets as columns in, frames out: Ethernet, IPv4, UDP, BTH and its extended headers, payload, ICRC.

Frames of one operation code have one shape, so each header field is written for all of them at once.
Formats: IBA volume 1 chapter 9, annexes A16 and A17; the operation codes' headers come from ``wire.headers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.synth import checksum, segments
from dpuflow.synth.pooled import MOST
from dpuflow.synth.rows import internet_sum, put, put_little
from dpuflow.synth.seeds import columns
from dpuflow.synth.trace import ACKS, CTS, LENGTH, STREAM
from dpuflow.synth.transport import LAYOUTS
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.synth.packets import Columns
    from dpuflow.synth.world import Played

    Bytes = NDArray[np.uint8]

IP_AT: Final = 14
UDP_AT: Final = 34
BTH_AT: Final = 42
EXTENDED_AT: Final = 54
TTL: Final = 255  # NCCL asks for it
TCP_TTL: Final = 64
EPHEMERAL: Final = 32768  # first of the ports that Linux gives out
ECT0: Final = 2
CE: Final = 3
CNP_CLASS: Final = 48 << 2 | ECT0  # as an adapter was seen to send them
LENGTH_BYTES: Final = 4
"""NCCL writes a message's size over TCP by itself."""
CONTENT_BYTES: Final = 12
"""So many first bytes of a message are its own: two words and what is between."""
EXTENDED: Final = (
    wire.RETH,
    wire.ATOMIC,
    wire.AETH,
    wire.ATOMIC_ACK,
    wire.IMM,
    wire.CNP_PAD,
)  # in wire order


class Framer:
    """Makes the frames of one world."""

    def __init__(self, played: Played, snaplen: int) -> None:
        self._played, self._snaplen = played, snaplen
        self._messages = played.trace.messages.read()
        scenario = played.scenario
        self._pool = columns(scenario.seed, "payload").integers(0, 256, 4096, np.uint8).tobytes()
        ends = played.ends
        both = [(e.src, e.dst, e.queue_pair) for e in ends] + [(e.dst, e.src, e.reply_pair) for e in ends]
        # By flow and direction: bytes of addresses as they stand in a frame.
        self._macs = _macs(played)
        self._ips = np.array([list(src.ip.packed + dst.ip.packed) for src, dst, _ in both], np.uint8).reshape(
            -1, 8
        )
        self._pairs = np.array([pair for _, _, pair in both], np.int64)
        self._ports = np.array([e.udp_port for e in ends] * 2, np.int64)
        self._services = np.array([e.ports for e in ends] + [e.ports[::-1] for e in ends], np.int64).reshape(
            -1, 2
        )
        # Under one leaf frames are switched; over the spine they are routed three times.
        near = [played.network.near(flow.src, flow.dst) for flow in played.flows]
        self._hops = np.array([0 if each else 3 for each in near] * 2, np.int64)
        acks = played.trace.acks.read()
        self._ranges = np.stack([acks[name] for name in ACKS[1:]], axis=1)
        self._tags = np.array(played.tags, np.int64)
        self._lists = played.trace.entries.read()
        self._listed = np.full(len(self._messages["flow"]), -1)
        rows = self._lists["message"]
        begins = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]][: len(rows)])
        self._listed[rows[begins]] = begins
        self._class = scenario.nccl.traffic_class & 0xFC | (ECT0 if scenario.nccl.ecn else 0)
        self._layout = LAYOUTS[scenario.nccl.version]

    def frames(self, packets: Columns) -> tuple[Bytes, NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of all frames (packets x longest), how many are captured of each, and how many it had."""
        count = len(packets["code"])
        shapes = {int(code): self._shape(int(code)) for code in np.unique(packets["code"])}
        lengths = np.zeros(count, np.int64)
        for code, headers in shapes.items():
            rows = packets["code"] == code
            payload = packets["payload"][rows]
            lengths[rows] = EXTENDED_AT + headers + payload
            if code < segments.DATA_CODE:
                lengths[rows] += (-payload & 3) + wire.ICRC_BYTES
        kept = np.minimum(lengths, self._snaplen) if self._snaplen else lengths
        out = np.zeros((count, int(kept.max(initial=0))), np.uint8)
        for code in shapes:
            rows = np.flatnonzero(packets["code"] == code)
            for payload in np.unique(packets["payload"][rows]).tolist():
                some = rows[packets["payload"][rows] == payload]
                mine = {name: column[some] for name, column in packets.items()}
                made = self._alike(mine, code, payload)
                width = min(made.shape[1], out.shape[1])
                out[some, :width] = made[:, :width]
        return out, kept, lengths

    @staticmethod
    def _shape(code: int) -> int:
        """Bytes of the headers after BTH or, of segments, after TCP's without options."""
        if code >= segments.DATA_CODE:
            return segments.HEADERS - segments.OPTIONS_AT + segments.option_bytes(code)
        headers = wire.OPCODES[code].headers
        return sum(size for bit, size in wire.HEADER_BYTES.items() if headers & bit)

    def _alike(self, packets: Columns, code: int, payload: int) -> Bytes:
        """Frames of one operation code and payload length; cut at the snap length where that is shorter."""
        if code >= segments.DATA_CODE:
            return self._segments(packets, code, payload)
        count = len(packets["code"])
        extended = self._shape(code)
        pad = -payload & 3
        length = EXTENDED_AT + extended + payload + pad + wire.ICRC_BYTES
        entry = self._layout.entry
        grants = (
            wire.OPCODES[code].operation == wire.OP_WRITE and payload % entry == 0 < payload <= MOST * entry
        )
        is_grant = np.zeros(count, bool)
        if grants:
            is_grant = self._messages["kind"][packets["message"]] == CTS
        kept = min(length, self._snaplen) if self._snaplen else length
        begins = wire.OPCODES[code].operation == wire.OP_WRITE and wire.OPCODES[code].place & wire.FIRST
        sized = grants is False and begins and (self._listed[np.maximum(packets["message"], 0)] >= 0).any()
        own = payload if is_grant.any() or sized else min(payload, CONTENT_BYTES) if begins else 0
        head = np.zeros((count, EXTENDED_AT + extended + own), np.uint8)
        way = packets["flow"] + packets["back"] * len(self._played.ends)
        self._ethernet_ip(head, packets, way, length - IP_AT)
        self._transport(head, packets, way, code, pad, length - IP_AT)
        if own:
            self._contents(head[:, EXTENDED_AT + extended :], packets)
        if is_grant.any():
            self._entries(head[:, EXTENDED_AT + extended :], packets, is_grant)
        elif sized:
            self._sizes(head[:, EXTENDED_AT + extended :], packets)
        out = np.zeros((count, max(kept, head.shape[1])), np.uint8)
        out[:, : head.shape[1]] = head
        if payload > own:
            room = max(0, min(payload - own, kept - head.shape[1]))
            out[:, head.shape[1] : head.shape[1] + room] = np.frombuffer(self._pool, np.uint8)[
                own : own + room
            ]
        if kept == length:
            tail = self._icrc(head, own, payload, pad)
            out[:, length - wire.ICRC_BYTES : length] = tail.astype("<u4").view(np.uint8).reshape(-1, 4)
        return out[:, :kept]

    def _segments(self, packets: Columns, code: int, payload: int) -> Bytes:
        """TCP segments with so much payload, cut at the snap length."""
        headers = segments.OPTIONS_AT + self._shape(code)
        length = headers + payload
        kept = min(length, self._snaplen) if self._snaplen else length
        row = np.maximum(packets["message"], 0)
        begins = (self._messages["kind"][row] == STREAM) & (self._messages["target"][row] > 0)
        begins &= (packets["psn"] == self._messages["va"][row]) & (packets["message"] >= 0)
        own = payload if payload == LENGTH_BYTES else min(payload, CONTENT_BYTES) if begins.any() else 0
        head = np.zeros((len(packets["code"]), headers + own), np.uint8)
        if own:
            self._payload(head[:, headers:], row, begins)
        way = packets["flow"] + packets["back"] * len(self._played.ends)
        self._ethernet_ip(head, packets, way, length - IP_AT, wire.IPPROTO_TCP)
        # Queue pair numbers stand for what TCP has in their place: ports and first sequence numbers.
        other = (way + len(self._played.ends)) % (2 * len(self._played.ends))
        ports = np.stack(
            [EPHEMERAL + self._pairs[other] % 28000, EPHEMERAL + self._pairs[way] % 28000], axis=1
        )
        ports = np.where(self._services[way] > 0, self._services[way], ports)
        starts = np.stack([self._pairs[other], self._pairs[way]], axis=1) * 2654435761
        ranges = self._ranges[packets["syndrome"]] if code > segments.ACK_CODE else self._ranges[:0]
        ends = segments.Ends(ports, starts, starts * 40503 >> 8)
        segments.fill(head, packets, code, ends, ranges, self._pool[own:payload])
        out = np.zeros((len(head), max(kept, head.shape[1])), np.uint8)
        out[:, : head.shape[1]] = head
        room = max(0, kept - head.shape[1])
        out[:, head.shape[1] : head.shape[1] + room] = np.frombuffer(self._pool, np.uint8)[own : own + room]
        return out[:, :kept]

    def _payload(self, body: Bytes, row: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """First bytes of segments: the size of the next message, or contents where a message begins."""
        body[:] = np.frombuffer(self._pool, np.uint8)[: body.shape[1]]
        sized = self._messages["kind"][row] == LENGTH
        if sized.any():
            size = self._messages["value"][row[sized]]
            body[sized] = size.astype("<u4").view(np.uint8).reshape(-1, LENGTH_BYTES)
        first = np.zeros((int(begins.sum()), body.shape[1]), np.uint8)
        self._contents(first, {"message": row[begins]})
        body[begins] = first

    def _ethernet_ip(
        self,
        head: Bytes,
        packets: Columns,
        way: NDArray[np.int64],
        length: int,
        protocol: int = wire.IPPROTO_UDP,
    ) -> None:
        head[:, 0:12] = self._macs[way, packets["received"] % 2]
        head[:, 12:14] = (8, 0)
        head[:, IP_AT] = 0x45
        traffic = np.where(packets["back"] == 1, self._class & 0xFC, self._class)
        marked = (packets["marked"] == 1) & (packets["received"] == 1) & (packets["back"] == 0)
        if protocol == wire.IPPROTO_TCP:
            traffic = 0 * traffic
        ttl = TCP_TTL if protocol == wire.IPPROTO_TCP else TTL
        notice = packets["code"] == wire.CNP_OPCODE
        head[:, IP_AT + 1] = np.where(notice, CNP_CLASS, np.where(marked, traffic | CE, traffic))
        put(head, IP_AT + 2, 2, length)
        put(head, IP_AT + 4, 2, packets["identity"] & 0xFFFF)
        head[:, IP_AT + 6] = 0x40  # don't fragment
        head[:, IP_AT + 8] = np.where(packets["received"] == 1, ttl - self._hops[way], ttl)
        head[:, IP_AT + 9] = protocol
        head[:, IP_AT + 12 : UDP_AT] = self._ips[way]
        total = internet_sum(head[:, IP_AT:UDP_AT])
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        put(head, IP_AT + 10, 2, ~total & 0xFFFF)

    def _transport(
        self, head: Bytes, packets: Columns, way: NDArray[np.int64], code: int, pad: int, length: int
    ) -> None:
        put(head, UDP_AT, 2, self._ports[way])
        put(head, UDP_AT + 2, 2, wire.ROCE_V2_PORT)
        put(head, UDP_AT + 4, 2, length - 20)
        head[:, BTH_AT] = code
        head[:, BTH_AT + 1] = 0x40 | pad << 4  # MigReq, as adapters set it
        put(head, BTH_AT + 2, 2, 0xFFFF)  # default partition
        put(head, BTH_AT + 5, 3, self._pairs[way])
        head[:, BTH_AT + 8] = packets["ask"] << 7
        put(head, BTH_AT + 9, 3, packets["psn"])
        at, headers = EXTENDED_AT, wire.OPCODES[code].headers
        message = np.maximum(packets["message"], 0)
        for header in EXTENDED:
            if not headers & header:
                continue
            if header == wire.RETH:
                put(head, at, 8, self._messages["va"][message])
                put(head, at + 8, 4, self._messages["rkey"][message])
                put(head, at + 12, 4, self._messages["bytes"][message])
            elif header == wire.ATOMIC:
                put(head, at, 8, self._messages["va"][message])
                put(head, at + 8, 4, self._messages["rkey"][message])
                put(head, at + 12, 8, self._messages["value"][message])
            elif header == wire.AETH:
                head[:, at] = packets["syndrome"]
                put(head, at + 1, 3, packets["msn"])
            elif header == wire.IMM:
                put(head, at, 4, self._messages["value"][message])
            elif header == wire.CNP_PAD:
                head[:, BTH_AT + 4] = 0x40  # BECN
            at += wire.HEADER_BYTES[header]

    def _contents(self, body: Bytes, packets: Columns) -> None:
        """First bytes of messages: what is passed on keeps them. Words of data; LL has flags between them."""
        body[:] = np.frombuffer(self._pool, np.uint8)[: body.shape[1]]
        held = self._messages["target"][packets["message"]].astype(np.uint64)
        for at, factor in ((0, 0x9E3779B97F4A7C15), (8, 0xC2B2AE3D27D4EB4F)):
            if at + 4 <= body.shape[1]:
                put_little(
                    body, at, 4, ((held + np.uint64(1)) * np.uint64(factor) >> np.uint64(32)).astype(np.int64)
                )

    def _entries(self, body: Bytes, packets: Columns, is_grant: NDArray[np.bool_]) -> None:
        """Payloads of clear-to-send entries; other messages of that length carry data."""
        layout, messages = self._layout, self._messages
        row = packets["message"]
        count = body.shape[1] // layout.entry
        first = self._listed[row]
        for place in range(count):
            entry = np.zeros((len(body), layout.entry), np.uint8)
            told = {name: messages[name][row] for name in ("target", "room", "key")}
            told["tag"] = self._tags[packets["flow"]]
            if (first >= 0).any():
                at = np.maximum(first, 0) + place
                told = {name: np.where(first >= 0, self._lists[name][at], told[name]) for name in told}
            put_little(entry, 0, 8, told["target"])
            put_little(entry, layout.size_at, layout.size_bytes, told["room"])
            put_little(entry, layout.rkeys_at, 4, told["key"])
            put_little(entry, layout.requests_at, 4, count)
            put_little(entry, layout.tag_at, 4, told["tag"])
            put_little(entry, layout.number_at, 8, messages["value"][row])
            part = slice(place * layout.entry, (place + 1) * layout.entry)
            body[is_grant, part] = entry[is_grant]

    def _sizes(self, body: Bytes, packets: Columns) -> None:
        """What stands behind a group of messages: how many bytes each has."""
        first = self._listed[packets["message"]]
        mine = first >= 0
        for place in range(body.shape[1] // LENGTH_BYTES):
            word = np.zeros((int(mine.sum()), LENGTH_BYTES), np.uint8)
            put_little(word, 0, LENGTH_BYTES, self._lists["room"][first[mine] + place])
            body[mine, place * LENGTH_BYTES : (place + 1) * LENGTH_BYTES] = word

    def _icrc(self, head: Bytes, own: int, payload: int, pad: int) -> NDArray[np.uint32]:
        """Of frames with these headers and ``own`` bytes of their payload; the rest is the pool's."""
        rows = head[:, IP_AT:].copy()
        for at in (1, 8, 10, 11, UDP_AT - IP_AT + 6, UDP_AT - IP_AT + 7, BTH_AT - IP_AT + 4):
            rows[:, at] = 0xFF  # may change on the way
        state = checksum.walk(np.full(len(rows), checksum.AFTER_LRH, np.uint32), rows)
        return ~checksum.skip(state, self._pool[own:payload] + bytes(pad))


def _macs(played: Played) -> Bytes:
    """Destination and source of each way, as frames leave and as they arrive: ways x 2 x 12 bytes."""
    network = played.network
    found = np.zeros((2 * len(played.ends), 2, 12), np.uint8)
    for number, (flow, ends) in enumerate(zip(played.flows, played.ends, strict=True)):
        for back in (0, 1):
            src, dst = (flow.src, flow.dst)[:: -1 if back else 1]
            own, other = (ends.src, ends.dst)[:: -1 if back else 1]
            near = network.near(src, dst)
            leaves = (other.mac if near else network.gateway(src)) + own.mac
            comes = other.mac + (own.mac if near else network.gateway(dst))
            found[number + back * len(played.ends)] = [list(leaves), list(comes)]
    return found
