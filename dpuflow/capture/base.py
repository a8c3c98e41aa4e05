"""What a capture is to the rest of dpuflow: files of bytes in windows, each with its format's state.

A window starts at a record and holds the records that start before the next multiple of ``WINDOW``,
whole: blocks of packets are therefore the same however the file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from dpuflow.kernels import columns as c

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.int64]

WINDOW: Final = 4 << 20
SLACK: Final = c.MAX_RECORD + 4096


class Damage(Exception):
    """A file cannot be understood on from here; the text says why, without file and offset."""


class ByteSource(Protocol):
    """The uncompressed bytes of one file."""

    name: str
    size: int | None
    """Bytes in all; of compressed files and pipes that is known only once they have been read."""
    damage: str | None
    """Why the bytes end too early, once that has been found."""
    on_disk: int | None
    """Bytes of the file as stored, for progress."""

    def window(self, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop``, fewer at the end; ``start`` never goes back. Valid until the next."""
        ...

    def done(self) -> int:
        """Bytes of the file as stored that have been read."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


class Format(Protocol):
    """How a capture file is written, as far as read: the parse kernel's ``form`` and ``interfaces``."""

    form: Numbers
    interfaces: Numbers
    first_record: int
    links: list[int]
    """Link types seen, in order."""
    comments: list[str]
    version: int
    """Counts changes of ``form`` and ``interfaces``."""

    def block(self, data: Bytes, at: int) -> int | None:
        """Take in the block at ``at`` that is no packet; where the next one starts, None if cut.

        Raises Damage.
        """
        ...

    def lost(self) -> int | None:
        """Packets that the capture states it has lost; None where it says nothing."""
        ...

    def first_ns(self, head: Bytes) -> int | None:
        """Stamp of the first packet, if ``head``, the file's beginning, holds one."""
        ...


@dataclass
class CaptureFile:
    """One opened file."""

    name: str
    bytes: ByteSource
    format: Format
    first_ns: int | None


@dataclass
class CaptureSource:
    """One vantage point: its files in order of their first stamp."""

    id: int
    vantage: str
    files: list[str]
    opened: list[CaptureFile] = field(default_factory=list)
    """Files that had better not be opened again, such as standard input."""

    def open_files(self) -> Iterator[CaptureFile]:
        """The files one after the other; the caller closes each."""
        from dpuflow.capture.pcapfile import open_file

        ready = {f.name: f for f in self.opened}
        self.opened = []
        for name in self.files:
            yield ready.pop(name) if name in ready else open_file(name)
