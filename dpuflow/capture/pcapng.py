"""pcapng: sections, interfaces, statistics and comments. draft-ietf-opsawg-pcapng.

Packets are walked by ``kernels/parse``, which stops at the blocks that this module takes in.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.capture.base import Damage
from dpuflow.kernels import columns as c

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.capture.base import Bytes

SECTION: Final = 0x0A0D0D0A
INTERFACE: Final = 1
STATISTICS: Final = 5
_PACKETS: Final = {2: 12, 6: 12}  # obsolete and enhanced packets -> offset of the stamp
_BYTE_ORDER: Final = 0x1A2B3C4D

_OPTION_COMMENT: Final = 1
_OPTION_RESOLUTION: Final = 9
_OPTION_OFFSET: Final = 14
_OPTION_INTERFACE_DROP: Final = 5
_OPTION_SYSTEM_DROP: Final = 7

MAX_INTERFACES: Final = 65536  # an enhanced packet could name more; a file that does is broken


class Pcapng:
    """State of a pcapng file: byte order and interfaces of the present section, statistics of all."""

    first_record = 0

    def __init__(self) -> None:
        self.form = np.zeros(c.F_SIZE, np.int64)
        self.form[c.F_PCAPNG] = 1
        self.interfaces = np.zeros((8, c.I_SIZE), np.int64)
        self.links: list[int] = []
        self._known_links: set[int] = set()
        self.comments: list[str] = []
        self.version = 0
        self._order = "<"
        self._section = 0
        self._lost: dict[tuple[int, int], int] = {}

    def block(self, data: Bytes, at: int) -> int | None:
        """Take in a section, interface or statistics block."""
        if at + 12 > len(data):
            return None
        order = self._order
        (kind,) = struct.unpack_from(f"{order}I", data.data, at)
        if kind == SECTION:
            order = _order_of(data, at)
        (size,) = struct.unpack_from(f"{order}I", data.data, at + 4)
        smallest = {SECTION: 28, INTERFACE: 20, STATISTICS: 24}.get(kind, 12)
        if size < smallest or size % 4 or size > c.MAX_RECORD:
            raise Damage(c.REASONS[2])
        if at + size > len(data):
            return None
        (again,) = struct.unpack_from(f"{order}I", data.data, at + size - 4)
        if again != size:
            raise Damage(c.REASONS[3])
        body = bytes(data[at + 8 : at + size - 4])
        if kind == SECTION:
            self._new_section(order, body)
        elif kind == INTERFACE:
            self._new_interface(body)
        elif kind == STATISTICS:
            self._statistics(body)
        return at + int(size)

    def lost(self) -> int | None:
        """Sum over interfaces of the last statistics' drop counts."""
        return sum(self._lost.values()) if self._lost else None

    def first_ns(self, head: Bytes) -> int | None:
        """Stamp of the first packet in ``head``, read by a state of its own."""
        state, at = Pcapng(), 0
        try:
            while at + 28 <= len(head):
                order = state._order
                kind, size = struct.unpack_from(f"{order}II", head.data, at)
                if kind in _PACKETS and len(state.links):
                    width = "H" if kind == 2 else "I"
                    (number,) = struct.unpack_from(order + width, head.data, at + 8)
                    if number >= state.form[c.F_INTERFACES]:
                        return None
                    high, low = struct.unpack_from(f"{order}II", head.data, at + _PACKETS[kind])
                    return stamp_ns(int(high) << 32 | int(low), [int(v) for v in state.interfaces[number]])
                following = state.block(head, at) if kind in (SECTION, INTERFACE, STATISTICS) else at + size
                if following is None or following <= at:
                    return None
                at = following
        except Damage:
            pass
        return None

    def _new_section(self, order: str, body: bytes) -> None:
        major, minor = struct.unpack_from(f"{order}HH", body, 4)
        if major != 1:
            raise Damage(f"a section is written in pcapng version {major}.{minor}, which is not known")
        self._order = order
        self._section += 1
        self.form[[c.F_SWAPPED, c.F_INTERFACES]] = order == ">", 0
        self.version += 1
        self._take_comments(body, 16)

    def _new_interface(self, body: bytes) -> None:
        if self._section == 0:
            raise Damage("an interface is described before any section starts")
        number = int(self.form[c.F_INTERFACES])
        if number >= MAX_INTERFACES:
            raise Damage(f"more than {MAX_INTERFACES} interfaces are described")
        if number >= len(self.interfaces):
            self.interfaces = np.concatenate([self.interfaces, np.zeros_like(self.interfaces)])
        link, _, snap = struct.unpack_from(f"{self._order}HHI", body)
        resolution, offset = 6, 0
        for code, value in _options(body, 8, self._order):
            if code == _OPTION_RESOLUTION and len(value) == 1:
                resolution = value[0]
            elif code == _OPTION_OFFSET and len(value) == 8:
                (offset,) = struct.unpack(f"{self._order}q", value)
        if (resolution & 127) > (63 if resolution & 128 else 27):
            raise Damage("an interface's time resolution is finer than any clock's")
        if abs(offset) > 1 << 33:
            raise Damage("an interface's time offset is out of range")
        row = self.interfaces[number]
        row[:] = 0
        row[c.I_LINK], row[c.I_SNAP], row[c.I_OFFSET] = link, snap, offset * 1_000_000_000
        if resolution & 128:
            row[c.I_BITS] = resolution & 127
        elif resolution <= 9:
            row[c.I_MULTIPLY] = 10 ** (9 - resolution)
        else:
            row[c.I_DIVIDE] = 10 ** (resolution - 9)
        self.form[c.F_INTERFACES] = number + 1
        self.version += 1
        if link not in self._known_links:
            self._known_links.add(link)
            self.links.append(link)
        self._take_comments(body, 8)

    def _statistics(self, body: bytes) -> None:
        (number,) = struct.unpack_from(f"{self._order}I", body)
        dropped = [
            struct.unpack(f"{self._order}Q", value)[0]
            for code, value in _options(body, 12, self._order)
            if code in (_OPTION_INTERFACE_DROP, _OPTION_SYSTEM_DROP) and len(value) == 8
        ]
        if dropped:
            self._lost[self._section, number] = sum(dropped)
        self._take_comments(body, 12)

    def _take_comments(self, body: bytes, at: int) -> None:
        for code, value in _options(body, at, self._order):
            if code == _OPTION_COMMENT:
                self.comments.append(text_of(value))


def _order_of(data: Bytes, at: int) -> str:
    """Byte order of the section that starts at ``at``."""
    (magic,) = struct.unpack_from("<I", data.data, at + 8)
    if magic == _BYTE_ORDER:
        return "<"
    if magic == 0x4D3C2B1A:
        return ">"
    raise Damage("a section has no byte-order mark")


def _options(body: bytes, at: int, order: str) -> Iterator[tuple[int, bytes]]:
    """Options from ``at`` on, as far as they are whole."""
    while at + 4 <= len(body):
        code, size = struct.unpack_from(f"{order}HH", body, at)
        if code == 0 or at + 4 + size > len(body):
            return
        yield code, body[at + 4 : at + 4 + size]
        at += 4 + (size + 3) // 4 * 4


def text_of(value: bytes) -> str:
    """A comment; some writers pad it with zeros and worse."""
    return value.split(b"\0", 1)[0].decode("utf-8", "replace")


def stamp_ns(ticks: int, row: list[int]) -> int:
    """Nanoseconds since the epoch; what the kernel does, in whole numbers of any size."""
    if row[c.I_MULTIPLY]:
        return ticks * row[c.I_MULTIPLY] + row[c.I_OFFSET]
    if row[c.I_DIVIDE]:
        return ticks // row[c.I_DIVIDE] + row[c.I_OFFSET]
    return (ticks * 1_000_000_000 >> row[c.I_BITS]) + row[c.I_OFFSET]
