"""Parts of NCCL's transfers on several connections that go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpuflow.matching.parts import _beside


def lane(starts: list[int], size: int, took: int = 20) -> Any:
    start = np.array(starts, np.int64)
    sizes = np.full(len(start), size)
    return SimpleNamespace(start_ns=start, end_ns=start + took, size=sizes, turns=None, lossy=False)


@pytest.mark.parametrize(
    ("after", "size", "together"),
    [
        (25, 64_000, True),  # the proxy sends one part, then the other
        (480, 64_000, False),  # as well half a turn later: another call's
        (25, 4096, False),  # parts of one transfer are about as large
    ],
)
def test_parts_sent_one_after_the_other_are_one_transfer(after: int, size: int, together: bool) -> None:
    starts = [900 * turn + 7 * (turn % 3) for turn in range(12)]
    turn = _beside(lane([at + after for at in starts], size), lane(starts, 69_632))
    assert (turn is not None and turn.tolist() == list(range(12))) if together else turn is None
