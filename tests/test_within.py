"""GPUs behind one adapter: when the last of them had entered, where lanes have unlike numbers of messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpuflow.entries import within


def test_lanes_of_unlike_lengths_share_one_usual_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    def lane(row: int, count: int) -> Any:
        apart = np.full(count - 1, 10, np.int64)
        return within._Lane(row, np.arange(count), apart, apart, 0)

    monkeypatch.setattr(within, "gpus_within", lambda instance: 2)
    monkeypatch.setattr(within, "edge_sizes", lambda algorithm, ranks: {0: [1]})
    monkeypatch.setattr(within, "_lanes", lambda *args: [lane(0, 3), lane(1, 5)])
    instance = SimpleNamespace(rows=range(5), algorithm="ring", ranks=4)
    picked = {"data_ns": np.arange(5) * 10}
    places: Any = SimpleNamespace(instances=[instance], picked=picked, sender=np.zeros(5, np.int64))
    assert within.last_within(places).rows.tolist() == [0, 1]
