"""NCCL's set-up sockets among a capture's TCP flows: their first bytes kept, queue pairs and ranks read.

In: blocks of packets with FLOW rows (TCP flows paired). Out: SETUP and MEMBER rows, and which flows carry
such traffic. Layouts: ``wire.nccl``; what bytes mean: ``exchange`` (net_ib) and ``bootstrap``. A stream
counts as NCCL's when its first twelve bytes are the handshake and what follows fits; others are dropped.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.messages.bootstrap import Talk, read_bootstrap
from dpuflow.messages.exchange import Found, read_exchange
from dpuflow.schema.rows import MEMBER, NONE32, SETUP, TcpFlag
from dpuflow.wire import nccl as nw

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Block, Rows

MOST_EXCHANGE: Final = 1 << 13
"""Bytes kept of a stream of net_ib: no version's exchange is longer."""
MOST_BOOTSTRAP: Final = 1 << 20
"""Of the bootstrap's: all-gathers of some thousand ranks."""
MOST_KEPT: Final = 1 << 25
"""Of all together; beyond it the oldest streams go."""
LEAST_MAGIC: Final = 1 << 32
"""A communicator's number is 64 random bits: a smaller one is another protocol's length or type."""
MOST_IDLE: Final = 512
"""Idle sockets of the bootstrap that name ranks which are kept, the latest: jobs come and go."""
MOST_SETUPS: Final = 1 << 16
"""Queue pairs that are remembered, the latest."""

_UNKNOWN, _FOLLOWED, _OTHER = 0, 1, 2


class Named(NamedTuple):
    """Queue pairs of a connection that were told: (address of the sender, of the receiver, their numbers)."""

    src: tuple[int, int]
    dst: tuple[int, int]
    src_qp: int
    dst_qp: int


class Segment(NamedTuple):
    """A TCP segment with payload."""

    flow: int
    seq: int
    ack: int
    length: int
    captured: bytes  # of its payload


class Bytes:
    """The first bytes of one direction of a stream, as far as they were captured."""

    def __init__(self, base: int, most: int) -> None:
        self.base, self.most = base, most
        self.data, self.known = bytearray(), bytearray()
        self.first = 0  # length of the first segment
        self.length = 0  # up to where it was sent, captured or not

    def put(self, seq: int, length: int, captured: bytes) -> int:
        """Take in a segment; says by how much what is kept has grown."""
        at = (seq - self.base) & 0xFFFFFFFF
        if at >> 31:  # a keep-alive, or from before
            return 0
        if at == 0 and not self.first:
            self.first = length
        self.length = max(self.length, at + length)
        end = min(at + len(captured), self.most)
        if end <= at:
            return 0
        grown = max(0, end - len(self.data))
        self.data.extend(bytes(grown))
        self.known.extend(bytes(grown))
        self.data[at:end] = captured[: end - at]
        self.known[at:end] = b"\1" * (end - at)
        return grown

    def seen(self, at: int, count: int) -> bytes | None:
        """``count`` bytes from ``at``; None unless all were captured."""
        if at + count > len(self.data) or 0 in self.known[at : at + count]:
            return None
        return bytes(self.data[at : at + count])

    def number(self, at: int, count: int = 4) -> int | None:
        """The same as a number."""
        found = self.seen(at, count)
        return None if found is None else int.from_bytes(found, "little")


class SetupStreams:
    """Follows the set-up sockets of one capture. ``rows`` are the SETUP rows so far."""

    def __init__(self) -> None:
        self._state = np.zeros(0, np.uint8)  # by flow
        self._streams: dict[int, Bytes] = {}  # by flow
        self._clients: dict[int, int] = {}  # flow of the connecting side -> type of socket
        self._ends: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # its addresses
        self._begins: dict[int, int] = {}  # flow -> first sequence number, as the SYN or the peer told
        self._done: dict[int, int] = {}  # flows whose exchange was read, both ways -> the client
        self._rows: list[Rows] = []
        self._shared: set[int] = set()  # flows whose bytes a copy reads: put elsewhere before they change
        self._kept = self._connections = 0
        self._pending: list[Named] = []

    def feed(self, block: Block, flows: Rows, endpoints: Rows) -> None:
        """Take in a block; ``flows`` are paired as far as its packets go."""
        tcp = block.tcp
        if len(self._state) < len(flows):
            self._state = np.concatenate([self._state, np.zeros(len(flows) - len(self._state), np.uint8)])
        packet = tcp["packet"]
        flow = np.asarray(block.columns["flow"][packet])
        payload = np.asarray(block.columns["payload"][packet])
        begins = tcp["flags"] & (TcpFlag.SYN | TcpFlag.RST) == TcpFlag.SYN
        some = flow != NONE32
        of = np.where(some, flow, 0)
        wanted = some & (begins | ((payload > 0) & (self._state[of] != _OTHER)))
        touched: dict[int, int] = {}
        for row in np.flatnonzero(wanted).tolist():
            number, at = int(flow[row]), int(packet[row])
            seq = int(tcp["seq"][row])
            if begins[row]:
                self._begin(number, seq + 1)
                continue
            if self._state[number] == _OTHER:
                continue
            start, count = int(block.columns["data_at"][at]), int(block.columns["data_len"][at])
            count = min(count, int(payload[row]))
            captured = block.data[start : start + count].tobytes()
            self._take(
                Segment(number, seq, int(tcp["ack"][row]), int(payload[row]), captured), flows, endpoints
            )
            if self._state[number] == _FOLLOWED:
                client = number if number in self._clients else int(flows["peer"][number])
                if self._clients.get(client) == nw.NET_IB:
                    touched[client] = int(block.columns["time_ns"][at])
        for client, time_ns in touched.items():
            self._read_exchange(client, int(flows["peer"][client]), time_ns)

    def named(self, endpoints: Rows) -> list[tuple[int, int, int, int]]:
        """Queue pairs told since whose endpoints are both there by now: rows of these, and the numbers."""
        if not self._pending:
            return []
        place = {
            (int(high), int(low)): row
            for row, (high, low) in enumerate(
                zip(endpoints["addr_hi"].tolist(), endpoints["addr_lo"].tolist(), strict=True)
            )
        }
        found = [
            (place[each.src], place[each.dst], each.src_qp, each.dst_qp)
            for each in self._pending
            if each.src in place and each.dst in place
        ]
        self._pending = [each for each in self._pending if each.src not in place or each.dst not in place]
        return found

    def finish(self, flows: Rows) -> tuple[Rows, Rows, NDArray[np.bool_]]:
        """SETUP and MEMBER rows, and by flow whether it carries NCCL's set-up."""
        mine = np.zeros(len(flows), bool)
        mine[list(self._done)] = True
        talks = self._talks(flows)
        members, told = read_bootstrap(talks)
        magics = {talks[client].magic for client in told}
        peers = flows["peer"].tolist()  # an agent asks of a thousand old sockets each second
        for client, kind in self._clients.items():
            magic = self._streams[client].number(0, 8) if client in self._streams else None
            known = magic == nw.MAGIC and kind != nw.NET_SOCKET
            if client in told or known or (kind in (nw.BOOTSTRAP, nw.PROXY) and magic in magics):
                for flow in (client, peers[client]):
                    if flow < len(mine):
                        mine[flow] = True
        # Of many pieces finding a common type takes longer than copying them.
        rows = np.concatenate(self._rows, dtype=SETUP.dtype) if self._rows else SETUP.zeros(0)
        made = np.array(members, MEMBER.dtype) if members else MEMBER.zeros(0)
        return rows, made, mine

    def _talks(self, flows: Rows) -> dict[int, Talk]:
        """The sockets that may be the bootstrap's, by the connecting side's flow."""
        peers = flows["peer"]
        return {
            client: Talk(
                self._streams[client], self._streams.get(int(peers[client])), peers[client] != NONE32
            )
            for client, kind in self._clients.items()
            if kind == nw.BOOTSTRAP and client in self._streams
        }

    def release(self, idle: NDArray[np.bool_], flows: Rows) -> None:
        """Let go of what flows that are ``idle`` (by row) have said, unless it names ranks: of that the
        latest are kept."""
        over = [flow for flow in self._streams if flow < len(idle) and idle[flow]]
        if not over:
            return
        talks = self._talks(flows)
        _, told = read_bootstrap({client: talks[client] for client in over if client in talks})
        latest = [client for client in over if client in told][-MOST_IDLE:]
        kept = {*latest, *(int(flows["peer"][client]) for client in latest)}
        for flow in over:
            if flow not in kept:
                self._give_up(flow)

    def copy(self) -> SetupStreams:
        """One to ``finish`` in place of this, which goes on."""
        other = copy.copy(self)
        other._streams = dict(self._streams)
        self._shared = set(self._streams)
        other._clients, other._ends, other._done = dict(self._clients), dict(self._ends), dict(self._done)
        other._rows, other._pending = list(self._rows), list(self._pending)
        other._state, other._begins = self._state.copy(), dict(self._begins)
        return other

    def keep_flows(self, place: NDArray[np.int64]) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone."""

        def moved(old: Mapping[int, object]) -> dict[int, object]:
            return {int(place[flow]): kept for flow, kept in old.items() if place[flow] >= 0}

        self._state = self._state[place[: len(self._state)] >= 0]
        for name in ("_streams", "_clients", "_ends", "_begins", "_done"):
            setattr(self, name, moved(getattr(self, name)))
        self._shared = set(self._streams)
        self._kept = sum(len(stream.data) for stream in self._streams.values())

    def shift(self, step_ns: int) -> None:
        """The clock was set: move all times that are kept."""
        for rows in self._rows:
            rows["time_ns"] += step_ns

    def in_use(self) -> list[int]:
        """Flows whose exchange is not over."""
        return list(self._streams)

    def _begin(self, flow: int, seq: int) -> None:
        """A stream begins (or begins anew on the same ports)."""
        if self._begins.get(flow) == seq & 0xFFFFFFFF and self._state[flow] != _UNKNOWN:
            return  # the SYN once more
        self._drop(flow)
        self._done.pop(flow, None)
        self._state[flow] = _UNKNOWN
        self._begins[flow] = seq & 0xFFFFFFFF

    def _drop(self, flow: int) -> None:
        stream = self._streams.pop(flow, None)
        if stream is not None:
            self._kept -= len(stream.data)
        self._clients.pop(flow, None)
        self._ends.pop(flow, None)

    def _give_up(self, flow: int) -> None:
        self._drop(flow)
        self._begins.pop(flow, None)
        self._state[flow] = _OTHER

    def _take(self, segment: Segment, flows: Rows, endpoints: Rows) -> None:
        """A segment with payload of a flow that is followed, or may be."""
        flow, peer = segment.flow, int(flows["peer"][segment.flow])
        stream = self._stream_of(segment, peer)
        if stream is None:
            self._give_up(flow)
            return
        self._kept += stream.put(segment.seq, segment.length, segment.captured)
        if flow in self._clients or peer in self._clients:
            # What is kept stays: it begins long streams.
            self._state[flow] = _OTHER if stream.length > stream.most else _FOLLOWED
            return
        kind = _handshake(stream)
        if kind in (-1, nw.NET_SOCKET):
            self._give_up(flow)
        elif kind:
            self._clients[flow] = kind
            self._state[flow] = _FOLLOWED
            stream.most = MOST_EXCHANGE if kind == nw.NET_IB else MOST_BOOTSTRAP
            src, dst = int(flows["src"][flow]), int(flows["dst"][flow])
            self._ends[flow] = _address(endpoints, src), _address(endpoints, dst)
            if peer != NONE32 and peer not in self._streams:
                self._state[peer] = _UNKNOWN

    def _stream_of(self, segment: Segment, peer: int) -> Bytes | None:
        """What is kept of the segment's flow, from now on if it is the first; None: it is none of NCCL's."""
        flow = segment.flow
        stream = self._streams.get(flow)
        if stream is not None:
            if flow in self._shared:
                stream = self._streams[flow] = copy.deepcopy(stream)
                self._shared.discard(flow)
            return stream
        base, most = self._begins.get(flow), MOST_BOOTSTRAP
        if peer in self._clients:
            most = self._streams[peer].most if peer in self._streams else 0
        elif base is None:
            if segment.captured[:8] != nw.MAGIC.to_bytes(8, "little"):
                return None
            if peer != NONE32:
                self._begins.setdefault(peer, segment.ack)
        while self._kept > MOST_KEPT:
            self._give_up(next(iter(self._streams)))
        self._shared.discard(flow)
        self._streams[flow] = Bytes(segment.seq if base is None else base, most)
        return self._streams[flow]

    def _read_exchange(self, client: int, server: int, time_ns: int) -> None:
        """Read the exchange if it is whole by now."""
        if client not in self._streams or server not in self._streams:
            return
        found = read_exchange(self._streams[client], self._streams[server])
        if found is None:
            if max(self._streams[each].length for each in (client, server)) > MOST_EXCHANGE:
                self._give_up(client)  # a version that is not known
                self._give_up(server)
            return
        src, dst = self._ends[client]
        rows = _rows(found, src, dst, time_ns, self._connections)
        self._connections += 1
        self._pending += [
            Named((int(r["src_hi"]), int(r["src_lo"])), (int(r["dst_hi"]), int(r["dst_lo"])),
                  int(r["src_qp"]), int(r["dst_qp"]))
            for r in rows
        ][:nw.PAIRS]  # fmt: skip
        del self._pending[:-MOST_SETUPS]
        self._rows.append(rows)
        while sum(map(len, self._rows)) > MOST_SETUPS:
            self._rows.pop(0)
        for flow in (client, server):
            self._drop(flow)
            self._state[flow] = _OTHER
            self._done[flow] = client


def _handshake(stream: Bytes) -> int:
    """The type of socket that a stream's first bytes tell; 0: not yet, -1: it is none of NCCL's."""
    if stream.first not in (8, nw.HANDSHAKE) and stream.first < nw.HANDSHAKE:
        return -1
    magic, kind = stream.number(0, 8), stream.number(nw.TYPE_AT)
    if magic is None or magic < LEAST_MAGIC:
        return 0 if stream.length < 8 else -1
    if kind is None:
        return 0 if stream.length < nw.HANDSHAKE else -1
    return kind if nw.BOOTSTRAP <= kind <= nw.RAS else -1


def _address(endpoints: Rows, row: int) -> tuple[int, int]:
    return int(endpoints["addr_hi"][row]), int(endpoints["addr_lo"][row])


def _rows(found: Found, src: tuple[int, int], dst: tuple[int, int], time_ns: int, connection: int) -> Rows:
    """SETUP rows of an exchange between sockets of two addresses."""
    rows = SETUP.zeros(len(found.pairs))
    rows["time_ns"], rows["connection"], rows["since"], rows["mtu"] = (
        time_ns,
        connection,
        found.since,
        found.mtu,
    )
    rows["entries_va"] = found.entries_va
    for place, (row, pair) in enumerate(zip(rows, found.pairs, strict=True)):
        row["place"], row["src_qp"], row["dst_qp"] = place, pair.src_qp, pair.dst_qp
        row["entries_rkey"] = pair.rkey
        for bit, (side, gid, socket) in enumerate((("src", pair.src_gid, src), ("dst", pair.dst_gid, dst))):
            row[f"{side}_hi"], row[f"{side}_lo"] = gid or socket
            row["addressed"] |= (gid is not None) << bit
    return rows
