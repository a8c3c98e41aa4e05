"""One-sided traffic keeps its rules: data before its flag, nobody goes on without all flags, caches whole."""

from __future__ import annotations

import pytest
from synth_worlds import messages_of, settings

from dpuflow.errors import OptionError
from dpuflow.schema.simulated import ATOMIC, SEND, WRITE
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.world import Played, play

DOUBLING = {"op": "all_reduce", "algorithm": "doubling"}
EXPERTS = {"kind": "experts", "steps": 3, "layers": 2, "tokens": 6}


def world(job: dict[str, object], nodes: int = 4, **more: object) -> Played:
    return play(parse_scenario(settings(job=job, cluster={"nodes": nodes}, **more), "test.yaml"))


@pytest.mark.parametrize("flag", ["atomic", "write"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_flag_follows_its_data_and_everybody_waits_for_all(flag: str, share: float) -> None:
    faults = [{"kind": "loss", "share": share}] if share else []
    played = world({**EXPERTS, "flag": flag}, nccl={"timeout": 8}, faults=faults)
    flags: dict[tuple[int, int], list[int]] = {}
    rows = [row for row in messages_of(played) if row.kind in (ATOMIC, WRITE)]
    for row in rows:
        if row.kind == ATOMIC or row.size == 8:
            ends = played.flows[row.flow]
            flags.setdefault((ends.src.number, ends.dst.number), []).append(row.came_ns)
    assert len(played.works) == 3 * 2 * 2
    for way, times in flags.items():
        assert len(times) == 2 * len(played.works), way  # two queue pairs
    for number, work in enumerate(played.works):
        for rank, left in work.leave_ns.items():
            needed = [times[2 * number : 2 * number + 2] for (_, dst), times in flags.items() if dst == rank]
            assert len(needed) == 3
            assert max(max(pair) for pair in needed) <= left
    # In order on every queue pair, and each message once.
    by_flow: dict[int, list[int]] = {}
    for row in rows:
        by_flow.setdefault(row.flow, []).append(row.psn)
    assert all(psns == sorted(set(psns)) for psns in by_flow.values())


def test_tokens_come_back_from_where_they_went() -> None:
    played = world({**EXPERTS, "skew": 0.9})
    messages = [row for row in messages_of(played) if row.kind == WRITE]
    count: dict[tuple[int, int, int], int] = {}
    for row in messages:
        ends = played.flows[row.flow]
        key = (ends.src.number, ends.dst.number, row.size)
        count[key] = count.get(key, 0) + 1
    sizes = {size for _, _, size in count}
    assert sizes == {7408, 14352}
    for (src, dst, size), number in count.items():
        if size == 7408:
            assert count[dst, src, 14352] == number
    assert len(set(count.values())) > 1


@pytest.mark.parametrize("gpus", [1, 4])
def test_doubling_meets_every_node_s_partner_once(gpus: int) -> None:
    text = settings(
        job={
            "kind": "loop",
            "iterations": 2,
            "ops": [{"op": "all_reduce", "bytes": 400_000, "algorithm": "doubling"}],
        },
        cluster={"nodes": 4, "gpus_per_node": gpus},
    )
    played = play(parse_scenario(text, "test.yaml"))
    carried: dict[tuple[int, int], int] = {}
    for row in messages_of(played):
        ends = played.flows[row.flow]
        carried[ends.src.number, ends.dst.number] = (
            carried.get((ends.src.number, ends.dst.number), 0) + row.size
        )
    assert len(carried) == 4 * gpus * 2
    for (src, dst), size in carried.items():
        assert (src // gpus) ^ (dst // gpus) in (1, 2)
        assert src % gpus == dst % gpus
        assert size == 2 * (-(-400_000 // gpus) + 8)
    names = {work.plan.algorithm for work in played.works}
    assert names == {"recursive_doubling" if gpus == 1 else "hierarchical"}
    for work in played.works:
        assert max(work.enter_ns.values()) < min(work.leave_ns.values())


def test_doubling_needs_a_power_of_two() -> None:
    text = settings(
        job={"kind": "loop", "ops": [{"op": "all_reduce", "bytes": 1, "algorithm": "doubling"}]},
        cluster={"nodes": 6},
    )
    with pytest.raises(
        OptionError, match=r"test.yaml:1: job.ops\[0\].algorithm: doubling is for 2, 4, 8, ... nodes"
    ):
        parse_scenario(text, "test.yaml")


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_notice_follows_the_last_page(mode: str) -> None:
    job = {"kind": "prefill_decode", "mode": mode, "notice": "send", "requests": 4, "prefill_us": 100,
           "kv_bytes": 1_000_000, "page_bytes": 30_000, "queue_pairs": 3, "tokens": 1}  # fmt: skip
    played = world(job)
    notices = [row for row in messages_of(played) if row.kind == SEND]
    assert len(notices) == len(played.transfers) == 8
    for each in played.transfers:
        assert each.end_ns is not None
        assert each.told_ns is not None
        assert each.told_ns >= each.end_ns
        assert any(row.sent_ns >= each.end_ns for row in notices)
    if mode == "write":  # who is written to learns of it by the notice alone
        came = sorted(row.came_ns for row in notices)
        assert sorted(each.told_ns for each in played.transfers)[0] >= came[0]


def test_caches_that_move_layer_by_layer_begin_before_the_prompt_is_done() -> None:
    job = {
        "kind": "prefill_decode",
        "requests": 2,
        "prefill_us": 4000,
        "kv_bytes": 4_000_000,
        "prefill_layers": 4,
    }
    whole, parts = world(job), world({**job, "layerwise": True})
    for one, other in zip(whole.transfers, parts.transfers, strict=True):
        assert one.start_ns is not None
        assert other.start_ns is not None
        assert one.size == other.size == other.done
    assert parts.transfers[0].start_ns < whole.transfers[0].start_ns - 2_000_000
    text = settings(job={**job, "layerwise": True, "mode": "read"})
    with pytest.raises(OptionError, match=r"job.layerwise: who reads a cache reads it when it is whole"):
        parse_scenario(text, "test.yaml")
