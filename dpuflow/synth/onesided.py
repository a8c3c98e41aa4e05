"""One-sided transfers of KV caches between prefill and decode ranks, as transfer engines make them.

Blocks of a cache lie scattered; each slice is an RDMA WRITE by the sender (no immediate, no clear-to-send) or
an RDMA READ by the receiver, over the queue pairs of the endpoint in turn. Slices of 64 KiB, two queue pairs,
16 READs under way on each: Mooncake's defaults (mooncake-transfer-engine/include/config.h).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from dpuflow.synth.trace import WRITE

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu

SLICE: Final = 64 * 1024
QUEUE_PAIRS: Final = 2
READS: Final = 16
"""Under way on one queue pair: max_rd_atomic."""
NOTICE_NS: Final = 20_000.0
"""From one side's being ready or done to the other's knowing it: a message of the engine (assumed)."""


class Transfer:
    """One cache on its way from ``src`` to ``dst``. Times are ns, None before they are known."""

    def __init__(self, endpoint: Endpoint, size: int, iteration: int) -> None:
        self.endpoint, self.size, self.iteration = endpoint, size, iteration
        self.offered_ns: float | None = None
        self.start_ns: float | None = None
        self.end_ns: float | None = None
        self.wanted = False
        self.waiting: list[Callable[[], None]] = []

    def offer(self) -> None:
        """The sender has the cache."""
        self.offered_ns = self.endpoint.engine.now
        if self.wanted or not self.endpoint.read:
            self._begin(0.0 if not self.endpoint.read else NOTICE_NS)

    def want(self, then: Callable[[], None]) -> None:
        """The receiver needs the cache and goes on with ``then`` when it is there."""
        engine = self.endpoint.engine
        if self.end_ns is not None:
            engine.at(max(engine.now, self.end_ns + NOTICE_NS), then)
            return
        self.waiting.append(then)
        self.wanted = True
        if self.endpoint.read and self.offered_ns is not None:
            self._begin(NOTICE_NS)

    def _begin(self, delay_ns: float) -> None:
        engine = self.endpoint.engine
        engine.at(engine.now + delay_ns, self.endpoint.carry, self)


class Endpoint:
    """The queue pairs of one pair of ranks, in one mode."""

    def __init__(
        self, src: Gpu, dst: Gpu, read: bool, engine: Engine, fabric: Fabric, random: Random
    ) -> None:
        self.src, self.dst, self.read, self.engine, self._fabric = src, dst, read, engine, fabric
        requester, responder = (dst, src) if read else (src, dst)
        self.flows = [
            fabric.connect(requester.port, responder.port, self._ignore, self._slice_done)
            for _ in range(QUEUE_PAIRS)
        ]
        self.backs = [
            fabric.answers(flow) if read else fabric.connect(flow.dst, flow.src, self._ignore, self._ignore)
            for flow in self.flows
        ]
        self._region = responder.memory.take(1 << 32, 4096)
        self._rkey = responder.memory.key()
        self._random = random
        self._left: list[tuple[Transfer, int]] = []  # transfers under way, with slices not yet done
        self._slices: deque[int] = deque()  # not yet posted
        self._posted = self._under_way = 0

    def carry(self, transfer: Transfer) -> None:
        """Post all slices."""
        transfer.start_ns = self.engine.now
        sizes = [min(SLICE, transfer.size - at) for at in range(0, transfer.size, SLICE)]
        self._left.append((transfer, len(sizes)))
        self._slices += sizes
        self._next()

    def _next(self) -> None:
        """Post what may be under way."""
        proxy = (self.dst if self.read else self.src).proxy
        while self._slices and (not self.read or self._under_way < READS * QUEUE_PAIRS):
            self._under_way += 1
            self.engine.at(proxy.act(0.0, 0.0), self._post, self._slices.popleft())

    def _post(self, size: int) -> None:
        flow = self.flows[self._posted % QUEUE_PAIRS]
        self._posted += 1
        va = self._region + self._random.randrange((1 << 32) // SLICE) * SLICE
        if self.read:
            self._fabric.read(flow, size, va, self._rkey)
        else:
            self._fabric.post(flow, WRITE, size, va, self._rkey, 0)

    def _slice_done(self, flow: Flow) -> None:
        self._under_way -= 1
        self._next()
        transfer, left = self._left[0]
        if left > 1:
            self._left[0] = transfer, left - 1
            return
        self._left.pop(0)
        transfer.end_ns = self.engine.now
        for then in transfer.waiting:
            self.engine.at(self.engine.now + (0.0 if self.read else NOTICE_NS), then)

    def _ignore(self, flow: Flow) -> None:
        """A WRITE tells its receiver nothing."""
