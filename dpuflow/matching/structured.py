"""Collectives of RoCE traffic that no header names: told from who sends how much to whom, and when.

NCCL spreads a collective over channels, each with connections of its own that carry data one way.
A channel is cut like any unnumbered stream (``sequenced``), with the operation unknown as well; then
the channels' collectives of the same turn are put together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.buffers import DEFAULT
from dpuflow.matching.credited import credited_instances
from dpuflow.matching.p2p import p2p_instances
from dpuflow.matching.pipes import connections_of
from dpuflow.matching.recognise import ELEMENT_BYTES
from dpuflow.matching.sequenced import Habits, cut_streams
from dpuflow.matching.streams import Streams, columns_of
from dpuflow.schedules.graph import dependencies
from dpuflow.schema.rows import Op
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.model import Instance
    from dpuflow.matching.streams import Columns, Edge
    from dpuflow.schema.tables import Rows


EXPLAINED = 0.9
"""An algorithm that leaves more than a tenth of a channel's messages over has not understood it."""
UNEVEN = 2 * ELEMENT_BYTES
"""By how many bytes a channel's messages may differ in the mean: blocks are rounded up to so much."""
AHEAD = NCCL_STEPS
"""Messages by which connections of one channel may be apart: its slots."""


def structured_instances(
    exchanges: Rows,
    rows: NDArray[np.int64],
    position: NDArray[np.int64],
    near: frozenset[int] | None = None,
    announced: NDArray[np.int64] | None = None,
    nodes: NDArray[np.int64] | None = None,
    until: NDArray[np.int64] | None = None,
    buffers: Mapping[int, Buffer] = DEFAULT,
    asked: NDArray[np.int64] | None = None,
) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE. Messages that fit no algorithm are left out.

    ``position`` gives each endpoint's place in the default numbering of ranks; ``near`` as in ``Instance``;
    ``announced`` the bytes that the clear-to-send entry of each exchange allowed, 0 where none was seen;
    ``nodes`` numbers each endpoint's node, None where each is a node of its own; ``until``: when each one's
    capture ends, NEVER without one, None where nothing is known of that; ``buffers``: what slots are;
    ``asked``: for how many messages each grant was, None where each was for one.
    """
    nodes = np.arange(len(position)) if nodes is None else nodes
    columns = columns_of(exchanges)
    found: list[Instance] = []
    if announced is not None:
        found, rows = p2p_instances(
            exchanges, columns, rows, announced, position, near, nodes, buffers, asked
        )
    if not len(rows):
        return found
    dealt, at, end = connections_of(exchanges, rows)
    if announced is not None:
        lines = dealt, at, end
        credited, told = credited_instances(
            exchanges, columns, lines, announced, position, near, nodes, until, buffers
        )
        found, at, end = found + credited, at[~told], end[~told]
    channels: list[list[Instance]] = []
    habits: Habits = {}
    for streams in _channels(exchanges, dealt, at, end):
        if len(streams.edges) < 2:
            continue  # one way between two endpoints is no collective

        def read(streams: Streams) -> list[Instance]:
            # NCCL's clear-to-send entries count from 1.
            whole = bool((exchanges["sub"][streams.rows[streams.at]] == 1).all())
            messages = streams.count
            cut = cut_streams(columns, streams, Op.UNKNOWN, position, settled=whole, habits=habits, near=near)
            named = [i for i in cut if i.algorithm is not None and _is_evident(i)]
            return named if sum(len(i.rows) for i in named) >= EXPLAINED * messages else []

        jobs = [read(part) for part in _one_after_the_other(columns, streams)]
        channels += jobs if len(jobs) > 1 and min(map(len, jobs)) > 1 else [read(streams)]
    return found + _merged([each for each in channels if each], exchanges, columns)


def _one_after_the_other(columns: Columns, streams: Streams) -> list[Streams]:
    """A channel's connections by job: those of the next were first used when those before were done with.

    So may be the steps of a single operation: what comes of it must be several on each side.
    """
    begins = np.array([columns.starts[streams.rows[at:end]].min() for at, end in _spans(streams)])
    ends = np.array([columns.arrivals[streams.rows[at:end]].max() for at, end in _spans(streams)])
    order = np.argsort(begins, kind="stable")
    until = np.maximum.accumulate(ends[order])
    parts = np.split(order, np.flatnonzero(begins[order][1:] > until[:-1]) + 1)
    if len(parts) < 2 or min(len(part) for part in parts) < 2:
        return []
    return [
        Streams([streams.edges[k] for k in part], streams.rows, streams.at[part], streams.end[part])
        for part in (np.sort(part) for part in parts)
    ]


def _spans(streams: Streams) -> list[tuple[int, int]]:
    return list(zip(streams.at.tolist(), streams.end.tolist(), strict=True))


def _is_evident(instance: Instance) -> bool:
    """Two ranks that each send once may as well be asking and answering."""
    assert instance.algorithm is not None
    return len(instance.order) > 2 or bool(dependencies(instance.algorithm, 2))


def _channels(
    exchanges: Rows, dealt: NDArray[np.int64], at: NDArray[np.int64], end: NDArray[np.int64]
) -> list[Streams]:
    """Connections ``dealt[at:end]`` by channel: the k-th of each pair of endpoints that are connected.

    Which connections of different pairs make one channel is told by the sizes of their messages, where these
    differ from channel to channel, else by their order of first use.
    """
    if not len(at):
        return []
    first = dealt[at]
    pairs = list(zip(exchanges["src"][first].tolist(), exchanges["dst"][first].tolist(), strict=True))
    level = _levels(pairs, *_kinds(exchanges, dealt, at, end))
    joined = connected(range(len(pairs)), lambda number: [(level[number], end) for end in pairs[number]])
    found = []
    for members in joined:
        which = np.array(sorted(members, key=lambda number: (pairs[number], number)))
        found.append(Streams([pairs[number] for number in which.tolist()], dealt, at[which], end[which]))
    return found


def _kinds(
    exchanges: Rows, dealt: NDArray[np.int64], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[list[int], list[int]]:
    """Two numbers for the mean size of each connection's messages ``dealt[at:end]``; near sizes share them.

    A channel's blocks differ by rounding only (``UNEVEN``), one in as many as there are ranks; that is the
    first number. The capture may begin and end within an operation, at another message on each connection:
    then means differ by so many messages' share as well, and the second number allows for that.
    """
    ends = np.stack([at, end], axis=1).ravel()
    size = np.r_[exchanges["bytes"][dealt].astype(np.int64), 0]
    count = end - at
    mean = np.add.reduceat(size, ends)[::2] / count
    order = np.argsort(mean, kind="stable")
    apart = np.diff(mean[order])
    cut = (AHEAD * np.maximum.reduceat(size, ends)[::2] / count)[order]

    def numbered(slack: NDArray[np.float64]) -> list[int]:
        kind = np.empty(len(order), np.int64)
        kind[order] = np.cumsum(np.r_[0, apart > slack])
        return [int(k) for k in kind]

    exact = np.full(len(apart), float(UNEVEN))
    return numbered(exact), numbered(exact + np.maximum(cut[1:], cut[:-1]))


def _levels(pairs: Sequence[Edge], *kinds: Sequence[int]) -> list[int]:
    """For each connection, in order of first use, which one of its pair it is.

    The first of ``kinds`` that every pair has the same of tells connections apart, beside their order.
    """
    places: dict[Edge, list[int]] = {}
    for place, pair in enumerate(pairs):
        places.setdefault(pair, []).append(place)
    kind: Sequence[int] = [0] * len(pairs)
    for these in kinds:
        if len({tuple(sorted(these[place] for place in mine)) for mine in places.values()}) == 1:
            kind = these
            break
    level = [0] * len(pairs)
    for mine in places.values():
        for number, place in enumerate(sorted(mine, key=lambda p: kind[p])):
            level[place] = number
    return level


def _merged(channels: Sequence[list[Instance]], exchanges: Rows, columns: Columns) -> list[Instance]:
    """Collectives of several channels that are one: the same ranks, operation and time of their data.

    Clear-to-send entries do not count: a channel that an operation leaves out has those of the next one
    out while it still runs.
    """
    waiting = [(lane, i) for lane, channel in enumerate(channels) for i in channel]
    if not waiting:
        return []
    rows = np.concatenate([i.rows for _, i in waiting])
    bounds = np.cumsum([0, *(len(i.rows) for _, i in waiting[:-1])])
    begins = np.minimum.reduceat(columns.starts[rows], bounds)
    ends = np.maximum(columns.arrivals[rows], exchanges["data_end_ns"][rows])
    closes = np.maximum.reduceat(ends, bounds).tolist()
    merged: list[_Merging] = []
    last: dict[tuple[object, ...], _Merging] = {}
    for number in np.argsort(begins, kind="stable").tolist():
        lane, instance = waiting[number]
        key = (frozenset(instance.order), instance.op)
        before = last.get(key)
        if before is not None and begins[number] < before.end_ns and lane not in before.lanes:
            before.parts.append(instance)
            before.lanes.add(lane)
            before.end_ns = max(before.end_ns, closes[number])
        else:
            last[key] = _Merging([instance], {lane}, closes[number])
            merged.append(last[key])
    return [m.whole() for m in merged]


@dataclass
class _Merging:
    """Collectives of several channels, the first one first; when the last of them ended."""

    parts: list[Instance]
    lanes: set[int]
    end_ns: int

    def whole(self) -> Instance:
        first, sizes = self.parts[0], [i.size for i in self.parts]
        if len(self.parts) == 1:
            return first
        return replace(
            first,
            rows=np.sort(np.concatenate([i.rows for i in self.parts])),
            size=None if None in sizes else sum(size for size in sizes if size is not None),
            complete=all(i.complete for i in self.parts),
            confidence=min(i.confidence for i in self.parts),
        )
