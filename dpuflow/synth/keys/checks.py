"""What does not go together in a scenario though each value may stand for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.synth.keys.faults import (
    Churn,
    CrossTraffic,
    Desync,
    EarlyStop,
    Flap,
    Late,
    Loss,
    Pause,
    SlowLink,
    Stop,
)
from dpuflow.synth.keys.jobs import ALGORITHM_OF, OPS, Decode, Experts, PrefillDecode, Service

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Scenario


def contradiction(scenario: Scenario) -> tuple[str, str] | None:
    """The key and the reason of the first value that does not go with another; None where all do."""
    cluster = scenario.cluster
    for i, fault in enumerate(scenario.faults):
        rank = getattr(fault, "rank", None)
        if rank is not None and rank >= scenario.ranks:
            return f"faults[{i}].rank", f"{rank} is not one of the {scenario.ranks} ranks, which count from 0"
        if isinstance(fault, Late):
            if fault.mode in ("persistent", "transient") and rank is None:
                return f"faults[{i}].mode", f"{fault.mode} needs a rank"
            if fault.mode == "transient" and fault.iterations is None:
                return f"faults[{i}].mode", "transient needs iterations"
        if isinstance(fault, Stop) and isinstance(scenario.job, (PrefillDecode, Service)):
            return f"faults[{i}].kind", "caches and requests go on in this job: take loop, training or decode"
        if isinstance(fault, EarlyStop) and not (
            isinstance(scenario.job, Decode) and (scenario.job.tp or scenario.ranks) < scenario.ranks
        ):
            return f"faults[{i}].kind", "only replicas that decode stop early: take decode, and tp"
        if isinstance(fault, Churn):
            reason = _no_churn(scenario, fault.rank)
            if reason is not None:
                return f"faults[{i}].kind", reason
        if isinstance(fault, Desync) and isinstance(scenario.job, Experts):
            return (
                f"faults[{i}].kind",
                "tokens have no one size that a rank could get wrong: take another job",
            )
        if isinstance(fault, (Loss, SlowLink)) and 0 < fault.until_us <= fault.from_us:
            return f"faults[{i}].until_us", f"{fault.until_us:g} is not after from_us, {fault.from_us:g}"
        for name in ("node", "src", "dst"):
            node = getattr(fault, name, None)
            if node == "client":
                if not scenario.clients.hosts:
                    return f"faults[{i}].node", "no client: set clients.hosts"
            elif node is not None and node >= cluster.nodes:
                return f"faults[{i}].{name}", f"{node} is not one of the {cluster.nodes} nodes"
        if isinstance(fault, (CrossTraffic, Flap, Pause)) and fault.times > 1 and fault.every_us < fault.us:
            return (
                f"faults[{i}].every_us",
                f"{fault.every_us:g} is less than the {fault.us:g} us that each takes",
            )
    nics = cluster.nics_per_node
    if nics is not None and cluster.gpus_per_node % nics:
        return "cluster.nics_per_node", f"{cluster.gpus_per_node} GPUs cannot share {nics} NICs evenly"
    if scenario.nccl.match_by == "id" and scenario.nccl.version not in ("2.29", "2.30"):
        return "nccl.match_by", f"{scenario.nccl.version} knows no id: take index, or version 2.29 or 2.30"
    if 0 < scenario.observation.truncate < 14:
        return "observation.truncate", "a mirror leaves the Ethernet header: 14 bytes at least"
    for i, node in enumerate(scenario.observation.only or ()):
        if node >= cluster.nodes:
            return f"observation.only[{i}]", f"{node} is not one of the {cluster.nodes} nodes"
    job = scenario.job
    tp, pp = getattr(job, "tp", None) or 1, getattr(job, "pp", 1)
    if scenario.ranks % (tp * pp):
        return "job.tp", f"{scenario.ranks} ranks cannot be divided by {tp * pp}"
    if getattr(job, "sharded", False) and (tp, pp) != (1, 1):
        return "job.sharded", "sharded training is data parallel alone: leave tp and pp at 1"
    if scenario.clients.node >= cluster.nodes:
        return "clients.node", f"{scenario.clients.node} is not one of the {cluster.nodes} nodes"
    if isinstance(job, Experts) and job.hot is not None and job.hot >= scenario.ranks:
        return "job.hot", f"{job.hot} is not one of the {scenario.ranks} ranks, which count from 0"
    if isinstance(job, Service) and not scenario.clients.hosts:
        return "clients.hosts", "a service without clients has nothing to do"
    if isinstance(job, PrefillDecode):
        prefill = job.prefill or scenario.ranks // 2
        if prefill >= scenario.ranks:
            return "job.prefill", f"{prefill} of {scenario.ranks} ranks leave none to decode"
        if job.mode == "read" and job.layerwise:
            return "job.layerwise", "who reads a cache reads it when it is whole: take write"
    for i, op in enumerate(getattr(job, "ops", ())):
        if op.op == "send_recv" and (op.peer >= scenario.ranks or op.peer == op.root):
            return f"job.ops[{i}].peer", f"{op.peer} is the sender or not one of the ranks"
        if op.root >= scenario.ranks:
            return f"job.ops[{i}].root", f"{op.root} is not one of the {scenario.ranks} ranks"
        if op.algorithm == "doubling" and cluster.nodes & (cluster.nodes - 1):
            return f"job.ops[{i}].algorithm", f"doubling is for 2, 4, 8, ... nodes, not {cluster.nodes}"
        if op.algorithm == "nvls_tree" and cluster.gpus_per_node < 2:
            return f"job.ops[{i}].algorithm", "nvls_tree is for nodes of several GPUs (cluster.gpus_per_node)"
        if op.op not in ALGORITHM_OF.get(op.algorithm, OPS):
            return f"job.ops[{i}].algorithm", f"NCCL has no {op.algorithm} for {op.op}"
    return None


def _no_churn(scenario: Scenario, rank: int) -> str | None:
    """Why a rank of this job registers nothing that peers write to or read."""
    job = scenario.job
    if isinstance(job, PrefillDecode):
        prefills = rank < (job.prefill or scenario.ranks // 2)
        if prefills == (job.mode == "read"):
            return None
        whose = "a prefill rank's" if job.mode == "read" else "a decode rank's"
        return f"in {job.mode} mode it is {whose} memory that caches are moved from or to"
    if scenario.nccl.registered and scenario.nccl.transport == "ib" and not isinstance(job, Experts):
        return None
    return "NCCL's own buffers are registered once: set nccl.registered, or move caches (prefill_decode)"
