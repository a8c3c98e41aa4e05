"""Whole conversations made at random: what peers say is well formed for the wire, absurd in what it claims.

Packets of one conversation follow each other in sequence, so that they come as far as messages, exchanges and
collectives; below them lie any stack of tags, labels, extension headers and tunnels, around them a pcapng of
any options. Everything takes a ``random.Random`` and nothing else is random.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from random import Random

from dpuflow import framing as fm
from dpuflow.wire import nccl

ABSURD = (
    0,
    1,
    3,
    4,
    12,
    63,
    64,
    4096,
    65535,
    65536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
)
SIZES = (0, 1, 4, 100, 1000, 4096, 9000)


def _number(rng: Random, bits: int) -> int:
    """A number that fits: often an absurd one."""
    if rng.random() < 0.6:
        return rng.choice(ABSURD) & (1 << bits) - 1
    return rng.getrandbits(rng.randrange(1, bits + 1))


# -- below: what carries a conversation -----------------------------------------------------------


class Way:
    """How packets of one conversation are wrapped, drawn once; ``wrap`` gives a frame."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.v6 = rng.random() < 0.35
        size = 16 if self.v6 else 4
        self.ends = [bytes([10, 0, 0, rng.randrange(1, 9)]), bytes([10, 0, 0, rng.randrange(9, 17)])]
        if self.v6:
            self.ends = [b"\xfd" + bytes(size - 5) + end for end in self.ends]
        self.extensions = [
            rng.choice((0, 43, 60, 44, 51, 135, 139, 140, 0, 60, 43, 60, 50, 59))
            for _ in range(rng.choice((0, 0, 1, 2, 9)))
        ]
        self.options = rng.randbytes(4 * rng.choice((0, 0, 0, 1, 10)))
        unread = rng.random() < 0.1
        self.tunnels = [
            rng.choice((*TUNNELS, *UNREAD) if unread else TUNNELS)
            for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2, 3, 8)))
        ]
        self.tags = [rng.choice((0x8100, 0x88A8, 0x9100)) for _ in range(rng.choice((0, 0, 0, 1, 2, 3, 12)))]
        self.labels = rng.choice((0, 0, 0, 0, 0, 0, 1, 3))
        self.pppoe = rng.random() < 0.03
        self.liar = rng.choice(
            (0.0, 0.0, 0.0, 0.0, 0.002, 0.05)
        )  # share of packets with a length that is none
        self.fragments = rng.random() < 0.05

    def ip(
        self, side: int, protocol: int, payload: bytes, ends: list[bytes] | None = None, inner: bool = True
    ) -> bytes:
        """(EtherType is told by the first nibble.)"""
        rng = self.rng
        src, dst = (ends or self.ends)[side], (ends or self.ends)[1 - side]
        lie = inner and rng.random() < self.liar
        if len(src) == 16:
            chain = b""
            kinds = [*(self.extensions if inner else ()), protocol]
            for kind, following in pairwise(kinds):
                if kind == 44:
                    offset = (
                        rng.choice((0, 0, 1, 0x1FFF)) << 3 | (1 if rng.random() < 0.3 else 0)
                        if self.fragments
                        else 0
                    )
                    chain += struct.pack(">BBHI", following, 0, offset, 7)
                elif kind == 51:
                    chain += struct.pack(">BBHII", following, 2, 0, 1, 1) + bytes(4)
                else:
                    words = rng.choice((0, 0, 1, 31, 255)) if lie else rng.choice((0, 1))
                    chain += bytes([following, words]) + bytes(6 + 8 * (words if words < 9 else 0))
            length = _number(rng, 16) if lie else len(chain) + len(payload)
            return (
                struct.pack(">IHBB", 0x60000000 | rng.getrandbits(28), length & 0xFFFF, kinds[0], 64)
                + src
                + dst
                + chain
                + payload
            )
        options = self.options if inner else b""
        length = _number(rng, 16) if lie else 20 + len(options) + len(payload)
        words = rng.randrange(16) if lie and rng.random() < 0.3 else 5 + len(options) // 4
        offset = rng.choice((0x4000, 0x2000, 1, 0x3FFF)) if self.fragments and rng.random() < 0.3 else 0x4000
        return (
            struct.pack(
                ">BBHHHBBH",
                0x40 | words,
                2 if rng.random() < 0.9 else 3,
                length & 0xFFFF,
                rng.getrandbits(16),
                offset,
                64,
                protocol,
                0,
            )
            + src
            + dst
            + options
            + payload
        )

    def wrap(self, side: int, protocol: int, payload: bytes) -> bytes:
        """An Ethernet frame from end ``side``."""
        packet = self.ip(side, protocol, payload)
        for depth, tunnel in enumerate(self.tunnels):
            ends = [bytes([172, 16, depth, 1]), bytes([172, 16, depth, 2])]
            if depth & 1:
                ends = [bytes(12) + end for end in ends]
            number, within = tunnel(self.rng, self.ethernet(side, packet), packet)
            packet = self.ip(side, number, within, ends, inner=False)
        return self.ethernet(side, packet, tagged=True)

    def ethernet(self, side: int, packet: bytes, tagged: bool = False) -> bytes:
        """With the tags, if this is the outermost."""
        kind = 0x86DD if packet[0] >> 4 == 6 else 0x0800
        macs = b"\2\0\0\0\0" + bytes([1 - side]) + b"\2\0\0\0\0" + bytes([side])
        if not tagged:
            return macs + struct.pack(">H", kind) + packet
        if self.labels:
            stack = [
                struct.pack(">I", self.rng.getrandbits(20) << 12 | (n == self.labels - 1) << 8 | 64)
                for n in range(self.labels)
            ]
            kind, packet = 0x8847, b"".join(stack) + packet
        elif self.pppoe:
            packet = (
                struct.pack(">BBHHH", 0x11, 0, 1, len(packet) + 2, 0x57 if kind == 0x86DD else 0x21) + packet
            )
            kind = 0x8864
        tags = b"".join(struct.pack(">HH", tag, self.rng.getrandbits(16)) for tag in self.tags)
        return macs + tags + struct.pack(">H", kind) + packet


def _udp(port: int, payload: bytes, source: int = 49152) -> bytes:
    return struct.pack(">HHHH", source, port, (8 + len(payload)) & 0xFFFF, 0) + payload


def _gre(rng: Random, kind: int, payload: bytes, flags: int | None = None) -> tuple[int, bytes]:
    flags = rng.choice((0, 0x2000, 0x1000, 0x8000, 0xB000, 0x4000, 1)) if flags is None else flags
    words = bin(flags >> 12 & 0b1011).count("1")
    return 47, struct.pack(">HH", flags, kind) + rng.randbytes(4 * words) + payload


def _erspan(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    which = rng.randrange(3)
    if which == 0:
        return _gre(rng, 0x88BE, frame, 0)
    if which == 1:
        return _gre(
            rng,
            0x88BE,
            struct.pack(">HHI", 0x1000 | rng.getrandbits(12), rng.getrandbits(16), 3) + frame,
            0x1000,
        )
    platform = rng.random() < 0.5
    head = struct.pack(
        ">HHIHH",
        0x2000 | rng.getrandbits(12),
        rng.getrandbits(16),
        rng.getrandbits(32),
        0,
        rng.getrandbits(14) << 1 | platform,
    )
    return _gre(rng, 0x22EB, head + (rng.randbytes(8) if platform else b"") + frame, 0x1000)


def _geneve(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    words = rng.choice((0, 0, 1, 10, 63))
    kind = 0x6558 if rng.random() < 0.8 else 0x0800
    inside = frame if kind == 0x6558 else packet
    return 17, _udp(
        6081,
        struct.pack(">BBHI", words, rng.getrandbits(8), kind, rng.getrandbits(32))
        + bytes(4 * words)
        + inside,
    )


def _vxlan(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    flags = 0x08000000 if rng.random() < 0.8 else rng.getrandbits(32)
    return 17, _udp(4789, struct.pack(">II", flags, rng.getrandbits(32)) + frame)


def _vxlan_gpe(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    return 17, _udp(
        4790, struct.pack(">II", 0x0C000000 | rng.choice((1, 2, 3, 4)), rng.getrandbits(32)) + frame
    )


def _bridged(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    return _gre(rng, 0x6558, frame)


def _routed(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    return _gre(rng, 0x86DD if packet[0] >> 4 == 6 else 0x0800, packet)


def _ip_in_ip(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    return 41 if packet[0] >> 4 == 6 else 4, packet


def _gtp(rng: Random, frame: bytes, packet: bytes) -> tuple[int, bytes]:
    return 17, _udp(2152, struct.pack(">BBHI", 0x30, 255, len(packet) & 0xFFFF, 1) + packet)


TUNNELS = (_vxlan, _geneve, _bridged, _routed, _erspan, _ip_in_ip)
UNREAD = (_vxlan_gpe, _gtp)


# -- what is said ---------------------------------------------------------------------------------


def _tcp_options(rng: Random, syn: bool) -> bytes:
    parts = []
    for _ in range(rng.choice((0, 1, 2, 5))):
        kind = rng.choice((0, 1, 2, 3, 4, 5, 8, 19, 28, 30, 34, 69, 254, 255))
        if kind < 2:
            parts.append(bytes([kind]))
        elif kind == 5:
            blocks = rng.randrange(5)
            parts.append(
                bytes([5, 2 + 8 * blocks])
                + b"".join(struct.pack(">I", _number(rng, 32)) for _ in range(2 * blocks))
            )
        else:
            size = {2: 4, 3: 3, 4: 2, 8: 10}.get(kind, rng.choice((2, 6, 18)))
            parts.append(
                bytes([kind, size if rng.random() < 0.95 else rng.choice((0, 1, 255))])
                + rng.randbytes(size - 2)
            )
    joined = b"".join(parts)[:40]
    return joined + bytes(-len(joined) % 4)


def _gloo(rng: Random) -> bytes:
    size = rng.choice(SIZES)
    claimed = _number(rng, 64) if rng.random() < 0.1 else size
    kind = rng.choice((0, 1, 1, 1, 2, 3))
    whole = 48 if kind >= 2 else 48 + claimed
    slot = rng.choice((0x05, 0x01, 0x0A, 0x7F)) << 24 | rng.getrandbits(16)
    return struct.pack(
        "<6Q",
        whole & (1 << 64) - 1,
        kind,
        slot,
        _number(rng, 40) if rng.random() < 0.2 else 0,
        claimed & (1 << 64) - 1,
        0,
    ) + bytes(size if kind < 2 else 0)


def _ob1(rng: Random) -> bytes:
    tag = rng.choice((65, 65, 65, 66, 67, 68, 69, 70, 71, 72, 73, fm.BTL_TAG_PUT))
    if tag == fm.BTL_TAG_PUT:
        count, size = rng.choice((1, 1, 2, 64, 65535)), rng.choice(SIZES)
        return (
            struct.pack("<BBHI", tag, fm.BTL_PUT, count, _number(rng, 32) if rng.random() < 0.1 else size)
            + struct.pack("<QQ", _number(rng, 64), size) * min(count, 70)
            + bytes(size)
        )
    size = rng.choice((14, 22, 26, 40, 56, 64))
    body = struct.pack(
        "<BBHiiH",
        tag,
        rng.getrandbits(8),
        rng.randrange(4),
        rng.choice((0, 1, 2, 3, (1 << 24) - 1)),
        rng.choice((5, -10, -12, -16, -17, -25, -(1 << 31))),
        rng.getrandbits(16),
    )
    body = (body + struct.pack("<QQQQQQ", *(_number(rng, 64) for _ in range(6))))[:size]
    more = rng.choice(SIZES)
    claimed = _number(rng, 32) if rng.random() < 0.1 else size + more
    return struct.pack("<BBHI", tag, 1, 0, claimed) + body + bytes(more)


def _nccl(rng: Random) -> bytes:
    size = rng.choice(SIZES)
    return struct.pack("<I", _number(rng, 32) if rng.random() < 0.1 else size) + bytes(size)


def _ucx(rng: Random) -> bytes:
    size = rng.choice(SIZES)
    return (
        struct.pack("<BI", rng.randrange(32), _number(rng, 32) if rng.random() < 0.1 else size)
        + rng.randbytes(8)
        + bytes(size)
    )


def _hello(rng: Random) -> bytes:
    """NCCL's handshake, and what net_ib's sides tell each other, or the bootstrap."""
    magic = nccl.MAGIC if rng.random() < 0.8 else rng.getrandbits(64)
    kind = rng.randrange(7)
    head = struct.pack("<QI", magic, kind)
    layout = rng.choice(nccl.EXCHANGES)
    told = bytearray(rng.randbytes(rng.choice((0, layout.props + layout.size + 4, 60, 40 * 128))))
    for _ in range(rng.randrange(6)):
        if len(told) > 8:
            struct.pack_into("<I", told, rng.randrange(len(told) - 4) & ~3, _number(rng, 32))
    return head + struct.pack("<I", _number(rng, 32)) * rng.randrange(2) + bytes(told)


SAID = (_gloo, _ob1, _nccl, _ucx, lambda rng: rng.randbytes(rng.choice((1, 5, 48, 1400))))


def tcp_talk(rng: Random, way: Way, messages: int) -> list[bytes]:
    """Both directions of a connection, in segments of any cut, some again, with holes, past 2**32."""
    out: list[bytes] = []
    seqs = [rng.choice((1, (1 << 32) - 3000, rng.getrandbits(32))) for _ in range(2)]
    ports = [rng.randrange(1024, 65536), rng.randrange(1024, 65536)]
    say = rng.choice(SAID)

    def segment(side: int, flags: int, data: bytes, at: int) -> None:
        options = _tcp_options(rng, bool(flags & 2))
        window = rng.choice((0, 1, 1000, 65535))
        ack = seqs[1 - side] if rng.random() < 0.97 else _number(rng, 32)
        words = 5 + len(options) // 4 if rng.random() < 0.99 else rng.randrange(16)
        head = struct.pack(
            ">HHIIBBHHH",
            ports[side],
            ports[1 - side],
            at & 0xFFFFFFFF,
            ack & 0xFFFFFFFF,
            words << 4,
            flags,
            window,
            0,
            rng.choice((0, 0, 0, 65535)),
        )
        out.append(way.wrap(side, 6, head + options + data))

    if rng.random() < 0.6:
        for side, flags in ((0, 2), (1, 18), (0, 16)):
            segment(side, flags, b"", seqs[side])
            seqs[side] += flags & 2 != 0
        if rng.random() < 0.3:
            say = _nccl if rng.random() < 0.7 else say
            first = _hello(rng)
            segment(0, 24, first[:1400], seqs[0])
            seqs[0] += len(first)
    for _ in range(messages):
        side = rng.randrange(2)
        data = say(rng) if rng.random() < 0.97 else rng.choice(SAID)(rng)
        at = 0
        while at < len(data):
            size = rng.choice((1, 7, 60, 1400, 1400, 8948, 65000))
            piece = data[at : at + size]
            dice = rng.random()
            if dice > 0.03:
                segment(side, 24, piece, seqs[side] + at)
            if dice > 0.97:
                segment(side, 24, rng.randbytes(len(piece)), seqs[side] + at - rng.choice((0, 1, 1400)))
            at += size
        seqs[side] += len(data) + (rng.choice(ABSURD) if rng.random() < 0.01 else 0)
        if rng.random() < 0.3:
            segment(1 - side, 16, b"", seqs[1 - side])
        if rng.random() < 0.01:
            segment(side, rng.getrandbits(8), b"", seqs[side])
    return out


def _grant_entry(rng: Random) -> bytes:
    """NCCL's entry that announces a buffer, 32 or 64 bytes, to be written by RDMA."""
    return struct.pack(
        "<QQQQ", _number(rng, 64), _number(rng, 64), rng.getrandbits(32), rng.randrange(64)
    ) + bytes(rng.choice((0, 32)))


def roce_talk(rng: Random, way: Way, messages: int) -> list[bytes]:
    """Both directions of some queue pairs, answers included; PSNs wrap, lengths in RETH are anything."""
    out: list[bytes] = []
    pairs = [(rng.getrandbits(24), rng.getrandbits(24)) for _ in range(rng.choice((1, 1, 2, 8)))]
    psn = {
        (p, s): rng.choice((0, 0xFFFFF0, rng.getrandbits(24))) for p in range(len(pairs)) for s in range(2)
    }
    transport = rng.choice((0, 0, 0, 0, 0, 0x20, 0xA0, 0x60, 0x40))
    mtu = rng.choice((256, 1024, 4096))
    liar = rng.choice((0.0, 0.02, 0.3))
    addresses = [rng.getrandbits(48) << 12 for _ in range(3)]

    def packet(
        pair: int, side: int, opcode: int, rest: bytes, data: bytes = b"", at: int | None = None
    ) -> None:
        number = psn[pair, side] if at is None else at
        pad = -len(data) % 4
        flags = 0x40 | pad << 4 if rng.random() > 0.01 else rng.getrandbits(8)
        bth = struct.pack(
            ">BBHII",
            opcode,
            flags,
            0xFFFF,
            pairs[pair][1 - side] | rng.choice((0, 0, 1 << 31)),
            number & 0xFFFFFF | 1 << 31,
        )
        out.append(way.wrap(side, 17, _udp(4791, bth + rest + data + bytes(pad) + bytes(4), 49152 + pair)))
        if at is None:
            psn[pair, side] += 1

    for _ in range(messages):
        pair, side, kind = rng.randrange(len(pairs)), rng.randrange(2), rng.random()
        size = rng.choice((0, 8, 32, 64, 64, 4096, 20_000))
        claimed = _number(rng, 32) if rng.random() < liar else size
        reth = struct.pack(
            ">QII",
            rng.choice((addresses[side] + rng.randrange(16) * 64, _number(rng, 64))),
            7 + side,
            claimed,
        )
        start = psn[pair, side]
        data = _grant_entry(rng) if size in (32, 64) and rng.random() < 0.7 else bytes(size)
        pieces = [data[n : n + mtu] for n in range(0, len(data), mtu)] or [b""]
        if kind < 0.6:
            write, with_data = kind < 0.45, rng.random() < 0.3
            base = 6 if write else 0
            for n, piece in enumerate(pieces):
                first, last = n == 0, n == len(pieces) - 1
                if first and last:
                    code = (0x0A if write else 4) + with_data
                else:
                    code = base if first else base + 2 + with_data if last else base + 1
                rest = (reth if write and first else b"") + (rng.randbytes(4) if with_data and last else b"")
                if rng.random() > 0.01:
                    packet(pair, side, transport | code, rest, piece)
                else:
                    psn[pair, side] += rng.choice((1, 1, 2, 1 << 22))
        elif kind < 0.7:
            packet(pair, side, transport | 0x0C, reth)
            psn[pair, side] += max(len(pieces) - 1, 0)
            for n, piece in enumerate(pieces):
                first, last = n == 0, n == len(pieces) - 1
                code = 0x10 if first and last else 0x0D if first else 0x0F if last else 0x0E
                packet(
                    pair,
                    1 - side,
                    transport | code,
                    rng.randbytes(4) if code != 0x0E else b"",
                    piece,
                    start + n,
                )
        elif kind < 0.75:
            packet(pair, side, transport | rng.choice((0x13, 0x14)), rng.randbytes(28))
            packet(pair, 1 - side, transport | 0x12, rng.randbytes(12), b"", start)
        elif kind < 0.95:
            syndrome = rng.choice((0x1F, 0x1F, 0x00, 0x20, 0x2E, 0x3F, 0x60, 0x63, 0x64, 0xFF))
            code = transport | 0x11
            packet(
                pair,
                side,
                code,
                struct.pack(">I", syndrome << 24 | rng.getrandbits(24)),
                b"",
                psn[pair, 1 - side] - rng.choice((0, 1, 1, 5, -5)),
            )
        else:
            packet(pair, side, 0x81 if rng.random() < 0.7 else rng.getrandbits(8), rng.randbytes(16))
    return out


# -- around: the file ------------------------------------------------------------------------------


def _block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    return struct.pack(order + "II", kind, len(body) + 12) + body + struct.pack(order + "I", len(body) + 12)


def _options(rng: Random, order: str, *fixed: tuple[int, bytes]) -> bytes:
    """The fixed ones among others of any code and length."""
    wanted = list(fixed)
    for _ in range(rng.choice((0, 0, 1, 4))):
        wanted.append(
            (
                rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 2988, 2989, 19372, 65535)),
                rng.randbytes(rng.choice((0, 1, 4, 8, 9, 300))),
            )
        )
    rng.shuffle(wanted)
    made = b"".join(
        struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4) for code, value in wanted
    )
    if rng.random() < 0.02:
        made += struct.pack(order + "HH", 2, 65535)
    return made + rng.choice((bytes(4), bytes(4), b""))


def pcapng(rng: Random, frames: list[bytes], start_ns: int, gap_ns: int) -> bytes:
    """The frames, their stamps growing by some ``gap_ns``, in sections of any order."""
    order, out, time = rng.choice("<<<>"), [], start_ns
    resolution = rng.choice((9, 9, 9, 6, 3, 0, 12, 0x80 | 30, 0x80 | 10))
    per_s = 2 ** (resolution & 127) if resolution & 128 else 10**resolution
    snap = rng.choice((0, 0, 0, 0, 60, 96, 128))
    counted = 1

    def begin() -> None:
        nonlocal counted
        counted = rng.choice((1, 1, 2, 40))
        out.append(
            _block(
                order,
                0x0A0D0D0A,
                struct.pack(order + "IHHq", 0x1A2B3C4D, 1, rng.choice((0, 0, 2)), -1) + _options(rng, order),
            )
        )
        for _ in range(counted):
            out.append(
                _block(
                    order,
                    1,
                    struct.pack(order + "HHI", 1, 0, snap) + _options(rng, order, (9, bytes([resolution]))),
                )
            )

    begin()
    for frame in frames:
        dice = rng.random()
        if dice < 0.002:
            order = rng.choice("<>")
            begin()
        elif dice < 0.01:
            kind = rng.choice((4, 5, 9, 10, 0x0BAD, 0x40000BAD, 0x80000001, 0x101))
            out.append(
                _block(
                    order,
                    kind,
                    struct.pack(order + "III", 0, 0, 0) + _options(rng, order)
                    if kind == 5
                    else rng.randbytes(rng.choice((4, 8, 100))),
                )
            )
        time += rng.choice(
            (
                0,
                0,
                gap_ns,
                gap_ns,
                3 * gap_ns,
                100 * gap_ns if rng.random() < 0.02 else gap_ns,
                -gap_ns if rng.random() < 0.05 else gap_ns,
            )
        )
        ticks = (time * per_s // 10**9) & (1 << 64) - 1
        kept = frame[: snap or len(frame)]
        wire = len(frame) if rng.random() < 0.99 else rng.choice((0, len(frame) - 1, 0xFFFFFFFF, 70_000))
        head = struct.pack(
            order + "IIIII", rng.randrange(counted), ticks >> 32, ticks & 0xFFFFFFFF, len(kept), wire
        )
        flags = struct.pack(order + "I", rng.getrandbits(32))
        fixed = rng.choice(
            ((), (), ((2, flags),), ((4, struct.pack(order + "Q", rng.choice((0, 1, 1 << 63, 7)))),))
        )
        out.append(
            _block(
                order,
                6,
                head
                + kept
                + bytes(-len(kept) % 4)
                + (_options(rng, order, *fixed) if fixed or rng.random() < 0.1 else b""),
            )
        )
    return b"".join(out)


def captures(rng: Random) -> list[bytes]:
    """Files of one, two or three vantage points that saw the same conversations, in turns."""
    talks = []
    for _ in range(rng.choice((1, 2, 3, 6, 12))):
        talk = roce_talk if rng.random() < 0.5 else tcp_talk
        talks.append(talk(rng, Way(rng), rng.choice((3, 30, 200))))
    frames: list[bytes] = []
    turns = [n for n, talk in enumerate(talks) for _ in talk]
    if rng.random() < 0.8:
        rng.shuffle(turns)
    places = [iter(talk) for talk in talks]
    frames = [next(places[n]) for n in turns]
    start_ns = rng.choice((0, 1_700_000_000 * 10**9, (1 << 62)))
    gap_ns = rng.choice((0, 1, 1000, 10**6, 10**9, 86_400 * 10**9))
    files = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        share = rng.choice((1.0, 1.0, 0.99, 0.5))
        seen = [frame for frame in frames if rng.random() < share]
        files.append(pcapng(rng, seen, start_ns + rng.choice((0, 1000, 10**9)), gap_ns))
    return files
