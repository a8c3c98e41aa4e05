"""Findings where only some nodes were captured: what cannot be compared or told from there is not told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpuflow

HOSTS = {"link_gbps": 1, "latency_us": 30, "mtu": 1024, "nodes": 4}
ON_HOSTS = {
    "seed": 2,
    "cluster": HOSTS,
    "machine": {"profile": "host"},
    "job": {
        "kind": "loop", "iterations": 20, "compute_us": 20_000,
        "ops": [{"op": "all_to_all", "bytes": 1 << 18}],
    },
}  # fmt: skip


Written = Callable[[dict[str, Any]], Path]


def told(folder: Path, *nodes: int) -> dict[str, list[str]]:
    """Conditions above info, with the addresses, as the captures of these nodes show them."""
    result = dpuflow.analyze([str(folder / f"node{node}.pcap.gz") for node in nodes])
    return {
        each.condition: [result.endpoints[end].address for end in each.endpoints]
        for each in result.findings
        if each.severity != "info"
    }


@pytest.mark.parametrize("nodes", [(0,), (3,), (0, 3), (1, 2), (0, 1, 2)])
def test_who_is_captured_does_not_receive_more_for_that(written: Written, nodes: tuple[int, ...]) -> None:
    scenario = {"seed": 2, "cluster": {"nodes": 4}, "job": {"kind": "experts", "steps": 8}}
    assert told(written(scenario), *nodes) == {}


def test_a_hot_node_is_told_by_those_that_are_seen_whole(written: Written) -> None:
    job = {"kind": "experts", "steps": 10, "hot": 1, "hot_share": 0.6}
    scenario = {"seed": 2, "cluster": {"nodes": 4}, "job": job}
    assert told(written(scenario), 0, 1, 2)["load_skew"] == ["10.0.0.2"]


@pytest.mark.parametrize("nodes", [(0,), (2,), (0, 3)])
def test_what_a_busy_host_sends_twice_is_no_loss_from_either_end(
    written: Written, nodes: tuple[int, ...]
) -> None:
    assert told(written(ON_HOSTS), *nodes) == {}


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1, 2, 3)])
def test_what_is_lost_is_a_loss_from_either_end(written: Written, nodes: tuple[int, ...]) -> None:
    scenario = ON_HOSTS | {"faults": [{"kind": "loss", "share": 0.02, "src": 0}]}
    assert "packet_loss" in told(written(scenario), *nodes)


def test_loads_that_are_not_seen_whole_are_not_judged(written: Written) -> None:
    scenario = {"seed": 2, "cluster": {"nodes": 4}, "job": {"kind": "experts", "steps": 8}}
    folder = written(scenario)
    states = {}
    for files in (["node0.pcap.gz"], ["node0.pcap.gz", "node1.pcap.gz", "node2.pcap.gz"]):
        result = dpuflow.analyze([str(folder / file) for file in files])
        (row,) = (row for row in result.judged if row.condition == "load_skew")
        states[len(files)] = row
    assert (states[1].state, states[3].state) == ("not_judged", "not_found")
    assert states[1].reason == "what fewer than 3 members of a group receive was captured whole"


def test_a_node_behind_a_slow_link_is_not_late_by_itself(written: Written) -> None:
    """Its peers' entries show in their first acts at the earliest: that they had taken their inputs before
    these says nothing of when they began to work."""
    job = {
        "kind": "training", "steps": 20, "layers": 2, "buckets": 2, "bucket_bytes": 341_328,
        "ep_bytes": 341_328, "forward_us": 50, "optimizer_us": 37.5, "jitter_us": 5, "algorithm": "ring",
    }  # fmt: skip
    slow = {"kind": "slow_link", "node": 2, "gbps": 25, "where": "down"}
    cluster = {"nodes": 3, "link_gbps": 100, "mtu": 1024, "ecn_kib": 200}
    folder = written({"seed": 2, "cluster": cluster, "job": job, "faults": [slow]})
    assert "straggler" not in told(folder, 2)


@pytest.mark.parametrize(("nodes", "state"), [(2, "not_judged"), (3, "not_found")])
def test_the_only_path_there_is_has_none_to_be_compared_with(
    written: Written, nodes: int, state: str
) -> None:
    job = {"kind": "loop", "iterations": 12, "ops": [{"op": "all_reduce", "bytes": 1 << 20}]}
    folder = written({"seed": 2, "cluster": {"nodes": nodes}, "job": job})
    result = dpuflow.analyze([str(file) for file in sorted(folder.glob("node*.pcap.gz"))])
    assert {each.state for each in result.judged if each.condition == "slow_link"} == {state}


def test_operations_with_the_same_messages_are_told_apart_by_content_from_some_nodes(
    written: Written,
) -> None:
    """Weights that are gathered and gradients that are scattered have the same messages: together they are
    neither, and were read as rings of the nodes captured alone."""
    job = {
        "kind": "training", "steps": 8, "layers": 4, "buckets": 2, "bucket_bytes": 213_312, "sharded": True,
        "forward_us": 25, "optimizer_us": 37.5, "algorithm": "ring",
    }  # fmt: skip
    folder = written({"seed": 2, "cluster": {"nodes": 8, "link_gbps": 400, "mtu": 1024}, "job": job})
    result = dpuflow.analyze([str(folder / f"node{node}.pcap.gz") for node in (0, 1, 2, 5)])
    found = Counter((str(c.op), c.bytes, len(c.ranks)) for c in result.collectives)
    assert found == {("all_gather", 26_664, 8): 64, ("reduce_scatter", 213_312, 8): 32}


@pytest.mark.parametrize("nodes", [(0, 3), (3,)])
def test_who_gets_more_from_senders_nobody_saw_is_not_slow_to_take_it(
    written: Written, nodes: tuple[int, ...]
) -> None:
    """What was seen of its inputs lay there until the rest had come, too."""
    operation = {"op": "all_to_allv", "bytes": 4 << 20, "root": 2, "skew": 0.2}
    job = {"kind": "loop", "iterations": 20, "compute_us": 500, "ops": [operation]}
    assert told(written({"seed": 9008, "cluster": {"nodes": 4}, "job": job}), *nodes) == {}


@pytest.mark.parametrize("paused", [True, False])
def test_a_port_of_which_only_credits_show_both_ends_is_not_compared(written: Written, paused: bool) -> None:
    """They take a small part of what data takes a byte, and are held for less: beside one of theirs a port
    that data comes to was slow, or paused."""
    operation = {"op": "all_reduce", "bytes": 1 << 18}
    pause = {"kind": "pause", "node": 0, "us": 90_000, "every_us": 300_000, "at_us": 100_000, "times": 200}
    scenario = ON_HOSTS | {"job": ON_HOSTS["job"] | {"ops": [operation]}, "faults": [pause] if paused else []}
    assert told(written(scenario), 0, 3) == {}
