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
    bytes_unresolved: int = 0


class Part(NamedTuple):
    """A message within a stretch: its size on the wire and what it is."""

    size: int
    wire: Wire
    role: Role
    slot: Slot
    length: int  # of the data it carries or announces
    context: int = 0


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
