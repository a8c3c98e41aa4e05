"""First acts long after their input: which had not waited, and what that says of when their rank entered."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of, analysed, captured, run_job

from dpuflow.entries import AT_LEAST, AT_MOST, EXACT, Entries, Relative, Rule, build_entries, relate, weigh
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schedules.algorithms import Algorithm
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts import infer

MS = 1_000_000
HALF_MS = 500_000
BROADCAST = algorithm_of(Op.BROADCAST, "linear")
REDUCE = algorithm_of(Op.REDUCE, "linear")
CHAIN = algorithm_of(Op.BROADCAST, "chain")
DOUBLING = algorithm_of(Op.BARRIER, "recursive_doubling")


def told(world: World) -> tuple[Entries, Relative]:
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    _, joined = captured(world.transfers(), 16)
    group = np.zeros(len(instances), np.int64)
    entries = weigh(build_entries(exchanges, instances), exchanges, joined, instances, group)
    return entries, relate(entries)


def busy(seed: int, *, slow_share: float = 0.1) -> Callable[[], int]:
    """Reactions of a host with more to run than cores: most take 30 to 90 us, one in ten 1 to 6 ms."""
    rng = random.Random(seed)
    return lambda: rng.randrange(MS, 6 * MS) if rng.random() < slow_share else rng.randrange(30_000, 90_000)


def job(
    seed: int, algorithm: Algorithm, n: int, late: dict[int, int], turns: int = 60, style: str = "rendezvous"
) -> World:
    """Ranks compute 15 ms, some of them longer; ``late``: those that always do, and by how much."""
    world = World(style, react=busy(seed))
    rng = random.Random(1000 + seed)
    run_job(
        world, algorithm, 1 << 18, list(range(n)), turns, compute_ns=15 * MS,
        late=lambda rank, turn: late.get(rank, 0) + rng.randrange(0, 50_000),
    )  # fmt: skip
    return world


def violated(world: World, relative: Relative, entries: Entries) -> int:
    """Bounds that the truth lies beyond by more than half a millisecond."""
    wrong = 0
    for row, (number, rank) in enumerate(zip(entries.collective, entries.endpoint, strict=True)):
        off = int(relative.lateness_ns[row]) - world.played[number].lateness_ns(int(rank))
        wrong += relative.bound[row] == AT_LEAST and off > HALF_MS
        wrong += relative.bound[row] == AT_MOST and off < -HALF_MS
    return wrong


# -- by hand ----------------------------------------------------------------------------------


# -- worlds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_late_for_having_a_busy_host(seed: int) -> None:
    """Slow answers of milliseconds are no entries, and no lateness is claimed of anybody."""
    world = job(seed, BROADCAST, 4, {})
    entries, relative = told(world)
    waited = entries.endpoint > 0
    assert (entries.rule[waited] == Rule.LONG_AFTER).mean() < 0.02
    assert violated(world, relative, entries) <= 1


def test_a_host_that_always_answers_half_as_fast_has_waited() -> None:
    """Slower by nature, not late: its delays are those of the others, drawn out."""
    slower, quick = busy(1), busy(2)
    turn = {"dst": 0}
    world = World("rendezvous", react=lambda: 2 * slower() if turn["dst"] % 3 == 0 else quick())
    for number in range(60):
        turn["dst"] = number
        world.play(BROADCAST, 1 << 18, dict.fromkeys(range(4), number * 100 * MS))
    entries, relative = told(world)
    assert (entries.rule[entries.endpoint > 0] == Rule.LONG_AFTER).mean() < 0.03
    assert violated(world, relative, entries) <= 2


def test_the_root_of_a_reduce_is_dated_by_the_offer_that_it_answers() -> None:
    """Another offer had only just come; that the first one had lain there for long tells that it was late."""
    rng = random.Random(8)
    world = World("rendezvous", react=lambda: rng.randrange(30_000, 150_000))
    for number in range(12):
        at = number * 100 * MS
        world.play(REDUCE, 1 << 18, {0: at + 8 * MS, 1: at, 2: at + 8 * MS - 100_000, 3: at})
    entries, relative = told(world)
    root = entries.endpoint == 0
    assert (entries.rule[root][1:] == Rule.LONG_AFTER).all()  # of the first, connections are opened
    assert (relative.bound[root][1:] == EXACT).all()
    assert np.abs(relative.lateness_ns[root][1:] - 8 * MS).max() < 200_000


def test_of_a_message_in_segments_the_first_one_tells_the_entry() -> None:
    """A chain that passes on segments: the late rank sends when the last ones had only just come."""
    world = World("eager", react=lambda: 5_000)
    for number in range(12):
        at = number * 100 * MS
        world.play(CHAIN, 1 << 18, {0: at, 1: at, 2: at + 8 * MS, 3: at}, cuts=4)
    exchanges = build_exchanges(world.transfers())
    number = np.array([row["play"] for row in world.rows])[world.in_order][exchanges["data"]]
    # The third and fourth segment reach rank 2 shortly before it is there.
    for play in range(12):
        rows = np.flatnonzero((number == play) & (exchanges["src"] == 1) & (exchanges["dst"] == 2))
        for back, row in enumerate(rows[::-1][:2]):
            exchanges["arrived_end_ns"][row] = TIME_0 + play * 100 * MS + 8 * MS - 50_000 * (back + 1)
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    late = entries.endpoint == 2
    assert (entries.rule[late] == Rule.AFTER_INPUT).all()
    assert (entries.unmoved_ns[late] > 7 * MS).all()  # since the first segment


def test_who_finds_its_input_there_entered_a_reaction_before_it_sends() -> None:
    """A lower bound that took the first message for the entry would claim nearly a millisecond too much."""
    rng, calls = random.Random(4), iter(range(10**6))
    # Of a barrier's 18 hand-overs ten are from a call to a first message; the others are from an input on.
    world = World(
        "eager",
        react=lambda: 5_000 if next(calls) % 18 in {*range(8), 10, 11} else rng.randrange(MS // 2, MS),
    )
    run_job(
        world, DOUBLING, 0, list(range(6)), 40, compute_ns=15 * MS,
        late=lambda rank, turn: 12 * MS * (rank == 1),
    )  # fmt: skip
    entries, relative = told(world)
    late = np.flatnonzero((entries.endpoint == 1) & (entries.rule == Rule.LONG_AFTER))
    assert len(late) >= 38
    acted = entries.enter_ns[late] - TIME_0
    true = np.array([world.played[entries.collective[row]].enter_ns[1] for row in late])
    assert (acted - true > HALF_MS).mean() > 0.5  # as far off as a bound may not be
    assert (relative.bound[late] == AT_LEAST).all()
    assert (relative.lateness_ns[late] > 10 * MS).all()
    assert violated(world, relative, entries) == 0


def test_who_only_receives_entered_after_it_had_left() -> None:
    """A leaf sends nothing; but where it left the collective before when others were in this one already,
    it is late by what lies between, and says so."""
    slow = World("eager", react=lambda: 5_000)
    for number in range(6):
        at = number * 20 * MS
        slow.play(BROADCAST, 4096, {0: at, 1: at + 30 * MS, 2: at + MS})
    exchanges = build_exchanges(slow.transfers())
    instances = slow.instances(exchanges)
    # Rank 1 reads late: what it is sent has arrived when it is there, as the window lets nothing in before.
    to = exchanges["dst"] == 1
    exchanges["arrived_end_ns"][to] += 30 * MS
    _, joined = captured(slow.transfers(), 3)
    inferred = infer(joined, exchanges, instances, build_entries(exchanges, instances))
    leaf = inferred.entries.endpoint == 1
    assert (inferred.causes.excess_ns[leaf] == NEVER).all()  # how long it worked is not known
    result = analysed(slow.transfers(), exchanges, instances, 3)
    for number, collective in enumerate(result.collectives[1:], 1):
        said = next(rank for rank in collective.ranks if rank.endpoint == 1)
        assert said.bound == "at_least"
        assert "no earlier than" in said.why
        assert said.lateness_ns is not None
        assert 9 * MS < said.lateness_ns <= slow.played[number].lateness_ns(1)
    verdicts = {each.endpoint: each.verdict for each in result.lateness}
    assert verdicts[1] not in ("late", "intermittent")  # when it left is the group's doing as well


def test_who_is_late_now_and_then_is_not_late_as_a_rule() -> None:
    """Answers that came in time count as well, though they are bounds: else only late ones were known."""
    rng = random.Random(6)
    turns = {3, 4, 11, 12, 13, 24, 27, 29, 38, 44, 45, 46, 55, 57, 58}
    world = World("rendezvous", react=lambda: rng.randrange(30_000, 90_000))
    run_job(
        world, BROADCAST, 1 << 18, [0, 1, 2, 3], 180, compute_ns=15 * MS,
        late=lambda rank, turn: 8 * MS * (rank == 2 and turn % 60 in turns) + rng.randrange(0, 300_000),
    )  # fmt: skip
    exchanges = build_exchanges(world.transfers())
    result = analysed(world.transfers(), exchanges, world.instances(exchanges), 4)
    said = {each.endpoint: (each.verdict, each.steadiness) for each in result.lateness}
    assert said[2][1] != "persistent"
    claimed = [r for c in result.collectives for r in c.ranks if r.endpoint == 2 and r.bound == "at_least"]
    assert len(claimed) >= 40


def test_who_is_scheduled_in_slices_was_not_late_each_time() -> None:
    """The root of a barrier goes on some slices of a core after the last one came; how fast hosts send says
    nothing of that, and its work scatters more than this."""
    rng, calls = random.Random(2), iter(range(10**6))
    slices = [30_000, 30_000, 1_400_000, 1_400_000, 1_400_000, 2_800_000, 2_800_000, 4_000_000]
    # Of a barrier's 13 hand-overs the tenth is the root's, from what it has received to what it sends.
    world = World("eager", react=lambda: rng.choice(slices) if next(calls) % 13 == 9 else 5_000)
    run_job(
        world, algorithm_of(Op.BARRIER, "linear"), 0, list(range(5)), 60, compute_ns=15 * MS,
        late=lambda rank, turn: rng.randrange(0, 12 * MS) * (rank > 0),
    )  # fmt: skip
    entries, relative = told(world)
    root = entries.endpoint == 0
    assert not np.isin(relative.bound[root], (EXACT, AT_LEAST)).any()
    assert violated(world, relative, entries) == 0
