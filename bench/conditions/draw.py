"""Jobs drawn at random, with the conditions that they have: none, one or two."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

NETWORK = ("slow_link", "packet_loss", "congestion", "head_of_line")
CLIENT = (
    "admission_backlog", "ingress_starvation", "session_skew", "ingress_loss", "egress_loss",
    "egress_backlog", "egress_jitter", "early_completion",
)  # fmt: skip

RARE = 1 / 8
"""Of the jobs: such as have what the others have not."""
OF_REQUESTS = (*(name for name in CLIENT if name != "ingress_starvation"), "saturation")
"""Conditions that cost requests time, not the job."""
STOPS = ("hang", "desync")
"""The job stands still."""

HOST_LINK = {"link_gbps": 1, "latency_us": 30, "mtu": 1024}
SLOWER = 100
"""A software stack against NICs: its times, and 1 against 100 Gbit/s."""


@dataclass
class Drawn:
    """A scenario as its YAML would have it, and what is wrong with it: condition to the nodes at fault."""

    scenario: dict[str, Any]
    conditions: dict[str, list[int]] = field(default_factory=dict)
    clock: str = "auto"


def draw(number: int, without: str = "") -> Drawn:
    """The same job for the same number, but for one condition that is left out (``without``). A third of them
    are healthy, an eighth has two conditions.

    A loaded host is a hundred times as slow as a GPU node, and what goes wrong with it so much larger; or no
    measurement could tell it from the host's own noise.
    """
    rare = Random(f"rare {number}")
    if rare.random() < RARE:
        return _rare(number, rare, without)
    random = Random(f"conditions {number}")
    profile = random.choice(("fabric", "host"))
    kind = random.choice(("training", "decode", "loop", "service", "service", "prefill_decode", "experts"))
    if kind == "service":
        profile = "fabric"
    nodes = random.choice((2, 4, 4, 8)) if kind != "service" else 2
    if kind == "prefill_decode":
        nodes = max(nodes, 4)  # one rank on either side has no collectives
    scenario: dict[str, Any] = {
        "name": f"conditions-{number}",
        "seed": number + 1,
        "cluster": {"nodes": nodes} | (HOST_LINK if profile == "host" else {}),
        "machine": {"profile": profile},
        "job": _job(kind, random, SLOWER if profile == "host" else 1),
        "faults": [],
    }
    drawn = Drawn(scenario)
    if kind == "service":
        scenario["clients"] = {
            "hosts": 4, "sessions": 2, "requests": 8, "tokens": 24,
            "think_us": random.choice((15_000, 30_000, 60_000)),
        }  # fmt: skip
    if profile == "fabric":
        _spray(scenario, number)
    if random.random() < 1 / 3:
        _stop(drawn, number, without)
        _churn(drawn, number, without)
        return drawn
    several = 2 if random.random() < 1 / 6 else 1
    for _ in range(several):
        _spoil(drawn, kind, random, without)
    return drawn


def _rare(number: int, random: Random, without: str) -> Drawn:
    """A job with what the others have not: replicas of which one stops, sends of unlike sizes most of which
    go to one rank, slow links to clients, losses on the way from and to them."""
    name = random.choice(("early_stop_skew", "load_skew", "saturation", "losses"))
    nodes = random.choice((4, 8)) if name in ("early_stop_skew", "load_skew") else 2
    rank = random.randrange(nodes)
    scenario: dict[str, Any] = {
        "name": f"conditions-{number}", "seed": number + 1, "cluster": {"nodes": nodes},
        "machine": {"profile": "fabric"}, "faults": [],
    }  # fmt: skip
    drawn = Drawn(scenario, {name: [rank]})
    fault: dict[str, Any]
    if name == "early_stop_skew":
        scenario["job"] = _job("decode", random, 1) | {"tp": nodes // 2}
        fault = {"kind": "early_stop", "rank": rank, "iteration": random.randrange(8, 20)}
        first = rank // (nodes // 2) * (nodes // 2)
        drawn.conditions = {name: list(range(first, first + nodes // 2))}
        drawn.clock = "trust"  # replicas share no packets that would tie their clocks
    elif name == "load_skew":
        operation = {"op": "all_to_allv", "bytes": random.choice((1 << 20, 4 << 20)), "root": rank}
        if name != without:
            operation["skew"] = random.choice((0.2, 0.5))
        scenario["job"] = {"kind": "loop", "iterations": 20, "compute_us": 500, "ops": [operation]}
        return drawn
    else:
        scenario["job"] = _job("service", random, 1)
        scenario["clients"] = {
            "hosts": 4, "sessions": 2, "requests": 8, "tokens": 24,
            "think_us": random.choice((15_000, 30_000)),
        }  # fmt: skip
        if name == "saturation":
            scenario["clients"]["token_bytes"] = 4000
            gbps = random.choice((0.05, 0.1))
            fault = {"kind": "slow_link", "node": "client", "gbps": gbps, "where": "down"}
            drawn.conditions = {name: [0]}
        else:
            drawn.conditions = {"ingress_loss": [0], "egress_loss": [0]}
            traffic = {"ingress_loss": "to_clients", "egress_loss": "from_clients"}.get(without, "clients")
            fault = {"kind": "loss", "share": 0.03, "traffic": traffic}
    if name != without:
        scenario["faults"].append(fault)
    return drawn


def _job(kind: str, random: Random, slower: int) -> dict[str, Any]:
    """A sound job; on hosts it moves less and computes longer."""
    if slower > 1:
        job = random.choice((
            {"kind": "decode", "tokens": 20, "layers": 2, "bytes": 16384, "layer_us": 4000},
            {
                "kind": "loop", "iterations": 20, "compute_us": 20_000,
                "ops": [{"op": random.choice(("all_reduce", "all_gather", "all_to_all")), "bytes": 1 << 18}],
            },
            {
                "kind": "training", "steps": 6, "layers": 2, "buckets": 2, "bucket_bytes": 1 << 18,
                "tp_bytes": 0, "forward_us": 20_000,
            },
        ))  # fmt: skip
        return dict(job)
    bucket = random.choice((1 << 20, 4 << 20))
    return {
        "training": {"kind": kind, "steps": 8, "buckets": 2, "bucket_bytes": bucket},
        "decode": {"kind": kind, "tokens": 30, "layers": 4, "bytes": random.choice((16384, 65536))},
        "loop": {
            "kind": kind, "iterations": 30,
            "ops": [{"op": random.choice(("all_reduce", "all_gather", "all_to_all")), "bytes": 1 << 20}],
        },
        "service": {"kind": kind, "layers": 2, "layer_us": 200, "prefill_us": 800, "bytes": 4096},
        "prefill_decode": {
            "kind": kind, "requests": 10, "prefill_us": 6000, "kv_bytes": 1 << 20, "tokens": 16,
        },
        "experts": {"kind": kind, "steps": 8},
    }[kind]  # fmt: skip


def _stop(drawn: Drawn, number: int, without: str) -> None:
    """A third of the healthy jobs that can stand still do so, in the second half of their steps.

    Drawn apart, so that all other jobs are what they were before jobs stood still.
    """
    random = Random(f"stops {number}")
    job = drawn.scenario["job"]
    steps = next((job[key] for key in ("iterations", "steps", "tokens") if key in job), 0)
    if job["kind"] in ("service", "prefill_decode") or random.random() > 1 / 3:
        return
    # Tokens for experts have no one size that a rank could get wrong.
    kind = "hang" if job["kind"] == "experts" else random.choice(STOPS)
    rank = random.randrange(drawn.scenario["cluster"]["nodes"])
    us = 200_000 * (5 if drawn.scenario["machine"]["profile"] == "host" else 1)
    fault = {"kind": kind, "rank": rank, "iteration": random.randrange(steps // 2, steps), "us": us}
    if kind == "desync":
        fault["bytes"] = random.choice((3 << 13, 3 << 18, 3 << 21))
    if kind != without:
        drawn.scenario["faults"].append(fault)
    drawn.conditions[kind] = [rank]


def _spray(scenario: dict[str, Any], number: int) -> None:
    """Packets of a third of the jobs take many paths, and overtake each other: nothing is wrong with that."""
    random = Random(f"paths {number}")
    if random.random() < 1 / 3:
        scenario["cluster"]["spray"] = random.choice((4, 16, 64))


def _churn(drawn: Drawn, number: int, without: str) -> None:
    """In two thirds of the sound jobs that move caches, or may register buffers, a rank does so each time."""
    random = Random(f"churn {number}")
    scenario, job = drawn.scenario, drawn.scenario["job"]
    loop = job["kind"] == "loop" and scenario["machine"]["profile"] == "fabric" and not drawn.conditions
    if (job["kind"] != "prefill_decode" and not loop) or random.random() > 2 / 3:
        return
    nodes = scenario["cluster"]["nodes"]
    rank = random.randrange(0 if loop else nodes // 2, nodes)
    if loop:
        scenario["nccl"] = {"registered": True}
    if without != "registration_churn":
        us = random.choice((300, 1000)) if loop else random.choice((2000, 5000))
        scenario["faults"].append({"kind": "churn", "rank": rank, "us": us})
    drawn.conditions["registration_churn"] = [rank]


def _spoil(drawn: Drawn, kind: str, random: Random, without: str) -> None:
    """One condition more."""
    scenario = drawn.scenario
    nodes = scenario["cluster"]["nodes"]
    node = random.randrange(nodes)
    if kind == "service":
        name = random.choice(CLIENT)
    else:
        name = random.choice(("straggler", *NETWORK) if nodes > 2 else ("straggler", "packet_loss"))
    if name in drawn.conditions:
        return
    at = [node]
    if name not in CLIENT:
        slower = SLOWER if scenario["machine"]["profile"] == "host" else 1
        fault = _fault(name, node, random, slower)
        if name != without:
            scenario["faults"].append(fault)
    else:
        at = [0]
        _load_service(scenario, name)
        if name != without:
            _spoil_service(scenario, name)
    drawn.conditions[name] = at


def _fault(name: str, node: int, random: Random, slower: int) -> dict[str, Any]:
    """What does it, throughout the job where it comes and goes."""
    again = {"at_us": 1000.0 * slower, "times": 200}
    rates = (5, 15) if slower == 1 else (0.5, 1)  # software is no faster than 9
    return {
        "straggler": {"kind": "gpu_late", "us": random.choice((300, 1000)) * slower, "rank": node},
        "slow_link": {"kind": "slow_link", "node": node, "gbps": random.choice(rates) / slower},
        "packet_loss": {"kind": "loss", "share": random.choice((0.002, 0.01)), "src": node},
        "congestion": {
            "kind": "cross_traffic", "node": node, "gbps": 95 / slower, "us": 3000 * slower,
            "every_us": 6000 * slower, **again,
        },
        "head_of_line": {
            "kind": "pause", "node": node, "us": 900 * slower, "every_us": 3000 * slower, **again,
        },
    }[name]  # fmt: skip


def _load_service(scenario: dict[str, Any], name: str) -> None:
    """A load under which the condition shows; sound by itself."""
    job, clients = scenario["job"], scenario["clients"]
    if name == "session_skew":
        job.update(tp=2)
        scenario["cluster"]["nodes"] = 4
        clients.update(hosts=6, sessions=4, think_us=20_000)
    elif name == "ingress_starvation":
        clients.update(think_us=6000)
    elif name == "egress_backlog":
        clients.update(hosts=6, think_us=30_000)
    elif name == "early_completion":
        clients.update(hosts=6, tokens=30, think_us=4000)


def _spoil_service(scenario: dict[str, Any], name: str) -> None:
    job, clients, faults = scenario["job"], scenario["clients"], scenario["faults"]
    if name == "admission_backlog":
        job.update(prefill_us=2400, max_batch=3)
        clients.update(hosts=6, sessions=3, requests=5, think_us=4000)
    elif name == "ingress_starvation":
        clients.update(until_us=60_000, resume_us=160_000)
    elif name == "session_skew":
        job.update(balance="skewed")
    elif name == "ingress_loss":
        faults.append({"kind": "loss", "share": 0.03, "traffic": "from_clients"})
    elif name == "egress_loss":
        faults.append({"kind": "loss", "share": 0.03, "traffic": "to_clients"})
    elif name == "egress_backlog":
        job.update(egress_us=150)
    elif name == "egress_jitter":
        job.update(egress_jitter_us=200)
    elif name == "early_completion":
        job.update(batching="static")
