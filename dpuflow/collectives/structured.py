"""Collectives of RoCE traffic that no header names: told from who sends how much to whom, and when.

NCCL spreads a collective over channels, each with connections of its own that carry data one way.
A channel is cut like any unnumbered stream (``sequenced``), with the operation unknown as well; then
the channels' collectives of the same turn are put together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.schedules import dependencies
from dpuflow.collectives.sequenced import Habits, cut_streams
from dpuflow.collectives.streams import columns_of, edge_streams
from dpuflow.collectives.tagged import span
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.model import Instance
    from dpuflow.tables import Rows


EXPLAINED = 0.9
"""An algorithm that leaves more than a tenth of a channel's messages over has not understood it."""


def structured_instances(
    exchanges: Rows, rows: NDArray[np.int64], position: NDArray[np.int64]
) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE. Messages that fit no algorithm are left out.

    ``position`` gives each endpoint's place in the default numbering of ranks.
    """
    starts, ends = span(exchanges)
    channels: list[list[Instance]] = []
    habits: Habits = {}
    columns = columns_of(exchanges)
    for lane in _channels(exchanges, rows):
        streams = edge_streams(exchanges, lane)
        if len(streams) < 2:
            continue  # one way between two endpoints is no collective
        # NCCL's clear-to-send entries count from 1.
        whole = all(exchanges["sub"][rows[0]] == 1 for rows in streams.values())
        found = cut_streams(columns, streams, Op.UNKNOWN, position, settled=whole, habits=habits)
        named = [i for i in found if i.algorithm is not None and _is_evident(i)]
        if sum(len(i.rows) for i in named) >= EXPLAINED * len(lane):
            channels.append(named)
    return _merged(channels, starts, ends)


def _is_evident(instance: Instance) -> bool:
    """Two ranks that each send once may as well be asking and answering."""
    assert instance.algorithm is not None
    return len(instance.order) > 2 or bool(dependencies(instance.algorithm, 2))


def _channels(exchanges: Rows, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """``rows`` by channel: the k-th connection of each pair of endpoints, where these are connected.

    Which connections of different pairs make one channel is told by their order of first use.
    """
    if not len(rows):
        return []
    src, dst = exchanges["src"][rows].astype(np.int64), exchanges["dst"][rows].astype(np.int64)
    key = (exchanges["connection"][rows].astype(np.int64) << 1) | (src > dst)
    first = np.full(int(key.max()) + 1, len(rows))
    first[key[::-1]] = np.arange(len(rows))[::-1]  # of equal keys the last assignment holds
    used = np.flatnonzero(first < len(rows))
    used = used[np.argsort(first[used], kind="stable")]
    place: dict[tuple[int, int], int] = {}
    level = np.zeros(len(used), np.int64)
    pairs = list(zip(src[first[used]].tolist(), dst[first[used]].tolist(), strict=True))
    for number, pair in enumerate(pairs):
        level[number] = place.get(pair, 0)
        place[pair] = int(level[number]) + 1
    label: dict[tuple[int, int], tuple[int, int]] = {}
    for number, pair in enumerate(pairs):
        for end in pair:
            label.setdefault((int(level[number]), end), (int(level[number]), end))
        low, high = sorted(_root(label, (int(level[number]), end)) for end in pair)
        label[high] = low
    numbers: dict[tuple[int, int], int] = {}
    channel = np.zeros(len(first), np.int64)
    for number, pair in enumerate(pairs):
        root = _root(label, (int(level[number]), pair[0]))
        channel[used[number]] = numbers.setdefault(root, len(numbers))
    of = channel[key]
    order = np.argsort(of, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(of[order])) + 1)


def _root(label: dict[tuple[int, int], tuple[int, int]], end: tuple[int, int]) -> tuple[int, int]:
    while label[end] != end:
        label[end] = label[label[end]]
        end = label[end]
    return end


def _merged(
    channels: Sequence[list[Instance]], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[Instance]:
    """Collectives of several channels that are one: the same ranks, operation and time."""
    merged: list[Instance] = []
    waiting = [i for channel in channels for i in channel]
    waiting.sort(key=lambda i: int(starts[i.rows].min()))
    last: dict[tuple[object, ...], tuple[Instance, int, set[int]]] = {}
    lanes = {id(i): number for number, channel in enumerate(channels) for i in channel}
    for instance in waiting:
        key = (frozenset(instance.order), instance.op)
        begin, end = int(starts[instance.rows].min()), int(ends[instance.rows].max())
        before = last.get(key)
        lane = lanes[id(instance)]
        if before is not None and begin < before[1] and lane not in before[2]:
            whole = before[0]
            whole.rows = np.sort(np.concatenate([whole.rows, instance.rows]))
            whole.size = None if whole.size is None or instance.size is None else whole.size + instance.size
            whole.complete &= instance.complete
            whole.confidence = min(whole.confidence, instance.confidence)
            last[key] = (whole, max(before[1], end), before[2] | {lane})
        else:
            merged.append(instance)
            last[key] = (instance, end, {lane})
    return merged
