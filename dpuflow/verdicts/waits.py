"""What a rank may have waited for besides its peers in the collective that it entered last.

Where a communicator cannot be read, its ranks spend time in collectives that nobody sees, and come late to
those that are seen. Collectives of one communicator come one after the other, while those of another go on
beside them: the next bucket of gradients has to wait until the one before is reduced. And a rank that
launches a collective and goes on (weights that are gathered ahead) enters the next one so long after it
*entered* the one before as its work takes: what it is late by it may have brought along from before, though
it left the one in between with all others.

Of a rank without a capture of its own its entry may be seen, but not when it left the collective before: it
may have worked longer, or have waited for messages on links between other nodes. So whose doing it was stays
unknown (docs/theory/verdicts.md).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import Latest, distinct, medians
from dpuflow.entries import against_others
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Op, Wire
from dpuflow.verdicts.chance import LATE_SHARE
from dpuflow.verdicts.steps import places_in_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


_NOT_WAITED_FOR: Final = (Wire.TCP_BURST, Wire.ROCE_WRITE, Wire.ROCE_READ)
"""Other programs' streams, and pages that are moved beside the collectives (see ``bulk``)."""


def group_before(entries: Entries, group: Ints) -> Ints:
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


def left_before(entries: Entries, kin: Ints) -> Ints:
    """Per row when its rank had left ``kin`` (``group_before``); NEVER where it had not when it entered."""
    until = np.where(kin >= 0, entries.leave_ns[kin], NEVER)
    return np.where(until <= entries.enter_ns, until, NEVER)


def left_any(entries: Entries) -> Ints:
    """Per row when its rank had last left any collective before it entered, in whatever order it had entered
    them; NEVER where it had left none. Streams wait for their own last one, and no packet names the stream.
    """
    until = np.full(len(entries.endpoint), NEVER)
    seen = entries.enter_ns != NEVER
    for each in distinct(entries.endpoint[seen]).tolist():
        mine = (rows := entries.of[each])[seen[rows]]
        left = np.sort(entries.leave_ns[mine])
        at = np.searchsorted(left, entries.enter_ns[mine]) - 1  # not its own
        until[mine] = np.where(at >= 0, left[np.maximum(at, 0)], NEVER)
    return until


def unread_until(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Ints:
    """Per row of Entries when the last message not matched to a collective had reached or left its rank
    before it entered; NEVER without one."""
    until = np.full(len(entries.endpoint), NEVER)
    read = np.zeros(len(exchanges), bool)
    for instance in instances:
        read[instance.rows] = True
    rows = exchanges[~read & (exchanges["data_ns"] != NEVER) & ~np.isin(exchanges["wire"], _NOT_WAITED_FOR)]
    if not len(rows):
        return until
    # Of messages between others nobody here waits.
    ends = distinct(entries.endpoint)
    rows = rows[np.isin(rows["src"], ends) & np.isin(rows["dst"], ends)]
    end = np.concatenate([rows["src"], rows["dst"], [0]]).astype(np.int64)
    when = np.concatenate([rows["data_end_ns"], there_ns(rows), [NEVER]])
    return when[Latest(end, when).by(entries.endpoint, entries.enter_ns)]


SIGN_TEST: Final = 2.326
"""Standard deviations beyond which one in a hundred values of a normal distribution lie."""


class Overlap(NamedTuple):
    """Per row of Entries."""

    rows: Bools  # it keeps to when its rank entered the collective before (``find_overlap``)
    group: Ints
    step: Ints  # -1: in none

    def less_carried(self, excess: Ints, entries: Entries) -> Ints:
        """How much longer ranks worked (``excess``, NEVER where not known) less what they brought along.

        Of groups with such rows: there a rank that was late once in a step may stay so until the step ends,
        and only what comes on top of that is new. So the most that a rank worked longer before in the step is
        taken off, as far as it was longer at all.
        """
        concerned = np.isin(self.group, distinct(self.group[self.rows]))
        rows = np.flatnonzero(concerned & (self.step >= 0) & (excess != NEVER))
        keys = np.stack([entries.endpoint[rows], self.step[rows], self.group[rows]])
        order = np.lexsort((entries.enter_ns[rows], *keys[::-1]))
        out = excess.copy()
        new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
        for part in np.split(rows[order], np.flatnonzero(new) + 1):
            before = np.maximum.accumulate(np.concatenate([[0], excess[part]]))[:-1]
            out[part] = np.minimum(excess[part], np.maximum(excess[part] - before, 0))
        return np.asarray(out, np.int64)


def find_overlap(kind: Ints, entries: Entries, last: Ints, group: Ints, step: Ints) -> Overlap:
    """Rows whose timing follows when their ranks entered the previous collective, not when they left it.

    ``last`` is each row's collective before, the same one for all ranks, else nothing is said. ``kind`` and
    ``group`` are each collective's (``kinds_of``), ``step`` is each row's (-1: in none). Told place by place
    of the step: of the collectives before which the time from entering to leaving was unusual, so many must
    have been entered as usual after the entering that chance makes it less than once in a hundred times.
    """
    found = np.zeros(len(last), bool)
    overlap = Overlap(found, group[entries.collective], step)
    # Of who may have waited for an input before its first message it is not known when it entered.
    known = (last >= 0) & entries.exact & entries.exact[last] & (entries.leave_ns[last] != NEVER)
    rows = np.flatnonzero(known & _same_before(entries, last, known))
    if not len(rows):
        return overlap
    # The same work comes at the same place of each step; outside of steps at collectives of one kind.
    place = np.stack([kind[entries.collective[rows]], places_in_steps(step, entries.endpoint)[rows]])
    place = np.unique(place, axis=1, return_inverse=True)[1].reshape(-1)
    both = np.unique(np.stack([place, entries.endpoint[rows]]), axis=1, return_inverse=True)[1].reshape(-1)
    enter, before, left = entries.enter_ns[rows], entries.enter_ns[last[rows]], entries.leave_ns[last[rows]]
    since_entering, since_leaving, inside = (
        np.abs(times - medians(times, both)[both]) for times in (enter - before, enter - left, left - before)
    )
    of = entries.collective[rows]
    whole = [np.bincount(of, each) for each in (since_entering, since_leaving, inside)]
    places = np.zeros(len(whole[0]), np.int64)
    places[of] = place
    seen = distinct(of)
    order = seen[np.argsort(places[seen], kind="stable")]
    for mine in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        entering, leaving, inside = (each[mine] for each in whole)
        telling = inside > np.minimum(entering, leaving)  # else both come to much the same
        votes, total = int((entering < leaving)[telling].sum()), int(telling.sum())
        if total and votes >= max(LATE_SHARE * total, (total + SIGN_TEST * total**0.5) / 2):
            found[rows[np.isin(of, mine)]] = True
    return overlap


def _same_before(entries: Entries, last: Ints, known: Bools) -> Bools:
    """Rows of collectives whose ranks, as far as known, all came from the same previous collective."""
    before = np.where(known, entries.collective[last], -1)
    low = np.where(known, before, FAR)
    least, most = (f.reduceat(v, entries.offsets[:-1]) for f, v in ((np.minimum, low), (np.maximum, before)))
    return np.asarray((least == most)[entries.collective], np.bool_)


class Beside(NamedTuple):
    """Per row of Entries."""

    partly: Bools  # of a collective of which not all messages were captured
    rows: Bools  # of these: the rank has no capture of its own
    lead_ns: Ints  # such a rank's entry less the median of the others'; NEVER where not known
    least: Bools  # ... may be more: of most of these others only their first acts are known


def seen_from_beside(instances: Sequence[Instance], entries: Entries) -> Beside:
    """The rows of ranks without a capture of their own, and what is known of them."""
    count = np.diff(entries.offsets)
    partly = np.repeat(np.array([i.view.near is not None for i in instances], bool), count)
    rows = partly.copy()
    for number in np.flatnonzero(partly[entries.offsets[:-1]] if len(count) else count).tolist():
        near = instances[number].view.near or frozenset()
        first = int(entries.offsets[number])
        rows[first : first + int(count[number])] = [end not in near for end in instances[number].order]
    lead = np.full(len(rows), NEVER)
    if not rows.any():
        return Beside(partly, rows, lead, rows)
    # A captured rank entered no later than its first act: the lead over that is none too long.
    dated = (entries.exact | (entries.told & ~rows)) & (entries.enter_ns != NEVER) & partly
    others, sure = (
        np.bincount(entries.collective[mine], minlength=len(count))[entries.collective] - mine
        for mine in (dated, dated & entries.exact)
    )
    dated &= others > 0
    lead[dated] = against_others(entries, entries.enter_ns, dated)[dated].round().astype(np.int64)
    return Beside(partly, rows, lead, rows & dated & (2 * sure < others))


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
