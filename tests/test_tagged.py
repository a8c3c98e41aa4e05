"""Collectives that carry a counting tag (Gloo), told apart where communicators share endpoints and tags."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of, run_job

from dpuflow.analysis import analyze
from dpuflow.entries import build_entries
from dpuflow.exchanges.build import build_exchanges
from dpuflow.framing import MPI_NONBLOCKING
from dpuflow.matching import Instance, Job, build_collectives
from dpuflow.schedules.algorithms import NONBLOCKING, Algorithm
from dpuflow.schema.rows import NEVER, Op, Wire
from dpuflow.schema.tables import Vantage

RING = algorithm_of(Op.ALL_REDUCE, "ring")
GATHER = algorithm_of(Op.ALL_GATHER, "ring")
DISSEMINATION = algorithm_of(Op.BARRIER, "dissemination")
MS = 1_000_000
TRACES = Path(__file__).resolve().parent.parent / "traces"


def rebuilt(world: World, ranks: int) -> list[Instance]:
    return build_collectives(Job(build_exchanges(world.transfers()), np.arange(ranks)))


def check(world: World, found: Sequence[Instance]) -> None:
    """Each collective played is one found: the same exchanges, operation, ranks and size."""
    exchanges = build_exchanges(world.transfers())
    truth = world.instances(exchanges)
    assert {tuple(i.rows.tolist()) for i in found} == {tuple(i.rows.tolist()) for i in truth}
    true = {tuple(i.rows.tolist()): i for i in truth}
    for instance in found:
        same = true[tuple(instance.rows.tolist())]
        assert (instance.op, set(instance.order)) == (same.op, set(same.order))
        assert instance.complete
        if same.op != Op.BARRIER:
            assert instance.size == pytest.approx(same.size, abs=2)


@pytest.mark.parametrize("late_ns", [0, 30 * MS])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_one_communicator(n: int, late_ns: int) -> None:
    world = World("gloo")
    run_job(world, RING, 1024 * n, list(range(n)), 10, late={n - 1: late_ns}, cuts=2)
    check(world, rebuilt(world, n))


def test_the_numbering_follows_the_ring() -> None:
    world = World("gloo")
    run_job(world, RING, 64_000, [2, 0, 3, 1], 3)
    for instance in rebuilt(world, 4):
        assert instance.order[instance.order.index(2) :] + instance.order[: instance.order.index(2)] == [
            2,
            0,
            3,
            1,
        ]


def test_a_late_rank_enters_long_after_its_peers_first_messages() -> None:
    """Back to back, and each time another rank is late by a hundred times what a collective takes."""
    world = World("gloo")
    late = random.Random(1)
    run_job(
        world,
        GATHER,
        4096,
        list(range(5)),
        30,
        compute_ns=0,
        late=lambda r, t: 40 * MS * (late.random() < 0.2),
    )
    check(world, rebuilt(world, 5))


@pytest.mark.parametrize("n", range(2, 10))
def test_barriers_by_dissemination(n: int) -> None:
    world = World("gloo")
    run_job(world, DISSEMINATION, 0, list(range(n)), 6, late={0: 2 * MS})
    found = rebuilt(world, n)
    check(world, found)
    assert {i.op for i in found} == {Op.BARRIER}


@pytest.mark.parametrize("compute_ns", [0, 3 * MS])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_broadcasts_from_every_root(n: int, compute_ns: int) -> None:
    """Nothing synchronises a broadcast: a root goes on while others have not even entered."""
    world = World("gloo")
    free = dict.fromkeys(range(n), MS)
    for turn in range(3 * n):
        enter = {rank: at + compute_ns + 7919 * rank % 20_000 for rank, at in free.items()}
        played = world.play(algorithm_of(Op.BROADCAST, "binomial"), 4096, enter, root=turn % n)
        free = played.leave_ns
    found = rebuilt(world, n)
    check(world, found)
    if n > 2:  # with two, either may as well be called the first
        assert [i.order[i.root or 0] for i in found] == [turn % n for turn in range(3 * n)]


def take_turns(
    world: World,
    algorithm: Algorithm,
    groups: Sequence[Sequence[Sequence[int]]],
    times: int,
    late_ns: int = 0,
) -> None:
    """``groups``: dimensions, each a list of communicators; every rank serves one of each in turn."""
    free = {rank: MS for group in groups[0] for rank in group}
    choices = random.Random(3)
    contexts = {tuple(ranks): number for number, ranks in enumerate(r for g in groups for r in g)}
    for _ in range(times):
        for dimension in groups:
            for ranks in dimension:
                enter = {rank: free[rank] + MS // 2 + choices.randrange(50_000) for rank in ranks}
                enter[choices.choice(list(enter))] += late_ns
                played = world.play(
                    algorithm, 1024 * len(ranks), enter, context=contexts[tuple(ranks)], cuts=2
                )
                free.update(played.leave_ns)


def grid(side: int) -> list[list[list[int]]]:
    """Rows and columns of a square of ranks: tensor and data parallel groups."""
    rows = [[side * i + j for j in range(side)] for i in range(side)]
    return [rows, [list(column) for column in zip(*rows, strict=True)]]


@pytest.mark.parametrize("late_ns", [0, 5 * MS])
@pytest.mark.parametrize("algorithm", [RING, GATHER], ids=["all_reduce", "all_gather"])
@pytest.mark.parametrize("side", [2, 3, 4])
def test_rows_and_columns_take_turns_with_equal_tags(side: int, algorithm: Algorithm, late_ns: int) -> None:
    world = World("gloo")
    take_turns(world, algorithm, grid(side), 6, late_ns)
    check(world, rebuilt(world, side * side))


def test_groups_that_number_their_ranks_anew_share_no_addresses() -> None:
    """Hellos name ranks within their process group: two names of one endpoint are of two groups, then."""
    files = sorted((TRACES / "gloo-groups-n6").glob("node*.pcap.gz"))
    result = analyze([Vantage(file.name.partition(".")[0], (str(file),)) for file in files])
    steps = [each for each in result.collectives if each.op == "all_reduce"]
    assert Counter((each.bytes, len(each.ranks)) for each in steps) == {(1024, 2): 42, (1536, 3): 28}
    assert {each.algorithm for each in steps} == {"ring"}
    assert {rank.bound for each in steps for rank in each.ranks} == {"exact"}


def test_two_communicators_of_the_same_ranks_take_turns() -> None:
    """Two meshes of connections between the same endpoints, both counting from 0."""
    world = World("gloo")
    take_turns(world, RING, [[[0, 1, 2, 3]]], 1)
    ranks = [0, 1, 2, 3]
    free = dict.fromkeys(ranks, 20 * MS)
    for turn in range(1, 12):
        enter = {rank: at + MS + rank * 5_000 for rank, at in free.items()}
        played = world.play(RING, 8192 if turn % 2 else 64_000, enter, context=turn % 2)
        free = played.leave_ns
    check(world, rebuilt(world, 4))


@pytest.mark.parametrize("algorithm", [RING, GATHER], ids=["all_reduce", "all_gather"])
def test_two_buckets_under_way_on_one_connection(algorithm: Algorithm) -> None:
    """The second is called before the first has ended, as DDP does."""
    world = World("gloo")
    at = MS
    for _ in range(20):
        enter = {rank: at + 9_000 * rank for rank in range(4)}
        first = world.play(algorithm, 64_000, enter)
        second = world.play(algorithm, 16_000, {rank: t + 30_000 for rank, t in enter.items()})
        assert min(first.leave_ns.values()) > max(second.enter_ns.values())
        at = max(second.leave_ns.values()) + MS
    check(world, rebuilt(world, 4))


def test_messages_missing_at_both_ends_of_the_capture() -> None:
    world = World("gloo")
    run_job(world, RING, 4096, [0, 1, 2, 3], 8)
    transfers = world.transfers()[31:-31]  # 72 messages a collective
    exchanges = build_exchanges(transfers)
    found = build_collectives(Job(exchanges, np.arange(4)))
    entries = build_entries(exchanges, found)
    assert entries.whole.reshape(8, 4).tolist() == [[False] * 4] + [[True] * 4] * 6 + [[False] * 4]
    assert all(i.size == 4096 for i in found[1:-1])
    assert sum(len(i.rows) for i in found[1:-1]) == 6 * 24


def test_a_rank_that_never_comes() -> None:
    """The capture ends while three ranks wait for the fourth: nothing is said of the last collective."""
    world = World("gloo")
    played = run_job(world, RING, 4096, [0, 1, 2, 3], 5, late=lambda r, t: 900 * MS * (r == 2 and t == 4))
    end = played[-1].enter_ns[2] + TIME_0
    transfers = world.transfers()
    transfers = transfers[transfers["sent_ns"] < end]
    assert len(transfers) > 4 * 72
    exchanges = build_exchanges(transfers)
    found = build_collectives(Job(exchanges, np.arange(4)))
    entries = build_entries(exchanges, found)
    assert entries.whole.tolist() == [True] * 16 + [False] * (len(entries.whole) - 16)
    assert len(found) > 4


@pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.ALL_GATHER])
def test_other_algorithms_than_rings_stay_whole(op: Op) -> None:
    """Pairs of ranks are no rings of two if their exchange is not that of a ring."""
    name = "recursive_doubling" if op == Op.ALL_REDUCE else "bruck"
    for n in (4, 5, 8):
        world = World("gloo")
        run_job(world, algorithm_of(op, name), 1024 * n, list(range(n)), 4)
        found = rebuilt(world, n)
        check(world, found)
        assert {i.algorithm.name for i in found if i.algorithm} == {name}


@pytest.mark.parametrize("n", [3, 5, 6, 7])
def test_bcube_is_one_collective_and_no_rings_of_two(n: int) -> None:
    """Each two ranks along an edge exchange as often as rings of two ranks do."""
    world = World("gloo")
    run_job(world, algorithm_of(Op.ALL_REDUCE, "unknown"), 4096 * n * n, list(range(n)), 5)
    check(world, rebuilt(world, n))


def test_non_blocking_collectives_are_told_by_the_tag_of_each_call() -> None:
    """Two communicators at a time with one context, of which no call has a name."""
    world, binomial = World("eager"), NONBLOCKING[0]
    for call in range(6):
        for ranks, size in (((0, 1), 8192), ((2, 3, 4), 4096)):
            enter = {rank: TIME_0 + call * 20 * MS + rank * 100_000 for rank in ranks}
            world.play(binomial, size, enter, context=3, tag=(MPI_NONBLOCKING - call) % (1 << 32))
    transfers = world.transfers()
    transfers["op"], transfers["wire"] = Op.UNKNOWN, Wire.OB1_MATCH
    found = build_collectives(Job(build_exchanges(transfers), np.arange(5)))
    told = {(i.op, tuple(i.order), i.size) for i in found}
    assert told == {(Op.ALL_REDUCE, (0, 1), 8192), (Op.ALL_REDUCE, (2, 3, 4), 4096)}
    assert len(found) == 12
    # The first rank has all before it answers: nothing dates when it came.
    assert all(0 not in i.free_rows() for i in found)


def test_non_blocking_calls_go_on_at_once() -> None:
    """Each is begun before the last has ended: one collective a tag, whatever lies between its messages.

    Who waits for a late rank's has not left it when it calls the next.
    """
    world, binomial = World("eager"), NONBLOCKING[0]
    for call in range(8):
        enter = {rank: TIME_0 + call * MS + rank * 100_000 + 3 * MS * (rank == 4) for rank in range(5)}
        world.play(binomial, 4096, enter, tag=(MPI_NONBLOCKING - call) % (1 << 32))
    transfers = world.transfers()
    transfers["op"], transfers["wire"] = Op.UNKNOWN, Wire.OB1_MATCH
    exchanges = build_exchanges(transfers)
    found = build_collectives(Job(exchanges, np.arange(5)))
    assert [(i.op, len(i.order), len(i.rows)) for i in found] == [(Op.ALL_REDUCE, 5, 8)] * 8
    entries = build_entries(exchanges, found)
    assert (entries.since_ns == NEVER).all()
