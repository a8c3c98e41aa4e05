"""Who may have been the last, where not all ranks were captured; for readers, nobody is judged by it.

In: what a captured rank heard of the others, entries, lateness. Out: for each rank heard of the latest
entry that fits all that was heard, where each link takes what is usual; then bounds for ranks of which no
lateness can be claimed, but of which a message came so late that they, or others that they wait for, are
likely to have been the last (docs/inference/one-node.md, "who may have been the last").

A message of step k leaves once its sender has done k steps and has its inputs; so whoever it stands for had
entered that many links before. Where what was heard before explains a message, nothing follows of the ranks
that it was the first to stand for: the delay of others is seen once more. How late the last is at most
follows from when any rank can have entered at the earliest: not before the ranks that were seen had entered
the collective before, if that was one which nobody leaves before all have entered.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries.later_steps import seen_acts
from dpuflow.entries.relative import AT_LEAST, AT_MOST, UNOBSERVABLE, Relative, cautious
from dpuflow.entries.rules import FEWEST, Rule
from dpuflow.schedules.graph import dependencies, depths
from dpuflow.schema.rows import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from dpuflow.entries.later_steps import Edge, Seen
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance

UNEXPLAINED: Final = 2.0
"""Distances from median to quartile by which a message must come later than expected: of links with a normal
scatter one in eleven does so by chance."""


class Pace(NamedTuple):
    """What is usual of a link in like collectives, and by how much one may be slower."""

    middle_ns: float | None
    beyond_ns: float


def likely_entries(entries: Entries, groups: Sequence[Sequence[Seen]]) -> Entries:
    """Entries with ``likely_ns`` of the ranks heard of; ``by_ns`` and ``by_act`` of those that nothing dates.

    ``groups`` as of ``later_steps.read_alike``.
    """
    likely, by, by_act = (
        entries.margins.likely_ns.copy(),
        entries.margins.by_ns.copy(),
        entries.margins.by_act.copy(),
    )
    for members in groups:
        pace = _pace(members, entries)
        for seen in members:
            for row, (when, shown, act) in _fit(seen, entries, pace).items():
                likely[row] = when
                if not entries.exact[row] and entries.margins.by_ns[row] == NEVER:
                    by[row], by_act[row] = shown, act
    margins = replace(entries.margins, likely_ns=likely, by_ns=by, by_act=by_act)
    return replace(entries, margins=margins)


def _pace(members: Sequence[Seen], entries: Entries) -> Pace:
    """From what captured ranks do: how soon they send after what a send needs, or after their send before."""
    first = members[0]
    algorithm, n, root = first.shape()
    captured = first.captured()
    needs: dict[tuple[Edge, int], list[tuple[Edge, int]]] = {}
    for send, needed in dependencies(algorithm, n, root):
        needs.setdefault(send, []).append(needed)
    waits: list[float] = []
    steps: list[float] = []
    for seen in members:
        for when, came, before in _sends(seen, captured, needs):
            (waits if came > before else steps).append(max(when - max(came, before), 0))
    if len(waits) >= FEWEST:
        middle, quartile = np.percentile(waits, (50, 75)).tolist()
        return Pace(middle, UNEXPLAINED * (quartile - middle))
    # It never waits (it is the late one): how fast it goes on tells little of how fast others react.
    slow = float(entries.margins.slow_ns[first.row])
    if len(steps) >= FEWEST and slow != NEVER:
        return Pace(float(np.median(steps)), slow)
    return Pace(None, 0.0)


def _sends(
    seen: Seen, captured: AbstractSet[int], needs: Mapping[tuple[Edge, int], Sequence[tuple[Edge, int]]]
) -> Iterator[tuple[int, int, int]]:
    """Of captured ranks' sends that need something: when they left, when that had come, the send before."""
    sent = {name[1:]: when for name, (when, _) in seen.times.items() if name[0] == "send"}
    # Who is not allowed to send does not go on either.
    grants = ((name, when) for name, (when, _) in seen.times.items() if name[0] == "grant")
    allowed = [when for name, when in grants if name[1][0] in captured]
    own = sorted((when, name) for name, when in sent.items() if name[0][0] in captured)
    for (before, _), (when, name) in pairwise(own):
        inputs = needs.get(name, [])
        if inputs and all(each in sent for each in inputs):
            yield when, max([*(sent[each] for each in inputs), *(at for at in allowed if at < when)]), before


def _fit(seen: Seen, entries: Entries, pace: Pace) -> dict[int, tuple[int, int, int]]:
    """For rows of ranks heard of: when they are likely to have entered; the message that first showed it."""
    rows = {seat: seen.row + place for place, seat in enumerate(seen.seats())}
    captured = seen.captured()
    paths = depths(*seen.shape())
    zero = seen.first_ns()  # a double holds no epoch to the nanosecond
    entered = {
        seat: float(entries.enter_ns[rows[seat]] - zero)
        for seat in captured
        if entries.enter_ns[rows[seat]] != NEVER
    }
    likely = dict(entered)
    shown: dict[int, tuple[int, int]] = {}
    plain: set[int] = set(entered)  # nothing heard before explains what was heard of these
    for act, when, row in sorted(seen_acts(seen), key=lambda found: found[1]):
        sends = act.kind == "send"
        sender = act.edge[0] if sends else act.edge[1]
        ranks = act.may.ranks
        links = paths[act.edge, act.number] if sends else {rank: ranks[rank] - 1 for rank in ranks}
        left = float(when - zero - (entries.margins.usual_way_ns[rows[sender]] if sender in rows else 0))
        explained = _explained(left, likely, links, pace)
        for rank in act.must:
            far = links.get(rank, 0)
            if far and pace.middle_ns is None:
                continue
            fits = left - far * (pace.middle_ns or 0)
            if rank not in likely:
                likely[rank], shown[rank] = fits, (when, row)
                plain |= set() if explained else {rank}
            elif rank not in captured:
                likely[rank] = min(likely[rank], fits)
    return {
        rows[rank]: (zero + round(likely[rank]), *shown.get(rank, (NEVER, 0)))
        for rank in plain
        if rank in rows and (rank in shown or rank in entered)
    }


def _explained(left: float, likely: Mapping[int, float], links: Mapping[int, int], pace: Pace) -> bool:
    """Whether an act comes as late as those make it that were heard of before, so many links away."""
    away = {rank: links[rank] for rank in likely if links.get(rank, 0) > 0}
    if pace.middle_ns is None or not away:
        return False
    return left <= max(likely[rank] + far * pace.middle_ns for rank, far in away.items()) + pace.beyond_ns


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
        near = instances[number].view.near or frozenset()
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
            if entries.margins.by_ns[row] != NEVER:
                by, act[row] = int(entries.margins.by_ns[row]), entries.margins.by_act[row]
        spread = max(int(entries.margins.spread_ns[row]), 0)
        enter[row], bound[row], lateness[row] = by, AT_MOST, by - floors[number] + spread
        error[row] = entries.margins.spread_ns[row]
    entries = replace(entries, rule=rule, act=act, after=after)
    return Bounded(entries, Relative(lateness, bound, error, enter), later)


def _latest(
    entries: Entries, rows: NDArray[np.int64], likely: NDArray[np.int64], dated: NDArray[np.bool_]
) -> int:
    """Which of ``rows`` is likely to have entered last.

    Of two the one that was heard of first counts, unless the second was ``dated`` or is later by more than
    hand-overs differ: what was heard by way of others may be the delay of the first once more.
    """
    shown = np.where(entries.margins.by_ns != NEVER, entries.margins.by_ns, entries.enter_ns)[rows]
    best, *others = rows[np.argsort(shown, kind="stable")].tolist()
    for row in others:
        margin = 0 if dated[row] else max(int(entries.margins.spread_ns[row]), 0)
        best = row if likely[row] > likely[best] + margin else best
    return int(best)


def _likely_ns(entries: Entries, instances: Sequence[Instance]) -> NDArray[np.int64]:
    """When each rank is likely to have entered; NEVER where nothing tells."""
    arrived = np.where(entries.exact, entries.enter_ns - entries.margins.usual_way_ns, NEVER)
    likely = np.where(entries.margins.likely_ns != NEVER, entries.margins.likely_ns, arrived)
    for number, instance in enumerate(instances):
        if instance.view.near is not None and _waits_for_none_captured(instance):
            rows = np.arange(*entries.offsets[number : number + 2])
            rows = rows[(entries.rule[rows] == Rule.PARTLY) & (entries.enter_ns[rows] != NEVER)]
            rows = rows[likely[rows] == NEVER]
            likely[rows] = entries.enter_ns[rows] - entries.margins.usual_way_ns[rows]
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
        groups.setdefault((tuple(sorted(instance.order)), instance.placement.ranks), []).append(number)
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
