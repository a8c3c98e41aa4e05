"""Jobs that follow each other between the same ranks, over connections of their own."""

from __future__ import annotations

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, run_job

from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Job, build_collectives
from dpuflow.matching.streams import sessions
from dpuflow.schema.rows import EXCHANGE, Op


def rows_of(connections: list[tuple[int, int, int]]) -> np.ndarray:
    rows = EXCHANGE.zeros(len(connections))
    rows["connection"], rows["src"], rows["dst"] = np.array(connections).T
    return rows


def parts(connections: list[tuple[int, int, int]]) -> list[list[int]]:
    exchanges = rows_of(connections)
    return [part.tolist() for part in sessions(exchanges, np.arange(len(exchanges)))]


def test_a_pair_with_a_new_connection_has_a_new_job() -> None:
    assert parts([(0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 0)]) == [[0, 1], [2, 3]]


def test_connections_side_by_side_are_one_job() -> None:
    assert parts([(0, 0, 1), (1, 1, 0), (0, 0, 1), (1, 1, 0)]) == [[0, 1, 2, 3]]


def test_pairs_that_take_turns_are_one_job() -> None:
    """Ranks connect when they first need to: 0 and 1 may be done before 2 and 3 begin."""
    assert parts([(0, 0, 1), (1, 2, 3), (2, 0, 2)]) == [[0, 1, 2]]


def test_another_job_that_goes_on_cuts_nothing() -> None:
    assert parts([(9, 0, 2), (0, 0, 1), (1, 0, 1), (9, 0, 2)]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("style", ["eager", "gloo"])
@pytest.mark.parametrize("n", [2, 4])
def test_what_two_jobs_did_is_not_mixed(style: str, n: int) -> None:
    """Messages of the second job were counted among those of the first: ranks seemed late by minutes."""
    ranks, ring = list(range(n)), algorithm_of(Op.ALL_REDUCE, "ring")
    worlds = [World(style), World(style)]
    played = [run_job(world, ring, 4096 * n, ranks, 12, late={1: 20_000_000 * k}, start_ns=k * 10**11 + 10**6)
              for k, world in enumerate(worlds)]  # fmt: skip
    second = worlds[1].transfers()
    second["connection"] += 100
    found = build_collectives(
        Job(build_exchanges(np.concatenate([worlds[0].transfers(), second])), np.arange(n))
    )
    assert len(found) == sum(map(len, played))
    assert {len(instance.rows) for instance in found} == {len(found[0].rows)}
