"""Counters of some time ago: as if all of them had been kept each time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dpuflow.agent.baseline import MOST, Baseline
from dpuflow.agent.stream import COUNTERS, Counts
from dpuflow.agent.windows import grown


@pytest.mark.parametrize("seed", range(20))
def test_flows_have_grown_by_what_they_did(seed: int) -> None:
    """Flows come, move, are idle, and are forgotten; times are noted seldom or often, cut soon or late."""
    draw = random.Random(seed)
    numbers: list[int] = []
    totals: dict[int, int] = {}
    noted: list[Counts] = []
    baseline, fresh, apart, behind = Baseline(), 0, draw.choice([1, 3]), draw.choice([5, 12, 60])
    for time_ns in range(120):
        for _ in range(draw.choice([0, 0, 1, 5])):
            numbers.append(fresh)
            totals[fresh] = draw.randrange(3)
            fresh += 1
        for number in numbers:
            totals[number] += draw.choice([0] * 9 + [7])
        if draw.random() < 0.1:
            numbers = [each for each in numbers if draw.random() < 0.5]
        values = np.array([[totals[each]] * len(COUNTERS) for each in numbers], np.uint64)
        now = Counts(time_ns, np.array(numbers, np.int64), values.reshape(-1, len(COUNTERS)), time_ns, 0)
        before = baseline.before(now)
        if before is not None:
            (then,) = [each for each in noted if each.time_ns == before.time_ns]
            assert grown(before, now).tolist() == grown(then, now).tolist()
            assert before.packets == then.packets
        noted.append(now)
        baseline.note(now, apart, time_ns - behind)
        times = [each.counts.time_ns for each in baseline._times]
        assert times == sorted(times)
        assert len(times) <= MOST
        assert times[0] <= max(time_ns - behind, 0) + apart


def test_idle_flows_are_kept_once() -> None:
    values = np.ones((5000, len(COUNTERS)), np.uint64)
    baseline = Baseline()
    for time_ns in range(MOST):
        values = values.copy()
        values[time_ns] += 1
        baseline.note(Counts(time_ns, np.arange(5000), values, 0, 0), 1, 0)
    assert sum(len(each.counts.flow) for each in baseline._times) < 5000 + MOST
