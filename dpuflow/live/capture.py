"""A running live capture as pieces of a pcapng file, with its counters: what files, pipes and readers get."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.errors import OptionError
from dpuflow.kernels import ring as kernel
from dpuflow.live import blocks
from dpuflow.live.base import LARGEST_BLOCK, OUT_BYTES
from dpuflow.live.nic import NIC_LOSSES, NicCounters
from dpuflow.live.rdma import RdmaCounters
from dpuflow.schema.ring import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.live.base import Backend, Bytes
    from dpuflow.live.options import LiveOptions

BACKENDS: Final = ("ebpf", "bcc", "afpacket", "psample", "doca")
_PAUSE_S: Final = 0.01  # between looks while many packets come; a look costs some 100 us and more
_IDLE_PAUSE_S: Final = 0.05  # while few or none come, if the ring holds what may come meanwhile,
_PIECE: Final = 1 << 17  # bytes that are worth a look: of less one waits for more
_BURST: Final = 1.28e9  # bytes of ring a second: 8 million records of 160 bytes
_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Status:
    """How a capture stands: counts since the start, and rates over the last second or so."""

    seconds: float
    packets: int
    messages: int
    flows: int
    bytes: int
    lost: int
    packet_rate: float
    message_rate: float
    bit_rate: float
    ring_share: float
    """The fullest that the ring has been over the last second or so, 0 to 1."""


@dataclass(frozen=True)
class Summary:
    """What a capture has come to. ``reason`` says why it ended, if not as asked."""

    status: Status
    counters: list[dict[str, int]]
    interfaces: list[str]
    hooks: str
    warnings: list[str] = field(default_factory=list)
    reason: str | None = None


def open_backend(options: LiveOptions, backend: str = "ebpf") -> Backend:
    """Attach to the interfaces. Raises OptionError, MissingError, DpuflowError."""
    if backend in ("ebpf", "bcc"):
        from dpuflow.live.ebpf import EbpfCapture

        return EbpfCapture(options, compile=backend == "bcc")
    if backend == "afpacket":
        from dpuflow.live.afpacket import PacketCapture

        return PacketCapture(options)
    if backend == "doca":
        from dpuflow.live.doca import DocaCapture

        return DocaCapture(options)
    if backend == "psample":
        from dpuflow.live.psample import SampleCapture

        return SampleCapture(options)
    raise OptionError(f"{backend!r} is not a backend: {', '.join(BACKENDS)}")


class LiveCapture:
    """One capture. Iterate ``pieces`` to the end, then ``summary``; ``close`` in any case.

    For those who run for long: ``ring_share`` tells how near to losing packets it is, ``switch`` goes on with
    another mode or sampling, and ``restart`` begins anew after ``pieces`` has ended (an interface was gone).
    What was counted stays counted. All of it from the thread that iterates ``pieces``: between two pieces, or
    in ``stopped`` and ``every_second``, which are called whether packets come or not.
    """

    def __init__(self, options: LiveOptions, backend: str = "ebpf") -> None:
        """Attach. Raises OptionError, MissingError, DpuflowError."""
        self.options = options
        self.backend = open_backend(options, backend)
        self._closed = False
        self._start_s = self._begun_s = time.monotonic()
        self._nic = NicCounters([interface.index for interface in self.backend.interfaces])
        self._rdma = RdmaCounters([interface.name for interface in self.backend.interfaces])
        self._past: dict[str, dict[str, int]] = {}
        self._counters = self._count()
        self._warnings: list[str] = []
        self._reason: str | None = None
        self._before = (self._start_s, 0, 0, 0)
        self._status = Status(0.0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)

    def head(self) -> bytes:
        """The blocks that a file of this capture begins with."""
        options, backend = self.options, self.backend
        comment = f"{backend.clock.text()}; backend {backend.name}, {backend.hooks}"
        parts = [blocks.section_block(comment)]
        parts += [
            blocks.interface_block(interface, options.snaplen, options.filter_text())
            for interface in backend.interfaces
        ]
        return b"".join(parts)

    def statistics(self) -> bytes:
        """The statistics blocks as things stand."""
        start_ns = self.backend.clock.start.real_ns + round(self._start_s * 1e9)
        now_ns = self.backend.clock.start.real_ns + time.monotonic_ns()
        self._counters = self._count()
        return b"".join(
            blocks.statistics_block(
                number, now_ns, start_ns, counters, int(self.backend.tally[kernel.D_IFACES + number])
            )
            for number, counters in enumerate(self._counters)
        )

    def pieces(
        self,
        duration_s: float | None = None,
        count: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        every_second: Callable[[Status], None] | None = None,
        drained: Callable[[int], None] | None = None,
        hold: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[Bytes]:
        """Packet blocks as they come until time, packets or ``stopped`` end it. A piece holds until the next.

        ``drained`` is told until when (monotonic clock, ns) the ring has been read. ``hold`` says for how
        many seconds nothing is to be read; it is asked again before that has passed.

        The packets that were taken before the end are all there. Does not hold ``head`` and ``statistics``.
        """
        backend, tally = self.backend, self.backend.tally
        out = np.empty(OUT_BYTES + LARGEST_BLOCK, np.uint8)
        if count is not None:
            tally[kernel.D_LEFT] = count
        end_s = math.inf if duration_s is None else self._begun_s + duration_s
        next_s = self._begun_s + _EVERY_S
        pause_s, longest_s = _PAUSE_S, max(min(_IDLE_PAUSE_S, self.options.buffer / _BURST), _PAUSE_S)
        while tally[kernel.D_LEFT] > 0 and not stopped():
            looked_ns = time.monotonic_ns()
            hold_s = hold()
            filled = 0 if hold_s else backend.read(out, 0)
            if filled:
                yield out[:filled]
            if drained is not None and not hold_s and filled < OUT_BYTES // 2:
                drained(looked_ns)
            now_s = time.monotonic()
            if now_s >= end_s:
                break
            if now_s >= next_s:
                next_s = now_s + _EVERY_S
                self._look(now_s)
                if every_second is not None:
                    every_second(self._status)
                if self._reason is not None:
                    break
            if hold_s:
                backend.wait(min(hold_s, _IDLE_PAUSE_S, max(end_s - now_s, 0.0)))
            elif filled < OUT_BYTES // 2:
                pause_s = min(max(pause_s * min(_PIECE / max(filled, 1), 2.0), _PAUSE_S), longest_s)
                backend.wait(min(pause_s, max(end_s - now_s, 0.0)))
        backend.detach()
        while filled := backend.read(out, 0):
            yield out[:filled]
        self._look(time.monotonic())

    def ring_share(self) -> float:
        """How much of the ring is filled now, 0 to 1: at 1 packets are lost.

        ``Status.ring_share`` has the highest of the last second, by which an overload is told.
        """
        return 0.0 if self._closed else self.backend.ring_share()

    def switch(
        self, *, mode: str | None = None, sample: float | None = None, snaplen: int | None = None
    ) -> None:
        """Go on with another mode, sampling (of 2^sample pairs of hosts one) or snap length; None: as it is.

        Between two pieces; no packet is lost by it, none is counted twice, and runs of messages that have
        begun are ended. Raises OptionError, MissingError, DpuflowError; all is then as before.
        """
        wanted = {"mode": mode, "sample": sample, "snaplen": snaplen}
        options = replace(self.options, **{name: v for name, v in wanted.items() if v is not None})  # type: ignore[arg-type]
        self.backend.switch(options)
        self.options = options

    def restart(self, options: LiveOptions | None = None) -> None:
        """Attach anew, as before or by other ``options``, after ``pieces`` has ended or failed.

        Counters go on by interface, packets and messages in all; the ring and the clock's offset are new
        (``head`` tells it). Raises OptionError, MissingError, DpuflowError, and may be called again then.
        """
        if not self._closed:
            self._counters = self._count()
            names = [interface.name for interface in self.backend.interfaces]
            self._past |= dict(zip(names, self._counters, strict=True))
            self.close()
        options = options or self.options
        backend = open_backend(options, self.backend.name)
        backend.tally[: kernel.D_FLOWS] = self.backend.tally[: kernel.D_FLOWS]
        delivered = {
            interface.name: int(self.backend.tally[kernel.D_IFACES + number])
            for number, interface in enumerate(self.backend.interfaces)
        }
        for number, interface in enumerate(backend.interfaces):
            backend.tally[kernel.D_IFACES + number] = delivered.get(interface.name, 0)
        self._nic = NicCounters([interface.index for interface in backend.interfaces])
        self.backend, self.options, self._closed, self._reason = backend, options, False, None
        self._begun_s = time.monotonic()
        self._counters = self._count()

    def _look(self, now_s: float) -> None:
        """Counters, clock and interfaces as they are now."""
        backend, tally = self.backend, self.backend.tally
        self._counters = self._count()
        packets, messages, size = (int(tally[k]) for k in (kernel.D_PACKETS, kernel.D_ENDS, kernel.D_BYTES))
        before_s, *before = self._before
        span = max(now_s - before_s, 1e-9)
        rates = [(now - then) / span for now, then in zip((packets, messages, size), before, strict=True)]
        self._before = (now_s, packets, messages, size)
        lost = sum(counters[name] for counters in self._counters for name in (*LOSSES, *NIC_LOSSES))
        flows = int(tally[kernel.D_FLOWS])
        self._status = Status(
            now_s - self._start_s, packets, messages, _estimate(flows), size, lost,
            rates[0], rates[1], 8 * rates[2], backend.take_peak(),
        )  # fmt: skip
        step = backend.clock.check()
        if step and not self._warnings:
            self._warnings.append(
                f"the wall clock was stepped by {step / 1e9:+.3f} s during the capture;"
                f" {backend.clock.stepped}"
            )
        gone = [interface.name for interface in backend.interfaces if not interface.exists()]
        if gone:
            self._reason = f"{', '.join(gone)}: the interface is gone; everything captured before is kept"

    def _count(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface and its NIC_NAMES, since the start."""
        counted = []
        rows = zip(self.backend.interfaces, self.backend.counters(), self._nic.grown(), strict=True)
        for interface, counters, nic in rows:
            past = self._past.get(interface.name, {})
            counted.append({name: n + past.get(name, 0) for name, n in (counters | nic).items()})
        return counted

    def summary(self) -> Summary:
        """What the capture has come to, after the last piece."""
        names = [interface.name for interface in self.backend.interfaces]
        warnings = [*self._warnings, *getattr(self.backend, "warnings", ())]
        unseen = self._unseen()
        reason = self._reason or (unseen[0] if unseen and not self._status.packets else None)
        warnings += [text for text in unseen if text != reason]
        return Summary(self._status, self._counters, names, self.backend.hooks, warnings, reason)

    def _unseen(self) -> list[str]:
        """What RDMA devices moved past a capture that was to have RoCE and has none."""
        options = self.options
        asked = {"roce", "any"} & {*options.protocols} and not (options.hosts or options.qps or options.vlans)
        if not asked or self.backend.tally[kernel.D_ENDS] or self.backend.name in ("doca", "psample"):
            return []
        return self._rdma.unseen()

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS and NIC_NAMES of each interface since the start, as of the last look."""
        return self._counters

    def close(self) -> None:
        """Detach and give everything back."""
        self._closed = True
        self.backend.close()


def _estimate(used: int) -> int:
    """Flows from used cells of 65536, by linear counting."""
    cells = 1 << 16
    return round(-cells * math.log(1 - min(used, cells - 1) / cells))
