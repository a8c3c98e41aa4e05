"""The arrays that the parse kernel fills: a block's columns, and the tables of flows and endpoints."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.errors import DpuflowError
from dpuflow.kernels import columns as c
from dpuflow.kernels._ready import bound
from dpuflow.kernels.intern import EMPTY, MAX_FLOWS
from dpuflow.schema.rows import ENDPOINT, FLOW, NEVER, NONE32, PACKET
from dpuflow.schema.tables import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.capture.base import Bytes, Format, Numbers

    Rows = NDArray[np.void]

_SLOT: Final = np.dtype([("key", "i8"), ("flow", "i8"), ("ends", "i8"), ("packets", "i8")])  # kernels/intern
_SLOTS_PER_FLOW: Final = 4
_LEAST_SLOTS: Final = 1 << 13
_MOST_FLOWS: Final = 1 << 28
_ENDS: Final = np.dtype([("src", "u4"), ("dst", "u4"), ("packets", "u8")])


class Buffers:
    """One block's arrays, used again and again: views of the bytes that the kernel fills."""

    def __init__(self) -> None:
        self.bytes: Bytes = _aligned(c.BLOCK_BYTES)
        self.columns: dict[str, NDArray[np.generic]] = {
            field.name: self._view(np.dtype(field.type), c.COLUMN_AT[field.name]) for field in PACKET.fields
        }
        self.sparse: list[Rows] = [self._view(r.dtype, c.TABLE_AT[r.name]) for r in c.SPARSE]
        self.times = self.columns["time_ns"]
        self._count = np.arange(c.ROWS, dtype=np.uint32)

    def _view(self, dtype: np.dtype[Any], at: int) -> NDArray[Any]:
        return self.bytes[at : at + dtype.itemsize * c.ROWS].view(dtype)

    def block(self, first_frame: int, rows: int, counts: list[int], data: Bytes, ordered: bool) -> Block:
        """The first ``rows`` rows as a Block, sorted by time if they are not ``ordered``."""
        if not ordered:
            self._sort(rows, counts)
        reth, aeth, imm, deth, atomic, tcp, pause = (
            table[:n] for table, n in zip(self.sparse, counts, strict=True)
        )
        return Block(first_frame, rows, self.columns, data, reth, aeth, imm, deth, atomic, tcp, pause)

    def number(self, first_frame: int, rows: int) -> None:
        """Number the frames of the first ``rows`` rows from ``first_frame`` on."""
        first = np.uint32(first_frame & NONE32)
        np.add(self._count[:rows], first, out=self.columns["frame"][:rows], casting="unsafe")

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


def _aligned(size: int) -> Bytes:
    """Zero bytes that start on a cache line."""
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


def _places(kept: NDArray[np.bool_]) -> Numbers:
    """The new row of each: they move up; -1 where it is not kept."""
    return np.where(kept, np.cumsum(kept) - 1, -1)


def _empty_flows(rows: int) -> Rows:
    flows = FLOW.zeros(rows)
    flows["peer"] = NONE32
    for name in ("first_ns", "last_ns", "rtt_min_ns"):
        flows[name] = NEVER
    return flows


class Interned:
    """Flows and endpoints with the hash tables that find them; grown between calls of the kernel."""

    def __init__(self, flows: int = 1024) -> None:
        self._make_flows(flows)
        self.endpoints = ENDPOINT.zeros(flows)
        self.index = np.full(2 * flows, -1, np.int32)

    def _make_flows(self, flows: int) -> None:
        self.flows = _empty_flows(flows)
        self.ends: Bytes = _aligned(flows * _ENDS.itemsize)
        self.keys: Numbers = np.zeros((flows, 2), np.int64)
        self.slots: Bytes = _aligned(max(flows * _SLOTS_PER_FLOW, _LEAST_SLOTS) * _SLOT.itemsize)
        self.slots[:] = 0xFF

    def grow(self, flows: int, endpoints: int) -> None:
        """Make room for more, ``flows`` and ``endpoints`` rows being used. Raises DpuflowError."""
        from dpuflow.kernels.tables import refill_index, refill_slots

        if flows == len(self.flows):
            if flows >= _MOST_FLOWS:
                raise DpuflowError(f"the capture has more than {flows} flows")
            rows, ends, keys, slots = self.flows, self.ends, self.keys, self.slots
            self._make_flows(2 * flows)
            self.flows[:flows], self.ends[: len(ends)], self.keys[:flows] = rows, ends, keys
            refill_slots(slots, self.slots)
        if endpoints + 2 > len(self.endpoints):
            more = ENDPOINT.zeros(2 * len(self.endpoints))
            more[:endpoints] = self.endpoints[:endpoints]
            self.endpoints = more
            self.index = np.full(2 * len(more), -1, np.int32)
            refill_index(self.endpoints, endpoints, self.index)

    def keep(self, flows: NDArray[np.bool_], endpoints: int) -> tuple[Interned, Numbers, Numbers]:
        """A smaller copy with the flows that are True, of ``endpoints`` rows those which they name.

        Returns it, and the new row of each flow and of each endpoint (-1: gone).
        """
        from dpuflow.kernels.intern import IPV6_TAG, TAG_SHIFT
        from dpuflow.kernels.tables import refill_index, refill_slots

        place = _places(flows)
        count = int(flows.sum())
        rows, ends = self.flows[: len(flows)][flows], self.ends.view(_ENDS)[: len(flows)][flows]
        named = np.zeros(endpoints, bool)
        named[ends["src"]] = named[ends["dst"]] = True
        moved = _places(named)
        made = Interned(max(1024, 1 << int(max(count, int(named.sum()) + 2)).bit_length()))
        for name in ("src", "dst"):
            rows[name] = ends[name] = moved[ends[name]]
        paired = rows["peer"] != NONE32
        other = place[rows["peer"][paired]]
        rows["peer"][paired] = np.where(other >= 0, other, NONE32)
        made.flows[:count], made.ends.view(_ENDS)[:count] = rows, ends
        made.keys[:count] = self.keys[: len(flows)][flows]
        numbered = (made.keys[:count, 1] >> TAG_SHIFT) & IPV6_TAG != 0  # their keys are rows of endpoints
        made.keys[:count, 0][numbered] = (
            ends["src"][numbered].astype(np.int64) | ends["dst"][numbered].astype(np.int64) << 32
        )
        entries = made.keys[:count].copy()
        entries[:, 1] |= np.arange(count, dtype=np.int64) << 32
        refill_slots(entries.reshape(-1).view(np.uint8), made.slots)
        left = int(named.sum())
        made.endpoints[:left] = self.endpoints[:endpoints][named]
        refill_index(made.endpoints, left, made.index)
        return made, place, moved

    def count_packets(self, flows: int) -> None:
        """Set the endpoints' packet counts from the first ``flows`` flows' counts."""
        ends = self.ends.view(_ENDS)[:flows]
        slots = self.slots.view(_SLOT)
        slots = slots[slots["flow"] != EMPTY]
        packets = ends["packets"].copy()
        packets[(slots["flow"] >> 32) & MAX_FLOWS] += slots["packets"].astype(np.uint64)
        for name, column in (("packets_out", "src"), ("packets_in", "dst")):
            self.endpoints[name] = 0
            np.add.at(self.endpoints[name], ends[column], packets)


class Parser:
    """The parse kernel with its state, for one stream of windows after another."""

    def __init__(self) -> None:
        from dpuflow.kernels.parse import parse

        self._parse = parse
        self._bound_to: tuple[object, ...] = ()
        self.state: Numbers = np.zeros(c.S_SIZE, np.int64)
        self.state[c.S_PREVIOUS] = NEVER
        self.state[c.S_DROPS] = -1
        self.state[c.S_MAX_ROWS] = c.ROWS
        self.skipped: Numbers = np.zeros(256, np.int64)
        self.comments: Numbers = np.zeros((c.COMMENTS, 2), np.int64)
        self.known = Interned()
        self._scratch: Numbers = np.zeros(32, np.int64)

    def run(self, form: Format, data: Bytes, buffers: Buffers) -> int:
        """Parse on from the state's position until something has to be done; what (``columns``)."""
        known = self.known
        arrays = (
            form.form, form.interfaces, data, buffers.bytes,
            known.slots, known.flows, known.ends, known.keys, known.endpoints, known.index,
        )  # fmt: skip
        if len(self._bound_to) != len(arrays) or any(map(is_not, self._bound_to, arrays)):
            self._call = bound(self._parse, self.state, *arrays, self.skipped, self.comments, self._scratch)
            self._bound_to = arrays
        return int(self._call())

    def grow(self) -> None:
        """Make room for more flows and endpoints."""
        self.known.grow(int(self.state[c.S_FLOWS]), int(self.state[c.S_ENDPOINTS]))

    def keep(self, flows: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
        """Forget the flows that are False; the new row of each flow and endpoint, -1 where it is gone."""
        self.known, place, ends = self.known.keep(flows, int(self.state[c.S_ENDPOINTS]))
        self.state[c.S_FLOWS], self.state[c.S_ENDPOINTS] = int(flows.sum()), int((ends >= 0).sum())
        return place, ends

    def start_block(self, first_frame: int = 0) -> None:
        """Begin an empty block, whose first row is that frame."""
        self.state[c.S_ROW] = 0
        self.state[c.S_FRAME] = first_frame
        self.state[c.S_DISORDERED] = 0
        self.state[c.S_BYTES] = 0
        self.state[c.S_SPARSE : c.S_SPARSE + len(c.SPARSE)] = 0
