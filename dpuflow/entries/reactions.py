"""How hosts react: exchanges and entries in; the law that says what an act can have waited for, out.

First how quickly hosts hand messages on in mid-operation, each time that a capture shows it (``Reactions``).
A rank that had sent all it could and waited for an input sends within its host's reaction once that is there;
NCCL's grants a slot again when its GPU has taken what was in it. How long these are the capture shows, for
each group of ranks that run alike: one sample of them, and how it is spread. What came later than the law
allows had not waited (``blockers``); how far two hand-overs differ it says as well (``margins``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import (
    classes,
    distinct,
    lower_medians,
    median_of,
    order_within,
    percentile,
    percentiles,
    quantiles,
    spans,
)
from dpuflow.entries.inputs import lines_of, messages_ahead
from dpuflow.entries.rows import BEYOND, FEWEST, ONE_SIDED, QUICK, SLOW, Rule
from dpuflow.exchanges.build import there_ns
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.places import Needs
    from dpuflow.entries.rows import Entries, Times
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


_LEVELS = (QUICK, 50, 90, SLOW)
_WIDE = 95
LIKELIER = 100
"""By this ratio of likelihoods a heavier tail than the exponential one is taken for real."""
PAIRED = 1000
"""Of more values than these only so many quantiles are compared with each other."""


def waited_sends(
    picked: Picked, needs: Needs, sender: Ints, receiver: Ints, enter: Ints
) -> tuple[Ints, Ints]:
    """Sends whose rank had done all it could and waited for an input: (row of Entries, time since it came).

    ``picked`` are the exchanges of ``needs``; ``sender``, ``receiver`` and ``enter`` refer to rows of
    Entries. Where the algorithm is known the input is the one that the send needs; else the last thing
    that happened before the send must be an input. What came before the rank had entered counts for
    nothing: it waited for the rank.
    """
    from dpuflow.kernels import waits

    start = np.where(picked["offer_ns"] != NEVER, picked["offer_ns"], picked["data_ns"])
    ready = np.full(len(picked), NEVER)
    there = there_ns(picked)
    np.maximum.at(ready, needs.send, there[needs.input])
    # Without an offer the data may have waited for its credit; that is as good as an input.
    credit = np.where(picked["offer_ns"] == NEVER, picked["grant_arrived_ns"], NEVER)
    ready = np.where(ready != NEVER, np.maximum(ready, credit), NEVER)
    ready[_behind_own_data(picked, sender, start, ready)] = NEVER

    count = len(picked)
    times = (there, picked["data_end_ns"], start)
    seen = [int(t[t != NEVER].min(initial=FAR)) for t in times]
    own, after = np.empty((2, count), np.int64)
    keys, order, room = np.empty((3, 3 * count), np.int64)
    found = waits.waited(
        sender, receiver, *times, ready, _begun_before(picked, sender, start),
        needs.mapped.view(np.uint8), needs.split.view(np.uint8), enter, min(seen),
        np.empty(waits.KINDS * len(enter) + 1, np.int64), keys, order, room, own, after,
    )  # fmt: skip
    # A blocking exchange ends when both its halves have: the rank may have waited for its own send, too.
    return own[:found], after[:found]


def _begun_before(picked: Picked, sender: Ints, start: Ints) -> Ints:
    """When NCCL had begun the send before each on the same connection: its thread blocks do not wait for each
    other. NEVER for the first one there, and of other libraries."""
    wire, line = picked["wire"], lines_of(picked)
    rows = np.flatnonzero(((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)) & (start != NEVER))
    rows = rows[np.lexsort((start[rows], line[rows], sender[rows]))]
    same = (sender[rows[1:]] == sender[rows[:-1]]) & (line[rows[1:]] == line[rows[:-1]])
    before = np.full(len(picked), NEVER)
    before[rows[1:][same]] = start[rows[:-1][same]]
    return before


def _behind_own_data(picked: Picked, sender: Ints, start: Ints, ready: Ints) -> Ints:
    """NCCL's sends whose rank was still sending when their input came: they waited for the wire, not for
    that.

    NCCL's thread blocks fill slots while the network takes those before; a blocking caller has one at a time.
    """
    wire = picked["wire"]
    rows = np.flatnonzero(((wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.NCCL_DATA)) & (start != NEVER))
    rows = rows[order_within(start[rows], sender[rows])]
    if len(rows) < 2:
        return rows[:0]
    same = sender[rows[1:]] == sender[rows[:-1]]
    busy = same & (picked["data_end_ns"][rows[:-1]] > ready[rows[1:]])
    behind: Ints = rows[1:][busy]
    return behind


def granted_data_ns(picked: Picked, sender: Ints) -> Ints:
    """How long Open MPI's hosts take from a grant to the data that it allows, where the rank was sending
    nothing else: it is inside the call and was waiting for the grant.
    """
    wire, start, end = picked["wire"], picked["data_ns"], picked["data_end_ns"]
    granted = picked["grant_arrived_ns"]
    mine = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (start != NEVER)
    rows = np.flatnonzero(mine)
    rows = rows[order_within(start[rows], sender[rows])]
    lone = (granted[rows] != NEVER) & (picked["offer_ns"][rows] != NEVER) & (granted[rows] < start[rows])
    lone &= _alone(sender[rows], np.where(granted[rows] != NEVER, granted[rows], start[rows]), end[rows])
    # What is the first to fill a connection's window takes longer than any that follows.
    large = np.flatnonzero(lone)
    lone[large[np.unique(lines_of(picked)[rows[large]], return_index=True)[1]]] = False
    return np.asarray((start - granted)[rows[lone]], np.int64)


def _alone(sender: Ints, allowed: Ints, end: Ints) -> Bools:
    """Data before which its sender had sent all else that had been allowed by then.

    What was allowed later and left before it excuses nothing: then its own was left lying.
    """
    order = order_within(allowed, sender)
    out = np.ones(len(order), bool)
    for mine in np.split(order, np.flatnonzero(np.diff(sender[order])) + 1):
        out[mine[1:]] = np.maximum.accumulate(end[mine])[:-1] <= allowed[mine[1:]]
    return out


def is_gloo(wire: int) -> bool:
    """Whether messages of this ``wire`` are Gloo's."""
    return bool(Wire.GLOO_DATA <= wire <= Wire.GLOO_RECV_READY)


def typical(total: int, of: Ints, values: Ints) -> Ints:
    """The lower median of each row's values; NEVER for rows without."""
    return lower_medians(values, of, np.full(total, NEVER, np.int64))


def consumed(
    picked: Picked, instances: Sequence[Instance], of: Ints, receiver: Ints, enter: Ints
) -> tuple[Times, Times]:
    """From an input's arrival to the entry that grants its slot again: (row of Entries, ns) of every one
    seen.

    The GPU has then taken it, and the proxy thread has seen that: as much as a send that waits for its input
    takes, on ranks that were in the operation (``enter``, by row of Entries) when it came. The second of both
    is from an operation's last input to the first entry of the next one, which its host may have held up:
    at the most, then, and so much more as other inputs are larger. ``of`` and ``receiver``: collective, and
    row of Entries, of each of ``picked``.
    """
    depth = np.fromiter((messages_ahead(i) for i in instances), np.int64, len(instances))[of]
    rows = np.flatnonzero((depth > 0) & (picked["wire"] == Wire.ROCE_WRITE_IMM)) if len(picked) else depth
    line, to = lines_of(picked)[rows], receiver[rows]
    order = order_within(picked["order"][rows].astype(np.int64), line)
    rows, line, to = rows[order], line[order], to[order]
    turn, depth, size = picked["order"][rows].astype(np.int64), depth[rows], picked["bytes"][rows]
    granted, arrived = picked["grant_ns"][rows], picked["arrived_end_ns"][rows]
    inside = (arrived != NEVER) & (granted != NEVER) & (enter[to] != NEVER) & (enter[to] <= arrived)
    where, found = [], []
    for ahead in distinct(depth).tolist():
        same = (line[ahead:] == line[:-ahead]) & (to[ahead:] == to[:-ahead]) & (depth[ahead:] == ahead)
        at = np.flatnonzero(same & inside[:-ahead])
        at = at[granted[at + ahead] >= arrived[at]]
        where.append(to[at])
        found.append(granted[at + ahead] - arrived[at])
    none = np.zeros(0, np.int64)
    largest = np.zeros(len(enter), np.int64)
    np.maximum.at(largest, to, size.astype(np.int64))
    last = (line[1:] == line[:-1]) & (to[1:] != to[:-1]) & (turn[1:] == turn[:-1] + 1) & inside[:-1]
    at = np.flatnonzero(last)
    at = at[(granted[at + 1] >= arrived[at]) & (size[at] > 0)]
    more = largest[to[at]] / np.maximum(size[at], 1).astype(np.float64)
    between = (granted[at + 1] - arrived[at]) * more
    return (
        (np.concatenate([none, *where]), np.concatenate([none, *found])),
        (to[at], between.round().astype(np.int64)),
    )


class Law(NamedTuple):
    """Per row of Entries how long its group's hosts take from an input to what had waited for it, ns.

    NaN where nothing in the whole capture tells.
    """

    quick_ns: Floats  # 5 % are no longer
    median_ns: Floats
    most_ns: Floats  # 90 %
    slow_ns: Floats  # 95 %
    worst_ns: Floats  # 999 in 1000
    apart_ns: Floats  # two of them differ by, in 95 of 100 cases
    by_sends: Bools  # measured from sends, not only from slots given back


class Tail:
    """Which share of values lies how far out: as counted, and far out by peaks over a threshold.

    Beyond a high one excesses of a distribution without a heavier tail than the exponential one become
    exponential (Pickands, 1975), so their mean tells how far it reaches. Those of a heavier one follow a
    power of the length (Hill, 1975), which counts for the share far out where it is LIKELIER.
    """

    def __init__(self, values: Ints | Floats) -> None:
        self.ordered = np.sort(values)
        self.high = percentile(self.ordered, SLOW)
        beyond = self.ordered[self.ordered > self.high]
        self.excess = float((beyond - self.high).mean()) if len(beyond) else 0.0
        logs = np.log(beyond / self.high) if self.high > 0 else beyond[:0]
        power = float(logs.mean()) if len(logs) else 0.0
        gain = np.log(self.excess / power / self.high) - power if power else 0.0
        self.power = power if len(logs) * gain > np.log(LIKELIER) else 0.0

    @property
    def worst(self) -> float:
        """What all but ``BEYOND`` of such values stay below."""
        return self.high + self.excess * float(np.log((1 - SLOW / 100) / BEYOND))

    def share_beyond(self, least_ns: Ints, *, surely: bool = False) -> Floats:
        """Which share of such values lies beyond each of ``least_ns``; ``surely``: at the least (95 %)."""
        counted = 1 - np.searchsorted(self.ordered, least_ns, "right") / len(self.ordered)
        share = counted
        if self.excess:
            far = np.exp(np.minimum(self.high - least_ns, 0) / self.excess)
            if self.power:
                far = np.maximum(least_ns / self.high, 1) ** (-1 / self.power)
            share = np.where(least_ns > self.high, (1 - SLOW / 100) * far, counted)
        if not surely:
            return share
        some = ONE_SIDED**2 / len(self.ordered)  # the lower end of Wilson's interval (1927)
        off = np.sqrt(some * (share * (1 - share) + some / 4))
        return np.asarray((share + some / 2 - off) / (1 + some), np.float64)


def tail_ns(values: Ints) -> float:
    """What all but ``BEYOND`` of such values stay below; NaN of too few."""
    return Tail(values).worst if len(values) >= FEWEST else float("nan")


def law_of(entries: Entries, of_row: Ints) -> Law:
    """The law of each row's group (``of_row``)."""
    out = np.full((6, len(of_row)), np.nan)
    by_sends = np.zeros(len(of_row), bool)
    for group, (kind, ns) in samples(entries, of_row).items():
        mine = of_row == group
        levels = np.array([*percentiles(ns, _LEVELS), tail_ns(ns), apart_ns(ns)])
        if kind in ("between", "first"):  # more than a reaction may have held these up: a bound, not usual
            levels[[1, 2, 5]] = np.nan
        out[:, mine] = levels[:, None]
        by_sends[mine] = kind in ("sends", "all")
    return Law(out[0], out[1], out[2], out[3], out[4], out[5], by_sends)


def samples(entries: Entries, of_row: Ints) -> dict[int, tuple[str, Ints]]:
    """Of each group the reactions that tell most, and what they are.

    Sends that had waited for an input; where data streams and no send is seen to wait, slots given back, and
    where operations fit in the slots, first entries of the next one: of the group's middle rank, for one
    that is slow at that is a fault of its own. A group that shows too little has those of all, whose ranks
    run on the same hosts, and where they are too few what hosts take from a grant to its data. Where nothing
    is seen to wait in mid-operation, first acts after an input, of the middle rank: at the most.
    """
    waited, granted = entries.reactions.waited, entries.reactions.granted_data_ns
    every = np.concatenate([waited[1], granted]) if len(waited[1]) < FEWEST <= len(granted) else waited[1]
    group_of = of_row[waited[0]]
    own = {int(group_of[at[0]]): waited[1][at] for at in classes(group_of)}
    after = np.isin(entries.rule, (Rule.AFTER_INPUT, Rule.ANSWER)) & (entries.unmoved_ns != NEVER)
    first = (np.flatnonzero(after), entries.unmoved_ns[after])
    taken, between, first_acts = (
        middle_ranks(entries, of_row, times)
        for times in (entries.reactions.taken, entries.reactions.between, first)
    )
    out: dict[int, tuple[str, Ints]] = {}
    for group in distinct(of_row).tolist():
        found = (
            ("sends", own), ("taken", taken), ("between", between), ("all", {group: every}),
            ("first", first_acts),
        )  # fmt: skip
        told = [(kind, by[group]) for kind, by in found if len(by.get(group, ())) >= FEWEST]
        if told:
            out[group] = told[0]
    return out


def middle_ranks(entries: Entries, of_row: Ints, times: Times) -> dict[int, Ints]:
    """For each group (``of_row``) those of ``times`` that the middle one of its ranks took; of ranks with
    enough."""
    rows, ns = times
    group = of_row[rows]
    ranks: dict[int, list[Ints]] = {}
    for at in classes(group, entries.endpoint[rows]):
        if len(at) >= FEWEST:
            ranks.setdefault(int(group[at[0]]), []).append(ns[at])
    return {each: sorted(found, key=median_of)[(len(found) - 1) // 2] for each, found in ranks.items()}


def apart_ns(values: Ints) -> float:
    """How far two of ``values`` differ at the most in 95 of 100 cases; NaN of too few."""
    if len(values) < FEWEST:
        return float("nan")
    some = np.sort(values).astype(np.float64)
    if len(some) > PAIRED:
        some = quantiles(some, (np.arange(PAIRED) + 0.5) / PAIRED)
    one, other = _widest_of_most() if len(some) == PAIRED else _widest(len(some))
    return percentiles(some[other] - some[one], (_WIDE,), len(some) * (len(some) - 1) // 2 - len(one))[0]


@remembered
def _widest_of_most() -> tuple[Ints, Ints]:
    """Those of PAIRED values. Of other numbers none are kept: an endless capture has any, each once."""
    return _widest(PAIRED)


def _widest(n: int) -> tuple[Ints, Ints]:
    """The pairs of ``n`` sorted values that may be among the twentieth that is farthest apart.

    Those from one as low to one as high, or further out, are no less apart, (one + 1) (n - other) pairs:
    others have enough of these.
    """
    pairs = n * (n - 1) // 2
    most = pairs - int((pairs - 1) * (_WIDE / 100))
    one = np.arange(n - 1)
    other = np.maximum(n - most // (one + 1), one + 1)
    return np.repeat(one, n - other), spans(other, n - other)


def _ends_with_last(instance: Instance) -> bool:
    """Whether a rank's last input over a connection is the last that it waits for there."""
    ring = instance.algorithm is not None and instance.algorithm.name == "ring"
    return ring or instance.op == Op.ALL_TO_ALL


def stalls(entries: Entries, exchanges: Rows, instances: Sequence[Instance], of_row: Ints) -> Tail | None:
    """By how much hand-overs of all hosts were seen to exceed the usual in mid-operation; None of too few.

    Over RoCE NCCL's proxy thread spins, and GPUs work whatever it does: where none of its hand-overs is seen
    they have no stalls. A kernel that sends for it may; of puts no packet says whether a GPU posted them.
    From an operation's last input to the next one's first entry only what ends its connection's part counts
    (rings, all_to_alls): elsewhere the rank had more to do. ``of_row``: the group of each row.
    """
    ends = np.array([_ends_with_last(i) for i in instances], bool)
    rows, ns = entries.reactions.between
    last = ends[entries.collective[rows]] if len(rows) else np.zeros(0, bool)
    entries = replace(entries, reactions=entries.reactions._replace(between=(rows[last], ns[last])))
    every = [entries.reactions.waited[1]]
    every += [ns for kind, ns in samples(entries, of_row).values() if kind in ("taken", "between")]
    longer = np.concatenate(every)
    if len(longer) >= FEWEST:
        return Tail(longer - median_of(longer))
    return Tail(np.zeros(1)) if _wires(exchanges, instances) <= {Wire.ROCE_WRITE_IMM} else None


def over_sockets(exchanges: Rows, instances: Sequence[Instance]) -> bool:
    """Whether all collectives are NCCL's over sockets: what GPUs send, though a kernel sends it for them."""
    return _wires(exchanges, instances) == {Wire.NCCL_DATA}


def _wires(exchanges: Rows, instances: Sequence[Instance]) -> set[int]:
    return {int(exchanges["wire"][i.rows[0]]) for i in instances if len(i.rows)}
