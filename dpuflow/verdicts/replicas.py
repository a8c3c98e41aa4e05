"""Pipelines side by side in, each stage against the same stage of the others out: who works longer.

Replicas of a model (data parallel) have pipelines of one shape, and the same stage of each does the same
work. So like is compared with like, act by act: the k-th transfer a stage sends in a step, and its entries
into the collectives that tie the replicas together. A stage works from the arrival of what an act follows
from, or from its last act, whichever is later; where it may have been its own last data or its peer's credit
that kept an act (NCCL carries out one send after the other), the shorter reckoning counts. What was sent
again is the network's doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.persistence import QUARTER_IN_SIGMAS, SIGMAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.verdicts.pipelines import Pipeline

    Ints = NDArray[np.int64]

FEWEST = 4
"""Steps from which on a scatter by quartiles means anything."""


class Compared(NamedTuple):
    """Acts that replicas were compared by; arrays are parallel."""

    rows: Ints  # of Entries
    excess_ns: Ints  # how much longer the rank worked for it than the others' median
    amount_ns: Ints  # the same, 0 within the noise
    sigma_ns: NDArray[np.float64]  # one standard deviation of the excess

    @property
    def some(self) -> bool:
        """Whether anything was compared."""
        return len(self.rows) > 0


def compare_replicas(
    instances: Sequence[Instance], entries: Entries, pipelines: Sequence[Pipeline]
) -> Compared:
    """What each stage's acts took longer than the same acts of the other replicas."""
    ties = [(number, frozenset(i.order)) for number, i in enumerate(instances) if i.op != Op.SEND_RECV]
    # What follows from one input among several that lay there: by order, as ``pipelines`` has it.
    since = np.full(len(entries.endpoint), NEVER)
    for work in (work for each in pipelines for row in each.work for work in row if work is not None):
        told = work.own_ns != NEVER
        since[work.rows[told]] = entries.enter_ns[work.rows[told]] - work.own_ns[told]
    parts = []
    for peers in _replicas(pipelines, {ends for _, ends in ties}):
        anchors = [number for number, ends in ties if ends >= set(peers)]
        parts.append(_compare(peers, anchors, instances, entries, since))
    if not parts:
        none = np.zeros(0, np.int64)
        return Compared(none, none, none, np.zeros(0))
    return Compared(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _replicas(pipelines: Sequence[Pipeline], tied: set[frozenset[int]]) -> list[list[int]]:
    """For each stage of pipelines side by side the endpoints that are that stage, two at the least."""
    found: dict[tuple[int, int, frozenset[int]], list[int]] = {}
    for each in pipelines:
        for place, stage in enumerate(each.stages):
            for ends in tied:
                # Not a collective that ties stages of one pipeline together.
                if stage in ends and len(ends.intersection(each.stages)) == 1:
                    found.setdefault((len(each.stages), place, ends), []).append(stage)
    return [sorted(peers) for peers in found.values() if len(peers) > 1]


def _compare(
    peers: Sequence[int],
    anchors: Sequence[int],
    instances: Sequence[Instance],
    entries: Entries,
    follows: Ints,
) -> tuple[Ints, Ints, Ints, NDArray[np.float64]]:
    acts = [_Acts(end, anchors, instances, entries, follows) for end in peers]
    alike: dict[tuple[int, ...], list[int]] = {}
    units = min(len(each.units) for each in acts)
    for unit in range(units):
        kinds = [each.units[unit][1] for each in acts]
        if kinds[0] and all(kind == kinds[0] for kind in kinds):
            alike.setdefault(kinds[0], []).append(unit)
    columns: list[list[NDArray[Any]]] = [[], [], [], []]
    for numbers in alike.values():
        # (peers, units, acts)
        where = np.array([[each.units[unit][0] for unit in numbers] for each in acts])
        excess = np.min(
            [_beyond(np.stack([e.own[k][w] for e, w in zip(acts, where, strict=True)])) for k in range(3)],
            axis=0,
        )
        rows = np.stack([each.rows[w] for each, w in zip(acts, where, strict=True)])
        known = np.stack([each.known[w] for each, w in zip(acts, where, strict=True)])
        sigma = np.broadcast_to(_scatter(excess), excess.shape)
        good = np.broadcast_to(known.all(axis=0, keepdims=True), excess.shape) & (len(numbers) >= FEWEST)
        amount = np.where(excess > SIGMAS * sigma, excess, 0)
        for column, values in zip(columns, (rows, excess, amount, sigma), strict=True):
            column.append(values[good])
    none = np.zeros(0, np.int64)
    rows, excess, amount = (np.concatenate([none, *c]).astype(np.int64) for c in columns[:3])
    return rows, excess, amount, np.concatenate([np.zeros(0), *columns[3]])


def _beyond(own: Ints) -> Ints:
    """How much longer each of the first axis worked than the others' median."""
    others = [np.median(np.delete(own, k, axis=0), axis=0) for k in range(len(own))]
    return np.asarray(own - np.stack(others), np.int64)


def _scatter(excess: Ints) -> NDArray[np.float64]:
    """One standard deviation about each peer's own median act by act, on the quieter side; over all peers."""
    low, middle, high = np.percentile(excess, (25, 50, 75), axis=1)
    sigma = np.minimum(middle - low, high - middle) / QUARTER_IN_SIGMAS
    return np.asarray(np.median(sigma, axis=0)[None, None], np.float64)


class _Acts:
    """What one endpoint does of its own accord: transfers it sends, entries into the ``anchors``."""

    def __init__(
        self,
        end: int,
        anchors: Sequence[int],
        instances: Sequence[Instance],
        entries: Entries,
        follows: Ints,
    ) -> None:
        enter, leave, idle = entries.enter_ns, entries.leave_ns, entries.idle_ns
        mine = np.flatnonzero(entries.endpoint == end)
        handed = np.array([i.op == Op.SEND_RECV for i in instances], bool)[entries.collective[mine]]
        first = entries.offsets[entries.collective[mine]] == mine
        sends, receives = mine[handed & first], mine[handed & ~first]
        tied = mine[~handed]
        tied = tied[(enter[tied] != NEVER) & (leave[tied] != NEVER)]
        anchor = tied[np.isin(entries.collective[tied], anchors)]
        sends = sends[enter[sends] != NEVER]
        rows = np.concatenate([sends, anchor])
        rows = rows[np.lexsort((rows, enter[rows]))]
        when = enter[rows]

        def before(times: Ints) -> Ints:
            """The last of ``times`` up to each act; NEVER without."""
            ordered = np.sort(times[times != NEVER])
            at = np.searchsorted(ordered, when, "right") - 1
            return np.where(at >= 0, ordered[np.maximum(at, 0)], NEVER) if len(ordered) else when * 0 + NEVER

        since = np.maximum(before(leave[receives]), before(leave[tied]))
        since = np.maximum(since, np.r_[NEVER, when[:-1]])
        since = np.where(follows[rows] != NEVER, follows[rows], since)
        self.rows = rows
        self.known = since != NEVER
        troubled = np.isin(rows, sends) & (entries.retransmitted[rows] > 0)
        self.known &= ~troubled
        # From what it follows from; from when it was free to act: its own data had left, and its peer had
        # allowed more; and, where several inputs had come since its last act, from the first of them: what
        # was done for each is not told, and whoever waited for a late peer gets them all at once.
        credit = entries.credit_ns[rows]
        kept = np.maximum(since, before(idle[sends]))
        kept = np.maximum(kept, np.where(credit != NEVER, when - credit, NEVER))
        came = np.sort(leave[receives][leave[receives] != NEVER])
        first = np.searchsorted(came, np.r_[NEVER, when[:-1]], "right")
        several = (follows[rows] == NEVER) & (np.searchsorted(came, when, "right") > first)
        oldest = np.where(several, came[np.minimum(first, len(came) - 1)], since) if len(came) else since
        self.own = tuple(np.where(self.known, np.maximum(when - s, 0), 0) for s in (since, kept, oldest))
        at = np.searchsorted(np.sort(enter[anchor]), when, "left")
        names: dict[tuple[object, ...], int] = {}
        kind = [
            names.setdefault((i.op, i.size, *i.order), len(names))
            for i in (instances[n] for n in entries.collective[rows].tolist())
        ]
        count = len(anchor) + 1
        self.units: list[tuple[list[int], tuple[int, ...]]] = [([], ()) for _ in range(count)]
        for place, (unit, name) in enumerate(zip(at.tolist(), kind, strict=True)):
            places, kinds = self.units[unit]
            self.units[unit] = [*places, place], (*kinds, name)
