"""Collectives of RoCE traffic that no header names: told from who sends how much to whom, and when.

NCCL spreads a collective over channels, each with connections of its own that carry data one way.
A channel is cut like any unnumbered stream (``sequenced``), with the operation unknown as well; then
the channels' collectives of the same turn are put together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.credited import credited_instances
from dpuflow.matching.levels import MOST
from dpuflow.matching.p2p import p2p_instances
from dpuflow.matching.pipes import connections_of
from dpuflow.matching.sequenced import cut_streams
from dpuflow.matching.streams import Streams
from dpuflow.schedules.graph import dependencies
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance, Job
    from dpuflow.matching.streams import Columns, Edge
    from dpuflow.schema.tables import Rows


def structured_instances(job: Job, rows: NDArray[np.int64]) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE. Messages that fit no algorithm are left out."""
    exchanges, columns = job.exchanges, job.columns
    found: list[Instance] = []
    if job.announced is not None:
        found, rows = p2p_instances(job, rows, job.announced)
    if not len(rows):
        return found
    dealt, at, end = connections_of(exchanges, rows)
    if job.announced is not None:
        credited, told = credited_instances(job, (dealt, at, end), job.announced)
        found, at, end = found + credited, at[~told], end[~told]
    channels: list[list[Instance]] = []
    for streams in _channels(exchanges, dealt, at, end):
        if len(streams.edges) < 2:
            continue  # one way between two endpoints is no collective
        jobs = [_read(job, part) for part in _one_after_the_other(columns, streams)]
        channels += jobs if len(jobs) > 1 and min(map(len, jobs)) > 1 else [_read(job, streams)]
    return found + _merged([each for each in channels if each], exchanges, columns)


def _read(job: Job, streams: Streams) -> list[Instance]:
    """The collectives of a channel; none where they leave too much of it over."""
    # NCCL's clear-to-send entries count from 1.
    whole = bool((job.exchanges["sub"][streams.rows[streams.at]] == 1).all())
    messages = streams.count
    cut = cut_streams(job, streams, Op.UNKNOWN, settled=whole)
    named = [i for i in cut if i.algorithm is not None and _is_evident(i)]
    return named if sum(len(i.rows) for i in named) >= MOST * messages else []


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

    Connections of different pairs that make one channel are told by their order of first use.
    """
    if not len(at):
        return []
    first = dealt[at]
    pairs = list(zip(exchanges["src"][first].tolist(), exchanges["dst"][first].tolist(), strict=True))
    seen: Counter[Edge] = Counter()
    level = []
    for pair in pairs:
        level.append(seen[pair])
        seen[pair] += 1
    joined = connected(range(len(pairs)), lambda number: [(level[number], end) for end in pairs[number]])
    found = []
    for members in joined:
        which = np.array(sorted(members, key=lambda number: (pairs[number], number)))
        found.append(Streams([pairs[number] for number in which.tolist()], dealt, at[which], end[which]))
    return found


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
