"""NCCL's clear-to-send entries beyond the snap length: small WRITEs of which too little was captured to read.

In: blocks; at the end MESSAGE rows. Out: words for ``roles.assign_roles`` as of an entry of which nothing was
captured, so that pattern and PSN tell, and how long a snap length would have shown them. A mirror's tunnel
(ERSPAN II and VXLAN: 50 bytes) moves entries beyond the usual one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import Kind, MessageFlag, Role, Wire
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Block, Rows

NEEDED: Final = 12
"""Bytes of an entry without which none is read: the slot's address and capacity (``kernels/roce``)."""
_WRITE_ONLY: Final = next(code for code, op in wire.OPCODES.items() if op.name == "RC_WRITE_ONLY")


class CutEntries:
    """Packets that may hold entries, by their frames' numbers; what holds none is told apart at the end."""

    def __init__(self) -> None:
        self._frames: list[NDArray[np.uint32]] = []
        self._heads: list[NDArray[np.int64]] = []  # bytes before the payload

    def feed(self, block: Block) -> None:
        """Take in one block."""
        from dpuflow.kernels.grants import CTS_MAX, CTS_UNIT

        columns, n = block.columns, block.rows
        data_len: NDArray[np.uint16] = columns["data_len"][:n].astype(np.uint16, copy=False)
        writes = np.flatnonzero((columns["opcode"][:n] == _WRITE_ONLY) & (data_len < NEEDED))
        if not len(writes):
            return
        payload, length = (columns[name][writes].astype(np.int64) for name in ("payload", "wire_len"))
        kind = columns["kind"][writes]
        may = (kind == Kind.ROCE_V2) | (kind == Kind.ROCE_V1)
        may &= (payload > 0) & (payload <= CTS_MAX) & (payload % CTS_UNIT == 0)
        if not may.any():
            return
        heads = length - payload - wire.ICRC_BYTES
        # A mirror that truncates copies states their own length, not the packet's.
        if (columns["wire_len"][:n].astype(np.int64) < columns["payload"][:n].astype(np.int64)).any():
            heads = length - data_len[writes]
        self._frames.append(columns["frame"][writes][may].astype(np.int64))
        self._heads.append(heads[may])

    def words(self, rows: Rows) -> NDArray[np.uint32]:
        """Of each row that may be such an entry the words of one of which nothing was captured."""
        from dpuflow.kernels.grants import N_WORDS, WORD_ROW

        if not self._frames:
            return np.zeros((0, N_WORDS), np.uint32)
        cut = np.isin(rows["last_frame"], np.concatenate(self._frames)) & (rows["packets"] == 1)
        at = np.flatnonzero(cut & (rows["wire"] == Wire.ROCE_WRITE))
        words = np.zeros((len(at), N_WORDS), np.uint32)
        words[:, WORD_ROW] = at
        return words

    def mark(self, rows: Rows, words: NDArray[np.uint32]) -> int:
        """Flag those of ``words`` that are entries as HIDDEN; the snap length that shows them, or 0."""
        from dpuflow.kernels.grants import WORD_ROW

        at = words[:, WORD_ROW].astype(np.int64)
        at = at[rows["role"][at] == Role.GRANT]
        rows["flags"][at] |= np.uint8(MessageFlag.HIDDEN)
        if not len(at):
            return 0
        heads = np.concatenate(self._heads)[np.isin(np.concatenate(self._frames), rows["last_frame"][at])]
        return int(heads.max()) + NEEDED

    def copy(self) -> CutEntries:
        """One that stays as this is now."""
        other = CutEntries()
        other._frames, other._heads = list(self._frames), list(self._heads)
        return other

    def forget(self, before_frame: int | None) -> None:
        """Let go of what came before that frame; None: of everything."""
        if not self._frames:
            return
        frames, heads = np.concatenate(self._frames), np.concatenate(self._heads)
        keep = frames >= before_frame if before_frame is not None else np.zeros(len(frames), bool)
        self._frames, self._heads = ([frames[keep]], [heads[keep]]) if keep.any() else ([], [])

    def renumber(self, frames: int) -> None:
        """Take ``frames`` off all numbers of frames."""
        self._frames = [np.maximum(each - frames, 0) for each in self._frames]
