"""Collectives nobody numbered, cut from the order of messages: played worlds with known answers."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from collective_worlds import Played, World, algorithm_of, run_job

from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance, Job, build_collectives
from dpuflow.matching.sequenced import cut_streams
from dpuflow.matching.streams import HOLE, edge_streams, numbered_streams
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schema.rows import EXCHANGE, Op, Wire

SAME = {
    frozenset({"pairwise", "linear"}),  # the same edges and sizes
    frozenset({"binomial", "tree", "linear", "chain"}),  # trees of few ranks coincide
}
NAMED = [a for a in ALGORITHMS if a.name != "unknown"]
IDS = [f"{a.op.token}-{a.name}-{i}" for i, a in enumerate(NAMED)]


def rebuilt(world: World, ranks: int) -> list[Instance]:
    return build_collectives(Job(build_exchanges(world.transfers()), np.arange(ranks)))


def names(instance: Instance) -> set[str]:
    assert instance.algorithm is not None
    return {instance.algorithm.name, *instance.alternatives}


def check(instances: list[Instance], played: list[Played]) -> None:
    assert len(instances) == len(played)
    for instance, truth in zip(instances, played, strict=True):
        assert instance.op == truth.algorithm.op
        assert truth.algorithm.name in names(instance)
        assert set(instance.order) == set(truth.ranks)
        assert instance.complete
        if truth.algorithm.op != Op.BARRIER:
            assert instance.size == pytest.approx(truth.size, abs=2)


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
@pytest.mark.parametrize("algorithm", NAMED, ids=IDS)
def test_every_algorithm_is_cut_and_named(algorithm: Algorithm, style: str) -> None:
    for n in (2, 3, 4, 5, 6, 8, 9):
        if not algorithm.fits(n):
            continue
        world = World(style)
        size = 1024 * n  # divides evenly, as a test of the size should
        played = run_job(world, algorithm, size, list(range(n)), 6)
        found = rebuilt(world, n)
        if n == 2:  # two ranks: patterns coincide, sizes with them
            assert len(found) in (len(played), *(len(played) * k for k in ()))
            assert {i.op for i in found} == {algorithm.op}
            continue
        check(found, played)


def ring(op: Op = Op.ALL_REDUCE) -> Algorithm:
    return next(a for a in ALGORITHMS if a.op == op and a.name == "ring")


@pytest.mark.parametrize("late_ns", [0, 300_000, 40_000_000])
def test_a_late_rank_does_not_tear_a_collective(late_ns: int) -> None:
    """Its peers' first messages lie far before its own: idle time must not cut."""
    world = World("eager")
    played = run_job(world, ring(), 64_000, [0, 1, 2, 3], 10, late={2: late_ns})
    check(rebuilt(world, 4), played)


def test_sizes_and_algorithms_may_change_from_one_to_the_next() -> None:
    world = World("eager")
    doubling = next(a for a in ALGORITHMS if a.name == "recursive_doubling" and a.op == Op.ALL_REDUCE)
    choices = random.Random(5)
    played: list[Played] = []
    free = dict.fromkeys(range(4), 0)
    for _ in range(40):
        algorithm, size = choices.choice([(ring(), 1 << 20), (ring(), 4096), (doubling, 512), (doubling, 64)])
        enter = {rank: at + 2_000_000 + choices.randrange(50_000) for rank, at in free.items()}
        played.append(world.play(algorithm, size, enter))
        free = played[-1].leave_ns
    check(rebuilt(world, 4), played)


def test_back_to_back_with_no_pause_between() -> None:
    world = World("eager")
    played = run_job(world, ring(), 16_384, [0, 1, 2, 3], 20, compute_ns=0)
    check(rebuilt(world, 4), played)


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER])
def test_operations_with_the_same_messages_are_named_beside_each_other(op: Op) -> None:
    """Nothing names the operation: a ring passes on blocks, reduced or not."""
    world = World("eager")
    played = run_job(world, ring(op), 4 * 1024, [0, 1, 2, 3], 10)
    exchanges = build_exchanges(world.transfers())
    streams = edge_streams(exchanges, np.arange(len(exchanges)))
    found = cut_streams(Job(exchanges, np.arange(4)), streams, Op.UNKNOWN, settled=True)
    assert len(found) == len(played)
    assert {frozenset({i.op, *i.alike}) for i in found} == {frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})}


@pytest.mark.parametrize("ranks", [3, 4])
def test_layers_back_to_back_are_no_segments(ranks: int) -> None:
    """Six rings after each pause: as many messages as one ring of six segments has, which is not what ran."""
    world = World("eager")
    played: list[Played] = []
    free = dict.fromkeys(range(ranks), 0)
    for turn in range(72):
        pause = 5_000_000 if turn % 6 == 0 else 2_000
        enter = {rank: at + pause + (2_000_000 if rank == turn // 6 % ranks else 0) * (turn % 6 == 0)
                 for rank, at in free.items()}  # fmt: skip
        played.append(world.play(ring(), 30_000, enter))
        free = played[-1].leave_ns
    check(rebuilt(world, ranks), played)


def test_segments_of_a_broadcast_are_one_message() -> None:
    chain = next(a for a in ALGORITHMS if a.op == Op.BROADCAST and a.name == "chain")
    world = World("eager")
    played = run_job(world, chain, 64_000, [0, 1, 2, 3, 4], 8, cuts=4)
    check(rebuilt(world, 5), played)


def test_a_capture_that_begins_within_a_collective() -> None:
    world = World("eager")
    played = run_job(world, ring(), 64_000, [0, 1, 2, 3], 10)
    transfers = world.transfers()[17:]  # 24 messages a collective: the first is cut
    found = build_collectives(Job(build_exchanges(transfers), np.arange(4)))
    whole = [i for i in found if i.complete]
    check(whole, played[1:])
    assert [i.complete for i in found] == [False] + [True] * 9


@pytest.mark.parametrize("cut", [0, *range(3, 9)])  # 1 and 2 could be where ob1 begins to number
def test_a_ring_of_two_is_one_collective_wherever_the_capture_begins(cut: int) -> None:
    """Busy hosts answer late, and one rank is late itself: its two steps were taken for two collectives."""
    choices = random.Random(cut)
    world = World("eager", react=lambda: choices.randrange(50_000, 16_000_000))
    played: list[Played] = []
    at = {0: 0, 1: 0}
    for _ in range(100):
        enter = {0: at[0] + 20_000_000, 1: at[1] + 60_000_000}
        played.append(world.play(ring(), 65_536, enter))
        at = played[-1].leave_ns
    found = build_collectives(Job(build_exchanges(world.transfers()[cut:]), np.arange(2)))
    rings = [i for i in found if i.complete and i.size == 65_536]
    assert len(rings) >= len(played) - 3
    assert len(found) - len(rings) <= 3


def test_a_message_nobody_saw_leaves_the_rest_in_place() -> None:
    """ob1 numbers its messages, so a gap in the numbers is a hole in the stream."""
    world = World("eager")
    played = run_job(world, ring(), 64_000, [0, 1, 2, 3], 10)
    transfers = np.delete(world.transfers(), [30, 95])
    found = build_collectives(Job(build_exchanges(transfers), np.arange(4)))
    assert len(found) == len(played)
    assert [len(i.rows) for i in found] == [24, 23, 24, 23, 24, 24, 24, 24, 24, 24]
    assert found[1].confidence < 1
    # Of each rank's six messages only the first one dates its entry: 30 and 95 are later ones.
    assert not any(i.view.blind for i in found)
    opening = int(np.flatnonzero(world.transfers()["src"] == 2)[6])  # rank 2's first of the second collective
    found = build_collectives(Job(build_exchanges(np.delete(world.transfers(), opening)), np.arange(4)))
    assert [i.view.blind for i in found] == [frozenset()] + [frozenset({2})] + [frozenset()] * 8


EXSCAN, USER = 2**32 - 18, 7


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
@pytest.mark.parametrize(
    ("tag", "op"), [(EXSCAN, Op.UNKNOWN), (USER, Op.SEND_RECV), (2**32 - 99, Op.UNKNOWN)]
)
def test_other_messages_of_the_communicator_leave_no_holes(style: str, tag: int, op: Op) -> None:
    """ob1 numbers all messages of a communicator: scans, point to point, and what nobody knows."""
    world, free = World(style), dict.fromkeys(range(4), 0)
    chain, played = algorithm_of(Op.BROADCAST, "chain"), []
    for turn in range(8):
        enter = {r: at + 5_000_000 + (r * 7919 + turn * 31) % 20_000 for r, at in free.items()}
        free = world.play(chain, 512, enter, tag=tag).leave_ns
        played.append(world.play(ring(), 64_000, {r: at + 20_000 for r, at in free.items()}))
        free = played[-1].leave_ns
    transfers = world.transfers()
    transfers["op"][transfers["tag"] == tag] = op
    found = build_collectives(Job(build_exchanges(transfers), np.arange(4)))
    check([i for i in found if i.op == Op.ALL_REDUCE], played)
    assert not any(HOLE in i.rows or i.confidence < 1 for i in found if i.op == Op.ALL_REDUCE)
    rest = [i for i in found if i.op != Op.ALL_REDUCE]
    if tag == EXSCAN:
        told = [(i.op, i.algorithm, i.order, i.size) for i in rest]
        assert told == [(Op.UNKNOWN, chain, [0, 1, 2, 3], 512)] * 8
    else:
        assert {(i.op, len(i.order)) for i in rest} <= {(Op.SEND_RECV, 2)}


def test_two_communicators_with_one_context_number() -> None:
    """MPI_Comm_split gives both halves the same context."""
    world = World("eager")
    left = run_job(world, ring(), 64_000, [0, 1, 2], 8, context=5)
    right = run_job(world, ring(), 8_000, [3, 4, 5], 8, context=5, start_ns=1_300_000)
    found = rebuilt(world, 6)
    check([i for i in found if 0 in i.order], left)
    check([i for i in found if 3 in i.order], right)


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
@pytest.mark.parametrize(
    ("parts", "op"),
    [((Op.REDUCE, Op.BROADCAST), Op.ALL_REDUCE), ((Op.GATHER, Op.BROADCAST), Op.ALL_GATHER),
     ((Op.REDUCE, Op.SCATTER), Op.REDUCE_SCATTER)],
)  # fmt: skip
def test_an_operation_made_of_two_is_told_by_how_the_root_goes_on(
    parts: tuple[Op, Op], op: Op, style: str
) -> None:
    n, size = 4, 48_000
    first, second = (algorithm_of(part, "linear") for part in parts)
    passed = size * n if parts[0] == Op.GATHER else size // n if parts[1] == Op.SCATTER else size
    for between_ns, expected in ((0, [op] * 6), (2_000_000, list(parts) * 6)):
        world, free = World(style), dict.fromkeys(range(n), 0)
        for turn in range(6):
            enter = {r: at + 5_000_000 + (r * 7919 + turn * 31) % 20_000 for r, at in free.items()}
            played = world.play(first, size, enter)
            enter = {r: at + between_ns for r, at in played.leave_ns.items()}
            free = world.play(second, passed, enter).leave_ns
        found = rebuilt(world, n)
        assert [i.op for i in found] == expected
        assert found[0].size == size
        assert names(found[0]) == {"linear"}
        assert found[0].alike == (() if expected[0] == op else (op,))  # a late root's would look like that


@pytest.mark.parametrize("leaders", [False, True])
@pytest.mark.parametrize("shape", ["chain", "linear"])
def test_roots_of_slow_hosts_go_on_at_once_unless_they_do_something_else(shape: str, leaders: bool) -> None:
    """Hosts need many times a message's way. Leaders of nodes reduce among themselves in between."""
    n, size = 4, 48_000
    world, free = World("eager", react=lambda: 150_000), dict.fromkeys(range(2 * n), 0)
    for turn in range(6):
        enter = {r: at + 9_000_000 + (r * 7919 + turn * 31) % 20_000 for r, at in free.items()}
        for node in (range(n), range(n, 2 * n)):
            mine = {r: enter[r] for r in node}
            free |= world.play(algorithm_of(Op.REDUCE, shape), size, mine, context=node[0]).leave_ns
        if leaders:
            mine = {r: free[r] for r in (0, n)}
            free |= world.play(algorithm_of(Op.ALL_REDUCE, "ring"), size, mine, context=2 * n).leave_ns
        for node in (range(n), range(n, 2 * n)):
            mine = {r: free[r] for r in node}
            free |= world.play(algorithm_of(Op.BROADCAST, "linear"), size, mine, context=node[0]).leave_ns
    found = [i for i in rebuilt(world, 2 * n) if len(i.order) == n]
    told = {Op.REDUCE: 12, Op.BROADCAST: 12} if leaders else {Op.ALL_REDUCE: 12}
    assert Counter(i.op for i in found) == told
    assert {i.alike for i in found} == {()}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1, 2, 5, 3, 4, 6], [0, 1, 3, 4, 2, 5]),  # lost on its way, read when it came again
        ([65534, 0, 65535, 1], [0, 2, 1, 3]),  # counts round
        ([1, 2, 5, 4, 6], [0, 1, HOLE, 3, 2, 4]),  # and one that nobody saw
        ([1, 2, 3, 1, 2], [0, 1, 2, 3, 4]),  # began anew
    ],
)
def test_messages_belong_where_their_numbers_say(numbers: list[int], expected: list[int]) -> None:
    exchanges = EXCHANGE.zeros(len(numbers))
    exchanges["sub"], exchanges["dst"], exchanges["order"] = numbers, 1, np.arange(len(numbers))
    exchanges["wire"], exchanges["op"] = Wire.OB1_MATCH, Op.ALL_REDUCE
    streams = numbered_streams(exchanges, edge_streams(exchanges, np.arange(len(numbers))))[Op.ALL_REDUCE]
    assert streams.rows.tolist() == expected


@pytest.mark.parametrize("style", ["eager", "rendezvous"])
def test_a_call_of_half_the_bytes_is_no_last_segment_of_the_one_before(style: str) -> None:
    """Roots that change, so that the order of the program tells; each rank works before each call."""
    world, played = World(style), []
    reduce, free = algorithm_of(Op.REDUCE, "binomial"), dict.fromkeys(range(3), 0)
    for turn in range(30):
        size, root = 12_000 >> turn % 3, turn // 3 % 3
        order = [(root + k) % 3 for k in range(3)]
        enter = {rank: at + 5_000_000 for rank, at in free.items()}
        played.append(world.play(reduce, size, {rank: enter[rank] for rank in order}))
        free |= played[-1].leave_ns
    found = rebuilt(world, 3)
    assert [(i.op, i.size) for i in found] == [(Op.REDUCE, each.size) for each in played]
