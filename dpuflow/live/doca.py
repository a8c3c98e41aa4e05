"""The DOCA backend: copies that a BlueField's eSwitch makes, received by the adapter of ``doca_bindings/``.

Only the adapter is loaded, which is compiled on the card against its own DOCA (`make doca`). It hands over
records laid out as in a TPACKET_V3 block, so that the same kernel filters them as for packet sockets.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.errors import DpuflowError, MissingError, OptionError
from dpuflow.kernels import packets as kernel
from dpuflow.kernels import ring
from dpuflow.live import doca_abi
from dpuflow.live.afpacket import filter_words
from dpuflow.live.base import OUT_BYTES, Interface, find_interface
from dpuflow.live.clock import StampClock, WallClock
from dpuflow.schema_ring import COUNTER_NAMES, Protocol

if TYPE_CHECKING:
    from dpuflow.live.base import Bytes, Numbers
    from dpuflow.live.options import LiveOptions

_ROCE, _TCP, _ANY = 1, 2, 4  # enum dpuflow_doca_protocol
_METHODS: Final = {"auto": 0, "mirror": 1, "flood": 2}
_PRODUCTIONS: Final = {"pair": 0, "kernel": 1}
_PIECE: Final = OUT_BYTES // 2
_SLACK: Final = 64  # kernels read a little beyond a packet


@dataclass(frozen=True)
class Facts:
    """What the adapter was compiled against. ``release``: 207 is 2.7."""

    version: str
    release: int
    mirror: bool
    flooding: bool
    bth: bool
    dpdk: bool
    fresh_ms: int
    devices: int


@dataclass(frozen=True)
class Card(Interface):
    """A card named by its PCI address, with or without a network interface of its own."""

    def exists(self) -> bool:
        """Whether it is still there: a card without an interface always is."""
        return self.index == 0 or super().exists()


def adapter_path() -> Path:
    """The adapter: what DPUFLOW_DOCA names, else the one that `make doca` has made."""
    return Path(os.environ.get("DPUFLOW_DOCA") or Path(__file__).resolve().parent / "libdpuflow_doca.so")


def load_adapter() -> tuple[Any, Any]:
    """The adapter and its cffi. Raises MissingError."""
    try:
        from cffi import FFI
    except ImportError:
        raise MissingError(
            "the DOCA backend needs the Python package cffi: pip install 'dpuflow[doca]'"
        ) from None
    path = adapter_path()
    if not path.is_file():
        raise MissingError(
            f"{path} is not there: make it with `make doca` on the card itself, where the DOCA SDK is"
        )
    ffi = FFI()
    ffi.cdef(doca_abi.DECLARATIONS)
    try:
        library = ffi.dlopen(str(path))
        facts = ffi.new("struct dpuflow_doca_facts *")
        library.dpuflow_doca_describe(facts)
    except (OSError, AttributeError) as error:
        raise MissingError(f"{path} cannot be loaded: {error}") from None
    if facts.abi != doca_abi.ABI:
        raise MissingError(
            f"{path} was made for another version of dpuflow (its interface is {facts.abi}, not"
            f" {doca_abi.ABI}): make it anew with `make doca`"
        )
    return library, ffi


def describe() -> Facts:
    """What the adapter was compiled against, and how many devices DOCA sees. Raises MissingError."""
    library, ffi = load_adapter()
    facts = ffi.new("struct dpuflow_doca_facts *")
    library.dpuflow_doca_describe(facts)
    return Facts(
        ffi.string(facts.version).decode(), facts.release, bool(facts.mirror), bool(facts.flooding),
        bool(facts.bth), bool(facts.dpdk), facts.fresh_ms, facts.devices,
    )  # fmt: skip


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
        raise OptionError(f"{name}: belongs to no PCI device; name the card's uplink (p0) or its PCI address")
    return Card(interface.name, interface.index, interface.mac), address


def representor(name: str) -> str:
    """A representor as the adapter names it (hpf, vf3, sf7), from that or from its interface's name.

    Raises OptionError.
    """
    for pattern, kind in (
        (r"hpf|pf\d+hpf", "hpf"),
        (r"(?:pf\d+)?vf(\d+)", "vf"),
        (r"(?:en.*pf\d+)?sf(\d+)", "sf"),
    ):
        found = re.fullmatch(pattern, name)
        if found:
            return kind + (str(int(found[1])) if found.groups() else "")
    raise OptionError(
        f"{name!r} is no representor: hpf or pf0hpf is the host, vf3 or pf0vf3 its function 3, sf7 or"
        " en3f0pf0sf7 the scalable function 7"
    )


def _hardware_protocols(options: LiveOptions) -> int:
    """What the card is to copy: no less than the filter wants."""
    bits = options.protocol_bits()
    if bits & Protocol.OTHER:
        return _ANY
    return (_ROCE if bits & Protocol.ROCE_V2 else 0) | (_TCP if bits & Protocol.TCP else 0)


class Session:
    """An open session of the adapter."""

    def __init__(self, options: LiveOptions, address: str, copy_to: str = "") -> None:
        """Set up copies, to ``poll`` or to the representor ``copy_to``.

        Raises OptionError, MissingError, DpuflowError; all is given back then.
        """
        from dpuflow.live.dpu import Machine, taken_by

        self._library, self._ffi = load_adapter()
        if taken := taken_by(Machine()):
            raise DpuflowError(f"{address}: the eSwitch is taken: {taken}")
        wanted = options.doca
        settings = self._ffi.new("struct dpuflow_doca_options *")
        settings.abi, settings.bytes = doca_abi.ABI, self._ffi.sizeof("struct dpuflow_doca_options")
        settings.device = address.encode()
        settings.peer = representor(wanted.peer).encode()
        settings.copy_to = representor(copy_to).encode() if copy_to else b""
        settings.protocols = _hardware_protocols(options)
        settings.method, settings.production = _METHODS[wanted.method], _PRODUCTIONS[wanted.production]
        settings.sample = wanted.sample
        settings.snaplen = int(filter_words(options)[kernel.P_SNAPLEN])
        settings.frame, settings.ring = wanted.frame, options.buffer
        if describe().bth and options.qps and settings.protocols & _ROCE:
            settings.qps = len(options.qps)
            settings.qp[0 : len(options.qps)] = options.qps
        handle = self._ffi.new("dpuflow_doca **")
        self._raise(self._library.dpuflow_doca_open(settings, handle))
        self._handle = handle[0]
        self._counters = self._ffi.new("struct dpuflow_doca_counters *")

    def method(self) -> str:
        """How copies are made, in words."""
        return str(self._ffi.string(self._library.dpuflow_doca_method_name(self._handle)).decode())

    def poll(self, room: Bytes) -> tuple[int, float]:
        """Fill ``room`` with a block of records; how many there are, and how full the ring was, 0 to 1."""
        place = self._ffi.from_buffer("struct dpuflow_doca_block *", room)
        self._raise(self._library.dpuflow_doca_poll(self._handle, place, len(room) - _SLACK))
        return place.records, place.waiting / max(place.ring, 1)

    def counters(self) -> dict[str, int | list[int]]:
        """The struct dpuflow_doca_counters by name. Raises DpuflowError."""
        self._raise(self._library.dpuflow_doca_count(self._handle, self._counters))
        found = self._counters
        return {
            "production": list(found.production),
            "copied": list(found.copied),
            **{
                name: getattr(found, name)
                for name in ("received", "ring_full", "no_buffer", "broken", "hardware")
            },
        }

    def stop(self) -> None:
        """No more copies; what has come can still be polled. Raises DpuflowError."""
        self._raise(self._library.dpuflow_doca_stop(self._handle))

    def close(self) -> None:
        """Give the card back. Raises DpuflowError where it made trouble; the session is over all the same."""
        handle, self._handle = self._handle, None
        if handle:
            self._raise(self._library.dpuflow_doca_close(handle))

    def _raise(self, status: int) -> None:
        if status == doca_abi.OK:
            return
        text = self._ffi.string(self._library.dpuflow_doca_error()).decode()
        kinds = {doca_abi.REFUSED: OptionError, doca_abi.MISSING: MissingError}
        raise kinds.get(status, DpuflowError)(text)


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
                "--backend doca captures from one card at a time: start a process for each other one"
            )
        if options.mode != "packets":
            raise OptionError("--backend doca has packets mode alone")
        if not _hardware_protocols(options):
            raise OptionError("--backend doca copies RoCEv2, TCP or any IP: choose one of them")
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
        self._piece: Bytes = np.zeros(_PIECE + _SLACK, np.uint8)
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
        before, now = _hardware_protocols(self._taken), _hardware_protocols(options)
        wanted = filter_words(options)
        if (
            options.mode != "packets"
            or (now & ~before and before != _ANY)
            or wanted[kernel.P_SNAPLEN] > self._wanted[kernel.P_SNAPLEN]
            or (self._taken.qps and not set(options.qps or (-1,)) <= set(self._taken.qps))
        ):
            raise OptionError("the card copies less than that: end this capture, and begin another one")
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
