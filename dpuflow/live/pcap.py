"""pcapng blocks of a live capture in, records of the older pcap format out, for readers that know no other.

draft-ietf-opsawg-pcap, with stamps in nanoseconds. Names of interfaces, comments and counts of what was lost
have no place in that format.
"""

from __future__ import annotations

import struct
from typing import Final

from dpuflow.errors import OptionError

_SECTION, _INTERFACE, _PACKET = 0x0A0D0D0A, 1, 6
_NANOSECONDS: Final = 0xA1B23C4D
_HEAD: Final = struct.Struct("<IHHiIII")
_RECORD: Final = struct.Struct("<IIII")
_BLOCK: Final = struct.Struct("<II")
_BODY: Final = struct.Struct("<IIIII")


class Pcap:
    """One file's records. All interfaces share its link type."""

    def __init__(self) -> None:
        self._link: int | None = None

    def convert(self, data: memoryview) -> bytes:
        """The records of whole blocks, after the file's head where the first interface is among them.

        Raises OptionError where interfaces have different link types.
        """
        parts: list[bytes | memoryview] = []
        at = 0
        while at < len(data):
            kind, size = _BLOCK.unpack_from(data, at)
            if kind == _PACKET:
                _, high, low, kept, length = _BODY.unpack_from(data, at + 8)
                seconds, rest = divmod(high << 32 | low, 10**9)
                parts += [_RECORD.pack(seconds, rest, kept, length), data[at + 28 : at + 28 + kept]]
            elif kind == _SECTION:
                self._link = None
            elif kind == _INTERFACE:
                link, _, snaplen = struct.unpack_from("<HHI", data, at + 8)
                if self._link is None:
                    parts.append(_HEAD.pack(_NANOSECONDS, 2, 4, 0, 0, snaplen or 1 << 18, link))
                elif link != self._link:
                    raise OptionError("pcap holds one link type: write .pcapng")
                self._link = link
            at += size
        return b"".join(parts)
