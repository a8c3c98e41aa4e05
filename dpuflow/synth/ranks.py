"""Ranks at work: programs of compute phases and operations, the host that launches ahead of the GPU.

An operation's kernel starts on a rank when the GPU has come to it, its stream is free and the host has
launched it; that is when the rank enters. It leaves when the kernel's last slice is done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from dpuflow.synth.gpu import LaneRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.caches import Transfer
    from dpuflow.synth.engine import Engine
    from dpuflow.synth.gpu import Gpu
    from dpuflow.synth.groups import Plan
    from dpuflow.synth.onesided import Mesh, Round
    from dpuflow.synth.scenario import Operation

HOST_NS: Final = 3_000.0
"""What one launch costs the host (assumed)."""
CHANNEL_NS: Final = 150.0
"""Thread blocks of one kernel start within this of each other (assumed)."""


@dataclass
class Work:
    """One operation of the job: what it is, and when each rank entered and left it."""

    operation: Operation
    plan: Plan
    iteration: int
    stream: int = 0
    extra: dict[str, object] = field(default_factory=dict)  # for truth.json
    enter_ns: dict[int, float] = field(default_factory=dict)
    leave_ns: dict[int, float] = field(default_factory=dict)
    injected_ns: dict[int, float] = field(default_factory=dict)
    held_ns: dict[int, float] = field(default_factory=dict)  # of the rank's first message on the wire

    @property
    def finished(self) -> bool:
        """Whether all its ranks have left it."""
        return self.leave_ns.keys() == self.plan.shares.keys()


@dataclass
class Compute:
    """The GPU is busy."""

    ns: float


@dataclass
class Launch:
    """An operation is asked for; the program goes on without waiting."""

    work: Work
    host_late_ns: float | None = None  # the host launches only when the GPU has come to it, and so much later
    slow_grant_ns: float = 0.0
    registers: bool = False  # the buffer is registered for this operation alone


@dataclass
class Wait:
    """Until an operation is done on this rank."""

    work: Work


@dataclass
class Put:
    """A kernel that puts to its peers itself; the program goes on when it is done."""

    work: Work
    mesh: Mesh
    rounds: list[Round]


@dataclass
class Offer:
    """``size`` bytes more of a cache are ready to be transferred; the program goes on."""

    transfer: Transfer
    size: int


@dataclass
class Want:
    """Until caches are there."""

    transfers: list[Transfer]


class Gate:
    """What ranks wait for at the same time: a prompt."""

    def __init__(self) -> None:
        self.open = False
        self._waiting: list[Callable[[], None]] = []

    def wait(self, proceed: Callable[[], None]) -> None:
        """Call ``proceed`` when it opens."""
        self._waiting.append(proceed)

    def release(self) -> None:
        """Let all go on, those who come later, too."""
        self.open = True
        waiting, self._waiting = self._waiting, []
        for proceed in waiting:
            proceed()


@dataclass
class Hold:
    """Until a gate is open."""

    gate: Gate


@dataclass
class Call:
    """The rank's host does something beside, at once."""

    act: Callable[[], None]


@dataclass
class Halt:
    """The rank does nothing any more."""


Program = list["Compute | Launch | Wait | Put | Offer | Want | Hold | Call | Halt"]


class Rank:
    """Carries out one program."""

    def __init__(self, gpu: Gpu, program: Program, engine: Engine, run_ahead: int, random: Random) -> None:
        program = list(takewhile(lambda item: not isinstance(item, Halt), program))
        self.gpu, self._program, self._engine, self._random = gpu, program, engine, random
        self._place = 0
        self._waits: Work | None = None
        self._launches = [i for i in program if isinstance(i, Launch)]
        self._reached = self._launched = self._done = 0
        self._run_ahead = run_ahead
        self._host_busy = False
        self._ready: dict[int, float] = {}  # launch -> when its kernel may start for the host's part
        self._streams: dict[int, deque[int]] = {}

    def start(self) -> None:
        """Begin."""
        self._drive_host()
        self.proceed()

    def proceed(self) -> None:
        """Go on with the program."""
        while self._place < len(self._program):
            item = self._program[self._place]
            if isinstance(item, Wait):
                if self.gpu.rank not in item.work.leave_ns:
                    self._waits = item.work
                    return
                self._place += 1
            elif isinstance(item, Offer):
                self._place += 1
                item.transfer.offer(item.size)
            elif isinstance(item, Put):
                self._place += 1
                self._put(item)
                return
            elif isinstance(item, Want):
                self._place += 1
                self._want(item.transfers)
                return
            elif isinstance(item, Call):
                self._place += 1
                item.act()
            elif isinstance(item, Hold):
                if not item.gate.open:
                    item.gate.wait(self.proceed)
                    return
                self._place += 1
            elif isinstance(item, Compute):
                self._place += 1
                self._engine.at(self._engine.now + item.ns, self.proceed)
                return
            elif isinstance(item, Launch):
                self._place += 1
                number = self._reached
                self._reached += 1
                queue = self._streams.setdefault(item.work.stream, deque())
                queue.append(number)
                if item.host_late_ns is not None:
                    self._drive_host()
                if queue[0] == number:
                    self._try(number)

    def _want(self, transfers: list[Transfer]) -> None:
        missing = len(transfers)

        def there() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self.proceed()

        for transfer in transfers:
            transfer.want(there)

    def _put(self, item: Put) -> None:
        work, rank = item.work, self.gpu.rank

        def done() -> None:
            work.leave_ns[rank] = self._engine.now
            self.proceed()

        work.enter_ns[rank] = self._engine.now
        item.mesh.enter(rank, item.rounds, done)

    # -- host --------------------------------------------------------------------------------

    def _drive_host(self) -> None:
        """Launch what the host may launch now."""
        number = self._launched
        if self._host_busy or number == len(self._launches) or number >= self._done + self._run_ahead:
            return
        launch = self._launches[number]
        delay = HOST_NS
        if launch.host_late_ns is not None:
            if self._reached <= number:
                return
            delay += launch.host_late_ns
        self._host_busy = True
        self._engine.at(self._engine.now + delay, self._launch)

    def _launch(self) -> None:
        number = self._launched
        launch = self._launches[number]
        self.gpu.slow_grant_ns, self.gpu.registers = launch.slow_grant_ns, launch.registers
        share = launch.work.plan.shares[self.gpu.rank]
        assert share.grain is not None
        for link, messages in share.receives:
            link.expect(messages, share.grain)
        for link, messages in share.sends:
            link.announce(messages)
        self._host_busy = False
        self._launched += 1
        self._ready[number] = self._engine.now + self.gpu.timing.launch_ns
        if self._reached > number and self._streams[launch.work.stream][0] == number:
            self._try(number)
        self._drive_host()

    # -- kernels -----------------------------------------------------------------------------

    def _try(self, number: int) -> None:
        """Start the kernel at the head of its stream, once the host has launched it."""
        if number in self._ready:
            self._engine.at(
                max(self._engine.now, self._ready.pop(number)), self._kernel, self._launches[number]
            )

    def _kernel(self, launch: Launch) -> None:
        work, rank, now = launch.work, self.gpu.rank, self._engine.now
        share = work.plan.shares[rank]
        work.enter_ns[rank] = now
        for link, _ in share.receives:
            link.open()
        assert share.grain is not None
        for link, _ in share.sends:
            link.window = share.grain.depth
        left = len(share.lanes)

        def lane_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._leave(work)

        def sent(held_ns: float) -> None:
            work.held_ns[rank] = min(held_ns, work.held_ns.get(rank, held_ns))

        for parts in share.lanes:
            run = LaneRun(parts, self.gpu, self._engine, lane_done, sent)
            self._engine.at(now + self._random.random() * CHANNEL_NS, run.proceed)

    def _leave(self, work: Work) -> None:
        work.leave_ns[self.gpu.rank] = self._engine.now
        self._done += 1
        queue = self._streams[work.stream]
        queue.popleft()
        if queue:
            self._try(queue[0])
        self._drive_host()
        if self._waits is work:
            self._waits = None
            self.proceed()
