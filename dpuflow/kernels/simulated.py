"""Simulated packets: events at a vantage point -> packets in columns -> frames as records of a pcap file.

Of RoCE packets; TCP's segments are written elsewhere, into the room that is left for them. Formats: IBA
volume 1 chapter 9, annexes A16 and A17 (ICRC: 7.8.1, A17.3.3); the tables are ``schema.simulated``'s.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np

from dpuflow.kernels._jit import i8, inner, kernel, le64, put32, put64, u1, void
from dpuflow.schema import simulated as table
from dpuflow.wire import headers as wire

IP_AT: Final = 14
UDP_AT: Final = 34
BTH_AT: Final = 42
EXTENDED_AT: Final = 54
RECORD: Final = 16  # bytes of a pcap record's own header
HEAD: Final = 56  # EXTENDED_AT in whole words
SLACK: Final = 8192
"""Room behind the last record: what follows cuts frames to what is kept of them."""
CE: Final = 3
CNP_CLASS: Final = 48 << 2 | 2  # as an adapter was seen to send them
CONTENT_BYTES: Final = 12
"""So many first bytes of a message are its own: two words and what is between."""
LENGTH_BYTES: Final = 4
"""Of a message's size, where it is written by itself."""
_ACK_NO_LIMIT: Final = 0x1F

(_FLOW, _KIND, _BYTES, _PSN, _VA, _RKEY, _VALUE, _TARGET, _ROOM, _KEY) = range(len(table.MESSAGES))
_R_KIND, _R_PSN, _R_SYNDROME, _R_MSN = (
    table.REPLIES.index(name) for name in ("kind", "psn", "syndrome", "msn")
)
_L_TARGET, _L_ROOM, _L_KEY, _L_TAG = (table.ENTRIES.index(name) for name in ("target", "room", "key", "tag"))
(_START, _SENT, _STEP, _END, _COUNT, _FIRST, _ROW, _E_FLOW, _E_IDENTITY, _E_MARKED, _E_REPLY, _E_RECEIVED) = (
    range(len(table.EVENTS))
)
(_CODE, _P_FLOW, _BACK, _RECEIVED, _P_PSN, _PAYLOAD, _MESSAGE, _SYNDROME, _MSN, _ASK, _MARKED, _IDENTITY) = (
    range(len(table.PACKETS))
)

_CODE_OF: Final = {opcode.name: opcode.code for opcode in wire.OPCODES.values()}
_PLAIN: Final = ("RC_WRITE_MIDDLE", "RC_WRITE_LAST", "RC_WRITE_FIRST", "RC_WRITE_ONLY")
_NAMES: Final = {  # of a kind of message: its middle, last, first and only packet
    table.CTS: _PLAIN,
    table.WRITE: _PLAIN,
    table.WRITE_IMM: ("RC_WRITE_MIDDLE", "RC_WRITE_LAST_IMM", "RC_WRITE_FIRST", "RC_WRITE_ONLY_IMM"),
    table.SEND: ("RC_SEND_MIDDLE", "RC_SEND_LAST", "RC_SEND_FIRST", "RC_SEND_ONLY"),
    table.ATOMIC: ("RC_FETCH_ADD",) * 4,
    table.READ: ("RC_READ_REQUEST",) * 4,
    table.RESPONSE: (
        "RC_READ_RESPONSE_MIDDLE",
        "RC_READ_RESPONSE_LAST",
        "RC_READ_RESPONSE_FIRST",
        "RC_READ_RESPONSE_ONLY",
    ),
}
_CODES = np.full((table.SEGMENT_ACK + 1, 4), table.DATA_CODE)
for _kind, _names in _NAMES.items():
    _CODES[_kind] = [_CODE_OF[name] for name in _names]
for _kind, _name in (
    (table.ACK, "RC_ACKNOWLEDGE"),
    (table.CNP, "CNP"),
    (table.ATOMIC_ACK, "RC_ATOMIC_ACKNOWLEDGE"),
):
    _CODES[_kind] = _CODE_OF[_name]
_CODES[table.SEGMENT_ACK] = table.ACK_CODE

_HEADERS = np.zeros(256, np.int64)
_BEGINS = np.zeros(256, np.bool_)  # a WRITE's first packet
_WRITES = np.zeros(256, np.bool_)
OVERHEAD: Final = np.zeros(256, np.int64)
"""Bytes of a frame beside payload and padding, by operation code."""
for _opcode in wire.OPCODES.values():
    _HEADERS[_opcode.code] = _opcode.headers
    _WRITES[_opcode.code] = _opcode.operation == wire.OP_WRITE
    _BEGINS[_opcode.code] = _opcode.operation == wire.OP_WRITE and _opcode.place & wire.FIRST
    OVERHEAD[_opcode.code] = (
        EXTENDED_AT
        + wire.ICRC_BYTES
        + sum(size for bit, size in wire.HEADER_BYTES.items() if _opcode.headers & bit)
    )

# CRC-32 is linear: the state after a payload is the state before it, moved over as many zero bytes, combined
# with the payload's own. So of the payloads, cut from one pool, each prefix is summed once.
_ONES: Final = 0xFFFFFFFF
AFTER_LRH: Final = zlib.crc32(b"\xff" * 8) ^ _ONES
"""State after the eight ones that stand for the local route header."""
_MOST_BITS: Final = 13  # payloads have less than 2^13 bytes


def _over(zeros: int) -> Any:
    """Tables that move a state over so many zero bytes: by each of its four bytes."""
    bits = [zlib.crc32(bytes(zeros), (1 << i) ^ _ONES) ^ _ONES for i in range(32)]
    tables = np.zeros((4, 256), np.int64)
    for bit, moved in enumerate(bits):
        tables[bit // 8, (np.arange(256) >> bit % 8 & 1).astype(bool)] ^= moved
    return tables


_ZEROS = np.stack([_over(1 << k) for k in range(_MOST_BITS)])
_TABLE = np.array([zlib.crc32(bytes([i]), _ONES) ^ _ONES for i in range(256)], np.int64)


def prefix_states(pool: bytes) -> Any:
    """The states, from zero, after each prefix of ``pool``."""
    states = [0]
    for byte in pool:
        states.append(int(_TABLE[(states[-1] ^ byte) & 0xFF]) ^ states[-1] >> 8)
    return np.array(states, np.int64)


@kernel(void(i8[:, ::1], i8, i8, i8[:, ::1]))
def unfold(events: Any, begin: Any, end: Any, packets: Any) -> None:
    """Of each packet of these events when it has passed, its event and its place in that.

    The last one has passed as its event ends.
    """
    at = 0
    for e in range(begin, end):
        count, start, step, last = events[e, _COUNT], events[e, _START], events[e, _STEP], events[e, _END]
        for k in range(count):
            packets[at, 0] = last if k + 1 == count else min(last, start + (k + 1) * step // 1000)
            packets[at, 1], packets[at, 2] = e, k
            at += 1


@kernel(void(i8[:, ::1], i8[:, ::1], i8[:, ::1], i8[:, ::1], i8[::1], i8, i8[:, ::1]))
def expand(events: Any, which: Any, messages: Any, replies: Any, mtus: Any, every: Any, packets: Any) -> None:
    """Fill ``packets``; ``which``: as ``unfold`` has them.

    ``mtus``: by flow; ``every``: so many packets of a message apart, one asks for an ACK (0: the last alone).
    """
    for i in range(len(which)):
        e, k = which[i, 1], which[i, 2]
        row, flow = events[e, _ROW], events[e, _E_FLOW]
        packets[i, _P_FLOW], packets[i, _RECEIVED] = flow, events[e, _E_RECEIVED]
        packets[i, _IDENTITY] = events[e, _E_IDENTITY] + k
        if events[e, _E_REPLY]:
            kind, psn = replies[row, _R_KIND], replies[row, _R_PSN]
            packets[i, _CODE], packets[i, _BACK], packets[i, _MESSAGE] = _CODES[kind, 0], 1, -1
            packets[i, _P_PSN] = psn if kind == table.SEGMENT_ACK else psn & wire.PSN_MASK
            packets[i, _PAYLOAD] = packets[i, _ASK] = packets[i, _MARKED] = 0
            packets[i, _SYNDROME] = replies[row, _R_SYNDROME]
            packets[i, _MSN] = replies[row, _R_MSN] & wire.PSN_MASK
            continue
        kind, mtu = messages[row, _KIND], mtus[flow]
        size = 0 if kind == table.READ else messages[row, _BYTES]  # a request carries nothing
        count = max(1, -(-size // mtu))
        at = events[e, _FIRST] + k
        last = at + 1 == count
        psn = messages[row, _PSN] + at
        answer = kind == table.RESPONSE
        asks = last or (every > 0 and kind < table.READ and (psn + 1) % max(every, 1) == 0)
        packets[i, _CODE] = _CODES[kind, 2 * (at == 0) + last]
        packets[i, _BACK], packets[i, _MESSAGE] = 0, row
        in_bytes = kind >= table.LENGTH
        packets[i, _P_PSN] = messages[row, _VA] + at * mtu if in_bytes else psn & wire.PSN_MASK
        packets[i, _PAYLOAD] = size - (count - 1) * mtu if last else mtu
        packets[i, _SYNDROME] = _ACK_NO_LIMIT if answer else 0
        packets[i, _MSN] = messages[row, _VALUE] & wire.PSN_MASK if answer else 0
        packets[i, _ASK] = asks and not answer
        packets[i, _MARKED] = k >= events[e, _COUNT] - events[e, _E_MARKED]


@inner
def _put(out: Any, at: Any, width: Any, value: Any) -> None:
    """Big endian."""
    for k in range(width):
        out[at + k] = value >> 8 * (width - 1 - k) & 0xFF


@inner
def _put_little(out: Any, at: Any, width: Any, value: Any) -> None:
    for k in range(width):
        out[at + k] = value >> 8 * k & 0xFF


@inner
def _moved(state: Any, zeros: Any) -> Any:
    """The CRC's state after so many zero bytes."""
    for k in range(_MOST_BITS):
        if zeros >> k & 1:
            state = (
                _ZEROS[k, 0, state & 0xFF]
                ^ _ZEROS[k, 1, state >> 8 & 0xFF]
                ^ _ZEROS[k, 2, state >> 16 & 0xFF]
                ^ _ZEROS[k, 3, state >> 24]
            )
    return state


@inner
def _content(held: Any, high: Any, low: Any) -> Any:
    """Bits 32 to 63 of what a message holds times a factor, given as two words (Fibonacci hashing)."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    number, high, low = np.uint64(held + 1), np.uint64(high), np.uint64(low)
    above, below = number >> half, number & mask
    return np.int64(((below * low >> half) + (below * high & mask) + (above * low & mask)) & mask)


@inner
def _extended(out: Any, at: Any, packets: Any, i: Any, messages: Any) -> Any:
    """Headers behind the BTH, in wire order; returns where the payload begins."""
    headers, row = _HEADERS[packets[i, _CODE]], max(packets[i, _MESSAGE], 0)
    if headers & (wire.RETH | wire.ATOMIC):
        _put(out, at, 8, messages[row, _VA])
        _put(out, at + 8, 4, messages[row, _RKEY])
        if headers & wire.RETH:
            _put(out, at + 12, 4, messages[row, _BYTES])
            at += 16
        else:
            _put(out, at + 12, 8, messages[row, _VALUE])
            _put(out, at + 20, 8, 0)
            at += 28
    if headers & wire.AETH:
        out[at] = packets[i, _SYNDROME] & 0xFF
        _put(out, at + 1, 3, packets[i, _MSN])
        at += 4
    if headers & wire.ATOMIC_ACK:
        _put(out, at, 8, 0)
        at += 8
    if headers & wire.IMM:
        _put(out, at, 4, messages[row, _VALUE])
        at += 4
    if headers & wire.CNP_PAD:
        _put(out, at, 8, 0)
        _put(out, at + 8, 8, 0)
        at += 16
    return at


@inner
def _grants(out: Any, at: Any, count: Any, row: Any, first: Any, tag: Any, messages: Any, entries: Any,
            layout: Any) -> None:  # fmt: skip
    """Clear-to-send entries, ``count`` of them: the message's own, or those of ENTRIES from ``first`` on."""
    size = layout[0]
    for k in range(count * size):
        out[at + k] = 0
    for k in range(count):
        target, room, key = messages[row, _TARGET], messages[row, _ROOM], messages[row, _KEY]
        if first >= 0:
            target, room = entries[first + k, _L_TARGET], entries[first + k, _L_ROOM]
            key, tag = entries[first + k, _L_KEY], entries[first + k, _L_TAG]
        _put_little(out, at, 8, target)
        _put_little(out, at + layout[1], layout[2], room)
        _put_little(out, at + layout[3], 4, key)
        _put_little(out, at + layout[4], 4, count)
        _put_little(out, at + layout[5], 4, tag)
        _put_little(out, at + layout[6], 8, messages[row, _VALUE])
        at += size


@inner
def _own(out: Any, at: Any, packets: Any, i: Any, messages: Any, listed: Any, entries: Any, tags: Any,
         layout: Any) -> Any:  # fmt: skip
    """First bytes of a payload that are the message's own, written over the pool's; returns how many.

    Entries of a clear-to-send; sizes behind a group of messages; else words by which what is passed on is
    known again (LL has flags between them).
    """
    code, payload, row = packets[i, _CODE], packets[i, _PAYLOAD], packets[i, _MESSAGE]
    if not _WRITES[code]:
        return 0
    first = listed[row]
    if payload % layout[0] == 0 and 0 < payload <= layout[7] * layout[0]:
        if messages[row, _KIND] == table.CTS:
            tag = tags[packets[i, _P_FLOW]]
            _grants(out, at, payload // layout[0], row, first, tag, messages, entries, layout)
            return payload
        first = -1
    if not _BEGINS[code]:
        return 0
    if first >= 0:
        for k in range(payload // LENGTH_BYTES):
            _put_little(out, at + k * LENGTH_BYTES, LENGTH_BYTES, entries[first + k, _L_ROOM])
        return payload
    if payload >= 4:
        _put_little(out, at, 4, _content(messages[row, _TARGET], 0x9E3779B9, 0x7F4A7C15))
    if payload >= 12:
        _put_little(out, at + 8, 4, _content(messages[row, _TARGET], 0xC2B2AE3D, 0x27D4EB4F))
    return min(payload, CONTENT_BYTES)


@inner
def _icrc(out: Any, frame: Any, body: Any, own: Any, payload: Any, states: Any) -> Any:
    """Of a frame with ones where it may change on the way; after ``own`` bytes its payload is the pool's."""
    state = AFTER_LRH
    for k in range(frame + IP_AT, body + own):
        state = _TABLE[(state ^ out[k]) & 0xFF] ^ state >> 8
    state = _moved(state ^ states[own], payload - own) ^ states[payload]
    return ~_moved(state, -payload & 3) & _ONES


@inner
def _ip(out: Any, frame: Any, packets: Any, i: Any, heads: Any, head: Any, size: Any) -> None:
    """What may change on the way in the IPv4 header, and its checksum (RFC 1071).

    ``heads[head:]``: the header as it is the same in all; ``size``: its total length.
    """
    traffic = np.int64(heads[head + 1])
    if packets[i, _CODE] == wire.CNP_OPCODE:
        traffic = CNP_CLASS
    elif packets[i, _MARKED] and packets[i, _RECEIVED] == 1 and packets[i, _BACK] == 0:
        traffic |= CE
    at = frame + IP_AT
    out[at + 1], out[at + 8] = traffic, heads[head + 8]
    total = 0x4500 + traffic + size + (packets[i, _IDENTITY] & 0xFFFF)
    for k in range(6, 20, 2):
        if k != 10:
            total += np.int64(heads[head + k]) << 8 | np.int64(heads[head + k + 1])
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    _put(out, at + 10, 2, ~total & 0xFFFF)


@kernel(
    void(
        *(i8[:, ::1], i8[::1], i8[::1], i8[::1]),
        *(i8[:, ::1], i8[::1], i8[:, ::1]),
        *(u1[::1], i8[::1], i8[::1], u1[::1], i8[::1], u1[::1]),
    )
)
def write_records(
    packets: Any, stamps: Any, captured: Any, lengths: Any, messages: Any, listed: Any, entries: Any,
    heads: Any, tags: Any, layout: Any, pool: Any, states: Any, out: Any,
) -> None:  # fmt: skip
    """Pcap records of ``packets`` one after the other into ``out``; TCP's segments get their header alone.

    ``captured``, ``lengths``: bytes of each kept, and those it had. ``listed``: by message its first row of
    ``entries``, -1: none. ``heads``: by flow, sent and then answered, and by whether it has arrived, its
    first HEAD bytes, with what is the same in all. ``tags``: by flow that of its entries. ``layout``:
    of an entry size, places and widths (``Framer``). ``pool``: what payloads are made of, and its ``states``.
    """
    flows, record = len(heads) // (4 * HEAD), 0
    for i in range(len(packets)):
        put32(out, record, stamps[i] // 1_000_000_000)
        put32(out, record + 4, stamps[i] % 1_000_000_000)
        put32(out, record + 8, captured[i])
        put32(out, record + 12, lengths[i])
        frame = record + RECORD
        record = frame + captured[i]
        code, payload = packets[i, _CODE], packets[i, _PAYLOAD]
        if code >= table.DATA_CODE:
            continue
        way = packets[i, _P_FLOW] + flows * packets[i, _BACK]
        head = HEAD * (2 * way + (packets[i, _RECEIVED] == 1))
        for k in range(0, EXTENDED_AT, 8):
            put64(out, frame + k, le64(heads, head + k))
        pad = -payload & 3
        length = OVERHEAD[code] + payload + pad
        _put(out, frame + UDP_AT + 4, 2, length - UDP_AT)
        out[frame + BTH_AT] = code
        out[frame + BTH_AT + 1] = 0x40 | pad << 4  # MigReq, as adapters set it
        out[frame + BTH_AT + 8] = packets[i, _ASK] << 7
        _put(out, frame + BTH_AT + 9, 3, packets[i, _P_PSN])
        body = _extended(out, frame + EXTENDED_AT, packets, i, messages)
        # Not more of it than is kept: the rest would be written over.
        for k in range(0, min(payload, captured[i] - (body - frame)), 8):
            put64(out, body + k, le64(pool, k))
        own = _own(out, body, packets, i, messages, listed, entries, tags, layout)
        end = frame + length - wire.ICRC_BYTES
        if end - pad < record:
            _put(out, end - pad, pad + wire.ICRC_BYTES, 0)
        _put(out, frame + IP_AT + 2, 2, length - IP_AT)
        _put(out, frame + IP_AT + 4, 2, packets[i, _IDENTITY])
        if captured[i] == length:
            for k in (IP_AT + 1, IP_AT + 8, IP_AT + 10, IP_AT + 11, UDP_AT + 6, UDP_AT + 7, BTH_AT + 4):
                out[frame + k] = 0xFF
            _put_little(out, end, 4, _icrc(out, frame, body, own, payload, states))
            out[frame + UDP_AT + 6] = out[frame + UDP_AT + 7] = 0
        out[frame + BTH_AT + 4] = 0x40 if code == wire.CNP_OPCODE else 0  # BECN
        _ip(out, frame, packets, i, heads, head + IP_AT, length - IP_AT)
