"""Filters of a mirror that was killed and whose notes are gone, known by their priority and their actions.

In: what tc shows of this network namespace. Out: steps that undo them. A mirror that runs holds a name for
each interface it has filters on, as long as it lives; its filters are no strays, wherever its notes are.
"""

from __future__ import annotations

import re
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from dpuflow.errors import DpuflowError
from dpuflow.live.mirror.base import Step, run
from dpuflow.live.mirror.tc import PRIORITY

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES: Final = 4  # two protocols, two EtherTypes
_HOOKS: Final = ("ingress", "egress")
_HOOKED: Final = re.compile(r"^qdisc clsact \S+ dev (\S+)", re.MULTILINE)
_FILTER: Final = re.compile(r"filter protocol (\S+) pref (\d+) (\S+)")
_COPY: Final = "mirred (Egress Mirror to device "


def claim(device: str) -> socket.socket:
    """Hold this interface's filters as a running mirror's, for as long as the socket is open.

    Raises DpuflowError where another mirror runs there.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Abstract: free again once its holder is dead, and the network namespace's, as interfaces are.
        held.bind(f"\0dpuflow-mirror-{socket.if_nametoindex(device)}")
    except OSError:
        held.close()
        raise DpuflowError(
            f"{device}: another dpuflow mirror runs there, or there is no such interface"
        ) from None
    return held


def strays() -> list[Step]:
    """What is left of mirrors that nobody runs any more, with what undoes it; nothing where tc is not."""
    with suppress(DpuflowError):
        return list(_strays())
    return []


def _strays() -> Iterator[Step]:
    for device in _HOOKED.findall(run(("tc", "qdisc", "show")).stdout):
        try:
            held = claim(device)
        except DpuflowError:
            continue
        with closing(held):
            for hook in _HOOKS:
                for protocol, priority, kind in _left(device, hook):
                    place = ("dev", device, hook, "protocol", protocol, "pref", priority)
                    yield Step(("tc", "filter", "add", *place, kind), ("tc", "filter", "del", *place))


def _left(device: str, hook: str) -> list[tuple[str, str, str]]:
    """EtherType, priority and kind of each rule there that is a mirror's."""
    shown: dict[tuple[str, str, str], str] = {}
    rule = None
    for line in run(("tc", "filter", "show", "dev", device, hook)).stdout.splitlines():
        if head := _FILTER.match(line):
            rule = head[1], head[2], head[3]
        if rule is not None:
            shown[rule] = shown.get(rule, "") + line + "\n"
    return [rule for rule, text in shown.items() if _is_ours(rule, text)]


def _is_ours(rule: tuple[str, str, str], text: str) -> bool:
    """Whether priority, kind and actions are those of ``dpuflow.live.mirror.tc``."""
    _, priority, kind = rule
    if not PRIORITY <= int(priority) < PRIORITY + RULES:
        return False
    if kind == "u32":
        return bool(re.search(rf"{re.escape(_COPY)}\S+\) continue", text))
    forwards = "mirred (Egress Redirect to device " in text
    return kind == "flower" and "skip_sw" in text and forwards and (_COPY in text or "sample rate" in text)
