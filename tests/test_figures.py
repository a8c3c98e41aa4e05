"""The result's lists of figures: worked examples, and jobs whose truth says what they should be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpuflow
from dpuflow.arrays.stretches import covered_between, covered_ns
from dpuflow.figures.operations import BUS, ratio_of, word_of
from dpuflow.figures.whatif import Shape, fitted, gains
from dpuflow.results import Analysis

GBIT = 1e9


Played = Callable[..., tuple[Analysis, dict[str, Any]]]


@pytest.fixture
def played(written: Callable[[dict[str, Any]], Path]) -> Played:
    """The result of a scenario and its truth."""

    def analysed(*faults: dict[str, Any], **scenario: Any) -> tuple[Analysis, dict[str, Any]]:
        folder = written(scenario | {"faults": list(faults)})
        files = [str(path) for path in sorted(folder.glob("*.pcap.gz"))]
        return dpuflow.analyze(files), json.loads((folder / "truth.json").read_text())

    return analysed


LOOP = {"kind": "loop", "iterations": 20, "ops": [{"op": "all_reduce", "bytes": 4 << 20}]}


def test_how_often_a_link_carries_the_buffer() -> None:
    """Of four ranks, as nccl-tests' PERFORMANCE.md has it."""
    assert BUS["all_reduce"](4) == 1.5
    assert BUS["reduce_scatter"](4) == BUS["all_to_all"](4) == 0.75
    assert BUS["all_gather"](4) == 3  # each rank's share goes to three others
    assert BUS["broadcast"](4) == BUS["reduce"](4) == 1


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.0, 0.2, "transfer_dominated"),
        (0.6, 0.9, "arrival_skew_dominated"),
        (0.4, 0.6, "mixed"),
        (0.2, 0.6, "inconclusive"),
        (0.4, 0.9, "inconclusive"),
    ],
)
def test_what_dominates(low: float, high: float, word: str) -> None:
    assert word_of(low, high) == word


def test_a_ratio_with_its_error() -> None:
    whole = np.full(100, 10.0)
    assert ratio_of(whole / 4, whole) == (0.25, 0)
    share, error = ratio_of(np.tile([0.0, 5.0], 50), whole)
    assert share == 0.25
    assert error == pytest.approx(0.025, rel=0.01)  # 2.5 of 10, over the root of 100


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6)


@given(SPANS, st.lists(st.integers(-3, 45), min_size=2, max_size=6).map(sorted))
def test_what_stretches_cover_together_counts_once(spans: list[tuple[int, int]], times: list[int]) -> None:
    stretches = np.array([(begin, begin + took) for begin, took in spans], np.int64).reshape(-1, 2).T
    covered = {at for begin, end in stretches.T.tolist() for at in range(begin, end)}

    def within(since: int, until: int) -> int:
        return len(covered.intersection(range(since, until)))

    assert covered_ns(stretches) == len(covered)
    assert covered_ns(stretches, times[0], times[-1]) == within(times[0], times[-1])
    between = covered_between(np.array(times), stretches)
    assert between.tolist() == [within(*pair) for pair in itertools.pairwise(times)]


def test_operations_of_a_sound_job(played: Played) -> None:
    result, truth = played(cluster={"nodes": 4}, job=LOOP)
    (row,) = result.operations
    took = [max(each["leave_ns"]) - min(each["enter_ns"]) for each in truth["collectives"]]
    alone = [max(each["leave_ns"]) - max(each["enter_ns"]) for each in truth["collectives"]]
    assert (row.op, row.algorithm, row.bytes, row.count) == ("all_reduce", "ring", 4 << 20, len(took))
    # A kernel begins before its first packet and ends after its last.
    assert row.p50_ns == pytest.approx(np.median(took), rel=0.1)
    assert row.bus_bits_per_s == pytest.approx(8 * 1.5 * (4 << 20) / np.median(alone) * 1e9, rel=0.1)
    assert (row.bus_bits_per_s or 0) < 100 * GBIT  # the links' rate
    (why,) = result.attribution
    assert (why.verdict, why.count) == ("transfer_dominated", len(took))
    assert why.low_share <= why.skew_share <= why.high_share
    assert not result.loss_tax
    (tax,) = result.tax
    assert tax.gain_at_most == pytest.approx(tax.step_ns / (tax.step_ns - tax.exposed_ns))


TRAINING = {"kind": "training", "steps": 10, "buckets": 2, "bucket_bytes": 4 << 20}
DECODE = {"kind": "decode", "tokens": 20, "layers": 4, "bytes": 65536, "token_us": 200}


@pytest.mark.parametrize(
    ("job", "low"),
    [
        (LOOP, 0.98),
        (TRAINING, 0.98),
        (TRAINING | {"overlap": False}, 0.98),
        # What operations take whatever they carry is left: many small ones.
        (DECODE, 0.7),
    ],
    ids=["loop", "overlapped", "exposed", "decode"],
)
def test_what_communication_at_no_cost_would_gain(played: Played, job: dict[str, Any], low: float) -> None:
    """The same job over links that take next to nothing for next to nothing."""

    def step_ns(truth: dict[str, Any]) -> float:
        ends: dict[int, int] = {}
        for each in truth["collectives"]:
            ends[each["iter"]] = max(ends.get(each["iter"], 0), *each["leave_ns"])
        return float(np.median(np.diff(sorted(ends.values()))))

    result, truth = played(cluster={"nodes": 4}, job=job)
    free = job | {key: 1024 for key in ("bytes", "bucket_bytes") if key in job}
    free |= {"ops": [each | {"bytes": 1024} for each in job["ops"]]} if "ops" in job else {}
    links = {"nodes": 4, "link_gbps": 1600, "latency_us": 0.05}
    _, other = played(cluster=links, job=free)
    (tax,) = result.tax
    gain = step_ns(truth) / step_ns(other)
    assert gain > 1.1
    assert tax.gain_at_most is not None
    assert low < gain / tax.gain_at_most < 1.02


def test_operations_of_a_rank_that_is_late(played: Played) -> None:
    late = {"kind": "gpu_late", "rank": 1, "us": 5000}
    result, truth = played(late, cluster={"nodes": 4}, job=LOOP)
    (why,) = result.attribution
    assert why.verdict == "arrival_skew_dominated"
    alone = [max(each["leave_ns"]) - max(each["enter_ns"]) for each in truth["collectives"]]
    assert why.zero_skew_ns == pytest.approx(np.median(alone), rel=0.1)


SIZES = [16384, 65536, 262144, 524288, 1 << 20, 2 << 20]


def test_alpha_and_beta_of_a_line() -> None:
    """Four ranks: six steps of 5 us, and 1.5 times the buffer at 10 bytes a nanosecond."""
    shape = Shape(4, 4, 4, useful=1.0)
    seen = {size: [6 * 5000 + 1.5 * size / 10] for size in SIZES}
    fit = fitted(shape, seen)
    assert fit is not None
    assert fit.line == pytest.approx([5000, 0.1])
    assert fit.apart < 1e-9
    doubling, two_level = gains(shape, fit, 1 << 20, 100_000)
    assert doubling[0] == pytest.approx(100_000 / (2 * 5000 + 2 * (1 << 20) / 10))
    assert doubling[1] == pytest.approx(100_000 / (2 * 5000 + 2 * 2 * (1 << 20) / 10))  # two partners at once
    assert doubling[2] == pytest.approx(100_000 / (2 * 2500 + 2 * (1 << 20) / 10))  # half the latency
    assert two_level == (None, None, None)  # nodes of one GPU
    assert gains(Shape(6, 6, 6, 1.0), fit, 1 << 20, 100_000)[0] == (None, None, None)  # no power of two


def test_what_makes_no_line_gains_nothing() -> None:
    shape = Shape(4, 4, 4, useful=1.0)
    assert fitted(shape, {16384: [30_000.0], 65536: [36_000.0]}) is None  # nothing tells how true it is
    assert fitted(shape, {size: [1e9 / size] for size in SIZES}) is None  # the larger the quicker
    fit = fitted(shape, {1 << 14: [30_000.0], 1 << 16: [90_000.0], 1 << 18: [70_000.0]})
    assert fit is not None
    assert gains(shape, fit, 1 << 16, 90_000)[0] == (None, None, None)


@pytest.mark.parametrize(
    ("nodes", "gpus", "key"), [(4, 1, "doubling"), (8, 1, "doubling"), (4, 2, "two_level")]
)
def test_what_another_algorithm_makes_of_it(played: Played, nodes: int, gpus: int, key: str) -> None:
    """The same cluster with both: what is projected from the one holds the truth of the other."""

    def of(algorithm: str) -> tuple[Analysis, dict[int, float]]:
        ops = [{"op": "all_reduce", "bytes": size, "algorithm": algorithm, "gap_us": 100} for size in SIZES]
        job = {"kind": "loop", "iterations": 5, "ops": ops}
        result, truth = played(cluster={"nodes": nodes, "gpus_per_node": gpus}, job=job)
        took: dict[int, list[int]] = {}
        for each in truth["collectives"]:
            took.setdefault(each["bytes"], []).append(max(each["leave_ns"]) - max(each["enter_ns"]))
        return result, {size: float(np.median(values)) for size, values in took.items()}

    (result, ring), (other, doubling) = of("ring"), of("doubling")
    rows = [row for row in result.all_reduce_what_if if row.bytes in ring]
    assert len(rows) >= 4
    for row in rows:
        assert (row.ranks, row.per_node) == (nodes * gpus, gpus)
        low, high = getattr(row, f"{key}_low"), getattr(row, f"{key}_high")
        assert low < ring[row.bytes] / doubling[row.bytes] < high
        assert low < getattr(row, f"{key}_gain") < high
        assert (row.two_level_gain is None) == (gpus == 1)
    assert not other.all_reduce_what_if  # of rings alone


def test_what_loss_takes_of_the_slowest_steps(played: Played) -> None:
    nccl = {"timeout": 10}
    job = LOOP | {"iterations": 40}
    loss = {"kind": "loss", "share": 0.0005, "src": 0}
    result, _ = played(loss, cluster={"nodes": 4}, nccl=nccl, job=job)
    sound, _ = played(cluster={"nodes": 4}, nccl=nccl, job=job)
    (tax,), (usual,) = result.loss_tax, sound.steps
    assert 0 < tax.held_steps <= tax.steps
    assert tax.p99_without_ns == pytest.approx(usual.p99_ns, rel=0.1)
    assert tax.tail_share == pytest.approx(1 - usual.p99_ns / tax.p99_ns, abs=0.1)


def test_tokens_with_what_prompts_add(played: Played) -> None:
    job = {"kind": "decode", "tokens": 20, "layers": 4, "bytes": 65536, "layer_us": 60, "token_us": 200}
    result, _ = played(cluster={"nodes": 4}, job=job)
    (row,) = result.decode
    assert (row.layers, row.hidden_bytes, row.prefills, row.prefill_ns_per_token) == (4, 65536, 0, 0)
    assert row.tokens in (19, 20)
    assert row.gap_ns == pytest.approx(row.step_ns, rel=0.01)


def test_tokens_that_nothing_but_their_batch_parts(played: Played) -> None:
    """A service that decodes without a pause, prompts among its tokens."""
    clients = {"hosts": 3, "sessions": 2, "requests": 2, "tokens": 12, "think_us": 10_000}
    job = {"kind": "service", "layers": 8, "bytes": 4096}
    result, truth = played(cluster={"nodes": 2}, job=job, clients=clients)
    tokens, prompts = (
        len({row["iter"] for row in truth["collectives"] if row["phase"] == phase})
        for phase in ("decode", "prefill")
    )
    (row,) = result.decode
    assert (row.layers, row.hidden_bytes) == (8, None)
    assert abs(row.tokens - tokens) <= 1
    assert abs(row.prefills - prompts) <= 1


def test_what_messages_took_between_each_pair(played: Played) -> None:
    slow = {"kind": "slow_link", "node": 2, "gbps": 10, "where": "down"}
    result, _ = played(slow, cluster={"nodes": 4}, job=LOOP)
    largest = {(row.src, row.dst): row for row in result.network_cost}  # of several sizes the last
    assert set(largest) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    quick = largest[0, 1].bits_per_s
    assert quick is not None
    assert 0.3 * 100 * GBIT < quick < 100 * GBIT
    assert (largest[1, 2].bits_per_s or 0) < 10 * GBIT


def test_one_node_alone_says_nothing_of_the_way(written: Callable[[dict[str, Any]], Path]) -> None:
    folder = written({"cluster": {"nodes": 4}, "job": LOOP, "faults": []})
    result = dpuflow.analyze([str(folder / "node0.pcap.gz")])
    assert result.network_cost == []
