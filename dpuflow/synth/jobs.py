"""Jobs: what each rank's program is, with the faults of ranks put into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.synth.ranks import Compute, Launch, Program, Wait, Work
from dpuflow.synth.scenario import GpuLate, Late, Loop, SlowHost, SlowReceiver
from dpuflow.synth.seeds import stream
from dpuflow.synth.sizes import PROTOCOLS

if TYPE_CHECKING:
    from dpuflow.synth.groups import Communicator
    from dpuflow.synth.scenario import Scenario


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

    def grant(self, rank: int, iteration: int) -> float:
        """Delay of each clear-to-send entry, ns."""
        return sum(
            fault.us * 1e3
            for fault in self._scenario.faults
            if isinstance(fault, SlowReceiver) and fault.rank == rank and iteration >= fault.from_iteration
        )


def build_loop(scenario: Scenario, world: Communicator) -> tuple[list[Work], dict[int, Program]]:
    """The job ``loop`` over all ranks."""
    job = scenario.job
    assert isinstance(job, Loop)
    delays = Delays(scenario)
    ranks = [gpu.rank for gpu in world.gpus]
    programs: dict[int, Program] = {rank: [] for rank in ranks}
    jitters = {rank: stream(scenario.seed, "compute", rank) for rank in ranks}
    works = []
    for iteration in range(job.iterations):
        for place, operation in enumerate(job.ops):
            protocol = PROTOCOLS[operation.protocol or scenario.nccl.protocol]
            work = Work(operation, world.plan(operation, protocol), iteration, protocol.name)
            works.append(work)
            for rank in work.plan.shares:
                compute = operation.gap_us * 1e3
                host = None
                if place == 0:
                    late = delays.of(rank, iteration, GpuLate)
                    slow = delays.of(rank, iteration, SlowHost)
                    if late + slow:
                        work.injected_ns[rank] = late + slow
                    host = slow or None
                    jitter = abs(jitters[rank].gauss(0.0, job.jitter_us * 1e3))
                    compute += job.compute_us * 1e3 + late + jitter
                programs[rank] += [Compute(compute)] if compute else []
                programs[rank] += [Launch(work, host, delays.grant(rank, iteration)), Wait(work)]
    return works, programs
