"""The eBPF backend: programs on the interfaces write packets into one ring, which is read in bulk."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.kernels import ring as kernel
from dpuflow.live import attach, place
from dpuflow.live.base import find_interface
from dpuflow.live.clock import STEP_NS, StampClock
from dpuflow.live.nic import take_all
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import ALL, Ring
from dpuflow.live.sampling import SampleMap
from dpuflow.live.wall import WallMap
from dpuflow.live.watchdog import watch
from dpuflow.schema import ring as schema_ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.live.base import Bytes

# What a program may take from its stamp to the record, so that what is older is complete on all CPUs and the
# records of all can be put in order; many times what it does take.
_GUARD_NS = 20_000
# The same for stamps that were made before the program ran: by the NIC, older by the time that a packet
# waits for the driver, or by the kernel, at tc, older by the time that it waits for another CPU.
_EARLY_GUARD_NS = 2_000_000
_SETTLED_S = 2 * schema_ring.RUN_NS / 1e9  # by then all runs have stood long enough


class EbpfCapture:
    """Programs loaded and attached as ``options`` ask, one set for each interface, with one ring."""

    def __init__(self, options: LiveOptions, compile: bool = False) -> None:
        """Attach; with ``compile`` programs that bcc makes now.

        Raises OptionError, MissingError, DpuflowError; nothing stays attached then.
        """
        self.interfaces = [find_interface(name) for name in options.interfaces]
        self.name = "bcc" if compile else "ebpf"
        self._options = self._checked(options)
        self.clock = StampClock()
        self.tally = np.zeros(kernel.D_SIZE, np.int64)
        self.tally[kernel.D_LEFT] = np.iinfo(np.int64).max
        self._attached = True
        self._places: list[place.Place] = []
        with ExitStack() as stack:
            self.ring = Ring.of_bytes(options.buffer)
            stack.callback(self.ring.close)
            self._wall = WallMap()
            stack.callback(self._wall.close)
            self._sampling = SampleMap(options.below)
            stack.callback(self._sampling.close)
            self._samples = options.below > 0  # whether the programs that are attached look at it
            shared = place.Shared(
                self.clock.start.real_ns, self.ring, self._wall.fd, self._sampling.fd, compile
            )
            for number, interface in enumerate(self.interfaces):
                if options.promiscuous:
                    stack.enter_context(take_all(interface.index, interface.name))
                each = place.Place(number, interface, options, shared)
                self._places.append(each)
                stack.callback(each.close)
            self.hooks = ", ".join(sorted({each.hook for each in self._places}))
            self.interfaces = [each.interface for each in self._places]
            early = any(each.stamped_early for each in self._places)
            self._guard_ns = _EARLY_GUARD_NS if early else _GUARD_NS
            self._dismiss = self._watch()
            self._stack = stack.pop_all()

    def _checked(self, options: LiveOptions) -> LiveOptions:
        if self.name == "bcc" and options.mode != "packets":
            raise OptionError("--backend bcc supports packets mode only")
        return options

    def _watch(self) -> Callable[[], None]:
        """Have what links do not hold removed when this process dies; what calls that off."""
        filters = [filter_ for each in self._places for filter_ in each.filters()]
        return watch(filters) if filters else lambda: None

    def read(self, out: Bytes, at: int) -> int:
        """Move what is in the ring to ``out`` from ``at`` on, as much as fits; where it ends."""
        self._wall.look()  # under load nobody waits
        limit = self._now() - self._guard_ns if self._attached else ALL
        return self.ring.drain(out, at, self.tally, limit, lambda: self._now() + STEP_NS)

    def _now(self) -> int:
        return time.monotonic_ns() + self.clock.start.real_ns

    def wait(self, seconds: float) -> None:
        """Sleep, and follow the wall clock when it is set."""
        self._wall.wait(seconds)

    @property
    def warnings(self) -> list[str]:
        """What is to be told of the stamps at the end."""
        texts = [text for each in self._places for text in each.warnings()]
        misdated = int(self.tally[kernel.D_MISDATED])
        if misdated:
            texts.append(
                f"{misdated} packets had impossible timestamps, as a clock was set at that moment: they got"
                " the time at which they were read from the ring"
            )
        return texts

    def ring_share(self) -> float:
        """How much of the ring is filled now, 0 to 1."""
        return self.ring.share()

    def take_peak(self) -> float:
        """The highest share at any look since the last call."""
        return self.ring.take_peak()

    def switch(self, options: LiveOptions) -> None:
        """Other programs in place of those attached, without a packet between that neither sees; but where
        sampling alone changes, those attached go on: loading others takes a tenth of a second of CPU.

        Ring and counters go on; runs that have begun are ended. Raises OptionError, MissingError,
        DpuflowError; then all is as before.
        """
        if self._samples and replace(options, sample=self._options.sample) == self._options:
            self._sampling.set(options.below)
            self._options = options
            for each in self._places:
                each.flush()
            return
        self._checked(options)
        with ExitStack() as unused:
            fresh = []
            for each in self._places:
                fresh.append(each.load(options, samples=True))
                unused.callback(fresh[-1].close)
            before = self._put(fresh)
            unused.pop_all()
        self._sampling.set(options.below)
        self._samples = True
        messages, self._options = self._options.mode == "messages", options
        dismiss, self._dismiss = self._dismiss, self._watch()  # of filters that are there no more
        dismiss()
        if messages:
            time.sleep(_SETTLED_S)
        for programs in before:
            place.flush(programs)
            programs.close()

    def _put(self, fresh: list[place.Programs]) -> list[place.Programs]:
        """Attach ``fresh`` everywhere or nowhere; what was attached before."""
        before: list[place.Programs] = []
        try:
            for each, programs in zip(self._places, fresh, strict=True):
                before.append(each.put(programs))
        except DpuflowError:
            for each, programs in zip(self._places, before, strict=False):
                each.put(programs)
            raise
        return before

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface. In messages mode runs that have stood long are ended first."""
        return [each.counters() for each in self._places]

    def detach(self) -> None:
        """Take the programs off the interfaces; the ring can still be read."""
        if not self._attached:
            return
        self._attached = False
        for each in self._places:
            each.detach()
        self._dismiss()
        if self._options.mode == "messages":
            time.sleep(_SETTLED_S)
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
    ring = Ring.of_bytes(1 << 17)
    try:
        for mode, more in (("packets", ()), ("messages", (place.FLUSH_TC,))):
            programs = (place.IN, place.OUT, place.XDP, *more)
            settings = LiveOptions(("lo",)).settings(0, 0)
            ring.set(settings)
            place.load(place.made(mode), [programs], settings, ring.maps()).close()
    finally:
        ring.close()
