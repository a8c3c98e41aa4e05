"""What ``ethtool -S`` shows: a driver's own statistics of an interface, by ioctl (linux/ethtool.h).

In: an interface's name. Out: name -> value; nothing where the driver has none. No privilege is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from typing import Final

_SIOCETHTOOL: Final = 0x8946
_GSTRINGS, _GSTATS, _GSSET_INFO = 0x1B, 0x1D, 0x37
_SS_STATS: Final = 1
_NAME: Final = 32  # ETH_GSTRING_LEN
_SPARE: Final = 8192
"""Room for more statistics than were announced: the kernel fills in what the driver has by then (another
channel has been added, say), however little room the caller said there is."""


class EthtoolStatistics:
    """Reads statistics; names are kept, as drivers have thousands of them and seldom change them."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def read(self, interface: str) -> dict[str, int]:
        """All statistics of ``interface``; empty where it is gone or its driver has none."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
                return self._read(asked, interface)
        except OSError:
            self._names.pop(interface, None)
            return {}

    def _read(self, asked: socket.socket, interface: str) -> dict[str, int]:
        info = _ask(asked, interface, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0))
        _, _, present, count = struct.unpack_from("=IIQI", info)
        if not present or not count:
            return {}
        names = self._names.get(interface)
        if names is None or len(names) != count:
            room = _NAME * (count + _SPARE)
            text = _ask(asked, interface, struct.pack("=III", _GSTRINGS, _SS_STATS, count), room)
            names = self._names[interface] = [
                text[at : at + _NAME].split(b"\0", 1)[0].decode("ascii", "replace")
                for at in range(12, 12 + _NAME * count, _NAME)
            ]
        data = _ask(asked, interface, struct.pack("=II", _GSTATS, count), 8 * (count + _SPARE))
        if struct.unpack_from("=I", data, 4)[0] != count:  # changed in between: next time
            del self._names[interface]
            return {}
        return dict(zip(names, struct.unpack_from(f"={count}Q", data, 8), strict=True))


def _ask(asked: socket.socket, interface: str, request: bytes, room: int = 0) -> bytes:
    buffer = ctypes.create_string_buffer(request, len(request) + room)
    ifreq = struct.pack("16sP16x", interface.encode()[:15], ctypes.addressof(buffer))
    fcntl.ioctl(asked, _SIOCETHTOOL, ifreq)
    return buffer.raw
