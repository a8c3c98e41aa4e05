"""Where a capture's blocks go: a file, several in turn, or a pipe; pcapng or pcap, plain, gzip or zstd.

Whatever ends the capture, files hold whole blocks.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.live.pcap import Pcap

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.live.base import Bytes

_ENDING: Final = re.compile(r"(?:\.(pcapng|ntar|pcap|cap))?(?:\.(gz|zst))?$")


def format_of(path: str) -> tuple[str, str]:
    """What a name says of a file: its format, pcap or pcapng, and how it is packed: gz, zst or not ("")."""
    match = _ENDING.search(path.lower())
    kind, packed = (match[1], match[2]) if match else (None, None)
    return "pcap" if kind in ("pcap", "cap") else "pcapng", packed or ""


def packer(packed: str) -> tuple[Any, int]:
    """What packs bytes as gz or zst, and how it is flushed to where a reader can stop."""
    if packed == "gz":
        return zlib.compressobj(1, wbits=31), zlib.Z_SYNC_FLUSH
    import zstandard

    return zstandard.ZstdCompressor(level=1).compressobj(), zstandard.COMPRESSOBJ_FLUSH_BLOCK


@dataclass(frozen=True)
class Rotation:
    """When to begin another file (0: never), and how many to keep (0: all)."""

    bytes: int = 0
    seconds: float = 0.0
    files: int = 0

    def __bool__(self) -> bool:
        return bool(self.bytes or self.seconds)


class Output:
    """Blocks to ``path`` ("-": standard output). ``head`` and ``statistics`` begin and end each file."""

    def __init__(
        self,
        path: str,
        head: Callable[[], bytes],
        statistics: Callable[[], bytes],
        rotation: Rotation | None = None,
    ) -> None:
        """Open the first file. Raises OptionError, OSError."""
        self.path, self._head, self._statistics = path, head, statistics
        self._rotation = rotation or Rotation()
        if path == "-" and self._rotation:
            raise OptionError("standard output cannot be rotated: name a file with -w")
        self.files: list[str] = []
        self._failed = False
        self._number = 0
        self._open()

    def _open(self) -> None:
        if self.path == "-":
            self._fd = 1
        else:
            name = self._name()
            self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self.files.append(name)
            if self._rotation.files and len(self.files) > self._rotation.files:
                os.unlink(self.files.pop(0))
        self._seekable = stat.S_ISREG(os.fstat(self._fd).st_mode)
        kind, packed = format_of(self.path)
        self._pcap = Pcap() if kind == "pcap" else None
        self._packed: Any = None
        self._flush = 0
        if packed:
            self._packed, self._flush = packer(packed)
        self._written = self._whole = 0
        self._opened_s = time.monotonic()
        self._put(memoryview(self._head()))

    def _name(self) -> str:
        """The present file's name: numbered where there may be several."""
        if not self._rotation:
            return self.path
        self._number += 1
        match = _ENDING.search(self.path)
        at = match.start() if match else len(self.path)
        return f"{self.path[:at]}-{self._number:05}{self.path[at:]}"

    def write(self, piece: Bytes) -> None:
        """Write whole blocks; begin another file where one is due. Raises DpuflowError, BrokenPipeError."""
        self._put(memoryview(piece.data))
        rotation = self._rotation
        if (rotation.bytes and self._written >= rotation.bytes) or (
            rotation.seconds and time.monotonic() - self._opened_s >= rotation.seconds
        ):
            self._end()
            self._open()

    def note(self) -> None:
        """Write the statistics as they stand, and all that came before: a kill loses what comes after."""
        self._put(memoryview(self._statistics()))
        if self._packed is not None:
            self._send(memoryview(self._packed.flush(self._flush)))

    def close(self) -> None:
        """Write the last statistics and close; after a failed write, only close."""
        if not self._failed:
            self._end()
        elif self._fd != 1:
            os.close(self._fd)

    def _end(self) -> None:
        self._put(memoryview(self._statistics()))
        if self._packed is not None:
            self._send(memoryview(self._packed.flush()))
        if self._fd != 1:
            os.close(self._fd)

    def _put(self, data: memoryview) -> None:
        """Blocks to the file."""
        if self._pcap is not None:
            data = memoryview(self._pcap.convert(data))
        if self._packed is None:
            self._send(data, whole=self._pcap is None)
        elif packed := self._packed.compress(data):
            self._send(memoryview(packed))

    def _send(self, data: memoryview, whole: bool = False) -> None:
        """All of ``data``; if the disk is full, cut after the last whole block."""
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except BrokenPipeError:
            self._failed = True
            raise
        except OSError as error:
            self._failed = True
            if whole and self._seekable:
                self._cut(data, done)
            where = self.files[-1] if self.files else "standard output"
            raise DpuflowError(f"{where}: {error.strerror}; everything written before is intact") from None
        self._written += done

    def _cut(self, data: memoryview, done: int) -> None:
        """Truncate behind the last block that was written whole, with room for statistics, and add them."""
        keep = at = 0
        statistics = self._statistics()
        while at + 8 <= done:
            size = struct.unpack_from("<I", data, at + 4)[0]
            if at + size + len(statistics) > done:
                break
            at += size
            keep = at
        os.ftruncate(self._fd, self._written + keep)
        os.lseek(self._fd, 0, os.SEEK_END)
        if done - keep >= len(statistics):
            os.write(self._fd, statistics)
