"""The algorithm of a collective whose exchanges are known, from who sent how much to whom.

In: the exchanges of one collective. Out: the algorithm, every rank's place in it and the buffer's size.
Nothing here looks at names of libraries, only at edges and bytes (``schedules``).

Of collectives of which only one rank's own messages were captured: the edges between that rank and its peers
in order of first contact in, algorithms with every seen endpoint at its position out; ranks that nobody saw
are negative numbers. What other edges of the schedule carried follows from the algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import gcd
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.components import in_a_row
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import edge_sizes, free_sends, lay_out
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.matching.model import Instance, Job
    from dpuflow.schedules.trees import Send
    from dpuflow.schema.tables import Rows


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
Seen = Callable[[int, int], bool]
"""Whether what the first of two endpoints sends to the second one is on the wire."""


def orders(edges: Iterable[tuple[int, int]], endpoints: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways to number the endpoints worth trying: as given, and along the ring if there is one."""
    # Rings run either way round: ranks may send to the next one or to the one before.
    tried = [tuple(endpoints), (endpoints[0], *reversed(endpoints[1:]))][: max(1, len(endpoints) - 1)]
    following: dict[int, int] = {}
    for src, dst in edges:
        if src in following and following[src] != dst:
            return tried
        following[src] = dst
    ring, closed = in_a_row(endpoints[0], following)
    if closed and len(ring) == len(endpoints) and tuple(ring) not in tried:
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
    known: Sequence[Algorithm] = ALGORITHMS,
    seen: Seen | None = None,
) -> list[Match]:
    """All ``known`` algorithms of ``op`` whose edges and bytes agree with ``edges``, simplest first.

    A message may have been cut into any number of segments where the algorithm allows it. ``op``
    UNKNOWN tries all operations. ``near``: the endpoints all of whose messages were captured, None for
    everyone: edges between others are not asked for; then the best match in time comes first, by how many
    messages each of ``near`` sends that need no input (``unasked``). ``seen``: which edges are on the wire,
    None: all. Where no buffer of one size fits, parts of the ``VARIED`` may be of any size: who sends to whom
    tells the algorithm.
    """
    if near is not None:
        asked = tuple((unasked or {}).items())
        return list(_partly(tuple(edges.items()), tuple(endpoints), op, near, asked, tuple(known)))
    found: dict[Algorithm, Match] = {}
    for sized in (True, False) if op in VARIED else (True,):
        for algorithm, order, root in _tries(edges, endpoints, op, known):
            if algorithm not in found:
                match = _match(edges, algorithm, order, root, seen, sized=sized)
                if match is not None:
                    found[algorithm] = match
        if found:
            break
    return list(found.values())


@remembered
def _partly(
    counted: tuple[tuple[tuple[int, int], tuple[int, int]], ...],
    endpoints: tuple[int, ...],
    op: Op,
    near: frozenset[int],
    asked: tuple[tuple[int, int], ...],
    known: tuple[Algorithm, ...],
) -> tuple[Match, ...]:
    """``matches`` where edges between endpoints that were not captured are missing: asked for again with each
    collective, from the same ranks in the same sizes."""
    edges, unasked = dict(counted), dict(asked)

    def seen(src: int, dst: int) -> bool:
        return src in near or dst in near

    contacts = [Contact(src, dst, count) for (src, dst), (count, _) in edges.items()]
    found: list[tuple[int, int, Match]] = []
    for algorithm, order, root in chain(_tries(edges, endpoints, op, known), placements(op, contacts, near)):
        match = _match(edges, algorithm, order, root, seen)
        if match is not None and _cut_alike(match, edges, seen):
            found.append((_untimely(match, edges, unasked), len(order), match))
    found.sort(key=lambda f: f[:2])  # of equals the fewest ranks, then the simplest algorithm
    best: dict[Algorithm, Match] = {}
    for _, _, match in found:
        best.setdefault(match.algorithm, match)
    return tuple(best.values())


def _tries(
    edges: EdgeBytes, endpoints: Sequence[int], op: Op, known: Sequence[Algorithm]
) -> Iterator[tuple[Algorithm, tuple[int, ...], int]]:
    """(algorithm, endpoints by position, root) of ``op`` among the endpoints that were seen."""
    n, tried = len(endpoints), orders(edges, endpoints)
    for algorithm in known:
        if op in (Op.UNKNOWN, algorithm.op) and algorithm.fits(n):
            for order in tried:
                for root in range(n) if algorithm.rooted else (0,):
                    yield algorithm, order, root


def expected_edges(
    algorithm: Algorithm, order: Sequence[int], root: int, seen: Seen | None
) -> Mapping[tuple[int, int], tuple[float, ...]]:
    """The edges of the schedule that are on the wire, by position, with the shares that they carry."""
    edges = edge_sizes(algorithm, len(order), root)
    if seen is None:
        return edges
    return {(s, d): sizes for (s, d), sizes in edges.items() if seen(order[s], order[d])}


def _match(
    edges: EdgeBytes,
    algorithm: Algorithm,
    order: tuple[int, ...],
    root: int,
    seen: Seen | None,
    *,
    sized: bool = True,
) -> Match | None:
    """The algorithm, if the edges that are ``seen`` carry what it has them carry; ``sized``: as parts of a
    buffer of one size."""
    total = sum(size for _, size in edges.values())
    if (algorithm.op == Op.BARRIER) != (total == 0):
        return None
    expected = expected_edges(algorithm, order, root, seen)
    size = total / max(sum(map(sum, expected.values())), 1e-12)
    fits = agree(edges, expected, order, size if sized else None, cuts=algorithm.cuts)
    return Match(algorithm, order, root, round(size) if sized else None) if fits else None


def _cut_alike(match: Match, edges: EdgeBytes, seen: Seen) -> bool:
    """Whether each message is cut into as many segments: of edges at few ranks else too many rings fit."""
    expected = expected_edges(match.algorithm, match.order, match.root, seen)
    order = match.order
    cuts = {edges[order[src], order[dst]][0] / len(sizes) for (src, dst), sizes in expected.items()}
    return len(cuts) == 1 and cuts.pop().is_integer()


def _untimely(match: Match, edges: EdgeBytes, unasked: Mapping[int, int]) -> int:
    """By how many the messages that need no input differ from those sent before any input came."""
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


MOST_RANKS: Final = 64
"""Ranks that a single rank's messages are explained by; each number is tried."""


View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A position, whom it sends to and whom it hears from, by first contact."""

AT_ONCE: Final = 0.5
"""A rank that is late itself has its inputs waiting, so not every collective shows how it posts."""


class Contact(NamedTuple):
    """An edge, with how many messages it carried; listed in order of the first of them."""

    src: int
    dst: int
    messages: int


def placements(
    op: Op, contacts: Sequence[Contact], near: frozenset[int], *, every: bool = False
) -> Iterator[tuple[Algorithm, tuple[int, ...], int]]:
    """(algorithm, endpoints by position, root) of ``op`` that show the one captured rank these contacts.

    Only with more ranks than endpoints seen, unless ``every``: the others are tried without this module.
    """
    seen = {end for c in contacts for end in c[:2]}
    own = seen & near
    if len(own) != 1:
        return
    (me,) = own
    outward = [c.dst for c in contacts if c.src == me]
    inward = [c.src for c in contacts if c.dst == me]
    # Inputs come as their senders are late; a rank's own sends keep to the schedule.
    turns = [inward, outward] if sorted(inward) == sorted(outward) and inward != outward else [inward]
    busiest = max(c.messages for c in contacts)
    for n in range(len(seen) + (not every), MOST_RANKS + 1):
        for algorithm in _carried_by(op, n, busiest):
            for seat, to, back in _views(algorithm, n).get((len(outward), len(inward)), ()):
                for heard in turns:
                    order = _fill(n, seat, me, (*to, *back), (*outward, *heard))
                    if order is not None:
                        yield algorithm, order, 0


def _carried_by(op: Op, n: int, busiest: int) -> Iterator[Algorithm]:
    """Algorithms of ``op`` for ``n`` ranks in which some edge carries no more messages than ``busiest``."""
    for algorithm in ALGORITHMS:
        of_op = algorithm.op == op or (op == Op.UNKNOWN and not algorithm.rooted)  # a leaf's fits any tree
        if of_op and algorithm.fits(n) and busiest >= _edges(algorithm, n)[1]:
            yield algorithm


@remembered
def _edges(algorithm: Algorithm, n: int) -> tuple[int, int]:
    """How many edges there are, and the fewest messages that any of them carries."""
    counts = Counter(map(itemgetter(1, 2), algorithm.sends(n, 1.0, 0)))  # by source and destination
    return len(counts), min(counts.values())


@remembered
def _views(algorithm: Algorithm, n: int) -> dict[tuple[int, int], list[View]]:
    """What positions see: (position, whom it sends to, whom it hears from), by first contact.

    By how many others they send to and hear from. Those that see the same messages at the same steps are one.
    """
    if n > 8 and _edges(algorithm, n)[0] > 8 * n:
        return {}  # everyone with everyone: then all endpoints were seen
    views: dict[object, View] = {}
    seats: list[list[Send]] = [[] for _ in range(n)]
    for send in lay_out(algorithm, n):
        seats[send.src].append(send)
        if send.dst != send.src:
            seats[send.dst].append(send)
    for seat, mine in enumerate(seats):
        to = tuple(dict.fromkeys(s.dst for s in mine if s.src == seat))
        back = tuple(dict.fromkeys(s.src for s in mine if s.dst == seat))
        names = {peer: number for number, peer in enumerate(dict.fromkeys((*to, *back)))}
        shape = tuple(
            (s.src == seat, names[s.dst if s.src == seat else s.src], round(s.size, 9)) for s in mine
        )
        views.setdefault(shape, (seat, to, back))
    found: dict[tuple[int, int], list[View]] = {}
    for view in views.values():
        found.setdefault((len(view[1]), len(view[2])), []).append(view)
    return found


def _fill(
    n: int, seat: int, me: int, positions: Sequence[int], endpoints: Sequence[int]
) -> tuple[int, ...] | None:
    """Endpoints by position, or None where one would sit twice."""
    order = [-1 - place for place in range(n)]
    order[seat] = me
    taken = {me: seat}
    for place, endpoint in zip(positions, endpoints, strict=True):
        if taken.setdefault(endpoint, place) != place or order[place] not in (endpoint, -1 - place):
            return None
        order[place] = endpoint
    return tuple(order)


def mark_at_once(job: Job, instances: Sequence[Instance], near: frozenset[int]) -> None:
    """Mark the collectives of operations whose captured ranks declare all of it before any data arrives.

    The other ranks run the same program. Only declarations count (offers, ready-to-receive): data sent to
    several peers at once still leaves one after the other. In a linear all_to_all the sends themselves show
    it, where the captured rank came first.
    """
    shown: dict[object, list[tuple[Instance, bool]]] = {}
    for instance in instances:
        linear = instance.op == Op.ALL_TO_ALL and instance.algorithm is not None
        linear = linear and instance.algorithm is not None and instance.algorithm.name == "linear"
        held = _declares_all(job.exchanges[instance.rows], near, linear=linear)
        if held is not None:
            name = instance.algorithm and instance.algorithm.name
            shown.setdefault((instance.op, name, instance.placement.ranks, tuple(instance.order)), []).append(
                (instance, held)
            )
    for votes in shown.values():
        if sum(held for _, held in votes) > AT_ONCE * len(votes):
            for instance, _ in votes:
                instance.view = replace(instance.view, at_once=True)


def _declares_all(rows: Rows, near: frozenset[int], *, linear: bool) -> bool | None:
    """Whether captured ranks contacted every peer before data reached them; None without declarations.

    ``linear``: whether they sent to every peer before.
    """
    gloo = (rows["wire"] >= Wire.GLOO_DATA) & (rows["wire"] <= Wire.GLOO_RECV_READY)
    if not gloo.all() and not linear:
        return None
    begun = np.where(rows["offer_ns"] != NEVER, rows["offer_ns"], rows["data_ns"])
    for end in near:
        heard, sent = rows["dst"] == end, rows["src"] == end
        data = rows["arrived_end_ns"][heard & (rows["arrived_end_ns"] != NEVER)]
        if not len(data):
            continue
        contacts: dict[int, int] = {}
        granted = np.where(gloo, rows["grant_ns"], NEVER)
        offered = np.where(gloo, rows["offer_ns"], begun)
        for mine, peer, times in ((heard, "src", granted), (sent, "dst", offered)):
            for other, when in zip(rows[peer][mine].tolist(), times[mine].tolist(), strict=True):
                if when != NEVER:
                    contacts[other] = min(when, contacts.get(other, when))
        if linear and contacts and min(contacts.values()) > int(data.min()):
            return None  # it came late: what it sent had nothing to wait for
        if max(contacts.values(), default=0) > int(data.min()):
            return False
    return True
