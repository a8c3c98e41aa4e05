"""Why a rank was late: its own time, a peer's lateness handed on, or the network."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from collective_worlds import HOP, TIME_0, World, algorithm_of, captured, no_waits

from dpuflow.entries import Entries, Rule, build_entries, relate, weigh
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance
from dpuflow.schema.rows import NEVER, Op, Wire
from dpuflow.verdicts.causes import (
    BY_PEER,
    BY_PEERS,
    COMPUTE,
    HOST,
    NETWORK,
    NONE,
    RECEIVER,
    _against_usual,
    causes_of,
)
from dpuflow.verdicts.excess import charge

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
LINEAR = algorithm_of(Op.ALL_TO_ALL, "linear")


def caused(
    world: World,
    *,
    slow: int | None = None,
    op: Op | None = None,
    exchanges: np.ndarray | None = None,
    weigh_entries: bool = False,
    nodes: tuple[int, ...] = (),
) -> dict[tuple[int, int], tuple[int, int]]:
    """(collective, rank) -> (cause, excess in ns)."""
    exchanges = build_exchanges(world.transfers()) if exchanges is None else exchanges
    instances: list[Instance] = world.instances(exchanges)
    if op is not None:
        instances[0].op = op
    for instance in instances:
        instance.placement = replace(instance.placement, nodes=nodes)
    entries = build_entries(exchanges, instances)
    if weigh_entries:
        _, joined = captured(world.transfers(), 8)
        entries = weigh(entries, exchanges, joined, instances, np.zeros(len(instances), np.int64))
    relative = relate(entries)
    charges = charge(entries, relative, np.zeros(len(instances), np.int64))
    causes = causes_of(
        instances, entries, relative, charges, entries.endpoint == slow, no_waits(entries, instances)
    )
    keys = zip(entries.collective.tolist(), entries.endpoint.tolist(), strict=True)
    return dict(zip(keys, zip(causes.cause.tolist(), causes.excess_ns.tolist(), strict=True), strict=True))


def after(world: World, add: dict[int, int]) -> dict[int, int]:
    """Enters of the next collective: each rank's leave, 1 ms of work, and what ``add`` says."""
    leave = world.played[-1].leave_ns
    return {rank: at + MS + add.get(rank, 0) for rank, at in leave.items()}


def test_own_time() -> None:
    world = World("gloo")
    world.play(RING, 4096, dict.fromkeys(range(4), 0))
    world.play(RING, 4096, after(world, {2: 5 * MS}))
    found = caused(world)
    assert found[1, 2][0] == COMPUTE
    assert found[1, 2][1] == pytest.approx(5 * MS, abs=50_000)
    assert {found[1, r][0] for r in (0, 1, 3)} == {NONE}


def test_nothing_was_before_to_wait_for() -> None:
    world = World("gloo")
    world.play(RING, 4096, {0: 0, 1: 5 * MS, 2: 0})
    assert [cause for cause, _ in caused(world).values()] == [NONE, COMPUTE, NONE]
    assert {excess for _, excess in caused(world).values()} == {NEVER}


def test_held_up_by_a_lost_message() -> None:
    world = World("gloo", packets=4)
    world.lose_next = {(1, 2)}
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {}))
    found = caused(world)
    assert found[1, 2][0] == NETWORK
    assert abs(found[1, 2][1]) < MS


def test_held_up_by_a_slow_link() -> None:
    world = World("gloo", packets=50, slow={(1, 2): 200.0})
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {}))
    assert caused(world, slow=2)[1, 2][0] == NETWORK
    assert caused(world)[1, 2][0] == NONE  # for all that is known it was handed on


def test_a_lost_message_is_no_excuse_for_long_work() -> None:
    world = World("gloo", packets=4)
    world.lose_next = {(1, 2)}
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {2: 300 * MS}))
    assert caused(world)[1, 2][0] == COMPUTE


def test_lateness_handed_on_by_a_peer() -> None:
    """2 waits for 3 in a group of their own; then 0 and 1 wait for 2, which worked no longer."""
    world = World("gloo")
    world.play(RING, 4096, {0: 0, 1: 0}, context=1)
    world.play(RING, 4096, {2: 0, 3: 9 * MS}, context=2)
    leave = {**world.played[0].leave_ns, **world.played[1].leave_ns}
    world.play(RING, 4096, {r: leave[r] + MS for r in (0, 2)}, context=3)
    found = caused(world)
    assert found[2, 2] == (NONE, 0)
    assert found[1, 3][0] == COMPUTE


def test_pipelines_are_not_compared() -> None:
    world = World("gloo")
    world.play(algorithm_of(Op.BROADCAST, "linear"), 4096, dict.fromkeys(range(4), 0))
    world.play(RING, 4096, after(world, {1: 5 * MS}))
    assert caused(world)[1, 1][0] == COMPUTE
    assert caused(world, op=Op.SEND_RECV)[1, 1][0] != COMPUTE


# -- receivers and hosts ----------------------------------------------------------------------


def credited(world: World, granted_ns: dict[int, dict[int, int]]) -> np.ndarray:
    """Exchanges of an eager world as NCCL's: data paid for by credits that run ahead of it.

    ``granted_ns``: collective -> rank -> when it posts its first credit, from the world's zero.
    """
    exchanges = build_exchanges(world.transfers())
    played = np.array([row["play"] for row in world.rows])[world.in_order][exchanges["data"]]
    for row, number in zip(exchanges, played.tolist(), strict=True):
        at = TIME_0 + granted_ns[number][int(row["dst"])]
        row["grant_ns"], row["grant_arrived_ns"] = at, at + HOP
        row["wire"], row["grant"], row["op"] = Wire.ROCE_WRITE_IMM, row["data"], Op.UNKNOWN
    return exchanges


@pytest.mark.parametrize(("late_credit", "cause"), [(0, COMPUTE), (5 * MS, HOST)])
def test_a_host_that_is_late_with_its_credits_too(late_credit: int, cause: int) -> None:
    world, free = World("eager"), dict.fromkeys(range(4), 0)
    granted: dict[int, dict[int, int]] = {}
    for turn in range(6):
        late = {2: 5 * MS} if turn == 4 else {}
        granted[turn] = {r: free[r] + (late_credit if r == 2 and late else 0) for r in free}
        free = world.play(RING, 4096, {r: at + MS + late.get(r, 0) for r, at in free.items()}).leave_ns
    found = caused(world, exchanges=credited(world, granted))
    assert found[4, 2][0] == cause
    assert {found[3, r][0] for r in range(4)} == {NONE}


def test_a_rank_that_waits_for_credit_is_not_late_its_receiver_is() -> None:
    """Rank 1's first message of the last collective leaves as soon as rank 2 has granted it, 9 ms late."""
    world, free = World("eager"), dict.fromkeys(range(4), 0)
    granted: dict[int, dict[int, int]] = {}
    for turn in range(12):
        wait = 9 * MS if turn == 11 else 0
        granted[turn] = {r: at + wait * (r == 2) for r, at in free.items()}
        enter = {r: at + MS for r, at in free.items()}
        enter[1] += wait and wait - MS + HOP  # what its packets show
        free = world.play(RING, 4096, enter).leave_ns
    found = caused(world, exchanges=credited(world, granted), weigh_entries=True)
    assert found[11, 1][0] == RECEIVER
    assert COMPUTE not in {cause for cause, _ in found.values()}


def test_held_up_by_its_own_last_send() -> None:
    """All that rank 1 needs is there, but its own last data leaves 6 ms later: its receiver took it late."""
    world = World("eager")
    world.play(LINEAR, 4096, dict.fromkeys(range(4), 0))
    world.play(LINEAR, 4096, after(world, {1: 6 * MS}))
    exchanges = build_exchanges(world.transfers())
    first = np.flatnonzero(exchanges["src"] == 1)[:3]
    exchanges["data_end_ns"][first[-1]] += 6 * MS + HOP
    assert caused(world, exchanges=exchanges)[1, 1][0] == RECEIVER
    exchanges["retransmitted"][first[-1]] = 1
    exchanges["acked_ns"][first[-1]] = exchanges["data_end_ns"][first[-1]]
    assert caused(world, exchanges=exchanges)[1, 1][0] == NETWORK


@pytest.mark.parametrize(("share", "cause"), [(0.25, NONE), (4.0, COMPUTE)])
def test_what_is_mostly_inherited_is_not_its_own(share: float, cause: int) -> None:
    """Rank 2 left late, for its link is slow (though none is called so), and then works longer as well."""
    world = World("gloo", packets=50, slow={(1, 2): 200.0})
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    leave = world.played[-1].leave_ns
    inherited = leave[2] - leave[3]
    world.play(LINEAR, 4096, after(world, {2: round(share * inherited)}))
    assert caused(world)[1, 2] == (cause, pytest.approx(share * inherited, rel=0.1))


# -- nodes of several GPUs --------------------------------------------------------------------


def test_gpus_of_a_node_may_have_left_as_late_as_its_last() -> None:
    """Three nodes of three GPUs; the last data of each node's first GPU comes 20 ms after the others'.

    Rank 1 left when NVLink had handed it that, its peers 4, 5, 7 and 8 with their own last packets: all
    worked equally long, though rank 1 seems to have worked longer by either end.
    """
    world = World("eager")
    world.play(LINEAR, 4096, dict.fromkeys(range(9), 0))
    for add, cause in (({1: 20 * MS}, NONE), ({1: 60 * MS}, COMPUTE)):
        again = deepcopy(world)
        again.play(LINEAR, 4096, after(world, dict.fromkeys((0, 3, 6), 20 * MS) | add))
        found = caused(again, exchanges=nodes_of_three(again), nodes=tuple(r // 3 for r in range(9)))
        assert found[1, 1][0] == cause
        assert {found[1, rank][0] for rank in range(9) if rank != 1} == {NONE}


def nodes_of_three(world: World) -> np.ndarray:
    """Exchanges, with what came last of all to ranks 0, 3 and 6 in the first collective 20 ms later still."""
    exchanges = build_exchanges(world.transfers())
    first = np.array([row["play"] for row in world.rows])[world.in_order][exchanges["data"]] == 0
    for rank in (0, 3, 6):
        to = np.flatnonzero(first & (exchanges["dst"] == rank))
        last = to[np.argmax(exchanges["arrived_end_ns"][to])]
        exchanges["arrived_end_ns"][last] += 20 * MS
    return exchanges


def test_a_root_is_compared_with_what_its_peers_usually_need() -> None:
    """Who waits for a late root worked no longer than until that sent: as roots they show what is usual."""
    world, broadcast = World("rendezvous"), algorithm_of(Op.BROADCAST, "linear")
    enter = dict.fromkeys(range(4), 0)
    for turn in range(24):
        world.play(broadcast, 4096, enter, root=turn % 4)
        enter = after(world, {0: 5 * MS} if turn == 19 else {})
    found = caused(world)
    assert found[20, 0][1] == pytest.approx(5 * MS, abs=300_000)
    assert all(
        abs(excess) < 300_000
        for (turn, rank), (_, excess) in found.items()
        if 1 < turn < 20 and rank == turn % 4
    )


def test_what_only_unread_messages_excuse_is_told_apart() -> None:
    world = World("gloo")
    world.play(RING, 4096, dict.fromkeys(range(4), 0))
    late = after(world, {2: 5 * MS})
    world.play(RING, 4096, late)
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    charges = charge(entries, relative, np.zeros(len(instances), np.int64))
    row = np.flatnonzero((entries.collective == 1) & (entries.endpoint == 2))
    unread = np.full(len(entries.endpoint), NEVER)
    unread[row] = entries.enter_ns[row] - MS
    nobody = np.zeros(len(entries.endpoint), bool)
    causes = causes_of(
        instances,
        entries,
        relative,
        charges,
        nobody,
        no_waits(entries, instances)._replace(unread=unread),
    )
    assert causes.excess_ns[row] < MS // 2
    assert causes.unread_ns[row] == pytest.approx(5 * MS, abs=300_000)
    assert not causes.unread_ns[np.arange(len(unread)) != row].any()


def test_what_excuses_a_rank_accuses_no_other() -> None:
    """Two ranks work 5 ms each; the one may have waited for 4 of them for messages that nobody read."""
    world = World("rendezvous")
    world.play(RING, 1 << 16, dict.fromkeys(range(2), 0))
    for _ in range(3):
        world.play(RING, 1 << 16, after(world, dict.fromkeys(range(2), 5 * MS)))
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    unread = np.where(entries.endpoint == 0, entries.enter_ns - MS, NEVER)
    causes = causes_of(
        instances,
        entries,
        relative,
        charge(entries, relative, np.zeros(len(instances), np.int64)),
        np.zeros(len(entries.endpoint), bool),
        no_waits(entries, instances)._replace(unread=unread),
    )
    known = causes.excess_ns != NEVER
    assert known[2:].all()
    assert (causes.excess_ns[known & (entries.endpoint == 1)] < MS // 2).all()
    assert (causes.excess_ns[known & (entries.endpoint == 0)] < -3 * MS).all()


def test_work_is_compared_at_the_same_place_of_a_step() -> None:
    """Two ranks broadcast in turn, each after other work: neither is compared with the other."""
    turns = 12
    endpoint, collective = np.tile([0, 1], 2 * turns), np.repeat(np.arange(2 * turns), 2)
    root = collective % 2
    exact = endpoint == root
    own = np.where(root == 0, 12 * MS, 4 * MS)
    entries = cast(
        Entries,
        SimpleNamespace(
            endpoint=endpoint, collective=collective, exact=exact, told=np.ones(len(exact), bool),
            enter_ns=collective * 100 * MS + own, offsets=np.arange(2 * turns + 1) * 2,
            rule=np.where(exact, int(Rule.FREE_STEP), int(Rule.AFTER_INPUT)),
        ),
    )  # fmt: skip
    since, nobody = np.stack([collective * 100 * MS] * 2), np.zeros(len(exact), bool)
    alike = (np.zeros(len(exact), np.int64), root)
    excess, by = _against_usual(entries, since, np.zeros(len(exact), np.int64), nobody, alike)
    assert not by[exact].any()
    assert not excess[exact].any()


@pytest.mark.parametrize(("dated", "usual"), [((4, 5), BY_PEER), ((3, 4, 5), BY_PEERS)])
def test_a_single_peer_that_is_told_clears_nobody(dated: tuple[int, ...], usual: int) -> None:
    """Of six ranks: a chain shows its last two alone, and both of them may be late."""
    turns, ranks = 12, 6
    endpoint, collective = np.tile(np.arange(ranks), turns), np.repeat(np.arange(turns), ranks)
    exact = np.isin(endpoint, dated)
    entries = cast(
        Entries,
        SimpleNamespace(
            endpoint=endpoint, collective=collective, exact=exact, told=np.ones(len(exact), bool),
            enter_ns=collective * 100 * MS + 24 * MS, offsets=np.arange(turns + 1) * ranks,
            rule=np.where(exact, int(Rule.FREE_STEP), int(Rule.AFTER_INPUT)),
        ),
    )  # fmt: skip
    since, nobody = np.stack([collective * 100 * MS] * 2), np.zeros(len(exact), bool)
    alike = (np.zeros(len(exact), np.int64), np.zeros(len(exact), np.int64))
    excess, by = _against_usual(entries, since, np.zeros(len(exact), np.int64), nobody, alike)
    assert (by[endpoint == 5] == usual).all()
    assert (excess == 0).all()
