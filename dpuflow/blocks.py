"""The arrays that the parse kernel fills: a block's columns, and the tables of flows and endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.kernels import columns as c
from dpuflow.schema import ENDPOINT, FLOW, NEVER, NONE32
from dpuflow.tables import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.capture.base import Bytes, Format, Numbers

    Rows = NDArray[np.void]

ROWS: Final = 16_384  # rows of a full block: its columns stay in the cache

SLOT_WIDTH: Final = 8  # int64 numbers a flow slot, one cache line (kernels/intern)
_SLOT_FLOW: Final = 2
_SLOT_PACKETS: Final = 5


class Buffers:
    """One block's arrays, used again and again."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.times: Numbers = np.zeros(rows, np.int64)
        self.words = np.zeros((len(c.WORDS), rows), np.uint32)
        self.halves = np.zeros((len(c.HALVES), rows), np.uint16)
        self.octets = np.zeros((len(c.OCTETS), rows), np.uint8)
        self.sparse: list[Rows] = [record.zeros(rows) for record in c.SPARSE]
        self.columns: dict[str, NDArray[np.generic]] = {c.TIMES[0]: self.times}
        for names, arrays in ((c.WORDS, self.words), (c.HALVES, self.halves), (c.OCTETS, self.octets)):
            self.columns.update(zip(names, arrays, strict=True))
        self._count = np.arange(rows, dtype=np.uint32)
        self._frame = self.columns["frame"]

    def block(self, first_frame: int, rows: int, counts: list[int], data: Bytes, ordered: bool) -> Block:
        """The first ``rows`` rows as a Block, sorted by time if they are not ``ordered``."""
        np.add(self._count[:rows], first_frame & NONE32, out=self._frame[:rows], casting="unsafe")
        if not ordered:
            self._sort(rows, counts)
        reth, aeth, imm, deth, atomic, tcp, pause = (
            table[:n] for table, n in zip(self.sparse, counts, strict=True)
        )
        return Block(first_frame, rows, self.columns, data, reth, aeth, imm, deth, atomic, tcp, pause)

    def _sort(self, rows: int, counts: list[int]) -> None:
        """Bring rows into order of time, equal stamps in file order, sparse rows along with them."""
        order = np.argsort(self.times[:rows], kind="stable")
        for column in self.columns.values():
            column[:rows] = column[:rows][order]
        place = np.empty(rows, np.uint32)
        place[order] = self._count[:rows]
        for table, n in zip(self.sparse, counts, strict=True):
            if n:
                table["packet"][:n] = place[table["packet"][:n]]
                table[:n] = table[:n][np.argsort(table["packet"][:n], kind="stable")]


def _empty_flows(rows: int) -> Rows:
    flows = FLOW.zeros(rows)
    flows["peer"] = NONE32
    for name in ("first_ns", "last_ns", "rtt_min_ns"):
        flows[name] = NEVER
    return flows


class Interned:
    """Flows and endpoints with the hash tables that find them; grown between calls of the kernel."""

    def __init__(self, flows: int = 1024) -> None:
        self.flows = _empty_flows(flows)
        self.endpoints = ENDPOINT.zeros(flows)
        self.slots = _aligned_slots(4 * flows)
        self.index = np.full(4 * flows, -1, np.int32)

    def grow(self, flows: int, endpoints: int) -> None:
        """Make room for more, ``flows`` and ``endpoints`` rows being used."""
        from dpuflow.kernels.tables import refill_index, refill_slots

        if 2 * (flows + 1) > len(self.flows):
            more = _empty_flows(2 * len(self.flows))
            more[:flows] = self.flows[:flows]
            slots = _aligned_slots(2 * len(self.slots))
            refill_slots(self.slots, slots)
            self.flows, self.slots = more, slots
        if 2 * (endpoints + 2) > len(self.endpoints):
            larger = ENDPOINT.zeros(2 * len(self.endpoints))
            larger[:endpoints] = self.endpoints[:endpoints]
            self.endpoints = larger
            self.index = np.full(2 * len(self.index), -1, np.int32)
            refill_index(self.endpoints, endpoints, self.index)

    def count_packets(self) -> None:
        """Set the endpoints' packet counts from the flows'."""
        used = self.slots[self.slots[:, _SLOT_FLOW] >= 0]
        packets = used[:, _SLOT_PACKETS].astype(np.uint64)
        for name, column in (("packets_out", 3), ("packets_in", 4)):
            self.endpoints[name] = 0
            np.add.at(self.endpoints[name], used[:, column], packets)


def _aligned_slots(rows: int) -> Numbers:
    """Empty slots, each within one cache line."""
    raw = np.empty(rows * SLOT_WIDTH + 8, np.int64)
    skip = -(raw.ctypes.data // 8) % 8
    slots = raw[skip : skip + rows * SLOT_WIDTH].reshape(rows, SLOT_WIDTH)
    slots[:] = 0
    slots[:, _SLOT_FLOW] = -1
    return slots


class Parser:
    """The parse kernel with its state, for one stream of windows after another."""

    def __init__(self) -> None:
        from dpuflow.kernels.parse import parse

        self._parse = parse
        self.state: Numbers = np.zeros(c.S_SIZE, np.int64)
        self.state[c.S_PREVIOUS] = NEVER
        self.state[c.S_DROPS] = -1
        self.state[c.S_MAX_ROWS] = ROWS
        self.skipped: Numbers = np.zeros(256, np.int64)
        self.comments: Numbers = np.zeros((c.COMMENTS, 2), np.int64)
        self.known = Interned()
        self._scratch: Numbers = np.zeros(32, np.int64)

    def run(self, form: Format, data: Bytes, buffers: Buffers) -> int:
        """Parse on from the state's position until something has to be done; what (``columns``)."""
        known = self.known
        return int(
            self._parse(
                self.state, form.form, form.interfaces, data,
                buffers.times, buffers.words, buffers.halves, buffers.octets, *buffers.sparse,
                known.slots, known.flows, known.endpoints, known.index,
                self.skipped, self.comments, self._scratch,
            )
        )  # fmt: skip

    def grow(self) -> None:
        """Make room for more flows and endpoints."""
        self.known.grow(int(self.state[c.S_FLOWS]), int(self.state[c.S_ENDPOINTS]))

    def start_block(self) -> None:
        """Begin an empty block."""
        self.state[c.S_ROW] = 0
        self.state[c.S_DISORDERED] = 0
        self.state[c.S_BYTES] = 0
        self.state[c.S_SPARSE : c.S_SPARSE + len(c.SPARSE)] = 0
