"""ob1 transfers: which PUT request, PUT and FIN belong to which RNDV, and headers that were cut off.

In: MESSAGE rows of one capture with their LINK rows. Only MATCH and RNDV name communicator, tag
and sequence number; the others name the sender's request, the receiver's fragment or the address
written to (ompi/mca/pml/ob1/pml_ob1_hdr.h), and take the rest from the RNDV through those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.messages.hidden_ob1 import Usage, fill, gaps
from dpuflow.messages.stretches import stretches
from dpuflow.schema.rows import NONE32, Framing, Role, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.messages.stretches import Solved
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


def latest_before(
    flow: np.ndarray, key: np.ndarray, time_ns: np.ndarray, is_source: np.ndarray
) -> np.ndarray:
    """For each element the last source with its flow and key that is not later; -1 if none.

    Pointers are used again by later messages, so the last one before is meant. Sources get themselves.
    """
    order = np.lexsort((~is_source, time_ns, key, flow))
    fresh = np.ones(len(order), bool)
    fresh[1:] = (flow[order][1:] != flow[order][:-1]) | (key[order][1:] != key[order][:-1])
    group = np.cumsum(fresh)
    place = np.maximum.accumulate(np.where(is_source[order], np.arange(len(order)), -1))
    same = place >= 0
    same &= group[place] == group
    answer = np.full(len(order), -1)
    answer[order[same]] = order[place[same]]
    return answer


class Names(NamedTuple):
    """By what rows of messages name each other, one a row."""

    key: Ints  # 0: not seen
    way: Ints  # the flow that the data takes


def link(rows: Rows, names: Names, sources: Ints, users: Ints) -> Ints:
    """For each of ``users`` the last row of ``sources`` before it whose key it names, -1 where none does."""
    users = users[names.key[users] != 0]
    both = np.concatenate([sources, users])
    is_source = np.arange(len(both)) < len(sources)
    found = latest_before(names.way[both], names.key[both], rows["first_ns"][both], is_source)[len(sources) :]
    answer = np.full(len(rows), -1)
    answer[users[found >= 0]] = both[found[found >= 0]]
    return answer


def _drop_surplus(rows: Rows, parent: Ints, users: Ints, size: Ints, room: Ints) -> None:
    """Part users from a source that is used up: they name a later one of the same pointer, not seen.

    ``size`` and ``room``, one a row: what a user takes of its source, what a source has.
    """
    users = users[parent[users] >= 0]
    users = users[np.lexsort((rows["first_ns"][users], parent[users]))]
    before = np.cumsum(size[users]) - size[users]
    fresh = np.ones(len(users), bool)
    fresh[1:] = parent[users][1:] != parent[users][:-1]
    before -= np.maximum.accumulate(np.where(fresh, before, 0))
    parent[users[~fresh & (before >= room[parent[users]])]] = -1


def _in_turn(rows: Rows, names: Names, parent: Ints, sources: Ints, users: Ints, size: str) -> None:
    """Users left without a parent take, in order, the oldest source of their way and size that has none.

    If neither's key was hidden they would have been linked: one of them has none. Pointers are used again:
    who finds no source came for one that a later user of the same pointer was linked to, and that one had
    meant a source whose pointer was hidden.
    """
    (keys, way), when, announced = names, rows["first_ns"], rows["announces"]
    lost = users[parent[users] < 0]
    if not len(lost):
        return
    user_of = np.full(len(rows), -1)
    user_of[parent[users[parent[users] >= 0]]] = users[parent[users] >= 0]
    ordered = sources[np.argsort(when[sources], kind="stable")]

    def fitting(user: int, those: Ints) -> Ints:
        fits: Ints = those[(way[those] == way[user]) & (when[those] <= when[user])]
        if keys[user]:
            fits = fits[keys[fits] == 0]
        if rows[size][user]:
            fits = fits[np.isin(announced[fits], (0, rows[size][user]))]
        return fits

    for i in lost[np.argsort(when[lost], kind="stable")].tolist():
        free = fitting(i, ordered[user_of[ordered] < 0])
        if len(free):
            parent[i], user_of[free[0]] = free[0], i
            continue
        taken = fitting(i, ordered[user_of[ordered] >= 0])
        for source in taken[(keys[i] == 0) & (when[user_of[taken]] > when[i])].tolist():
            later = int(user_of[source])
            others = fitting(later, ordered[user_of[ordered] < 0])
            if len(others):
                parent[i], parent[later] = source, others[0]
                user_of[source], user_of[others[0]] = i, later
                break


def inherit(rows: Rows, links: Rows, flows: Rows) -> None:
    """Give PUT request, PUT, FIN, ACK and FRAG the context, tag, sub and op of their RNDV, in place."""
    peer = flows["peer"][rows["flow"]].astype(np.int64)
    own = rows["flow"].astype(np.int64)
    wire, role = rows["wire"], rows["role"]
    rndv = np.flatnonzero((wire == Wire.OB1_RNDV) | ((wire == Wire.OB1_OTHER) & (role == Role.OFFER)))
    other = wire == Wire.OB1_OTHER
    grants = np.flatnonzero((wire == Wire.OB1_PUT_REQUEST) | (other & (role == Role.GRANT)))
    frags = np.flatnonzero((wire == Wire.OB1_OTHER) & (role == Role.DATA))
    requests = np.flatnonzero(wire == Wire.OB1_PUT_REQUEST)
    puts, fins = np.flatnonzero(wire == Wire.OB1_PUT), np.flatnonzero(wire == Wire.OB1_FIN)
    # The flow that the data takes: the opposite one for what the receiver sends.
    way = np.where(np.isin(np.arange(len(rows)), grants), peer, own)
    request = links["request"].astype(np.int64)
    by_request, by_address = Names(request, way), Names(links["address"], way)
    of_grant = link(rows, by_request, rndv, np.concatenate([grants, frags]))
    announced, carried = rows["announces"].astype(np.int64), rows["bytes"].astype(np.int64)
    _drop_surplus(rows, of_grant, requests, announced, announced)
    _in_turn(rows, by_request, of_grant, rndv, requests, "announces")
    unnamed = requests[of_grant[requests] >= 0]
    unnamed = unnamed[request[of_grant[unnamed]] == 0]
    request[of_grant[unnamed]] = request[unnamed]
    of_put = link(rows, by_address, requests, puts)
    _drop_surplus(rows, of_put, puts, carried, announced)
    _in_turn(rows, by_address, of_put, requests, puts, "bytes")
    told = puts[of_put[puts] >= 0]
    bare = told[rows["announces"][of_put[told]] == 0]
    rows["announces"][of_put[bare]] = rows["bytes"][bare]
    of_fin = link(rows, Names(links["fragment"], way), requests, fins)
    one = np.ones(len(rows), np.int64)
    _drop_surplus(rows, of_fin, fins, one, one)
    # A FIN whose fragment was not seen ends the PUT before it on its flow.
    for i in fins[of_fin[fins] < 0]:
        before = puts[(own[puts] == own[i]) & (rows["seq_end"][puts] <= rows["seq"][i])]
        if len(before):
            of_fin[i] = of_put[before[-1]]
    parent = of_grant.copy()
    for users, via in ((puts, of_put), (fins, of_fin)):
        known = users[via[users] >= 0]
        parent[known] = of_grant[via[known]]
        if users is fins:
            rows["va"][known] = request[via[known]].view(np.uint64)
    heirs = np.flatnonzero(parent >= 0)
    for name in ("context", "tag", "sub", "op"):
        rows[name][heirs] = rows[name][parent[heirs]]
    rows["va"][rndv] = request[rndv].view(np.uint64)
    rows["va"][heirs] = request[parent[heirs]].view(np.uint64)


def resolve_ob1(rows: Rows, links: Rows, flows: Rows, orders: dict[int, np.ndarray], solved: Solved) -> None:
    """As ``hidden_gloo.resolve_gloo``, for flows framed by ob1; inheritance comes after (``inherit``)."""
    for f, order in orders.items():
        if flows["framing"][f] != Framing.OB1 or flows["peer"][f] == NONE32:
            continue
        fins = 0
        runs = stretches(links, order)
        solved.counts.stretches += len(runs)
        usage = Usage(rows, order, len(runs))
        for gap in gaps(rows, order, runs):
            for run, parts in zip(gap.runs, fill(rows, gap, fins, usage, solved.has_room), strict=True):
                if parts:
                    fins += sum(part.wire == Wire.OB1_FIN for part in parts)
                    solved.put(run, parts)
