"""NCCL over TCP: sizes before messages, and the operations that they make."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.synth.case import write_case

SOCKETS = {"transport": "socket"}


@pytest.mark.parametrize(
    ("op", "nodes", "channels", "told"),
    [
        ("op: all_reduce, bytes: 999996", 3, 2, ("all_reduce", "ring", 999_996, "simple")),
        ("op: all_reduce, bytes: 7000", 5, 1, ("all_reduce", "ring", 7000, "simple")),
        ("op: all_reduce, bytes: 65536, protocol: ll", 4, 1, ("all_reduce", "ring", 65536, "ll")),
        (
            "op: all_reduce, bytes: 2500000, algorithm: tree",
            6,
            2,
            ("all_reduce", "tree", 2_500_000, "simple"),
        ),
        ("op: all_gather, bytes: 100000", 4, 2, ("all_gather", "ring", 100_000, "simple")),
        ("op: all_gather, bytes: 40000, algorithm: pat", 5, 1, ("all_gather", "pat", 40_000, "simple")),
        ("op: broadcast, bytes: 1500000, root: 2", 4, 2, ("broadcast", "chain", 1_500_000, "simple")),
    ],
)
def test_operations(
    op: str, nodes: int, channels: int, told: tuple[str, str, int, str], tmp_path: Path
) -> None:
    more = settings(cluster={"nodes": nodes}, nccl=SOCKETS | {"channels": channels})
    captures = write_case(loop(op, more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes, c.protocol) for c in result.collectives)
    assert found == {told: 8}
