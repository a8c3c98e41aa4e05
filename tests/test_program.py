"""Operations read in the order of the ranks' programs, and of processes that share addresses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of
from test_sequenced import check

import dpuflow
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Job, build_collectives
from dpuflow.schedules.algorithms import Algorithm
from dpuflow.schedules.trees import Send
from dpuflow.schema.rows import Op, Wire
from dpuflow.scoring.score import score_files

ROOTED = [(Op.BROADCAST, "binomial"), (Op.REDUCE, "binomial"), (Op.GATHER, "linear"), (Op.SCATTER, "linear")]


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
@pytest.mark.parametrize("n", [4, 5, 7])
def test_roots_may_change_from_call_to_call(style: str, n: int) -> None:
    """Ranks are late in turn, and nobody waits between operations."""
    world, free, played = World(style), dict.fromkeys(range(n), 0), []
    for turn in range(24):
        op, name = ROOTED[turn * 7 % 4]
        late = {turn * 3 % n: 4_000_000} if turn % 3 == 0 else {}
        enter = {r: at + 20_000 + late.get(r, 0) + (r * 7919 + turn * 31) % 9_000 for r, at in free.items()}
        played.append(world.play(algorithm_of(op, name), 4096 * n, enter, root=turn * 5 % n))
        free = played[-1].leave_ns
    found = build_collectives(Job(build_exchanges(world.transfers()), np.arange(n)))
    order = sorted(found, key=lambda i: i.op)
    check(order, sorted(played, key=lambda p: p.algorithm.op))
    for op in {op for op, _ in ROOTED}:
        roots = [i.root for i in found if i.op == op]
        assert sorted(r for r in roots if r is not None) == sorted(
            p.root for p in played if p.algorithm.op == op
        )


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
def test_what_two_ranks_exchange_after_their_captures_is_not_looked_for(style: str) -> None:
    """Linear broadcasts, each rank the root in turn: others' roots are read as before, theirs by what they
    send to others; no other rank's message takes the place of one that nobody saw."""
    world, free, n, gone = World(style), dict.fromkeys(range(4), 0), 4, 11
    for turn in range(24):
        enter = {r: at + 1_000_000 + (r * 7919 + turn * 31) % 9_000 for r, at in free.items()}
        if turn == gone:
            until = TIME_0 + min(enter.values())
        free = world.play(algorithm_of(Op.BROADCAST, "linear"), 4096, enter, root=turn % n).leave_ns
    transfers = world.transfers()
    last = int(transfers["sent_ns"].max())
    between = np.isin(transfers["src"], (0, 1)) & np.isin(transfers["dst"], (0, 1))
    seen = transfers[~(between & (transfers["sent_ns"] >= until))]
    job = Job(build_exchanges(seen), np.arange(n), until=np.array([until, until, last, last]))
    found = sorted(build_collectives(job), key=lambda i: int(job.columns.starts[i.rows].min()))
    assert [i.root for i in found] == [turn % n for turn in range(24)]
    for turn, instance in enumerate(found):
        partly = turn >= gone and turn % n < 2
        assert len(instance.rows) == n - 1 - partly
        assert instance.confidence == (pytest.approx(2 / 3) if partly else 1.0)
        assert instance.view.blind == (frozenset({turn % n}) if partly else frozenset())


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
def test_rounds_of_isends_are_all_to_alls(style: str) -> None:
    """Each with sizes of its own; among neighbours alone they have no name."""
    world, free, n = World(style), dict.fromkeys(range(5), 0), 5
    for turn in range(9):
        enter = {r: at + 1_000_000 + (r * 7919 + turn * 31) % 9_000 for r, at in free.items()}
        free = world.play(algorithm_of(Op.ALL_TO_ALL, "linear"), 640 * (turn + 1), enter, tag=7).leave_ns
    transfers = world.transfers()
    transfers["op"] = Op.SEND_RECV
    found = build_collectives(Job(build_exchanges(transfers), np.arange(n)))
    assert [(i.op, len(i.rows), i.size) for i in found] == [(Op.ALL_TO_ALL, n * (n - 1), None)] * 9
    few = transfers[np.abs(transfers["src"].astype(int) - transfers["dst"]) == 1]
    found = build_collectives(Job(build_exchanges(few), np.arange(n)))
    assert [(i.op, len(i.rows), len(i.free_rows())) for i in found] == [(Op.UNKNOWN, 2 * (n - 1), n)] * 9


@pytest.mark.parametrize("n", [3, 4, 6])
def test_rounds_along_a_ring_are_dated_and_a_pipeline_is_not_one(n: int) -> None:
    """Isend to the next, irecv from the one before, wait: all but one rank is seen to send before it gets."""

    def around(n: int, size: float, root: int) -> Iterator[Send]:
        for rank in range(n):
            yield Send(0, rank, (rank + 1) % n, size)

    def along(n: int, size: float, root: int) -> Iterator[Send]:
        for rank in range(n - 1):
            yield Send(rank, rank, rank + 1, size)

    for sends, told in ((around, {(Op.UNKNOWN, n, n)}), (along, {(Op.SEND_RECV, 2, 0)})):
        world, free = World("eager"), dict.fromkeys(range(n), 0)
        for turn in range(9):
            late = {0: 5_000_000, 1: 1_000_000 * (turn % 3)}
            enter = {r: at + late.get(r, 0) + (r * 7919 + turn * 31) % 9_000 for r, at in free.items()}
            free = world.play(Algorithm(Op.ALL_GATHER, "ring", sends), 4096, enter, tag=7).leave_ns
        transfers = world.transfers()
        transfers["op"] = Op.SEND_RECV
        found = build_collectives(Job(build_exchanges(transfers), np.arange(n)))
        assert {(i.op, len(i.order), len(i.free_rows())) for i in found} == told


@pytest.mark.parametrize("shape", ["linear", "pairwise"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("n", [3, 4, 5])
def test_uneven_all_to_alls_between_rings_of_odd_shares(n: int, named: bool, shape: str) -> None:
    """An all_reduce whose buffer does not divide evenly is read among all_to_alls of any sizes, whether tags
    name operations or were not captured; a reduce_scatter would send each rank the same of all others."""
    world, free, draw = World("eager"), dict.fromkeys(range(n), 0), random.Random(n)
    spread, ring = algorithm_of(Op.ALL_TO_ALL, shape), algorithm_of(Op.ALL_REDUCE, "ring")
    for turn in range(60):
        enter = {r: at + 1_000_000 + draw.randrange(400_000) for r, at in free.items()}
        free = world.play(ring if turn % 3 == 2 else spread, 4_000 * n, enter).leave_ns
    transfers = world.transfers()
    a2a = transfers["op"] == Op.ALL_TO_ALL
    transfers["bytes"][a2a] = [256 * draw.randint(1, 40) for _ in range(int(a2a.sum()))]
    # Blocks of a number of elements that the ranks do not divide: the first ones have one more.
    ahead = np.argsort(transfers["sent_ns"], kind="stable")
    turns: dict[tuple[int, int], int] = {}
    for row in ahead[~a2a[ahead]].tolist():
        edge = int(transfers["src"][row]), int(transfers["dst"][row])
        turn = turns[edge] = turns.get(edge, -1) + 1
        step = turn % (2 * n - 2)
        block = (edge[0] - step) % n
        transfers["bytes"][row] = 4_000 + 4 * (block == 0)
    if not named:
        transfers["op"], transfers["wire"] = Op.UNKNOWN, Wire.TAGGED
    found = build_collectives(Job(build_exchanges(transfers), np.arange(n)))
    assert [i.op for i in found] == [Op.ALL_TO_ALL, Op.ALL_TO_ALL, Op.ALL_REDUCE] * 20
    assert all(i.complete and i.algorithm is not None for i in found)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("g_moe_n5_random", 0.97),
        ("g_allreduce_2pernode_n8_late5", 0.97),
        ("m_bcast_roots_n4_random", 0.0),
    ],
)
def test_shapes_of_real_jobs(shared: Path, tmp_path: Path, name: str, last: float) -> None:
    """Uneven all_to_alls, two processes behind an address, roots that change."""
    case = shared / "captures/tcp" / name
    places = [dpuflow.Vantage(p.name.split(".")[0], (str(p),)) for p in sorted(case.glob("node*.pcap.gz"))]
    dpuflow.write_json(dpuflow.analyze(places), str(tmp_path / "r.json"))
    (score,) = score_files([(str(tmp_path / "r.json"), str(case))], 1_000_000, 2_000_000)
    assert score.found == score.op_right == score.true
    assert score.bytes_right == score.bytes_asked
    assert score.bounds_violated == 0
    assert score.last_right >= last * score.last_asked
    if last:
        assert score.verdicts_right == 1, score.verdict_notes
