"""What nodes pass on, against slow twins that follow the definitions word by word."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dpuflow.kernels import passing
from dpuflow.schema.rows import NEVER


def _seen(
    came: np.ndarray, goes: np.ndarray, sizes: np.ndarray, behind: int, ignored: int
) -> list[tuple[int, int]]:
    """For each place how often messages were seen together, and how often they were the same."""
    found = [(0, 0)] * len(sizes)
    for at in range(behind, len(sizes)):
        pairs = [(int(a), int(b)) for a, b in zip(came[:, at - behind], goes[:, at], strict=True)]
        pairs = [(a, b) for a, b in pairs if a and b and sizes[at] and not a == b == ignored]
        found[at] = len(pairs), sum(a == b for a, b in pairs)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_what_is_passed_on(seed: int) -> None:
    """Few values or many, one of them usual or none, messages without bytes, samples not captured."""
    rng = np.random.default_rng(seed)
    operations, messages = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    behind = int(rng.integers(0, messages))
    came, goes = rng.integers(0, rng.integers(2, 9), (2, operations, messages), np.uint32)
    sizes = rng.integers(0, 3, messages)
    known, same = np.zeros((2, messages), np.int64)
    ((value, often),) = Counter(came.ravel().tolist()).most_common(1)
    ignored = value if came.size > 1 and 2 * often > came.size else -1
    assert passing.usual(came) == ignored
    passing.passed(came, goes, sizes, behind, ignored, known, same)
    assert list(zip(known.tolist(), same.tolist(), strict=True)) == _seen(came, goes, sizes, behind, ignored)


@pytest.mark.parametrize("seed", range(20))
def test_which_lanes_carry_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    into, out, operations, messages = rng.integers(1, 5, 4).tolist()
    came = rng.integers(0, 3, (into, operations, messages), np.uint32)
    goes = rng.integers(0, 3, (out, operations, messages), np.uint32)
    behind = int(rng.integers(0, messages + 1))
    count = np.zeros((into, out), np.int64)
    passing.alike(came, goes, behind, count)
    for one in range(into):
        for other in range(out):
            pairs = zip(
                came[one, :, : messages - behind].ravel(), goes[other, :, behind:].ravel(), strict=True
            )
            assert count[one, other] == sum(1 for a, b in pairs if a and a == b)


@pytest.mark.parametrize("seed", range(40))
def test_how_long_it_took(seed: int) -> None:
    rng = np.random.default_rng(seed)
    operations, into, out, messages = rng.integers(1, 6, 4).tolist()
    came = rng.integers(0, 50, (operations, into, messages))
    left = rng.integers(0, 50, (out, operations * messages))
    came[rng.random(came.shape) < 0.2] = NEVER
    left[rng.random(left.shape) < 0.2] = NEVER
    known, early = np.zeros((2, into, out), np.int64)
    passing.handed(came, left, known, early)
    for one in range(into):
        for other in range(out):
            pairs = zip(came[:, one].ravel().tolist(), left[other].tolist(), strict=True)
            times = sorted(b - a for a, b in pairs if NEVER not in (a, b))
            assert known[one, other] == len(times)
            assert early[one, other] == sum(time < 0 for time in times)
            if times:
                places = rng.integers(0, len(times), (1, 4))
                found, room = np.empty((1, 4), np.int64), np.empty(left.shape[1], np.int64)
                passing.took(came, left, np.array([[one, other]]), places, room, found)
                assert found[0].tolist() == [times[place] for place in places[0]]
