"""An inference service: which prompts each step takes up, and whose tokens it brings.

Planned before it is played, by estimates of how long steps take: which prompts there are, when they are taken
up and how long their answers are. Played, a step waits for the prompts that it takes up; so what is planned
too early happens later, never before its cause.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dpuflow.synth.ranks import Call, Gate, Hold
from dpuflow.synth.requests import Request, Session
from dpuflow.synth.scenario import Operation, Service, SlowInput
from dpuflow.synth.seeds import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.jobs import Builder
    from dpuflow.synth.scenario import Clients, Scenario

COMMUNICATION: Final = 1.1
"""What a step takes, in compute, with its all_reduces (an estimate: it only orders what is taken up when)."""


@dataclass
class Asked:
    """One request as it is planned."""

    session: int
    think_ns: float
    prompt: int
    tokens: int
    at_ns: float = 0.0  # when it will be asked, by the plan
    gate: Gate = field(default_factory=Gate)
    emit: Callable[[int], None] = lambda left: None


@dataclass
class Step:
    """A prefill of one prompt, or one token of each answer of a batch; tokens that each still lacks."""

    prefill: Asked | None
    answers: list[tuple[Asked, int]]


def draw_requests(scenario: Scenario) -> list[list[Asked]]:
    """Of each session what it will ask, in order."""
    clients = scenario.clients
    found = []
    for number in range(clients.hosts * clients.sessions):
        draw = stream(scenario.seed, "client", number // clients.sessions, number % clients.sessions)
        mine = []
        for _ in range(clients.requests):
            think = clients.think_us * 1e3 * (1.0 if clients.together else draw.expovariate(1.0))
            size = max(1, round(clients.prompt_bytes * draw.uniform(0.5, 1.5)))
            tokens = draw.randint(max(1, clients.tokens // 2), clients.tokens)
            mine.append(Asked(number, think, size, tokens))
        found.append(mine)
    return found


class _Line:
    """The prompts that a replica's sessions have asked and it has not taken up, and what they ask then."""

    def __init__(self, clients: Clients, sessions: Sequence[Sequence[Asked]]) -> None:
        self._clients = clients
        self._left = {mine[0].session: deque(mine) for mine in sessions if mine}
        self._waiting: list[Asked] = []
        for session in self._left:
            self.ask(session, 0.0)

    def ask(self, session: int, now: float) -> None:
        """A session has its answer: it asks the next, if it has one."""
        if self._left[session]:
            each = self._left[session].popleft()
            each.at_ns = not_paused(self._clients, now + each.think_ns)
            self._waiting.append(each)

    def first(self) -> Asked | None:
        """What was asked first of all that waits."""
        return min(self._waiting, key=lambda each: each.at_ns, default=None)

    def take(self, each: Asked) -> None:
        """It waits no more."""
        self._waiting.remove(each)


def plan(job: Service, clients: Clients, sessions: Sequence[Sequence[Asked]]) -> list[Step]:
    """The steps of one replica that these sessions ask."""
    line = _Line(clients, sessions)
    now = 0.0
    batch: list[tuple[Asked, int]] = []
    steps: list[Step] = []
    draining = False
    decode = (job.layers * job.layer_us * 1e3) * COMMUNICATION
    prefill = (job.layers * job.prefill_us * 1e3) * COMMUNICATION
    while (each := line.first()) or batch:
        may = len(batch) < job.max_batch and not (draining and job.batching == "static")
        if each and may and (each.at_ns <= now or not batch):
            line.take(each)
            now = max(now, each.at_ns) + prefill
            steps.append(Step(each, [(each, each.tokens)]))
            batch.append((each, each.tokens - 1))
        else:
            now += decode
            draining = True
            steps.append(Step(None, batch))
            batch = [(each, lacks - 1) for each, lacks in batch]
        done = [each for each, lacks in batch if not lacks]
        batch = [pair for pair in batch if pair[1]]
        draining &= bool(batch)
        for each in done:
            line.ask(each.session, now)
    return steps


def not_paused(clients: Clients, at_ns: float) -> float:
    """``at_ns``, or when clients ask again."""
    begin, end = clients.until_us * 1e3, clients.resume_us * 1e3
    return end if begin and begin <= at_ns < end else at_ns


def build_service(job: Service, builder: Builder, sessions: Sequence[Sequence[Asked]]) -> None:
    """The programs of all replicas."""
    scenario = builder.scenario
    tp = job.tp or scenario.ranks
    for replica, first in enumerate(range(0, scenario.ranks, tp)):
        ranks = range(first, first + tp)
        mine = [each for n, each in enumerate(sessions) if replica_of(scenario, n) == replica]
        for number, step in enumerate(plan(job, scenario.clients, mine)):
            builder.begin(number)
            _step(job, builder, ranks, step)


def replica_of(scenario: Scenario, session: int) -> int:
    """Whom a session asks."""
    job = scenario.job
    assert isinstance(job, Service)
    count = scenario.ranks // (job.tp or scenario.ranks)
    if job.balance == "skewed" and session % (2 * count) >= count:
        return 0
    return session % count


def _step(job: Service, builder: Builder, ranks: range, step: Step) -> None:
    us, size = job.layer_us, job.bytes * len(step.answers)
    if step.prefill is not None:
        us, size = job.prefill_us, job.prefill_bytes
        for rank in ranks:
            builder.programs[rank].append(Hold(step.prefill.gate))
        slow_us = sum(
            fault.us
            for fault in builder.scenario.faults
            if isinstance(fault, SlowInput) and step.prefill.at_ns >= fault.from_us * 1e3
        )
        builder.compute(ranks, slow_us)
    reduce = Operation(op="all_reduce", bytes=size, protocol="ll" if step.prefill is None else None)
    phase = "decode" if step.prefill is None else "prefill"
    for layer in range(job.layers):
        for part in ("attention", "mlp"):
            builder.compute(ranks, us / 2, job.jitter_us)
            builder.run(ranks, reduce, layer=layer, part=part, group="tp", phase=phase)
    for each, lacks in step.answers:
        builder.programs[ranks[0]].append(Call(_emission(each, lacks)))


def _emission(each: Asked, lacks: int) -> Callable[[], None]:
    return lambda: each.emit(lacks)


class FrontEnd:
    """What hands tokens to the network, one after the other."""

    def __init__(self, job: Service, engine: Engine, random: Random) -> None:
        self._job, self._engine, self._random = job, engine, random
        self._free_at = 0.0

    def hand_on(self, act: Callable[[int], None], left: int) -> None:
        """Call ``act`` when it is this token's turn."""
        job = self._job
        took = job.egress_us * 1e3
        self._free_at = max(self._free_at, self._engine.now) + took
        at = self._free_at
        if job.egress_jitter_us:
            at += self._random.expovariate(1.0) * job.egress_jitter_us * 1e3
        self._engine.at(at, act, left)


class Served(Session):
    """A session whose answers the job's steps bring."""

    def serve(self, asked: Sequence[Asked], front: FrontEnd) -> None:
        """What it will ask, and who answers."""
        self._asked_for = list(asked)
        self._next = 0
        for each in asked:
            each.emit = self._handed(front)

    def _handed(self, front: FrontEnd) -> Callable[[int], None]:
        return lambda left: front.hand_on(self._token_out, left)

    def start(self) -> None:
        """Think, then ask the next."""
        each = self._asked_for[self._next]
        # No sooner than planned: a step that takes it up would come only then. One that is planned before
        # clients pause comes, if a little later: else answers that are open would wait for it meanwhile.
        self._engine.at(max(self._engine.now + each.think_ns, each.at_ns), self._ask)

    def _ask(self) -> None:
        each = self._asked_for[self._next]
        self.requests.append(Request(self._client, self._number, each.prompt, self._engine.now))
        self._send(self.up, each.prompt)

    def _asked(self, flow: object) -> None:
        request, each = self.requests[-1], self._asked_for[self._next]
        request.arrived_ns = self._engine.now
        request.tokens = self._left = each.tokens
        each.gate.release()

    def _token_out(self, left: int) -> None:
        request = self.requests[-1]
        if request.first_ns is None:
            request.first_ns = self._engine.now
        self._send(self.down, self._settings.token_bytes)

    def _got(self, flow: object) -> None:
        self._left -= 1
        if self._left:
            return
        self.requests[-1].last_ns = self._engine.now
        self._next += 1
        if self._next < len(self._asked_for):
            self.start()
