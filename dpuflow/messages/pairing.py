"""Which flow is the opposite of which, told from traffic alone or from a handshake.

Packets name their destination QP only, so the flow A to B (destination QP b) does not say which of the
flows B to A answers it. Evidence, strongest first: CM REQ and REP, or NCCL's exchange over TCP (``setups``),
name both QPs; a datagram's DETH names its source QP; ACKs can only name PSNs that the opposite flow has sent
already, so each wrong candidate is contradicted sooner or later; a UDP source port that is the kernel's hash
of both QPs; being the only candidate. Where two candidates fit alike, none is chosen.
InfiniBand volume 1, 9.7.5 (ACK), 12.6 (CM messages).
"""

from __future__ import annotations

import copy
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, spans
from dpuflow.messages.growing import longer
from dpuflow.schema.rows import NONE32, Pairing, Transport, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

MOST_SCORES = 1 << 24  # pairs of flows that are compared; more flows stay unpaired

MOST_NAMED = 1 << 16  # QPs that a handshake named which are kept when flows are forgotten

_MAD_HEADER = 24  # common MAD header; the CM message follows (IBTA 13.4.3)
_CM_CLASS = 7
_REQ, _REP = 0x10, 0x13


class Scores(NamedTuple):
    """What ACKs said of flows' candidates, a run for each flow."""

    flow: Ints
    width: Ints
    conflicts: NDArray[np.int32]
    echoes: NDArray[np.int32]


class Pairs:
    """The candidates of each flow, what ACKs said of them, and what has been decided.

    ``conflicts`` and ``echoes`` have a run of scores for each flow (PEER.scores), one for each flow of
    the opposite direction (``members`` from PEER.candidates to PEER.candidates_end).
    """

    def __init__(self) -> None:
        from dpuflow.kernels import pairing as kernels

        self._kernels = kernels
        self.members = np.zeros(0, np.int32)
        self.conflicts = np.zeros(0, np.int32)
        self.echoes = np.zeros(0, np.int32)
        # Of each direction where its flows lie in ``members``, its ends, and the opposite one.
        self._runs: Ints = np.zeros((0, kernels.WAY), np.int64)
        self._slots = np.full(64, -1, np.int32)  # what finds a direction by its ends
        self._wanted = 0  # scores of all of them
        self._room = (np.zeros(0, np.uint8), *np.zeros((2, self._kernels.LINES, 0), np.int64))
        self._found = np.zeros((0, 2), np.int64)
        self._requests: dict[tuple[int, int, int], int] = {}  # (from, to, communication id) -> QP
        self._named: dict[tuple[int, int, int], int] = {}  # (src, dst, destination QP) -> source QP

    def copy(self) -> Pairs:
        """One that can decide without this one's knowing."""
        other = copy.copy(self)
        other._requests, other._named = dict(self._requests), dict(self._named)
        for name in ("members", "conflicts", "echoes", "_runs", "_slots"):
            setattr(other, name, getattr(self, name).copy())
        other._room, other._found = tuple(map(np.copy, self._room)), self._found.copy()
        return other

    def _make_room(self, cells: int, most: int) -> None:
        """Room for the kernel that decides: for pairs of flows, and for the flows of a direction."""
        if cells > len(self._room[0]):
            self._room = np.zeros(cells, np.uint8), *self._room[1:]
        if most > len(self._found):
            self._room = self._room[0], *np.zeros((2, self._kernels.LINES, most), np.int64)
            self._found = np.zeros((most, 2), np.int64)

    def keep_flows(self, place: Ints, ends: Ints, flows: Rows, old_peers: Rows, peers: Rows) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone.

        ``ends`` is the same for endpoints; ``flows`` and ``peers`` are what is left. Of the QPs that
        handshakes named the last ones are kept.
        """
        scored = self._scored(old_peers, np.flatnonzero(place[: len(old_peers)] >= 0))
        left = place[self.members[spans(old_peers["candidates"][scored.flow], scored.width)]] >= 0
        of = np.repeat(np.arange(len(scored.flow)), scored.width)[left]
        count = np.bincount(of, minlength=len(scored.flow))
        scored = Scores(place[scored.flow], count, scored.conflicts[left], scored.echoes[left])
        named = self._requests, self._named
        self.__init__()  # type: ignore[misc]
        peers["candidates"] = peers["candidates_end"] = 0
        # ACKs of the flows laid out anew are counted by what is put back below.
        acks = peers["acks"].copy()
        peers["acks"] = 0
        self.add_flows(flows, peers, 0)
        self._put_back(scored, peers)
        peers["acks"] = acks
        self._requests, self._named = (
            {
                (int(ends[src]), int(ends[dst]), number): qp
                for (src, dst, number), qp in list(each.items())[-MOST_NAMED:]
                if ends[src] >= 0 and ends[dst] >= 0
            }
            for each in named
        )

    def add_flows(self, flows: Rows, peers: Rows, known: int) -> None:
        """Lay out scores of the flows from row ``known`` on, and anew of those that may be their opposites.

        What was scored is kept. What is laid out anew stands behind the rest; where half the room has been
        given up, or there is not room for all, everything is.
        """
        fresh = (flows["transport"][known:] == Transport.ROCE) & (flows["dest_qp"][known:] > 1)
        rows = known + np.flatnonzero(fresh)
        way = self._enter(flows, rows)
        touched = distinct(np.concatenate([way, self._runs[way, self._kernels.OPPOSITE]]))
        touched = touched[touched >= 0]
        old, size, width = self._sizes(touched, way)
        self._wanted += int((size * width - old * self._opposites(touched, old)).sum())
        whole = not known or self._wanted > MOST_SCORES or len(self.conflicts) > 2 * self._wanted
        if whole:
            touched = np.arange(len(self._runs))
            old, size, width = self._sizes(touched, way)
        before = self.members[spans(self._runs[touched, 0], old)]
        scored = self._scored(peers, before.astype(np.int64))
        self._make_room(int((size * width).max(initial=0)), int(size.max(initial=0)))
        if whole:
            self.members = np.zeros(0, np.int32)
            self.conflicts = self.echoes = np.zeros(0, np.int32)
        ways = np.concatenate([np.repeat(touched, old), way])
        members = np.concatenate([before, rows])[np.argsort(ways, kind="stable")]
        start = len(self.members) + np.cumsum(size) - size
        self._runs[touched, 0], self._runs[touched, 1] = start, start + size
        self.members = longer(self.members, len(members))
        self.members[len(self.members) - len(members) :] = members
        self._lay_out(peers, members, touched, size, width)
        self._put_back(scored, peers)

    def _sizes(self, touched: Ints, way: Ints) -> tuple[Ints, Ints, Ints]:
        """Of directions how many flows they had, have with those of ``way``, and their opposites have."""
        old = self._runs[touched, 1] - self._runs[touched, 0]
        size = old + np.bincount(np.searchsorted(touched, way), minlength=len(touched))
        return old, size, self._opposites(touched, size)

    def _opposites(self, touched: Ints, size: Ints) -> Ints:
        """The ``size`` of the opposite of each of these directions, 0 without."""
        other = self._runs[touched, self._kernels.OPPOSITE]
        return np.where(other >= 0, size[np.searchsorted(touched, other) % max(len(touched), 1)], 0)

    def _enter(self, flows: Rows, rows: Ints) -> Ints:
        """The directions of flows, new ones numbered and empty."""
        runs, way = longer(self._runs, len(rows)), np.empty(len(rows), np.int64)
        if 2 * len(runs) > len(self._slots):
            self._slots = np.full(4 << len(runs).bit_length(), -1, np.int32)
            self._kernels.refill(self._slots, self._runs)
        count = self._kernels.enter(flows, rows, self._slots, runs, len(self._runs), way)
        self._runs = runs[:count]
        return way

    def _way(self, src: int, dst: int) -> int:
        """The number of a direction, -1 if not met."""
        return int(self._kernels.way_of(self._slots, self._runs, src << 32 | dst))

    def _lay_out(self, peers: Rows, members: Ints, ways: Ints, size: Ints, width: Ints) -> None:
        """Give the flows of directions ``ways`` their candidates, and scores behind those there are.

        Directions for which there is no room left have none.
        """
        total = len(self.conflicts)
        if total + int((size * width).sum()) > MOST_SCORES:
            for at, cells in enumerate((size * width).tolist()):
                if total + cells > MOST_SCORES:
                    width[at] = cells = 0
                total += cells
        start = np.where(width > 0, self._runs[self._runs[ways, self._kernels.OPPOSITE], 0], 0)
        of = np.repeat(width, size)
        end = np.cumsum(of)
        peers["candidates"][members] = np.repeat(start, size)
        peers["candidates_end"][members] = np.repeat(start + width, size)
        peers["scores"][members] = len(self.conflicts) + end - of
        more = int(end[-1]) if len(end) else 0
        self.conflicts, self.echoes = longer(self.conflicts, more), longer(self.echoes, more)

    def _put_back(self, scored: Scores, peers: Rows) -> None:
        """Give flows that were laid out anew the scores they had.

        The candidates met before keep their places: a direction's flows only grow at their end. Those that
        are new had sent nothing when the ACKs so far came.
        """
        at, width, acks = _scores(peers, scored.flow)
        kept = np.minimum(scored.width, width)
        self.conflicts[spans(at, width)] = np.repeat(acks, width)
        old, new = spans(np.cumsum(scored.width) - scored.width, kept), spans(at, kept)
        self.conflicts[new], self.echoes[new] = scored.conflicts[old], scored.echoes[old]

    def _scored(self, peers: Rows, flows: Ints) -> Scores:
        """Scores of those flows that have any and are not paired."""
        flows = flows[(peers["acks"][flows] > 0) & (peers["peer"][flows] < 0)]
        at, width, _ = _scores(peers, flows)
        places = spans(at, width)
        return Scores(flows, width, self.conflicts[places], self.echoes[places])

    def name(self, src: int, dst: int, src_qp: int, dst_qp: int) -> None:
        """A handshake named the queue pairs of a connection between two endpoints."""
        self._named[src, dst, dst_qp] = src_qp
        self._named[dst, src, src_qp] = dst_qp

    def named(self, flows: Rows, known: int) -> list[int]:
        """Flows from row ``known`` on whose QPs a handshake has named."""
        if not self._named:
            return []
        keys = zip(*(flows[name][known:].tolist() for name in ("src", "dst", "dest_qp")), strict=True)
        return [known + i for i, key in enumerate(keys) if key in self._named]

    def read_mad(self, message: Rows, flows: Rows, payload: bytes) -> bool:
        """Take in a datagram to QP 1: set the message's tag (attribute), learn QPs from REQ and REP.

        ``message`` is a slice of one row. Says whether both QPs of a connection became known; where the
        snap length hides them, nothing is learnt.
        """
        if len(payload) < _MAD_HEADER or payload[1] != _CM_CLASS:
            return False
        attribute = int.from_bytes(payload[16:18], "big")
        message["tag"] = attribute
        body = payload[_MAD_HEADER:]
        flow = int(message["flow"][0])
        src, dst = int(flows["src"][flow]), int(flows["dst"][flow])
        if attribute == _REQ and len(body) >= 35:
            (ours,) = struct.unpack_from(">I", body, 0)
            self._requests[src, dst, ours] = int.from_bytes(body[32:35], "big")
        elif attribute == _REP and len(body) >= 15:
            (asked,) = struct.unpack_from(">I", body, 4)
            qp = self._requests.get((dst, src, asked))
            if qp is not None:
                replied = int.from_bytes(body[12:15], "big")
                self._named[dst, src, replied] = qp  # the requester's flow goes to the replier's QP
                self._named[src, dst, qp] = replied
                return True
        return False

    def decide(
        self, flows: Rows, peers: Rows, messages: Rows, ripe: int | None = None, last: bool = False
    ) -> Ints:
        """Pair what can be paired: sets FLOW.peer, FLOW.pairing and PEER.peer, returns the pairs, (n, 2).

        With ``ripe``, only flows between that flow's endpoints. ``last`` at the capture's end, when being
        the only candidate and a few ACKs must do.
        """
        if last and (peers["datagram_row"] >= 0).any():
            self._read_datagrams(flows, messages)
        opposite = self._runs[:, self._kernels.OPPOSITE]
        if ripe is None:
            ways = np.flatnonzero(opposite >= np.arange(len(opposite)))
            sides, found = np.stack((ways, opposite[ways]), axis=1), np.zeros((len(peers), 2), np.int64)
        else:
            way, found = self._way(int(flows["src"][ripe]), int(flows["dst"][ripe])), self._found
            sides = np.array([[way, opposite[way]]] if way >= 0 and opposite[way] >= 0 else [], np.int64)
            sides = sides.reshape(-1, 2)
        named = self._by_handshake(flows, peers, ripe)
        count = self._kernels.decide(
            sides, self._runs, self.members, self.conflicts, self.echoes, peers, flows, int(last),
            *self._room, found,
        )  # fmt: skip
        return np.concatenate([named, found[:count]])

    def _by_handshake(self, flows: Rows, peers: Rows, ripe: int | None) -> Ints:
        """Pair flows whose queue pairs a handshake named."""
        if not self._named:
            return np.zeros((0, 2), np.int64)
        of = self._named if ripe is None else [sorted((int(flows["src"][ripe]), int(flows["dst"][ripe])))]
        found = []
        for src, dst in {(src, dst) for src, dst, *_ in of if src <= dst}:
            ours, theirs = (self._unpaired(each, peers) for each in ((src, dst), (dst, src)))
            if not len(ours) or not len(theirs):  # as most that an agent has held for a while
                continue
            by_qp = dict(zip(flows["dest_qp"][theirs].tolist(), theirs.tolist(), strict=True))
            for a, qp in zip(ours.tolist(), flows["dest_qp"][ours].tolist(), strict=True):
                b = by_qp.pop(self._named.get((src, dst, qp), -1), None)
                if b is not None:
                    found.append((a, b))
        pairs = np.array(found, np.int64).reshape(-1, 2)
        for a, b in (pairs.T, pairs[:, ::-1].T):
            peers["peer"][a] = flows["peer"][a] = b
            flows["pairing"][a] = Pairing.HANDSHAKE
        return pairs

    def _unpaired(self, ends: tuple[int, int], peers: Rows) -> NDArray[np.int32]:
        """Flows of a direction that have no peer yet."""
        way = self._way(*ends)
        members = self.members[:0] if way < 0 else self.members[slice(*self._runs[way, :2])]
        return members[peers["peer"][members] < 0]

    def _read_datagrams(self, flows: Rows, messages: Rows) -> None:
        """Learn the source QPs of datagram flows that have a single one."""
        sent = messages[messages["wire"] == Wire.ROCE_DATAGRAM]
        both = distinct(sent["flow"].astype(np.int64) << 32 | sent["sub"])
        named, first, times = np.unique(both >> 32, return_index=True, return_counts=True)
        for flow, source in zip(named[times == 1], both[first[times == 1]] & NONE32, strict=False):
            key = (int(flows["src"][flow]), int(flows["dst"][flow]), int(flows["dest_qp"][flow]))
            self._named.setdefault(key, int(source))


def _scores(peers: Rows, flows: Ints) -> tuple[Ints, Ints, Ints]:
    """Where the flows' scores lie, how many they are, and of how many ACKs."""
    columns = (
        peers[name][flows].astype(np.int64) for name in ("scores", "candidates", "candidates_end", "acks")
    )
    at, start, end, acks = columns
    return at, end - start, acks
