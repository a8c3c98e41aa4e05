"""Operations of NCCL's net_ib, cut where its clear-to-send entries say that one begins.

In: connections and what each message's clear-to-send entry announced. Out: collectives, and the connections
that carry something else. One mechanism serves rings, chains, trees and PAT; no pause and no guess of sizes
enters:

1. Connections that carry the same operations are in lockstep: the same numbers of messages, and the places
   where an operation may begin are the same on all of them (``pipes``).
2. Each rank carries out the operations of a communicator one after the other, on all connections. So the
   turns of several sets in lockstep go together if at every rank all first messages of a turn come before
   those of the next one (``operations``, ``reading``).
3. What takes part in a turn must make up one algorithm of NCCL with sizes that it can have (``layouts``,
   ``operations``).

Which connections are of one communicator is not known, nor are all in lockstep known to be: what explains the
most messages stands.

Several communicators may share endpoints (tensor, data, expert parallel groups), never a connection. Which
connections are of one communicator is told by whom they connect: a ring, a tree or a chain connects all of
its ranks, whatever number of channels it uses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.lanes import grouped
from dpuflow.matching.levels import MOST
from dpuflow.matching.model import placed
from dpuflow.matching.pipes import in_lockstep, in_turn, pipes_of, together
from dpuflow.matching.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.pipes import Lockstep, Pipe
    from dpuflow.matching.streams import Columns


def credited_instances(
    job: Job,
    connections: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    announced: NDArray[np.int64],
) -> tuple[list[Instance], NDArray[np.bool_]]:
    """Collectives, and whether each connection is understood.

    ``connections`` are rows of EXCHANGE by connection, where each one's begin and where they end;
    ``announced`` as in ``Job``.
    """
    near, nodes = job.near, job.nodes
    told = np.zeros(len(connections[1]), bool)
    found: list[Instance] = []
    if not announced.any():
        return found, told
    pipes = pipes_of(job, connections, announced)
    usable = [
        (number, pipe)
        for number, pipe in enumerate(pipes)
        if pipe is not None and set(pipe.slots.tolist()) <= job.buffers.keys()
    ]
    for members in joined(usable, nodes):
        joint = [pipe for _, pipe in members]
        sets = in_lockstep(joint)
        own, instances = _by_communicators(job, sets)
        for others in (_coarser, _finer):
            if len(own) < len(members) and len(other := others(job.columns, joint)) != len(sets):
                more = _by_communicators(job, other)
                own, instances = max((own, instances), more, key=lambda read: _explained(read[1]))
        found += [placed(instance, near) for instance in instances]
        told[[number for number, pipe in members if id(pipe.rows) in own]] = True
    return found, told


def _apart(
    parts: list[list[Lockstep]], nodes: NDArray[np.int64], near: frozenset[int] | None
) -> list[list[Lockstep]]:
    """``parts`` that may be communicators: where not all nodes were captured not those with several GPUs of a
    node. These are rather a part of what was not understood."""
    ends = ({end for each in part for pipe in each.pipes for end in pipe[:2]} for part in parts)
    own = (near is None or len({int(nodes[end]) for end in mine}) == len(mine) for mine in ends)
    return [part for part, alone in zip(parts, own, strict=True) if alone]


def _coarser(columns: Columns, pipes: Sequence[Pipe]) -> list[Lockstep]:
    """``pipes`` by how many messages they have: where receivers were slow few of them do not show to be in
    lockstep, and yet have in common hardly more than beginnings."""
    alike = grouped(pipes, lambda pipe: (pipe.first, pipe.stop))
    return [each for mine in alike.values() if (each := together(mine)) is not None]


def _finer(columns: Columns, pipes: Sequence[Pipe]) -> list[Lockstep]:
    """``pipes`` in lockstep, more of them apart: operations that have as many messages, each on pipes of its
    own, may look like one. What is cut too often goes together again in turns."""
    alike = grouped(pipes, lambda pipe: int(columns.sizes[pipe.rows].max()))
    sets = [each for mine in alike.values() for each in in_lockstep(mine, strict=True)]
    return [part for each in sets for part in in_turn(each, columns.starts)]


def _explained(instances: Sequence[Instance]) -> int:
    """How many messages they have."""
    return sum(len(each.rows) for each in instances)


def _by_communicators(job: Job, sets: list[Lockstep]) -> tuple[set[int], list[Instance]]:
    """Pipes that are understood, by the identity of their rows, and what they carry."""
    nodes, near = job.nodes, job.near
    own: set[int] = set()
    found: list[Instance] = []
    # One communicator; several, each with its own endpoints; or with its own nodes.
    for kind in (None, np.arange(len(nodes)), nodes):
        left = without(sets, own)
        parts = [left] if kind is None else _apart(communicators(left, kind), nodes, near)
        for part, instances in _understood(job, parts):
            found += instances
            own |= {id(pipe.rows) for each in part for pipe in each.pipes}
    return own, found


def _understood(job: Job, parts: list[list[Lockstep]]) -> list[tuple[list[Lockstep], list[Instance]]]:
    """Communicators, each given by its sets, with their operations, where these explain enough."""
    found = []
    for part in filter(None, parts):
        instances = Reading(job, part).instances()
        explained = _explained(instances)
        count = sum(int(each.bounds[-1] - each.bounds[0]) * len(each.pipes) for each in part)
        if instances and explained >= MOST * count:
            found.append((part, instances))
    return found


def joined(pipes: Sequence[tuple[int, Pipe]], nodes: NDArray[np.int64]) -> list[list[tuple[int, Pipe]]]:
    """Pipes that are connected by endpoints, or by nodes: inside one NVLink connects them."""
    return connected(pipes, lambda numbered: nodes[[numbered[1].src, numbered[1].dst]].tolist())


def communicators(sets: Sequence[Lockstep], nodes: NDArray[np.int64]) -> list[list[Lockstep]]:
    """``sets`` cut into connected parts; parts that connect the same nodes are one communicator's."""
    found: dict[frozenset[int], list[Lockstep]] = {}
    for each in sets:
        for members in _connected(each.pipes, nodes):
            part = _some(each, members)
            ends = frozenset(int(nodes[end]) for pipe in part.pipes for end in pipe[:2])
            found.setdefault(ends, []).append(part)
    return list(found.values())


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
