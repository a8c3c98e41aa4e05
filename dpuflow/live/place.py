"""The programs of one interface: loaded, attached, and replaced while packets pass.

In: an interface, options, the ring. Out: packets in the ring and counters, until ``detach``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.live import attach, libbpf
from dpuflow.live.base import object_path
from dpuflow.live.compiled import Compiled
from dpuflow.live.phc import NicClock

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.live.base import Interface
    from dpuflow.live.options import LiveOptions
    from dpuflow.live.ring import Ring

IN, OUT, XDP = "dpuflow_in", "dpuflow_out", "dpuflow_xdp"
FLUSH, FLUSH_TC = "dpuflow_flush", "dpuflow_flush_tc"  # the second one where the kernel refuses the first
_FRAME = bytes(64)  # which the second one does not look at

Programs = libbpf.Loaded | Compiled


class Shared(NamedTuple):
    """What the places of one capture have in common."""

    clock_ns: int
    ring: Ring
    wall_fd: int
    sampling_fd: int
    compile: bool


class Place:
    """One interface, number ``number`` of its capture, with the programs of ``options`` attached."""

    def __init__(
        self,
        number: int,
        interface: Interface,
        options: LiveOptions,
        shared: Shared,
    ) -> None:
        """Load and attach. Raises MissingError, DpuflowError; nothing stays attached then."""
        self.interface = interface
        self._number = number
        self._clock_ns, self._ring, self._wall_fd, self._sampling_fd, self._compile = shared
        self._on: dict[str, attach.Link | attach.Filter] = {}
        with ExitStack() as stack:
            self._nic = self._clock(options)
            if self._nic is not None:
                stack.callback(self._nic.close)
            self._counters_fd = libbpf.create_counters()
            stack.callback(os.close, self._counters_fd)
            self._programs = self._first(options)
            stack.callback(lambda: self._programs.close())
            with ExitStack() as attached:
                self.hook = self._attach(options.hook, attached)
                tc = not self.hook.startswith("xdp")
                self._early = self._nic is not None or (tc and options.timestamps != "kernel")
                self._attached = attached.pop_all()
            if self._nic is not None:
                self.interface = replace(interface, clock=self._nic.text())
            self._stack = stack.pop_all()

    def _clock(self, options: LiveOptions) -> NicClock | None:
        """The NIC's clock, if its stamps are to be taken. Raises DpuflowError where they must."""
        if options.timestamps == "kernel" or self._compile or options.hook == "xdp-generic":
            return None
        try:
            return NicClock.of(self.interface.name)
        except DpuflowError:
            if options.timestamps == "hardware":
                raise
            return None

    def _first(self, options: LiveOptions) -> Programs:
        """The first programs; with the kernel's stamps where the driver gives none, unless it must."""
        try:
            return self.load(options)
        except DpuflowError:
            if self._nic is None or options.timestamps == "hardware":
                raise
            self._nic = None  # closed with the rest
            return self.load(options)

    def load(self, options: LiveOptions, samples: bool = False) -> Programs:
        """The programs that ``options`` ask for here; with ``samples`` those that can leave pairs of hosts
        out later. Raises MissingError, DpuflowError."""
        settings = options.settings(self._number, self._clock_ns)
        settings["sample"] |= samples
        self._ring.set(settings)
        maps = self._ring.maps() | {"counters": self._counters_fd, "sampling": self._sampling_fd}
        if options.timestamps != "kernel":  # without it the programs do not take what was stamped before
            maps["wall"] = self._wall_fd
        xdp = options.hook.startswith("xdp")
        names: tuple[str, ...] = (XDP,) if xdp else (IN, OUT)
        if self._compile:
            return Compiled(names, settings, maps)
        path, device = made(options.mode), 0
        if self._nic is not None:
            settings["hardware"] = 1
            maps["phc"] = self._nic.fd
            if xdp:
                path, device = made(f"{options.mode}_hardware"), self.interface.index
        choices = [(*names, FLUSH), (*names, FLUSH_TC)] if options.mode == "messages" else [names]
        return load(path, choices, settings, maps, device)

    def _attach(self, hook: str, attached: ExitStack) -> str:
        """Attach the programs; where, in words."""
        name, index = self.interface.name, self.interface.index
        fds = self._programs.fds
        # What leaves a loopback comes in again: seen at both ends, each packet would look sent twice.
        once = self.interface.loopback
        attached.callback(self._remove)
        if hook.startswith("xdp"):
            self._on[XDP] = attach.link(fds[XDP], index, name, hook)
            return hook + " (inbound only)"
        if hook != "clsact":
            try:
                self._on[IN] = attach.link(fds[IN], index, name, "tcx-in")
                if not once:
                    self._on[OUT] = attach.link(fds[OUT], index, name, "tcx-out")
                return "tcx (inbound only)" if once else "tcx"
            except MissingError:
                if hook == "tcx":
                    raise
                self._remove()
        attached.callback(attach.claim(index, name).close)
        attached.callback(self._remove)  # while they are held
        for program, outbound in ((IN, False), (OUT, True))[: 1 if once else 2]:
            self._on[program] = attach.add_filter(fds[program], index, name, outbound)
        return "clsact (inbound only)" if once else "clsact"

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

    def flush(self) -> None:
        """End the runs of messages mode that have stood long."""
        flush(self._programs)

    def counters(self) -> dict[str, int]:
        """The COUNTERS since the start, whichever programs counted. Reads the NIC's clock, too."""
        if self._nic is not None:
            self._nic.sample()
        self.flush()
        return libbpf.read_counters(self._counters_fd)

    def warnings(self) -> list[str]:
        """What is to be told of the stamps."""
        if self._nic is None or not self._nic.steps:
            return []
        return [f"{self.interface.name}: the NIC's clock {self._nic.device} was set {self._nic.steps} times"]

    @property
    def stamped_early(self) -> bool:
        """Whether stamps may be older than the program that writes them."""
        return self._early

    def detach(self) -> None:
        """Take the programs off the interface."""
        self._attached.close()

    def close(self) -> None:
        """Give everything back."""
        self.detach()
        self._stack.close()


def load(
    path: Path,
    choices: list[tuple[str, ...]],
    settings: NDArray[np.void],
    maps: dict[str, int],
    device: int = 0,
) -> libbpf.Loaded:
    """The first of ``choices`` of programs that the kernel takes; what it cannot do is left out of them.

    Raises MissingError, DpuflowError.
    """
    attempts = [(names, atomic) for atomic in (1, 0) for names in choices]
    for names, atomic in attempts[:-1]:
        _allow(settings, atomic)
        try:
            return libbpf.Loaded(path, names, settings, maps, device)
        except MissingError:
            raise
        except DpuflowError:
            continue
    names, atomic = attempts[-1]
    _allow(settings, atomic)
    return libbpf.Loaded(path, names, settings, maps, device)


def _allow(settings: NDArray[np.void], atomic: int) -> None:
    """Whether the programs may use atomic operations that give back what was there.

    Linux has them from 5.12 on, for arm64 from 5.18 on. By them a run is held, and where the processor
    reorders stores a record of a CPU's own ring is published: without, the kernel's lock and its ring.
    """
    settings["atomic"] = atomic
    if not atomic and not settings["ordered"]:
        settings["cell_mask"] = 0


def flush(programs: Programs) -> None:
    """End the runs of messages mode that have stood long."""
    if FLUSH in programs.fds:
        libbpf.run_program(programs.fds[FLUSH])
    elif FLUSH_TC in programs.fds:
        libbpf.run_program(programs.fds[FLUSH_TC], _FRAME)


def made(mode: str) -> Path:
    """The object file of a mode. Raises MissingError."""
    path = object_path(mode)
    if not path.is_file():
        raise MissingError(f"{path} not found: build it with `make bpf` (needs clang and libbpf-dev)")
    return path
