"""Connections that sends of several GPUs share: what PXN makes of point-to-point traffic.

With PXN a node's GPUs send to a GPU of another node through the one on its rail, whose proxy has one
connection to it a channel (NCCL_NET_SHARED_COMMS=1, the default; src/transport/net.cc sendProxyConnect). The
receiver puts what it expects in one call over it in groups: a clear-to-send entry for each message of up to
eight senders, in one WRITE (recvProxyProgress; nreqs). The sender posts a group when all of its messages are
ready: a WRITE each, and their sizes in a WRITE WITH IMMEDIATE (src/transport/net_ib/p2p.cc ncclIbMultiSend).
So who is late delays all.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import CTS, WRITE, WRITE_IMM
from dpuflow.synth.flows import WorkRequest
from dpuflow.synth.sizes import round_up
from dpuflow.synth.transport import NVLINK_NS, Grain, Link, in_order
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu
    from dpuflow.synth.transport import Settings

MOST: Final = 8
"""NCCL_NET_IB_MAX_RECVS: messages of one group."""
SHARED_STEPS: Final = 16
"""NCCL_SHARED_STEPS: slots that the connections of a channel share."""
SIZE_BYTES: Final = 4


class Pooled(Link):
    """What one GPU sends to another over a connection that others share."""

    def __init__(self, src: Gpu, dst: Gpu, pool: Pool) -> None:
        super().__init__(src, dst)
        self.pool = pool
        self.asked = self.posted = self.announced = self.opened = self.calls = 0
        self.sizes: deque[tuple[int, int]] = deque()
        self._nvlink_ns = 0.0 if pool.nic is src else NVLINK_NS

    def expect(self, messages: int, grain: Grain) -> None:
        """The receiver's host has launched an operation with so many messages."""
        self.pool.expect(self, messages, grain)

    def announce(self, messages: int) -> None:
        """The sender's host has."""
        self.announced += messages
        self.pool.send()

    def open(self) -> None:
        """The receiver's kernel has started an operation."""
        self.opened += 1
        self.pool.grant()

    def watch(self, tell: Callable[[float], None]) -> None:
        """Tell how long the slice that is made next waits for its turn."""
        self._note(tell, self.pool.now)

    def publish(self, size: int, content: int) -> None:
        """The sending GPU has filled a slot."""
        self.produced += 1
        self.sizes.append((size, content))
        self.pool.send()

    def take(self) -> None:
        """The receiving GPU is done with a slot."""
        self.taken += 1
        self.pool.grant()

    def handover_ns(self) -> float:
        """From the slice in the sender's memory to the proxy that serves it."""
        return self._nvlink_ns + self.src.handover_ns()

    def post(self, now: float) -> None:
        """The proxy takes up its next message."""
        self.posted += 1
        self._handed(self.posted, now)

    def bring(self) -> None:
        """A message is with the receiving GPU."""
        self.arrived += 1
        self._bring()

    def free(self) -> None:
        """A message is acknowledged."""
        self.freed += 1
        self._give()


class _Call:
    """What the receiver expects of one call: the links that take part, their messages before and after."""

    def __init__(self, now: float, grain: Grain) -> None:
        self.at, self.grain, self.posted = now, grain, 0
        self.spans: dict[Pooled, tuple[int, int]] = {}
        self.needs: dict[Pooled, int] = {}  # how many kernels must have begun

    @property
    def depth(self) -> int:
        """Messages of each that are granted ahead."""
        return max(1, min(NCCL_STEPS, SHARED_STEPS // len(self.spans)))

    def group(self) -> list[Pooled]:
        """Whose messages are granted together next."""
        return [link for link, (first, last) in self.spans.items() if first + self.posted < last]


class Pool:
    """The connection itself, from ``nic``'s NIC to that of ``dst``, on one channel."""

    def __init__(self, nic: Gpu, dst: Gpu, engine: Engine, fabric: Fabric, settings: Settings) -> None:
        self.nic, self.src, self.dst = nic, nic, dst
        self._engine, self._fabric, self._settings = engine, fabric, settings
        self.data = [
            fabric.connect(nic.port, dst.port, self._data_arrived, self._data_done)
            for _ in range(settings.queue_pairs)
        ]
        self.grants = fabric.connect(dst.port, nic.port, self._grant_arrived, self.ignore)
        self.fifo_va = nic.memory.take(settings.layout.stride * settings.layout.rows, 4096)
        self.fifo_rkey = nic.memory.key()
        self._sizes_va = dst.memory.take(settings.layout.rows * MOST * SIZE_BYTES, 4096)
        self._sizes_rkey = dst.memory.key()
        self._buffer: tuple[int, int] | None = None
        self._calls: deque[_Call] = deque()
        self._granted = self._credits = self._written = self._told = self._done = 0
        self._granted_at = self._posted_at = 0.0
        self._groups: deque[list[tuple[Pooled, int, int]]] = (
            deque()
        )  # granted, not yet posted: link, va, rkey
        self._ready: deque[list[tuple[Pooled, int, int]]] = deque()
        self._coming: deque[list[Pooled]] = deque()
        self._acked: deque[list[Pooled]] = deque()
        self._came = [0] * settings.queue_pairs
        self._went = [0] * settings.queue_pairs

    @property
    def now(self) -> float:
        """The time, ns."""
        return self._engine.now

    # -- receiver ----------------------------------------------------------------------------

    def expect(self, link: Pooled, messages: int, grain: Grain) -> None:
        """The receiver's host has launched an operation: what it expects in one call goes together."""
        call = self._calls[-1] if self._calls else None
        open_ = call is not None and call.at == self.now and link not in call.spans
        if call is None or not open_ or len(call.spans) == MOST or call.posted:
            call = _Call(self.now, grain)
            self._calls.append(call)
            self._engine.at(self.now, self.grant)
        call.spans[link] = (link.asked, link.asked + messages)
        link.asked += messages
        link.calls += 1
        call.needs[link] = link.calls

    def grant(self) -> None:
        """Post the entries that the call and the slots allow."""
        while self._calls and all(link.taken >= last for link, (_, last) in self._calls[0].spans.items()):
            self._calls.popleft()
        if not self._calls:
            return
        call = self._calls[0]
        if self._settings.registered and any(link.opened < n for link, n in call.needs.items()):
            return
        while (group := call.group()) and all(
            call.spans[link][0] + call.posted < link.taken + call.depth for link in group
        ):
            self._granted += 1
            places = [call.posted % call.depth * len(call.spans) + i for i in range(len(group))]
            call.posted += 1
            when = self.dst.proxy.act(self._granted_at, self.dst.grant_ns())
            self._granted_at = when
            self._engine.at(when, self._post_grant, self._granted, group, places, call.grain)

    def _post_grant(self, number: int, group: list[Pooled], places: list[int], grain: Grain) -> None:
        layout = self._settings.layout
        if self._buffer is None:
            self._buffer = self.dst.memory.take(grain.slot * SHARED_STEPS, 4096), self.dst.memory.key()
        base, rkey = self._buffer
        targets = [base + place % SHARED_STEPS * grain.slot for place in places]
        trace = self._fabric.trace
        message = len(trace.messages)
        for link, target in zip(group, targets, strict=True):
            trace.entries.add(message, target, grain.slot, rkey, link.src.rank)
        self._groups.append([(link, target, rkey) for link, target in zip(group, targets, strict=True)])
        row = self.fifo_va + (number - 1) % layout.rows * layout.stride
        size = layout.entry * len(group)
        entry = WorkRequest(CTS, size, row, self.fifo_rkey, number, targets[0], grain.slot, rkey)
        self._fabric.post(self.grants, entry)

    def _data_arrived(self, flow: Flow) -> None:
        which = self.data.index(flow)
        self._came[which] += 1
        for _ in range(in_order(self._came, self._told, self._settings.split)):
            self._told += 1
            for link in self._coming.popleft():
                self._engine.at(self.dst.proxy.act(0.0, self.dst.poll_ns()), link.bring)

    # -- sender ------------------------------------------------------------------------------

    def _grant_arrived(self, flow: Flow) -> None:
        self._credits += 1
        self.send()

    def send(self) -> None:
        """Post the groups whose messages are all produced, and granted."""
        while self._credits and self._groups:
            group = [link for link, _, _ in self._groups[0]]
            if any(link.posted >= min(link.produced, link.announced) for link in group):
                return
            self._credits -= 1
            self._ready.append(self._groups.popleft())
            for link in group:
                link.post(self.now)
            when = self.nic.proxy.act(self._posted_at, max(link.handover_ns() for link in group))
            self._posted_at = when
            self._engine.at(when, self._post_data)

    def _post_data(self) -> None:
        group = self._ready.popleft()
        links = [link for link, _, _ in group]
        self._coming.append(links)
        self._acked.append(links)
        held = [link.sizes.popleft() for link in links]
        number = self._written
        self._written += 1
        pairs = self.data
        flows = pairs if self._settings.split else [pairs[number % len(pairs)]]
        for i, flow in enumerate(flows):
            self._write(flow, i, len(flows), group, held, number)

    def _write(
        self,
        flow: Flow,
        part: int,
        parts: int,
        group: list[tuple[Pooled, int, int]],
        held: list[tuple[int, int]],
        number: int,
    ) -> None:
        """Post one queue pair's part of a group."""
        layout, by_id = self._settings.layout, self._settings.by_id
        first = held[0][0]
        told = number if by_id else first if layout.big_endian or len(group) == 1 else 0
        value = layout.immediate(told)
        several = len(group) > 1
        for (_, target, rkey), (size, content) in zip(group, held, strict=True):
            piece = round_up(ceil(size / parts), 128) if parts > 1 else size
            mine = max(0, min(piece, size - part * piece))
            data = WorkRequest(WRITE_IMM, mine, target + part * piece, rkey, value, content + part)
            self._fabric.post(flow, data._replace(kind=WRITE, value=0, counts=False) if several else data)
        if several:
            trace = self._fabric.trace
            message = len(trace.messages)
            for size, _ in held:
                trace.entries.add(message, 0, size, 0, 0)
            row = self._sizes_va + number % layout.rows * MOST * SIZE_BYTES
            sizes = WorkRequest(WRITE_IMM, SIZE_BYTES * len(group), row, self._sizes_rkey, value)
            self._fabric.post(flow, sizes)

    def _data_done(self, flow: Flow) -> None:
        which = self.data.index(flow)
        self._went[which] += 1
        for _ in range(in_order(self._went, self._done, self._settings.split)):
            self._done += 1
            for link in self._acked.popleft():
                self._engine.at(self.now + self.src.poll_ns(), link.free)

    def ignore(self, flow: Flow) -> None:
        """Completions of clear-to-send entries tell nobody anything."""
