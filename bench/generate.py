"""Writes generated traffic to files: classic pcap with nanoseconds, and the same packets as pcapng.

Formats: pcap Internet-Draft section 4 and 5, pcapng Internet-Draft sections 4.1, 4.2 and 4.3.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np
from numba import njit

from bench.traffic import MAX_FRAME, Traffic

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WHOLE: Final = MAX_FRAME  # a snap length that cuts nothing
_CHUNK: Final = 4 << 20


@dataclass(frozen=True)
class Written:
    """What a generated capture holds."""

    packets: int
    messages: int
    bytes: int


@njit(cache=True, nogil=True)
def _to_pcapng(records, size, out):
    """Classic records as enhanced packet blocks of interface 0; returns the bytes written."""
    at = end = 0
    while at < size:
        sec = np.int64(0)
        nsec = np.int64(0)
        kept = np.int64(0)
        for i in range(4):
            sec |= np.int64(records[at + i]) << (8 * i)
            nsec |= np.int64(records[at + 4 + i]) << (8 * i)
            kept |= np.int64(records[at + 8 + i]) << (8 * i)
        t = sec * 1_000_000_000 + nsec
        padded = (kept + 3) & ~3
        length = 32 + padded
        for i in range(4):
            out[end + i] = 6 if i == 0 else 0
            out[end + 4 + i] = (length >> (8 * i)) & 0xFF
            out[end + 8 + i] = 0
            out[end + 12 + i] = (t >> (32 + 8 * i)) & 0xFF
            out[end + 16 + i] = (t >> (8 * i)) & 0xFF
            out[end + 20 + i] = records[at + 8 + i]
            out[end + 24 + i] = records[at + 12 + i]
            out[end + 28 + padded + i] = (length >> (8 * i)) & 0xFF
        out[end + 28 : end + 28 + kept] = records[at + 16 : at + 16 + kept]
        out[end + 28 + kept : end + 28 + padded] = 0
        at += 16 + kept
        end += length
    return end


def _pcap_header(snaplen: int) -> bytes:
    return struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, snaplen, 1)


def _pcapng_header(snaplen: int) -> bytes:
    section = struct.pack("<IIIHHqI", 0x0A0D0D0A, 28, 0x1A2B3C4D, 1, 0, -1, 28)
    nanoseconds = struct.pack("<HHB3xHH", 9, 1, 9, 0, 0)  # if_tsresol 10^-9, end of options
    length = 20 + len(nanoseconds)
    return section + struct.pack("<IIHHI", 1, length, 1, 0, snaplen) + nanoseconds + struct.pack("<I", length)


def write_captures(
    packets: int, *, pcap: Path | None = None, pcapng: Path | None = None, seed: int = 1, snaplen: int = 96
) -> Written:
    """Write the first ``packets`` packets of the job of ``seed``, as either format or both.

    Memory does not depend on ``packets``. ``snaplen``: bytes kept of a packet, ``WHOLE`` for all.
    """
    traffic = Traffic(seed, snaplen)
    records: NDArray[np.uint8] = np.zeros(_CHUNK, np.uint8)
    blocks: NDArray[np.uint8] = np.zeros(_CHUNK * 3 // 2, np.uint8)  # a block of 62 B is 1.23 of a record
    total = 0
    with ExitStack() as stack:
        classic: BinaryIO | None = stack.enter_context(pcap.open("wb")) if pcap else None
        modern: BinaryIO | None = stack.enter_context(pcapng.open("wb")) if pcapng else None
        if classic:
            classic.write(_pcap_header(snaplen))
        if modern:
            modern.write(_pcapng_header(snaplen))
        while size := traffic.write_into(records, packets):
            total += size
            if classic:
                classic.write(records[:size].data)
            if modern:
                modern.write(blocks[: _to_pcapng(records, size, blocks)].data)
    return Written(traffic.packets, traffic.messages, total)
