"""The programs' rings, mapped, and read in bulk (``kernels/ring``): no call per packet.

Each CPU has one of its own, which costs a sixth of what the kernel's ring buffer does and is not contended;
the kernel's takes what those have no room for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.errors import DpuflowError
from dpuflow.kernels import ring as kernel
from dpuflow.live import libbpf
from dpuflow.schema import ring as schema_ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dpuflow.live.base import Bytes, Numbers

ALL: Final = (1 << 63) - 1  # as a limit: everything
_MIN_CELL: Final = 1 << 14
_LONGEST: Final = 2 * schema_ring.MAX_SNAPLEN  # a packet and what stands before it


class Ring:
    """Mapped rings: the kernel's of ``size`` bytes, and for each CPU one of ``cell_size`` (0: none).

    Not to be used after ``close``.
    """

    def __init__(self, size: int, cell_size: int = 0) -> None:
        """Make and map them. Raises MissingError, DpuflowError."""
        self.size, self.cell_size = size, cell_size
        self.fd = libbpf.create_ring(size)
        self._stride = schema_ring.CELL_DATA + cell_size + kernel.CELL_SLACK
        cells = _cpus() if cell_size else 0
        self.cells_fd = libbpf.create_cells(max(cells, 1), self._stride if cells else 8)
        page = mmap.PAGESIZE
        # The kernel has the ring's pages a second time behind its end, so that no record is broken: more of
        # them than the longest record needs would count as memory that is used (32 MiB of 64).
        again = min(size, _LONGEST)
        try:
            self._consumer = mmap.mmap(self.fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self._producer = mmap.mmap(
                self.fd, page + size + again, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
            )
            self._cells = mmap.mmap(self.cells_fd, -(-max(cells * self._stride, 1) // page) * page)
        except OSError as error:
            raise DpuflowError(f"cannot map the ring ({error.strerror}): use a smaller --buffer") from None
        # Made once: arrays made at every look would cost more than the look.
        self._mapped = _bytes(self._consumer), _bytes(self._producer)
        self._cell_bytes = _bytes(self._cells)
        self._marks = np.zeros((cells, 3), np.int64)
        self._peak = 0
        self._looked = 0
        self._seen = np.zeros(1 << 16, np.uint8)
        self._ends = [(_position(read, 0), _position(written, 0)) for read, written in (self._mapped,)]
        for at in range(0, cells * self._stride, self._stride):
            tail, head = at + schema_ring.CELL_TAIL, at + schema_ring.CELL_HEAD
            self._ends.append((_position(self._cell_bytes, tail), _position(self._cell_bytes, head)))

    @classmethod
    def of_bytes(cls, buffer: int) -> Ring:
        """Half of ``buffer`` for the kernel's ring, half for those of the CPUs.

        Raises MissingError, DpuflowError.
        """
        half = _power(buffer) // 2
        cell = min(max(_power(half // _cpus() + 1) // 2, _MIN_CELL), schema_ring.MAX_CELL)
        return cls(half, 0 if _interrupts_itself() else cell)

    def set(self, settings: NDArray[np.void]) -> None:
        """Say in a program's settings what there is."""
        settings["cell_mask"] = max(self.cell_size - 1, 0)
        settings["ordered"] = os.uname().machine in ("x86_64", "i686")

    def maps(self) -> dict[str, int]:
        """Descriptors of the programs' maps that it is made of."""
        return {"ring": self.fd, "cells": self.cells_fd}

    def share(self) -> float:
        """How much of it is filled now, 0 to 1: of the kernel's ring and the fullest CPU's own."""
        return self._filled() / (self.size + self.cell_size)

    def _filled(self) -> int:
        kept, *own = [written.value - read.value for read, written in self._ends]
        return kept + max(own, default=0)

    def take_peak(self) -> float:
        """The highest share at any look since the last call, 0 to 1."""
        peak, self._peak = self._peak, 0
        return max(peak / (self.size + self.cell_size), self.share())

    def drain(
        self, out: Bytes, at: int, tally: Numbers, limit: int = ALL, clock: Callable[[], int] | None = None
    ) -> int:
        """Move records stamped before ``limit`` to ``out`` from ``at`` on, as many as fit; where they end.

        Stamps later than ``clock`` says, or a minute earlier than at the last look, cannot be: such records
        get the last time before ``limit``, and are counted. It is asked once it is settled what is read: on
        a busy machine this thread may stand still for long before that.
        """
        # An idle capture looks twenty times a second, on a cold core: the call would take 60 us.
        filled = self._filled()
        if not filled:
            return at
        self._peak = max(self._peak, filled)
        end = kernel.positions(self._mapped[1], self._cell_bytes, self._stride, self._marks)
        now = ALL if clock is None else clock()
        earliest, self._looked = self._looked - schema_ring.PHC_SPAN_NS, 0 if clock is None else now
        return int(
            kernel.drain(
                *self._mapped, self.size, self._cell_bytes, self._stride, self.cell_size, self._marks, end,
                limit, earliest, now, out, at, tally, self._seen,
            )
        )  # fmt: skip

    def discard(self) -> None:
        """Forget what is in it."""
        for read, written in self._ends:
            read.value = written.value

    def close(self) -> None:
        """Give the rings back."""
        for area in (self._consumer, self._producer, self._cells):
            area.close()
        os.close(self.fd)
        os.close(self.cells_fd)


def _cpus() -> int:
    """CPUs that are there, the highest number counting. One that is added later uses the kernel's ring."""
    online = Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip()
    return int(online.replace("-", ",").split(",")[-1]) + 1


def _interrupts_itself() -> bool:
    """Whether a program may be interrupted by itself on the same CPU: on real-time kernels."""
    return os.path.exists("/sys/kernel/realtime")


def _power(number: int) -> int:
    """The power of two that is not smaller."""
    return 1 << max(number - 1, 4095).bit_length()


def _position(mapped: Bytes, at: int) -> ctypes.c_uint64:
    """A reader's or writer's position."""
    return ctypes.c_uint64.from_address(mapped.ctypes.data + at)


def _bytes(area: mmap.mmap) -> Bytes:
    """The mapping as an array. Kernels are compiled for arrays that may be written, which a mapping that
    is only read is not for NumPy; nothing writes to it."""
    address = np.frombuffer(area, np.uint8).ctypes.data
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(area)).from_address(address))
