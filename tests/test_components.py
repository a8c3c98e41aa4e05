"""Connected components."""

from __future__ import annotations

import random

from dpuflow.arrays.components import connected


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
