"""Collectives of RoCE traffic that no header names: told from who sends how much to whom, and when.

NCCL spreads a collective over channels, each with connections of its own that carry data one way.
A channel is cut like any unnumbered stream (``sequenced``), with the operation unknown as well; then
the channels' collectives of the same turn are put together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
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
from dpuflow.schema.rows import NEVER, Op

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
        channels.append(_read(job, streams))
    return found + _merged([each for each in channels if each], exchanges, columns)


def _read(job: Job, streams: Streams) -> list[Instance]:
    """The collectives of a channel; none where they leave too much of it over."""
    # NCCL's clear-to-send entries count from 1.
    whole = bool((job.exchanges["sub"][streams.rows[streams.at]] == 1).all())
    messages = streams.count
    cut = cut_streams(job, streams, Op.UNKNOWN, settled=whole)
    named = [i for i in cut if i.algorithm is not None and _is_evident(i)]
    return named if sum(len(i.rows) for i in named) >= MOST * messages else []


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
    begins = [int(columns.starts[i.rows].min()) for _, i in waiting]
    merged: list[dict[int, Instance]] = []  # by channel
    last: dict[tuple[object, ...], tuple[dict[int, Instance], int]] = {}  # with when it ends
    for number in np.argsort(begins, kind="stable").tolist():
        lane, instance = waiting[number]
        key = (frozenset(instance.order), instance.op)
        end = int(np.maximum(columns.arrivals[instance.rows], exchanges["data_end_ns"][instance.rows]).max())
        parts, until = last.get(key, ({}, NEVER))
        if begins[number] < until and lane not in parts:
            parts[lane], end = instance, max(until, end)
        else:
            parts = {lane: instance}
            merged.append(parts)
        last[key] = parts, end
    return [_together(list(parts.values())) for parts in merged]


def _together(parts: Sequence[Instance]) -> Instance:
    """One collective of those of several channels, the first one first."""
    first, sizes = parts[0], [i.size for i in parts if i.size is not None]
    if len(parts) == 1:
        return first
    return replace(
        first,
        rows=np.sort(np.concatenate([i.rows for i in parts])),
        size=sum(sizes) if len(sizes) == len(parts) else None,
        complete=all(i.complete for i in parts),
        confidence=min(i.confidence for i in parts),
    )
