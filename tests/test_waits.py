"""Sends that had waited for their input, against a plain twin; columns picked in one pass."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.arrays.ordering import Picked
from dpuflow.entries.reactions import _alone
from dpuflow.kernels import streams, waits
from dpuflow.schema.rows import EXCHANGE, NEVER


def twin(
    sender: np.ndarray, receiver: np.ndarray, times: tuple[np.ndarray, np.ndarray, np.ndarray],
    ready: np.ndarray, last: np.ndarray, mapped: np.ndarray, split: np.ndarray, enter: np.ndarray,
) -> list[tuple[int, int]]:  # fmt: skip
    """Rank by rank, event by event."""
    arrived, sent, start = (t.tolist() for t in times)
    found = []
    for rank, entered in enumerate(enter.tolist()):
        events = []
        for i in range(len(sender)):
            if receiver[i] == rank:
                events.append((arrived[i], waits.INPUT, i))
            if sender[i] == rank:
                events += [(sent[i], waits.DONE, i), (start[i], waits.SEND, i)]
        events = sorted(e for e in events if e[0] != NEVER and e[0] >= entered)
        for place, (time_ns, kind, i) in enumerate(events):
            if kind != waits.SEND:
                continue
            before = events[:place]
            since = NEVER
            if mapped[i]:
                since = int(ready[i])
            elif before and before[-1][1] == waits.INPUT and not split[i]:
                since = before[-1][0]
            sends = [t for t, what, _ in before if what == waits.SEND]
            sends = sends if last[i] == NEVER else [int(last[i])]
            if since == NEVER or not max([entered, *sends]) <= since <= time_ns:
                continue
            done = [t for t, what, _ in before if what == waits.DONE]
            found.append((rank, time_ns - max([since, *done])))
    return found


@pytest.mark.parametrize("seed", range(80))
def test_waited_sends_match_the_twin(seed: int) -> None:
    choice = np.random.default_rng(seed)
    n, ranks = int(choice.integers(0, 60)), int(choice.integers(1, 6))
    sender, receiver = choice.integers(0, ranks, (2, n))

    def times(missing: float, count: int) -> np.ndarray:
        values = choice.integers(-30, 60, count)  # so that many are equal
        return np.where(choice.random(count) < missing, NEVER, values)

    three = (times(0.2, n), times(0.2, n), times(0.2, n))
    ready, last, enter = times(0.4, n), times(0.6, n), times(0.2, ranks)
    mapped, split = choice.integers(0, 2, (2, n)).astype(np.uint8)
    own, after = np.empty((2, n), np.int64)
    found = waits.waited(
        sender, receiver, *three, ready, last, mapped, split, enter, -30,
        np.empty(waits.KINDS * ranks + 1, np.int64), *np.empty((3, 3 * n), np.int64), own, after,
    )  # fmt: skip
    pairs = list(zip(own[:found].tolist(), after[:found].tolist(), strict=True))
    assert pairs == twin(sender, receiver, three, ready, last, mapped, split, enter)


def test_columns_are_those_of_the_table() -> None:
    choice = np.random.default_rng(3)
    table = EXCHANGE.zeros(30)
    for name in EXCHANGE.dtype.names:
        table[name] = choice.integers(0, 200, 30)
    rows = choice.permutation(30)[:17]
    picked = Picked.exchanges(table, rows)
    for name in EXCHANGE.dtype.names:
        assert picked[name].tolist() == table[name][rows].tolist()
        assert picked[name].flags.c_contiguous
    assert set(streams.TIMES + streams.NUMBERS + streams.KINDS) < set(EXCHANGE.dtype.names)


def test_a_reaction_counts_whatever_left_before_it_that_was_allowed_later() -> None:
    """A grant that is left lying while later ones are served is a slow reaction; one that comes while what
    was allowed before it is leaving is none."""
    sender = np.zeros(4, np.int64)
    allowed, end = np.array([0, 10, 20, 100]), np.array([90, 15, 25, 110])
    assert _alone(sender, allowed, end).tolist() == [True, False, False, True]
    allowed, end = np.array([0, 10, 20, 100]), np.array([5, 95, 25, 110])
    assert _alone(sender, allowed, end).tolist() == [True, True, False, True]
