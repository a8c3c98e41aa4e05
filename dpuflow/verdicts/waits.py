"""What a rank may have waited for besides its peers in the collective that it entered last.

Where a communicator cannot be read, its ranks spend time in collectives that nobody sees, and come late to
those that are seen. Collectives of one communicator come one after the other, while those of another go on
beside them: the next bucket of gradients has to wait until the one before is reduced.

Of a rank without a capture of its own its entry may be seen, but not when it left the collective before: it
may have worked longer, or have waited for messages on links between other nodes. So whose doing it was stays
unknown (docs/theory/verdicts.md).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries import against_others
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Op, Wire

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


class Beside(NamedTuple):
    """Per row of Entries."""

    partly: NDArray[np.bool_]  # of a collective of which not all messages were captured
    rows: NDArray[np.bool_]  # of these: the rank has no capture of its own
    lead_ns: NDArray[np.int64]  # such a rank's entry less the median of the others'; NEVER where not known


def seen_from_beside(instances: Sequence[Instance], entries: Entries) -> Beside:
    """Tell the rows of ranks without a capture of their own, and what is known of them."""
    count = np.diff(entries.offsets)
    partly = np.repeat(np.array([i.view.near is not None for i in instances], bool), count)
    rows = partly.copy()
    for number in np.flatnonzero(partly[entries.offsets[:-1]] if len(count) else count).tolist():
        near = instances[number].view.near or frozenset()
        first = int(entries.offsets[number])
        rows[first : first + int(count[number])] = [end not in near for end in instances[number].order]
    lead = np.full(len(rows), NEVER)
    if not rows.any():
        return Beside(partly, rows, lead)
    # A captured rank entered no later than its first act: the lead over that is none too long.
    dated = (entries.exact | (entries.told & ~rows)) & (entries.enter_ns != NEVER) & partly
    lead[dated] = against_others(entries, entries.enter_ns, dated)[dated].round().astype(np.int64)
    return Beside(partly, rows, lead)


def never_captured(instances: Sequence[Instance]) -> frozenset[int]:
    """Endpoints of collectives of which not all messages were captured, that have no capture of their own."""
    partly = [instance for instance in instances if instance.view.near is not None]
    ends = {end for instance in partly for end in instance.order}
    return frozenset(ends.difference(*(instance.view.near or () for instance in partly)))


def busy_elsewhere(instances: Sequence[Instance]) -> frozenset[int]:
    """Endpoints without a capture that are in some groups of a captured one, but not in all.

    The captured rank belongs to several communicators; so will its peers, and they may have been kept by
    one of which nothing was captured. The same goes for point-to-point transfers: in a pipeline all ranks
    have some, and wait for them.
    """
    groups: dict[frozenset[int], int] = {}
    near: set[int] = set()
    for instance in instances:
        # How many ranks a tree has is not seen from within.
        tree = instance.algorithm is None or instance.algorithm.rooted
        if instance.view.near is not None and instance.op != Op.SEND_RECV and not tree:
            near |= instance.view.near
            members = frozenset(instance.order)
            groups[members] = max(groups.get(members, 0), instance.placement.ranks or len(members))
    found: set[int] = set()
    if any(i.view.near is not None and i.op == Op.SEND_RECV for i in instances):
        found.update(*groups)
    for (one, many), (other, others) in combinations(groups.items(), 2):
        # Of one communicator different algorithms show different peers, never more than it has ranks.
        if one & other & near and len(one | other) > min(many, others):
            found |= one ^ other
    return frozenset(found - near)
