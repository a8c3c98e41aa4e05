"""Scripted TCP connections: who says what in turn in, whole frames with their times out.

For sockets of few bytes that wait for each other, not for the network: they are played by themselves, do
not queue, and lose nothing. Linux's ways: SYN with its options, time stamps, segments of 1448 bytes, the last
of a write pushed, each write acknowledged at once (as at a connection's beginning), right checksums.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.synth.flows import FRAMING_BYTES, STREAM_BYTES
from dpuflow.synth.rows import internet_sum
from dpuflow.synth.segments import STAMPS, TICK_NS
from dpuflow.synth.stream import SCALE, SEGMENT
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from ipaddress import IPv4Address
    from random import Random

    from dpuflow.synth.cluster import Network
    from dpuflow.synth.flows import Port

FIN: Final = 1
SYN: Final = 2
PUSH: Final = 8
ACK: Final = 16
TTL: Final = 64
ROUTED: Final = 3
"""Hops over the spine, as ``frames`` has them."""
FIRST_WINDOW: Final = 64240
WINDOW: Final = 502
"""What a receiver that reads at once advertises, in units of its scale (as Linux's first windows are)."""
KERNEL_NS: Final = 8_000.0
"""From a segment's coming to its acknowledgment (assumed)."""


class Say(NamedTuple):
    """One write: by the connecting side or the other one, so long after both are done with the last one."""

    client: bool
    data: bytes
    after_ns: float


class Side(NamedTuple):
    """One end of a connection: ``begins`` is the sequence number of its first byte, ``clock`` the value of
    its time stamps when the world begins."""

    port: Port
    tcp_port: int
    begins: int
    clock: int
    identity: int

    @classmethod
    def drawn(cls, port: Port, random: Random, tcp_port: int | None = None) -> Side:
        """An end with numbers as Linux draws them."""
        chosen = random.randrange(32768, 61000) if tcp_port is None else tcp_port
        return cls(
            port, chosen, random.randrange(1 << 32), random.randrange(1 << 32), random.randrange(1 << 16)
        )


class Frame(NamedTuple):
    """A frame with its times at both ports: as it leaves, and as it arrives."""

    tx_ns: int
    rx_ns: int
    src: Port
    dst: Port
    leaves: bytes
    comes: bytes


class _End:
    """What one side has sent and heard, and when it was last busy."""

    def __init__(self, side: Side, now: float) -> None:
        self.side, self.now = side, now
        self.sent = self.heard = 0  # bytes, a FIN as one
        self.echo = 0
        self.identity = side.identity


class Conversation:
    """One connection as it goes on; ``frames`` are those so far."""

    def __init__(self, network: Network, client: Side, server: Side, begin_ns: float) -> None:
        self._network = network
        self._ends = {True: _End(client, begin_ns), False: _End(server, begin_ns)}
        self.frames: list[Frame] = []
        there = self._send(True, begin_ns, SYN)
        back = self._send(False, there + KERNEL_NS, SYN | ACK)
        self._send(True, back + KERNEL_NS, ACK)
        self._ends[True].now = self._ends[False].now = back + KERNEL_NS

    @property
    def now(self) -> float:
        """When both sides are done with what they did so far."""
        return max(end.now for end in self._ends.values())

    def say(self, say: Say, not_before: float = float("-inf")) -> float:
        """One write; says when all of it is there."""
        mine, other = self._ends[say.client], self._ends[not say.client]
        at = there = max(self.now, not_before) + say.after_ns
        for start in range(0, len(say.data), SEGMENT):
            part = say.data[start : start + SEGMENT]
            last = start + SEGMENT >= len(say.data)
            there = self._send(say.client, at, ACK | (PUSH if last else 0), part)
            at += (len(part) + STREAM_BYTES + FRAMING_BYTES) * mine.side.port.up_ns
        mine.now, other.now = at, there + KERNEL_NS
        self._send(not say.client, other.now, ACK)
        return there

    def close(self) -> None:
        """The client ends it."""
        there = self._send(True, self.now + KERNEL_NS, FIN | ACK)
        back = self._send(False, there + KERNEL_NS, FIN | ACK)
        self._ends[True].now = self._ends[False].now = self._send(True, back + KERNEL_NS, ACK)

    def _send(self, by: bool, at_ns: float, flags: int, data: bytes = b"") -> float:
        """One segment; says when it is there."""
        mine, other = self._ends[by], self._ends[not by]
        src, dst = mine.side.port, other.side.port
        syn = flags & SYN
        sequence = mine.side.begins + mine.sent - (1 if syn else 0)
        known = other.side.begins + mine.heard if flags & ACK else 0
        tick = mine.side.clock + int(at_ns // TICK_NS) & 0xFFFFFFFF
        options = bytes(STAMPS) + struct.pack(">II", tick, mine.echo)
        if syn:
            # Maximum segment size, SACK, time stamps, window scale.
            options = bytes((2, 4, 5, 180, 4, 2, 8, 10)) + options[4:] + bytes((1, 3, 3, SCALE))
        header = struct.pack(
            ">HHIIBBHHH", mine.side.tcp_port, other.side.tcp_port, sequence & 0xFFFFFFFF, known & 0xFFFFFFFF,
            (20 + len(options)) // 4 << 4, flags, FIRST_WINDOW if syn else WINDOW, 0, 0,
        )  # fmt: skip
        segment = header + options + data
        leaves, comes = _frames(self._network, src, dst, mine.identity, segment)
        mine.identity = mine.identity + 1 & 0xFFFF
        on_wire = (len(leaves) + FRAMING_BYTES) * max(src.up_ns, dst.down_ns)
        there = at_ns + self._network.latency_ns(src, dst) + on_wire
        self.frames.append(Frame(round(at_ns), round(there), src, dst, leaves, comes))
        mine.sent += len(data) + (1 if flags & FIN else 0)
        other.heard = mine.sent
        other.echo = tick
        return there


def _frames(network: Network, src: Port, dst: Port, identity: int, segment: bytes) -> tuple[bytes, bytes]:
    """The frame as it leaves and as it arrives; over the spine it is routed."""
    own, other = network.addresses[src.number], network.addresses[dst.number]
    segment = _checked(own.ip, other.ip, segment)
    near = network.near(src, dst)
    made = []
    for arrived in (False, True):
        to, by = other.mac, own.mac
        if not near:
            to, by = (to, network.gateway(dst)) if arrived else (network.gateway(src), by)
        ttl = TTL - (ROUTED if arrived and not near else 0)
        header = struct.pack(
            ">BBHHHBBH4s4s", 0x45, 0, 20 + len(segment), identity, 0x4000, ttl, wire.IPPROTO_TCP, 0,
            own.ip.packed, other.ip.packed,
        )  # fmt: skip
        header = header[:10] + _sum(header) + header[12:]
        made.append(to + by + struct.pack(">H", wire.ETHERTYPE_IPV4) + header + segment)
    return made[0], made[1]


def _checked(src: IPv4Address, dst: IPv4Address, segment: bytes) -> bytes:
    """The segment with its checksum."""
    pseudo = src.packed + dst.packed + struct.pack(">HH", wire.IPPROTO_TCP, len(segment))
    return segment[:16] + _sum(pseudo + segment) + segment[18:]


def _sum(data: bytes) -> bytes:
    total = int(internet_sum(np.frombuffer(data, np.uint8)[None, :])[0])
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)


def seen_at(frames: list[Frame], node: int | None, half_ns: int) -> Iterator[tuple[int, bytes]]:
    """Time and bytes of the frames that pass a node's ports, or the switch (None), in order of time."""
    found: list[tuple[int, int, bytes]] = []
    for number, frame in enumerate(frames):
        if node is None:
            found.append((frame.tx_ns + half_ns, number, frame.leaves))
        elif frame.src.node == node:
            found.append((frame.tx_ns, number, frame.leaves))
        elif frame.dst.node == node:
            found.append((frame.rx_ns, number, frame.comes))
    for time_ns, _, data in sorted(found):
        yield time_ns, data
