"""A GPU with its NIC, memory and proxy thread, and the lanes of its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.synth.timing import lognormal

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.flows import Port
    from dpuflow.synth.timing import Timing
    from dpuflow.synth.transport import Link


RESTED_NS: Final = 1e6
"""A proxy thread that had nothing to do for so long may have to be scheduled anew."""
CONTENTS: Final = (1 << 62) - 1
"""What slices hold is a number up to this."""


class Memory:
    """Registered memory of one process: addresses and keys as a host hands them out."""

    def __init__(self, random: Random) -> None:
        self._next = 0x7F00_0000_0000 + random.randrange(1 << 26) * 4096
        self._key = random.randrange(0x1000, 0x200000)

    def take(self, size: int, align: int) -> int:
        """The address of a new region."""
        at = -(-self._next // align) * align
        self._next = at + size
        return at

    def key(self) -> int:
        """A new remote key."""
        self._key += 0x101
        return self._key


class Proxy:
    """NCCL's proxy thread of one GPU: one thing at a time."""

    def __init__(self, engine: Engine, timing: Timing, random: Random) -> None:
        self._engine, self._timing, self._random = engine, timing, random
        self._free_at = 0.0

    def act(self, not_before: float, delay_ns: float) -> float:
        """When an action asked for now is done, ``delay_ns`` of notice and queueing included."""
        now, timing = self._engine.now, self._timing
        share = timing.wake_share if now - self._free_at > RESTED_NS else timing.stall_share
        if share and self._random.random() < share:
            self._free_at = max(self._free_at, now) + self._random.expovariate(1.0 / timing.stall_ns)
        when = max(now + delay_ns, not_before, self._free_at) + timing.proxy_ns
        self._free_at = max(self._free_at, now) + timing.proxy_ns
        return when


class Gpu:
    """One rank's GPU and what serves it."""

    def __init__(
        self, rank: int, node: int, port: Port, engine: Engine, timing: Timing, random: Random
    ) -> None:
        self.rank, self.node, self.port = rank, node, port
        self.timing = timing
        self.handover_ns = lognormal(random, timing.handover_ns, timing.spread)
        """From a slice in GPU memory to the proxy's noticing."""
        self.memory = Memory(random)
        self.proxy = Proxy(engine, timing, random)
        self._made = 0
        self.slow_grant_ns = 0.0
        self.registers = False  # a buffer for each operation

    def poll_ns(self) -> float:
        """From a completion to the proxy's noticing."""
        return self.handover_ns() * 0.5

    def content(self) -> int:
        """What a new slice of this GPU's own holds, as a number for its first bytes."""
        self._made += 1
        return self.rank << 40 | self._made

    def grant_ns(self) -> float:
        """From a free slot to the proxy's noticing."""
        return self.handover_ns() * 0.5 + self.slow_grant_ns


class Part(NamedTuple):
    """A stretch of a lane with its links: slices as (bytes of data, bytes on the wire)."""

    recv: tuple[Link, ...]
    send: tuple[Link, ...]
    slices: tuple[tuple[int, int], ...]
    times: int
    copies: bool


class LaneRun:
    """One lane while its kernel runs: waits for input and slots, copies, passes on."""

    def __init__(
        self,
        parts: tuple[Part, ...],
        gpu: Gpu,
        engine: Engine,
        done: Callable[[], None],
        sent: Callable[[float], None],
    ) -> None:
        """``sent`` is told how long the first slice on the wire of each link was held up."""
        self._parts, self._gpu, self._engine, self._done, self._sent = parts, gpu, engine, done, sent
        self._part = self._round = self._slice = 0
        self._began_ns = engine.now
        self._waited_ns: float | None = None  # for the first slice's input and slot
        self._used: set[Link] = set()

    def proceed(self) -> None:
        """Go on with the current slice if all it needs is there; else wait for what is missing."""
        if self._part == len(self._parts):
            self._done()
            return
        part = self._parts[self._part]
        for link in part.recv:
            if link.arrived <= link.taken:
                link.receiver = self
                return
        for link in part.send:
            if link.produced - link.freed >= link.window:
                link.sender = self
                return
        if part.send and self._waited_ns is None:
            self._waited_ns = self._engine.now - self._began_ns
        timing = self._gpu.timing
        size = part.slices[self._slice][0]
        self._engine.at(self._engine.now + timing.step_ns + size * timing.copy_ns_per_byte, self._finish)

    def _finish(self) -> None:
        part = self._parts[self._part]
        wire = part.slices[self._slice][1]
        self._slice += 1
        if self._slice == len(part.slices):
            self._slice = 0
            self._round += 1
            if self._round == part.times:
                self._round = 0
                self._part += 1
        content = self._gpu.content()
        for link in part.recv:
            came = link.contents.popleft()
            content = came if part.copies else content + came & CONTENTS
            link.take()
        for link in part.send:
            link.contents.append(content)
            if link not in self._used:
                self._used.add(link)
                link.watch(self._taken)
            link.publish(wire, content)
        self.proceed()

    def _taken(self, credit_ns: float) -> None:
        """A link's first slice is with the proxy, that long after it was made."""
        self._sent(credit_ns + (self._waited_ns or 0.0))
