"""Clocks of scripted worlds: offset and drift found again, the error told, false trust found out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from worlds import START, Sent, World

from dpuflow.join import clockgraph, join
from dpuflow.join.clockmap import ClockMap
from dpuflow.join.envelope import fit_line
from dpuflow.schema.rows import NEVER
from dpuflow.schema.tables import Joined

NODES = ("node0", "node1", "node2", "node3")


def worst_error_ns(joined: Joined, world: World) -> float:
    """Largest error of any transfer's time, sent or arrived, against the script and the captures' truth."""
    worst = 0.0
    for clock, info in zip(joined.clocks, joined.captures, strict=True):
        offset, drift = world.clocks.get(info.vantage, (0, 0.0))
        offset0, drift0 = world.clocks.get(joined.captures[0].vantage, (0, 0.0))
        assert clock.offset_ns is not None
        assert clock.drift_ppb is not None
        for at_ns in (joined.start_ns, joined.end_ns):  # local minus reference at both ends
            true = (offset - offset0) + (at_ns - START) * (drift - drift0)
            found = clock.offset_ns + (at_ns - joined.start_ns) * clock.drift_ppb * 1e-9
            worst = max(worst, abs(found - true))
    return worst


def test_offsets_and_drifts_are_found_again() -> None:
    clocks = {"node1": (700_000_000, 30e-6), "node2": (-40_000_000_000, -70e-6), "node3": (1_000_000, 5e-6)}
    world = World(4, clocks=clocks).ring(1000, 10_000_000)
    joined = join(world.captures(*NODES))
    assert [c.method for c in joined.clocks] == ["reference", "estimated", "estimated", "estimated"]
    assert worst_error_ns(joined, world) < 5_000
    assert all(10_000 < (c.error_ns or 0) < 100_000 for c in joined.clocks[1:])
    delay = joined.transfers["arrived_ns"] - joined.transfers["sent_ns"]
    assert delay.min() > 10_000
    assert len(joined.transfers) == 4000


def test_the_switch_halves_the_error_and_closes_the_loops() -> None:
    clocks = {"node1": (5_000_000_000, -30e-6), "switch": (-7_000_000_000, 12e-6)}
    world = World(2, clocks=clocks).ring(1000, 5_000_000)
    joined = join(world.captures("node0", "switch", "node1"))
    assert joined.local == [[0], [], [1]]
    assert worst_error_ns(joined, world) < 5_000
    assert (joined.clocks[1].error_ns or 0) < 0.6 * (joined.clocks[2].error_ns or 0)


def test_an_uneven_path_lies_within_the_error_told() -> None:
    """The switch is far from node 1: nothing shows it, but half the round trip covers it."""
    world = World(2, delay_ns=200_000, noise_ns=2_000).ring(500)
    captures = world.captures("node0", "node1")
    later = captures[1].messages
    towards = captures[1].flows["dst"][later["flow"]] == captures[1].endpoints["addr_lo"].argmax()
    later["first_ns"][towards] += 150_000  # everything towards node 1 takes longer than back
    later["last_ns"][towards] += 150_000
    later["acked_ns"] += 150_000  # ACKs that come towards it, and those that it sends for what has come
    joined = join(captures, clock="estimate")
    assert joined.clocks[1].error_ns is not None
    assert joined.clocks[1].offset_ns is not None
    assert 50_000 < abs(joined.clocks[1].offset_ns) <= joined.clocks[1].error_ns


@pytest.mark.parametrize("mode", ["auto", "trust", "estimate"])
def test_one_clock_in_each_mode(mode: str) -> None:
    world = World(4).ring(500)
    joined = join(world.captures(*NODES), clock=mode)
    assert {c.method for c in joined.clocks[1:]} == {"estimated" if mode == "estimate" else "trusted"}
    assert worst_error_ns(joined, world) < 10_000
    assert joined.limits == []


def test_false_trust_is_reported() -> None:
    joined = join(
        World(2, clocks={"node1": (-400_000, 0.0)}).ring(100).captures("node0", "node1"), clock="trust"
    )
    assert joined.clocks[1].method == "trusted"
    assert "disagree" in joined.limits[0]
    assert "before they were sent" in joined.limits[0]


def test_auto_estimates_where_packets_would_arrive_before_they_were_sent() -> None:
    world = World(2, clocks={"node1": (-400_000, 0.0)}).ring(500)
    joined = join(world.captures("node0", "node1"))
    assert joined.clocks[1].method == "estimated"
    assert worst_error_ns(joined, world) < 10_000
    assert joined.limits == []


def test_a_clock_that_steps_is_followed_and_reported() -> None:
    captures = World(2).ring(400).captures("node0", "node1")
    true = captures[1].messages["first_ns"].copy()
    after = true > START + 200_000_000
    for name in ("first_ns", "last_ns", "acked_ns"):
        captures[1].messages[name][after] += 300_000_000
    joined = join(captures, clock="estimate")
    assert "it was set by +300" in joined.clocks[1].why
    rows = joined.transfers[joined.transfers["capture"] == 1]
    assert np.abs(rows["sent_ns"] - true[rows["message"]]).max() < 5_000


def test_a_few_mismatched_packets_do_not_matter() -> None:
    world = World(2, clocks={"node1": (50_000_000, 10e-6)}).ring(500)
    captures = world.captures("node0", "node1")
    for row in (10, 300, 700):
        captures[1].messages["first_ns"][row] -= 20_000_000
    joined = join(captures)
    assert worst_error_ns(joined, world) < 20_000


def test_traffic_one_way_without_acks_ties_nothing() -> None:
    world = World(3)
    for number in range(100):
        world.sent.append(Sent(0, 1, START + number * 1_000_000))
        world.sent.append(Sent(0, 2, START + number * 1_000_000))
    captures = world.captures("node0", "node1", "node2")
    for tables in captures:
        tables.messages["acked_ns"] = NEVER
    joined = join(captures, clock="estimate")
    assert [c.method for c in joined.clocks] == ["reference", "none", "none"]
    assert joined.islands == []  # else what all saw would be there three times
    assert any("clocks of node1 + node2 to node0" in line for line in joined.limits)


def test_the_strip_between_two_clouds() -> None:
    """By hand: clocks differ by 1000 + 0.001 t, the least delay is 50 one way and 70 the other."""
    time = np.arange(0, 100_000, 100)
    there = 1000 + time // 1000 + 50 + (time // 100 % 7) * 10
    back = 1000 + time // 1000 - 70 - (time // 100 % 5) * 10
    x = np.concatenate([time, time])
    y = x + np.concatenate([there, back])
    line = fit_line(x, y, np.arange(len(x)) < len(time))
    assert line is not None
    assert abs(line.base_ns + line.offset - 990) < 3
    assert abs(line.slope - 0.001) < 2e-5
    assert abs(line.width - 120) < 4
    assert line.broken == 0.0
    assert fit_line(time, time + there, np.ones(len(time), bool)) is None


def test_clock_map() -> None:
    place = ClockMap(START, 40_000_000_000, 50e-6)
    true = START + np.array([0, 1, 3_600_000_000_000])
    local = true + 40_000_000_000 + np.array([0, 0, 180_000_000])
    assert place.to_reference(local).tolist() == true.tolist()
    assert place.to_reference(np.array([NEVER])).tolist() == [NEVER]


def test_a_drift_that_changes_is_followed() -> None:
    captures = (
        World(2, clocks={"node1": (50_000_000, 40e-6)}).ring(2000, 5_000_000).captures("node0", "node1")
    )
    true = captures[1].messages["first_ns"].copy()
    for name in ("first_ns", "last_ns", "acked_ns"):
        time = captures[1].messages[name]
        late = np.maximum(time - (START + 5_050_000_000), 0)
        time -= np.where(time == NEVER, 0, np.rint(late * 80e-6).astype("i8"))
    moved = captures[1].messages["first_ns"] - true
    joined = join(captures, clock="estimate")
    assert "2 pieces" in joined.clocks[1].why
    place = joined.transfers["capture"] == 1
    message = joined.transfers["message"][place]
    expected = true[message] - 50_000_000 - np.rint((true[message] - START) * (40e-6 / (1 + 40e-6)))
    assert moved.min() < -300_000
    assert np.abs(joined.transfers["sent_ns"][place] - expected).max() < 10_000


def test_the_error_covers_a_late_beginning() -> None:
    """Traffic begins 20 s into the capture: how the clocks stood before is known from their rates alone."""
    world = World(2, clocks={"node1": (3_000_000, 20e-6)}).ring(30, 5_000_000)
    captures = world.captures("node0", "node1")
    for tables in captures:
        assert tables.info.first_ns is not None
        tables.info.first_ns -= 20_000_000_000
    near, far = join(world.captures("node0", "node1")), join(captures)
    true = 3_000_000 - 20_000_000_000 * 20e-6
    assert abs((far.clocks[1].offset_ns or 0) - true) <= (far.clocks[1].error_ns or 0)
    assert (far.clocks[1].error_ns or 0) > 10 * (near.clocks[1].error_ns or 0)


def test_auto_says_why_it_estimates() -> None:
    joined = join(World(2, clocks={"node1": (-400_000, 0.0)}).ring(100).captures("node0", "node1"))
    assert "300 of 600 packets of two captures would arrive before they were sent" in joined.clocks[1].why


def test_a_capture_given_twice_counts_once() -> None:
    world = World(2, clocks={"node1": (1_000_000, 0.0)}).ring(100)
    captures = world.captures("node0", "node1")
    copy = replace(captures[1], info=replace(captures[1].info, id=2, vantage="again"))
    once, twice = join(captures), join([*captures, copy])
    assert np.array_equal(once.transfers, twice.transfers)
    assert twice.clocks[2].offset_ns == twice.clocks[1].offset_ns
    assert any(line.startswith("again is a copy of node1") for line in twice.limits)
    assert not any("ties the clock" in line for line in twice.limits)
    alone = join([captures[0], replace(captures[0], info=replace(captures[0].info, id=1, vantage="again"))])
    assert [(c.reference, c.method) for c in alone.clocks] == [(True, "reference"), (False, "trusted")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["auto", "trust", "estimate"])
def test_stamps_centuries_apart(mode: str) -> None:
    captures = World(2).ring(100).captures("node0", "node1")
    for tables, shift in zip(captures, (-START, 9_200_000_000_000_000_000 - START), strict=True):
        for name in ("first_ns", "last_ns", "acked_ns"):
            tables.messages[name] += np.where(tables.messages[name] == NEVER, 0, shift)
        for name in ("first_ns", "last_ns"):
            tables.flows[name] += np.where(tables.flows[name] == NEVER, 0, shift)
        assert tables.info.first_ns is not None
        assert tables.info.last_ns is not None
        tables.info.first_ns += shift
        tables.info.last_ns += shift
    joined = join(captures, clock=mode)
    if mode != "trust":
        assert joined.clocks[1].offset_ns == pytest.approx(9_200_000_000_000_000_000, abs=10_000)


def test_whom_only_a_pair_that_no_line_fits_tied_stays_untied(monkeypatch: pytest.MonkeyPatch) -> None:
    """node1 and node2 share packets, but what both share with the reference fits no line."""
    later = {"node1": (1_000_000_000_000, 0.0), "node2": (2_000_000_000_000, 0.0)}
    captures = World(3, clocks=later).ring(200).captures("node0", "node1", "node2")
    fit_lines = clockgraph.fit_lines
    monkeypatch.setattr(
        clockgraph, "fit_lines", lambda x, y, way: [] if x.min() < START + 10**11 else fit_lines(x, y, way)
    )
    joined = join(captures, clock="estimate")
    assert [c.method for c in joined.clocks] == ["reference", "none", "none"]
