"""How well this machine's wall clock is kept, as PTP's or NTP's daemon or the kernel tells it, in words."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from typing import Final

_UNSYNCHRONISED: Final = 0x40  # STA_UNSYNC (linux/timex.h)
_ANSWER_S: Final = 3.0


def clock_state() -> str:
    """One line: the daemon that keeps the clock and its offset, or the kernel's estimate."""
    return _ptp() or _chrony() or _kernel()


def _ask(*command: str) -> str:
    """What a command prints, "" where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _ptp() -> str:
    """linuxptp's own words: the NIC's clock against its grandmaster."""
    told = dict(re.findall(r"^\s+(\w+)\s+(\S+)$", _ask("pmc", "-u", "-b", "0", "GET TIME_STATUS_NP"), re.M))
    if told.get("gmPresent") != "true" or "master_offset" not in told:
        return ""
    return (
        f"PTP: {int(told['master_offset']):+,} ns from its grandmaster {told.get('gmIdentity', '')}".rstrip()
    )


def _chrony() -> str:
    """chronyd's estimate of the clock's offset, and its bound: half the root delay and the dispersion."""
    fields = _ask("chronyc", "-c", "tracking").strip().split(",")
    try:
        offset, delay, dispersion = (float(fields[k]) for k in (4, 10, 11))
    except (IndexError, ValueError):
        return ""
    if fields[13:14] == ["Not synchronised"]:
        return "NTP: chronyd is not synchronised"
    bound = (delay / 2 + dispersion) * 1e6
    return f"NTP: chronyd, {offset * 1e6:+,.1f} us from {fields[1]}, within {bound:,.0f} us"


def _kernel() -> str:
    """What whoever steers the clock has told the kernel (adjtimex(2))."""
    state = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).adjtimex(state) < 0:
        return "synchronisation unknown"
    (most,), (status,) = struct.unpack_from("=q", state.raw, 24), struct.unpack_from("=i", state.raw, 40)
    if status & _UNSYNCHRONISED:
        return "not synchronised (no PTP, no NTP)"
    return f"synchronised, within {most:,} us according to the kernel"
