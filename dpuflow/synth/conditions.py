"""What is wrong in a scenario, by the names that findings have: for truth.json alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpuflow.synth.scenario import (
    Churn,
    CrossTraffic,
    Desync,
    EarlyStop,
    Experts,
    Flap,
    GpuLate,
    Hang,
    Late,
    Loop,
    Loss,
    Nvlink,
    Pause,
    Service,
    SlowGpu,
    SlowHost,
    SlowInput,
    SlowLink,
    SlowPcie,
    SlowReceiver,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpuflow.synth.scenario import Fault, Scenario

_ALWAYS: dict[str, float | None] = {"from_ns": None, "to_ns": None}
_OF_LOSSES: dict[str, tuple[str, ...]] = {
    "clients": ("ingress_loss", "egress_loss"),
    "from_clients": ("ingress_loss",),
    "to_clients": ("egress_loss",),
}

_NAMES: dict[type[Any], str] = {
    Churn: "registration_churn",
    CrossTraffic: "congestion",
    Desync: "desync",
    Flap: "packet_loss",
    Hang: "hang",
    Nvlink: "p2p_throttling",
    Pause: "head_of_line",
    SlowLink: "slow_link",
    SlowPcie: "pcie_saturation",
    SlowReceiver: "credit_starvation",
}
"""Of faults that put in the same condition always, at their rank or node."""


def conditions(scenario: Scenario, begun_ns: Mapping[int, float]) -> list[dict[str, Any]]:
    """One row a condition that was put in; ``ranks`` at fault, empty where it is no rank's.

    ``begun_ns``: when each iteration's first operation began, ns since the start. ``from_ns``, ``to_ns``: as
    of that, None where it lasts from the start or to the end.
    """
    found = [
        row | lasting(fault, begun_ns) for fault in scenario.faults for row in _of_fault(scenario, fault)
    ]
    job, clients = scenario.job, scenario.clients
    if isinstance(job, Experts) and job.hot is not None:
        found.append({"condition": "load_skew", "ranks": [job.hot]} | _ALWAYS)
    if isinstance(job, Loop):
        hot = {op.root for op in job.ops if op.op == "all_to_allv" and op.skew}
        found += [{"condition": "load_skew", "ranks": [rank]} | _ALWAYS for rank in sorted(hot)]
    if isinstance(job, Service):
        if clients.until_us:
            stop = {"from_ns": clients.until_us * 1e3, "to_ns": clients.resume_us * 1e3}
            found.append({"condition": "ingress_starvation", "ranks": list(range(scenario.ranks))} | stop)
        if job.balance == "skewed":
            found.append({"condition": "session_skew", "ranks": [0]} | _ALWAYS)
        if job.batching == "static":
            found.append({"condition": "early_completion", "ranks": [0]} | _ALWAYS)
    return found


def lasting(fault: Fault, begun_ns: Mapping[int, float]) -> dict[str, float | None]:
    """From when to when, ns since the start; None: from the start, to the end."""
    first: int = getattr(fault, "iteration", 0) or getattr(fault, "from_iteration", 0)
    since_us = getattr(fault, "from_us", 0.0) or getattr(fault, "at_us", 0.0)
    begin = begun_ns.get(first) if first else since_us * 1e3
    end: float | None = getattr(fault, "until_us", 0.0) * 1e3 or None
    if isinstance(fault, Late) and fault.mode == "transient" and fault.iterations:
        end = begun_ns.get(first + fault.iterations)
    if isinstance(fault, (Flap, Pause, CrossTraffic)):
        end = (fault.at_us + (fault.times - 1) * fault.every_us + fault.us) * 1e3
    return {"from_ns": begin or None, "to_ns": end}


def _of_fault(scenario: Scenario, fault: Fault) -> list[dict[str, Any]]:
    """Conditions and ranks that a fault puts in."""
    names, ranks = _told(scenario, fault)
    return [{"condition": name, "ranks": ranks} for name in names]


def _told(scenario: Scenario, fault: Fault) -> tuple[tuple[str, ...], list[int]]:
    per_node, everyone = scenario.cluster.gpus_per_node, list(range(scenario.ranks))

    def of_node(node: int | None) -> list[int]:
        return [] if node is None else list(range(node * per_node, (node + 1) * per_node))

    if isinstance(fault, (GpuLate, SlowHost)):
        return ("straggler",), [] if fault.rank is None else [fault.rank]
    if isinstance(fault, SlowGpu):  # work of all that grew looks the same
        return (("launch_latency",), everyone) if fault.rank is None else (("straggler",), [fault.rank])
    if isinstance(fault, EarlyStop):
        tp = getattr(scenario.job, "tp", None) or scenario.ranks
        return ("early_stop_skew",), everyone[fault.rank // tp * tp :][:tp]
    if isinstance(fault, SlowInput):
        return ("input_starvation",), everyone
    if isinstance(fault, Loss):
        where = fault.src if fault.src is not None else fault.dst
        return _OF_LOSSES.get(fault.traffic, ("packet_loss",)), of_node(where)
    if isinstance(fault, SlowLink) and fault.node == "client":
        return ("saturation",), of_node(scenario.clients.node)
    name = _NAMES.get(type(fault))
    if name is None:
        return (), []
    rank: int | None = getattr(fault, "rank", None)
    return (name,), of_node(getattr(fault, "node", None)) if rank is None else [rank]
