"""Bounds, verdicts and transfers on hosts whose hand-overs stall and scatter: scripted, fixed seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpuflow
from dpuflow.entries.reactions import Tail, apart_ns, tail_ns
from dpuflow.reports.json import json_lines
from dpuflow.scoring.score import match_collectives
from dpuflow.scoring.truth import Case, read_case
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import (
    Cluster,
    Fault,
    GpuLate,
    Job,
    Loop,
    Loss,
    Machine,
    Nccl,
    Operation,
    Scenario,
    SlowLink,
    Training,
)
from dpuflow.synth.timing import Timing
from dpuflow.verdicts.chance import _least_ns, _occasions

HOST = Machine(profile="host")


def played(scenario: Scenario, folder: Path) -> tuple[dict[str, Any], Case]:
    captures = write_case(scenario, str(folder))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    analysis = json.loads("\n".join(json_lines(result)))
    return analysis, read_case(str(folder), analysis)


def world(
    job: Job, seed: int, faults: list[Fault] | None = None, nodes: int = 4, channels: int = 1
) -> Scenario:
    cluster = Cluster(nodes=nodes, link_gbps=0.1, latency_us=30.0)
    nccl = Nccl(channels=channels)
    return Scenario(
        name="stalls", seed=seed, cluster=cluster, nccl=nccl, machine=HOST, job=job, faults=faults or []
    )


def decode(iterations: int = 80) -> Loop:
    """Small all_reduces back to back: every stall of a host shows as somebody's lateness."""
    operation = Operation(op="all_reduce", bytes=64 << 10, algorithm="ring", protocol="ll")
    return Loop(ops=[operation], iterations=iterations, compute_us=2000, jitter_us=50)


def pipeline(steps: int = 10) -> Training:
    return Training(
        pp=2, steps=steps, microbatches=4, layers=1, buckets=1, bucket_bytes=440_896, pp_bytes=440_896,
        forward_us=12_500, optimizer_us=12_500, jitter_us=200,
    )  # fmt: skip


def broken(analysis: dict[str, Any], case: Case) -> tuple[int, int]:
    """Bounds that the truth lies beyond, by more than three hand-overs and a round trip; and all bounds."""
    slack_ns = 3 * Timing.of(HOST).handover_ns + 60_000
    count = beyond = 0
    for number, at in match_collectives(case.collectives, analysis["collectives"]).items():
        late = case.collectives[number].lateness_ns
        for row in analysis["collectives"][at]["ranks"]:
            off = (row["lateness_ns"] or 0) - late.get(row["endpoint"], 0)
            count += row["bound"] in ("at_most", "at_least")
            beyond += row["bound"] == "at_most" and -off > slack_ns
            beyond += row["bound"] == "at_least" and off > slack_ns
    return beyond, count


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("job", [pipeline()])
def test_bounds_hold(job: Job, seed: int, tmp_path: Path) -> None:
    analysis, case = played(world(job, seed, channels=2), tmp_path)
    beyond, count = broken(analysis, case)
    assert count > 50
    assert beyond <= 1  # of one in a thousand, and a tail that few hand-overs show


def test_stalls_are_nobodys_habit(tmp_path: Path) -> None:
    """Never named. An all-clear that is no surer than a guess is none; what would have shown is told."""
    for seed in range(3, 9):
        folder = tmp_path / str(seed)
        folder.mkdir()
        analysis, _ = played(world(decode(), seed, channels=2), folder)
        verdicts = {row["verdict"] for row in analysis["lateness"]}
        assert verdicts <= {"on_time", "unknown"}
        assert all(row["detectable_ns"] < 5_000_000 for row in analysis["lateness"])


@pytest.mark.parametrize("seed", [1, 7, 8])
def test_stalls_beside_losses_of_an_all_to_all(seed: int, tmp_path: Path) -> None:
    """No send waits for an input; how hosts stall shows from a pair's last message to its next entry."""
    operation = Operation(op="all_to_all", bytes=600_000, algorithm="ring", protocol="simple")
    job = Loop(ops=[operation], iterations=24, compute_us=30_000, jitter_us=200)
    analysis, _ = played(world(job, seed, [Loss(src=1, dst=2, share=0.005)], nodes=5, channels=2), tmp_path)
    assert {row["verdict"] for row in analysis["lateness"]} == {"on_time"}


@pytest.mark.parametrize("seed", [2, 6])
def test_stalls_beside_a_slow_link_of_a_tree(seed: int, tmp_path: Path) -> None:
    """In trees a rank's last input of an operation waits for no other: until its slot is granted again it
    shows how hosts stall."""
    operation = Operation(op="all_reduce", bytes=16_384, algorithm="tree", protocol="ll")
    job = Loop(ops=[operation], iterations=24, compute_us=30_000, jitter_us=200)
    slow: list[Fault] = [SlowLink(node=1, gbps=0.02)]
    analysis, _ = played(world(job, seed, slow, nodes=5, channels=2), tmp_path)
    assert {row["verdict"] for row in analysis["lateness"]} <= {"on_time", "unknown"}


def test_late_among_stalls(tmp_path: Path) -> None:
    """A rank that is late by more than stalls usually take is still named, and no other."""
    analysis, case = played(world(decode(40), 5, [GpuLate(rank=2, us=20_000)], channels=2), tmp_path)
    late = [row for row in analysis["lateness"] if row["verdict"] in ("late", "intermittent")]
    assert [(row["endpoint"], row["verdict"], row["cause"]) for row in late] == [
        (case.endpoint_of_rank[2], "late", "compute")
    ]


def test_transfers_that_stalls_cut_up(tmp_path: Path) -> None:
    """A proxy that stalls posts a part's second entry after its first chunk has come, as if a part began."""
    for seed in (8, 118):
        folder = tmp_path / str(seed)
        folder.mkdir()
        analysis, _ = played(world(pipeline(), seed, channels=4), folder)
        sizes = {each["bytes"] for each in analysis["collectives"] if each["op"] == "send_recv"}
        assert sizes == {440_896}


def test_left_behind_a_slow_wire(tmp_path: Path) -> None:
    """Data takes 100 ms to leave, but the rank that sent it had gone on: work counts from there."""
    operation = Operation(op="all_reduce", bytes=4 << 20, algorithm="ring", protocol="simple")
    job = Loop(ops=[operation], iterations=16, compute_us=30_000, jitter_us=200)
    analysis, case = played(world(job, 9, [GpuLate(rank=2, us=100_000)], nodes=3), tmp_path)
    rows = {row["endpoint"]: (row["verdict"], row["steadiness"]) for row in analysis["lateness"]}
    guilty = case.endpoint_of_rank[2]
    assert rows.pop(guilty) == ("late", "persistent")
    assert {verdict for verdict, _ in rows.values()} == {"on_time"}


def test_tail() -> None:
    """Of exponential times the tail is where 999 in 1000 end, though only 200 were seen."""
    random = np.random.default_rng(1)
    found = [tail_ns(random.exponential(1e6, 200).astype(np.int64)) for _ in range(200)]
    assert np.median(found) == pytest.approx(np.log(1000) * 1e6, rel=0.1)
    assert np.isnan(tail_ns(np.arange(7)))
    assert tail_ns(np.full(20, 5)) == 5


def test_share_beyond() -> None:
    values = np.arange(1000)
    assert Tail(values).share_beyond(np.array([-1, 499, 899])).tolist() == pytest.approx([1.0, 0.5, 0.1])
    far = Tail(values).share_beyond(np.array([950, 1000, 2000]))
    assert far[0] > far[1] > far[2] > 0
    assert Tail(np.full(20, 5)).share_beyond(np.array([4, 5])).tolist() == [1.0, 0.0]


def test_a_heavier_tail_than_the_exponential_one_is_taken_for_real_where_it_is_far_likelier() -> None:
    rng = np.random.default_rng(5)
    light, heavy = 1e6 * rng.exponential(1, 2000), 1e6 * (1 + rng.pareto(1.2, 2000))
    assert Tail(light).power == 0
    assert Tail(heavy).power == pytest.approx(1 / 1.2, rel=0.25)
    assert Tail(heavy[:40]).power == 0  # of two values beyond the threshold nothing is told
    least = np.array([100_000_000])
    assert Tail(heavy).share_beyond(least)[0] == pytest.approx(100**-1.2, rel=0.5)


def test_incidents_that_stalls_explain() -> None:
    """Five of a hundred hand-overs stall, and a host may stall twice before it enters: as many incidents are
    chance, forty are not, nor is one far beyond."""
    stalls = Tail(np.r_[np.zeros(95), np.full(5, 1e6)])

    def least_ns(*amounts: int) -> float:
        return _least_ns(np.array([*amounts] + [0] * (100 - len(amounts))), stalls, None)

    assert least_ns(*[900_000] * 4) == float("inf")
    assert least_ns(*[900_000] * 40) == 900_000
    assert least_ns(900_000, 900_000, 50_000_000) == 50_000_000


def test_long_incidents_are_no_stalls_where_too_few_short_ones_come() -> None:
    """Hosts that stall so often for 3 ms stall more often still for 1 ms: that would show."""
    rng = np.random.default_rng(7)
    stalls = Tail(np.where(rng.random(4000) < 0.05, 1e6 * rng.exponential(1, 4000), 0))
    long_ns, none = np.full(30, 3_000_000), np.zeros(400, np.int64)
    shorter_ns = (5e5 + 1e6 * rng.exponential(1, 110)).astype(np.int64)
    for short, sure in ((shorter_ns[:8], True), (shorter_ns, False)):
        amounts = np.r_[long_ns[: 30 if sure else 10], short, none][:400]
        assert np.isfinite(_least_ns(amounts, stalls, _occasions(amounts, stalls))) == sure
    amounts = np.r_[long_ns, none][:400]
    assert not np.isfinite(
        _least_ns(amounts, stalls, _occasions(amounts[:0], stalls))
    )  # nothing bounds how often they stall


def test_errors_hold_where_hosts_stall(tmp_path: Path) -> None:
    """Half-widths of 95 % intervals, of all that is given as exact."""
    held = []
    for seed in range(1, 7):
        folder = tmp_path / str(seed)
        folder.mkdir()
        analysis, case = played(world(decode(), seed), folder)
        for number, at in match_collectives(case.collectives, analysis["collectives"]).items():
            late_ns = case.collectives[number].lateness_ns
            for rank in analysis["collectives"][at]["ranks"]:
                if rank["bound"] == "exact" and rank["error_ns"] is not None:
                    held.append(abs(rank["lateness_ns"] - late_ns[rank["endpoint"]]) <= rank["error_ns"])
    assert len(held) >= 600
    assert np.mean(held) >= 0.93  # of some hundred: two standard deviations


@pytest.mark.parametrize("count", [7, 8, 60, 2500])
def test_how_far_two_values_differ(count: int) -> None:
    values = np.random.default_rng(count).pareto(1.5, count) * 1e6
    found = apart_ns(values.astype(np.int64))
    if count < 8:
        assert np.isnan(found)
        return
    pairs = [abs(one - other) for place, one in enumerate(values) for other in values[place + 1 :]]
    assert found == pytest.approx(sorted(pairs)[round(0.95 * (len(pairs) - 1))], rel=0.03)
