"""The account of a step's time: parts of its critical path that add up to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpuflow.analysis import analyze
from dpuflow.entries.build import Entries, blank
from dpuflow.entries.relative import previous_row
from dpuflow.results import Account, Analysis
from dpuflow.schema.tables import Vantage
from dpuflow.verdicts.accounts import _walk

MS = 1_000_000
TRACES = Path(__file__).resolve().parents[1] / "traces"


def played(seed: int, ranks: int, collectives: int) -> Entries:
    """Ranks that work for random times between collectives that all wait for the last to enter."""
    rng = np.random.default_rng(seed)
    work = rng.integers(1, 30 * MS, (collectives, ranks))
    enter, leave = np.zeros((1, collectives, ranks), np.int64), np.zeros((collectives, ranks), np.int64)
    left = np.full(ranks, 10**18)
    for number in range(collectives):
        enter[0, number] = left + work[number]
        left = leave[number] = enter[0, number].max() + rng.integers(1, 3 * MS, ranks)
    rows = np.arange(collectives * ranks)
    entries = blank(rows // ranks, rows % ranks, np.arange(0, len(rows) + 1, ranks))
    entries.enter_ns, entries.leave_ns = enter[0].ravel(), leave.ravel()
    return entries


@pytest.mark.parametrize("seed", range(8))
def test_segments_of_a_walk_add_up_to_the_step(seed: int) -> None:
    ranks, each = 2 + seed, 1 + seed % 4
    entries = played(seed, ranks, 12 * each)
    unseen = np.random.default_rng(seed).random(len(entries.enter_ns)) < 0.1 * (seed % 3)
    entries.enter_ns[unseen] = np.iinfo(np.int64).min
    before = previous_row(entries)
    ends = np.arange(each - 1, 12 * each, each) * ranks + seed % ranks
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        walk = _walk(entries, before, first, last)
        assert sum(length for length, _, _ in walk) == entries.leave_ns[last] - entries.leave_ns[first]
        assert all(length >= 0 for length, _, _ in walk)
        assert unseen.any() or all(row >= 0 for _, row, _ in walk)


def trace(name: str) -> Analysis:
    files = sorted((TRACES / name).glob("node*.pcap.gz"))
    return analyze([Vantage(file.name.partition(".")[0], (str(file),)) for file in files])


def total(account: Account) -> int:
    parts = account.parts
    named = parts.library + parts.transfer + parts.network + parts.credit + parts.unexplained
    return named + sum(parts.work.values()) + sum(parts.in_node.values())


def test_a_late_rank_carries_what_its_peers_waited() -> None:
    """Rank 2 of the bundled Gloo job works 10 ms longer than the others in steps of 39 ms."""
    (account,) = trace("gloo-allreduce-n4").accounts
    assert total(account) == account.step_ns
    assert account.step_ns == pytest.approx(39.1 * MS, rel=0.02)
    ((endpoint, waited),) = account.waited.items()
    assert account.parts.work[endpoint] > 30 * MS
    assert waited == pytest.approx(10 * MS, rel=0.1)
    assert account.parts.unexplained < 0.02 * account.step_ns
