"""When ranks leave, as ACKs tell: busy hosts, what libfabric waits for, and who has gone on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, no_waits

from dpuflow.entries import AT_LEAST, Entries, Rule, build_entries, relate
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schema.rows import NEVER, MessageFlag, Op, Role, Wire
from dpuflow.verdicts.causes import COMPUTE, NONE, Causes, causes_of
from dpuflow.verdicts.excess import charge

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
LATE = 2  # the rank that enters 5 ms after its peers
FIRST, SECOND = LATE, 4 + LATE  # its rows of Entries


def two_turns(wire: Wire = Wire.ROCE_SEND) -> tuple[World, np.ndarray]:
    """Two collectives of eager messages with 1 ms of work between; one rank comes 5 ms late to the second."""
    world = World("eager")
    world.play(RING, 4096, dict.fromkeys(range(4), 0))
    leave = world.played[-1].leave_ns
    world.play(RING, 4096, {r: at + MS + (5 * MS if r == LATE else 0) for r, at in leave.items()})
    transfers = world.transfers()
    transfers["wire"], transfers["acked_ns"] = wire, transfers["arrived_end_ns"]
    transfers["taken_ns"] = transfers["arrived_end_ns"]
    return world, transfers


def last_of(transfers: np.ndarray, column: str) -> int:
    """The last message of the first turn that has the late rank in ``column``."""
    world_half = np.sort(transfers["sent_ns"])[len(transfers) // 2]
    rows = np.flatnonzero((transfers[column] == LATE) & (transfers["sent_ns"] < world_half))
    return int(rows[np.argmax(transfers["arrived_end_ns"][rows])])


def concluded(world: World, transfers: np.ndarray) -> tuple[Entries, Causes]:
    exchanges = build_exchanges(transfers)
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    charges = charge(entries, relative, np.zeros(len(instances), np.int64))
    slow = np.zeros(len(entries.endpoint), bool)
    return entries, causes_of(instances, entries, relative, charges, slow, no_waits(entries, instances))


def test_a_host_that_takes_its_data_late_is_no_late_rank() -> None:
    world, transfers = two_turns()
    entries, causes = concluded(world, transfers)
    assert causes.cause[SECOND] == COMPUTE
    before, since = int(entries.leave_ns[FIRST]), int(entries.since_ns[SECOND])
    transfers["taken_ns"][last_of(transfers, "dst")] += 5 * MS
    entries, causes = concluded(world, transfers)
    assert entries.leave_ns[FIRST] == before + 5 * MS
    assert causes.cause[SECOND] == NONE
    assert abs(causes.excess_ns[SECOND]) < MS // 10
    assert entries.since_ns[SECOND] == since  # a bound from below rests on what arrived


@pytest.mark.parametrize("wire", [Wire.ROCE_SEND, Wire.OB1_MATCH])
@pytest.mark.parametrize("holds", [False, True])
def test_only_libfabric_waits_for_the_acks_of_what_it_sends(wire: Wire, *, holds: bool) -> None:
    world, transfers = two_turns(wire)
    transfers["flags"] |= np.uint8(MessageFlag.HOLDS_SENDER if holds else 0)
    transfers["acked_ns"][last_of(transfers, "src")] += 5 * MS
    _, causes = concluded(world, transfers)
    assert (causes.cause[SECOND] == NONE) == (holds and wire == Wire.ROCE_SEND)


def test_tcp_receivers_acknowledge_at_leisure() -> None:
    world, transfers = two_turns(Wire.OB1_MATCH)
    transfers["taken_ns"][last_of(transfers, "dst")] += 5 * MS
    _, causes = concluded(world, transfers)
    assert causes.cause[SECOND] == COMPUTE


def test_who_enters_its_next_collective_has_left() -> None:
    """An ACK may stand for several messages and come long after the rank has gone on."""
    world, transfers = two_turns()
    transfers["taken_ns"][last_of(transfers, "dst")] += 500 * MS
    entries, _ = concluded(world, transfers)
    assert entries.leave_ns[FIRST] == entries.enter_ns[SECOND]
    transfers["taken_ns"] = NEVER
    seen, _ = concluded(world, transfers)
    assert (entries.leave_ns >= seen.leave_ns).all()


def test_nobody_works_longer_than_peers_who_came_nobody_knows_when() -> None:
    """Ranks that are late by at least so much entered some time after they left: that is no short work."""
    world, transfers = two_turns()
    exchanges = build_exchanges(transfers)
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    charges = charge(entries, relative, np.zeros(len(instances), np.int64))
    rule, bound, enter = entries.rule.copy(), relative.bound.copy(), entries.enter_ns.copy()
    others = [4, 4 + 1]
    rule[others], bound[others], enter[others] = Rule.ANSWER, AT_LEAST, entries.leave_ns[[0, 1]]
    found = causes_of(
        instances,
        replace(entries, rule=rule, enter_ns=enter),
        relative._replace(bound=bound, enter_ns=enter),
        charges,
        np.zeros(len(rule), bool),
        no_waits(entries, instances),
    )
    assert (found.excess_ns[others] == NEVER).all()
    assert abs(found.excess_ns[4 + 3] + 5 * MS) < MS // 10  # as against the late rank alone


def test_who_was_not_seen_to_get_all_that_was_announced_is_not_blamed_for_what_came_after() -> None:
    world = World("rendezvous")
    world.play(RING, 1 << 20, dict.fromkeys(range(4), 0))
    leave = world.played[-1].leave_ns
    world.play(RING, 1 << 20, {r: at + MS + (5 * MS if r == LATE else 0) for r, at in leave.items()})
    _, causes = concluded(world, world.transfers())
    assert causes.cause[SECOND] == COMPUTE
    # Its last data of the first turn is in no capture, nor is what allowed it: it may have come much later.
    came = [row for row in world.rows if row["play"] == 0 and row["role"] == Role.DATA and row["dst"] == LATE]
    last = max(came, key=lambda row: row["arrived_end_ns"])
    same = ("play", "sub", "connection", "context", "tag")
    hidden = [
        row for row in world.rows
        if row["role"] != Role.OFFER and LATE in (row["src"], row["dst"])
        and all(row[name] == last[name] for name in same)
        and (row["src"] == last["src"]) == (row["role"] == Role.DATA)
    ]  # fmt: skip
    assert len(hidden) == 2
    world.rows = [row for row in world.rows if row not in hidden]
    entries, causes = concluded(world, world.transfers())
    assert entries.idle_ns[FIRST] == NEVER
    assert causes.excess_ns[SECOND] == NEVER
    assert causes.cause[SECOND] != COMPUTE


@pytest.mark.parametrize(("wire", "sooner"), [(Wire.OB1_MATCH, True), (Wire.ROCE_SEND, False)])
def test_a_root_has_left_when_its_socket_took_what_a_slow_link_still_carries(
    wire: Wire, *, sooner: bool
) -> None:
    """Two broadcasts; data of the first takes 40 ms to leave. Its root may call the second before."""
    world = World("eager")
    for enter in (0, 50 * MS):
        world.play(algorithm_of(Op.BROADCAST, "linear"), 4096, dict.fromkeys(range(3), enter))
    transfers = world.transfers()
    transfers["wire"] = wire
    exchanges = build_exchanges(transfers)
    first = exchanges["data_ns"] < exchanges["data_ns"].min() + 25 * MS
    exchanges["data_end_ns"][first] += 40 * MS
    entries = build_entries(exchanges, world.instances(exchanges))
    second = len(world.played[0].ranks)  # the root's row
    began = int(entries.enter_ns[0])
    assert entries.leave_ns[0] >= began + 40 * MS
    assert (entries.since_ns[second] < began + MS) == sooner
