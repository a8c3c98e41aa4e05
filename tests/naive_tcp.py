"""TCP for the eye: scripted segments as Blocks, and a plain reassembler that frames Gloo byte by byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from dpuflow.messages.tcp import TcpMessages
from dpuflow.schema import rows as schema
from dpuflow.schema.rows import TcpFlag, Wire
from dpuflow.schema.tables import Block

ISN = (1000, 0xFFFFF000)  # the second stream wraps soon
GLOO_WIRE = {0: Wire.GLOO_DATA, 1: Wire.GLOO_DATA, 2: Wire.GLOO_SEND_READY, 3: Wire.GLOO_RECV_READY}


@dataclass
class Segment:
    """One captured TCP segment; ``way`` 0 is what the side that opened the connection sends."""

    time_ns: int
    way: int
    at: int  # offset in the stream; -1: the SYN's sequence number
    data: bytes = b""
    ack: int | None = None  # offset in the opposite stream
    flags: int = TcpFlag.ACK
    window: int = 1000
    ce: bool = False
    sack: tuple[int, int] = (0, 0)  # first SACK block, offsets in the opposite stream; equal: none


def gloo(opcode: int, tag: int, length: int, prefix: int = 4, delta: int = 0) -> bytes:
    """A Gloo message; DATA (opcode 1) with its payload."""
    size = 48 + (length if opcode < 2 else 0)
    slot = prefix << 56 | tag << 24 | delta
    return struct.pack("<6Q", size, opcode, slot, 0, length, 0) + bytes(size - 48)


def handshake() -> list[Segment]:
    """SYN, SYN-ACK, ACK at the times 0, 1, 2."""
    return [
        Segment(0, 0, -1, flags=TcpFlag.SYN),
        Segment(1, 1, -1, ack=0, flags=TcpFlag.SYN | TcpFlag.ACK),
        Segment(2, 0, 0, ack=0),
    ]


def cut(
    way: int, stream: bytes, sizes: list[int], time_ns: int, step_ns: int = 100, at: int = 0
) -> list[Segment]:
    """``stream`` in segments of ``sizes`` (the last repeated), one each ``step_ns``."""
    made = []
    for k in range(len(stream)):
        size = sizes[min(k, len(sizes) - 1)]
        made.append(Segment(time_ns + k * step_ns, way, at, stream[:size]))
        at, stream = at + size, stream[size:]
        if not stream:
            break
    return made


def block(
    segments: list[Segment], first_frame: int = 0, snap: int = 1 << 16, isn: tuple[int, int] = ISN
) -> Block:
    """The segments as the parser would hand them over, payload cut to ``snap`` bytes."""
    columns = schema.PACKET.columns(len(segments))
    tcp = schema.TCP.zeros(len(segments))
    data = b""
    for i, s in enumerate(segments):
        seen = s.data[:snap]
        values = {
            "time_ns": s.time_ns, "frame": first_frame + i, "flow": s.way, "payload": len(s.data),
            "data_at": len(data), "data_len": len(seen), "tos": 3 if s.ce else 2, "kind": schema.Kind.TCP,
        }  # fmt: skip
        for name, value in values.items():
            columns[name][i] = value
        data += seen
        ack = 0 if s.ack is None else isn[1 - s.way] + 1 + s.ack
        flags = s.flags if s.ack is not None else s.flags & ~TcpFlag.ACK
        sack = [(isn[1 - s.way] + 1 + edge) % 2**32 if s.sack[0] != s.sack[1] else 0 for edge in s.sack]
        tcp[i] = (i, (isn[s.way] + 1 + s.at) % 2**32, ack % 2**32, 0, 0, *sack, s.window, flags, 255)
    empty = [getattr(schema, name).zeros(0) for name in ("RETH", "AETH", "IMM", "DETH", "ATOMIC")]
    # Loads of eight bytes at a header's start stay inside, as in a capture's window.
    buffer = np.frombuffer(data + bytes(64), np.uint8).copy()
    return Block(first_frame, len(segments), columns, buffer, *empty, tcp, schema.PAUSE.zeros(0))


def two_flows() -> np.ndarray:
    """FLOW rows of the two directions."""
    flows = schema.FLOW.zeros(2)
    flows["src"], flows["dst"], flows["sport"], flows["dport"] = (0, 1), (1, 0), (40000, 5000), (5000, 40000)
    flows["transport"], flows["peer"], flows["rtt_min_ns"] = schema.Transport.TCP, schema.NONE32, schema.NEVER
    return flows


def run(segments: list[Segment], snap: int = 1 << 16, rows: int = 1000,
        isn: tuple[int, int] = ISN) -> tuple[np.ndarray, np.ndarray, TcpMessages]:  # fmt: skip
    """MESSAGE and FLOW rows of the segments, fed in blocks of ``rows``."""
    flows, tcp = two_flows(), TcpMessages()
    for start in range(0, len(segments), rows):
        tcp.feed(block(segments[start : start + rows], start, snap, isn), flows)
    return tcp.finish(flows), flows, tcp


@dataclass
class Message:
    """What the reassembler says of a message."""

    way: int
    at: int
    end: int
    wire: Wire
    tag: int = 0
    length: int = 0
    first_ns: int = 0
    last_ns: int = 0
    acked_ns: int = schema.NEVER


def frame_gloo(way: int, stream: bytes) -> list[Message]:
    """Messages of a whole Gloo stream; the opening side's starts with its rank."""
    found, at = [], 0
    if way == 0:
        found, at = [Message(0, 0, 8, Wire.GLOO_HELLO)], 8
    while at + 48 <= len(stream):
        size, opcode, slot, _, length, _ = struct.unpack_from("<6Q", stream, at)
        found.append(Message(way, at, at + size, GLOO_WIRE[opcode], slot >> 24 & 0xFFFFFFFF, length))
        at += size
    return found


def reassemble(segments: list[Segment]) -> list[Message]:
    """Gloo messages with their times, from segments that hold all their bytes."""
    found: list[Message] = []
    for way in (0, 1):
        byte: dict[int, int] = {}
        stamp: dict[int, int] = {}
        delivered: dict[int, int] = {}
        following = 0
        for s in segments:
            if s.way != way:
                continue
            for k, value in enumerate(s.data):
                if s.at + k not in byte:
                    byte[s.at + k], stamp[s.at + k] = value, s.time_ns
            while following in byte:
                delivered[following] = max(s.time_ns, stamp[following])
                following += 1
        for m in frame_gloo(way, bytes(byte[k] for k in range(following))):
            acks = [s.time_ns for s in segments if s.way != way and s.ack is not None and s.ack >= m.end]
            acked = acks[0] if acks else schema.NEVER
            found.append(replace(m, first_ns=stamp[m.at], last_ns=delivered[m.end - 1], acked_ns=acked))
    return found
