"""Results kept by what they take: no more than allowed, and nothing is worked out twice within that."""

from __future__ import annotations

from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schedules.graph import edge_sizes, kept, schedule


def test_what_is_kept_is_bounded_by_its_size() -> None:
    made: list[int] = []

    @kept(len, most=100)
    def row(n: int) -> list[int]:
        made.append(n)
        return [0] * n

    for n in (40, 50, 40, 50):
        row(n)
    assert made == [40, 50]
    row(30)  # together 120: what was before is forgotten
    row(40)
    assert made == [40, 50, 30, 40]
    row(30)
    assert made == [40, 50, 30, 40]
    row(1000)  # alone more than is allowed: kept until the next
    row(1000)
    row(1)
    row(1000)
    assert made == [40, 50, 30, 40, 1000, 1, 1000]


def test_schedules_of_many_sizes_take_no_more_memory_than_few() -> None:
    """A node with few peers tries its messages against groups of up to 64 ranks, by every algorithm."""
    import tracemalloc

    tracemalloc.start()
    try:
        for n in range(2, 65):
            for algorithm in ALGORITHMS:
                if algorithm.fits(n):
                    schedule(algorithm, n)
                    edge_sizes(algorithm, n)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 50 << 20
