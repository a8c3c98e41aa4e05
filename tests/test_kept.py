"""Results kept by what they take: no more than allowed, and nothing is worked out twice within that."""

from __future__ import annotations

import ast
import gc
import tracemalloc
from pathlib import Path

import numpy as np

from dpuflow.entries.reactions import FEWEST, PAIRED, apart_ns
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schedules.graph import edge_sizes, plan
from dpuflow.schedules.remembered import STORE, Store

PACKAGE = Path(__file__).resolve().parents[1] / "dpuflow"


def test_what_is_kept_is_bounded_and_the_longest_unused_goes_first() -> None:
    made: list[int] = []
    store = Store(most=5000)

    @store.remembered
    def row(n: int, *, of: str = "") -> np.ndarray:
        made.append(n)
        return np.zeros(n, np.uint8)

    for n in (1000, 1500, 1000):
        row(n)
    assert made == [1000, 1500]
    row(1600)  # 1500 was not used for longest
    row(1000)
    assert made == [1000, 1500, 1600]
    row(1500)
    assert made == [1000, 1500, 1600, 1500]
    assert store.taken <= store.most
    row(10_000)  # alone more than is allowed: kept until the next
    row(10_000)
    row(1)
    row(10_000)
    assert made[4:] == [10_000, 1, 10_000]
    row(10_000, of="others")
    assert made[7:] == [10_000]
    store.clear()
    assert store.taken == 0


def test_what_was_not_used_between_two_turns_is_forgotten() -> None:
    """In an agent one analysis of an odd moment filled the store for good."""
    made: list[int] = []
    store = Store(most=5000)

    @store.remembered
    def row(n: int) -> np.ndarray:
        made.append(n)
        return np.zeros(n, np.uint8)

    row(1000)
    store.turn()
    row(800)
    row(1000)
    store.turn()
    row(1000)
    row(800)
    assert made == [1000, 800]
    store.turn()
    row(1000)
    store.turn()
    row(1000)
    row(800)
    assert made == [1000, 800, 800]
    row(4500)  # displaces the mark of the last turn, too
    store.turn()
    row(4500)
    assert made == [1000, 800, 800, 4500]
    for _ in range(2):
        store.turn()
    assert store.taken == 0


def test_functions_do_not_take_each_others_results() -> None:
    store = Store()
    double, triple = store.remembered(lambda n: 2 * n), store.remembered(lambda n: 3 * n)
    assert [double(2), triple(2), double(2), triple(2)] == [4, 6, 4, 6]


def test_what_is_kept_takes_no_more_memory_than_is_said() -> None:
    """A node with few peers tries its messages against groups of up to 64 ranks, by every algorithm; what is
    made of a plan only when it is asked for counts as well."""
    STORE.clear()
    gc.collect()
    tracemalloc.start()
    try:
        for n in (*range(4, 64, 5), 64):
            for algorithm in (each for each in ALGORITHMS if each.fits(n)):
                made = plan(algorithm, n, 0)
                _ = made.sends, made.inputs, made.needs
                edge_sizes(algorithm, n, 0)
        del made
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * STORE.most < STORE.taken <= STORE.most
    assert taken < 1.2 * STORE.most


def test_numbers_of_samples_that_come_once_push_nothing_out() -> None:
    """In an agent's windows each has another number: their pairs took the place of all schedules, large
    arrays that of small objects, whose memory Python keeps. In an hour its own grew from 62 to 84 MiB."""
    STORE.clear()
    for n in range(FEWEST, PAIRED + 100, 7):
        apart_ns(np.arange(n))
    assert STORE.taken < 2 << 20


def test_nothing_else_is_kept_that_grows_with_what_is_seen() -> None:
    """Caches that count entries hold algorithms alone: these are small, and known by identity."""
    for room in ("schedules", "matching", "entries", "verdicts", "findings", "join", "messages"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.returns is not None:
                    names = [ast.unparse(each) for each in node.decorator_list]
                    if any("cache" in name and name != "cached_property" for name in names):
                        assert ast.unparse(node.returns) in ("Algorithm", "Sends"), f"{path}:{node.name}"
