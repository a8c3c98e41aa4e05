"""RDMA devices behind interfaces: the adapter moves their packets, so that no capture of the host has them.

In: names of interfaces. Out: the devices that sysfs shows behind them, and how their port counters grow
(Linux: Documentation/ABI/stable/sysfs-class-infiniband). Software devices (rxe, siw) send through the kernel.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
_COUNTERS: Final = ("port_rcv_packets", "port_xmit_packets")
FEW: Final = 100
"""Packets of an RDMA port that may be the host's own chatter (connection management) rather than a job."""
WHERE: Final = (
    "capture on the BlueField in DPU mode (dpuflow mirror), at the switch (SPAN, ERSPAN) or from the RDMA"
    " device (README, Where to capture)"
)


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device of hardware, behind ``interface``."""

    interface: str
    device: str
    port: int

    def packets(self) -> int | None:
        """Packets that it has sent and received so far; None where it does not say."""
        folder = SYS / "class/infiniband" / self.device / "ports" / str(self.port) / "counters"
        try:
            return sum(int((folder / name).read_text(encoding="ascii")) for name in _COUNTERS)
        except (OSError, ValueError):
            return None


def ports_of(interface: str) -> list[RdmaPort]:
    """The ports behind an interface, of a bond or VLAN those behind the interfaces below it."""
    folder = SYS / "class/net" / interface
    with suppress(OSError):
        devices = sorted(each.name for each in (folder / "device/infiniband").iterdir())
        return [RdmaPort(interface, device, _port(folder, device)) for device in devices]
    with suppress(OSError):
        below = sorted(each.name.removeprefix("lower_") for each in folder.glob("lower_*"))
        return [port for name in below for port in ports_of(name)]
    return []


def _port(folder: Path, device: str) -> int:
    """The device's port of an interface: its dev_port counts from 0, where the device has as many."""
    with suppress(OSError, ValueError):
        port = int((folder / "dev_port").read_text(encoding="ascii")) + 1
        if (SYS / "class/infiniband" / device / "ports" / str(port)).is_dir():
            return port
    return 1


def bypassed(interfaces: list[str]) -> list[str]:
    """For each interface with RDMA devices of hardware a sentence that says what no capture of it has."""
    return [
        f"{name}: RoCE by {' and '.join(port.device for port in ports)} bypasses the kernel and does not"
        f" show on {name}: {WHERE}"
        for name in interfaces
        if (ports := ports_of(name))
    ]


class RdmaCounters:
    """How many packets the RDMA ports behind some interfaces have moved since this was made."""

    def __init__(self, interfaces: list[str]) -> None:
        ports = [port for name in interfaces for port in ports_of(name)]
        self._start = [(port, count) for port in ports if (count := port.packets()) is not None]

    def unseen(self) -> list[str]:
        """A sentence for each device whose port counters have grown, for captures without a RoCE packet."""
        grown = [(port, (port.packets() or count) - count) for port, count in self._start]
        return [
            f"{port.interface}: its RDMA device {port.device} moved {count:,} packets during the capture, but"
            f" no RoCE showed here, as it bypasses the kernel: {WHERE}"
            for port, count in grown
            if count >= FEW
        ]
