"""Scenarios of NCCL over TCP drawn at random: all its algorithms, programs of several operations, faults."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Final

from bench.accuracy.draw import KIB, MIB, STREAMED
from dpuflow.synth.scenario import (
    Clocks,
    Cluster,
    GpuLate,
    Job,
    Loop,
    Machine,
    Nccl,
    Observation,
    Operation,
    Scenario,
    SlowLink,
    Training,
)

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Fault

KINDS: Final = (
    ("all_reduce", "ring", "simple"), ("all_reduce", "ring", "ll"), ("all_reduce", "tree", "simple"),
    ("all_reduce", "tree", "ll"), ("all_gather", "ring", "simple"), ("reduce_scatter", "ring", "simple"),
    ("broadcast", "ring", "simple"), ("reduce", "ring", "simple"), ("all_to_all", "ring", "simple"),
    ("all_gather", "pat", "simple"), ("reduce_scatter", "pat", "simple"), ("fsdp", "ring", "simple"),
    ("decode", "ring", "ll"), ("decode", "tree", "ll"), ("ddp", "ring", "simple"),
    ("pipeline", "ring", "simple"), ("mixed", "tree", "simple"),
)  # fmt: skip
FAULTS: Final = ("none", "persistent", "onset", "random", "rotating", "slow_link")
MOST_BYTES: Final = 300 * MIB
"""That all messages of a job carry, about."""


def draw_streamed(number: int, profile: str | None = None) -> Scenario:
    """Scenario ``number``; every kind and fault comes up in turn."""
    random = Random(f"accuracy/{number}")
    place = number - STREAMED
    op, algorithm, protocol = KINDS[place % len(KINDS)]
    fault = FAULTS[(place // len(KINDS) + place) % len(FAULTS)]
    profile = profile or ("host" if random.random() < 0.2 else "fabric")
    host = profile == "host"
    slow = 100.0 if host else 1.0
    nodes = random.choice((4, 6, 8) if op == "pipeline" else (2, 3, 4, 4, 5, 6, 8))
    rank = random.randrange(nodes)
    iterations = random.randrange(14, 26)
    each = MOST_BYTES // (iterations * nodes * (nodes if op in ("all_gather", "fsdp") else 2))
    most = max(32 * KIB, min(256 * KIB if protocol == "ll" else 8 * MIB, each))
    step = 4 * nodes
    size = max(step, round(exp(random.uniform(log(8 * KIB), log(most)))) // step * step)
    compute_us = slow * random.choice((300.0, 1000.0, 3000.0))
    late_us = slow * random.choice((50.0, 200.0, 1000.0))
    third = iterations // 3
    faults: dict[str, list[Fault]] = {
        "none": [],
        "persistent": [GpuLate(rank=rank, us=late_us)],
        "onset": [GpuLate(rank=rank, us=late_us, from_iteration=third)],
        "random": [GpuLate(mode="random", us=late_us)],
        "rotating": [GpuLate(mode="rotating", us=late_us)],
        "slow_link": [SlowLink(node=rank, gbps=0.02 if host else 5.0)],
    }
    one_clock = random.random() < 0.5
    return Scenario(
        name=f"{number}-{op}-{algorithm}-{protocol}-n{nodes}-{fault}-{profile}",
        seed=number,
        cluster=Cluster(
            nodes=nodes, link_gbps=0.1 if host else random.choice((25.0, 100.0)),
            latency_us=30.0 if host else 5.0,
        ),
        nccl=Nccl(channels=random.choice((1, 2, 4)), transport="socket"),
        machine=Machine(profile=profile),
        job=_job(op, algorithm, protocol, size, iterations, compute_us, slow, random),
        faults=faults[fault],
        observation=Observation(
            clocks=Clocks(jitter_ns=20.0)
            if one_clock
            else Clocks(offset_us=2e6, drift_ppm=20.0, jitter_ns=20.0),
            compress=False,
        ),
    )  # fmt: skip


def _job(
    op: str, algorithm: str, protocol: str, size: int, iterations: int, compute_us: float, slow: float,
    random: Random,
) -> Job:  # fmt: skip
    jitter_us = slow * random.choice((0.5, 2.0, 5.0))
    if op in ("ddp", "pipeline"):
        pipeline = op == "pipeline"
        return Training(
            pp=2 if pipeline else 1, steps=iterations, microbatches=4 if pipeline else 1,
            layers=1 if pipeline else 4, buckets=1 if pipeline else 2, bucket_bytes=size, tp_bytes=0,
            pp_bytes=size, jitter_us=jitter_us, forward_us=compute_us / 8, optimizer_us=compute_us / 8,
        )  # fmt: skip

    def operation(name: str, how: str = "ring", gap_us: float = 0.0, share: int = 1) -> Operation:
        return Operation(
            op=name,
            bytes=max(4096, size // share // 4096 * 4096),
            algorithm=how,
            protocol=protocol,
            gap_us=gap_us,
        )

    if op == "fsdp":
        blocks = [operation("all_gather", share=8), operation("reduce_scatter", gap_us=compute_us / 2)]
        return Loop(ops=blocks, iterations=iterations, compute_us=compute_us, jitter_us=jitter_us)
    if op == "mixed":
        several = [
            operation("all_reduce", "tree", share=4),
            operation("all_gather", gap_us=compute_us / 3, share=8),
            operation("all_reduce", gap_us=compute_us / 3),
            operation("broadcast", gap_us=compute_us / 3, share=2),
        ]
        return Loop(ops=several, iterations=iterations, compute_us=compute_us, jitter_us=jitter_us)
    if op == "decode":
        two = [
            Operation(op="all_reduce", bytes=64 * KIB, algorithm=algorithm, protocol=protocol),
            Operation(
                op="all_reduce", bytes=64 * KIB, algorithm=algorithm, protocol=protocol, gap_us=20.0 * slow
            ),
        ]
        return Loop(ops=two, iterations=3 * iterations, compute_us=20.0 * slow, jitter_us=0.5 * slow)
    one = Operation(op=op, bytes=size, algorithm=algorithm, protocol=protocol)
    return Loop(ops=[one], iterations=iterations, compute_us=compute_us, jitter_us=jitter_us)
