"""The smallest lateness that is told, by kind of operation: ranks late by 2 to 100 us, one after the other.

In: a noise profile. Out: a table of the least time at which "later than that" is right 99 times in 100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.accuracy.measure import measure
from bench.accuracy.smallest import LEFT_OUT, smallest_ns
from dpuflow.quantities import duration
from dpuflow.reports.layout import table
from dpuflow.synth.scenario import (
    Clocks,
    Cluster,
    GpuLate,
    Loop,
    Machine,
    Nccl,
    Observation,
    Operation,
    Scenario,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.accuracy.measure import Measured


def _operation(op: str, kib: int, algorithm: str = "ring", protocol: str = "simple") -> Operation:
    return Operation(op=op, bytes=kib * 1024, algorithm=algorithm, protocol=protocol)


KINDS: Final = {
    "decode all_reduce 64 KiB, ring LL": (_operation("all_reduce", 64, "ring", "ll"), 2, "ib"),
    "decode all_reduce 64 KiB, tree LL": (_operation("all_reduce", 64, "tree", "ll"), 2, "ib"),
    "decode all_reduce 64 KiB, tree LL, 1 channel": (_operation("all_reduce", 64, "tree", "ll"), 1, "ib"),
    "all_reduce 1 MiB, ring LL128": (_operation("all_reduce", 1024, "ring", "ll128"), 2, "ib"),
    "all_reduce 1 MiB, ring Simple": (_operation("all_reduce", 1024), 2, "ib"),
    "all_reduce 1 MiB, tree Simple": (_operation("all_reduce", 1024, "tree"), 2, "ib"),
    "all_gather 256 KiB, ring": (_operation("all_gather", 256), 2, "ib"),
    "all_gather 256 KiB, PAT": (_operation("all_gather", 256, "pat"), 2, "ib"),
    "reduce_scatter 1 MiB, ring": (_operation("reduce_scatter", 1024), 2, "ib"),
    "all_to_all 1 MiB": (_operation("all_to_all", 1024), 2, "ib"),
    "broadcast 256 KiB, chain": (_operation("broadcast", 256), 2, "ib"),
    "all_reduce 256 KiB, ring, over TCP": (_operation("all_reduce", 256), 2, "socket"),
}
"""What is swept: the operation, channels at most, NCCL's transport."""
LATE_US: Final = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
SHARE: Final = 0.12
"""Of the iterations in which a rank drawn at random is late by each of these."""
ITERATIONS: Final = 300
SLOWER: Final = 100.0
"""Times that a loaded software stack is slower (as in ``draw``)."""


def scenario_of(kind: str, profile: str) -> Scenario:
    """Back to back: hardly any work between the operations, ranks late by times that differ."""
    operation, channels, transport = KINDS[kind]
    slow, gbps, way_us = (SLOWER, 1.0, 30.0) if profile == "host" else (1.0, 100.0, 1.5)
    return Scenario(
        name=f"000-sweep-{operation.algorithm}-{operation.protocol}-n4-random-{profile}",
        seed=1,
        cluster=Cluster(nodes=4, link_gbps=gbps, latency_us=way_us),
        nccl=Nccl(channels=channels, transport=transport),
        machine=Machine(profile=profile),
        job=Loop(ops=[operation], iterations=ITERATIONS, compute_us=20.0 * slow, jitter_us=0.5 * slow),
        faults=[GpuLate(mode="random", us=us * slow, share=SHARE) for us in LATE_US],
        observation=Observation(clocks=Clocks(offset_us=2e6, drift_ppm=20.0, jitter_ns=20.0), compress=False),
    )  # fmt: skip


def row_of(kind: str, measured: Measured) -> list[str]:
    """One kind's line: ranks, what of them packets show, and the smallest lateness told rightly."""
    every = measured.told
    shown = [(true, told) for true, told, proved in every if proved >= (1 - LEFT_OUT) * true]
    exact = [(true, told) for true, told in measured.pairs if told is not None]

    def percent(part: Sequence[object]) -> str:
        return f"{100 * len(part) / len(every):.0f} %" if every else "-"

    def smallest(pairs: Sequence[tuple[int, int | None]]) -> str:
        found = smallest_ns(pairs)
        return "-" if found is None else duration(found)

    everyone = [(true, told) for true, told, _ in every]
    return [
        kind, str(len(every)), percent(exact), smallest(exact), percent(shown), smallest(shown),
        smallest(everyone),
    ]  # fmt: skip


def sweep(profile: str) -> list[str]:
    """The table, line by line."""
    rows = [row_of(kind, measure(scenario_of(kind, profile))) for kind in KINDS]
    head = [f"smallest lateness, {profile}", "ranks", "exact", "of these", "shown", "of these", "of all"]
    return table(head, rows)
