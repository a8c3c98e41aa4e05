"""The adapter of ``doca_bindings/``, loaded, and a session of it. Nothing else of DOCA is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dpuflow.errors import DpuflowError, MissingError, OptionError
from dpuflow.kernels import packets as kernel
from dpuflow.live import doca_abi
from dpuflow.live.afpacket import filter_words
from dpuflow.schema.ring import Protocol

if TYPE_CHECKING:
    from dpuflow.live.base import Bytes
    from dpuflow.live.options import LiveOptions

_ROCE, _TCP, ANY = 1, 2, 4  # enum dpuflow_doca_protocol
_METHODS: Final = {"auto": 0, "mirror": 1, "flood": 2}
_PRODUCTIONS: Final = {"pair": 0, "kernel": 1}
SLACK: Final = 64  # kernels read a little beyond a packet


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


def adapter_path() -> Path:
    """The adapter: what DPUFLOW_DOCA names, else the one that `make doca` has made."""
    return Path(os.environ.get("DPUFLOW_DOCA") or Path(__file__).resolve().parent / "libdpuflow_doca.so")


def load_adapter() -> tuple[Any, Any]:
    """The adapter and its cffi. Raises MissingError."""
    try:
        from cffi import FFI
    except ImportError:
        raise MissingError(
            "the DOCA backend needs the Python package cffi: pip install '.[doca]' in the dpuflow checkout"
        ) from None
    path = adapter_path()
    if not path.is_file():
        raise MissingError(f"{path} not found: build it with `make doca` on the card, where the DOCA SDK is")
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
            f"{path} was built for another version of dpuflow (interface {facts.abi}, not"
            f" {doca_abi.ABI}): rebuild it with `make doca`"
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
        f"{name!r} is not a representor: hpf or pf0hpf is the host, vf3 or pf0vf3 its function 3, sf7 or"
        " en3f0pf0sf7 the scalable function 7"
    )


def copied_protocols(options: LiveOptions) -> int:
    """What the card is to copy: no less than the filter wants."""
    bits = options.protocol_bits()
    if bits & Protocol.OTHER:
        return ANY
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
            raise DpuflowError(f"{address}: the eSwitch is in use: {taken}")
        wanted = options.doca
        settings = self._ffi.new("struct dpuflow_doca_options *")
        settings.abi, settings.bytes = doca_abi.ABI, self._ffi.sizeof("struct dpuflow_doca_options")
        settings.device = address.encode()
        settings.peer = representor(wanted.peer).encode()
        settings.copy_to = representor(copy_to).encode() if copy_to else b""
        settings.protocols = copied_protocols(options)
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
        self._raise(self._library.dpuflow_doca_poll(self._handle, place, len(room) - SLACK))
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
