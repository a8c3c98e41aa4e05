"""Schedules do what their operation promises, for every number of ranks."""

from __future__ import annotations

from collections import Counter
from operator import or_

import pytest
from collective_worlds import algorithm_of

from dpuflow.matching.program import one_after_the_other
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import (
    dependencies,
    edge_sizes,
    fold,
    free_ranks,
    needed_between,
    schedule,
)
from dpuflow.schedules.trees import (
    binary_by_level,
    binary_heap,
    binomial_in_order,
    binomial_outward,
    chains,
    k_nomial,
    split_binary,
)
from dpuflow.schema.rows import Op

ALL_TO_ALL_KNOWLEDGE = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BARRIER, Op.REDUCE_SCATTER)
IDS = [f"{a.op.token}-{a.name}-{i}" for i, a in enumerate(ALGORITHMS)]


def know(algorithm: Algorithm, n: int, root: int = 0) -> list[set[int]]:
    """Whose contribution has reached each rank at the end: a step's messages carry what was known before."""
    known = [{rank} for rank in range(n)]
    sends = schedule(algorithm, n, root)
    for step in sorted({send.step for send in sends}):
        news = [(send.dst, set(known[send.src])) for send in sends if send.step == step]
        for dst, what in news:
            known[dst] |= what
    return known


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_everybody_learns_what_the_operation_promises(algorithm: Algorithm) -> None:
    for n in range(2, 18):
        if not algorithm.fits(n):
            continue
        for root in {0, n - 1} if algorithm.rooted else {0}:
            known = know(algorithm, n, root)
            _, state = fold(algorithm, n, root, [frozenset({rank}) for rank in range(n)], or_)
            assert [set(each) for each in state] == known
            if algorithm.op in ALL_TO_ALL_KNOWLEDGE:
                assert all(len(k) == n for k in known)
            elif algorithm.op in (Op.BROADCAST, Op.SCATTER):
                assert all(root in k for k in known)
            else:
                assert len(known[root]) == n


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_messages_grow_with_the_buffer(algorithm: Algorithm) -> None:
    for n in range(2, 18):
        if algorithm.fits(n):
            total = sum(send.size for send in schedule(algorithm, n))
            assert sum(send.size for send in algorithm.sends(n, 1000, 0)) == pytest.approx(1000 * total)
            assert total == pytest.approx(sum(sum(s) for s in edge_sizes(algorithm, n).values()))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_nobody_sends_to_itself_or_outside(algorithm: Algorithm) -> None:
    for n in range(2, 18):
        if algorithm.fits(n):
            for send in schedule(algorithm, n):
                assert send.src != send.dst
                assert 0 <= send.src < n
                assert 0 <= send.dst < n


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.rooted and a.turned], ids=lambda a: a.name)
def test_another_root_turns_the_ranks(algorithm: Algorithm) -> None:
    for n in (n for n in range(2, 20) if algorithm.fits(n)):
        for root in range(n):
            turned = {((a + root) % n, (b + root) % n): z for (a, b), z in edge_sizes(algorithm, n).items()}
            assert edge_sizes(algorithm, n, root) == turned


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_edges_that_are_told_are_those_of_the_schedule(algorithm: Algorithm) -> None:
    for n in (n for n in (*range(2, 18), 31, 33) if algorithm.fits(n)):
        counted = [len({s[1:3] for s in algorithm.sends(n, 1, root)}) for root in range(n)]
        if algorithm.edges is not None:
            assert [algorithm.edges(n, root) for root in range(n)] == counted
        assert max(counted) - min(counted) <= n  # as the search for hypotheses takes it


def needs_by_definition(algorithm: Algorithm, n: int, root: int) -> list[tuple[object, object]]:
    named, sent = [], Counter[tuple[int, int]]()
    for send in schedule(algorithm, n, root):
        named.append((send, ((send.src, send.dst), sent[send.src, send.dst])))
        sent[send.src, send.dst] += 1
    pairs: list[tuple[object, object]] = []
    for send, name in named:
        before = [other for other, _ in named if other.dst == send.src and other.step < send.step]
        last = max((other.step for other in before), default=None)
        pairs += [(name, what) for other, what in named if other.dst == send.src and other.step == last]
    return pairs


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.op.name}-{a.name}")
@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_a_send_needs_the_latest_input_of_earlier_steps(algorithm: Algorithm, n: int) -> None:
    if algorithm.fits(n):
        expected = needs_by_definition(algorithm, n, 0)
        assert sorted(dependencies(algorithm, n)) == sorted(expected)
        mine = [pair for pair in dependencies(algorithm, n) if pair[0][0][0] == 1]
        assert list(dependencies(algorithm, n, 0, frozenset([1]))) == mine


def test_free_ranks_are_those_that_wait_for_nobody() -> None:
    by_name = {(a.op, a.name): a for a in reversed(ALGORITHMS)}
    assert free_ranks(by_name[Op.ALL_REDUCE, "ring"], 4) == {0, 1, 2, 3}
    assert free_ranks(by_name[Op.ALL_REDUCE, "recursive_doubling"], 3) == {0, 2}  # 1 takes in 0 first
    assert free_ranks(by_name[Op.BROADCAST, "binomial"], 4, 2) == {2}
    assert free_ranks(by_name[Op.REDUCE, "linear"], 4, 1) == {0, 2, 3}


def test_known_counts() -> None:
    by_name = {(a.op, a.name): a for a in reversed(ALGORITHMS)}
    assert edge_sizes(by_name[Op.ALL_REDUCE, "ring"], 4)[0, 1] == (0.25,) * 6
    halves = edge_sizes(by_name[Op.ALL_REDUCE, "rabenseifner"], 4)
    assert halves[0, 1] == (0.5, 0.5)
    assert halves[0, 2] == (0.25, 0.25)
    assert edge_sizes(by_name[Op.ALL_GATHER, "recursive_doubling"], 8)[0, 4] == (4.0,)


def test_shapes_of_trees() -> None:
    assert binomial_in_order(8) == [0, 0, 0, 2, 0, 4, 4, 6]
    assert binomial_outward(8) == [0, 0, 0, 1, 0, 1, 2, 3]
    assert binary_by_level(15) == [0, 0, 0, 1, 2, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6]
    assert binary_heap(7) == [0, 0, 0, 1, 1, 2, 2]
    assert chains(1)(4) == [0, 0, 1, 2]
    assert chains(3)(9) == [0, 0, 1, 2, 0, 4, 5, 0, 7]
    assert k_nomial(3)(10) == [0, 0, 0, 0, 3, 3, 0, 6, 6, 0]


def test_halves_of_a_split_tree_come_down_in_segments() -> None:
    sends = list(split_binary(0.4)(4, 100.0, 0))
    sizes = [send.size for send in sends if (send.src, send.dst) == (0, 1)]
    assert sizes == pytest.approx([20, 20, 10])
    assert [send.size for send in sends if (send.src, send.dst) == (2, 1)] == [50]
    assert [send.size for send in sends if (send.src, send.dst) == (0, 3)] == [50]  # the last one has no pair


def test_an_operation_of_two_others_does_what_it_promises() -> None:
    by_name = {(a.op, a.name): a for a in reversed(ALGORITHMS)}
    for first, second, op in (
        ((Op.REDUCE, "linear"), (Op.BROADCAST, "linear"), Op.ALL_REDUCE),
        ((Op.REDUCE, "binomial"), (Op.BROADCAST, "chain"), Op.ALL_REDUCE),
        ((Op.GATHER, "binomial"), (Op.BROADCAST, "binomial"), Op.ALL_GATHER),
        ((Op.REDUCE, "chain"), (Op.SCATTER, "linear"), Op.REDUCE_SCATTER),
    ):
        both = one_after_the_other(by_name[first], by_name[second], op)
        assert all(len(k) == 5 for k in know(both, 5, 2))
        assert both.name == (first[1] if first[1] == second[1] else "unknown")


def test_a_first_message_between_nodes_may_tell_of_all_of_its_node() -> None:
    """Six ranks on three nodes by halving and doubling: 1 and 3 hand all they have to their mates, 4 and 5
    have each other's when they first send elsewhere."""
    algorithm = algorithm_of(Op.ALL_REDUCE, "rabenseifner")
    needed = needed_between(algorithm, (0, 0, 1, 1, 2, 2))
    assert needed == {0: {0, 1}, 2: {2, 3}, 4: {4, 5}, 5: {4, 5}}
    assert needed_between(algorithm_of(Op.ALL_REDUCE, "ring"), (0, 0, 1, 1)) == {1: {1}, 3: {3}}
