"""The algorithm of a collective whose exchanges are known, from who sent how much to whom.

In: the exchanges of one collective. Out: the algorithm, every rank's place in it and the buffer's
size. Nothing here looks at names of libraries, only at edges and bytes (``schedules``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import gcd
from typing import NamedTuple

from dpuflow.matching.partial import Contact, placements
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import edge_sizes, free_sends
from dpuflow.schema.rows import Op

ELEMENT_BYTES = 16
"""The largest element a library reduces (a double complex): how far two shares of one buffer may
differ when it does not divide evenly."""
VARIED = frozenset((Op.ALL_TO_ALL, Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.REDUCE_SCATTER))
"""Operations that let ranks' parts differ in size (MPI_Alltoallv, PyTorch's split sizes)."""


class Match(NamedTuple):
    """An algorithm that explains the exchanges; ``order`` is endpoints by position.

    ``size``: the buffer's bytes, None where ranks' parts differ.
    """

    algorithm: Algorithm
    order: tuple[int, ...]
    root: int
    size: int | None


EdgeBytes = Mapping[tuple[int, int], tuple[int, int]]
"""(src, dst) endpoints -> (messages, bytes)."""


def orders(edges: Iterable[tuple[int, int]], endpoints: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways to number the endpoints worth trying: as given, and along the ring if there is one."""
    # Rings run either way round: ranks may send to the next one or to the one before.
    tried = [tuple(endpoints), (endpoints[0], *reversed(endpoints[1:]))][: max(1, len(endpoints) - 1)]
    following: dict[int, int] = {}
    for src, dst in edges:
        if src in following and following[src] != dst:
            return tried
        following[src] = dst
    ring = [endpoints[0]]
    while len(ring) < len(endpoints):
        after = following.get(ring[-1])
        if after is None or after in ring:
            return tried
        ring.append(after)
    if following.get(ring[-1]) == ring[0] and tuple(ring) not in tried:
        tried.insert(0, tuple(ring))
    return tried


def whole_size(size: float, parts: Iterable[int]) -> int:
    """``size``, an average of sums of ``parts``, as the number of bytes that they can add up to.

    Shares of a buffer may differ by an element; the buffer is a multiple of what they are all multiples of.
    """
    grain = gcd(*parts)
    near = round(size / grain) * grain if grain > 1 else round(size)
    return near if abs(near - size) <= ELEMENT_BYTES else round(size)


def matches(
    edges: EdgeBytes,
    endpoints: Sequence[int],
    op: Op,
    near: frozenset[int] | None = None,
    unasked: Mapping[int, int] | None = None,
) -> list[Match]:
    """All algorithms of ``op`` whose edges and bytes agree with ``edges``, simplest first.

    A message may have been cut into any number of segments where the algorithm allows it. ``op``
    UNKNOWN tries all operations. ``near``: the endpoints all of whose messages were captured, None for
    everyone: edges between others are not asked for; then the best match in time comes first, by how many
    messages each of ``near`` sends that need no input (``unasked``). Where no buffer of one size fits, parts
    of the ``VARIED`` may be of any size: who sends to whom tells the algorithm.
    """
    if near is not None:
        return _partly(edges, endpoints, op, near, unasked or {})
    found = _matches(edges, endpoints, op, sized=True)
    return found if found or op not in VARIED else _matches(edges, endpoints, op, sized=False)


def _matches(edges: EdgeBytes, endpoints: Sequence[int], op: Op, *, sized: bool) -> list[Match]:
    n = len(endpoints)
    total = sum(size for _, size in edges.values())
    found: list[Match] = []
    for algorithm in ALGORITHMS:
        if op not in (Op.UNKNOWN, algorithm.op) or not algorithm.fits(n):
            continue
        if (algorithm.op == Op.BARRIER) != (total == 0):
            continue
        for order in orders(edges, endpoints):
            match = next(
                (
                    Match(algorithm, order, root, round(size) if sized else None)
                    for root in (range(n) if algorithm.rooted else (0,))
                    for expected in (edge_sizes(algorithm, n, root),)
                    for size in (total / max(sum(map(sum, expected.values())), 1e-12),)
                    if agree(edges, expected, order, size if sized else None, cuts=algorithm.cuts)
                ),
                None,
            )
            if match is not None:
                found.append(match)
                break
    return found


def _partly(
    edges: EdgeBytes, endpoints: Sequence[int], op: Op, near: frozenset[int], unasked: Mapping[int, int]
) -> list[Match]:
    """``matches`` where edges between endpoints that were not captured are missing."""
    n = len(endpoints)
    found: list[tuple[int, int, Match]] = []
    tries = [
        (algorithm, order, root)
        for order in orders(edges, endpoints)
        for algorithm in ALGORITHMS
        if op in (Op.UNKNOWN, algorithm.op) and algorithm.fits(n)
        for root in (range(n) if algorithm.rooted else (0,))
    ]
    contacts = [Contact(src, dst, count) for (src, dst), (count, _) in edges.items()]
    total = sum(size for _, size in edges.values())
    for algorithm, order, root in chain(tries, placements(op, contacts, near)):
        if (algorithm.op == Op.BARRIER) != (total == 0):
            continue
        expected = {
            (s, d): sizes
            for (s, d), sizes in edge_sizes(algorithm, len(order), root).items()
            if order[s] in near or order[d] in near
        }
        share = sum(sum(sizes) for sizes in expected.values())
        size = total / share if share else 0.0
        # Each edge must be cut alike: otherwise too many rings fit.
        cuts = {edges.get((order[s], order[d]), (0, 0))[0] / len(z) for (s, d), z in expected.items()}
        if len(cuts) != 1 or not cuts.pop().is_integer():
            continue
        if expected and agree(edges, expected, order, size, cuts=algorithm.cuts):
            match = Match(algorithm, order, root, round(size))
            found.append((_untimely(match, edges, unasked), len(order), match))
    found.sort(key=lambda f: f[:2])  # of equals the fewest ranks, then the simplest algorithm
    best: dict[Algorithm, Match] = {}
    for _, _, match in found:
        best.setdefault(match.algorithm, match)
    return list(best.values())


def _untimely(match: Match, edges: EdgeBytes, unasked: Mapping[int, int]) -> int:
    """By how many the messages that need no input differ from those that were sent without any."""
    places = {end: place for place, end in enumerate(match.order)}
    off = 0
    for end, count in unasked.items():
        place = places[end]
        sends = free_sends(match.algorithm, len(match.order), match.root, place)
        units = edge_sizes(match.algorithm, len(match.order), match.root)
        off += abs(
            count
            - sum(
                number * edges[end, match.order[dst]][0] // len(units[place, dst])
                for dst, number in sends.items()
            )
        )
    return off


def agree(
    edges: EdgeBytes,
    expected: Mapping[tuple[int, int], tuple[float, ...]],
    order: Sequence[int],
    size: float | None,
    *,
    cuts: bool,
) -> bool:
    """Whether counts and, for a buffer of ``size`` bytes (None: any), bytes of every edge are as expected."""
    if len(edges) != len(expected):
        return False
    for (src, dst), sizes in expected.items():
        seen = edges.get((order[src], order[dst]))
        if seen is None:
            return False
        count, total = seen
        if count < len(sizes) or (not cuts and count != len(sizes)):
            return False
        if size is not None and abs(total - sum(sizes) * size) > ELEMENT_BYTES * count:
            return False
    return True
