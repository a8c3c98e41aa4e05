"""Jobs: who takes part in what, what overlaps, and where a delay is felt."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from synth_worlds import settings

from dpuflow.errors import OptionError
from dpuflow.schema.simulated import READ, RESPONSE, WRITE
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.world import Played, play


def job(nodes: int = 4, faults: list[dict[str, object]] | None = None, **keys: object) -> Played:
    text = settings(job=keys, cluster={"nodes": nodes}, faults=faults or [])
    return play(parse_scenario(text, "test.yaml"))


def groups(world: Played) -> Counter[tuple[object, tuple[int, ...]]]:
    return Counter((work.extra.get("group"), tuple(sorted(work.plan.shares))) for work in world.works)


def test_data_parallel_buckets_overlap_the_backward_pass() -> None:
    for overlap in (True, False):
        world = job(kind="training", steps=3, layers=6, buckets=3, overlap=overlap, bucket_bytes=1 << 20)
        assert groups(world) == {("dp", (0, 1, 2, 3)): 9}
        first, second, last = world.works[:3]
        assert first.extra["bucket"] == 0
        # 6 layers of 2 x 300 us backward: two between the first bucket and the second.
        apart = second.enter_ns[0] - first.enter_ns[0]
        assert (apart >= 1_200_000) == overlap
        assert last.leave_ns[0] < world.works[3].enter_ns[0]


def test_tensor_data_and_pipeline_ranks_are_megatron_s() -> None:
    world = job(8, kind="training", tp=2, pp=2, steps=1, layers=1, microbatches=2, buckets=1)
    assert groups(world) == {
        ("tp", (0, 1)): 4, ("tp", (2, 3)): 4, ("tp", (4, 5)): 4, ("tp", (6, 7)): 4,
        ("pp", (0, 4)): 4, ("pp", (1, 5)): 4, ("pp", (2, 6)): 4, ("pp", (3, 7)): 4,
        ("dp", (0, 2)): 1, ("dp", (1, 3)): 1, ("dp", (4, 6)): 1, ("dp", (5, 7)): 1,
    }  # fmt: skip


def test_a_stage_waits_for_the_one_before_it() -> None:
    world = job(2, kind="training", pp=2, steps=1, layers=1, microbatches=3, forward_us=400)
    forward = [work for work in world.works if work.extra["phase"] == "forward"]
    assert len(forward) == 3
    for number, work in enumerate(forward):
        assert work.enter_ns[0] >= 400e3 * (number + 1)
        assert work.enter_ns[0] <= work.leave_ns[1]


def test_experts_exchange_twice_a_layer_and_direction() -> None:
    world = job(4, kind="training", steps=2, layers=3, ep_bytes=65536, buckets=1)
    parts = Counter(work.extra.get("phase") for work in world.works if work.operation.op == "all_to_all")
    assert parts == {"dispatch": 12, "combine": 12}


def test_decoding_reduces_twice_a_layer_in_each_replica() -> None:
    world = job(4, kind="decode", tp=2, tokens=3, layers=2)
    assert groups(world) == {("tp", (0, 1)): 12, ("tp", (2, 3)): 12}
    assert {work.plan.protocol for work in world.works} == {"ll"}


@pytest.mark.parametrize("kind", ["training", "decode"])
def test_a_delay_is_told_with_the_first_operation_after_it(kind: str) -> None:
    late = [{"kind": "gpu_late", "rank": 1, "us": 700}]
    world = job(4, late, kind=kind)
    told = [work for work in world.works if work.injected_ns]
    rounds = {work.iteration for work in world.works}
    assert [work.iteration for work in told] == sorted(rounds)
    for work in told:
        assert work.injected_ns == {1: 700e3}
        assert work.enter_ns[1] - min(work.enter_ns.values()) > 600e3


def test_ranks_must_divide() -> None:
    text = settings(job={"kind": "training", "tp": 3})
    with pytest.raises(OptionError, match=r"test.yaml:1: job.tp: 4 ranks cannot be divided by 3"):
        parse_scenario(text, "test.yaml")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_caches_are_moved_before_they_are_decoded(mode: str) -> None:
    world = job(4, kind="prefill_decode", mode=mode, requests=3, kv_bytes=1_000_000, tokens=2, layers=1)
    assert [(t.endpoint.src.rank, t.endpoint.dst.rank) for t in world.transfers] == [(0, 2), (1, 3)] * 3
    decoding = [work for work in world.works if work.extra.get("phase") != "prefill"]
    for transfer in world.transfers:
        first = next(work for work in decoding if work.iteration == transfer.iteration)
        assert transfer.offered_ns <= transfer.start_ns < transfer.end_ns
        assert transfer.end_ns <= first.enter_ns[transfer.endpoint.dst.rank]
    messages, bursts = world.trace.messages.read(), world.trace.bursts.read()
    carried = messages["kind"] == (WRITE if mode == "write" else RESPONSE)
    assert int(messages["bytes"][carried].sum()) == 6 * 1_000_000
    assert (messages["kind"] == READ).sum() == (0 if mode == "write" else carried.sum())
    for row in messages["flow"][carried]:
        ends = world.flows[row]
        assert ends.src.number < 2 <= ends.dst.number
    assert (bursts["rx_end_ns"] >= 0).all()


def test_a_read_s_answer_has_the_psns_that_the_request_took() -> None:
    world = job(2, kind="prefill_decode", mode="read", requests=2, kv_bytes=300_000, tokens=1)
    messages = world.trace.messages.read()
    for flow in world.flows:
        if flow.answer is None:
            continue
        asked, answered = (
            messages["psn"][messages["flow"] == f.number].tolist() for f in (flow, flow.answer)
        )
        assert asked == answered
        assert len(asked) > 2
    replied = set(world.trace.replies.read()["flow"].tolist())
    assert not replied & {flow.number for flow in world.flows if flow.asked or flow.answer}


@pytest.mark.parametrize("page", [20_000, 300_000])
@pytest.mark.parametrize("notice", ["hidden", "send"])
@pytest.mark.parametrize("share", [0.001, 0.02])
def test_what_a_read_has_lost_is_asked_for_again(page: int, notice: str, share: float) -> None:
    """From the first packet that lacks; what came is not asked for twice without need."""
    text = settings(
        job={"kind": "prefill_decode", "mode": "read", "requests": 3, "kv_bytes": 2_000_001, "tokens": 1,
             "page_bytes": page, "notice": notice},
        nccl={"timeout": 8}, faults=[{"kind": "loss", "share": share}],
    )  # fmt: skip
    world = play(parse_scenario(text, "test.yaml"))
    messages, bursts = world.trace.messages.read(), world.trace.bursts.read()
    assert all(each.done == each.size for each in world.transfers)
    lost = bursts["rx_end_ns"] < 0
    again = 0
    for flow in world.flows:
        if flow.answer is None:
            continue
        asked = messages["flow"] == flow.number
        reads = asked & (messages["kind"] == READ)
        psns, sizes = messages["psn"][reads].tolist(), messages["bytes"][reads].tolist()
        # Each re-request ends where the request that it repeats had ended.
        ends = {psn + max(1, -(-size // 4096)) for psn, size in zip(psns, sizes, strict=True)}
        whole = {psn: size for psn, size in zip(psns, sizes, strict=True) if size >= page or psn == min(psns)}
        again += len(psns) - len(ends)
        assert whole
        # Every PSN of every answer arrived at least once.
        came: set[int] = set()
        mine = np.flatnonzero((bursts["flow"] == flow.answer.number) & ~lost)
        for row, first, count in zip(
            *(bursts[name][mine].tolist() for name in ("message", "first", "count")), strict=True
        ):
            begin = int(messages["psn"][row]) + first
            came.update(range(begin, begin + count))
        needed = {
            p for psn, size in zip(psns, sizes, strict=True) for p in range(psn, psn + -(-size // 4096))
        }
        assert needed <= came
    assert lost.any()
    assert again > 0


@pytest.mark.parametrize("pxn", [True, False])
def test_with_pxn_sends_leave_on_the_receiver_s_rail(pxn: bool) -> None:
    text = settings(
        job={"kind": "loop", "iterations": 2, "ops": [{"op": "all_to_all", "bytes": 800_000}]},
        cluster={"nodes": 2, "gpus_per_node": 4},
        nccl={"pxn": pxn},
    )
    world = play(parse_scenario(text, "test.yaml"))
    rails = {(link.data[0].src.number % 4, link.data[0].dst.number % 4) for link in world.connections}
    assert rails == ({(i, i) for i in range(4)} if pxn else {(i, j) for i in range(4) for j in range(4)})
    # Entries name who truly sends, whoever's NIC it is.
    for link in world.connections:
        assert world.tags[link.grants.number] == link.src.rank
        assert link.data[0].src.node == link.src.node
        assert link.nic.rank % 4 == (link.dst.rank if pxn else link.src.rank) % 4
    carried = {link.src.rank for link in world.connections}
    assert carried == set(range(8))
    for work in world.works:
        assert work.leave_ns.keys() == set(range(8))


def test_sharded_training_gathers_ahead_and_scatters_behind() -> None:
    """A layer's weights are gathered while the layer before computes, forward and backward."""
    world = job(4, kind="training", sharded=True, steps=2, layers=3, bucket_bytes=400_000, jitter_us=0)
    assert groups(world) == {("dp", (0, 1, 2, 3)): 18}
    step = world.works[:9]
    order = [(work.operation.op, work.extra["layer"], work.extra["phase"]) for work in step]
    assert order == [
        *(("all_gather", layer, "forward") for layer in (0, 1, 2)),
        *(("all_gather", layer, "backward") for layer in (2, 1)),
        ("reduce_scatter", 2, "backward"),
        ("all_gather", 0, "backward"),
        ("reduce_scatter", 1, "backward"),
        ("reduce_scatter", 0, "backward"),
    ]
    assert [work.operation.bytes for work in step[5:7]] == [400_000, 100_000]
    first, second, third = step[:3]
    assert second.enter_ns[0] - first.leave_ns[0] < 10_000  # asked for before the first was there
    # The third when the first layer's 300 us are over.
    assert 300_000 <= third.enter_ns[0] - first.leave_ns[0] < 320_000
    assert step[-1].leave_ns[0] < world.works[9].enter_ns[0]


def test_sharded_training_is_data_parallel_alone() -> None:
    with pytest.raises(OptionError, match="sharded training is data parallel alone"):
        job(4, kind="training", sharded=True, tp=2)
