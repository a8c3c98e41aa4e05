"""Gloo's headers beyond the snap length -> messages, inferred where the protocol leaves no choice.

In: a connection's MESSAGE and LINK rows, each flow's in stream order (see ``hidden``). Out: which pieces are
solved, and the rows in their place. A transfer is SEND_READY and DATA one way, RECV_READY the other, of one
slot and length; transfers of a slot are matched in order (``framing`` has the sources).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.framing import GLOO_PREAMBLE
from dpuflow.messages.stretches import Part, Slot, stretches
from dpuflow.schema.rows import Framing, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.messages.stretches import Solved
    from dpuflow.schema.tables import Rows

_ALL = 7  # LINK.known of a header that was seen whole
_MATCH = 2


@dataclass
class _Kind:
    """Instances of one kind of message on one flow, by slot and in stream order.

    Parallel lists: where in the stream they begin (those inferred: where their stretch begins), their times,
    and the bytes of DATA that each tells, -1 where it does not.
    """

    places: dict[Slot, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: dict[Slot, list[int]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[Slot, list[int]] = field(default_factory=lambda: defaultdict(list))

    def before(self, slot: Slot, seq: int) -> int:
        """How many of the slot's instances stand before a stretch at ``seq``, or were put into it."""
        return bisect_right(self.places[slot], seq)

    def add(self, slot: Slot, seq: int, time_ns: int, size: int = -1) -> None:
        at = self.before(slot, seq)
        self.places[slot].insert(at, seq)
        self.times[slot].insert(at, time_ns)
        self.sizes[slot].insert(at, size)

    def drop(self, slot: Slot, seq: int) -> None:
        """Take back what was put last into the stretch at ``seq``."""
        at = self.before(slot, seq) - 1
        del self.places[slot][at], self.times[slot][at], self.sizes[slot][at]


_NEAR = 64  # slots looked at before and after the time in question: that many run at once at most
_MOST_DATA = 9  # a stretch is not tried with more DATA than this
_KINDS = (Wire.GLOO_SEND_READY, Wire.GLOO_RECV_READY, Wire.GLOO_DATA)
_READY = _KINDS[:2]
_NEVER_AGAIN = int(np.iinfo(np.int64).max)


class GlooConnection:
    """Both directions of one Gloo connection: which messages of which slots are not accounted for."""

    def __init__(self, rows: Rows, links: Rows, orders: tuple[np.ndarray, np.ndarray]) -> None:
        self.rows, self.links, self.orders = rows, links, orders
        self.kinds = [{wire: _Kind() for wire in _KINDS} for _ in orders]
        self.usual: list[dict[tuple[int, int], int]] = [{}, {}]
        # Each flow's rows of known slot, the slot's number, and how many of each kind a slot has.
        self._known = [o[(links["known"][o] & _MATCH) != 0] for o in orders]
        self._times = [np.maximum.accumulate(rows["first_ns"][known]) for known in self._known]
        whole = np.concatenate(self._known)
        op, tag, sub = (rows[name][whole].astype(np.int64) for name in ("op", "tag", "sub"))
        self._keys, number = np.unique(op << 56 | tag << 24 | sub, return_inverse=True)
        self._number = [number[: len(self._known[0])], number[len(self._known[0]) :]]
        slots = len(self._keys)
        seen = np.zeros((2, 3, slots), np.int64)
        self._length = np.full((2, slots), -1, np.int64)  # by the way of the data
        self._first = np.full(slots, np.iinfo(np.int64).max)
        for way, (known, slot) in enumerate(zip(self._known, self._number, strict=True)):
            np.minimum.at(self._first, slot, rows["first_ns"][known])
            for k, wire in enumerate(_KINDS):
                of_kind = rows["wire"][known] == wire
                data_way = 1 - way if wire == Wire.GLOO_RECV_READY else way
                seen[data_way, k] += np.bincount(slot[of_kind], minlength=slots)
                size = rows["bytes" if wire == Wire.GLOO_DATA else "announces"][known[of_kind]]
                told = (size > 0) | (wire == Wire.GLOO_DATA)
                np.maximum.at(self._length[data_way], slot[of_kind][told], size[told].astype(np.int64))
        self._transfers = seen.max(axis=1)
        self._watched = np.zeros(slots, bool)
        self._watch((seen != self._transfers[:, None]).any(axis=(0, 1)))

    def _watch(self, which: np.ndarray) -> None:
        """Keep the single messages of these slots: some of theirs are not accounted for."""
        which = which & ~self._watched
        self._watched |= which
        for way, (known, slot) in enumerate(zip(self._known, self._number, strict=True)):
            for i, n in zip(known[which[slot]], slot[which[slot]], strict=True):
                kind = self.kinds[way].get(Wire(int(self.rows["wire"][i])))
                if kind is not None:
                    data = self.rows["wire"][i] == Wire.GLOO_DATA
                    size = int(self.rows["bytes" if data else "announces"][i])
                    place, time_ns = (int(self.rows[name][i]) for name in ("seq", "first_ns"))
                    kind.add(self._slot(n), place, time_ns, size if data or size else -1)
        watched = np.flatnonzero(self._watched)
        watched = watched[np.argsort(self._first[watched], kind="stable")]
        self._since = self._first[watched]
        self._slots = [self._slot(n) for n in watched]
        self._index = dict(zip(self._slots, watched.tolist(), strict=True))

    def _slot(self, number: np.integer) -> Slot:
        key = int(self._keys[number])
        return key >> 56, key >> 24 & 0xFFFFFFFF, key & 0xFFFFFF

    def _triple(self, way: int) -> tuple[_Kind, _Kind, _Kind]:
        """SEND_READY, RECV_READY and DATA of the transfers that go ``way``."""
        mine, other = self.kinds[way], self.kinds[1 - way]
        return mine[Wire.GLOO_SEND_READY], other[Wire.GLOO_RECV_READY], mine[Wire.GLOO_DATA]

    def wanted(
        self, way: int, since_ns: int, until_ns: int, kinds: Sequence[Wire] = _KINDS
    ) -> dict[Wire, list[Slot]]:
        """Slots of about that time of which flow ``way`` must have sent more of a kind than were seen."""
        first = max(0, int(np.searchsorted(self._since, since_ns)) - _NEAR)
        last = int(np.searchsorted(self._since, until_ns, side="right")) + _NEAR
        if not self.usual[way]:  # what nobody has begun when the flow goes on is looked at last
            last = min(last, int(np.searchsorted(self._since, self._goes_on_ns(way, until_ns), side="right")))
        near = self._slots[first:last]
        wanted: dict[Wire, list[Slot]] = {}
        for wire in kinds:
            times, data_way = self.kinds[way][wire].times, 1 - way if wire == Wire.GLOO_RECV_READY else way
            wanted[wire] = [s for s in near if len(times[s]) < self.transfers(data_way, s)]
        return wanted

    def _goes_on_ns(self, way: int, until_ns: int) -> int:
        """When flow ``way`` next has a message of known slot after ``until_ns``."""
        times = self._times[way]
        at = int(np.searchsorted(times, until_ns, side="right"))
        return int(times[at]) if at < len(times) else _NEVER_AGAIN

    def transfers(self, way: int, slot: Slot) -> int:
        """How many transfers of a slot went ``way``, as far as is known."""
        number = self._index[slot]
        usual = self.usual[way].get((slot[0], int(self._length[way, number])), 0)
        return max(int(self._transfers[way, number]), usual)

    def learn(self) -> None:
        """Let slots of the same operation and length have the same number of transfers, from now on.

        Only for stretches that stay unsolved: there all three messages of a transfer may be hidden.
        """
        op = self._keys >> 56
        for way in (0, 1):
            number, length = self._transfers[way], self._length[way]
            alike, which = np.unique(np.stack([op, length]), axis=1, return_inverse=True)
            for k in range(alike.shape[1]):
                same = which.reshape(-1) == k
                usual = int(median_of(number[same]))
                self.usual[way][int(alike[0, k]), int(alike[1, k])] = usual
                self._watch(same & (number < usual))

    def length(self, way: int, slot: Slot, k: int) -> int | None:
        """Bytes of the slot's transfer number ``k`` that goes ``way``: a slot's last block may be shorter.

        Transfers of a slot are matched in order, so a READY tells if all of its kind were seen; else they
        are taken to be alike.
        """
        for kind in self._triple(way)[:2]:
            sizes = kind.sizes[slot]
            if k < len(sizes) == self.transfers(way, slot) and sizes[k] >= 0:
                return sizes[k]
        length = int(self._length[way, self._index[slot]])
        return None if length < 0 else length

    def pick_data(
        self, way: int, wanted: list[Slot], seq: int, until_ns: int, length: int | None = None
    ) -> Slot | None:
        """The wanted slot whose next DATA after ``seq`` was announced first, before ``until_ns``."""
        send, grant, data = self._triple(way)
        best: tuple[int, Slot] | None = None
        for slot in wanted:
            k = data.before(slot, seq)
            if length is not None and self.length(way, slot, k) != length:
                continue
            # A READY that was itself not seen shifts the count of the others: trust the fuller kind.
            most = max(len(send.times[slot]), len(grant.times[slot]))
            signs = [r.times[slot][k] for r in (send, grant) if len(r.times[slot]) == most > k]
            if self.usual[way] and most < self.transfers(way, slot):
                signs = [until_ns]
            if signs and max(signs) <= until_ns and (best is None or (min(signs), slot) < best):
                best = min(signs), slot
        return best[1] if best else None

    def pick_ready(
        self, way: int, wanted: dict[Wire, list[Slot]], seq: int, since_ns: int
    ) -> tuple[Wire, Slot] | None:
        """The wanted READY whose DATA is the next to come after ``since_ns``.

        Transfers of a slot go in order, so one that lacks a READY is noticed where the next one's stands in
        for it and comes too late: by the first DATA without a READY before it. DATA that was not seen either
        comes after its other READY at the earliest.
        """
        best: tuple[int, Wire, Slot] | None = None
        for wire, transfer_way in ((Wire.GLOO_SEND_READY, way), (Wire.GLOO_RECV_READY, 1 - way)):
            send, grant, data = self._triple(transfer_way)
            ready, other = (send, grant) if wire == Wire.GLOO_SEND_READY else (grant, send)
            for slot in wanted[wire]:
                k = ready.before(slot, seq)
                # One flow has an order of bytes; of two only the times can be compared.
                mine = wire == Wire.GLOO_SEND_READY
                stood, came = (r.places[slot] if mine else r.times[slot] for r in (ready, data))
                while k < min(len(stood), len(came)) and stood[k] <= came[k]:
                    k += 1
                if len(data.times[slot]) > k:
                    coming = data.times[slot][k]
                elif len(other.times[slot]) > k:
                    coming = max(other.times[slot][k], since_ns)
                else:
                    continue
                if coming >= since_ns and (best is None or (coming, wire, slot) < best):
                    best = coming, wire, slot
        return best[1:] if best else None

    def solve(self, way: int, pieces: np.ndarray) -> list[Part] | None:
        """The messages that fill a stretch of flow ``way``; None if more than what is wanted is needed."""
        first, last = self.rows[pieces[0]], self.rows[pieces[-1]]
        seq = int(first["seq"])
        size = int(last["seq_end"]) - seq
        since, until = int(first["first_ns"]), int(last["last_ns"])
        data: list[Part] = []
        added: list[tuple[_Kind, Slot]] = []
        kind = self.kinds[way][Wire.GLOO_DATA]
        for leading in range(min(size // GLOO_PREAMBLE, _MOST_DATA) + 1):  # DATA first tried: none
            if leading:
                wanted = self.wanted(way, since, until, (Wire.GLOO_DATA,))[Wire.GLOO_DATA]
                slot = self.pick_data(way, wanted, seq, until)
                length = None if slot is None else self.length(way, slot, kind.before(slot, seq))
                if slot is None or length is None:
                    break
                data.append(Part(GLOO_PREAMBLE + length, Wire.GLOO_DATA, Role.DATA, slot, length))
                size -= data[-1].size
                self._add(added, kind, slot, seq, since)
                if size < 0:
                    break
            ready = self._ready(way, seq, size, since, until)
            if ready is not None:
                return ready + data
        self._drop(added, seq)
        return None

    def _ready(self, way: int, seq: int, size: int, since: int, until: int) -> list[Part] | None:
        """READY that fill ``size`` bytes, or None; undone where it does not come out even."""
        if size < 0 or size % GLOO_PREAMBLE:
            return None
        added: list[tuple[_Kind, Slot]] = []
        ready: list[Part] = []
        for _ in range(size // GLOO_PREAMBLE):
            picked = self.pick_ready(way, self.wanted(way, since, until, _READY), seq, since)
            if picked is None:
                self._drop(added, seq)
                return None
            wire, slot = picked
            role, transfer_way = (Role.OFFER, way) if wire == Wire.GLOO_SEND_READY else (Role.GRANT, 1 - way)
            length = self.length(transfer_way, slot, self.kinds[way][wire].before(slot, seq))
            ready.append(Part(GLOO_PREAMBLE, wire, role, slot, length or 0))
            self._add(added, self.kinds[way][wire], slot, seq, since)
        return ready

    @staticmethod
    def _drop(added: list[tuple[_Kind, Slot]], seq: int) -> None:
        for kind, slot in added:
            kind.drop(slot, seq)

    @staticmethod
    def _add(added: list[tuple[_Kind, Slot]], kind: _Kind, slot: Slot, seq: int, time_ns: int) -> None:
        kind.add(slot, seq, time_ns)
        added.append((kind, slot))

    def complete(self, way: int, i: int) -> bool:
        """Fill in row ``i`` of flow ``way``, whose length is known but not its slot, or not all of it."""
        row, known = self.rows[i], int(self.links["known"][i])
        seq, time_ns = int(row["seq"]), int(row["first_ns"])
        wire = Wire(int(row["wire"]))
        if not known & _MATCH:
            wanted = self.wanted(way, time_ns, time_ns)
            if wire == Wire.GLOO_DATA:
                slot = self.pick_data(way, wanted[wire], seq, time_ns, int(row["bytes"]))
            else:
                if wire != Wire.UNKNOWN:
                    wanted = {w: wanted[w] if w == wire else [] for w in wanted}
                picked = self.pick_ready(way, wanted, seq, time_ns)
                if picked is None:
                    return False
                wire, slot = picked
            if slot is None:
                return False
            row["op"], row["tag"], row["sub"] = slot
            self.kinds[way][wire].add(slot, seq, time_ns)
        row["wire"] = wire
        if wire == Wire.GLOO_DATA:
            return True
        sending = wire == Wire.GLOO_SEND_READY
        data_way = way if sending else 1 - way
        key = int(row["op"]) << 56 | int(row["tag"]) << 24 | int(row["sub"])
        length = int(self._length[data_way, int(np.searchsorted(self._keys, key))])
        if length < 0:
            return False
        row["role"], row["announces"] = Role.OFFER if sending else Role.GRANT, length
        return True


def resolve_gloo(rows: Rows, links: Rows, flows: Rows, orders: dict[int, np.ndarray], solved: Solved) -> None:
    """Fill in Gloo rows in place; what stretches turn out to be goes to ``solved``. ``orders``: by flow."""
    for f, order in orders.items():
        peer = int(flows["peer"][f])
        if flows["framing"][f] != Framing.GLOO or (peer in orders and peer < f):
            continue
        sides = (order, orders.get(peer, order[:0]))
        rest = [(way, run) for way in (0, 1) for run in _lacking(rows, links, sides[way])]
        if not rest:
            continue
        pieces = sum(int(links["piece"][run[0]]) for _, run in rest)
        solved.counts.stretches += pieces
        solved.counts.headers += len(rest) - pieces
        connection = GlooConnection(rows, links, sides)
        rest = [(way, run) for way, run in rest if not _fill(connection, way, run, solved)]
        if rest:
            connection.learn()
            left = [(way, run) for way, run in rest if not _fill(connection, way, run, solved)]
            for way, run in left if 2 * len(left) <= len(rest) else ():
                _fill(connection, way, run, solved)  # with what was found the other way


def _lacking(rows: Rows, links: Rows, order: np.ndarray) -> list[np.ndarray]:
    """A flow's rows whose header was not seen whole, each alone, and its stretches."""
    runs = {int(run[0]): run for run in stretches(links, order)}
    hidden = (links["known"][order] != _ALL) & (rows["wire"][order] != Wire.TCP_BURST)
    todo = order[hidden | (links["piece"][order] == 1)]
    return [runs.get(int(i), i[None]) for i in todo if not links["piece"][i] or int(i) in runs]


def _fill(connection: GlooConnection, way: int, run: np.ndarray, solved: Solved) -> bool:
    """Whether it is known what a row or a stretch of flow ``way`` is; if so it is told."""
    if not connection.links["piece"][run[0]]:
        found = connection.complete(way, int(run[0]))
        solved.counts.resolved += found
        return found
    parts = connection.solve(way, run)
    if parts is None:
        return False
    solved.put(run, parts)
    return True
