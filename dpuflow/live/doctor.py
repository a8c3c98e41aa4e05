"""What this machine allows: each condition of a live capture, tried as capture would, with what to do."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dpuflow.errors import DpuflowError
from dpuflow.live.options import LiveOptions

if TYPE_CHECKING:
    from collections.abc import Callable

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_PERFMON": 38, "CAP_BPF": 39}
_HOOKS = ("tcx", "clsact", "xdp-generic")
_SYS_ADMIN = 21  # counts as CAP_BPF and CAP_PERFMON


@dataclass(frozen=True)
class Check:
    """One condition: whether it is met, and in words. ``needed``: what was asked for needs it."""

    name: str
    met: bool
    text: str
    needed: bool = False

    @property
    def absent(self) -> bool:
        """Whether it is only what this machine has not: no fault of a plain host."""
        return not self.met and self.text.startswith(("no BlueField found", "no ovs-vsctl"))


def examine(interfaces: list[str]) -> list[Check]:
    """Every condition, and each of ``interfaces``. Nothing is attached to any interface of the machine."""
    programs = _tried("programs", _programs)
    checks = [_kernel(), _privileges(), _tried("libbpf", _libbpf), programs]
    hooks = []
    if programs.met:
        hooks = [_tried(hook, partial(_in_own_network, partial(_hook, hook))) for hook in _HOOKS]
    packet = _tried("afpacket", _afpacket)
    works = any(check.met for check in hooks)
    verdict = Check(
        "capture",
        works or packet.met,
        "works"
        if works
        else "works only with --backend afpacket"
        if packet.met
        else "does not work on this machine; see above",
        needed=True,
    )
    return [
        *checks,
        *hooks,
        packet,
        *(_interface(name) for name in interfaces),
        *_rdma(interfaces),
        _clock(),
        _leftovers(),
        *_card(),
        verdict,
    ]


def clean() -> list[str]:
    """Remove filters that a killed dpuflow has left in this network namespace; from which interfaces."""
    from dpuflow.live.ebpf import remove_leftovers

    return remove_leftovers()


def clean_mirrors() -> list[str]:
    """Undo mirrors that a killed dpuflow has left in this network namespace; the commands that are undone."""
    from dpuflow.live.mirror.base import clean

    return clean()


def _card() -> list[Check]:
    """The card, tc and OVS."""
    from dpuflow.live import dpu

    return [Check(*line) for line in dpu.examine(_in_own_network)]


def _tried(name: str, attempt: Callable[[], str]) -> Check:
    try:
        return Check(name, True, attempt())
    except DpuflowError as error:
        return Check(name, False, str(error))


def _kernel() -> Check:
    release = os.uname().release
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2]]
    old = tuple(numbers) < (5, 8)
    btf = "with" if os.path.exists("/sys/kernel/btf/vmlinux") else "without"
    text = f"Linux {release}, {os.uname().machine}, {btf} BTF (not needed)"
    return Check(
        "kernel", not old, text + ("; eBPF capture needs 5.8 or later: use --backend afpacket" if old else "")
    )


def _privileges() -> Check:
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if held >> _SYS_ADMIN & 1:
        missing = [name for name in missing if name not in ("CAP_BPF", "CAP_PERFMON")]
    return Check("privileges", not missing, f"missing: {', '.join(missing)}" if missing else "sufficient")


def _in_own_network(attempt: Callable[[], str]) -> str:
    """``attempt`` in a child with a network namespace of its own, so that nobody's traffic is touched."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            words = "+" + attempt() if _leave_network() else "+not tried: needs CAP_SYS_ADMIN"
        except DpuflowError as error:
            words = "-" + str(error)
        except BaseException as error:
            words = f"-{type(error).__name__}: {error}"
        os.write(writer, words.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        words = file.read()
    os.waitpid(child, 0)
    if not words.startswith("+"):
        raise DpuflowError(words[1:])
    return words[1:]


def _leave_network() -> bool:
    """Whether this process now has a network namespace of its own."""
    return int(ctypes.CDLL(None).unshare(0x40000000)) == 0  # CLONE_NEWNET


def _libbpf() -> str:
    from dpuflow.live.libbpf import library

    library()
    return "libbpf.so.1 found"


def _programs() -> str:
    from dpuflow.live.ebpf import load_once

    load_once()
    return "the eBPF programs load"


def _hook(hook: str) -> str:
    from dpuflow.live.ebpf import EbpfCapture

    EbpfCapture(LiveOptions(("lo",), buffer=1 << 16, hook=hook)).close()
    return "can be attached"


def _afpacket() -> str:
    from dpuflow.live.afpacket import PacketCapture

    PacketCapture(LiveOptions(("lo",), buffer=1 << 20)).close()
    return "packet sockets can be opened"


def _interface(name: str) -> Check:
    from dpuflow.live.base import find_interface

    def look() -> str:
        find_interface(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            up = "" if _is_up(control, name) else ", but is down"
        return f"can be captured{up}; {_stamps(name)}"

    return replace(_tried(name, look), needed=True)


def _rdma(interfaces: list[str]) -> list[Check]:
    """Interfaces, those named or else all, whose RoCE no capture here can have."""
    from dpuflow.live.rdma import bypassed

    names = interfaces or sorted(name for _, name in socket.if_nameindex())
    return [Check("rdma", False, text) for text in bypassed(names)]


def _stamps(name: str) -> str:
    """Whose stamps its packets get."""
    from dpuflow.live.phc import clock_of, stamps_what_comes

    clock = clock_of(name)
    if clock is None:
        return "timestamps by the kernel"
    if stamps_what_comes(name):
        return f"received packets are timestamped by the NIC (/dev/ptp{clock})"
    return f"timestamps by the kernel; the NIC (/dev/ptp{clock}) can do it: hwstamp_ctl -i {name} -r 1"


def _is_up(control: socket.socket, name: str) -> bool:
    import fcntl

    answer = fcntl.ioctl(control, 0x8913, name.encode().ljust(40, b"\0"))  # SIOCGIFFLAGS
    return bool(answer[16] & 1)


def _clock() -> Check:
    from dpuflow.live.clock import read_clocks

    reading = read_clocks()
    ahead = round((reading.tai_ns - reading.real_ns) / 1e9)
    return Check(
        "clock",
        True,
        f"read to within {reading.error_ns} ns; the kernel's offset of TAI from UTC is {ahead} s",
    )


def _leftovers() -> Check:
    from dpuflow.live.ebpf import leftovers

    try:
        found = leftovers()
    except DpuflowError:
        return Check("leftovers", True, "none (no libbpf)")
    if found:
        return Check(
            "leftovers",
            False,
            f"stale dpuflow filters on {', '.join(found)}: dpuflow doctor --clean removes them",
        )
    return Check("leftovers", True, "none")
