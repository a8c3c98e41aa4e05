"""Communicators: who is next to whom on which channel, and the links between them (src/graph/connect.cc)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.synth import algorithms, sizes
from dpuflow.synth.gpu import Part
from dpuflow.synth.pat import pat as pat_lanes
from dpuflow.synth.pooled import Pool, Pooled
from dpuflow.synth.sockets import Socket
from dpuflow.synth.transport import Connection, Grain, Link, Local
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from dpuflow.synth.algorithms import Lane
    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.gpu import Gpu
    from dpuflow.synth.scenario import Operation
    from dpuflow.synth.sizes import Protocol
from dpuflow.synth.transport import Settings

UNEVEN: Final = 0.2
"""By what share of an even one sizes of an all_to_allv differ at most, wherever they go (assumed)."""


def _algorithm(operation: Operation) -> str:
    """By which NCCL carries the operation out."""
    if operation.op in ("all_to_all", "all_to_allv", "send_recv"):
        return "linear"
    if operation.op in ("broadcast", "reduce"):
        return "chain"
    if operation.algorithm == "nvls_tree":
        return "tree"
    return operation.algorithm if operation.algorithm in ("tree", "pat") else "ring"


def _ragged(operation: Operation, n: int, draw: Random) -> dict[tuple[int, int], int]:
    """What each position sends to each other one in an all_to_allv, one byte at least."""
    even, skew = operation.bytes / n, operation.skew
    found = {}
    for src in range(n):
        others = n - 1 if src == operation.root else n - 2
        for dst in range(n):
            share = 1.0
            if src != operation.root:
                share = 1 + skew * others if dst == operation.root else 1 - skew
            if dst != src:
                found[src, dst] = max(1, round(even * share * draw.uniform(1 - UNEVEN, 1 + UNEVEN)))
    return found


class Share(NamedTuple):
    """One rank's part in an operation."""

    lanes: tuple[tuple[Part, ...], ...]
    receives: tuple[tuple[Link, int], ...]  # links it receives on, and how many messages
    sends: tuple[tuple[Link, int], ...]
    grain: Grain | None  # None: nothing is granted


class Plan(NamedTuple):
    """An operation as its ranks carry it out; the same for every repetition."""

    shares: dict[int, Share]  # by rank of the job
    algorithm: str
    protocol: str | None  # NCCL's


class Communicator:
    """A group of GPUs. Links are made when first used."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        engine: Engine,
        fabric: Fabric,
        settings: Settings,
        most: int,
        on_rail: Callable[[Gpu, Gpu], Gpu],
    ) -> None:
        self.gpus, self._engine, self._fabric, self._settings, self._most = (
            gpus,
            engine,
            fabric,
            settings,
            most,
        )
        self._on_rail = on_rail  # of the first one's node the GPU on the second one's rail
        self._pools: dict[tuple[int, int, int], Pool] = {}
        self._links: dict[tuple[int, int, int, bool, int], Link] = {}
        self._plans: dict[tuple[object, ...], Plan] = {}
        self.nodes: dict[int, list[int]] = {}  # node -> positions of its GPUs
        for place, gpu in enumerate(gpus):
            self.nodes.setdefault(gpu.node, []).append(place)

    def links(self) -> list[Link]:
        """All that were used, in order of their making."""
        return list(self._links.values())

    def ring(self, channel: int) -> list[int]:
        """Positions in ring order. Neighbouring nodes meet on the same rail: odd ones go the other way."""
        order: list[int] = []
        for number, places in enumerate(self.nodes.values()):
            count = len(places)
            enter = channel % count
            leave = enter ^ 1 if enter ^ 1 < count else (enter + 1) % count
            if number % 2:
                enter, leave = leave, enter
            between = [places[(enter + i) % count] for i in range(1, count)]
            if count > 1:
                between.remove(places[leave])
                between.append(places[leave])
            order += [places[enter], *between]
        return order

    def tree(self, channel: int, channels: int) -> dict[int, int | None]:
        """Position -> parent: a double binary tree over nodes, a chain of GPUs inside each."""
        first, second = algorithms.double_tree(len(self.nodes))
        over = first if channel < -(-channels // 2) else second
        members = list(self.nodes.values())
        heads = []
        parents: dict[int, int | None] = {}
        for places in members:
            chain = [places[(channel + i) % len(places)] for i in range(len(places))]
            heads.append(chain[0])
            for before, after in pairwise(chain):
                parents[after] = before
        for node, parent in enumerate(over):
            parents[heads[node]] = None if parent is None else heads[parent]
        return parents

    def plan(self, operation: Operation, protocol: str, draw: Random | None = None) -> Plan:
        """How the operation is carried out, with NCCL's ``protocol`` where it has the choice.

        ``draw``: of all_to_allv, for sizes that are others each time.
        """
        if operation.op == "all_to_allv":
            assert draw is not None
            return self._make(operation, self._settings.protocols[protocol], draw)
        key = (
            operation.op,
            operation.bytes,
            operation.algorithm,
            protocol,
            operation.channels,
            operation.root,
            operation.peer,
        )
        if key not in self._plans:
            self._plans[key] = self._make(operation, self._settings.protocols[protocol])
        return self._plans[key]

    def _make(self, operation: Operation, protocol: Protocol, draw: Random | None = None) -> Plan:
        """The operation's lanes, in NCCL's ``protocol`` where it has the choice."""
        name = _algorithm(operation)
        if name == "linear" or operation.algorithm in ("pat", "nvls_tree"):
            protocol = self._settings.protocols["simple"]
        if name == "linear":
            lanes, grain = self._sends(operation, protocol, draw)
        else:
            lanes = self._channels(operation, name, protocol)
            grain = Grain.of(protocol, name == "ring")
        shares = {
            self.gpus[place].rank: self._share(place, mine, protocol, grain)
            for place, mine in lanes.items()
            if mine
        }
        return Plan(shares, name, protocol.name)

    def _most_channels(self, operation: Operation) -> int:
        return min(self._most, operation.channels or self._most)

    def _sends(
        self, operation: Operation, simple: Protocol, draw: Random | None
    ) -> tuple[dict[int, list[Lane]], Grain]:
        """Lanes of what is made of sends and receives, by position."""
        n, size, most = len(self.gpus), operation.bytes, self._most_channels(operation)
        chunk = min(sizes.P2P_CHUNK, simple.slot)
        lanes: dict[int, list[Lane]] = {place: [] for place in range(n)}
        if operation.op != "send_recv":
            to_each = {} if draw is None else _ragged(operation, n, draw)
            lanes = algorithms.all_to_all(
                range(n), lambda *way: to_each.get(way, size // n), most, chunk, self._per_node()
            )
        else:
            lanes |= algorithms.send_recv(operation.root, operation.peer, size, most, chunk)
        return lanes, Grain(3, chunk, 1, NCCL_STEPS)

    def _channels(self, operation: Operation, name: str, protocol: Protocol) -> dict[int, list[Lane]]:
        """Lanes of a collective, by position: each channel carries its share."""
        n, op, size = len(self.gpus), operation.op, operation.bytes
        blocks = op in ("all_gather", "reduce_scatter")
        # What one channel carries: all_gather counts a rank's block, reduce_scatter the whole buffer.
        own = -(-size // n) if op == "reduce_scatter" else size
        whole = own * n if blocks else size
        count = sizes.channels_for(protocol, whole, n, self._most_channels(operation), name != "tree")
        cell = protocol.share
        if name == "chain":
            cell *= 2
        elif blocks:
            cell = cell * 2 // n
        shares = sizes.deal(own, count, max(16, cell))
        lanes: dict[int, list[Lane]] = {place: [] for place in range(n)}
        for channel, share in enumerate(shares):
            if name == "tree":
                nvls = operation.algorithm == "nvls_tree"
                found = self._tree(channel, len(shares), share, protocol, nvls)
            else:
                found = {
                    p: [lane] for p, lane in self._lane(operation, name, channel, share, protocol).items()
                }
            for place, each in found.items():
                lanes[place] += each
        return lanes

    def _lane(
        self, operation: Operation, name: str, channel: int, share: int, protocol: Protocol
    ) -> dict[int, Lane]:
        """A channel of a ring, a chain or PAT, by position."""
        op, ring = operation.op, self.ring(channel)
        if name == "pat":
            return pat_lanes(channel, range(len(self.gpus)), share, op == "reduce_scatter", protocol.slot)
        if name == "chain":
            at = ring.index(operation.root) + (1 if op == "reduce" else 0)
            return algorithms.chain(channel, ring[at:] + ring[:at], share, protocol, op == "broadcast")
        if op == "all_reduce":
            return algorithms.ring_all_reduce(channel, ring, share, protocol)
        return algorithms.ring_blocks(channel, ring, share, protocol, op == "all_gather")

    def _tree(
        self, channel: int, channels: int, share: int, protocol: Protocol, nvls: bool
    ) -> dict[int, list[Lane]]:
        """A channel of a tree, by position."""
        if not nvls:
            return algorithms.tree_all_reduce(channel, self.tree(channel, channels), share, protocol)
        over = algorithms.double_tree(len(self.nodes))[channel % 2]
        return algorithms.nvls_tree_all_reduce(channel, list(self.nodes.values()), over, share)

    def _share(self, place: int, lanes: list[Lane], protocol: Protocol, grain: Grain) -> Share:
        receives: dict[Link, int] = {}
        sends: dict[Link, int] = {}
        found = []
        for lane in lanes:
            parts = []
            for recv, send, slices, times, copies in lane.stretches:
                inputs = tuple(self._link(lane, other, place, lane.planes[0]) for other in recv)
                outputs = tuple(self._link(lane, place, other, lane.planes[1]) for other in send)
                for link in inputs:
                    receives[link] = receives.get(link, 0) + len(slices) * times
                for link in outputs:
                    sends[link] = sends.get(link, 0) + len(slices) * times
                cut = tuple((size, size if lane.point_to_point else protocol.wire(size)) for size in slices)
                parts.append(Part(inputs, outputs, cut, times, copies))
            found.append(tuple(parts))
        return Share(tuple(found), tuple(receives.items()), tuple(sends.items()), grain)

    def _per_node(self) -> int:
        """GPUs of each node, 1 where nodes have more or less of them."""
        counts = {len(places) for places in self.nodes.values()}
        return counts.pop() if len(counts) == 1 else 1

    def _pool(self, channel: int, via: Gpu, dst: Gpu) -> Pool:
        """What sends through ``via``'s NIC share."""
        key = (channel, via.rank, dst.rank)
        if key not in self._pools:
            self._pools[key] = Pool(via, dst, self._engine, self._fabric, self._settings)
        return self._pools[key]

    def _link(self, lane: Lane, src: int, dst: int, plane: int) -> Link:
        a, b = self.gpus[src], self.gpus[dst]
        key = (lane.channel, src, dst, lane.point_to_point, plane if a.node == b.node else 0)
        if key not in self._links:
            if a.node == b.node:
                self._links[key] = Local(a, b, self._engine, self._settings.nvlink.get(a.node, 0.0))
            elif self._settings.sockets:
                self._links[key] = Socket(a, b, self._engine, self._fabric)
            else:
                # Collectives have rings and trees of their own; only sends go round by another GPU.
                via = self._on_rail(a, b) if self._settings.pxn and lane.point_to_point else None
                if via is not None and self._settings.shared:
                    self._links[key] = Pooled(a, b, self._pool(lane.channel, via, b))
                else:
                    self._links[key] = Connection(a, b, self._engine, self._fabric, self._settings, via)
        return self._links[key]
