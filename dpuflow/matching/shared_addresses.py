"""Collectives of processes that share addresses: what each process sent, and what that is of its endpoint.

What processes of one address tell each other stays in their node: of a schedule only the edges between nodes
are seen. An endpoint has entered when the last of its processes has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.identity.processes import UNNAMED
from dpuflow.matching.recognise import matches
from dpuflow.schedules.graph import needed_between
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.recognise import EdgeBytes, Match
    from dpuflow.schema.tables import Rows

RINGS: Final = {Op.ALL_REDUCE: -1, Op.REDUCE_SCATTER: -1, Op.ALL_GATHER: 1}
"""Gloo's rings: whom a rank sends to, relative to itself (gloo/allreduce.cc, allgather.cc)."""
UNTOLD: Final = 1 << 20
"""Processes of which no rank is known have numbers from here on."""


def shares_addresses(job: Job, rows: Ints) -> bool:
    """Whether hellos name several ranks at one endpoint among ``rows``, and no rank at two.

    Ranks are numbered in each communicator anew: a rank at two endpoints is of two communicators.
    """
    if job.ends is None or not len(rows):
        return False
    picked = job.exchanges[rows]
    named = {
        (endpoint, rank)
        for end, ranks in zip(("src", "dst"), job.ends.of(picked), strict=True)
        for endpoint, rank in zip(picked[end].tolist(), ranks.tolist(), strict=True)
        if rank != UNNAMED
    }
    endpoints, ranks = ({pair[side] for pair in named} for side in (0, 1))
    return len(endpoints) < len(named) == len(ranks)


class Processes:
    """The processes at both ends of exchanges of one job, and the endpoint of each."""

    def __init__(self, job: Job, rows: Ints) -> None:
        """``rows``: of all collectives of one process group, of which it is known who is at their ends."""
        ends = job.ends
        assert ends is not None
        self._job, picked = job, job.exchanges[rows]
        side = (picked["src"] > picked["dst"]).astype(np.int64)
        line = picked["connection"].astype(np.int64)
        ranks = [ends.rank[line, side], ends.rank[line, 1 - side]]
        ports = [ends.port[line, side], ends.port[line, 1 - side]]
        where = [picked["src"].astype(np.int64), picked["dst"].astype(np.int64)]
        self.node: dict[int, int] = {}
        for endpoint, rank in zip(where, ranks, strict=True):
            known = rank != UNNAMED
            self.node.update(zip(rank[known].tolist(), endpoint[known].tolist(), strict=True))
        self.ranks = max(self.node, default=-1) + 1
        listeners = self._listeners(picked["op"], ranks, ports, where)
        names: dict[tuple[int, int], int] = {}
        for place, (rank, port, endpoint) in enumerate(zip(ranks, ports, where, strict=True)):
            for row in np.flatnonzero(rank == UNNAMED).tolist():
                key = (int(endpoint[row]), int(port[row]))
                ranks[place][row] = listeners.get(key, names.setdefault(key, UNTOLD + len(names)))
                self.node[int(ranks[place][row])] = key[0]
        self.at = dict(
            zip(rows.tolist(), zip(ranks[0].tolist(), ranks[1].tolist(), strict=True), strict=True)
        )

    def _listeners(
        self, op: NDArray[np.uint8], ranks: Sequence[Ints], ports: Sequence[Ints], where: Sequence[Ints]
    ) -> dict[tuple[int, int], int]:
        """The rank of each listener (endpoint, port): its peer's neighbour in a ring, else the one left."""
        found: dict[tuple[int, int], int] = {}
        for sender, receiver in ((0, 1), (1, 0)):
            known = (ranks[sender] != UNNAMED) & (ranks[receiver] == UNNAMED) & np.isin(op, list(RINGS))
            for row in np.flatnonzero(known).tolist():
                step = RINGS[Op(int(op[row]))] * (1 if sender == 0 else -1)
                key = (int(where[receiver][row]), int(ports[receiver][row]))
                rank = (int(ranks[sender][row]) + step) % self.ranks
                if found.setdefault(key, rank) != rank or self.node.get(rank, key[0]) != key[0]:
                    return {}
        if len(set(found.values())) < len(found):
            return {}
        left: dict[int, set[tuple[int, int]]] = {}
        for named, port, endpoint in zip(ranks, ports, where, strict=True):
            for row in np.flatnonzero(named == UNNAMED).tolist():
                key = (int(endpoint[row]), int(port[row]))
                if key not in found:
                    left.setdefault(key[0], set()).add(key)
        for end, keys in left.items():
            free = {rank for rank, node in self.node.items() if node == end} - set(found.values())
            if len(keys) == len(free) == 1:
                found[keys.pop()] = free.pop()
        return found

    def told(self, rows: Ints) -> bool:
        """Whether the ranks at both ends of all ``rows`` are known."""
        return all(max(self.at[row]) < UNTOLD for row in rows.tolist())

    @cached_property
    def homes(self) -> dict[int, int]:
        """The endpoint of each rank, as far as it is known. One that was never seen between nodes is where
        its neighbours are, or where ranks are missing if all endpoints have as many."""
        homes = {rank: end for rank, end in self.node.items() if rank < UNTOLD}
        most = max(Counter(homes.values()).values(), default=0)
        even = most * len(set(homes.values())) == self.ranks
        for rank in sorted(set(range(self.ranks)) - homes.keys()):
            near = {self.node.get(other % self.ranks) for other in (rank - 1, rank + 1)}
            count = Counter(homes.values())
            room = {end for end in near if end is not None and not (even and count[end] >= most)}
            if len(room) == 1 and (even or None not in near):
                homes[rank] = room.pop()
        return homes

    def _dated(self, instance: Instance) -> tuple[frozenset[int], frozenset[int]]:
        """Ranks whose first message between nodes needs nothing from others, and those that are known to have
        come by the first messages of their own or of such mates."""
        if instance.algorithm is None or len(self.homes) < self.ranks:
            return frozenset(), frozenset()
        home = tuple(self.homes[rank] for rank in instance.order)
        needed = needed_between(instance.algorithm, home, instance.root or 0)
        own = {at: ranks for at, ranks in needed.items() if all(home[rank] == home[at] for rank in ranks)}
        free = frozenset(instance.order[at] for at in own)
        return free, frozenset(instance.order[at] for ranks in own.values() for at in ranks)

    def _silent(self, seen: set[int]) -> frozenset[int]:
        """Endpoints with a rank that is not ``seen``: all where it is not known which."""
        gone = set(range(self.ranks)) - seen
        if not gone <= self.homes.keys():
            return frozenset(self.node.values())
        return frozenset(self.homes[rank] for rank in gone)

    def edges(self, exchanges: Rows, rows: Ints) -> dict[tuple[int, int], tuple[int, int]]:
        """(sending, receiving process) -> messages and bytes."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for row, size in zip(rows.tolist(), exchanges["bytes"][rows].tolist(), strict=True):
            count, total = found.get(self.at[row], (0, 0))
            found[self.at[row]] = count + 1, total + size
        return found

    def matches(self, edges: EdgeBytes, op: Op) -> list[Match]:
        """All algorithms of ``op`` among all ranks whose edges between nodes are these."""
        return matches(edges, range(self.ranks), op, seen=self.apart)

    def apart(self, rank: int, other: int) -> bool:
        """Whether two ranks are of different nodes; what one of no known node sends is not seen."""
        node = self.node
        return rank in node and other in node and node[rank] != node[other]

    def instance(self, instance: Instance) -> Instance:
        """The collective of ranks as one of endpoints; ``order`` of the former are the ranks."""
        both = np.array([self.at[row] for row in instance.rows.tolist()], np.int64).reshape(-1, 2)
        ends = self._job.ordered(self.node[p] for p in set(both.ravel().tolist()))
        first = {end: min(p for p, node in self.node.items() if node == end) for end in ends}
        if instance.root is not None and instance.root in self.node:
            first[self.node[instance.root]] = instance.root
        told = self.told(instance.rows)
        seen = set(both.ravel().tolist())
        free, come = self._dated(instance) if told else (frozenset[int](), frozenset[int]())
        silent = frozenset(ends) if self._seen(seen) < self.ranks else frozenset[int]()
        if told:
            silent = self._silent(seen | come)
        return replace(
            instance,
            order=ends,
            placement=replace(
                instance.placement,
                ranks=self.ranks if told else 0,
                seats=tuple(first[end] for end in ends) if told else (),
                processes=both.T,
            ),
            view=replace(
                instance.view,
                blind=frozenset(place for place, end in enumerate(ends) if end in silent),
                free=free,
            ),
        )

    def _seen(self, seen: set[int]) -> int:
        """How many processes have these messages, at least: one without a rank may be one that has one."""
        named: dict[int, int] = {}
        nameless: dict[int, int] = {}
        for process in seen:
            those = named if process < UNTOLD else nameless
            those[self.node[process]] = those.get(self.node[process], 0) + 1
        return sum(max(named.get(end, 0), nameless.get(end, 0)) for end in {*named, *nameless})
