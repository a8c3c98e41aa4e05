"""Collective algorithms as schedules: who sends how much to whom, in which step.

A schedule is what an algorithm does for ``n`` ranks and a buffer of ``size`` bytes (as the result
format counts ``bytes``: what one rank passed to the call). It answers what a reconstruction asks:
how many messages each edge carries and of what size, and which sends need no input.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005) for recursive doubling, halving-doubling, Rabenseifner, Bruck, binomial and ring;
Patarasuk and Yuan (2009) for the ring all_reduce; Hensgen, Finkel, Manber (1988) for
dissemination. Where ranks are no power of two: the extra ranks fold into neighbours first.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

from dpuflow.collectives.kept import kept
from dpuflow.collectives.sending import Send, is_power, power_below
from dpuflow.collectives.trees import (
    binary_by_level,
    binary_heap,
    binomial_in_order,
    binomial_outward,
    chains,
    down,
    flat,
    gathered,
    in_order_up,
    k_nomial,
    scattered,
    split_binary,
    synced_up,
    up,
)
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One way to carry out an operation.

    ``sends(n, size, root)`` gives the schedule; ``size_of(n, total)`` the buffer from the payload
    of all messages together; ``fits(n)`` whether it can serve ``n`` ranks; ``cuts`` whether each
    message may be cut into equal segments; ``turned`` whether another root's schedule is that of root 0 with
    the ranks turned; ``starters(n, root)`` the ranks whose first message needs no input, where steps do not
    tell: parts of the buffer that go side by side have steps of their own.
    """

    op: Op
    name: str
    sends: Callable[[int, float, int], Iterator[Send]]
    size_of: Callable[[int, float], float]
    fits: Callable[[int], bool] = lambda n: n >= 2
    rooted: bool = False
    cuts: bool = False
    turned: bool = True
    starters: Callable[[int, int], frozenset[int]] | None = None


# -- rings -----------------------------------------------------------------------------------


def _ring_all_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(2 * (n - 1)):
        for rank in range(n):
            yield Send(step, rank, (rank + 1) % n, size / n)


def _ring_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(n - 1):
        for rank in range(n):
            yield Send(step, rank, (rank + 1) % n, size)


def _ring_reduce_scatter(n: int, size: float, root: int) -> Iterator[Send]:
    yield from _ring_all_gather(n, size / n, root)


# -- hypercubes ------------------------------------------------------------------------------


def _folded(n: int) -> tuple[int, list[int]]:
    """The power of two below n, and the rank that stands for each position of the hypercube."""
    power = power_below(n)
    extra = n - power
    return power, [2 * i + 1 if i < extra else i + extra for i in range(power)]


def _recursive_doubling(n: int, size: float, root: int) -> Iterator[Send]:
    power, ranks = _folded(n)
    extra = n - power
    for i in range(extra):
        yield Send(0, 2 * i, 2 * i + 1, size)
    step, distance = (1 if extra else 0), 1
    while distance < power:
        for i, rank in enumerate(ranks):
            yield Send(step, rank, ranks[i ^ distance], size)
        step, distance = step + 1, distance * 2
    for i in range(extra):
        yield Send(step, 2 * i + 1, 2 * i, size)


def _rabenseifner(n: int, size: float, root: int) -> Iterator[Send]:
    power = power_below(n)
    extra = n - power
    ranks = [2 * i if i < extra else i + extra for i in range(power)]
    step = 0
    if extra:  # the pair shares the first reduction: halves cross, then the even rank gets both
        for i in range(extra):
            yield Send(0, 2 * i, 2 * i + 1, size / 2)
            yield Send(0, 2 * i + 1, 2 * i, size / 2)
            yield Send(1, 2 * i + 1, 2 * i, size / 2)
        step = 2
    part, distance = size, 1
    while distance < power:
        part /= 2
        for i, rank in enumerate(ranks):
            yield Send(step, rank, ranks[i ^ distance], part)
        step, distance = step + 1, distance * 2
    while distance > 1:
        distance //= 2
        for i, rank in enumerate(ranks):
            yield Send(step, rank, ranks[i ^ distance], part)
        part *= 2
        step += 1
    for i in range(extra):
        yield Send(step, 2 * i, 2 * i + 1, size)


def _halving(n: int, size: float, masks: list[int]) -> Iterator[tuple[Send, dict[int, int]]]:
    """Recursive halving of a vector of n blocks, extra ranks folded: sends, and each rank's block so far.

    In the order of ``masks`` partners exchange halves of what they hold; a rank that stands for two has two
    blocks.
    """
    power = power_below(n)
    extra = n - power
    ranks = [2 * i + 1 if i < extra else i + extra for i in range(power)]
    begin = [2 * i if i < extra else i + extra for i in range(power)] + [n]
    for i in range(extra):
        yield Send(0, 2 * i, 2 * i + 1, size), {}
    first, many = [0] * power, power
    for step, mask in enumerate(masks, 1 if extra else 0):
        many //= 2
        for i in range(power):
            # The partner with the bit takes the upper half.
            sent = first[i] + (0 if i & mask else many)
            blocks = begin[sent + many] - begin[sent]
            first[i] += many if i & mask else 0
            yield Send(step, ranks[i], ranks[i ^ mask], size / n * blocks), dict(enumerate(first))


def _recursive_halving(n: int, size: float, root: int) -> Iterator[Send]:
    power = power_below(n)
    masks = [1 << k for k in reversed(range(power.bit_length() - 1))]
    for send, _ in _halving(n, size, masks):
        yield send
    for i in range(n - power):
        yield Send(n, 2 * i + 1, 2 * i, size / n)


def _butterfly(n: int, size: float, root: int) -> Iterator[Send]:
    """Recursive halving with the nearest partner first; the blocks then go where they belong."""
    power = power_below(n)
    extra, bits = n - power, power.bit_length() - 1
    for send, _ in _halving(n, size, [1 << k for k in range(bits)]):
        yield send
    for i in range(power):
        own = 2 * i + 1 if i < extra else i + extra
        mirror = int(format(i, f"0{bits}b")[::-1], 2)
        target = 2 * mirror + 1 if mirror < extra else mirror + extra
        if mirror < extra:
            yield Send(n, own, target - 1, size / n)
        if target != own:
            yield Send(n, own, target, size / n)


def _rabenseifner_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    """Halving with the nearest partner first, then the parts gather at the root the way back."""
    power = power_below(n)
    extra, bits = n - power, power.bit_length() - 1
    ranks = [2 * i if i < extra else i + extra for i in range(power)]
    for send in _rabenseifner(n, size, root):
        if send.step < bits + (2 if extra else 0):
            yield send
    top, step = (root - extra if root >= 2 * extra else root // 2), n
    if root < 2 * extra and root % 2:  # the root was folded away: it takes the place of the first
        top = 0
        yield Send(step, ranks[0], root, size / power)
        ranks[0] = root
    active = list(range(power))
    for k in reversed(range(bits)):
        step += 1
        leaving = [i for i in active if (i ^ 1 << k) >> k == top >> k]
        for i in leaving:
            yield Send(step, ranks[i], ranks[i ^ 1 << k], size / 2 ** (k + 1))
        active = [i for i in active if i not in leaving]


def _doubling_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    distance, step = 1, 0
    while distance < n:
        for rank in range(n):
            yield Send(step, rank, rank ^ distance, size * distance)
        step, distance = step + 1, distance * 2


def _bruck_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    distance, step = 1, 0
    while distance < n:
        for rank in range(n):
            yield Send(step, rank, (rank - distance) % n, size * min(distance, n - distance))
        step, distance = step + 1, distance * 2


def _bruck_all_to_all(n: int, size: float, root: int) -> Iterator[Send]:
    distance, step = 1, 0
    while distance < n:
        blocks = sum(1 for i in range(n) if i & distance)
        for rank in range(n):
            yield Send(step, rank, (rank + distance) % n, size / n * blocks)
        step, distance = step + 1, distance * 2


def _neighbour_exchange(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(n // 2):
        for rank in range(n):
            even = (rank % 2 == 0) == (step % 2 == 0)
            yield Send(step, rank, (rank + (1 if even else -1)) % n, size if step == 0 else 2 * size)


# -- all pairs -------------------------------------------------------------------------------


def _pairwise(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(1, n):
        for rank in range(n):
            yield Send(step - 1, rank, (rank + step) % n, size / n)


def _linear_all_to_all(n: int, size: float, root: int) -> Iterator[Send]:
    for send in _pairwise(n, size, root):
        yield send._replace(step=0)


# -- barriers --------------------------------------------------------------------------------


def _dissemination(n: int, size: float, root: int) -> Iterator[Send]:
    distance, step = 1, 0
    while distance < n:
        for rank in range(n):
            yield Send(step, rank, (rank + distance) % n, 0)
        step, distance = step + 1, distance * 2


def _doubling_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    power = power_below(n)
    for rank in range(power, n):
        yield Send(0, rank, rank - power, 0)
    distance, step = 1, 1
    while distance < power:
        for rank in range(power):
            yield Send(step, rank, rank ^ distance, 0)
        step, distance = step + 1, distance * 2
    for rank in range(power, n):
        yield Send(step, rank - power, rank, 0)


def _binomial_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    inward = list(up(binomial_in_order)(n, 0, root))
    yield from inward
    for send in reversed(inward):
        yield Send(2 * n - send.step, send.dst, send.src, 0)


def _linear_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    yield from up(flat)(n, 0, root)
    for send in down(flat)(n, 0, root):
        yield send._replace(step=n)


def _double_ring(n: int, size: float, root: int) -> Iterator[Send]:
    for lap in range(2):
        for rank in range(n):
            yield Send(lap * n + rank, rank, (rank + 1) % n, 0)


def _ring_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    """Gloo: a ring reduce_scatter, then each rank hands its part to the root."""
    yield from _ring_reduce_scatter(n, size, root)
    for rank in range(n):
        if rank != root:
            yield Send(n - 1, rank, root, size / n)


@lru_cache(maxsize=1024)
def _units(sends: Callable[[int, float, int], Iterator[Send]], n: int) -> float:
    """Payload of all messages together for a buffer of one byte."""
    return sum(send.size for send in sends(n, 1.0, 0))


SHAPES: tuple[tuple[str, Callable[[int], list[int]], Callable[[int], bool]], ...] = (
    ("binomial", binomial_in_order, lambda n: n > 1),
    ("binomial", binomial_outward, lambda n: n > 3),
    ("linear", flat, lambda n: n > 2),
    ("chain", chains(1), lambda n: n > 2),
    *(("chain", chains(heads), lambda n, heads=heads: n > heads + 1) for heads in (2, 3, 4)),
    ("tree", binary_by_level, lambda n: n > 3),
    ("tree", binary_heap, lambda n: n > 5),
    ("unknown", k_nomial(3), lambda n: n > 4),  # the result format has no name for it
    ("unknown", k_nomial(4), lambda n: n > 5),
)
"""Name, parents and for how many ranks it is no other shape, of what a buffer goes down or up on."""


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(Op.ALL_REDUCE, "ring", _ring_all_reduce, lambda n, t: t / (2 * (n - 1)), cuts=True),
    Algorithm(
        Op.ALL_REDUCE,
        "recursive_doubling",
        _recursive_doubling,
        lambda n, t: t / (power_below(n) * (power_below(n).bit_length() - 1) + 2 * (n - power_below(n))),
    ),
    Algorithm(
        Op.ALL_REDUCE,
        "rabenseifner",
        _rabenseifner,
        lambda n, t: t / (2 * (power_below(n) - 1) + 2.5 * (n - power_below(n))),
    ),
    Algorithm(Op.ALL_GATHER, "ring", _ring_all_gather, lambda n, t: t / (n * (n - 1)), cuts=True),
    Algorithm(
        Op.ALL_GATHER, "recursive_doubling", _doubling_all_gather, lambda n, t: t / (n * (n - 1)), is_power
    ),
    Algorithm(Op.ALL_GATHER, "bruck", _bruck_all_gather, lambda n, t: t / (n * (n - 1))),
    Algorithm(
        Op.ALL_GATHER,
        "unknown",  # neighbour exchange: the result format has no name for it
        _neighbour_exchange,
        lambda n, t: t / (n * (n - 1)),
        lambda n: n >= 4 and n % 2 == 0,
    ),
    Algorithm(Op.REDUCE_SCATTER, "ring", _ring_reduce_scatter, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(
        Op.REDUCE_SCATTER,
        "halving_doubling",
        _recursive_halving,
        lambda n, t: t / _units(_recursive_halving, n),
    ),
    Algorithm(
        Op.REDUCE_SCATTER,
        "halving_doubling",
        _butterfly,
        lambda n, t: t / _units(_butterfly, n),
        lambda n: n > 3,
    ),
    Algorithm(Op.ALL_TO_ALL, "pairwise", _pairwise, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(Op.ALL_TO_ALL, "linear", _linear_all_to_all, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(
        Op.ALL_TO_ALL,
        "bruck",
        _bruck_all_to_all,
        lambda n, t: t / sum(bin(i).count("1") for i in range(n)),
    ),
    *(
        Algorithm(Op.BROADCAST, name, down(shape), lambda n, t: t / (n - 1), fits, rooted=True, cuts=True)
        for name, shape, fits in SHAPES
    ),
    Algorithm(Op.BROADCAST, "tree", split_binary(), lambda n, t: t / _units(split_binary(), n), rooted=True),
    *(
        Algorithm(Op.REDUCE, name, up(shape), lambda n, t: t / (n - 1), fits, rooted=True, cuts=True)
        for name, shape, fits in SHAPES
    ),
    Algorithm(
        Op.REDUCE,
        "tree",
        in_order_up,
        lambda n, t: t / _units(in_order_up, n),
        lambda n: n > 2,
        rooted=True,
        cuts=True,
        turned=False,
    ),
    Algorithm(
        Op.REDUCE,
        "rabenseifner",
        _rabenseifner_reduce,
        lambda n, t: t / _units(_rabenseifner_reduce, n),
        rooted=True,
        turned=False,
    ),
    Algorithm(
        Op.REDUCE, "ring", _ring_reduce, lambda n, t: t / (n - 1) / (1 + 1 / n), rooted=True, cuts=True
    ),
    Algorithm(Op.GATHER, "linear", up(flat), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(Op.GATHER, "linear", synced_up(), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(
        Op.GATHER,
        "binomial",
        gathered(binomial_in_order),
        lambda n, t: t / _units(gathered(binomial_in_order), n),
        rooted=True,
    ),
    Algorithm(Op.SCATTER, "linear", down(flat), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(
        Op.SCATTER,
        "binomial",
        scattered(binomial_in_order),
        lambda n, t: t / _units(scattered(binomial_in_order), n),
        rooted=True,
    ),
    Algorithm(Op.BARRIER, "recursive_doubling", _doubling_barrier, lambda n, t: 0.0),
    Algorithm(Op.BARRIER, "dissemination", _dissemination, lambda n, t: 0.0),
    Algorithm(Op.BARRIER, "linear", _linear_barrier, lambda n, t: 0.0, rooted=True),
    Algorithm(Op.BARRIER, "binomial", _binomial_barrier, lambda n, t: 0.0, rooted=True),
    Algorithm(Op.BARRIER, "ring", _double_ring, lambda n, t: 0.0),
)


@kept(lambda sends: 112 * len(sends))
def schedule(algorithm: Algorithm, n: int, root: int = 0) -> tuple[Send, ...]:
    """The schedule for a buffer of one byte, in order of steps: sizes are to be multiplied."""
    return tuple(sorted(algorithm.sends(n, 1.0, root), key=itemgetter(0)))


@kept(lambda edges: sum(250 + 32 * len(sizes) for sizes in edges.values()))
def edge_sizes(algorithm: Algorithm, n: int, root: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    """For each (src, dst) the sizes of its messages in order, for a buffer of one byte."""
    edges: dict[tuple[int, int], list[float]] = {}
    for send in schedule(algorithm, n, root):
        edges.setdefault((send.src, send.dst), []).append(send.size)
    return {edge: tuple(sizes) for edge, sizes in edges.items()}


Place = tuple[tuple[int, int], int]
"""A message of a schedule: its (src, dst) and how many that edge has sent before it."""


@kept(lambda pairs: 300 * len(pairs))
def dependencies(
    algorithm: Algorithm, n: int, root: int = 0, of: frozenset[int] | None = None
) -> tuple[tuple[Place, Place], ...]:
    """Pairs (send, input): the send needs the input, the latest one that its rank gets in earlier steps.

    Only sends of the ranks ``of``, None for all.
    """
    seen: dict[tuple[int, int], int] = {}
    inputs: dict[int, list[tuple[int, Place]]] = {}
    sends: list[tuple[Send, Place]] = []
    for send in schedule(algorithm, n, root):
        edge = (send.src, send.dst)
        place = (edge, seen.get(edge, 0))
        seen[edge] = place[1] + 1
        if of is None or send.src in of:
            sends.append((send, place))
        if of is None or send.dst in of:
            inputs.setdefault(send.dst, []).append((send.step, place))
    pairs: list[tuple[Place, Place]] = []
    for send, place in sends:
        before = inputs.get(send.src, [])
        end = bisect_left(before, send.step, key=itemgetter(0))  # a schedule is in order of steps
        if end:
            begin = bisect_left(before, before[end - 1][0], key=itemgetter(0))
            pairs.extend((place, what) for _, what in before[begin:end])
    return tuple(pairs)


@kept(lambda ranks: 32 * len(ranks))
def free_ranks(algorithm: Algorithm, n: int, root: int = 0) -> frozenset[int]:
    """Ranks whose first message needs no input: nothing is sent to them in an earlier step."""
    if algorithm.starters is not None:
        return algorithm.starters(n, root)
    first_send: dict[int, int] = {}
    first_input: dict[int, int] = {}
    for send in schedule(algorithm, n, root):
        first_send.setdefault(send.src, send.step)
        first_input.setdefault(send.dst, send.step)
    return frozenset(r for r, step in first_send.items() if step <= first_input.get(r, step))


@kept(lambda acts: 400 * (len(acts[0]) + len(acts[1])))
def first_acts(algorithm: Algorithm, n: int, root: int) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
    """What a rank does first: to whom it sends before all else, and from whom it receives in its first step.

    Ranks that receive before they send are not among the former, those that send before they receive not
    among the latter.
    """
    first: dict[int, int] = {}
    sends: dict[int, int] = {}
    inputs: dict[int, set[int]] = {}
    for send in schedule(algorithm, n, root):
        first.setdefault(send.dst, send.step)
        if first.setdefault(send.src, send.step) == send.step:
            sends.setdefault(send.src, send.dst)
        if first[send.dst] == send.step:
            inputs.setdefault(send.dst, set()).add(send.src)
    return sends, {rank: frozenset(peers) for rank, peers in inputs.items()}


@lru_cache(maxsize=4096)
def free_sends(algorithm: Algorithm, n: int, root: int, rank: int) -> dict[int, int]:
    """Whom a rank sends how many messages that need no input: those of steps before its first input."""
    sends: dict[int, int] = {}
    mine = schedule(algorithm, n, root)
    first = min((s.step for s in mine if s.dst == rank), default=None)
    for send in mine:
        if send.src == rank and (first is None or send.step <= first):
            sends[send.dst] = sends.get(send.dst, 0) + 1
    return sends
