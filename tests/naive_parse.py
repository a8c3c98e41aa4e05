"""A plain parser of captures, written for the eye: the slow twin of ``dpuflow.kernels.parse``.

``read`` takes the bytes of a pcap or pcapng file and gives one ``Row`` a packet with everything the
kernel's columns and sparse rows hold. It follows the RFCs and IBA chapter 9 step by step, knows opcodes
from ``dpuflow.wire.headers`` only, and shares no code with the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from dpuflow.schema.rows import BthFlag, Direction, Kind
from dpuflow.wire import headers as wire

LONGEST = 262_144  # captured bytes of a record; more is damage
LONGEST_BLOCK = 1 << 20
_LAYERS = 16


@dataclass
class Row:
    """One packet."""

    time_ns: int = 0
    wire_len: int = 0
    iface: int = 0
    direction: int = 0
    kind: Kind = Kind.NONE
    src: int | None = None  # 128 bits, IPv4 as ::ffff:a.b.c.d
    dst: int | None = None
    sport: int = 0
    dport: int = 0
    tos: int = 0
    opcode: int = 0
    flags: int = 0
    dest_qp: int = 0
    psn: int = 0
    payload: int = 0
    data: bytes = b""
    sparse: dict[str, dict[str, int | list[int]]] = field(default_factory=dict)


@dataclass
class Record:
    """Where a record lies in the file, and what its header says."""

    start: int
    end: int
    time_ns: int | None  # None: a simple packet block, which has no stamp
    wire_len: int
    frame: bytes
    link: int
    iface: int = 0
    direction: int = 0


class Stop(Exception):
    """The packet goes no further: its Kind is known."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind.name)
        self.kind = kind


def read(file: bytes) -> tuple[list[Row], bool]:
    """All packets before any damage, and whether the file is whole."""
    rows: list[Row] = []
    walk = records(file)
    previous = 0
    while True:
        try:
            record = next(walk)
        except StopIteration as stop:
            return rows, stop.value
        row = packet(record, previous)
        previous = row.time_ns
        rows.append(row)


def records(file: bytes) -> Iterator[Record]:
    """Records in file order; returns whether the file is whole."""
    if len(file) >= 4 and file[:4] == b"\x0a\x0d\x0d\x0a":
        return (yield from _pcapng(file))
    return (yield from _pcap(file))


def _pcap(file: bytes) -> Iterator[Record]:
    order, ns, header = {
        b"\xd4\xc3\xb2\xa1": ("<", 1000, 16), b"\xa1\xb2\xc3\xd4": (">", 1000, 16),
        b"\x4d\x3c\xb2\xa1": ("<", 1, 16), b"\xa1\xb2\x3c\x4d": (">", 1, 16),
        b"\x34\xcd\xb2\xa1": ("<", 1000, 24), b"\xa1\xb2\xcd\x34": (">", 1000, 24),
    }[file[:4]]  # fmt: skip
    link = struct.unpack(order + "I", file[20:24])[0] & 0x03FFFFFF
    at = 24
    while at < len(file):
        if at + header > len(file):
            return False
        seconds, fraction, captured, wire_len = struct.unpack(order + "4I", file[at : at + 16])
        end = at + header + captured
        if captured > LONGEST or end > len(file):
            return False
        yield Record(at, end, seconds * 10**9 + fraction * ns, wire_len, file[at + header : end], link)
        at = end
    return True


def _pcapng(file: bytes) -> Iterator[Record]:
    order, interfaces, sections = "<", [], 0
    at = 0
    while at < len(file):
        if at + 12 > len(file):
            return False
        if file[at : at + 4] == b"\x0a\x0d\x0d\x0a":
            marks = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
            if file[at + 8 : at + 12] not in marks:
                return False
            order = marks[file[at + 8 : at + 12]]
        kind, size = struct.unpack(order + "II", file[at : at + 8])
        smallest = {0x0A0D0D0A: 28, 1: 20, 2: 32, 3: 16, 5: 24, 6: 32}
        if size % 4 or size < smallest.get(kind, 12) or (kind in smallest and size > LONGEST_BLOCK):
            return False
        end = at + size
        if end > len(file):
            return False
        if kind in smallest and file[end - 4 : end] != struct.pack(order + "I", size):
            return False
        body = file[at + 8 : end - 4]
        if kind == 0x0A0D0D0A:
            interfaces = []
            sections += 1
            if struct.unpack(order + "H", body[4:6])[0] != 1:
                return False
        elif kind == 1:
            described = _interface(body, order)
            if described is None or sections == 0:
                return False
            interfaces.append(described)
        elif kind == 3:
            if not interfaces:
                return False
            link, snap, _, _ = interfaces[0]
            (wire_len,) = struct.unpack(order + "I", body[:4])
            captured = min(wire_len, len(body) - 4, snap or LONGEST_BLOCK)
            yield Record(at, end, None, wire_len, body[4 : 4 + captured], link)
        elif kind in (2, 6):
            number, high, low, captured, wire_len = struct.unpack(order + "5I", body[:20])
            if kind == 2:
                (number,) = struct.unpack(order + "H", body[:2])
            if number >= len(interfaces) or captured > LONGEST or captured > len(body) - 20:
                return False
            link, _, resolution, offset = interfaces[number]
            time = _ns(high << 32 | low, resolution) + offset * 10**9
            time = (time + 2**63) % 2**64 - 2**63
            direction = 0
            for code, value in _options(body[20 + (captured + 3) // 4 * 4 :], order):
                if code == 2 and len(value) == 4:
                    direction = struct.unpack(order + "I", value)[0] & 3
            frame = body[20 : 20 + captured]
            yield Record(at, end, time, wire_len, frame, link, number & 0xFFFF, direction % 3)
        at = end
    return True


def _interface(body: bytes, order: str) -> tuple[int, int, int, int] | None:
    """Link type, snap length, if_tsresol, if_tsoffset; None where they make no sense."""
    link, _, snap = struct.unpack(order + "HHI", body[:8])
    resolution, offset = 6, 0
    for code, value in _options(body[8:], order):
        if code == 9 and len(value) == 1:
            resolution = value[0]
        elif code == 14 and len(value) == 8:
            (offset,) = struct.unpack(order + "q", value)
    if resolution & 127 > (63 if resolution & 128 else 27) or abs(offset) > 1 << 33:
        return None
    return link, snap, resolution, offset


def _ns(ticks: int, resolution: int) -> int:
    if resolution & 128:
        return ticks * 10**9 >> (resolution & 127)
    return ticks * 10**9 // 10**resolution


def _options(body: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(body):
        code, size = struct.unpack(order + "HH", body[at : at + 4])
        if code == 0 or at + 4 + size > len(body):
            return
        yield code, body[at + 4 : at + 4 + size]
        at += 4 + (size + 3) // 4 * 4


# -- one packet ---------------------------------------------------------------------------------


def packet(record: Record, previous: int = 0) -> Row:
    """One record to its row; ``previous`` is the stamp of the record before."""
    time = previous if record.time_ns is None else record.time_ns
    row = Row(time, record.wire_len, record.iface, record.direction)
    try:
        _Packet(record, row).parse()
    except Stop as stop:
        return Row(time, record.wire_len, record.iface, row.direction, stop.kind)
    return row


class _Packet:
    def __init__(self, record: Record, row: Row) -> None:
        self.frame, self.row, self.link = record.frame, row, record.link
        self.wire_end = record.wire_len
        self.at = 0
        self.end = 0  # where the innermost IP packet ends by its own length
        self.first_fragment = False
        self.outer_ce = False
        self.stamp: int | None = None
        self.src_mac = 0

    def take(self, size: int, cut: Kind) -> bytes:
        """The next ``size`` bytes, or Stop where they were not captured."""
        if self.at + size > len(self.frame):
            raise Stop(cut)
        self.at += size
        return self.frame[self.at - size : self.at]

    def parse(self) -> None:
        following = self.link_header()
        for _ in range(_LAYERS):
            if following in (wire.ETHERTYPE_VLAN, wire.ETHERTYPE_QINQ, wire.ETHERTYPE_QINQ_OLD):
                following = be(self.take(4, Kind.CUT_LINK)[2:])
            elif following == wire.ETHERTYPE_IPV4:
                following = self.ipv4()
            elif following == wire.ETHERTYPE_IPV6:
                following = self.ipv6()
            elif following == "ip":
                if self.at + 2 > len(self.frame):
                    raise Stop(Kind.CUT_IP)
                version = self.frame[self.at] >> 4
                if version not in (4, 6):
                    raise Stop(Kind.MALFORMED_IP)
                following = wire.ETHERTYPE_IPV4 if version == 4 else wire.ETHERTYPE_IPV6
            elif following == "ethernet":
                following = self.ethernet()
            elif following == wire.ETHERTYPE_ROCE_V1:
                return self.roce_v1()
            elif following == wire.ETHERTYPE_MAC_CONTROL:
                return self.mac_control()
            elif following in (0x8847, 0x8848, 0x8864, 0x894F):
                raise Stop(Kind.UNSUPPORTED_TUNNEL)
            elif isinstance(following, int):
                raise Stop(Kind.OTHER_ETHERTYPE)
            else:
                protocol = int(following[9:])  # "protocol 17"
                if protocol == wire.IPPROTO_TCP:
                    return self.tcp()
                inside = self.tunnel(protocol)
                if inside is None:
                    return self.udp()
                if self.first_fragment:
                    raise Stop(Kind.FRAGMENT)
                following = inside
        raise Stop(Kind.UNSUPPORTED_TUNNEL)

    def link_header(self) -> int | str:
        if self.link == wire.LINKTYPE_ETHERNET:
            return self.ethernet()
        if self.link in (wire.LINKTYPE_RAW, wire.LINKTYPE_RAW_OPENBSD):
            return "ip"
        if self.link == wire.LINKTYPE_IPV4:
            return wire.ETHERTYPE_IPV4
        if self.link == wire.LINKTYPE_IPV6:
            return wire.ETHERTYPE_IPV6
        if self.link in (wire.LINKTYPE_NULL, wire.LINKTYPE_LOOP):
            raw = self.take(4, Kind.CUT_LINK)
            family = struct.unpack("<I", raw)[0]
            if family > 0xFFFF:
                family = be(raw)
            if family == 2:
                return wire.ETHERTYPE_IPV4
            if family in (10, 23, 24, 28, 30):
                return wire.ETHERTYPE_IPV6
            raise Stop(Kind.OTHER_ETHERTYPE)
        if self.link == wire.LINKTYPE_LINUX_SLL:
            raw = self.take(16, Kind.CUT_LINK)
            self.cooked(be(raw[:2]), be(raw[4:6]), raw[6:12])
            return be(raw[14:])
        if self.link == wire.LINKTYPE_LINUX_SLL2:
            raw = self.take(20, Kind.CUT_LINK)
            self.cooked(raw[10], raw[11], raw[12:18])
            return be(raw[:2])
        raise Stop(Kind.UNSUPPORTED_LINK_TYPE)

    def cooked(self, packet_type: int, size: int, address: bytes) -> None:
        if size == 6:
            self.src_mac = be(address)
        if packet_type == 4:
            self.row.direction = Direction.OUTBOUND
        elif packet_type in (0, 1, 2):
            self.row.direction = Direction.INBOUND

    def ethernet(self) -> int:
        raw = self.take(14, Kind.CUT_LINK)
        self.src_mac = be(raw[6:12])
        return be(raw[12:])

    def ipv4(self) -> str:
        start = self.at
        raw = self.take(20, Kind.CUT_IP)
        version, header, total = raw[0] >> 4, (raw[0] & 15) * 4, be(raw[2:4])
        self.end = start + total if total else self.wire_end
        if version != 4 or header < 20 or not header <= self.end - start <= wire.MAX_OFFLOADED:
            raise Stop(Kind.MALFORMED_IP)
        self.take(header - 20, Kind.CUT_IP)
        self.row.tos = raw[1]
        self.row.src, self.row.dst = 0xFFFF << 32 | be(raw[12:16]), 0xFFFF << 32 | be(raw[16:20])
        if be(raw[6:8]) & 0x1FFF:
            raise Stop(Kind.FRAGMENT)
        self.first_fragment = bool(raw[6] & 0x20)
        return f"protocol {raw[9]}"

    def ipv6(self) -> str:
        start = self.at
        raw = self.take(40, Kind.CUT_IP)
        if raw[0] >> 4 != 6:
            raise Stop(Kind.MALFORMED_IP)
        length, following = be(raw[4:6]), raw[6]
        self.end = start + 40 + length if length else self.wire_end
        if self.end - start > max(wire.MAX_OFFLOADED, length + 40):
            raise Stop(Kind.MALFORMED_IP)
        self.row.tos = be(raw[:2]) >> 4 & 255
        self.row.src, self.row.dst = be(raw[8:24]), be(raw[24:40])
        self.first_fragment = False
        for _ in range(_LAYERS):
            if following not in (0, 43, 44, 51, 60, 135, 139, 140):
                return f"protocol {following}"
            if self.at + 8 > self.end:
                raise Stop(Kind.MALFORMED_IP)
            raw = self.take(8, Kind.CUT_IP)
            if following == 44:
                if be(raw[2:4]) & 0xFFF8:
                    raise Stop(Kind.FRAGMENT)
                self.first_fragment = bool(raw[3] & 1)
            elif following == 51:
                self.at += (raw[1] + 2) * 4 - 8
            else:
                self.at += (raw[1] + 1) * 8 - 8
            following = raw[0]
        raise Stop(Kind.MALFORMED_IP)

    def tunnel(self, protocol: int) -> int | str | None:
        """What lies in a tunnel; None for a datagram that is none."""
        if protocol == 4:
            return wire.ETHERTYPE_IPV4
        if protocol == 41:
            return wire.ETHERTYPE_IPV6
        if protocol == wire.IPPROTO_GRE:
            return self.gre()
        if protocol != wire.IPPROTO_UDP:
            raise Stop(Kind.OTHER_IP_PROTOCOL)
        if self.at + 8 > self.end:
            raise Stop(Kind.MALFORMED_TRANSPORT)
        port = be(self.take(8, Kind.CUT_TRANSPORT)[2:4])
        if port not in (wire.VXLAN_PORT, wire.GENEVE_PORT):
            self.at -= 8
            return None
        header = self.take(8, Kind.CUT_TRANSPORT)
        self.outer_ce = self.outer_ce or self.row.tos & 3 == 3
        if port == wire.VXLAN_PORT:
            return "ethernet"
        if header[0] >> 6:
            raise Stop(Kind.UNSUPPORTED_TUNNEL)
        self.at += (header[0] & 63) * 4
        return self.inside(be(header[2:4]))

    def inside(self, kind: int) -> int | str:
        if kind == wire.ETHERTYPE_TEB:
            return "ethernet"
        if kind in (wire.ETHERTYPE_IPV4, wire.ETHERTYPE_IPV6):
            return kind
        raise Stop(Kind.UNSUPPORTED_TUNNEL)

    def gre(self) -> int | str:
        if self.at + 4 > self.end:
            raise Stop(Kind.MALFORMED_TRANSPORT)
        raw = self.take(4, Kind.CUT_TRANSPORT)
        flags, kind = be(raw[:2]), be(raw[2:])
        if flags & 0x4007:
            raise Stop(Kind.UNSUPPORTED_TUNNEL)
        for bit in (0x8000, 0x2000, 0x1000):  # checksum, key, sequence number
            self.at += 4 if flags & bit else 0
        if kind == wire.ETHERTYPE_ERSPAN_II:
            if flags & 0x1000:
                self.take(8, Kind.CUT_TRANSPORT)
            return "ethernet"
        if kind == wire.ETHERTYPE_ERSPAN_III:
            return self.erspan_iii()
        return self.inside(kind)

    def erspan_iii(self) -> str:
        raw = self.take(12, Kind.CUT_TRANSPORT)
        if raw[0] >> 4 != 2:
            raise Stop(Kind.UNSUPPORTED_TUNNEL)
        sub = self.take(8, Kind.CUT_TRANSPORT) if raw[11] & 1 else None
        frame_type, granularity = raw[10] >> 2 & 31, raw[11] >> 1 & 3
        if frame_type not in (0, 2):
            raise Stop(Kind.UNSUPPORTED_TUNNEL)
        if sub is not None and granularity == 2 and sub[0] >> 2 in (5, 6) and be(raw[4:8]) < 10**9:
            self.stamp = be(sub[4:8]) * 10**9 + be(raw[4:8])
        return "ethernet" if frame_type == 0 else "ip"

    def done(self, kind: Kind) -> None:
        self.row.kind = kind
        if self.stamp is not None:
            self.row.time_ns = self.stamp
        if kind == Kind.PAUSE:
            return
        if self.outer_ce and self.row.tos & 3:
            self.row.tos |= 3

    def mac_control(self) -> None:
        opcode = be(self.take(2, Kind.CUT_LINK))
        if opcode not in (0x0001, 0x0101):
            raise Stop(Kind.OTHER_ETHERTYPE)
        raw = self.take(2 if opcode == 1 else 18, Kind.CUT_LINK)
        if opcode == 1:
            classes, quanta = 0, [be(raw)] + [0] * 7
        else:
            classes, quanta = raw[1], [be(raw[2 + 2 * k : 4 + 2 * k]) for k in range(8)]
        pause = {"src_mac": self.src_mac, "opcode": opcode, "classes": classes, "quanta": quanta}
        self.row.sparse["pause"] = pause
        self.row.tos, self.row.src, self.row.dst = 0, None, None
        self.done(Kind.PAUSE)

    def roce_v1(self) -> None:
        raw = self.take(40, Kind.CUT_IP)
        if raw[0] >> 4 != 6 or raw[6] != 0x1B:
            raise Stop(Kind.MALFORMED_ROCE)
        self.row.tos = be(raw[:2]) >> 4 & 255
        self.row.src, self.row.dst = be(raw[8:24]), be(raw[24:40])
        self.end = self.at + be(raw[4:6])
        self.bth(Kind.ROCE_V1)

    def udp(self) -> None:
        start = self.at
        raw = self.take(8, Kind.CUT_TRANSPORT)
        self.row.sport, self.row.dport, length = be(raw[:2]), be(raw[2:4]), be(raw[4:6])
        if self.row.dport != wire.ROCE_V2_PORT:
            raise Stop(Kind.OTHER_UDP)
        if length == 0:
            length = self.end - start
        if length < 8 or (start + length > self.end and not self.first_fragment):
            raise Stop(Kind.MALFORMED_TRANSPORT)
        self.end = start + length
        self.bth(Kind.ROCE_V2)

    def bth(self, kind: Kind) -> None:
        row = self.row
        if self.end - self.at < wire.BTH_BYTES + wire.ICRC_BYTES:
            raise Stop(Kind.MALFORMED_ROCE)
        raw = self.take(12, Kind.CUT_BTH)
        if raw[1] & 15:
            raise Stop(Kind.UNSUPPORTED_BTH_VERSION)
        if raw[0] not in wire.OPCODES:
            raise Stop(Kind.UNSUPPORTED_OPCODE)
        headers = wire.OPCODES[raw[0]].headers
        pad = raw[1] >> 4 & 3
        extended = sum(size for bit, size in wire.HEADER_BYTES.items() if headers & bit)
        payload = self.end - self.at - extended - pad - wire.ICRC_BYTES
        if payload < 0:
            raise Stop(Kind.MALFORMED_ROCE)
        row.opcode, row.dest_qp, row.psn, row.payload = raw[0], be(raw[5:8]), be(raw[9:12]), payload
        flags = {
            BthFlag.SOLICITED: raw[1] & 0x80, BthFlag.MIG_REQ: raw[1] & 0x40, BthFlag.FECN: raw[4] & 0x80,
            BthFlag.BECN: raw[4] & 0x40, BthFlag.ACK_REQ: raw[8] & 0x80,
        }  # fmt: skip
        row.flags = sum(flag for flag, is_set in flags.items() if is_set) | pad << BthFlag.PAD_SHIFT
        start = self.at + extended
        if start > len(self.frame):
            row.flags |= BthFlag.EXTENSION_CUT
        row.data = self.frame[start : start + payload][:0xFFFF]
        for bit, size in wire.HEADER_BYTES.items():  # in wire order
            if headers & bit:
                part = self.frame[self.at : self.at + size]
                if len(part) == size:
                    self.extension(bit, part)
                self.at += size
        self.done(kind)

    def extension(self, bit: int, raw: bytes) -> None:
        sparse = self.row.sparse
        if bit == wire.DETH:
            sparse["deth"] = {"qkey": be(raw[:4]), "src_qp": be(raw[5:8])}
        elif bit == wire.RETH:
            sparse["reth"] = {"va": be(raw[:8]), "rkey": be(raw[8:12]), "dma_len": be(raw[12:16])}
        elif bit == wire.ATOMIC:
            sparse["atomic"] = {"va": be(raw[:8]), "rkey": be(raw[8:12])}
            sparse["atomic"] |= {"swap_add": be(raw[12:20]), "compare": be(raw[20:28])}
        elif bit == wire.AETH:
            sparse["aeth"] = {"syndrome": raw[0], "msn": be(raw[1:4])}
        elif bit in (wire.IMM, wire.IETH):
            sparse["imm"] = {"value": be(raw)}

    def tcp(self) -> None:
        row, start = self.row, self.at
        if self.end - start < 20:
            raise Stop(Kind.MALFORMED_TRANSPORT)
        raw = self.take(20, Kind.CUT_TRANSPORT)
        header = (raw[12] >> 4) * 4
        if header < 20 or start + header > self.end:
            raise Stop(Kind.MALFORMED_TRANSPORT)
        row.sport, row.dport, row.opcode = be(raw[:2]), be(raw[2:4]), raw[13]
        row.payload = self.end - start - header
        row.data = self.frame[start + header : self.end][:0xFFFF]
        tcp: dict[str, int | list[int]] = {
            "seq": be(raw[4:8]), "ack": be(raw[8:12]), "window": be(raw[14:16]), "flags": raw[13],
            "tsval": 0, "tsecr": 0, "sack_left": 0, "sack_right": 0, "wscale": 255,
        }  # fmt: skip
        options = self.frame[start + 20 : start + header]
        while options and options[0] != 0:
            if options[0] == 1:
                options = options[1:]
                continue
            if len(options) < 2 or options[1] < 2 or options[1] > len(options):
                break
            code, size = options[0], options[1]
            if code == 8 and size == 10:
                tcp["tsval"], tcp["tsecr"] = be(options[2:6]), be(options[6:10])
            elif code == 5 and size >= 10:
                tcp["sack_left"], tcp["sack_right"] = be(options[2:6]), be(options[6:10])
            elif code == 3 and size == 3 and raw[13] & 2:
                tcp["wscale"] = min(options[2], 14)
            options = options[size:]
        row.sparse["tcp"] = tcp
        self.done(Kind.TCP)


def be(raw: bytes) -> int:
    """Big endian."""
    return int.from_bytes(raw, "big")
