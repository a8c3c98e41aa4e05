"""Ranks behind others: what the messages of an algorithm's later steps tell of who had entered late.

In: collectives of which only some ranks were captured, entries. Out: entries with more ranks dated.

What reaches a captured rank in a later step had to wait for several ranks. When each of them but one is known
to have entered long before, that one is what the message waited for (docs/inference/one-node.md). A
message that may have waited for several ranks not heard of before names none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from dpuflow.entries.handover import is_gloo
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import FAR_BEYOND, FEWEST, SLOW, Rule
from dpuflow.schedules.graph import edge_sizes, schedule
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dpuflow.entries.handover import Usual
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.tables import Rows

Edge = tuple[int, int]
Name = tuple[str, Edge, int]
"""("send" or "grant", edge, number) of a message."""
_K = TypeVar("_K")


class Waited(NamedTuple):
    """What a message may have waited for: ranks' entries, and captured ranks' own messages."""

    ranks: Mapping[int, int]  # rank -> over how many links that reached the captured rank, at most
    own: Mapping[Name, int]  # the same of captured ranks' messages

    def further(self) -> Waited:
        """The same, seen one link further on."""
        return Waited(
            {rank: links + 1 for rank, links in self.ranks.items()},
            {name: links + 1 for name, links in self.own.items()},
        )

    def with_(self, other: Waited) -> Waited:
        """Both together."""
        return Waited(_longest(self.ranks, other.ranks), _longest(self.own, other.own))


def _longest(a: Mapping[_K, int], b: Mapping[_K, int]) -> Mapping[_K, int]:
    """Of both together, each with the more links."""
    if not a or not b:
        return a or b
    found = dict(a)
    for key, links in b.items():
        if links > found.get(key, -1):
            found[key] = links
    return found


class Act(NamedTuple):
    """The ``number``-th message of an edge, or the receiver's allowance for it, that a captured rank sees."""

    kind: str  # "send", "grant"
    edge: Edge
    number: int
    must: frozenset[int]  # these had entered for certain
    may: Waited


NOTHING: Final = Waited({}, {})


@remembered
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
                allowed = Waited({}, {("grant", edge, turn): 1})
            else:
                allowed = may_before[dst].further().with_(Waited({dst: 1}, {}))
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
        return frozenset(), Waited({}, {("send", edge, turn): 1})
    sure = frozenset({src}) | (must[src] if carries else frozenset())
    return sure, may[src].further().with_(Waited({src: 1}, {}))


@dataclass
class Seen:
    """One collective's messages as the captured ranks saw them."""

    row: int  # of Entries, its first
    instance: Instance
    times: dict[Name, tuple[int, int]]  # -> time there, TRANSFER row
    transfer_ns: list[int]  # of each message to a captured rank: from its first packet to its last
    unasked: bool  # receivers allow messages before they are offered
    resent: bool  # packets were sent again
    allowed: dict[Name, int] = field(default_factory=dict)  # NCCL: when its receiver's credit for it left

    def shape(self) -> tuple[Algorithm, int, int]:
        """The algorithm, for how many ranks and from which root."""
        assert self.instance.algorithm is not None
        return self.instance.algorithm, self.instance.rank_count, self.instance.root or 0

    def seats(self) -> tuple[int, ...]:
        """The position in the algorithm of each endpoint in ``order``."""
        return self.instance.seats

    def first_ns(self) -> int:
        """When the first of its messages was seen."""
        return min((when for when, _ in self.times.values()), default=0)

    def captured(self) -> frozenset[int]:
        """The positions of captured ranks."""
        near = self.instance.view.near or frozenset()
        return frozenset(
            seat for seat, end in zip(self.seats(), self.instance.order, strict=True) if end in near
        )


class _Shown(NamedTuple):
    """The message that first shows that a rank had entered."""

    when: int
    row: int  # of TRANSFER
    links: int  # over so many the rank's own entry came
    others: tuple[tuple[int, int], ...]  # what else it may have waited for: time, links from there
    alone: bool  # of the ranks that it may have waited for this one alone had not been heard of before

    def beyond_ns(self, hop: float) -> float:
        """How much later it came than all else that it may have waited for explains.

        ``hop``: how long a link takes, of which the last may take FAR_BEYOND times as long.
        """
        return self.when - max(
            (time + hop * (links - 1 + FAR_BEYOND) for time, links in self.others), default=FAR
        )


def date_behind(entries: Entries, groups: Sequence[Sequence[Seen]], usual: Usual) -> Entries:
    """Date ranks without a capture of their own by the messages that can have waited for them alone.

    ``groups`` as of ``read_alike``. Where packets were sent again they may have been so between others, too,
    in any collective: nobody is dated there.
    """
    groups = [members for members in groups if not any(seen.resent for seen in members)]
    if not groups:
        return entries
    rule, enter, act = entries.rule.copy(), entries.enter_ns.copy(), entries.act.copy()
    way, leave = entries.margins.way_ns.copy(), entries.leave_ns.copy()
    open_ = np.isin(rule, (Rule.PARTLY, Rule.UNSEEN, Rule.AFTER_INPUT, Rule.ANSWER))
    solved = [[_solve(seen) for seen in members] for members in groups]
    for members, found, hop in zip(groups, solved, _hops_ns(groups, solved, entries, usual), strict=True):
        if hop is None:
            continue
        for seen, (shown, _) in zip(members, found, strict=True):
            alone = {seen.row + place: sign for place, sign in shown.items() if sign.alone}
            for at, sign in alone.items():
                if open_[at] and sign.beyond_ns(hop) > 0:
                    # What NCCL's ranks pass on streams through GPUs, proxies and slots that nobody saw.
                    rule[at] = Rule.WAITED if seen.allowed else Rule.BEHIND
                    enter[at], act[at] = sign.when, sign.row
                    way[at] = max(int(way[at]), 0) + round(hop * (sign.links - 1))
                    leave[at] = max(int(leave[at]), sign.when)
    margins = replace(entries.margins, way_ns=way)
    return replace(entries, rule=rule, enter_ns=enter, act=act, leave_ns=leave, margins=margins)


def _hops_ns(
    groups: Sequence[Sequence[Seen]], solved: Sequence[Sequence[_Solved]], entries: Entries, usual: Usual
) -> Iterator[float | None]:
    """By group how long a link takes at the most, 95 of 100 times; None where too few tell."""
    every = [link_ns for found in solved for _, links_ns in found for link_ns in links_ns]
    for members, found in zip(groups, solved, strict=True):
        own = [link_ns for _, links_ns in found for link_ns in links_ns]
        links_ns = own if len(own) >= FEWEST else every
        least = _least_hop_ns(members, entries, usual)
        yield max(least, _percentile(links_ns, SLOW)) if len(links_ns) >= FEWEST else None


def read_alike(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> list[list[Seen]]:
    """The messages of collectives that were captured at some ranks only, by kind and by who is where."""
    groups: dict[object, list[Seen]] = {}
    for number, instance in enumerate(instances):
        seen = read_seen(exchanges, instance, int(entries.offsets[number])) if _told(instance) else None
        if seen is not None:
            place = (
                instance.algorithm,
                instance.placement.ranks,
                instance.root,
                instance.placement.seats,
                tuple(instance.order),
            )
            groups.setdefault((place, instance.size, len(instance.rows)), []).append(seen)
    return list(groups.values())


def _told(instance: Instance) -> bool:
    """Whether the schedule is known and some of its ranks were captured, some not."""
    view, algorithm = instance.view, instance.algorithm
    if view.near is None or algorithm is None or algorithm.rooted or view.blind:
        return False
    near = [end in view.near for end in instance.order]
    return instance.complete and any(near) and not all(near) and not view.at_once


def read_seen(exchanges: Rows, instance: Instance, row: int) -> Seen | None:
    """The times of all acts of a collective; None if its messages do not fit its algorithm.

    ``row``: its first of Entries.
    """
    picked = exchanges[instance.rows]
    assert instance.algorithm is not None
    seat = dict(zip(instance.order, instance.seats, strict=True))
    near = instance.view.near or frozenset()
    sizes = edge_sizes(instance.algorithm, instance.rank_count, instance.root or 0)
    edges: dict[Edge, list[int]] = {}
    for place, (src, dst) in enumerate(zip(picked["src"].tolist(), picked["dst"].tolist(), strict=True)):
        edges.setdefault((seat[src], seat[dst]), []).append(place)
    captured = {seat[end] for end in instance.order if end in near}
    wire = int(picked["wire"][0])
    seen = Seen(row, instance, {}, [], is_gloo(wire), bool((picked["retransmitted"] > 0).any()))
    for edge, places in edges.items():
        cuts, rest = divmod(len(places), len(sizes.get(edge, ())) or 1)
        if rest or edge not in sizes:
            return None
        _read_edge(seen, edge, picked[np.array(places)], cuts, captured)
    return seen


def _read_edge(seen: Seen, edge: Edge, mine: Rows, cuts: int, captured: AbstractSet[int]) -> None:
    """Note the acts that messages of an edge show, ``cuts`` to a message of the schedule."""
    leaves, comes = edge[0] in captured, edge[1] in captured
    own = np.where(mine["offer_ns"] != NEVER, mine["offer_ns"], mine["data_ns"])
    there = np.where(mine["offer_arrived_ns"] != NEVER, mine["offer_arrived_ns"], mine["arrived_ns"])
    shown = own if leaves else there
    first = np.where(mine["offer"] != NONE32, mine["offer"], mine["data"])
    wire = int(mine["wire"][0])
    for turn, at in enumerate(np.argsort(shown, kind="stable")[::cuts].tolist()):
        _note(seen, ("send", edge, turn), shown[at], first[at])
        if wire >= Wire.GLOO_HELLO:  # a host posts clear-to-send entries ahead of its GPU: nobody's entry
            came = mine["grant_arrived_ns"] if leaves else mine["grant_ns"]
            _note(seen, ("grant", edge, turn), came[at], mine["grant"][at])
        if wire == Wire.ROCE_WRITE_IMM and comes and mine["grant_ns"][at] != NEVER:
            seen.allowed["send", edge, turn] = int(mine["grant_ns"][at])
    if comes:
        seen.transfer_ns += (mine["arrived_end_ns"] - mine["arrived_ns"]).tolist()


def _note(seen: Seen, name: tuple[str, Edge, int], when: int, row: int) -> None:
    if when != NEVER:
        seen.times[name] = (int(when), int(row))


def seen_acts(seen: Seen) -> list[tuple[Act, int, int]]:
    """What its captured ranks saw of the others: each act, when, and the TRANSFER row."""
    granted = any(name[0] == "grant" for name in seen.times)
    acts = acts_seen(*seen.shape(), seen.captured(), asked=not seen.unasked, granted=granted)
    names = ((act, (act.kind, act.edge, act.number)) for act in acts)
    return [(act, *seen.times[name]) for act, name in names if name in seen.times]


_Solved = tuple[dict[int, _Shown], list[float]]


def _solve(seen: Seen) -> _Solved:
    """What shows the entry of ranks not heard of before, by place in ``order``; and times of single links.

    The latter, ns a link: of messages that had waited for nobody unknown.
    """
    seats, acts = seen.seats(), seen_acts(seen)
    first: dict[int, int] = {}  # rank -> which act shows first that it had entered
    for place in sorted(range(len(acts)), key=lambda place: acts[place][1]):
        for rank in acts[place][0].must:
            first.setdefault(rank, place)
    shown: dict[int, _Shown] = {}
    links_ns: list[float] = []
    heard = {rank: acts[place][1] for rank, place in first.items()}
    for place, (act, when, row) in enumerate(acts):
        # Who was heard of by this message, or later, is one that it may have waited for.
        before = {rank: heard[rank] for rank, at in first.items() if at != place and heard[rank] < when}
        unknown = [rank for rank in act.may.ranks if rank not in before]
        others = [(before[rank], links) for rank, links in act.may.ranks.items() if rank in before]
        others += _inputs(seen, act, when)
        if not unknown and others:
            links_ns.append(max(min((when - time) / links for time, links in others), 0.0))
        for rank in unknown:
            if rank in act.must and rank in seats and first[rank] == place:
                alone = len(unknown) == 1 and bool(others)
                shown[seats.index(rank)] = _Shown(when, row, act.may.ranks[rank], tuple(others), alone)
    return shown, links_ns


def _inputs(seen: Seen, act: Act, when: int) -> list[tuple[int, int]]:
    """When captured ranks had done what the act needs, before it, and how many links lie between.

    Nor does data go before its credit, which its receiver's GPU gives when it is there.
    """
    own = [(seen.times[name][0], links) for name, links in act.may.own.items() if name in seen.times]
    allowed = seen.allowed.get((act.kind, act.edge, act.number), NEVER)
    if allowed > NEVER:
        own.append((allowed, 1))
    return [(time, links) for time, links in own if time < when]


def _least_hop_ns(members: Sequence[Seen], entries: Entries, usual: Usual) -> float:
    """What a link takes at least, 95 of 100 times: the way, a message's length, a captured rank's reaction.

    The times of links themselves may come short of it: no message shows how late its input was.
    """
    first = members[0]
    rows = slice(first.row, first.row + len(first.instance.order))
    lengths = [value for seen in members for value in seen.transfer_ns]
    way = float(entries.margins.way_ns[rows].max(initial=0)) + _percentile(lengths or [0], SLOW)
    return way + float(np.nan_to_num(usual.slowest_ns[first.row], nan=0.0))


def _percentile(values: Sequence[float], level: float) -> float:
    return float(np.percentile(values, level))
