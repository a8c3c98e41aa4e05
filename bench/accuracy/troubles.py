"""Faults of the network and of credits drawn at random, beside a late GPU or not, under jobs of many kinds.

``TROUBLES`` says what goes wrong, ``KINDS`` under which job. In half of the scenarios a GPU is late as well:
it must be named, and nobody else; in the others nobody may be blamed.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from bench.accuracy.draw import KIB, MOST_PACKETS, TROUBLED
from dpuflow.synth.scenario import (
    Clocks,
    Cluster,
    CrossTraffic,
    Decode,
    Experts,
    Flap,
    GpuLate,
    Job,
    Loop,
    Loss,
    Machine,
    Nccl,
    Observation,
    Operation,
    Pause,
    PrefillDecode,
    Scenario,
    SlowLink,
    SlowReceiver,
    Training,
)

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Fault

KINDS: Final = (
    ("all_reduce", "ring", "simple"), ("fsdp", "ring", "simple"), ("all_to_all", "ring", "simple"),
    ("pipeline", "ring", "simple"), ("all_reduce", "tree", "simple"), ("tp_dp", "ring", "simple"),
    ("broadcast", "ring", "simple"), ("moe", "ring", "simple"), ("decode", "ring", "ll"),
    ("helix", "ring", "simple"), ("serving", "ring", "simple"), ("ddp", "ring", "simple"),
    ("sharded", "pat", "simple"), ("experts", "linear", "atomic"), ("all_reduce", "ring", "socket"),
    ("rails", "ring", "simple"), ("tp_pp_dp", "ring", "simple"),
)  # fmt: skip
TROUBLES: Final = {
    "traffic": "other jobs' traffic congests the way to a node for a while, again and again",
    "incast": "bursts of several hosts at once, faster than a node's link",
    "slow_up": "a node's link is slow, outward",
    "slow_down": "inward: frames queue in the switch",
    "slow_both": "both ways",
    "pause": "a NIC stops the switch (PFC), whose queue fills and stops its senders",
    "flap": "a port goes down and up",
    "starved": "a receiver grants late",
    "loss": "frames are lost",
}
LATE: Final = ("persistent", "persistent", "onset", "random")
"""How the GPU beside the trouble is late, where one is."""
NODES: Final = {"pipeline": (4, 6, 8), "tp_dp": (4, 6, 8), "tp_pp_dp": (8,), "serving": (4, 6, 8)}
STEPS: Final = 20
PASSES: Final = {"fsdp": 6, "tp_dp": 10, "tp_pp_dp": 10, "moe": 10, "helix": 2, "sharded": 2, "ddp": 2}
"""About how often a step sends what an all_reduce would."""


def draw_trouble(number: int, profile: str | None = None) -> Scenario:
    """Scenario ``number``; every job and trouble comes up in turn."""
    random = Random(f"accuracy/{number}")
    place = number - TROUBLED
    op, algorithm, protocol = KINDS[place % len(KINDS)]
    trouble = list(TROUBLES)[place % len(TROUBLES)]  # of 17 kinds each meets each of the 9
    late = random.choice(LATE) if random.random() < 0.5 else None
    profile = profile or ("host" if random.random() < 0.2 else "fabric")
    slow = 100.0 if profile == "host" else 1.0
    socket = protocol == "socket"
    if socket and trouble == "starved":  # a socket grants nothing
        trouble = "loss"
    nodes = random.choice(NODES.get(op, (3, 4, 4, 5, 6, 8)))
    gpus = random.choice((2, 4)) if op == "rails" else 1
    gbps = 0.1 if profile == "host" else random.choice((25.0, 100.0, 400.0))
    # So much as a link takes in 20 to 300 us.
    mtu = random.choice((1024, 4096))
    most = MOST_PACKETS * mtu // (2 * nodes * gpus * STEPS * PASSES.get(op, 1))
    size = min(most, round(gbps / 8 * 1e3 * random.uniform(20.0, 300.0) * slow))
    size = max(8 * KIB, size) // (8 * nodes) * 8 * nodes
    compute_us = slow * random.choice((300.0, 1000.0, 3000.0))
    job = _job(op, algorithm, size, compute_us, slow * random.choice((0.5, 2.0, 5.0)), gbps, slow)
    late_us = slow * random.choice((50.0, 200.0, 1000.0))
    faults = _troubles(trouble, random, nodes, nodes * gpus, gbps, compute_us, late_us)
    rank = random.randrange(nodes * gpus)
    if late is not None:
        faults.append(
            GpuLate(mode="random", us=late_us) if late == "random"
            else GpuLate(rank=rank, us=late_us, from_iteration=STEPS // 3 if late == "onset" else 0)
        )  # fmt: skip
    one_clock = random.random() < 0.5
    return Scenario(
        name=f"{number}-{op}-{algorithm}-{protocol}-n{nodes}-{trouble}{'+' + late if late else ''}-{profile}",
        seed=number,
        cluster=Cluster(
            nodes=nodes, gpus_per_node=gpus, mtu=mtu, link_gbps=gbps,
            latency_us=30.0 if profile == "host" else 1.5,
            queue_kib=random.choice((512.0, 4096.0)), ecn_kib=random.choice((None, 50.0, 200.0)),
        ),
        nccl=Nccl(
            version=random.choice(("2.20", "2.25", "2.29", "2.30")),
            channels=gpus * random.choice((1, 2)) if op == "rails" else random.choice((1, 2, 4)),
            transport="socket" if socket else "ib",
            qps_per_connection=random.choice((1, 1, 1, 2, 4)),
            timeout=random.choice((10, 12, 14)),
        ),
        machine=Machine(profile=profile, ack_coalesce=random.choice((1, 1, 4))),
        job=job,
        faults=faults,
        observation=Observation(
            clocks=Clocks(jitter_ns=20.0) if one_clock
            else Clocks(offset_us=2e6, drift_ppm=20.0, jitter_ns=20.0),
            compress=False,
        ),
    )  # fmt: skip


def _job(
    op: str, algorithm: str, size: int, compute_us: float, jitter_us: float, gbps: float, slow: float
) -> Job:
    """About ``STEPS`` steps of ``compute_us``."""
    layers = {
        "ddp": Training(buckets=2),
        "fsdp": Training(sharded=True),
        "pipeline": Training(pp=2, microbatches=4, layers=1, buckets=1, pp_bytes=size),
        "tp_dp": Training(tp=2, buckets=2, tp_bytes=size),
        "tp_pp_dp": Training(tp=2, pp=2, microbatches=2, layers=1, buckets=1, tp_bytes=size, pp_bytes=size),
        "moe": Training(layers=2, ep_bytes=size),
    }
    if op in layers:
        job = layers[op]
        job.steps, job.bucket_bytes, job.jitter_us = STEPS, size, jitter_us
        job.forward_us, job.optimizer_us = compute_us / (3 * job.layers * job.microbatches), compute_us / 8
        return job
    if op == "decode":
        return Decode(tokens=STEPS, layers=3, bytes=64 * KIB, layer_us=60.0 * slow, token_us=100.0 * slow,
                      jitter_us=0.5 * slow)  # fmt: skip
    if op == "serving":
        cache = round(gbps / 8 * 1e3 * compute_us * 0.3)
        return PrefillDecode(
            requests=12, kv_bytes=min(cache // 4096 * 4096, 128 * 64 * KIB), prefill_us=compute_us, layers=3,
            prefill_bytes=256 * KIB, tokens=4, bytes=16 * KIB, layer_us=60.0 * slow, jitter_us=2.0 * slow,
        )  # fmt: skip
    if op == "experts":
        return Experts(steps=16, layers=2, tokens=8, attention_us=100.0 * slow, expert_us=60.0 * slow,
                       jitter_us=2.0 * slow)  # fmt: skip
    gap_us = compute_us / 3
    ops = {
        "helix": [
            Operation(op="all_to_all", bytes=size), Operation(op="all_reduce", bytes=size, gap_us=gap_us),
        ],
        "sharded": [
            Operation(op="all_gather", bytes=max(4096, size // 8), algorithm="pat"),
            Operation(op="reduce_scatter", bytes=size, algorithm="pat", gap_us=gap_us),
        ],
        "rails": [Operation(op="all_reduce", bytes=size)],
    }.get(op, [Operation(op=op, bytes=size, algorithm=algorithm)])  # fmt: skip
    return Loop(ops=ops, iterations=STEPS, compute_us=compute_us, jitter_us=jitter_us)


def _troubles(
    kind: str, random: Random, nodes: int, ranks: int, gbps: float, step_us: float, late_us: float
) -> list[Fault]:
    node = random.randrange(nodes)
    every_us = step_us * random.uniform(0.4, 3.0)
    times = int(2 * STEPS * step_us / every_us)
    part = random.uniform(0.05, 0.4)
    slow_gbps = gbps / random.choice((4, 10))
    made: dict[str, list[Fault]] = {
        "traffic": [CrossTraffic(
            node=node, gbps=gbps * random.uniform(0.6, 0.95), at_us=step_us, us=part * every_us, times=times,
            every_us=every_us,
        )],
        "incast": [CrossTraffic(
            node=node, gbps=gbps * random.choice((2, 4, 8)), at_us=step_us, us=part * every_us / 4,
            times=times, every_us=every_us,
        )],
        "slow_up": [SlowLink(node=node, gbps=slow_gbps, where="up")],
        "slow_down": [SlowLink(node=node, gbps=slow_gbps, where="down")],
        "slow_both": [SlowLink(node=node, gbps=slow_gbps)],
        "pause": [Pause(node=node, at_us=step_us, us=part * every_us, times=times, every_us=every_us)],
        "flap": [Flap(
            node=node, at_us=2 * step_us, us=step_us * random.uniform(0.05, 0.5),
            times=random.choice((2, 4, 8)), every_us=step_us * random.uniform(1.0, 4.0),
        )],
        "starved": [SlowReceiver(rank=random.randrange(ranks), us=late_us)],
        "loss": [Loss(src=random.choice((None, node)), share=random.choice((0.001, 0.005, 0.01)))],
    }  # fmt: skip
    return made[kind]


def faulty(count: int) -> range:
    """Numbers of the scenarios of troubles that go with ``count`` others: three tenths as many."""
    return range(TROUBLED, TROUBLED + 3 * count // 10)
