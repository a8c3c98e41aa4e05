"""Scenarios of one-sided traffic drawn at random: caches on their move, experts, doubling by puts."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from bench.accuracy.draw import KIB, ONE_SIDED
from dpuflow.synth.scenario import (
    Clocks,
    Cluster,
    Experts,
    GpuLate,
    Job,
    Loop,
    Loss,
    Machine,
    Nccl,
    Observation,
    Operation,
    PrefillDecode,
    Scenario,
    SlowLink,
)

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Fault

KINDS = (
    ("kv", "read", "hidden"), ("kv", "write", "hidden"), ("kv", "write", "send"), ("kv", "read", "send"),
    ("kv", "layers", "send"), ("kv", "layers", "hidden"), ("experts", "linear", "atomic"),
    ("experts", "linear", "write"), ("all_reduce", "doubling", "puts"),
)  # fmt: skip
FAULTS = ("none", "persistent", "slow_link", "persistent", "onset", "loss")


def draw_one_sided(number: int, profile: str | None = None) -> Scenario:
    """Scenario ``number``; every kind and fault comes up in turn."""
    random = Random(f"accuracy/{number}")
    place = number - ONE_SIDED
    op, algorithm, protocol = KINDS[place % len(KINDS)]
    fault = FAULTS[(place // len(KINDS) + place) % len(FAULTS)]
    profile = profile or ("host" if random.random() < 0.2 else "fabric")
    host = profile == "host"
    slow = 100.0 if host else 1.0
    nodes = random.choice(
        (2, 4, 8) if op == "all_reduce" else (3, 4, 6, 8) if op == "experts" else (4, 4, 6, 8)
    )
    rank = random.randrange(nodes)
    gbps = 1.0 if host else random.choice((25.0, 100.0, 400.0))
    job = _job(op, algorithm, protocol, slow, gbps, random)
    late_us = slow * random.choice((50.0, 100.0, 300.0))
    third = getattr(job, "requests", getattr(job, "steps", getattr(job, "iterations", 12))) // 3
    faults: dict[str, list[Fault]] = {
        "none": [],
        "persistent": [GpuLate(rank=rank, us=late_us)],
        "onset": [GpuLate(rank=rank, us=late_us, from_iteration=third)],
        "slow_link": [SlowLink(node=rank, gbps=gbps / 10, where=random.choice(("up", "both")))],
        "loss": [Loss(src=rank, dst=(rank + nodes // 2) % nodes, share=0.002)],
    }
    one_clock = random.random() < 0.5
    return Scenario(
        name=f"{number}-{op}-{algorithm}-{protocol}-n{nodes}-{fault}-{profile}",
        seed=number,
        cluster=Cluster(
            nodes=nodes, mtu=random.choice((1024, 4096)), link_gbps=gbps, latency_us=30.0 if host else 1.5
        ),
        nccl=Nccl(channels=random.choice((1, 2)), timeout=14),
        machine=Machine(profile=profile),
        job=job,
        faults=faults[fault],
        observation=Observation(
            clocks=Clocks(jitter_ns=20.0)
            if one_clock
            else Clocks(offset_us=2e6, drift_ppm=20.0, jitter_ns=20.0),
            compress=False,
        ),
    )


def _job(op: str, algorithm: str, protocol: str, slow: float, gbps: float, random: Random) -> Job:
    if op == "kv":
        # A cache takes from a fifth of a prompt's time to all of it.
        size = round(gbps / 8 * 1e3 * 3000 * slow * random.uniform(0.1, 0.4)) // 4096 * 4096
        page = random.choice((16 * KIB, 64 * KIB, 256 * KIB))
        size = min(size, 128 * page)
        return PrefillDecode(
            requests=12, mode="read" if algorithm == "read" else "write", layerwise=algorithm == "layers",
            notice=protocol, kv_bytes=size, page_bytes=page, queue_pairs=random.choice((1, 2, 4)),
            prefill_us=3000 * slow, prefill_bytes=256 * KIB, tokens=random.choice((3, 6)), layers=3,
            bytes=16 * KIB, layer_us=60 * slow, jitter_us=2 * slow,
        )  # fmt: skip
    if op == "experts":
        return Experts(
            steps=16, layers=2, tokens=random.choice((4, 8, 16)), skew=random.choice((0.0, 0.5, 0.9)),
            flag=protocol, queue_pairs=random.choice((1, 2, 4)), attention_us=100 * slow, expert_us=60 * slow,
            jitter_us=2 * slow,
        )  # fmt: skip
    size = random.choice((32, 128, 512)) * KIB
    operation = Operation(op="all_reduce", bytes=size, algorithm="doubling")
    return Loop(ops=[operation], iterations=60, compute_us=100 * slow, jitter_us=2 * slow)


def many(count: int) -> range:
    """Numbers of the one-sided scenarios that go with ``count`` others: a fifth of them."""
    return range(ONE_SIDED, ONE_SIDED + -(-count // 5))
