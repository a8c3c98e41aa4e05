"""Which pairs of hosts the programs leave out, changed by one store while packets pass.

In: a threshold (``LiveOptions.below``). Out: a map that all programs of a capture share.
"""

from __future__ import annotations

import mmap
import os
import struct

from dpuflow.live import libbpf
from dpuflow.schema import ring as schema_ring


class SampleMap:
    """The map, ``fd``; ``close`` gives it back."""

    def __init__(self, below: int) -> None:
        """Of 2^32 pairs those whose hash is ``below`` are left out. Raises MissingError, DpuflowError."""
        self.fd = libbpf.create_cells(1, schema_ring.SAMPLING.dtype.itemsize)
        self._area = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.set(below)

    def set(self, below: int) -> None:
        """From the next packet on."""
        struct.pack_into("=I", self._area, 0, below)

    def close(self) -> None:
        """Give it back."""
        self._area.close()
        os.close(self.fd)
