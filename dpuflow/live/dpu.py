"""What a BlueField, tc and OVS allow here: looked at in the order in which a way of capture is chosen.

Card and its mode, switchdev, who owns the eSwitch, DOCA, then tc and OVS; at the end the way to take. Nothing
is changed; filters are tried in a network namespace of their own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.errors import DpuflowError
from dpuflow.live.mirror import base
from dpuflow.live.mirror.base import run
from dpuflow.live.mirror.strays import strays

if TYPE_CHECKING:
    from collections.abc import Callable

_VENDOR: Final = "0x15b3"
_CARDS: Final = {"0xa2d2": "BlueField", "0xa2d6": "BlueField-2", "0xa2dc": "BlueField-3"}
_FILTERS: Final = {
    "flower": "flower ip_proto udp action mirred egress mirror dev lo",
    "u32": "u32 match u32 0 0 action mirred egress mirror dev lo",
    "sample": "u32 match u32 0 0 action sample rate 10 group 1",
}
Line = tuple[str, bool, str]
"""Name, whether it is as it should be, and in words."""


@dataclass
class Machine:
    """What is looked at: files below ``root``; what commands say."""

    root: Path = Path("/")
    lines: list[Line] = field(default_factory=list)

    def say(self, name: str, met: bool, text: str) -> bool:
        self.lines.append((name, met, text))
        return met

    def read(self, path: str) -> str:
        """A file's text, "" where there is none."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def ask(self, *command: str) -> str:
        """What a command prints; "" where it is not there, or fails."""
        with contextlib.suppress(DpuflowError, OSError):
            done = run(command)
            return done.stdout.strip() if done.returncode == 0 else ""
        return ""


def examine(isolated: Callable[[Callable[[], str]], str], root: Path = Path("/")) -> list[Line]:
    """One line for each condition. ``isolated`` runs a function in a network namespace of its own."""
    machine = Machine(root)
    cards = _cards(machine)
    doca = False
    if cards:
        doca = _mode(machine, cards[0]) & _switchdev(machine, cards[0]) & _owner(machine) & _doca(machine)
    filters = _filters(machine, isolated)
    ovs = _ovs(machine)
    noted, found = base.leftovers(), strays()
    known = {step.undo for _, steps in noted for step in steps}
    left = len(noted) + len({step.undo[4] for step in found if step.undo not in known})
    told = f"{left} left behind by killed processes: dpuflow doctor --clean undoes them"
    machine.say("mirrors", not left, told if left else "none left behind")
    machine.say("use", True, _way(bool(cards), doca, ovs, filters))
    return machine.lines


def _cards(machine: Machine) -> list[str]:
    """PCI addresses of BlueField functions."""
    found = []
    with contextlib.suppress(OSError):
        for folder in sorted((machine.root / "sys/bus/pci/devices").iterdir()):
            at = f"sys/bus/pci/devices/{folder.name}"
            kind = _CARDS.get(machine.read(f"{at}/device"))
            if kind and machine.read(f"{at}/vendor") == _VENDOR:
                found.append((folder.name, kind))
    if not found:
        machine.say("card", False, "no BlueField found: --backend doca and mirror tc need one")
        return []
    arm = bool(machine.read("etc/mlnx-release"))
    where = "on its Arm cores" if arm else "seen from the host, which captures only its own traffic"
    machine.say("card", arm, f"{found[0][1]}, {', '.join(address for address, _ in found)}, {where}")
    return [address for address, _ in found]


def _mode(machine: Machine, address: str) -> bool:
    """Whether the Arm cores own the eSwitch."""
    told = machine.ask("mlxconfig", "-d", address, "q", "INTERNAL_CPU_MODEL", "INTERNAL_CPU_OFFLOAD_ENGINE")
    values = dict(line.split()[:2] for line in told.splitlines() if line.strip().startswith("INTERNAL_CPU"))
    if values.get("INTERNAL_CPU_MODEL", "").startswith("SEPARATED"):
        return machine.say(
            "mode", False, "separated host mode: whether the Arm cores see the host's traffic is unknown"
        )
    if values.get("INTERNAL_CPU_OFFLOAD_ENGINE", "").startswith("DISABLED"):
        return machine.say(
            "mode",
            False,
            "NIC mode: the Arm cores see no traffic; capture at the switch or from the RDMA device, or set"
            " DPU mode and power-cycle",
        )
    if values.get("INTERNAL_CPU_MODEL"):
        return machine.say("mode", True, "DPU mode")
    there = any((machine.root / "sys/class/net").glob("pf*hpf"))
    return machine.say(
        "mode", there,
        "DPU mode (the host's representor is present)" if there
        else "not DPU mode: no host representor (pf0hpf); check with mlxconfig",
    )  # fmt: skip


def _switchdev(machine: Machine, address: str) -> bool:
    told = machine.ask("devlink", "dev", "eswitch", "show", f"pci/{address}")
    if "mode switchdev" in told:
        return machine.say("switchdev", True, f"pci/{address} is in switchdev mode")
    mode = told.partition("mode ")[2].partition(" ")[0] or "unknown"
    return machine.say(
        "switchdev", False,
        f"pci/{address}: the eSwitch's mode is {mode}: devlink dev eswitch set pci/{address} mode switchdev",
    )  # fmt: skip


def _owner(machine: Machine) -> bool:
    """Whether nobody else has taken the eSwitch by DOCA Flow or DPDK."""
    taken = taken_by(machine)
    return machine.say("eswitch", taken is None, taken or "free (used by the kernel only)")


def taken_by(machine: Machine) -> str | None:
    """Who owns the eSwitch so that DOCA Flow must not be opened beside it, and what to do; None if nobody."""
    told = machine.ask("ovs-vsctl", "--timeout=3", "get", "Open_vSwitch", ".", "other_config").replace(
        '"', ""
    )
    if "doca-init=true" in told:
        return "OVS-DOCA owns it: use mirror ovs, not --backend doca"
    for file in sorted((machine.root / "etc/kubelet.d").glob("*hbn*")):
        return f"HBN owns it ({file.name}): use HBN's own mirroring"
    if _locked(machine.root / "var/run/dpdk/rte/config"):
        return "a DPDK or DOCA program is running: stop it to use --backend doca"
    return None


def _locked(path: Path) -> bool:
    """Whether another process holds DPDK's lock of the primary process.

    Read from /proc/locks: opening the file and closing it would drop a lock of this process itself.
    """
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    held = (line.split() for line in locks.splitlines() if "POSIX" in line and "->" not in line)
    return any(int(words[5].rpartition(":")[2]) == inode and int(words[4]) != os.getpid() for words in held)


def _doca(machine: Machine) -> bool:
    from dpuflow.live.doca_session import describe

    try:
        facts = describe()
    except DpuflowError as error:
        sdk = machine.ask("pkg-config", "--modversion", "doca-flow")
        more = f" (the SDK here is {sdk})" if sdk else ""
        return machine.say("doca", False, f"{error}{more}")
    ways = " and ".join(name for name, has in (("mirror", facts.mirror), ("flood", facts.flooding)) if has)
    queues = "by DPDK" if facts.dpdk else "without DPDK"
    match = ", matches QPs" if facts.bth else ""
    return machine.say(
        "doca", facts.devices > 0,
        f"adapter of DOCA {facts.version}: {ways}, {queues}{match}; DOCA sees {facts.devices} devices",
    )  # fmt: skip


def _filters(machine: Machine, isolated: Callable[[Callable[[], str]], str]) -> list[str]:
    """Which filters and actions of tc work."""
    try:
        told = isolated(_try_filters)
    except DpuflowError as error:
        machine.say("tc", False, str(error))
        return []
    if told.startswith("not tried"):
        machine.say("tc", False, told)
        return []
    works = told.split()
    lacks = [name for name in _FILTERS if name not in works]
    text = f"works: {', '.join(works) or 'nothing'}"
    machine.say("tc", bool(works), text + (f"; this kernel lacks {', '.join(lacks)}" if lacks else ""))
    return works


def _try_filters() -> str:
    """In a network namespace of its own: the names of the filters that the kernel takes."""
    works = []
    run(("tc", "qdisc", "add", "dev", "lo", "clsact"))
    for number, (name, words) in enumerate(_FILTERS.items()):
        place = ("tc", "filter", "add", "dev", "lo", "ingress", "protocol", "ip", "pref", str(number + 1))
        if run((*place, *words.split())).returncode == 0:
            works.append(name)
    return " ".join(works)


def _ovs(machine: Machine) -> bool:
    if not any(os.access(Path(folder, "ovs-vsctl"), os.X_OK) for folder in os.get_exec_path()):
        machine.say("ovs", False, "no ovs-vsctl: Open vSwitch is not installed")
        return False
    try:
        asked = run(("ovs-vsctl", "--timeout=3", "list-br"))
    except (DpuflowError, subprocess.SubprocessError) as error:
        return machine.say("ovs", False, str(error))
    if asked.returncode:
        return machine.say("ovs", False, "Open vSwitch is installed, but not running")
    told = machine.ask("ovs-vsctl", "--timeout=3", "get", "Open_vSwitch", ".", "other_config").replace(
        '"', ""
    )
    offload = "on" if "hw-offload=true" in told else "off"
    return machine.say(
        "ovs", True, f"bridges {' '.join(asked.stdout.split()) or 'none'}; hw-offload is {offload}"
    )


def _way(card: bool, doca: bool, ovs: bool, filters: list[str]) -> str:
    """The first way that works."""
    if doca:
        return "dpuflow capture --backend doca"
    if card and ovs:
        return "dpuflow mirror ovs, and dpuflow capture on the interface that gets the copies"
    if card and "flower" in filters:
        return "dpuflow mirror tc, and dpuflow capture on the interface that gets the copies"
    return "dpuflow capture on the host's own interface"
