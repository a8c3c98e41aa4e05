"""Upper bounds for ranks that may have been the last, where not all ranks were captured.

In: entries and lateness. Out: the same, with bounds for those ranks of which no lateness can be claimed, but
of which a message came so late that they, or others that they wait for, are likely to have been the last
(docs/inference/one-node.md, "who may have been the last").

Such a rank had entered when the message left. How late that is at most follows from when any rank can have
entered at the earliest: not before the ranks that were seen had entered the collective before, if that
was one which nobody leaves before all have entered. Nobody is judged by these bounds; they are for readers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries.build import Entries, Rule
from dpuflow.entries.relative import AT_LEAST, AT_MOST, UNOBSERVABLE, Relative, cautious
from dpuflow.schema.rows import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching import Instance

TYING: Final = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER)
"""Operations that no rank leaves before all have entered: each needs something of everyone."""


class Bounded(NamedTuple):
    """Entries and lateness with upper bounds; ``later_ns``: for rows that may have been the last, how much
    later than all ranks whose entries are known they, or others that they wait for, are likely to have
    entered, where that is beyond the noise; NEVER for others.
    """

    entries: Entries
    relative: Relative
    later_ns: NDArray[np.int64]


def bound_above(
    entries: Entries,
    relative: Relative,
    instances: Sequence[Instance],
    short: NDArray[np.bool_],
    noise_ns: NDArray[np.int64],
) -> Bounded:
    """``short`` marks collectives with ranks that no capture saw (``relative.short_of_ranks``).

    ``noise_ns``: how far entries of each row's group differ by chance.
    """
    later = np.full(len(entries.rule), NEVER)
    relative = relative._replace(lateness_ns=cautious(entries, relative, short))
    numbers = np.flatnonzero(short & entries.whole[entries.offsets[:-1]])
    if not len(numbers):
        return Bounded(entries, relative, later)
    floors = _floors(entries, instances)
    rule, enter = entries.rule.copy(), relative.enter_ns.copy()
    act, after = entries.act.copy(), entries.after.copy()
    lateness, bound, error = relative.lateness_ns.copy(), relative.bound.copy(), relative.error_ns.copy()
    likely = _likely_ns(entries, instances)
    # Links that nobody saw may have held the message that shows such a rank: how late it was is not known.
    dated = entries.exact & (entries.rule != Rule.BEHIND)
    behind = (entries.rule == Rule.BEHIND) & (bound == AT_LEAST)
    bound[behind], lateness[behind], error[behind] = UNOBSERVABLE, NEVER, NEVER
    for number in numbers.tolist():
        near = instances[number].near or frozenset()
        rows = np.arange(*entries.offsets[number : number + 2])
        exact = dated[rows]
        if not exact.any():
            continue
        row = _latest(entries, rows[likely[rows] != NEVER], likely, dated)
        # Late by no less than 0 says nothing, but of a captured rank it goes with an entry that is known.
        vague = bound[row] == AT_LEAST and lateness[row] == 0 and int(entries.endpoint[row]) not in near
        others = likely[rows[exact & (rows != row)]]
        ahead = int(likely[row] - others.max()) if len(others) else 0
        if ahead <= 0 or not (vague or bound[row] == UNOBSERVABLE):
            continue
        later[row] = ahead if ahead > noise_ns[row] else NEVER
        if floors[number] == NEVER:
            continue
        by = int(entries.enter_ns[row])
        if not dated[row]:
            rule[row], after[row] = Rule.WAITED, NONE32
            if entries.by_ns[row] != NEVER:
                by, act[row] = int(entries.by_ns[row]), entries.by_act[row]
        spread = max(int(entries.spread_ns[row]), 0)
        enter[row], bound[row], lateness[row] = by, AT_MOST, by - floors[number] + spread
        error[row] = entries.spread_ns[row]
    entries = replace(entries, rule=rule, act=act, after=after)
    return Bounded(entries, Relative(lateness, bound, error, enter), later)


def _latest(
    entries: Entries, rows: NDArray[np.int64], likely: NDArray[np.int64], dated: NDArray[np.bool_]
) -> int:
    """Which of ``rows`` is likely to have entered last.

    Of two the one that was heard of first counts, unless the second was ``dated`` or is later by more than
    hand-overs differ: what was heard by way of others may be the delay of the first once more.
    """
    shown = np.where(entries.by_ns != NEVER, entries.by_ns, entries.enter_ns)[rows]
    best, *others = rows[np.argsort(shown, kind="stable")].tolist()
    for row in others:
        margin = 0 if dated[row] else max(int(entries.spread_ns[row]), 0)
        best = row if likely[row] > likely[best] + margin else best
    return int(best)


def _likely_ns(entries: Entries, instances: Sequence[Instance]) -> NDArray[np.int64]:
    """When each rank is likely to have entered; NEVER where nothing tells."""
    arrived = np.where(entries.exact, entries.enter_ns - entries.usual_way_ns, NEVER)
    likely = np.where(entries.likely_ns != NEVER, entries.likely_ns, arrived)
    for number, instance in enumerate(instances):
        if instance.near is not None and _waits_for_none_captured(instance):
            rows = np.arange(*entries.offsets[number : number + 2])
            rows = rows[(entries.rule[rows] == Rule.PARTLY) & (entries.enter_ns[rows] != NEVER)]
            rows = rows[likely[rows] == NEVER]
            likely[rows] = entries.enter_ns[rows] - entries.usual_way_ns[rows]
    return likely


def _waits_for_none_captured(instance: Instance) -> bool:
    """Whether what a captured rank hears of its peers first can have waited for no captured rank.

    Down a tree nothing comes back; what is sent all at once waits for nobody.
    """
    if instance.algorithm is None:
        return False
    down = instance.algorithm.rooted and instance.op in (Op.BROADCAST, Op.SCATTER)
    return down or (instance.op == Op.ALL_TO_ALL and instance.algorithm.name == "linear")


def _floors(entries: Entries, instances: Sequence[Instance]) -> list[int]:
    """For each collective before when no rank of it can have entered; NEVER where nothing tells.

    Who hands its calls to workers may call before the last one is done (``queues``): there nothing does.
    """
    floors = [NEVER] * len(instances)
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, instance in enumerate(instances):
        groups.setdefault((tuple(sorted(instance.order)), instance.ranks), []).append(number)
    known = np.where(entries.exact, entries.enter_ns, NEVER)
    latest = np.maximum.reduceat(known, entries.offsets[:-1]).tolist()
    queued = set(entries.collective[entries.rule == Rule.QUEUED].tolist())
    for numbers in groups.values():
        if queued.intersection(numbers):
            continue
        floor = NEVER
        for number in sorted((n for n in numbers if latest[n] != NEVER), key=lambda n: int(latest[n])):
            floors[number] = floor
            if instances[number].complete and instances[number].op in TYING:
                floor = int(latest[number])
    return floors
