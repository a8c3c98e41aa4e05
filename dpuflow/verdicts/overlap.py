"""Whose work goes on beside its collectives: entries in, the rows that do not wait for the one before out.

A rank that waits for a collective enters the next one so long after it has left the one before as its
work takes. One that launches it and goes on (buckets of gradients, weights that are gathered ahead) enters
the next one so long after it *entered* the one before: nobody had waited for when that ended. What such a
rank is late by it may have brought along from before, though it left the one in between with all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.persistence import LATE_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance

SIGN_TEST: Final = 2.326
"""Standard deviations beyond which one in a hundred values of a normal distribution lie."""


class Overlap(NamedTuple):
    """Per row of Entries."""

    rows: NDArray[np.bool_]  # it keeps to when its rank entered the collective before (``find_overlap``)
    group: NDArray[np.int64]
    step: NDArray[np.int64]  # -1: in none

    def less_carried(self, excess: NDArray[np.int64], entries: Entries) -> NDArray[np.int64]:
        """How much longer ranks worked (``excess``, NEVER where not known) less what they brought along.

        Of groups with such rows: there a rank that was late once in a step may stay so until the step ends,
        and only what comes on top of that is new. So the most that a rank worked longer before in the step is
        taken off, as far as it was longer at all.
        """
        concerned = np.isin(self.group, np.unique(self.group[self.rows]))
        rows = np.flatnonzero(concerned & (self.step >= 0) & (excess != NEVER))
        keys = np.stack([entries.endpoint[rows], self.step[rows], self.group[rows]])
        order = np.lexsort((entries.enter_ns[rows], *keys[::-1]))
        out = excess.copy()
        new = (np.diff(keys[:, order], axis=1) != 0).any(axis=0)
        for part in np.split(rows[order], np.flatnonzero(new) + 1):
            before = np.maximum.accumulate(np.concatenate([[0], excess[part]]))[:-1]
            out[part] = np.minimum(excess[part], np.maximum(excess[part] - before, 0))
        return np.asarray(out, np.int64)


def find_overlap(
    instances: Sequence[Instance],
    entries: Entries,
    last: NDArray[np.int64],
    group: NDArray[np.int64],
    step: NDArray[np.int64],
) -> Overlap:
    """Rows that keep to when their ranks entered the collective before, rather than to when they left it.

    ``last`` is each row's collective before, the same one for all ranks, else nothing is said. ``group``
    numbers each collective's group, ``step`` is each row's step (-1: in none). Told place by place of the
    step: of the collectives before which the time from entering to leaving was unusual, so many must have
    been entered as usual after the entering that chance makes it less than once in a hundred times.
    """
    found = np.zeros(len(last), bool)
    overlap = Overlap(found, group[entries.collective], step)
    # Of who may have waited for an input before its first message it is not known when it entered.
    known = (last >= 0) & entries.exact & entries.exact[last] & (entries.leave_ns[last] != NEVER)
    rows = np.flatnonzero(known & _same_before(entries, last, known))
    if not len(rows):
        return overlap
    place = _places(instances, entries, group, step, rows)
    both = np.unique(np.stack([place, entries.endpoint[rows]]), axis=1, return_inverse=True)[1].reshape(-1)
    times = [entries.enter_ns[rows], entries.enter_ns[last[rows]], entries.leave_ns[last[rows]]]
    since_entering, since_leaving, inside = (
        np.abs(_from_median(times[i] - times[j], both)) for i, j in ((0, 1), (0, 2), (2, 1))
    )
    of = entries.collective[rows]
    whole = [np.bincount(of, each) for each in (since_entering, since_leaving, inside)]
    places = np.zeros(len(whole[0]), np.int64)
    places[of] = place
    seen = np.unique(of)
    order = seen[np.argsort(places[seen], kind="stable")]
    for mine in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        entering, leaving, inside = (each[mine] for each in whole)
        telling = inside > np.minimum(entering, leaving)  # else both come to much the same
        votes, total = int((entering < leaving)[telling].sum()), int(telling.sum())
        if total and votes >= max(LATE_SHARE * total, (total + SIGN_TEST * total**0.5) / 2):
            found[rows[np.isin(of, mine)]] = True
    return overlap


def _same_before(entries: Entries, last: NDArray[np.int64], known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows of collectives whose ranks, as far as known, had all been in the same one before."""
    before = np.where(known, entries.collective[last], -1)
    low = np.where(known, before, np.iinfo(np.int64).max)
    least, most = (f.reduceat(v, entries.offsets[:-1]) for f, v in ((np.minimum, low), (np.maximum, before)))
    return np.asarray((least == most)[entries.collective], np.bool_)


def _places(
    instances: Sequence[Instance],
    entries: Entries,
    group: NDArray[np.int64],
    step: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Numbers of places in the step: the k-th collective of its kind. Outside of steps its kind alone."""
    kinds: dict[tuple[object, ...], int] = {}
    kind = np.array(
        [
            kinds.setdefault((i.op, i.size, g), len(kinds))
            for i, g in zip(instances, group.tolist(), strict=True)
        ]
    )[entries.collective[rows]]
    keys = np.stack([entries.endpoint[rows], step[rows], kind])
    order = np.lexsort((entries.collective[rows], *keys[::-1]))
    new = np.r_[True, (np.diff(keys[:, order], axis=1) != 0).any(axis=0)]
    starts = np.flatnonzero(new)
    number = np.empty(len(rows), np.int64)
    number[order] = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    number[step[rows] < 0] = -1
    return np.asarray(
        np.unique(np.stack([kind, number]), axis=1, return_inverse=True)[1].reshape(-1), np.int64
    )


def _from_median(values: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each value less the median of those of its class."""
    order = np.lexsort((values, of))
    starts = np.flatnonzero(np.r_[True, np.diff(of[order]) != 0])
    count = np.diff(np.r_[starts, len(order)])
    ordered = values[order]
    middle = (ordered[starts + (count - 1) // 2] + ordered[starts + count // 2]) / 2
    out = np.empty(len(values), np.float64)
    out[order] = ordered - np.repeat(middle, count)
    return out
