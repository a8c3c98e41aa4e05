"""Scenarios drawn at random: sizes, operations, ranks, faults, clocks. The same number, the same scenario."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Any

from dpuflow.synth.scenario import (
    Clocks,
    Cluster,
    GpuLate,
    Job,
    Loop,
    Loss,
    Machine,
    Nccl,
    Observation,
    Operation,
    Scenario,
    SlowHost,
    SlowLink,
    SlowReceiver,
    Training,
)

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Fault

KIB, MIB = 1024, 1 << 20
FAULTS = (
    "none", "persistent", "persistent", "persistent", "rotating", "random", "onset", "transient", "slow_host",
    "slow_receiver", "loss", "slow_link",
)  # fmt: skip
KINDS = (
    ("all_reduce", "ring", "simple"), ("all_reduce", "ring", "simple"), ("all_reduce", "ring", "ll"),
    ("all_reduce", "ring", "ll128"), ("all_reduce", "tree", "simple"), ("all_reduce", "tree", "ll"),
    ("all_reduce", "tree", "ll128"), ("all_gather", "ring", "simple"), ("reduce_scatter", "ring", "simple"),
    ("broadcast", "ring", "simple"), ("all_to_all", "ring", "simple"), ("decode", "ring", "ll"),
    ("all_gather", "pat", "simple"), ("all_reduce", "ring", "socket"), ("rails", "ring", "simple"),
    ("ddp", "ring", "simple"), ("pipeline", "ring", "simple"),
)  # fmt: skip
MOST_PACKETS = 400_000
ONE_SIDED = 1000
"""Numbers from here on are scenarios of one-sided traffic (``onesided``)."""
PARTLY = 3000
"""From here on those that are captured at some nodes only (``partly``)."""
TROUBLED = 4000
"""From here on those of faults of the network and of credits (``troubles``)."""
STREAMED = 5000
"""From here on those of NCCL over TCP (``streamed``)."""


def draw(number: int, profile: str | None = None) -> Scenario:
    """Scenario ``number``; every kind of operation and fault comes up in turn."""
    if number >= STREAMED:
        from bench.accuracy.streamed import draw_streamed

        return draw_streamed(number, profile)
    if number >= TROUBLED:
        from bench.accuracy.troubles import draw_trouble

        return draw_trouble(number, profile)
    if number >= PARTLY:
        from bench.accuracy.partly import draw_partly

        return draw_partly(number, profile)
    if number >= ONE_SIDED:
        from bench.accuracy.onesided import draw_one_sided

        return draw_one_sided(number, profile)
    random = Random(f"accuracy/{number}")
    op, algorithm, protocol = KINDS[number % len(KINDS)]
    fault = FAULTS[(number // len(KINDS) + number) % len(FAULTS)]
    profile = profile or ("host" if random.random() < 0.2 else "fabric")
    slow = 100.0 if profile == "host" else 1.0  # a loaded stack is so much slower, and faults larger
    nodes = random.choice((4, 6, 8) if op == "pipeline" else (2, 3, 4, 4, 5, 6, 8))
    gpus = random.choice((2, 4, 8)) if op == "rails" else 1
    mtu = random.choice((1024, 4096, 4096))
    decode = op == "decode"
    iterations = 100 if decode else random.randrange(16, 31)
    most = {"ll": 256 * KIB, "ll128": 4 * MIB}.get(protocol, 16 * MIB)
    each = MOST_PACKETS * mtu // (iterations * nodes * (nodes if op in ("all_gather", "broadcast") else 2))
    size = (
        64 * KIB if decode else round(exp(random.uniform(log(8 * KIB), log(max(16 * KIB, min(most, each))))))
    )
    step = 4 * nodes
    size = max(step, size // step * step)
    rails = op == "rails"
    socket = protocol == "socket"
    operation = Operation(
        op="all_reduce" if decode or rails or op in ("ddp", "pipeline") else op,
        bytes=size,
        algorithm=algorithm,
        protocol="simple" if socket else protocol,
        root=random.randrange(nodes) if op == "broadcast" else 0,
    )
    compute_us = slow * (20.0 if decode else random.choice((300.0, 1000.0, 3000.0)))
    late_us = slow * (10.0 if decode else random.choice((20.0, 50.0, 200.0, 1000.0)))
    one_clock = random.random() < 0.5
    return Scenario(
        name=f"{number:03d}-{op}-{algorithm}-{protocol}-n{nodes}-{fault}-{profile}",
        seed=number,
        cluster=Cluster(
            nodes=nodes, mtu=mtu, gpus_per_node=gpus,
            link_gbps=0.1 if profile == "host" else random.choice((25.0, 100.0, 400.0)),
            latency_us=30.0 if profile == "host" else 1.5,
        ),
        nccl=Nccl(
            version=random.choice(("2.20", "2.25", "2.29", "2.30")),
            channels=random.choice((gpus, 2 * gpus)) if rails else random.choice((1, 2, 2, 4)),
            transport="socket" if socket else "ib",
            **_queue_pairs(number, random.choice((1, 1, 1, 2))),
            adaptive_routing=random.random() < 0.1,
            timeout=14,
        ),
        machine=Machine(profile=profile, ack_coalesce=random.choice((1, 1, 4))),
        job=_job(op, operation, iterations, compute_us, slow * random.choice((0.5, 2.0, 5.0))),
        faults=_faults(
            fault, random, nodes * gpus, gpus, late_us, iterations, 0.02 if profile == "host" else 5.0
        ),
        observation=Observation(
            clocks=Clocks(jitter_ns=20.0) if one_clock
            else Clocks(offset_us=2e6, drift_ppm=20.0, jitter_ns=20.0),
            compress=False,
        ),
    )  # fmt: skip


def _queue_pairs(number: int, usual: int) -> dict[str, Any]:
    """Queue pairs of a connection: the ``usual`` ones, or more, with messages in turn or cut over all."""
    random = Random(f"accuracy/{number}/queue pairs")
    if random.random() < 0.7:
        return {"qps_per_connection": usual}
    return {"qps_per_connection": random.choice((2, 4, 8)), "split_data_on_qps": random.random() < 0.7}


def _job(op: str, operation: Operation, iterations: int, compute_us: float, jitter_us: float) -> Job:
    if op == "ddp":
        return Training(
            steps=iterations, layers=4, buckets=2, bucket_bytes=operation.bytes, jitter_us=jitter_us,
            forward_us=compute_us / 8, optimizer_us=compute_us / 8,
        )  # fmt: skip
    if op == "pipeline":
        return Training(
            pp=2, steps=iterations, microbatches=4, layers=1, buckets=1, bucket_bytes=operation.bytes,
            pp_bytes=operation.bytes, jitter_us=jitter_us, forward_us=compute_us / 8,
            optimizer_us=compute_us / 8,
        )  # fmt: skip
    return Loop(ops=[operation], iterations=iterations, compute_us=compute_us, jitter_us=jitter_us)


def _faults(
    kind: str, random: Random, ranks: int, gpus: int, us: float, iterations: int, slow_gbps: float
) -> list[Fault]:
    """``slow_gbps``: a fifth of the slowest port that the profile has."""
    rank, third = random.randrange(ranks), iterations // 3
    node, nodes = rank // gpus, ranks // gpus
    other = (node + 1) % nodes
    made: dict[str, list[Fault]] = {
        "none": [],
        "persistent": [GpuLate(rank=rank, us=us)],
        "rotating": [GpuLate(mode="rotating", us=us)],
        "random": [GpuLate(mode="random", us=us)],
        "onset": [GpuLate(rank=rank, us=us, from_iteration=third)],
        "transient": [GpuLate(rank=rank, us=us, mode="transient", from_iteration=third, iterations=third)],
        "slow_host": [SlowHost(rank=rank, us=us)],
        "slow_receiver": [SlowReceiver(rank=rank, us=us)],
        "loss": [Loss(src=node, dst=other, share=0.005)],
        "slow_link": [SlowLink(node=node, gbps=slow_gbps)],
    }
    return made[kind]


if __name__ == "__main__":
    import sys

    from dpuflow.synth.case import write_case

    write_case(draw(int(sys.argv[1])), sys.argv[2])
