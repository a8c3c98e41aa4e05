"""The ceiling of CPU: over any span of time no more is used, whatever a piece of work costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from dpuflow.agent import budget
from dpuflow.agent.budget import CREDIT_S, LEAST, Budget


class Machine:
    """One core whose time passes by work of some thread, and by sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.thread = 1000.0, "others"
        self.used = {"capture": 7.0, "analysis": 5.0, "others": 3.0}
        self.log = [(self.now_s, 0.0)]
        monkeypatch.setattr(budget, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return sum(self.used.values())

    def thread_time(self) -> float:
        return self.used[self.thread]

    def work(self, thread: str, seconds: float) -> None:
        """Use the core for so long."""
        self.used[thread] += seconds
        self.now_s += seconds
        self.log.append((self.now_s, self.process_time()))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.log.append((self.now_s, self.process_time()))

    def capture(self, made: Budget, seconds: float) -> bool:
        """A piece of capturing, if it may begin."""
        self.thread, before = "capture", self.thread
        may = made.capture_wait() == 0
        if may:
            self.work("capture", seconds)
        self.thread = before
        return may


def run(
    machine: Machine, made: Budget, seconds: float, costs: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """Capture and analyse as much as allowed; the costliest piece of each. Captures within analyses, too."""
    most = dict.fromkeys(costs, 0.0)

    def drawn(what: str) -> float:
        cost = costs[what]()
        most[what] = max(most[what], cost)
        return cost

    end_s = machine.now_s + seconds
    while machine.now_s < end_s:
        machine.work("others", drawn("others"))
        busy = machine.capture(made, drawn("capture"))
        if made.analysis_wait() == 0:
            busy = True
            machine.thread = "analysis"
            with made.analysing():
                parts = drawn("analysis")
                for _ in range(4):
                    machine.work("analysis", parts / 4)
                    machine.capture(made, drawn("capture"))
            machine.thread = "others"
        if not busy:
            machine.sleep(0.01)
    return most


def spans(log: list[tuple[float, float]], seconds: float) -> Iterator[tuple[float, float]]:
    """(length, use) of all spans of about so long."""
    times, used = (np.array(column) for column in zip(*log, strict=True))
    ends = np.minimum(np.searchsorted(times, times + seconds), len(times) - 1)
    yield from zip(times[ends] - times, used[ends] - used, strict=True)


@pytest.mark.parametrize("share", [0.02, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_span_uses_more_than_its_share(monkeypatch: pytest.MonkeyPatch, share: float, seed: int) -> None:
    draw = random.Random(seed)
    machine = Machine(monkeypatch)
    made = Budget(share)
    started = machine.now_s
    most = run(machine, made, 400.0, {
        "capture": lambda: draw.choice([1e-5, 1e-3, 5e-3, 0.1, draw.uniform(0, 2)]) * min(share, 1),
        "analysis": lambda: draw.choice([1e-3, 0.05, 0.5, draw.uniform(0, 20)]) * min(share, 1),
        "others": lambda: draw.choice([0, 1e-4, 1e-3]) * min(share, 0.1),
    })  # fmt: skip
    beyond = CREDIT_S * share + sum(most.values())
    machine.log = [row for row in machine.log if row[0] > started + 1]
    for seconds in (0.5, 3.0, 30.0, 300.0):
        assert all(use <= share * length + beyond + 1e-9 for length, use in spans(machine.log, seconds))
    if share < 1:  # who wants more than the share gets it
        (first_s, first), (last_s, last) = machine.log[0], machine.log[-1]
        assert last - first >= 0.8 * share * (last_s - first_s) - beyond


def test_what_one_leaves_the_other_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    made = Budget(0.2)
    while machine.now_s < 1100.0:
        if not machine.capture(made, 0.002):
            machine.sleep(0.001)
    assert (machine.used["capture"] - 7.0) / 100 == pytest.approx(0.2, abs=0.01)
    assert made.capture_s == pytest.approx(machine.used["capture"] - 7.0, abs=0.003)


def test_an_analysis_that_cost_much_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    made = Budget(0.5)
    machine.thread = "analysis"
    with made.analysing():
        machine.work("analysis", 3.0)
    assert made.analysis_wait() > 3.0  # half a core: three seconds of work are six seconds' credit
    machine.thread = "capture"
    assert made.capture_wait() == 0
    machine.sleep(2.5)
    assert made.analysis_wait() > 0
    machine.sleep(1.0)
    assert made.analysis_wait() == 0


def test_the_rest_of_the_process_is_paid_for_but_starves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    made = Budget(0.1)
    captured = [machine.used["capture"]]
    for _ in range(200):
        machine.work("others", 0.05)  # a third of a core
        end_s = machine.now_s + 0.1
        while machine.now_s < end_s:
            if not machine.capture(made, 1e-4):
                machine.sleep(0.005)
        captured.append(machine.used["capture"])
    assert made.overdrawn()
    rates = [(b - a) / 0.15 for a, b in pairwise(captured[::50])]
    assert all(rate > 0.5 * LEAST * 0.1 * 50 for rate in rates)
    made.forgive()
    assert not made.overdrawn()
