"""Headers that the snap length cut off -> messages, inferred where the protocol leaves no choice.

In: MESSAGE rows of one capture with their LINK rows, each flow's in stream order; a stretch of
bytes without a readable header is a run of "pieces", one a segment. Out: rows in which solved
stretches are messages. All inferred rows keep the flag HIDDEN; what stays unsolved stays a BURST.
Gloo: a transfer is SEND_READY and DATA one way, RECV_READY the other, of one slot and length.
ob1: sequence numbers have no holes, and a FIN follows each PUT (see ``framing`` for sources).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpuflow import ob1
from dpuflow.framing import GLOO_PREAMBLE
from dpuflow.schema import Framing, Role, Wire
from dpuflow.stretches import HiddenCounts, Part, Slot, split, stretches

if TYPE_CHECKING:
    from dpuflow.tables import Rows

_ALL = 7  # LINK.known of a header that was seen whole
_MATCH = 2


@dataclass
class _Kind:
    """Instances of one kind of message on one flow, by slot: their times, in stream order."""

    times: dict[Slot, list[int]] = field(default_factory=lambda: defaultdict(list))
    length: dict[Slot, int] = field(default_factory=dict)

    def before(self, slot: Slot, time_ns: int) -> int:
        """How many of the slot's instances came before ``time_ns``."""
        return sum(t < time_ns for t in self.times[slot])

    def add(self, slot: Slot, time_ns: int) -> None:
        self.times[slot].append(time_ns)
        self.times[slot].sort()


def _slot(row: np.void) -> Slot:
    return int(row["op"]), int(row["tag"]), int(row["sub"])


class GlooConnection:
    """Both directions of one Gloo connection: which messages of which slots are not accounted for."""

    def __init__(self, rows: Rows, links: Rows, orders: tuple[np.ndarray, np.ndarray]) -> None:
        self.rows, self.links, self.orders = rows, links, orders
        self.kinds: list[dict[Wire, _Kind]] = []
        for order in orders:
            whole = order[(links["known"][order] & _MATCH) != 0]
            kinds = {w: _Kind() for w in (Wire.GLOO_SEND_READY, Wire.GLOO_RECV_READY, Wire.GLOO_DATA)}
            for i in whole:
                kind = kinds.get(Wire(int(rows["wire"][i])))
                if kind is not None:
                    slot = _slot(rows[i])
                    kind.times[slot].append(int(rows["first_ns"][i]))
                    of_data = kind is kinds[Wire.GLOO_DATA]
                    length = int(rows["bytes" if of_data else "announces"][i])
                    if length or of_data:
                        kind.length[slot] = length
            self.kinds.append(kinds)
        self.usual: list[dict[tuple[int, int | None], int]] = [{}, {}]

    def _triple(self, way: int) -> tuple[_Kind, _Kind, _Kind]:
        """SEND_READY, RECV_READY and DATA of the transfers that go ``way``."""
        mine, other = self.kinds[way], self.kinds[1 - way]
        return mine[Wire.GLOO_SEND_READY], other[Wire.GLOO_RECV_READY], mine[Wire.GLOO_DATA]

    def wanted(self, way: int) -> dict[Wire, list[Slot]]:
        """Slots of which flow ``way`` must have sent more messages of a kind than were seen."""
        wanted: dict[Wire, list[Slot]] = {}
        for wire, transfer_way, place in (
            (Wire.GLOO_SEND_READY, way, 0),
            (Wire.GLOO_RECV_READY, 1 - way, 1),
            (Wire.GLOO_DATA, way, 2),
        ):
            triple = self._triple(transfer_way)
            slots = {slot for kind in triple for slot in kind.times}
            wanted[wire] = [s for s in slots if len(triple[place].times[s]) < self.transfers(transfer_way, s)]
        return wanted

    def transfers(self, way: int, slot: Slot) -> int:
        """How many transfers of a slot went ``way``, as far as is known."""
        seen = max(len(kind.times[slot]) for kind in self._triple(way))
        return max(seen, self.usual[way].get((slot[0], self.length(way, slot)), 0))

    def learn(self) -> None:
        """Let slots of the same operation and length have the same number of transfers, from now on.

        Only for stretches that stay unsolved: there all three messages of a transfer may be hidden.
        """
        for way in (0, 1):
            numbers: dict[tuple[int, int | None], list[int]] = defaultdict(list)
            for slot in {slot for kind in self._triple(way) for slot in kind.times}:
                numbers[slot[0], self.length(way, slot)].append(self.transfers(way, slot))
            self.usual[way] = {key: int(np.median(n)) for key, n in numbers.items()}

    def length(self, way: int, slot: Slot) -> int | None:
        """Bytes of the slot's transfers that go ``way``."""
        return next((k.length[slot] for k in self._triple(way) if slot in k.length), None)

    def pick_data(self, way: int, wanted: list[Slot], until_ns: int, length: int | None) -> Slot | None:
        """The wanted slot whose next DATA was announced first, before ``until_ns``."""
        send, grant, data = self._triple(way)
        best: tuple[int, Slot] | None = None
        for slot in wanted:
            if length is not None and self.length(way, slot) != length:
                continue
            k = data.before(slot, until_ns)
            # A READY that was itself not seen shifts the count of the others: trust the fuller kind.
            most = max(len(send.times[slot]), len(grant.times[slot]))
            signs = [r.times[slot][k] for r in (send, grant) if len(r.times[slot]) == most > k]
            if self.usual[way] and most < self.transfers(way, slot):
                signs = [until_ns]
            if signs and max(signs) <= until_ns and (best is None or (min(signs), slot) < best):
                best = min(signs), slot
        return best[1] if best else None

    def pick_ready(self, way: int, wanted: dict[Wire, list[Slot]], since_ns: int) -> tuple[Wire, Slot] | None:
        """The wanted READY whose DATA is the next to come after ``since_ns``."""
        best: tuple[int, Wire, Slot] | None = None
        for wire, transfer_way in ((Wire.GLOO_SEND_READY, way), (Wire.GLOO_RECV_READY, 1 - way)):
            ready, data = self.kinds[way][wire], self._triple(transfer_way)[2]
            for slot in wanted[wire]:
                k = ready.before(slot, since_ns)
                if len(data.times[slot]) > k and data.times[slot][k] >= since_ns:
                    candidate = data.times[slot][k], wire, slot
                    if best is None or candidate < best:
                        best = candidate
        return best[1:] if best else None

    def solve(self, way: int, pieces: np.ndarray) -> list[Part] | None:
        """The messages that fill a stretch of flow ``way``; None if more than what is wanted is needed."""
        first, last = self.rows[pieces[0]], self.rows[pieces[-1]]
        size = int(last["seq_end"]) - int(first["seq"])
        since, until = int(first["first_ns"]), int(last["last_ns"])
        for leading in range(size // GLOO_PREAMBLE + 1):  # DATA first tried: none
            parts = self._try(way, size, since, until, leading)
            if parts is not None:
                return parts
            if leading > 8:
                break
        return None

    def _try(self, way: int, size: int, since: int, until: int, data_count: int) -> list[Part] | None:
        """``data_count`` DATA and for the rest READY, or None; undone where it does not come out even."""
        added: list[tuple[_Kind, Slot, int]] = []
        data: list[Part] = []
        for _ in range(data_count):
            slot = self.pick_data(way, self.wanted(way)[Wire.GLOO_DATA], until, None)
            length = None if slot is None else self.length(way, slot)
            if slot is None or length is None:
                break
            data.append(Part(GLOO_PREAMBLE + length, Wire.GLOO_DATA, Role.DATA, slot, length))
            size -= data[-1].size
            self._add(added, self.kinds[way][Wire.GLOO_DATA], slot, since)
        ready: list[Part] = []
        if len(data) == data_count and size >= 0 and size % GLOO_PREAMBLE == 0:
            for _ in range(size // GLOO_PREAMBLE):
                picked = self.pick_ready(way, self.wanted(way), since)
                if picked is None:
                    break
                wire, slot = picked
                role, transfer_way = (
                    (Role.OFFER, way) if wire == Wire.GLOO_SEND_READY else (Role.GRANT, 1 - way)
                )
                ready.append(Part(GLOO_PREAMBLE, wire, role, slot, self.length(transfer_way, slot) or 0))
                self._add(added, self.kinds[way][wire], slot, since)
                size -= GLOO_PREAMBLE
            if size == 0:
                return ready + data
        for kind, slot, time_ns in added:
            kind.times[slot].remove(time_ns)
        return None

    @staticmethod
    def _add(added: list[tuple[_Kind, Slot, int]], kind: _Kind, slot: Slot, time_ns: int) -> None:
        kind.add(slot, time_ns)
        added.append((kind, slot, time_ns))

    def complete(self, way: int, i: int) -> bool:
        """Fill in row ``i`` of flow ``way``, whose length is known but not its slot, or not all of it."""
        row, known = self.rows[i], int(self.links["known"][i])
        time_ns = int(row["first_ns"])
        wire = Wire(int(row["wire"]))
        if not known & _MATCH:
            wanted = self.wanted(way)
            if wire == Wire.GLOO_DATA:
                slot = self.pick_data(way, wanted[wire], time_ns, int(row["bytes"]))
            else:
                if wire != Wire.UNKNOWN:
                    wanted = {w: wanted[w] if w == wire else [] for w in wanted}
                picked = self.pick_ready(way, wanted, time_ns)
                if picked is None:
                    return False
                wire, slot = picked
            if slot is None:
                return False
            row["op"], row["tag"], row["sub"] = slot
            self.kinds[way][wire].add(slot, time_ns)
        row["wire"] = wire
        if wire == Wire.GLOO_DATA:
            return True
        sending = wire == Wire.GLOO_SEND_READY
        length = self.length(way if sending else 1 - way, _slot(row))
        if length is None:
            return False
        row["role"], row["announces"] = Role.OFFER if sending else Role.GRANT, length
        return True


def resolve_gloo(rows: Rows, links: Rows, flows: Rows, orders: dict[int, np.ndarray],
                 counts: HiddenCounts) -> tuple[list[np.ndarray], list[Rows]]:  # fmt: skip
    """Fill in Gloo rows in place; returns the pieces that were solved and the rows that replace them."""
    gone: list[np.ndarray] = []
    made: list[Rows] = []
    for f, order in orders.items():
        peer = int(flows["peer"][f])
        if flows["framing"][f] != Framing.GLOO or (peer in orders and peer < f):
            continue
        sides = (order, orders.get(peer, order[:0]))
        todo = [
            o[((links["known"][o] != _ALL) & (rows["wire"][o] != Wire.TCP_BURST)) | (links["piece"][o] == 1)]
            for o in sides
        ]
        if not any(len(t) for t in todo):
            continue
        connection = GlooConnection(rows, links, sides)
        rest: list[tuple[int, np.ndarray]] = []
        for way in (0, 1):
            runs = {int(run[0]): run for run in stretches(links, sides[way])}
            starts = [i for i in todo[way] if not links["piece"][i] or int(i) in runs]
            rest += [(way, runs.get(int(i), i[None])) for i in starts]
        for learnt in (False, True):
            if learnt and rest:
                connection.learn()
            left = []
            for way, run in rest:
                if not links["piece"][run[0]]:
                    solved = connection.complete(way, int(run[0]))
                    counts.headers += not learnt
                    counts.resolved += solved
                else:
                    parts = connection.solve(way, run)
                    solved = parts is not None
                    counts.stretches += not learnt
                    if parts is not None:
                        gone.append(run)
                        made.append(split(rows, run, parts))
                        counts.stretches_resolved += 1
                        counts.headers += len(parts)
                        counts.resolved += len(parts)
                if not solved:
                    left.append((way, run))
            rest = left
    return gone, made


def resolve(rows: Rows, links: Rows, flows: Rows) -> tuple[Rows, HiddenCounts]:
    """All of it: the rows with what could be inferred (``rows`` is changed), and the counts."""
    counts = HiddenCounts()
    framed = np.isin(flows["framing"][rows["flow"]], (Framing.GLOO, Framing.OB1))
    index = np.flatnonzero(framed)
    by_flow = index[np.argsort(rows["flow"][index], kind="stable")]
    cuts = np.flatnonzero(np.diff(rows["flow"][by_flow].astype(np.int64))) + 1
    orders = {int(rows["flow"][o[0]]): o for o in np.split(by_flow, cuts) if len(o)}
    gone, made = resolve_gloo(rows, links, flows, orders, counts)
    gone_ob1, made_ob1 = ob1.resolve_ob1(rows, links, flows, orders, counts)
    gone, made = gone + gone_ob1, made + made_ob1
    keep = np.ones(len(rows), bool)
    if gone:
        keep[np.concatenate(gone)] = False
    left = keep & (links["piece"] == 1)
    counts.bytes_unresolved = int((rows["seq_end"][left] - rows["seq"][left]).sum())
    new = np.concatenate(made) if made else rows[:0]
    rows = np.concatenate([rows[keep], new])
    links = np.concatenate([links[keep], np.zeros(len(new), links.dtype)])
    ob1.inherit(rows, links, flows)
    return rows, counts
