"""Collectives that need no receiver's consent: WRITEs into the peers' memory, and a flag behind them.

A round of an exchange is what a rank's kernel puts to some peers at once; it is over when the flags of all
who put to it in that round have come. One round to everybody is the dispatch, or the combine, of experts
(DeepEP, csrc/kernels/legacy/internode_ll.cu: a WRITE for each token, then an atomic add on a counter);
log2(n) rounds with the partner at distance 2^k are recursive doubling as NVRAR has it (NVSHMEM's puts and
signals).
Nothing is granted: receive buffers are there from the start, two in turn (DeepEP's low-latency mode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import ATOMIC, WRITE
from dpuflow.synth.flows import WorkRequest
from dpuflow.synth.transport import NVLINK_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu

POST_NS: Final = 120.0
"""What one work request costs a GPU that drives the NIC itself (IBGDA; assumed)."""
COPIERS: Final = 16
"""Thread blocks that copy side by side (assumed)."""
FLAG_BYTES: Final = 8
"""Of a flag that is a WRITE: an NVSHMEM signal, or a counter of DeepEP's."""
REGION: Final = 1 << 26
"""Bytes of each peer's receive buffer."""


class Near:
    """To a GPU of the same node: over NVLink, so nothing is on the wire."""

    def __init__(self, engine: Engine, flagged: Callable[[], None]) -> None:
        self._engine, self._flagged = engine, flagged

    def put(self, pair: int, size: int, offset: int, content: int) -> None:
        """One piece of data."""

    def flag(self, pair: int, atomic: bool, value: int) -> None:
        """What tells the receiver that all before it is there."""
        self._engine.at(self._engine.now + NVLINK_NS, self._flagged)


class Lane:
    """The queue pairs by which one rank puts to another."""

    def __init__(
        self, src: Gpu, dst: Gpu, queue_pairs: int, fabric: Fabric, flagged: Callable[[], None]
    ) -> None:
        self.src, self.dst, self._fabric = src, dst, fabric
        self._flagged = flagged
        self.flows = [fabric.connect(src.port, dst.port, self._came, self.ignore) for _ in range(queue_pairs)]
        self.region = dst.memory.take(2 * REGION, 4096)
        self.rkey = dst.memory.key()
        self.flag_va = dst.memory.take(4096, 4096)

    def put(self, pair: int, size: int, offset: int, content: int) -> None:
        """One piece of data; ``offset`` is its place in the receive buffer."""
        flow = self.flows[pair]
        data = WorkRequest(WRITE, size, self.region + offset, self.rkey, 0, content, counts=False)
        self._fabric.post(flow, data)

    def flag(self, pair: int, atomic: bool, value: int) -> None:
        """What tells the receiver that all before it on this queue pair is there."""
        flow, va = self.flows[pair], self.flag_va + 8 * pair
        if atomic:
            self._fabric.post(flow, WorkRequest(ATOMIC, 0, va, self.rkey, value))
        else:
            self._fabric.post(flow, WorkRequest(WRITE, FLAG_BYTES, va, self.rkey, target=value))

    def _came(self, flow: Flow) -> None:
        self._flagged()

    def ignore(self, flow: Flow) -> None:
        """A completion frees nothing that anybody waits for."""


@dataclass(frozen=True)
class Round:
    """What one rank does in one round: bytes of each piece it puts to each peer, and from whom it gets."""

    puts: dict[int, tuple[int, ...]]
    waits_for: tuple[int, ...]


def to_everybody(pieces: dict[tuple[int, int], tuple[int, ...]], rank: int) -> list[Round]:
    """One round: ``pieces`` are bytes of what each (rank, peer) puts."""
    puts = {dst: sizes for (src, dst), sizes in pieces.items() if src == rank}
    return [Round(puts, tuple(src for src, dst in pieces if dst == rank))]


def doubling(ranks: Sequence[int], per_node: int, rank: int, size: int, piece: int) -> list[Round]:
    """Recursive doubling over nodes (a power of two), between a reduce-scatter and an all-gather inside each.

    ``ranks`` are ordered node by node, ``per_node`` of each; ``size`` bytes are reduced.
    """
    place = ranks.index(rank)
    node, seat = divmod(place, per_node)
    own = -(-size // per_node)
    cut = tuple(min(piece, own - at) for at in range(0, own, piece))
    inside = tuple(ranks[node * per_node + other] for other in range(per_node) if other != seat)
    across = []
    distance = 1
    while distance < len(ranks) // per_node:
        peer = ranks[(node ^ distance) * per_node + seat]
        across.append(Round({peer: cut}, (peer,)))
        distance *= 2
    local = [Round(dict.fromkeys(inside, cut), inside)] if inside else []
    return [*local, *across, *local]


class Mesh:
    """Lanes between the ranks of a group, one each way, made when first used; flags that came are counted."""

    def __init__(
        self, gpus: Sequence[Gpu], engine: Engine, fabric: Fabric, queue_pairs: int, atomic: bool
    ) -> None:
        self.gpus = {gpu.rank: gpu for gpu in gpus}
        self._engine, self._fabric = engine, fabric
        self._queue_pairs, self._atomic = queue_pairs, atomic
        self._lanes: dict[tuple[int, int], Lane | Near] = {}
        self._flags: dict[tuple[int, int], int] = {}  # (src, dst) -> flags seen by the receiver's kernel
        self._wanted: dict[tuple[int, int], int] = {}  # flags of rounds that are behind the receiver
        self._waiting: dict[int, Callable[[], None]] = {}  # rank -> what looks again when a flag came
        self._turns: dict[int, int] = {}  # rank -> which half of the buffers it puts into

    def lanes(self) -> list[Lane]:
        """All that were used, in order of their making."""
        return [lane for lane in self._lanes.values() if isinstance(lane, Lane)]

    def _lane(self, src: int, dst: int) -> Lane | Near:
        key = (src, dst)
        if key not in self._lanes:
            a, b = self.gpus[src], self.gpus[dst]

            def flagged() -> None:
                self._flagged(src, dst)

            if a.node == b.node:
                self._lanes[key] = Near(self._engine, flagged)
            else:
                self._lanes[key] = Lane(a, b, self._queue_pairs, self._fabric, flagged)
        return self._lanes[key]

    def _flagged(self, src: int, dst: int) -> None:
        self._engine.at(self._engine.now + self.gpus[dst].poll_ns(), self._see, src, dst)

    def _see(self, src: int, dst: int) -> None:
        self._flags[src, dst] = self._flags.get((src, dst), 0) + 1
        if dst in self._waiting:
            self._waiting[dst]()

    def enter(self, rank: int, rounds: Sequence[Round], done: Callable[[], None]) -> None:
        """A rank's kernel starts; ``done`` is called when its last round is over."""
        _Run(self, rank, rounds, done).begin()

    # -- what a run needs ----------------------------------------------------------------------

    def put(self, rank: int, this: Round) -> None:
        """Post a round's pieces, peer by peer, and behind each peer's a flag on every queue pair."""
        gpu = self.gpus[rank]
        when = self._engine.now + gpu.handover_ns()
        turn = self._turns[rank] = 1 - self._turns.get(rank, 1)
        base = turn * REGION
        for peer, sizes in this.puts.items():
            lane, offset = self._lane(rank, peer), base
            for number, size in enumerate(sizes):
                when += POST_NS + size * gpu.timing.copy_ns_per_byte / COPIERS
                self._engine.at(when, lane.put, number % self._queue_pairs, size, offset, gpu.content())
                offset += -(-size // 16) * 16
        for peer, sizes in this.puts.items():
            for pair in range(self._queue_pairs):
                when += POST_NS
                self._engine.at(
                    when,
                    self._lane(rank, peer).flag,
                    pair,
                    self._atomic,
                    len(sizes[pair :: self._queue_pairs]) + 1,
                )

    def over(self, rank: int, this: Round) -> bool:
        """Whether everything that the rank waits for in a round has come; then it is behind it."""
        keys = [(peer, rank) for peer in this.waits_for]
        if any(self._flags.get(k, 0) < self._wanted.get(k, 0) + self._queue_pairs for k in keys):
            return False
        for key in keys:
            self._wanted[key] = self._wanted.get(key, 0) + self._queue_pairs
        return True

    def wait(self, rank: int, then: Callable[[], None] | None) -> None:
        """Look again with ``then`` when a flag comes; None: no more."""
        if then is None:
            self._waiting.pop(rank, None)
        else:
            self._waiting[rank] = then

    def later(self, rank: int, size: int, then: Callable[[], None]) -> None:
        """Go on when the rank's kernel has taken in ``size`` bytes."""
        timing = self.gpus[rank].timing
        self._engine.at(self._engine.now + timing.step_ns + size * timing.copy_ns_per_byte / COPIERS, then)


class _Run:
    """One rank's part in one exchange."""

    def __init__(self, mesh: Mesh, rank: int, rounds: Sequence[Round], done: Callable[[], None]) -> None:
        self._mesh, self._rank, self._rounds, self._done = mesh, rank, rounds, done
        self._at = 0

    def begin(self) -> None:
        """Put what this round puts, then wait for what it brings."""
        if self._at == len(self._rounds):
            self._done()
            return
        self._mesh.put(self._rank, self._rounds[self._at])
        self._look()

    def _look(self) -> None:
        this = self._rounds[self._at]
        if not self._mesh.over(self._rank, this):
            self._mesh.wait(self._rank, self._look)
            return
        self._mesh.wait(self._rank, None)
        self._at += 1
        size = sum(sum(sizes) for sizes in this.puts.values())
        self._mesh.later(self._rank, size, self.begin)
