"""Headers of UCX and libfabric over TCP: plausible or not, how long, what they say (tables: framing)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpuflow import framing as fm
from dpuflow.kernels._jit import inner, le16, le32, le64
from dpuflow.kernels.tcp_state import KNOWN_ALL, KNOWN_KIND, KNOWN_LENGTH
from dpuflow.schema.rows import MessageFlag, Role, Wire

_MAX_LENGTH = 1 << 40  # longer transfers are implausible
_HIDDEN = int(MessageFlag.HIDDEN)
_UCX_LEAST = np.full(256, fm.UCX_MOST + 1, np.int64)
for _type, _size in fm.UCX_LEAST.items():
    _UCX_LEAST[_type] = _size
_UCX_MAGIC = np.frombuffer(fm.UCX_MAGIC.to_bytes(8, "little"), np.int64)[0]
_DATA, _OFFER, _GRANT = int(Role.DATA), int(Role.OFFER), int(Role.GRANT)
_DONE, _CONTROL = int(Role.DONE), int(Role.CONTROL)
_W_TAGGED, _W_TAGGED_OTHER = int(Wire.TAGGED), int(Wire.TAGGED_OTHER)
_W_TAGGED_DONE = int(Wire.TAGGED_DONE)
_W_BURST, _BURST = int(Wire.TCP_BURST), int(Role.BURST)


@inner
def seen_all(mask: Any, at: Any, count: Any) -> Any:
    """Whether ``mask`` has all of ``count`` bits from ``at`` on."""
    need = ((np.int64(1) << count) - 1) << at
    return mask & need == need


@inner
def _fragments(size: Any, left: Any) -> Any:
    """Bytes on the wire of ``left`` bytes in further UCX fragments of ``size``."""
    data = size - fm.UCX_MIDDLE_BYTES
    return left + (left + data - 1) // data * (fm.UCX_HEADER + fm.UCX_MIDDLE_BYTES)


@inner
def ucx_length(b: Any, at: Any, n: Any, allowed: Any) -> Any:
    """Length of UCX's message at b[at:], all of its fragments; ``allowed`` bytes were asked for last."""
    if n < fm.UCX_HEADER:
        return 0
    if n >= fm.UCX_HELLO and le64(b, at) == _UCX_MAGIC:
        return fm.UCX_HELLO
    kind, size = np.int64(b[at]), le32(b, at + 1)
    if size < _UCX_LEAST[kind] or size > fm.UCX_MOST:
        return -1
    whole = fm.UCX_HEADER + size
    if kind == fm.UCX_PUT:
        if size != _UCX_LEAST[kind]:
            return -1
        if n < fm.UCX_PUT_BYTES + 8:
            return 0
        length = le64(b, at + fm.UCX_PUT_BYTES)
        return whole + length if 0 <= length <= _MAX_LENGTH else -1
    if kind == fm.UCX_FIRST or kind == fm.UCX_SYNC_FIRST:
        if n < fm.UCX_TOTAL + 8:
            return 0
        left = le64(b, at + fm.UCX_TOTAL) - (size - _UCX_LEAST[kind])
        return whole + _fragments(size, left) if 0 < left <= _MAX_LENGTH else -1
    if kind == fm.UCX_DATA:
        if n < fm.UCX_OFFSET + 8:
            return 0
        left = allowed - le64(b, at + fm.UCX_OFFSET) - (size - fm.UCX_MIDDLE_BYTES)
        if 0 < left <= _MAX_LENGTH:
            return whole + _fragments(size, left)
    return whole


@inner
def ofi_length(b: Any, at: Any, n: Any) -> Any:
    """Length of libfabric's message whose first n bytes lie at b[at:]; 0 cannot tell, -1 not one."""
    if n < fm.OFI_BASE:
        return -1 if n > 0 and b[at] != fm.OFI_VERSION else 0
    kind, header = np.int64(b[at + 1]), np.int64(b[at + fm.OFI_HEADER])
    if b[at] != fm.OFI_VERSION or kind > fm.OFI_DATA:
        return -1
    if header == 0:
        length = np.int64(b[at + 2]) << 8 | np.int64(b[at + 3])
        known = kind <= fm.OFI_TAG and length <= fm.OFI_HELLO_MOST and le32(b, at + 4) == 0
        return fm.OFI_HELLO + length if known and le64(b, at + 8) == 0 else -1
    size = le64(b, at + fm.OFI_SIZE)
    if header < fm.OFI_BASE or header % 8 != 0 or size < header or size > _MAX_LENGTH:
        return -1
    return size


@inner
def decode_ucx(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """Fill a MESSAGE row from the bytes of a header in ``mask``; its tag and requests go to ``link``.

    KNOWN_MATCH stands for a tag of its own.
    """
    length = np.int64(row.seq_end) - np.int64(row.seq)
    row.wire, row.role = _W_TAGGED_OTHER, _CONTROL
    link.known = KNOWN_KIND | KNOWN_LENGTH
    if length == fm.UCX_HELLO and le64(b, at) == _UCX_MAGIC:
        return
    kind, size, need = np.int64(b[at]), le32(b, at + 1), np.int64(0)
    if kind == fm.UCX_ONLY or kind == fm.UCX_FIRST or kind == fm.UCX_SYNC_ONLY or kind == fm.UCX_SYNC_FIRST:
        row.wire, row.role = _W_TAGGED, _DATA
        row.bytes = size - _UCX_LEAST[kind]
        if kind == fm.UCX_FIRST or kind == fm.UCX_SYNC_FIRST:
            row.bytes = le64(b, at + fm.UCX_TOTAL)
        need = 8
        link.request, link.known = le64(b, at + fm.UCX_TAG), KNOWN_ALL
    elif kind == fm.UCX_RTS:
        row.wire, row.role, need = _W_TAGGED, _OFFER, 8
        link.request, link.known = le64(b, at + fm.UCX_TAG), KNOWN_ALL
        if seen_all(mask, fm.UCX_RTS_REQUEST, 8):
            link.fragment = le64(b, at + fm.UCX_RTS_REQUEST)
        if seen_all(mask, fm.UCX_RTS_BYTES, 8):
            row.announces = le64(b, at + fm.UCX_RTS_BYTES)
    elif kind == fm.UCX_RTR:
        row.wire, row.role, need = _W_TAGGED, _GRANT, 8
        link.fragment = le64(b, at + fm.UCX_REPLY)
        if seen_all(mask, fm.UCX_RTR_REQUEST, 16):
            link.request = le64(b, at + fm.UCX_RTR_REQUEST)
            link.address = le64(b, at + fm.UCX_RTR_ADDRESS)
        if seen_all(mask, fm.UCX_RTR_BYTES, 8):
            row.announces = le64(b, at + fm.UCX_RTR_BYTES)
    elif kind == fm.UCX_DATA:
        row.wire, row.role = _W_TAGGED, _DATA
        frames = (length + fm.UCX_HEADER + size - 1) // (fm.UCX_HEADER + size)
        row.bytes = length - frames * (fm.UCX_HEADER + fm.UCX_MIDDLE_BYTES)
        link.fragment = le64(b, at + fm.UCX_REPLY)
    elif kind == fm.UCX_MIDDLE:
        # Of a message whose first part was not read: bytes of the same stretch (``hidden_tagged``).
        row.wire, row.role, row.bytes = _W_BURST, _BURST, length
        link.piece = 1
    elif kind == fm.UCX_PUT and length > fm.UCX_HEADER + size:  # an empty one only waits for those before
        row.wire, row.role = _W_TAGGED, _DATA
        row.bytes = le64(b, at + fm.UCX_PUT_BYTES)
        link.address = le64(b, at + fm.UCX_PUT_ADDRESS)
    elif kind == fm.UCX_ATS:
        row.wire, row.role, need = _W_TAGGED_DONE, _DONE, 8
        link.fragment = le64(b, at + fm.UCX_REPLY)
    elif kind == fm.UCX_ATP:  # both sides are done with it, the sender when its puts have been acknowledged
        row.wire, row.role, need = _W_TAGGED_DONE, _DATA, 8
        link.fragment = le64(b, at + fm.UCX_REPLY)
    if need > 0 and not seen_all(mask, fm.UCX_TAG, need):
        link.request, link.fragment, link.address, row.announces = 0, 0, 0, 0
        link.known = KNOWN_KIND
        row.flags |= _HIDDEN


@inner
def decode_ofi(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """As ``decode_ucx`` for a message of libfabric's tcp provider, rxm's headers in it included."""
    length = np.int64(row.seq_end) - np.int64(row.seq)
    row.wire, row.role = _W_TAGGED_OTHER, _CONTROL
    link.known = KNOWN_KIND | KNOWN_LENGTH
    kind, header = np.int64(b[at + 1]), np.int64(b[at + fm.OFI_HEADER])
    if header == 0:
        return
    rank = np.int64(b[at + fm.OFI_FLAGS]) & fm.OFI_SOURCE
    tag = fm.OFI_BASE + 8 * rank
    if kind == fm.OFI_TAG or kind == fm.OFI_RTS:
        row.wire, row.role = _W_TAGGED, _DATA
        row.bytes = length - header
        if kind == fm.OFI_RTS:
            row.role, row.bytes = _OFFER, 0
        if seen_all(mask, fm.OFI_BASE, header - fm.OFI_BASE):
            link.known = KNOWN_ALL
            link.request = le64(b, at + tag)
            link.address = le64(b, at + fm.OFI_BASE) if rank else -1
            link.fragment = np.int64(b[at + fm.OFI_FLAGS]) & fm.OFI_DELIVERED
            if kind == fm.OFI_RTS:
                row.announces = le64(b, at + tag + 8)
        else:
            link.known = KNOWN_KIND
            row.flags |= _HIDDEN
    elif kind == fm.OFI_READ:
        row.wire, row.role = _W_TAGGED, _GRANT
        if seen_all(mask, fm.OFI_READ_BYTES, 8):
            row.announces = le64(b, at + fm.OFI_READ_BYTES)
    elif kind == fm.OFI_CTS:
        row.wire, row.role = _W_TAGGED, _GRANT
    elif kind == fm.OFI_READ_DATA or kind == fm.OFI_WRITE or kind == fm.OFI_DATA:
        row.wire, row.role, row.bytes = _W_TAGGED, _DATA, length - header
    elif b[at + fm.OFI_MARK] == fm.OFI_ACK:
        row.wire, row.role = _W_TAGGED_DONE, _DONE
    else:
        row.wire, row.role, row.bytes = _W_TAGGED, _DATA, length - header
        rxm = (
            header <= fm.HEADER_BYTES // 2 and length >= header + fm.RXM_HEADER and seen_all(mask, header, 2)
        )
        if rxm and b[at + header] == fm.RXM_VERSION and b[at + header + 1] <= fm.RXM_LAST:
            decode_rxm(row, link, b, at + header, mask >> header)


@inner
def decode_rxm(row: Any, link: Any, b: Any, at: Any, mask: Any) -> Any:
    """What rxm's header at b[at:] adds. Its tag lies too far back for 64 bytes."""
    kind = np.int64(b[at + 1])
    if seen_all(mask, fm.RXM_IDENT, 8):
        link.fragment = le64(b, at + fm.RXM_IDENT) + 1  # they begin with 0, which stands for none here
    if kind == fm.RXM_OFFER:
        row.role, row.bytes = _OFFER, 0
        # Six of the eight bytes tell any length below 256 TiB.
        if seen_all(mask, fm.RXM_BYTES, 6):
            row.announces = le32(b, at + fm.RXM_BYTES) | le16(b, at + fm.RXM_BYTES + 4) << 32
    elif kind <= fm.RXM_SEGMENT:
        row.bytes -= fm.RXM_HEADER
    else:
        row.role, row.bytes = _CONTROL, 0
        if kind == fm.RXM_READ:
            row.wire, row.role = _W_TAGGED_DONE, _DONE
        elif kind == fm.RXM_GRANT:
            row.role = _GRANT
