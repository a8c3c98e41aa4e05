"""The halves of ring all_reduces: a reduce-scatter, then an all-gather, on each connection by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from collective_worlds import algorithm_of

from dpuflow.matching import Instance
from dpuflow.results import Phase
from dpuflow.schema.rows import EXCHANGE, NEVER, Op
from dpuflow.verdicts.parallelism import ring_phases

RING = algorithm_of(Op.ALL_REDUCE, "ring")


def ring_rows(ranks: int, channels: int, *, shift: int = 0) -> np.ndarray:
    """One all_reduce, a message a microsecond a step; ``shift``: how far the channels are apart, ns."""
    steps = 2 * (ranks - 1)
    rows = EXCHANGE.zeros(ranks * channels * steps)
    rows["offer_ns"], rows["bytes"] = NEVER, 1000
    for number, row in enumerate(rows):
        step, rest = divmod(number, ranks * channels)
        channel, rank = divmod(rest, ranks)
        row["src"], row["dst"] = rank, (rank + 1) % ranks
        row["connection"], row["order"] = channel * ranks + rank, step
        row["data_ns"] = 1_000 * step + shift * channel
        row["arrived_end_ns"] = row["data_ns"] + 500
    return rows


def phases_of(rows: np.ndarray, **changes: object) -> list[Phase]:
    ranks = sorted({int(end) for end in rows["src"]})
    ring = Instance(np.arange(len(rows)), Op.ALL_REDUCE, ranks, RING, **changes)  # type: ignore[arg-type]
    (phases,) = ring_phases(rows, [ring])
    return phases


def test_halves_of_one_channel() -> None:
    assert phases_of(ring_rows(4, 1)) == [
        Phase("reduce_scatter", 0, 2_500), Phase("all_gather", 3_000, 5_500)
    ]  # fmt: skip


def test_channels_each_have_their_halves() -> None:
    """Numbers of messages count per connection: one channel's first message is no second of another's."""
    rows = ring_rows(4, 2, shift=50)
    rows["order"][rows["connection"] >= 4] += 100  # in use before
    assert phases_of(rows) == [
        Phase("reduce_scatter", 0, 2_550), Phase("all_gather", 3_000, 5_550)
    ]  # fmt: skip


def test_what_has_no_such_phases() -> None:
    rows = ring_rows(4, 1)
    assert phases_of(rows, complete=False) == []
    whole = np.arange(len(rows))
    others = [
        Instance(whole, Op.ALL_REDUCE, [0, 1, 2, 3], algorithm_of(Op.ALL_REDUCE, "recursive_doubling")),
        Instance(whole, Op.ALL_GATHER, [0, 1, 2, 3], algorithm_of(Op.ALL_GATHER, "ring")),
        Instance(whole, Op.ALL_REDUCE, [0, 1, 2, 3]),
    ]
    assert ring_phases(rows, others) == [[], [], []]
    assert ring_phases(rows, []) == []


def test_a_half_of_which_no_end_was_seen() -> None:
    rows = ring_rows(4, 1)
    rows["arrived_end_ns"][len(rows) // 2 :] = NEVER
    assert phases_of(rows) == [Phase("reduce_scatter", 0, 2_500)]


@pytest.mark.parametrize("seed", range(30))
def test_random_collectives_match_a_twin(seed: int) -> None:
    """Sizes that differ, offers before data, several collectives in turn."""
    choice = random.Random(seed)
    parts, instances = [], []
    for _ in range(choice.randrange(1, 4)):
        rows = ring_rows(choice.randrange(2, 6), choice.randrange(1, 4), shift=choice.randrange(2_000))
        rows["bytes"] = [choice.randrange(3_000) for _ in rows]
        rows["offer_ns"] = [
            choice.choice((NEVER, int(row["data_ns"]) - choice.randrange(900))) for row in rows
        ]
        first = sum(len(part) for part in parts)
        order = sorted({int(end) for end in rows["src"]})
        instances.append(Instance(first + np.arange(len(rows)), Op.ALL_REDUCE, order, RING))
        parts.append(rows)
    exchanges = np.concatenate(parts)
    for instance, found in zip(instances, ring_phases(exchanges, instances), strict=True):
        halves: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        mine = exchanges[instance.rows]
        for connection in np.unique(mine["connection"]):
            rows = mine[mine["connection"] == connection]
            done = 0
            for row in rows[np.argsort(rows["order"], kind="stable")]:
                done += int(row["bytes"])
                sent = int(row["data_ns"] if row["offer_ns"] == NEVER else row["offer_ns"])
                later = 2 * done > int(rows["bytes"].sum())
                halves[later].append((sent, int(row["arrived_end_ns"])))
        expected = [
            Phase(name, min(t for t, _ in half), max(t for _, t in half))
            for name, half in zip(("reduce_scatter", "all_gather"), halves, strict=True)
            if half
        ]
        assert found == expected
