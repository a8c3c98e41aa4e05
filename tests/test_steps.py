"""The job's steps: told from what its sequence of collectives repeats, or from its pauses, or not at all."""

from __future__ import annotations

import random
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, run_job

from dpuflow.entries import build_entries
from dpuflow.exchanges.build import build_exchanges
from dpuflow.outline import list_steps
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.parallelism import Tokens, _largest_batch
from dpuflow.verdicts.steps import (
    Steps,
    _between_changes,
    _covered,
    _drawn,
    _pattern,
    _recurring,
    find_steps,
    jobs,
    lengths,
)

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
BARRIER = algorithm_of(Op.BARRIER, "dissemination")


def steps_of(world: World) -> tuple[list[Steps], np.ndarray]:
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    groups: dict[tuple[int, ...], int] = {}
    of = np.array([groups.setdefault(tuple(sorted(i.order)), len(groups)) for i in instances], np.int64)
    return find_steps(instances, build_entries(exchanges, instances), of)


def play(sizes: list[int], times: int, work: list[int] | None = None, seed: int = 0) -> World:
    """``times`` steps of all_reduces of these sizes; ``work`` before each, in ns."""
    world, noise = World("gloo"), random.Random(seed)
    free = dict.fromkeys(range(3), MS)
    for _ in range(times):
        for place, nbytes in enumerate(sizes):
            pause = work[place] if work else 2 * MS
            enter = {r: at + pause + noise.randrange(200_000) for r, at in free.items()}
            free = world.play(RING, nbytes, enter).leave_ns
    return world


@pytest.mark.parametrize("sizes", [[4096], [4096, 8192], [4096] * 4 + [65536], [64, 64, 4096, 64, 4096]])
def test_a_repeated_sequence_is_a_step(sizes: list[int]) -> None:
    (found,), step = steps_of(play(sizes, 10))
    assert (found.endpoints, found.period, found.by_pause) == ([0, 1, 2], len(sizes), False)
    assert len(found.ends) >= 9
    assert np.bincount(step[step >= 0]).tolist() == [3 * len(sizes)] * len(found.ends)


def test_a_step_begins_after_the_longest_pause() -> None:
    (found,), step = steps_of(play([64, 128, 256], 8, [MS, 9 * MS, MS]))
    assert step[:3].tolist() == [-1] * 3  # the first collective belongs to a step that began before
    assert found.period == 3


def test_equal_collectives_are_told_apart_by_the_pause_between_tokens() -> None:
    (found,), step = steps_of(play([4096] * 8, 12, [3 * MS] + [MS] * 7))
    assert (found.period, found.by_pause, len(found.ends)) == (8, True, 12)
    assert step[:24].tolist() == [0] * 24


def test_equal_collectives_without_a_pause_are_steps_of_one() -> None:
    (found,), _ = steps_of(play([4096] * 8, 12))
    assert (found.period, found.by_pause) == (1, False)


def test_pauses_too_weak_to_tell_are_not_told_at_twice_their_distance() -> None:
    """At each 24th place pauses are longer by some of their scatter; by chance each 48th stands out."""
    draws = np.random.default_rng(3)
    found = set()
    for _ in range(200):
        pause = draws.normal(50, 0.5, 24 * 30)
        pause[::24] += np.abs(draws.normal(1.2, 0.5, 30))
        found.add(_recurring(pause))
    assert found <= {None, (24, 0)}


def test_equal_collectives_are_told_apart_by_the_batch_that_changes_from_step_to_step() -> None:
    draw = random.Random(4)
    batches = [draw.choice((4096, 8192, 12288)) for _ in range(30)]
    (found,), step = steps_of(play([size for size in batches for _ in range(8)], 1))
    assert (found.period, found.by_pause) == (8, True)
    assert np.unique(np.bincount(step[step >= 0])).tolist() == [3 * 8]


def test_sizes_that_change_anywhere_part_no_steps() -> None:
    changes = np.random.default_rng(2)
    found = [_between_changes(np.cumsum(changes.random(240) < 0.1)) for _ in range(200)]
    assert found.count(None) >= 199  # one in a thousand
    assert _between_changes(np.repeat(changes.permutation(60), 8)) == (8, 0)


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ([8, 8, 16, 24, 8], 24),  # a batch that grows
        ([8, 8, 8, 8 * 64, 16], 16),  # a prompt
        ([8, 8, 64, 80, 24, 16], 24),  # prompts of two lengths
        ([16, 16, 16], 16),
        ([8, 24, 24, 24], 24),  # one request, then three at once
        ([8, 40, 16, 40, 24, 40, 32, 24, 40, 32, 24], 32),  # each request read before it joins the batch
        ([8, 16, 24, 32, 40, 32, 24, 32, 40, 32, 24], 40),  # read by others
    ],
)
def test_batches_grow_by_a_request_at_a_time(sizes: list[int], largest: int) -> None:
    assert _largest_batch(np.array(sizes)) == largest


def test_a_late_rank_makes_no_step() -> None:
    world = World("gloo")
    noise = random.Random(1)
    run_job(
        world, RING, 4096, [0, 1, 2], 60,
        late=lambda rank, turn: 5 * MS * (rank == 1 and turn % 5 == 0) + noise.randrange(200_000),
    )  # fmt: skip
    assert steps_of(world)[0][0].period == 1


def test_what_comes_before_and_after_is_in_no_step() -> None:
    world = play([4096, 8192], 10)
    run_job(world, BARRIER, 0, [0, 1, 2], 2, start_ns=max(world.played[-1].leave_ns.values()))
    (found,), step = steps_of(world)
    assert len(found.ends) >= 9
    assert step[-6:].tolist() == [-1] * 6


def test_sizes_that_vary_leave_the_operation_to_go_by() -> None:
    choices = random.Random(4)
    (found,), _ = steps_of(play([choices.choice([64, 4096, 65536]) for _ in range(40)], 1))
    assert (found.period, len(found.ends)) == (1, 40)


def test_no_pattern_no_steps() -> None:
    choices = random.Random(4)
    world, free = World("gloo"), dict.fromkeys(range(3), MS)
    for _ in range(40):
        enter = {r: at + MS for r, at in free.items()}
        free = world.play(choices.choice([RING, BARRIER]), 64, enter).leave_ns
    assert steps_of(world)[0] == []


def test_two_jobs_have_steps_of_their_own() -> None:
    world = World("gloo")
    noise = random.Random(2)
    for ranks, sizes in (([0, 1], [64]), ([2, 3, 4], [64, 4096])):
        free = dict.fromkeys(ranks, MS)
        for _ in range(10):
            for nbytes in sizes:
                enter = {r: at + MS + noise.randrange(100_000) for r, at in free.items()}
                free = world.play(RING, nbytes, enter, context=ranks[0]).leave_ns
    found = steps_of(world)[0]
    assert [(s.endpoints, s.period) for s in found] == [([0, 1], 1), ([2, 3, 4], 2)]


def test_jobs_are_what_groups_connect() -> None:
    world = World("eager")
    run_job(world, RING, 64, [0, 1], 1)
    run_job(world, RING, 64, [3, 4], 1)
    run_job(world, RING, 64, [1, 5], 1)
    assert jobs(world.instances(build_exchanges(world.transfers()))) == [[0, 1, 5], [3, 4]]


def test_covered_agrees_with_its_definition() -> None:
    """A place is covered where it lies in a stretch that repeats with the period, three times or more."""
    choices = np.random.default_rng(0)
    for _ in range(300):
        classes = choices.integers(0, 2, 24)
        period = int(choices.integers(1, 5))
        expected = np.zeros(24, bool)
        for start in range(24):
            for end in range(start + 3 * period, 25):
                if (classes[start : end - period] == classes[start + period : end]).all():
                    expected[start:end] = True
        assert (_covered(classes, period) == expected).all()


def test_a_pattern_that_leaves_out_what_recurs_is_none() -> None:
    assert _pattern(np.array([0, 0, 0, 0, 1, 2, 3] * 1 + [0, 0, 0, 0, 1, 3, 2, 0, 0, 0, 0, 2, 1, 3])) is None


@pytest.mark.parametrize("length", [12, 23, 60])
def test_pauses_that_are_all_alike_are_no_steps(length: int) -> None:
    """Whatever the pauses are drawn from: only their order counts."""
    rng = np.random.default_rng(length)
    found = sum(_recurring(rng.exponential(1, length)) is not None for _ in range(2000))
    assert found <= 6  # once in a thousand


@pytest.mark.parametrize(("period", "steps"), [(2, 10), (3, 8), (4, 6), (12, 6), (80, 20)])
def test_longer_pauses_are_steps(period: int, steps: int) -> None:
    rng = np.random.default_rng(period)
    pauses = rng.exponential(1, period * steps)
    pauses[1::period] += 10
    assert _recurring(pauses) == (period, 1)


def test_marked_ones_drawn_by_chance() -> None:
    """As counting all ways to draw says."""
    marked, total, draws = 4, 9, 3
    ways = list(combinations(range(total), draws))
    for least in range(draws + 1):
        hits = sum(sum(each < marked for each in way) >= least for way in ways)
        assert _drawn(least, draws, marked, total) == pytest.approx(hits / len(ways))


def test_a_step_whose_end_is_unknown_has_no_length() -> None:
    """Its end counted as the least of all times: the steps beside it overflowed."""
    steps = Steps([0, 1], 0, 1, by_pause=False, ends=np.arange(6))
    entries = SimpleNamespace(leave_ns=np.array([NEVER, 100, 130, NEVER, 170, 220]))
    numbers, took_ns = lengths(steps, entries)  # type: ignore[arg-type]
    assert numbers.tolist() == [2, 5]
    assert took_ns.tolist() == [30, 50]
    (row,) = list_steps([steps], [None], entries)  # type: ignore[arg-type]
    assert (row.count, row.step_ns, row.start_ns, row.end_ns) == (2, 40, 100, 220)
    tokens = Tokens(steps, np.array([0, 1, 2, 3, 5]), np.array([4]))
    (row,) = list_steps([steps], [tokens], entries)  # type: ignore[arg-type]
    assert (row.kind, row.count, row.start_ns) == ("decode", 2, 100)  # of the prompt's step nothing is known
    unknown = SimpleNamespace(leave_ns=np.full(6, NEVER))
    assert list(list_steps([steps], [None], unknown)) == []  # type: ignore[arg-type]
