"""Transfers that are calls of all with all: NCCL's, and rounds that no library names.

In: transfers. Out: those that belong to communicators whose ranks all send to each other in one call, and the
all_to_all of each call. The sends and receives of one call run in one kernel: who has not sent its own has
consumed nothing either (NCCL 2.30, src/enqueue.cc addP2pToPlan, src/device/sendrecv.h).

Over nodes of several GPUs sends leave by the NICs on the receivers' rails (PXN): each NIC receives for its
own GPU, and sends for all of its node, one connection a channel and receiver (src/graph/search.cc
ncclTopoGetNetDev, src/transport/net.cc sendSetup). So a call leads from every node to every NIC of the
others. That a transfer is of several senders is told by entries for several messages (``bunches``).

Other libraries' rounds (isend and irecv of a mixture of experts) have as many messages on every edge, and no
rank begins one before it is through with the one before.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.model import Instance
from dpuflow.matching.parts import ALIKE, Transfers
from dpuflow.matching.streams import columns_of, edge_streams
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.matching.streams import Columns, Edge
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


_LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


def cliques(every: Sequence[Transfers]) -> list[list[Transfers]]:
    """Transfers by endpoints that they connect, those of as many calls and bytes apart from others.

    Communicators that exchange all with all do so equally often on all their edges; a pipeline's edges that
    touch them need not.
    """
    classes: dict[int, list[Transfers]] = {}
    for each in every:
        classes.setdefault(len(each.rows), []).append(each)
    return [clique for members in classes.values() for clique in connected(members, attrgetter("edge"))]


def in_common(members: Sequence[Transfers]) -> tuple[list[Transfers], list[Transfers]]:
    """Of edges seen from mid-job on the transfers of calls that are seen of all, and the others, cut off.

    What belongs to one call overlaps most: told from the transfer in the middle of each edge's. Nothing where
    more than the capture's ends would be left out.
    """
    base, places = members[0], []
    for each in members:
        middle = len(each.rows) // 2
        over = np.minimum(base.end_ns, each.end_ns[middle]) - np.maximum(base.start_ns, each.start_ns[middle])
        places.append(int(np.argmax(over)) - middle)  # of its first one among those of the base
    begin = max(places)
    end = min(place + len(each.rows) for place, each in zip(places, members, strict=True))
    first, last = max(int(e.start_ns[0]) for e in members), min(int(e.end_ns[-1]) for e in members)
    kept, cut = [], []
    for place, each in zip(places, members, strict=True):
        low, high = begin - place, max(end, begin) - place
        ahead, behind = each.part(0, low), each.part(high, len(each.rows))
        if low == high or (ahead.start_ns > first).any() or (behind.end_ns < last).any():
            return [], []
        kept.append(each.part(low, high))
        for part in (ahead, behind):
            part.whole[:] = False
            cut.append(part)
    return kept, cut


def at_all(members: Sequence[Transfers]) -> tuple[list[Transfers], list[Transfers]]:
    """Of edges seen from mid-job on the transfers while all of them are seen, and the others, cut off.

    From one time to another at which none was under way.
    """
    first, last = max(int(e.start_ns[0]) for e in members), min(int(e.end_ns[-1]) for e in members)
    start, end = (
        np.concatenate(times) for times in zip(*((e.start_ns, e.end_ns) for e in members), strict=True)
    )
    order = np.argsort(start)
    quiet = start[order][1:][start[order][1:] > np.maximum.accumulate(end[order])[:-1]]
    quiet = quiet[(quiet >= first) & (quiet <= last)]
    if len(quiet) < 2:
        return [], []
    kept, cut = [], []
    for each in members:
        low, high = np.searchsorted(each.start_ns, [quiet[0], quiet[-1]]).tolist()
        kept.append(each.part(low, high))
        cut += [each.part(0, low), each.part(high, len(each.rows))]
    for part in cut:
        part.whole[:] = False
    return (kept, cut) if all(each.rows for each in kept) else ([], [])


def as_most(members: Sequence[Transfers], near: frozenset[int] | None, columns: Columns) -> list[Transfers]:
    """Transfers of calls of all with all, those of some edges dealt anew to calls that most edges agree on.

    A stamp that is late, or a message that was not captured, makes one transfer of two or two of one; and who
    has nothing for a peer may send it nothing. Each message belongs to the call in which its sender began to
    send to the others. Nothing where there is no such agreement.
    """
    count, most = Counter(len(each.rows) for each in members).most_common(1)[0]
    edges = [each.edge for each in members]
    if 2 * most <= len(members) or len(set(edges)) < len(edges) or not _all_pairs(set(edges), near):
        return []
    agreed = [each for each in members if len(each.rows) == count]
    found = []
    for each in members:
        own = [other for other in agreed if other.edge[0] == each.edge[0]]
        if len(each.rows) == count or not own:
            found.append(each)
            continue
        start = np.min([other.start_ns for other in own], axis=0)
        end = np.max([other.end_ns for other in own], axis=0)
        begin = np.minimum(start, np.r_[start[:1], (end[:-1] + start[1:]) // 2])
        rows = np.concatenate(each.rows)
        if not each.begun:
            rows = rows[columns.starts[rows] >= begin[0]]
        call = np.maximum(np.searchsorted(begin, columns.starts[rows], "right") - 1, 0)
        parts = [rows[call == number] for number in range(count)]
        first, last, size = start.copy(), start.copy(), np.zeros(count, np.int64)
        np.minimum.at(first, call, columns.starts[rows])
        np.maximum.at(last, call, columns.arrivals[rows])
        np.add.at(size, call, columns.sizes[rows])
        following = np.full(count, NEVER)
        found.append(
            Transfers(each.edge, parts, first, last, size, own[0].whole.copy(), following, each.begun)
        )
    return found if all(len(each.rows) == count for each in found) else []


def _all_pairs(edges: AbstractSet[Edge], near: frozenset[int] | None) -> bool:
    """Whether everybody sends to everybody, as far as that can be seen."""
    ends = sorted({end for edge in edges for end in edge})
    return edges == {
        (a, b) for a in ends for b in ends if a != b and (near is None or a in near or b in near)
    }


def is_call(members: Sequence[Transfers], near: frozenset[int] | None) -> bool:
    """Whether the k-th transfers of all edges are one call of all with all, for every k."""
    edges = {each.edge for each in members}
    ends = sorted({end for edge in edges for end in edge})
    if len(members) != len(edges) or not _all_pairs(edges, near):
        return False
    start = {each.edge: each.start_ns for each in members}
    end = {each.edge: each.end_ns for each in members}
    if len(members[0].rows) > 1:
        # Nobody makes a call before it has all of the one before.
        for own in ends:
            sent = np.min([start[edge][1:] for edge in edges if edge[0] == own], axis=0)
            came = np.max([end[edge][:-1] for edge in edges if edge[1] == own], axis=0)
            if (sent >= came).mean() < ALIKE:
                return False
    return len(ends) > 2 or not _answers(members[0], members[1])


def _answers(one: Transfers, other: Transfers) -> bool:
    """Whether of two endpoints one mostly answers the other: it sends when it has consumed what came.

    In one call nothing is consumed before the own kernel runs, however late that is: the next entry for the
    other's data then comes with the own first message, not with the arrival.
    """
    for asks, answers in ((one, other), (other, one)):
        after = answers.start_ns > asks.end_ns
        if after.mean() < ALIKE:
            continue
        known = after & (asks.next_ns != NEVER)
        waited, ahead = (asks.next_ns - asks.end_ns)[known], (answers.start_ns - asks.next_ns)[known]
        if not known.any() or (waited < ahead).mean() >= 0.5:
            return True
    return False


def all_to_all(
    members: Sequence[Transfers], turn: int, position: Ints, near: frozenset[int] | None
) -> Instance:
    rows = np.sort(np.concatenate([each.rows[turn] for each in members]))
    ends = sorted({end for each in members for end in each.edge}, key=lambda end: int(position[end]))
    sizes = {int(each.size[turn]) for each in members}
    size = sizes.pop() * len(ends) if len(sizes) == 1 else None
    whole = all(bool(each.whole[turn]) for each in members)
    names = ["pairwise"] if len(ends) == 2 else []
    return Instance(rows, Op.ALL_TO_ALL, ends, _LINEAR, names, size=size, complete=whole, near=near)


def calls_over_rails(
    every: Sequence[Transfers], asked: Ints, position: Ints, nodes: Ints
) -> tuple[list[Instance], list[Transfers]]:
    """The all_to_alls among ``every``, and the transfers that are of none."""
    found: list[Instance] = []
    left: list[Transfers] = []
    for members in _by_nodes(every, nodes):
        senders = [_senders(each, asked) for each in members]
        if min(senders) < 2 or not _is_call(members, nodes):
            left += members
            continue
        for turn in range(len(members[0].rows)):
            found.append(_call(members, senders, turn, position, nodes))
    return found, left


def _by_nodes(every: Sequence[Transfers], nodes: Ints) -> list[list[Transfers]]:
    """Transfers by the nodes that they connect, those of as many calls."""
    return connected(every, lambda each: [(len(each.rows), int(nodes[end])) for end in each.edge])


def _senders(each: Transfers, asked: Ints) -> int:
    """Of how many GPUs the transfers are, as far as entries tell."""
    return int(asked[np.concatenate(each.rows)].max())


def _is_call(members: Sequence[Transfers], nodes: Ints) -> bool:
    """Whether the k-th transfers together are one call of all with all, for every k."""
    ends = {end for each in members for end in each.edge}
    places = {int(nodes[end]) for end in ends}
    asked = {(place, end) for place in places for end in ends if int(nodes[end]) != place}
    ways = [(int(nodes[each.edge[0]]), each.edge[1]) for each in members]
    if len(places) < 2 or len(ways) != len(asked) or set(ways) != asked:
        return False
    if len(members[0].rows) > 1:
        # A node's GPUs send again when each has all of the call before.
        for place in places:
            sent = np.min([e.start_ns[1:] for e in members if nodes[e.edge[0]] == place], axis=0)
            came = np.max([e.end_ns[:-1] for e in members if nodes[e.edge[1]] == place], axis=0)
            if (sent >= came).mean() < ALIKE:
                return False
    return True


def _call(
    members: Sequence[Transfers],
    senders: Sequence[int],
    turn: int,
    position: Ints,
    nodes: Ints,
) -> Instance:
    rows = np.sort(np.concatenate([each.rows[turn] for each in members]))
    ends = sorted({end for each in members for end in each.edge}, key=lambda end: int(position[end]))
    mates = {end: sum(nodes[other] == nodes[end] for other in ends) for end in ends}
    # Where all GPUs of a node send, each sends an equal part of what a NIC receives from the node.
    parts = {
        int(each.size[turn]) / count if count == mates[each.edge[0]] else None
        for each, count in zip(members, senders, strict=True)
    }
    part = parts.pop() if len(parts) == 1 else None
    whole = all(bool(each.whole[turn]) for each in members)
    return Instance(
        rows,
        Op.ALL_TO_ALL,
        ends,
        _LINEAR,
        size=None if part is None else round(part * len(ends)),
        complete=whole,
        ranks=len(ends),
        nodes=tuple(nodes[ends].tolist()),
        inside=True,
    )


FEWEST: Final = 3
"""Two ranks that answer each other are everyone, too."""
IN_ORDER: Final = 0.9
"""The share of rounds that every rank must keep apart: a message may be late or have another one's time."""
LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


def rounds_of_everyone(
    exchanges: Rows, rows: NDArray[np.int64], position: NDArray[np.int64]
) -> tuple[list[Instance], NDArray[np.int64]]:
    """The rounds among ``rows`` of one communicator, and the rows that are in none.

    ``position`` gives each endpoint's place in the default numbering of ranks.
    """
    streams = edge_streams(exchanges, rows)
    lanes = [each for _, each in streams.left()]
    ends = sorted({end for edge in streams.edges for end in edge}, key=lambda end: int(position[end]))
    n = len(ends)
    count = min(map(len, lanes))
    # The captures' ends may cut a round or two.
    if n < FEWEST or len(lanes) != n * (n - 1) or count < IN_ORDER * max(map(len, lanes)):
        return [], rows
    rounds = np.array([lane[:count] for lane in lanes])
    starts = columns_of(exchanges).starts[rounds]
    src = np.array([edge[0] for edge in streams.edges])
    apart = np.ones(count - 1, bool)
    for end in ends:
        mine = starts[src == end]
        apart &= mine.max(axis=0)[:-1] <= mine.min(axis=0)[1:]
    if not count or apart.sum() < IN_ORDER * (count - 1):
        return [], rows
    found = [
        Instance(each[np.argsort(when, kind="stable")], Op.ALL_TO_ALL, list(ends), LINEAR, confidence=0.9)
        for each, when in zip(rounds.T, starts.T, strict=True)
    ]
    return found, np.setdiff1d(rows, rounds)
