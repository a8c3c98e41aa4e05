"""The programs of one interface: loaded, attached, and replaced while packets pass.

In: an interface, options, the ring. Out: packets in the ring and counters, until ``detach``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.live import attach, libbpf
from dpuflow.live.base import object_path
from dpuflow.live.compiled import Compiled

if TYPE_CHECKING:
    from pathlib import Path

    from dpuflow.live.base import Interface
    from dpuflow.live.options import LiveOptions
    from dpuflow.live.ring import Ring

IN, OUT, XDP, FLUSH = "dpuflow_in", "dpuflow_out", "dpuflow_xdp", "dpuflow_flush"

Programs = libbpf.Loaded | Compiled


class Place:
    """One interface, number ``number`` of its capture, with the programs of ``options`` attached."""

    def __init__(
        self,
        number: int,
        interface: Interface,
        options: LiveOptions,
        clock_ns: int,
        ring: Ring,
        compile: bool,
    ) -> None:
        """Load and attach. Raises MissingError, DpuflowError; nothing stays attached then."""
        self.interface = interface
        self._number, self._clock_ns, self._ring, self._compile = number, clock_ns, ring, compile
        self._on: dict[str, attach.Link | attach.Filter] = {}
        with ExitStack() as stack:
            self._counters_fd = libbpf.create_counters()
            stack.callback(os.close, self._counters_fd)
            self._programs = self.load(options)
            stack.callback(lambda: self._programs.close())
            with ExitStack() as attached:
                self.hook = self._attach(options.hook, attached)
                self._attached = attached.pop_all()
            self._stack = stack.pop_all()

    def load(self, options: LiveOptions) -> Programs:
        """The programs that ``options`` ask for here. Raises MissingError, DpuflowError."""
        settings = options.settings(self._number, self._clock_ns)
        self._ring.set(settings)
        maps = self._ring.maps() | {"counters": self._counters_fd}
        names: tuple[str, ...] = (XDP,) if options.hook.startswith("xdp") else (IN, OUT)
        if self._compile:
            return Compiled(names, settings, maps)
        if options.mode == "messages":
            names += (FLUSH,)
        return libbpf.Loaded(made(options.mode), names, settings, maps)

    def _attach(self, hook: str, attached: ExitStack) -> str:
        """Attach the programs; where, in words."""
        name, index = self.interface.name, self.interface.index
        fds = self._programs.fds
        attached.callback(self._remove)
        if hook.startswith("xdp"):
            self._on[XDP] = attach.link(fds[XDP], index, name, hook)
            return hook + " (inbound only)"
        if hook != "clsact":
            try:
                self._on[IN] = attach.link(fds[IN], index, name, "tcx-in")
                self._on[OUT] = attach.link(fds[OUT], index, name, "tcx-out")
                return "tcx"
            except MissingError:
                if hook == "tcx":
                    raise
                self._remove()
        attached.callback(attach.claim(index, name).close)
        attached.callback(self._remove)  # while they are held
        for program, outbound in ((IN, False), (OUT, True)):
            self._on[program] = attach.add_filter(fds[program], index, name, outbound)
        return "clsact"

    def _remove(self) -> None:
        while self._on:
            self._on.popitem()[1].remove()

    def filters(self) -> list[attach.Filter]:
        """What of it stays when the process dies."""
        return [on for on in self._on.values() if isinstance(on, attach.Filter)]

    def put(self, programs: Programs) -> Programs:
        """Attach ``programs`` in place of the present ones, which are given back.

        Raises DpuflowError; the present ones then stay.
        """
        before, done = self._programs, []
        try:
            for name, on in self._on.items():
                self._on[name] = on.replace(programs.fds[name])
                done.append(name)
        except DpuflowError:
            for name in done:
                self._on[name] = self._on[name].replace(before.fds[name])
            raise
        self._programs = programs
        return before

    def counters(self) -> dict[str, int]:
        """The COUNTERS since the start, whichever programs counted."""
        flush(self._programs)
        return libbpf.read_counters(self._counters_fd)

    def detach(self) -> None:
        """Take the programs off the interface."""
        self._attached.close()

    def close(self) -> None:
        """Give everything back."""
        self.detach()
        self._stack.close()


def flush(programs: Programs) -> None:
    """End the runs of messages mode that have stood long."""
    if FLUSH in programs.fds:
        libbpf.run_program(programs.fds[FLUSH])


def made(mode: str) -> Path:
    """The object file of a mode. Raises MissingError."""
    path = object_path(mode)
    if not path.is_file():
        raise MissingError(f"{path} is not there: make it with `make bpf` (needs clang and libbpf-dev)")
    return path
