"""KV caches on their way from prefill to decode ranks, as engines move them: one-sided, page by page.

Pages of a cache lie scattered; each is an RDMA WRITE by the sender (no immediate, no clear-to-send) or
an RDMA READ by the receiver, over the queue pairs of the endpoint in turn. Pages of 64 KiB, two queue pairs,
16 READs under way on each: Mooncake's defaults (mooncake-transfer-engine/include/config.h). Who was not asked
learns of the end by a SEND behind the last page (NIXL's notification, a UCX active message) or in a way that
the captures do not show (Mooncake: the engines' own TCP).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.schema.simulated import SEND, WRITE
from dpuflow.synth.flows import WorkRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu

READS: Final = 16
"""Under way on one queue pair: max_rd_atomic."""
NOTICE_NS: Final = 20_000.0
"""From one side's being ready or done to the other's knowing it, where no packet here tells (assumed)."""
NOTICE_BYTES: Final = 72
"""Of a SEND that tells of a transfer's end (assumed)."""


class Manner(NamedTuple):
    """How an engine moves caches."""

    read: bool
    page: int
    queue_pairs: int
    sends: bool  # a SEND tells the other side of the end


class Transfer:
    """One cache on its way from ``src`` to ``dst``. Times are ns, None before they are known."""

    def __init__(
        self, endpoint: Endpoint, size: int, iteration: int, register_ns: float | None = None
    ) -> None:
        """``register_ns``: what registering memory for it alone takes; None: it is registered."""
        self.endpoint, self.size, self.iteration = endpoint, size, iteration
        self._register_ns = register_ns
        self.memory = endpoint.memory  # address and key
        self._ready_ns = 0.0
        self.offered_ns: float | None = None
        self.start_ns: float | None = None
        self.end_ns: float | None = None
        self.wanted_ns: float | None = None
        self.told_ns: float | None = None  # when the receiver knew that it is there
        self.offered = self.done = 0  # bytes
        self.waiting: list[Callable[[], None]] = []

    def offer(self, size: int) -> None:
        """The sender has ``size`` bytes more of the cache."""
        if self.offered_ns is None:
            self.offered_ns = self.endpoint.engine.now
        self.offered += size
        if not self.endpoint.manner.read:
            self._begin(size, 0.0)
        elif self.wanted_ns is not None:
            self._begin(size, NOTICE_NS)

    def want(self, then: Callable[[], None]) -> None:
        """The receiver needs the cache and goes on with ``then`` when it is there."""
        engine = self.endpoint.engine
        self.wanted_ns = engine.now
        if self.told_ns is not None:
            engine.at(max(engine.now, self.told_ns), then)
            return
        self.waiting.append(then)
        if self.endpoint.manner.read and self.offered:
            self._begin(self.offered, NOTICE_NS)

    def tell(self, when_ns: float) -> None:
        """The receiver will know at ``when_ns`` that all of it is there."""
        self.told_ns = when_ns
        for then in self.waiting:
            self.endpoint.engine.at(when_ns, then)

    def _begin(self, size: int, delay_ns: float) -> None:
        engine = self.endpoint.engine
        when = engine.now + delay_ns
        if self._register_ns is not None and not self._ready_ns:
            self.memory, self._ready_ns = self.endpoint.register(), when + self._register_ns
        engine.at(max(when, self._ready_ns), self.endpoint.carry, self, size)


class Endpoint:
    """The queue pairs of one pair of ranks, in one mode."""

    def __init__(
        self, src: Gpu, dst: Gpu, manner: Manner, engine: Engine, fabric: Fabric, random: Random
    ) -> None:
        self.src, self.dst, self.manner, self.engine, self._fabric = src, dst, manner, engine, fabric
        requester, responder = (dst, src) if manner.read else (src, dst)
        self._proxy = requester.proxy
        self.flows = [
            fabric.connect(requester.port, responder.port, self._told, self._done)
            for _ in range(manner.queue_pairs)
        ]
        self.backs = [
            fabric.answers(flow)
            if manner.read
            else fabric.connect(flow.dst, flow.src, self._ignore, self._ignore)
            for flow in self.flows
        ]
        self._responder = responder
        self.memory = self.register()
        self._random = random
        self._pages: deque[tuple[Transfer, int]] = deque()  # not yet posted
        # Of each queue pair what is not yet done, in order: bytes of a page, 0 for a notice.
        self._posted: list[deque[tuple[Transfer, int]]] = [deque() for _ in self.flows]
        self._coming: list[deque[Transfer | None]] = [deque() for _ in self.flows]  # None: a page
        self._turn = self._under_way = 0

    def register(self) -> tuple[int, int]:
        """New memory of the responder's: address and key."""
        return self._responder.memory.take(1 << 32, 4096), self._responder.memory.key()

    def carry(self, transfer: Transfer, size: int) -> None:
        """Post all pages of ``size`` bytes more."""
        if transfer.start_ns is None:
            transfer.start_ns = self.engine.now
        page = self.manner.page
        self._pages += ((transfer, min(page, size - at)) for at in range(0, size, page))
        self._next()

    def _next(self) -> None:
        """Post what may be under way."""
        manner = self.manner
        while self._pages and (not manner.read or self._under_way < READS * manner.queue_pairs):
            self._under_way += 1
            self.engine.at(self._proxy.act(0.0, 0.0), self._post, *self._pages.popleft())

    def _post(self, transfer: Transfer, size: int) -> None:
        turn = self._turn % len(self.flows)
        self._turn += 1
        self._posted[turn].append((transfer, size))
        page = self.manner.page
        region, rkey = transfer.memory
        va = region + self._random.randrange((1 << 32) // page) * page
        if self.manner.read:
            self._fabric.read(self.flows[turn], size, va, rkey)
        else:
            self._coming[turn].append(None)
            self._fabric.post(self.flows[turn], WorkRequest(WRITE, size, va, rkey))

    def _done(self, flow: Flow) -> None:
        """What was posted first on a queue pair is done."""
        transfer, size = self._posted[self.flows.index(flow)].popleft()
        if not size:
            return
        self._under_way -= 1
        self._next()
        transfer.done += size
        if transfer.done < transfer.size:
            return
        now = transfer.end_ns = self.engine.now
        if self.manner.sends:
            self.engine.at(self._proxy.act(0.0, 0.0), self._notify, transfer)
        if self.manner.read:
            transfer.tell(now)
        elif not self.manner.sends:
            transfer.tell(now + NOTICE_NS)

    def _notify(self, transfer: Transfer) -> None:
        self._posted[0].append((transfer, 0))
        self._coming[0].append(transfer)
        self._fabric.post(self.flows[0], WorkRequest(SEND, NOTICE_BYTES))

    def _told(self, flow: Flow) -> None:
        """A message is at the responder: of pages it learns nothing, a notice it reads."""
        transfer = self._coming[self.flows.index(flow)].popleft()
        if transfer is not None and not self.manner.read:
            transfer.tell(self.engine.now + self.dst.poll_ns())

    def _ignore(self, flow: Flow) -> None:
        """Nothing travels this way."""
