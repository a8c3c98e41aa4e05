"""Which interfaces there are to capture from; asked of the kernel, as /sys may show another namespace."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIOCGIFFLAGS, _SIOCGIFHWADDR = 0x8913, 0x8927
_UP, _LOOPBACK = 1, 8  # linux/if.h
_ETHERNET: Final = 1  # ARPHRD_ETHER
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
    """The interfaces named; for "auto" the Ethernet ports that are up.

    Those are the physical ones (on a BlueField its ports alone); where there is none, such as in a network
    namespace, all that are no bridge.
    """
    if "auto" not in named:
        return list(named)
    up = [name for _, name in socket.if_nameindex() if _is_up(name)]
    physical = [name for name in up if os.path.exists(f"/sys/class/net/{name}/device")]
    uplinks = [name for name in physical if _UPLINK.fullmatch(name)]
    return sorted(uplinks or physical or [name for name in up if not _OTHERS.match(name)])


def _is_up(name: str) -> bool:
    """Whether it is Ethernet, up, and not the loopback."""
    request = struct.pack("16s24x", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
            (kind,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFHWADDR, request), 16)
        except OSError:
            return False
    return bool(flags & _UP and not flags & _LOOPBACK and kind == _ETHERNET)
