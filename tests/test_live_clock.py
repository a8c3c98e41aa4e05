"""When the wall clock counts as set, and when readings of a busy machine only differ."""

from __future__ import annotations

import pytest

from dpuflow.live import clock
from dpuflow.live.clock import ClockReading, StampClock

MS = 1_000_000


@pytest.mark.parametrize(
    ("moved", "error", "told"),
    [(0, 100, 0), (MS // 2, 100, 0), (2 * MS, 100, 2 * MS), (-3 * MS, 100, -3 * MS), (2 * MS, 3 * MS, 0)],
)
def test_a_clock_is_set_beyond_what_reading_it_may_be_off(
    moved: int, error: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading that was held up for 3 ms had told of a clock set by 2."""
    readings = iter([ClockReading(10**18, 0, 100), ClockReading(10**18 + moved, 0, error)])
    monkeypatch.setattr(clock, "read_clocks", lambda: next(readings))
    assert StampClock().check() == told
