"""Messages by edge: what of them cutting looks at, and the holes that lost ones leave.

In: EXCHANGE rows of one communicator. Out: for each (sender, receiver) its rows in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema import NEVER, Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.tables import Rows

Streams = dict[tuple[int, int], "NDArray[np.int64]"]
"""(src, dst) -> EXCHANGE rows in order; HOLE where a message is known to be missing."""

HOLE = -1


@dataclass(frozen=True)
class Columns:
    """What cutting needs of every exchange; the last element stands for HOLE: no size, no times."""

    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]  # the sender's first act
    arrivals: NDArray[np.int64]


def columns_of(exchanges: Rows) -> Columns:
    """The columns of EXCHANGE rows, one element longer for HOLE."""
    offered = exchanges["offer_ns"] != NEVER
    return Columns(
        np.append(exchanges["bytes"].astype(np.int64), -1),
        np.append(np.where(offered, exchanges["offer_ns"], exchanges["data_ns"]), NEVER),
        np.append(exchanges["arrived_end_ns"], NEVER),
    )


def edge_streams(exchanges: Rows, rows: NDArray[np.int64]) -> Streams:
    """``rows`` by (src, dst), each in order."""
    picked = exchanges[rows]
    edge = (picked["src"].astype(np.int64) << 32) | picked["dst"]
    in_order = np.lexsort((picked["order"], edge))
    edge = edge[in_order]
    bounds = np.flatnonzero(np.r_[True, edge[1:] != edge[:-1], True])
    return {
        (int(edge[low] >> 32), int(edge[low] & 0xFFFFFFFF)): rows[in_order[low:high]]
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    }


def has_numbers(exchanges: Rows, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the library numbers the messages of each pair of ranks and communicator."""
    wire = exchanges["wire"][rows]
    return np.asarray((wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER), bool)


def numbered_streams(exchanges: Rows, streams: Streams) -> dict[Op, Streams]:
    """Each operation's streams. Numbers that ob1 gave out but nobody saw become HOLEs.

    A hole goes to the operation of the message before it, or of the one after where none is.
    """
    found: dict[Op, Streams] = {}
    for edge, rows in streams.items():
        number = exchanges["sub"][rows].astype(np.int64)
        if not has_numbers(exchanges, rows).all():
            number = np.arange(len(rows))
        skipped = (np.diff(number, prepend=number[:1] - 1) - 1) % (1 << 16)
        # A jump by more than what could hide is a new start, not a hole.
        skipped = np.where(skipped > len(rows), 0, skipped)
        ops = exchanges["op"][rows]
        own = np.repeat(rows, skipped + 1)
        whose = np.repeat(np.r_[ops[:1], ops[:-1]], skipped + 1)
        last = np.cumsum(skipped + 1) - 1
        hole = np.ones(len(own), bool)
        hole[last] = False
        own[hole] = HOLE
        whose[last] = ops
        for op in np.unique(whose).tolist():
            found.setdefault(Op(op), {})[edge] = own[whose == op]
    return found
