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

from dpuflow.schema.rows import NONE32, Pairing, Transport, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Found = tuple[int, int, Pairing]
    Scores = tuple[int, NDArray[np.int32], NDArray[np.int32]]  # of a flow: conflicts, echoes

ENOUGH_ACKS = 8  # before a capture's end, fewer decide nothing
SIGMAS = 3  # standard deviations by which the true one contradicts less than others
MOST_SCORES = 1 << 24  # pairs of flows that are compared; more flows stay unpaired

MOST_NAMED = 1 << 16  # QPs that a handshake named which are kept when flows are forgotten

_MAD_HEADER = 24  # common MAD header; the CM message follows (IBTA 13.4.3)
_CM_CLASS = 7
_REQ, _REP = 0x10, 0x13


def udp_port(qp: int, other_qp: int) -> int:
    """The kernel's UDP source port for a connection with flow label 0 (rdma_flow_label_to_udp_sport)."""
    v = qp * other_qp
    v ^= v >> 20
    v ^= v >> 40
    label = v & 0xFFFFF
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14))


class Sides(NamedTuple):
    """Flows between two endpoints that have no peer yet."""

    src: int
    dst: int
    ours: list[int]  # from src to dst
    theirs: list[int]  # from dst to src

    def without(self, found: list[Found]) -> Sides:
        """Those whose part in the pairs found nobody has."""
        ours, theirs = {a for a, _, _ in found}, {b for _, b, _ in found}
        return self._replace(
            ours=[flow for flow in self.ours if flow not in ours],
            theirs=[flow for flow in self.theirs if flow not in theirs],
        )

    def left(self, found: list[Found]) -> tuple[list[int], list[int]]:
        """Places of those that are in no pair found."""
        taken = {flow for a, b, _ in found for flow in (a, b)}
        ours, theirs = ([i for i, f in enumerate(each) if f not in taken] for each in self[2:])
        return ours, theirs


class Pairs:
    """The candidates of each flow, what ACKs said of them, and what has been decided.

    ``conflicts`` and ``echoes`` have a run of scores for each flow (PEER.scores), one for each flow of
    the opposite direction (``members`` from PEER.candidates to PEER.candidates_end).
    """

    def __init__(self) -> None:
        self.members = np.zeros(0, np.int32)
        self.conflicts = np.zeros(0, np.int32)
        self.echoes = np.zeros(0, np.int32)
        self._directions: dict[tuple[int, int], list[int]] = {}
        self._requests: dict[tuple[int, int, int], int] = {}  # (from, to, communication id) -> QP
        self._named: dict[tuple[int, int, int], int] = {}  # (src, dst, destination QP) -> source QP
        self._wanted = 0  # scores of all flows, were there room

    def copy(self) -> Pairs:
        """One that can decide without this one's knowing."""
        other = copy.copy(self)
        other._named = dict(self._named)
        return other

    def keep_flows(
        self, place: NDArray[np.int64], ends: NDArray[np.int64], flows: Rows, old_peers: Rows, peers: Rows
    ) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone.

        ``ends`` is the same for endpoints; ``flows`` and ``peers`` are what is left. Of the QPs that
        handshakes named the last ones are kept.
        """
        scored = []
        opposite = {}
        for (src, dst), row in self._directions.items():
            back = np.array(self._directions.get((dst, src), []), np.int64)
            opposite.update(dict.fromkeys(row, back))
        for flow, conflicts, echoes in self._layout(old_peers):
            if place[flow] >= 0:
                left = place[opposite[flow][: len(conflicts)]] >= 0
                scored.append((int(place[flow]), conflicts[left], echoes[left]))
        self._directions, self._wanted = {}, 0
        self.conflicts = self.echoes = np.zeros(0, np.int32)
        peers["candidates"] = peers["candidates_end"] = 0
        # ACKs of the flows laid out anew are counted by what is put back below.
        acks = peers["acks"].copy()
        peers["acks"] = 0
        self.add_flows(flows, peers, 0)
        self._put_back(scored, peers)
        peers["acks"] = acks
        for named in (self._requests, self._named):
            last = list(named.items())[-MOST_NAMED:]
            named.clear()
            for (src, dst, number), qp in last:
                if ends[src] >= 0 and ends[dst] >= 0:
                    named[int(ends[src]), int(ends[dst]), number] = qp

    def add_flows(self, flows: Rows, peers: Rows, known: int) -> None:
        """Lay out scores of the flows from row ``known`` on, and anew of those that may be their opposites.

        What was scored is kept. What is laid out anew stands behind the rest; where half the room has been
        given up, or there is not room for all, everything is.
        """
        touched = self._enter(flows, known)
        whole = not known or self._wanted > MOST_SCORES or len(self.conflicts) > 2 * self._wanted
        if whole:
            touched = dict.fromkeys(self._directions)
        again = np.zeros(len(peers), bool)
        again[[flow for key in touched for flow in self._directions[key]]] = True
        old = self._layout(peers[:known], again[:known])
        if whole:
            self.members = np.zeros(0, np.int32)
            self.conflicts = self.echoes = np.zeros(0, np.int32)
        members: list[int] = []
        place: dict[tuple[int, int], tuple[int, int]] = {}
        for key in touched:
            row = self._directions[key]
            at = len(self.members) + len(members)
            place[key] = (at, at + len(row))
            members += row
        total = first = len(self.conflicts)
        laid: list[tuple[int, int, int, int]] = []  # flow, its candidates, scores
        for src, dst in touched:
            start, end = place.get((dst, src), (0, 0))
            row = self._directions[src, dst]
            if total + len(row) * (end - start) > MOST_SCORES:
                start = end = 0
            for flow in row:
                laid.append((flow, start, end, total))
                total += end - start
        table = np.array(laid, np.int64).reshape(-1, 4)
        for name, column in zip(("candidates", "candidates_end", "scores"), table.T[1:], strict=True):
            peers[name][table[:, 0]] = column
        self.members = np.concatenate([self.members, np.array(members, np.int32)])
        more = np.zeros(total - first, np.int32)
        self.conflicts, self.echoes = (np.concatenate([each, more]) for each in (self.conflicts, self.echoes))
        self._put_back(old, peers)

    def _enter(self, flows: Rows, known: int) -> dict[tuple[int, int], None]:
        """Enter flows from row ``known`` on; returns the directions with new flows or new candidates."""
        touched: dict[tuple[int, int], None] = {}
        fresh = (flows["transport"][known:] == Transport.ROCE) & (flows["dest_qp"][known:] > 1)
        rows = known + np.flatnonzero(fresh)
        ends = zip(flows["src"][rows].tolist(), flows["dst"][rows].tolist(), strict=True)
        for flow, (src, dst) in zip(rows.tolist(), ends, strict=True):
            back = self._directions.get((dst, src), ())
            self._wanted += 2 * len(back) + (src == dst)
            self._directions.setdefault((src, dst), []).append(flow)
            touched[src, dst] = None
            if back:
                touched[dst, src] = None
        return touched

    def _put_back(self, scored: list[Scores], peers: Rows) -> None:
        """Give flows that were laid out anew the scores they had.

        The candidates met before keep their places: a direction's list only grows at its end. Those that are
        new had sent nothing when the ACKs so far came.
        """
        for flow, conflicts, echoes in scored:
            at, end = int(peers["scores"][flow]), int(peers["candidates_end"][flow])
            width = end - int(peers["candidates"][flow])
            kept = min(len(conflicts), width)
            self.conflicts[at : at + kept] = conflicts[:kept]
            self.conflicts[at + kept : at + width] = peers["acks"][flow]
            self.echoes[at : at + kept] = echoes[:kept]

    def _layout(self, peers: Rows, among: NDArray[np.bool_] | bool = True) -> list[Scores]:
        """Scores of the flows ``among`` all that have any and are not paired."""
        flows = np.flatnonzero((peers["acks"] > 0) & (peers["peer"] < 0) & among)
        columns = (peers[name][flows].tolist() for name in ("scores", "candidates", "candidates_end"))
        places = [slice(at, at + b - a) for at, a, b in zip(*columns, strict=True)]
        return [
            (f, self.conflicts[at], self.echoes[at]) for f, at in zip(flows.tolist(), places, strict=True)
        ]

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
    ) -> Iterator[tuple[int, int]]:
        """Pair what can be paired: sets FLOW.peer, FLOW.pairing and PEER.peer, yields each pair once.

        With ``ripe``, only flows between that flow's endpoints. ``last`` at the capture's end, when being
        the only candidate and a few ACKs must do.
        """
        if last and (peers["datagram_row"] >= 0).any():
            self._read_datagrams(flows, messages)
        peer, flow_peer, pairing = peers["peer"], flows["peer"], flows["pairing"]
        for src, dst in self._between_ends(flows, ripe):
            row, back = self._directions.get((src, dst)), self._directions.get((dst, src))
            if row is None or back is None or src > dst:
                continue
            ours, theirs = ([flow for flow in each if peer[flow] < 0] for each in (row, back))
            if not ours or not theirs:
                continue
            alone = len(ours) == len(theirs) == 1 and not self._named
            between = self._only if alone else self._between
            for a, b, how in between(Sides(src, dst, ours, theirs), flows, peers, last):
                peer[a] = flow_peer[a] = b
                peer[b] = flow_peer[b] = a
                pairing[a] = pairing[b] = how
                yield a, b

    def _between_ends(self, flows: Rows, ripe: int | None) -> list[tuple[int, int]]:
        """All directions, or the one between the endpoints of flow ``ripe``."""
        if ripe is None:
            return list(self._directions)
        ends = int(flows["src"][ripe]), int(flows["dst"][ripe])
        return [(min(ends), max(ends))]

    def _between(self, sides: Sides, flows: Rows, peers: Rows, last: bool) -> list[Found]:
        """New pairs of the flows between two endpoints."""
        found = self._by_handshake(sides, flows)
        sides = sides.without(found)
        ours, theirs = sides[2:]
        if not ours or not theirs:
            return found
        acks, conflicts, echoes = self._evidence(sides, peers)
        excluded = conflicts > np.maximum(_by_chance(conflicts, acks), 0 if last else 1)
        fits = ~excluded & (acks >= (1 if last else ENOUGH_ACKS)) & (2 * echoes >= acks)
        found += [(ours[a], theirs[b], Pairing.ACKS) for a, b in _clear_cut(fits, excluded)]
        left = sides.left(found)
        if not left[0] or not left[1]:
            return found
        grid = np.ix_(*left)
        by_port = self._ports(sides, flows)[grid] & ~excluded[grid] & ((acks[grid] >= 2) | last)
        for a, b in _clear_cut(by_port, ~by_port):
            found.append((ours[left[0][a]], theirs[left[1][b]], Pairing.UDP_PORT))
        left = sides.left(found)
        if (
            last
            and sides.src != sides.dst
            and len(left[0]) == len(left[1]) == 1
            and not excluded[np.ix_(*left)]
        ):
            found.append((ours[left[0][0]], theirs[left[1][0]], Pairing.ONLY))
        return found

    def _by_handshake(self, sides: Sides, flows: Rows) -> list[Found]:
        """Pairs whose queue pairs a handshake named."""
        by_qp = {int(flows["dest_qp"][flow]): flow for flow in sides.theirs}
        found: list[Found] = []
        for a in sides.ours:
            named = self._named.get((sides.src, sides.dst, int(flows["dest_qp"][a])), -1)
            b = by_qp.pop(named, None)
            if b is not None:
                found.append((a, b, Pairing.HANDSHAKE))
        return found

    def _only(self, sides: Sides, flows: Rows, peers: Rows, last: bool) -> list[Found]:
        """As ``_between`` of one flow each way, none of them named: where flows are many, most are such."""
        (src, dst), (a,), (b,) = sides[:2], sides.ours, sides.theirs
        acks = conflicts = echoes = 0
        for flow, other, back in ((a, b, (dst, src)), (b, a, (src, dst))):
            row = peers[flow]
            acks += int(row["acks"])
            if row["candidates_end"] > row["candidates"]:
                at = int(row["scores"]) + self._directions[back].index(other)
                conflicts += int(self.conflicts[at])
                echoes += int(self.echoes[at])
        chance = min(max(int(conflicts + SIGMAS * conflicts**0.5), acks // 16), acks // 2)
        if conflicts > max(chance, 0 if last else 1):
            return []
        if acks >= (1 if last else ENOUGH_ACKS) and 2 * echoes >= acks:
            return [(a, b, Pairing.ACKS)]
        if (acks >= 2 or last) and self._ports(sides, flows)[0, 0]:
            return [(a, b, Pairing.UDP_PORT)]
        return [(a, b, Pairing.ONLY)] if last and src != dst else []

    def _evidence(
        self, sides: Sides, peers: Rows
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """ACKs, contradictions and echoes of both flows of each pair together, (ours, theirs)."""
        src, dst, ours, theirs = sides
        shape = (len(ours), len(theirs))
        conflicts, echoes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        place_ours = {f: i for i, f in enumerate(self._directions[src, dst])}
        place_theirs = {f: i for i, f in enumerate(self._directions[dst, src])}
        at_ours, at_theirs = [place_ours[f] for f in ours], [place_theirs[f] for f in theirs]
        ways = ((ours, at_theirs, conflicts, echoes), (theirs, at_ours, conflicts.T, echoes.T))
        for mine, others, contradicted, echoed in ways:
            places = np.array(others)
            columns = (peers[name][mine].tolist() for name in ("scores", "candidates", "candidates_end"))
            for i, (scores, begin, end) in enumerate(zip(*columns, strict=True)):
                if end > begin:
                    at = scores + places
                    contradicted[i] += self.conflicts[at]
                    echoed[i] += self.echoes[at]
        acks = peers["acks"][ours].astype(np.int64)[:, None] + peers["acks"][theirs].astype(np.int64)[None, :]
        return acks, conflicts, echoes

    @staticmethod
    def _ports(sides: Sides, flows: Rows) -> NDArray[np.bool_]:
        """Where both flows have the source port that the kernel derives from their two QPs."""
        match = np.zeros((len(sides.ours), len(sides.theirs)), bool)
        for i, a in enumerate(sides.ours):
            for j, b in enumerate(sides.theirs):
                port = int(flows["sport"][a])
                if port == int(flows["sport"][b]):
                    match[i, j] = port == udp_port(int(flows["dest_qp"][a]), int(flows["dest_qp"][b]))
        return match

    def _read_datagrams(self, flows: Rows, messages: Rows) -> None:
        """Learn the source QPs of datagram flows that have a single one."""
        sent = messages[messages["wire"] == Wire.ROCE_DATAGRAM]
        both = np.unique(sent["flow"].astype(np.int64) << 32 | sent["sub"])
        named, first, times = np.unique(both >> 32, return_index=True, return_counts=True)
        for flow, source in zip(named[times == 1], both[first[times == 1]] & NONE32, strict=False):
            key = (int(flows["src"][flow]), int(flows["dst"][flow]), int(flows["dest_qp"][flow]))
            self._named.setdefault(key, int(source))


def _by_chance(conflicts: NDArray[np.int64], acks: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often ACKs may contradict the true one of each pair of flows, (ours, theirs).

    A capture that begins in mid traffic, or lost packets, contradict it now and then. Stamps that are late
    may put ACKs before what they acknowledge, as often as they contradict the best for either flow.
    """
    least = np.minimum(conflicts.min(axis=1)[:, None], conflicts.min(axis=0)[None, :])
    most: NDArray[np.int64] = (least + SIGMAS * least**0.5).astype(np.int64)
    return most.clip(acks // 16, acks // 2)


def _clear_cut(fits: NDArray[np.bool_], excluded: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Pairs that fit where every rival of one of the two is excluded.

    A pair found excludes both from all others, which may leave another with a single one.
    """
    excluded = excluded.copy()
    found: list[tuple[int, int]] = []
    while len(found) < min(fits.shape) and fits.any():
        left = ~excluded
        alone = fits & left & ((left.sum(1) == 1)[:, None] | (left.sum(0) == 1)[None, :])
        alone &= (alone.sum(1) == 1)[:, None] & (alone.sum(0) == 1)[None, :]  # two claims on one: neither
        new = [(a, b) for a, b in np.argwhere(alone).tolist()]
        if not new:
            break
        found += new
        for a, b in new:
            excluded[a, :] = True
            excluded[:, b] = True
    return found
