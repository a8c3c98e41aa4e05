"""Sets of connections in lockstep in, those of one communicator each out.

Several communicators may share endpoints (tensor, data, expert parallel groups), never a connection. Which
connections are of one communicator is told by whom they connect: a ring, a tree or a chain connects all of
its ranks, whatever number of channels it uses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dpuflow.arrays.components import connected
from dpuflow.matching.pipes import together

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.matching.pipes import Lockstep, Pipe


def communicators(sets: Sequence[Lockstep], nodes: NDArray[np.int64]) -> list[list[Lockstep]]:
    """``sets`` cut into connected parts; parts that connect the same nodes are one communicator's."""
    found: dict[frozenset[int], list[Lockstep]] = {}
    for each in sets:
        for members in _connected(each.pipes, nodes):
            part = _some(each, members)
            ends = frozenset(int(nodes[end]) for pipe in part.pipes for end in pipe[:2])
            found.setdefault(ends, []).append(part)
    return list(found.values())


def completed(sets: Sequence[Lockstep]) -> list[list[Lockstep]]:
    """Parts of ``sets`` with the pipes whose ends all are theirs, in lockstep with them.

    Many messages of a pipe whose receiver was slow look like beginnings, so it is like no other.
    """
    found: dict[frozenset[int], list[Pipe]] = {}
    for each in sets:
        for members in _connected(each.pipes, None):
            pipes = [each.pipes[i] for i in members]
            found.setdefault(frozenset(end for pipe in pipes for end in pipe[:2]), []).extend(pipes)
    parts = []
    for ends, pipes in found.items():
        more = [pipe for others, theirs in found.items() if others < ends for pipe in theirs]
        if more and (one := together([*pipes, *more])) is not None:
            parts.append([one])
    return parts


def without(sets: Sequence[Lockstep], rows: Container[int]) -> list[Lockstep]:
    """``sets`` without the pipes whose rows are the arrays identified by ``rows``."""
    kept = [(each, [i for i, pipe in enumerate(each.pipes) if id(pipe.rows) not in rows]) for each in sets]
    return [_some(each, members) for each, members in kept if members]


def _some(each: Lockstep, members: list[int]) -> Lockstep:
    return replace(each, pipes=[each.pipes[i] for i in members], rows=each.rows[members])


def _connected(pipes: Sequence[Pipe], nodes: NDArray[np.int64] | None) -> list[list[int]]:
    """Numbers of pipes that are connected by nodes (None: by endpoints)."""
    ends = [(pipe.src, pipe.dst) if nodes is None else nodes[[pipe.src, pipe.dst]].tolist() for pipe in pipes]
    return connected(range(len(pipes)), ends.__getitem__)
