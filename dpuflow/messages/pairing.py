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
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from dpuflow.arrays.ordering import distinct, spans
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

        self._decide, self._lines = kernels.decide, kernels.LINES
        self.members = np.zeros(0, np.int32)
        self.conflicts = np.zeros(0, np.int32)
        self.echoes = np.zeros(0, np.int32)
        self._ways: dict[int, int] = {}  # the number of a direction, by ``_key``
        self._opposite: Ints = np.zeros(0, np.int64)  # of each direction the other one, -1 none
        self._runs: Ints = np.zeros((0, 2), np.int64)  # where the flows of each lie in ``members``
        self._make_room(0, 0)
        self._requests: dict[tuple[int, int, int], int] = {}  # (from, to, communication id) -> QP
        self._named: dict[tuple[int, int, int], int] = {}  # (src, dst, destination QP) -> source QP

    def copy(self) -> Pairs:
        """One that can decide without this one's knowing."""
        other = copy.copy(self)
        other._ways, other._requests, other._named = dict(self._ways), dict(self._requests), dict(self._named)
        other._make_room(len(self._room[0]), len(self._found))
        return other

    def _make_room(self, cells: int, most: int) -> None:
        """Room for the kernel that decides: for pairs of flows, and for the flows of a direction."""
        self._room = (np.zeros(cells, np.uint8), *np.zeros((2, self._lines, most), np.int64))
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
        old = np.diff(self._runs)[:, 0]
        size = old + np.bincount(way, minlength=len(old))
        width = np.where(self._opposite >= 0, size[self._opposite], 0)  # candidates of each direction's flows
        wanted = int((size * width).sum())
        touched = distinct(np.concatenate([way, self._opposite[way]]))
        touched = touched[touched >= 0]
        whole = not known or wanted > MOST_SCORES or len(self.conflicts) > 2 * wanted
        if whole:
            touched = np.arange(len(size))
        before = self.members[spans(self._runs[touched, 0], old[touched])]
        scored = self._scored(peers, before.astype(np.int64))
        self._make_room(int((size * width).max(initial=0)), int(size.max(initial=0)))
        if whole:
            self.members = np.zeros(0, np.int32)
            self.conflicts = self.echoes = np.zeros(0, np.int32)
        ways = np.concatenate([np.repeat(touched, old[touched]), way])
        members = np.concatenate([before, rows])[np.argsort(ways, kind="stable")]
        start = len(self.members) + np.cumsum(size[touched]) - size[touched]
        self._runs[touched] = np.stack([start, start + size[touched]], axis=1)
        self.members = np.concatenate([self.members, members.astype(np.int32)])
        self._lay_out(peers, members, np.repeat(touched, size[touched]), size, width)
        self._put_back(scored, peers)

    def _enter(self, flows: Rows, rows: Ints) -> Ints:
        """The directions of flows, new ones numbered and empty."""
        src, dst = (flows[end][rows].astype(np.int64) for end in ("src", "dst"))
        keys, first, of = np.unique(_key(src, dst), return_index=True, return_inverse=True)
        number = self._numbers(keys)
        new = np.flatnonzero(number < 0)
        new = new[np.argsort(first[new])]  # as flows come
        number[new] = np.arange(len(self._runs), len(self._runs) + len(new))
        self._ways.update(zip(keys[new].tolist(), number[new].tolist(), strict=True))
        other = self._numbers(_key(dst[first[new]], src[first[new]]))
        self._opposite = np.concatenate([self._opposite, other])
        self._opposite[other[other >= 0]] = number[new][other >= 0]
        self._runs = np.concatenate([self._runs, np.zeros((len(new), 2), np.int64)])
        return number[of]

    def _numbers(self, keys: Ints) -> Ints:
        """The numbers of directions, -1 for those not met."""
        return np.fromiter(map(self._ways.get, keys.tolist(), repeat(-1)), np.int64, len(keys))

    def _lay_out(self, peers: Rows, members: Ints, way: Ints, size: Ints, width: Ints) -> None:
        """Give flows of directions ``way`` their candidates, and scores behind those there are.

        Directions for which there is no room left have none.
        """
        total = len(self.conflicts)
        if total + int(width[way].sum()) > MOST_SCORES:
            width = width.copy()
            for each in distinct(way).tolist():
                if total + size[each] * width[each] > MOST_SCORES:
                    width[each] = 0
                total += int(size[each] * width[each])
        start = np.where(width > 0, self._runs[self._opposite, 0], 0)
        end = np.cumsum(width[way])
        peers["candidates"][members] = start[way]
        peers["candidates_end"][members] = (start + width)[way]
        peers["scores"][members] = len(self.conflicts) + end - width[way]
        more = np.zeros(int(end[-1]) if len(end) else 0, np.int32)
        self.conflicts, self.echoes = (np.concatenate([each, more]) for each in (self.conflicts, self.echoes))

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
        if ripe is None:
            ways = np.flatnonzero(self._opposite >= np.arange(len(self._opposite)))
            found = np.zeros((len(peers), 2), np.int64)
        else:
            src, dst = int(flows["src"][ripe]), int(flows["dst"][ripe])
            both = _key(src, dst) in self._ways and _key(dst, src) in self._ways
            ways = np.array([self._ways[_key(src, dst)]] if both else [], np.int64)
            found = self._found
        sides = np.stack((ways, self._opposite[ways]), axis=1)
        named = self._by_handshake(flows, peers, ripe)
        count = self._decide(
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
        way = self._ways.get(_key(*ends))
        members = self.members[:0] if way is None else self.members[slice(*self._runs[way])]
        return members[peers["peer"][members] < 0]

    def _read_datagrams(self, flows: Rows, messages: Rows) -> None:
        """Learn the source QPs of datagram flows that have a single one."""
        sent = messages[messages["wire"] == Wire.ROCE_DATAGRAM]
        both = distinct(sent["flow"].astype(np.int64) << 32 | sent["sub"])
        named, first, times = np.unique(both >> 32, return_index=True, return_counts=True)
        for flow, source in zip(named[times == 1], both[first[times == 1]] & NONE32, strict=False):
            key = (int(flows["src"][flow]), int(flows["dst"][flow]), int(flows["dest_qp"][flow]))
            self._named.setdefault(key, int(source))


@overload
def _key(src: int, dst: int) -> int: ...
@overload
def _key(src: Ints, dst: Ints) -> Ints: ...
def _key(src: int | Ints, dst: int | Ints) -> int | Ints:
    """Two endpoints in one number."""
    return src << 32 | dst


def _scores(peers: Rows, flows: Ints) -> tuple[Ints, Ints, Ints]:
    """Where the flows' scores lie, how many they are, and of how many ACKs."""
    columns = (
        peers[name][flows].astype(np.int64) for name in ("scores", "candidates", "candidates_end", "acks")
    )
    at, start, end, acks = columns
    return at, end - start, acks
