"""Entries of ranks in, how long the job took without stalls, and those stalls, out.

One or two long pauses (a checkpoint, a hang) are no more a job's usual time than one or two incidents are a
rank's habit (``chance.is_habit``): from one collective to the next counts for no more than the third
longest such time. Where many steps are told, neither is what comes in fewer than one of twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.quantities import duration
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.chance import FEWEST, is_material

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Ints
    from dpuflow.entries import Entries


TWICE: Final = 2
"""Times the usual pause: longer ones are reported; a rank that waited as long waited for a transfer
(``bulk``)."""
USUAL: Final = 95
"""Percentile of steps: what takes longer is not what a step usually takes."""
TOLD: Final = 3
"""So many stalls are listed one by one."""


@dataclass(frozen=True)
class Pause:
    """One stall, ns on the reference clock. ``endpoint`` alone kept the others waiting; None: all were
    away."""

    start_ns: int
    length_ns: int
    endpoint: int | None


@dataclass(frozen=True)
class Work:
    """How long a job took without stalls, from its first entry to its last leave, and the stalls in order."""

    ns: int
    pauses: list[Pause]


def worked_ns(start_ns: Ints, end_ns: int) -> int:
    """How long a job took whose collectives began at ``start_ns`` and were over at ``end_ns``, stalls apart.

    All of it with fewer than twice as many collectives as make a habit.
    """
    lengths = _lengths(np.sort(start_ns), end_ns)
    return int(np.minimum(lengths, _most(lengths, False)).sum())


def find_work(entries: Entries, step: Ints) -> Work:
    """The work of a job and its stalls; ``step`` is each row's step (-1: in none), as of ``find_steps``."""
    seen = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    if not seen.any():
        return Work(0, [])
    steps = bool(2 * np.count_nonzero(step[seen] >= 0) > np.count_nonzero(seen))
    seen &= (step >= 0) | (not steps)
    # What begins with its first collective: a step, or the collective itself.
    unit = step[seen] if steps else entries.collective[seen]
    order = np.lexsort((entries.enter_ns[seen], unit))
    first = order[np.r_[True, np.diff(unit[order]) != 0]]
    first = first[np.argsort(entries.enter_ns[seen][first], kind="stable")]
    start_ns = entries.enter_ns[seen][first]
    lengths = _lengths(start_ns, int(entries.leave_ns[seen].max()))
    most = _most(lengths, steps)
    worked = int(np.minimum(lengths, most).sum())
    found = []
    for at in np.flatnonzero(lengths > TWICE * most).tolist():
        length = int(lengths[at])
        if is_material(length - most, worked):
            begin, end = int(start_ns[at]), int(start_ns[at]) + length
            found.append(_longest_within(entries, begin, end))
    return Work(worked, found)


def pause_sentences(work: Work, names: Sequence[str], begin_ns: int) -> list[str]:
    """What is said of stalls; ``names`` of endpoints, ``begin_ns`` the beginning of the captures."""
    if not work.pauses:
        return []
    told = [
        f"for {duration(each.length_ns)}, {duration(each.start_ns - begin_ns)} into the captures"
        + (f" ({names[each.endpoint]} alone was that late)" if each.endpoint is not None else "")
        for each in sorted(work.pauses, key=lambda each: -each.length_ns)[:TOLD]
    ]
    times = len(work.pauses)
    more = f"; and {times - len(told)} shorter times" if times > len(told) else ""
    return [
        f"The job paused {'once' if times == 1 else f'{times} times'}: {'; '.join(told)}{more}. Pauses"
        " (checkpoints, a hang) count against no rank: the cost of lateness is a share of the other"
        f" {duration(work.ns)}."
    ]


def _lengths(start_ns: Ints, end_ns: int) -> Ints:
    lengths: Ints = np.diff(np.append(start_ns, end_ns)) if len(start_ns) else np.zeros(0, np.int64)
    return np.maximum(lengths, 0)


def _most(lengths: Ints, steps: bool) -> int:
    """What one counts for at the most."""
    if len(lengths) < 2 * FEWEST:
        return int(lengths.max(initial=0))
    third = int(np.sort(lengths)[-FEWEST])
    return min(third, int(np.percentile(lengths, USUAL, method="higher"))) if steps else third


def _longest_within(entries: Entries, begin_ns: int, end_ns: int) -> Pause:
    """The longest time between two entries from one time to the other, and who alone ended it."""
    rows = np.flatnonzero((entries.enter_ns >= begin_ns) & (entries.enter_ns <= end_ns))
    rows = rows[np.argsort(entries.enter_ns[rows], kind="stable")]
    if len(rows) < 2:
        return Pause(begin_ns, end_ns - begin_ns, None)
    enter = entries.enter_ns[rows]
    at = int(np.argmax(np.diff(enter)))
    last = rows[at + 1]
    others = (entries.collective == entries.collective[last]) & (entries.enter_ns != NEVER)
    others[last] = False
    alone = bool(others.any()) and bool((entries.enter_ns[others] <= enter[at]).all())
    endpoint = int(entries.endpoint[last]) if alone else None
    return Pause(int(enter[at]), int(enter[at + 1] - enter[at]), endpoint)
