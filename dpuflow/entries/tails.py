"""How long a hand-over may take at the worst, and how often: beyond what errors cover.

In: entries with the reactions that the capture shows. Out: a time a row that 999 in 1000 hand-overs of its
hosts stay below, and all hand-overs that were seen. ``error_ns`` is half of a 95 % interval; of a host that
stalls now and then one message in twenty comes later than any such interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import classes, percentile
from dpuflow.entries.handover import by_rank, may_hand_over
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import BEYOND, BY_GPUS, FEWEST, QUICK, SLOW
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.rows import Entries, Times
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


ONE_SIDED = 1.645
"""Standard deviations below which 95 % of a normal distribution lie."""


def tail_ns(values: NDArray[np.int64]) -> float:
    """What all but ``BEYOND`` of such values stay below; NaN of too few.

    Peaks over a threshold: beyond a high one excesses of a distribution without a heavier tail than the
    exponential one become exponential (Pickands, 1975), so their mean tells how far it reaches.
    """
    if len(values) < FEWEST:
        return float("nan")
    high = percentile(values, SLOW)
    beyond = values[values > high]
    excess = float((beyond - high).mean()) if len(beyond) else 0.0
    return high + excess * float(np.log((1 - SLOW / 100) / BEYOND))


class Tail:
    """Which share of values lies how far out: as counted, and far out by the same tail."""

    def __init__(self, values: NDArray[np.int64] | NDArray[np.float64]) -> None:
        self.ordered = np.sort(values)
        self.high = percentile(self.ordered, SLOW)
        beyond = self.ordered[self.ordered > self.high]
        self.excess = float((beyond - self.high).mean()) if len(beyond) else 0.0

    def share_beyond(self, least_ns: NDArray[np.int64], *, surely: bool = False) -> NDArray[np.float64]:
        """Which share of such values lies beyond each of ``least_ns``; ``surely``: at the least (95 %)."""
        counted = 1 - np.searchsorted(self.ordered, least_ns, "right") / len(self.ordered)
        share = counted
        if self.excess:
            far = (1 - SLOW / 100) * np.exp(np.minimum(self.high - least_ns, 0) / self.excess)
            share = np.where(least_ns > self.high, far, counted)
        if not surely:
            return share
        some = ONE_SIDED**2 / len(self.ordered)  # the lower end of Wilson's interval (1927)
        off = np.sqrt(some * (share * (1 - share) + some / 4))
        return np.asarray((share + some / 2 - off) / (1 + some), np.float64)


def stalls(
    entries: Entries, exchanges: Rows, instances: Sequence[Instance], of_row: NDArray[np.int64]
) -> Tail | None:
    """By how much hand-overs of all hosts were seen to exceed the usual in mid-operation; None of too few.

    Sends that had waited for an input; slots given back, and in rings and all_to_alls, where nothing more is
    done on a connection after its last input, first entries of the next one; elsewhere those that follow a
    rank's last input of all: of each group's middle rank, for one that is slow at that is a fault of its
    own. Over RoCE NCCL's proxy thread spins, and GPUs work whatever it does: where none of its hand-overs is
    seen they have no stalls. A kernel that sends for it may; of puts no packet says whether a GPU posted
    them. ``of_row``: the group of each row.
    """
    ends = np.array([_ends_with_last(i) for i in instances], bool)
    rows, ns = entries.reactions.between
    last = ends[entries.collective[rows]] if len(rows) else np.zeros(0, bool)
    whole = entries.reactions.ended
    other = ~ends[entries.collective[whole[0]]] if len(whole[0]) else np.zeros(0, bool)
    found = [entries.reactions.waited[1]]
    for times in (entries.reactions.taken, (rows[last], ns[last]), (whole[0][other], whole[1][other])):
        found += _middle_ranks(entries, of_row, times).values()
    every = np.concatenate(found)
    if len(every) >= FEWEST:
        return Tail(every - np.median(every))
    spinning = _of_wires(entries, exchanges, instances, lambda wire: wire == Wire.ROCE_WRITE_IMM).all()
    return Tail(np.zeros(1)) if spinning else None


def _ends_with_last(instance: Instance) -> bool:
    ring = instance.algorithm is not None and instance.algorithm.name == "ring"
    return ring or instance.op == Op.ALL_TO_ALL


def _middle_ranks(entries: Entries, of_row: NDArray[np.int64], times: Times) -> dict[int, NDArray[np.int64]]:
    """For each group those of ``times`` that the middle one of its ranks took, by their tails; of ranks with
    enough of them."""
    ranks: dict[int, list[NDArray[np.int64]]] = {}
    for group, own in by_rank(entries, of_row, times):
        ranks.setdefault(group, []).append(own)
    return {group: sorted(found, key=tail_ns)[(len(found) - 1) // 2] for group, found in ranks.items()}


def tails(entries: Entries, of_row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per row what a hand-over of its group (``of_row``) takes at the worst, ns; NaN where nothing tells.

    Of sends that had waited for an input; where data streams and no send is seen to wait, of slots given
    back; and where operations fit in the slots, of first entries of the next one. A group that shows too
    little has the sends of all.
    """
    return _by_group(_samples(entries, of_row), of_row, tail_ns)


def _samples(entries: Entries, of_row: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Hand-overs of each group that shows any."""
    out = {}
    middle = [
        _middle_ranks(entries, of_row, times)
        for times in (entries.reactions.taken, entries.reactions.between)
    ]
    group = of_row[entries.reactions.waited[0]]
    for each in np.unique(of_row).tolist():
        samples = [
            entries.reactions.waited[1][group == each],
            *(found[each] for found in middle if each in found),
        ]
        told = [sample for sample in (*samples, entries.reactions.waited[1]) if len(sample) >= FEWEST]
        if told:
            out[each] = told[0]
    return out


def _by_group(
    samples: dict[int, NDArray[np.int64]],
    of_row: NDArray[np.int64],
    measure: Callable[[NDArray[np.int64]], float],
) -> NDArray[np.float64]:
    """Per row what ``measure`` makes of its group's sample; NaN without one."""
    out = np.full(len(of_row), np.nan)
    for group, sample in samples.items():
        out[of_row == group] = measure(sample)
    return out


def worst_ns(
    tail: NDArray[np.float64], entries: Entries, exchanges: Rows, instances: Sequence[Instance]
) -> NDArray[np.int64]:
    """Per row what to allow for, whole ns: its ``tail`` where a thread like NCCL's proxy serves all alike.

    In Open MPI the caller itself sends, an entry wakes nobody up, and reactions say nothing of it; Gloo wakes
    other threads for a call than for a message. 0 there.
    """
    found = np.nan_to_num(tail, nan=0.0).round().astype(np.int64)
    return np.where(served_alike(entries, exchanges, instances), found, 0)


def served_alike(entries: Entries, exchanges: Rows, instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Rows whose first message and whose later ones are handed on by one thread, as NCCL's proxy does."""
    return _of_wires(entries, exchanges, instances, lambda wire: wire in BY_GPUS)


def handed_to_threads(entries: Entries, exchanges: Rows, instances: Sequence[Instance]) -> NDArray[np.bool_]:
    """Rows whose calls wake a thread of the library, as Gloo's do; a library that nothing names may do so."""
    return _of_wires(entries, exchanges, instances, may_hand_over)


def _of_wires(
    entries: Entries, exchanges: Rows, instances: Sequence[Instance], fits: Callable[[int], bool]
) -> NDArray[np.bool_]:
    wires = exchanges["wire"]
    handed = [len(i.rows) > 0 and fits(int(wires[i.rows[0]])) for i in instances]
    return np.asarray(np.array(handed, bool)[entries.collective], bool)


def room(entries: Entries, begun: Sequence[Times], of_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per row how long before its first act its rank may have entered at the worst, ns.

    As much as a hand-over takes at the worst beyond the quickest (5 %), for these all ranks need; nor more
    than the group's work scatters by at the worst, hand-over included. And not before it can have done the
    least that its group was ever seen to need from when it began. ``begun``: by row such a beginning, NEVER
    without, and that least: from leaving its collective before; from posting its credits for this one.
    """
    reactions = _by_group(
        _samples(entries, of_row), of_row, lambda sample: tail_ns(sample) - percentile(sample, QUICK)
    )
    scatter = _by_group(_longer(entries, begun[0][0], of_row), of_row, tail_ns)
    worst = np.nan_to_num(np.fmin(reactions, scatter), nan=0.0)
    out = worst.round().astype(np.int64)
    for since_ns, least_ns in begun:
        known = (since_ns != NEVER) & (entries.enter_ns != NEVER)
        worked = np.where(known, entries.enter_ns - np.where(known, since_ns, 0) - least_ns, FAR)
        out = np.clip(worked, 0, out)
    return np.asarray(out, np.int64)


def _longer(
    entries: Entries, left_ns: NDArray[np.int64], of_row: NDArray[np.int64]
) -> dict[int, NDArray[np.int64]]:
    """By group how much longer than in the median each rank worked, where both ends are known."""
    rows = np.flatnonzero(entries.exact & entries.whole & (left_ns != NEVER))
    longer = (entries.enter_ns - left_ns)[rows]
    for mine in classes(of_row[rows], entries.endpoint[rows]):
        longer[mine] -= round(float(np.median(longer[mine])))
    return {
        int(of_row[rows[mine[0]]]): np.maximum(longer[mine], 0)
        for mine in classes(of_row[rows])
        if len(mine) >= FEWEST
    }
