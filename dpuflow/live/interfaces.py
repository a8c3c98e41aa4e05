"""The interfaces of this machine, as ``dpuflow capture -D`` lists them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SYSFS = "/sys/class/net"


def interface_lines(sysfs: str = _SYSFS) -> Iterator[str]:
    """``1.eth2 [up, RDMA mlx5_0]``, one an interface: what ``tcpdump -D`` says, and which have RDMA."""
    for number, name in socket.if_nameindex():
        folder = Path(sysfs, name)
        facts = ["up" if _read(folder / "operstate") in ("up", "unknown") else "down"]
        devices = folder / "device" / "infiniband"
        facts += [f"RDMA {device}" for device in (sorted(os.listdir(devices)) if devices.is_dir() else [])]
        yield f"{number}.{name} [{', '.join(facts)}]"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
