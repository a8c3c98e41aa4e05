"""Differences of lateness between neighbours, each on one clock alone.

In: exchanges, collectives and entries. Out: an Edge for each pair of endpoints of which one's own capture
shows both its own entry and the first act of the other towards it. No clock is compared with another: what
crosses between two captures is only the halved difference of both views, in which the clocks cancel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, median_of
from dpuflow.entries import Rule
from dpuflow.entries.reactions import is_gloo
from dpuflow.entries.rows import INTERVAL_IN_SIGMAS, QUARTER_IN_SIGMAS
from dpuflow.results import Edge
from dpuflow.schedules.graph import first_acts
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows


class View(NamedTuple):
    """By collective, how long after an endpoint's entry its own capture saw another's first act."""

    collective: Ints
    lead_ns: Ints  # with the one-way delay in it


class Measured(NamedTuple):
    """An edge with what it was measured from, by collective."""

    edge: Edge
    collective: Ints
    value_ns: NDArray[np.floating]


def measure_edges(
    joined: Joined, exchanges: Rows, instances: Sequence[Instance], entries: Entries
) -> list[Measured]:
    """Median difference of lateness for each pair of neighbours, in order of endpoints.

    ``error_ns``: the scatter of the median, what the two directions' delays may differ by, and how far loops
    of edges stay open after least squares, whichever is most; None where nothing bounds the delay.
    """
    views = _views(joined, exchanges, instances, entries)
    found: list[Measured] = []
    for a, b in sorted({(min(pair), max(pair)) for pair in views}):
        there, back = views.get((a, b)), views.get((b, a))
        if there is not None and back is not None:
            common, one, two = _common(there.collective, back.collective)
            if len(common):
                # Entries cancel in the sum, which leaves both delays.
                delays = there.lead_ns[one] + back.lead_ns[two]
                value = 0.5 * (there.lead_ns[one] - back.lead_ns[two])
                found.append(_measured(a, b, common, value, max(float(median_of(delays)), 0.0) / 2))
                continue
        view, start, end = (there, a, b) if there is not None else (back, b, a)
        assert view is not None
        delay = _half_round_trip(joined, start, end)
        found.append(_measured(start, end, view.collective, view.lead_ns - (delay or 0.0), delay))
    _close_loops(found)
    return found


def disagreements(joined: Joined, edges: Sequence[Measured], entries: Entries) -> list[str]:
    """Sentences on pairs whose lateness on the common clock is not what each capture alone shows of it."""
    if len(joined.captures) < 2:
        return []
    own = {end: capture for capture, rows in enumerate(joined.local) for end in rows}
    dated = entries.exact & (entries.enter_ns != NEVER)
    told = []
    for edge, collective, value in edges:
        ends = (edge.from_, edge.to)
        if edge.error_ns is None or not own.keys() >= set(ends):
            continue
        tied = [joined.clocks[own[end]] for end in ends]
        clocks = [(clock.error_ns if clock.tied_ns is None else clock.tied_ns) or 0 for clock in tied]
        start, end = (np.flatnonzero(dated & (entries.endpoint == end)) for end in ends)
        both, one, two = _common(entries.collective[start], entries.collective[end])
        _, at, of = _common(both, collective)
        if not len(at):
            continue
        lead = entries.enter_ns[end[two[at]]] - entries.enter_ns[start[one[at]]]
        off = float(median_of(lead - value[of]))
        if abs(off) > edge.error_ns + sum(clocks):
            names = [joined.captures[own[end]].vantage for end in ends]
            told.append(
                f"The clocks of {names[0]} and {names[1]} as used here differ by {off / 1000:.1f} us from "
                "what each capture alone shows: lateness between the two is off by as much."
            )
    return told


def _common(a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
    """Values in both (each has its values once, sorted), and where they are in each."""
    at = np.minimum(np.searchsorted(b, a), max(len(b) - 1, 0))
    one = np.flatnonzero(b[at] == a) if len(b) else np.zeros(0, np.int64)
    return a[one], one, at[one]


def _views(
    joined: Joined, exchanges: Rows, instances: Sequence[Instance], entries: Entries
) -> dict[tuple[int, int], View]:
    """(endpoint whose capture it is, other endpoint) -> View."""
    own = {end for rows in joined.local for end in rows}
    width = len(joined.endpoints)
    who: list[tuple[int, int, int]] = []  # collective, row of the captured endpoint, row of the other
    for number, instance in enumerate(instances):
        if instance.op == Op.SEND_RECV or not instance.complete:
            continue
        first = int(entries.offsets[number])
        # What a library sends to all at once leaves one after the other; Gloo's declarations do not.
        if instance.view.at_once and not is_gloo(int(exchanges["wire"][instance.rows[0]])):
            continue
        for place, other in _dating(instance, own):
            who.append((number, first + place, first + other))
    if not who:
        return {}
    acts = _first_acts(exchanges, instances, width)
    if not len(acts[0]):
        return {}
    collective, row, other_row = np.array(who, np.int64).T
    mine, other = entries.endpoint[row], entries.endpoint[other_row]
    key = (collective * width + other) * width + mine
    at = np.minimum(np.searchsorted(acts[0], key), len(acts[0]) - 1)
    known = (acts[0][at] == key) & entries.exact[row] & (entries.rule[row] != Rule.LONG_AFTER)
    lead = acts[1][at] - entries.enter_ns[row]
    # How long after its entry the other acted towards this one: seen where it was captured itself.
    lag = acts[2][at] - entries.enter_ns[other_row]
    captured = np.isin(other, list(own))
    known &= ~captured | (entries.exact[other_row] & (acts[2][at] != NEVER))
    lead = np.where(captured, lead - lag, lead)
    found: dict[tuple[int, int], View] = {}
    rows = np.flatnonzero(known)
    rows = rows[np.lexsort((other[rows], mine[rows]))]
    pairs = np.stack([mine[rows], other[rows]])
    bounds = np.flatnonzero(np.r_[True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)][: len(rows)])
    for part in np.split(rows, bounds[1:]) if len(rows) else []:
        found[int(mine[part[0]]), int(other[part[0]])] = View(collective[part], lead[part])
    return found


def _dating(instance: Instance, own: set[int]) -> list[tuple[int, int]]:
    """Places in ``order`` of a captured endpoint and of another whose first act goes to it."""
    seats = instance.seats
    mine = [place for place, end in enumerate(instance.order) if end in own]
    if instance.view.at_once:
        return [(place, other) for place in mine for other in range(len(instance.order)) if other != place]
    if instance.algorithm is None:
        return []
    sends, grants = first_acts(instance.algorithm, instance.rank_count, instance.root or 0)
    return [
        (place, other)
        for place in mine
        for other, seat in enumerate(seats)
        if sends.get(seat) == seats[place] or (seat in grants and seats[place] in grants[seat])
    ]


def _first_acts(exchanges: Rows, instances: Sequence[Instance], width: int) -> tuple[Ints, Ints, Ints]:
    """The first act of one endpoint towards another in each collective, as it reached the other's own node.

    Returns sorted keys (collective, actor, other), times of arrival and of sending.
    """
    if not instances:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = np.concatenate([i.rows for i in instances])
    of = np.repeat(np.arange(len(instances)), [len(i.rows) for i in instances])
    picked = Picked(exchanges, rows)
    src, dst = picked["src"].astype(np.int64), picked["dst"].astype(np.int64)
    offered = picked["offer_arrived_ns"] != NEVER
    got = np.where(offered, picked["offer_arrived_ns"], picked["arrived_ns"])
    sent = np.where(offered, picked["offer_ns"], picked["data_ns"])
    unasked = (picked["wire"] >= Wire.GLOO_DATA) & (picked["wire"] <= Wire.GLOO_RECV_READY)
    granted = np.where(unasked, picked["grant_arrived_ns"], NEVER)
    key = np.concatenate([(of * width + src) * width + dst, (of * width + dst) * width + src])
    time, left = np.concatenate([got, granted]), np.concatenate([sent, picked["grant_ns"]])
    order = np.lexsort((time, key))
    order = order[time[order] != NEVER]
    first = np.r_[True, key[order][1:] != key[order][:-1]][: len(order)]
    return key[order][first], time[order][first], left[order][first]


def _measured(
    start: int, end: int, collective: Ints, value: NDArray[np.floating], delay: float | None
) -> Measured:
    """``delay``: how much of the delay may be uneven, ns."""
    error = None if delay is None else round(delay + _error_of_median(value))
    edge = Edge(start, end, len(value), round(float(median_of(value))), error)
    return Measured(edge, collective, value)


def _error_of_median(value: NDArray[np.floating]) -> float:
    """Half of the 95 % interval of a median (of a normal sample: sigma times the root of pi / 2n)."""
    spread = float(median_of(np.abs(value - median_of(value)))) / QUARTER_IN_SIGMAS
    return INTERVAL_IN_SIGMAS * spread * float(np.sqrt(np.pi / 2 / len(value)))


def _half_round_trip(joined: Joined, a: int, b: int) -> float | None:
    """Half of the least time from data to its ACK between two endpoints, ns."""
    flows = joined.flows
    between = ((flows["src"] == a) & (flows["dst"] == b)) | ((flows["src"] == b) & (flows["dst"] == a))
    times = flows["rtt_min_ns"][between]
    times = times[times != NEVER]
    # The capture at the sender sees the whole way there and back, that at the receiver none of it.
    return float(times.max()) / 2 if len(times) else None


def _close_loops(found: list[Measured]) -> None:
    """Least squares over the graph of edges; what stays open becomes part of each edge's error.

    Edges are compared on the collectives that they share; those with few of these are left alone.
    """
    most = max((len(m.collective) for m in found), default=0)
    used = [m for m in found if 2 * len(m.collective) >= most]
    ends = sorted({end for m in used for end in (m.edge.from_, m.edge.to)})
    if not used or len(used) < len(ends):
        return  # no loop
    common = used[0].collective
    for m in used[1:]:
        common = _common(common, m.collective)[0]
    if not len(common):
        return
    number = {end: n for n, end in enumerate(ends)}
    start, end = np.array([[number[m.edge.from_], number[m.edge.to]] for m in used]).T
    right = np.stack([m.value_ns[_common(common, m.collective)[2]] for m in used])
    # The normal equations, since there are far more edges than ends.
    normal, summed = np.zeros((len(ends), len(ends))), np.zeros((len(ends), len(common)))
    np.add.at(normal, (start, start), 1.0)
    np.add.at(normal, (end, end), 1.0)
    np.add.at(normal, (start, end), -1.0)
    np.add.at(normal, (end, start), -1.0)
    np.add.at(summed, end, right)
    np.subtract.at(summed, start, right)
    solved = np.linalg.lstsq(normal, summed, rcond=None)[0]
    open_by = np.abs(np.median(solved[end] - solved[start] - right, axis=1))
    for n, m in enumerate(used):
        if m.edge.error_ns is not None:
            m.edge.error_ns = max(m.edge.error_ns, round(float(open_by[n])))
