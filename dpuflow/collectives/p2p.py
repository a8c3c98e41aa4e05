"""NCCL's sends and receives, which go over connections of their own: transfers, and calls of all with all.

In: EXCHANGE rows of connections whose clear-to-send entries announce the chunk of point-to-point buffers.
Out: collectives: each transfer a send_recv, or, where every rank of some sends to every other in one call, an
all_to_all. Facts of NCCL's that carry this (2.30, src/transport/net.cc, src/enqueue.cc addP2pToPlan,
src/device/sendrecv.h):

- point-to-point connections are never a collective's (connIndex 1), and have buffers of their own;
- a transfer is cut into parts, one a channel, and each part into equal chunks but for the last;
- a connection takes up a part when the one before it is done there, so the entry for a part's first chunk
  comes after the last chunk before it (``credited``); as many entries as there are slots come with it;
- the sends and receives of one call run in one kernel: who has not sent its own has consumed nothing either.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.collectives.algorithms import ALGORITHMS
from dpuflow.collectives.buffers import CHUNKS, DEFAULT, RING, STEP
from dpuflow.collectives.model import Instance
from dpuflow.collectives.pxn import calls_over_rails
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.buffers import Buffer
    from dpuflow.collectives.streams import Columns, Edge
    from dpuflow.tables import Rows

    Ints = NDArray[np.int64]

ALIKE: Final = 0.9
"""Share of cases that must agree: what loss or a capture's edge disturbs is left room for."""
TWICE: Final = 2
"""Times the usual time for one slot that is no more than one; a part's end takes as many as there are."""
PIECES: Final = 8
"""A receiver that comes late frees as many slots one by one, and no more."""
_LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


class Transfers(NamedTuple):
    """The transfers from one endpoint to another within one communicator, in order; arrays are parallel."""

    edge: Edge
    rows: list[Ints]  # EXCHANGE rows of each
    start_ns: Ints
    end_ns: Ints  # all of it had arrived
    size: Ints
    whole: NDArray[np.bool_]  # neither end is cut off by the capture
    next_ns: Ints  # first entry for the transfer after it; NEVER where there is none
    begun: bool  # seen from the connection's first message on

    def part(self, low: int, high: int) -> Transfers:
        """Those from number ``low`` to before ``high``."""
        return Transfers(
            self.edge,
            self.rows[low:high],
            self.start_ns[low:high],
            self.end_ns[low:high],
            self.size[low:high],
            self.whole[low:high].copy(),
            self.next_ns[low:high],
            self.begun,
        )


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
    parts = [
        _Parts(exchanges, columns, edge, line, asked[line])
        for edge, line in _lines(exchanges, rows, announced, buffers)
    ]
    by: dict[Edge, list[_Parts]] = {}
    for part in parts:
        by.setdefault(part.edge, []).append(part)
    by = {edge: lanes for edge, lanes in by.items() if all(lane.cut_by_rule(len(lanes)) for lane in lanes)}
    by = {edge: lanes for edge, lanes in by.items() if not _in_turn(lanes, by.get(edge[::-1], []))}
    by = _without_rings(by, near)
    known = Counter(each for lanes in by.values() for lane in lanes for each in lane.signatures())
    for lanes in by.values():
        for lane in lanes:
            lane.mend(known)
    every = [each for lanes in by.values() for each in _transfers(lanes)]
    found, every = calls_over_rails(every, asked, position, nodes) if near is None else ([], every)
    calls: list[list[Transfers]] = []
    left: list[Transfers] = []
    for together in _connected(every):
        members, cut = ([], together) if all(each.begun for each in together) else _in_common(together)
        whole = bool(members) and _is_call(members, near)
        calls += [members] if whole else []
        left += cut if whole else together
    for clique in _cliques(left):
        if _is_call(clique, near):
            calls.append(clique)
            called = {id(each) for each in clique}
            left = [each for each in left if id(each) not in called]
    for members in calls:
        found += [_all_to_all(members, turn, position, near) for turn in range(len(members[0].rows))]
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


def _lines(
    exchanges: Rows, rows: Ints, announced: Ints, buffers: Mapping[int, Buffer]
) -> list[tuple[Edge, Ints]]:
    """(sender, receiver) and rows of each way of a connection whose entries announce a chunk."""
    from dpuflow.kernels import streams

    key = np.empty(len(rows), np.int64)
    keys = streams.directions(exchanges, rows, key) + 1
    room = announced[rows]
    # Rings of Simple have such slots where NCCL_BUFFSIZE is 512 KiB or 1 MiB, others where it is 2 MiB.
    sizes = [s for s in CHUNKS if buffers.get(s) != RING and (s == min(CHUNKS) or buffers.get(s) != STEP)]
    chunk = np.isin(room, sizes)
    other = np.bincount(key[(room != 0) & ~chunk], minlength=keys)
    own = ((np.bincount(key[chunk], minlength=keys) > 0) & (other == 0))[key]
    mine, line = rows[own], key[own]
    if not len(mine):
        return []
    order = np.lexsort((exchanges["order"][mine], line))
    parts = np.split(mine[order], np.flatnonzero(np.diff(line[order])) + 1)
    parts.sort(key=lambda part: int(part[0]))
    return [((int(exchanges["src"][p[0]]), int(exchanges["dst"][p[0]])), p) for p in parts]


def _in_turn(lanes: Sequence[_Parts], back: Sequence[_Parts]) -> bool:
    """Whether two endpoints send each message when the other's one before has come, within parts, too.

    Chunks of a transfer wait for none; two ranks' all_reduce along a ring does.
    """
    if len(lanes) != 1 or len(back) != 1 or len(lanes[0].rows) != len(back[0].rows):
        return False
    inside = np.ones(len(lanes[0].rows), bool)
    inside[lanes[0].begins[:-1]] = inside[back[0].begins[:-1]] = False
    at = np.flatnonzero(inside)
    pairs = ((lanes[0], back[0]), (back[0], lanes[0]))
    return len(at) > 0 and all((a.starts[at] > b.arrivals[at - 1]).mean() >= ALIKE for a, b in pairs)


def _without_rings(by: dict[Edge, list[_Parts]], near: frozenset[int] | None) -> dict[Edge, list[_Parts]]:
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


def _sends_unasked(inward: Sequence[_Parts], outward: Sequence[_Parts]) -> bool:
    """Whether an endpoint that gets as much as it sends does not wait for the former as a stage would.

    In a ring each rank's first message needs no input, so the k-th often leaves before the k-th has come.
    """
    came = np.sort(np.concatenate([lane.arrivals for lane in inward]))
    left = np.sort(np.concatenate([lane.starts for lane in outward]))
    return len(came) == len(left) and bool((left > came).mean() < ALIKE)


class _Parts:
    """The parts that one connection carries one way: ``begins[k]:begins[k + 1]`` are places in ``rows``."""

    def __init__(self, exchanges: Rows, columns: Columns, edge: Edge, rows: Ints, asked: Ints) -> None:
        self.edge, self.rows = edge, rows
        self.bytes, self.starts = columns.sizes[rows], columns.starts[rows]
        self.sizes = self.bytes // asked  # of several senders' messages that go together one
        self.several = bool((asked > 1).any())
        self.arrivals = columns.arrivals[rows]
        self.grants = exchanges["grant_ns"][rows]
        self.lossy = bool(exchanges["retransmitted"][rows].any())
        self.number = exchanges["sub"][rows].astype(np.int64)  # clear-to-send entries count from 1
        self.begins = self._cut()

    def _cut(self) -> Ints:
        """Where parts begin, the end as the last."""
        count = len(self.rows)
        granted, before = self.grants[1:], self.arrivals[:-1]
        unknown = (granted == NEVER) | (before == NEVER)
        # A part's chunks never grow.
        new = np.where(unknown, self.sizes[1:] != self.sizes[:-1], granted > before)
        new |= (self.sizes[1:] > self.sizes[:-1]) | (np.diff(self.number) > 1)
        begins = np.flatnonzero(np.r_[True, new])
        # A receiver that comes late frees slots one by one and looks like a beginning: there the entries
        # come one by one, too, at a true one as many at once as there are slots.
        ends = np.append(begins[1:], count)
        at_once = np.array(
            [
                int(np.searchsorted(self.grants[a:b], self.arrivals[a], "right"))
                for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
        )
        slots = self.slots = int(at_once.max(initial=1))
        kept = [0]
        for number in range(1, len(begins)):
            at, last = int(begins[number]), int(begins[number]) - 1
            even = last > kept[-1] and self.sizes[kept[-1]] == self.sizes[last] >= self.sizes[at]
            doubt = even and at - kept[-1] >= slots
            rest = self.sizes[at : ends[number]]
            # A busy proxy has not posted all of them by the time the first chunk is there, but most.
            few = 2 * at_once[number] <= min(slots, len(rest)) and len(rest) > 1
            one_by_one = few or rest.max() > _chunk(int(rest.sum()))
            goes_on = self._goes_on(kept[-1] + slots, at) and not self._at_once(at, slots)
            if not (doubt and (one_by_one or goes_on)):
                kept.append(at)
        return np.array([*kept, count])

    def _goes_on(self, begin: int, at: int) -> bool:
        """Whether the entry ``at`` comes as those from ``begin`` on do, which wait for one slot each.

        Where a part ends all slots are emptied before the next entry.
        """
        gaps = np.diff(self.grants[begin - 1 : at + 1])
        return len(gaps) > 1 and bool(gaps[-1] <= TWICE * np.median(gaps[:-1]))

    def _at_once(self, at: int, slots: int) -> bool:
        """Whether the entries from ``at`` on come together, not one by one as those that wait for a slot.

        Messages that several senders' go with share fewer slots: these are empty after one or two more.
        """
        if not self.several or slots < TWICE:
            return False
        gaps, mine = np.diff(self.grants[:at]), np.diff(self.grants[at : at + slots])
        return len(mine) > 0 and bool(TWICE * mine.max() < np.median(gaps))

    def cut_by_rule(self, lanes: int) -> bool:
        """Whether chunks are as large as NCCL cuts parts of ``lanes`` that a transfer may have."""
        total = lanes * np.add.reduceat(self.sizes, self.begins[:-1])
        largest = np.maximum.reduceat(self.sizes, self.begins[:-1])
        unit = np.where(total < 131_072, 32_768, np.where(total < 1 << 20, 65_536, max(CHUNKS)))
        return bool((largest <= unit).mean() >= ALIKE)

    def signatures(self) -> list[tuple[int, int]]:
        """Messages and bytes of every part."""
        total = np.add.reduceat(self.sizes, self.begins[:-1])
        return list(zip(np.diff(self.begins).tolist(), total.tolist(), strict=True))

    def mend(self, known: Counter[tuple[int, int]]) -> None:
        """Put together what a late receiver or a proxy that stalled made look like several parts.

        Where others show it as one: parts as long as the whole are ``known``, and come more often than ones
        like the pieces, or the first piece alone shows chunks of one size.
        """
        bounds, pieces = self.begins.tolist(), self.signatures()
        kept, place = [], 0
        longest = max(count for count, _ in known)
        while place < len(pieces):
            kept.append(bounds[place])
            place = self._whole(place, bounds, pieces, known, longest)
        self.begins = np.array([*kept, len(self.rows)])
        begins = self.begins[:-1]
        self.start_ns = self.starts[begins]
        self.end_ns = self.arrivals[self.begins[1:] - 1]
        self.size = np.add.reduceat(self.bytes, begins)
        self.whole = np.ones(len(begins), bool)
        if self.number[0] > 1:
            self.whole[0] = (int(self.begins[1]), int(self.size[0])) in known
        self.next_ns = np.r_[self.grants[begins[1:]], NEVER]

    def _whole(
        self,
        place: int,
        bounds: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        known: Counter[tuple[int, int]],
        longest: int,
    ) -> int:
        """Behind which of ``pieces`` the part that begins with number ``place`` ends."""
        count, size = pieces[place]
        begin, rarest, best = bounds[place], known[pieces[place]], (0, place + 1)
        even = count >= 2 and bool(self.sizes[begin] == self.sizes[begin + count - 1])
        for last in range(place + 1, min(place + PIECES, len(pieces))):
            # Chunks of a part are as large as its first, but for the last.
            before = bounds[last] - 1
            if self.sizes[before] != self.sizes[begin] or self.sizes[before + 1] > self.sizes[begin]:
                break
            count, size = count + pieces[last][0], size + pieces[last][1]
            rarest = max(rarest, known[pieces[last]])
            often = known[count, size]
            sure = even and (last == place + 1 or pieces[place][0] == self.slots)
            if often > best[0] and (often > rarest or sure):
                best = often, last + 1
            if count >= longest:
                break
        return best[1]

    def piece(self, number: int) -> Ints:
        """The rows of a part."""
        return self.rows[self.begins[number] : self.begins[number + 1]]


def _chunk(size: int) -> int:
    """The largest chunk of a part of ``size`` bytes."""
    return 32_768 if size < 131_072 else 65_536 if size < 1 << 20 else max(CHUNKS)


def _transfers(lanes: Sequence[_Parts]) -> list[Transfers]:
    """What connections from one endpoint to another carry: parts that go side by side are one transfer."""
    left = sorted(lanes, key=lambda lane: (-len(lane.start_ns), int(lane.start_ns[0])))
    found: list[Transfers] = []
    while left:
        base, rest = left[0], []
        merged = [(base, np.arange(len(base.start_ns)))]
        for lane in left[1:]:
            turn = _beside(lane, base)
            if turn is None:
                rest.append(lane)
            else:
                merged.append((lane, turn))
        found.append(_whole(merged))
        left = rest
    return found


def _beside(lane: _Parts, base: _Parts) -> Ints | None:
    """For each part of ``lane`` that of ``base`` which it goes beside; None where they do not go together."""
    if len(lane.start_ns) == len(base.start_ns):
        turn = np.arange(len(lane.start_ns))
        over = _overlap(lane, base, turn)
        # A channel that waits for an ACK that was lost falls behind the others by as much as slots hold.
        if (lane.lossy or base.lossy) and 2 * (over >= 0).sum() > len(over):
            return turn
    else:
        later = np.searchsorted(base.start_ns, lane.start_ns)
        tries = np.stack([np.clip(later + k, 0, len(base.start_ns) - 1) for k in (-1, 0)])
        over = np.stack([_overlap(lane, base, turn) for turn in tries])
        best = np.argmax(over, axis=0)
        turn, over = tries[best, np.arange(len(best))], over.max(axis=0)
        if (np.diff(turn) <= 0).any():
            return None
    return turn if (over >= 0).mean() >= ALIKE else None


def _overlap(lane: _Parts, base: _Parts, turn: Ints) -> Ints:
    """How long each part was under way together with that of ``base``, ns; below 0 where not at all."""
    start = np.maximum(lane.start_ns, base.start_ns[turn])
    return np.asarray(np.minimum(lane.end_ns, base.end_ns[turn]) - start, np.int64)


def _whole(merged: Sequence[tuple[_Parts, Ints]]) -> Transfers:
    """Transfers of parts that go together, each with its place among the transfers."""
    base = merged[0][0]
    begun = all(int(lane.number[0]) == 1 for lane, _ in merged)
    count = len(base.start_ns)
    start, end = base.start_ns.copy(), base.end_ns.copy()
    size, whole, following = base.size.copy(), base.whole.copy(), base.next_ns.copy()
    rows = [[base.piece(k)] for k in range(count)]
    for lane, turn in merged[1:]:
        np.minimum.at(start, turn, lane.start_ns)
        np.maximum.at(end, turn, lane.end_ns)
        np.add.at(size, turn, lane.size)
        whole[turn] &= lane.whole
        for number, place in enumerate(turn.tolist()):
            rows[place].append(lane.piece(number))
    together = [np.sort(np.concatenate(each)) if len(each) > 1 else each[0] for each in rows]
    return Transfers(base.edge, together, start, end, size, whole, following, begun)


def _cliques(every: Sequence[Transfers]) -> list[list[Transfers]]:
    """Transfers by endpoints that they connect, those of as many calls and bytes apart from others.

    Communicators that exchange all with all do so equally often on all their edges; a pipeline's edges that
    touch them need not.
    """
    classes: dict[int, list[Transfers]] = {}
    for each in every:
        classes.setdefault(len(each.rows), []).append(each)
    return [clique for members in classes.values() for clique in _connected(members)]


def _connected(members: Sequence[Transfers]) -> list[list[Transfers]]:
    """Transfers by endpoints that they connect."""
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for each in members:
        parent[root(each.edge[1])] = root(each.edge[0])
    by: dict[int, list[Transfers]] = {}
    for each in members:
        by.setdefault(root(each.edge[0]), []).append(each)
    return list(by.values())


def _in_common(members: Sequence[Transfers]) -> tuple[list[Transfers], list[Transfers]]:
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


def _is_call(members: Sequence[Transfers], near: frozenset[int] | None) -> bool:
    """Whether the k-th transfers of all edges are one call of all with all, for every k."""
    edges = {each.edge for each in members}
    ends = sorted({end for edge in edges for end in edge})
    asked = {(a, b) for a in ends for b in ends if a != b and (near is None or a in near or b in near)}
    if edges != asked or len(members) != len(edges):
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


def _all_to_all(
    members: Sequence[Transfers], turn: int, position: Ints, near: frozenset[int] | None
) -> Instance:
    rows = np.sort(np.concatenate([each.rows[turn] for each in members]))
    ends = sorted({end for each in members for end in each.edge}, key=lambda end: int(position[end]))
    sizes = {int(each.size[turn]) for each in members}
    size = sizes.pop() * len(ends) if len(sizes) == 1 else None
    whole = all(bool(each.whole[turn]) for each in members)
    names = ["pairwise"] if len(ends) == 2 else []
    return Instance(rows, Op.ALL_TO_ALL, ends, _LINEAR, names, size=size, complete=whole, near=near)
