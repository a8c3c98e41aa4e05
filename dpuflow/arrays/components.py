"""Connected components: what meets, directly or through others, together; and what follows one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K", bound="Hashable")


def connected(items: Iterable[T], touches: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """``items`` by connected component, where those that touch the same are neighbours; in order of items."""
    number: dict[Hashable, int] = {}
    above: list[int] = []

    def root(node: int) -> int:
        while above[node] != node:
            above[node] = node = above[above[node]]
        return node

    kept = list(items)
    for place, item in enumerate(kept):
        above.append(place)
        for what in touches(item):
            above[root(number.setdefault(what, place))] = root(place)
    found: dict[int, list[T]] = {}
    for place, item in enumerate(kept):
        found.setdefault(root(place), []).append(item)
    return list(found.values())


def least_connected(a: NDArray[np.int64], b: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """For each of ``nodes`` the least node of its component, where ``a[i]`` and ``b[i]`` are neighbours."""
    least = np.arange(nodes)
    while len(a):
        low = np.minimum(least[a], least[b])
        for ends in (a, b):
            np.minimum.at(least, least[ends], low)
        while ((further := least[least]) != least).any():
            least = further
        apart = least[a] != least[b]
        a, b = a[apart], b[apart]
    return least


def in_a_row(start: K, after: Mapping[K, K]) -> tuple[list[K], bool]:
    """What follows ``start``, each ``after`` the one before, and whether the last one leads back to it."""
    row, then = [start], after.get(start)
    while then is not None and then not in row:
        row.append(then)
        then = after.get(then)
    return row, then == start
