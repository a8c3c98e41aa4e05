"""What first acts may have waited for where captures miss packets, by hand and on a real capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dpuflow
from bench.robustness.records import read_records, write_records
from dpuflow.arrays.ordering import Picked
from dpuflow.entries import Entries, Rule
from dpuflow.entries.blockers import (
    Blocker,
    Scene,
    before_leaving,
    behind_own_data,
    credited,
    missing_before,
    solve,
)
from dpuflow.entries.reactions import Law
from dpuflow.entries.rows import blank
from dpuflow.matching import Instance
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, TRANSFER, MessageFlag, Op, Seen, Wire

US = 1_000
RANKS = (0, 1, 2)


def ranks_of(enter_us: list[list[int]], leave_us: list[list[int]]) -> Entries:
    """Operations of three ranks, each a list of when they entered and left."""
    count = len(enter_us)
    collective, endpoint = np.repeat(np.arange(count), 3), np.tile(RANKS, count)
    entries = blank(collective, endpoint, np.arange(count + 1) * 3)
    enter, leave = (np.array(times, np.int64).ravel() * US for times in (enter_us, leave_us))
    rule = np.full(3 * count, int(Rule.FREE_STEP))
    return replace(entries, enter_ns=enter, leave_ns=leave, rule=rule, fed=np.ones(3 * count, bool))


def scene(entries: Entries, sent_us: list[int], arrived_us: list[int], gap_at: int | None) -> Scene:
    """Messages from rank 0 to rank 1, and whether packets of one are missing; reactions take 10 us."""
    exchanges, transfers = EXCHANGE.zeros(len(sent_us)), TRANSFER.zeros(len(sent_us))
    for rows in (exchanges, transfers):
        rows["dst"], rows["wire"] = 1, Wire.ROCE_SEND
    exchanges["data_ns"] = transfers["sent_ns"] = np.array(sent_us) * US
    exchanges["data_end_ns"], exchanges["arrived_end_ns"] = np.array(sent_us) * US, np.array(arrived_us) * US
    if gap_at is not None:
        transfers["flags"][gap_at] = MessageFlag.GAP
    level, group = np.full(len(entries.rule), 10.0 * US), np.zeros(len(entries.rule), np.int64)
    law = Law(level, level, level, level, level, level, level > 0)
    instances = [Instance(np.zeros(0, np.int64), Op.ALL_REDUCE, list(RANKS))] * (len(entries.offsets) - 1)
    return Scene(entries, Picked.exchanges(exchanges), transfers, instances, group, law, level, group, group)


def stands(world: Scene) -> np.ndarray:
    """Rows that missing packets leave in doubt."""
    return missing_before(world).stands(world.entries.enter_ns)


def test_the_first_blocker_that_stands_is_the_reason() -> None:
    entries = ranks_of([[0, 1, 2]], [[9, 9, 9]])
    none, late = np.full(3, NONE32, np.int64), np.array([NEVER, NEVER, 1 * US])
    entries = replace(entries, rule=np.array([Rule.FREE_STEP, Rule.FREE_STEP, Rule.ANSWER]))
    offer = Blocker(Rule.LONG_AFTER, late, 500.0, none)
    credit = Blocker(Rule.CREDIT, np.array([0, NEVER, NEVER]), 500.0, none + 0)
    queued = Blocker(Rule.QUEUED, np.array([0, 1 * US, 0]), 500.0, none - 1)
    rule, after = solve(entries, offer, [credit, queued])
    assert rule.tolist() == [Rule.CREDIT, Rule.QUEUED, Rule.LONG_AFTER]
    rule, _ = solve(entries, offer._replace(limit_ns=1_500.0), [credit._replace(limit_ns=np.nan)])
    assert rule.tolist() == [Rule.CREDIT, Rule.FREE_STEP, Rule.ANSWER]  # what no law rejects stands
    assert after.tolist() == [NONE32, NONE32 - 1, NONE32]


def test_what_came_later_than_any_hand_over_had_not_waited_for_its_credit() -> None:
    """Where data streams no reaction is seen, only how long hand-overs take at the most."""
    enter = [[200 * k + 30, 200 * k + 10, 200 * k + 110] for k in range(12)]
    entries = ranks_of(enter, [[200 * k + 120] * 3 for k in range(12)])
    since = np.where(entries.collective > 0, 200 * US * (entries.collective - 1) + 120 * US, NEVER)
    credit = np.select([entries.endpoint == 0, entries.endpoint == 2], [100 * US, 120 * US], NEVER)
    world = scene(replace(entries, since_ns=since, credit_ns=credit), [100], [105], None)

    def in_doubt(hand_over_us: float) -> np.ndarray:
        worst = np.full(len(since), hand_over_us * US)
        law = world.law._replace(most_ns=np.full(len(since), np.nan), worst_ns=worst)
        return credited(replace(world, law=law)).rows

    assert (in_doubt(150.0) == ((entries.endpoint == 2) & (since != NEVER))).all()
    assert not in_doubt(110.0).any()


@pytest.mark.parametrize(
    ("after_us", "late_us", "doubt"), [(30, 300, True), (80, 300, False), (30, 100, False)]
)
def test_who_is_much_later_than_all_right_after_its_credit_waited_for_it(
    after_us: int, late_us: int, doubt: bool
) -> None:
    """Reactions take 10 us, the worst 50. A receiver that comes late allows all its slots at once, and the
    sender takes longer than usual to go on: then it was not late by itself as often as that."""
    enter = [[1000 * k, 1000 * k + late_us, 1000 * k] for k in range(12)]
    entries = ranks_of(enter, [[1000 * k + 400] * 3 for k in range(12)])
    since = np.where(entries.collective > 0, 1000 * US * (entries.collective - 1) + 400 * US, NEVER)
    credit = np.where(entries.endpoint == 1, after_us * US, 500 * US)
    world = scene(replace(entries, since_ns=since, credit_ns=credit), [100], [105], None)
    law = world.law._replace(most_ns=np.full(len(since), 10.0 * US), worst_ns=np.full(len(since), 50.0 * US))
    assert credited(replace(world, law=law)).rows[entries.endpoint == 1][1:].all() == doubt


def test_what_follows_other_data_at_once_is_no_first_message_once_packets_are_missing() -> None:
    """Rank 1 acts 5 us after an input, then long after the next one; rank 2 never lost anything."""
    entries = ranks_of([[90, 125, 90], [400, 500, 400]], [[130, 130, 130], [510, 510, 510]])
    sent, arrived = [100, 300], [120, 320]
    assert not stands(scene(entries, sent, arrived, None)).any()
    assert stands(scene(entries, sent, arrived, 0)).tolist() == [False, True, *[False] * 4]


@pytest.mark.parametrize("wire", [Wire.ROCE_WRITE_IMM, Wire.ROCE_READ, Wire.GLOO_DATA])
def test_data_of_known_length_is_taken_for_nothing_else(wire: Wire) -> None:
    entries = ranks_of([[90, 125, 90]], [[130, 130, 130]])
    world = scene(entries, [100], [120], 0)
    world.transfers["wire"] = wire
    assert not stands(world).any()


@pytest.mark.parametrize(("acked_us", "kept"), [(59, True), (20, False)])
def test_what_follows_the_acknowledgment_of_a_repeated_message_may_have_waited_for_that(
    acked_us: int, kept: bool
) -> None:
    """Rank 0 enters the second operation 60 us after it began the first, whose only message was lost."""
    entries = ranks_of([[0, 0, 0], [60, 30, 30]], [[9, 9, 9], [90, 90, 90]])
    world = scene(entries, [0, 60], [9, 70], None)
    world.exchanges["wire"][:] = Wire.ROCE_WRITE_IMM
    world.exchanges["seen"][:] = Seen.AT_SENDER
    world.exchanges["retransmitted"][:] = [1, 0]
    world.exchanges["acked_ns"][:] = [acked_us * US, 70 * US]
    packets = replace(world, packet_ns=np.full(6, 100.0))
    found = behind_own_data(packets)
    assert found.rule == Rule.QUEUED
    assert bool(found.stands(entries.enter_ns)[3]) is kept


def test_one_rank_alone_cannot_be_in_two_operations() -> None:
    calls = [[0, 0, 0], [100, 40, 100]], [[50, 50, 50], [150, 150, 150]]
    assert before_leaving(scene(ranks_of(*calls), [0], [10], None)).tolist() == [*[False] * 4, True, False]
    # Where packets are missing nobody knows whose messages the others' were.
    assert before_leaving(scene(ranks_of(*calls), [0], [10], 0)).all()
    together = [[0, 0, 0], [40, 40, 100]], [[50, 50, 50], [150, 150, 150]]
    assert not before_leaving(scene(ranks_of(*together), [0], [10], None)).any()
    unknown = replace(ranks_of(*calls), enter_ns=np.array([0, 0, 0, 100, NEVER, 100]) * 1)
    assert not before_leaving(scene(unknown, [0], [10], None)).any()


@pytest.mark.parametrize("packet", [475, 625, 1200, 2375])
def test_one_packet_that_a_capture_missed_changes_nobody_s_verdict(
    shared: Path, tmp_path: Path, packet: int
) -> None:
    """The other node's capture has the message whole: it is one message, and the algorithm stays."""
    folder = shared / "captures" / "roce" / "ar-ring-n2-64k-late1-5ms"
    files = []
    for node in range(2):
        records = read_records(folder / f"node{node}.pcap.gz")
        kept = np.arange(len(records)) != (packet if node == 0 else -1)
        files.append(tmp_path / f"node{node}.pcap")
        write_records(records.take(kept), files[-1])
    result = dpuflow.analyze([dpuflow.Vantage(file.stem, (str(file),)) for file in files])
    assert [row.verdict for row in result.lateness] == ["on_time", "late"]
    assert sum(c.algorithm == "ring" and c.bytes == 65536 for c in result.collectives) >= 39
