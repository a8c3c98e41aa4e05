"""What this process uses, as the kernel counts it (proc(5)), and how its allocator gives memory back.

glibc keeps what was freed: each thread may have a heap of its own, and blocks that once were large teach it
to keep larger ones. Analyses allocate and free megabytes every second, requests in other threads, too: in
weeks the heaps' gaps would grow. Elsewhere (musl) nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Final, NamedTuple

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # malloc.h: M_ARENA_MAX, M_MMAP_THRESHOLD
_ARENAS: Final = 2
TRIM_S: Final = 60.0
"""Memory that is free within the heaps goes back to the kernel (``give_back``) this often."""
_MAPPED_BYTES: Final = 128 << 10  # a block as large as this is mapped by itself, and goes when it is freed


class Memory(NamedTuple):
    """Resident bytes: all, and those of the process's own, which map neither files nor the ring."""

    resident: int = 0
    own: int = 0


beside: set[int] = set()
"""Numbers of the agent's other processes, whose own memory counts as its."""


_files: dict[int, int] = {}  # by process: opening one takes ten times as long as reading it
_lock: Final = threading.Lock()


def memory() -> Memory:
    """What is resident now; zeros where /proc does not tell."""
    with _lock:
        processes = (os.getpid(), *beside)
        for process in _files.keys() - processes:
            os.close(_files.pop(process))
        found = [*map(_of, processes)]
    own = sum(each.own for each in found)
    return Memory(found[0].resident - found[0].own + own, own)


def _of(process: int) -> Memory:
    try:
        if process not in _files:
            _files[process] = os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
        _, resident, shared, *_ = map(int, os.pread(_files[process], 256, 0).split())
    except (OSError, ValueError):
        return Memory()
    return Memory(resident * _PAGE, (resident - shared) * _PAGE)


def resident_bytes() -> int:
    """Resident memory; 0 where /proc does not tell."""
    return memory().resident


def restrain_allocator() -> None:
    """Few heaps, and large blocks apart from them; before threads begin."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _ARENAS)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back() -> None:
    """Return free pages within the heaps to the kernel; takes about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
