"""Steps without a rank's lateness against the same job without it, and what groups and steps are for."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from collective_worlds import World, algorithm_of, analysed, run_job

from dpuflow.exchanges.build import build_exchanges
from dpuflow.results import Analysis
from dpuflow.schedules.algorithms import Algorithm
from dpuflow.schema.rows import Op

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
LINEAR = algorithm_of(Op.ALL_TO_ALL, "linear")
ROOTED = algorithm_of(Op.BROADCAST, "linear")
Late = Callable[[int, int], int]


def result_of(world: World, ranks: int) -> Analysis:
    transfers = world.transfers()
    exchanges = build_exchanges(transfers)
    return analysed(transfers, exchanges, world.instances(exchanges), ranks)


def job(algorithm: Algorithm, late: Late, *, times: int = 30, style: str = "gloo") -> Analysis:
    world, noise = World(style, packets=4), random.Random(3)
    run_job(
        world, algorithm, 65536, [0, 1, 2, 3], times,
        late=lambda rank, turn: late(rank, turn) + noise.randrange(100_000),
    )  # fmt: skip
    return result_of(world, 4)


@pytest.mark.parametrize("guilty", [0, 3])
@pytest.mark.parametrize("algorithm", [RING, LINEAR, ROOTED], ids=lambda a: a.op.token)
def test_without_its_lateness(algorithm: Algorithm, guilty: int) -> None:
    (found,) = job(algorithm, lambda rank, turn: 5 * MS * (rank == guilty)).what_if
    without = job(algorithm, lambda rank, turn: 0).steps[0].step_ns
    assert found.endpoint == guilty
    assert found.step_ns == pytest.approx(without + 5 * MS, rel=0.02)
    assert found.step_without_ns == pytest.approx(without, rel=0.02)


def test_the_other_late_rank_stays_late() -> None:
    found = {w.endpoint: w for w in job(RING, lambda r, t: {1: 3 * MS, 2: 8 * MS}.get(r, 0)).what_if}
    without = job(RING, lambda rank, turn: 0).steps[0].step_ns
    assert found[2].step_without_ns == pytest.approx(without + 3 * MS, rel=0.03)
    assert found[1].step_without_ns == pytest.approx(found[1].step_ns, rel=0.03)


def test_only_steps_since_the_onset_count() -> None:
    (found,) = job(RING, lambda rank, turn: 5 * MS * (rank == 1 and turn >= 18)).what_if
    without = job(RING, lambda rank, turn: 0).steps[0].step_ns
    assert (found.step_ns, found.step_without_ns) == pytest.approx((without + 5 * MS, without), rel=0.03)


def test_a_sound_job_has_nothing_to_save() -> None:
    assert job(RING, lambda rank, turn: 0).what_if == []


# -- what for -----------------------------------------------------------------------------------


def nested(layers: int, late: int = 0) -> Analysis:
    """Four ranks, two by two: ``layers`` all_reduces in each row, then one in each column."""
    world, noise = World("gloo"), random.Random(1)
    free = dict.fromkeys(range(4), MS)
    for _ in range(12):
        for layer in range(layers + 1):
            for context, pair in enumerate([(0, 1), (2, 3)] if layer < layers else [(0, 2), (1, 3)]):
                more = late * (layer == 0)
                enter = {r: free[r] + 2 * MS + noise.randrange(100_000) + more * (r == 3) for r in pair}
                size = 4096 if layer < layers else 65536
                free.update(world.play(RING, size, enter, context=context + 2 * (layer == layers)).leave_ns)
    return result_of(world, 4)


def test_tensor_and_data_parallel_groups() -> None:
    kinds = {tuple(g.endpoints): g.kind for g in nested(4).groups}
    assert kinds == {(0, 1): "tp", (2, 3): "tp", (0, 2): "dp", (1, 3): "dp"}


def test_equally_busy_groups_are_not_told_apart() -> None:
    assert {g.kind for g in nested(1).groups} == {None}


def test_late_in_nested_groups() -> None:
    result = nested(4, 6 * MS)
    assert [(r.endpoint, r.steadiness) for r in result.lateness if r.verdict == "late"] == [(3, "persistent")]
    (found,) = result.what_if
    assert found.step_ns - found.step_without_ns == pytest.approx(6 * MS, rel=0.05)


def test_experts() -> None:
    world, free = World("gloo"), dict.fromkeys(range(4), MS)
    for _ in range(10):
        for algorithm in (LINEAR, LINEAR, RING):
            free = world.play(algorithm, 4096, {r: at + 2 * MS for r, at in free.items()}).leave_ns
    assert [g.kind for g in result_of(world, 4).groups] == ["ep"]


def test_one_operation_over_and_over_tells_nothing() -> None:
    assert [g.kind for g in job(LINEAR, lambda rank, turn: 0).groups] == [None]
    assert [g.kind for g in job(RING, lambda rank, turn: 0).groups] == [None]


def tokens(layers: int, count: int, prompt: int = 0, pause: int = 2 * MS) -> Analysis:
    world, noise = World("gloo"), random.Random(2)
    free = dict.fromkeys(range(2), MS)
    for token in range(-1 if prompt else 0, count):
        size = 8192 * (prompt if token < 0 else 1)
        for reduction in range(2 * layers):
            wait = pause * (reduction == 0) + (4 if token < 0 else 1) * MS // 2
            enter = {r: at + wait + noise.randrange(50_000) for r, at in free.items()}
            free = world.play(RING, size, enter).leave_ns
    return result_of(world, 2)


def test_decode() -> None:
    result = tokens(6, 12)
    (steps,) = result.steps
    assert (steps.kind, steps.layers, steps.collectives) == ("decode", 6, 12)
    assert steps.tokens_per_s == pytest.approx(1e9 / steps.step_ns, rel=1e-4)
    assert [g.kind for g in result.groups] == ["tp"]


def test_prefill_then_decode() -> None:
    world_steps = {s.kind: s for s in tokens(6, 12, prompt=16).steps}
    assert world_steps["decode"].layers == 6
    assert world_steps["decode"].tokens_per_s is not None


def test_a_training_step_with_equal_buckets_is_no_token() -> None:
    assert {s.kind for s in tokens(6, 12, pause=60 * MS).steps} == {None}
