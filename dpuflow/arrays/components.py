"""Connected components: what meets, directly or through others, together; and what follows one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

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


def in_a_row(start: K, after: Mapping[K, K]) -> tuple[list[K], bool]:
    """What follows ``start``, each ``after`` the one before, and whether the last one leads back to it."""
    row, then = [start], after.get(start)
    while then is not None and then not in row:
        row.append(then)
        then = after.get(then)
    return row, then == start
