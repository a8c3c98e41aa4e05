"""Algorithms told from edges and bytes alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from collective_worlds import algorithm_of

from dpuflow import matching
from dpuflow.matching.recognise import EdgeBytes, matches, orders
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import schedule
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from dpuflow.matching import Instance
    from dpuflow.matching.model import Job

IDS = [f"{a.op.token}-{a.name}-{i}" for i, a in enumerate(ALGORITHMS)]


def edges_of(algorithm: Algorithm, ranks: list[int], size: int, root: int = 0, cuts: int = 1) -> EdgeBytes:
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    for send in schedule(algorithm, len(ranks), root):
        edge = ranks[send.src], ranks[send.dst]
        count, total = edges.get(edge, (0, 0))
        edges[edge] = (count + cuts, total + round(send.size * size))
    return edges


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_each_algorithm_is_among_its_own_matches(algorithm: Algorithm) -> None:
    for n in range(2, 18):
        if not algorithm.fits(n):
            continue
        for root in {0, n - 1} if algorithm.rooted else {0}:
            found = matches(edges_of(algorithm, list(range(n)), 840 * n, root), list(range(n)), algorithm.op)
            mine = [m for m in found if m.algorithm == algorithm]
            assert len(mine) == 1, n
            if algorithm.op != Op.BARRIER:
                assert mine[0].size == pytest.approx(840 * n, abs=2 * n)
            if algorithm.rooted and n > 2 and algorithm.op != Op.BARRIER:
                assert mine[0].order[mine[0].root] == root


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_one_message_less_is_no_match(algorithm: Algorithm) -> None:
    n = 8
    edges = dict(edges_of(algorithm, list(range(n)), 8192))
    edge = random.Random(3).choice(sorted(edges))
    if edges[edge][0] == 1:
        del edges[edge]
    else:
        edges[edge] = (edges[edge][0] - 1, edges[edge][1])
    found = matches(edges, list(range(n)), algorithm.op)
    assert algorithm not in [m.algorithm for m in found]


def test_bytes_count_not_only_edges() -> None:
    ring = algorithm_of(Op.ALL_REDUCE, "ring")
    edges = dict(edges_of(ring, [0, 1, 2, 3], 4096))
    edges[0, 1] = (edges[0, 1][0], edges[0, 1][1] + 500)
    assert matches(edges, [0, 1, 2, 3], Op.ALL_REDUCE) == []
    edges[0, 1] = (edges[0, 1][0], edges[0, 1][1] - 500 + 16)  # a share of one element more
    assert [m.algorithm for m in matches(edges, [0, 1, 2, 3], Op.ALL_REDUCE)] == [ring]


def test_segments() -> None:
    ring = algorithm_of(Op.ALL_REDUCE, "ring")
    doubling = algorithm_of(Op.ALL_REDUCE, "recursive_doubling")
    (found,) = matches(edges_of(ring, [0, 1, 2], 3000, cuts=4), [0, 1, 2], Op.ALL_REDUCE)
    assert (found.algorithm, found.size) == (ring, 3000)
    assert matches(edges_of(doubling, [0, 1, 2, 3], 3000, cuts=2), [0, 1, 2, 3], Op.ALL_REDUCE) == []


def test_a_ring_through_ranks_in_any_order() -> None:
    ring = algorithm_of(Op.ALL_GATHER, "ring")
    places = [4, 1, 3, 0, 2]
    (found,) = matches(edges_of(ring, places, 100), list(range(5)), Op.ALL_GATHER)
    at = found.order.index(4)
    assert [*found.order[at:], *found.order[:at]] == places


@pytest.mark.parametrize(
    ("edges", "ring"),
    [
        ([(0, 2), (2, 3), (3, 1), (1, 0)], True),
        ([(0, 2), (2, 3), (3, 1)], False),  # open
        ([(0, 2), (0, 3), (3, 1), (1, 0)], False),  # a branch
        ([(0, 2), (2, 0), (1, 3), (3, 1)], False),  # two rings
    ],
)
def test_a_ring_is_read_off_its_edges(edges: list[tuple[int, int]], ring: bool) -> None:
    found = orders(edges, [0, 1, 2, 3])
    assert ((0, 2, 3, 1) in found) == ring
    assert (0, 1, 2, 3) in found


def test_operations_that_look_alike() -> None:
    """Gather and reduce by all-to-one: the operation must be told; without it both are named."""
    edges = edges_of(algorithm_of(Op.GATHER, "linear"), [0, 1, 2, 3], 64)
    assert {m.algorithm.op for m in matches(edges, [0, 1, 2, 3], Op.GATHER)} == {Op.GATHER}
    assert {m.algorithm.op for m in matches(edges, [0, 1, 2, 3], Op.UNKNOWN)} >= {Op.GATHER, Op.REDUCE}


def test_what_is_remembered_of_ranks_seen_in_part_is_nobodys_to_change() -> None:
    """Captured at rank 0 alone: each collective asks again, and gets a list of its own."""
    ring = algorithm_of(Op.ALL_GATHER, "ring")
    edges = {edge: seen for edge, seen in edges_of(ring, [0, 1, 2, 3], 4096).items() if 0 in edge}
    asked = [matches(edges, [0, 1, 2, 3], Op.ALL_GATHER, frozenset({0}), {0: 1}) for _ in range(2)]
    assert ring in [match.algorithm for match in asked[0]]
    asked[0].clear()
    assert asked[1] == matches(edges, [0, 1, 2, 3], Op.ALL_GATHER, frozenset({0}), {0: 1}) != []
    other = {edge: (count, total + 4096) for edge, (count, total) in edges.items()}
    sizes = {each.size for each in matches(other, [0, 1, 2, 3], Op.ALL_GATHER, frozenset({0}), {0: 1})}
    assert sizes.isdisjoint({each.size for each in asked[1]})


def test_no_bytes_is_a_barrier_and_nothing_else() -> None:
    edges = edges_of(algorithm_of(Op.BARRIER, "dissemination"), [0, 1, 2, 3, 4], 0)
    assert {m.algorithm.op for m in matches(edges, list(range(5)), Op.UNKNOWN)} == {Op.BARRIER}


def test_what_began_after_a_capture_had_ended_is_not_whole() -> None:
    """Of no known algorithm nothing shows that messages are missing."""
    exchanges = np.array([(100,), (140,)], [("data_ns", "i8")])
    instance = cast("Instance", SimpleNamespace(order=[0, 2], rows=np.array([0, 1])))
    for until, cut in (([150, 90, 150], False), ([150, 150, 90], True), ([150, 150, NEVER], False)):
        job = SimpleNamespace(exchanges=exchanges, until=np.array(until))
        assert matching._ends_before(cast("Job", job), instance) is cut
    assert not matching._ends_before(cast("Job", SimpleNamespace(until=None)), instance)
