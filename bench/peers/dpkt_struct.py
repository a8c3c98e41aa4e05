"""Peer: dpkt's reader, headers taken apart with ``struct``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import dpkt

from bench.peers._main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.checksum import Fields

_IP_UDP_BTH: Final = struct.Struct(">xB H 5x B 2x II HHH 2x BB 2x I I")  # from the IPv4 header on


def read(path: str) -> Iterator[Fields]:
    """The packets of an Ethernet capture of IPv4 without options."""
    with open(path, "rb") as file:
        for time, data in dpkt.pcap.Reader(file):
            tos, ip_len, protocol, src, dst, sport, dport, udp_len, opcode, bits, qp, psn = (
                _IP_UDP_BTH.unpack_from(data, 14)
            )
            if protocol != 17 or dport != 4791:
                continue
            flags = psn >> 31 | (bits >> 7) << 3 | (bits >> 6 & 1) << 4 | (bits >> 4 & 3) << 5
            # dpkt hides the length on the wire: Ethernet adds 14 bytes to IPv4's. Its time is a Decimal.
            yield (int(time * 1_000_000_000), src, dst, sport, dport, ip_len + 14, udp_len, tos & 3,
                   opcode, flags, qp & 0xFFFFFF, psn & 0xFFFFFF)  # fmt: skip


if __name__ == "__main__":
    main(read)
