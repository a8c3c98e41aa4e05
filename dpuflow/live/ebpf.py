"""The eBPF backend: programs on the interfaces write packets into one ring, which is read in bulk."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import numpy as np

from dpuflow import schema_ring
from dpuflow.errors import DpuflowError, MissingError, OptionError
from dpuflow.kernels import ring as kernel
from dpuflow.live import attach, libbpf
from dpuflow.live.base import find_interface, object_path
from dpuflow.live.clock import StampClock
from dpuflow.live.compiled import Compiled
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import Ring
from dpuflow.live.watchdog import watch

if TYPE_CHECKING:
    from pathlib import Path

    from dpuflow.live.base import Bytes, Interface

_IN, _OUT, _XDP, _FLUSH = "dpuflow_in", "dpuflow_out", "dpuflow_xdp", "dpuflow_flush"


class EbpfCapture:
    """Programs loaded and attached as ``options`` ask, one set for each interface, with one ring."""

    def __init__(self, options: LiveOptions, compile: bool = False) -> None:
        """Attach; with ``compile`` programs that bcc makes now.

        Raises OptionError, MissingError, DpuflowError; nothing stays attached then.
        """
        self.interfaces = [find_interface(name) for name in options.interfaces]
        self.name = "bcc" if compile else "ebpf"
        if compile and options.mode != "packets":
            raise OptionError("--backend bcc has packets mode alone")
        path = None if compile else _programs(options.mode)
        self.clock = StampClock()
        self.tally = np.zeros(kernel.D_SIZE, np.int64)
        self.tally[kernel.D_LEFT] = np.iinfo(np.int64).max
        self._counters: list[int] = []
        self._filters: list[attach.Filter] = []
        self._flushes: list[int] = []
        self._detached = False
        with ExitStack() as stack:
            size = 1 << max(options.buffer - 1, 4095).bit_length()
            self.ring = Ring(libbpf.create_ring(size), size)
            stack.callback(self.ring.close)
            detached = stack.enter_context(ExitStack())
            hooks = [
                self._attach(path, interface, number, options, stack, detached)
                for number, interface in enumerate(self.interfaces)
            ]
            self.hooks = ", ".join(sorted(set(hooks)))
            if self._filters:
                detached.callback(watch(self._filters))
            self._attached = detached.pop_all()
            self._stack = stack.pop_all()

    def _attach(
        self,
        path: Path | None,
        interface: Interface,
        number: int,
        options: LiveOptions,
        stack: ExitStack,
        detached: ExitStack,
    ) -> str:
        """Load and attach one interface's programs; the hook they are at."""
        xdp = options.hook.startswith("xdp")
        settings = options.settings(number, self.clock.start.real_ns)
        programs: tuple[str, ...] = (_XDP,) if xdp else (_IN, _OUT)
        if options.mode == "messages":
            programs += (_FLUSH,)
        loaded: libbpf.Loaded | Compiled
        if path is None:
            loaded = Compiled(programs, settings, self.ring.fd)
        else:
            loaded = libbpf.Loaded(path, programs, settings, self.ring.fd)
        stack.callback(loaded.close)
        if options.mode == "messages":
            self._flushes.append(loaded.fds[_FLUSH])
        self._counters.append(loaded.counters_fd)
        name, index = interface.name, interface.index
        if xdp:
            detached.callback(attach.link(loaded.fds[_XDP], index, name, options.hook))
            return options.hook + " (inbound only)"
        if options.hook != "clsact":
            try:
                with ExitStack() as both:
                    both.callback(attach.link(loaded.fds[_IN], index, name, "tcx-in"))
                    both.callback(attach.link(loaded.fds[_OUT], index, name, "tcx-out"))
                    detached.enter_context(both.pop_all())
                return "tcx"
            except MissingError:
                if options.hook == "tcx":
                    raise
        detached.callback(attach.claim(index, name).close)
        for program, outbound in ((_IN, False), (_OUT, True)):
            filter_ = attach.add_filter(loaded.fds[program], index, name, outbound)
            detached.callback(filter_.remove)
            self._filters.append(filter_)
        return "clsact"

    def read(self, out: Bytes, at: int) -> int:
        """Move what is in the ring to ``out`` from ``at`` on, as much as fits; where it ends."""
        return self.ring.drain(out, at, self.tally)

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface. In messages mode runs that have stood long are ended first."""
        for fd in self._flushes:
            libbpf.run_program(fd)
        return [libbpf.read_counters(fd) for fd in self._counters]

    def detach(self) -> None:
        """Take the programs off the interfaces; the ring can still be read."""
        self._attached.close()
        if self._flushes and not self._detached:
            self._detached = True
            time.sleep(2 * schema_ring.RUN_NS / 1e9)  # then all runs have stood long enough
            self.counters()

    def close(self) -> None:
        """Give everything back."""
        self.detach()
        self._stack.close()


def leftovers() -> list[str]:
    """Interfaces of this network namespace with a clsact filter of a dpuflow that is gone.

    Raises MissingError.
    """
    found = []
    for index, name in socket.if_nameindex():
        if any(attach.has_filter(index, outbound) for outbound in (False, True)):
            with suppress(DpuflowError):  # it is in use
                attach.claim(index, name).close()
                found.append(name)
    return found


def remove_leftovers() -> list[str]:
    """Remove them; which there were. Raises MissingError."""
    found = leftovers()
    for name in found:
        for outbound in (False, True):
            attach.remove_filter(socket.if_nametoindex(name), outbound)
    return found


def load_once() -> None:
    """Load all programs and give them back. Raises MissingError, DpuflowError."""
    ring_fd = libbpf.create_ring(1 << 16)
    try:
        for mode, more in (("packets", ()), ("messages", (_FLUSH,))):
            programs = (_IN, _OUT, _XDP, *more)
            libbpf.Loaded(_programs(mode), programs, LiveOptions(("lo",)).settings(0, 0), ring_fd).close()
    finally:
        os.close(ring_fd)


def _programs(mode: str) -> Path:
    """The object file. Raises MissingError."""
    path = object_path(mode)
    if not path.is_file():
        raise MissingError(f"{path} is not there: make it with `make bpf` (needs clang and libbpf-dev)")
    return path
