"""NCCL's trees of which only some nodes were captured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from lane_views import view
from synth_worlds import loop, settings

import dpuflow
from dpuflow.matching.buffers import STEP_SLOT
from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import trees
from dpuflow.schedules.nccl import double_tree
from dpuflow.synth.case import write_case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("nodes", "only"),
    [(4, [0]), (4, [1, 2]), (5, [0]), (5, [1]), (5, [0, 3, 4]), (6, [2]), (8, [3, 6]), (8, [0, 4, 7])],
)  # fmt: skip
def test_trees_from_some_nodes(nodes: int, only: list[int], tmp_path: Path) -> None:
    keys = settings(
        cluster={"nodes": nodes},
        observation={"only": only},
        faults=[{"kind": "gpu_late", "rank": 1, "us": 200}],
    )
    captures = write_case(
        loop("op: all_reduce, bytes: 1500000, algorithm: tree", keys, iterations=8), tmp_path
    )
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        ("all_reduce", "tree", 1_500_000): 8
    }
    near = {f"10.0.0.{node + 1}" for node in only}
    hidden = {end.id for end in result.endpoints if end.address not in near}
    said = [r.bound for c in result.collectives for r in c.ranks if r.endpoint in hidden]
    assert "exact" not in said


@pytest.mark.parametrize("only", [0, 1, 3])
def test_a_leaf_blames_nobody_for_who_is_behind_its_parent(only: int, tmp_path: Path) -> None:
    """On one channel a leaf sees one peer, which had waited for the other leaf. Together they look like
    a tree of two ranks, and the parent was called late, with an exact entry."""
    keys = settings(
        cluster={"nodes": 5},
        nccl={"channels": 1},
        observation={"only": [only]},
        faults=[{"kind": "gpu_late", "rank": 3, "us": 500}],
    )
    captures = write_case(
        loop("op: all_reduce, bytes: 256KiB, algorithm: tree", keys, iterations=24), tmp_path
    )
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    own = {end.id for end in result.endpoints if end.address == f"10.0.0.{only + 1}"}
    assert len(result.collectives) == 24
    assert "exact" not in {r.bound for c in result.collectives for r in c.ranks if r.endpoint not in own}
    assert "late" not in {row.verdict for row in result.lateness if row.endpoint not in own}


def edges(ranks: int, channels: int, seen: set[int], late: int = -1) -> list[Lane]:
    """The lanes of double trees at the ranks ``seen``, each rank's up-message after its children's."""
    made = []
    for channel in range(channels):
        parents = double_tree(ranks)[channel % 2]

        def height(place: int, parents: tuple[int, ...] = parents) -> int:
            return max((1 + height(child) for child, up in enumerate(parents) if up == place), default=0)

        for child, parent in enumerate(parents):
            if parent < 0 or not seen & {child, parent}:
                continue
            when = 1000 * height(child) + (10_000 if child == late else 0)
            up, down = np.array([[when]]), np.array([[50_000 - when]])
            size, none = np.array([4096 + channel]), np.zeros((1, 1), np.uint32)
            made += [
                Lane(child, parent, STEP_SLOT, size, up, up + 900, none),
                Lane(parent, child, STEP_SLOT, size, down, down + 900, none),
            ]
    return made


@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("channels", [1, 2, 4])
def test_every_rank_tells_the_bytes(ranks: int, channels: int) -> None:
    whole = sum(4096 + channel for channel in range(channels))
    for place in range(ranks):
        for late in (-1, place):
            lanes = edges(ranks, channels, {place}, late)
            found = trees(view(lanes, {place}))
            assert found is not None
            assert (found.size, found.tails) == (whole, channels), (place, late)


def test_all_that_the_ranks_seen_can_have() -> None:
    lanes = edges(4, 2, {0, 1, 2, 3})
    full = trees(view(lanes))
    assert full is not None
    assert full.algorithm.starters is not None
    assert full.algorithm.starters(4, 0) == {0, 1, 2, 3}
    # All edges touch these three, and make up the trees of four.
    found = trees(view(lanes, {0, 1, 2}))
    assert found is not None
    assert found.algorithm is full.algorithm
    # Of more ranks nothing is known but the edges.
    part = trees(view(edges(8, 2, {5}), {5}))
    assert part is not None
    assert part.algorithm.starters is not None
    assert part.algorithm.starters(8, 0) == frozenset()


def test_no_trees() -> None:
    lanes = edges(4, 2, {2})
    assert trees(view(lanes[1:], {2})) is None  # an edge without its way back
    assert trees(view(lanes, {1})) is None  # edges that no captured rank has
    early = [lane._replace(starts=lane.starts * 0, arrivals=lane.arrivals * 0 + 1) for lane in lanes]
    assert trees(view(early, {2})) is None  # nothing waits for anything
    apart = edges(4, 2, {2}) + [
        lane._replace(
            src=lane.src + 10, dst=lane.dst + 10, starts=lane.starts + 10**6, arrivals=lane.arrivals + 10**6
        )
        for lane in lanes
    ]
    assert trees(view(apart, {2, 12})) is None  # one is through before the other begins


def test_a_channel_of_next_to_no_bytes_is_none() -> None:
    """A barrier's connections carry 8 bytes beside an operation's channels, which share its bytes."""
    lanes = edges(4, 2, {2})
    least = [
        lane._replace(sizes=lane.sizes * 0 + 8) if k < len(lanes) // 2 else lane
        for k, lane in enumerate(lanes)
    ]
    assert trees(view(lanes, {2})) is not None
    assert trees(view(least, {2})) is None
