"""Transport headers to a block's row and its sparse rows: RoCE, TCP, pause frames.

IBA volume 1 chapter 9 and annexes A16, A17; RFC 9293, 7323, 2018; IEEE 802.3 annex 31B, 802.1Q.
Lengths come from the IP and UDP headers, since the snap length may have cut the packet.
"""

from __future__ import annotations

import numpy as np

from dpuflow import wire
from dpuflow.kernels._jit import be16, be32, be64, inner
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
)
from dpuflow.kernels.layers import P_AT, P_CAPTURED, P_END, P_FRAGMENT, P_SRC_MAC
from dpuflow.schema import BthFlag, Kind, TcpFlag

_OK = int(Kind.NONE)
_CUT_BTH = int(Kind.CUT_BTH)
_CUT_LINK = int(Kind.CUT_LINK)
_CUT_TRANSPORT = int(Kind.CUT_TRANSPORT)
_MALFORMED_ROCE = int(Kind.MALFORMED_ROCE)
_MALFORMED_TRANSPORT = int(Kind.MALFORMED_TRANSPORT)
_OTHER_ETHERTYPE = int(Kind.OTHER_ETHERTYPE)
_UNSUPPORTED_BTH_VERSION = int(Kind.UNSUPPORTED_BTH_VERSION)
_UNSUPPORTED_OPCODE = int(Kind.UNSUPPORTED_OPCODE)
_KNOWN = 1 << 31
_EXTENSION_CUT = int(BthFlag.EXTENSION_CUT)
_SYN = int(TcpFlag.SYN)


def _opcode_table() -> np.ndarray:
    """For each opcode: header bits in the low half, their bytes above, the top bit if it is known."""
    table = np.zeros(256, np.int64)
    for opcode in wire.OPCODES.values():
        size = sum(n for bit, n in wire.HEADER_BYTES.items() if opcode.headers & bit)
        table[opcode.code] = _KNOWN | size << 16 | opcode.headers
    return table


OPCODE_TABLE = _opcode_table()


@inner
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
def roce(data, p, i, words, halves, octets):  # type: ignore[no-untyped-def]
    """BTH to the row's columns; a Kind: NONE, or why it was given up. Extensions: ``extensions``."""
    at, end, captured = p[P_AT], p[P_END], p[P_CAPTURED]
    if end - at < wire.BTH_BYTES + wire.ICRC_BYTES:
        return _MALFORMED_ROCE
    if at + wire.BTH_BYTES > captured:
        return _CUT_BTH
    first = be16(data, at)
    if first & 15:
        return _UNSUPPORTED_BTH_VERSION
    entry = OPCODE_TABLE[first >> 8]
    if entry == 0:
        return _UNSUPPORTED_OPCODE
    extension = (entry >> 16) & 0x7FFF
    payload = end - at - wire.BTH_BYTES - extension - ((first >> 4) & 3) - wire.ICRC_BYTES
    if payload < 0:
        return _MALFORMED_ROCE
    third, last = be32(data, at + 4), be32(data, at + 8)
    flags = bth_flags(first & 255, third >> 24, last >> 24)
    start = at + wire.BTH_BYTES + extension
    if start > captured:
        flags |= _EXTENSION_CUT
        start = captured
    words[DEST_QP, i] = third & 0xFFFFFF
    words[PSN, i] = last & 0xFFFFFF
    words[PAYLOAD, i] = payload
    words[DATA_AT, i] = start
    halves[DATA_LEN, i] = min(payload, captured - start, 0xFFFF)
    octets[OPCODE, i] = first >> 8
    octets[FLAGS, i] = flags
    return _OK


@inner
def extensions(data, at, captured, headers, i, s, reth, aeth, imm, deth, atomic):  # type: ignore[no-untyped-def]
    """Sparse rows of the extended headers after a BTH that ends at ``at``, those captured whole."""
    if headers & wire.RDETH:
        at += 4
    if headers & wire.DETH:
        if at + 8 <= captured:
            n = s[N_DETH]
            s[N_DETH] = n + 1
            deth[n].packet = i
            deth[n].qkey = be32(data, at)
            deth[n].src_qp = be32(data, at + 4) & 0xFFFFFF
        at += 8
    if headers & wire.XRCETH:
        at += 4
    if headers & wire.FETH:
        at += 4
    if headers & wire.RETH:
        if at + 16 <= captured:
            n = s[N_RETH]
            s[N_RETH] = n + 1
            reth[n].packet = i
            reth[n].va = np.uint64(be64(data, at))
            reth[n].rkey = be32(data, at + 8)
            reth[n].dma_len = be32(data, at + 12)
        at += 16
    if headers & wire.ATOMIC:
        if at + 28 <= captured:
            n = s[N_ATOMIC]
            s[N_ATOMIC] = n + 1
            atomic[n].packet = i
            atomic[n].va = np.uint64(be64(data, at))
            atomic[n].rkey = be32(data, at + 8)
            atomic[n].swap_add = np.uint64(be64(data, at + 12))
            atomic[n].compare = np.uint64(be64(data, at + 20))
        at += 28
    if headers & wire.AETH:
        if at + 4 <= captured:
            n = s[N_AETH]
            s[N_AETH] = n + 1
            value = be32(data, at)
            aeth[n].packet = i
            aeth[n].syndrome = value >> 24
            aeth[n].msn = value & 0xFFFFFF
        at += 4
    if headers & wire.ATOMIC_ACK:
        at += 8
    if headers & (wire.IMM | wire.IETH) and at + 4 <= captured:
        n = s[N_IMM]
        s[N_IMM] = n + 1
        imm[n].packet = i
        imm[n].value = be32(data, at)


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
def tcp(data, p, i, words, halves, octets):  # type: ignore[no-untyped-def]
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
    words[PAYLOAD, i] = end - start
    words[DATA_AT, i] = min(start, captured)
    halves[DATA_LEN, i] = min(end - start, captured - min(start, captured), 0xFFFF)
    halves[SPORT, i] = be16(data, at)
    halves[DPORT, i] = be16(data, at + 2)
    octets[OPCODE, i] = bits & 255
    return _OK


@inner
def tcp_row(data, p, i, s, rows):  # type: ignore[no-untyped-def]
    """The sparse row of a TCP header that ``tcp`` has checked; options as far as captured."""
    at, captured = p[P_AT], p[P_CAPTURED]
    n = s[N_TCP]
    s[N_TCP] = n + 1
    bits = be16(data, at + 12)
    row = rows[n]
    row.packet = i
    row.seq = be32(data, at + 4)
    row.ack = be32(data, at + 8)
    row.window = be16(data, at + 14)
    row.flags = bits & 255
    row.wscale = 255
    row.tsval = 0
    row.tsecr = 0
    row.sack_left = 0
    row.sack_right = 0
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
            row.tsval = be32(data, at + 2)
            row.tsecr = be32(data, at + 6)
        elif option == 5 and size >= 10:
            row.sack_left = be32(data, at + 2)
            row.sack_right = be32(data, at + 6)
        elif option == 3 and size == 3 and bits & _SYN:
            row.wscale = min(np.int64(data[at + 2]), 14)
        at += size


@inner
def pause(data, p, i, s, octets, rows):  # type: ignore[no-untyped-def]
    """A MAC control frame: a pause row, or a Kind."""
    at, captured = p[P_AT], p[P_CAPTURED]
    if at + 2 > captured:
        return _CUT_LINK
    opcode = be16(data, at)
    if opcode not in (0x0001, 0x0101):
        return _OTHER_ETHERTYPE
    if at + (4 if opcode == 1 else 20) > captured:
        return _CUT_LINK
    n = s[N_PAUSE]
    s[N_PAUSE] = n + 1
    row = rows[n]
    row.packet = i
    row.src_mac = np.uint64(p[P_SRC_MAC])
    row.opcode = opcode
    if opcode == 1:
        row.classes = 0
        for k in range(8):
            row.quanta[k] = 0
        row.quanta[0] = be16(data, at + 2)
    else:
        row.classes = be16(data, at + 2) & 255
        for k in range(8):
            row.quanta[k] = be16(data, at + 4 + 2 * k)
    return _OK
