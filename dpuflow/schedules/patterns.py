"""Who sends how much to whom, in which step: rings, hypercubes, all pairs and barriers.

In: the ranks ``n``, a buffer of ``size`` bytes (as the result format counts ``bytes``: what one rank passed
to the call) and a root. Out: the ``Send``s, in no order that matters but that of their steps. Trees are in
``trees``.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005) for recursive doubling, halving-doubling, Rabenseifner, Bruck and ring;
Patarasuk and Yuan (2009) for the ring all_reduce; Hensgen, Finkel, Manber (1988) for
dissemination. Where ranks are no power of two: the extra ranks fold into neighbours first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.schedules.trees import Send, binomial_in_order, down, flat, power_below, up

if TYPE_CHECKING:
    from collections.abc import Iterator

# -- rings -----------------------------------------------------------------------------------


def ring_all_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(2 * (n - 1)):
        for rank in range(n):
            yield Send(step, rank, (rank + 1) % n, size / n)


def ring_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(n - 1):
        for rank in range(n):
            yield Send(step, rank, (rank + 1) % n, size)


def ring_reduce_scatter(n: int, size: float, root: int) -> Iterator[Send]:
    yield from ring_all_gather(n, size / n, root)


def powers(n: int) -> list[tuple[int, int]]:
    """The powers of two below ``n``, numbered."""
    return [(k, 1 << k) for k in range((n - 1).bit_length())]


# -- hypercubes ------------------------------------------------------------------------------


def _folded(n: int) -> tuple[int, list[int]]:
    """The power of two below n, and the rank that stands for each position of the hypercube."""
    power = power_below(n)
    extra = n - power
    return power, [2 * i + 1 if i < extra else i + extra for i in range(power)]


def recursive_doubling(n: int, size: float, root: int) -> Iterator[Send]:
    power, ranks = _folded(n)
    extra = n - power
    for i in range(extra):
        yield Send(0, 2 * i, 2 * i + 1, size)
    for step, distance in powers(power):
        for i, rank in enumerate(ranks):
            yield Send(step + 1, rank, ranks[i ^ distance], size)
    for i in range(extra):
        yield Send(n, 2 * i + 1, 2 * i, size)


def rabenseifner(n: int, size: float, root: int) -> Iterator[Send]:
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
    yield from _halved_and_doubled(ranks, size, step)
    for i in range(extra):
        yield Send(2 * n, 2 * i, 2 * i + 1, size)


def _halved_and_doubled(ranks: list[int], size: float, step: int) -> Iterator[Send]:
    """Recursive halving with the nearest partner first, then the way back."""
    distances = [distance for _, distance in powers(len(ranks))]
    for number, distance in enumerate([*distances, *reversed(distances)], step):
        for i, rank in enumerate(ranks):
            yield Send(number, rank, ranks[i ^ distance], size / 2 / distance)


def folded_rabenseifner(n: int, size: float, root: int) -> Iterator[Send]:
    """MPICH's: an extra rank hands all of its buffer to its neighbour, and gets all of the result."""
    power, ranks = _folded(n)
    for i in range(n - power):
        yield Send(0, 2 * i, 2 * i + 1, size)
    yield from _halved_and_doubled(ranks, size, 1)
    for i in range(n - power):
        yield Send(2 * n, 2 * i + 1, 2 * i, size)


def _halving(n: int, size: float, masks: list[int]) -> Iterator[Send]:
    """Recursive halving of a vector of n blocks, extra ranks folded.

    In the order of ``masks`` partners exchange halves of what they hold; a rank that stands for two has two
    blocks.
    """
    power = power_below(n)
    extra = n - power
    ranks = [2 * i + 1 if i < extra else i + extra for i in range(power)]
    begin = [2 * i if i < extra else i + extra for i in range(power)] + [n]
    for i in range(extra):
        yield Send(0, 2 * i, 2 * i + 1, size)
    first, many = [0] * power, power
    for step, mask in enumerate(masks, 1 if extra else 0):
        many //= 2
        for i in range(power):
            # The partner with the bit takes the upper half.
            sent = first[i] + (0 if i & mask else many)
            blocks = begin[sent + many] - begin[sent]
            first[i] += many if i & mask else 0
            yield Send(step, ranks[i], ranks[i ^ mask], size / n * blocks)


def recursive_halving(n: int, size: float, root: int) -> Iterator[Send]:
    power = power_below(n)
    masks = [1 << k for k in reversed(range(power.bit_length() - 1))]
    yield from _halving(n, size, masks)
    for i in range(n - power):
        yield Send(n, 2 * i + 1, 2 * i, size / n)


def butterfly(n: int, size: float, root: int) -> Iterator[Send]:
    """Recursive halving with the nearest partner first; the blocks then go where they belong."""
    power = power_below(n)
    extra, bits = n - power, power.bit_length() - 1
    yield from _halving(n, size, [1 << k for k in range(bits)])
    for i in range(power):
        own = 2 * i + 1 if i < extra else i + extra
        mirror = int(format(i, f"0{bits}b")[::-1], 2)
        target = 2 * mirror + 1 if mirror < extra else mirror + extra
        if mirror < extra:
            yield Send(n, own, target - 1, size / n)
        if target != own:
            yield Send(n, own, target, size / n)


def rabenseifner_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    """Halving with the nearest partner first, then the parts gather at the root the way back."""
    power = power_below(n)
    extra, bits = n - power, power.bit_length() - 1
    ranks = [2 * i if i < extra else i + extra for i in range(power)]
    for send in rabenseifner(n, size, root):
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


def bcube(n: int, size: float, root: int) -> Iterator[Send]:
    """Gloo: ranks on a grid, two to an edge as long as that divides; each shares with all along one edge
    after the other, then the way back (gloo/allreduce.cc bcube)."""
    edges, distance, part = list[tuple[int, int, float]](), 1, size
    while distance < n:
        count = 2 if n // distance % 2 == 0 else n // distance
        part /= count
        edges.append((distance, count, part))
        distance *= count
    for step, (distance, count, part) in enumerate([*edges, *reversed(edges)]):
        for rank in range(n):
            place = rank // distance % count
            for other in range(place + 1, place + count):
                yield Send(step, rank, rank + (other % count - place) * distance, part)


def doubling_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    for step, distance in powers(n):
        for rank in range(n):
            yield Send(step, rank, rank ^ distance, size * distance)


def bruck_all_gather(n: int, size: float, root: int) -> Iterator[Send]:
    for step, distance in powers(n):
        for rank in range(n):
            yield Send(step, rank, (rank - distance) % n, size * min(distance, n - distance))


def bruck_all_to_all(n: int, size: float, root: int) -> Iterator[Send]:
    for step, distance in powers(n):
        blocks = sum(1 for i in range(n) if i & distance)
        for rank in range(n):
            yield Send(step, rank, (rank + distance) % n, size / n * blocks)


def neighbour_exchange(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(n // 2):
        for rank in range(n):
            even = (rank % 2 == 0) == (step % 2 == 0)
            yield Send(step, rank, (rank + (1 if even else -1)) % n, size if step == 0 else 2 * size)


# -- all pairs -------------------------------------------------------------------------------


def pairwise(n: int, size: float, root: int) -> Iterator[Send]:
    for step in range(1, n):
        for rank in range(n):
            yield Send(step - 1, rank, (rank + step) % n, size / n)


def linear_all_to_all(n: int, size: float, root: int) -> Iterator[Send]:
    for send in pairwise(n, size, root):
        yield send._replace(step=0)


# -- barriers --------------------------------------------------------------------------------


def dissemination(n: int, size: float, root: int) -> Iterator[Send]:
    for step, distance in powers(n):
        for rank in range(n):
            yield Send(step, rank, (rank + distance) % n, 0)


def doubling_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    power = power_below(n)
    for rank in range(power, n):
        yield Send(0, rank, rank - power, 0)
    for step, distance in powers(power):
        for rank in range(power):
            yield Send(step + 1, rank, rank ^ distance, 0)
    for rank in range(power, n):
        yield Send(n, rank - power, rank, 0)


def folded_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    yield from recursive_doubling(n, 0, root)


def binomial_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    inward = list(up(binomial_in_order)(n, 0, root))
    yield from inward
    for send in reversed(inward):
        yield Send(2 * n - send.step, send.dst, send.src, 0)


def linear_barrier(n: int, size: float, root: int) -> Iterator[Send]:
    yield from up(flat)(n, 0, root)
    for send in down(flat)(n, 0, root):
        yield send._replace(step=n)


def double_ring(n: int, size: float, root: int) -> Iterator[Send]:
    for lap in range(2):
        for rank in range(n):
            yield Send(lap * n + rank, rank, (rank + 1) % n, 0)


def ring_reduce(n: int, size: float, root: int) -> Iterator[Send]:
    """Gloo: a ring reduce_scatter, then each rank hands its part to the root."""
    yield from ring_reduce_scatter(n, size, root)
    for rank in range(n):
        if rank != root:
            yield Send(n - 1, rank, root, size / n)
