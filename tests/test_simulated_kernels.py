"""The simulator's kernels against their twins, packet by packet."""

from __future__ import annotations

import numpy as np
import pytest
from naive_frames import frame, packet, record
from synth_worlds import loop, settings

from dpuflow.schema.simulated import EVENTS, MESSAGES, PACKETS, REPLIES
from dpuflow.synth.frames import Framer
from dpuflow.synth.packets import _events, packets_at
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.seeds import columns
from dpuflow.synth.world import Played, play

RING = "op: all_reduce, bytes: 300KB"
WORLDS = {
    "loss": loop(RING, settings(nccl={"timeout": 8}, faults=[{"kind": "loss", "share": 0.03}])),
    "routed": loop(RING, settings(nccl={"adaptive_routing": True, "traffic_class": 106, "ecn": False})),
    "old": loop(RING, settings(nccl={"version": "2.18", "qps_per_connection": 2}, cluster={"mtu": 1024})),
    "acks": loop(RING, settings(machine={"ack_packets": 8}, cluster={"mtu": 256})),
    "marks": loop(
        "op: all_to_all, bytes: 1MiB",
        settings(cluster={"ecn_kib": 4, "nodes": 5, "nodes_per_leaf": 2}),
    ),
    "pooled": loop("op: all_to_all, bytes: 100KB", settings(cluster={"nodes": 3, "gpus_per_node": 2})),
    "reads": parse_scenario(
        "name: t\ncluster: {nodes: 2}\njob: {kind: prefill_decode, mode: read, requests: 1, kv_bytes: 100KB,"
        " tokens: 1}\n", "t.yaml",
    ),
    "sends": parse_scenario(
        "name: t\ncluster: {nodes: 2}\njob: {kind: prefill_decode, notice: send, requests: 1, kv_bytes: 90KB,"
        " tokens: 1}\n", "t.yaml",
    ),
    "atomics": parse_scenario(
        "name: t\ncluster: {nodes: 3}\njob: {kind: experts, steps: 1, layers: 1, tokens: 3}\n", "t.yaml"
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(WORLDS))
def world(request: pytest.FixtureRequest) -> Played:
    return play(WORLDS[request.param])


@pytest.mark.parametrize("node", [1, None])
def test_packets_are_those_of_the_events(world: Played, node: int | None) -> None:
    wanted = []
    for cells in _events(world, node).tolist():
        event = dict(zip(EVENTS, cells, strict=True))
        for place in range(event["count"]):
            even = event["start"] + (place + 1) * event["step_ps"] // 1000
            stamp = event["end"] if place + 1 == event["count"] else min(even, event["end"])
            wanted.append([stamp, *(packet(world, event, place)[name] for name in PACKETS)])
    for window in (1000, 200_000):
        blocks = list(packets_at(world, node, window))
        found = [
            [s, *row]
            for block in blocks
            for s, row in zip(block.stamp_ns.tolist(), block.rows.tolist(), strict=True)
        ]
        assert [row[0] for row in found] == sorted(row[0] for row in wanted)
        assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(("snaplen", "truncate"), [(0, 0), (128, 0), (57, 0), (64, 100), (0, 76)])
def test_records_are_those_of_the_packets(world: Played, snaplen: int, truncate: int) -> None:
    pool = columns(world.scenario.seed, "payload").integers(0, 256, 4096, np.uint8).tobytes()
    block = next(packets_at(world, 1, 4000))
    every = max(1, len(block.rows) // 600)
    some = block.where(np.arange(0, len(block.rows), every))
    stamps = some.stamp_ns + 1_800_000_000 * 10**9
    found = Framer(world, snaplen).records(some, stamps, truncate).tobytes()
    wanted = [
        record(stamp, frame(world, dict(zip(PACKETS, row, strict=True)), pool), snaplen, truncate)
        for stamp, row in zip(stamps.tolist(), some.rows.tolist(), strict=True)
    ]
    assert found == b"".join(wanted)


def test_the_worlds_have_every_kind_of_packet() -> None:
    """Else the twins would be compared on less than there is."""
    from dpuflow.schema.simulated import ATOMIC_ACK, RESPONSE

    worlds = [play(scenario) for scenario in WORLDS.values()]
    kinds = {k for w in worlds for k in w.trace.messages.cells()[:, MESSAGES.index("kind")].tolist()}
    replies = {k for w in worlds for k in w.trace.replies.cells()[:, REPLIES.index("kind")].tolist()}
    assert kinds == set(range(RESPONSE + 1))
    assert replies == {9, 10, ATOMIC_ACK}
    assert any(len(world.trace.entries) for world in worlds)
