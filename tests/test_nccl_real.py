"""NCCL itself, recorded: 2.28.9 with a GPU, over RoCE and over its sockets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dpuflow
from dpuflow.entries.channels import _goes_on
from dpuflow.schema.rows import NEVER

TRACES = Path(__file__).parents[1] / "traces"


@pytest.mark.parametrize(
    ("name", "told", "late"),
    [
        # The barrier before ran on one of the two channels: their connections count operations otherwise.
        ("nccl-tree-n4", {("all_reduce", "tree", 262_144): 16, ("all_reduce", "tree", 8): 1}, "10.88.0.2"),
        # Up to 2.28 entries of sends announce a part's chunk, as many bytes as a slot of LL.
        (
            "nccl-alltoall-n4",
            {("all_to_all", "linear", 262_144): 14, ("all_reduce", "tree", 8): 1},
            "10.88.0.1",
        ),
        # What comes over one of two connections goes on over another: how soon, only that tells.
        (
            "nccl-ddp-n3",
            {
                ("all_reduce", "ring", 144_576): 40,
                ("all_reduce", "ring", 48_192): 20,
                ("all_reduce", "tree", 8): 1,
            },
            "10.88.0.1",
        ),
    ],
)
def test_operations_and_who_is_late(name: str, told: dict[tuple[str, str, int], int], late: str) -> None:
    files = sorted((TRACES / name).glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == told
    named = [row.endpoint for row in result.lateness if row.verdict == "late"]
    assert [str(end.address) for end in result.endpoints if end.id in named] == [late]


def test_what_a_connection_goes_on_with_takes_always_as_long() -> None:
    """Of two channels the second comes and goes a little later, so that either out may follow either in."""
    random = np.random.default_rng(0)
    came = np.cumsum(random.integers(100, 1000, (20, 2, 6)), axis=2)
    left = came[:, ::-1] + 40 + random.integers(0, 5, came.shape)
    left[3] = NEVER
    any_size = np.ones((2, 2), bool)
    found = _goes_on(came, left, any_size)
    assert found is not None
    assert found.tolist() == [1, 0]
    # Nothing leaves before it has come: that tells more than how evenly it follows, and sizes tell all.
    left[:, 0] += random.integers(0, 3000, (20, 6))
    left[3] = NEVER
    found = _goes_on(came, left, any_size)
    assert found is not None
    assert found.tolist() == [1, 0]
    found = _goes_on(came, np.maximum(left, came.max() + 1), np.eye(2, dtype=bool))
    assert found is not None
    assert found.tolist() == [0, 1]
