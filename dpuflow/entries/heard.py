"""Who may have been the last, where not all ranks were captured; for readers, nobody is judged by it.

In: what a captured rank heard of the others, entries, lateness. Out: for each rank heard of the latest
entry that fits all that was heard, where each link takes what is usual; then bounds for ranks of which no
lateness can be claimed, but of which a message came so late that they, or others that they wait for, are
likely to have been the last (docs/theory/one-node.md).

A message of step k leaves once its sender has done k steps and has its inputs; so whoever it stands for had
entered that many links before (``schedules.graph.depths``). Where what was heard before explains a message,
nothing follows of the ranks that it was the first to stand for: the delay of others is seen once more. How
late the last is at most follows from when any rank can have entered at the earliest: not before the ranks
that were seen had entered the collective before, if that was one which nobody leaves before all have entered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries.relative import AT_LEAST, AT_MOST, UNOBSERVABLE, Relative, cautious
from dpuflow.entries.rows import Heard, Rule
from dpuflow.schedules.graph import depths, edge_sizes
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries.reactions import Law
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.tables import Rows


class Message(NamedTuple):
    """Data, its offer, or leave to send, that a captured rank got; ranks are positions in the schedule."""

    when_ns: int  # it was there
    row: int  # of TRANSFER
    src: int
    must: frozenset[int]  # these, captured by nobody, had entered for certain
    links: Mapping[int, int]  # whose entries it may have waited for -> over how many links, at most


def likely_entries(entries: Entries, exchanges: Rows, instances: Sequence[Instance], law: Law) -> Heard:
    """When ranks known only through others' messages are likely to have entered, and what first shows those
    that nothing dates. A hop takes as long as the group's hosts usually take to react (``law``).
    """
    out = entries.heard
    likely, by, by_act = out.likely_ns.copy(), out.by_ns.copy(), out.by_act.copy()
    exact = entries.exact
    for number, instance in enumerate(instances):
        heard = heard_of(exchanges, instance)
        if not heard:
            continue
        first = int(entries.offsets[number])
        rows = {seat: first + place for place, seat in enumerate(instance.seats)}
        near = instance.view.near or frozenset()
        captured = {seat for seat, end in zip(instance.seats, instance.order, strict=True) if end in near}
        pace = (float(law.median_ns[first]), float(law.slow_ns[first]))
        for row, (when, shown, act) in _fit(heard, rows, captured, entries, pace).items():
            likely[row] = when
            if not exact[row]:
                by[row], by_act[row] = shown, act
    return Heard(likely, by, by_act)


def heard_of(exchanges: Rows, instance: Instance) -> list[Message]:
    """What captured ranks heard of the others, in order of time; nothing if that is not known, as where all
    were captured, or the messages do not fit the schedule.
    """
    view, algorithm = instance.view, instance.algorithm
    if view.near is None or algorithm is None or algorithm.rooted or view.blind or view.at_once:
        return []
    seat = dict(zip(instance.order, instance.seats, strict=True))
    captured = {seat[end] for end in instance.order if end in view.near}
    if not instance.complete or not 0 < len(captured) < len(seat):
        return []
    picked, shape = exchanges[instance.rows], (algorithm, instance.rank_count, instance.root or 0)
    edges: dict[tuple[int, int], list[int]] = {}
    for place, (src, dst) in enumerate(zip(picked["src"].tolist(), picked["dst"].tolist(), strict=True)):
        edges.setdefault((seat[src], seat[dst]), []).append(place)
    found: list[Message] = []
    for edge, places in edges.items():
        cuts, rest = divmod(len(places), len(edge_sizes(*shape).get(edge, ())) or 1)
        if rest or edge not in edge_sizes(*shape):
            return []
        if (edge[0] in captured) != (edge[1] in captured):
            found += _on_edge(shape, edge, picked[np.array(places)], cuts, captured)
    return sorted(found, key=lambda each: each.when_ns)


def _on_edge(
    shape: tuple[Algorithm, int, int],
    edge: tuple[int, int],
    mine: Rows,
    cuts: int,
    captured: AbstractSet[int],
) -> Iterator[Message]:
    """What a captured rank heard over an edge, ``cuts`` messages to one of the schedule: data, or what allows
    its own. Clear-to-send entries are posted by a host ahead of its GPU: nobody's entry.
    """
    comes = edge[1] in captured
    if comes:
        other, names = edge[0], ("offer", "offer_arrived_ns", "data", "arrived_ns")
    elif int(mine["wire"][0]) >= Wire.GLOO_HELLO:
        other, names = edge[1], ("grant", "grant_arrived_ns", "grant", "grant_arrived_ns")
    else:
        return
    known = mine[names[1]] != NEVER
    when, row = (
        np.where(known, mine[names[1]], mine[names[3]]),
        np.where(known, mine[names[0]], mine[names[2]]),
    )
    own = when if comes else np.where(mine["offer_ns"] != NEVER, mine["offer_ns"], mine["data_ns"])
    carries = comes and shape[0].op != Op.ALL_TO_ALL  # what is sent on holds what came before
    away = depths(*shape, receivers=not comes)
    for turn, at in enumerate(np.argsort(own, kind="stable")[::cuts].tolist()):
        if when[at] != NEVER:
            links = away[edge, turn]
            must = frozenset(links.keys() - captured) if carries else frozenset({other})
            yield Message(int(when[at]), int(row[at]), other, must, links)


def _fit(
    heard: Sequence[Message],
    rows: Mapping[int, int],
    captured: AbstractSet[int],
    entries: Entries,
    pace: tuple[float, float],
) -> dict[int, tuple[int, int, int]]:
    """For rows of ranks heard of: when they are likely to have entered; the message that first showed it.

    ``rows`` are by position; ``pace``: how long a link usually takes, and how long a slow one; NaN where
    nothing tells.
    """
    zero = heard[0].when_ns  # a double holds no epoch to the nanosecond
    known = {place: int(entries.enter_ns[rows[place]]) for place in sorted(captured)}
    entered = {place: float(enter - zero) for place, enter in known.items() if enter != NEVER}
    usual, slow = pace
    likely, plain = dict(entered), set(entered)
    shown: dict[int, tuple[int, int]] = {}
    for each in heard:
        way = entries.margins.usual_way_ns[rows[each.src]] if each.src in rows else 0
        left = float(each.when_ns - zero - way)
        away = [likely[rank] + far * usual for rank, far in each.links.items() if far and rank in likely]
        explained = bool(away) and left <= max(away) + slow - usual
        for rank in each.must:
            far = each.links.get(rank, 0)
            if far and np.isnan(usual):
                continue
            fits = left - (far * usual if far else 0.0)
            if rank not in likely:
                likely[rank], shown[rank] = fits, (each.when_ns, each.row)
                plain |= set() if explained else {rank}
            elif rank not in captured:
                likely[rank] = min(likely[rank], fits)
    return {
        rows[rank]: (zero + round(likely[rank]), *shown.get(rank, (NEVER, 0)))
        for rank in sorted(plain)
        if rank in rows
    }


TYING: Final = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER)
"""Operations that no rank leaves before all have entered: each needs something of everyone."""


class Bounded(NamedTuple):
    """Entries and lateness with upper bounds; ``later_ns``: for rows that may have been the last, how much
    later than all ranks whose entries are known they, or others that they wait for, are likely to have
    entered, where that is beyond the noise; NEVER for others.
    """

    entries: Entries
    relative: Relative
    later_ns: Ints


def bound_above(
    entries: Entries, relative: Relative, instances: Sequence[Instance], short: Bools, noise_ns: Ints
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
    likely, exact = _likely_ns(entries, instances), entries.exact
    for number in numbers.tolist():
        near = instances[number].view.near or frozenset()
        rows = np.arange(*entries.offsets[number : number + 2])
        if not exact[rows].any():
            continue
        row = _latest(entries, rows[likely[rows] != NEVER], likely, exact)
        # Late by no less than 0 says nothing, but of a captured rank it goes with an entry that is known.
        vague = bound[row] == AT_LEAST and lateness[row] == 0 and int(entries.endpoint[row]) not in near
        others = likely[rows[exact[rows] & (rows != row)]]
        ahead = int(likely[row] - others.max()) if len(others) else 0
        if ahead <= 0 or not (vague or bound[row] == UNOBSERVABLE):
            continue
        later[row] = ahead if ahead > noise_ns[row] else NEVER
        if floors[number] == NEVER:
            continue
        by = int(entries.enter_ns[row])
        if not exact[row]:
            rule[row], after[row] = Rule.WAITED, NONE32
            if entries.heard.by_ns[row] != NEVER:
                by, act[row] = int(entries.heard.by_ns[row]), entries.heard.by_act[row]
        spread = max(int(entries.margins.spread_ns[row]), 0)
        enter[row], bound[row], lateness[row] = by, AT_MOST, by - floors[number] + spread
        error[row] = entries.margins.spread_ns[row]
    entries = replace(entries, rule=rule, act=act, after=after)
    return Bounded(entries, Relative(lateness, bound, error, enter), later)


def _latest(entries: Entries, rows: Ints, likely: Ints, exact: Bools) -> int:
    """Which of ``rows`` is likely to have entered last; ``exact`` and ``likely`` are of all rows.

    Of two the one that was heard of first counts, unless the second is dated or is later by more than
    hand-overs differ: what was heard by way of others may be the delay of the first once more.
    """
    shown = np.where(entries.heard.by_ns != NEVER, entries.heard.by_ns, entries.enter_ns)[rows]
    best, *others = rows[np.argsort(shown, kind="stable")].tolist()
    for row in others:
        margin = 0 if exact[row] else max(int(entries.margins.spread_ns[row]), 0)
        best = row if likely[row] > likely[best] + margin else best
    return int(best)


def _likely_ns(entries: Entries, instances: Sequence[Instance]) -> Ints:
    """When each rank is likely to have entered; NEVER where nothing tells."""
    arrived = np.where(entries.exact, entries.enter_ns - entries.margins.usual_way_ns, NEVER)
    likely = np.where(entries.heard.likely_ns != NEVER, entries.heard.likely_ns, arrived)
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
