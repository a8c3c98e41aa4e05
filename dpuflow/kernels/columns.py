"""Where each PACKET column and sparse row lies in a block's bytes, and the parse kernel's state.

All arrays of a block lie in one array of bytes at places known beforehand, so that the kernel keeps
one address in a register and not thirty.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dpuflow.schema import rows as schema

ROWS: Final = 16_384  # rows of a full block: its columns stay in the second-level cache

SPARSE: Final = (
    schema.RETH,
    schema.AETH,
    schema.IMM,
    schema.DETH,
    schema.ATOMIC,
    schema.TCP,
    schema.PAUSE,
)

_LINE: Final = 64  # a cache line
_STAGGER: Final = 9 * _LINE  # columns one row apart by this much more, lest all share one cache set


def _layout() -> tuple[dict[str, int], dict[str, int], int]:
    """Offset of each column and of each sparse table, and the bytes of all."""
    at = 0
    columns, tables = {}, {}
    for field in schema.PACKET.fields:
        columns[field.name] = at
        at += np.dtype(field.type).itemsize * ROWS + _STAGGER
    for record in SPARSE:
        tables[record.name] = at
        at += record.dtype.itemsize * ROWS + _STAGGER
    return columns, tables, at


COLUMN_AT, TABLE_AT, STAGE_AT = _layout()

CHUNK: Final = 64  # packets decoded together (kernels/usual)
assert _STAGGER >= 8 * CHUNK  # which writes whole chunks, wherever a block ends
STAGE_BYTES: Final = 64 * CHUNK + 16 * _STAGGER
BLOCK_BYTES: Final = STAGE_AT + STAGE_BYTES  # the last part is scratch of kernels/usual

TIME: Final = COLUMN_AT["time_ns"]
FLOW: Final = COLUMN_AT["flow"]
SRC: Final = COLUMN_AT["src"]
DST: Final = COLUMN_AT["dst"]
WIRE_LEN: Final = COLUMN_AT["wire_len"]
PAYLOAD: Final = COLUMN_AT["payload"]
DATA_AT: Final = COLUMN_AT["data_at"]
DEST_QP: Final = COLUMN_AT["dest_qp"]
PSN: Final = COLUMN_AT["psn"]
FRAME: Final = COLUMN_AT["frame"]
SPORT: Final = COLUMN_AT["sport"]
DPORT: Final = COLUMN_AT["dport"]
DATA_LEN: Final = COLUMN_AT["data_len"]
IFACE: Final = COLUMN_AT["iface"]
OPCODE: Final = COLUMN_AT["opcode"]
FLAGS: Final = COLUMN_AT["flags"]
TOS: Final = COLUMN_AT["tos"]
KIND: Final = COLUMN_AT["kind"]
DIRECTION: Final = COLUMN_AT["direction"]

# -- state: what the kernel is told and what it tells (int64 array) -----------------------------
S_POS: Final = 0  # where the next record starts in the window
S_END: Final = 1  # bytes in the window
S_LIMIT: Final = 2  # records that start here or later belong to the next window
S_ROW: Final = 3  # rows filled
S_MAX_ROWS: Final = 4
S_PREVIOUS: Final = 5  # stamp of the record before; NEVER before the first
S_DISORDERED: Final = 6  # records stamped before the one they follow
S_FLOWS: Final = 7
S_ENDPOINTS: Final = 8
S_BYTES: Final = 9  # bytes on the wire
S_DROPS: Final = 10  # packets lost, from the options of enhanced packets; -1 if none has one
S_COMMENTS: Final = 11  # comments seen; the first COMMENTS of them are located
S_SPARSE: Final = 12  # seven counts of rows, in the order of SPARSE
S_REASON: Final = 19  # why the walk stopped: DAMAGED's reason
S_FRAME: Final = 20  # frame number of row 0
S_SIZE: Final = 24

N_RETH: Final = S_SPARSE + 0
N_AETH: Final = S_SPARSE + 1
N_IMM: Final = S_SPARSE + 2
N_DETH: Final = S_SPARSE + 3
N_ATOMIC: Final = S_SPARSE + 4
N_TCP: Final = S_SPARSE + 5
N_PAUSE: Final = S_SPARSE + 6

COMMENTS: Final = 64  # comments of packets located per call

# -- form: how the file is written (int64 array) ------------------------------------------------
F_PCAPNG: Final = 0
F_SWAPPED: Final = 1  # big endian
F_HEADER: Final = 2  # classic: bytes of a record header
F_INTERFACES: Final = 3
F_SIZE: Final = 4

# -- interfaces: one row each (int64 array) -----------------------------------------------------
I_LINK: Final = 0
I_MULTIPLY: Final = 1  # ns a tick; 0 where a tick is less than 1 ns or no decimal fraction of a second
I_DIVIDE: Final = 2  # then: ticks a ns; 0 for binary fractions
I_BITS: Final = 3  # then: a tick is 2^-bits s
I_OFFSET: Final = 4  # ns to add
I_SNAP: Final = 5  # snap length, for simple packets
I_SIZE: Final = 8

# -- why the kernel returned --------------------------------------------------------------------
LIMIT: Final = 0  # S_LIMIT reached
FULL: Final = 1  # S_MAX_ROWS reached
MORE: Final = 2  # the record at S_POS goes on beyond the window
GROW: Final = 3  # no room for another flow or endpoint
BLOCK: Final = 4  # pcapng: a section, interface or statistics block at S_POS
DAMAGED: Final = 5  # S_REASON

MAX_CAPTURED: Final = 262_144  # libpcap's own limit; a longer record is damage
MAX_RECORD: Final = 1 << 20  # the longest block that a packet may stand in, options included

REASONS: Final = {
    1: "a record claims more captured bytes than any capture holds",
    2: "a block's length is impossible",
    3: "the length after a block differs from the one before it",
    4: "a packet names an interface that is not described",
}
