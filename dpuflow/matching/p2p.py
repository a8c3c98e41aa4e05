"""NCCL's sends and receives, which go over connections of their own: transfers, and calls of all with all.

In: EXCHANGE rows of connections whose clear-to-send entries announce the chunk of point-to-point buffers.
Out: collectives: each transfer a send_recv, or, where every rank of some sends to every other in one call, an
all_to_all. ``parts`` cuts each connection's messages, ``parts`` joins what goes side by side, ``calls``
and ``calls`` tell calls of all with all. Lines that behave like a collective's are left to what reads these.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.buffers import DEFAULT
from dpuflow.matching.calls import all_to_all, as_most, at_all, calls_over_rails, cliques, in_common, is_call
from dpuflow.matching.model import Instance
from dpuflow.matching.parts import ALIKE, PACE, Parts, Sending, lines_of, transfers_of
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.parts import Transfers
    from dpuflow.matching.streams import Columns, Edge
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


def p2p_instances(
    exchanges: Rows,
    columns: Columns,
    rows: Ints,
    announced: Ints,
    position: Ints,
    near: frozenset[int] | None,
    nodes: Ints,
    buffers: Mapping[int, Buffer] = DEFAULT,
    asked: Ints | None = None,
) -> tuple[list[Instance], Ints]:
    """The transfers and all_to_alls among ``rows``, and the rows that are not of point-to-point connections.

    Arguments as of ``structured_instances``.
    """
    asked = np.ones(len(exchanges), np.int64) if asked is None else np.maximum(asked, 1)
    lines = lines_of(exchanges, columns, rows, announced, buffers)
    if not lines:
        return [], rows
    beside = Counter(edge for edge, _ in lines)
    sending = Sending(
        exchanges["src"][rows].astype(np.int64), columns.starts[rows], exchanges["data_end_ns"][rows]
    )
    parts = [
        Parts(exchanges, columns, edge, line, asked[line], announced[line], beside[edge], sending)
        for edge, line in lines
    ]
    by: dict[Edge, list[Parts]] = {}
    for part in parts:
        by.setdefault(part.edge, []).append(part)
    by = {
        edge: lanes
        for edge, lanes in by.items()
        if all(lane.registered or lane.cut_by_rule() for lane in lanes)
    }
    met = Counter(edge[0] for edge in by)
    by = {
        edge: lanes
        for edge, lanes in by.items()
        if met[edge[0]] > 1 or met[edge[1]] > 1 or not _in_turn(lanes, by.get(edge[::-1], []))
    }
    by = _without_rings(by, near)
    handed_on = _handed_on(by)
    by = {edge: lanes for edge, lanes in by.items() if edge not in handed_on}
    known = Counter(each for lanes in by.values() for lane in lanes for each in lane.signatures())
    for lanes in by.values():
        for lane in lanes:
            if not lane.registered:
                lane.cut(known)
            lane.close(known)
    every = [each for lanes in by.values() for each in transfers_of(lanes)]
    found, every = calls_over_rails(every, asked, position, nodes) if near is None else ([], every)
    calls: list[list[Transfers]] = []
    left: list[Transfers] = []
    for together in connected(every, attrgetter("edge")):
        members, cut = ([], together) if all(each.begun for each in together) else in_common(together)
        whole = bool(members) and is_call(members, near)
        if not whole:
            begun = all(each.begun for each in together)
            members, cut = (list(together), []) if begun else at_all(together)
            members = as_most(members, near, columns) if members else members
            whole = bool(members) and is_call(members, near)
        calls += [members] if whole else []
        left += cut if whole else together
    for clique in cliques(left):
        if is_call(clique, near):
            calls.append(clique)
            called = {id(each) for each in clique}
            left = [each for each in left if id(each) not in called]
    for members in calls:
        found += [all_to_all(members, turn, position, near) for turn in range(len(members[0].rows))]
    for each in left:
        # What it sends was there when it called; unless it was another GPU's that handed it over.
        handed = _may_hand_over(each.edge, len(by[each.edge]), nodes)
        found += [
            Instance(
                own,
                Op.SEND_RECV,
                list(each.edge),
                size=int(size),
                complete=bool(whole),
                free=frozenset(() if handed else (0,)),
                near=near,
                inside=handed,
            )
            for own, size, whole in zip(each.rows, each.size, each.whole, strict=True)
        ]
    taken = [lane.rows for lanes in by.values() for lane in lanes]
    return found, np.setdiff1d(rows, np.concatenate(taken), assume_unique=True) if taken else rows


def _may_hand_over(edge: Edge, lanes: int, nodes: Ints) -> bool:
    """Whether an adapter may send for all GPUs of its node, to the one on its rail of another (PXN).

    It then has connections for each of them (src/transport/net.cc sendSetup).
    """
    mates = int((nodes == nodes[edge[0]]).sum())
    return 1 < mates <= lanes and nodes[edge[0]] != nodes[edge[1]]


def _in_turn(lanes: Sequence[Parts], back: Sequence[Parts]) -> bool:
    """Whether two endpoints send each message when the other's one before has come, within parts, too.

    Chunks of a transfer wait for none; two ranks' all_reduce along a ring does. Of several peers' sends the
    second chunks wait for all first ones.
    """
    if len(lanes) != 1 or len(back) != 1 or len(lanes[0].rows) != len(back[0].rows):
        return False
    inside = np.ones(len(lanes[0].rows), bool)
    inside[lanes[0].begins[:-1]] = inside[back[0].begins[:-1]] = False
    at = np.flatnonzero(inside)
    pairs = ((lanes[0], back[0]), (back[0], lanes[0]))
    return len(at) > 0 and all((a.starts[at] > b.arrivals[at - 1]).mean() >= ALIKE for a, b in pairs)


def _handed_on(by: Mapping[Edge, Sequence[Parts]]) -> set[Edge]:
    """Lines on which ranks hand on what came to them in registered buffers at once: a collective's.

    A stage of a pipeline works on it first.
    """
    found: set[Edge] = set()
    for before, after in ((one, other) for one in by for other in by if one[1] == other[0]):
        for came, left in zip(by[before], by[after], strict=False):
            if came.registered and left.registered and len(came.rows) == len(left.rows):
                gap, way = left.starts - came.arrivals, came.arrivals - came.starts
                if ((gap >= 0) & (gap <= PACE * way)).mean() >= ALIKE:
                    found |= {before, after}
    return found


def _without_rings(by: dict[Edge, list[Parts]], near: frozenset[int] | None) -> dict[Edge, list[Parts]]:
    """Lines but for those that hand on along a ring of three or more: a collective, whoever wrote it.

    Of a ring that was captured at some of its ranks (``near``) only their lines are seen.
    """
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for src, dst in by:
        after.setdefault(src, []).append(dst)
        before.setdefault(dst, []).append(src)
    ring: set[Edge] = set()
    for start in after:
        order = [start]
        while len(after.get(order[-1], ())) == 1 == len(before[after[order[-1]][0]]):
            following = after[order[-1]][0]
            if following in order:
                break
            order.append(following)
        if len(order) > 2 and after.get(order[-1]) == [start]:
            ring.update(zip(order, [*order[1:], start], strict=True))
    for end in near or ():
        if len(before.get(end, ())) == 1 == len(after.get(end, ())) and before[end] != after[end]:
            edges = (before[end][0], end), (end, after[end][0])
            if _sends_unasked(by[edges[0]], by[edges[1]]):
                ring.update(edges)
    return {edge: lanes for edge, lanes in by.items() if edge not in ring}


def _sends_unasked(inward: Sequence[Parts], outward: Sequence[Parts]) -> bool:
    """Whether an endpoint that gets as much as it sends does not wait for the former as a stage would.

    In a ring each rank's first message needs no input, so the k-th often leaves before the k-th has come.
    """
    came = np.sort(np.concatenate([lane.arrivals for lane in inward]))
    left = np.sort(np.concatenate([lane.starts for lane in outward]))
    return len(came) == len(left) and bool((left > came).mean() < ALIKE)
