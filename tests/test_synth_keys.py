"""Scenarios' rarer keys: NICs that are shared, pauses, versions, NVLS, immediates, hosts' noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, messages_of, played, records, settings

from dpuflow.errors import OptionError
from dpuflow.schema.simulated import CTS, WRITE_IMM
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Nccl, parse_scenario
from dpuflow.synth.transport import Local

REDUCE = "op: all_reduce, bytes: 8MiB"


def test_gpus_that_share_a_nic_send_by_it(tmp_path: Path) -> None:
    shared = settings(
        cluster={"nodes": 2, "gpus_per_node": 4, "nics_per_node": 2},
        nccl={"channels": 4},
        observation={"compress": False},
    )
    write_case(loop(REDUCE, shared), str(tmp_path))
    nodes = json.loads((tmp_path / "meta.json").read_text())["nodes"]
    assert [node["ip"] for node in nodes] == [f"10.{nic}.0.{host}" for host in (1, 2) for nic in (0, 0, 1, 1)]
    assert len({node["mac"] for node in nodes}) == 4
    sent = {bytes(frame[26:30]) for _, frame in records(tmp_path / "node0.pcap")}
    assert sent == {bytes((10, nic, 0, host)) for nic in (0, 1) for host in (1, 2)}


def test_with_pxn_a_shared_nic_on_the_rail_is_the_sender_s_own() -> None:
    shared = settings(cluster={"nodes": 2, "gpus_per_node": 4, "nics_per_node": 2})
    world = played("op: all_to_all, bytes: 1MiB", shared, iterations=1)
    for connection in world.connections:
        rails = [end.number % 2 for end in (connection.nic.port, connection.dst.port)]
        assert rails[0] == rails[1]
        assert (connection.nic is connection.src) == (connection.src.port.number % 2 == rails[1])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"cluster": {"gpus_per_node": 4, "nics_per_node": 3}},
            "cluster.nics_per_node: 4 GPUs cannot share 3",
        ),
        ({"nccl": {"match_by": "id", "version": "2.25"}}, "nccl.match_by: 2.25 knows no id"),
        ({"nccl": {"match_by": "tag"}}, "nccl.match_by: 'tag' is not one of index, id"),
        (
            {"faults": [{"kind": "pause", "node": 1, "at_us": 0, "us": 50, "times": 2, "every_us": 10}]},
            r"faults\[0\].every_us: 10 is less than the 50 us",
        ),
        (
            {"faults": [{"kind": "loss", "share": 0.1, "from_us": 50, "until_us": 10}]},
            r"faults\[0\].until_us: 10 is not after from_us, 50",
        ),
        ({"faults": [{"kind": "pause", "node": 9, "at_us": 0, "us": 50}]}, r"faults\[0\].node: 9 is not one"),
    ],
)
def test_what_does_not_go_together_is_said(more: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        loop(REDUCE, settings(**more))


def test_a_hot_rank_is_one_of_the_job_s() -> None:
    with pytest.raises(OptionError, match=r"job\.hot: 9 is not one of the 4 ranks"):
        parse_scenario(json.dumps({"job": {"kind": "experts", "hot": 9}}), "test")


def test_nvls_needs_several_gpus_in_a_node() -> None:
    with pytest.raises(OptionError, match="nvls_tree is for nodes of several GPUs"):
        loop(REDUCE + ", algorithm: nvls_tree")


@pytest.mark.parametrize(("nodes", "chunk"), [(2, 128 << 10), (4, 64 << 10)])
def test_nvls_trees_carry_each_head_s_share(nodes: int, chunk: int) -> None:
    """Every rail has its tree over the nodes, up and down, in NCCL's chunks; nothing else is on the wire."""
    gpus = 4
    world = played(
        REDUCE + ", algorithm: nvls_tree, channels: 2",
        settings(cluster={"nodes": nodes, "gpus_per_node": gpus}, nccl={"channels": 2}),
        iterations=1,
    )
    by_edge: dict[tuple[int, int], list[int]] = {}
    for row in messages_of(world):
        if row.kind == WRITE_IMM:
            flow = world.flows[row.flow]
            by_edge.setdefault((flow.src.number, flow.dst.number), []).append(row.size)
    assert all(src % gpus == dst % gpus for src, dst in by_edge)
    assert len(by_edge) >= 2 * gpus * (nodes - 1)
    assert {size for sizes in by_edge.values() for size in sizes} == {chunk}
    # One edge of a tree for each node but the root, up and down, for each channel and rail.
    assert sum(map(sum, by_edge.values())) == 2 * (nodes - 1) * (8 << 20)
    local = [link for link in world.links if isinstance(link, Local)]
    assert all(link.produced == link.taken > 0 for link in local)
    (work,) = world.works
    assert work.plan.algorithm == "tree"
    assert len(work.leave_ns) == nodes * gpus


def test_immediates_can_be_numbers() -> None:
    world = played(REDUCE, settings(nccl={"match_by": "id", "version": "2.30"}), iterations=1)
    for flow in {row.flow for row in messages_of(world) if row.kind == WRITE_IMM}:
        told = [row.value for row in messages_of(world) if row.flow == flow]
        assert told == list(range(len(told)))


@pytest.mark.parametrize(
    ("version", "power", "splits"), [("2.18", 18, True), ("2.20", 18, False), ("2.25", 20, False)]
)
def test_defaults_are_the_version_s(version: str, power: int, splits: bool) -> None:
    assert Nccl(version=version).timeout_ns == 4096.0 * 2**power
    assert Nccl(version=version).splits == splits
    assert Nccl(version=version, timeout=14, split_data_on_qps=True).timeout_ns == 4096.0 * 2**14
    assert Nccl(version=version, split_data_on_qps=True).splits


PAUSE = {"kind": "pause", "node": 1, "at_us": 300, "us": 500}


def test_a_nic_that_pauses_holds_up_those_who_send_to_others() -> None:
    """The switch's buffer fills, its senders stop, and what they have for others waits behind."""
    more = {"cluster": {"nodes": 4, "queue_kib": 512, "ecn_kib": None}}
    calm = played("op: all_to_all, bytes: 16MiB", settings(**more), iterations=1)
    world = played("op: all_to_all, bytes: 16MiB", settings(faults=[PAUSE], **more), iterations=1)
    bursts, pauses = world.trace.bursts.read(), world.trace.pauses.read()
    assert (bursts["rx_end_ns"] >= 0).all()
    to = np.array([flow.dst.number for flow in world.flows])
    came = np.sort(bursts["rx_end_ns"][to[bursts["flow"]] == 1])
    still = (came > 330e3) & (came < 790e3)
    assert not still.any()
    assert {0, 2, 3} <= set(pauses["port"].tolist())

    # Node 3 is nobody's problem, and waits for its senders all the same.
    def finished(played_world: object) -> float:
        return max(played_world.works[0].leave_ns.values())  # type: ignore[attr-defined]

    assert finished(world) > finished(calm) + 300e3
    found = []
    for each in (calm, world):
        table = each.trace.bursts.read()
        there = table["rx_end_ns"][to[table["flow"]] == 3]
        found.append(int(((there > 600e3) & (there < 780e3)).sum()))
    assert 2 * found[1] < found[0]


def test_a_loaded_stack_sends_unevenly_and_takes_up_what_came_in_turns() -> None:
    """As the real captures of net_ib over Soft-RoCE show it (tools/noise.py)."""
    host = settings(machine={"profile": "host"}, cluster={"link_gbps": 1, "mtu": 1024, "latency_us": 30})
    world = played("op: all_reduce, bytes: 256KiB", host, iterations=4)
    bursts = world.trace.bursts.read()
    flow = int(np.bincount(bursts["flow"]).argmax())
    mine = bursts["flow"] == flow
    sent = np.diff(np.sort(bursts["tx_end_ns"][mine])) / 1e3
    low, middle, high = np.percentile(sent, (5, 50, 95))
    assert middle > 3 * low
    assert high > 3 * middle
    came = np.diff(np.sort(bursts["rx_end_ns"][mine & (bursts["rx_end_ns"] >= 0)])) / 1e3
    assert np.percentile(came, 25) < 1  # one turn takes up several
    assert np.percentile(came, 90) > 200
    assert (bursts["rx_end_ns"][mine] >= bursts["tx_end_ns"][mine]).all()


def test_ip_identifications_count_on_whoever_sends(tmp_path: Path) -> None:
    """One after the other for each peer, repetitions included, and never by the packet number."""
    lossy = settings(
        faults=[{"kind": "loss", "share": 0.01, "src": 0, "dst": 1}],
        nccl={"timeout": 8},
        observation={"compress": False, "clocks": {"jitter_ns": 0}},
    )
    write_case(loop(REDUCE, lossy), str(tmp_path))
    ways: dict[bytes, list[int]] = {}
    for _, frame in records(tmp_path / "node0.pcap"):
        if frame[26:30] == bytes((10, 0, 0, 1)):
            ways.setdefault(bytes(frame[30:34]), []).append(int.from_bytes(frame[18:20], "big"))
    for numbers in ways.values():
        # Two may change places that left within one burst of another queue pair.
        assert sorted(n - numbers[0] & 0xFFFF for n in numbers)[:50] == list(range(len(numbers)))[:50]
        assert (np.diff(numbers) & 0xFFFF == 1).mean() > 0.8


def test_every_fault_and_key_of_machine_is_checked() -> None:
    text = "job: {kind: decode}\nmachine: {turn_us: -1}\n"
    with pytest.raises(OptionError, match=r"a\.yaml:2: machine.turn_us: -1 is below 0"):
        parse_scenario(text, "a.yaml")
    assert CTS == 0


@pytest.mark.parametrize(("leaf", "routed"), [(4, False), (1, True)])
def test_frames_over_the_spine_are_routed(tmp_path: Path, leaf: int, routed: bool) -> None:
    """They come with another source and three hops less; what stays under one leaf is switched."""
    more = settings(
        cluster={"nodes": 2, "nodes_per_leaf": leaf},
        observation={"compress": False, "clocks": {"jitter_ns": 0}},
    )
    write_case(loop(REDUCE, more, iterations=1), str(tmp_path))
    meta = json.loads((tmp_path / "meta.json").read_text())
    macs = [bytes.fromhex(node["mac"].replace(":", "")) for node in meta["nodes"]]
    seen = set()
    for node in (0, 1):
        for _, frame in records(tmp_path / f"node{node}.pcap"):
            mine = frame[26:30] == bytes((10, 0, 0, node + 1))
            seen.add((mine, frame[22], frame[:6] == macs[node], frame[6:12] == macs[node]))
            assert (frame[:6] in macs and frame[6:12] in macs) != routed
    assert seen == {(True, 255, False, True), (False, 252 if routed else 255, True, False)}


def test_worlds_begin_at_some_time_of_a_day(tmp_path: Path) -> None:
    begins = set()
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        write_case(
            loop(REDUCE, settings(seed=seed, observation={"compress": False}), iterations=1), str(folder)
        )
        truth = json.loads((folder / "truth.json").read_text())
        first = records(folder / "node0.pcap")[0][0]
        assert 0 <= first - min(truth["collectives"][0]["enter_ns"]) + 10**6 < 2 * 10**6
        begins.add(first // 10**9)
    assert len(begins) == 3


def test_what_was_put_in_is_told_by_the_names_of_findings(tmp_path: Path) -> None:
    decode = "cluster: {nodes: 4}\njob: {kind: decode, tp: 2, tokens: 4, layers: 1}\nclients: {hosts: 1}\n"
    sends = "job: {kind: loop, iterations: 2, ops: [{op: all_to_allv, bytes: 64KiB, skew: 0.5, root: 2}]}\n"
    said = []
    for number, text in enumerate(
        (
            decode + "faults: [{kind: early_stop, rank: 3, iteration: 2}]",
            decode + "faults: [{kind: loss, share: 0.1, traffic: clients}]",
            decode + "faults: [{kind: slow_link, node: client, gbps: 0.1}]",
            sends,
        )
    ):
        folder = tmp_path / str(number)
        write_case(parse_scenario(text, "a.yaml"), str(folder))
        rows = json.loads((folder / "truth.json").read_text())["conditions"]
        said.append([(row["condition"], row["ranks"]) for row in rows])
    assert said == [
        [("early_stop_skew", [2, 3])],
        [("ingress_loss", []), ("egress_loss", [])],
        [("saturation", [0])],
        [("load_skew", [2])],
    ]


def test_a_replica_that_stops_early_does_nothing_more_while_its_captures_go_on(tmp_path: Path) -> None:
    text = "observation: {compress: false}\njob: {kind: decode, tp: 2, tokens: 6, layers: 1}\n"
    text += "faults: [{kind: early_stop, rank: 0, iteration: 2}]"
    write_case(parse_scenario(text, "a.yaml"), str(tmp_path))
    rows = json.loads((tmp_path / "truth.json").read_text())["collectives"]
    assert sum(row["ranks"] == [0, 1] for row in rows) == 2 * 2
    assert sum(row["ranks"] == [2, 3] for row in rows) == 6 * 2
    ends = [list(records(tmp_path / f"node{node}.pcap"))[-1][0] for node in range(4)]
    assert max(ends) == ends[0] == ends[1]


@pytest.mark.parametrize(("skew", "share"), [(0.0, 0.25), (0.5, 0.5)])
def test_sends_of_unlike_sizes_go_to_one_rank_by_their_skew(skew: float, share: float) -> None:
    world = played(f"op: all_to_allv, bytes: 1MiB, root: 1, skew: {skew}", "cluster: {nodes: 4}\n", 6)
    rows = [row for row in messages_of(world) if row.kind == WRITE_IMM]
    got = [sum(row.size for row in rows if world.flows[row.flow].dst.node == node) for node in range(4)]
    assert got[1] / sum(got) == pytest.approx(share, abs=0.05)
    assert len({row.size for row in rows}) > 30  # no two alike, nor the same again
