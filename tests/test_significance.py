"""Places among peers and what chance does: lateness below the noise of single units."""

from __future__ import annotations

import random

import numpy as np
import pytest
from collective_worlds import World, run_job
from test_judgement import MS, RING, stages

from dpuflow.entries import Tail
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.chance import incidents_of, standing_of
from dpuflow.verdicts.judgement import Judgement


def naive_place(collective: np.ndarray, excess: np.ndarray, row: int) -> tuple[float, int]:
    """The same, row by row: half a place for each equal one."""
    if excess[row] == NEVER:
        return 0.0, 0
    like = (collective == collective[row]) & (excess != NEVER)
    below, equal = (excess[like] < excess[row]).sum(), (excess[like] == excess[row]).sum() - 1
    return (below + equal / 2) / max(like.sum() - 1, 1) - 0.5, int(like.sum())


def test_places_are_those_counted_one_by_one() -> None:
    rng = np.random.default_rng(1)
    collective, excess = rng.integers(0, 12, 60), rng.integers(-4, 5, 60)
    excess[rng.random(60) < 0.2] = NEVER
    standing = standing_of(collective, excess)
    for row in range(60):
        assert (standing.place[row], standing.ranks[row]) == pytest.approx(
            naive_place(collective, excess, row)
        )
    assert len(standing_of(collective[:0], excess[:0]).place) == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_are_alike_stand_high_no_more_often_than_said(ranks: int) -> None:
    """A heavy tail on one side, as hosts that are held up now and then make it."""
    rng = np.random.default_rng(ranks)
    of = np.repeat(np.arange(22), ranks)
    found = []
    for _ in range(1000):
        excess = np.round(rng.pareto(1.2, 22 * ranks) * MS).astype(np.int64)
        found.append(standing_of(of, excess).chance(np.arange(0, 22 * ranks, ranks)))
    for level in (0.2, 0.05, 0.01):
        assert np.mean(np.array(found) <= level) <= level + 3 * np.sqrt(level / 1000)
    assert np.mean(np.array(found) <= 0.2) > 0.1


def dealt(seed: int, ranks: int, often: float = 0.0) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Sixty units of ranks that are late in one of eight by a heavy tail; rank 0 by 5 ms more ``often``."""
    rng = np.random.default_rng(seed)
    amounts = {rank: (rng.random(60) < 1 / 8) * rng.pareto(1.2, 60) * MS for rank in range(ranks)}
    amounts[0] = np.where(rng.random(60) < often, 5 * MS, amounts[0])
    return {rank: np.arange(60) for rank in range(ranks)}, {
        rank: each.astype(np.int64) for rank, each in amounts.items()
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_incidents_that_chance_deals_out_accuse_one_job_in_a_hundred_at_most(ranks: int) -> None:
    accused = 0
    for seed in range(300):
        units, amounts = dealt(seed, ranks)
        found = incidents_of(units, amounts, None)
        accused += any(each.sure_ns.any() for each in found.values())
        assert all(
            (found[rank].open_ns == amounts[rank]).all() for rank in units
        )  # nobody is cleared of them
    assert accused <= 3 + 2 * 3**0.5


def test_incidents_of_one_rank_are_told_from_chance() -> None:
    for seed in range(50):
        found = incidents_of(*dealt(seed, 5, often=0.35), None)
        assert found[0].sure_ns.any()
        assert not any(found[rank].sure_ns.any() for rank in range(1, 5))


def test_stalls_that_add_up_in_steps_of_many_collectives_are_no_incidents() -> None:
    """Three in a hundred hand-overs stall by 5 ms; a rank of another group has steps of one collective."""

    def stalled(rng: np.random.Generator, times: int) -> np.ndarray:
        stalls = (rng.random(times) < 0.06) * rng.exponential(5 * MS, times)
        return (stalls * (stalls > 3 * MS)).astype(np.int64)

    accused = 0
    for seed in range(50):
        rng = np.random.default_rng(seed)
        seen = Tail((rng.random(2_000) < 0.03) * rng.exponential(5 * MS, 2_000))
        units = {rank: np.repeat(np.arange(12), 36) for rank in range(3)} | {3: 100 + np.arange(48)}
        amounts = {rank: stalled(rng, len(each)) for rank, each in units.items()}
        accused += any(each.sure_ns.any() for each in incidents_of(units, amounts, seen).values())
        late = amounts | {0: np.where(np.arange(432) % 12 == 0, 25 * MS, amounts[0])}
        assert incidents_of(units, late, seen)[0].sure_ns.any()
    assert accused <= 2


def test_a_handful_of_hand_overs_explains_no_habit_away() -> None:
    """One long hand-over of twenty may be one in a thousand: it clears nobody of as long incidents."""
    units = {rank: np.arange(24) for rank in range(4)}
    amounts = {rank: np.where(np.arange(24) % 12 == rank, 12 * MS, 0) for rank in range(4)}
    few = Tail(np.r_[np.zeros(19), 15 * MS])
    many = Tail(np.tile(few.ordered, 50))
    assert all(each.open_ns.any() for each in incidents_of(units, amounts, few).values())
    assert not any(each.open_ns.any() for each in incidents_of(units, amounts, many).values())
    assert not any(each.sure_ns.any() for each in incidents_of(units, amounts, few).values())


def test_who_works_longest_every_time_stands_where_chance_puts_nobody() -> None:
    of, excess = np.repeat(np.arange(5), 4), np.tile([9, 1, 2, 3], 5)
    standing = standing_of(of, excess)
    rows = np.arange(0, 20, 4)
    assert standing.chance(rows) < 0.005
    assert standing.chance(rows + 1) > 0.99
    assert standing_of(of[:1], excess[:1]).chance(np.array([0])) == 1


def busy(late: dict[int, int], seed: int, times: int = 22, ranks: int = 8) -> list[Judgement]:
    """A job on hosts that are held up by milliseconds, exponentially, besides what ``late`` adds."""
    draw = random.Random(seed)
    world = World("eager")

    def longer(rank: int, turn: int) -> int:
        return round(draw.expovariate(1 / 3)) * MS + late.get(rank, 0)

    run_job(world, RING, 4096, list(range(ranks)), times, late=longer)
    return stages(world)[3]


def test_busy_hosts_that_are_alike_are_not_called_persistently_late() -> None:
    for seed in range(30):
        assert "persistent" not in [j.steadiness for j in busy({}, seed)], f"seed {seed}"


def test_what_is_less_than_the_noise_is_told_by_how_often_it_comes() -> None:
    found = [[(j.verdict, j.steadiness) for j in busy({5: 4 * MS}, seed)] for seed in range(10)]
    told = [each[5] == ("late", "persistent") for each in found]
    assert sum(told) >= 8
    assert not any(("late", "persistent") in each[:5] + each[6:] for each in found)


def test_incidents_in_turn_count_without_hand_overs_where_they_are_critical_and_gpus_send() -> None:
    """Each of four ranks late in every fourth unit, which no place among peers tells."""
    units = {rank: np.arange(24) for rank in range(4)}
    amounts = {rank: np.where(np.arange(24) % 4 == rank, MS, 0).astype(np.int64) for rank in range(4)}
    for span_ns, counts in ((0, False), (239 * MS, True), (241 * MS, False)):
        found = incidents_of(units, amounts, None, span_ns=span_ns)
        assert all(each.sure_ns.any() == counts for each in found.values())
