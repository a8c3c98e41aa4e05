"""Schedules with a root: how a buffer goes down a tree or chain, how parts come up to the root.

Each gives the messages for ``n`` ranks, a buffer of ``size`` bytes and a ``root`` (see ``schedules``). Trees
are numbered from the root: position v stands for rank v + root. Sources: Thakur, Rabenseifner, Gropp (2005);
for the shapes in use, the topologies of Open MPI's coll/base.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from dpuflow.schedules.remembered import remembered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sends = Callable[[int, float, int], Iterator["Send"]]


class Send(NamedTuple):
    """One message of a schedule. Ranks are positions in the group, 0 to n - 1."""

    step: int
    src: int
    dst: int
    size: float  # bytes; a fraction where the buffer does not divide evenly


def power_below(n: int) -> int:
    """The largest power of two that is not above ``n``."""
    return 1 << (n.bit_length() - 1)


def is_power(n: int) -> bool:
    """Whether ``n`` is a power of two, 2 at least."""
    return n >= 2 and n & (n - 1) == 0


# -- shapes: for each position but 0 its parent -------------------------------------------------


def binomial_in_order(n: int) -> list[int]:
    """Parents: a position without its lowest bit, so a subtree is a run of positions."""
    return [v & (v - 1) for v in range(n)]


def binomial_outward(n: int) -> list[int]:
    """Parents: a position without its highest bit; in step k everybody serves the one 2^k further on."""
    return [v - power_below(v) if v else 0 for v in range(n)]


def binary_heap(n: int) -> list[int]:
    """Parents in a binary tree numbered level by level, children side by side."""
    return [(v - 1) // 2 if v else 0 for v in range(n)]


def binary_by_level(n: int) -> list[int]:
    """Parents in a binary tree numbered level by level, first children first: odd positions on the left."""
    parents = [0] * n
    for v in range(1, n):
        width = power_below(v + 1)  # of v's level, which begins at width - 1; the one above is half as wide
        parents[v] = width // 2 - 1 + (v - (width - 1)) % (width // 2)
    return parents


def chains(heads: int) -> Callable[[int], list[int]]:
    """Parents in chains side by side, as even as they can be; one chain is a pipeline."""

    def parents(n: int) -> list[int]:
        found, count = [0], min(heads, n - 1)
        for chain in range(count):
            for place in range((n - 1) // count + (chain < (n - 1) % count)):
                found.append(len(found) - 1 if place else 0)
        return found

    return parents


def k_nomial(radix: int) -> Callable[[int], list[int]]:
    """Parents: a position without its lowest digit of base ``radix`` that is not 0."""

    def parents(n: int) -> list[int]:
        found = [0] * n
        for v in range(1, n):
            unit = 1
            while v % (unit * radix) == 0:
                unit *= radix
            found[v] = v - v % (unit * radix)
        return found

    return parents


def flat(n: int) -> list[int]:
    """Everybody's parent is the root."""
    return [0] * n


# -- what goes along them ------------------------------------------------------------------------


@remembered
def _shape(
    parents: Callable[[int], list[int]], n: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Parents, depths and sizes of the subtrees of each position; parents come before children."""
    parent = parents(n)
    depth, below = [0] * n, [1] * n
    for v in range(1, n):
        depth[v] = depth[parent[v]] + 1
    for v in range(n - 1, 0, -1):
        below[parent[v]] += below[v]
    return tuple(parent), tuple(depth), tuple(below)


def along(parents: Callable[[int], list[int]], *, upward: bool, parts: bool = False) -> Sends:
    """The buffer from parents to children, or (``upward``) back: all of it, or (``parts``) a block for each
    rank of the subtree in one message."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        parent, depth, below = _shape(parents, n)
        for v in range(1, n):
            step, src, dst = (n - depth[v], v, parent[v]) if upward else (depth[v] - 1, parent[v], v)
            yield Send(step, (src + root) % n, (dst + root) % n, size * (below[v] if parts else 1))

    return sends


down, up = partial(along, upward=False), partial(along, upward=True)
scattered, gathered = partial(down, parts=True), partial(up, parts=True)


@lru_cache(maxsize=64)
def split_binary(segment: float = 1.0) -> Sends:
    """One half of the buffer down each side of a binary tree; then pairs exchange their halves whole.

    ``segment``: what goes down at once, as a share of a half.
    """
    parts = [segment] * int(1 / segment + 1e-9)
    if 1 - sum(parts) > 1e-9:
        parts.append(1 - sum(parts))

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        parent, depth, _ = _shape(binary_by_level, n)
        for number, part in enumerate(parts):
            for v in range(1, n):
                step = depth[v] - 1 + number
                yield Send(step, (parent[v] + root) % n, (v + root) % n, size / 2 * part)
        last = len(parts) + max(depth)
        for v in range(1, n, 2):
            if v + 1 < n:
                yield Send(last, (v + root) % n, (v + 1 + root) % n, size / 2)
                yield Send(last, (v + 1 + root) % n, (v + root) % n, size / 2)
            else:
                yield Send(last, root, (v + root) % n, size / 2)

    return sends


@lru_cache(maxsize=64)
def synced_up(segment: float = 1.0) -> Sends:
    """Everybody's block to the root when it asks (an empty message), a first segment before the rest.

    ``segment``: the first one, as a share of a block.
    """

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for rank in range(n):
            if rank != root:
                yield Send(0, root, rank, 0.0)
                yield Send(1, rank, root, size * segment)
                yield Send(2, rank, root, size * (1 - segment))

    return sends


def in_order_up(n: int, size: float, root: int) -> Iterator[Send]:
    """Up a binary tree whose subtrees are runs of ranks, for reductions whose order matters.

    The last rank is its top; from there the result goes to the root.
    """

    def below(first: int, count: int, depth: int) -> Iterator[Send]:
        top = first + count - 1
        right = count // 2
        for start, some in ((first + right, count - right - 1), (first, right)):
            if some > 0:
                yield from below(start, some, depth + 1)
                yield Send(n - depth - 1, start + some - 1, top, size)

    yield from below(0, n, 0)
    if root != n - 1:
        yield Send(n, n - 1, root, size)
