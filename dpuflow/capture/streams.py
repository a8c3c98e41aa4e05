"""Byte sources: a mapped file, or a stream of chunks (compressed, or a pipe) in a reused buffer."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np

from dpuflow.capture.base import SLACK, WINDOW, Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.capture.base import Bytes


class Mapped:
    """A file on disk, mapped window by window, so that memory stays bounded.

    The mapping is private and writable because Numba would compile a second version for read-only
    arrays; nothing writes to it.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self.damage: str | None = None
        self._file = file
        self._length = os.fstat(file.fileno()).st_size
        self.size: int | None = self._length
        self.on_disk: int | None = self._length
        self._done = 0

    def window(self, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop``, without a copy; valid as long as it is held."""
        self._done = min(start, self._length)
        stop = min(stop, self._length)
        if start >= stop:
            return np.empty(0, np.uint8)
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._file.fileno(), stop - page, access=mmap.ACCESS_COPY, offset=page)
        except (OSError, ValueError) as error:
            self.damage = f"the file cannot be mapped ({error})"
            return np.empty(0, np.uint8)
        return np.frombuffer(mapped, np.uint8)[start - page :]

    def done(self) -> int:
        """Bytes before the last window."""
        return self._done

    def close(self) -> None:
        """Close the file; windows that are still held stay valid."""
        self._done = self._length
        self._file.close()


class Closable(Protocol):
    """What a stream closes at its end."""

    def close(self) -> None:
        """Give it back."""
        ...


class Streamed:
    """Chunks of bytes that come one after the other; a Damage that they raise ends the stream."""

    def __init__(
        self,
        name: str,
        chunks: Iterator[bytes | memoryview],
        on_disk: int | None,
        tell: Callable[[], int],
        file: Closable,
    ) -> None:
        self.name = name
        self.damage: str | None = None
        self.size: int | None = None
        self.on_disk = on_disk
        self._chunks, self._tell, self._file = chunks, tell, file
        self._buffer: Bytes = np.empty(WINDOW + SLACK, np.uint8)
        self._start = 0  # offset of the buffer's first byte in the stream
        self._filled = 0
        self._rest = memoryview(b"")
        self._ended = False

    def window(self, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop``, in a buffer that the next call overwrites."""
        while start > self._start + self._filled and self._more():  # skip a block longer than the window
            self._start += self._filled
            self._filled = 0
            step = min(start - self._start, len(self._rest))
            self._rest = self._rest[step:]
            self._start += step
        self._note_size()
        behind = start - self._start
        if behind > 0:
            keep = max(self._filled - behind, 0)
            self._buffer[:keep] = self._buffer[behind : behind + keep]
            self._start, self._filled = start, keep
        while self._filled < stop - start and self._more():
            step = min(len(self._buffer) - self._filled, len(self._rest), stop - start - self._filled)
            self._buffer[self._filled : self._filled + step] = self._rest[:step]
            self._filled += step
            self._rest = self._rest[step:]
        self._note_size()
        return self._buffer[: min(self._filled, stop - start)]

    def _note_size(self) -> None:
        """Set ``size`` once the end has been reached and nothing was lost before it."""
        if self._ended and self.damage is None and self.size is None:
            self.size = self._start + self._filled + len(self._rest)

    def _more(self) -> bool:
        """Whether ``_rest`` holds bytes, fetched if need be."""
        while not self._rest and not self._ended:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration:
                self._ended = True
            except Damage as error:
                self.damage = str(error)
                self._ended = True
        return len(self._rest) > 0

    def done(self) -> int:
        """Bytes of the stored file that have been read."""
        return self._tell()

    def close(self) -> None:
        """Close the file below."""
        self._file.close()
