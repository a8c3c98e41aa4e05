"""The DOCA backend: copies that a BlueField's eSwitch makes, received by the adapter of ``doca_bindings/``.

The adapter is compiled on the card against its own DOCA (`make doca`). It hands over records laid out as in a
TPACKET_V3 block, so that the same kernel filters them as for packet sockets.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.kernels import packets as kernel
from dpuflow.kernels import ring
from dpuflow.live.afpacket import filter_words
from dpuflow.live.base import OUT_BYTES, Interface, find_interface
from dpuflow.live.clock import StampClock, WallClock
from dpuflow.live.doca_session import ANY, SLACK, Session, copied_protocols, describe
from dpuflow.schema.ring import COUNTER_NAMES

if TYPE_CHECKING:
    from dpuflow.live.base import Bytes, Numbers
    from dpuflow.live.options import LiveOptions

_PIECE: Final = OUT_BYTES // 2


@dataclass(frozen=True)
class Card(Interface):
    """A card named by its PCI address, with or without a network interface of its own."""

    def exists(self) -> bool:
        """Whether it is still there: a card without an interface always is."""
        return self.index == 0 or super().exists()


def find_card(name: str) -> tuple[Card, str]:
    """The card that an interface belongs to, or that a PCI address names, and that address.

    Raises OptionError, DpuflowError.
    """
    found = re.fullmatch(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", name.lower())
    if found:
        address = f"{found[1] or '0000'}:{found[2]}"
        return Card(address, 0, bytes(6)), address
    interface = find_interface(name)
    address = os.path.basename(os.path.realpath(f"/sys/class/net/{name}/device"))
    if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address):
        raise OptionError(
            f"{name}: is not the interface of a PCI device; name the card's uplink (p0) or its PCI address"
        )
    return Card(interface.name, interface.index, interface.mac), address


class _CopyClock(WallClock):
    """Stamps of copies."""

    def text(self) -> str:
        """How stamps relate to wall time, for the file."""
        return (
            "clock: CLOCK_REALTIME when the copy was received, or the card's own where its clock is within"
            f" a second of that; both come after the eSwitch; {self._ahead()}"
        )


class DocaCapture:
    """One card whose copies are captured."""

    name = "doca"

    def __init__(self, options: LiveOptions) -> None:
        """Set up. Raises OptionError, MissingError, DpuflowError; nothing stays then."""
        if len(options.interfaces) != 1:
            raise OptionError(
                "--backend doca captures from one card: start another process for the next card"
            )
        if options.mode != "packets":
            raise OptionError("--backend doca supports packets mode only")
        if not copied_protocols(options):
            raise OptionError("--backend doca copies RoCEv2, TCP or any IP: choose one")
        card, address = find_card(options.interfaces[0])
        self.interfaces: list[Interface] = [card]
        self.clock: StampClock = _CopyClock()
        self.warnings: list[str] = []
        self.tally = np.zeros(ring.D_SIZE, np.int64)
        self.tally[ring.D_LEFT] = np.iinfo(np.int64).max
        self._wanted = filter_words(options)
        self._seen: Bytes = np.zeros(1 << 16, np.uint8)
        self._counts: Numbers = np.zeros(len(kernel.VERDICTS), np.int64)
        self._found: Numbers = np.zeros(2, np.int64)
        self._piece: Bytes = np.zeros(_PIECE + SLACK, np.uint8)
        self._lost = self._broken = 0
        self._share = self._peak = 0.0
        self._taken = options
        facts = describe()
        self._session = Session(options, address)
        sampled = f", 1 of {1 << options.doca.sample} packets" if options.doca.sample else ""
        way = f"{self._session.method()} of DOCA {facts.version} at {address}"
        self.hooks = f"{way}, uplink to {options.doca.peer}{sampled}"

    def read(self, out: Bytes, at: int) -> int:
        """Move the records that have come to ``out`` from ``at`` on, as much as fits; where it ends."""
        while len(out) - at >= OUT_BYTES and self.tally[ring.D_LEFT] > 0:
            records, self._share = self._session.poll(self._piece)
            self._peak = max(self._peak, self._share)
            if not records:
                break
            at = int(
                kernel.drain_block(
                    self._piece,
                    0,
                    0,
                    self._wanted,
                    out,
                    at,
                    self.tally,
                    self._counts,
                    self._seen,
                    self._found,
                )
            )
        return at

    def wait(self, seconds: float) -> None:
        """Sleep between two looks."""
        time.sleep(seconds)

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of the copies. Those lost in the card's queue or before ``read`` are ``ring_full``."""
        try:
            found: dict[str, Any] = self._session.counters()
            self._lost, self._broken = found["ring_full"] + found["no_buffer"], found["broken"]
        except DpuflowError as error:
            if str(error) not in self.warnings:
                self.warnings.append(str(error))
        named = dict.fromkeys(COUNTER_NAMES, 0)
        named |= dict(zip(kernel.VERDICTS, map(int, self._counts), strict=True))
        named["ring_full"], named["unreadable"] = self._lost, self._broken
        return [named | {"seen": sum(named.values())}]

    def ring_share(self) -> float:
        """How full the ring was at the last look, 0 to 1."""
        return self._share

    def take_peak(self) -> float:
        """The highest share at any look since the last call."""
        peak, self._peak = self._peak, self._share
        return peak

    def switch(self, options: LiveOptions) -> None:
        """Filter the copies as ``options`` say from now on; the card goes on copying what it copies.

        Raises OptionError for what would need other copies.
        """
        before, now = copied_protocols(self._taken), copied_protocols(options)
        wanted = filter_words(options)
        if (
            options.mode != "packets"
            or (now & ~before and before != ANY)
            or wanted[kernel.P_SNAPLEN] > self._wanted[kernel.P_SNAPLEN]
            or (self._taken.qps and not set(options.qps or (-1,)) <= set(self._taken.qps))
        ):
            raise OptionError(
                "the card was set to copy less than that: stop this capture and start a new one"
            )
        self._wanted = wanted

    def detach(self) -> None:
        """Take the pipes out of production's way; what was copied can still be read."""
        try:
            self._session.stop()
        except DpuflowError as error:
            self.warnings.append(str(error))

    def close(self) -> None:
        """Give the card back."""
        try:
            self._session.close()
        except DpuflowError as error:
            self.warnings.append(str(error))
