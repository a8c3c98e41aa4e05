"""How hosts react, entries with their reactions in; the law that says what an act can have waited for, out.

A rank that waits acts within its host's reaction. How long these are the capture shows, for each group of
ranks that run alike: one sample of them, and how it is spread. What came later than the law allows had not
waited (``released``, ``blockers``); how far two hand-overs differ it says as well (``margins``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, distinct, median_of, percentile, percentiles, quantiles, spans
from dpuflow.entries.rows import BEYOND, FEWEST, ONE_SIDED, QUICK, SLOW, Rule
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries.rows import Entries, Times
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


_LEVELS = (QUICK, 50, 90, SLOW)
_WIDE = 95
LIKELIER = 100
"""By this ratio of likelihoods a heavier tail than the exponential one is taken for real."""
PAIRED = 1000
"""Of more values than these only so many quantiles are compared with each other."""


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
    return {each: sorted(found, key=np.median)[(len(found) - 1) // 2] for each, found in ranks.items()}


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
