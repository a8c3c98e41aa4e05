"""What the NIC and its driver say they have dropped: packets that no program on the interface gets to see.

In: an interface's index. Out: counters of rtnl_link_stats64 (linux/if_link.h), the same as in
/sys/class/net/IF/statistics, but asked for by rtnetlink(7), as /sys may show another network namespace.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from dpuflow.errors import DpuflowError, MissingError

_GETLINK, _NEWLINK, _ERROR = 18, 16, 2
_REQUEST: Final = 1
_STATS64: Final = 23  # IFLA_STATS64
_ANSWER: Final = 1 << 16
_SOL_PACKET, _ADD_MEMBERSHIP, _PROMISCUOUS = 263, 1, 1

_PLACES: Final = {
    "rx_errors": 4,
    "rx_dropped": 6,
    "rx_crc_errors": 12,
    "rx_fifo_errors": 14,
    "rx_missed_errors": 15,
}
"""Places in rtnl_link_stats64, in 64-bit words."""

NIC_NAMES: Final = tuple(_PLACES)

NIC_LOSSES: Final = ("rx_missed_errors", "rx_fifo_errors")
"""Packets that never reached the host, and so are in no capture of it (libpcap counts the same two).
``rx_dropped`` is none of them: the kernel also counts there what nobody wanted after it was captured."""


def read_nic(index: int) -> dict[str, int] | None:
    """The counters named in NIC_NAMES since the driver was loaded; None where the interface is gone."""
    header = struct.pack("=IHHII", 32, _GETLINK, _REQUEST, 1, 0)
    request = header + struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as asked:
            asked.send(request)
            answer = asked.recv(_ANSWER)
    except OSError:
        return None
    length, kind = struct.unpack_from("=IH", answer)
    if kind != _NEWLINK:
        return None
    at = 32  # behind nlmsghdr and ifinfomsg
    while at + 4 <= length:
        size, code = struct.unpack_from("=HH", answer, at)
        if code == _STATS64:
            words = struct.unpack_from(f"={(size - 4) // 8}Q", answer, at + 4)
            return {name: words[place] for name, place in _PLACES.items()}
        at += max(size + 3 & ~3, 4)
    return None


def take_all(index: int, name: str) -> socket.socket:
    """Have the NIC hand over packets addressed to others, too, as long as the socket is open (packet(7)).

    The kernel counts who wants that, and forgets those that have died. Raises MissingError, DpuflowError.
    """
    try:
        held = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except PermissionError:
        raise MissingError(f"{name}: --promiscuous needs CAP_NET_RAW, or root") from None
    try:
        held.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, struct.pack("=iHH8s", index, _PROMISCUOUS, 0, b""))
    except OSError as error:
        held.close()
        raise DpuflowError(f"{name}: cannot be made promiscuous ({error.strerror})") from None
    return held


class NicCounters:
    """How the counters of some interfaces have grown since this was made."""

    def __init__(self, indexes: list[int]) -> None:
        self._indexes = indexes
        zero = dict.fromkeys(NIC_NAMES, 0)
        self._start = [read_nic(index) or zero for index in indexes]
        self._last = [dict(start) for start in self._start]

    def grown(self) -> list[dict[str, int]]:
        """For each interface; what was said last where it has gone since, never below 0."""
        for number, index in enumerate(self._indexes):
            self._last[number] = read_nic(index) or self._last[number]
        return [
            {name: max(last[name] - start[name], 0) for name in NIC_NAMES}
            for last, start in zip(self._last, self._start, strict=True)
        ]
