"""Ceilings: detail is given up step by step, said, and comes back; the capture's thread waits in time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpuflow.agent import limits
from dpuflow.agent.budget import Budget
from dpuflow.agent.config import Limits
from dpuflow.agent.limits import FEWEST_MESSAGES, ROW_BYTES, Governor, Orders, Pace, Use

BASE = 200 << 20
SETTINGS = Limits(cpu=0.5, memory=512 << 20, max_sample=2, recover=10.0)
CALM = Use(cpu=0.1, capture_cpu=0.05, rss=200 << 20, ring=0.0, lost=0, held=0.0)
BUSY = Use(cpu=0.5, capture_cpu=0.4, rss=200 << 20, ring=0.1, lost=0, held=1.0)


def seconds(governor: Governor, use: Use, count: int) -> list[tuple[str, int]]:
    return [_detail(governor.look(use, 1.0)) for _ in range(count)]


def _detail(orders: Orders) -> tuple[str, int]:
    return orders.mode, orders.sample


def test_detail_goes_step_by_step_and_no_further() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    assert governor.orders.reason is None
    told = seconds(governor, BUSY, 12)
    assert told[0] == ("packets", 0)
    assert list(dict.fromkeys(told)) == [("packets", 0), ("messages", 0), ("messages", 1), ("messages", 2)]
    assert governor.orders.reason == "capturing wants more than 50% of a core: one in 4 pairs of hosts only"


def test_a_backend_that_does_not_fold_goes_on_to_sampling() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=False, base=BASE)
    assert list(dict.fromkeys(seconds(governor, BUSY, 4))) == [("packets", 0), ("packets", 1), ("packets", 2)]


def test_a_loss_counts_at_once() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    lost = Use(cpu=0.1, capture_cpu=0.1, rss=0, ring=1.0, lost=7, held=0.0)
    assert seconds(governor, lost, 1) == [("messages", 0)]
    assert governor.orders.reason == "the ring lost 7 packets: messages only"


def test_detail_comes_back_and_later_if_that_was_too_early() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    seconds(governor, BUSY, 2)
    assert seconds(governor, CALM, 10)[-2:] == [("messages", 0), ("packets", 0)]
    assert governor.orders.reason is None
    seconds(governor, BUSY, 2)
    told = seconds(governor, CALM, 20)
    assert told.index(("packets", 0)) == 19


def test_neither_calm_nor_strained_changes_nothing() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    seconds(governor, BUSY, 2)
    between = Use(cpu=0.4, capture_cpu=0.1, rss=200 << 20, ring=0.1, lost=0, held=0.0)
    assert set(seconds(governor, between, 100)) == {("messages", 0)}


def test_short_memory_shortens_the_span_first() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    full = Use(cpu=0.1, capture_cpu=0.05, rss=600 << 20, ring=0.0, lost=0, held=0.0)
    spans = [governor.look(full, 1.0).span_s for _ in range(3)]
    assert spans == [5.0, 2.5, 2.0]
    assert _detail(governor.orders) == ("packets", 0)
    assert seconds(governor, full, 2)[-1] == ("messages", 0)
    assert "600 MiB of memory are used, 512 allowed" in (governor.orders.reason or "")
    assert "2 s of traffic are held" in (governor.orders.reason or "")
    seconds(governor, CALM, 60)
    assert (governor.orders.span_s, governor.orders.reason) == (10.0, None)


def test_what_is_held_fits_the_memory() -> None:
    most = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE).orders.most
    assert most * ROW_BYTES + BASE <= SETTINGS.memory


def test_costly_analyses_hold_fewer_messages_until_there_is_room() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    room = governor.orders.most
    costly = replace(CALM, analysis_s=2.4, messages=50_000)  # twice what four seconds allow
    assert governor.look(costly, 1.0).most == 25_000
    assert governor.orders.reason == "an analysis took 2.4 s of CPU: 25000 messages are held"
    governor.look(replace(CALM, analysis_s=1000.0, messages=25_000), 1.0)
    assert governor.orders.most == FEWEST_MESSAGES
    seconds(governor, CALM, 100)
    assert (governor.orders.most, governor.orders.reason) == (room, None)


def test_where_nothing_comes_all_detail_is_wanted_whatever_the_agent_itself_costs() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    seconds(governor, BUSY, 2)
    idle = replace(CALM, cpu=0.45, idle=True)
    assert seconds(governor, idle, 10)[-1] == ("packets", 0)


def test_an_agent_that_cannot_keep_its_ceiling_says_so() -> None:
    governor = Governor(SETTINGS, "packets", 0, 10.0, folds=True, base=BASE)
    governor.look(replace(CALM, overdrawn=True), 1.0)
    assert governor.orders.reason == "all but capturing and analysing takes more than 50.0% of a core"
    governor.look(CALM, 1.0)
    assert governor.orders.reason is None


def test_the_capture_waits_for_room_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    held = [5000]
    pace = Pace(Budget(10.0), lambda: held[0], 1000)
    waits = []
    for _ in range(300):
        waits.append(pace())
        clock.now_s += 0.01
    assert waits.count(0.0) == 1
    assert pace.take_waited() == pytest.approx(2.98, abs=0.02)
    held[0] = 1999
    assert pace() == 0
    assert pace.take_waited() == pytest.approx(0.01)
