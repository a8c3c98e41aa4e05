"""What else an act may have waited for: queues, credits, connections; and how far off an entry may be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from collective_worlds import HOP, REACT, World, algorithm_of, captured, run_job

from dpuflow.entries import AT_LEAST, AT_MOST, EXACT, Entries, Relative, Rule, build_entries, relate, weigh
from dpuflow.entries.places import build_needs, started_ns
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import dependencies
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire
from dpuflow.schema.tables import Clock, Joined

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
DOUBLING = algorithm_of(Op.ALL_REDUCE, "recursive_doubling")


def told(
    world: World, exchanges: np.ndarray | None = None, joined: Joined | None = None
) -> tuple[Entries, Relative]:
    if joined is None:
        _, joined = captured(world.transfers(), 16)
    exchanges = build_exchanges(joined.transfers) if exchanges is None else exchanges
    instances = world.instances(exchanges)
    groups: dict[frozenset[int], int] = {}
    group = np.array([groups.setdefault(frozenset(i.order), len(groups)) for i in instances])
    entries = weigh(build_entries(exchanges, instances), exchanges, joined, instances, group)
    return entries, relate(entries)


def rules(entries: Entries, collective: int) -> set[Rule]:
    return {Rule(rule) for rule in entries.rule[entries.collective == collective]}


# -- queues -----------------------------------------------------------------------------------


def buckets(workers: int, count: int, *, apart: int = 10_000, norm: bool = False) -> World:
    """DDP: each step hands over ``count`` buckets, ``apart`` ns; ``workers`` of them run side by side.

    ``norm``: once all are done each rank calls one more at once, as a gradient's norm is asked for.
    """
    world = World("gloo")
    ranks = [0, 1, 2, 3]
    free = MS
    for step in range(5):
        called = {r: free + 5 * MS + r * 20_000 + 3 * MS * (r == step % 4) for r in ranks}
        busy = [dict(called) for _ in range(workers)]
        for bucket in range(count):
            lane = min(busy, key=lambda each: max(each.values()))
            start = {r: max(called[r] + bucket * apart, lane[r]) for r in ranks}
            lane.update(world.play(RING, 400_000, start).leave_ns)
        if norm:
            done = {r: max(lane[r] for lane in busy) + 2_000 for r in ranks}
            busy = [dict(world.play(RING, 4_000, done).leave_ns)]
        free = max(max(lane.values()) for lane in busy)
    return world


def test_who_had_waited_for_all_is_as_far_apart_as_it_came_from_there() -> None:
    """Rank by rank late by 3 ms at the buckets, together at what is called once these are done."""
    entries, relative = told(buckets(2, 4, apart=7_000, norm=True))
    least = relative.bound == AT_LEAST
    norm = entries.collective % 5 == 4
    assert rules(entries, 4) == {Rule.QUEUED}
    assert relative.lateness_ns[norm & least].max(initial=0) < MS
    assert relative.lateness_ns[~norm & least].max() > 2 * MS


def test_buckets_that_queue_are_bounds() -> None:
    entries, relative = told(buckets(2, 4))
    for number in range(20):
        rows = entries.collective == number
        queued = number % 4 >= 2
        assert rules(entries, number) == ({Rule.QUEUED} if queued else {Rule.READY}), number
        if not queued:
            assert set(relative.bound[rows]) == {EXACT}
            continue
        # Called at once with the first two, which the bounds must allow for.
        true = np.array([3 * MS * (r == number // 4 % 4) + r * 20_000 for r in range(4)])
        true -= true.min()
        said, least, late = relative.lateness_ns[rows], relative.bound[rows] == AT_LEAST, int(true.argmax())
        assert set(relative.bound[rows]) <= {AT_LEAST, AT_MOST}
        assert (said[least] <= true[least]).all()
        assert (said[~least] >= true[~least]).all()
        assert least[late]
        assert said[late] > 2 * MS  # as at the calls before, which showed
        assert (entries.after[rows] != NONE32).all()
        assert (relative.enter_ns[rows][least] < entries.enter_ns[rows][least]).all()
        assert (entries.since_act[rows] != NONE32).all()


def test_a_bucket_that_waited_for_a_busy_host_is_no_call() -> None:
    """A worker that starts what had queued later than usual: the call was long before, and dates nothing."""
    world = World("gloo")
    ranks = [0, 1, 2, 3]
    free = MS
    for step in range(8):
        called = {r: free + 5 * MS + r * 20_000 for r in ranks}
        busy = [dict(called) for _ in range(2)]
        for bucket in range(5):
            lane = min(busy, key=lambda each: max(each.values()))
            start = {r: max(called[r] + bucket * 10_000, lane[r]) for r in ranks}
            # Rank 2's worker is put off now and then, longer than by usual hand-overs, not by slow ones.
            start[2] += 3 * REACT // 2 if bucket == 3 and step % 4 == 1 else 0
            lane.update(world.play(RING, 400_000, start).leave_ns)
        free = max(max(lane.values()) for lane in busy)
    entries, relative = told(world)
    for number in range(40):
        rows = entries.collective == number
        if number % 5 >= 2:
            assert rules(entries, number) == {Rule.QUEUED}, number
            least = relative.bound[rows] == AT_LEAST
            true = np.arange(4) * 20_000
            assert (relative.lateness_ns[rows][least] <= true[least]).all()


def test_a_blocking_caller_cannot_queue() -> None:
    """Decode steps: dozens of collectives back to back, none of which ever overlaps another."""
    world = World("gloo")
    free = dict.fromkeys(range(4), MS)
    for _ in range(40):
        free = world.play(RING, 16_384, {r: at + 2_000 for r, at in free.items()}).leave_ns
    entries, relative = told(world)
    assert Rule.QUEUED not in {Rule(rule) for rule in entries.rule}
    assert (relative.bound == EXACT).all()


def test_groups_that_overlap_each_other_do_not_queue() -> None:
    """A rank is in two groups at a time, as with data and tensor parallelism; neither has two at once."""
    world = World("gloo")
    free = dict.fromkeys(range(4), MS)
    for _ in range(8):
        world.play(RING, 400_000, {r: free[r] + MS for r in (0, 1, 2, 3)}, context=1)
        left = world.play(RING, 400_000, {r: free[r] + MS + 20_000 for r in (0, 1)}, context=2).leave_ns
        free = {r: max(at, left.get(r, 0)) for r, at in world.played[-2].leave_ns.items()}
    entries, _ = told(world)
    assert Rule.QUEUED not in {Rule(rule) for rule in entries.rule}


# -- reactions --------------------------------------------------------------------------------


def late_always(style: str, algorithm: Algorithm, n: int, rank: int, turns: int = 20) -> World:
    """A job in which one rank is 5 ms later than the others, every time."""
    world = World(style, react=lambda: 5_000)
    run_job(world, algorithm, 4096, list(range(n)), turns, late={rank: 5 * MS})
    return world


@pytest.mark.parametrize(
    ("style", "op", "name", "n", "rank"),
    [
        ("rendezvous", Op.BROADCAST, "linear", 4, 2),  # answers an offer, late
        ("rendezvous", Op.REDUCE, "linear", 4, 0),
    ],
)
def test_who_is_always_late_shows_no_reaction(style: str, op: Op, name: str, n: int, rank: int) -> None:
    """Nobody was ever seen to wait for an input: how fast hosts go on tells what is long after one."""
    world = late_always(style, algorithm_of(op, name), n, rank)
    entries, relative = told(world)
    assert not len(entries.reactions.waited[0])
    assert len(entries.reactions.granted_data_ns) >= 8
    late = entries.endpoint == rank
    assert {Rule(rule) for rule in entries.rule[late][2:]} == {Rule.LONG_AFTER}
    said = relative.lateness_ns[late][2:]
    assert set(relative.bound[late][2:]) <= {EXACT, AT_LEAST}
    assert ((said > 4 * MS) & (said < 5.2 * MS)).all()
    others = np.isin(relative.bound, (EXACT, AT_LEAST)) & ~late
    assert (relative.lateness_ns[others] < MS).all()


# -- credits, connections, repetitions --------------------------------------------------------


def credit_world(ages: list[int], late: dict[int, int] | None = None) -> tuple[World, np.ndarray]:
    """Rank 0's credit of each ring comes ``ages`` ns before its first message; the others' 5 ms.

    It sends that much later in the turns ``late``.
    """
    world = World("eager")
    job_late = late or {}
    run_job(
        world, RING, 4096, [0, 1, 2, 3], len(ages),
        late=lambda rank, turn: job_late.get(turn, 0) if rank == 0 else 0,
    )  # fmt: skip
    exchanges = build_exchanges(world.transfers())
    played = np.array([row["play"] for row in world.rows])[world.in_order][exchanges["data"]]
    first = {}
    for place in range(len(exchanges)):
        first.setdefault((int(played[place]), int(exchanges["src"][place])), place)
    for (number, rank), place in first.items():
        at = exchanges["data_ns"][place] - (ages[number] if rank == 0 else 5 * MS)
        exchanges["grant_arrived_ns"][place], exchanges["grant_ns"][place] = at, at - HOP
        exchanges["grant"][place] = exchanges["data"][place]
    exchanges["wire"], exchanges["op"] = Wire.ROCE_WRITE_IMM, Op.UNKNOWN  # NCCL names nothing
    return world, exchanges


def test_a_credit_that_came_late_for_once() -> None:
    """Who sends 3 ms later than ever, just after its credit, may have waited for it."""
    ages = [5 * MS] * 20
    ages[12] = 4_000
    world, exchanges = credit_world(ages, {12: 3 * MS})
    entries, relative = told(world, exchanges)
    late = (entries.rule == Rule.CREDIT).nonzero()[0]
    assert [(int(entries.collective[row]), int(entries.endpoint[row])) for row in late] == [(12, 0)]
    assert relative.bound[late].tolist() == [AT_MOST]
    # It needs 5 ms of work, so nobody else can have been late by more than if it entered then.
    assert 3 * MS <= relative.lateness_ns[late[0]] < 3.1 * MS
    assert (relative.lateness_ns[entries.collective == 12][1:] < 0.1 * MS).all()


def test_a_credit_that_came_while_the_rank_must_have_worked() -> None:
    """Just before its first message, but had it waited it would have worked less than anyone ever did."""
    ages = [5 * MS] * 20
    ages[9] = 4_000
    world, exchanges = credit_world(ages)
    entries, _ = told(world, exchanges)
    assert entries.exact.all()


def test_what_opens_a_connection_waits_for_it() -> None:
    world = World("eager")
    run_job(world, RING, 4096, [0, 1, 2], 6)
    transfers = world.transfers()
    # libfabric: each connection's first message is part of its set-up, just before the first data.
    transfers["wire"] = Wire.ROCE_SEND
    _, joined = captured(transfers, 16)
    entries, relative = told(world, joined=joined)
    assert rules(entries, 0) == {Rule.CONNECTING}
    assert (relative.bound[entries.collective > 0] == EXACT).all()


def test_what_was_sent_again_and_not_seen_at_its_sender() -> None:
    world = World("eager")
    run_job(world, RING, 4096, [0, 1, 2], 6)
    transfers = world.transfers()
    entries, _ = told(world)
    act = int(entries.act[(entries.collective == 3) & (entries.endpoint == 1)][0])
    for seen, rule in ((3, Rule.FREE_STEP), (2, Rule.REPEATED)):
        transfers["retransmitted"][act], transfers["seen"][act] = 1, seen
        _, joined = captured(transfers, 16)
        entries, _ = told(world, joined=joined)
        assert entries.rule[(entries.collective == 3) & (entries.endpoint == 1)].tolist() == [rule]


def test_messages_that_contradict_their_collective_say_nothing() -> None:
    """Put together wrongly: what should answer an input came long before it."""
    world = World("eager")
    run_job(world, DOUBLING, 4096, [0, 1, 2, 3], 6)
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    for name in ("data_ns", "data_end_ns", "arrived_ns", "arrived_end_ns"):
        exchanges[name][instances[3].rows[4:]] -= 2 * MS
    entries, relative = told(world, exchanges)
    assert rules(entries, 3) == {Rule.CONTRADICTED}
    assert (relative.lateness_ns[entries.collective == 3] == NEVER).all()
    assert (relative.bound[entries.collective != 3] == EXACT).all()


# -- dependencies -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.op.token}-{a.name}")
@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_every_send_comes_after_the_inputs_it_needs(algorithm, n: int) -> None:  # type: ignore[no-untyped-def]
    if not algorithm.fits(n):
        return
    world = World("eager")
    cuts = 3 if algorithm.cuts else 1
    for turn in range(3):
        root = turn % n if algorithm.rooted else 0
        order = [(k + turn) % n for k in range(n)]  # ranks in other positions each time
        world.play(algorithm, 9216 * n, dict.fromkeys(order, 20 * turn * MS), root=root, cuts=cuts)
    exchanges = build_exchanges(world.transfers())
    needs = build_needs(exchanges, world.instances(exchanges))
    assert needs.mapped.all()
    per_turn = sum(len(dependencies(algorithm, n, t % n if algorithm.rooted else 0)) for t in range(3))
    assert len(needs.send) == cuts * per_turn
    picked = exchanges[needs.rows]
    assert (picked["src"][needs.send] == picked["dst"][needs.input]).all()
    assert (needs.collective[needs.send] == needs.collective[needs.input]).all()
    assert (started_ns(picked)[needs.send] >= picked["arrived_end_ns"][needs.input]).all()
    assert not needs.early_ns.any()


def test_a_rank_that_becomes_slow_in_mid_operation() -> None:
    """It entered in time, then sat on an input for 2 ms: local lateness, and nobody's entry is any later."""
    delays = iter([0] * 400 + [2 * MS])
    world = World("eager", react=lambda: 5_000 + next(delays, 0))
    run_job(world, RING, 4096, [0, 1, 2, 3], 20)
    entries, relative = told(world)
    assert (relative.bound == EXACT).all()
    assert relative.lateness_ns.max() < 100_000
    (row,) = np.flatnonzero(entries.stalled_ns)
    assert entries.stalled_ns[row] == pytest.approx(2 * MS, rel=0.02)
    transfers = world.transfers()
    transfers["retransmitted"][int(entries.last[row])] = 1
    _, joined = captured(transfers, 16)
    assert not told(world, joined=joined)[0].stalled_ns.any()  # the network may have kept it


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "held"), [("gloo", 0.95), ("eager", 0.8), ("rendezvous", 0.8)])
@pytest.mark.parametrize("seed", range(3))
def test_errors_hold_as_often_as_they_say(style: str, held: float, seed: int) -> None:
    """Hand-overs scatter at random, ranks are late at random; the intervals hold what was true.

    Here entries of Open MPI are handed over as slowly as ranks react; real ones do so more quickly.
    """
    choices = random.Random(seed)
    world = World(style, react=lambda: round(20_000 + choices.gammavariate(2.0, 15_000)))
    run_job(world, RING, 65_536, list(range(5)), 60, late=lambda r, t: choices.choice([0, 0, 4 * MS]))
    _, relative = told(world)
    true = np.array([p.enter_ns[r] - min(p.enter_ns.values()) for p in world.played for r in p.ranks])
    exact = relative.bound == EXACT
    assert exact.mean() > 0.9
    off, error = np.abs(relative.lateness_ns - true)[exact], relative.error_ns[exact]
    assert (error != NEVER).all()
    assert (off <= error).mean() >= held
    assert np.median(error) <= 15 * np.percentile(off, 95)


def test_clocks_that_err_add_their_error() -> None:
    world = World("eager")
    run_job(world, RING, 4096, [0, 1], 10)
    transfers = world.transfers()
    tables, joined = captured(transfers, 2)
    _, one_clock = told(world)
    transfers["capture"] = transfers["src"]
    joined.clocks.append(Clock(1, False, "estimated", 0, 0, 7_000))
    _, two_clocks = told(world, joined=joined)
    apart = two_clocks.error_ns - one_clock.error_ns
    assert set(apart.tolist()) == {0, 7_000}
    assert (apart[two_clocks.lateness_ns > 0] == 7_000).all()
    assert len(tables) == 1


def test_nothing_to_tell_an_error_from() -> None:
    world = World("eager")
    world.play(RING, 4096, {0: 0, 1: 0})
    exchanges = build_exchanges(world.transfers())
    exchanges = exchanges[:0]
    _, joined = captured(world.transfers(), 2)
    entries = weigh(build_entries(exchanges, []), exchanges, joined, [], np.zeros(0, np.int64))
    assert len(relate(entries).error_ns) == 0
