"""What a step would take without one rank's own lateness: the job's collectives, replayed.

Each rank acts some time after the last thing that happened to it: that time is its own work, and it is
kept, but for the late rank's excess over its peers. A rank leaves a collective as long after the latest
entry it depends on as it did; which entries those are is read from the algorithm's schedule (in a
broadcast the root's and its parents', in an all_reduce everyone's), all of them where that is unknown.
A sender need not wait for its transfer to arrive.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schedules.graph import reach, schedule
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.verdicts.steps import Steps

ROWS = 20_000
"""Entries that are replayed: whole steps in a row, as many as fit. Their median stands for all."""
REPRODUCED = 0.02
"""How far the replay with nothing changed may be off from the steps as they were."""


class Saving(NamedTuple):
    """The typical step as it was, and without the late rank's excess."""

    step_ns: int
    without_ns: int


def step_without(
    instances: Sequence[Instance],
    entries: Entries,
    steps: Steps,
    sooner_ns: Mapping[int, int],
    from_ns: int | None,
    steady: bool,
) -> Saving | None:
    """Replay with each row of ``sooner_ns`` entering that much sooner; None where no replay fits.

    ``from_ns``: steps that began before are left out (the rank was not late then). ``steady``: the
    median step is told, which lateness that comes now and then leaves as it is; else the mean. Nothing is
    said where some of a collective's ranks were not seen at all.
    """
    typical = np.median if steady else np.mean
    end_ns = entries.leave_ns[steps.ends]
    first = 0 if from_ns is None else int(np.searchsorted(end_ns, from_ns, "right"))
    if len(end_ns) - first < 2:
        return None
    inside = np.isin(entries.endpoint, steps.endpoints)
    rows = np.flatnonzero(inside & (entries.leave_ns > end_ns[first]))
    rows = rows[np.argsort(entries.leave_ns[rows], kind="stable")]
    last = len(end_ns) - 1
    if len(rows) > ROWS:
        last = int(np.searchsorted(end_ns, entries.leave_ns[rows[ROWS]], "right")) - 1
        rows = rows[entries.leave_ns[rows] <= end_ns[max(last, first + 1)]]
    ends = steps.ends[first + 1 : last + 1]
    if len(ends) < 2:
        return None
    if any(instances[number].seats for number in np.unique(entries.collective[rows]).tolist()):
        return None  # of ranks that no capture saw nobody knows how late they would still be
    events = _events(instances, entries, rows)
    observed = np.diff(entries.leave_ns[ends])
    step_ns = float(typical(observed))
    same = float(typical(np.diff(_replay(events, entries, ends, {}))))
    if step_ns <= 0 or abs(same - step_ns) > REPRODUCED * step_ns:
        return None
    without = float(typical(np.diff(_replay(events, entries, ends, sooner_ns))))
    return Saving(round(step_ns), round(min(max(without, 0.0), step_ns)))


Event = tuple[int, int, int, tuple[int, ...] | None, bool]
"""Time, endpoint, row; for a leaving the rows it depends on (None: an entry); whether the rank waited."""


def _events(instances: Sequence[Instance], entries: Entries, rows: NDArray[np.int64]) -> list[Event]:
    """Entries that are a rank's own act, and leavings, in order of time; entries first."""
    found: list[tuple[int, int, Event]] = []
    enter, leave = entries.enter_ns, entries.leave_ns
    # Within a transfer nothing reaches its sender that it could have waited for.
    sender = np.zeros(len(enter), bool)
    sender[entries.offsets[:-1][[i.op == Op.SEND_RECV for i in instances]]] = True
    act = (entries.exact | sender) & (enter != NEVER)
    for row in rows.tolist():
        endpoint, number = int(entries.endpoint[row]), int(entries.collective[row])
        if act[row]:
            at = int(enter[row])
            found.append((at, 0, (at, endpoint, row, None, True)))
        instance, base = instances[number], int(entries.offsets[number])
        place = row - base
        if leave[row] == NEVER:
            continue
        needs = tuple(
            base + p for p in _needs(instance.algorithm, len(instance.order), instance.root or 0)[place]
        )
        at = int(leave[row])
        known = tuple(n for n in needs if act[n] and enter[n] <= at)
        found.append((at, 1, (at, endpoint, row, known, instance.op != Op.SEND_RECV or place > 0)))
    found.sort(key=lambda item: item[:2])
    return [event for _, _, event in found]


@lru_cache(maxsize=1024)
def _needs(algorithm: Algorithm | None, n: int, root: int) -> tuple[tuple[int, ...], ...]:
    """For each place of a group the places on whose entry its leaving depends."""
    if algorithm is None:
        return (tuple(range(n)),) * n
    found = [set(known) for known in reach(algorithm, n, root)]
    sends = schedule(algorithm, n, root)
    fed = {send.dst for send in sends}
    for send in sends:
        if send.src not in fed:  # it leaves when all is sent, which may wait for who takes it
            found[send.src].add(send.dst)
    return tuple(tuple(sorted(known)) for known in found)


def _replay(
    events: Sequence[Event], entries: Entries, ends: NDArray[np.int64], sooner_ns: Mapping[int, int]
) -> NDArray[np.int64]:
    """When the rows ``ends`` are left if each row of ``sooner_ns`` is entered that much sooner."""
    then: dict[int, int] = {}  # per endpoint the last thing that happened to it, as it was
    now: dict[int, int] = {}  # and as it would be: the latest of all
    entered: dict[int, int] = {}
    left: dict[int, int] = {}
    enter = entries.enter_ns
    for at, endpoint, row, needs, waited in events:
        before = then.get(endpoint, at)
        after = now.get(endpoint, at)
        known = [(int(enter[need]), entered[need]) for need in needs or () if need in entered]
        if needs is None:
            when = entered[row] = after + max(at - before - sooner_ns.get(row, 0), 0)
        elif known:
            when = left[row] = max(new for _, new in known) + at - max(old for old, _ in known)
        else:  # nobody's entry can be seen: as long after what went before as it was
            when = left[row] = after + at - before
        if not waited:
            continue
        then[endpoint] = max(before, at)
        now[endpoint] = max(after, when)
    return np.array([left.get(int(row), int(entries.leave_ns[row])) for row in ends], np.int64)
