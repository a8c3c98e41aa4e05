"""Peer: scapy's PcapReader with its RoCE layer."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.utils import PcapReader

from bench.peers._main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.checksum import Fields


def _ipv4(text: str) -> int:
    return int.from_bytes(socket.inet_aton(text), "big")


def read(path: str) -> Iterator[Fields]:
    """The packets of a capture."""
    with PcapReader(path) as reader:
        for packet in reader:
            if BTH not in packet:
                continue
            ip, udp, bth = packet[IP], packet[UDP], packet[BTH]
            flags = bth.ackreq | bth.solicited << 3 | bth.migreq << 4 | bth.padcount << 5
            yield (int(packet.time * 1_000_000_000), _ipv4(ip.src), _ipv4(ip.dst), udp.sport, udp.dport,
                   packet.wirelen, udp.len, ip.tos & 3, bth.opcode, flags, bth.dqpn, bth.psn)  # fmt: skip


if __name__ == "__main__":
    main(read)
