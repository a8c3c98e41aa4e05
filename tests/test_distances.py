"""NCCL's PAT of which only some nodes were captured."""

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
from dpuflow.matching.layouts import pat_of
from dpuflow.schedules.nccl import pat_dimensions
from dpuflow.schema.rows import Op
from dpuflow.synth.case import write_case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("nodes", "only"), [(4, [1]), (5, [0, 3]), (6, [0, 2]), (7, [2, 3, 5]), (8, [6]), (8, [0, 1, 4, 7])]
)
@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("op: all_gather, bytes: 75000", ("all_gather", 75_000)),
        ("op: reduce_scatter, bytes: 840000", ("reduce_scatter", 840_000)),
    ],
)
@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_pat_from_some_nodes(
    nodes: int, only: list[int], op: str, told: tuple[str, int], transport: str, tmp_path: Path
) -> None:
    keys = settings(
        cluster={"nodes": nodes},
        nccl={"channels": 2, "transport": transport},
        observation={"only": only},
        faults=[{"kind": "gpu_late", "rank": only[0], "us": 200}],
    )
    captures = write_case(loop(op + ", algorithm: pat", keys, iterations=12), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        (told[0], "pat", told[1]): 12
    }
    near = {f"10.0.0.{node + 1}" for node in only}
    hidden = {end.id for end in result.endpoints if end.address not in near}
    assert "exact" not in {r.bound for c in result.collectives for r in c.ranks if r.endpoint in hidden}


def lanes(ranks: int, own: int, *, far_first: bool, block: int = 1000) -> list[Lane]:
    """What one rank passes on and gets; messages of one block each, its neighbour's last or first."""
    made = []
    for at, (distance, blocks) in enumerate(sorted(pat_dimensions(ranks).items(), reverse=far_first)):
        for src, dst in ((own, (own + distance) % ranks), ((own - distance) % ranks, own)):
            starts = 100 * at + np.arange(blocks)[None]
            sizes, none = np.full(blocks, block), np.zeros((1, blocks), np.uint32)
            made.append(Lane(src, dst, STEP_SLOT, sizes, starts, starts + 50, none))
    return made


@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 64])
@pytest.mark.parametrize("far_first", [False, True])
def test_every_rank_tells_all(ranks: int, far_first: bool) -> None:
    made = lanes(ranks, 2, far_first=far_first)
    members = sorted({end for lane in made for end in lane[:2]})
    found = pat_of(view(made, {2}))
    assert found is not None
    assert found.among == len(found.order) == ranks
    if ranks == 3:
        assert {found.op, *found.alike} == {Op.ALL_GATHER, Op.REDUCE_SCATTER}
    else:
        assert (found.op, found.alike) == (Op.ALL_GATHER if far_first else Op.REDUCE_SCATTER, ())
    assert found.size == (1000 if found.op == Op.ALL_GATHER else 1000 * ranks)
    assert pat_of(view(made, {2}, ranks + 1)) is None
    assert found.algorithm.starters is not None
    assert found.algorithm.starters(ranks, 0) == {members.index(2)}


@pytest.mark.parametrize("ranks", [5, 6, 9, 13])
@pytest.mark.parametrize("seen", ["all", "one"])
def test_channels_with_blocks_of_their_own_share_messages_differently(ranks: int, seen: str) -> None:
    """Blocks of a reduce_scatter that do not divide evenly over two channels: of the larger ones fewer share
    a message, and gaps differ."""
    made, none = [], np.zeros((1, 1), np.uint32)
    for block, share in ((32800, 1), (30136, 2)):
        for distance, blocks in sorted(pat_dimensions(ranks, share).items()):
            at = np.array([[100 * distance]])
            made += [
                Lane(src, (src + distance) % ranks, STEP_SLOT, np.array([block * blocks]), at, at + 50, none)
                for src in range(ranks)
                if seen == "all" or 2 in (src, (src + distance) % ranks)
            ]
    found = pat_of(view(made, set(range(ranks)) if seen == "all" else {2}))
    assert found is not None
    assert (found.op, found.size) == (Op.REDUCE_SCATTER, 62936 * ranks)
    assert seen == "all" or found.among == ranks


def test_no_pat() -> None:
    made = lanes(6, 2, far_first=True)
    members = sorted({end for lane in made for end in lane[:2]})
    assert pat_of(view(made, {members[0]})) is None  # lanes that no captured rank has
    assert pat_of(view(made[1:], {2})) is None  # it gets what nobody passes on
    assert pat_of(view([*made[2:], made[0]._replace(sizes=np.array([7]))], {2})) is None
