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


@pytest.mark.parametrize("only", [[2], [0, 3], [1, 2, 4], [0, 1, 2, 3, 5]])
@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("op: all_reduce, bytes: 960000", ("all_reduce", "ring", 960_000, "simple")),
        ("op: all_gather, bytes: 100000", ("all_gather", "ring", 100_000, "simple")),
        ("op: reduce_scatter, bytes: 600000", ("reduce_scatter", "ring", 600_000, "simple")),
        (
            "op: all_reduce, bytes: 2500000, algorithm: tree",
            ("all_reduce", "tree", 2_500_000, "simple"),
        ),
    ],
)
def test_operations_from_some_nodes(
    only: list[int], op: str, told: tuple[str, str, int, str], tmp_path: Path
) -> None:
    """A captured rank's hops tell the rest, as over RoCE: sizes, and first bytes of what is passed on."""
    more = settings(cluster={"nodes": 6}, nccl=SOCKETS | {"channels": 2}, observation={"only": only})
    captures = write_case(loop(op, more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    found = Counter((str(c.op), str(c.algorithm), c.bytes, c.protocol) for c in result.collectives)
    assert found == {told: 8}


def test_first_bytes_tell_operations_apart(tmp_path: Path) -> None:
    """Every node captured: a reduce_scatter's messages have the sizes of an all_gather's."""
    more = settings(cluster={"nodes": 4}, nccl=SOCKETS | {"channels": 1})
    captures = write_case(loop("op: reduce_scatter, bytes: 400000", more, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert {(str(c.op), c.bytes, tuple(map(str, c.op_alternatives))) for c in result.collectives} == {
        ("reduce_scatter", 400_000, ())
    }
