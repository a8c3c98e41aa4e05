"""Runs of bytes whose framing was lost -> MESSAGE rows, once it is known which messages fill them.

A stretch is a run of "pieces" (LINK.piece), one a segment, so each message in it gets the time of
the segment it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema.rows import MESSAGE, MessageFlag, Role, Wire

if TYPE_CHECKING:
    from dpuflow.schema.tables import Rows

Slot = tuple[int, int, int]  # op, tag, sub


@dataclass
class HiddenCounts:
    """What was not seen of the headers, and what became of it."""

    headers: int = 0  # messages known to exist whose header was not seen whole
    resolved: int = 0  # of them, those whose fields could be inferred
    stretches: int = 0  # runs of bytes without a readable header
    stretches_resolved: int = 0
    too_many: int = 0  # of them, those that were known and stay bytes, for want of room
    bytes_unresolved: int = 0


class Part(NamedTuple):
    """A message within a stretch: its size on the wire and what it is."""

    size: int
    wire: Wire
    role: Role
    slot: Slot
    length: int  # of the data it carries or announces
    context: int = 0


class Solved:
    """What stretches were found to be: the pieces that are gone, and MESSAGE and LINK rows in their place.

    ``room``: how many messages there is room for in all: of what nobody captured, a gap may hold any number.
    """

    def __init__(self, rows: Rows, links: Rows, room: int) -> None:
        self._rows, self._links, self._room = rows, links, room
        self.counts = HiddenCounts()
        self._gone: list[np.ndarray] = []
        self._made: list[Rows] = []
        self._their_links: list[Rows] = []

    def has_room(self, count: int) -> bool:
        """Whether so many messages more can be kept; counted where they cannot."""
        self.counts.too_many += count > self._room
        return count <= self._room

    def put(self, run: np.ndarray, parts: list[Part]) -> Rows:
        """These messages, which have room, fill the stretch; returns their LINK rows, empty so far."""
        self._room -= len(parts)
        self._gone.append(run)
        self._made.append(split(self._rows, run, parts))
        self._their_links.append(np.zeros(len(parts), self._links.dtype))
        self.counts.stretches_resolved += 1
        self.counts.headers += len(parts)
        self.counts.resolved += len(parts)
        return self._their_links[-1]

    def applied(self) -> tuple[Rows, Rows]:
        """All MESSAGE and LINK rows; counts what is left of pieces."""
        rows, links = self._rows, self._links
        keep = np.ones(len(rows), bool)
        if self._gone:
            keep[np.concatenate(self._gone)] = False
        left = keep & (links["piece"] == 1)
        self.counts.bytes_unresolved = int((rows["seq_end"][left] - rows["seq"][left]).sum())
        return np.concatenate([rows[keep], *self._made]), np.concatenate([links[keep], *self._their_links])


def stretches(links: Rows, order: np.ndarray) -> list[np.ndarray]:
    """Runs of pieces among the rows ``order`` (one flow's, in stream order)."""
    piece = links["piece"][order] == 1
    edges = np.flatnonzero(np.diff(np.concatenate(([0], piece.view(np.int8), [0]))))
    return [order[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def split(rows: Rows, pieces: np.ndarray, parts: list[Part]) -> Rows:
    """MESSAGE rows for the parts that fill a stretch; times come from the segments they lie in."""
    made = MESSAGE.zeros(len(parts))
    ends = rows["seq_end"][pieces].astype(np.int64)
    start = int(rows["seq"][pieces[0]])
    for row, part in zip(made, parts, strict=True):
        end = start + part.size
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, end - 1, side="right"))
        a, b = rows[pieces[first]], rows[pieces[last]]
        row["first_ns"], row["first_frame"] = a["first_ns"], a["first_frame"]
        row["last_ns"], row["last_frame"], row["acked_ns"] = b["last_ns"], b["last_frame"], b["acked_ns"]
        row["seq"], row["seq_end"], row["flow"] = start, end, a["flow"]
        for name in ("packets", "ecn_marked"):
            row[name] = rows[name][pieces[first : last + 1]].sum()
        row["retransmitted"] = a["retransmitted"]
        row["flags"] = np.bitwise_or.reduce(rows["flags"][pieces[first : last + 1]]) | MessageFlag.HIDDEN
        row["wire"], row["role"] = part.wire, part.role
        row["op"], row["tag"], row["sub"] = part.slot
        row["context"] = part.context
        row["bytes" if part.role == Role.DATA else "announces"] = part.length
        start = end
    return made
