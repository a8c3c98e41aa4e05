"""Connected components."""

from __future__ import annotations

import random

import numpy as np

from dpuflow.arrays.components import connected, least_connected


def by_growing(items: list[tuple[int, ...]]) -> list[set[int]]:
    """Places of ``items``, each group grown until nothing touches it any more."""
    groups: list[set[int]] = []
    for place in range(len(items)):
        group = {place}
        while more := {
            other
            for other in range(len(items))
            if other not in group and any(set(items[other]) & set(items[one]) for one in group)
        }:
            group |= more
        if group not in groups:
            groups.append(group)
    return groups


def test_what_touches_the_same_is_together_in_order() -> None:
    draw = random.Random(5)
    for _ in range(200):
        items = [tuple(draw.choices(range(12), k=draw.randrange(4))) for _ in range(draw.randrange(9))]
        found = connected(range(len(items)), items.__getitem__)
        assert [set(group) for group in found] == by_growing(items)
        assert all(group == sorted(group) for group in found)


def test_nodes_are_known_by_the_least_one_that_they_meet() -> None:
    draw = random.Random(6)
    for _ in range(200):
        pairs = [(draw.randrange(12), draw.randrange(12)) for _ in range(draw.randrange(12))]
        a, b = np.array(pairs, np.int64).reshape(-1, 2).T
        expected = list(range(12))
        for places in by_growing([*pairs]):
            ends = {end for place in places for end in pairs[place]}
            for end in ends:
                expected[end] = min(ends)
        assert least_connected(a, b, 12).tolist() == expected
    chain = np.random.default_rng(1).permutation(1000)
    assert least_connected(chain[1:], chain[:-1], 1000).max() == 0
