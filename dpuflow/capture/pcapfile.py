"""Opening capture files: which format by magic number, plain or compressed, and classic pcap's header.

draft-ietf-opsawg-pcap. The record walk itself is ``kernels/parse``.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import numpy as np

from dpuflow.capture.base import WINDOW, CaptureFile
from dpuflow.capture.compressed import GZIP, gunzip, is_zstd, plain, unzstd
from dpuflow.capture.pcapng import Pcapng
from dpuflow.capture.streams import Mapped, Streamed
from dpuflow.errors import CaptureError, DpuflowError, FormatError
from dpuflow.kernels import columns as c

if TYPE_CHECKING:
    from dpuflow.capture.base import Bytes, ByteSource

HEADER_BYTES: Final = 24

# Magic number, read little endian -> (big endian, ns a tick, bytes of a record header).
_PCAP: Final = {
    0xA1B2C3D4: (False, 1000, 16),
    0xD4C3B2A1: (True, 1000, 16),
    0xA1B23C4D: (False, 1, 16),
    0x4D3CB2A1: (True, 1, 16),
    0xA1B2CD34: (False, 1000, 24),  # Kuznetzov's variant: 8 more bytes a record
    0x34CDB2A1: (True, 1000, 24),
}
_PCAPNG: Final = 0x0A0D0D0A

_REFUSED: Final = {
    b"snoop\0\0\0": "a Solaris snoop file",
    b"btsnoop\0": "a Bluetooth snoop file",
    b"GMBU": "a Microsoft Network Monitor file",
    b"RTSS": "a Microsoft Network Monitor file",
    b"XCP\0": "a NetXRay file",
    b"TRSNIFF data": "a Sniffer file",
    b"iptrace": "an AIX iptrace file",
    b"\xfd7zXZ": "compressed with xz",
    b"BZh": "compressed with bzip2",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"PK\x03\x04": "a zip archive",
}


class Pcap:
    """State of a classic pcap file: nothing changes after its header."""

    first_record = HEADER_BYTES

    def __init__(self, head: bytes) -> None:
        (magic,) = struct.unpack_from("<I", head)
        swapped, multiply, record_header = _PCAP[magic]
        order = ">" if swapped else "<"
        _zone, _, snap, link = struct.unpack_from(f"{order}iIII", head, 8)
        link &= 0x03FFFFFF  # above it: length of the frame check sequence
        self.form = np.zeros(c.F_SIZE, np.int64)
        self.form[[c.F_SWAPPED, c.F_HEADER, c.F_INTERFACES]] = swapped, record_header, 1
        self.interfaces = np.zeros((1, c.I_SIZE), np.int64)
        self.interfaces[0, [c.I_LINK, c.I_MULTIPLY, c.I_OFFSET, c.I_SNAP]] = link, multiply, 0, snap
        self.links = [link]
        self.comments: list[str] = []
        self.version = 0
        self._order, self._multiply = order, multiply

    def block(self, data: Bytes, at: int) -> int | None:
        """Classic pcap has no other blocks."""
        raise AssertionError("classic pcap has packets only")

    def lost(self) -> int | None:
        """Classic pcap does not say."""
        return None

    def first_ns(self, head: Bytes) -> int | None:
        """Stamp of the first record."""
        if len(head) < HEADER_BYTES + 8:
            return None
        seconds, fraction = struct.unpack_from(f"{self._order}II", head.data, HEADER_BYTES)
        return int(seconds) * 1_000_000_000 + int(fraction) * self._multiply


def open_file(name: str) -> CaptureFile:
    """Open ``name`` ("-": standard input). Raises FormatError, CaptureError, DpuflowError."""
    source = _open_bytes(name)
    head = source.window(0, WINDOW)
    start = bytes(head[:32])
    magic = int.from_bytes(start[:4], "little") if len(start) >= 4 else 0
    if magic == _PCAPNG:
        pcapng = Pcapng()
        return CaptureFile(name, source, pcapng, pcapng.first_ns(head))
    if magic in _PCAP:
        if len(head) < HEADER_BYTES:
            raise CaptureError(name, len(head), source.damage or "the file header is cut short")
        pcap = Pcap(start)
        return CaptureFile(name, source, pcap, pcap.first_ns(head))
    source.close()
    if source.damage:
        raise CaptureError(name, len(head), source.damage)
    if not start:
        raise FormatError(name, "the file is empty")
    for prefix, kind in _REFUSED.items():
        if start.startswith(prefix):
            raise FormatError(name, f"this is {kind}, which is not supported; convert it to pcap or pcapng")
    if b'"dpuflow.analysis/' in bytes(head[:4096]):
        raise FormatError(name, "this is a result of dpuflow, not a capture: use `dpuflow report`")
    begins = bytes(start[:8])
    shown = (
        f'"{begins.decode()}"' if begins.isascii() and begins.decode().isprintable() else begins[:4].hex(" ")
    )
    raise FormatError(name, f"neither pcap nor pcapng (it starts with {shown})")


def _open_bytes(name: str) -> ByteSource:
    """The file's plain bytes, decompressed where its magic number says so."""
    try:
        file = cast("BinaryIO", sys.stdin.buffer if name == "-" else open(name, "rb", buffering=0))  # noqa: SIM115
        status = os.fstat(file.fileno())
        regular = stat.S_ISREG(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            raise DpuflowError(f"{name}: is a directory")
        head = _head(file)
    except OSError as error:
        raise DpuflowError(f"{name}: {error.strerror or error}") from None
    compressed = head.startswith(GZIP) or is_zstd(head)
    on_disk = status.st_size if regular else None
    if regular and not compressed and name != "-" and head:
        return Mapped(name, file)
    decode = gunzip if head.startswith(GZIP) else unzstd if is_zstd(head) else plain
    counted = _Counted(file, len(head))
    return Streamed(name, decode(cast("BinaryIO", counted), head), on_disk, counted.tell, file)


def _head(file: BinaryIO) -> bytes:
    """The first four bytes; a pipe may hand them over one by one."""
    head = file.read(4)
    while head and len(head) < 4 and (more := file.read(4 - len(head))):
        head += more
    return head


class _Counted:
    """A file that counts what is read from it, since a pipe cannot tell where it is."""

    def __init__(self, file: BinaryIO, before: int) -> None:
        self._file, self._count = file, before

    def read(self, size: int) -> bytes:
        chunk = self._file.read(size)
        self._count += len(chunk)
        return chunk

    def tell(self) -> int:
        return self._count
