"""The kernel's ring buffer, mapped, and read in bulk (``kernels/ring``): no call per packet."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.errors import DpuflowError
from dpuflow.kernels import ring as kernel

if TYPE_CHECKING:
    from dpuflow.live.base import Bytes, Numbers


class Ring:
    """A mapped ring of ``size`` bytes; not to be used after ``close``."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        page = mmap.PAGESIZE
        try:
            self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._producer = mmap.mmap(fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        except OSError as error:
            raise DpuflowError(
                f"the ring cannot be mapped ({error.strerror}): choose a smaller --buffer"
            ) from None
        # Made once: arrays made at every look would cost more than the look.
        self._mapped = _bytes(self._consumer), _bytes(self._producer)
        self._peak = 0
        self._seen = np.zeros(1 << 16, np.uint8)
        self._read, self._written = (_position(mapped) for mapped in self._mapped)

    def share(self) -> float:
        """How much of it is filled now, 0 to 1."""
        return float(self._written.value - self._read.value) / self.size

    def take_peak(self) -> float:
        """The highest share at any look since the last call, 0 to 1."""
        peak, self._peak = self._peak, 0
        return max(peak / self.size, self.share())

    def drain(self, out: Bytes, at: int, tally: Numbers) -> int:
        """Move records to ``out`` from ``at`` on as packet blocks, as many as fit; where they end."""
        # An idle capture looks twenty times a second, on a cold core: the call would take 60 us.
        filled = self._written.value - self._read.value
        if not filled:
            return at
        self._peak = max(self._peak, filled)
        return int(kernel.drain(*self._mapped, self.size, out, at, tally, self._seen))

    def close(self) -> None:
        """Give the ring back."""
        self._consumer.close()
        self._producer.close()
        os.close(self.fd)


def _position(page: Bytes) -> ctypes.c_uint64:
    """The reader's or writer's position, at the beginning of its page."""
    return ctypes.c_uint64.from_address(page.ctypes.data)


def _bytes(area: mmap.mmap) -> Bytes:
    """The mapping as an array. Kernels are compiled for arrays that may be written, which a mapping that
    is only read is not for NumPy; nothing writes to it."""
    address = np.frombuffer(area, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(area)).from_address(address))
