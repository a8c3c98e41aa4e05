"""What to capture and how: the options of a live capture, checked, and the programs' settings from them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.errors import OptionError
from dpuflow.schema import ring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_SNAPLEN: Final = 128
DEFAULT_BUFFER: Final = 64 << 20
MIN_SNAPLEN: Final = 64  # all that a RoCEv2 or TCP packet over IPv4 is judged by, and the smallest size class
MIN_BUFFER: Final = 1 << 16  # a page of arm64 kernels with the largest ones; rings are whole pages
MAX_BUFFER: Final = 1 << 31  # the largest power of two that the kernel takes as a ring's size

PROTOCOLS: Final = {
    "roce": ring.Protocol.ROCE_V2 | ring.Protocol.ROCE_V1 | ring.Protocol.PAUSE,
    "tcp": int(ring.Protocol.TCP),
    "any": sum(ring.Protocol),
}
MODES: Final = ("packets", "messages")
HOOKS: Final = ("auto", "tcx", "clsact", "xdp", "xdp-generic")
TIMESTAMPS: Final = ("auto", "kernel", "hardware")
MAX_SAMPLE: Final = 16


PSAMPLE_GROUP: Final = 55776
DOCA_METHODS: Final = ("auto", "mirror", "flood")
PRODUCTIONS: Final = ("pair", "kernel")


@dataclass(frozen=True)
class DocaOptions:
    """How a BlueField makes copies. ``sample``: of 2^k packets one is copied; ``frame``: bytes at most."""

    peer: str = "hpf"
    method: str = "auto"
    production: str = "pair"
    sample: int = 0
    frame: int = 9216

    def __post_init__(self) -> None:
        """Raise OptionError for what cannot be."""
        for value, known in ((self.method, DOCA_METHODS), (self.production, PRODUCTIONS)):
            if value not in known:
                raise OptionError(f"{value!r} is not one of {', '.join(known)}")


@dataclass(frozen=True)
class LiveOptions:
    """What to capture. ``sample``: of 2^k pairs of hosts one is kept. ``timestamps``: the kernel's, the NIC's
    (hardware), or those of the NIC where it has been told to stamp (auto)."""

    interfaces: tuple[str, ...]
    snaplen: int = DEFAULT_SNAPLEN
    protocols: tuple[str, ...] = ("roce", "tcp")
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    qps: tuple[int, ...] = ()
    vlans: tuple[int, ...] = ()
    sample: float = 0
    buffer: int = DEFAULT_BUFFER
    hook: str = "auto"
    mode: str = "packets"
    doca: DocaOptions = DocaOptions()
    timestamps: str = "auto"
    promiscuous: bool = False
    group: int = PSAMPLE_GROUP

    def __post_init__(self) -> None:
        """Raise OptionError for what cannot be."""
        if not self.interfaces:
            raise OptionError("name at least one interface to capture from")
        if len(set(self.interfaces)) < len(self.interfaces):
            raise OptionError("an interface is named twice")
        self._check_manner()
        self._check_filters()

    def _check_filters(self) -> None:
        for what, values, most in (
            ("interfaces", self.interfaces, 255),
            ("hosts", self.hosts, ring.MAX_HOSTS),
            ("ports", self.ports, ring.MAX_PORTS),
            ("QPs", self.qps, ring.MAX_QPS),
            ("VLANs", self.vlans, ring.MAX_VLANS),
        ):
            if len(values) > most:
                raise OptionError(f"{len(values)} {what} given; at most {most} are supported")
        for host in self.hosts:
            address_words(host)
        bits = self.protocol_bits()
        for what, numbers, bit, protocol in (
            ("port", self.ports, ring.Protocol.TCP, "tcp"),
            ("QP", self.qps, ring.Protocol.ROCE_V2, "roce"),
        ):
            if numbers and not bits & bit:
                raise OptionError(
                    f"{what} {numbers[0]} is of protocol {protocol}, and {', '.join(self.protocols)} alone is"
                    " captured"
                )
        for what, numbers, top in (
            ("port", self.ports, 65535),
            ("QP", self.qps, 0xFFFFFF),
            ("VLAN", self.vlans, 4094),
        ):
            for number in numbers:
                if not 0 <= number <= top:
                    raise OptionError(f"{number} is not a {what}: must be 0 to {top}")

    def _check_manner(self) -> None:
        for word, value, words in (
            ("mode", self.mode, MODES),
            ("hook", self.hook, HOOKS),
            ("stamp", self.timestamps, TIMESTAMPS),
        ):
            if value not in words:
                raise OptionError(f"{value!r} is not a {word}: {', '.join(words)}")
        if self.timestamps == "hardware" and self.hook == "xdp-generic":
            raise OptionError("hardware timestamps need --hook tcx, clsact or xdp")
        if self.snaplen and not MIN_SNAPLEN <= self.snaplen <= ring.MAX_SNAPLEN:
            raise OptionError(
                f"snap length {self.snaplen} is out of range: {MIN_SNAPLEN} (the headers) to"
                f" {ring.MAX_SNAPLEN}, or 0 for whole packets"
            )
        if not MIN_BUFFER <= self.buffer <= MAX_BUFFER:
            raise OptionError(f"a buffer of {self.buffer} bytes: must be 64Ki to 2Gi")
        if not 0 <= self.sample <= MAX_SAMPLE:
            raise OptionError(f"sampling 1 of 2^{self.sample:g} pairs of hosts: must be 0 to {MAX_SAMPLE}")

    @property
    def below(self) -> int:
        """Of 2^32 pairs of hosts, how many are left out."""
        share: float = 0.5**self.sample
        return (1 << 32) - round((1 << 32) * share)

    def settings(self, iface: int, clock_ns: int) -> NDArray[np.void]:
        """The SETTINGS row of the programs of interface number ``iface``."""
        row = ring.SETTINGS.zeros(1)
        row["clock_ns"], row["schema"], row["iface"] = clock_ns, ring.layout_number(), iface
        row["snaplen"] = self.snaplen or ring.MAX_SNAPLEN
        row["protocols"] = self.protocol_bits()
        row["sample"] = self.below
        for k, (high, low) in enumerate(map(address_words, self.hosts)):
            row["host_hi"][0, k], row["host_lo"][0, k] = high, low
        for name, count, values in (
            ("qp", "qps", self.qps),
            ("port", "ports", self.ports),
            ("vlan", "vlans", self.vlans),
        ):
            row[name][0, : len(values)] = values
            row[count] = len(values)
        row["hosts"] = len(self.hosts)
        return row

    def protocol_bits(self) -> int:
        """``Protocol`` bits."""
        bits = 0
        for name in self.protocols:
            if name not in PROTOCOLS:
                raise OptionError(f"{name!r} is not a protocol: {', '.join(PROTOCOLS)}")
            bits |= PROTOCOLS[name]
        return bits

    def filter_text(self) -> str:
        """The filter in words, for the file."""
        parts = [f"protocol {','.join(self.protocols)}"]
        for word, values in (
            ("host", self.hosts),
            ("port", self.ports),
            ("qp", self.qps),
            ("vlan", self.vlans),
        ):
            if values:
                parts.append(f"{word} {','.join(map(str, values))}")
        if self.sample:
            parts.append(f"sample 1 of {2**self.sample:.3g} pairs of hosts")
        return "; ".join(parts)


def address_words(text: str) -> tuple[int, int]:
    """An address as ENDPOINT has it: two 64-bit numbers, IPv4 as ::ffff:a.b.c.d. Raises OptionError."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise OptionError(f"host {text!r} is not an IPv4 or IPv6 address") from None
    number = int(address) if address.version == 6 else 0xFFFF << 32 | int(address)
    return number >> 64, number & (1 << 64) - 1
