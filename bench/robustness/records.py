"""Classic pcap files as columns: read once, records taken, moved and cut with NumPy, written again."""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC: Final = {0xA1B2C3D4: 1000, 0xA1B23C4D: 1}  # ns of one unit of a record's second word
_FILE: Final = struct.Struct("<IHHiIII")
_RECORD: Final = 16


@dataclass(frozen=True, eq=False)
class Records:
    """One capture: a row a packet, in the order of the file. ``data`` is shared by all made of one file."""

    stamp_ns: NDArray[np.int64]
    start: NDArray[np.int64]
    """Where a packet's first byte is in ``data``."""
    length: NDArray[np.int64]
    """Bytes kept of it."""
    original: NDArray[np.int64]
    """Bytes it had."""
    data: NDArray[np.uint8]
    link_type: int

    def __len__(self) -> int:
        return len(self.stamp_ns)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Records:
        """Only ``rows``, in their order."""
        return replace(
            self,
            stamp_ns=self.stamp_ns[rows],
            start=self.start[rows],
            length=self.length[rows],
            original=self.original[rows],
        )

    def stamped(self, stamp_ns: NDArray[np.int64]) -> Records:
        """The same packets with these stamps, in the order of the stamps."""
        return replace(self, stamp_ns=stamp_ns).take(np.argsort(stamp_ns, kind="stable"))

    def cut(self, snaplen: int) -> Records:
        """No more than ``snaplen`` bytes of each packet."""
        return replace(self, length=np.minimum(self.length, snaplen))

    def bytes_at(self, first: int, count: int) -> NDArray[np.uint8]:
        """(packets, count): bytes of each packet from its byte ``first`` on; zeros where it is shorter."""
        at = self.start[:, None] + np.arange(first, first + count)
        within = np.arange(first, first + count) < self.length[:, None]
        found: NDArray[np.uint8] = np.where(within, self.data[np.minimum(at, len(self.data) - 1)], 0)
        return found.astype(np.uint8)


def read_records(path: Path) -> Records:
    """A little-endian classic pcap file, plain or .gz. Raises ValueError where it is another kind."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    magic, _, _, _, _, _, link_type = _FILE.unpack_from(content)
    if magic not in _MAGIC:
        raise ValueError(f"{path}: not a little-endian classic pcap file")
    starts, at = [], _FILE.size
    while at + _RECORD <= len(content):
        starts.append(at)
        at += _RECORD + int.from_bytes(content[at + 8 : at + 12], "little")
    data = np.frombuffer(content, np.uint8)
    start = np.array(starts, np.int64)
    words = data[start[:, None] + np.arange(_RECORD)].reshape(-1, _RECORD).view("<u4").astype(np.int64)
    return Records(
        stamp_ns=words[:, 0] * 10**9 + words[:, 1] * _MAGIC[magic],
        start=start + _RECORD,
        length=words[:, 2],
        original=words[:, 3],
        data=data,
        link_type=link_type,
    )


def write_records(records: Records, path: Path) -> None:
    """A classic pcap file with stamps in nanoseconds."""
    size = records.length + _RECORD
    begin = np.cumsum(size) - size
    out = np.empty(int(size.sum()), np.uint8)
    words = np.empty((len(records), 4), "<u4")
    words[:, 0], words[:, 1] = np.divmod(records.stamp_ns, 10**9)
    words[:, 2], words[:, 3] = records.length, records.original
    out[begin[:, None] + np.arange(_RECORD)] = words.view(np.uint8).reshape(-1, _RECORD)
    within = np.arange(int(records.length.sum())) - np.repeat(
        np.cumsum(records.length) - records.length, records.length
    )
    out[np.repeat(begin + _RECORD, records.length) + within] = records.data[
        np.repeat(records.start, records.length) + within
    ]
    longest = int(records.length.max(initial=0))
    head = _FILE.pack(0xA1B23C4D, 2, 4, 0, 0, max(longest, 96), records.link_type)
    path.write_bytes(head + out.tobytes())
