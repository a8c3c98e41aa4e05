"""Parts of NCCL's transfers on several connections that go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpuflow.matching.parts import _beside


def lane(starts: list[int], size: int, alone: bool = True, took: int = 20) -> Any:
    start = np.array(starts, np.int64)
    sizes = np.full(len(start), size)
    return SimpleNamespace(
        start_ns=start, end_ns=start + took, size=sizes, turns=None, lossy=False, alone=alone
    )


@pytest.mark.parametrize(
    ("after", "size", "alone", "together"),
    [
        (25, 64_000, True, True),  # the proxy sends one part, then the other
        (480, 64_000, True, False),  # as well half a turn later: another call's
        (25, 4096, True, False),  # parts of one transfer are about as large
        (25, 64_000, False, False),  # perhaps another GPU's of its node
    ],
)
def test_parts_sent_one_after_the_other_are_one_transfer(
    after: int, size: int, alone: bool, together: bool
) -> None:
    starts = [900 * turn + 7 * (turn % 3) for turn in range(12)]
    turn = _beside(lane([at + after for at in starts], size, alone), lane(starts, 69_632))
    assert (turn is not None and turn.tolist() == list(range(12))) if together else turn is None
