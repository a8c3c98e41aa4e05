"""Captured bytes to a block's columns in one pass: the walk over records and the decoding fused.

The usual packet (Ethernet, IPv4 or IPv6 without options, UDP to 4791, nothing cut) takes a
path of its own; whatever is unusual about a packet, ``layers`` and ``headers`` sort it out. pcap:
draft-ietf-opsawg-pcap; pcapng: draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels import columns as c
from dpuflow.kernels._jit import (
    COMPILED,
    be16,
    from_dtype,
    i4,
    i8,
    inner,
    kernel,
    le16,
    le32,
    le64,
    put8,
    put16,
    put32,
    put64,
    u1,
)
from dpuflow.kernels.bytes import u16, u32
from dpuflow.kernels.headers import OPCODE_TABLE, extensions, pause, roce, tcp, tcp_row, udp_end
from dpuflow.kernels.intern import (
    EMPTY,
    IPV6_TAG,
    TAG_SHIFT,
    TCP_TAG,
    endpoint_of,
    ends_of,
    find_slot,
    flow_in,
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
from dpuflow.kernels.usual import (
    ENHANCED,
    SIX,
    fields,
    flows_of,
    gather,
    gather_pcapng,
    record_at,
    shift_of,
    sizes,
    sparse,
    stamps,
    tally,
)
from dpuflow.schema import rows as schema
from dpuflow.schema.rows import NEVER, NONE32, Kind, Transport
from dpuflow.wire import headers as wire

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

SECTION = 0x0A0D0D0A
INTERFACE = 1
PACKET = 2  # obsolete
SIMPLE = 3
STATISTICS = 5

_SHORT = 8  # usual packets in a row that are worth a run


@inner
def _decode(data, at, captured, wire_len, link, i, s, block, slots, flows, ends, keys, endpoints, index, p):  # type: ignore[no-untyped-def]
    """Any packet to row ``i``; its Kind."""
    put32(block, c.FLOW + 4 * i, NONE32)
    put32(block, c.SRC + 4 * i, NONE32)
    put32(block, c.DST + 4 * i, NONE32)
    put32(block, c.WIRE_LEN + 4 * i, wire_len)
    for column in (c.PAYLOAD, c.DATA_AT, c.DEST_QP, c.PSN):
        put32(block, column + 4 * i, 0)
    for column in (c.SPORT, c.DPORT, c.DATA_LEN):
        put16(block, column + 2 * i, 0)
    for column in (c.OPCODE, c.FLAGS, c.TOS):
        put8(block, column + i, 0)
    kind = walk(data, at, captured, at + wire_len, link, p)
    if kind != _OK:
        return kind
    protocol = p[P_PROTOCOL]
    if protocol == MAC_CONTROL:
        kind = pause(data, p, i, s, block)
        return _PAUSE if kind == _OK else kind
    if protocol == wire.IPPROTO_TCP:
        kind = tcp(data, p, i, block)
        result, transport = _TCP, _TCP_FLOW
    else:
        result, transport = _V1, _ROCE_FLOW
        if protocol != ROCE_V1:
            result = _V2
            put16(block, c.SPORT + 2 * i, be16(data, p[P_AT]))
            put16(block, c.DPORT + 2 * i, be16(data, p[P_AT] + 2))
            if be16(data, p[P_AT] + 2) != wire.ROCE_V2_PORT:
                return _OTHER_UDP
            kind = udp_end(data, p)
            if kind != _OK:
                return kind
        kind = roce(data, p, i, block)
    if kind != _OK:
        return kind
    tos = p[P_TOS]
    if p[P_OUTER_CE] == 1 and tos & 3:
        tos |= 3
    put8(block, c.TOS + i, tos)
    _flow(i, transport, s, block, slots, flows, ends, keys, endpoints, index, p)
    if result == _TCP:
        tcp_row(data, p, i, s, block)
    else:
        headers = np.int64(OPCODE_TABLE[np.int64(block[c.OPCODE + i])]) & 0xFFFF
        extensions(data, p[P_AT] + wire.BTH_BYTES, p[P_CAPTURED], headers, i, s, block)
    return result


@inner
def _flow(i, transport, s, block, slots, flows, ends, keys, endpoints, index, p):  # type: ignore[no-untyped-def]
    """Flow, source and destination of row ``i``, added if new."""
    sport, dport = le16(block, c.SPORT + 2 * i), le16(block, c.DPORT + 2 * i)
    dest_qp = le32(block, c.DEST_QP + 4 * i)
    if transport == _TCP_FLOW:
        key = (TCP_TAG << TAG_SHIFT) | (sport << 16) | dport
    else:
        key = dest_qp
    src, dst = np.int64(0), np.int64(0)
    first = p[P_KEY]
    if p[P_FAMILY] == 6:
        key |= IPV6_TAG << TAG_SHIFT
        src = endpoint_of(s, endpoints, index, p[P_SRC_HI], p[P_SRC_LO], p[P_SRC_MAC])
        dst = endpoint_of(s, endpoints, index, p[P_DST_HI], p[P_DST_LO], p[P_DST_MAC])
        first = src | (dst << 32)
    at = find_slot(slots, first, key)
    if le64(slots, at + 8) == EMPTY:
        if p[P_FAMILY] == 4:
            src = endpoint_of(s, endpoints, index, p[P_SRC_HI], p[P_SRC_LO], p[P_SRC_MAC])
            dst = endpoint_of(s, endpoints, index, p[P_DST_HI], p[P_DST_LO], p[P_DST_MAC])
        new_flow(s, slots, at, flows, ends, keys, first, key, src, dst, dest_qp, sport, dport, transport)
    flow = flow_in(slots, at)
    put32(block, c.FLOW + 4 * i, flow)
    ends_of(ends, flow, i, block)


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
            more = np.int64((low << 32 | high) if swapped else (high << 32 | low))
            s[c.S_DROPS] = np.int64(max(s[c.S_DROPS], 0) + more)
        elif code == 1:
            if s[c.S_COMMENTS] < len(comments):
                comments[s[c.S_COMMENTS], 0] = at + 4
                comments[s[c.S_COMMENTS], 1] = size
            s[c.S_COMMENTS] += 1
        at += 4 + ((size + 3) & ~3)
    return direction if direction < 3 else 0


@inner
def _stamp(ticks, interfaces, i):  # type: ignore[no-untyped-def]
    """Nanoseconds of a 64-bit tick count."""
    if interfaces[i, c.I_MULTIPLY]:
        return np.int64(ticks * interfaces[i, c.I_MULTIPLY] + interfaces[i, c.I_OFFSET])
    ticks = np.uint64(ticks)
    if interfaces[i, c.I_DIVIDE]:
        return np.int64(np.int64(ticks // np.uint64(interfaces[i, c.I_DIVIDE])) + interfaces[i, c.I_OFFSET])
    bits = np.uint64(interfaces[i, c.I_BITS])
    whole = ticks >> bits
    part = ticks - (whole << bits)
    if bits <= _HALF:
        fraction = part * _BILLION >> bits
    else:  # the product in two halves, since it has more than 64 bits
        low = (part & np.uint64(0xFFFFFFFF)) * _BILLION >> _HALF
        fraction = ((part >> _HALF) * _BILLION + low) >> (bits - _HALF)
    return np.int64(np.int64(whole * _BILLION + fraction) + interfaces[i, c.I_OFFSET])


_SIGNATURE = i8(
    i8[::1], i8[::1], i8[:, ::1], u1[::1],  # state, form, interfaces, data
    u1[::1], u1[::1],  # block, slots
    from_dtype(schema.FLOW.dtype)[::1], u1[::1], i8[:, ::1],  # flows, ends, keys
    from_dtype(schema.ENDPOINT.dtype)[::1], i4[::1],  # endpoints, index
    i8[::1], i8[:, ::1], i8[::1],  # skipped, comments, packet scratch
)  # fmt: skip


@kernel(_SIGNATURE)
def parse(s, form, interfaces, data, block, slots, flows, ends, keys, endpoints, index, skipped, comments, p):  # type: ignore[no-untyped-def]
    """Fill rows from S_ROW on with the records from S_POS on; why it stopped (``columns``)."""
    pcapng, swapped = form[c.F_PCAPNG] != 0, form[c.F_SWAPPED] != 0
    header, known_interfaces = form[c.F_HEADER], form[c.F_INTERFACES]
    pos, end, limit = s[c.S_POS], s[c.S_END], s[c.S_LIMIT]
    i, max_rows, previous = s[c.S_ROW], s[c.S_MAX_ROWS], s[c.S_PREVIOUS]
    disordered, total, frames = s[c.S_DISORDERED], s[c.S_BYTES], s[c.S_FRAME]
    link, multiply = interfaces[0, c.I_LINK], interfaces[0, c.I_MULTIPLY]
    offset = interfaces[0, c.I_OFFSET]
    interface = np.int64(0)
    usual = pcapng or (header == 16 and link == wire.LINKTYPE_ETHERNET)
    usual = usual and not swapped and COMPILED
    before = 28 if pcapng else 16  # bytes of a record before the frame
    reach = np.int64(c.CHUNK)
    status = c.LIMIT
    while pos < limit:
        if i >= max_rows:
            status = c.FULL
            break
        if usual:
            most = min(reach, max_rows - i)
            shift = shift_of(data, pos, end, before)
            six = shift >= SIX
            # Each is compiled for itself: for IPv4 the shift is a constant.
            if pcapng:
                if six:
                    stop, found = gather_pcapng(
                        data, pos, end, limit, shift, True, endpoints, index, interfaces, known_interfaces,
                        i, most, block,
                    )  # fmt: skip
                elif shift:
                    stop, found = gather_pcapng(
                        data, pos, end, limit, 4, False, endpoints, index, interfaces, known_interfaces,
                        i, most, block,
                    )  # fmt: skip
                else:
                    stop, found = gather_pcapng(
                        data, pos, end, limit, 0, False, endpoints, index, interfaces, known_interfaces,
                        i, most, block,
                    )  # fmt: skip
            elif six:
                stop, found = gather(
                    data, pos, end, limit, shift, True, endpoints, index, i, most, block
                )  # fmt: skip
            elif shift:
                stop, found = gather(data, pos, end, limit, 4, False, endpoints, index, i, most, block)
            else:
                stop, found = gather(data, pos, end, limit, 0, False, endpoints, index, i, most, block)
            n = sizes(i, found, block)
            reach = min(2 * reach, c.CHUNK) if n == found else max(n, _SHORT)
            if n >= _SHORT:
                step = (stop - pos) // found
                if six:
                    n = flows_of(
                        data, stop, step, shift, True, i, n, s, block, slots, flows, ends, keys, endpoints,
                        index,
                    )  # fmt: skip
                else:
                    n = flows_of(
                        data, stop, step, shift, False, i, n, s, block, slots, flows, ends, keys, endpoints,
                        index,
                    )  # fmt: skip
                if n > 0:
                    if not pcapng:
                        stamps(i, multiply, offset, block)
                    fields(i, frames + i, pcapng, block)
                    sparse(data, i, n, s, block)
                    more, late, previous = tally(i, n, previous, block)
                    total += more
                    disordered += late
                    pos = stop if n == found else record_at(n, before + shift, block)
                    i += n
                    continue
        direction = np.int64(0)
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
            seconds, fraction = u32(data, pos, swapped), u32(data, pos + 4, swapped)
            time = np.int64(seconds * 1_000_000_000 + fraction * multiply + offset)
        else:
            if pos + 12 > end:
                status = c.MORE
                break
            block_type, size = u32(data, pos, swapped), u32(data, pos + 4, swapped)
            following = pos + size
            if block_type in (SECTION, INTERFACE, STATISTICS):
                status = c.BLOCK
                break
            if size < 12 or size & 3:
                s[c.S_REASON] = 2
                status = c.DAMAGED
                break
            if block_type not in (ENHANCED, PACKET, SIMPLE):
                pos = following  # may lie beyond the window
                continue
            if size > c.MAX_RECORD or size < (16 if block_type == SIMPLE else 32):
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
            interface = 0
            if block_type == ENHANCED:
                interface = u32(data, pos + 8, swapped)
            elif block_type == PACKET:
                interface = u16(data, pos + 8, swapped)
            if interface >= known_interfaces:
                s[c.S_REASON] = 4
                status = c.DAMAGED
                break
            link = interfaces[interface, c.I_LINK]
            if block_type == SIMPLE:
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
                ticks = np.int64((u32(data, pos + 12, swapped) << 32) | u32(data, pos + 16, swapped))
                time = _stamp(ticks, interfaces, interface)
                options = at + ((caplen + 3) & ~3)
                if options + 8 <= following - 4:
                    direction = _options(data, options, following - 4, swapped, s, comments)
                if block_type == PACKET:
                    lost = u16(data, pos + 10, swapped)
                    if lost != 0xFFFF:
                        s[c.S_DROPS] = max(s[c.S_DROPS], 0) + lost

        if not has_room(s, flows, endpoints):
            status = c.GROW
            break
        p[P_DIRECTION] = direction
        kind = _decode(
            data, at, at + caplen, wire_len, link, i, s, block, slots, flows, ends, keys, endpoints, index, p
        )
        put8(block, c.KIND + i, kind)
        direction = p[P_DIRECTION]
        if kind >= _FIRST_SKIP:
            skipped[kind] += 1
        elif p[P_STAMP] != NEVER:
            time = p[P_STAMP]
        put16(block, c.IFACE + 2 * i, interface)
        put8(block, c.DIRECTION + i, direction)
        put64(block, c.TIME + 8 * i, time)
        put32(block, c.FRAME + 4 * i, frames + i)
        if time < previous:
            disordered += 1
        previous = time
        total += wire_len
        i += 1
        pos = following
    s[c.S_POS], s[c.S_ROW], s[c.S_PREVIOUS] = pos, i, previous
    s[c.S_DISORDERED], s[c.S_BYTES] = disordered, total
    return status
