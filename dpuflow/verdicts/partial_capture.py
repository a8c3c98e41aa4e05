"""What captures at some nodes only can say of why the ranks beside them were late.

In: collectives and entries. Out: which rows of Entries are ranks without a capture of their own, how much
later than their peers they entered, and for how long a link that nobody saw may have held them back.

Of such a rank its entry may be seen, but not when it left the collective before: it may have worked longer,
or have waited for messages on links between other nodes. A link is the same for all its messages. Where the
schedule lets the captured rank wait for that link, too, its own time in collectives bounds what the link
can do; where it does not, nothing does, and the cause stays unknown (docs/theory/verdicts.md).
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries import against_others, previous_row
from dpuflow.schedules.graph import awaited, schedule
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm

LONGEST_NS: Final = 1 << 62  # stamps of damaged captures may lie centuries apart
SLOWEST: Final = 95
"""Percentile of a captured rank's times in like collectives that tells what the network may do, as the
level of all intervals."""


class Beside(NamedTuple):
    """Per row of Entries."""

    partly: NDArray[np.bool_]  # of a collective of which not all messages were captured
    rows: NDArray[np.bool_]  # of these: the rank has no capture of its own
    lead_ns: NDArray[np.int64]  # such a rank's entry less the median of the others'; NEVER where not known
    held_ns: NDArray[np.float64]  # links may have kept it so long; infinite where nothing tells


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
    held = np.full(len(rows), np.inf)
    if not rows.any():
        return Beside(partly, rows, lead, held)
    # A captured rank entered no later than its first act: the lead over that is none too long.
    dated = (entries.exact | (entries.told & ~rows)) & (entries.enter_ns != NEVER) & partly
    lead[dated] = against_others(entries, entries.enter_ns, dated)[dated].round().astype(np.int64)
    before = previous_row(entries)
    inside = _inside_ns(instances, entries, rows, dated)
    known = np.flatnonzero(partly & (before >= 0))
    for row, last in zip(known.tolist(), before[known].tolist(), strict=True):
        number = int(entries.collective[last])
        if inside[number] >= 0:
            far = _share_unseen(instances[number], int(entries.endpoint[row])) if rows[row] else 1.0
            held[row] = inside[number] * far if np.isfinite(far) else np.inf
    return Beside(partly, rows, lead, held)


def _inside_ns(
    instances: Sequence[Instance], entries: Entries, far: NDArray[np.bool_], dated: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each collective how long captured ranks were in it at most after the last entry seen; -1: unknown.

    A link that is slow now and then need not have been so in this one: like collectives count as well.
    """
    inside = np.full(len(instances), -1)
    alike: dict[object, list[int]] = {}
    for number, instance in enumerate(instances):
        if instance.view.near is None:
            continue
        rows = np.arange(*entries.offsets[number : number + 2])
        own = rows[~far[rows] & (entries.leave_ns[rows] != NEVER)]
        if len(own) and dated[rows].any():
            began = int(entries.enter_ns[rows[dated[rows]]].max())
            inside[number] = min(max(int(entries.leave_ns[own].max()) - began, 0), LONGEST_NS)
            alike.setdefault((instance.op, instance.size, tuple(instance.order)), []).append(number)
    for numbers in alike.values():
        inside[numbers] = np.maximum(inside[numbers], round(float(np.percentile(inside[numbers], SLOWEST))))
    return inside


def _share_unseen(instance: Instance, endpoint: int) -> float:
    """How much longer than captured ranks a link may hold ``endpoint``, in terms of what it holds those."""
    if instance.algorithm is None or instance.algorithm.rooted or endpoint not in instance.order:
        return np.inf  # how large a tree is cannot be seen from within
    seats = instance.seats
    n, root = instance.rank_count, instance.root or 0
    own = [seat for seat, end in zip(seats, instance.order, strict=True) if end in (instance.view.near or ())]
    place = seats[instance.order.index(endpoint)]
    return min((_unseen(instance.algorithm, n, root, place, mine) for mine in own), default=np.inf)


@remembered
def _unseen(algorithm: Algorithm, n: int, root: int, seat: int, mine: int) -> float:
    """The most that any link holds ``seat`` longer than ``mine``, over what it holds ``mine``.

    A slow link costs a rank as much for each message that the rank's leaving depends on. That goes for links
    from ``mine``, too: what leaves a host at full pace may wait behind it.
    """
    waits, own = dict(awaited(algorithm, n, root, seat)), awaited(algorithm, n, root, mine)
    # A call may not return before the network has taken all that it sends.
    waits |= Counter((send.src, send.dst) for send in schedule(algorithm, n, root) if send.src == seat)
    shares = [(number - own[edge]) / own[edge] if own.get(edge) else np.inf for edge, number in waits.items()]
    return max([0.0, *shares])


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
