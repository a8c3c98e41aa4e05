"""What the message builders share to let finished rows go while they run on: lists that skip rows, clocks.

In: arrays whose rows name each other by number. Out: the same for the rows that are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


def places(keep: NDArray[np.bool_]) -> Ints:
    """The new number of each row once those that are False are gone; -1 for these."""
    return np.where(keep, np.cumsum(keep) - 1, -1)


def nearest_kept(pointer: NDArray[np.int32], keep: NDArray[np.bool_]) -> Ints:
    """For each row the next one along ``pointer`` (-1 ends a list) that is kept, by its old number."""
    found = pointer.astype(np.int64)
    while True:
        gone = np.flatnonzero((found >= 0) & ~keep[found])
        if not len(gone):
            return found
        found[gone] = found[found[gone]]


def moved(rows: NDArray[np.generic], place: Ints) -> Ints:
    """Row numbers translated; -1 stays, and stands for what is gone."""
    old = rows.astype(np.int64)
    return np.where(old >= 0, place[old], -1) if len(place) else np.full(len(old), -1)


def onto_kept(rows: NDArray[np.generic], along: Ints, keep: NDArray[np.bool_], place: Ints) -> Ints:
    """Row numbers translated; a row that is gone gives way to the nearest one kept ``along`` its list."""
    old = rows.astype(np.int64)
    inside = np.flatnonzero(old >= 0)
    gone = inside[~keep[old[inside]]]
    old[gone] = along[old[gone]]
    return moved(old, place)


def shift_times(rows: Rows, names: Iterable[str], step_ns: int, unset: tuple[int, ...] = (NEVER,)) -> None:
    """Move the times ``names``, but for those that stand for no time, in place."""
    for name in names:
        times = rows[name]
        times[~np.isin(times, unset)] += step_ns


def shift_frames(rows: Rows, names: Iterable[str], frames: int) -> None:
    """Take ``frames`` off numbers of frames, in place; none falls below 0."""
    for name in names:
        rows[name] = np.maximum(rows[name].astype(np.int64) - frames, 0)
