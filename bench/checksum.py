"""One number for the fields of all packets, the same whatever program read them.

Packet i (from 0) adds (2 i + 1) (time + 3 ends + 5 ports + 7 bth + 11 rest) modulo 2^64, where

    time   ns since the epoch
    ends   source IPv4 << 32 | destination IPv4
    ports  UDP source port << 48 | destination port << 32 | length on the wire
    bth    destination QP << 40 | PSN << 16 | opcode << 8 | flags
    rest   ECN << 32 | payload length, without pad and ICRC

and flags are AckReq 1, solicited event 8, MigReq 16, pad count << 5 (tshark 4.0 gives no name to
FECN and BECN). The C peer
adds it up while it reads (about 1 ns a packet); the others only in an untimed pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

MASK: Final = (1 << 64) - 1
FLAGS: Final = 1 | 8 | 16 | 3 << 5

# Bytes between BTH and payload of the opcodes that RC connections and CNPs use.
EXTENDED: Final = {
    0x03: 4, 0x05: 4, 0x06: 16, 0x09: 4, 0x0A: 16, 0x0B: 20, 0x0C: 16, 0x0D: 4, 0x0F: 4,
    0x10: 4, 0x11: 4, 0x12: 12, 0x13: 28, 0x14: 28, 0x16: 4, 0x17: 4, 0x81: 16,
}  # fmt: skip


# time, source and destination IPv4, UDP ports, length on the wire, UDP length, ECN, opcode, flags, QP, PSN
Fields = tuple[int, int, int, int, int, int, int, int, int, int, int, int]


class Checksum:
    """Adds packets up, one by one or a block of columns at a time."""

    def __init__(self) -> None:
        self.packets = 0
        self._sum = 0

    def __str__(self) -> str:
        return f"{self._sum:016x}"

    def add(self, fields: Fields) -> None:
        """Count one packet."""
        time_ns, src, dst, sport, dport, wire_len, udp_len, ecn, opcode, flags, dest_qp, psn = fields
        payload = udp_len - 24 - EXTENDED.get(opcode, 0) - (flags >> 5 & 3)
        value = (
            time_ns
            + 3 * (src << 32 | dst)
            + 5 * (sport << 48 | dport << 32 | wire_len)
            + 7 * (dest_qp << 40 | psn << 16 | opcode << 8 | flags)
            + 11 * (ecn << 32 | payload)
        )
        self._sum = (self._sum + (2 * self.packets + 1) * value) & MASK
        self.packets += 1

    def add_columns(
        self, columns: Mapping[str, NDArray[np.generic]], rows: int, ipv4: NDArray[np.uint64]
    ) -> None:
        """Count the first ``rows`` rows of PACKET columns; ``ipv4``: addresses by ENDPOINT row."""

        def column(name: str) -> NDArray[np.uint64]:
            return columns[name][:rows].astype(np.uint64)

        def shift(values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
            return values << np.uint64(bits)

        ends = shift(ipv4[columns["src"][:rows]], 32) | ipv4[columns["dst"][:rows]]
        ports = shift(column("sport"), 48) | shift(column("dport"), 32) | column("wire_len")
        flags = column("flags") & np.uint64(FLAGS)
        bth = shift(column("dest_qp"), 40) | shift(column("psn"), 16) | shift(column("opcode"), 8) | flags
        rest = shift(column("tos") & np.uint64(3), 32) | column("payload")
        values = column("time_ns") + np.uint64(3) * ends + np.uint64(5) * ports
        values += np.uint64(7) * bth + np.uint64(11) * rest
        weights = np.uint64(2) * np.arange(self.packets, self.packets + rows, dtype=np.uint64) + np.uint64(1)
        self._sum = (self._sum + int((weights * values).sum())) & MASK
        self.packets += rows
