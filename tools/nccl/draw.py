"""Random jobs for record.py: programs, sizes, ranks and faults drawn from a seed.

    python tools/nccl/draw.py SEED COUNT PREFIX JOBS.json

The same seed draws the same jobs. Their names are PREFIX, a number, the program, how many ranks, the fault.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

K = 1024
PROGRAMS = [
    "all_reduce",
    "all_reduce",
    "ddp",
    "ddp",
    "fsdp",
    "moe",
    "pipeline",
    "decode",
    "tpdp",
    "mixed",
    "local",
    "one",
    "one",
    "roots",
    "hier",
    "ring",
    "halo",
    "server",
    "torch_ddp",
    "torch_fsdp",
    "torch_pipeline",
    "torch_zero",
]
"""Programs to choose from; the common ones twice."""
LONG = 22
SHORT = 12
DEEP = ("fsdp", "moe", "pipeline", "tpdp", "ring", "torch_ddp", "torch_fsdp", "torch_pipeline", "torch_zero")
"""Programs with many collectives a step: they get SHORT iterations."""


def draw_size(rng: random.Random, low: int, high: int) -> int:
    """Bytes between two powers of two, a multiple of 64."""
    return int(2 ** rng.uniform(low, high)) // 64 * 64


def draw_fault(rng: random.Random, late: int, ms: float) -> dict[str, Any] | None:
    """No delay, one of the same rank in each step or in some, or one of any rank."""
    persistent = {"kind": "persistent", "rank": late, "ms": ms}
    sometimes = {"kind": "sometimes", "rank": late, "ms": 3 * ms, "share": 0.2}
    anyone = {"kind": "random", "range_ms": [1, 8], "prob": 0.4}
    return rng.choice([None, None, persistent, persistent, persistent, sometimes, anyone])


def draw_network(rng: random.Random, ranks: int) -> list[dict[str, Any]]:
    """Mostly nothing; or a node whose packets get lost, or whose link is narrow."""
    node = rng.randrange(ranks)
    loss = {"kind": "loss", "node": node, "permille": rng.choice([2, 5])}
    narrow = {"kind": "rate", "node": node, "rate": rng.choice(["500mbit", "1gbit"])}
    return rng.choice([[], [], [], [], [], [], [loss], [narrow]])


def draw_torch(rng: random.Random, ranks: int, ms: float) -> dict[str, dict[str, Any]]:
    """Parameters of frameworks.py's programs."""
    model = {
        "ms": ms,
        "layers": rng.randint(2, 6),
        "width": rng.choice([128, 256, 384, 512]),
        "batch": rng.choice([16, 64, 128]),
        "fwd": round(rng.uniform(0.2, 1), 2),
        "spread": rng.random() < 0.4,
        "log": rng.choice([0, 1, 5]),
    }
    replicas = 2 if ranks >= 4 and ranks % 2 == 0 and rng.random() < 0.5 else 1
    schedules = ["gpipe", "1f1b", "interleaved"]
    return {
        "torch_ddp": {
            **model,
            "bucket_mb": round(rng.uniform(0.2, 1.5), 2),
            "accumulate": rng.choice([1, 1, 2, 4]),
            "clip": rng.random() < 0.5,
        },
        "torch_fsdp": {**model, "replicas": replicas, "reshard": rng.random() < 0.7},
        "torch_zero": {**model, "bucket_mb": round(rng.uniform(0.2, 1.5), 2)},
        "torch_pipeline": {
            **model,
            "ms": 1,
            "layers": rng.randint(1, 2),
            "replicas": replicas,
            "schedule": rng.choice(schedules),
            "microbatches": ranks // replicas * rng.choice([1, 2]),
        },
    }


def draw_params(rng: random.Random, ranks: int) -> dict[str, dict[str, Any]]:
    """Parameters of every program, so that what else is drawn does not depend on which is chosen."""
    ms = round(rng.uniform(2, 8), 2)
    return {
        "all_reduce": {"ms": ms, "size": draw_size(rng, 12, 20)},
        "ddp": {
            "ms": ms,
            "size": draw_size(rng, 16, 19),
            "buckets": rng.randint(2, 5),
            "norm": rng.random() < 0.5,
        },
        "fsdp": {"ms": ms / 3, "size": draw_size(rng, 16, 19), "layers": rng.randint(2, 4)},
        "moe": {
            "ms": ms / 2,
            "layers": rng.randint(1, 2),
            "unit": rng.choice([1, 2, 4]) * K,
            "grad": rng.choice([0, 256 * K]),
        },
        "pipeline": {
            "ms": 0,
            "size": draw_size(rng, 15, 19),
            "fwd": round(rng.uniform(0.7, 2), 2),
            "bwd": round(rng.uniform(1.4, 3), 2),
            "microbatches": rng.randint(3, 7),
            "schedule": rng.choice(["gpipe", "1f1b"]),
            "sync": draw_size(rng, 16, 19),
        },
        "decode": {
            "ms": round(rng.uniform(0.2, 0.6), 2),
            "size": draw_size(rng, 12, 16),
            "layers": rng.randint(4, 10),
        },
        "tpdp": {
            "ms": ms / 3,
            "tp": 2,
            "size": draw_size(rng, 14, 18),
            "dp_size": draw_size(rng, 16, 19),
            "layers": rng.randint(2, 4),
            "overlap": rng.random() < 0.5,
        },
        "mixed": {"ms": ms, "size": draw_size(rng, 16, 19), "roots": rng.random() < 0.5},
        "local": {"ms": ms, "size": draw_size(rng, 15, 18), "tensors": rng.randint(2, 5)},
        "one": {
            "op": rng.choice(["all_gather", "reduce_scatter", "all_to_all", "broadcast"]),
            "ms": ms,
            "size": draw_size(rng, 16, 20) // (ranks * 64) * ranks * 64,
            "root": rng.randrange(ranks),
        },
        "roots": {
            "ms": ms,
            "size": draw_size(rng, 12, 18),
            "ops": rng.sample(["reduce", "broadcast", "gather", "scatter"], rng.randint(1, 3)),
        },
        "hier": {"ms": ms, "size": draw_size(rng, 15, 19), "per": 2},
        "ring": {"ms": ms, "size": draw_size(rng, 15, 19), "hop_ms": round(rng.uniform(0.3, 1), 2)},
        "halo": {"ms": ms, "size": draw_size(rng, 12, 18), "every": rng.randint(1, 4)},
        "server": {"ms": ms, "size": draw_size(rng, 14, 18)},
        **draw_torch(rng, ranks, ms),
    }


def draw_job(rng: random.Random, name: str, seed: int) -> dict[str, Any]:
    """One job as record.py reads it."""
    ranks = rng.choice([2, 3, 4, 4, 5, 6, 8])
    program = rng.choice(PROGRAMS)
    if program == "pipeline":
        ranks = rng.choice([2, 3, 4])
    if program in ("tpdp", "hier"):
        ranks = rng.choice([4, 6, 8])
    fault = draw_fault(rng, rng.randrange(ranks), round(rng.uniform(1, 6), 2))
    params = draw_params(rng, ranks)[program]
    return {
        "name": f"{name}-{program}-n{ranks}-{fault['kind'] if fault else 'none'}",
        "program": program,
        "ranks": ranks,
        "iterations": SHORT if program in DEEP else LONG,
        "seed": seed,
        "params": params,
        "fault": fault,
        "offloads": rng.random() < 0.5,
        "mode": rng.choice(["gpu", "gpu", "gpu", "host"]),
        "network": draw_network(rng, ranks),
        "limit_s": 25 if program.startswith("torch") else 15,
    }


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    seed, count, prefix = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rng = random.Random(seed)
    jobs = [draw_job(rng, f"{prefix}{i:02d}", seed * 1000 + i) for i in range(count)]
    Path(sys.argv[4]).write_text(json.dumps(jobs, indent=1) + "\n")
    print("\n".join(job["name"] for job in jobs))


if __name__ == "__main__":
    main()
