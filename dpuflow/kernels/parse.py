"""Captured bytes to a block's columns in one pass: the walk over records and the decoding fused.

The usual packet (Ethernet, IPv4 without options, UDP to 4791, a known flow, nothing cut) takes a
path of its own; whatever is unusual about a packet, ``layers`` and ``headers`` sort it out. pcap:
draft-ietf-opsawg-pcap; pcapng: draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

import numpy as np

from dpuflow import schema, wire
from dpuflow.kernels import columns as c
from dpuflow.kernels._jit import be16, be32, from_dtype, i4, i8, inner, kernel, le16, le32, le64, prefetch, u1, u2, u4
from dpuflow.kernels.bytes import mac, u16, u32
from dpuflow.kernels.headers import OPCODE_TABLE, bth_flags, extensions, pause, roce, tcp, tcp_row, udp_end
from dpuflow.kernels.intern import (
    SLOT_DST,
    SLOT_FLOW,
    SLOT_PACKETS,
    SLOT_SRC,
    endpoint_of,
    find_slot,
    has_room,
    new_flow,
)
from dpuflow.kernels.layers import (
    MAC_CONTROL,
    P_AT,
    P_CAPTURED,
    P_DIRECTION,
    P_DST_HI,
    P_DST_LO,
    P_DST_MAC,
    P_FAMILY,
    P_KEY,
    P_OUTER_CE,
    P_PROTOCOL,
    P_SRC_HI,
    P_SRC_LO,
    P_SRC_MAC,
    P_STAMP,
    P_TOS,
    ROCE_V1,
    walk,
)
from dpuflow.schema import NEVER, NONE32, Kind, Transport

_OK = int(Kind.NONE)
_V2 = int(Kind.ROCE_V2)
_V1 = int(Kind.ROCE_V1)
_TCP = int(Kind.TCP)
_PAUSE = int(Kind.PAUSE)
_OTHER_UDP = int(Kind.OTHER_UDP)
_FIRST_SKIP = schema.FIRST_SKIP
_ROCE_FLOW = int(Transport.ROCE)
_TCP_FLOW = int(Transport.TCP)

_HALF = np.uint64(32)
_BILLION = np.uint64(1_000_000_000)

TCP_KEY = 1 << 56  # bits of the second key word
IPV6_KEY = 1 << 57

SECTION = 0x0A0D0D0A
INTERFACE = 1
PACKET = 2  # obsolete
SIMPLE = 3
STATISTICS = 5
ENHANCED = 6

_AHEAD = 1536  # bytes to prefetch ahead of the walk
_FAST_BYTES = 14 + 20 + 8 + wire.BTH_BYTES  # headers of the usual packet


@inner
def _decode(data, at, captured, wire_len, link, i, s, out, slots, flows, endpoints, index, p):  # type: ignore[no-untyped-def]
    """Any packet to row ``i``; its Kind."""
    words, halves, octets, reth, aeth, imm, deth, atomic, tcps, pauses = out
    for k in range(words.shape[0]):
        words[k, i] = 0
    words[c.FLOW, i] = NONE32
    words[c.SRC, i] = NONE32
    words[c.DST, i] = NONE32
    words[c.WIRE_LEN, i] = wire_len
    halves[c.SPORT, i] = 0
    halves[c.DPORT, i] = 0
    halves[c.DATA_LEN, i] = 0
    octets[c.OPCODE, i] = 0
    octets[c.FLAGS, i] = 0
    octets[c.TOS, i] = 0
    kind = walk(data, at, captured, at + wire_len, link, p)
    if kind != _OK:
        return kind
    protocol = p[P_PROTOCOL]
    if protocol == MAC_CONTROL:
        kind = pause(data, p, i, s, octets, pauses)
        return _PAUSE if kind == _OK else kind
    if protocol == wire.IPPROTO_TCP:
        kind = tcp(data, p, i, words, halves, octets)
        result, transport = _TCP, _TCP_FLOW
        key = TCP_KEY | (np.int64(halves[c.SPORT, i]) << 16) | np.int64(halves[c.DPORT, i])
    else:
        result = _V1
        if protocol != ROCE_V1:
            result = _V2
            halves[c.SPORT, i] = be16(data, p[P_AT])
            halves[c.DPORT, i] = be16(data, p[P_AT] + 2)
            if halves[c.DPORT, i] != wire.ROCE_V2_PORT:
                return _OTHER_UDP
            kind = udp_end(data, p)
            if kind != _OK:
                return kind
        kind = roce(data, p, i, words, halves, octets)
        transport = _ROCE_FLOW
        key = np.int64(words[c.DEST_QP, i])
    if kind != _OK:
        return kind
    tos = p[P_TOS]
    if p[P_OUTER_CE] == 1 and tos & 3:
        tos |= 3
    octets[c.TOS, i] = tos
    at = _flow(data, i, key, transport, s, words, halves, slots, flows, endpoints, index, p)
    slots[at, SLOT_PACKETS] += 1
    if result == _TCP:
        tcp_row(data, p, i, s, tcps)
    else:
        headers = OPCODE_TABLE[octets[c.OPCODE, i]] & 0xFFFF
        extensions(data, p[P_AT] + wire.BTH_BYTES, p[P_CAPTURED], headers, i, s, reth, aeth, imm, deth, atomic)
    return result


@inner
def _flow(data, i, key, transport, s, words, halves, slots, flows, endpoints, index, p):  # type: ignore[no-untyped-def]
    """Flow, source and destination of row ``i``, added if new; the flow's slot."""
    src, dst = np.int64(0), np.int64(0)
    first = p[P_KEY]
    if p[P_FAMILY] == 6:
        key |= IPV6_KEY
        src = endpoint_of(s, endpoints, index, p[P_SRC_HI], p[P_SRC_LO], p[P_SRC_MAC])
        dst = endpoint_of(s, endpoints, index, p[P_DST_HI], p[P_DST_LO], p[P_DST_MAC])
        first = src | (dst << 32)
    at = find_slot(slots, first, key)
    if slots[at, SLOT_FLOW] < 0:
        if p[P_FAMILY] == 4:
            src = endpoint_of(s, endpoints, index, p[P_SRC_HI], p[P_SRC_LO], p[P_SRC_MAC])
            dst = endpoint_of(s, endpoints, index, p[P_DST_HI], p[P_DST_LO], p[P_DST_MAC])
        new_flow(
            s, slots, at, flows, first, key, src, dst,
            words[c.DEST_QP, i], halves[c.SPORT, i], halves[c.DPORT, i], transport,
        )  # fmt: skip
    words[c.FLOW, i] = slots[at, SLOT_FLOW]
    words[c.SRC, i] = slots[at, SLOT_SRC]
    words[c.DST, i] = slots[at, SLOT_DST]
    return at


@inner
def _options(data, at, end, swapped, s, comments):  # type: ignore[no-untyped-def]
    """Options of an enhanced packet block: its direction; drops and comments into the state."""
    direction = 0
    while at + 4 <= end:
        code, size = u16(data, at, swapped), u16(data, at + 2, swapped)
        if code == 0 or at + 4 + size > end:
            break
        if code == 2 and size == 4:
            direction = u32(data, at + 4, swapped) & 3
        elif code == 4 and size == 8:
            low, high = u32(data, at + 4, swapped), u32(data, at + 8, swapped)
            s[c.S_DROPS] = max(s[c.S_DROPS], 0) + ((low << 32 | high) if swapped else (high << 32 | low))
        elif code == 1:
            if s[c.S_COMMENTS] < len(comments):
                comments[s[c.S_COMMENTS], 0] = at + 4
                comments[s[c.S_COMMENTS], 1] = size
            s[c.S_COMMENTS] += 1
        at += 4 + ((size + 3) & ~3)
    return direction if direction < 3 else 0


@inner
def _stamp(ticks, interface):  # type: ignore[no-untyped-def]
    """Nanoseconds of a 64-bit tick count."""
    if interface[c.I_MULTIPLY]:
        return ticks * interface[c.I_MULTIPLY] + interface[c.I_OFFSET]
    ticks = np.uint64(ticks)
    if interface[c.I_DIVIDE]:
        return np.int64(ticks // np.uint64(interface[c.I_DIVIDE])) + interface[c.I_OFFSET]
    bits = np.uint64(interface[c.I_BITS])
    whole = ticks >> bits
    part = ticks - (whole << bits)
    if bits <= _HALF:
        fraction = part * _BILLION >> bits
    else:  # the product in two halves, since it has more than 64 bits
        low = (part & np.uint64(0xFFFFFFFF)) * _BILLION >> _HALF
        fraction = ((part >> _HALF) * _BILLION + low) >> (bits - _HALF)
    return np.int64(whole * _BILLION + fraction) + interface[c.I_OFFSET]


_RECORDS = [from_dtype(r.dtype)[::1] for r in c.SPARSE]
_SIGNATURE = i8(
    i8[::1], i8[::1], i8[:, ::1], u1[::1],  # state, form, interfaces, data
    i8[::1], u4[:, ::1], u2[:, ::1], u1[:, ::1],  # times, words, halves, octets
    *_RECORDS,
    i8[:, ::1], from_dtype(schema.FLOW.dtype)[::1],  # slots, flows
    from_dtype(schema.ENDPOINT.dtype)[::1], i4[::1],  # endpoints, index
    i8[::1], i8[:, ::1], i8[::1],  # skipped, comments, packet scratch
)  # fmt: skip


@kernel(_SIGNATURE)
def parse(  # type: ignore[no-untyped-def]
    s, form, interfaces, data, times, words, halves, octets,
    reth, aeth, imm, deth, atomic, tcps, pauses,
    slots, flows, endpoints, index, skipped, comments, p,
):  # fmt: skip
    """Fill rows from S_ROW on with the records from S_POS on; why it stopped (``columns``)."""
    out = (words, halves, octets, reth, aeth, imm, deth, atomic, tcps, pauses)
    pcapng, swapped = form[c.F_PCAPNG] != 0, form[c.F_SWAPPED] != 0
    header, known_interfaces = form[c.F_HEADER], form[c.F_INTERFACES]
    pos, end, limit = s[c.S_POS], s[c.S_END], s[c.S_LIMIT]
    i, max_rows, previous = s[c.S_ROW], s[c.S_MAX_ROWS], s[c.S_PREVIOUS]
    disordered, total = s[c.S_DISORDERED], s[c.S_BYTES]
    link, multiply = interfaces[0, c.I_LINK], interfaces[0, c.I_MULTIPLY]
    offset = interfaces[0, c.I_OFFSET]
    interface, direction = 0, 0
    status = c.LIMIT
    while pos < limit:
        if i >= max_rows:
            status = c.FULL
            break
        prefetch(data, pos + _AHEAD)
        if not pcapng:
            at = pos + header
            if at > end:
                status = c.MORE
                break
            caplen, wire_len = u32(data, pos + 8, swapped), u32(data, pos + 12, swapped)
            following = at + caplen
            if caplen > c.MAX_CAPTURED:
                s[c.S_REASON] = 1
                status = c.DAMAGED
                break
            if following > end:
                status = c.MORE
                break
            time = u32(data, pos, swapped) * 1_000_000_000 + u32(data, pos + 4, swapped) * multiply + offset
        else:
            if pos + 12 > end:
                status = c.MORE
                break
            block, size = u32(data, pos, swapped), u32(data, pos + 4, swapped)
            following = pos + size
            if block in (SECTION, INTERFACE, STATISTICS):
                status = c.BLOCK
                break
            if size < 12 or size & 3:
                s[c.S_REASON] = 2
                status = c.DAMAGED
                break
            if block not in (ENHANCED, PACKET, SIMPLE):
                pos = following  # may lie beyond the window
                continue
            if size > c.MAX_RECORD or size < (16 if block == SIMPLE else 32):
                s[c.S_REASON] = 2
                status = c.DAMAGED
                break
            if following > end:
                status = c.MORE
                break
            if u32(data, following - 4, swapped) != size:
                s[c.S_REASON] = 3
                status = c.DAMAGED
                break
            interface, direction = 0, 0
            if block == ENHANCED:
                interface = u32(data, pos + 8, swapped)
            elif block == PACKET:
                interface = u16(data, pos + 8, swapped)
            if interface >= known_interfaces:
                s[c.S_REASON] = 4
                status = c.DAMAGED
                break
            link = interfaces[interface, c.I_LINK]
            if block == SIMPLE:
                wire_len = u32(data, pos + 8, swapped)
                caplen = min(wire_len, size - 16)
                if interfaces[0, c.I_SNAP] > 0:
                    caplen = min(caplen, interfaces[0, c.I_SNAP])
                at = pos + 12
                time = previous if previous != NEVER else 0  # it has no stamp of its own
            else:
                at = pos + 28
                caplen, wire_len = u32(data, pos + 20, swapped), u32(data, pos + 24, swapped)
                if caplen > c.MAX_CAPTURED or at + caplen > following - 4:
                    s[c.S_REASON] = 1
                    status = c.DAMAGED
                    break
                ticks = (u32(data, pos + 12, swapped) << 32) | u32(data, pos + 16, swapped)
                time = _stamp(ticks, interfaces[interface])
                options = at + ((caplen + 3) & ~3)
                if options + 8 <= following - 4:
                    direction = _options(data, options, following - 4, swapped, s, comments)
                if block == PACKET:
                    lost = u16(data, pos + 10, swapped)
                    if lost != 0xFFFF:
                        s[c.S_DROPS] = max(s[c.S_DROPS], 0) + lost

        usual = False
        if link == wire.LINKTYPE_ETHERNET and caplen >= _FAST_BYTES:
            kind_and_tos = le32(data, at + 12)  # EtherType, version and header length, TOS
            strange = (kind_and_tos & 0xFFFFFF) ^ 0x450008
            strange |= (le32(data, at + 20) & 0xFF00FFBF) ^ 0x11000000  # no fragment, UDP
            strange |= le16(data, at + 36) ^ 0xB712  # to 4791
            ip_bytes, udp_bytes = be16(data, at + 16), be16(data, at + 38)
            strange |= ip_bytes ^ (udp_bytes + 20)
            bth = be32(data, at + 42)
            strange |= bth & 0xF0000  # BTH version
            entry = OPCODE_TABLE[bth >> 24]
            headers, extension = entry & 0xFFFF, (entry >> 16) & 0x7FFF
            payload = udp_bytes - 8 - wire.BTH_BYTES - wire.ICRC_BYTES - extension - ((bth >> 20) & 3)
            start = at + _FAST_BYTES + extension
            if strange == 0 and entry != 0 and payload >= 0 and start <= at + caplen:
                qp_word, psn_word = be32(data, at + 46), be32(data, at + 50)
                slot = find_slot(slots, le64(data, at + 26), qp_word & 0xFFFFFF)
                flow = slots[slot, SLOT_FLOW]
                if flow >= 0:
                    usual = True
                    slots[slot, SLOT_PACKETS] += 1
                    words[c.FLOW, i] = flow
                    words[c.SRC, i] = slots[slot, SLOT_SRC]
                    words[c.DST, i] = slots[slot, SLOT_DST]
                    words[c.WIRE_LEN, i] = wire_len
                    words[c.PAYLOAD, i] = payload
                    words[c.DATA_AT, i] = start
                    words[c.DEST_QP, i] = qp_word & 0xFFFFFF
                    words[c.PSN, i] = psn_word & 0xFFFFFF
                    halves[c.SPORT, i] = be16(data, at + 34)
                    halves[c.DPORT, i] = wire.ROCE_V2_PORT
                    halves[c.DATA_LEN, i] = min(payload, at + caplen - start)
                    octets[c.OPCODE, i] = bth >> 24
                    octets[c.FLAGS, i] = bth_flags((bth >> 16) & 255, qp_word >> 24, psn_word >> 24)
                    octets[c.TOS, i] = kind_and_tos >> 24
                    octets[c.KIND, i] = _V2
                    if headers:
                        extensions(
                            data, at + _FAST_BYTES, at + caplen, headers, i, s, reth, aeth, imm, deth, atomic
                        )
        if not usual:
            if not has_room(s, flows, endpoints, slots):
                status = c.GROW
                break
            p[P_DIRECTION] = direction
            kind = _decode(
                data, at, at + caplen, wire_len, link, i, s, out, slots, flows, endpoints, index, p
            )
            octets[c.KIND, i] = kind
            direction = p[P_DIRECTION]
            if kind >= _FIRST_SKIP:
                skipped[kind] += 1
            elif p[P_STAMP] != NEVER:
                time = p[P_STAMP]
        halves[c.IFACE, i] = interface
        octets[c.DIRECTION, i] = direction
        times[i] = time
        if time < previous:
            disordered += 1
        previous = time
        total += wire_len
        i += 1
        pos = following
    s[c.S_POS], s[c.S_ROW], s[c.S_PREVIOUS] = pos, i, previous
    s[c.S_DISORDERED], s[c.S_BYTES] = disordered, total
    return status
