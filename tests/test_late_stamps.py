"""Captures whose stamps are late now and then, what follows on the same queue pushed along."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.join.common import densest
from dpuflow.join.sightings import not_after
from dpuflow.join.transfers import at_many_moments
from dpuflow.schema.rows import NEVER
from dpuflow.synth.case import write_case


def delay_stamps(path: Path, share: float, seed: int) -> None:
    """Rewrite a capture with ``share`` of the stamps of one direction 2 to 60 us late, in order of stamps."""
    raw = gzip.decompress(path.read_bytes())
    at, records, stamps = 24, [], []
    while at < len(raw):
        seconds, rest, kept, _ = np.frombuffer(raw, "<u4", 4, at).tolist()
        records.append(raw[at + 8 : at + 16 + kept])
        stamps.append(seconds * 10**9 + rest)
        at += 16 + kept
    random, stamp_ns = np.random.default_rng(seed), np.array(stamps)
    senders = np.array([record[14:20] for record in records])
    _, way = np.unique(senders, return_inverse=True)
    queue = np.flatnonzero(way == seed % 2)
    late = np.where(random.random(len(queue)) < share, random.integers(2_000, 60_000, len(queue)), 0)
    stamp_ns[queue] = np.maximum.accumulate(stamp_ns[queue] + late)
    order = np.argsort(stamp_ns, kind="stable").tolist()
    parts = [np.array(divmod(int(stamp_ns[k]), 10**9), "<u4").tobytes() + records[k] for k in order]
    path.write_bytes(gzip.compress(raw[:24] + b"".join(parts), 1))


@pytest.mark.parametrize("share", [0.002, 0.02])
def test_operations_are_found_and_the_late_rank_named(share: float, tmp_path: Path) -> None:
    more = settings(
        cluster={"nodes": 2}, nccl={"channels": 2}, faults=[{"kind": "gpu_late", "rank": 1, "us": 500}]
    )
    captures = write_case(loop("op: all_reduce, bytes: 1MiB", more, iterations=20), str(tmp_path))
    files = [tmp_path / capture.name for capture in captures]
    for number, file in enumerate(files):
        delay_stamps(file, share, number)
    result = dpuflow.analyze([dpuflow.Vantage(file.stem, (str(file),)) for file in files])
    assert [(each.op, each.algorithm) for each in result.collectives] == [("all_reduce", "ring")] * 20
    assert [row.verdict for row in result.lateness] == ["on_time", "late"]


def test_a_tree_over_16_nodes_from_mid_run(shared: Path) -> None:
    folder = shared / "captures/nccl/tree-ll-n16-midrun-random"
    files = sorted(folder.glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.stem, (str(file),)) for file in files])
    assert {(each.op, each.algorithm) for each in result.collectives} == {("all_reduce", "tree")}
    assert len(result.collectives) == 33


def test_nothing_comes_after_what_came_of_it() -> None:
    times, acked = np.array([10, 50, 70]), np.array([20, 40, NEVER])
    assert not_after(times, acked).tolist() == [10, 40, 70]
    assert not_after(times, acked, 5).tolist() == [10, 45, 70]


def test_the_densest_values() -> None:
    random = np.random.default_rng(0)
    values = np.r_[random.integers(0, 60_000, 800), random.integers(3_000, 3_100, 200)]
    low, high = densest(values)
    assert 3_000 <= low <= high <= 3_100
    assert densest(np.array([5])) == (5, 5)


def test_a_clock_is_set_at_one_moment_and_stamps_are_late_at_many() -> None:
    """However many messages wait while a clock is set, and however long they do."""
    first, last = np.array([0, 90, 95, 10]), np.array([1_000, 105, 100, 99])
    assert not at_many_moments(first, last)
    assert not at_many_moments(np.r_[first, 2_000], np.r_[last, 2_001])  # set twice
    assert at_many_moments(np.arange(0, 30, 10), np.arange(5, 35, 10))
    assert not at_many_moments(first[:0], last[:0])
