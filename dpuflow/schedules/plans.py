"""Schedules as arrays, in the form that kernels compare streams with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schedules.graph import dependencies, edge_sizes, free_ranks
from dpuflow.schedules.kept import kept

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from dpuflow.schedules.algorithms import Algorithm


@dataclass(frozen=True)
class Plan:
    """One collective of an algorithm: its edges in the order of ``edge_sizes``, and what they carry.

    Where only the messages of the ranks ``captured`` are seen, it has their edges only, and asks of no
    other rank when it sends. Ranks are positions. Lists by rank have offsets: rank r's part is
    ``x[x_at[r]:x_at[r + 1]]``.
    """

    algorithm: Algorithm
    ranks: int
    root: int
    edges: tuple[tuple[int, int], ...]
    counts: NDArray[np.int64]  # messages of each edge
    shares: NDArray[np.float64]  # sizes of all edges' messages for a buffer of one byte
    captured: frozenset[int] | None = None

    @cached_property
    def sends(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and edges that each rank sends on."""
        return _by_rank(self.ranks, (src for src, _ in self.edges))

    @cached_property
    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and edges that each rank receives on."""
        return _by_rank(self.ranks, (dst for _, dst in self.edges))

    @cached_property
    def needs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets by sending rank, and rows: edge and number of a send, and of the input it needs."""
        number = {edge: place for place, edge in enumerate(self.edges)}
        pairs = dependencies(self.algorithm, self.ranks, self.root, self.captured)
        at, order = _by_rank(self.ranks, (send[0][0] for send, _ in pairs))
        rows = [(number[send[0]], send[1], number[got[0]], got[1]) for send, got in pairs]
        return at, np.array(rows, np.int64).reshape(-1, 4)[order]

    @cached_property
    def free(self) -> NDArray[np.int64]:
        """Ranks whose first message needs no input."""
        ranks = free_ranks(self.algorithm, self.ranks, self.root)
        return np.array(sorted(ranks if self.captured is None else ranks & self.captured), np.int64)

    @cached_property
    def messages(self) -> int:
        """Messages of one collective, not cut into segments."""
        return int(self.counts.sum())

    @cached_property
    def most_events(self) -> int:
        """Messages that the busiest rank sends and receives, not cut into segments."""
        events = np.zeros(self.ranks, np.int64)
        np.add.at(events, np.array(self.edges).ravel(), np.repeat(self.counts, 2))
        return int(events.max())


@kept(lambda made: 16 * len(made.shares) + 300 * len(made.edges))
def plan(algorithm: Algorithm, ranks: int, root: int, captured: frozenset[int] | None = None) -> Plan:
    """The schedule's arrays; ``root`` is a position, ``captured`` are positions (None: all)."""
    sizes = edge_sizes(algorithm, ranks, root)
    if captured is not None:
        sizes = {edge: each for edge, each in sizes.items() if not captured.isdisjoint(edge)}
    counts = np.array([len(each) for each in sizes.values()], np.int64)
    shares = np.array([share for each in sizes.values() for share in each], np.float64)
    return Plan(algorithm, ranks, root, tuple(sizes), counts, shares, captured)


def _by_rank(ranks: int, whose: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets, and the places of ``whose`` in order of rank."""
    of = np.fromiter(whose, np.int64)
    return np.searchsorted(np.sort(of), np.arange(ranks + 1)), np.argsort(of, kind="stable")
