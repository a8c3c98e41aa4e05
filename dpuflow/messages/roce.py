"""RoCE packets to messages: Blocks in, MESSAGE rows and FLOW counters out.

A message runs from FIRST/ONLY to LAST/ONLY (InfiniBand volume 1, 9.4). What the rows say beyond the
schema:

- READ: the answer is the message (wire ROCE_READ, on the flow that carries the data, its bytes from the
  request where that was seen); the request is a message of its own on its flow, without bytes, role
  GRANT, ``announces`` the length asked for.
- Datagrams carry their source QP in ``sub``, and ``seq`` is the PSN as on the wire: it counts per source.
- ``seq`` of the rest starts at 2**24 plus the first PSN seen, so that it never goes below zero.
- A message sent again before its ACK is completed by the last packet seen before the ACK.
- FLOW.cnp counts on the flow that the CNPs slow down; as long as that is not known, on the one that
  carried them.
- NCCL's clear-to-send entries (role GRANT): ``announces`` is the capacity of the first entry, ``tag`` the
  rank that will send, ``sub`` the index, each as far as the snap length shows it, else 0, and the
  message's count for the index.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.kernels._ready import bound
from dpuflow.messages.cut_entries import CutEntries
from dpuflow.messages.growing import Growing, aligned, longer
from dpuflow.messages.lost import restore
from dpuflow.messages.pairing import Pairs
from dpuflow.messages.retained import moved, nearest_kept, onto_kept, places, shift_frames, shift_times
from dpuflow.messages.roles import assign_roles
from dpuflow.messages.sends import SendHeads
from dpuflow.schema.rows import FLOW, MESSAGE, NEVER, NONE32, Kind, MessageFlag, Transport, Wire
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Block, Rows

_SCANNED = ("frame", "time_ns", "flow", "payload", "data_at", "dest_qp", "psn", "data_len", "opcode", "flags",
            "tos", "kind")  # fmt: skip
MOST_HOLES: Final = 16 << 20
"""Bytes for open holes, of all lanes: packets that take many paths leave dozens of them at a time."""
_PLACE_SHIFT, _HAS_IMM, _DATAGRAM = 4, 1 << 8, 1 << 9


def opcode_table() -> NDArray[np.int64]:
    """256 entries for ``kernels.roce``: operation, place (0 for MIDDLE) and headers; 0 if unknown."""
    table = np.zeros(256, np.int64)
    for code, opcode in wire.OPCODES.items():
        table[code] = opcode.operation | (opcode.place & wire.ONLY) << _PLACE_SHIFT
        if opcode.headers & wire.IMM:
            table[code] |= _HAS_IMM
        if opcode.transport == "UD":
            table[code] |= _DATAGRAM
    return table


class RoceMessages:
    """Messages of all RoCE flows of one capture; state grows with flows and messages, not with packets."""

    def __init__(self) -> None:
        from dpuflow.kernels import acks, grants, lanes, roce

        self._scan, self._survey, self._at = roce.scan, grants.survey, lanes
        self._row_word = grants.WORD_ROW
        self._replay = acks.replay
        self._table = opcode_table()
        self._lanes = np.zeros(0, lanes.LANE)
        self._holes = np.zeros((0, lanes.HOLES + 1, 2), np.int64)
        self._peers = np.zeros(0, acks.PEER)
        self._log = Growing(acks.LOG)
        self._messages = Growing(MESSAGE.dtype)
        self._links = Growing(lanes.LINK)
        self._words = Growing(np.dtype(np.uint32), grants.N_WORDS)
        self._mad = np.zeros(2, np.int64)
        self._counts = np.zeros(lanes.N_COUNTS, np.int64)
        self._pairs = Pairs()
        self._heads = SendHeads()
        self._cut = CutEntries()
        self.snaplen_needed = 0  # that ``finish`` found to show entries which were cut off
        self._imm = np.zeros(0, bool)  # flows of which a WRITE WITH IMMEDIATE is gone

    def feed(self, block: Block, flows: Rows) -> None:
        """Take in one block; ``flows`` holds at least the flows of its packets and is updated in place.

        Its counters of packets and bytes are complete only when ``finish`` has come.
        """
        n = block.rows
        if n == 0:
            return
        self._welcome(flows)
        k, counts, columns = self._at, self._counts, block.columns
        kinds = columns["kind"][:n]
        if not ((kinds == Kind.ROCE_V2) | (kinds == Kind.ROCE_V1)).any():
            return  # without RoCE its kernel need not be compiled
        self._messages.reach(int(counts[k.ROWS]), 2 * n)
        self._links.reach(int(counts[k.ROWS]), 2 * n)
        self._log.reach(int(counts[k.LOGGED]), n)
        self._words.reach(int(counts[k.WORDS]), n)
        self._scan_all(block, flows)
        if counts[k.SENDS]:
            counts[k.SENDS] = 0
            self._heads.feed(block)
        self._cut.feed(block)

    def _scan_all(self, block: Block, flows: Rows) -> None:
        """Take in the packets of a block, for which there is room."""
        k, counts, n = self._at, self._counts, block.rows
        counts[k.START] = 0
        scan = self._bound(block, flows)
        while counts[k.START] < n:
            counts[k.START] = scan()
            if counts[k.RIPE]:
                self._pair(flows, int(counts[k.RIPE]) - 1)
                counts[k.RIPE] = 0
            if counts[k.MADS]:
                counts[k.MADS] = 0
                self._read_mad(block, flows, *self._mad.tolist())
            if counts[k.FULL] > 0:
                counts[k.FULL] = 0 if self._more_holes() else -1
                scan = self._bound(block, flows)

    def _more_holes(self) -> bool:
        """Make room for four times as many open holes, where that takes no more than ``MOST_HOLES``."""
        older = self._holes.shape[1] - 1
        if 4 * self._holes.nbytes > MOST_HOLES:
            return False
        more = np.zeros((len(self._holes), 4 * (older + 1), 2), np.int64)
        more[:, :older], more[:, -1] = self._holes[:, :older], self._holes[:, -1]
        self._holes = more
        return True

    def _bound(self, block: Block, flows: Rows) -> Callable[[], int]:
        """``kernels.roce.scan`` of a block."""
        columns = block.columns
        return bound(
            self._scan,
            block.rows,
            *(columns[name] for name in _SCANNED),
            block.data,
            block.reth,
            block.aeth,
            block.imm,
            block.deth,
            block.atomic,
            self._table,
            flows,
            self._lanes,
            self._lanes.view(np.uint8),
            self._holes,
            self._peers,
            self._pairs.members,
            self._pairs.conflicts,
            self._pairs.echoes,
            self._log.rows,
            self._messages.rows,
            self._links.rows,
            self._words.rows,
            self._mad,
            self._counts,
        )

    def name_pairs(self, named: list[tuple[int, int, int, int]], flows: Rows) -> None:
        """Queue pairs that a handshake elsewhere told: rows of two endpoints, and the number at each."""
        for src, dst, src_qp, dst_qp in named:
            self._pairs.name(src, dst, src_qp, dst_qp)
        if named and len(self._peers):
            self._welcome(flows)
            keys = {(dst, dst_qp) for _, dst, _, dst_qp in named}
            ends = zip(flows["dst"].tolist(), flows["dest_qp"].tolist(), strict=True)
            for flow in [row for row, key in enumerate(ends) if key in keys]:
                if flows["transport"][flow] == Transport.ROCE and self._peers["peer"][flow] < 0:
                    self._pair(flows, flow)

    def finish(self, flows: Rows) -> Rows:
        """Close what is open, tell roles, and return the MESSAGE rows in order of completion."""
        self._welcome(flows)
        self._pair(flows, last=True)
        self._count_rest(flows)
        self._close_open(flows)
        n = int(self._counts[self._at.ROWS])
        rows, links = self._messages.rows[:n], self._links.rows[:n]
        writes = np.zeros((2, len(flows)), np.int64)
        facts = np.zeros(2, np.int64)
        self._survey(self._messages.rows, n, writes, facts)
        reads, unsorted = facts.tolist()
        if reads:
            _join_reads(rows, links["lane"] == 1, flows)
        with_imm = writes[1] > 0
        with_imm[: len(self._imm)] |= self._imm
        words, cut = self._words.rows[: self._counts[self._at.WORDS]], self._cut.words(rows)
        assign_roles(rows, flows, np.concatenate([words, cut]) if len(cut) else words, with_imm, writes[0])
        self.snaplen_needed = self._cut.mark(rows, cut)
        self._heads.read(rows, flows)
        rows, mended = restore(rows, links["status"], flows, with_imm)
        if unsorted or mended:
            _sort_in_place(rows)
        return rows

    def copy(self) -> RoceMessages:
        """One to ``finish`` in place of this, which goes on: what the capture comes to so far."""
        k, counts = self._at, self._counts
        other = copy.copy(self)
        other._lanes, other._holes = aligned(self._lanes), self._holes.copy()
        other._peers, other._counts = self._peers.copy(), counts.copy()
        other._messages = self._messages.copy(int(counts[k.ROWS]))
        other._links = self._links.copy(int(counts[k.ROWS]))
        other._words = self._words.copy(int(counts[k.WORDS]))
        other._cut, other._heads = self._cut.copy(), self._heads.copy()
        other._log, other._pairs = self._log.copy(int(counts[k.LOGGED])), self._pairs.copy()
        return other

    def forget(self, before_ns: NDArray[np.int64]) -> None:
        """Let go of messages that ended before ``before_ns`` of their flow, and of what only they need.

        What comes later is told as if they were still here, but that they are not mended by it.
        """
        k, counts = self._at, self._counts
        n = int(counts[k.ROWS])
        rows, links = self._messages.rows[:n], self._links.rows[:n]
        keep = rows["last_ns"] >= before_ns[rows["flow"]]
        self._forget_log(before_ns)
        if keep.all():
            return
        gone = rows[~keep]
        if len(self._imm) < len(self._peers):
            self._imm = np.concatenate([self._imm, np.zeros(len(self._peers) - len(self._imm), bool)])
        self._imm[gone["flow"][gone["wire"] == Wire.ROCE_WRITE_IMM]] = True
        place = places(keep)
        back, on = nearest_kept(links["prev"], keep), nearest_kept(links["next"], keep)
        links["prev"], links["next"] = moved(back, place), moved(on, place)
        lanes = self._lanes
        lanes["tail"] = onto_kept(lanes["tail"], back, keep, place)
        lanes["head"] = onto_kept(lanes["head"], on, keep, place)
        lanes["cursor"] = moved(lanes["cursor"], place)
        self._peers["datagram_row"] = moved(self._peers["datagram_row"], place)
        words = self._words.rows[: counts[k.WORDS]]
        row = moved(words[:, self._row_word], place)
        words[:, self._row_word] = row.clip(0)
        counts[k.WORDS] = self._words.keep(len(words), row >= 0)
        # A message that goes on no more holds nothing up.
        alive = (lanes["open"] == 1) & (lanes["last_ns"] >= np.repeat(before_ns[: len(self._peers)], 2))
        needed = np.concatenate([rows["first_frame"][keep], lanes["first_frame"][alive]])
        del rows, links, words
        self._links.keep(n, keep)
        counts[k.ROWS] = self._messages.keep(n, keep)
        oldest = int(needed.min()) if len(needed) else None
        self._heads.forget(oldest)
        self._cut.forget(oldest)

    def _forget_log(self, before_ns: NDArray[np.int64]) -> None:
        """Let go of ACKs that came before and belong to no flow known, and of those applied."""
        count = int(self._counts[self._at.LOGGED])
        if not count:
            return
        log, peers = self._log.rows[:count], self._peers
        waiting = np.flatnonzero(peers["log_tail"] >= 0)
        last = np.where(log["next"] >= 0, log["next"], np.arange(count)).astype(np.int64)
        while (further := last[last]).tolist() != last.tolist():
            last = further
        flow = np.full(count, -1)
        flow[peers["log_tail"][waiting]] = waiting
        flow = flow[last]
        keep = (flow >= 0) & (log["time_ns"] >= before_ns[flow])
        place, on = places(keep), nearest_kept(log["next"], keep)
        log["next"] = moved(on, place)
        heads = onto_kept(peers["log_head"], on, keep, place)
        peers["log_tail"] = np.where(heads >= 0, moved(peers["log_tail"], place), -1)
        peers["log_head"] = heads
        del log
        self._counts[self._at.LOGGED] = self._log.keep(count, keep)

    def keep_flows(self, place: NDArray[np.int64], ends: NDArray[np.int64], flows: Rows) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone.

        ``ends`` is the same for endpoints, ``flows`` are those that are left. Of those gone no message may be
        held (``forget``).
        """
        kept = np.flatnonzero(place[: len(self._peers)] >= 0)
        rows = self._messages.rows[: self._counts[self._at.ROWS]]
        rows["flow"] = place[rows["flow"]]
        lanes = (2 * kept[:, None] + np.arange(2)).reshape(-1)
        old = self._peers
        self._lanes, self._holes = aligned(self._lanes[lanes]), self._holes[lanes]
        self._peers = old[kept]
        self._peers["peer"] = moved(old["peer"][kept], place)
        self._imm = self._imm[kept[kept < len(self._imm)]]
        self._heads.keep_flows(place)
        self._pairs.keep_flows(place, ends, flows[: len(kept)], old, self._peers)

    def shift(self, step_ns: int) -> None:
        """The clock was set: move all times that are kept."""
        k, counts = self._at, self._counts
        shift_times(self._messages.rows[: counts[k.ROWS]], ("first_ns", "last_ns", "acked_ns"), step_ns)
        shift_times(self._lanes, ("first_ns", "last_ns", "acked_ns"), step_ns, (0,))
        shift_times(self._peers, ("datagram_ns",), step_ns, (0,))
        shift_times(self._log.rows[: counts[k.LOGGED]], ("time_ns",), step_ns, ())

    def renumber(self, frames: int) -> None:
        """Take ``frames`` off all numbers of frames, before they reach 32 bits."""
        shift_frames(
            self._messages.rows[: self._counts[self._at.ROWS]], ("first_frame", "last_frame"), frames
        )
        shift_frames(self._lanes, ("first_frame", "last_frame"), frames)
        self._heads.renumber(frames)
        self._cut.renumber(frames)

    def in_use(self, over: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Per flow whether it holds messages, has one on its way, or ACKs that wait for a peer.

        What was on its way in flows that are ``over`` never ends: it does not count.
        """
        used: NDArray[np.bool_] = (self._lanes["open"].reshape(-1, 2) == 1).any(axis=1)
        used[over[: len(used)].nonzero()] = False
        used |= self._peers["log_head"] >= 0
        used[self._messages.rows["flow"][: self.held()]] = True
        return used

    def held(self) -> int:
        """Messages that are held."""
        return int(self._counts[self._at.ROWS])

    def ends(self) -> NDArray[np.int64]:
        """When each of them ended, so far."""
        ends: NDArray[np.int64] = self._messages.rows[: self.held()]["last_ns"].copy()
        return ends

    def _read_mad(self, block: Block, flows: Rows, packet: int, row: int) -> None:
        """Learn QPs from a datagram to QP 1."""
        at, length = int(block.columns["data_at"][packet]), int(block.columns["data_len"][packet])
        if self._pairs.read_mad(
            self._messages.rows[row : row + 1], flows, block.data[at : at + length].tobytes()
        ):
            self._pair(flows, int(self._messages.rows["flow"][row]))

    def _welcome(self, flows: Rows) -> None:
        """Make room for flows not met before."""
        FLOW.check(flows)
        known = len(self._peers)
        more = len(flows) - known
        if more <= 0:
            return
        fresh = flows[known:]
        roce = fresh["transport"] == Transport.ROCE
        fresh["peer"][roce] = NONE32
        fresh["rtt_min_ns"][roce] = NEVER
        self._lanes, self._holes = longer(self._lanes, 2 * more), longer(self._holes, 2 * more)
        self._peers = longer(self._peers, more)
        for name in ("top", "acked", "head", "tail", "cursor", "high"):
            self._lanes[name][2 * known :] = -1
        for name in ("peer", "log_head", "log_tail", "datagram_row"):
            self._peers[name][known:] = -1
        self._pairs.add_flows(flows, self._peers, known)
        for flow in self._pairs.named(flows, known):
            self._pair(flows, flow)

    def _pair(self, flows: Rows, ripe: int | None = None, last: bool = False) -> None:
        """Pair flows for which there is enough evidence, and give them the ACKs kept so far.

        With ``ripe`` only between the endpoints of that flow.
        """
        pairs = self._pairs.decide(
            flows, self._peers, self._messages.rows[: self._counts[self._at.ROWS]], ripe, last
        )
        if len(pairs):
            self._replay(
                self._lanes,
                self._holes,
                self._messages.rows,
                self._links.rows,
                flows,
                self._peers,
                self._log.rows,
                pairs,
            )

    def _count_rest(self, flows: Rows) -> None:
        """Count in FLOW the packets that were taken in without it."""
        lanes = self._lanes[::2]
        at = np.flatnonzero(lanes["more_packets"])
        flows["packets"][at] += lanes["more_packets"][at].astype(np.uint64)
        flows["bytes"][at] += lanes["more_bytes"][at].astype(np.uint64)
        flows["last_ns"][at] = np.maximum(flows["last_ns"][at], lanes["last_ns"][at])
        lanes["more_packets"][at] = 0

    def _close_open(self, flows: Rows) -> None:
        """Write messages that the capture's end cut off."""
        lanes = self._lanes
        at = np.flatnonzero(lanes["open"])
        if not len(at):
            return
        n = int(self._counts[self._at.ROWS])
        self._messages.reach(n, len(at))
        self._links.reach(n, len(at))
        cut, rows = lanes[at], self._messages.rows[n : n + len(at)]
        rows[:] = np.zeros(1, rows.dtype)
        for name in ("first_ns", "last_ns", "seq", "bytes", "va", "rkey", "packets", "retransmitted",
                     "first_frame", "last_frame", "wire", "flags"):  # fmt: skip
            rows[name] = cut[name]
        rows["ecn_marked"] = cut["ecn"]
        rows["acked_ns"] = NEVER
        rows["flow"] = at // 2
        known = cut["expected"] > 0
        rows["seq_end"] = np.where(known, cut["seq"] + cut["expected"], cut["top"])
        begun = (cut["status"] & 1 != 0) | (cut["flags"] & MessageFlag.STARTS_BEFORE != 0)
        gap = ~begun | (cut["top"] - cut["seq"] != cut["packets"])
        rows["flags"] &= np.uint8(255 - MessageFlag.GAP)
        rows["flags"] |= np.where(gap, MessageFlag.GAP, 0).astype(np.uint8)
        rows["flags"] |= np.uint8(MessageFlag.ENDS_AFTER)
        self._links.rows["lane"][n : n + len(at)] = at & 1
        np.add.at(flows["messages"], at // 2, 1)
        lanes["open"][at] = 0
        self._counts[self._at.ROWS] = n + len(at)


def _sort_in_place(rows: Rows) -> None:
    """Bring rows into order of ``last_ns``. Nearly all are already, so only those that move are copied."""
    order = np.argsort(rows["last_ns"], kind="stable")
    moved = np.flatnonzero(order != np.arange(len(order)))
    rows[moved] = rows[order[moved]]


def _join_reads(rows: Rows, answers: NDArray[np.bool_], flows: Rows) -> None:
    """Give each READ's answer the length and address that its request named, and the request its PSNs.

    Both have the same PSN (low 24 bits); of several the request last sent before the answer counts.
    """
    reads = rows["wire"] == 4
    at = np.flatnonzero(reads)
    answer = answers[at]
    # The flow of the request: an answer's opposite. Without a peer it matches no request.
    asker = np.where(answer, flows["peer"][rows["flow"][at]], rows["flow"][at]).astype(np.int64)
    key = asker << wire.PSN_BITS | (rows["seq"][at].astype(np.int64) & wire.PSN_MASK)
    order = np.lexsort((answer, rows["first_frame"][at], key))
    at, answer, key = at[order], answer[order], key[order]
    latest = np.maximum.accumulate(np.where(answer, -1, np.arange(len(at))))
    found = answer & (latest >= 0) & (key[latest] == key)
    ours, theirs = at[found], at[latest[found]]
    rows["bytes"][ours] = rows["announces"][theirs]
    for name in ("va", "rkey"):
        rows[name][ours] = rows[name][theirs]
    whole = rows["flags"][ours] & (MessageFlag.GAP | MessageFlag.ENDS_AFTER) == 0
    spans = rows["seq_end"][ours] - rows["seq"][ours]
    rows["seq_end"][theirs[whole]] = rows["seq"][theirs[whole]] + spans[whole]
    gaps = reads & answers & ((rows["flags"] & MessageFlag.GAP) != 0)
    lost = (rows["seq_end"] - rows["seq"]).astype(np.int64) - rows["packets"]
    np.add.at(flows["missing"], rows["flow"][gaps], np.maximum(lost[gaps], 0).astype(np.uint32))
