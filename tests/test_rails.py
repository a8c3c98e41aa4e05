"""Nodes of several GPUs with a NIC each: rings from their hops between nodes, trees, communicators."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Scenario, parse_scenario


def analysed(scenario: Scenario, folder: Path) -> tuple[Analysis, dict[str, list[dict[str, list[int]]]]]:
    captures = write_case(scenario, str(folder))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    return result, json.loads((folder / "truth.json").read_text())


def told(result: Analysis) -> Counter[tuple[str, str, int | None]]:
    return Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives)


@pytest.mark.parametrize(
    ("op", "nodes", "gpus", "channels"),
    [
        ("op: all_reduce, bytes: 3000000", 2, 4, 4),
        ("op: all_reduce, bytes: 1999984", 3, 2, 4),
        ("op: all_reduce, bytes: 60000, protocol: ll", 3, 2, 2),
        ("op: all_gather, bytes: 600000", 4, 2, 2),
        ("op: reduce_scatter, bytes: 4800000", 4, 4, 4),
        ("op: reduce_scatter, bytes: 4800000", 3, 4, 8),  # GPUs leave microseconds after their last packets
        ("op: reduce_scatter, bytes: 60000000", 2, 2, 2),
        ("op: all_reduce, bytes: 90000000", 2, 2, 2),  # several loops
    ],
)
def test_rings(op: str, nodes: int, gpus: int, channels: int, tmp_path: Path) -> None:
    more = settings(cluster={"nodes": nodes, "gpus_per_node": gpus}, nccl={"channels": channels},
                    faults=[{"kind": "gpu_late", "rank": 1, "us": 150}])  # fmt: skip
    result, truth = analysed(loop(op, more, iterations=5), tmp_path)
    kind, size = op.split(",")[0].split()[1], int(op.split("bytes: ")[1].split(",")[0])
    assert told(result) == {(kind, "ring", size): 5}
    # Every GPU leaves its node on some channel: its own first message dates it, not its node's.
    places = {e.address: e.id for e in result.endpoints}
    meta = json.loads((tmp_path / "meta.json").read_text())
    ids = [places[node["ip"]] for node in meta["nodes"]]
    for collective, true in zip(result.collectives, truth["collectives"], strict=True):
        rows = {rank.endpoint: rank for rank in collective.ranks}
        assert rows.keys() == set(ids)
        assert {row.bound for row in rows.values()} == {"exact"}
        first = min(true["enter_ns"])
        for endpoint, enter in zip(ids, true["enter_ns"], strict=True):
            lateness = rows[endpoint].lateness_ns
            assert lateness is not None
            assert abs(lateness - (enter - first)) < 5_000
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [ids[1]]


def test_bytes_that_lines_leave_open(tmp_path: Path) -> None:
    """LL128's last lines need not be full: the bytes lie between two numbers."""
    more = settings(cluster={"nodes": 3, "gpus_per_node": 4}, nccl={"channels": 4})
    result, _ = analysed(loop("op: all_reduce, bytes: 81920, protocol: ll128", more, iterations=4), tmp_path)
    assert told(result) == {("all_reduce", "ring", None): 4}
    for collective in result.collectives:
        assert collective.bytes_between is not None
        least, most = collective.bytes_between
        assert least <= 81920 <= most


def test_one_node_of_several_gpus_whose_peers_are_behind_a_router(tmp_path: Path) -> None:
    """All of them show the router's MAC, and are no port of the node."""
    more = settings(cluster={"nodes": 3, "gpus_per_node": 2, "nodes_per_leaf": 1},
                    nccl={"channels": 4}, observation={"only": [0]})  # fmt: skip
    result, _ = analysed(
        loop("op: all_reduce, algorithm: tree, bytes: 4000000", more, iterations=6), tmp_path
    )
    assert told(result) == {("all_reduce", "tree", 4000000): 6}
    own = {node["ip"] for node in json.loads((tmp_path / "meta.json").read_text())["nodes"][:2]}
    (sentence,) = [limit for limit in result.limits if limit.startswith("Not captured at their own nodes")]
    others = {endpoint.address for endpoint in result.endpoints} - own
    assert len(others) == 4
    assert all(address in sentence for address in others)
    assert not any(f"{address}," in sentence for address in own)


def test_gpus_that_no_channel_leaves_at_make_bounds(tmp_path: Path) -> None:
    """One channel leaves each node at one GPU. The others may have been the earliest."""
    more = settings(cluster={"nodes": 3, "gpus_per_node": 4}, nccl={"channels": 1})
    result, truth = analysed(loop("op: all_reduce, bytes: 70000", more, iterations=8), tmp_path)
    assert told(result) == {("all_reduce", "ring", 70000): 8}
    ids = {e.id: e.address for e in result.endpoints}
    address = {node["ip"]: node["rank"] for node in json.loads((tmp_path / "meta.json").read_text())["nodes"]}
    for collective, true in zip(result.collectives, truth["collectives"], strict=True):
        first = min(true["enter_ns"])
        for rank in collective.ranks:
            assert rank.bound != "exact"
            late = true["enter_ns"][address[ids[rank.endpoint]]] - first
            if rank.bound == "at_least":
                assert rank.lateness_ns is not None
                assert rank.lateness_ns <= late + 5_000


def test_what_a_tree_sends_up_may_have_waited_inside_the_node_so_the_node_is_named(tmp_path: Path) -> None:
    more = settings(cluster={"nodes": 4, "gpus_per_node": 2}, nccl={"channels": 4},
                    faults=[{"kind": "gpu_late", "rank": 3, "us": 200}])  # fmt: skip
    result, truth = analysed(
        loop("op: all_reduce, algorithm: tree, bytes: 4000000", more, iterations=6), tmp_path
    )
    assert told(result) == {("all_reduce", "tree", 4000000): 6}
    address = {
        node["ip"]: node["rank"] // 2 for node in json.loads((tmp_path / "meta.json").read_text())["nodes"]
    }
    place = {e.node: address[e.address] for e in result.endpoints}
    for collective, true in zip(result.collectives, truth["collectives"], strict=True):
        came = [max(true["enter_ns"][2 * node : 2 * node + 2]) for node in range(4)]  # the last of its GPUs
        assert {place[rank.node] for rank in collective.ranks} == {0, 1, 2, 3}
        for rank in collective.ranks:
            assert rank.bound == "exact"
            assert rank.lateness_ns is not None
            late = came[place[rank.node]] - min(came)
            assert abs(rank.lateness_ns - late) <= max(
                rank.error_ns or 0, 10_000
            )  # what the nodes pass on inside
    (late_row,) = (row for row in result.lateness if row.verdict == "late")
    assert late_row.node is not None
    assert place[late_row.node] == 1
    (straggler,) = (finding for finding in result.findings if finding.condition == "straggler")
    assert {address[result.endpoints[end].address] for end in straggler.endpoints} == {1}
    assert straggler.summary.startswith("A GPU of node ")


def test_tensor_parallel_inside_nodes_data_parallel_between(tmp_path: Path) -> None:
    """NVLink carries the tensor parallel groups: only the data parallel ones are seen, one a rail."""
    scenario = parse_scenario(
        """
cluster: {nodes: 3, gpus_per_node: 4}
job: {kind: training, tp: 4, steps: 6, layers: 2, buckets: 1, bucket_bytes: 900000, tp_bytes: 300000}
""",
        "test.yaml",
    )
    result, _ = analysed(scenario, tmp_path)
    assert told(result) == {("all_reduce", "ring", 900000): 4 * 6}
    assert sorted(len(group.endpoints) for group in result.groups) == [3, 3, 3, 3]


def test_gpus_that_share_an_adapter_are_told_apart_by_the_ranks_that_entries_name(tmp_path: Path) -> None:
    """The latest of them is the adapter's entry. Records too short for the ranks hold no such thing."""
    more = settings(cluster={"nodes": 2, "gpus_per_node": 4, "nics_per_node": 2, "link_gbps": 400},
                    nccl={"channels": 4}, faults=[{"kind": "gpu_late", "rank": 5, "us": 150}])  # fmt: skip
    op = "op: all_reduce, bytes: 500000, protocol: ll"
    result, truth = analysed(loop(op, more, iterations=8), tmp_path / "whole")
    ids = {e.address: e.id for e in result.endpoints}
    meta = json.loads((tmp_path / "whole" / "meta.json").read_text())
    behind: dict[int, list[int]] = {}
    for node in meta["nodes"]:
        behind.setdefault(ids[node["ip"]], []).append(node["rank"])
    assert sorted(map(len, behind.values())) == [2] * 4
    late = next(end for end, ranks in behind.items() if 5 in ranks)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [late]
    assert not any("share an adapter" in sentence for sentence in result.limits)
    exact = 0
    for collective, true in zip(result.collectives, truth["collectives"], strict=True):
        enters = {end: max(true["enter_ns"][rank] for rank in ranks) for end, ranks in behind.items()}  # type: ignore[call-overload]
        first = min(enters.values())
        for row in collective.ranks:
            if row.lateness_ns is None:
                continue
            lateness = enters[row.endpoint] - first
            exact += row.bound == "exact"
            if row.bound != "at_most":
                assert row.lateness_ns <= lateness + 5_000
            if row.bound != "at_least":
                assert row.lateness_ns >= lateness - 5_000
    assert exact
    cut, _ = analysed(loop(op, more + settings(observation={"snaplen": 100}), iterations=8), tmp_path / "cut")
    assert any("share an adapter" in sentence for sentence in cut.limits)
    assert not [row for row in cut.lateness if row.verdict == "late"]


@pytest.mark.parametrize(
    ("op", "nodes", "gpus", "told_as"),
    [
        # The root is not the first of its node on every channel: these paths end in its node again.
        ("op: broadcast, bytes: 1MiB, root: 0", 3, 2, ("broadcast", "chain", 1 << 20)),
        ("op: broadcast, bytes: 1MiB, root: 5", 4, 2, ("broadcast", "chain", 1 << 20)),
        ("op: reduce, bytes: 700000, root: 3", 3, 2, ("reduce", "chain", 700_000)),
        ("op: reduce_scatter, bytes: 1152000", 3, 2, ("reduce_scatter", "ring", 1_152_000)),
    ],
)
def test_what_nodes_pass_on_tells_operations(
    op: str, nodes: int, gpus: int, told_as: tuple[str, str, int], tmp_path: Path
) -> None:
    """Chains over nodes of several GPUs make bounds, and accuse nobody whom another had kept."""
    more = settings(cluster={"nodes": nodes, "gpus_per_node": gpus}, nccl={"channels": 4},
                    faults=[{"kind": "gpu_late", "rank": 2, "us": 400}])  # fmt: skip
    result, truth = analysed(loop(op, more, iterations=8), tmp_path)
    assert told(result) == {told_as: 8}
    ids = {e.address: e.id for e in result.endpoints}
    meta = json.loads((tmp_path / "meta.json").read_text())
    rank_of = {ids[node["ip"]]: node["rank"] for node in meta["nodes"]}
    assert {rank_of[row.endpoint] for row in result.lateness if row.verdict == "late"} <= {2}
    for collective, true in zip(result.collectives, truth["collectives"], strict=True):
        first = min(true["enter_ns"])
        for row in collective.ranks:
            late = true["enter_ns"][rank_of[row.endpoint]] - first
            if row.bound == "at_most":
                assert row.lateness_ns is not None
                assert row.lateness_ns >= late - 5_000


def test_a_ring_of_gpus_behind_shared_adapters_is_one_however_often_it_waits(shared: Path) -> None:
    """Where receivers are slow, parts of it make rings of fewer ranks; what is passed on tells them apart."""
    case = shared / "captures/nccl/n27-shared-nic-n3g4-ring-late4"
    result = dpuflow.analyze([dpuflow.Vantage(f.name, (str(f),)) for f in sorted(case.glob("node*"))])
    assert told(result) == {("all_reduce", "ring", 307_200): 20}
    late = [row.endpoint for row in result.lateness if row.verdict == "late"]
    assert [end.rank for end in result.endpoints if end.id in late] == [4]
