"""Which interfaces there are to capture from; asked of the kernel, as /sys may show another namespace.

All are listed once; after that the kernel tells of each change (rtnetlink(7), RTMGRP_LINK), so that a host of
ten thousand containers costs nothing for as long as none comes or goes.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_GROUP_LINK: Final = 1  # RTMGRP_LINK
_DONE, _NEWLINK, _DELLINK, _GETLINK = 3, 16, 17, 18  # linux/netlink.h, linux/rtnetlink.h
_DUMP: Final = 0x301  # NLM_F_REQUEST, NLM_F_DUMP
_NAME, _MASK = 3, 29  # IFLA_IFNAME, IFLA_EXT_MASK
_NO_STATISTICS: Final = 8  # RTEXT_FILTER_SKIP_STATS
_UP, _LOOPBACK = 1, 8  # linux/if.h
_ETHERNET: Final = 1  # ARPHRD_ETHER
_HEADS: Final = 32  # nlmsghdr and ifinfomsg
_PCI: Final = re.compile(r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_UPLINK: Final = re.compile(r"p\d+")
"""On a BlueField p0 and p1 are the ports; the others represent the host's functions, and show their packets
a second time."""
_OTHERS: Final = re.compile(r"(docker|br-|virbr|cni|flannel|cali|dummy|ifb|bond_slave)")


def present(name: str) -> bool:
    """Whether there is an interface of that name now; a card named by its PCI address always is."""
    if _PCI.fullmatch(name):
        return True
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def wanted(named: Sequence[str]) -> list[str]:
    """The interfaces named; for "auto" the Ethernet ports that are up now."""
    with Links() as links:
        return links.wanted(named)


class Links:
    """The interfaces of this network namespace, followed from the first question on until ``close``."""

    def __init__(self) -> None:
        self.told = 0
        """Interfaces that the kernel has told of, one that changed counted anew."""
        self._socket: socket.socket | None = None
        self._up: dict[int, str] = {}  # Ethernet interfaces that are up, by index
        self._physical: list[str] | None = None  # those of them that are ports; None: to be looked at

    def wanted(self, named: Sequence[str]) -> list[str]:
        """The interfaces named; for "auto" the Ethernet ports that are up.

        Those are the physical ones (on a BlueField its ports alone); where there is none, such as in a
        network namespace, all that are no bridge.
        """
        if "auto" not in named:
            return list(named)
        self._follow()
        if self._physical is None:
            up = sorted(self._up.values())
            physical = [name for name in up if os.path.exists(f"/sys/class/net/{name}/device")]
            uplinks = [name for name in physical if _UPLINK.fullmatch(name)]
            self._physical = uplinks or physical or [name for name in up if not _OTHERS.match(name)]
        return list(self._physical)

    def close(self) -> None:
        """Follow them no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        """What has changed since the last time; all of it the first time, and where notices were lost."""
        if self._socket is None:
            self._socket = self._listed()
        while True:
            try:
                part = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: more changed at a time than there was room for
                self.close()
                self._socket = self._listed()
                return
            self._take(part)

    def _listed(self) -> socket.socket:
        """A socket that hears of changes, all that is there having been read from it. Raises OSError."""
        self._up, self._physical = {}, None
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        try:
            made.bind((0, _GROUP_LINK))
            attribute = struct.pack("=HHI", 8, _MASK, _NO_STATISTICS)
            head = struct.pack("=IHHII", _HEADS + len(attribute), _GETLINK, _DUMP, 1, 0)
            made.send(head + bytes(16) + attribute)
            while not self._take(made.recv(1 << 16)):
                pass
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made

    def _take(self, part: bytes) -> bool:
        """Messages of one read; whether the list has ended with it."""
        at = 0
        while at + 16 <= len(part):
            length, kind = struct.unpack_from("=IH", part, at)
            if kind == _DONE or length < 16:
                return True
            if kind in (_NEWLINK, _DELLINK) and length >= _HEADS:
                self._note(part[at : at + length], gone=kind == _DELLINK)
            at += length + 3 & ~3
        return False

    def _note(self, message: bytes, gone: bool) -> None:
        """One interface as it is now."""
        self.told += 1
        family, hardware, index, flags = struct.unpack_from("=BxHiI", message, 16)
        if family != socket.AF_UNSPEC:
            return  # of a bridge's port
        before = self._up.pop(index, None)
        if not gone and hardware == _ETHERNET and flags & _UP and not flags & _LOOPBACK:
            self._up[index] = _name_in(message)
        if self._up.get(index) != before:
            self._physical = None


def _name_in(message: bytes) -> str:
    """The attribute IFLA_IFNAME."""
    at = _HEADS
    while at + 4 <= len(message):
        size, code = struct.unpack_from("=HH", message, at)
        if code == _NAME:
            return message[at + 4 : at + size].rstrip(b"\0").decode("utf-8", "surrogateescape")
        at += max(size + 3 & ~3, 4)
    return ""
