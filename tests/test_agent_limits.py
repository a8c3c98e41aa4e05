"""Ceilings: detail is given up step by step, said, and comes back; the capture's thread waits in time."""

from __future__ import annotations

import pytest

from dpuflow.agent import limits
from dpuflow.agent.config import Limits
from dpuflow.agent.limits import BASE_BYTES, ROW_BYTES, Governor, Orders, Pace, Use, pause_after

SETTINGS = Limits(cpu=0.5, memory=512 << 20, max_sample=2, recover=10.0)
CALM = Use(cpu=0.1, capture_cpu=0.05, rss=200 << 20, ring=0.0, lost=0, waited=False)
BUSY = Use(cpu=0.5, capture_cpu=0.4, rss=200 << 20, ring=0.1, lost=0, waited=True)


def seconds(governor: Governor, use: Use, count: int) -> list[tuple[str, int]]:
    return [_detail(governor.look(use, 1.0)) for _ in range(count)]


def _detail(orders: Orders) -> tuple[str, int]:
    return orders.mode, orders.sample


def test_detail_goes_step_by_step_and_no_further() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True)
    assert governor.orders.reason is None
    told = seconds(governor, BUSY, 12)
    assert told[0] == ("packets", 0)
    assert list(dict.fromkeys(told)) == [("packets", 0), ("messages", 0), ("messages", 1), ("messages", 2)]
    assert governor.orders.reason == "capturing wants more than 50% of a core: one in 4 pairs of hosts only"


def test_a_backend_that_does_not_fold_goes_on_to_sampling() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=False)
    assert list(dict.fromkeys(seconds(governor, BUSY, 4))) == [("packets", 0), ("packets", 1), ("packets", 2)]


def test_a_loss_counts_at_once() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True)
    lost = Use(cpu=0.1, capture_cpu=0.1, rss=0, ring=1.0, lost=7, waited=False)
    assert seconds(governor, lost, 1) == [("messages", 0)]
    assert governor.orders.reason == "the ring lost 7 packets: messages only"


def test_detail_comes_back_and_later_if_that_was_too_early() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True)
    seconds(governor, BUSY, 2)
    assert seconds(governor, CALM, 10)[-2:] == [("messages", 0), ("packets", 0)]
    assert governor.orders.reason is None
    seconds(governor, BUSY, 2)
    told = seconds(governor, CALM, 20)
    assert told.index(("packets", 0)) == 19


def test_neither_calm_nor_strained_changes_nothing() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True)
    seconds(governor, BUSY, 2)
    between = Use(cpu=0.4, capture_cpu=0.1, rss=200 << 20, ring=0.1, lost=0, waited=False)
    assert set(seconds(governor, between, 100)) == {("messages", 0)}


def test_short_memory_shortens_the_span_first() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True)
    full = Use(cpu=0.1, capture_cpu=0.05, rss=600 << 20, ring=0.0, lost=0, waited=False)
    spans = [governor.look(full, 1.0).span_s for _ in range(3)]
    assert spans == [5.0, 2.5, 2.0]
    assert _detail(governor.orders) == ("packets", 0)
    assert seconds(governor, full, 2)[-1] == ("messages", 0)
    assert "600 MiB of memory are used, 512 allowed" in (governor.orders.reason or "")
    assert "2 s of traffic are held" in (governor.orders.reason or "")
    seconds(governor, CALM, 60)
    assert (governor.orders.span_s, governor.orders.reason) == (10.0, None)


def test_what_is_held_fits_the_memory() -> None:
    most = Governor(SETTINGS, "packets", 0, 10.0, folds=True).orders.most
    assert most * ROW_BYTES + BASE_BYTES <= SETTINGS.memory


class Clock:
    """Time that passes only by work, all of it on the CPU, and by sleep."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.used_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        self.used_s += seconds


def test_the_capture_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    pace = Pace(0.2, lambda: 0, 1000)
    while clock.now_s < 10.0:
        clock.work(0.001)
        pace()
    assert clock.used_s / clock.now_s == pytest.approx(0.2, abs=0.03)
    assert pace.waited
    assert pace.used_s == pytest.approx(clock.used_s, abs=0.002)


def test_the_capture_waits_for_room() -> None:
    held = iter([5000, 5000, 5000, 100])
    pace = Pace(10.0, lambda: next(held), 1000)
    pace()
    assert pace.waited
    assert next(held, None) is None


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.01, 1.0), (0.3, 1.0), (0.6, 2.0), (3.0, 10.0)])
def test_analyses_keep_to_their_share(cost_s: float, pause_s: float) -> None:
    assert pause_after(cost_s, 0.5, 1.0) == pytest.approx(pause_s)
