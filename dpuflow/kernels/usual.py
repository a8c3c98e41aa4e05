"""The usual packet, 64 at a time: Ethernet, IPv4 or IPv6 without options, UDP to 4791, nothing cut.

All packets of a run have a VLAN tag, or none has, and one IP version: ``shift`` is how much later than
behind untagged Ethernet and IPv4 their UDP headers lie, and the frame is taken to start so much later
that what follows lies where it lies there.

``gather`` walks the records and copies the header words of a run of such packets aside, the BTH with
its bytes put in order; then short loops over the run, which the compiler turns into vector code, make
the columns. The memory is busy all the time only if bytes ahead are fetched while flows are looked up.
A single loop in C that does it all for each packet is no faster. What is not usual ends the run and is
left to ``parse``.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels import columns as c
from dpuflow.kernels import headers as h
from dpuflow.kernels._jit import (
    DEALT,
    arranger,
    be16,
    be32,
    be64,
    deal,
    inlined,
    inner,
    le16,
    le32,
    le64,
    least32,
    lowest,
    prefetch,
    prefetch_far,
    put8,
    put16,
    put32,
    put64,
    which,
)
from dpuflow.kernels.bytes import mac
from dpuflow.kernels.intern import (
    EMPTY,
    IPV6_TAG,
    SLOT_BITS,
    TAG_SHIFT,
    counted,
    endpoint_of,
    find_slot,
    flow_in,
    has_room,
    hash_of,
    holds,
    known_endpoint,
    new_flow,
)
from dpuflow.schema.rows import Kind, Transport
from dpuflow.wire import headers as wire

_V2 = int(Kind.ROCE_V2)
_ROCE_FLOW = int(Transport.ROCE)
ENHANCED = 6
_VLAN = 0x0081  # EtherType 0x8100 as it lies in the frame
_IPV6 = 0xDD86
SIX = 20  # bytes by which an IPv6 header is longer than one of IPv4

_NEAR = 1024  # how far ahead the walk fetches bytes into the first-level cache
_LEAD = 4096  # how far ahead of it they are fetched into the second while flows are looked up
HEADERS = 14 + 20 + 8 + wire.BTH_BYTES
_REST = 8 + wire.BTH_BYTES + wire.ICRC_BYTES  # of the UDP length, besides extensions, pad and payload
MARGIN = 128  # bytes from a record's start that must lie in the window for its headers to be looked at

# Scratch, one entry per packet of the run.
_GAP = 320  # lest all parts start in one set of the cache


def _scratch(*sizes: int) -> tuple[int, ...]:
    """Offsets of parts with so many bytes a packet."""
    starts, at = [], c.STAGE_AT
    for size in sizes:
        starts.append(at)
        at += size * c.CHUNK + _GAP
    assert at <= c.BLOCK_BYTES
    return tuple(starts)


_KEYS, _ENDS, _AT, _CAPTURED, _FRAME_14, _FIRST, _UDP_LENGTH, _ENTRY, _SLOT, _STRANGE, _BTH = _scratch(
    8,  # addresses, as they lie in the header
    8,  # source and destination endpoint
    4,  # offset of the frame
    4,  # captured bytes
    4,  # version, TOS, total length, as they lie in the header
    4,  # bytes 0, 1, 4 and 8 of the BTH
    4,
    4,  # of the opcode table
    4,  # offset of the flow's slot
    4,  # bit 31: not usual after all
    16,  # what ``_numbers`` makes of a BTH
)

# From the UDP length to the end of the BTH, as four numbers: bytes 0, 1, 4 and 8 of the BTH; destination
# QP; PSN; the UDP length.
_numbers = arranger((4, 5, 8, 12), (11, 10, 9, -1), (15, 14, 13, -1), (1, 0, -1, -1))

_SIGN = 1 << 31
_LAST_WORD = wire.IMM | wire.IETH  # these end the extended headers; an AETH begins them


@inlined
def shift_of(data, pos, end, header):  # type: ignore[no-untyped-def]
    """The ``shift`` of the record at ``pos``: 4 for a VLAN tag, SIX for IPv6, or both."""
    if pos + MARGIN >= end:
        return 0
    following = le16(data, pos + header + 12)
    shift = 0
    if following == _VLAN:
        shift = 4
        following = le16(data, pos + header + 16)
    return shift + SIX if following == _IPV6 else shift


@inlined
def gather(data, pos, end, limit, shift, six, endpoints, index, i, most, block):  # type: ignore[no-untyped-def]
    """Copy header words of usual packets from ``pos`` on, ``most`` at most; where it stopped, how many.

    TIME gets the stamps as they lie in the record; see ``stamps``. ``six``: of IPv6.
    """
    n = 0
    safe = min(limit, end - MARGIN)
    while pos < safe and n < most:
        prefetch(data, pos + _NEAR)
        at = pos + 16 + shift
        captured = le32(data, pos + 8) - shift
        if not within(captured, HEADERS, c.MAX_CAPTURED - shift):
            break
        if not _copy(data, at, captured, shift, six, endpoints, index, n, block):
            break
        put64(block, c.TIME + 8 * (i + n), le64(data, pos))
        put32(block, c.WIRE_LEN + 4 * (i + n), le32(data, pos + 12))
        put16(block, c.SPORT + 2 * (i + n), le16(data, at + 34))
        pos = at + captured
        n += 1
    if pos > end:  # only the last one can lie half outside
        n -= 1
        pos = record_at(n, 16 + shift, block)
    return pos, n


@inlined
def gather_pcapng(  # type: ignore[no-untyped-def]
    data, pos, end, limit, shift, six, endpoints, index, interfaces, known, i, most, block
):  # fmt: skip
    """The same for enhanced packet blocks without options; TIME gets the time."""
    n = 0
    safe = min(limit, end - MARGIN)
    while pos < safe and n < most:
        prefetch(data, pos + _NEAR)
        at = pos + 28 + shift
        captured = le32(data, pos + 20)
        size, interface = le32(data, pos + 4), le32(data, pos + 8)
        following = pos + size
        differs = (le32(data, pos) ^ ENHANCED) | (size ^ (32 + ((captured + 3) & ~3)))
        if differs != 0 or captured < HEADERS + shift or captured > c.MAX_CAPTURED or following > end:
            break
        if le32(data, following - 4) != size or interface >= known:
            break
        multiply = interfaces[interface, c.I_MULTIPLY]
        if multiply == 0 or interfaces[interface, c.I_LINK] != wire.LINKTYPE_ETHERNET:
            break
        if not _copy(data, at, captured - shift, shift, six, endpoints, index, n, block):
            break
        ticks = (le32(data, pos + 12) << 32) | le32(data, pos + 16)
        put64(block, c.TIME + 8 * (i + n), ticks * multiply + interfaces[interface, c.I_OFFSET])
        put32(block, c.WIRE_LEN + 4 * (i + n), le32(data, pos + 24))
        put16(block, c.SPORT + 2 * (i + n), le16(data, at + 34))
        put16(block, c.IFACE + 2 * (i + n), interface)
        pos = following
        n += 1
    return pos, n


@inlined
def within(value, low, high):  # type: ignore[no-untyped-def]
    """Whether a number lies between two others, in one comparison."""
    return np.uint64(value - low) <= np.uint64(high - low)


@inlined
def record_at(n, header, block):  # type: ignore[no-untyped-def]
    """Where the record of the run's packet ``n`` starts, ``header`` bytes before its frame."""
    return le32(block, _AT + 4 * n) - header


@inlined
def _copy(data, at, captured, shift, six, endpoints, index, n, block):  # type: ignore[no-untyped-def]
    """Header words of the frame at ``at``, if it looks like a usual packet."""
    strange = le16(data, at + 36) ^ 0xB712  # to 4791
    if six:
        strange |= le16(data, at - 8) ^ _IPV6
        strange |= ((le16(data, at - 6) & 0xF0) ^ 0x60) | ((le16(data, at) & 255) ^ wire.IPPROTO_UDP)
        if shift != SIX:
            strange |= le16(data, at - 12) ^ _VLAN
    else:
        strange |= (le32(data, at + 12) & 0xFFFFFF) ^ 0x450008  # IPv4, no options
        strange |= (le32(data, at + 20) & 0xFF00FFBF) ^ 0x11000000  # no fragment, UDP
        if shift != 0:
            strange |= le16(data, at + 8) ^ _VLAN
    if strange != 0:
        return False
    if six:  # what it was made of in IPv4, and the key of its flow; who is new is left to ``parse``
        src = known_endpoint(endpoints, index, be64(data, at + 2), be64(data, at + 10))
        dst = known_endpoint(endpoints, index, be64(data, at + 18), be64(data, at + 26))
        if src < 0 or dst < 0:
            return False
        total = _swap16(be16(data, at - 2) + SIX)
        put32(block, _FRAME_14 + 4 * n, (((be16(data, at - 6) >> 4) & 255) << 8) | (total << 16))
        put64(block, _KEYS + 8 * n, src | (dst << 32))
    else:
        put32(block, _FRAME_14 + 4 * n, le32(data, at + 14))
        put64(block, _KEYS + 8 * n, le64(data, at + 26))
    put32(block, _AT + 4 * n, at)
    put32(block, _CAPTURED + 4 * n, captured)
    put32(block, _ENTRY + 4 * n, np.int64(h.OPCODE_TABLE[le16(data, at + 42) & 255]))
    _numbers(block, _BTH + 16 * n, data, at + 38)
    return True


@inlined
def _swap16(value):  # type: ignore[no-untyped-def]
    return ((value & 255) << 8) | ((value >> 8) & 255)


@inlined
def sizes(i, n, block):  # type: ignore[no-untyped-def]
    """Queue pairs, PSNs, payloads; for how many packets lengths and opcodes are usual as well.

    Here and below loops run over the whole chunk, whatever ``n``: what lies behind is not looked at. Each
    has one output: the compiler turns no others into vector code.
    """
    for k in range(0, c.CHUNK, DEALT):
        deal(
            block, _FIRST + 4 * k, c.DEST_QP + 4 * (i + k), c.PSN + 4 * (i + k), _UDP_LENGTH + 4 * k,
            _BTH + 16 * k,
        )  # fmt: skip
    for k in range(c.CHUNK):
        put32(block, c.PAYLOAD + 4 * (i + k), _payload(k, block))
    for k in range(c.CHUNK):
        put32(block, c.DATA_AT + 4 * (i + k), le32(block, _AT + 4 * k) + HEADERS + _extension(k, block))
    for k in range(c.CHUNK):
        kept = le32(block, _CAPTURED + 4 * k) - HEADERS - _extension(k, block)
        put16(block, c.DATA_LEN + 2 * (i + k), least32(_payload(k, block), kept))
    for k in range(c.CHUNK):
        put32(block, _STRANGE + 4 * k, _strange(k, block))
    strange = which(block, _STRANGE, _SIGN)
    return min(lowest(strange), n) if strange != 0 else n


@inlined
def _payload(k, block):  # type: ignore[no-untyped-def]
    pad = (le32(block, _FIRST + 4 * k) >> 12) & 3
    return le32(block, _UDP_LENGTH + 4 * k) - _REST - pad - _extension(k, block)


@inlined
def _extension(k, block):  # type: ignore[no-untyped-def]
    return (le32(block, _ENTRY + 4 * k) >> 16) & 0xFFF


@inlined
def _strange(k, block):  # type: ignore[no-untyped-def]
    """Bit 31 is set if lengths or opcode of a packet are not usual."""
    total = _swap16(le32(block, _FRAME_14 + 4 * k) >> 16)
    udp_bytes = le32(block, _UDP_LENGTH + 4 * k)
    version = (le32(block, _FIRST + 4 * k) >> 8) & 15
    kept = le32(block, _CAPTURED + 4 * k) - HEADERS - _extension(k, block)
    differs = (total ^ (udp_bytes + 20)) | version | (le32(block, _ENTRY + 4 * k) & h.RARE)
    return _payload(k, block) | kept | -differs


@inlined
def flows_of(  # type: ignore[no-untyped-def]
    data, ahead, step, shift, six, i, n, s, block, slots, flows, ends, keys, endpoints, index
):  # fmt: skip
    """Flow, source and destination; for how many packets there was room, of IPv6 up to a new flow.

    Meanwhile the records from ``ahead`` on are fetched for the next run, ``step`` bytes each.
    """
    mask = len(slots) - 1
    family = IPV6_TAG << TAG_SHIFT if six else 0
    for k in range(c.CHUNK):
        hashed = hash_of(le64(block, _KEYS + 8 * k), le32(block, c.DEST_QP + 4 * (i + k)) | family)
        put32(block, _SLOT + 4 * k, (hashed << SLOT_BITS) & mask)
    for k in range(n):
        key, qp = le64(block, _KEYS + 8 * k), le32(block, c.DEST_QP + 4 * (i + k)) | family
        slot = le32(block, _SLOT + 4 * k)
        prefetch_far(data, ahead + _LEAD + step * k)
        prefetch_far(data, ahead + _LEAD + step * k + 64)
        if not holds(slots, slot, key, qp):
            slot = find_slot(slots, key, qp)
            if le64(slots, slot + 8) == EMPTY:
                if six or not has_room(s, flows, endpoints):
                    n = k
                    break
                at = le32(block, _AT + 4 * k)
                _add(data, at, shift, key, qp, slot, s, slots, flows, ends, keys, endpoints, index)
        flow = flow_in(slots, slot)
        put32(block, c.FLOW + 4 * (i + k), flow)
        put64(block, _ENDS + 8 * k, counted(slots, slot))
    for k in range(c.CHUNK):
        put32(block, c.SRC + 4 * (i + k), le64(block, _ENDS + 8 * k))
    for k in range(c.CHUNK):
        put32(block, c.DST + 4 * (i + k), le64(block, _ENDS + 8 * k) >> 32)
    return n


@inner
def _add(data, at, shift, key, qp_key, slot, s, slots, flows, ends, keys, endpoints, index):  # type: ignore[no-untyped-def]
    """A new flow from the headers at ``at``."""
    mapped = 0xFFFF00000000  # ::ffff:a.b.c.d
    src = endpoint_of(
        s, endpoints, index, np.int64(0), be32(data, at + 26) | mapped, mac(data, at - shift + 6)
    )
    dst = endpoint_of(s, endpoints, index, np.int64(0), be32(data, at + 30) | mapped, mac(data, at - shift))
    sport, dport = be16(data, at + 34), be16(data, at + 36)
    dest_qp = be32(data, at + 46) & 0xFFFFFF
    new_flow(s, slots, slot, flows, ends, keys, key, qp_key, src, dst, dest_qp, sport, dport, _ROCE_FLOW)


@inlined
def stamps(i, multiply, offset, block):  # type: ignore[no-untyped-def]
    """Times from the classic records' seconds and fractions."""
    multiply &= 0xFFFFFFFF  # as it is, but the compiler knows so
    for k in range(c.CHUNK):
        stamp = le64(block, c.TIME + 8 * (i + k))
        time = (stamp & 0xFFFFFFFF) * 1_000_000_000 + ((stamp >> 32) & 0xFFFFFFFF) * multiply + offset
        put64(block, c.TIME + 8 * (i + k), time)


@inlined
def fields(i, frame, pcapng, block):  # type: ignore[no-untyped-def]
    """The columns that only need their bytes put in order; ``frame`` is the number of row ``i``."""
    for k in range(c.CHUNK):
        put32(block, c.FRAME + 4 * (i + k), frame + k)
    for k in range(c.CHUNK):
        put16(block, c.SPORT + 2 * (i + k), _swap16(le16(block, c.SPORT + 2 * (i + k))))
    for k in range(c.CHUNK):
        put8(block, c.OPCODE + i + k, le32(block, _FIRST + 4 * k))
    for k in range(c.CHUNK):
        put8(block, c.TOS + i + k, le32(block, _FRAME_14 + 4 * k) >> 8)
    for k in range(c.CHUNK):
        first = le32(block, _FIRST + 4 * k)
        put8(block, c.FLAGS + i + k, h.bth_flags((first >> 8) & 255, (first >> 16) & 255, first >> 24))
    for k in range(c.CHUNK):
        put16(block, c.DPORT + 2 * (i + k), wire.ROCE_V2_PORT)
    for k in range(c.CHUNK):
        put8(block, c.KIND + i + k, _V2)
    for k in range(c.CHUNK):
        put8(block, c.DIRECTION + i + k, 0)
    if not pcapng:
        for k in range(c.CHUNK):
            put16(block, c.IFACE + 2 * (i + k), 0)


@inlined
def sparse(data, i, n, s, block):  # type: ignore[no-untyped-def]
    """Rows of the extended headers, of those packets that have any: one kind after the other, so that the
    processor need not guess which is next."""
    reth, aeth, imm = s[c.N_RETH] * h.RETH_ROW, s[c.N_AETH] * h.AETH_ROW, s[c.N_IMM] * h.IMM_ROW
    live = (1 << n) - 1 if n < c.CHUNK else -1
    having = which(block, _ENTRY, wire.RETH) & live
    while having != 0:
        k = lowest(having)
        having &= having - 1
        at = le32(block, _AT + 4 * k) + HEADERS
        put32(block, h.RETH_PACKET + reth, i + k)
        put64(block, h.RETH_VA + reth, be64(data, at))
        put32(block, h.RETH_RKEY + reth, be32(data, at + 8))
        put32(block, h.RETH_LENGTH + reth, be32(data, at + 12))
        reth += h.RETH_ROW
    having = which(block, _ENTRY, wire.AETH) & live
    while having != 0:
        k = lowest(having)
        having &= having - 1
        value = be32(data, le32(block, _AT + 4 * k) + HEADERS)
        put32(block, h.AETH_PACKET + aeth, i + k)
        put32(block, h.AETH_SYNDROME + aeth, value >> 24)
        put32(block, h.AETH_MSN + aeth, value & 0xFFFFFF)
        aeth += h.AETH_ROW
    having = which(block, _ENTRY, _LAST_WORD) & live
    while having != 0:
        k = lowest(having)
        having &= having - 1
        at = le32(block, _AT + 4 * k) + HEADERS + _extension(k, block) - 4
        put32(block, h.IMM_PACKET + imm, i + k)
        put32(block, h.IMM_VALUE + imm, be32(data, at))
        imm += h.IMM_ROW
    s[c.N_RETH] = reth // h.RETH_ROW
    s[c.N_AETH] = aeth // h.AETH_ROW
    s[c.N_IMM] = imm // h.IMM_ROW


@inlined
def tally(i, n, previous, block):  # type: ignore[no-untyped-def]
    """Bytes on the wire, records stamped before the one they follow, and the last stamp."""
    total, disordered = np.int64(0), np.int64(0)
    for k in range(n):
        total += le32(block, c.WIRE_LEN + 4 * (i + k))
    if le64(block, c.TIME + 8 * i) < previous:
        disordered += 1
    for k in range(1, n):
        disordered += 1 if le64(block, c.TIME + 8 * (i + k)) < le64(block, c.TIME + 8 * (i + k - 1)) else 0
    return total, disordered, le64(block, c.TIME + 8 * (i + n - 1))
