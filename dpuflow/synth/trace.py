"""What a simulated world leaves behind: tables of integers that grow row by row and are read as columns.

One row of MESSAGES is what a work request put on the wire, one of BURSTS some packets of it sent in a
row, one of REPLIES a single packet that a NIC made itself. Times are ns from the start of the world.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MESSAGES: Final = (
    "flow",
    "kind",  # CTS, WRITE, WRITE_IMM, SEND, ATOMIC, READ, RESPONSE, LENGTH, STREAM
    "bytes",
    "psn",  # of its first packet, not yet modulo 2^24
    "va",  # of a TCP stream: bytes before it
    "rkey",
    "value",  # immediate as on the wire, big endian; of a CTS its number from 1; of a RESPONSE its MSN; of an
    # ATOMIC what it adds
    "target",  # of a CTS: where the data shall go; of a write: what it holds, as a number
    "room",  # of a CTS: how much may come
    "key",  # of a CTS: the key for it
)
BURSTS: Final = (
    "flow",
    "message",  # row of MESSAGES
    "first",  # packet within the message
    "count",
    "tx_ns",  # start of the first packet at the sender's port
    "tx_step_ps",  # from packet to packet
    "tx_end_ns",
    "rx_ns",  # the same at the receiver's port
    "rx_step_ps",
    "rx_end_ns",  # -1: lost on the way
    "marked",  # so many of its packets carry an ECN mark, the last ones
)
REPLIES: Final = (
    "flow",  # that it answers; it travels the other way
    "kind",  # ACK, CNP, ATOMIC_ACK, SEGMENT_ACK: its ``psn`` counts bytes, its ``msn`` is the window
    "tx_ns",
    "rx_ns",  # -1: lost on the way
    "psn",
    "syndrome",
    "msn",
)
ACKS: Final = ("echo_ns", "left0", "right0", "left1", "right1", "left2", "right2")
"""Of a SEGMENT_ACK, whose ``syndrome`` is a row here: when what it answers was sent, ranges of bytes that are
there beyond a hole (0, 0: none).
"""
ENTRIES: Final = ("message", "target", "room", "key", "tag")
"""Of clear-to-send entries for several messages each, and of the sizes written behind these (``room``)."""
PAUSES: Final = ("port", "from_ns", "until_ns")
CTS, WRITE, WRITE_IMM, SEND, ATOMIC, READ, RESPONSE, LENGTH, STREAM = range(9)
ACK, CNP, ATOMIC_ACK, SEGMENT_ACK = range(9, 13)


class Table:
    """Rows of integers; ``add`` is all that the simulation calls."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._cells = array("q")

    def __len__(self) -> int:
        return len(self._cells) // len(self.columns)

    def add(self, *row: int) -> int:
        """Add a row; returns its number."""
        number = len(self)
        self._cells.extend(row)
        return number

    def read(self) -> dict[str, NDArray[np.int64]]:
        """All columns. The table must not grow while they are in use."""
        cells = np.frombuffer(self._cells, np.int64).reshape(-1, len(self.columns))
        return {name: cells[:, i] for i, name in enumerate(self.columns)}


class Trace:
    """All tables of one world."""

    def __init__(self) -> None:
        self.messages = Table(MESSAGES)
        self.bursts = Table(BURSTS)
        self.replies = Table(REPLIES)
        self.acks = Table(ACKS)
        self.pauses = Table(PAUSES)
        self.entries = Table(ENTRIES)
