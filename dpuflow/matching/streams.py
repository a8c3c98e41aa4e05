"""Messages by edge, and by job: what of them cutting looks at, and the holes that lost ones leave.

In: EXCHANGE rows of one communicator. Out: for each (sender, receiver) its rows in order; and the rows of
jobs that followed each other between the same ranks. A job opens connections of its own: where none is used
both before and after a moment, and some pair of ranks has one on either side, the job before it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Bools, Ints
    from dpuflow.schema.tables import Rows


Edge = tuple[int, int]
"""(src, dst), endpoints."""

_NUMBERS = 1 << 16
HOLE = -1
"""In place of a row: a message is known to be missing."""


class Columns(NamedTuple):
    """What cutting needs of every exchange; the last element stands for HOLE: no size, no times."""

    sizes: Ints
    starts: Ints  # the sender's first act
    arrivals: Ints
    samples: NDArray[np.uint32]  # of the data's first bytes, RoCE without framing and NCCL alone; 0 without


def columns_of(exchanges: Rows) -> Columns:
    """The columns of EXCHANGE rows, one element longer for HOLE."""
    from dpuflow.kernels import streams

    sizes, starts, arrivals = np.empty((3, len(exchanges) + 1), np.int64)
    streams.columns(exchanges, sizes, starts, arrivals)
    sizes[-1], starts[-1], arrivals[-1] = -1, NEVER, NEVER
    return Columns(sizes, starts, arrivals, np.append(exchanges["context"], np.uint32(0)))


class Streams:
    """EXCHANGE rows by edge, taken from the front: ``rows[at[k]:end[k]]`` are left of ``edges[k]``."""

    def __init__(self, edges: Sequence[Edge], rows: Ints, at: Ints, end: Ints) -> None:
        self.edges, self.rows, self.at, self.end = edges, rows, at, end
        self.number = {edge: k for k, edge in enumerate(edges)}
        self._lanes: dict[tuple[Edge, ...], Ints] = {}
        self.version = 0  # counts up with every change
        self._present: tuple[int, frozenset[Edge]] = (-1, frozenset())

    @classmethod
    def of(cls, parts: Iterable[tuple[Edge, Ints]]) -> Streams:
        """From each edge's rows in order."""
        edges, rows = zip(*parts, strict=True)
        ends = np.cumsum([len(part) for part in rows])
        return cls(edges, np.concatenate(rows), np.r_[0, ends[:-1]], ends)

    def __bool__(self) -> bool:
        return bool((self.at < self.end).any())

    def left(self) -> list[tuple[Edge, Ints]]:
        """Each edge that has rows left, with them."""
        bounds = zip(self.edges, self.at.tolist(), self.end.tolist(), strict=True)
        return [(edge, self.rows[low:high]) for edge, low, high in bounds if low < high]

    @property
    def count(self) -> int:
        """Rows left."""
        return int((self.end - self.at).sum())

    @property
    def present(self) -> frozenset[Edge]:
        """The edges with rows left."""
        if self._present[0] != self.version:
            here = (self.at < self.end).tolist()
            edges = frozenset(edge for edge, some in zip(self.edges, here, strict=True) if some)
            self._present = self.version, edges
        return self._present[1]

    def lanes(self, edges: tuple[Edge, ...]) -> Ints:
        """The numbers of edges."""
        if edges not in self._lanes:
            self._lanes[edges] = np.array([self.number[edge] for edge in edges], np.int64)
        return self._lanes[edges]

    def take(self, lanes: Ints | slice | int, rows: Ints | int) -> None:
        """Leave the next ``rows`` of the edges numbered ``lanes`` behind."""
        self.at[lanes] += rows
        self.version += 1

    def back_to(self, at: Ints) -> None:
        """Undo what was taken since a copy of ``at`` was made."""
        self.at[:] = at
        self.version += 1


def edge_streams(exchanges: Rows, rows: Ints) -> Streams:
    """``rows`` by (src, dst), each in order."""
    src, dst, order = (exchanges[name][rows] for name in ("src", "dst", "order"))
    edge = (src.astype(np.int64) << 32) | dst
    in_order = np.lexsort((order, edge))
    edge = edge[in_order]
    bounds = np.flatnonzero(np.r_[True, edge[1:] != edge[:-1], True])
    edges = [(int(key >> 32), int(key & 0xFFFFFFFF)) for key in edge[bounds[:-1]]]
    return Streams(edges, rows[in_order], bounds[:-1].copy(), bounds[1:])


def has_numbers(exchanges: Rows, rows: Ints) -> Bools:
    """Whether the library numbers the messages of each pair of ranks and communicator."""
    wire = exchanges["wire"][rows]
    return np.asarray((wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER), bool)


def numbered_streams(exchanges: Rows, streams: Streams) -> dict[Op, Streams]:
    """Each operation's streams. Numbers that ob1 gave out but nobody saw become HOLEs.

    A hole goes to the operation of the message before it, or of the one after where none is. Other messages
    of the communicator (point to point, MPI_Exscan) have numbers of their own.
    """
    found: dict[Op, list[tuple[Edge, Ints]]] = {}
    others = _others(exchanges, streams)
    for edge, rows in streams.left():
        number, whole = exchanges["sub"][rows].astype(np.int64), False
        taken = others.get(edge, rows[:0])
        if has_numbers(exchanges, rows).all():
            # What was lost on its way was read late, yet belongs where its number says.
            both = np.concatenate([rows, taken])
            both = both[np.argsort(exchanges["order"][both], kind="stable")]
            along = np.unwrap(exchanges["sub"][both].astype(np.int64), period=_NUMBERS).astype(np.int64)
            whole = len(distinct(along)) == len(along)  # else they began anew
        else:
            number = np.arange(len(rows))
        if whole:
            mine = np.isin(both, rows)
            in_order = np.argsort(along[mine], kind="stable")
            rows, number = both[mine][in_order], along[mine][in_order]
        before = np.r_[number[:1] - 1, number[:-1]]
        skipped = (number - before - 1) % _NUMBERS
        if whole and len(taken):
            known = np.sort(along[~mine])
            skipped -= np.searchsorted(known, number) - np.searchsorted(known, before)
        # A jump by more than what could hide is a new start, not a hole.
        skipped = np.where(skipped > len(rows), 0, np.maximum(skipped, 0))
        ops = exchanges["op"][rows]
        own = np.repeat(rows, skipped + 1)
        whose = np.repeat(np.r_[ops[:1], ops[:-1]], skipped + 1)
        last = np.cumsum(skipped + 1) - 1
        hole = np.ones(len(own), bool)
        hole[last] = False
        own[hole] = HOLE
        whose[last] = ops
        for op in distinct(whose).tolist():
            found.setdefault(Op(op), []).append((edge, own[whose == op]))
    return {op: Streams.of(parts) for op, parts in found.items()}


def _others(exchanges: Rows, streams: Streams) -> dict[Edge, Ints]:
    """Of each edge of the streams the rows on its connections that the same communicator numbers, too."""
    here = np.zeros(len(exchanges), bool)
    here[streams.rows] = True
    rows = np.flatnonzero(~here & has_numbers(exchanges, np.arange(len(exchanges))))
    for name in ("context", "connection"):
        rows = rows[np.isin(exchanges[name][rows], distinct(exchanges[name][here]))]
    if not len(rows):
        return {}
    return {edge: mine for edge, mine in edge_streams(exchanges, rows).left() if edge in streams.number}


def sessions(exchanges: Rows, rows: Ints) -> list[Ints]:
    """``rows`` cut where all connections were made anew; one array a job, in order, together all of ``rows``.

    ``rows`` are row numbers of EXCHANGE of one communicator, ascending, and so in order of their first sign.
    """
    if not len(rows):
        return [rows]
    connection, of = np.unique(exchanges["connection"][rows], return_inverse=True)
    if len(connection) < 2:
        return [rows]
    of = of.reshape(-1)
    place = np.arange(len(rows))
    first, last = np.full(len(connection), len(rows)), np.full(len(connection), -1)
    np.minimum.at(first, of, place)
    np.maximum.at(last, of, place)
    src, dst = exchanges["src"][rows[first]].tolist(), exchanges["dst"][rows[first]].tolist()
    cuts, pairs, end = [0], set[frozenset[int]](), -1
    for number in np.argsort(first, kind="stable").tolist():
        if end >= 0 and first[number] > end and _met(pairs, number, first, src, dst):
            cuts.append(int(first[number]))
            pairs.clear()
        pairs.add(frozenset((src[number], dst[number])))
        end = max(end, int(last[number]))
    return [rows[low:high] for low, high in zip(cuts, [*cuts[1:], len(rows)], strict=True)]


def _met(pairs: set[frozenset[int]], number: int, first: Ints, src: list[int], dst: list[int]) -> bool:
    """Whether a pair that had a connection before ``number`` began has another one afterwards."""
    later = np.flatnonzero(first >= first[number]).tolist()
    return any(frozenset((src[k], dst[k])) in pairs for k in later)
