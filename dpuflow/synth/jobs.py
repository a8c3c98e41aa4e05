"""Jobs: what each rank's program is, with the faults of ranks put into it.

A builder adds compute phases and operations rank by rank. A GPU that is late in an iteration computes longer
in its first compute phase (or before its first operation, where none comes before that); the operation after
that carries the delay in the truth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dpuflow.synth.caches import Manner, Transfer
from dpuflow.synth.groups import Plan, Share
from dpuflow.synth.onesided import doubling, to_everybody
from dpuflow.synth.ranks import Compute, Halt, Launch, Offer, Program, Put, Wait, Want, Work
from dpuflow.synth.scenario import (
    Churn,
    Decode,
    Desync,
    EarlyStop,
    Experts,
    GpuLate,
    Hang,
    Late,
    Loop,
    Operation,
    PrefillDecode,
    SlowGpu,
    SlowHost,
    SlowReceiver,
    Training,
)
from dpuflow.synth.seeds import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dpuflow.synth.caches import Endpoint
    from dpuflow.synth.groups import Communicator
    from dpuflow.synth.onesided import Mesh, Round
    from dpuflow.synth.scenario import Scenario


PUT_BYTES: Final = 64 * 1024
"""Of one piece of what recursive doubling puts (assumed)."""


class Delays:
    """Who is delayed in which iteration, and how: the faults of ranks, drawn once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random: dict[tuple[int, int], int | None] = {}

    def _hit(self, number: int, fault: Late, rank: int, iteration: int) -> bool:
        if iteration < fault.from_iteration:
            return False
        if fault.mode == "persistent":
            return rank == fault.rank
        if fault.mode == "transient":
            assert fault.iterations is not None
            return rank == fault.rank and iteration < fault.from_iteration + fault.iterations
        if fault.mode == "rotating":
            return rank == iteration % self._scenario.ranks
        if (number, iteration) not in self._random:
            draw = stream(self._scenario.seed, "fault", number, iteration)
            hit = draw.random() < fault.share
            self._random[number, iteration] = draw.randrange(self._scenario.ranks) if hit else None
        return self._random[number, iteration] == rank

    def of(self, rank: int, iteration: int, kind: type[Late]) -> float:
        """Delay by faults of ``kind``, ns."""
        return sum(
            fault.us * 1e3
            for number, fault in enumerate(self._scenario.faults)
            if isinstance(fault, kind) and self._hit(number, fault, rank, iteration)
        )

    def factor(self, rank: int, iteration: int) -> float:
        """So many times as long a rank's GPU computes."""
        found = 1.0
        for fault in self._scenario.faults:
            if (
                isinstance(fault, SlowGpu)
                and fault.rank in (None, rank)
                and iteration >= fault.from_iteration
            ):
                found *= fault.factor
        return found

    def grant(self, rank: int, iteration: int) -> float:
        """Delay of each clear-to-send entry, ns."""
        return sum(
            fault.us * 1e3
            for fault in self._scenario.faults
            if isinstance(fault, SlowReceiver) and fault.rank == rank and iteration >= fault.from_iteration
        )

    def registers(self, rank: int, iteration: int) -> float | None:
        """What registering memory anew takes, ns; None where the rank keeps what is registered."""
        anew = [
            fault.us * 1e3
            for fault in self._scenario.faults
            if isinstance(fault, Churn) and fault.rank == rank and iteration >= fault.from_iteration
        ]
        return sum(anew) if anew else None


class Builder:
    """Programs of all ranks while they are written."""

    def __init__(
        self,
        scenario: Scenario,
        group: Callable[[Sequence[int]], Communicator],
        endpoint: Callable[[int, int, Manner], Endpoint],
        mesh: Callable[[Sequence[int], int, bool], Mesh],
    ) -> None:
        self.scenario = scenario
        self.transfers: list[Transfer] = []
        self._endpoint, self._mesh = endpoint, mesh
        self.works: list[Work] = []
        self.programs: dict[int, Program] = {rank: [] for rank in range(scenario.ranks)}
        self.iteration = 0
        self._group = group
        self._delays = Delays(scenario)
        self._jitter = {rank: stream(scenario.seed, "compute", rank) for rank in self.programs}
        # Of ranks delayed in this iteration: by their GPU, not yet put in; by their host; told with their
        # next operation.
        self._gpu: dict[int, float] = {}
        self._host: dict[int, float] = {}
        self._late: dict[int, float] = {}

    def begin(self, iteration: int) -> None:
        """A new iteration: its faults wait for each rank's next compute phase and operation."""
        self.iteration = iteration
        for rank in self.programs:
            late = self._delays.of(rank, iteration, GpuLate)
            host = self._delays.of(rank, iteration, SlowHost)
            if late:
                self._gpu[rank] = late
            if host:
                self._host[rank] = self._late[rank] = host
        for fault in self.scenario.faults:
            if isinstance(fault, Hang) and fault.iteration == iteration:
                self.programs[fault.rank].append(Halt())

    def _put_in(self, rank: int) -> float:
        """What the rank's GPU computes longer in this iteration, once, ns."""
        late = self._gpu.pop(rank, 0.0)
        if late:
            self._late[rank] = self._late.get(rank, 0.0) + late
        return late

    def compute(self, ranks: Iterable[int], us: float, jitter_us: float = 0.0) -> None:
        """A compute phase; its random part never makes it shorter."""
        for rank in ranks:
            jitter = abs(self._jitter[rank].gauss(0.0, jitter_us * 1e3)) if jitter_us else 0.0
            if us or jitter:
                worked = us * 1e3 * self._delays.factor(rank, self.iteration) + jitter
                self.programs[rank].append(Compute(worked + self._put_in(rank)))

    def launch(self, ranks: Sequence[int], operation: Operation, lane: int = 0, **extra: object) -> Work:
        """An operation of the communicator of ``ranks`` on stream ``lane``; nobody waits for it yet.

        One that puts without asking is waited for all the same.
        """
        if operation.algorithm == "doubling":
            per_node = self.scenario.cluster.gpus_per_node
            rounds = {r: doubling(ranks, per_node, r, operation.bytes, PUT_BYTES) for r in ranks}
            name = "hierarchical" if per_node > 1 else "recursive_doubling"
            return self.put(ranks, operation, rounds, name, 1, False, **extra)
        work = self._work(ranks, operation, lane, extra)
        plan = work.plan
        for fault in self.scenario.faults:
            if isinstance(fault, Desync) and fault.iteration == self.iteration and fault.rank in plan.shares:
                other = self._work(ranks, replace(operation, bytes=fault.bytes), lane, extra)
                self.programs[fault.rank] += [Launch(other), Halt()]
        for rank in plan.shares:
            # Who only receives from a peer computes on what it gets: after that.
            receives = operation.op == "send_recv" and not plan.shares[rank].sends
            longer = 0.0 if receives else self._put_in(rank)
            if longer:
                self.programs[rank].append(Compute(longer))
            host, late = self._host.pop(rank, None), self._late.pop(rank, 0.0)
            anew = self._delays.registers(rank, self.iteration) if self.scenario.nccl.registered else None
            if anew is not None:
                host, late = (host or 0.0) + anew, late + anew
            if late:
                work.injected_ns[rank] = late
            grant = self._delays.grant(rank, self.iteration)
            self.programs[rank].append(Launch(work, host, grant, anew is not None))
        return work

    def _work(self, ranks: Sequence[int], operation: Operation, lane: int, extra: dict[str, object]) -> Work:
        protocol = operation.protocol or self.scenario.nccl.protocol
        draw = None
        if operation.op == "all_to_allv":
            draw = stream(self.scenario.seed, "ragged", len(self.works))
        plan = self._group(ranks).plan(operation, protocol, draw)
        if draw is not None:  # which has no one size
            operation = replace(operation, op="all_to_all", bytes=0)
        work = Work(operation, plan, self.iteration, lane, dict(extra))
        self.works.append(work)
        return work

    def put(
        self,
        ranks: Sequence[int],
        operation: Operation,
        rounds: dict[int, list[Round]],
        algorithm: str,
        queue_pairs: int,
        atomic: bool,
        **extra: object,
    ) -> Work:
        """An operation of kernels that put to their peers themselves, which each rank waits for."""
        mesh = self._mesh(ranks, queue_pairs, atomic)
        plan = Plan({rank: Share((), (), (), None) for rank in ranks}, algorithm, None)
        work = Work(operation, plan, self.iteration, 0, dict(extra))
        self.works.append(work)
        for rank in ranks:
            # A kernel that a host launches late is late like one whose GPU is.
            longer = self._put_in(rank) + self._host.pop(rank, 0.0)
            if longer:
                self.programs[rank].append(Compute(longer))
            late = self._late.pop(rank, 0.0)
            if late:
                work.injected_ns[rank] = late
            self.programs[rank].append(Put(work, mesh, rounds[rank]))
        return work

    def wait(self, work: Work) -> None:
        """Every rank of ``work`` waits for it."""
        for rank in work.plan.shares:
            self.programs[rank].append(Wait(work))

    def transfer(self, src: int, dst: int, size: int, manner: Manner) -> Transfer:
        """A cache that ``src`` will ``offer`` to ``dst``, and ``dst`` will ``want``."""
        anew = self._delays.registers(src if manner.read else dst, self.iteration)
        transfer = Transfer(self._endpoint(src, dst, manner), size, self.iteration, anew)
        self.transfers.append(transfer)
        return transfer

    def offer(self, transfer: Transfer, size: int) -> None:
        """Its sender has ``size`` bytes more of it now."""
        self.programs[transfer.endpoint.src.rank].append(Offer(transfer, size))

    def want(self, transfers: Sequence[Transfer]) -> None:
        """Each receiver goes on when what it shall get is there."""
        for rank, program in self.programs.items():
            mine = [each for each in transfers if each.endpoint.dst.rank == rank]
            if mine:
                program.append(Want(mine))

    def run(self, ranks: Sequence[int], operation: Operation, **extra: object) -> None:
        """Launch and wait."""
        self.wait(self.launch(ranks, operation, 0, **extra))


def build(scenario: Scenario, builder: Builder) -> None:
    """Write the programs of the scenario's job."""
    from dpuflow.synth.training import build_training

    job = scenario.job
    if isinstance(job, Loop):
        _loop(job, builder)
    elif isinstance(job, Experts):
        _experts(job, builder)
    elif isinstance(job, PrefillDecode):
        _prefill_decode(job, builder)
    elif isinstance(job, Decode):
        _decode(job, builder)
    else:
        assert isinstance(job, Training)
        build_training(job, builder)


def _loop(job: Loop, builder: Builder) -> None:
    everybody = range(builder.scenario.ranks)
    for iteration in range(job.iterations):
        builder.compute(everybody, job.compute_us, job.jitter_us)
        builder.begin(iteration)
        for operation in job.ops:
            builder.compute(everybody, operation.gap_us)
            builder.run(everybody, operation)


def _decode(job: Decode, builder: Builder) -> None:
    """Tensor parallel decoding: an all_reduce after attention and one after the feed-forward part."""
    tp = job.tp or builder.scenario.ranks
    replicas = [range(first, first + tp) for first in range(0, builder.scenario.ranks, tp)]
    reduce = Operation(op="all_reduce", bytes=job.bytes, algorithm=job.algorithm, protocol=job.protocol)
    faults = builder.scenario.faults
    stops = {fault.rank // tp: fault.iteration for fault in faults if isinstance(fault, EarlyStop)}
    for token in range(job.tokens):
        builder.begin(token)
        for number, replica in enumerate(replicas):
            if token >= stops.get(number, job.tokens):
                continue
            builder.compute(replica, job.token_us, job.jitter_us)
            _token(builder, replica, job.layers, job.layer_us, job.jitter_us, reduce)


def _token(
    builder: Builder, ranks: range, layers: int, layer_us: float, jitter_us: float, reduce: Operation
) -> None:
    for layer in range(layers):
        for part in ("attention", "mlp"):
            builder.compute(ranks, layer_us / 2, jitter_us)
            builder.run(ranks, reduce, layer=layer, part=part, group="tp")


def _prefill_decode(job: PrefillDecode, builder: Builder) -> None:
    """Request by request; while one is decoded the next is prefilled."""
    count = job.prefill or builder.scenario.ranks // 2
    first, second = range(count), range(count, builder.scenario.ranks)
    large = Operation(op="all_reduce", bytes=job.prefill_bytes)
    small = Operation(op="all_reduce", bytes=job.bytes, protocol="ll")
    manner = Manner(job.mode == "read", job.page_bytes, job.queue_pairs, job.notice == "send")
    parts = job.prefill_layers if job.layerwise else 1
    each = -(-job.kv_bytes // parts)
    for request in range(job.requests):
        builder.begin(request)
        caches = [builder.transfer(src, second[src % len(second)], job.kv_bytes, manner) for src in first]
        for layer in range(job.prefill_layers):
            builder.compute(first, job.prefill_us / job.prefill_layers, job.jitter_us)
            if len(first) > 1:
                builder.run(first, large, group="tp", phase="prefill", layer=layer)
            if job.layerwise or layer + 1 == job.prefill_layers:
                done = layer * each if job.layerwise else 0
                for cache in caches:
                    builder.offer(cache, min(each, job.kv_bytes - done))
        builder.want(caches)
        for _ in range(job.tokens):
            if len(second) > 1:
                _token(builder, second, job.layers, job.layer_us, job.jitter_us, small)
            else:
                builder.compute(second, job.layers * job.layer_us, job.jitter_us)


def _usual(job: Experts, src: int, dst: int, ranks: int) -> float:
    """How many tokens a rank sends to another one in the mean."""
    if job.hot is None or job.hot == src or ranks <= 2:
        return job.tokens
    rest = (1 - job.hot_share) / (ranks - 2)
    return job.tokens * (ranks - 1) * (job.hot_share if job.hot == dst else rest)


def _experts(job: Experts, builder: Builder) -> None:
    """Layer by layer: tokens go to their experts and come back, both one-sided."""
    ranks = range(builder.scenario.ranks)
    draw = stream(builder.scenario.seed, "tokens")
    for step in range(job.steps):
        builder.begin(step)
        for layer in range(job.layers):
            counts = {
                (src, dst): max(
                    1, round(_usual(job, src, dst, len(ranks)) * (1 + job.skew * draw.uniform(-1, 1)))
                )
                for src in ranks
                for dst in ranks
                if src != dst
            }
            for phase, size, us in (
                ("dispatch", job.token_bytes, job.attention_us),
                ("combine", job.combine_bytes, job.expert_us),
            ):
                builder.compute(ranks, us, job.jitter_us)
                # What came from a peer goes back to it.
                pieces = {
                    (src, dst): (size,) * counts[(src, dst) if phase == "dispatch" else (dst, src)]
                    for src, dst in counts
                }
                even = len(set(counts.values())) == 1
                operation = Operation(
                    op="all_to_all", bytes=len(ranks) * size * job.tokens if even else 0, algorithm="ring"
                )
                rounds = {rank: to_everybody(pieces, rank) for rank in ranks}
                builder.put(
                    ranks, operation, rounds, "linear", job.queue_pairs, job.flag == "atomic",
                    group="ep", phase=phase, layer=layer,
                )  # fmt: skip
