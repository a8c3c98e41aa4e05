"""What every live backend gives: interfaces, pcapng blocks of packets, and counters of what was lost."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from dpuflow.errors import DpuflowError
from dpuflow.kernels.columns import MAX_CAPTURED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.live.clock import StampClock
    from dpuflow.live.options import LiveOptions

    Bytes = NDArray[np.uint8]
    Numbers = NDArray[np.int64]

OUT_BYTES: Final = 1 << 20  # blocks are handed on in pieces of this size, which stay in the cache
LARGEST_BLOCK: Final = MAX_CAPTURED + 256

_LOOPBACK: Final = 772  # ARPHRD_LOOPBACK
_ETHERNET_TYPES: Final = (1, _LOOPBACK)  # ARPHRD_ETHER is 1: both have Ethernet headers


@dataclass(frozen=True)
class Interface:
    """One interface to capture from."""

    name: str
    index: int
    mac: bytes
    clock: str = ""
    """What stamps its packets, in words, where it is not the kernel."""
    loopback: bool = False
    """What goes out comes in again: inbound alone has each packet once."""

    def called(self) -> str | None:
        """What it is called now: it may have been renamed. None: it is gone, whatever has its name."""
        try:
            return socket.if_indextoname(self.index)
        except OSError:
            return None

    def exists(self) -> bool:
        """Whether it is still there, and still the same one."""
        return self.called() is not None


class Backend(Protocol):
    """A running capture. Packets come out as whole enhanced packet blocks of pcapng, little endian, ns."""

    name: str
    interfaces: list[Interface]
    clock: StampClock
    hooks: str
    """How it is attached, in words."""
    tally: Numbers
    """``kernels/ring``: D_PACKETS and what follows."""

    def read(self, out: Bytes, at: int) -> int:
        """Move what has come to ``out`` from ``at`` on, as much as fits; where it ends."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep between two looks."""
        ...

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface, by name, since the start."""
        ...

    def ring_share(self) -> float:
        """How much of the ring is filled now, 0 to 1; of several the fullest."""
        ...

    def take_peak(self) -> float:
        """The highest ``ring_share`` at any look since the last call."""
        ...

    def switch(self, options: LiveOptions) -> None:
        """Go on with other filters, snap length, mode or sampling. Nothing that was counted or taken is lost.

        Interfaces, buffer and hook stay. Raises OptionError, MissingError, DpuflowError; all is then as
        before.
        """
        ...

    def detach(self) -> None:
        """Stop taking packets; what has been taken can still be read."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def find_interface(name: str) -> Interface:
    """The interface of that name. Raises DpuflowError."""
    try:
        index = socket.if_nametoindex(name)
    except OSError:
        known = ", ".join(sorted(each for _, each in socket.if_nameindex()))
        raise DpuflowError(
            f"{name or repr(name)}: no such interface; this machine has {known}{_hint(name)}"
        ) from None
    kind, mac = _hardware(name)
    if kind not in _ETHERNET_TYPES:
        raise DpuflowError(
            f"{name}: not an Ethernet interface (ARPHRD type {kind}); only Ethernet is captured"
        )
    return Interface(name, index, mac, loopback=kind == _LOOPBACK)


def _hint(name: str) -> str:
    """What to do where another tool's name of an interface was given."""
    if name == "any":
        return " (give -i for each of those that carry the job)"
    from dpuflow.live.rdma import SYS

    if name and name.isprintable() and "/" not in name and (SYS / "class/infiniband" / name).is_dir():
        return " (that is an RDMA device, captured by tcpdump or ibdump: README, Where to capture)"
    return ""


def _hardware(name: str) -> tuple[int, bytes]:
    """ARPHRD type and address, from the interface itself (/sys may show another network namespace)."""
    import fcntl

    request = name.encode().ljust(16, b"\0") + bytes(24)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, 0x8927, request)  # SIOCGIFHWADDR
    return int.from_bytes(answer[16:18], "little"), bytes(answer[18:24])


def object_path(mode: str = "packets") -> Path:
    """The programs of a mode, made beforehand by `make bpf`; DPUFLOW_BPF names another folder of them."""
    folder = os.environ.get("DPUFLOW_BPF") or Path(__file__).resolve().parent
    return Path(folder, f"{mode}.bpf.o")
