"""The invariant CRC of whole RoCE packets (IBA volume 1 7.8.1, annexes A16.5.1 and A17.3.3).

In: an Ethernet frame with RoCE version 1 or 2. Out: the CRC the frame carries and the one it should
carry. For checking captures and made packets; the readers do not need it, since a snap length
usually cuts it off.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow import wire

if TYPE_CHECKING:
    from collections.abc import Buffer

_LRH: Final = b"\xff" * 8  # stands for the local route header, which RoCE has not
_VLANS: Final = (wire.ETHERTYPE_VLAN, wire.ETHERTYPE_QINQ, wire.ETHERTYPE_QINQ_OLD)

# Bytes that may change on the way count as ones: offsets in each header.
_IPV4_VARIANT: Final = (1, 8, 10, 11)  # TOS, TTL, checksum
_UDP_VARIANT: Final = (6, 7)  # checksum
_BTH_VARIANT: Final = (4,)  # FECN, BECN, reserved


class Icrc(NamedTuple):
    """What the frame carries and what was computed; both as the number ``zlib.crc32`` gives."""

    carried: int
    computed: int

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return self.carried == self.computed


def icrc_of(frame: Buffer) -> Icrc | None:
    """The ICRC of an Ethernet frame; None if it is no RoCE packet or not captured whole.

    VLAN tags are allowed; IPv4 options and IPv6 extension headers are not.
    """
    data = bytes(frame)
    at, ethertype = 14, int.from_bytes(data[12:14], "big")
    while ethertype in _VLANS:
        at, ethertype = at + 4, int.from_bytes(data[at + 2 : at + 4], "big")
    masked = bytearray(data)
    if ethertype == wire.ETHERTYPE_IPV4 and data[at : at + 1] == b"\x45" and data[at + 9 : at + 10] == b"\x11":
        for offset in _IPV4_VARIANT:
            _set(masked, at + offset)
        end = at + int.from_bytes(data[at + 2 : at + 4], "big")
        transport = at + 20
    elif ethertype == wire.ETHERTYPE_IPV6 and data[at + 6 : at + 7] == b"\x11":
        _mask_ipv6(masked, at)
        end = at + 40 + int.from_bytes(data[at + 4 : at + 6], "big")
        transport = at + 40
    elif ethertype == wire.ETHERTYPE_ROCE_V1 and data[at + 6 : at + 7] == b"\x1b":
        _mask_ipv6(masked, at)
        end = at + 40 + int.from_bytes(data[at + 4 : at + 6], "big")
        transport = at + 40
    else:
        return None
    bth = transport
    if ethertype != wire.ETHERTYPE_ROCE_V1:
        if int.from_bytes(data[transport + 2 : transport + 4], "big") != wire.ROCE_V2_PORT:
            return None
        for offset in _UDP_VARIANT:
            _set(masked, transport + offset)
        bth = transport + 8
    if end > len(data) or end < bth + wire.BTH_BYTES + wire.ICRC_BYTES:
        return None
    for offset in _BTH_VARIANT:
        _set(masked, bth + offset)
    carried = int.from_bytes(data[end - wire.ICRC_BYTES : end], "little")
    return Icrc(carried, zlib.crc32(_LRH + masked[at : end - wire.ICRC_BYTES]))


def _set(data: bytearray, at: int) -> None:
    if at < len(data):
        data[at] = 0xFF


def _mask_ipv6(data: bytearray, at: int) -> None:
    """Traffic class, flow label and hop limit; the version stays."""
    if at < len(data):
        data[at] |= 0x0F
    for offset in (1, 2, 3, 7):
        _set(data, at + offset)
