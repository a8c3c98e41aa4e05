"""Collectives of which only one rank's own messages were captured: which algorithm, how many ranks.

In: the edges between that rank and its peers in order of first contact. Out: algorithms with every seen
endpoint at its position; ranks that nobody saw are negative numbers. Other edges of the schedule
(``schedules``) cannot be checked; what they carried follows from the algorithm.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import schedule
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.matching.model import Instance
    from dpuflow.schedules.sending import Send
    from dpuflow.schema.tables import Rows

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
        for algorithm in ALGORITHMS:
            if op not in (Op.UNKNOWN, algorithm.op) or not algorithm.fits(n):
                continue
            if algorithm.rooted and op == Op.UNKNOWN:
                continue  # a leaf's one message fits any tree
            if busiest < _edges(algorithm, n)[1]:
                continue
            for seat, to, back in _views(algorithm, n).get((len(outward), len(inward)), ()):
                for heard in turns:
                    order = _fill(n, seat, me, (*to, *back), (*outward, *heard))
                    if order is not None:
                        yield algorithm, order, 0


@lru_cache(maxsize=4096)
def _edges(algorithm: Algorithm, n: int) -> tuple[int, int]:
    """How many edges there are, and the fewest messages that any of them carries."""
    counts = Counter(map(itemgetter(1, 2), schedule(algorithm, n, 0)))  # by source and destination
    return len(counts), min(counts.values())


@lru_cache(maxsize=4096)
def _views(algorithm: Algorithm, n: int) -> dict[tuple[int, int], list[View]]:
    """What positions see: (position, whom it sends to, whom it hears from), by first contact.

    By how many others they send to and hear from. Those that see the same messages at the same steps are one.
    """
    if n > 8 and _edges(algorithm, n)[0] > 8 * n:
        return {}  # everyone with everyone: then all endpoints were seen
    views: dict[object, View] = {}
    seats: list[list[Send]] = [[] for _ in range(n)]
    for send in schedule(algorithm, n, 0):
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


def mark_at_once(exchanges: Rows, instances: Sequence[Instance], near: frozenset[int]) -> None:
    """Mark the collectives of operations whose captured ranks declare all of it before any data arrives.

    The other ranks run the same program. Only declarations count (offers, ready-to-receive): data sent to
    several peers at once still leaves one after the other. In a linear all_to_all the sends themselves show
    it, where the captured rank came first.
    """
    shown: dict[object, list[tuple[Instance, bool]]] = {}
    for instance in instances:
        linear = instance.op == Op.ALL_TO_ALL and instance.algorithm is not None
        linear = linear and instance.algorithm is not None and instance.algorithm.name == "linear"
        held = _declares_all(exchanges[instance.rows], near, linear=linear)
        if held is not None:
            name = instance.algorithm and instance.algorithm.name
            shown.setdefault((instance.op, name, instance.ranks, tuple(instance.order)), []).append(
                (instance, held)
            )
    for votes in shown.values():
        if sum(held for _, held in votes) > AT_ONCE * len(votes):
            for instance, _ in votes:
                instance.at_once = True


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
