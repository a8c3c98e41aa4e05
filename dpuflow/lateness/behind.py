"""Ranks behind others: what the messages of an algorithm's later steps tell of who had entered late.

In: collectives of which only some ranks were captured, entries. Out: entries with more ranks dated.

What reaches a captured rank in a later step had to wait for several ranks. When each of them but one is known
to have entered long before, that one is what the message waited for (docs/inference.md, "One capture"). A
message that may have waited for several ranks not heard of before names none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.collectives.schedules import edge_sizes, schedule
from dpuflow.lateness.entries import Entries, Rule
from dpuflow.lateness.handover import FEWEST, is_gloo
from dpuflow.schema import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.collectives import Instance
    from dpuflow.collectives.schedules import Algorithm
    from dpuflow.lateness.handover import Usual
    from dpuflow.tables import Rows

FAR_BEYOND: Final = 3.0
"""Times the slow way from rank to rank (95th percentile) that the last of several links may have taken."""
SLOWEST: Final = 95
_FAR = np.iinfo(np.int64).max

Edge = tuple[int, int]


class Waited(NamedTuple):
    """What a message may have waited for: ranks' entries, and captured ranks' own messages."""

    ranks: Mapping[int, int]  # rank -> over how many links that reached the captured rank, at most
    own: frozenset[tuple[str, Edge, int]]  # ("send" or "grant", edge, number)

    def further(self) -> Waited:
        """The same, seen one link further on."""
        return Waited({rank: links + 1 for rank, links in self.ranks.items()}, self.own)

    def with_(self, other: Waited) -> Waited:
        """Both together."""
        ranks = {r: max(self.ranks.get(r, 0), other.ranks.get(r, 0)) for r in {*self.ranks, *other.ranks}}
        return Waited(ranks, self.own | other.own)


class Act(NamedTuple):
    """The ``number``-th message of an edge, or the receiver's allowance for it, that a captured rank sees."""

    kind: str  # "send", "grant"
    edge: Edge
    number: int
    must: frozenset[int]  # these had entered for certain
    may: Waited


NOTHING: Final = Waited({}, frozenset())


@lru_cache(maxsize=256)
def acts_seen(
    algorithm: Algorithm, n: int, root: int, captured: frozenset[int], *, asked: bool, granted: bool
) -> tuple[Act, ...]:
    """All that captured ranks see of the others in one collective, in order of steps.

    ``granted``: receivers allow each message, and its sender does not go on before; ``asked``: they do so
    only once it was offered.
    """
    must: list[frozenset[int]] = [frozenset() for _ in range(n)]  # by rank, what its inputs so far stand for
    may = [NOTHING] * n
    number: dict[Edge, int] = {}
    found: list[Act] = []
    steps: dict[int, list[tuple[Edge, int]]] = {}
    for send in schedule(algorithm, n, root):
        edge = (send.src, send.dst)
        number[edge] = number.get(edge, -1) + 1
        steps.setdefault(send.step, []).append((edge, number[edge]))
    carries = algorithm.op != Op.ALL_TO_ALL  # what is sent on holds what came before; else it only waits
    for step in sorted(steps):
        must_before, may_before = list(must), list(may)
        for edge, turn in steps[step]:
            src, dst = edge
            if src == dst:
                continue
            sure, held = _sent(edge, turn, must_before, may_before, captured, carries=carries)
            if dst in captured and src not in captured:
                found.append(Act("send", edge, turn, sure, held))
            must[dst], may[dst] = must[dst] | sure, may[dst].with_(held)
            if not granted:
                continue
            if dst in captured:
                allowed = Waited({}, frozenset({("grant", edge, turn)}))
            else:
                allowed = may_before[dst].further().with_(Waited({dst: 1}, frozenset()))
                if asked:
                    allowed = allowed.with_(held.further())
                if src in captured:
                    found.append(Act("grant", edge, turn, frozenset({dst}), allowed))
            may[src] = may[src].with_(allowed)
    return tuple(found)


def _sent(
    edge: Edge,
    turn: int,
    must: Sequence[frozenset[int]],
    may: Sequence[Waited],
    captured: frozenset[int],
    *,
    carries: bool,
) -> tuple[frozenset[int], Waited]:
    """What a message stands for: who had entered, and what else it may have waited for."""
    src = edge[0]
    if src in captured:
        return frozenset(), Waited({}, frozenset({("send", edge, turn)}))
    sure = frozenset({src}) | (must[src] if carries else frozenset())
    return sure, may[src].further().with_(Waited({src: 1}, frozenset()))


@dataclass
class _Seen:
    """One collective's messages as the captured ranks saw them."""

    row: int  # of Entries, its first
    instance: Instance
    times: dict[tuple[str, Edge, int], tuple[int, int]]  # -> time there, TRANSFER row
    transfer_ns: list[int]  # of each message to a captured rank: from its first packet to its last


def date_behind(entries: Entries, exchanges: Rows, instances: Sequence[Instance], usual: Usual) -> Entries:
    """Date ranks without a capture of their own by the messages that can have waited for them alone."""
    groups: dict[object, list[_Seen]] = {}
    for number, instance in enumerate(instances):
        if _told(instance):
            seen = _read(exchanges, instance, int(entries.offsets[number]))
            if seen is not None:
                key = (
                    instance.algorithm,
                    instance.ranks,
                    instance.root,
                    instance.seats,
                    tuple(instance.order),
                )
                groups.setdefault((key, instance.size, len(instance.rows)), []).append(seen)
    if not groups:
        return entries
    rule, enter, act = entries.rule.copy(), entries.enter_ns.copy(), entries.act.copy()
    way, leave = entries.way_ns.copy(), entries.leave_ns.copy()
    open_ = np.isin(rule, (Rule.PARTLY, Rule.UNSEEN, Rule.AFTER_INPUT, Rule.ANSWER))
    solved = [[_solve(seen, exchanges) for seen in members] for members in groups.values()]
    every = [delay for found in solved for _, delays in found for delay in delays]
    for members, found in zip(groups.values(), solved, strict=True):
        own = [delay for _, delays in found for delay in delays]
        hop = _hop_ns(members, own if len(own) >= FEWEST else every, entries, usual)
        if hop is None:
            continue
        for seen, (dated, _) in zip(members, found, strict=True):
            for place, (when, alone_ns, links, own_links, row) in dated.items():
                at = seen.row + place
                if open_[at] and alone_ns > hop * (links - 1 + FAR_BEYOND):
                    rule[at], enter[at], act[at] = Rule.BEHIND, when, row
                    way[at] = max(int(way[at]), 0) + round(hop * (own_links - 1))
                    leave[at] = max(int(leave[at]), when)
    return replace(entries, rule=rule, enter_ns=enter, act=act, way_ns=way, leave_ns=leave)


def _told(instance: Instance) -> bool:
    """Whether the schedule is known and some of its ranks were captured, some not."""
    if instance.near is None or instance.algorithm is None or instance.algorithm.rooted or instance.blind:
        return False
    near = [end in instance.near for end in instance.order]
    return instance.complete and any(near) and not all(near) and not instance.at_once


def _read(exchanges: Rows, instance: Instance, row: int) -> _Seen | None:
    """The times of all acts of a collective; None if packets were sent again or the messages do not fit."""
    picked = exchanges[instance.rows]
    if (picked["retransmitted"] > 0).any():
        return None
    assert instance.algorithm is not None
    seats = instance.seats or tuple(range(len(instance.order)))
    seat = dict(zip(instance.order, seats, strict=True))
    near = instance.near or frozenset()
    sizes = edge_sizes(instance.algorithm, instance.ranks or len(seats), instance.root or 0)
    edges: dict[Edge, list[int]] = {}
    for place, (src, dst) in enumerate(zip(picked["src"].tolist(), picked["dst"].tolist(), strict=True)):
        edges.setdefault((seat[src], seat[dst]), []).append(place)
    captured = {seat[end] for end in instance.order if end in near}
    seen = _Seen(row, instance, {}, [])
    for edge, places in edges.items():
        cuts, rest = divmod(len(places), len(sizes.get(edge, ())) or 1)
        if rest or edge not in sizes:
            return None
        mine = picked[np.array(places)]
        offered = mine["offer_ns"] != NEVER
        own = np.where(offered, mine["offer_ns"], mine["data_ns"])
        there = np.where(mine["offer_arrived_ns"] != NEVER, mine["offer_arrived_ns"], mine["arrived_ns"])
        first = np.where(mine["offer"] != NONE32, mine["offer"], mine["data"])
        order = np.argsort(own if edge[0] in captured else there, kind="stable")
        for turn, at in enumerate(order[::cuts].tolist()):
            if edge[0] in captured:
                _note(seen, ("send", edge, turn), own[at], first[at])
                _note(seen, ("grant", edge, turn), mine["grant_arrived_ns"][at], mine["grant"][at])
            else:
                _note(seen, ("send", edge, turn), there[at], first[at])
                _note(seen, ("grant", edge, turn), mine["grant_ns"][at], mine["grant"][at])
        if edge[1] in captured:
            seen.transfer_ns += (mine["arrived_end_ns"] - mine["arrived_ns"]).tolist()
    return seen


def _note(seen: _Seen, name: tuple[str, Edge, int], when: int, row: int) -> None:
    if when != NEVER:
        seen.times[name] = (int(when), int(row))


def _solve(seen: _Seen, exchanges: Rows) -> tuple[dict[int, tuple[int, int, int, int, int]], list[int]]:
    """Who may be dated by what, and how long messages took that had waited for nobody unknown.

    The first: place in ``order`` -> (time of the message, how long after all else it may have waited for,
    over how many links that came, over how many the rank's own entry did, TRANSFER row).
    """
    instance, times = seen.instance, seen.times
    assert instance.algorithm is not None
    seats = instance.seats or tuple(range(len(instance.order)))
    near = instance.near or frozenset()
    captured = frozenset(s for s, end in zip(seats, instance.order, strict=True) if end in near)
    wires = exchanges["wire"][instance.rows]
    gloo, granted = is_gloo(int(wires[0])), any(name[0] == "grant" for name in times)
    acts = [
        (act, *times[act.kind, act.edge, act.number])
        for act in acts_seen(
            instance.algorithm,
            instance.ranks or len(seats),
            instance.root or 0,
            captured,
            asked=not gloo,
            granted=granted,
        )
        if (act.kind, act.edge, act.number) in times
    ]
    first: dict[int, int] = {}  # rank -> which act shows first that it had entered
    for place in sorted(range(len(acts)), key=lambda place: acts[place][1]):
        for rank in acts[place][0].must:
            first.setdefault(rank, place)
    dated: dict[int, tuple[int, int, int, int, int]] = {}
    delays: list[int] = []
    for place, (act, when, row) in enumerate(acts):
        unknown = [rank for rank in act.may.ranks if first.get(rank, place) == place]
        others = [acts[first[rank]][1] for rank in act.may.ranks if rank not in unknown]
        others += [times[own][0] for own in act.may.own if own in times]
        if not others:
            continue
        alone = when - max(others)
        if not unknown:
            delays.append(max(alone, 0))
        elif len(unknown) == 1 and unknown[0] in seats and unknown[0] in act.must:
            links = max(act.may.ranks.values())
            dated[seats.index(unknown[0])] = (when, alone, links, act.may.ranks[unknown[0]], row)
    return dated, delays


def _hop_ns(members: Sequence[_Seen], delays: Sequence[int], entries: Entries, usual: Usual) -> float | None:
    """How long it takes from one rank's message to that of the next that waited for it, in 95 of 100 cases.

    By messages that can have waited only for what was seen to come before (``delays``), and no less than the
    sum of the way, a message's length and a captured rank's slow reaction. None where too few were seen: how
    fast hosts react that were not captured is not known then.
    """
    if len(delays) < FEWEST:
        return None
    first = members[0]
    rows = slice(first.row, first.row + len(first.instance.order))
    lengths = [value for seen in members for value in seen.transfer_ns]
    own = float(entries.way_ns[rows].max(initial=0)) + float(np.percentile(lengths or [0], SLOWEST))
    own += float(np.nan_to_num(usual.slowest_ns[first.row], nan=0.0))
    return max(own, float(np.percentile(delays, SLOWEST)))
