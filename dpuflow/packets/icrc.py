"""The invariant CRC of whole RoCE packets (IBA volume 1 7.8.1, annexes A16.5.1 and A17.3.3).

In: an Ethernet frame with RoCE version 1 or 2. Out: the CRC the frame carries and the one it should
carry. For checking captures and made packets; the readers do not need it, since a snap length
usually cuts it off.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from dpuflow.wire import headers as wire

_LRH: Final = b"\xff" * 8  # stands for the local route header, which RoCE has not
_VLANS: Final = (wire.ETHERTYPE_VLAN, wire.ETHERTYPE_QINQ, wire.ETHERTYPE_QINQ_OLD)
_GRH_NEXT: Final = 0x1B

# Bytes that may change on the way count as ones: offset and mask in each header.
_IPV4_VARIANT: Final = {1: 0xFF, 8: 0xFF, 10: 0xFF, 11: 0xFF}  # TOS, TTL, checksum
_IPV6_VARIANT: Final = {0: 0x0F, 1: 0xFF, 2: 0xFF, 3: 0xFF, 7: 0xFF}  # class, flow label, hop limit
_UDP_VARIANT: Final = {6: 0xFF, 7: 0xFF}  # checksum
_BTH_VARIANT: Final = {4: 0xFF}  # FECN, BECN, reserved


class Icrc(NamedTuple):
    """What the frame carries and what was computed; both as the number ``zlib.crc32`` gives."""

    carried: int
    computed: int

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return self.carried == self.computed


def icrc_of(frame: bytes) -> Icrc | None:
    """The ICRC of an Ethernet frame; None if it is no RoCE packet or not captured whole.

    VLAN tags are allowed; IPv4 options and IPv6 extension headers are not.
    """
    data = bytearray(frame)
    at = 14
    ethertype = _u16(data, 12)
    while ethertype in _VLANS:
        ethertype = _u16(data, at + 2)
        at += 4
    if len(data) < at + 20 + 8 + wire.BTH_BYTES + wire.ICRC_BYTES:
        return None
    if ethertype == wire.ETHERTYPE_IPV4 and data[at] == 0x45:
        end, bth, following = at + _u16(data, at + 2), at + 20, data[at + 9]
        _set(data, at, _IPV4_VARIANT)
    elif ethertype in (wire.ETHERTYPE_IPV6, wire.ETHERTYPE_ROCE_V1):
        end, bth, following = at + 40 + _u16(data, at + 4), at + 40, data[at + 6]
        _set(data, at, _IPV6_VARIANT)
    else:
        return None
    if ethertype != wire.ETHERTYPE_ROCE_V1:
        if following != wire.IPPROTO_UDP or _u16(data, bth + 2) != wire.ROCE_V2_PORT:
            return None
        _set(data, bth, _UDP_VARIANT)
        bth += 8
    elif following != _GRH_NEXT:
        return None
    if end > len(data) or end < bth + wire.BTH_BYTES + wire.ICRC_BYTES:
        return None
    _set(data, bth, _BTH_VARIANT)
    carried = int.from_bytes(data[end - wire.ICRC_BYTES : end], "little")
    return Icrc(carried, zlib.crc32(_LRH + data[at : end - wire.ICRC_BYTES]))


def _u16(data: bytearray, at: int) -> int:
    """Two bytes, big endian; what lies beyond the end counts as nothing."""
    return int.from_bytes(data[at : at + 2], "big")


def _set(data: bytearray, at: int, variant: dict[int, int]) -> None:
    """Set the variant bits of the header at ``at``."""
    for offset, mask in variant.items():
        if at + offset < len(data):
            data[at + offset] |= mask
