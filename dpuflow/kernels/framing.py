"""Header bytes of a message -> is it plausible, how long is it, what does it say (tables: framing)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpuflow import framing as fm
from dpuflow.kernels._jit import inner, le16, le32, le64
from dpuflow.kernels.grants import SAMPLED, sample_of
from dpuflow.kernels.tagging import ofi_length, seen_all, ucx_length
from dpuflow.kernels.tcp_state import KNOWN_ALL, KNOWN_KIND, KNOWN_LENGTH, KNOWN_MATCH
from dpuflow.schema.rows import Framing, MessageFlag, Op, Role, Wire

_GLOO, _OB1, _NCCL = int(Framing.GLOO), int(Framing.OB1), int(Framing.NCCL)
_UCX, _OFI = int(Framing.UCX), int(Framing.OFI)
_MAX_LENGTH = 1 << 40  # longer transfers are implausible
_MAX_RANK = 1 << 24
_MAX_DESCRIPTORS = 64
_HIDDEN = int(MessageFlag.HIDDEN)

_MAGIC = np.frombuffer(fm.OB1_MAGIC, np.uint8).copy()
_OB1_BYTES = np.zeros(256, np.int64)
for _type, _size in fm.OB1_BYTES.items():
    _OB1_BYTES[_type] = _size
_PREFIX_OP = np.full(256, int(Op.UNKNOWN), np.uint8)
for _prefix, _op in fm.GLOO_PREFIX.items():
    _PREFIX_OP[_prefix] = int(_op)
_TAG_OP = np.full(64, int(Op.UNKNOWN), np.uint8)  # by -tag
for _tag, _op in fm.MPI_TAG.items():
    _TAG_OP[-_tag] = int(_op)
_SEND_RECV = int(Op.SEND_RECV)

_DATA, _OFFER, _GRANT = int(Role.DATA), int(Role.OFFER), int(Role.GRANT)
_DONE, _CONTROL = int(Role.DONE), int(Role.CONTROL)
_W_GLOO_HELLO, _W_GLOO_DATA = int(Wire.GLOO_HELLO), int(Wire.GLOO_DATA)
_W_SEND_READY, _W_RECV_READY = int(Wire.GLOO_SEND_READY), int(Wire.GLOO_RECV_READY)
_W_OB1_HELLO, _W_MATCH, _W_RNDV = int(Wire.OB1_HELLO), int(Wire.OB1_MATCH), int(Wire.OB1_RNDV)
_W_PUT_REQUEST, _W_PUT, _W_FIN = int(Wire.OB1_PUT_REQUEST), int(Wire.OB1_PUT), int(Wire.OB1_FIN)
_W_OTHER = int(Wire.OB1_OTHER)
_W_NCCL_HELLO, _W_NCCL_DATA = int(Wire.NCCL_HELLO), int(Wire.NCCL_DATA)
_NCCL_MAGIC = np.int64(fm.NCCL_MAGIC)


@inner
def i32(b: Any, at: Any) -> Any:
    v = le32(b, at)
    return v - (np.int64(1) << 32) if v >> 31 else v


@inner
def gloo_length(b: Any, at: Any, n: Any) -> Any:
    """Length of the Gloo message whose first n bytes lie at b[at:]; 0 cannot tell, -1 not one."""
    if n < 8:
        return 0
    nbytes = le64(b, at)
    if nbytes < fm.GLOO_PREAMBLE or nbytes > _MAX_LENGTH:
        return -1
    if n < 16:
        if n > 8 and b[at + 8] > fm.GLOO_NOTIFY_RECV:
            return -1
        return nbytes
    opcode = le64(b, at + fm.GLOO_OPCODE)
    if opcode < 0 or opcode > fm.GLOO_NOTIFY_RECV:
        return -1
    ready = opcode >= fm.GLOO_NOTIFY_SEND
    if ready and nbytes != fm.GLOO_PREAMBLE:
        return -1
    if n >= fm.GLOO_LENGTH + 8:
        length = le64(b, at + fm.GLOO_LENGTH)
        if length < 0 or length > _MAX_LENGTH or (not ready and length != nbytes - fm.GLOO_PREAMBLE):
            return -1
    return nbytes


@inner
def ob1_is_hello(b: Any, at: Any, n: Any) -> Any:
    """True if the n bytes at b[at:] show the text of a BTL hello."""
    if n < fm.OB1_MAGIC_AT + len(_MAGIC):
        return False
    same = 0
    for i in range(len(_MAGIC)):
        same += b[at + fm.OB1_MAGIC_AT + i] == _MAGIC[i]
    return same == len(_MAGIC)


@inner
def ob1_length(b: Any, at: Any, n: Any) -> Any:
    """Length of the BTL frame whose first n bytes lie at b[at:]; 0 cannot tell, -1 not one."""
    if n < fm.BTL_HEADER:
        return 0
    if ob1_is_hello(b, at, n):
        return fm.OB1_HELLO
    tag, kind, count, size = np.int64(b[at]), np.int64(b[at + 1]), le16(b, at + 2), le32(b, at + 4)
    if tag == fm.BTL_TAG_PUT:
        if kind != fm.BTL_PUT or count < 1 or count > _MAX_DESCRIPTORS or size < 1:
            return -1
        if n >= 24:
            length = le64(b, at + fm.BTL_PUT_LENGTH)
            if length < 0 or length > size or (count == 1 and length != size):
                return -1
        return fm.BTL_HEADER + fm.BTL_DESCRIPTOR * count + size
    if tag < fm.OB1_MATCH or tag > fm.OB1_LAST or kind != fm.BTL_SEND or count != 0:
        return -1
    if size < _OB1_BYTES[tag] or size >> 31:
        return -1
    if n > fm.BTL_HEADER and b[at + fm.BTL_HEADER] != tag:
        return -1
    if tag <= fm.OB1_RGET and n >= fm.OB1_SOURCE + 4 and not 0 <= i32(b, at + fm.OB1_SOURCE) < _MAX_RANK:
        return -1
    return fm.BTL_HEADER + size


@inner
def nccl_length(b: Any, at: Any, n: Any) -> Any:
    """Length of NCCL's message whose first n bytes lie at b[at:]; 0 cannot tell, -1 not one."""
    if n < fm.NCCL_SIZE:
        return 0
    size = le32(b, at)
    if size == _NCCL_MAGIC & 0xFFFFFFFF:
        if n < 12:
            return 0
        hello = le64(b, at) == _NCCL_MAGIC and le32(b, at + 8) == fm.NCCL_TYPE
        return fm.NCCL_HELLO if hello else -1
    return fm.NCCL_SIZE + size if size <= fm.NCCL_MOST else -1


@inner
def header_length(framing: Any, b: Any, at: Any, n: Any, allowed: Any) -> Any:
    """Whole length of the message at b[at:] of which n bytes were seen; 0 cannot tell, -1 not one."""
    if framing == _GLOO:
        return gloo_length(b, at, n)
    if framing == _NCCL:
        return nccl_length(b, at, n)
    if framing == _UCX:
        return ucx_length(b, at, n, allowed)
    if framing == _OFI:
        return ofi_length(b, at, n)
    return ob1_length(b, at, n)


@inner
def recognise(b: Any, at: Any, n: Any, left: Any) -> Any:
    """Framing whose header the n bytes at b[at:] show beyond doubt enough to try it, else 0.

    ``left`` bytes of the segment begin there. NCCL writes a message's size by itself, and its magic number.
    """
    if n >= 8 and le64(b, at) == _NCCL_MAGIC:
        return _NCCL
    if n >= fm.NCCL_SIZE and (left == fm.NCCL_SIZE or left == fm.NCCL_HELLO) and nccl_length(b, at, n) > 0:
        return _NCCL
    if n >= 16 and gloo_length(b, at, n) > 0:
        # A length of 2**32 and more or an unseen one of DATA is too weak a sign.
        opcode = np.int64(b[at + fm.GLOO_OPCODE])
        if opcode >= fm.GLOO_NOTIFY_SEND or (n >= 40 and opcode == fm.GLOO_SEND_UNBOUND):
            return _GLOO
        if opcode == fm.GLOO_SEND_UNBOUND and le64(b, at) >> 32 == 0 and (n < 24 or b[at + 23] <= 8):
            return _GLOO
    enough = fm.BTL_HEADER + (2 if n == 0 or np.int64(b[at]) != fm.BTL_TAG_PUT else fm.BTL_DESCRIPTOR)
    if n >= enough and ob1_length(b, at, n) > 0:
        return _OB1
    if n >= fm.OFI_BASE and ofi_length(b, at, n) > 0:
        return _OFI
    # UCX's five bytes are a weak sign: a message that ends within its segment ends it, or a header follows.
    length = ucx_length(b, at, n, 0)
    if length > 0 and (length >= left or (length < n and ucx_length(b, at + length, n - length, 0) >= 0)):
        return _UCX
    return 0


@inner
def decode_gloo(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """Fill a MESSAGE row and its link from a preamble of which the bytes in ``mask`` were seen."""
    length = np.int64(row.seq_end) - np.int64(row.seq)
    if length == fm.GLOO_HELLO:
        row.wire, row.role = _W_GLOO_HELLO, _CONTROL
        row.sub = le32(b, at)
        link.known = KNOWN_ALL
        return
    known = 0
    opcode = np.int64(-1)
    if seen_all(mask, fm.GLOO_OPCODE, 1):
        opcode = np.int64(b[at + fm.GLOO_OPCODE])
    elif length > fm.GLOO_PREAMBLE:
        opcode = fm.GLOO_SEND_UNBOUND
    row.wire = 0
    row.role = _CONTROL
    if opcode >= 0:
        known |= KNOWN_KIND
        if opcode == fm.GLOO_NOTIFY_SEND:
            row.wire, row.role = _W_SEND_READY, _OFFER
        elif opcode == fm.GLOO_NOTIFY_RECV:
            row.wire, row.role = _W_RECV_READY, _GRANT
        else:
            row.wire, row.role = _W_GLOO_DATA, _DATA
            row.bytes = length - fm.GLOO_PREAMBLE
            known |= KNOWN_LENGTH
    if seen_all(mask, fm.GLOO_SLOT, 8):
        known |= KNOWN_MATCH
        slot = le64(b, at + fm.GLOO_SLOT)
        row.tag = slot >> 24 & 0xFFFFFFFF
        row.sub = slot & 0xFFFFFF
        row.op = _PREFIX_OP[slot >> 56 & 0xFF]
    if opcode >= fm.GLOO_NOTIFY_SEND and seen_all(mask, fm.GLOO_LENGTH, 8):
        known |= KNOWN_LENGTH
        row.announces = le64(b, at + fm.GLOO_LENGTH)
    link.known = known
    if known != KNOWN_ALL:
        row.flags |= _HIDDEN


@inner
def decode_nccl(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """As ``decode_gloo`` for a message of NCCL's sockets; ``sub`` tells what it carries, as over RoCE."""
    length = np.int64(row.seq_end) - np.int64(row.seq)
    link.known = KNOWN_ALL
    if length == fm.NCCL_HELLO and le32(b, at) == _NCCL_MAGIC & 0xFFFFFFFF:
        row.wire, row.role = _W_NCCL_HELLO, _CONTROL
        return
    row.wire, row.role, row.bytes = _W_NCCL_DATA, _DATA, length - fm.NCCL_SIZE
    if row.bytes >= SAMPLED and seen_all(mask, fm.NCCL_SIZE, SAMPLED):
        row.sub = sample_of(b, at + fm.NCCL_SIZE)


@inner
def decode_ob1(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """As ``decode_gloo`` for a BTL frame; requests and addresses go to ``link`` for the matching."""
    length = np.int64(row.seq_end) - np.int64(row.seq)
    tag = np.int64(b[at])
    if length == fm.OB1_HELLO and ob1_is_hello(b, at, 20):
        row.wire, row.role = _W_OB1_HELLO, _CONTROL
        row.sub = le32(b, at + 4)
        link.known = KNOWN_ALL
        return
    known = KNOWN_KIND
    if tag == fm.BTL_TAG_PUT:
        row.wire, row.role = _W_PUT, _DATA
        row.bytes = le32(b, at + 4)
        if seen_all(mask, fm.BTL_PUT_ADDRESS, 8):
            link.address = le64(b, at + fm.BTL_PUT_ADDRESS)
            known |= KNOWN_LENGTH
    elif tag <= fm.OB1_RGET:
        row.wire = _W_MATCH if tag == fm.OB1_MATCH else _W_RNDV if tag == fm.OB1_RNDV else _W_OTHER
        row.role = _DATA if tag == fm.OB1_MATCH else _OFFER
        if tag != fm.OB1_RGET:
            row.bytes = le32(b, at + 4) - _OB1_BYTES[tag]
        if seen_all(mask, fm.OB1_CONTEXT, 12):
            known |= KNOWN_MATCH
            mpi_tag = i32(b, at + fm.OB1_TAG)
            row.context = le16(b, at + fm.OB1_CONTEXT)
            row.tag = mpi_tag & 0xFFFFFFFF
            row.sub = le16(b, at + fm.OB1_SEQ)
            if mpi_tag >= 0:
                row.op = _SEND_RECV
            elif mpi_tag > -64:
                row.op = _TAG_OP[-mpi_tag]
        if tag == fm.OB1_MATCH:
            known |= KNOWN_LENGTH
        elif seen_all(mask, fm.OB1_LENGTH, 16):
            known |= KNOWN_LENGTH
            row.announces = le64(b, at + fm.OB1_LENGTH)
            link.request = le64(b, at + fm.OB1_REQUEST)
    elif tag == fm.OB1_PUT:
        row.wire, row.role = _W_PUT_REQUEST, _GRANT
        if seen_all(mask, fm.OB1_ACK_REQUEST, 8):
            link.request = le64(b, at + fm.OB1_ACK_REQUEST)
            known |= KNOWN_LENGTH
        if seen_all(mask, fm.OB1_PUT_FRAGMENT, 8):
            link.fragment = le64(b, at + fm.OB1_PUT_FRAGMENT)
        if seen_all(mask, fm.OB1_PUT_ADDRESS, 8):
            link.address = le64(b, at + fm.OB1_PUT_ADDRESS)
        # Six of the eight bytes tell any length below 256 TiB.
        if seen_all(mask, fm.OB1_PUT_LENGTH, 6):
            row.announces = le32(b, at + fm.OB1_PUT_LENGTH) | le16(b, at + fm.OB1_PUT_LENGTH + 4) << 32
    elif tag == fm.OB1_FIN:
        row.wire, row.role = _W_FIN, _DONE
        if seen_all(mask, fm.OB1_FIN_FRAGMENT, 8):
            link.fragment = le64(b, at + fm.OB1_FIN_FRAGMENT)
            known |= KNOWN_LENGTH
    else:
        row.wire = _W_OTHER
        row.role = _GRANT if tag == fm.OB1_ACK else _DATA if tag == fm.OB1_FRAG else _CONTROL
        at_request = fm.OB1_FRAG_REQUEST if tag == fm.OB1_FRAG else fm.OB1_ACK_REQUEST
        if tag == fm.OB1_FRAG:
            row.bytes = le32(b, at + 4) - _OB1_BYTES[tag]
        if tag != fm.OB1_ACK and tag != fm.OB1_FRAG:
            known |= KNOWN_LENGTH
        elif seen_all(mask, at_request, 8):
            link.request = le64(b, at + at_request)
            known |= KNOWN_LENGTH
    # Rendezvous parts other than the first carry no match of their own: inherited at the end.
    link.known = known
    if known & KNOWN_LENGTH == 0 or (tag <= fm.OB1_RGET and tag != fm.BTL_TAG_PUT and known != KNOWN_ALL):
        row.flags |= _HIDDEN
