"""When ranks had taken what they received, and whose GPUs are slow to.

In: exchanges, entries. Out: when ranks had taken what came, and whose GPUs take long. Data is there, and its
receiver's GPU copies it out of the slots; no credit for the next operation before it has (proxy.cc). A slow
one keeps its senders waiting for credits, or is itself late to what comes next. It computes no longer than
its peers, and the links are as quick as others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct, median_of
from dpuflow.entries import AT_ONCE, against_others, places_of, previous_row
from dpuflow.entries.inputs import lines_of
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire
from dpuflow.verdicts.chance import is_material, usual_excess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


class SlowReceiver(NamedTuple):
    """Times in ns: how long its inputs lay there in the median operation, the other receivers', and what that
    cost in all; ``operations`` of which that is told."""

    endpoint: int
    taking_ns: int
    others_ns: int
    cost_ns: int
    operations: int


def slow_receivers(
    exchanges: Rows, instances: Sequence[Instance], entries: Entries, taken_ns: Ints, worked_ns: int
) -> list[SlowReceiver]:
    """Ranks that usually take longer than the others, at a cost; ``taken_ns`` as of ``taken_until``.

    Of whose inputs only a part was seen the rest may have been under way meanwhile.
    """
    known = (taken_ns != NEVER) & (entries.leave_ns != NEVER)
    for row in np.flatnonzero(known).tolist():
        instance, end = instances[entries.collective[row]], int(entries.endpoint[row])
        near = instance.view.near
        known[row] = near is None or end in near or near.issuperset({*instance.order} - {end})
    lag = np.where(known, taken_ns - np.where(known, entries.leave_ns, 0), 0)
    ends = distinct(entries.endpoint[known]).tolist()
    rows_of = {end: (rows := entries.of[end])[known[rows]] for end in ends}
    usual = {endpoint: float(median_of(lag[rows])) for endpoint, rows in rows_of.items()}
    if len(usual) < 2:
        return []
    late = _late_after(entries, taken_ns, known)
    waited = _waited(exchanges, instances, entries, distinct(entries.collective[known]))
    found = []
    for endpoint, rows in rows_of.items():
        others = float(median_of([ns for end, ns in usual.items() if end != endpoint]))
        excess = (lag[rows] - others).round().astype(np.int64)
        cost = np.minimum(np.maximum(excess, 0), np.maximum(late[rows], waited[rows]))
        by = usual_excess(excess, cost)
        if by and is_material(by * len(rows), worked_ns):
            found.append(
                SlowReceiver(int(endpoint), round(usual[endpoint]), round(others), int(cost.sum()), len(rows))
            )
    return found


def _late_after(entries: Entries, taken_ns: Ints, known: Bools) -> Ints:
    """Per row by how much its rank came after the others to the collective that it entered next."""
    behind = against_others(entries, entries.enter_ns, entries.enter_ns != NEVER)
    last = previous_row(entries)
    after = np.flatnonzero((last >= 0) & known[last] & np.isfinite(behind))
    after = after[entries.enter_ns[after] >= taken_ns[last[after]]]
    out = np.zeros(len(last), np.int64)
    out[last[after]] = np.maximum(behind[after], 0).round().astype(np.int64)
    return out


def _waited(exchanges: Rows, instances: Sequence[Instance], entries: Entries, numbers: Ints) -> Ints:
    """Per row of these collectives for how long messages to its rank waited for credit in mid-operation: on
    one connection, that on which they waited longest."""
    out = np.zeros(len(entries.endpoint), np.int64)
    told = np.concatenate([instances[n].rows for n in numbers.tolist()])
    of = np.repeat(numbers, [len(instances[n].rows) for n in numbers.tolist()])
    rows = Picked(exchanges, told)
    known = (rows["grant"] != NONE32) & (rows["grant_arrived_ns"] != NEVER) & (rows["data_ns"] != NEVER)
    rows, of = Picked(exchanges, told[known]), of[known]
    way = lines_of(rows)
    order = np.lexsort((rows["order"], way, of))
    rows, of, way = Picked(exchanges, told[known][order]), of[order], way[order]
    same = (np.diff(way) == 0) & (np.diff(of) == 0)
    left, sent, credit = rows["data_end_ns"][:-1], rows["data_ns"][1:], rows["grant_arrived_ns"][1:]
    # What leaves soon after its credit, of the time since the one before had left, had waited for that.
    same &= (credit > left) & (sent - credit < AT_ONCE * (sent - left))
    at = np.flatnonzero(same)
    if not len(at):
        return out
    place = places_of(of[at + 1], rows["dst"][at + 1], entries)
    keys, line = np.unique(np.stack([place, way[at + 1]]), axis=1, return_inverse=True)
    total = np.bincount(line.reshape(-1), (credit - left)[at]).astype(np.int64)
    np.maximum.at(out, keys[0][keys[0] >= 0], total[keys[0] >= 0])
    return out


def taken_until(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> Ints:
    """Per row of Entries when its rank had taken what point-to-point connections brought; NEVER if not told.

    A connection takes up its next operation when the GPU has taken all of the one before (proxy.cc,
    ProxyAppend): no later than the next entry is posted. A slow GPU does so long after the data is there.
    """
    found = np.full(len(entries.endpoint), NEVER)
    one_to_one = [n for n, i in enumerate(instances) if i.op in (Op.SEND_RECV, Op.ALL_TO_ALL)]
    if not one_to_one:
        return found
    of = np.full(len(exchanges), -1)
    for number in one_to_one:
        of[instances[number].rows] = number
    rows = np.flatnonzero((of >= 0) & (exchanges["wire"] == Wire.ROCE_WRITE_IMM))
    way = lines_of(exchanges)
    rows = rows[np.lexsort((exchanges["order"][rows], way[rows]))]
    last, after = rows[:-1], rows[1:]
    ends = (way[last] == way[after]) & (of[last] != of[after])
    last, granted = last[ends], exchanges["grant_ns"][after[ends]]
    known = (granted != NEVER) & (granted >= exchanges["arrived_end_ns"][last])
    last, granted = last[known], granted[known]
    at = places_of(of[last], exchanges["dst"][last], entries)
    np.maximum.at(found, at[at >= 0], granted[at >= 0])
    return found


def taken_before(instances: Sequence[Instance], entries: Entries, taken: Ints) -> Ints:
    """Per row when its rank had ``taken`` (``taken_until``) all of the call before, and only then went on to
    work; NEVER where its host may have been what it waited for.
    """
    last = previous_row(entries)
    calls = np.array([i.op == Op.ALL_TO_ALL for i in instances], bool)
    known = (last >= 0) & (entries.enter_ns != NEVER) & (taken[last] != NEVER)
    known &= calls[entries.collective[last]] if len(instances) else known
    out = np.full(len(last), NEVER)
    if known.any():
        since = entries.leave_ns[last]
        later = worked_since(since, taken[last], entries.enter_ns, known)
        out[known] = np.where(later > since, later, NEVER)[known]
    return out


def worked_since(since: Ints, taken: Ints, until: Ints, known: Bools) -> Ints:
    """From when on ranks worked until they acted: they could ``since``, and had ``taken`` their inputs then.

    A GPU that is slow to take what came works from then on, as long as usual. One that acts soon after may
    have waited for its host, which posts entries, too.
    """
    if not known.any():
        return since
    usual = median_of((until - since)[known])
    later = known & (taken > since) & (2 * (until - taken) >= usual)
    return np.asarray(np.where(later, taken, since), np.int64)
