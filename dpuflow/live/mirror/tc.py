"""Mirroring by tc: in the card (flower, skip_sw), samples of it (psample), or in software (u32).

tc-mirred(8), tc-sample(8). A rule of its own priority each; filters of others stay, and come first where
their number is lower. In the card a rule decides what becomes of the packet, so that it also carries the
forward to the peer. Tagged packets are not matched by these rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.errors import OptionError
from dpuflow.live.mirror.base import Step
from dpuflow.wire.headers import ROCE_V2_PORT

if TYPE_CHECKING:
    from dpuflow.live.mirror.base import MirrorPlan

PRIORITY: Final = 55776  # of the first rule; dpuflow capture's own filters have 55793

_FLOWER: Final = {
    "roce": ("ip_proto", "udp", "dst_port", str(ROCE_V2_PORT)),
    "tcp": ("ip_proto", "tcp"),
}
_U32: Final = {
    ("roce", "ip"): "match ip protocol 17 0xff match ip dport {port} 0xffff",
    ("roce", "ipv6"): "match ip6 protocol 17 0xff match ip6 dport {port} 0xffff",
    ("tcp", "ip"): "match ip protocol 6 0xff",
    ("tcp", "ipv6"): "match ip6 protocol 6 0xff",
}


def _rules(protocols: tuple[str, ...]) -> list[tuple[str, str]]:
    """(ours, EtherType's name) of each rule."""
    if "any" in protocols:
        return [("any", "all")]
    return [(protocol, ether) for protocol in protocols for ether in ("ip", "ipv6")]


def _clsact(device: str) -> Step:
    """The hook for filters; it stays where others have made it, or use it meanwhile."""
    shown = [("tc", "filter", "show", "dev", device, hook) for hook in ("ingress", "egress")]
    return Step(
        ("tc", "qdisc", "add", "dev", device, "clsact"),
        ("tc", "qdisc", "del", "dev", device, "clsact"),
        unless=("tc", "qdisc", "show", "dev", device),
        has="clsact",
        still=tuple(shown),
    )


def _filter(device: str, hook: str, number: int, ether: str, words: tuple[str, ...]) -> Step:
    """One rule."""
    place = ("dev", device, hook)
    kind = ("protocol", ether, "pref", str(PRIORITY + number))
    return Step(
        ("tc", "filter", "add", *place, *kind, *words),
        ("tc", "filter", "del", *place, *kind),
        absent=("tc", "filter", "show", *place),
        has=f"pref {PRIORITY + number} ",
        device=device,
    )


def receiver(plan: MirrorPlan) -> list[Step]:
    """Copies carry others' addresses: where they are read, all must be taken."""
    if not plan.receiver:
        return []
    link = ("ip", "link", "set", "dev", plan.receiver)
    return [
        Step((*link, "up")),
        Step((*link, "promisc", "on"), (*link, "promisc", "off")),
    ]


def need(plan: MirrorPlan, *names: str) -> None:
    for name in names:
        if not getattr(plan, name):
            raise OptionError(f"--{'from' if name == 'source' else name} is required for this kind of mirror")
    devices = [device for device in (plan.source, plan.peer, plan.to) if device]
    if len(set(devices)) < len(devices):
        raise OptionError("--from, --peer and --to must be different interfaces")


class TcMirror:
    """Copies made by the card to a representor, whose function then receives them."""

    def steps(self, plan: MirrorPlan) -> list[Step]:
        """Both directions between ``source`` and ``peer``. Raises OptionError."""
        need(plan, "source", "peer", "to")
        steps = [*receiver(plan), _clsact(plan.source), _clsact(plan.peer)]
        copy = ("action", "mirred", "egress", "mirror", "dev", plan.to, "pipe")
        for here, there in ((plan.source, plan.peer), (plan.peer, plan.source)):
            onward = ("action", "mirred", "egress", "redirect", "dev", there)
            for number, (protocol, ether) in enumerate(_rules(plan.protocols)):
                words = ("flower", "skip_sw", *_FLOWER.get(protocol, ()), *copy, *onward)
                steps.append(_filter(here, "ingress", number, ether, words))
        return steps


class TcSample:
    """Samples made by the card, cut by the kernel, to the psample group that --backend psample reads."""

    def steps(self, plan: MirrorPlan) -> list[Step]:
        """Both directions between ``source`` and ``peer``. Raises OptionError."""
        need(plan, "source", "peer")
        if plan.rate < 1:
            raise OptionError(f"--rate {plan.rate}: must be at least 1")
        steps = [_clsact(plan.source), _clsact(plan.peer)]
        cut = ("trunc", str(plan.truncate)) if plan.truncate else ()
        sample = ("action", "sample", "rate", str(plan.rate), "group", str(plan.group), *cut)
        for here, there in ((plan.source, plan.peer), (plan.peer, plan.source)):
            onward = ("action", "mirred", "egress", "redirect", "dev", there)
            for number, (protocol, ether) in enumerate(_rules(plan.protocols)):
                words = ("flower", "skip_sw", *_FLOWER.get(protocol, ()), *sample, *onward)
                steps.append(_filter(here, "ingress", number, ether, words))
        return steps


class TcSoftware:
    """Copies made by the kernel of a host: both directions of one interface, to another one."""

    def steps(self, plan: MirrorPlan) -> list[Step]:
        """What comes in at ``source`` and what goes out. Raises OptionError."""
        need(plan, "source", "to")
        if plan.peer:
            raise OptionError("--peer applies to tc and sample only")
        steps = [*receiver(plan), _clsact(plan.source)]
        # Further filters are asked as if this one were not there.
        copy = f"action mirred egress mirror dev {plan.to} continue"
        for hook in ("ingress", "egress"):
            for number, (protocol, ether) in enumerate(_rules(plan.protocols)):
                match = _U32.get((protocol, ether), "match u32 0 0").format(port=ROCE_V2_PORT)
                words = ("u32", *match.split(), *copy.split())
                steps.append(_filter(plan.source, hook, number, ether, words))
        return steps
