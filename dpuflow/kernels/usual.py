"""The usual packet, some hundred at a time: Ethernet, IPv4 without options, UDP to 4791, nothing cut.

``gather`` walks the records and copies the raw header words of a run of such packets aside; then
short loops over the run, most of which the compiler turns into vector code, make the columns. One
loop that does it all for each packet takes twice as long: it has more values than registers and
waits for the flow table. What is not usual ends the run and is left to ``parse``.
"""

from __future__ import annotations

import numpy as np

from dpuflow import wire
from dpuflow.kernels import columns as c
from dpuflow.kernels import headers as h
from dpuflow.kernels._jit import (
    be16,
    be32,
    be64,
    inlined,
    inner,
    le16,
    le32,
    le64,
    prefetch,
    prefetch_far,
    put8,
    put16,
    put32,
    put64,
)
from dpuflow.kernels.bytes import mac
from dpuflow.kernels.intern import (
    EMPTY,
    SLOT_BITS,
    endpoint_of,
    ends_of,
    find_slot,
    flow_in,
    has_room,
    hash_of,
    holds,
    new_flow,
)
from dpuflow.schema import Kind, Transport

_V2 = int(Kind.ROCE_V2)
_ROCE_FLOW = int(Transport.ROCE)
ENHANCED = 6

_AHEAD = 1536  # bytes to prefetch ahead of the walk
_FAR = 128  # bytes to prefetch a packet while flows are looked up
HEADERS = 14 + 20 + 8 + wire.BTH_BYTES
_REST = 8 + wire.BTH_BYTES + wire.ICRC_BYTES  # of the UDP length, besides extensions, pad and payload
MARGIN = 128  # bytes from a record's start that must lie in the window for its headers to be looked at

# Scratch, one entry per packet of the run: header words as they lie in the packet.
_GAP = 320  # lest all parts start in one set of the cache
_AT = c.STAGE_AT  # offset of the frame
_LENGTHS = _AT + 8 * c.CHUNK + _GAP  # captured and wire length
_FRAME_12 = _LENGTHS + 8 * c.CHUNK + _GAP  # EtherType, version, TOS, total length, identification
_ENTRY = _FRAME_12 + 8 * c.CHUNK + _GAP  # of the opcode table
_ADDRESSES = _ENTRY + 4 * c.CHUNK + _GAP
_UDP = _ADDRESSES + 8 * c.CHUNK + _GAP  # source port, destination port, length, checksum
_BTH = _UDP + 8 * c.CHUNK + _GAP  # opcode to destination QP
_PSN = _BTH + 8 * c.CHUNK + _GAP  # AckReq and PSN; then four bytes of no interest
_RETHS = _PSN + 8 * c.CHUNK + _GAP  # numbers of the packets that have a RETH
_AETHS = _RETHS + 2 * c.CHUNK + _GAP
_IMMS = _AETHS + 2 * c.CHUNK + _GAP  # immediate data or IETH

_RETH_BIT = wire.RETH.bit_length() - 1
_AETH_BIT = wire.AETH.bit_length() - 1
_IMM_BIT = wire.IMM.bit_length() - 1
_IETH_BIT = wire.IETH.bit_length() - 1


@inlined
def gather(data, pos, end, limit, interfaces, i, most, block):  # type: ignore[no-untyped-def]
    """Copy header words of usual packets from ``pos`` on, ``most`` at most; where it stopped, how many."""
    n = 0
    safe = min(limit, end - MARGIN)
    multiply, offset = interfaces[0, c.I_MULTIPLY], interfaces[0, c.I_OFFSET]
    while pos < safe and n < most:
        prefetch(data, pos + _AHEAD)
        at = pos + 16
        lengths = le64(data, pos + 8)
        captured = lengths & 0xFFFFFFFF
        following = at + captured
        if captured < HEADERS or captured > c.MAX_CAPTURED or following > end:
            break
        if not _copy(data, at, lengths, n, block):
            break
        time = le32(data, pos) * 1_000_000_000 + le32(data, pos + 4) * multiply + offset
        put64(block, c.TIME + 8 * (i + n), time)
        pos = following
        n += 1
    return pos, n


@inlined
def gather_pcapng(data, pos, end, limit, interfaces, known, i, most, block):  # type: ignore[no-untyped-def]
    """The same for enhanced packet blocks without options."""
    n = 0
    safe = min(limit, end - MARGIN)
    while pos < safe and n < most:
        prefetch(data, pos + _AHEAD)
        at = pos + 28
        lengths = le64(data, pos + 20)
        captured = lengths & 0xFFFFFFFF
        size, interface = le32(data, pos + 4), le32(data, pos + 8)
        following = pos + size
        differs = (le32(data, pos) ^ ENHANCED) | (size ^ (32 + ((captured + 3) & ~3)))
        if differs != 0 or captured < HEADERS or captured > c.MAX_CAPTURED or following > end:
            break
        if le32(data, following - 4) != size or interface >= known:
            break
        multiply = interfaces[interface, c.I_MULTIPLY]
        if multiply == 0 or interfaces[interface, c.I_LINK] != wire.LINKTYPE_ETHERNET:
            break
        if not _copy(data, at, lengths, n, block):
            break
        ticks = (le32(data, pos + 12) << 32) | le32(data, pos + 16)
        put64(block, c.TIME + 8 * (i + n), ticks * multiply + interfaces[interface, c.I_OFFSET])
        put16(block, c.IFACE + 2 * (i + n), interface)
        pos = following
        n += 1
    return pos, n


@inlined
def _copy(data, at, lengths, n, block):  # type: ignore[no-untyped-def]
    """Header words of the frame at ``at``, if it looks like a usual packet."""
    frame_12 = le64(data, at + 12)
    strange = (frame_12 & 0xFFFFFF) ^ 0x450008  # IPv4, no options
    strange |= (le32(data, at + 20) & 0xFF00FFBF) ^ 0x11000000  # no fragment, UDP
    strange |= le16(data, at + 36) ^ 0xB712  # to 4791
    if strange != 0:
        return False
    put64(block, _AT + 8 * n, at)
    put64(block, _LENGTHS + 8 * n, lengths)
    put64(block, _FRAME_12 + 8 * n, frame_12)
    put64(block, _ADDRESSES + 8 * n, le64(data, at + 26))
    put64(block, _UDP + 8 * n, le64(data, at + 34))
    put64(block, _BTH + 8 * n, le64(data, at + 42))
    put64(block, _PSN + 8 * n, le64(data, at + 50))
    return True


@inlined
def _swap16(value):  # type: ignore[no-untyped-def]
    return ((value & 255) << 8) | ((value >> 8) & 255)


@inlined
def sizes(i, n, block):  # type: ignore[no-untyped-def]
    """Payload columns; how many packets of the run are usual in their lengths and opcodes as well.

    Short loops with one output each: the compiler turns no others into vector code.
    """
    for k in range(n):
        put32(block, _ENTRY + 4 * k, h.OPCODE_TABLE[le16(block, _BTH + 8 * k) & 255])
    for k in range(n):
        pad = (le64(block, _BTH + 8 * k) >> 12) & 3
        udp_bytes = _swap16(le64(block, _UDP + 8 * k) >> 32)
        put32(block, c.PAYLOAD + 4 * (i + k), udp_bytes - _REST - pad - _extension(k, block))
    for k in range(n):
        put32(block, c.DATA_AT + 4 * (i + k), le64(block, _AT + 8 * k) + HEADERS + _extension(k, block))
    for k in range(n):
        kept = le32(block, _LENGTHS + 8 * k) - HEADERS - _extension(k, block)
        put16(block, c.DATA_LEN + 2 * (i + k), min(le32(block, c.PAYLOAD + 4 * (i + k)), kept))
    strange = np.int64(0)
    for k in range(n):
        strange |= _strange(i, k, block)
    if strange >= 0:
        return n
    for k in range(n):
        if _strange(i, k, block) < 0:
            return k
    return n


@inlined
def _extension(k, block):  # type: ignore[no-untyped-def]
    return (le32(block, _ENTRY + 4 * k) >> 16) & 0xFFF


@inlined
def _strange(i, k, block):  # type: ignore[no-untyped-def]
    """Negative if lengths or opcode of a packet are not usual."""
    total = _swap16(le64(block, _FRAME_12 + 8 * k) >> 32)
    udp_bytes = _swap16(le64(block, _UDP + 8 * k) >> 32)
    version = (le64(block, _BTH + 8 * k) >> 8) & 15
    payload = le32(block, c.PAYLOAD + 4 * (i + k)) << 32  # its sign where the others have theirs
    kept = le32(block, _LENGTHS + 8 * k) - HEADERS - _extension(k, block)
    differs = (total ^ (udp_bytes + 20)) | version | (le32(block, _ENTRY + 4 * k) & h.RARE)
    return payload | kept | -differs


@inlined
def flows_of(data, ahead, i, n, s, block, slots, flows, ends, keys, endpoints, index):  # type: ignore[no-untyped-def]
    """Flow, source and destination; for how many packets there was room.

    Meanwhile the bytes from ``ahead`` on are fetched for the next run.
    """
    mask = len(slots) - 1
    for k in range(n):
        key = le64(block, _ADDRESSES + 8 * k)
        qp_key = (le64(block, _BTH + 8 * k) >> 40) & 0xFFFFFF  # as it lies in the header
        slot = (hash_of(key, qp_key) << SLOT_BITS) & mask
        prefetch_far(data, ahead + _FAR * k)
        prefetch_far(data, ahead + _FAR * k + 64)
        if not holds(slots, slot, key, qp_key):
            slot = find_slot(slots, key, qp_key)
            if le64(slots, slot + 8) == EMPTY:
                if not has_room(s, flows, endpoints):
                    n = k
                    break
                at = le64(block, _AT + 8 * k)
                _add(data, at, key, qp_key, slot, s, slots, flows, ends, keys, endpoints, index)
        put32(block, c.FLOW + 4 * (i + k), flow_in(slots, slot))
    for k in range(n):
        ends_of(ends, le32(block, c.FLOW + 4 * (i + k)), i + k, block)
    return n


@inner
def _add(data, at, key, qp_key, slot, s, slots, flows, ends, keys, endpoints, index):  # type: ignore[no-untyped-def]
    """A new flow from the headers at ``at``."""
    mapped = 0xFFFF00000000  # ::ffff:a.b.c.d
    src = endpoint_of(s, endpoints, index, np.int64(0), be32(data, at + 26) | mapped, mac(data, at + 6))
    dst = endpoint_of(s, endpoints, index, np.int64(0), be32(data, at + 30) | mapped, mac(data, at))
    sport, dport = be16(data, at + 34), be16(data, at + 36)
    dest_qp = be32(data, at + 46) & 0xFFFFFF
    new_flow(s, slots, slot, flows, ends, keys, key, qp_key, src, dst, dest_qp, sport, dport, _ROCE_FLOW)


@inlined
def fields(i, n, pcapng, block):  # type: ignore[no-untyped-def]
    """The columns that only need their bytes put in order."""
    for k in range(n):
        put32(block, c.WIRE_LEN + 4 * (i + k), le64(block, _LENGTHS + 8 * k) >> 32)
    for k in range(n):
        put32(block, c.DEST_QP + 4 * (i + k), be32(block, _BTH + 8 * k + 4) & 0xFFFFFF)
    for k in range(n):
        put32(block, c.PSN + 4 * (i + k), be32(block, _PSN + 8 * k) & 0xFFFFFF)
    for k in range(n):
        put16(block, c.SPORT + 2 * (i + k), _swap16(le64(block, _UDP + 8 * k)))
    for k in range(n):
        put8(block, c.OPCODE + i + k, le64(block, _BTH + 8 * k))
    for k in range(n):
        put8(block, c.TOS + i + k, le64(block, _FRAME_12 + 8 * k) >> 24)
    for k in range(n):
        bth = le64(block, _BTH + 8 * k)
        last = le32(block, _PSN + 8 * k)
        put8(block, c.FLAGS + i + k, h.bth_flags((bth >> 8) & 255, (bth >> 32) & 255, last & 255))
    for k in range(n):
        put16(block, c.DPORT + 2 * (i + k), wire.ROCE_V2_PORT)
    for k in range(n):
        put8(block, c.KIND + i + k, _V2)
    for k in range(n):
        put8(block, c.DIRECTION + i + k, 0)
    if not pcapng:
        for k in range(n):
            put16(block, c.IFACE + 2 * (i + k), 0)


@inlined
def sparse(data, i, n, s, block):  # type: ignore[no-untyped-def]
    """Rows of the extended headers: first which packets have them, without branches, then what."""
    reths, aeths, imms = np.int64(0), np.int64(0), np.int64(0)
    for k in range(n):
        entry = le32(block, _ENTRY + 4 * k)
        put16(block, _RETHS + 2 * reths, k)
        put16(block, _AETHS + 2 * aeths, k)
        put16(block, _IMMS + 2 * imms, k)
        reths += (entry >> _RETH_BIT) & 1
        aeths += (entry >> _AETH_BIT) & 1
        imms += ((entry >> _IMM_BIT) | (entry >> _IETH_BIT)) & 1
    row = s[c.N_RETH] * h.RETH_ROW
    for j in range(reths):
        k = le16(block, _RETHS + 2 * j)
        at = le64(block, _AT + 8 * k) + HEADERS
        put32(block, h.RETH_PACKET + row, i + k)
        put64(block, h.RETH_VA + row, be64(data, at))
        put32(block, h.RETH_RKEY + row, be32(data, at + 8))
        put32(block, h.RETH_LENGTH + row, be32(data, at + 12))
        row += h.RETH_ROW
    row = s[c.N_AETH] * h.AETH_ROW
    for j in range(aeths):
        k = le16(block, _AETHS + 2 * j)
        value = be32(data, le64(block, _AT + 8 * k) + HEADERS)
        put32(block, h.AETH_PACKET + row, i + k)
        put32(block, h.AETH_SYNDROME + row, value >> 24)
        put32(block, h.AETH_MSN + row, value & 0xFFFFFF)
        row += h.AETH_ROW
    row = s[c.N_IMM] * h.IMM_ROW
    for j in range(imms):
        k = le16(block, _IMMS + 2 * j)
        before = ((le32(block, _ENTRY + 4 * k) >> _RETH_BIT) & 1) * 16
        put32(block, h.IMM_PACKET + row, i + k)
        put32(block, h.IMM_VALUE + row, be32(data, le64(block, _AT + 8 * k) + HEADERS + before))
        row += h.IMM_ROW
    s[c.N_RETH] += reths
    s[c.N_AETH] += aeths
    s[c.N_IMM] += imms


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


@inlined
def record_at(n, header, block):  # type: ignore[no-untyped-def]
    """Where the record of the run's packet ``n`` starts, ``header`` bytes before its frame."""
    return le64(block, _AT + 8 * n) - header
