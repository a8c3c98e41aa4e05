"""PAT, parallel aggregated trees: all_gather and reduce_scatter in a logarithmic number of hops.

Every rank passes the same sequence of messages, told by distance: the block of the rank ``s`` further on
comes to it over the dimension of the lowest bit of ``s``, from the rank that much further on. The trees of
all blocks run in depth-first order, far branches first, and blocks ``delta`` apart share messages as long as
a slot holds them. reduce_scatter is the same backwards, but that the blocks of a message lie in the order of
their numbers' bits read backwards, with gaps for those of ranks that there are not. Source: NCCL 2.28
src/include/collectives.h (PatAGAlgorithm, PatRSAlgorithm), src/device/prims_simple.h (patReduce). What
differs: a slot is given back at its first use, not at its last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.synth.algorithms import Lane, Stretch, merged
from dpuflow.synth.sizes import PROTOCOLS
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Message(NamedTuple):
    """Blocks that travel together, over one dimension: at their receiver they are of the ranks so far on."""

    dimension: int
    blocks: tuple[int, ...]
    room: int  # how many blocks it is as long as


def lowest(value: int) -> int:
    """Number of the lowest bit set."""
    return (value & -value).bit_length() - 1


def depth_first(width: int) -> Iterator[int]:
    """1 ... width - 1 (a power of two) with far branches first: 4 6 7 5 2 3 1 of 8."""

    def below(value: int, bit: int) -> Iterator[int]:
        while bit:
            yield value | bit
            yield from below(value | bit, bit >> 1)
            bit >>= 1

    return below(0, width >> 1)


SLOT: Final = PROTOCOLS["simple"].slot


def far_first(count: int) -> list[int]:
    """Numbers below ``count`` (a power of two) by their bits read backwards, highest first: 3 1 2 0 of 4."""
    bits = count.bit_length() - 1
    return [int(f"{count - 1 - a:0{bits}b}"[::-1], 2) if bits else 0 for a in range(count)]


def pat_messages(ranks: int, block: int, scatter: bool, slot: int = SLOT) -> list[Message]:
    """The messages of an all_gather of ``block`` bytes a rank, in order of their sending; of a reduce_scatter
    (``scatter``) in the reverse order."""
    delta = 1 << (ranks - 1).bit_length()
    share = 1
    while slot // (block * share) >= 2 and share < ranks // 2:
        share, delta = 2 * share, delta // 2
    factor, depth = share, NCCL_STEPS
    while depth > 1 and factor < ranks // 2:
        factor, delta, depth = 2 * factor, delta // 2, depth // 2
    found: list[Message] = []

    def add(distances: list[int]) -> None:
        if scatter:
            distances = [distances[k] for k in far_first(len(distances))]
        groups = [distances[i : i + share] for i in range(0, len(distances), share)]
        for group in groups[::-1] if scatter else groups:
            blocks = tuple(s for s in group if s < ranks)
            if blocks:
                found.append(Message(lowest(group[0]), blocks, len(group) if scatter else len(blocks)))

    scale = factor // 2
    while scale:
        add([(2 * a + 1) * scale * delta for a in range(factor // (2 * scale))])
        scale //= 2
    for step in depth_first(delta):
        add([a * delta + step for a in range(factor)])
    return found


def pat(channel: int, order: Sequence[int], size: int, scatter: bool, slot: int = SLOT) -> dict[int, Lane]:
    """Lanes of all ranks; ``size`` bytes a rank on this channel, in rounds of one slot."""
    ranks = len(order)
    lanes: dict[int, list[Stretch]] = {rank: [] for rank in order}
    for at in range(0, size, slot):
        block = min(slot, size - at)
        messages = pat_messages(ranks, block, scatter, slot)
        steps = list(_scatter(messages)) if scatter else list(_gather(messages))
        for place, rank in enumerate(order):
            for sends, message in steps:
                # all_gather sends down, towards lower ranks; reduce_scatter the other way.
                away = (1 << message.dimension) * (1 if sends == scatter else -1)
                other = (order[(place + away) % ranks],)
                bytes_ = (message.room * block,)
                lanes[rank].append(Stretch(() if sends else other, other if sends else (), bytes_))
    return {rank: merged(channel, stretches) for rank, stretches in lanes.items()}


def _gather(messages: list[Message]) -> Iterator[tuple[bool, Message]]:
    """(sends, message) in a rank's order: each message is received when a send needs it, or at the end."""
    source = {block: i for i, message in enumerate(messages) for block in message.blocks}
    needs = [
        [source[near] for block in message.blocks if (near := block - (1 << message.dimension)) in source]
        for message in messages
    ]
    yield from _in_turn(messages, needs)


def _scatter(messages: list[Message]) -> Iterator[tuple[bool, Message]]:
    """The same backwards: a partial sum is sent when those of all branches below it are there."""
    backwards = messages[::-1]
    source = {block: i for i, message in enumerate(backwards) for block in message.blocks}
    needs = [
        [
            source[far]
            for block in message.blocks
            for bit in range(message.dimension)
            if (far := block | 1 << bit) in source
        ]
        for message in backwards
    ]
    yield from _in_turn(backwards, needs)


def _in_turn(messages: list[Message], needs: list[list[int]]) -> Iterator[tuple[bool, Message]]:
    """Sends in order, each after what it needs, and after what would else leave its peer without a slot.

    All ranks run the same program, so a rank that never has more than NCCL_STEPS messages of a dimension
    waiting for it never makes the rank beyond wait for a slot without end.
    """
    taken: set[int] = set()
    sent: dict[int, list[int]] = {}
    for i, message in enumerate(messages):
        before = sent.setdefault(message.dimension, [])
        oldest = before[-NCCL_STEPS:][:1] if len(before) >= NCCL_STEPS else []
        for needed in needs[i] + oldest:
            if needed not in taken:
                yield from _take(messages, needed, taken)
        yield True, message
        before.append(i)
    for i in range(len(messages)):
        if i not in taken:
            yield from _take(messages, i, taken)


def _take(messages: list[Message], wanted: int, taken: set[int]) -> Iterator[tuple[bool, Message]]:
    """Receive up to ``wanted``: messages of one dimension come in order."""
    for i in range(wanted + 1):
        if messages[i].dimension == messages[wanted].dimension and i not in taken:
            taken.add(i)
            yield False, messages[i]
