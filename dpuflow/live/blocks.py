"""The pcapng blocks around the packets: section, interfaces, statistics. draft-ietf-opsawg-pcapng."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

from dpuflow import __version__
from dpuflow.live.nic import NIC_LOSSES, NIC_NAMES
from dpuflow.schema.ring import COUNTER_NAMES, LOSSES
from dpuflow.wire.headers import LINKTYPE_ETHERNET

if TYPE_CHECKING:
    from dpuflow.live.base import Interface

_SECTION, _INTERFACE, _STATISTICS = 0x0A0D0D0A, 1, 5
_COMMENT: Final = 1


def section_block(comment: str) -> bytes:
    """The section header: what wrote the file, where, and how its clock is to be read."""
    system = os.uname()
    options = [
        (_COMMENT, comment.encode()),
        (2, system.machine.encode()),
        (3, f"{system.sysname} {system.release}".encode()),
        (4, f"dpuflow {__version__}".encode()),
    ]
    return _block(_SECTION, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1), options)


def interface_block(interface: Interface, snaplen: int, filter_text: str) -> bytes:
    """One interface: name, address, filter, nanoseconds."""
    options = [
        (2, interface.name.encode()),
        (6, interface.mac),
        (9, b"\x09"),
        (11, b"\x00" + filter_text.encode()),
        (12, os.uname().sysname.encode()),
    ]
    if interface.clock:
        options.append((_COMMENT, interface.clock.encode()))
    return _block(_INTERFACE, struct.pack("<HHI", LINKTYPE_ETHERNET, 0, snaplen), options)


def statistics_block(
    number: int, now_ns: int, start_ns: int, counters: dict[str, int], delivered: int
) -> bytes:
    """What one interface has seen and lost since the start; every counter by name in the comment.

    ``delivered``: packets written so far, in all files of a rotated capture.
    """
    lost = sum(counters[name] for name in LOSSES)
    named = ", ".join(f"{name} {counters[name]}" for name in (*COUNTER_NAMES, *NIC_NAMES))
    options = [
        (_COMMENT, named.encode()),
        (2, _stamp(start_ns)),
        (3, _stamp(now_ns)),
        (4, struct.pack("<Q", counters["seen"])),
        (5, struct.pack("<Q", sum(counters[name] for name in NIC_LOSSES))),
        (6, struct.pack("<Q", counters["captured"] + lost)),
        (7, struct.pack("<Q", lost)),
        (8, struct.pack("<Q", delivered)),
    ]
    return _block(_STATISTICS, struct.pack("<I", number) + _stamp(now_ns), options)


def _stamp(time_ns: int) -> bytes:
    return struct.pack("<II", time_ns >> 32, time_ns & 0xFFFFFFFF)


def _block(kind: int, body: bytes, options: list[tuple[int, bytes]]) -> bytes:
    """A block with its options, padded, and its length before and after."""
    for code, value in options:
        body += struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)
    body += bytes(4)
    size = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + size + body + size
