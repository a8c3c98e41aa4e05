"""Which connections are in lockstep, where slow receivers make many places look like beginnings."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.matching.buffers import RING_SLOT
from dpuflow.matching.credited import Pipe, in_lockstep


@pytest.mark.parametrize("seed", range(6))
def test_many_connections_show_what_two_do_not(seed: int) -> None:
    """Of 60 messages of an operation ten look like its first one: two connections share by chance as many of
    these as there are operations."""
    random, operations, messages = np.random.default_rng(seed), 17, 60
    pipes = []
    for number in range(12):
        begins = random.random(operations * messages) < 1 / 6
        begins[::messages] = True
        rows = np.arange(len(begins)) + number * len(begins)
        pipes.append(Pipe(number, number ^ 1, rows, 1, begins, np.full(len(begins), RING_SLOT)))
    (one,) = in_lockstep(pipes)
    assert len(one.pipes) == 12
    # At a single place, by chance, all of them may seem to begin.
    assert set(range(0, operations * messages, messages)) <= set(one.bounds.tolist())
    assert len(one) <= operations + 1


def test_connections_of_other_operations_stay_apart() -> None:
    """As many messages in operations of another length: nothing but the first beginning is common."""
    pipes = []
    for number, messages in enumerate((60, 60, 34, 34)):
        begins = np.zeros(1020, bool)
        begins[::messages] = True
        rows = np.arange(1020) + 1020 * number
        pipes.append(Pipe(number, number ^ 1, rows, 1, begins, np.full(1020, RING_SLOT)))
    assert sorted(len(each) for each in in_lockstep(pipes)) == [17, 30]
