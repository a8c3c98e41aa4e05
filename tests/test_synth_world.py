"""The simulated transport keeps NCCL's and RoCE's rules: credits, causality, bytes, sequence numbers."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from synth_worlds import Row, messages_of, played, settings

from dpuflow.schema.simulated import CNP, CTS, WRITE_IMM
from dpuflow.synth.congestion import CNP_NS
from dpuflow.synth.world import Played
from dpuflow.wire.nccl import NCCL_STEPS

KINDS = {
    "ring": ("op: all_reduce, bytes: 3MiB", ""),
    "ring ll": ("op: all_reduce, bytes: 64KiB, protocol: ll", ""),
    "ring ll128": ("op: all_reduce, bytes: 1MB, protocol: ll128", ""),
    "ring many loops": ("op: all_reduce, bytes: 40MB", settings(cluster={"nodes": 3})),
    "tree": ("op: all_reduce, bytes: 9MiB, algorithm: tree", settings(cluster={"nodes": 7})),
    "all_gather": ("op: all_gather, bytes: 2MB", ""),
    "reduce_scatter": ("op: reduce_scatter, bytes: 8MiB", ""),
    "pat": ("op: all_gather, bytes: 700KB, algorithm: pat", settings(cluster={"nodes": 7})),
    "pat back": ("op: reduce_scatter, bytes: 1MB, algorithm: pat", settings(cluster={"nodes": 12})),
    "broadcast": ("op: broadcast, bytes: 5MiB, root: 2", ""),
    "reduce": ("op: reduce, bytes: 5MiB, root: 1", ""),
    "all_to_all": ("op: all_to_all, bytes: 4MiB", ""),
    "send_recv": ("op: send_recv, bytes: 1MB", ""),
    "eight GPUs": ("op: all_reduce, bytes: 16MiB", settings(cluster={"nodes": 2, "gpus_per_node": 8},
                                                            nccl={"channels": 8})),
    "tree in nodes": ("op: all_reduce, bytes: 16MiB, algorithm: tree",
                      settings(cluster={"nodes": 3, "gpus_per_node": 4}, nccl={"channels": 4})),
    "queue pairs": ("op: all_reduce, bytes: 3MiB", settings(nccl={"qps_per_connection": 3})),
    "split": ("op: all_reduce, bytes: 3MB",
              settings(nccl={"qps_per_connection": 4, "split_data_on_qps": True})),
    "adaptive routing": ("op: all_reduce, bytes: 3MB", settings(nccl={"adaptive_routing": True})),
    "registered": ("op: all_reduce, bytes: 3MiB", settings(nccl={"registered": True})),
    "loss": ("op: all_reduce, bytes: 8MiB",
             settings(nccl={"timeout": 8}, faults=[{"kind": "loss", "share": 0.01}])),
    "slow link": ("op: all_reduce, bytes: 8MiB",
                  settings(faults=[{"kind": "slow_link", "node": 1, "gbps": 10}])),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(KINDS))
def world(request: pytest.FixtureRequest) -> Played:
    return played(*KINDS[request.param])


def by_connection(world: Played) -> list[tuple[list[Row], list[Row]]]:
    """For each connection its clear-to-send entries and its data messages with immediate, in order."""
    rows = defaultdict(list)
    for row in messages_of(world):
        rows[row.flow].append(row)
    return [
        (
            rows[link.grants.number],
            sorted((r for f in link.data for r in rows[f.number]), key=lambda r: r.sent_ns),
        )
        for link in world.connections
    ]


def test_everybody_enters_and_leaves(world: Played) -> None:
    for work in world.works:
        assert work.enter_ns.keys() == work.leave_ns.keys() == work.plan.shares.keys()
        assert all(work.enter_ns[rank] < work.leave_ns[rank] for rank in work.enter_ns)


def test_one_clear_to_send_for_each_message_and_no_data_before_it(world: Played) -> None:
    pairs = len(world.connections[0].data) if world.scenario.nccl.split_data_on_qps else 1
    for grants, data in by_connection(world):
        whole = [row for row in data if row.kind == WRITE_IMM]
        assert len(whole) == len(grants) * pairs
        assert [row.value for row in grants] == list(range(1, len(grants) + 1))
        for i, row in enumerate(whole):
            assert grants[i // pairs].came_ns <= row.sent_ns


def test_credits_are_never_exceeded(world: Played) -> None:
    """No more messages under way than slots, whatever the receiver had granted."""
    for grants, data in by_connection(world):
        pairs = len(world.connections[0].data) if world.scenario.nccl.split_data_on_qps else 1
        whole = [row for row in data if row.kind == WRITE_IMM][::pairs]
        for i, row in enumerate(grants):
            done = sum(1 for other in whole if 0 <= other.came_ns <= row.sent_ns)
            assert i + 1 - done <= NCCL_STEPS


def test_all_bytes_arrive_once(world: Played) -> None:
    expected = defaultdict(int)
    for work in world.works:
        for share in work.plan.shares.values():
            for lane in share.lanes:
                for part in lane:
                    for link in part.send:
                        expected[link] += part.times * sum(wire for _, wire in part.slices)
    for link, (_, data) in zip(world.connections, by_connection(world), strict=True):
        assert sum(row.size for row in data) == expected[link]
        assert all(row.came_ns >= 0 for row in data)


def test_sequence_numbers_follow_each_other(world: Played) -> None:
    following: dict[int, int] = {}
    for row in messages_of(world):
        assert row.psn == following.get(row.flow, 0)
        following[row.flow] = row.psn + max(1, -(-row.size // world.scenario.cluster.mtu))


def test_the_slots_are_nccl_s(world: Played) -> None:
    """Data goes round the slots of the staging buffer; entries round the rows of theirs."""
    messages = world.trace.messages.read()
    for link in world.connections:
        mine = messages["flow"] == link.grants.number
        rows = messages["va"][mine] - link.fifo_va
        assert (rows == (messages["value"][mine] - 1) % 256 * 512).all()
        assert (messages["kind"][mine] == CTS).all()
        slots = 256 if world.scenario.nccl.registered else NCCL_STEPS
        assert len(set(messages["target"][mine].tolist())) <= slots


def test_a_late_gpu_shows_in_its_own_first_message() -> None:
    world = played(
        "op: all_reduce, bytes: 1MiB", settings(faults=[{"kind": "gpu_late", "rank": 2, "us": 400}])
    )
    for work in world.works:
        others = [ns for rank, ns in work.enter_ns.items() if rank != 2]
        assert 250e3 < work.enter_ns[2] - max(others) < 600e3
        assert work.injected_ns == {2: 400e3}


def test_a_slow_host_is_late_with_its_clear_to_send_too() -> None:
    late = [{"kind": "slow_host", "rank": 2, "us": 400}]
    world = played("op: all_reduce, bytes: 1MiB", settings(faults=late))
    incoming = next(link for link in world.connections if link.dst.rank == 2)
    grants = [row for row in messages_of(world) if row.flow == incoming.grants.number]
    assert grants[0].sent_ns > min(world.works[0].enter_ns.values()) + 300e3


@pytest.mark.parametrize("share", [0.002, 0.05])
def test_what_is_lost_is_sent_again(share: float) -> None:
    world = played(
        "op: all_reduce, bytes: 8MiB",
        settings(nccl={"timeout": 8}, faults=[{"kind": "loss", "share": share, "src": 1, "dst": 2}]),
    )
    bursts, replies = world.trace.bursts.read(), world.trace.replies.read()
    lost = bursts["rx_end_ns"] < 0
    assert lost.any()
    for flow in {int(f) for f in bursts["flow"][lost]}:
        assert (world.flows[flow].src.node, world.flows[flow].dst.node) == (1, 2)
    assert (replies["syndrome"] == 0x60).any()


SLOW = {"kind": "slow_link", "node": 1, "gbps": 10}
INCAST = "op: all_to_all, bytes: 48MiB"


def rates(**cluster: object) -> Played:
    return played(INCAST, settings(cluster=cluster, nccl={"timeout": 8}, faults=[SLOW]), iterations=1)


def test_a_long_queue_marks_and_slows_its_senders() -> None:
    calm, marked = rates(ecn_kib=None), rates()
    bursts, replies = marked.trace.bursts.read(), marked.trace.replies.read()
    assert not calm.trace.bursts.read()["marked"].any()
    assert bursts["marked"].any()
    slow = {int(flow) for flow in bursts["flow"][bursts["marked"] > 0]}
    assert 1 in {marked.flows[flow].dst.node for flow in slow}
    notices = replies["kind"] == CNP
    assert {int(flow) for flow in replies["flow"][notices]} == slow
    for flow in slow:
        times = np.sort(replies["tx_ns"][notices & (replies["flow"] == flow)])
        assert (np.diff(times) >= 0.9 * CNP_NS).all()
        assert marked.flows[flow].rate is not None
    assert 0 < 2 * len(marked.trace.pauses) < len(calm.trace.pauses)


def test_a_full_queue_pauses_its_senders_and_loses_nothing() -> None:
    world = rates(ecn_kib=None, queue_kib=1024)
    pauses, bursts = world.trace.pauses.read(), world.trace.bursts.read()
    assert len(pauses["port"])
    assert (bursts["rx_end_ns"] >= 0).all()
    for port, begin, end in zip(
        *(pauses[name].tolist() for name in ("port", "from_ns", "until_ns")), strict=True
    ):
        mine = np.array([world.flows[flow].src.number == port for flow in bursts["flow"]])
        assert not ((bursts["tx_ns"][mine] > begin + 2) & (bursts["tx_ns"][mine] < end - 2)).any()


def test_without_pauses_a_full_queue_drops() -> None:
    world = rates(ecn_kib=None, queue_kib=512, pfc=False)
    assert (world.trace.bursts.read()["rx_end_ns"] < 0).any()
    assert not len(world.trace.pauses)


def test_nothing_passes_a_link_that_is_down() -> None:
    down = {"kind": "flap", "node": 2, "at_us": 300, "us": 100, "times": 2, "every_us": 400}
    world = played("op: all_reduce, bytes: 8MiB", settings(nccl={"timeout": 8}, faults=[down]))
    bursts = world.trace.bursts.read()
    lost = bursts["rx_end_ns"] < 0
    ends = [{world.flows[flow].src.node, world.flows[flow].dst.node} for flow in bursts["flow"][lost]]
    assert ends
    assert all(2 in nodes for nodes in ends)


def test_a_loaded_stack_repeats_messages_that_were_not_lost() -> None:
    stack = settings(machine={"profile": "host", "repeat_share": 0.2}, cluster={"link_gbps": 1})
    world = played("op: all_reduce, bytes: 256KiB", stack)
    bursts, replies = world.trace.bursts.read(), world.trace.replies.read()
    assert (bursts["rx_end_ns"] >= 0).all()
    assert int(bursts["count"].sum()) > 1.1 * sum(
        max(1, -(-row.size // world.scenario.cluster.mtu)) for row in messages_of(world)
    )
    assert (replies["syndrome"] != 0x60).all()


def test_with_registered_buffers_a_late_gpu_grants_late() -> None:
    """With staging buffers the host grants ahead; with the user's own buffer its kernel does."""
    for registered in (False, True):
        late = settings(nccl={"registered": registered}, faults=[{"kind": "gpu_late", "rank": 2, "us": 400}])
        world = played("op: all_reduce, bytes: 1MiB", late)
        incoming = next(link for link in world.connections if link.dst.rank == 2)
        first = next(row for row in messages_of(world) if row.flow == incoming.grants.number)
        assert (first.sent_ns > world.works[0].enter_ns[2]) == registered


@settings_of_hypothesis(max_examples=25, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all"]),
    size=st.integers(1, 3_000_000),
    protocol=st.sampled_from(["simple", "ll", "ll128"]),
    nodes=st.integers(2, 7),
    gpus=st.integers(1, 4),
    channels=st.integers(1, 5),
    pairs=st.integers(1, 3),
    coalesce=st.sampled_from([1, 8]),
    loss=st.sampled_from([0.0, 0.0, 0.01]),
    mtu=st.sampled_from([256, 4096]),
)
def test_whatever_the_sizes_nobody_is_left_waiting(
    op: str, size: int, protocol: str, nodes: int, gpus: int, channels: int, pairs: int, coalesce: int,
    loss: float, mtu: int,
) -> None:  # fmt: skip
    world = played(
        f"op: {op}, bytes: {size}, protocol: {protocol}",
        settings(
            cluster={"nodes": nodes, "gpus_per_node": gpus, "mtu": mtu},
            nccl={"channels": channels, "qps_per_connection": pairs, "timeout": 8},
            machine={"ack_coalesce": coalesce},
            faults=[{"kind": "loss", "share": loss}],
        ),
        iterations=1,
    )
    assert all(row.came_ns >= 0 for row in messages_of(world))
    test_one_clear_to_send_for_each_message_and_no_data_before_it(world)
    test_credits_are_never_exceeded(world)


@pytest.mark.parametrize("coalesce", [1, 8])
def test_long_messages_can_be_acknowledged_on_the_way(coalesce: int) -> None:
    often = settings(machine={"ack_packets": 64, "ack_coalesce": coalesce})
    world = played("op: all_reduce, bytes: 8MiB", often)
    replies, messages = world.trace.replies.read(), world.trace.messages.read()
    within = ((replies["psn"] + 1) % 64 == 0).sum()
    ends = {(int(f), int(p)) for f, p in zip(messages["flow"], messages["psn"] - 1, strict=True)}
    on_the_way = [(int(f), int(p)) for f, p in zip(replies["flow"], replies["psn"], strict=True)]
    assert within > len(messages["flow"]) // 2
    assert len([pair for pair in on_the_way if pair not in ends]) > len(messages["flow"]) // 2
    for flow in set(replies["flow"].tolist()):
        psns = replies["psn"][replies["flow"] == flow]
        assert (np.diff(psns) > 0).all()


def crossed(faults: list[dict[str, object]], **cluster: object) -> Played:
    return played("op: all_to_all, bytes: 4MiB", settings(cluster=cluster, faults=faults))


def test_other_jobs_traffic_delays_and_marks_and_is_in_no_capture() -> None:
    fault = {
        "kind": "cross_traffic",
        "node": 1,
        "gbps": 90,
        "at_us": 100,
        "us": 400,
        "times": 3,
        "every_us": 700,
    }
    alone, beside = crossed([]), crossed([fault])
    one, other = alone.trace.bursts.read(), beside.trace.bursts.read()
    for world, bursts in ((alone, one), (beside, other)):  # all bytes arrive once, after they left
        assert (bursts["rx_end_ns"] >= bursts["tx_end_ns"]).all()
        sent = world.trace.messages.read()["bytes"].sum()
        assert sent == alone.trace.messages.read()["bytes"].sum()
    assert not one["marked"].any()
    towards = np.array([beside.flows[flow].dst.node for flow in other["flow"]])
    assert set(towards[other["marked"] > 0].tolist()) == {1}
    for work, same in zip(beside.works, alone.works, strict=True):
        assert work.enter_ns.keys() == same.enter_ns.keys()
    assert beside.end_ns > alone.end_ns
    assert len(beside.flows) == len(alone.flows)  # nobody of the job sends it


def test_a_full_queue_stops_other_jobs_senders_too() -> None:
    """Eight times the link's rate for a while: with PFC the queue keeps its bounds, and nothing is lost."""
    fault = {"kind": "cross_traffic", "node": 1, "gbps": 800, "at_us": 100, "us": 300}
    world = crossed([fault], queue_kib=512, ecn_kib=None)
    bursts = world.trace.bursts.read()
    assert (bursts["rx_end_ns"] >= 0).all()
    waited = bursts["rx_ns"] - bursts["tx_ns"]
    # Half of the buffer stops all senders; what was on its way by then still comes.
    assert 10_000 < waited.max() < 512 * 1024 * 8 / 100 + 40_000
    dropped = crossed([fault], queue_kib=512, ecn_kib=None, pfc=False)
    assert (dropped.trace.bursts.read()["rx_end_ns"] < 0).any()
