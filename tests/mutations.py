"""Damaged captures from good ones, and packets made at random from the wire tables.

Everything takes a ``random.Random`` and nothing else is random, so a seed tells all.
"""

from __future__ import annotations

import struct
from random import Random

from naive_parse import records

from dpuflow.wire import headers as wire

_INTERESTING = (0, 1, 2, 7, 8, 15, 16, 20, 27, 28, 32, 40, 63, 64, 127, 128, 255, 256, 0xFFFF, 0x7FFF, 0x8000)
_WORDS = (
    0,
    1,
    3,
    4,
    11,
    12,
    16,
    28,
    32,
    0xFFFF,
    0x10000,
    262_144,
    262_145,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFF0,
)


def first_difference(good: bytes, bad: bytes) -> int:
    """Offset of the first byte in which they differ, or the length of the shorter one."""
    same = min(len(good), len(bad))
    step = 1 << 12
    for at in range(0, same, step):
        stop = min(at + step, same)
        if good[at:stop] != bad[at:stop]:
            return next(i for i in range(at, stop) if good[i] != bad[i])
    return same


def mutate(raw: bytes, rng: Random, protect: int = 4) -> bytes:
    """One to six changes anywhere after the first ``protect`` bytes."""
    data = bytearray(raw)
    spans = [(r.start, r.end) for r in records(raw)]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(_CHANGES)(data, rng, spans, protect)
    return bytes(raw[:protect]) + bytes(data[protect:])


def _somewhere(data: bytearray, rng: Random, protect: int) -> int:
    return rng.randrange(min(protect, len(data) - 1), len(data)) if data else 0


def _flip_bit(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    if data:
        data[_somewhere(data, rng, protect)] ^= 1 << rng.randrange(8)


def _set_bytes(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    at = _somewhere(data, rng, protect) if data else 0
    size = rng.choice((1, 1, 2, 4, 8))
    data[at : at + size] = bytes(rng.choice((0, 255, rng.randrange(256))) for _ in data[at : at + size])


def _set_number(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    at = _somewhere(data, rng, protect) if data else 0
    code = rng.choice(("B", ">H", "<I", ">I"))
    mask = (1 << 8 * struct.calcsize(code)) - 1
    put = struct.pack(code, rng.choice(_WORDS if code.endswith("I") else _INTERESTING) & mask)
    data[at : at + len(put)] = put[: len(data[at : at + len(put)])]


def _record_header(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    """A number into a record's header, where lengths and stamps lie."""
    if spans:
        at = rng.choice(spans)[0] + 4 * rng.randrange(8)
        put = struct.pack(rng.choice("<>") + "I", rng.choice((*_WORDS, rng.randrange(4096))))
        data[at : at + 4] = put[: len(data[at : at + 4])]


def _headers(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    """A byte within the first 80 of a record, where protocol headers lie."""
    if spans:
        start, end = rng.choice(spans)
        at = min(start + 16 + rng.randrange(96), end - 1)
        if at < len(data):
            data[at] = rng.choice(
                (rng.randrange(256), rng.choice(_INTERESTING) & 255, data[at] ^ 1 << rng.randrange(8))
            )


def _cut(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    del data[_somewhere(data, rng, protect) if data else 0 :]


def _remove(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    at = _somewhere(data, rng, protect) if data else 0
    del data[at : at + rng.choice((1, 2, 4, 16, 60, 1000))]


def _insert(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    at = _somewhere(data, rng, protect) if data else 0
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16, 60)))


def _splice(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    """Some records once more at another record's place, or somewhere."""
    if spans:
        start, end = rng.choice(spans)
        at = rng.choice(spans)[0] if rng.random() < 0.7 else _somewhere(data, rng, protect)
        data[at:at] = data[start : end + rng.choice((0, 0, 5, 200))]


def _remove_record(data: bytearray, rng: Random, spans: list, protect: int) -> None:
    if spans:
        start, end = rng.choice(spans)
        del data[start:end]


_CHANGES = (
    _flip_bit, _flip_bit, _set_bytes, _set_number, _record_header, _record_header, _headers, _headers,
    _headers, _cut, _remove, _insert, _splice, _remove_record,
)  # fmt: skip


def head(raw: bytes, packets: int) -> bytes:
    """The file with its first ``packets`` records only."""
    end = 24
    for n, record in enumerate(records(raw)):
        if n == packets:
            break
        end = record.end
    return raw[:end]


def shuffled_life(raw: bytes, rng: Random) -> bytes:
    """A classic little-endian pcap whose packets live badly: lost, doubled, late, with other headers.

    Records stay well formed, so that the stages after the reader see the damage.
    """
    out = [raw[:24]]
    nasty = rng.choice((0.002, 0.01, 0.05, 0.3))
    kept: list[bytes] = []
    for record in records(raw):
        piece = bytearray(raw[record.start : record.end])
        dice = rng.random()
        if dice < nasty:
            dice /= nasty
            if dice < 0.2:
                continue
            if dice < 0.3:
                kept.append(bytes(piece))
            elif dice < 0.7 and len(piece) > 60:
                at = 16 + 14 + rng.randrange(len(piece) - 30)
                piece[at] = rng.choice((rng.randrange(256), 0, 255))
            elif dice < 0.8:
                at = rng.choice((0, 4, 12))
                struct.pack_into(
                    "<I", piece, at, rng.choice(_WORDS) if rng.random() < 0.5 else rng.randrange(2**32)
                )
            elif dice < 0.9 and len(piece) >= 16 + 14 + 20 + 24 + 4:
                struct.pack_into(
                    ">I", piece, 16 + 14 + 20 + rng.choice((4, 8, 12, 16, 20, 24)), rng.randrange(2**32)
                )
            elif out:
                kept.insert(rng.randrange(len(kept) + 1), bytes(piece))
                continue
        out.append(bytes(piece))
        if kept and rng.random() < 0.2:
            out.append(kept.pop())
    if rng.random() < 0.3:
        del out[1 : 1 + rng.randrange(len(out))]
    if rng.random() < 0.3:
        del out[rng.randrange(1, len(out) + 1) :]
    if not out:
        out = [raw[:24]]
    return b"".join([raw[:24], *out[1:]])


# -- random packets -----------------------------------------------------------------------------


def random_capture(rng: Random, packets: int = 40) -> bytes:
    """A pcap or pcapng file of random packets with random snap lengths."""
    link = rng.choice((1, 1, 1, 1, 0, 12, 101, 108, 113, 228, 229, 276, 147))
    snap = rng.choice((0, 0, 0, rng.randrange(1, 200)))
    addresses = [rng.randbytes(4) for _ in range(3)], [rng.randbytes(16) for _ in range(3)]
    order = rng.choice("<<>")
    frames = []
    plain = rng.random() < 0.3  # a run of usual packets, now and then a strange one
    for _ in range(packets):
        strange = not plain or rng.random() < 0.1
        frame = random_frame(rng, link, addresses, strange)
        wire_len = rng.choice((len(frame),) * 12 + (0, len(frame) // 2, len(frame) + 4, 1 << 20))
        cut = snap or (rng.randrange(len(frame) + 1) if strange and rng.random() < 0.3 else len(frame))
        frames.append((frame[:cut], wire_len))
    time = rng.randrange(2**31) * 10**9
    if rng.random() < 0.5:
        ns, header = rng.choice(((1, 16), (1000, 16), (1000, 24)))
        magic = {(1, 16): 0xA1B23C4D, (1000, 16): 0xA1B2C3D4, (1000, 24): 0xA1B2CD34}[ns, header]
        out = [struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 65535, link)]
        for frame, wire_len in frames:
            time += rng.choice((0, 500, 1000, 10**9, -2000))
            out.append(struct.pack(order + "4I", time // 10**9, time % 10**9 // ns, len(frame), wire_len))
            out.append(bytes(header - 16) + frame)
        return b"".join(out)
    return _random_pcapng(rng, order, link, frames, time)


def _block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    return struct.pack(order + "II", kind, len(body) + 12) + body + struct.pack(order + "I", len(body) + 12)


def _option(order: str, code: int, value: bytes) -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def _random_pcapng(rng: Random, order: str, link: int, frames: list, time: int) -> bytes:
    out: list[bytes] = []
    links: list[int] = []

    def section() -> None:
        links.clear()
        out.append(_block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1)))
        interface(link)

    def interface(its_link: int) -> None:
        options = b""
        if rng.random() < 0.7:
            options += _option(
                order, 9, bytes([rng.choice((0, 3, 6, 9, 9, 9, 10, 12, 19, 0x8A, 0x94, 0xA0, 0xA8, 0xBF))])
            )
        if rng.random() < 0.3:
            options += _option(
                order, 14, struct.pack(order + "q", rng.choice((0, -3600, 7200, 2**32, -(2**33))))
            )
        if options and rng.random() < 0.8:
            options += bytes(4)
        links.append(its_link)
        out.append(
            _block(order, 1, struct.pack(order + "HHI", its_link, 0, rng.choice((0, 0, 65535, 90))) + options)
        )

    section()
    for frame, wire_len in frames:
        dice = rng.random()
        if dice < 0.03:
            section()
        elif dice < 0.08:
            interface(rng.choice((link, 1, 101)))
        elif dice < 0.12:
            out.append(_block(order, 5, struct.pack(order + "III", 0, 0, 0) + _option(order, 5, bytes(8))))
        elif dice < 0.16:
            out.append(_block(order, rng.choice((4, 0x0BAD, 0x80000001)), rng.randbytes(rng.randrange(40))))
        time += rng.choice((0, 1, 1000, 10**9, -5))
        number = rng.randrange(len(links)) if rng.random() < 0.3 else 0
        options = b""
        if rng.random() < 0.3:
            options = _option(order, rng.choice((1, 2, 4, 5, 2)), rng.randbytes(rng.choice((4, 8, 3))))
            options += rng.choice((b"", bytes(4)))
        ticks = time // rng.choice((1, 1000)) & (1 << 64) - 1 if rng.random() < 0.9 else rng.randrange(2**64)
        stamp = struct.pack(order + "II", ticks >> 32, ticks & 0xFFFFFFFF)
        lengths = struct.pack(order + "II", len(frame), wire_len)
        padded = frame + bytes(-len(frame) % 4)
        kind = rng.choice((6,) * 10 + (2, 3))
        if kind == 6:
            out.append(
                _block(order, 6, struct.pack(order + "I", number) + stamp + lengths + padded + options)
            )
        elif kind == 2:
            drops = rng.choice((0, 3, 0xFFFF))
            out.append(
                _block(
                    order, 2, struct.pack(order + "HH", number, drops) + stamp + lengths + padded + options
                )
            )
        else:
            out.append(_block(order, 3, struct.pack(order + "I", max(wire_len, len(frame))) + frame))
    return b"".join(out)


def random_frame(
    rng: Random, link: int, addresses: tuple[list[bytes], list[bytes]], strange: bool = True
) -> bytes:
    """One frame: link header, tags, IP, tunnels, a transport; ``strange``: with faults and rarities."""
    if not strange:
        ip = _ipv4(rng, addresses, 17, _udp(rng, 4791, _bth(rng, False)), False)
        return _link(rng, link, 0x0800, ip, False)
    return _link(rng, link, *_network(rng, addresses, 0), True)


def _maybe(rng: Random, chance: float, odd: int, usual: int) -> int:
    return odd if rng.random() < chance else usual


def _link(rng: Random, link: int, ethertype: int, payload: bytes, strange: bool) -> bytes:
    if link in (101, 12, 228, 229):
        return payload
    if link in (0, 108):
        family = {0x0800: 2, 0x86DD: rng.choice((10, 24, 28, 30))}.get(ethertype, rng.randrange(40))
        return struct.pack(rng.choice("<>") + "I", family) + payload
    if link == 113:
        return (
            struct.pack(">HHH8sH", rng.randrange(6), 1, rng.choice((6, 6, 0)), rng.randbytes(8), ethertype)
            + payload
        )
    if link == 276:
        return (
            struct.pack(
                ">HHIHBB8s", ethertype, 0, 1, 1, rng.randrange(6), rng.choice((6, 6, 0)), rng.randbytes(8)
            )
            + payload
        )
    return _ethernet(rng, ethertype, payload, strange)


def _ethernet(rng: Random, ethertype: int, payload: bytes, strange: bool) -> bytes:
    tags = b""
    while strange and rng.random() < 0.2:
        tags += struct.pack(">HH", rng.choice((0x8100, 0x88A8, 0x9100)), rng.randrange(65536))
    return rng.randbytes(12) + tags + struct.pack(">H", ethertype) + payload


def _network(rng: Random, addresses: tuple[list[bytes], list[bytes]], depth: int) -> tuple[int, bytes]:
    """EtherType and what follows."""
    dice = rng.random()
    if dice < 0.06:
        opcode = rng.choice((1, 0x101, 0x101, 2))
        return 0x8808, struct.pack(">H", opcode) + rng.randbytes(rng.choice((44, 44, 2, 17, 18)))
    if dice < 0.16:
        bth = _bth(rng, True)
        first = (_maybe(rng, 0.05, 4, 6) << 28) | (rng.randrange(256) << 20)
        length = _maybe(rng, 0.1, rng.randrange(65536), len(bth))
        grh = struct.pack(">IHBB", first, length, _maybe(rng, 0.05, 6, 0x1B), 64)
        return 0x8915, grh + rng.choice(addresses[1]) + rng.choice(addresses[1]) + bth
    if dice < 0.2:
        return rng.choice((0x0806, 0x8847, 0x8864, 0x88CC, 0x0600, rng.randrange(65536))), rng.randbytes(40)
    protocol, payload = _transport(rng, addresses, depth)
    if rng.random() < 0.35:
        return 0x86DD, _ipv6(rng, addresses, protocol, payload)
    return 0x0800, _ipv4(rng, addresses, protocol, payload, True)


def _ipv4(rng: Random, addresses: tuple, protocol: int, payload: bytes, strange: bool) -> bytes:
    options = rng.randbytes(4 * rng.choice((0, 0, 0, 1, 10))) if strange else b""
    words = _maybe(rng, 0.03, rng.randrange(16), 5 + len(options) // 4) if strange else 5
    total = 20 + len(options) + len(payload)
    fragment = 0x4000
    if strange:
        total = _maybe(
            rng, 0.1, rng.choice((0, 19, 20, 27, 28, 39, 65535, max(total - 3, 0), total + 9)), total
        )
        fragment = _maybe(rng, 0.1, rng.choice((0, 0x2000, 0x2000, 1, 0x1FFF, 0x3001)), fragment)
    first = (_maybe(rng, 0.02, rng.randrange(16), 4) if strange else 4) << 4 | words
    header = struct.pack(
        ">BBHHHBBH",
        first,
        rng.choice((0, 2, 3, 104, rng.randrange(256))),
        total & 0xFFFF,
        7,
        fragment,
        64,
        protocol,
        0,
    )
    return header + rng.choice(addresses[0]) + rng.choice(addresses[0]) + options + payload


def _ipv6(rng: Random, addresses: tuple, protocol: int, payload: bytes) -> bytes:
    following = protocol
    for _ in range(rng.choice((0, 0, 0, 1, 2, 5, 17))):
        kind = rng.choice((0, 43, 44, 51, 60, 135, 139, 140))
        if kind == 44:
            offset = rng.choice((0, 0, 1, 8, 9))
            header = struct.pack(">BBHI", following, 0, offset, 5)
        elif kind == 51:
            size = rng.choice((4, 1, 0))
            header = struct.pack(">BBHII", following, size, 0, 0, 0) + bytes(max(4 * size - 4, 0))
        else:
            size = rng.choice((0, 0, 1, 200))
            header = bytes([following, size]) + rng.randbytes(6 + 8 * min(size, 3))
        payload = header + payload
        following = kind
    first = _maybe(rng, 0.02, rng.randrange(16), 6) << 28 | rng.randrange(256) << 20 | 0x1FACE
    length = _maybe(rng, 0.1, rng.choice((0, 1, 7, 8, 65535, max(len(payload) - 3, 0))), len(payload))
    mapped = [bytes(10) + b"\xff\xff" + a for a in addresses[0]]
    ends = [rng.choice(mapped if rng.random() < 0.2 else addresses[1]) for _ in range(2)]
    return struct.pack(">IHBB", first, length & 0xFFFF, following, 64) + ends[0] + ends[1] + payload


def _transport(rng: Random, addresses: tuple, depth: int) -> tuple[int, bytes]:
    """IP protocol number and what follows."""
    dice = rng.random()
    if dice < 0.25 and depth < 4:
        return _tunnel(rng, addresses, depth)
    if dice < 0.75:
        return 17, _udp(
            rng, _maybe(rng, 0.1, rng.choice((53, 4790, 4789, 6081)), 4791), _bth(rng, True), True
        )
    if dice < 0.95:
        return 6, _tcp(rng)
    return rng.choice((1, 2, 58, 89, 132, 255, 0)), rng.randbytes(30)


def _udp(rng: Random, port: int, payload: bytes, strange: bool = False) -> bytes:
    length = 8 + len(payload)
    if strange:
        length = _maybe(
            rng, 0.1, rng.choice((0, 7, 8, 9, 23, 24, 65535, max(length - 5, 0), length + 1)), length
        )
    return (
        struct.pack(">HHHH", rng.choice((69, 49152, rng.randrange(65536))), port, length & 0xFFFF, 0)
        + payload
    )


def _bth(rng: Random, strange: bool) -> bytes:
    known = list(wire.OPCODES)
    opcode = (
        _maybe(rng, 0.06, rng.randrange(256), rng.choice(known))
        if strange
        else rng.choice((*range(0x18), 0x81))
    )
    headers = wire.OPCODES[opcode].headers if opcode in wire.OPCODES else 0
    size = sum(n for bit, n in wire.HEADER_BYTES.items() if headers & bit)
    pad = rng.randrange(4)
    if strange:
        size = _maybe(rng, 0.05, max(size - rng.randrange(20), 0), size)
    second = (
        rng.choice((0, 0x40, 0x80, 0xC0))
        | pad << 4
        | (_maybe(rng, 0.03, rng.randrange(16), 0) if strange else 0)
    )
    third = rng.choice((0, 0x40000000, 0x80000000)) | rng.choice((1, 17, 0xFFFFFF))
    last = rng.choice((0, 0x80000000)) | rng.randrange(1 << 24)
    bth = struct.pack(">BBHII", opcode, second, 0xFFFF, third, last)
    return bth + rng.randbytes(size + rng.choice((0, 4, 64, 256)) + pad + wire.ICRC_BYTES)


def _tcp(rng: Random) -> bytes:
    options = b""
    for _ in range(rng.randrange(5)):
        options += rng.choice((
            b"\x01", b"\x02\x04\x05\xb4", b"\x03\x03" + rng.randbytes(1), b"\x04\x02",
            b"\x08\x0a" + rng.randbytes(8), b"\x05\x0a" + rng.randbytes(8), b"\x05\x12" + rng.randbytes(16),
            b"\x00", b"\xfe\x00", b"\x05\x03\x00",
        ))  # fmt: skip
    options = options[:40] + b"\x01" * (-len(options[:40]) % 4)
    words = _maybe(rng, 0.05, rng.randrange(16), 5 + len(options) // 4)
    ports = rng.choice((0, 4791, 49152, 65535)), rng.choice((4791, 80, 29500))
    header = struct.pack(
        ">HHIIBBHHH",
        *ports,
        rng.randrange(2**32),
        rng.randrange(2**32),
        words << 4,
        rng.randrange(256),
        rng.randrange(65536),
        0,
        0,
    )
    return header + options + rng.randbytes(rng.choice((0, 0, 1, 100)))


def _tunnel(rng: Random, addresses: tuple, depth: int) -> tuple[int, bytes]:
    ethertype, packet = _network(rng, addresses, depth + 1)
    kind = rng.choice(("vxlan", "geneve", "gre", "erspan1", "erspan2", "erspan3", "ipip"))
    if kind == "ipip":
        return (4 if ethertype == 0x0800 else 41), packet
    frame = _ethernet(rng, ethertype, packet, True)
    if kind == "vxlan":
        return 17, _udp(rng, wire.VXLAN_PORT, b"\x08\0\0\0" + rng.randbytes(3) + b"\0" + frame, True)
    if kind == "geneve":
        words = rng.choice((0, 0, 1, 5))
        whole = rng.random() < 0.7
        head = struct.pack(">BBH", _maybe(rng, 0.05, 0x40, 0) | words, 0, 0x6558 if whole else ethertype)
        return 17, _udp(
            rng,
            wire.GENEVE_PORT,
            head + bytes(4) + rng.randbytes(4 * words) + (frame if whole else packet),
            True,
        )
    flags = rng.choice(
        (0, 0x1000, 0x2000, 0x8000, 0xB000, _maybe(rng, 0.2, 0x4000, 0), _maybe(rng, 0.2, 1, 0))
    )
    if kind == "gre":
        whole = rng.random() < 0.5
        inner_type, content = (0x6558, frame) if whole else (ethertype, packet)
    elif kind == "erspan1":
        flags &= ~0x1000
        inner_type, content = 0x88BE, frame
    elif kind == "erspan2":
        flags |= 0x1000
        inner_type, content = 0x88BE, rng.randbytes(8) + frame
    else:
        flags |= 0x1000
        sub = rng.randrange(2)
        frame_type, granularity = rng.choice((0, 0, 2, 5)), rng.choice((0, 1, 2, 2))
        bits = frame_type << 10 | granularity << 1 | sub
        stamp = rng.choice((rng.randrange(10**9), rng.randrange(2**32)))
        content = struct.pack(">HHIHH", _maybe(rng, 0.05, 0x1000, 0x2000), 0, stamp, 0, bits)
        if sub:
            content += struct.pack(">BBHI", rng.choice((5, 6, 3)) << 2, 0, 0, rng.randrange(2**32))
        inner_type, content = 0x22EB, content + (packet if frame_type == 2 else frame)
    words = sum(1 for bit in (0x8000, 0x2000, 0x1000) if flags & bit)
    return 47, struct.pack(">HH", flags, inner_type) + rng.randbytes(4 * words) + content
