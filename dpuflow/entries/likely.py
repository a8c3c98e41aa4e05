"""When ranks without a capture of their own are likely to have entered, from what a captured one heard.

In: collectives of which only some ranks were captured, entries. Out: for each rank heard of, captured ones
included, the latest entry that fits all that was heard, where each link takes what is usual; and the message
that first showed it (docs/inference/one-node.md, "who may have been the last"). No bound: links vary.

A message of step k leaves once its sender has done k steps and has its inputs; so whoever it stands for had
entered that many links before. Where what was heard before explains a message, nothing follows of the ranks
that it was the first to stand for: the delay of others is seen once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries.behind import seen_acts
from dpuflow.entries.handover import FEWEST
from dpuflow.schedules.graph import dependencies, depths
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.entries.behind import Edge, Seen
    from dpuflow.entries.build import Entries

UNEXPLAINED: Final = 2.0
"""Distances from median to quartile by which a message must come later than expected: of links with a normal
scatter one in eleven does so by chance."""


class Pace(NamedTuple):
    """What is usual of a link in like collectives, and by how much one may be slower."""

    middle_ns: float | None
    beyond_ns: float


def likely_entries(entries: Entries, groups: Sequence[Sequence[Seen]]) -> Entries:
    """Entries with ``likely_ns`` of the ranks heard of; ``by_ns`` and ``by_act`` of those that nothing dates.

    ``groups`` as of ``behind.read_alike``.
    """
    likely, by, by_act = entries.likely_ns.copy(), entries.by_ns.copy(), entries.by_act.copy()
    for members in groups:
        pace = _pace(members, entries)
        for seen in members:
            for row, (when, shown, act) in _fit(seen, entries, pace).items():
                likely[row] = when
                if not entries.exact[row] and entries.by_ns[row] == NEVER:
                    by[row], by_act[row] = shown, act
    return replace(entries, likely_ns=likely, by_ns=by, by_act=by_act)


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
        sent = {name[1:]: when for name, (when, _) in seen.times.items() if name[0] == "send"}
        allowed = [
            when for name, (when, _) in seen.times.items() if name[0] == "grant" and name[1][0] in captured
        ]
        own = sorted((when, *name) for name, when in sent.items() if name[0][0] in captured)
        for place, (when, edge, turn) in enumerate(own):
            inputs = needs.get((edge, turn), [])
            if inputs and place and all(each in sent for each in inputs):
                # Who is not allowed to send does not go on either.
                free = [at for at in allowed if at < when]
                came, before = max([*(sent[each] for each in inputs), *free]), own[place - 1][0]
                (waits if came > before else steps).append(max(when - max(came, before), 0))
    if len(waits) >= FEWEST:
        middle, quartile = np.percentile(waits, (50, 75)).tolist()
        return Pace(middle, UNEXPLAINED * (quartile - middle))
    # It never waits (it is the late one): how fast it goes on tells little of how fast others react.
    slow = float(entries.slow_ns[first.row])
    if len(steps) >= FEWEST and slow != NEVER:
        return Pace(float(np.median(steps)), slow)
    return Pace(None, 0.0)


def _fit(seen: Seen, entries: Entries, pace: Pace) -> dict[int, tuple[int, int, int]]:
    """For rows of ranks heard of: when they are likely to have entered; the message that first showed it."""
    algorithm, n, root = seen.shape()
    rows = {seat: seen.row + place for place, seat in enumerate(seen.seats())}
    captured = seen.captured()
    paths = depths(algorithm, n, root)
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
        sender = act.edge[0] if act.kind == "send" else act.edge[1]
        links = (
            paths[act.edge, act.number]
            if act.kind == "send"
            else {rank: over - 1 for rank, over in act.may.ranks.items()}
        )
        left = float(when - zero - (entries.usual_way_ns[rows[sender]] if sender in rows else 0))
        expected = [
            likely[rank] + links[rank] * (pace.middle_ns or 0)
            for rank in likely
            if links.get(rank, 0) > 0 and pace.middle_ns is not None
        ]
        explained = bool(expected) and left <= max(expected) + pace.beyond_ns
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
