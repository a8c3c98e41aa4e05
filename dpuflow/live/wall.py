"""The wall clock as the programs know it, and the moment somebody sets it.

In: nothing but the kernel's clocks. Out: a map with CLOCK_REALTIME minus CLOCK_MONOTONIC, by which the
programs take stamps that the kernel has made in wall time. timerfd_create(2), TFD_TIMER_CANCEL_ON_SET: the
kernel itself tells when the clock is set, so that nothing is asked per packet.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import struct
import time
from typing import TYPE_CHECKING, Final

from dpuflow.live import libbpf
from dpuflow.live.clock import read_clocks
from dpuflow.schema import ring as schema_ring

if TYPE_CHECKING:
    from collections.abc import Callable

_ABSOLUTE, _CANCEL_ON_SET = 1, 2  # TFD_TIMER_ABSTIME, TFD_TIMER_CANCEL_ON_SET
_NEVER_S: Final = 1 << 40
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC


class WallMap:
    """The map, kept right by whoever calls ``wait`` in place of sleeping, or ``look``; ``close`` ends it."""

    def __init__(self, watch: Callable[[], int] | None = None) -> None:
        """``watch``: makes the descriptor that becomes readable when the clock is set.

        Where the kernel cannot tell that, stamps in wall time are not taken. Raises MissingError,
        DpuflowError.
        """
        with contextlib.ExitStack() as stack:
            self.fd = libbpf.create_cells(1, schema_ring.WALL.dtype.itemsize)
            stack.callback(os.close, self.fd)
            self._area = mmap.mmap(self.fd, mmap.PAGESIZE)
            stack.callback(self._area.close)
            self._watch: int | None = None
            self._poll = select.poll()
            with contextlib.suppress(OSError):
                self._watch = (watch or _watch_clock)()
                stack.callback(os.close, self._watch)
                self._poll.register(self._watch, select.POLLIN)
                self._tell()
            self._stack = stack.pop_all()

    def wait(self, seconds: float) -> None:
        """Sleep; when the clock is set meanwhile, tell the programs at once."""
        if self._watch is None:
            time.sleep(seconds)
        else:
            self._follow(1000 * seconds)

    def look(self) -> None:
        """Tell the programs if the clock was set; for those who have no time to wait."""
        if self._watch is not None:
            self._follow(0)

    def _follow(self, milliseconds: float) -> None:
        if not self._poll.poll(milliseconds):
            return
        assert self._watch is not None
        try:
            os.read(self._watch, 8)
        except OSError as error:
            if error.errno != errno.ECANCELED:
                raise
        self._tell()

    def _tell(self) -> None:
        struct.pack_into("=Q", self._area, 0, read_clocks().real_ns)

    def close(self) -> None:
        """Give it back."""
        self._stack.close()


def _watch_clock() -> int:
    """A timer that never comes, but is cancelled when somebody sets the wall clock. Raises OSError."""
    c = ctypes.CDLL(None, use_errno=True)
    fd = int(c.timerfd_create(time.CLOCK_REALTIME, _FLAGS))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    end = (ctypes.c_long * 4)(0, 0, _NEVER_S, 0)  # struct itimerspec: no interval
    if c.timerfd_settime(fd, _ABSOLUTE | _CANCEL_ON_SET, end, None) != 0:
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, "timerfd_settime")
    return fd
