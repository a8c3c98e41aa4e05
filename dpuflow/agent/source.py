"""The thread that takes packets from the interfaces into the Stream, whatever becomes of the interfaces.

In: the configuration's ``capture`` section. Out: what is held in ``stream`` (under ``lock``), until when the
interfaces were read, counters of what was lost. An interface that goes is waited for; the others go on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from dpuflow.agent.interfaces import Links, present
from dpuflow.errors import DpuflowError, OptionError
from dpuflow.kernels import columns as c
from dpuflow.live.base import OUT_BYTES
from dpuflow.live.capture import LiveCapture
from dpuflow.live.options import DocaOptions, LiveOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.config import Capture as Settings
    from dpuflow.agent.log import Log
    from dpuflow.agent.stream import Stream
    from dpuflow.capture.pcapng import Pcapng
    from dpuflow.live.capture import Status

RETRY_S: Final = 1.0
BEHIND_NS: Final = {"afpacket": 30_000_000, "doca": 30_000_000}
"""How long a backend may keep packets to itself before it hands them over."""


@dataclass
class State:
    """How the capture stands; replaced as a whole."""

    interfaces: dict[str, bool] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)  # COUNTER_NAMES, NIC_NAMES since the start
    status: Status | None = None
    hooks: str = ""
    clock_steps: int = 0
    error: str | None = None  # why nothing is captured at present


class Source:
    """Start it, then ask for ``read_until_ns``, ``state`` and what clock steps there were."""

    def __init__(
        self, settings: Settings, stream: Stream, lock: threading.Lock, log: Log,
        pace: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        """``pace`` is asked before each piece for how many seconds to wait, to keep the ceilings."""
        self.settings, self.stream, self.lock, self.log = settings, stream, lock, log
        self.pace = pace
        self.mode, self.sample = settings.mode, float(settings.sample)
        self.switch_s = 0.0  # CPU seconds that going on with other programs has taken in all
        self.switches = 0  # how often detail was changed in all
        self._links = Links()
        self._refused: set[tuple[str, float]] = set()  # what the backend cannot do
        self.state = State()
        self.read_until_ns = 0
        self._pending_step_ns = 0
        self._stepped_ns = 0
        self._stop = threading.Event()
        self._again = threading.Event()
        self._capture: LiveCapture | None = None
        self._thread = threading.Thread(target=self._run, name="dpuflow-capture", daemon=True)

    def start(self) -> None:
        """Attach, and take packets from now on. Raises OptionError, MissingError, DpuflowError."""
        self._open()
        self._thread.start()

    def names(self) -> list[str]:
        """The interfaces that are, or will be, captured from."""
        return self._links.wanted(self.settings.interfaces)

    def close(self) -> None:
        """Detach; what was taken before is in the stream."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(30)
        elif self._capture is not None:
            self._capture.close()

    def degrade(self, mode: str, sample: float) -> None:
        """Go on with less detail, or more, from the next piece on."""
        if (mode, sample) not in self._refused:
            self.mode, self.sample = mode, sample

    def reconfigure(self, settings: Settings) -> None:
        """Attach anew by other settings."""
        self.settings = settings
        self.mode, self.sample = settings.mode, float(settings.sample)
        self._again.set()

    def take_clock_step(self) -> int:
        """By how much the wall clock has been set since the last call; ask under the lock."""
        step, self._pending_step_ns = self._pending_step_ns, 0
        return step

    def taken(self) -> int:
        """Packets read from the ring since the capture began, as of the last look; those of a run count."""
        status = self.state.status
        return 0 if status is None else status.packets

    def obeyed(self) -> bool:
        """Whether what arrives now is of the last order."""
        options = None if self._capture is None else self._capture.options
        return options is None or (self.mode, self.sample) == (options.mode, options.sample)

    def ring_share(self) -> float | None:
        """How much of the ring is filled, None where nothing is captured."""
        status = self.state.status
        return None if status is None else status.ring_share

    def _options(self, interfaces: list[str]) -> LiveOptions:
        s = self.settings
        return LiveOptions(
            tuple(interfaces), s.snaplen, tuple(s.protocols), tuple(s.hosts), tuple(s.ports), tuple(s.qps),
            tuple(s.vlans), self.sample, s.buffer, s.hook, self.mode,
            DocaOptions(s.peer, s.copy_by, s.production),
        )  # fmt: skip

    def _open(self) -> None:
        """Attach to those of the interfaces that are there."""
        names = self.names()
        there = [name for name in names if present(name)]
        self.state = replace(self.state, interfaces={name: name in there for name in names})
        if not there:
            raise DpuflowError(
                f"{', '.join(names)}: no such interface"
                if names
                else "no Ethernet interface is up: name some in capture.interfaces"
            )
        options = self._options(there)
        if self._capture is None:
            self._capture = LiveCapture(options, self.settings.backend)
        else:
            self._capture.restart(options)

    def _run(self) -> None:
        """Capture, and begin again whenever that ends, until told to stop."""
        first = True
        while not self._stop.is_set():
            try:
                if not first:
                    # Before it is obeyed: where nothing can be opened, it must not be taken for a new order.
                    self._again.clear()
                    self._open()
                first = False
                self.state = replace(self.state, error=None)
                self._take()
            except DpuflowError as error:
                self._fail(str(error))
            except OSError as error:
                self._fail(f"the capture failed: {error.strerror or error}")
            if not self._stop.is_set() and not self._again.is_set():
                self._stop.wait(RETRY_S)
        if self._capture is not None:
            self._capture.close()
        self._links.close()

    def _fail(self, text: str) -> None:
        if self.state.error != text:
            self.log.warning("capture_failed", text)
        gone = {name: present(name) and there for name, there in self.state.interfaces.items()}
        self.state = replace(self.state, error=text, interfaces=gone, status=None)

    def _take(self) -> None:
        """One capture from its beginning to its end."""
        import numpy as np

        from dpuflow.capture.pcapng import Pcapng

        capture = self._capture
        assert capture is not None
        form = Pcapng()
        with self.lock:
            self.stream.feed(form, np.frombuffer(capture.head(), np.uint8).copy())
        self._stepped_ns = 0
        clock = capture.backend.clock
        follows = clock.start.real_ns
        behind_ns = BEHIND_NS.get(capture.backend.name, 0)
        self.log.info(
            "capture_started",
            f"capturing from {', '.join(i.name for i in capture.backend.interfaces)} by"
            f" {capture.backend.name} ({capture.backend.hooks}), {self.mode} mode",
        )

        def drained(monotonic_ns: int) -> None:
            self.read_until_ns = monotonic_ns + follows + self._stepped_ns - behind_ns

        def look(status: Status) -> None:
            self._look(capture, form, status)

        def hold() -> float:
            # Before it waits: what arrives while nothing is read is to be of the new order, too.
            if (self.mode, self.sample) != (capture.options.mode, capture.options.sample):
                self._switch(capture)
            return self.pace()

        for piece in capture.pieces(
            stopped=lambda: self._stop.is_set() or self._again.is_set(), every_second=look, drained=drained,
            hold=hold,
        ):  # fmt: skip
            with self.lock:
                self.stream.feed(form, piece)
            if len(piece) >= OUT_BYTES // 2:  # the ring is not empty: it is read in the order of time
                last_ns = min(self.stream.info.last_ns or 0, time.time_ns()) - behind_ns
                self.read_until_ns = max(self.read_until_ns, last_ns)
        reason = capture.summary().reason
        if reason is not None:
            raise DpuflowError(reason)

    def _switch(self, capture: LiveCapture) -> None:
        """Go on with another mode or sampling; as before where that fails."""
        used_s = time.thread_time()
        try:
            capture.switch(mode=self.mode, sample=self.sample)
        except DpuflowError as error:
            self.log.warning("switch_failed", f"keeping the current capture: {error}")
            self._refused.add((self.mode, self.sample))
            self.mode, self.sample = capture.options.mode, capture.options.sample
        self.switch_s += time.thread_time() - used_s
        self.switches += 1

    def _look(self, capture: LiveCapture, form: Pcapng, status: Status) -> None:
        """Counters, clock and interfaces, once a second."""
        losses: dict[str, int] = {}
        for counters in capture.counters():
            for name, count in counters.items():
                losses[name] = losses.get(name, 0) + count
        steps = self.state.clock_steps
        clock = capture.backend.clock
        moved = clock.check() - self._stepped_ns
        if abs(moved) > clock.noise_ns:
            with self.lock:
                self.stream.shift(moved)
                self._pending_step_ns += moved
                if capture.backend.name not in BEHIND_NS:  # their stamps follow the clock by themselves
                    form.interfaces[:, c.I_OFFSET] += moved
            self._stepped_ns += moved
            steps += 1
            self.log.warning(
                "clock_step", f"the wall clock was stepped by {moved / 1e9:+.3f} s; timestamps follow it"
            )
        names = self.names()
        alive = [interface for interface in capture.backend.interfaces if interface.exists()]
        attached = {name for each in alive for name in (each.name, each.called()) if name}
        there = {name: name in attached for name in names}
        for name, now in there.items():
            if not now and present(name):
                self._again.set()  # it has come, or come back
        self.state = State(there, losses, status, capture.backend.hooks, steps, None)


def check_settings(settings: Settings) -> None:
    """Raise OptionError for what cannot be captured by."""
    names = [name for name in settings.interfaces if name != "auto"]
    if len(names) < len(settings.interfaces) and names:
        raise OptionError("capture.interfaces: give either auto or interface names")
    LiveOptions(
        tuple(names) or ("auto",), settings.snaplen, tuple(settings.protocols), tuple(settings.hosts),
        tuple(settings.ports), tuple(settings.qps), tuple(settings.vlans), settings.sample, settings.buffer,
        settings.hook, settings.mode, DocaOptions(settings.peer, settings.copy_by, settings.production),
    )  # fmt: skip
