"""GPUs behind one adapter: a ring's messages out of a node in; when the last of its GPUs had entered, out.

A ring passes all GPUs of a node, and one of them is at the exit. In step k of its first loop that one sends
what the GPU k places before it was the first to send: it needs so many GPUs of its node, and nothing from
another node. So the first messages of these steps, as many as a node has GPUs, show one GPU after the other:
each had entered by then, and where a message came long after the one before it and after its credit, it had
waited for that GPU alone (NCCL 2.30, src/device/all_reduce.h runRing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schedules.graph import edge_sizes
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.places import Places
    from dpuflow.matching import Instance

    Ints = NDArray[np.int64]

FAR_BEYOND: Final = 3.0
"""Times the usual distance of two steps' messages beyond which the later one had waited: for a GPU, where
that goes for the time since all else that it may have waited for, too."""


class Within(NamedTuple):
    """Rows of Places whose last GPU shows: what dates it."""

    rows: Ints
    at: Ints  # which exchange
    exact: NDArray[np.bool_]  # it had waited for a GPU alone; else for its credit, perhaps
    inner: NDArray[np.bool_]  # that GPU is not the one at the exit
    lag_ns: Ints  # so much before or after that it may have entered
    since_ns: Ints  # ... but no earlier than this; NEVER where nothing shows it


class _Lane(NamedTuple):
    """The first messages of a lane's first steps."""

    row: int  # that sends them
    at: Ints  # which exchanges
    apart: Ints  # how long after the step before, of all but the first
    idle: Ints  # ... and after all else that they may have waited for
    lay_ns: int  # how long the first one's credit lay there


def gpus_within(instance: Instance) -> int:
    """How many GPUs each adapter serves where a ring shows each of them; 0 where none does so."""
    ring = instance.algorithm is not None and instance.algorithm.name == "ring"
    known = instance.near is None and instance.hides_ranks and not instance.inside and not instance.apart
    n = len(instance.order)
    if not (ring and known and instance.complete) or n < 2 or instance.ranks % n:
        return 0
    if len(set(instance.nodes)) < n:  # several adapters a node
        return 0
    return instance.ranks // n


def last_within(places: Places) -> Within:
    """When the last GPU behind each adapter had entered, where more shows than when that at the exit had."""
    base = np.r_[0, np.cumsum([len(i.rows) for i in places.instances])]
    lanes = []
    for number, instance in enumerate(places.instances):
        gpus = gpus_within(instance)
        if gpus and instance.algorithm is not None:
            steps = max(map(len, edge_sizes(instance.algorithm, instance.ranks).values()))
            mine = np.arange(base[number], base[number + 1])
            lanes += list(_lanes(places.picked, places.sender, mine, gpus, steps))
    if not lanes:
        none = np.zeros(0, np.int64)
        return Within(none, none, none > 0, none > 0, none, none)
    apart, idle = (
        FAR_BEYOND * np.median(np.concatenate([getattr(lane, name) for lane in lanes]))
        for name in ("apart", "idle")
    )
    found: dict[int, tuple[int, ...]] = {}
    for lane in lanes:
        entry = _entry(places.picked["data_ns"], lane, float(apart), float(idle))
        # One kernel works on all channels: the GPU had entered when the first of them shows it.
        found[lane.row] = min(found.get(lane.row, entry), entry)
    rows = np.array(sorted(found), np.int64)
    _, waited, at, inner, lag, since = np.array([found[row] for row in rows.tolist()], np.int64).T
    return Within(rows, at, waited == 0, inner > 0, lag, since)


def _lanes(picked: Picked, sender: Ints, mine: Ints, gpus: int, steps: int) -> Iterator[_Lane]:
    mine = mine[np.lexsort((picked["order"][mine], picked["connection"][mine], sender[mine]))]
    line = picked["connection"][mine].astype(np.int64) * len(picked) + sender[mine]
    for lane in np.split(mine, np.flatnonzero(np.diff(line)) + 1):
        slices, rest = divmod(len(lane), steps)
        if rest or not slices:
            continue
        at = lane[: gpus * slices : slices]
        before = lane[slices - 1 : (gpus - 1) * slices : slices]
        start, end = picked["data_ns"][at], picked["data_end_ns"][before]
        credits = picked["grant_arrived_ns"][at]
        if len(at) == gpus and (start != NEVER).all() and (end != NEVER).all():
            held = np.maximum(end, credits[1:])
            yield _Lane(int(sender[at[0]]), at, np.diff(start), np.maximum(start[1:] - held, 0),
                        int(start[0] - credits[0]) if credits[0] != NEVER else 0)  # fmt: skip


def _entry(data_ns: Ints, lane: _Lane, apart: float, idle: float) -> tuple[int, ...]:
    """When the last GPU had entered, whether its message may have waited for a credit, which exchange that
    is, whether it is another GPU than that at the exit, how far that may be off, and since when it may be."""
    when, waited, which, inner, lag = int(data_ns[lane.at[0]]), False, int(lane.at[0]), False, 0
    sure = when if lane.lay_ns > idle else NEVER
    for at, since, free in zip(lane.at[1:].tolist(), lane.apart.tolist(), lane.idle.tolist(), strict=True):
        lag += since
        if since > apart:
            when, waited, which, inner, lag = int(data_ns[at]), free <= idle, at, True, 0
            sure = sure if waited else when
    return when, waited, which, inner, lag, sure
