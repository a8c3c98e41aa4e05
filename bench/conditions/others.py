"""Further jobs drawn at random: conditions that begin in the middle, those seen indirectly, late GPUs inside
of nodes, tokens."""

from __future__ import annotations

import json
import tempfile
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import dpuflow
from bench.conditions.beside import tokens_right
from bench.conditions.truth import NEGLIGIBLE, lasted, play

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.results import Analysis

RIGHT_AWAY = 3
"""Steps within which the onset of a condition is to be told."""
TWICE = 2 * NEGLIGIBLE
"""Of the time: what costs so much in one run is no chance."""
SHADOWS: dict[str, tuple[str, ...]] = {
    "input_starvation": ("host_cpu", "admission_backlog"),
    "launch_latency": (),
    "p2p_throttling": ("straggler", "load_skew"),
    "pcie_saturation": ("congestion", "kv_transfer_bottleneck"),
    "registration_churn": ("straggler", "host_cpu"),
    "host_cpu": ("pcie_saturation", "node_skew"),
}
"""Conditions that are seen indirectly, each with what its row in the table names beside it."""


class Told(NamedTuple):
    """Whether one job was judged right, wrong, or nothing was told; ``None``: it is not asked."""

    name: str
    word: str | None
    steps: float | None = None  # by how much the onset is off


def _analysed(folder: str) -> Analysis:
    return dpuflow.analyze([str(path) for path in sorted(Path(folder).glob("*.pcap.gz"))])


def _node_of(folder: str) -> dict[str, int]:
    """Nodes by address."""
    nodes = json.loads((Path(folder) / "meta.json").read_text())["nodes"]
    return {address: each["node"] for each in nodes for address in each["ips"]}


def _truth(folder: str) -> dict[str, Any]:
    truth: dict[str, Any] = json.loads((Path(folder) / "truth.json").read_text())
    return truth


def onset(number: int) -> Told:
    """A condition that begins in the second third of a job: how far off its beginning is told, in steps."""
    random = Random(f"onset {number}")
    nodes, kind = random.choice((3, 4)), random.choice(("training", "decode", "loop"))
    job = {
        "training": {"kind": kind, "steps": 24, "buckets": 2, "bucket_bytes": 1 << 20},
        "decode": {"kind": kind, "tokens": 40, "layers": 4, "bytes": 32768},
        "loop": {
            "kind": kind, "iterations": 40,
            "ops": [{"op": random.choice(("all_reduce", "all_gather")), "bytes": 1 << 20}],
        },
    }[kind]  # fmt: skip
    scenario = {"name": f"onset-{number}", "seed": number + 1, "cluster": {"nodes": nodes}, "job": job}
    share, node = random.uniform(1 / 3, 2 / 3), random.randrange(nodes)
    steps = int(job.get("steps") or job.get("tokens") or job["iterations"])  # type: ignore[call-overload]
    name = random.choice(("straggler", "slow_link", "packet_loss", "congestion", "head_of_line"))
    with tempfile.TemporaryDirectory() as folder:
        play(scenario, folder)
        sound, _ = lasted(folder)
        begun = sorted({(row["iter"], min(row["enter_ns"])) for row in _truth(folder)["collectives"]})
    first = dict(reversed(begun))
    usual = median(b - a for a, b in zip(list(first.values())[1:], first.values(), strict=False))
    at_us = share * sound / 1e3
    again = {"at_us": at_us, "times": 400}
    fault = {
        "straggler": {"kind": "gpu_late", "us": 500, "rank": node, "from_iteration": int(share * steps)},
        "slow_link": {"kind": "slow_link", "node": node, "gbps": random.choice((5, 15)), "from_us": at_us},
        "packet_loss": {"kind": "loss", "share": 0.01, "src": node, "from_us": at_us},
        "congestion": {
            "kind": "cross_traffic", "node": node, "gbps": 95, "us": 3000, "every_us": 4000, **again,
        },
        "head_of_line": {"kind": "pause", "node": node, "us": 900, "every_us": 3000, **again},
    }[name]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        play(scenario | {"faults": [fault]}, folder)
        truth, result = _truth(folder), _analysed(folder)
        if 1 - sound / lasted(folder)[0] < TWICE:
            return Told(name, None)
    mine = [each for each in result.findings if each.condition == name]
    if not mine:
        return Told(name, "missed", inf)
    began_ns = truth["conditions"][0]["from_ns"]
    off = min((abs((each.start_ns or 0) - began_ns) / abs(usual) for each in mine), default=0.0)
    return Told(name, "right" if off <= RIGHT_AWAY else "wrong", off)


def shadow(number: int) -> Told:
    """A condition that is seen indirectly: itself, or what else it may be, is told."""
    random = Random(f"shadow {number}")
    name = random.choice(tuple(SHADOWS))
    nodes = random.choice((3, 4))
    loop: dict[str, Any] = {
        "kind": "loop", "iterations": 24,
        "ops": [
            {"op": random.choice(("all_reduce", "all_gather")), "bytes": random.choice((1 << 16, 1 << 20))}
        ],
    }  # fmt: skip
    node = random.randrange(nodes)
    cluster: dict[str, Any] = {"nodes": nodes}
    more: dict[str, Any] = {}
    which = 0
    if name == "input_starvation":
        cluster, which = {"nodes": 2}, 1
        loop = {"kind": "service", "layers": 2, "layer_us": 200, "prefill_us": 800, "bytes": 4096}
        more["clients"] = {"hosts": 3, "sessions": 1, "requests": 12, "tokens": 10, "think_us": 60_000}
        faults = [{"kind": "slow_input", "us": random.choice((5000, 20_000)), "from_us": 350_000}]
    elif name == "launch_latency":
        begin = random.randrange(8, 16)
        faults = [{"kind": "slow_gpu", "factor": random.choice((2.5, 4)), "from_iteration": begin}]
    elif name == "p2p_throttling":
        cluster |= {"gpus_per_node": 4, "nics_per_node": random.choice((1, 2, 4)), "nodes": 3}
        loop["ops"][0]["bytes"] = 4 << 20
        faults = [{"kind": "nvlink", "node": node % 3, "gbyte_s": random.choice((1.0, 3.0))}]
    elif name == "pcie_saturation":
        loop = {
            "kind": "prefill_decode",
            "mode": "read",
            "requests": 16,
            "prefill_us": 1000,
            "kv_bytes": 2 << 20,
        }
        node %= nodes // 2
        faults = [{"kind": "slow_pcie", "node": node, "us": random.choice((200, 800))}]
    elif name == "registration_churn":
        more["nccl"] = {"registered": True}
        faults = [{"kind": "churn", "rank": node, "us": random.choice((300, 1000))}]
    else:
        cluster |= {"gpus_per_node": 2, "nics_per_node": 2}
        us = random.choice((300, 1000))
        faults = [{"kind": "slow_host", "rank": rank, "us": us} for rank in (2 * node, 2 * node + 1)]
    scenario = {"name": f"shadow-{number}", "seed": number + 1, "cluster": cluster, "job": loop, **more}
    took = []
    for each in ([], faults):
        with tempfile.TemporaryDirectory() as folder:
            play(scenario | {"faults": each}, folder)
            took.append(lasted(folder)[which])
            result, of = _analysed(folder), _node_of(folder)
    if 1 - took[0] / took[1] < TWICE:
        return Told(name, None)
    told = {each.condition for each in result.findings}
    told |= {part.condition for each in result.findings for part in each.consists_of}
    if name in told:
        rank = faults[0].get("rank", 0) // cluster.get("gpus_per_node", 1)
        guilty = faults[0].get("node", rank if "rank" in faults[0] else None)
        at = [each.endpoints for each in result.findings if each.condition == name]
        places = {of.get(result.endpoints[end].address) for ends in at for end in ends}
        return Told(name, "right" if guilty is None or not at or guilty in places else "wrong")
    return Told(name, "alternative" if told & set(SHADOWS[name]) else "missed")


def inside(number: int) -> Told:
    """A late GPU in a node of eight that share its NICs, two channels: the node is named."""
    random = Random(f"inside {number}")
    nodes, op = random.choice((2, 4)), random.choice(("all_reduce", "all_gather", "reduce_scatter"))
    rank = random.randrange(8 * nodes)
    scenario = {
        "name": f"inside-{number}", "seed": number + 1,
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "nics_per_node": random.choice((1, 2, 8))},
        "nccl": {"channels": 2},
        "job": {
            "kind": "loop", "iterations": 20,
            "ops": [{"op": op, "bytes": random.choice((1 << 20, 4 << 20))}],
        },
        "faults": [{"kind": "gpu_late", "us": random.choice((500, 2000)), "rank": rank}],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        play(scenario, folder)
        result = _analysed(folder)
        of = _node_of(folder)
    named = {
        of[result.endpoints[end].address]
        for each in result.findings
        if each.condition in ("straggler", "node_skew", "p2p_throttling", "host_cpu")
        for end in each.endpoints
    }
    if not named:
        return Told("late GPU in a node", "untold")
    return Told("late GPU in a node", "right" if named == {rank // 8} else "wrong")


def tokens(number: int) -> list[Told]:
    """Jobs that decode, with and without a pause between tokens, prompts among them or before."""
    random = Random(f"tokens {number}")
    kind = random.choice(("decode", "decode", "prefill_decode", "service"))
    layers = random.choice((4, 8, 12))
    job: dict[str, Any] = {"kind": kind, "layers": layers, "bytes": random.choice((4096, 32768))}
    more: dict[str, Any] = {}
    nodes = random.choice((2, 4))
    pause = "no pause"
    if kind == "decode":
        job |= {"tokens": 30, "token_us": random.choice((0, 60, 200))}
        pause = "a pause" if job["token_us"] else "no pause"
    elif kind == "prefill_decode":
        nodes = max(nodes, 4)
        job |= {"requests": 6, "tokens": 10, "prefill_us": 1500, "kv_bytes": 1 << 20}
    else:
        job |= {"layer_us": 100, "prefill_us": 400}
        nodes = 2
        more["clients"] = {"hosts": 3, "sessions": 2, "requests": 6, "tokens": 20, "think_us": 10_000}
    scenario = {
        "name": f"tokens-{number}",
        "seed": number + 1,
        "cluster": {"nodes": nodes},
        "job": job,
        **more,
    }
    with tempfile.TemporaryDirectory() as folder:
        play(scenario, folder)
        result = _analysed(folder)
        words = tokens_right(scenario, _truth(folder)["collectives"], result)
    return [Told(f"{kind}, {pause}", word) for word in words]


DRAWS: dict[str, Callable[[int], Any]] = {
    "onset": onset,
    "shadow": shadow,
    "inside": inside,
    "tokens": tokens,
}
