"""Transport headers to a block's row and its sparse rows: RoCE, TCP, pause frames.

IBA volume 1 chapter 9 and annexes A16, A17; RFC 9293, 7323, 2018; IEEE 802.3 annex 31B, 802.1Q.
Lengths come from the IP and UDP headers, since the snap length may have cut the packet.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import be16, be32, be64, inlined, inner, put8, put16, put32, put64
from dpuflow.kernels.columns import (
    DATA_AT,
    DATA_LEN,
    DEST_QP,
    DPORT,
    FLAGS,
    N_AETH,
    N_ATOMIC,
    N_DETH,
    N_IMM,
    N_PAUSE,
    N_RETH,
    N_TCP,
    OPCODE,
    PAYLOAD,
    PSN,
    SPORT,
    TABLE_AT,
)
from dpuflow.kernels.layers import P_AT, P_CAPTURED, P_END, P_FRAGMENT, P_SRC_MAC
from dpuflow.schema.rows import AETH, ATOMIC, DETH, IMM, PAUSE, RETH, TCP, BthFlag, Kind, Record, TcpFlag
from dpuflow.wire import headers as wire

_OK = int(Kind.NONE)
_CUT_BTH = int(Kind.CUT_BTH)
_CUT_LINK = int(Kind.CUT_LINK)
_CUT_TRANSPORT = int(Kind.CUT_TRANSPORT)
_MALFORMED_ROCE = int(Kind.MALFORMED_ROCE)
_MALFORMED_TRANSPORT = int(Kind.MALFORMED_TRANSPORT)
_OTHER_ETHERTYPE = int(Kind.OTHER_ETHERTYPE)
_UNSUPPORTED_BTH_VERSION = int(Kind.UNSUPPORTED_BTH_VERSION)
_UNSUPPORTED_OPCODE = int(Kind.UNSUPPORTED_OPCODE)
RARE = 1 << 30  # opcode with headers that the usual packet's path leaves to ``extensions``
UNKNOWN = RARE | 1 << 31
_USUAL = wire.RETH | wire.AETH | wire.IMM | wire.IETH | wire.CNP_PAD
_EXTENSION_CUT = int(BthFlag.EXTENSION_CUT)
_SYN = int(TcpFlag.SYN)


def _row(record: Record, *names: str) -> tuple[int, ...]:
    """Bytes of a sparse row, then where the named fields of the first row lie in the block's bytes."""
    offsets = record.dtype.fields
    assert offsets is not None
    assert set(names) == set(offsets), record.name
    return record.dtype.itemsize, *(TABLE_AT[record.name] + offsets[name][1] for name in names)


RETH_ROW, RETH_PACKET, RETH_VA, RETH_RKEY, RETH_LENGTH = _row(RETH, "packet", "va", "rkey", "dma_len")
AETH_ROW, AETH_PACKET, AETH_SYNDROME, AETH_MSN = _row(AETH, "packet", "syndrome", "msn")
IMM_ROW, IMM_PACKET, IMM_VALUE = _row(IMM, "packet", "value")
_DETH_ROW, _DETH_PACKET, _DETH_QKEY, _DETH_SRC_QP = _row(DETH, "packet", "qkey", "src_qp")
_ATOMIC_ROW, _ATOMIC_PACKET, _ATOMIC_VA, _ATOMIC_RKEY, _ATOMIC_SWAP, _ATOMIC_COMPARE = _row(
    ATOMIC, "packet", "va", "rkey", "swap_add", "compare"
)
_TCP_ROW, _TCP_PACKET, _TCP_SEQ, _TCP_ACK, _TCP_WINDOW, _TCP_FLAGS, _TCP_WSCALE, *_TCP_OPTIONS = _row(
    TCP, "packet", "seq", "ack", "window", "flags", "wscale", "tsval", "tsecr", "sack_left", "sack_right"
)
_TCP_TSVAL, _TCP_TSECR, _TCP_LEFT, _TCP_RIGHT = _TCP_OPTIONS
_PAUSE_ROW, _PAUSE_PACKET, _PAUSE_MAC, _PAUSE_OPCODE, _PAUSE_CLASSES, _PAUSE_QUANTA = _row(
    PAUSE, "packet", "src_mac", "opcode", "classes", "quanta"
)


def _opcode_table() -> np.ndarray:
    """For each opcode: header bits (low 16), their bytes (next 12), RARE; UNKNOWN where there is none."""
    table = np.full(256, UNKNOWN, np.uint32)
    for opcode in wire.OPCODES.values():
        size = sum(n for bit, n in wire.HEADER_BYTES.items() if opcode.headers & bit)
        rare = RARE if opcode.headers & ~_USUAL else 0
        table[opcode.code] = rare | size << 16 | opcode.headers
    return table


OPCODE_TABLE = _opcode_table()


@inlined
def bth_flags(second, fifth, ninth):  # type: ignore[no-untyped-def]
    """BthFlag bits from bytes 1, 4 and 8 of the BTH."""
    return (
        (ninth >> 7)  # AckReq
        | ((fifth >> 5) & 2)  # BECN, bit 6
        | ((fifth >> 5) & 4)  # FECN, bit 7
        | ((second >> 4) & 8)  # solicited, bit 7
        | ((second >> 2) & 16)  # migration, bit 6
        | ((second & 0x30) << 1)  # pad count, bits 5 and 4
    )


@inner
def roce(data, p, i, block):  # type: ignore[no-untyped-def]
    """BTH to the row's columns; a Kind: NONE, or why it was given up. Extensions: ``extensions``."""
    at, end, captured = p[P_AT], p[P_END], p[P_CAPTURED]
    if end - at < wire.BTH_BYTES + wire.ICRC_BYTES:
        return _MALFORMED_ROCE
    if at + wire.BTH_BYTES > captured:
        return _CUT_BTH
    first = be16(data, at)
    if first & 15:
        return _UNSUPPORTED_BTH_VERSION
    entry = np.int64(OPCODE_TABLE[first >> 8])
    if entry == UNKNOWN:
        return _UNSUPPORTED_OPCODE
    extension = (entry >> 16) & 0xFFF
    payload = end - at - wire.BTH_BYTES - extension - ((first >> 4) & 3) - wire.ICRC_BYTES
    if payload < 0:
        return _MALFORMED_ROCE
    third, last = be32(data, at + 4), be32(data, at + 8)
    flags = bth_flags(first & 255, third >> 24, last >> 24)
    start = at + wire.BTH_BYTES + extension
    if start > captured:
        flags |= _EXTENSION_CUT
        start = captured
    put32(block, DEST_QP + 4 * i, third & 0xFFFFFF)
    put32(block, PSN + 4 * i, last & 0xFFFFFF)
    put32(block, PAYLOAD + 4 * i, payload)
    put32(block, DATA_AT + 4 * i, start)
    put16(block, DATA_LEN + 2 * i, min(payload, captured - start, 0xFFFF))
    put8(block, OPCODE + i, first >> 8)
    put8(block, FLAGS + i, flags)
    return _OK


@inner
def extensions(data, at, captured, headers, i, s, block):  # type: ignore[no-untyped-def]
    """Sparse rows of the extended headers after a BTH that ends at ``at``, those captured whole."""
    if headers & wire.RDETH:
        at += 4
    if headers & wire.DETH:
        if at + 8 <= captured:
            row = s[N_DETH] * _DETH_ROW
            s[N_DETH] += 1
            put32(block, _DETH_PACKET + row, i)
            put32(block, _DETH_QKEY + row, be32(data, at))
            put32(block, _DETH_SRC_QP + row, be32(data, at + 4) & 0xFFFFFF)
        at += 8
    if headers & wire.XRCETH:
        at += 4
    if headers & wire.FETH:
        at += 4
    if headers & wire.RETH:
        if at + 16 <= captured:
            row = s[N_RETH] * RETH_ROW
            s[N_RETH] += 1
            put32(block, RETH_PACKET + row, i)
            put64(block, RETH_VA + row, be64(data, at))
            put32(block, RETH_RKEY + row, be32(data, at + 8))
            put32(block, RETH_LENGTH + row, be32(data, at + 12))
        at += 16
    if headers & wire.ATOMIC:
        if at + 28 <= captured:
            row = s[N_ATOMIC] * _ATOMIC_ROW
            s[N_ATOMIC] += 1
            put32(block, _ATOMIC_PACKET + row, i)
            put64(block, _ATOMIC_VA + row, be64(data, at))
            put32(block, _ATOMIC_RKEY + row, be32(data, at + 8))
            put64(block, _ATOMIC_SWAP + row, be64(data, at + 12))
            put64(block, _ATOMIC_COMPARE + row, be64(data, at + 20))
        at += 28
    if headers & wire.AETH:
        if at + 4 <= captured:
            row = s[N_AETH] * AETH_ROW
            s[N_AETH] += 1
            value = be32(data, at)
            put32(block, AETH_PACKET + row, i)
            put32(block, AETH_SYNDROME + row, value >> 24)
            put32(block, AETH_MSN + row, value & 0xFFFFFF)
        at += 4
    if headers & wire.ATOMIC_ACK:
        at += 8
    if headers & (wire.IMM | wire.IETH) and at + 4 <= captured:
        row = s[N_IMM] * IMM_ROW
        s[N_IMM] += 1
        put32(block, IMM_PACKET + row, i)
        put32(block, IMM_VALUE + row, be32(data, at))


@inner
def udp_end(data, p):  # type: ignore[no-untyped-def]
    """Set P_AT and P_END to what a datagram carries; a Kind."""
    at = p[P_AT]
    length = be16(data, at + 4)
    if length == 0:  # jumbogram or segmentation offload: the IP header's length holds
        length = p[P_END] - at
    if length < 8 or (at + length > p[P_END] and p[P_FRAGMENT] == 0):
        return _MALFORMED_TRANSPORT
    p[P_AT] = at + 8
    p[P_END] = at + length
    return _OK


@inner
def tcp(data, p, i, block):  # type: ignore[no-untyped-def]
    """Ports, payload and flags to the row's columns; a Kind."""
    at, end, captured = p[P_AT], p[P_END], p[P_CAPTURED]
    if end - at < 20:
        return _MALFORMED_TRANSPORT
    if at + 20 > captured:
        return _CUT_TRANSPORT
    bits = be16(data, at + 12)
    start = at + (bits >> 12) * 4
    if start < at + 20 or start > end:
        return _MALFORMED_TRANSPORT
    kept = min(start, captured)
    put32(block, PAYLOAD + 4 * i, end - start)
    put32(block, DATA_AT + 4 * i, kept)
    put16(block, DATA_LEN + 2 * i, min(end - start, captured - kept, 0xFFFF))
    put16(block, SPORT + 2 * i, be16(data, at))
    put16(block, DPORT + 2 * i, be16(data, at + 2))
    put8(block, OPCODE + i, bits & 255)
    return _OK


@inner
def tcp_row(data, p, i, s, block):  # type: ignore[no-untyped-def]
    """The sparse row of a TCP header that ``tcp`` has checked; options as far as captured."""
    at, captured = p[P_AT], p[P_CAPTURED]
    row = s[N_TCP] * _TCP_ROW
    s[N_TCP] += 1
    bits = be16(data, at + 12)
    put32(block, _TCP_PACKET + row, i)
    put32(block, _TCP_SEQ + row, be32(data, at + 4))
    put32(block, _TCP_ACK + row, be32(data, at + 8))
    put16(block, _TCP_WINDOW + row, be16(data, at + 14))
    put8(block, _TCP_FLAGS + row, bits & 255)
    tsval, tsecr, left, right, wscale = 0, 0, 0, 0, 255
    stop = min(at + (bits >> 12) * 4, captured)
    at += 20
    while at < stop:
        option = np.int64(data[at])
        if option == 0:
            break
        if option == 1:
            at += 1
            continue
        if at + 2 > stop:
            break
        size = np.int64(data[at + 1])
        if size < 2 or at + size > stop:
            break
        if option == 8 and size == 10:
            tsval, tsecr = be32(data, at + 2), be32(data, at + 6)
        elif option == 5 and size >= 10:
            left, right = be32(data, at + 2), be32(data, at + 6)
        elif option == 3 and size == 3 and bits & _SYN:
            wscale = min(np.int64(data[at + 2]), 14)
        at += size
    put32(block, _TCP_TSVAL + row, tsval)
    put32(block, _TCP_TSECR + row, tsecr)
    put32(block, _TCP_LEFT + row, left)
    put32(block, _TCP_RIGHT + row, right)
    put8(block, _TCP_WSCALE + row, wscale)


@inner
def pause(data, p, i, s, block):  # type: ignore[no-untyped-def]
    """A MAC control frame: a pause row, or a Kind."""
    at, captured = p[P_AT], p[P_CAPTURED]
    if at + 2 > captured:
        return _CUT_LINK
    opcode = be16(data, at)
    if opcode not in (0x0001, 0x0101):
        return _OTHER_ETHERTYPE
    if at + (4 if opcode == 1 else 20) > captured:
        return _CUT_LINK
    row = s[N_PAUSE] * _PAUSE_ROW
    s[N_PAUSE] += 1
    put64(block, _PAUSE_MAC + row, p[P_SRC_MAC])
    put32(block, _PAUSE_PACKET + row, i)
    put16(block, _PAUSE_OPCODE + row, opcode)
    put16(block, _PAUSE_CLASSES + row, 0 if opcode == 1 else be16(data, at + 2) & 255)
    for k in range(8):
        quanta = be16(data, at + 4 + 2 * k) if opcode != 1 else be16(data, at + 2) if k == 0 else 0
        put16(block, _PAUSE_QUANTA + row + 2 * k, quanta)
    return _OK
