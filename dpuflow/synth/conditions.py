"""What is wrong in a scenario, by the names that findings have: for truth.json alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpuflow.synth.scenario import (
    Churn,
    CrossTraffic,
    Desync,
    Experts,
    Flap,
    GpuLate,
    Hang,
    Late,
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
_OF_LOSSES = {"from_clients": "ingress_loss", "to_clients": "egress_loss"}


def conditions(scenario: Scenario, begun_ns: Mapping[int, float]) -> list[dict[str, Any]]:
    """One row a condition that was put in; ``ranks`` at fault, empty where it is no rank's.

    ``begun_ns``: when each iteration's first operation began, ns since the start. ``from_ns``, ``to_ns``: as
    of that, None where it lasts from the start or to the end.
    """
    found = [_of_fault(scenario, fault) | lasting(fault, begun_ns) for fault in scenario.faults]
    job, clients = scenario.job, scenario.clients
    if isinstance(job, Experts) and job.hot is not None:
        found.append({"condition": "load_skew", "ranks": [job.hot]} | _ALWAYS)
    if isinstance(job, Service):
        if clients.until_us:
            stop = {"from_ns": clients.until_us * 1e3, "to_ns": clients.resume_us * 1e3}
            found.append({"condition": "ingress_starvation", "ranks": list(range(scenario.ranks))} | stop)
        if job.balance == "skewed":
            found.append({"condition": "session_skew", "ranks": [0]} | _ALWAYS)
        if job.batching == "static":
            found.append({"condition": "early_completion", "ranks": [0]} | _ALWAYS)
    return [row for row in found if row["condition"]]


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


def _of_fault(scenario: Scenario, fault: Fault) -> dict[str, Any]:
    per_node = scenario.cluster.gpus_per_node

    def of_node(node: int | None) -> list[int]:
        return [] if node is None else list(range(node * per_node, (node + 1) * per_node))

    if isinstance(fault, (GpuLate, SlowHost)):
        return {"condition": "straggler", "ranks": [] if fault.rank is None else [fault.rank]}
    if isinstance(fault, SlowGpu):
        all_of_them = fault.rank is None
        name = "launch_latency" if all_of_them else "straggler"  # work of all that grew looks the same
        return {"condition": name, "ranks": list(range(scenario.ranks)) if all_of_them else [fault.rank]}
    if isinstance(fault, (Desync, Hang)):
        return {"condition": "hang" if isinstance(fault, Hang) else "desync", "ranks": [fault.rank]}
    if isinstance(fault, SlowInput):
        return {"condition": "input_starvation", "ranks": list(range(scenario.ranks))}
    if isinstance(fault, Nvlink):
        return {"condition": "p2p_throttling", "ranks": of_node(fault.node)}
    if isinstance(fault, SlowPcie):
        return {"condition": "pcie_saturation", "ranks": of_node(fault.node)}
    if isinstance(fault, Churn):
        return {"condition": "registration_churn", "ranks": [fault.rank]}
    if isinstance(fault, SlowReceiver):
        return {"condition": "credit_starvation", "ranks": [fault.rank]}
    if isinstance(fault, Loss):
        kind = _OF_LOSSES.get(fault.traffic, "packet_loss")
        return {"condition": kind, "ranks": of_node(fault.src if fault.src is not None else fault.dst)}
    if isinstance(fault, SlowLink):
        return {"condition": "slow_link", "ranks": of_node(fault.node)}
    if isinstance(fault, (Flap, Pause, CrossTraffic)):
        names = {Flap: "packet_loss", Pause: "head_of_line", CrossTraffic: "congestion"}
        return {"condition": names[type(fault)], "ranks": of_node(fault.node)}
    return {"condition": "", "ranks": []}
