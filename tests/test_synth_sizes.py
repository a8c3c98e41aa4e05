"""Message counts and sizes against worked examples of NCCL's formulas, computed by hand from its sources."""

from __future__ import annotations

from collections import Counter

import pytest

from dpuflow.schedules.nccl import pat_dimensions
from dpuflow.synth import algorithms
from dpuflow.synth.algorithms import Lane, double_tree
from dpuflow.synth.pat import _gather, _scatter, depth_first, far_first, pat_messages
from dpuflow.synth.sizes import PROTOCOLS, channels_for, deal, p2p_chunks, p2p_parts
from dpuflow.wire.nccl import NCCL_STEPS

KIB, MIB = 1024, 1 << 20


def sent(lanes: list[Lane], protocol: str) -> list[int]:
    """Bytes on the wire of every message of the lanes that send."""
    return [
        PROTOCOLS[protocol].wire(size)
        for lane in lanes
        for stretch in lane.stretches
        for _ in range(stretch.times if stretch.send else 0)
        for size in stretch.slices
    ]


@pytest.mark.parametrize(
    ("size", "n", "channels", "protocol", "messages"),
    [
        (256 * MIB, 4, 2, "simple", {MIB: 192}),
        (100 * MIB, 8, 2, "simple", {MIB: 84, 128 * KIB: 28}),
        (MIB, 4, 2, "simple", {64 * KIB: 12}),
        (1024 * MIB, 16, 16, "simple", {MIB: 120}),
        (256 * MIB, 2, 2, "simple", {MIB: 128}),
        (4 * MIB, 4, 2, "ll128", {561_152: 6}),
        (64 * KIB, 4, 1, "ll", {32_768: 6}),
    ],
)
def test_ring_all_reduce(size: int, n: int, channels: int, protocol: str, messages: dict[int, int]) -> None:
    for share in deal(size, channels, PROTOCOLS[protocol].share):
        lanes = algorithms.ring_all_reduce(0, range(n), share, PROTOCOLS[protocol])
        for rank in range(n):
            assert Counter(sent([lanes[rank]], protocol)) == messages


def test_small_slices_are_sent_even_if_empty() -> None:
    """Of a chunk of at most 32 KiB the second slice has nothing left."""
    lanes = algorithms.ring_all_reduce(0, range(4), 64 * KIB, PROTOCOLS["simple"])
    assert Counter(sent([lanes[0]], "simple")) == {16 * KIB: 6, 0: 6}


def test_ring_all_gather() -> None:
    (share, other) = deal(64 * MIB, 2, 16 * KIB)
    lanes = algorithms.ring_blocks(0, range(4), share, PROTOCOLS["simple"], copies=True)
    assert share == other
    assert Counter(sent([lanes[1]], "simple")) == {MIB: 96}


@pytest.mark.parametrize(("protocol", "chunk"), [("simple", 512 * KIB), ("ll", 64 * KIB), ("ll128", 614_400)])
def test_tree_goes_up_and_down_every_edge(protocol: str, chunk: int) -> None:
    size = 32 * PROTOCOLS[protocol].data
    parents = dict(enumerate(double_tree(4)[0]))
    lanes = algorithms.tree_all_reduce(0, parents, size, PROTOCOLS[protocol])
    leaf = next(rank for rank in parents if rank not in parents.values())
    assert Counter(sent(lanes[leaf][:1], protocol)) == {chunk: 32}
    assert not lanes[leaf][1].stretches[0].send


def test_the_double_tree_of_four() -> None:
    """As ncclGetDtree gives it: 0 <- 2 <- {1, 3} and 3 <- 1 <- {0, 2}."""
    assert double_tree(4) == ([None, 2, 0, 2], [1, 3, 1, None])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 16, 33, 64])
def test_trees_reach_everybody_and_split_the_leaves(n: int) -> None:
    leaves = []
    for parents in double_tree(n):
        assert parents.count(None) == 1
        for place in range(n):
            seen = set()
            at: int | None = place
            while at is not None:
                assert at not in seen
                seen.add(at)
                at = parents[at]
        assert max(Counter(p for p in parents if p is not None).values()) <= 2
        leaves.append({place for place in range(n) if place not in parents})
    assert len(leaves[0] | leaves[1]) >= n - 2


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        (1, [1]),
        (100 * KIB, [32 * KIB] * 3 + [4 * KIB]),
        (256 * KIB, [64 * KIB] * 4),
        (MIB, [128 * KIB] * 8),
        (0, [0]),
    ],
)
def test_sends_and_receives(size: int, chunks: list[int]) -> None:
    assert p2p_chunks(size) == chunks


def test_channels_carry_all_and_small_operations_use_fewer() -> None:
    for size in (1, 4096, 100_003, 7 * MIB):
        for channels in (1, 2, 5, 16):
            shares = deal(size, channels, 16 * KIB)
            assert sum(shares) == size
            assert len(shares) <= channels
    assert channels_for(PROTOCOLS["simple"], 32 * KIB, 4, 8, ring=True) == 1
    assert channels_for(PROTOCOLS["simple"], 64 * MIB, 4, 8, ring=True) == 8


def test_pat_s_order_of_branches() -> None:
    assert list(depth_first(8)) == [4, 6, 7, 5, 2, 3, 1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12, 16, 33])
@pytest.mark.parametrize("block", [1, 1000, 100_000, 512 * KIB])
@pytest.mark.parametrize("scatter", [False, True])
def test_pat_brings_every_block_to_everybody(ranks: int, block: int, scatter: bool) -> None:
    """Played rank by rank: whoever sends a block has it, or has all the parts of the sum below it."""
    messages = pat_messages(ranks, block, scatter)
    assert sorted(s for m in messages for s in m.blocks) == list(range(1, ranks))
    assert max(m.room for m in messages) * block <= max(block, 512 * KIB)
    held: set[int] = {0} if not scatter else set()
    came: set[int] = set()
    for sends, message in _scatter(messages) if scatter else _gather(messages):
        if not sends:
            came |= set(message.blocks)
        elif scatter:
            for s in message.blocks:
                below = {s | 1 << bit for bit in range(message.dimension) if s | 1 << bit < ranks}
                assert below <= came
        else:
            assert {s - (1 << message.dimension) for s in message.blocks} <= held | came
    assert came == set(range(1, ranks))


def test_pat_aggregates_small_blocks() -> None:
    """Eight ranks and small blocks: a message a dimension, of 1, 2 and 4 blocks (Bruck's pattern)."""
    small = pat_messages(8, 1024, scatter=False)
    assert sorted((m.dimension, len(m.blocks)) for m in small) == [(0, 4), (1, 2), (2, 1)]
    assert len(pat_messages(8, 512 * KIB, scatter=False)) == 7


def test_pat_s_reduce_scatter_leaves_room_for_ranks_that_there_are_not() -> None:
    """Six ranks, as NCCL 2.28.9 was recorded: 10,944 bytes a block, messages of 43,776, 21,888 and 10,944."""
    assert far_first(4) == [3, 1, 2, 0]
    messages = pat_messages(6, 10_944, scatter=True)
    assert sorted((m.dimension, m.blocks, m.room) for m in messages) == [
        (0, (3, 5, 1), 4),
        (1, (2,), 2),
        (2, (4,), 1),
    ]
    gathered = pat_messages(6, 43_776, scatter=False)  # of these three, one and one were seen
    assert Counter(m.dimension for m in gathered) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8, 12, 16, 33])
@pytest.mark.parametrize("block", [1, 60_000, 200_000, 512 * KIB])
def test_pat_s_messages_are_as_many_blocks_as_its_schedule_says(ranks: int, block: int) -> None:
    messages = pat_messages(ranks, block, scatter=True)
    share = max(m.room for m in messages)
    bytes_of: Counter[int] = Counter()
    for message in messages:
        bytes_of[1 << message.dimension] += message.room
    assert bytes_of == pat_dimensions(ranks, share)


@pytest.mark.parametrize(
    ("size", "channels", "parts"),
    [(100 * KIB, 8, [100 * KIB]), (256 * KIB, 8, [128 * KIB] * 2), (4 * MIB, 4, [MIB] * 4), (0, 2, [0]),
     (300_000, 8, [77_824, 77_824, 77_824, 66_528]), (130 * KIB, 1, [130 * KIB])],
)  # fmt: skip
def test_parts_of_a_send(size: int, channels: int, parts: list[int]) -> None:
    assert p2p_parts(size, channels) == parts


@pytest.mark.parametrize("ranks", [8, 48, 64])
@pytest.mark.parametrize("order", [_gather, _scatter])
def test_pat_never_waits_for_a_slot_that_only_a_later_receive_gives_back(ranks, order):
    """All ranks run one program: more than eight messages of a dimension not received stopped 64 ranks."""
    waiting: dict[int, int] = {}
    for sends, message in order(pat_messages(ranks, 1 << 18, order is _scatter)):
        waiting[message.dimension] = waiting.get(message.dimension, 0) + (1 if sends else -1)
        assert 0 <= waiting[message.dimension] <= NCCL_STEPS
    assert not any(waiting.values())
