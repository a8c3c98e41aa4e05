"""Packets in, records of a pcap file out: RoCE's frames by a kernel, TCP's segments by the column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.simulated import ACK_CODE, ACKS, DATA_CODE, LENGTH, STREAM
from dpuflow.synth import segments
from dpuflow.synth.pooled import MOST
from dpuflow.synth.rows import internet_sum, put, put_little
from dpuflow.synth.seeds import columns
from dpuflow.synth.transport import LAYOUTS
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.synth.packets import Columns, Packets
    from dpuflow.synth.world import Played

    Bytes = NDArray[np.uint8]

IP_AT: Final = 14
UDP_AT: Final = 34
BTH_AT: Final = 42
TTL: Final = 255  # NCCL asks for it
TCP_TTL: Final = 64
EPHEMERAL: Final = 32768  # first of the ports that Linux gives out
ECT0: Final = 2
LENGTH_BYTES: Final = 4
"""NCCL writes a message's size over TCP by itself."""
CONTENT_BYTES: Final = 12
"""So many first bytes of a message are its own: two words and what is between."""


class Framer:
    """Makes the frames of one world."""

    def __init__(self, played: Played, snaplen: int) -> None:
        from dpuflow.kernels import simulated as kernels

        self._played, self._snaplen = played, snaplen
        self._cells, self._messages = played.trace.messages.cells(), played.trace.messages.read()
        scenario = played.scenario
        self._pool = columns(scenario.seed, "payload").integers(0, 256, 4096, np.uint8)
        self._states = kernels.prefix_states(self._pool.tobytes())
        self._class = scenario.nccl.traffic_class & 0xFC | (ECT0 if scenario.nccl.ecn else 0)
        ends = played.ends
        both = [(e.src, e.dst, e.queue_pair) for e in ends] + [(e.dst, e.src, e.reply_pair) for e in ends]
        # By flow and direction: bytes of addresses as they stand in a frame.
        self._macs = _macs(played)
        self._ips = np.array([list(src.ip.packed + dst.ip.packed) for src, dst, _ in both], np.uint8).reshape(
            -1, 8
        )
        self._pairs = np.array([pair for _, _, pair in both], np.int64)
        self._services = np.array([e.ports for e in ends] + [e.ports[::-1] for e in ends], np.int64).reshape(
            -1, 2
        )
        # Under one leaf frames are switched; over the spine they are routed three times.
        near = [played.network.near(flow.src, flow.dst) for flow in played.flows]
        self._hops = np.array([0 if each else 3 for each in near] * 2, np.int64)
        self._heads = self._roce_heads(np.array([e.udp_port for e in ends] * 2, np.int64))
        acks = played.trace.acks.read()
        self._ranges = np.stack([acks[name] for name in ACKS[1:]], axis=1)
        self._tags = np.array(played.tags, np.int64)
        self._entries = played.trace.entries.cells()
        self._listed = np.full(len(self._cells), -1)
        rows = played.trace.entries.read()["message"]
        begins = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]][: len(rows)])
        self._listed[rows[begins]] = begins
        layout = LAYOUTS[scenario.nccl.version]
        self._places = np.array(
            [
                *(layout.entry, layout.size_at, layout.size_bytes, layout.rkeys_at),
                *(layout.requests_at, layout.tag_at, layout.number_at, MOST),
            ]
        )
        self._beside = np.zeros(segments.LAST_CODE + 1, np.int64)  # bytes beside payload and padding, by code
        self._beside[: len(kernels.OVERHEAD)] = kernels.OVERHEAD
        for code in range(DATA_CODE, segments.LAST_CODE + 1):
            self._beside[code] = segments.HEADERS + segments.option_bytes(code)

    def _roce_heads(self, udp_ports: NDArray[np.int64]) -> Bytes:
        """What is the same in all RoCE frames of a way, as they leave and as they arrive: up to the PSN."""
        from dpuflow.kernels import simulated as kernels

        ways = len(self._pairs)
        heads = np.zeros((ways, 2, kernels.HEAD), np.uint8)
        way = np.arange(ways)
        for received in (0, 1):
            head = heads[:, received]
            back = (way >= ways // 2).astype(np.int64)
            zero = np.zeros(ways, np.int64)
            told = {"received": zero + received, "back": back, "identity": zero}
            self._ethernet_ip(head, told, way, 0, wire.IPPROTO_UDP, TTL)
            head[:, IP_AT + 1] = np.where(back == 1, self._class & 0xFC, self._class)
            put(head, UDP_AT, 2, udp_ports)
            put(head, UDP_AT + 2, 2, wire.ROCE_V2_PORT)
            put(head, BTH_AT + 2, 2, 0xFFFF)  # default partition
            put(head, BTH_AT + 5, 3, self._pairs)
        return heads.reshape(-1)

    def records(self, packets: Packets, stamps: NDArray[np.int64], truncate: int) -> Bytes:
        """Pcap records of the packets; frames longer than ``truncate`` (0: none) were cut to that before."""
        from dpuflow.kernels import simulated as kernels

        code, payload = packets.column("code"), packets.column("payload")
        lengths = payload + self._beside[code] + np.where(code < DATA_CODE, -payload & 3, 0)
        if truncate:
            # What the mirror has cut nobody downstream knows to have been longer.
            lengths = np.minimum(lengths, truncate)
        captured = np.minimum(lengths, self._snaplen) if self._snaplen else lengths
        size = int(captured.sum()) + kernels.RECORD * len(captured)
        out = np.empty(size + kernels.SLACK, np.uint8)
        kernels.write_records(
            packets.rows, stamps, captured, lengths, self._cells, self._listed, self._entries, self._heads,
            self._tags, self._places, self._pool, self._states, out,
        )  # fmt: skip
        if packets.streams is not None:
            self._write_segments(packets, captured, out)
        return out[:size]

    def _write_segments(self, packets: Packets, captured: NDArray[np.int64], out: Bytes) -> None:
        """Frames of TCP's segments into the room that was left for them."""
        from dpuflow.kernels import simulated as kernels

        columns, begins = packets.columns(), np.cumsum(kernels.RECORD + captured) - captured
        code, payload = columns["code"], columns["payload"]
        segment = code >= DATA_CODE
        for kind, size in np.unique(np.stack([code, payload], axis=1)[segment], axis=0).tolist():
            rows = np.flatnonzero((code == kind) & (payload == size))
            made = self._segments({name: column[rows] for name, column in columns.items()}, kind, size)
            kept = int(captured[rows[0]])
            # Frames of one size are moved each as one, to any byte.
            whole = np.dtype((np.void, kept))
            places = np.ndarray((len(out) - kept + 1,), whole, out, strides=(1,))
            places[begins[rows]] = np.ascontiguousarray(made[:, :kept]).view(whole)[:, 0]

    def _segments(self, packets: Columns, code: int, payload: int) -> Bytes:
        """TCP segments with so much payload, cut at the snap length."""
        headers = segments.HEADERS + segments.option_bytes(code)
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
        self._ethernet_ip(head, packets, way, length - IP_AT, wire.IPPROTO_TCP, TCP_TTL)
        # Queue pair numbers stand for what TCP has in their place: ports and first sequence numbers.
        other = (way + len(self._played.ends)) % (2 * len(self._played.ends))
        ports = np.stack(
            [EPHEMERAL + self._pairs[other] % 28000, EPHEMERAL + self._pairs[way] % 28000], axis=1
        )
        ports = np.where(self._services[way] > 0, self._services[way], ports)
        starts = np.stack([self._pairs[other], self._pairs[way]], axis=1) * 2654435761
        ranges = self._ranges[packets["syndrome"]] if code > ACK_CODE else self._ranges[:0]
        ends = segments.Ends(ports, starts, starts * 40503 >> 8)
        segments.fill(head, packets, code, ends, ranges, self._pool[own:payload].tobytes())
        out = np.zeros((len(head), max(kept, head.shape[1])), np.uint8)
        out[:, : head.shape[1]] = head
        room = max(0, kept - head.shape[1])
        out[:, head.shape[1] : head.shape[1] + room] = self._pool[own : own + room]
        return out[:, :kept]

    def _payload(self, body: Bytes, row: NDArray[np.int64], begins: NDArray[np.bool_]) -> None:
        """First bytes of segments: the size of the next message, or contents where a message begins."""
        body[:] = self._pool[: body.shape[1]]
        sized = self._messages["kind"][row] == LENGTH
        if sized.any():
            size = self._messages["value"][row[sized]]
            body[sized] = size.astype("<u4").view(np.uint8).reshape(-1, LENGTH_BYTES)
        first = np.zeros((int(begins.sum()), body.shape[1]), np.uint8)
        self._contents(first, {"message": row[begins]})
        body[begins] = first

    def _ethernet_ip(
        self, head: Bytes, packets: Columns, way: NDArray[np.int64], length: int, protocol: int, ttl: int
    ) -> None:
        head[:, 0:12] = self._macs[way, packets["received"] % 2]
        head[:, 12:14] = (8, 0)
        head[:, IP_AT] = 0x45
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

    def _contents(self, body: Bytes, packets: Columns) -> None:
        """First bytes of messages: what is passed on keeps them. Words of data; LL has flags between them."""
        body[:] = self._pool[: body.shape[1]]
        held = self._messages["target"][packets["message"]].astype(np.uint64)
        for at, factor in ((0, 0x9E3779B97F4A7C15), (8, 0xC2B2AE3D27D4EB4F)):
            if at + 4 <= body.shape[1]:
                put_little(
                    body, at, 4, ((held + np.uint64(1)) * np.uint64(factor) >> np.uint64(32)).astype(np.int64)
                )


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
