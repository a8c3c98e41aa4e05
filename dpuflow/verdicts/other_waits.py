"""Until when a rank may have waited for something else than the collective that it entered last.

Where a communicator cannot be read, its ranks spend time in collectives that nobody sees, and come late to
those that are seen. And collectives of one communicator come one after the other, while those of another go
on beside them: the next bucket of gradients has to wait until the one before is reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

_NOT_WAITED_FOR: Final = (Wire.TCP_BURST, Wire.ROCE_WRITE, Wire.ROCE_READ)
"""Other programs' streams, and pages that are moved beside the collectives (see ``bulk``)."""


def group_before(entries: Entries, group: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row of Entries that of its rank's collective before in the same group, -1 for none.

    ``group`` numbers each collective's group.
    """
    found = np.full(len(entries.endpoint), -1)
    seen = np.flatnonzero(entries.enter_ns != NEVER)
    of = group[entries.collective[seen]]
    order = seen[np.lexsort((entries.collective[seen], entries.enter_ns[seen], of, entries.endpoint[seen]))]
    before, after = order[:-1], order[1:]
    same = entries.endpoint[before] == entries.endpoint[after]
    same &= group[entries.collective[before]] == group[entries.collective[after]]
    found[after[same]] = before[same]
    return found


def left_before(entries: Entries, kin: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per row when its rank had left ``kin`` (``group_before``); NEVER where it had not when it entered."""
    until = np.where(kin >= 0, entries.leave_ns[kin], NEVER)
    return np.where(until <= entries.enter_ns, until, NEVER)


def left_any(entries: Entries) -> NDArray[np.int64]:
    """Per row when its rank had last left any collective before it entered, in whatever order it had entered
    them; NEVER where it had left none. Streams wait for their own last one, and no packet names the stream.
    """
    until = np.full(len(entries.endpoint), NEVER)
    seen = entries.enter_ns != NEVER
    for each in np.unique(entries.endpoint[seen]).tolist():
        mine = np.flatnonzero((entries.endpoint == each) & seen)
        left = np.sort(entries.leave_ns[mine])
        at = np.searchsorted(left, entries.enter_ns[mine]) - 1  # not its own
        until[mine] = np.where(at >= 0, left[np.maximum(at, 0)], NEVER)
    return until


def unread_until(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> NDArray[np.int64]:
    """Per row of Entries when the last message that no collective was made of was there at its rank, or had
    left it, before it entered; NEVER without one."""
    until = np.full(len(entries.endpoint), NEVER)
    read = np.zeros(len(exchanges), bool)
    for instance in instances:
        read[instance.rows] = True
    rows = exchanges[~read & (exchanges["data_ns"] != NEVER) & ~np.isin(exchanges["wire"], _NOT_WAITED_FOR)]
    if not len(rows):
        return until
    # Of messages between others nobody here waits.
    ends = np.unique(entries.endpoint)
    rows = rows[np.isin(rows["src"], ends) & np.isin(rows["dst"], ends)]
    end = np.concatenate([rows["src"], rows["dst"]]).astype(np.int64)
    when = np.concatenate([rows["data_end_ns"], there_ns(rows)])
    for each in np.unique(end).tolist():
        times = np.sort(when[(end == each) & (when != NEVER)])
        mine = np.flatnonzero((entries.endpoint == each) & (entries.enter_ns != NEVER))
        at = np.searchsorted(times, entries.enter_ns[mine], side="right") - 1
        until[mine[at >= 0]] = times[at[at >= 0]]
    return until
