"""NCCL's algorithms as schedules: rings gone round in loops, double binary trees, PAT.

Sources: NCCL 2.30, src/device/all_reduce.h (runRing, runTreeSplit), src/graph/trees.cc (ncclGetBtree,
ncclGetDtree), src/include/collectives.h (PatAGAlgorithm, PatRSAlgorithm). Messages that a slot's size cuts
the buffer into are segments of these sends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.trees import Send, chains, down, up
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Iterator

Parents = tuple[int, ...]
"""For each position its parent in a tree, -1 for the root."""


@lru_cache(maxsize=256)
def looped_ring(op: Op, loops: int) -> Algorithm:
    """The ring of ``op``, gone round for each of ``loops`` parts of the buffer, one after the other."""
    base = next(a for a in ALGORITHMS if a.op == op and a.name == "ring")
    if loops == 1:
        return base

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        steps = 1 + max(send.step for send in base.sends(n, size, root))
        for loop in range(loops):
            for send in base.sends(n, size / loops, root):
                yield send._replace(step=loop * steps + send.step)

    return replace(base, sends=sends)


def binary_tree(n: int) -> Parents:
    """NCCL's first tree: leaves hang on the inner node next to them, these on one two away, and so on."""
    parents = [-1]
    for place in range(1, n):
        bit = place & -place
        above = (place & ~bit) | bit << 1
        parents.append(above if above < n else place & ~bit)
    return tuple(parents)


def double_tree(n: int) -> tuple[Parents, Parents]:
    """Both trees: the second is the first one seen in a mirror, or turned by one where ``n`` is odd."""
    first = binary_tree(n)
    move = [(place + 1) % n if n % 2 else n - 1 - place for place in range(n)]
    second = [-1] * n
    for place, parent in enumerate(first):
        if parent >= 0:
            second[move[place]] = move[parent]
    return first, tuple(second)


@lru_cache(maxsize=256)
def tree_all_reduce(trees: tuple[Parents, ...]) -> Algorithm:
    """Up to the root and down again, on each of ``trees`` with its part of the buffer."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for parents in trees:
            for place, parent in enumerate(parents):
                if parent >= 0:
                    depth = _depth(parents, place)
                    yield Send(n - depth, place, parent, size / len(trees))
                    yield Send(n + depth, parent, place, size / len(trees))

    leaves = frozenset(place for parents in trees for place in range(len(parents)) if place not in parents)
    return Algorithm(Op.ALL_REDUCE, "tree", sends, cuts=True, starters=lambda n, _: leaves)


def _depth(parents: Parents, place: int) -> int:
    depth = 0
    while parents[place] >= 0:
        place = parents[place]
        depth += 1
    return depth


def pat_dimensions(n: int, share: int = 1) -> dict[int, int]:
    """How many blocks a rank of PAT passes to the one so far away (a power of two), of all n - 1.

    ``share``: how many blocks share a message of a reduce_scatter, a power of two. It has gaps then for
    blocks of ranks that there are not (NCCL 2.28 PatRSAlgorithm: mirrorInvert, sendOffset), and they count.
    """
    above = 1 << (n - 1).bit_length()
    found: dict[int, int] = {}
    for number in range(1, n):
        low = number & -number
        room = min(share, above // (2 * low))  # blocks of a message; the first one it has tells it
        if number < above // room:
            found[low] = found.get(low, 0) + room
    return found


@lru_cache(maxsize=256)
def pat(op: Op, n: int, share: int = 1) -> Algorithm:
    """Parallel aggregated trees of ``op``, all_gather or reduce_scatter, for ``n`` ranks.

    ``share`` as in ``pat_dimensions``. Which blocks share a message depends on their size, so the inputs of a
    message are not told: all are given as of one step. A rank's first one needs none, in both operations.
    """
    away = -1 if op == Op.ALL_GATHER else 1

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        block = size if op == Op.ALL_GATHER else size / n
        for distance, blocks in pat_dimensions(n, share).items():
            for rank in range(n):
                yield Send(0, rank, (rank + away * distance) % n, block * blocks)

    return Algorithm(op, "pat", sends)


@lru_cache(maxsize=256)
def seen_pat(op: Op, edges: tuple[tuple[int, int, int], ...], captured: frozenset[int]) -> Algorithm:
    """The part of ``pat`` that captured ranks see: (source, destination, blocks), by position.

    Their first messages need no input; of the others' it is not known which is the first.
    """

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        block = size if op == Op.ALL_GATHER else size / n
        for src, dst, blocks in edges:
            yield Send(0, src, dst, block * blocks)

    return Algorithm(op, "pat", sends, starters=lambda n, _: captured)


@lru_cache(maxsize=256)
def some_trees(edges: tuple[tuple[int, int], ...]) -> Algorithm:
    """Trees with these (child, parent) of positions together; which edge is of which tree is not known.

    So no input of a message is told, and nobody is said to need none.
    """

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for child, parent in edges:
            yield Send(0, child, parent, size * (n - 1) / len(edges))
            yield Send(0, parent, child, size * (n - 1) / len(edges))

    return Algorithm(Op.ALL_REDUCE, "tree", sends, starters=lambda n, _: frozenset())


@lru_cache(maxsize=256)
def seen_hops(op: Op, edges: tuple[tuple[int, int], ...], steps: int) -> Algorithm:
    """The part of a ring that goes along ``edges`` of positions, for so many steps."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        for step in range(steps):
            for src, dst in edges:
                yield Send(step, src, dst, size / steps)

    everyone = frozenset(src for src, _ in edges)
    return Algorithm(op, "ring", sends, starters=lambda n, _: everyone)


BROADCAST_CHAIN: Final = Algorithm(Op.BROADCAST, "chain", down(chains(1)), rooted=True, cuts=True)
"""From rank to rank along a ring that is cut open before the root."""
REDUCE_CHAIN: Final = Algorithm(Op.REDUCE, "chain", up(chains(1)), rooted=True, cuts=True)
"""The same along a ring that is cut open behind the root."""
