"""Which of NCCL's transfers are calls of all with all.

In: transfers. Out: those that belong to communicators whose ranks all send to each other in one call, and the
all_to_all of each call. The sends and receives of one call run in one kernel: who has not sent its own has
consumed nothing either (NCCL 2.30, src/enqueue.cc addP2pToPlan, src/device/sendrecv.h).
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.model import Instance
from dpuflow.matching.parts import ALIKE
from dpuflow.matching.transfers import Transfers
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.matching.streams import Columns, Edge

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
