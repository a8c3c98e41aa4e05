"""Laws: folds commute with views, a schedule is found in its own messages, captures have no order."""

from __future__ import annotations

from itertools import permutations
from operator import or_
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dpuflow
from dpuflow.matching.recognise import matches
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import dependencies, edge_sizes, fold, free_ranks, free_sends, plan
from dpuflow.schedules.nccl import double_tree, looped_ring, pat, tree_all_reduce
from dpuflow.schema.rows import Op

TRACES = Path(__file__).parents[1] / "traces"
LOOPED = looped_ring(Op.ALL_REDUCE, 3)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Algorithm, int, int, frozenset[int]]:
    """An algorithm, for how many ranks, from which root, and the ranks that are captured."""
    n = draw(st.integers(2, 9))
    nccl = [LOOPED, tree_all_reduce(double_tree(n)), pat(Op.ALL_GATHER, n), pat(Op.REDUCE_SCATTER, n)]
    algorithm = draw(st.sampled_from([each for each in [*ALGORITHMS, *nccl] if each.fits(n)]))
    root = draw(st.integers(0, n - 1)) if algorithm.rooted else 0
    return algorithm, n, root, frozenset(draw(st.sets(st.integers(0, n - 1), min_size=1)))


@given(instances(), st.booleans())
def test_a_view_of_a_fold_is_the_fold_of_a_view(
    given: tuple[Algorithm, int, int, frozenset[int]], own: bool
) -> None:
    """What is seen of all dependencies is what dependencies on the seen ones give."""
    algorithm, n, root, captured = given
    start = [frozenset({rank}) for rank in range(n)]
    told, state = fold(algorithm, n, root, start, or_, own=own)
    seen, viewed = fold(algorithm, n, root, [each & captured for each in start], or_, own=own)
    assert [each & captured for each in state] == viewed
    assert {place: each & captured for place, each in told.items()} == seen


@given(instances())
def test_a_view_of_dependencies_is_the_dependencies_of_a_view(
    given: tuple[Algorithm, int, int, frozenset[int]],
) -> None:
    algorithm, n, root, captured = given
    every = dependencies(algorithm, n, root)
    assert dependencies(algorithm, n, root, captured) == tuple(
        (send, needed) for send, needed in every if send[0][0] in captured
    )
    whole, view = plan(algorithm, n, root), plan(algorithm, n, root, captured)
    assert view.edges == tuple(edge for edge in whole.edges if captured & set(edge))
    assert set(view.free.tolist()) == free_ranks(algorithm, n, root) & captured


SEEN = given(instances(), st.integers(1, 4), st.integers(1, 1 << 20))


@settings(deadline=None, max_examples=40)
@SEEN
def test_a_schedule_is_found_in_what_is_seen_of_its_own_messages(
    drawn: tuple[Algorithm, int, int, frozenset[int]], cuts: int, size: int
) -> None:
    is_found(drawn, cuts, size)


@pytest.mark.long
@settings(deadline=None, max_examples=400)
@SEEN
def test_many_schedules_are_found(
    drawn: tuple[Algorithm, int, int, frozenset[int]], cuts: int, size: int
) -> None:
    is_found(drawn, cuts, size)


def is_found(drawn: tuple[Algorithm, int, int, frozenset[int]], cuts: int, size: int) -> None:
    algorithm, n, root, captured = drawn
    assume(algorithm in ALGORITHMS)
    cuts = cuts if algorithm.cuts else 1
    edges = {
        edge: (cuts * len(sizes), round(sum(sizes) * size * n))
        for edge, sizes in edge_sizes(algorithm, n, root).items()
        if captured & set(edge)
    }
    assume({end for edge in edges for end in edge} == set(range(n)))
    near = None if len(captured) == n else captured
    unasked = {rank: cuts * sum(free_sends(algorithm, n, root, rank).values()) for rank in captured}
    found = matches(edges, range(n), algorithm.op, near, unasked)
    assert any(_alike(match.algorithm, match.root, algorithm, root, n, captured) for match in found)


def _alike(
    one: Algorithm, one_root: int, other: Algorithm, root: int, n: int, captured: frozenset[int]
) -> bool:
    """Whether captured ranks see the same messages of both."""
    mine, theirs = (
        {edge: (len(sizes), round(sum(sizes), 6)) for edge, sizes in edge_sizes(each, n, top).items()
         if captured & set(edge)}
        for each, top in ((one, one_root), (other, root))
    )  # fmt: skip
    return one is other or mine == theirs


@pytest.mark.parametrize("case", ["mpi-alltoall-libfabric-n3", "gloo-allreduce-n4"])
def test_the_order_of_captures_does_not_matter(case: str) -> None:
    files = sorted(str(file) for file in (TRACES / case).glob("node*.pcap*"))

    def told(order: tuple[str, ...]) -> list[object]:
        result = dpuflow.analyze([dpuflow.Vantage(Path(file).name, (file,)) for file in order])
        names = {end.id: end.address for end in result.endpoints}
        return [
            (c.op, c.bytes, c.algorithm, sorted((names[r.endpoint], r.bound, r.lateness_ns) for r in c.ranks))
            for c in result.collectives
        ]

    one, *others = (told(order) for order in [*permutations(files)][::5])
    assert one
    assert all(other == one for other in others)
