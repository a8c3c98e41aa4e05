"""Connections side by side, against slow twins that follow the definitions word by word."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dpuflow.kernels import lockstep
from dpuflow.schema.rows import NEVER


@pytest.mark.parametrize("seed", range(60))
def test_two_connections_side_by_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    left, right = rng.integers(0, 2, (2, n), np.uint8)
    slots, others = np.where(rng.random((2, n)) < 0.1, 1, 2)
    sizes, theirs = rng.integers(1, 9, (2, n if seed % 3 else 0))
    found = np.empty(lockstep.N_FOUND, np.int64)
    lockstep.compare(left, right, slots, others, sizes, theirs, 2, found)
    both = np.flatnonzero(left & right).tolist()
    single = [a for a, b in pairwise(both) if b == a + 1 and len(sizes)]
    assert found[lockstep.APART] == np.sum(slots != others)
    assert found[[lockstep.LEFTS, lockstep.RIGHTS, lockstep.SHARED]].tolist() == [
        *map(np.count_nonzero, (left, right)),
        len(both),
    ]
    assert found[lockstep.UNLIKE] == sum(
        max(sizes[k], theirs[k]) > 2 * min(sizes[k], theirs[k]) for k in single
    )
    for place, begins in ((lockstep.LEFT_LONGEST, left), (lockstep.RIGHT_LONGEST, right)):
        if begins.any():
            assert found[place] == np.diff([*np.flatnonzero(begins), n]).max()


@pytest.mark.parametrize("seed", range(60))
def test_operations_that_overlap(seed: int) -> None:
    """Of numbers as many apart as are asked for; what is not known counts for nothing."""
    rng = np.random.default_rng(seed)
    count, shifts = int(rng.integers(3, 12)), int(rng.integers(0, 3))
    at = np.cumsum(rng.integers(1, 4, count + 1))
    times = np.sort(rng.integers(0, 100, (2, int(at[-1]) + 3)), axis=1)
    times[rng.random(times.shape) < 0.1] = NEVER
    one, other = times
    found = np.empty((1 + 2 * shifts, 2), np.int64)
    lockstep.overlaps(at, one, other, found)
    apart = [(0, 0)] + [pair for k in range(1, shifts + 1) for pair in ((k, 0), (0, k))]
    for (low, high), told in zip(apart, found.tolist(), strict=True):
        pairs = [(k + low, k + high) for k in range(count - low - high)]
        spans = [((one[at[i]], one[at[i + 1] - 1]), (other[at[j]], other[at[j + 1] - 1])) for i, j in pairs]
        known = [(mine, theirs) for mine, theirs in spans if NEVER not in (mine[0], theirs[0])]
        overlap = [mine[0] <= theirs[1] and theirs[0] <= mine[1] for mine, theirs in known]
        assert told == [sum(overlap), len(known)]
