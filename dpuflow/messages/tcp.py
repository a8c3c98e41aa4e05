"""Blocks of TCP packets -> FLOW counters and MESSAGE rows (RFC 9293; headers in ``framing``).

Bytes are followed by sequence number, so a message's extent is known from the headers that were
captured even where its payload was not. Headers that lie beyond the snap length are inferred at
the end (``hidden``) where the protocol leaves no choice.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.framing import HEADER_BYTES
from dpuflow.messages.hidden import resolve
from dpuflow.messages.retained import moved, nearest_kept, onto_kept, places, shift_frames, shift_times
from dpuflow.messages.setups import SetupStreams
from dpuflow.messages.stretches import HiddenCounts
from dpuflow.schema.rows import (
    MEMBER,
    MESSAGE,
    NEVER,
    SETUP,
    Framing,
    MessageFlag,
    Pairing,
    Role,
    Transport,
    Wire,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Block, Rows


_TIMES = (
    "first_ns", "last_ns", "delivered_ns", "max_ack_ns", "beyond_ns", "timed_ns", "opened_ns", "seen_ns",
)  # fmt: skip
_FRAMES = ("first_frame", "last_frame", "delivered_frame")


_FREE_ROWS: Final = 1 << 15
"""Messages of any kind that are kept, whatever they are made of."""
_ROW_BYTES: Final = 64
"""Captured bytes for each message beyond: with it and what is inferred from it, 4 KB are kept."""


def _both_ways(rows: Rows, flows: Rows) -> NDArray[np.bool_]:
    """By flow whether both directions carry sizes with messages: NCCL's data goes one way on a connection.

    What goes both ways is its bootstrap, its proxies' or its RAS threads', whose beginnings were not seen.
    """
    framed = np.zeros(len(flows) + 1, bool)  # the last one: a flow without a peer
    framed[rows["flow"][rows["wire"] == Wire.NCCL_DATA]] = True
    both: NDArray[np.bool_] = framed[:-1] & framed[np.minimum(flows["peer"], len(flows))]
    return both


def _mark_setups(rows: Rows, setup: NDArray[np.bool_]) -> None:
    """Messages of flows that set NCCL's connections up, whatever their bytes were taken for."""
    mine = setup[rows["flow"]]
    rows["wire"][mine], rows["role"][mine] = Wire.NCCL_SETUP, Role.CONTROL
    for name in ("op", "tag", "sub", "context", "announces", "va"):
        rows[name][mine] = 0
    rows["flags"][mine] &= ~np.uint8(MessageFlag.HIDDEN)


def _grown(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """``array`` with room for ``rows`` elements, the new ones zero."""
    bigger = np.zeros(rows, array.dtype)
    bigger[: len(array)] = array
    return bigger


class TcpMessages:
    """Follows all TCP streams of one capture; what it keeps grows with flows and messages.

    ``feed`` takes the blocks in order, ``finish`` ends the capture and gives the MESSAGE rows.
    """

    def __init__(self) -> None:
        from dpuflow.kernels import tcp, tcp_state

        self.hidden = HiddenCounts()
        self.setups = SetupStreams()
        self.members: Rows = MEMBER.zeros(0)  # after ``finish``, as are the next
        self.told: Rows = SETUP.zeros(0)
        self._kernels, self._state = tcp, tcp_state
        self._flows = 0
        self.barred = 0  # streams whose messages are too many and too small to be kept
        self._ends: dict[tuple[int, int, int, int], int] = {}
        self._streams: Rows = np.zeros(0, tcp_state.STREAM)
        self._header: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._rows = MESSAGE.zeros(1024)
        self._links = np.zeros(1024, tcp_state.LINK)
        self._counts = np.zeros(4, np.int64)
        self._width = 64
        self._held: Rows = np.zeros(0, tcp_state.HELD)
        self._held_data: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._counts[tcp_state.FREE_SLOT] = -1
        self._more_slots(64)

    def feed(self, block: Block, flows: Rows, endpoints: Rows | None = None) -> None:
        """Take a block; its column ``flow`` refers to rows of ``flows``, and these to ``endpoints``.

        Pairs new flows in place. Without ``endpoints`` NCCL's set-up is not read.
        """
        if len(block.tcp) == 0:
            return
        self._new_flows(flows)
        if endpoints is not None:
            self.setups.feed(block, flows, endpoints)
        columns = [block.columns[name][: block.rows] for name in
                   ("time_ns", "frame", "flow", "payload", "data_at", "data_len", "tos")]  # fmt: skip
        data = block.data if block.data.flags.writeable else block.data.copy()
        kernels, state, at = self._kernels, self._state, 0
        while True:
            at = kernels.follow(
                at, *columns, data, block.tcp, self._streams, self._header, self._rows,
                self._links, self._held, self._held_data, self._width, self._counts,
            )  # fmt: skip
            want = self._counts[state.WANT]
            if want == state.DONE:
                return
            if want == state.MORE_ROWS:
                self._bar()
                self._more_rows(0)
            elif want == state.MORE_SLOTS:
                self._more_slots(2 * len(self._held))
            else:
                self._widen()

    def finish(self, flows: Rows) -> Rows:
        """End the capture: MESSAGE rows in order of completion; ``flows`` gets its counters."""
        kernels, state = self._kernels, self._state
        self._new_flows(flows)
        room = int(self._streams["held_seen"].sum()) // state.MIN_MESSAGE
        self._more_rows(
            room + state.PER_SEGMENT * (int(self._streams["held_count"].sum()) + len(self._streams))
        )
        kernels.end_all(
            self._streams, self._header, self._rows, self._links, self._held, self._held_data,
            self._width, self._counts,
        )  # fmt: skip
        kernels.settle(self._streams, self._rows, self._links)
        count = int(self._counts[state.ROWS])
        self._report(flows, self._rows[:count])
        self.told, self.members, setup = self.setups.finish(flows)
        setup |= _both_ways(self._rows[:count], flows)
        # Its round trips are hosts', not the job's.
        flows["framing"][setup], flows["rtt_min_ns"][setup] = Framing.NCCL, NEVER
        _mark_setups(self._rows[:count], setup)
        self._mark_heads(flows, self._rows[:count])
        room = max(self._most_rows() - count, 0)
        rows, self.hidden = resolve(self._rows[:count], self._links[:count], flows, room)
        self._mark_openings(flows, rows)
        flows["messages"] += np.bincount(rows["flow"], minlength=len(flows)).astype(np.uint32)
        return rows[np.argsort(rows["last_ns"], kind="stable")]

    def copy(self) -> TcpMessages:
        """One to ``finish`` in place of this, which goes on: what the capture comes to so far."""
        count = int(self._counts[self._state.ROWS])
        other = copy.copy(self)
        other._streams, other._header = self._streams.copy(), self._header.copy()
        other._rows, other._links = self._rows[:count].copy(), self._links[:count].copy()
        other._held, other._held_data = self._held.copy(), self._held_data.copy()
        other._counts, other._ends = self._counts.copy(), dict(self._ends)
        other.setups = self.setups.copy()
        return other

    def forget(self, before_ns: NDArray[np.int64], flows: Rows) -> None:
        """Let go of messages that ended before ``before_ns`` of their flow; ``flows`` keeps their number.

        What comes later is told as if they were still here, but that they are not mended by it.
        """
        count = int(self._counts[self._state.ROWS])
        rows, links, streams = self._rows[:count], self._links[:count], self._streams
        keep = rows["last_ns"] >= before_ns[rows["flow"]]
        if keep.all():
            return
        told = rows["flow"][~keep & (links["piece"] == 0)]
        flows["messages"] += np.bincount(told, minlength=len(flows)).astype(np.uint32)
        # What was captured goes along with what it told.
        held, here = (
            np.bincount(rows["flow"][which], minlength=len(streams)) for which in (keep, slice(None))
        )
        streams["total_seen"] = streams["total_seen"] * (held / np.maximum(here, 1))
        place = places(keep)
        back, on = nearest_kept(links["prev"], keep), nearest_kept(links["next"], keep)
        links["prev"], links["next"] = moved(back, place), moved(on, place)
        for name in ("last_row", "trial"):
            streams[name] = onto_kept(streams[name], back, keep, place)
        streams["unacked"] = onto_kept(streams["unacked"], on, keep, place)
        left = int(keep.sum())
        room = max(1024, 2 * left)
        kept_rows, kept_links = MESSAGE.zeros(room), np.zeros(room, self._state.LINK)
        kept_rows[:left], kept_links[:left] = rows[keep], links[keep]
        del rows, links
        self._rows, self._links = kept_rows, kept_links
        self._counts[self._state.ROWS] = left

    def keep_flows(self, place: NDArray[np.int64], flows: Rows) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone.

        ``flows`` are those that are left. Of those gone no message may be held.
        """
        kept = np.flatnonzero(place[: self._flows] >= 0)
        self._free_slots(np.flatnonzero(place[: self._flows] < 0))
        rows = self._rows[: self._counts[self._state.ROWS]]
        rows["flow"] = place[rows["flow"]]
        self.setups.keep_flows(place)
        self._streams = self._streams[kept]
        self._streams["peer"] = moved(self._streams["peer"], place)
        self._header = self._header.reshape(-1, HEADER_BYTES)[kept].reshape(-1)
        self._flows = len(kept)
        tcp = np.flatnonzero(flows["transport"][: len(kept)] == Transport.TCP)
        columns = (flows[name][tcp].tolist() for name in ("src", "dst", "sport", "dport"))
        self._ends = dict(zip(zip(*columns, strict=True), tcp.tolist(), strict=True))

    def _free_slots(self, gone: NDArray[np.int64]) -> None:
        """Give up the segments of these flows that stand behind one that never came."""
        counts, state = self._counts, self._state
        for flow in gone[self._streams["held"][gone] >= 0].tolist():
            stream = self._streams[flow]
            self._held["next"][stream["held_tail"]] = counts[state.FREE_SLOT]
            counts[state.FREE_SLOT] = stream["held"]
            counts[state.SLOTS_USED] -= stream["held_count"]

    def shift(self, step_ns: int) -> None:
        """The clock was set: move all times that are kept."""
        self.setups.shift(step_ns)
        shift_times(
            self._rows[: self._counts[self._state.ROWS]], ("first_ns", "last_ns", "acked_ns"), step_ns
        )
        shift_times(self._streams, _TIMES, step_ns, (0,))
        shift_times(self._held, ("time_ns",), step_ns, (0,))

    def renumber(self, frames: int) -> None:
        """Take ``frames`` off all numbers of frames, before they reach 31 bits."""
        shift_frames(self._rows[: self._counts[self._state.ROWS]], ("first_frame", "last_frame"), frames)
        shift_frames(self._streams, _FRAMES, frames)
        shift_frames(self._held, ("frame",), frames)

    def in_use(self, over: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Per flow whether it holds messages, has one on its way, or segments behind one that is missing.

        What was on its way in flows that are ``over`` never ends: it does not count.
        """
        streams = self._streams[: self._flows]
        used: NDArray[np.bool_] = (streams["start"] >= 0) | (streams["held_count"] > 0)
        used[over[: len(used)].nonzero()] = False
        used[self._rows["flow"][: self.held()]] = True
        used[self.setups.in_use()] = True
        return used

    def held(self) -> int:
        """Messages that are held."""
        return int(self._counts[self._state.ROWS])

    def ends(self) -> NDArray[np.int64]:
        """When each of them ended, so far."""
        ends: NDArray[np.int64] = self._rows[: self.held()]["last_ns"].copy()
        return ends

    def _new_flows(self, flows: Rows) -> None:
        """Make streams for flows not seen before, and pair them by their 4-tuple."""
        old, new = self._flows, len(flows)
        if new == old:
            return
        if new > len(self._streams):
            room = max(new, 2 * len(self._streams), 16)
            self._header = _grown(self._header, room * HEADER_BYTES)
            self._streams = _grown(self._streams, room)
            fresh = self._streams[old:]
            for name in ("peer", "held", "held_tail", "last_row", "unacked", "window"):
                fresh[name] = -1
            fresh["start"] = fresh["rtt_min"] = -1
        for row in np.flatnonzero(flows["transport"][old:] == Transport.TCP) + old:
            flow = flows[row]
            src, dst, sport, dport = (int(flow[name]) for name in ("src", "dst", "sport", "dport"))
            self._ends[src, dst, sport, dport] = int(row)
            peer = self._ends.get((dst, src, dport, sport))
            if peer is not None and peer != row:
                for one, other in ((int(row), peer), (peer, int(row))):
                    self._streams["peer"][one] = flows["peer"][one] = other
                    flows["pairing"][one] = Pairing.PORTS
        self._flows = new

    def _bar(self) -> None:
        """Streams that tell more messages than their bytes can be worth are bursts from here on.

        Headers of four bytes that announce nothing may follow each other for ever: no library sends so.
        """
        streams, told = self._streams, int(self._counts[self._state.ROWS])
        if told <= self._most_rows():
            return
        of = np.bincount(self._rows["flow"][:told], minlength=len(streams))
        dense = (streams["barred"] == 0) & (of > streams["total_seen"] // _ROW_BYTES)
        framed = dense & (streams["mode"] != self._state.BURST)
        streams["barred"][dense] = 1
        streams["mode"][framed] = self._state.BURST
        self.barred += int(dense.sum())

    def _most_rows(self) -> int:
        """So many messages, read or inferred, are worth what is kept of them."""
        return _FREE_ROWS + int(self._streams["total_seen"].sum()) // _ROW_BYTES

    def _more_rows(self, extra: int) -> None:
        room = max(2 * len(self._rows), len(self._rows) + extra)
        # In place: the pages that are there stay where they are, which a copy would double.
        self._rows.resize(room, refcheck=False)
        self._links.resize(room, refcheck=False)

    def _more_slots(self, slots: int) -> None:
        first = len(self._held)
        self._held = _grown(self._held, slots)
        self._held_data = _grown(self._held_data, slots * self._width)
        self._held["next"][first:] = np.arange(first + 1, slots + 1)
        self._held["next"][-1] = self._counts[self._state.FREE_SLOT]
        self._counts[self._state.FREE_SLOT] = first

    def _widen(self) -> None:
        wide = min(2 * self._width, self._state.MAX_WIDTH)
        data = np.zeros((len(self._held), wide), np.uint8)
        data[:, : self._width] = self._held_data.reshape(-1, self._width)
        self._held_data, self._width = data.reshape(-1), wide

    def _report(self, flows: Rows, rows: Rows) -> None:
        """Write what was counted into the FLOW rows."""
        tcp = flows["transport"] == Transport.TCP
        streams = self._streams[: len(flows)]
        for column, name in (
            ("packets", "total_packets"),
            ("bytes", "total_bytes"),
            ("ecn_marked", "total_ecn"),
            ("retransmitted", "total_retransmitted"),
            ("out_of_order", "total_out_of_order"),
            ("missing", "total_missing"),
            ("zero_window", "total_zero_window"),
            ("spurious", "total_spurious"),
            ("closed", "closed"),
        ):
            flows[column][tcp] = streams[name][tcp]
        seen = tcp & (streams["total_packets"] > 0)
        flows["first_ns"][seen], flows["last_ns"][seen] = streams["opened_ns"][seen], streams["seen_ns"][seen]
        flows["rtt_min_ns"][tcp] = np.where(streams["rtt_min"] < 0, NEVER, streams["rtt_min"])[tcp]
        spoke = np.bincount(rows["flow"], minlength=len(flows)) > 0
        unframed = np.where(spoke, int(Framing.NONE), int(Framing.UNKNOWN))
        flows["framing"][tcp] = np.where(streams["framing"] > 0, streams["framing"], unframed)[tcp]
        paired = tcp & (streams["peer"] >= 0)
        flows["peer"][paired] = streams["peer"][paired]
        flows["pairing"][paired] = Pairing.PORTS

    def _mark_openings(self, flows: Rows, rows: Rows) -> None:
        """A connection's first message that tags name, where the capture holds the connection's beginning."""
        named = np.flatnonzero((rows["wire"] == Wire.TAGGED) & np.isin(rows["role"], (Role.DATA, Role.OFFER)))
        named = named[np.lexsort((rows["seq"][named], rows["flow"][named]))]
        flow, first = np.unique(rows["flow"][named], return_index=True)
        # Of a flow of which messages are forgotten, that one is gone.
        begun = (self._streams["whole"][flow] != 0) & (flows["messages"][flow] == 0)
        rows["flags"][named[first[begun]]] |= np.uint8(MessageFlag.OPENING)

    def _mark_heads(self, flows: Rows, rows: Rows) -> None:
        """Bytes before the first header of a framed stream: ends of messages begun before the capture."""
        framed = flows["framing"] != Framing.UNKNOWN
        framed &= flows["framing"] != Framing.NONE
        head = framed[rows["flow"]] & (rows["role"] == Role.BURST) & (rows["flags"] & MessageFlag.HIDDEN == 0)
        before = np.where(self._streams["whole"][rows["flow"][head]], 0, int(MessageFlag.STARTS_BEFORE))
        rows["flags"][head] |= (before | int(MessageFlag.HIDDEN)).astype(np.uint8)
