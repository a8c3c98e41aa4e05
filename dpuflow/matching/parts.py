"""The parts that NCCL's connections for sends and receives carry, one way each.

In: EXCHANGE rows of connections whose clear-to-send entries name buffers of point-to-point connections.
Out: which rows of each make up a part, from times and sizes, and from how often parts are alike. Facts of
NCCL's that carry this (2.30, src/transport/net.cc, src/enqueue.cc addP2pToPlan, src/device/sendrecv.h):

- point-to-point connections are never a collective's (connIndex 1), and have buffers of their own;
- a transfer is cut into parts, one a channel, and each part into equal chunks but for the last;
- a connection takes up a part when the one before it is done there, so the entry for a part's first chunk
  comes after the last chunk before it (``credited``); as many entries as there are slots come with it.

Parts that go side by side over several channels are one transfer.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of, percentile
from dpuflow.matching.buffers import CHUNKS, RING, STEP
from dpuflow.matching.model import HALF, MOST, TWICE
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.arrays.stretches import Covered
    from dpuflow.matching.model import Job
    from dpuflow.matching.streams import Edge

    Reals = Floats


ANY, PLAIN, STALL, HIDDEN, SURE = 2.0, 4.0, 7.0, 10.0, 12.0
"""Bits: a part of any shape; a single sign; a proxy thread that stalls (one in a hundred); a late stamp (one
in a thousand); several signs."""
LEAST: Final = 2
"""Slots of a connection: eight, fewer where up to eight peers' sends and receives go together (net.cc)."""
PACE: Final = 4
"""Entries that wait for a chunk to be taken come so many times as slowly as those that are posted at once."""
UNITS: Final = (32_768, 65_536, *CHUNKS)
"""Bytes of a chunk of a part, by how many bytes a transfer has (src/enqueue.cc addP2pToPlan)."""
QUICK: Final = 5
"""Percentile of pauses that are as short as pauses between parts are."""
FEW: Final = 3
"""So many equal parts are a pattern."""


def lines_of(job: Job, rows: Ints, announced: Ints) -> list[tuple[Edge, Ints]]:
    """(sender, receiver) and rows of each way of a connection whose entries announce a chunk, or all that
    comes."""
    from dpuflow.kernels import streams

    exchanges, buffers = job.exchanges, job.buffers

    key = np.empty(len(rows), np.int64)
    keys = streams.directions(exchanges, rows, key) + 1
    room = announced[rows]
    # Rings of Simple have such slots where NCCL_BUFFSIZE is 512 KiB or 1 MiB, others where it is 2 MiB.
    sizes = [s for s in CHUNKS if buffers.get(s) != RING and (s == min(CHUNKS) or buffers.get(s) != STEP)]
    chunk = np.isin(room, sizes)
    other = np.bincount(key[(room != 0) & ~chunk], minlength=keys)
    own = (np.bincount(key[chunk], minlength=keys) > 0) & (other == 0)
    slot = np.isin(room, list(buffers))  # full ones announce what comes, too: a collective's
    own = (own | _pooled(job, rows, room, key) | _registered(job, rows, room, slot, key))[key]
    mine, line = rows[own], key[own]
    if not len(mine):
        return []
    order = np.lexsort((exchanges["order"][mine], line))
    parts = np.split(mine[order], np.flatnonzero(np.diff(line[order])) + 1)
    parts.sort(key=lambda part: int(part[0]))
    return [((int(exchanges["src"][p[0]]), int(exchanges["dst"][p[0]])), p) for p in parts]


def _pooled(job: Job, rows: Ints, room: Ints, key: Ints) -> Bools:
    """Ways (``key``) whose entries announce no more than a buffer of point-to-point connections holds.

    Up to 2.28 an entry announces a part's chunk, or its bytes if they are fewer (enqueue.cc addP2pToPlan,
    net.cc recvProxyProgress). That may be as much as a slot of LL is. But buffers of a pool lie as far apart
    as the largest chunk, and slots of LL, which are taken in turn, next to each other.
    """
    keys = int(key.max(initial=-1)) + 1
    if job.granted_at is None:
        return np.zeros(keys, np.bool_)
    at = job.granted_at[rows]
    known = (room != 0) & (at >= 0)
    line, place, size = key[known], at[known] % min(CHUNKS), room[known]
    count, other = np.bincount(line, minlength=keys), np.zeros(keys, np.int64)
    first = np.full(keys, -1, np.int64)
    first[line[::-1]] = place[::-1]
    np.add.at(other, line, (place != first[line]) | (size > min(CHUNKS)))
    return np.asarray((count > TWICE) & (other == 0), np.bool_)


def _registered(job: Job, rows: Ints, room: Ints, slot: Bools, key: Ints) -> Bools:
    """Ways (``key``) of connections into registered buffers: a part is one message (enqueue.cc addP2pToPlan).

    Its entry announces what comes, and is posted when the receiver's kernel runs (net.cc, regBufferReady),
    after all that came before. A collective whose operations each fill one ``slot`` of a staging buffer
    has such entries, too: nothing here tells them apart, so that a way with no other entries is not claimed.
    """
    exchanges, columns, keys = job.exchanges, job.columns, int(key.max(initial=-1)) + 1
    exact: Bools = np.bincount(key[(room == 0) | (room != columns.sizes[rows])], minlength=keys) == 0
    exact &= np.bincount(key[~slot], minlength=keys) > 0
    if not exact.any():
        return exact
    order = np.lexsort((exchanges["order"][rows], key))
    line, before = key[order], rows[order]
    same = line[1:] == line[:-1]
    after = same & (exchanges["grant_ns"][before[1:]] > columns.arrivals[before[:-1]])
    turns = np.bincount(line[1:][same], minlength=keys)
    alone = np.bincount(line[1:][after], minlength=keys) >= MOST * turns
    return exact & (turns > 0) & alone


class Parts:
    """The parts that one connection carries one way: ``begins[k]:begins[k + 1]`` are places in ``rows``."""

    def __init__(
        self, job: Job, edge: Edge, rows: Ints, entries: tuple[Ints, Ints], lanes: int, sending: Covered
    ) -> None:
        """``entries``: for how many messages each row's was, and how many bytes it announced; ``lanes``: how
        many connections lead from one endpoint to the other; ``sending``: when the former sent anything."""
        exchanges, columns, (asked, announced) = job.exchanges, job.columns, entries
        self.edge, self.rows, self.lanes = edge, rows, lanes
        # Else it may send for other GPUs of its node (PXN), each over connections of its own.
        self.alone = int((job.nodes == job.nodes[edge[0]]).sum()) == 1
        self.bytes, self.starts = columns.sizes[rows], columns.starts[rows]
        self.sizes = self.bytes // asked  # of several senders' messages that go together one
        self.arrivals = columns.arrivals[rows]
        self.grants = exchanges["grant_ns"][rows]
        # How long the sender had sent nothing while it had the entry.
        granted = exchanges["grant_arrived_ns"][rows]
        granted = np.where(granted == NEVER, self.starts, granted)
        self.idle = self.starts - granted - sending.before(self.starts) + sending.before(granted)
        self.lossy = bool(exchanges["retransmitted"][rows].any())
        self.number = exchanges["sub"][rows].astype(np.int64)  # clear-to-send entries count from 1
        self.silent = not announced.any()  # sockets have no entries
        if self.silent:
            self.number = np.arange(1, len(rows) + 1)
        self.slots = 1
        self.turns: Ints | None = None  # of which calls the parts are, where other ways tell
        granted = self.grants[1:] > self.arrivals[:-1]
        self.registered = bool((announced == self.sizes).all()) and len(rows) > 1 and granted.mean() >= MOST
        if self.registered:
            self.begins = np.arange(len(rows) + 1)
        else:
            self.cut()

    def cut(self, known: Counter[tuple[int, int]] | None = None) -> None:
        """Cut into parts: the likeliest, of all ways to cut, by what entries and sizes say of each place.

        ``known``: how many parts of so many messages and bytes there are. A part like others is likelier then
        than one like none, whatever a late receiver, a proxy that stalls or a late stamp make it look like.
        """
        if self.silent:
            self.begins = self._by_pauses()
            return
        maybe, begins, inside, at_once = self._evidence()
        shapes: dict[tuple[int, int], float] = {}
        strange = ANY
        if known:
            total = sum(known.values())
            often = [shape for shape, count in known.most_common() if count >= FEW]
            shapes = {shape: float(np.log2(total / known[shape])) for shape in often}
            # Good and Turing: what was not seen yet is as likely as what was seen once.
            strange += float(np.log2(total / max(1, sum(1 for count in known.values() if count == 1))))
            # A late stamp hides where a part ends; ones like the others would end there.
            maybe = distinct(np.concatenate([maybe, *(maybe + count for count, _ in often[:FEW])]))
        places = np.append(maybe[maybe < len(self.rows)], len(self.rows))
        self.begins = self._likeliest(places, begins, inside, at_once, shapes, strange)

    def _evidence(self) -> tuple[Ints, Reals, Reals, Ints]:
        """Where parts may begin; what each message costs, in bits, if it does, and if it goes on with one;
        and how many entries had come, from its own on, when it was there.

        A part's first entry comes when the part before is done, together with as many more as there are
        slots. So it does within a part where the receiver came late or is slow, but then one by one.
        """
        count = len(self.rows)
        grants, before = self.grants, np.r_[NEVER, self.arrivals[:-1]]
        unknown = (grants == NEVER) | (before == NEVER)
        # A part's chunks never grow.
        grown = np.r_[True, self.sizes[1:] > self.sizes[:-1]]
        lost = np.r_[False, np.diff(self.number) > 1]
        smaller = np.r_[False, self.sizes[1:] < self.sizes[:-1]]
        maybe = np.flatnonzero(np.where(unknown, smaller, grants > before) | grown | lost)
        there = np.maximum.accumulate(grants)
        at_once = np.maximum(np.searchsorted(there, self.arrivals, "right") - np.arange(count), 1)
        at_once[unknown & ~grown] = 0
        self.slots = max(LEAST, int(at_once[maybe].max(initial=1)))
        apart = np.diff(grants)
        later = apart[apart > 0]
        posted = float(median_of(np.sort(later)[: max(1, len(apart) // 4)])) if len(later) else 0.0
        # Who waits for a slot sends as soon as it is given back, not when it calls again.
        blocked = self.idle <= PACE * (self.arrivals - self.starts)
        begins, inside = np.full(count, HIDDEN), np.zeros(count)
        for at, seen in zip(maybe.tolist(), at_once[maybe].tolist(), strict=True):
            if not blocked[at]:
                begins[at], inside[at] = 0.0, SURE
                continue
            together = seen > 1 and median_of(apart[at : at + seen - 1]) <= PACE * posted
            begins[at], inside[at] = (0.0, PLAIN) if together else (1.0, 1.0)
        begins[unknown], inside[unknown] = 1.0, 1.0
        inside[grown] = np.inf
        return maybe, begins, inside, at_once

    def _by_pauses(self) -> Ints:
        """Where parts begin that nothing announces, and the end: their chunks follow one another, and behind
        the last one its sender pauses as it does behind those that are no whole chunk, and so end one. Where
        such ends make all parts alike, pauses are the network's."""
        pause = self.starts[1:] - self.arrivals[:-1]
        ends = ~np.isin(self.sizes[:-1], UNITS) | (self.sizes[1:] > self.sizes[:-1])
        cuts = np.r_[0, 1 + np.flatnonzero(ends), len(self.rows)]
        shapes = Counter(zip(np.diff(cuts)[1:-1], np.add.reduceat(self.sizes, cuts[:-1])[1:-1], strict=True))
        if shapes and len(shapes) <= TWICE and min(shapes.values()) >= FEW:
            return np.asarray(cuts, np.int64)
        least = percentile(pause[ends], QUICK) / 2 if np.count_nonzero(ends) >= FEW else np.inf
        return np.asarray(np.r_[0, 1 + np.flatnonzero(ends | (pause >= least)), len(self.rows)], np.int64)

    def _likeliest(
        self,
        places: Ints,
        begins: Reals,
        inside: Reals,
        at_once: Ints,
        shapes: Mapping[tuple[int, int], float],
        strange: float,
    ) -> Ints:
        """The cut at some of ``places`` that costs least: the shortest path from the first to the end."""
        count = len(self.rows)
        longest = max((messages for messages, _ in shapes), default=count + 1)
        bytes_to = np.r_[0, np.cumsum(self.sizes)]
        within = np.r_[0.0, np.cumsum(np.where(np.isfinite(inside), inside, 0.0))]
        # From where on all chunks are as large as each one.
        changed = np.flatnonzero(np.r_[True, np.diff(self.sizes) != 0])
        alike = changed[np.searchsorted(changed, np.arange(count), "right") - 1]
        best, origin = np.zeros(len(places)), np.zeros(len(places), np.int64)
        for number in range(1, len(places)):
            end = int(places[number])
            shrinks = end > 1 and self.sizes[end - 1] <= self.sizes[end - 2]
            low = int(alike[end - 2]) if shrinks else end - 1
            first = min(int(np.searchsorted(places, low)), number - 1)
            starts = places[first:number]
            long, seen = end - starts, at_once[starts]
            asked = np.minimum(long, self.slots)
            # A busy proxy has not posted all of a part's entries when its first chunk is there, but most.
            few = np.where(2 * seen > asked, np.where(seen < asked, 1.0, 0.0), STALL)
            late = inside[np.minimum(starts + 1, count - 1)]  # of the second entry that is said already
            few = np.where((seen == 1) & np.isfinite(late), np.maximum(few - late, 0.0), few)
            cost = best[first:number] + within[end] - within[starts + 1]
            cost += np.where(seen > long, SURE, np.where(seen == 0, 0.0, few))
            for k, start in enumerate(starts.tolist()):
                shape = end - start, int(bytes_to[end] - bytes_to[start])
                cut_off = end == count or (start == 0 and self.number[0] > 1)
                cut_off &= shape[0] < longest  # what is left of a part is no more than the part
                cost[k] += min(shapes.get(shape, strange), ANY if cut_off else strange)
            k = int(np.argmin(cost))
            best[number] = cost[k] + (begins[end] if end < count else 0.0)
            origin[number] = first + k
        kept = [len(places) - 1]
        while kept[-1]:
            kept.append(int(origin[kept[-1]]))
        return np.asarray(places[kept[::-1]], np.int64)

    def cut_by_rule(self) -> bool:
        """Whether chunks are as large as NCCL cuts parts of ``lanes`` that a transfer may have.

        By bytes: what a stall cut off a part is small, and its chunks those of the whole.
        """
        total = self.lanes * np.add.reduceat(self.sizes, self.begins[:-1])
        largest = np.maximum.reduceat(self.sizes, self.begins[:-1])
        unit = np.where(total < 131_072, 32_768, np.where(total < 1 << 20, 65_536, max(CHUNKS)))
        return bool(total[largest <= unit].sum() >= MOST * total.sum())

    def signatures(self) -> list[tuple[int, int]]:
        """Messages and bytes of every part."""
        total = np.add.reduceat(self.sizes, self.begins[:-1])
        return list(zip(np.diff(self.begins).tolist(), total.tolist(), strict=True))

    def close(self, known: Counter[tuple[int, int]]) -> None:
        """What the parts are, now that they are cut."""
        begins = self.begins[:-1]
        self.start_ns = self.starts[begins]
        self.end_ns = self.arrivals[self.begins[1:] - 1]
        self.size = np.add.reduceat(self.bytes, begins)
        self.whole = np.ones(len(begins), bool)
        if self.number[0] > 1:
            self.whole[0] = known[int(self.begins[1]), int(self.size[0])] > 1
        self.next_ns = np.r_[self.grants[begins[1:]], NEVER]

    def by_message(self) -> Parts:
        """The same, were each message a part."""
        other = copy(self)
        other.begins = np.arange(len(self.rows) + 1)
        other.close(Counter())
        return other

    def cut_at(self, times: Ints) -> Ints:
        """Where parts would begin that were cut at these times, and the end."""
        at = np.searchsorted(np.maximum.accumulate(self.starts), times)
        return np.asarray(np.r_[0, at, len(self.rows)], np.int64)

    def piece(self, number: int) -> Ints:
        """The rows of a part."""
        return self.rows[self.begins[number] : self.begins[number + 1]]


class Transfers(NamedTuple):
    """The transfers from one endpoint to another within one communicator, in order; arrays are parallel."""

    edge: Edge
    rows: list[Ints]  # EXCHANGE rows of each
    start_ns: Ints
    end_ns: Ints  # all of it had arrived
    size: Ints
    whole: Bools  # neither end is cut off by the capture
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


def common_cuts(lanes: Sequence[Parts], *, early: bool = False) -> dict[int, Ints]:
    """By sender the times before its calls of all others: where most of its ways begin a part together.

    A call's sends leave in one kernel, and before the next one the sender pauses; ``early``: of that pause
    half, for one of its ways may begin before the others. Empty where senders have unlike numbers of calls.
    """
    found: dict[int, Ints] = {}
    for end in {lane.edge[0] for lane in lanes}:
        mine = [lane for lane in lanes if lane.edge[0] == end]
        pauses = np.concatenate([lane.start_ns[1:] - lane.end_ns[:-1] for lane in mine])
        if not len(pauses):
            return {}
        apart = max(int(percentile(pauses, QUICK) / 2), 1)
        begins = np.sort(np.concatenate([lane.start_ns[1:] for lane in mine]))
        groups = np.split(begins, np.flatnonzero(np.diff(begins) > apart) + 1)
        first = np.array([group[0] for group in groups if len(group) >= HALF * len(mine)], np.int64)
        ends = [lane.end_ns[np.maximum(np.searchsorted(lane.end_ns, first) - 1, 0)] for lane in mine]
        pause = first - np.median(ends, axis=0).astype(np.int64)
        found[end] = first - (pause if early else apart) // 2
    return found if len({len(times) for times in found.values()}) == 1 else {}


def transfers_of(lanes: Sequence[Parts]) -> list[Transfers]:
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


def by_message(lanes: Sequence[Parts]) -> Transfers | None:
    """What connections from one endpoint to another carry, were each message a part; None where they have
    unlike numbers of them, or the first ones were not seen."""
    count = len(lanes[0].rows)
    if any(len(lane.rows) != count or lane.number[0] != 1 for lane in lanes):
        return None
    single = [lane.by_message() for lane in lanes]
    return _whole([(lane, np.arange(count)) for lane in single])


def _beside(lane: Parts, base: Parts) -> Ints | None:
    """For each part of ``lane`` that of ``base`` which it goes beside; None where they do not go together."""
    if lane.turns is not None and base.turns is not None:
        return lane.turns if np.isin(lane.turns, base.turns).all() else None
    if len(lane.start_ns) == len(base.start_ns):
        turn = np.arange(len(lane.start_ns))
        over = _overlap(lane, base, turn)
        # A channel that waits for an ACK that was lost falls behind the others by as much as slots hold.
        if (lane.lossy or base.lossy) and 2 * (over >= 0).sum() > len(over):
            return turn
        if _one_call(lane, base):
            return turn
    else:
        later = np.searchsorted(base.start_ns, lane.start_ns)
        tries = np.stack([np.clip(later + k, 0, len(base.start_ns) - 1) for k in (-1, 0)])
        over = np.stack([_overlap(lane, base, turn) for turn in tries])
        best = np.argmax(over, axis=0)
        turn, over = tries[best, np.arange(len(best))], over.max(axis=0)
        if (np.diff(turn) <= 0).any():
            return None
    return turn if (over >= 0).mean() >= MOST else None


def _one_call(lane: Parts, base: Parts) -> bool:
    """Whether the parts of both lanes with the same number follow each other sooner than the next ones follow
    them. A transfer's parts are about as large (src/enqueue.cc addP2pToPlan); a proxy that serves several
    connections sends one part after the other, and they need not overlap."""
    first, last = np.minimum(lane.start_ns, base.start_ns), np.maximum(lane.start_ns, base.start_ns)
    alike = lane.alone & (np.maximum(lane.size, base.size) <= TWICE * np.minimum(lane.size, base.size))
    together = alike[:-1] & (last[:-1] - first[:-1] < first[1:] - last[:-1])
    return len(together) >= FEW and bool(together.mean() >= MOST)


def _overlap(lane: Parts, base: Parts, turn: Ints) -> Ints:
    """How long each part was under way together with that of ``base``, ns; below 0 where not at all."""
    start = np.maximum(lane.start_ns, base.start_ns[turn])
    return np.asarray(np.minimum(lane.end_ns, base.end_ns[turn]) - start, np.int64)


def _whole(merged: Sequence[tuple[Parts, Ints]]) -> Transfers:
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
