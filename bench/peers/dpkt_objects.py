"""Peer: dpkt's reader and its packet objects; the BTH by hand, as dpkt has no RoCE."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import dpkt

from bench.peers._main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.checksum import Fields

_BTH: Final = struct.Struct(">BB2xII")


def read(path: str) -> Iterator[Fields]:
    """The packets of an Ethernet capture."""
    with open(path, "rb") as file:
        for time, data in dpkt.pcap.Reader(file):
            ip = dpkt.ethernet.Ethernet(data).data
            if (
                not isinstance(ip, dpkt.ip.IP)
                or not isinstance(ip.data, dpkt.udp.UDP)
                or ip.data.dport != 4791
            ):
                continue
            udp = ip.data
            opcode, bits, qp, psn = _BTH.unpack_from(udp.data)
            flags = psn >> 31 | (bits >> 7) << 3 | (bits >> 6 & 1) << 4 | (bits >> 4 & 3) << 5
            src, dst = int.from_bytes(ip.src, "big"), int.from_bytes(ip.dst, "big")
            # dpkt hides the length on the wire: Ethernet adds 14 bytes to IPv4's. Its time is a Decimal.
            yield (int(time * 1_000_000_000), src, dst, udp.sport, udp.dport, ip.len + 14, udp.ulen,
                   ip.tos & 3, opcode, flags, qp & 0xFFFFFF, psn & 0xFFFFFF)  # fmt: skip


if __name__ == "__main__":
    main(read)
