"""Arrays that grow while a capture is read: in place, or from a cache line on."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Growing:
    """Rows in memory that grows in place: pages move, nothing is copied, none is touched before its use."""

    def __init__(self, dtype: np.dtype[Any], *shape: int) -> None:
        self._row = np.dtype((dtype, shape)) if shape else dtype
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows: NDArray[Any] = np.frombuffer(self._memory, self._row, 0)

    def reach(self, used: int, room: int) -> None:
        """Make room for ``room`` rows more than the ``used`` ones. No other view of the rows may be left."""
        if len(self.rows) >= used + room:
            return
        count = 2 * used + 4 * room
        del self.rows
        self._memory.resize(-(-count * self._row.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE)
        if hasattr(self._memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows = np.frombuffer(self._memory, self._row, count)

    def copy(self, used: int) -> Growing:
        """The first ``used`` rows in memory of their own."""
        other = object.__new__(Growing)
        other._row = self._row
        other._memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        other.rows = np.frombuffer(other._memory, other._row, 0)
        other.reach(0, used)
        other.rows[:used] = self.rows[:used]
        return other

    def keep(self, used: int, keep: NDArray[Any]) -> int:
        """Of the first ``used`` rows move the kept ones up; how many. What lies behind is given back."""
        kept = self.rows[:used][keep]
        self.rows[: len(kept)] = kept
        first = -(-(len(kept) + 1) * self._row.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < len(self._memory) and hasattr(self._memory, "madvise"):
            self._memory.madvise(mmap.MADV_DONTNEED, first, len(self._memory) - first)
        return len(kept)


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts at a cache line."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    copy = raw[skip : skip + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def longer(array: NDArray[Any], more: int) -> NDArray[Any]:
    """With ``more`` rows of zeros behind; from a cache line on, and mostly in room that was left for it."""
    raw = array.base
    row = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    size = array.nbytes + more * row
    at = array.ctypes.data - raw.ctypes.data if isinstance(raw, np.ndarray) else 0
    if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or at + size > raw.nbytes:
        raw = np.zeros(2 * size + 64, np.uint8)
        at = -raw.ctypes.data % 64
        raw[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    grown: NDArray[Any] = raw[at : at + size].view(array.dtype).reshape(-1, *array.shape[1:])
    return grown
