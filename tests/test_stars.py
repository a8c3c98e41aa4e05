"""Gathers and scatters made of sends, told by who sends whom as much at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from dpuflow.matching.calls import stars
from dpuflow.matching.parts import Transfers
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from dpuflow.matching.model import Instance, Job

MS = 1_000_000
Calls = list[tuple[Op, int]]
"""Operations and their roots."""


def read(calls: Calls, ranks: int, apart_ns: int = MS, sizes: tuple[int, ...] = (4096,)) -> list[Instance]:
    """What is read of ``calls``, ``apart_ns`` one after the other; each sender 10 us after the last."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for turn, (op, root) in enumerate(calls):
        for place, other in enumerate(end for end in range(ranks) if end != root):
            edge = (root, other) if op == Op.SCATTER else (other, root)
            sent.setdefault(edge, []).append((turn * apart_ns + 10_000 * place, sizes[place % len(sizes)]))
    lanes, row = [], 0
    for edge, own in sent.items():
        starts = np.array([ns for ns, _ in own])
        lanes.append(
            Transfers(
                edge,
                [np.array([row + k]) for k in range(len(own))],
                starts,
                starts + 5_000,
                np.array([size for _, size in own]),
                np.ones(len(own), bool),
                np.full(len(own), NEVER),
                True,
            )
        )
        row += len(own)
    job = SimpleNamespace(ordered=lambda ends: sorted(set(ends)), near=None)
    found, left = stars(cast("Job", job), lanes)
    assert not found or not left
    return found


@pytest.mark.parametrize(
    "calls",
    [
        [(Op.GATHER, 0)] * 5,
        [(Op.SCATTER, 2)] * 5,
        [(Op.GATHER, 1), (Op.SCATTER, 1)] * 3,
        [(Op.GATHER, 1), (Op.SCATTER, 3), (Op.GATHER, 0), (Op.GATHER, 0), (Op.SCATTER, 2), (Op.SCATTER, 3)],
    ],
)
def test_one_root_or_changing_ones(calls: Calls) -> None:
    found = read(calls, 4)
    assert [(each.op, each.root) for each in found] == calls
    assert {(len(each.rows), each.size, str(each.algorithm and each.algorithm.name)) for each in found} == {
        (3, 4096, "linear")
    }


def test_what_all_send_to_all_is_no_scatter_of_each() -> None:
    assert not read([(Op.SCATTER, root) for root in range(4)] * 3, 4, apart_ns=1_000)


def test_unlike_bytes_and_three_ranks_are_none() -> None:
    assert not read([(Op.GATHER, 0)] * 5, 4, sizes=(4096, 8192, 4096))
    assert not read([(Op.GATHER, 1), (Op.SCATTER, 1)] * 5, 3)  # neighbours in a row do that
