"""Word to systemd, as sd_notify(3): datagrams to the socket named in NOTIFY_SOCKET; nothing without it."""

from __future__ import annotations

import os
import socket
import time

from dpuflow.quantities import whole_number


def notify(*states: str) -> None:
    """Send states such as "READY=1"; failures are of no consequence."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto("\n".join(states).encode(), address)
    except OSError:
        return


def reloading() -> None:
    """Say that a reload has begun; READY=1 ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_s() -> float | None:
    """How often the watchdog wants to hear of us, half of its limit; None where there is none."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    limit = whole_number(usec)
    if limit is None or (pid and pid != str(os.getpid())):
        return None
    return limit / 2e6
