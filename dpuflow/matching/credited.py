"""Operations of NCCL's net_ib, cut where its clear-to-send entries say that one begins.

In: connections and what each message's clear-to-send entry announced. Out: collectives, and the connections
that carry something else. One mechanism serves rings, chains, trees and PAT; no pause and no guess of sizes
enters:

1. Connections that carry the same operations are in lockstep: the same numbers of messages, and the places
   where an operation may begin are the same on all of them (``in_lockstep``).
2. Each rank carries out the operations of a communicator one after the other, on all connections. So the
   turns of several sets in lockstep go together if at every rank all first messages of a turn come before
   those of the next one (``reading``).
3. What takes part in a turn must make up one algorithm of NCCL with sizes that it can have (``layouts``).

Which connections are of one communicator is not known, nor are all in lockstep known to be: what explains the
most messages stands.

Several communicators may share endpoints (tensor, data, expert parallel groups), never a connection. Which
connections are of one communicator is told by whom they connect: a ring, a tree or a chain connects all of
its ranks, whatever number of channels it uses.

A connection takes up an operation when the one before it is done there. So the entry for an operation's
first message comes after the last message before it has arrived; within an operation entries run ahead by
the slots of the buffer (NCCL 2.30, src/proxy.cc ProxyAppend, src/transport/net.cc recvProxyProgress). A
receiver that is slow may use up its slots and look the same, but not at the same message of every connection
that carries the operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import connected
from dpuflow.matching.lanes import grouped
from dpuflow.matching.model import MOST, RARE, TWICE, placed
from dpuflow.matching.reading import Reading
from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.streams import Columns
    from dpuflow.schema.tables import Rows


def credited_instances(
    job: Job, connections: tuple[Ints, Ints, Ints], announced: Ints
) -> tuple[list[Instance], Bools]:
    """Collectives, and whether each connection is understood, or can be nothing else.

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
        in_part = near is not None and _in_part(joint, near, nodes)
        sets = in_lockstep(joint)
        own, instances = _by_communicators(job, sets)
        for others in (_coarser, _finer):
            if len(own) < len(members) and len(other := others(job.columns, joint)) != len(sets):
                more = _by_communicators(job, other)
                own, instances = max((own, instances), more, key=lambda read: _explained(read[1]))
        found += [placed(instance, near) for instance in instances]
        told[[number for number, pipe in members if in_part or id(pipe.rows) in own]] = True
    return found, told


def _in_part(pipes: Sequence[Pipe], near: frozenset[int], nodes: Ints) -> bool:
    """Whether nodes have several GPUs and not all were captured: which of the other GPUs share a node is not
    known then. What is not understood here (trees) nothing else makes sense of either."""
    ends = {end for pipe in pipes for end in pipe[:2]}
    return not ends <= near and len({int(nodes[end]) for end in ends}) < len(ends)


def _apart(parts: list[list[Lockstep]], nodes: Ints, near: frozenset[int] | None) -> list[list[Lockstep]]:
    """``parts`` that may be communicators; where not all nodes were captured, not those with several GPUs of
    one node: these are more likely part of something not understood."""
    ends = ({end for each in part for pipe in each.pipes for end in pipe[:2]} for part in parts)
    own = (near is None or len({int(nodes[end]) for end in mine}) == len(mine) for mine in ends)
    return [part for part, alone in zip(parts, own, strict=True) if alone]


def _coarser(columns: Columns, pipes: Sequence[Pipe]) -> list[Lockstep]:
    """``pipes`` by their numbers of messages: where receivers were slow, few pipes show no lockstep, and yet
    have hardly more than beginnings in common."""
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
        # The last operation may be cut off, where captures end or the job stopped: nothing is asked of it.
        if instances and (
            explained >= MOST * count or (2 * explained > count and _all_but_the_last(part, instances))
        ):
            found.append((part, instances))
    return found


def _all_but_the_last(sets: Sequence[Lockstep], instances: Sequence[Instance]) -> bool:
    """Whether ``instances`` have all operations of ``sets`` but for the last on each connection."""
    told = np.concatenate([each.rows for each in instances])
    return all(np.isin(each.rows[:, each.bounds[0] : each.bounds[-2]], told).all() for each in sets)


def joined(pipes: Sequence[tuple[int, Pipe]], nodes: Ints) -> list[list[tuple[int, Pipe]]]:
    """Pipes that are connected by endpoints, or by nodes: inside one NVLink connects them."""
    return connected(pipes, lambda numbered: nodes[[numbered[1].src, numbered[1].dst]].tolist())


def communicators(sets: Sequence[Lockstep], nodes: Ints) -> list[list[Lockstep]]:
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


def _connected(pipes: Sequence[Pipe], nodes: Ints | None) -> list[list[int]]:
    """Numbers of pipes that are connected by nodes (None: by endpoints)."""
    ends = [(pipe.src, pipe.dst) if nodes is None else nodes[[pipe.src, pipe.dst]].tolist() for pipe in pipes]
    return connected(range(len(pipes)), ends.__getitem__)


LIKE: Final = 0.5
"""Of the places where operations may begin on one of two pipes in lockstep, the share that the other must
have as well. Chance gives pipes of other counts at most one in two."""

SIGMAS: Final = 3
"""Standard deviations beyond chance that show two pipes of equally many messages to be in lockstep."""

_NONE: Final = np.zeros(0, np.int64)


class Pipe(NamedTuple):
    """One direction of one connection."""

    src: int
    dst: int
    rows: Ints  # of EXCHANGE, in order
    first: int  # number of its first clear-to-send entry; they are counted from 1
    begins: Bools  # an operation may begin with this message
    slots: Ints  # bytes that each message's entry announced
    arrived: Ints | None = None  # when each message had; None: not known
    until: int = FAR  # when the captures of its ends stop
    sizes: Ints | None = None  # bytes of each message; None: not known

    @property
    def stop(self) -> int:
        """Number of the entry behind the last."""
        return self.first + len(self.rows)


@dataclass
class Lockstep:
    """Pipes that carry the same operations: j has the messages ``bounds[j]:bounds[j + 1]`` of each."""

    pipes: list[Pipe]
    rows: Ints  # (pipes, messages) of EXCHANGE
    bounds: Ints
    slots: Ints  # of each operation: what its entries announced

    def __len__(self) -> int:
        return len(self.bounds) - 1


def connections_of(exchanges: Rows, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """``rows`` by connection and direction, each in order; where each begins and ends, by first use."""
    from dpuflow.kernels import streams as kernels

    key = np.empty(len(rows), np.int64)
    keys = kernels.directions(exchanges, rows, key) + 1
    count = np.bincount(key, minlength=keys)
    end = np.cumsum(count)
    dealt, at = np.empty_like(rows), end - count
    if not kernels.deal(exchanges, rows, key, at.copy(), dealt, np.zeros(keys, np.uint32)):
        dealt = rows[np.lexsort((exchanges["order"][rows], key))]
    used = np.flatnonzero(count)
    used = used[np.argsort(dealt[at[used]])]
    return dealt, at[used], end[used]


def pipes_of(job: Job, connections: tuple[Ints, Ints, Ints], announced: Ints) -> list[Pipe | None]:
    """A pipe for each of ``connections`` (``credited_instances``); None where entries are missing.

    Those missing at the beginning came before the capture did; a pipe begins behind them. ``announced`` as
    in ``Job``.
    """
    exchanges, until, (dealt, at, end) = job.exchanges, job.until, connections
    index, slots = exchanges["sub"][dealt].astype(np.int64), announced[dealt]
    granted, arrived = exchanges["grant_ns"][dealt], exchanges["arrived_end_ns"][dealt]
    sizes = job.columns.sizes[dealt]
    known = (granted[1:] != NEVER) & (arrived[:-1] != NEVER)
    waited = (granted[1:] > arrived[:-1]) | ~known
    begins = np.r_[True, waited | (slots[1:] != slots[:-1])]
    unseen = (slots == 0) | (index < 1)
    holes = np.r_[0, np.cumsum(np.r_[True, index[1:] != index[:-1] + 1] | unseen)]
    ends = np.stack([exchanges["src"][dealt[at]], exchanges["dst"][dealt[at]]], axis=1).tolist()
    found: list[Pipe | None] = []
    seen = np.flatnonzero(~unseen)
    begun = np.r_[seen, len(dealt)][np.searchsorted(seen, at)]
    for (src, dst), start, low, high in zip(
        ends, at.tolist(), np.minimum(begun, end).tolist(), end.tolist(), strict=True
    ):
        # Entries for the first messages came before the capture began; there are none missing behind them.
        if low == high or holes[high] > holes[low + 1]:
            found.append(None)
            continue
        begins[low] = index[low] == 1 or (low > start and bool(known[low - 1] and waited[low - 1]))
        part = slice(low, high)
        last = FAR if until is None else int(max(until[src], until[dst]))
        found.append(
            Pipe(
                src,
                dst,
                dealt[part],
                int(index[low]),
                begins[part],
                slots[part],
                arrived[part],
                last,
                sizes[part],
            )
        )
    return found


def in_lockstep(pipes: Sequence[Pipe], strict: bool = False) -> list[Lockstep]:
    """``pipes`` by what they carry, those with the fewest messages first.

    ``strict``: operations begin at all places that those before have in common, and at hardly any others: not
    those of as many messages in more operations, whose places include those of fewer.
    """
    sets: list[tuple[list[Pipe], Bools]] = []
    # Where receivers were slow many places look like beginnings: first those pipes with the fewest of these.
    for pipe in sorted(pipes, key=lambda pipe: (pipe.stop, int(np.count_nonzero(pipe.begins)))):
        for number, (members, common) in enumerate(sets):
            both = _in_both(members[0], common, pipe, strict)
            if both is not None:
                members.append(pipe)
                sets[number] = members, both
                break
        else:
            sets.append(([pipe], pipe.begins))
    if not strict:
        sets = _put_together(sets)
    return [each for members, _ in sets if (each := together(members)) is not None]


def _put_together(sets: Sequence[tuple[list[Pipe], Bools]]) -> list[tuple[list[Pipe], Bools]]:
    """``sets`` of pipes, those in lockstep merged, with what all pipes of a set have in common.

    Where receivers were slow two pipes share hardly more places than chance gives them. What many pipes have
    in common is nothing but beginnings, and shows which others have all of these, too.
    """
    kept: list[tuple[list[Pipe], Bools]] = []
    for members, common in sorted(sets, key=lambda each: (each[0][0].stop, -len(each[0]))):
        for number, (others, theirs) in enumerate(kept):
            if others[0].stop != members[0].stop:
                continue
            both = _in_both(others[0], theirs, members[0]._replace(begins=common), surely=True)
            if both is not None:
                kept[number] = [*others, *members], both
                break
        else:
            kept.append((members, common))
    return kept


def in_turn(each: Lockstep, starts: Ints) -> list[Lockstep]:
    """``each`` cut where every rank begins each operation on as many of its pipes before on the others.

    Two operations that take turns on pipes of their own (PAT's all_gather and reduce_scatter, whose
    connections lead opposite ways) have as many messages there. ``starts``: of each row of EXCHANGE.
    """
    begins = starts[each.rows[:, each.bounds[:-1]]]
    ranks: dict[int, list[int]] = {}
    for number in np.argsort(begins.sum(axis=1, dtype=np.float64), kind="stable").tolist():
        ranks.setdefault(each.pipes[number].src, []).append(number)
    (most, *others) = {len(mine) for mine in ranks.values()}
    if others:
        return [each]
    order = np.array(list(ranks.values()))  # (ranks, pipes of each)
    when = begins[order]
    known = (when != NEVER).all()
    cuts = [
        cut
        for cut in range(1, most)
        if known and (when[:, :cut].max(axis=1) <= when[:, cut:].min(axis=1)).all()
    ]
    parts = [together([each.pipes[n] for n in part.ravel()]) for part in np.split(order, cuts, axis=1)]
    return [each] if None in parts else [part for part in parts if part is not None]


def _in_both(
    one: Pipe, common: Bools, other: Pipe, strict: bool = False, surely: bool = False
) -> Bools | None:
    """With which messages of ``one`` operations may begin on both pipes; None if they are not in lockstep.

    ``common``: with which of them they may begin on all pipes that are known to be like it. ``surely``: more
    than chance gives, whatever else speaks for it.
    """
    from dpuflow.kernels import lockstep as kernels

    first = max(one.first, other.first)
    stop = max(min(one.stop, other.stop), first)
    mine, theirs = (slice(first - each.first, stop - each.first) for each in (one, other))
    left, right = common[mine], other.begins[theirs]
    sizes = (
        [_NONE, _NONE] if one.sizes is None or other.sizes is None else [one.sizes[mine], other.sizes[theirs]]
    )
    found = np.empty(kernels.N_FOUND, np.int64)
    kernels.compare(
        left.view(np.uint8), right.view(np.uint8), one.slots[mine], other.slots[theirs], *sizes, TWICE, found
    )
    apart, lefts, rights, shared, left_longest, right_longest, unlike = found.tolist()
    if apart:  # a barrier's tree before a ring's: it takes no part
        return None
    # Of many places that only look like beginnings chance gives both pipes as many as this.
    chance = lefts * rights / max(stop - first, 1)
    beyond = one.stop == other.stop and shared > chance + SIGMAS * chance**0.5
    if not beyond and (surely or shared < max(1, LIKE * min(lefts, rights))):
        return None
    if strict and (shared < lefts or shared <= LIKE * max(lefts, rights)):
        return None
    if one.stop != other.stop:
        # The capture's end may have cut an operation off; more than one it cannot.
        # The numbers of a capture that begins in mid-job agree by no chance.
        surely = min(one.first, other.first) > 1 and shared > chance + SIGMAS * chance**0.5
        if 2 * shared < max(lefts, rights) and not surely:
            return None
        longest = max(left_longest, right_longest)
        if abs(one.stop - other.stop) > longest and not _stopped(one, other, longest):
            return None
    # Channels share an operation's bytes alike.
    begin = left & right
    if unlike or _numbered_otherwise(one, other, first, begin):
        return None
    both = np.zeros_like(common)
    both[mine] = begin
    return both


def _numbered_otherwise(one: Pipe, other: Pipe, first: int, begin: Bools) -> bool:
    """Whether one pipe carried an operation before that the other had no part in.

    Then of operations of the same numbers hardly any overlap in time, and nearly all of those some apart do.
    ``begin``: with which of the entries from number ``first`` on an operation may begin on both.
    """
    from dpuflow.kernels import lockstep as kernels

    at = np.flatnonzero(begin)
    if one.arrived is None or other.arrived is None or len(at) <= TWICE:
        return False
    found = np.empty((1 + 2 * min(NCCL_STEPS, len(at) - 1 - TWICE), 2), np.int64)
    kernels.overlaps(at, one.arrived[first - one.first :], other.arrived[first - other.first :], found)
    same, *others = (both / max(known, 1) for both, known in found.tolist())
    return same <= RARE and max(others, default=0.0) >= MOST


def _stopped(one: Pipe, other: Pipe, longest: int) -> bool:
    """Whether, of two pipes, the captures at the ends of the one with fewer messages stopped before the other
    had finished its next operation. ``longest``: messages of the longest operation."""
    short, long = sorted((one, other), key=lambda pipe: pipe.stop)
    return long.arrived is not None and bool(long.arrived[short.stop + longest - long.first] >= short.until)


def together(pipes: Sequence[Pipe]) -> Lockstep | None:
    """Pipes in lockstep, from the first number that all of them have to the last."""
    first, stop = max(pipe.first for pipe in pipes), min(pipe.stop for pipe in pipes)
    if stop <= first:
        return None
    rows = np.stack([pipe.rows[first - pipe.first : stop - pipe.first] for pipe in pipes])
    begins = np.ones(stop - first, bool)
    for pipe in pipes:
        begins &= pipe.begins[first - pipe.first : stop - pipe.first]
    bounds = np.flatnonzero(begins)
    if all(pipe.stop == stop or pipe.begins[stop - pipe.first] for pipe in pipes):
        bounds = np.r_[bounds, stop - first]
    if len(bounds) < 2:
        return None
    slots = pipes[0].slots[bounds[:-1] + (first - pipes[0].first)]
    return Lockstep(list(pipes), rows, bounds, slots)
