"""NCCL's network transport: proxy threads, clear-to-send entries, credits, data writes with immediate.

A ``Connection`` carries data one way between two GPUs' channels. The receiver's proxy grants slots (CTS) as
soon as its host has launched the operation, the sender's proxy writes a slice when the GPU has made it and a
grant is there, and a slot is free again when the NIC has the ACK (src/transport/net.cc, net_ib/p2p.cc).
``Local`` is the same between GPUs of one node, over NVLink: nothing of it is on the wire.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.schema.simulated import CTS, WRITE, WRITE_IMM
from dpuflow.synth.flows import WorkRequest
from dpuflow.synth.sizes import round_up
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu, LaneRun
    from dpuflow.synth.sizes import Protocol

ROUTED_BYTES: Final = 8192
"""NCCL_IB_AR_THRESHOLD: larger messages are a WRITE and an empty WRITE with immediate."""
NVLINK_NS: Final = 700.0
"""From one GPU's store to another's load over NVLink (assumed; invisible on the wire)."""


class Layout(NamedTuple):
    """How a version of NCCL writes its clear-to-send entries and immediates."""

    entry: int  # bytes
    stride: int  # from row to row
    rows: int
    size_at: int
    size_bytes: int
    rkeys_at: int
    rkeys: int
    requests_at: int
    tag_at: int
    number_at: int
    big_endian: bool  # the immediate

    def immediate(self, told: int) -> int:
        """What the wire's four bytes are, read as big endian."""
        return int.from_bytes(told.to_bytes(4, "big" if self.big_endian else "little"), "big")


LAYOUTS: Final = {
    "2.18": Layout(32, 256, 64, 8, 4, 12, 1, 16, 20, 24, False),
    "2.20": Layout(64, 512, 256, 8, 4, 12, 2, 20, 24, 32, False),
    "2.25": Layout(64, 512, 256, 8, 8, 16, 4, 32, 36, 40, False),
    "2.29": Layout(64, 512, 256, 8, 8, 16, 4, 32, 36, 40, True),
    "2.30": Layout(64, 512, 256, 8, 8, 16, 8, 48, 52, 56, True),
}
"""By the first version that has it (src/transport/net_ib, ncclIbSendFifo)."""


class Grain(NamedTuple):
    """What one operation makes of a connection's buffer."""

    base: int  # which buffer: the protocol's number, or p2p's; below 0: of one operation alone
    slot: int  # bytes of a slot
    steps: int  # slots one message takes
    depth: int  # messages granted ahead

    @classmethod
    def of(cls, protocol: Protocol, ring: bool) -> Grain:
        """Of a collective: rings with Simple take two slots a message where they cut chunks in slices."""
        steps = protocol.slice_steps if ring else 1
        return cls(protocol.number, protocol.slot, steps, NCCL_STEPS // steps)


class Link(ABC):
    """What both kinds of connection count, in messages since the beginning."""

    wired = True  # captures see what it carries

    def __init__(self, src: Gpu, dst: Gpu) -> None:
        self.src, self.dst = src, dst
        self.window = NCCL_STEPS  # messages the sender's GPU may be ahead of what is done
        self.produced = 0  # by the sending GPU
        self.freed = 0  # slots given back to it
        self.arrived = 0  # at the receiving GPU
        self.contents: deque[int] = deque()  # of slots filled and not yet taken
        self.taken = 0  # by it
        self.sender: LaneRun | None = None  # waits for a slot
        self.receiver: LaneRun | None = None  # waits for data
        self._watched: deque[tuple[int, float, Callable[[float], None]]] = deque()

    def expect(self, messages: int, grain: Grain) -> None:
        """The receiver's host has launched an operation with so many messages."""

    def announce(self, messages: int) -> None:
        """The sender's host has."""

    def open(self) -> None:
        """The receiver's kernel has started an operation."""

    def watch(self, tell: Callable[[float], None]) -> None:
        """Tell how long the slice that is made next waits for a credit and its operation's turn."""

    @abstractmethod
    def publish(self, size: int, content: int) -> None:
        """The sending GPU has filled a slot with ``size`` bytes on the wire, which hold ``content``."""

    @abstractmethod
    def take(self) -> None:
        """The receiving GPU is done with a slot."""

    def _note(self, tell: Callable[[float], None], now: float) -> None:
        self._watched.append((self.produced + 1, now, tell))

    def _handed(self, message: int, now: float) -> None:
        """The proxy has taken up ``message``, counted from 1."""
        if self._watched and self._watched[0][0] == message:
            _, made, tell = self._watched.popleft()
            tell(now - made)

    def _give(self) -> None:
        if self.sender is not None:
            lane, self.sender = self.sender, None
            lane.proceed()

    def _bring(self) -> None:
        if self.receiver is not None:
            lane, self.receiver = self.receiver, None
            lane.proceed()


class Local(Link):
    """Between GPUs of one node."""

    wired = False

    def __init__(self, src: Gpu, dst: Gpu, engine: Engine, byte_ns: float = 0.0) -> None:
        """``byte_ns``: what a byte takes beyond the latency; of sound links that is left out."""
        super().__init__(src, dst)
        self._engine, self._byte_ns, self._free_at = engine, byte_ns, 0.0

    def publish(self, size: int, content: int) -> None:
        self.produced += 1
        self._free_at = max(self._free_at, self._engine.now) + size * self._byte_ns
        self._engine.at(self._free_at + NVLINK_NS, self._arrive)

    def _arrive(self) -> None:
        self.arrived += 1
        self._bring()

    def take(self) -> None:
        self.taken += 1
        self._engine.at(self._engine.now + NVLINK_NS, self._free)

    def _free(self) -> None:
        self.freed += 1
        self._give()


class Settings(NamedTuple):
    """NCCL's settings that the transport needs."""

    layout: Layout
    queue_pairs: int
    split: bool
    routed: bool
    registered: bool
    sockets: bool
    pxn: bool
    shared: bool  # sends of a node's GPUs go over one connection of the NIC that sends them
    by_id: bool  # immediates are numbers of requests
    protocols: dict[str, Protocol]
    nvlink: dict[int, float]  # of nodes whose GPUs hand on slowly: ns a byte


def in_order(counts: list[int], before: int, split: bool) -> int:
    """How many more messages are whole, given those of each queue pair."""
    pairs = len(counts)
    if pairs == 1:
        return counts[0] - before
    if split:
        return min(counts) - before
    more = 0
    while counts[(before + more) % pairs] > (before + more) // pairs:
        more += 1
    return more


class Connection(Link):
    """Between NICs. With PXN the sender's is that of ``via``, another GPU of its node, which gets the slices
    over NVLink and whose proxy serves them (src/graph/search.cc ncclTopoGetNetDev, src/transport/net.cc
    sendSetup).
    """

    def __init__(
        self, src: Gpu, dst: Gpu, engine: Engine, fabric: Fabric, settings: Settings, via: Gpu | None = None
    ) -> None:
        super().__init__(src, dst)
        self.nic = via or src
        self._hop_ns = 0.0 if self.nic is src else NVLINK_NS
        self._engine, self._fabric, self._settings = engine, fabric, settings
        self.data = [
            fabric.connect(self.nic.port, dst.port, self._data_arrived, self._data_done)
            for _ in range(settings.queue_pairs)
        ]
        self.grants = fabric.connect(dst.port, self.nic.port, self._grant_arrived, self.ignore)
        self.fifo_va = self.nic.memory.take(settings.layout.stride * settings.layout.rows, 4096)
        self.fifo_rkey = self.nic.memory.key()
        self._buffers: dict[int, tuple[int, int]] = {}  # base -> address and rkey, at the receiver
        self._step = self._anew = 0
        self._asked: deque[tuple[int, Grain]] = deque()  # operations: their last message, how they use slots
        self._asked_before = self._opened = 0  # operations that are done, and that kernels have begun
        self._granted = 0
        self._credits = 0
        self._targets: deque[tuple[int, int]] = deque()  # of credits not yet used
        self._sizes: deque[tuple[int, int]] = deque()  # produced, not yet posted: bytes, what they hold
        self._ends: deque[int] = deque()  # operations of the sender: their last message
        self._ahead: deque[int] = deque()
        self._posted = 0
        self._posted_at = self._granted_at = 0.0
        self._came = [0] * settings.queue_pairs
        self._went = [0] * settings.queue_pairs

    # -- receiver ----------------------------------------------------------------------------

    def expect(self, messages: int, grain: Grain) -> None:
        last = self._asked[-1][0] if self._asked else self.taken
        if self.dst.registers:
            self._anew += 1
            grain = grain._replace(base=-self._anew)
        self._asked.append((last + messages, grain))
        self._grant()

    def open(self) -> None:
        self._opened += 1
        self._grant()

    def _grant(self) -> None:
        """Post the clear-to-send entries that the operation and the slots allow."""
        while self._asked and self.taken >= self._asked[0][0]:
            self._asked.popleft()
            self._asked_before += 1
        if not self._asked:
            return
        if self._settings.registered and self._asked_before + 1 > self._opened:
            return
        last, grain = self._asked[0]
        while self._granted < min(last, self.taken + grain.depth):
            self._granted += 1
            when = self.dst.proxy.act(self._granted_at, self.dst.grant_ns())
            self._granted_at = when
            self._engine.at(when, self._post_grant, self._granted, grain)

    def _post_grant(self, number: int, grain: Grain) -> None:
        layout = self._settings.layout
        if grain.base not in self._buffers:
            size = grain.slot * (layout.rows if self._settings.registered else NCCL_STEPS)
            self._buffers[grain.base] = self.dst.memory.take(size, 4096), self.dst.memory.key()
        base, rkey = self._buffers[grain.base]
        # A registered buffer is the user's: data goes on and on in it, not round the slots.
        slots = layout.rows if self._settings.registered else NCCL_STEPS
        target = base + self._step % slots * grain.slot
        self._step += grain.steps
        self._targets.append((target, rkey))
        row = self.fifo_va + (number - 1) % layout.rows * layout.stride
        room = grain.slot * grain.steps
        entry = WorkRequest(CTS, layout.entry, row, self.fifo_rkey, number, target, room, rkey)
        self._fabric.post(self.grants, entry)

    def _data_arrived(self, flow: Flow) -> None:
        """The last packet of a message is in the receiver's NIC; its proxy tells the GPU in order."""
        which = self.data.index(flow)
        self._came[which] += 1
        for _ in range(in_order(self._came, self._told, self._settings.split)):
            self._told += 1
            self._engine.at(self.dst.proxy.act(0.0, self.dst.poll_ns()), self._bring_one)

    _told = 0  # messages handed to the receiver's proxy

    def _bring_one(self) -> None:
        self.arrived += 1
        self._bring()

    def take(self) -> None:
        self.taken += 1
        self._grant()

    # -- sender ------------------------------------------------------------------------------

    def _grant_arrived(self, flow: Flow) -> None:
        self._credits += 1
        self._send()

    def announce(self, messages: int) -> None:
        last = self._ends[-1] if self._ends else self.freed
        self._ends.append(last + messages)
        self._send()

    def watch(self, tell: Callable[[float], None]) -> None:
        self._note(tell, self._engine.now)

    def publish(self, size: int, content: int) -> None:
        self.produced += 1
        self._sizes.append((size, content))
        self._send()

    def _send(self) -> None:
        """Write what is produced, granted, and of the operation whose turn it is."""
        while self._ends and self.freed >= self._ends[0]:
            self._ends.popleft()
        last = self._ends[0] if self._ends else 0
        while self._posted < min(self.produced, self._credits, last):
            self._posted += 1
            self._handed(self._posted, self._engine.now)
            when = self.nic.proxy.act(self._posted_at, self._hop_ns + self.src.handover_ns())
            self._posted_at = when
            self._engine.at(when, self._post_data)

    def _post_data(self) -> None:
        size, content = self._sizes.popleft()
        target, rkey = self._targets.popleft()
        pairs = self.data
        number = self._written
        self._written += 1
        value = self._settings.layout.immediate(number if self._settings.by_id else size)
        data = WorkRequest(WRITE_IMM, size, target, rkey, value, content)
        if not self._settings.split:
            self._write(pairs[number % len(pairs)], data, size)
            return
        piece = round_up(ceil(size / len(pairs)), 128)
        for i, flow in enumerate(pairs):
            part = max(0, min(piece, size - i * piece))
            self._write(flow, data._replace(size=part, va=target + i * piece, target=content + i), size)

    _written = 0  # messages handed to the NIC

    def _write(self, flow: Flow, data: WorkRequest, message: int) -> None:
        """Post some of a ``message`` of so many bytes; its size alone decides how (ncclIbMultiSend)."""
        if self._settings.routed and message > ROUTED_BYTES:
            self._fabric.post(flow, data._replace(kind=WRITE, value=0, counts=False))
            self._fabric.post(flow, WorkRequest(WRITE_IMM, 0, value=data.value))
        else:
            self._fabric.post(flow, data)

    def _data_done(self, flow: Flow) -> None:
        which = self.data.index(flow)
        self._went[which] += 1
        for _ in range(in_order(self._went, self._done, self._settings.split)):
            self._done += 1
            self._engine.at(self._engine.now + self._hop_ns + self.src.poll_ns(), self._free)

    _done = 0  # messages acknowledged

    def _free(self) -> None:
        self.freed += 1
        self._send()
        self._give()

    def ignore(self, flow: Flow) -> None:
        """Completions of clear-to-send entries tell nobody anything."""
