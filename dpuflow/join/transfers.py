"""All captures of a job as one: common endpoints, one clock, and one TRANSFER a message.

In: the CaptureTables of all vantage points. Out: Joined.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct, is_in, median_of, order_within
from dpuflow.join.clockmap import ClockMap, Samples
from dpuflow.join.clocks import tie_clocks
from dpuflow.join.common import (
    FEWEST,
    Answers,
    Common,
    densest,
    find_common,
    join_addresses,
    nearer_end,
    number_connections,
    total_flows,
    widen_local,
)
from dpuflow.join.envelope import MAX_DRIFT
from dpuflow.join.limits import limits_of
from dpuflow.join.missed import date_missed
from dpuflow.join.sightings import (
    MOST_SLACK,
    Sightings,
    Ties,
    collect,
    complete_keys,
    find_copies,
    find_ties,
    not_after,
    recurs_ns,
    runs,
    superseded_bursts,
)
from dpuflow.join.steps import settle_steps
from dpuflow.join.unwound import unwound
from dpuflow.schema.rows import NEVER, TRANSFER, Role, Seen, Wire
from dpuflow.schema.tables import Joined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dpuflow.join.clockgraph import Clocks
    from dpuflow.schema.tables import CaptureTables, Rows

    Bools = np.typing.NDArray[np.bool_]
    Ints = np.typing.NDArray[np.int64]

RELIABLE: Final = (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM, Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM)
"""Messages of RoCE's reliable connections that its receivers acknowledge."""
CLOSER: Final = 1 / 16
"""So much closer than late stamps lie on average what is no chance lies: most of these are late by little."""
MOMENTS: Final = 3
"""Waits that show no time on the wire at so many moments or more are not due to a clock that was set."""


def join(captures: list[CaptureTables], *, clock: str = "auto") -> Joined:
    """Join the captures of several vantage points; ``clock`` is "auto", "trust" or "estimate".

    Raises OptionError for another ``clock``. Captures whose clocks nothing ties are islands with transfers of
    their own (``Joined.islands``). What is left out of all keeps its flows, not its messages.
    """
    copies = find_copies(captures)
    captures = _emptied(captures, copies)
    infos = [t.info for t in captures]
    steady = [unwound(t) for t in captures]
    captures = [t for t, _ in steady]
    common = find_common(captures)
    alone = len(captures) == 1  # nothing to match: its messages need not be laid out for it
    seen = collect(_emptied(captures, (0,)) if alone else captures, common)
    order = np.argsort(seen.key, kind="stable") if len(captures) > 1 else np.zeros(0, np.int64)
    ties = find_ties(seen, order)
    _decide_local(captures, common, seen, ties)
    widen_local(captures, common)
    meeting = [divmod(int(pair), len(captures)) for pair in distinct(ties.pair)]
    empty = [c for c, t in enumerate(captures) if not len(t.messages)]
    samples = _samples(common, seen, ties)
    found = tie_clocks([t.info for t in captures], samples, clock, copies, meeting, empty)
    settle_steps(found, samples, partial(_stamps, seen))
    _to_reference(seen, found)
    join_addresses(captures, common)
    transfers = _all_transfers(captures, common, seen, order, found)
    total_flows(captures, common, _flow_times(captures, found))
    limits = [text for _, text in steady if text] + found.limits + limits_of(captures, common)
    views = [
        Joined(
            infos,
            found.clocks,
            common.endpoints,
            common.addresses,
            common.local,
            common.flows,
            rows,
            *_extent(captures, found, island),
            limits,
            Picked.transfers(rows),
        )
        for island, rows in zip(found.islands, transfers, strict=True)
    ]
    return views[0] if len(views) == 1 else _several(views, found.islands)


def _emptied(captures: Sequence[CaptureTables], which: Collection[int]) -> list[CaptureTables]:
    """The captures, these of them without messages."""
    return [replace(t, messages=t.messages[:0]) if c in which else t for c, t in enumerate(captures)]


def _several(views: Sequence[Joined], islands: Sequence[Sequence[int]]) -> Joined:
    """The first island's view, with those of all."""
    narrow = [_island(view, members) for view, members in zip(views, islands, strict=True)]
    return replace(narrow[0], local=views[0].local, islands=narrow)


def _all_transfers(
    captures: Sequence[CaptureTables], common: Common, seen: Sightings, order: Ints, found: Clocks
) -> list[Rows]:
    """The transfers of each island in order of time, with what was not seen of them where that is known."""
    if len(captures) == 1:
        transfers = [_own_transfers(captures[0], common)]
    else:
        slack = np.zeros(len(common.flows), np.int64)
        if any(len(island) > 1 for island in found.islands):
            slack = np.maximum(recurs_ns(common, seen) // 2, min(2 * found.slack_ns, MOST_SLACK))
        each_flow = _OfFlows(common.near().astype(np.uint8), slack, number_connections(common.flows))
        transfers = [
            _transfers(captures, common, seen, order, each_flow, sorted(island)) for island in found.islands
        ]
    asked = _asked_again(captures, common)
    return [date_missed(captures, _in_causal_order(rows, found.slack_ns, asked)) for rows in transfers]


def _flow_times(captures: Sequence[CaptureTables], found: Clocks) -> list[tuple[bool, Ints, Ints]]:
    """Of each capture whether its clock is tied, and first and last time of its flows."""
    times = []
    for tables, place in zip(captures, found.maps, strict=True):
        used = place or ClockMap(0)
        first, last = (used.to_reference(tables.flows[name]) for name in ("first_ns", "last_ns"))
        times.append((place is not None, first, last))
    return times


def _island(view: Joined, members: Sequence[int]) -> Joined:
    """What is seen by the captures of an island alone."""
    local = [rows if capture in members else [] for capture, rows in enumerate(view.local)]
    return replace(view, local=local, used=frozenset(members))


def _nearer(seen: Sightings, ties: Ties, at: Ints) -> float:
    """How much longer the first capture of the ties ``at`` waits for ACKs than the second, ns: the usual.

    Positive: it is nearer to the sender. Each difference is taken on one clock, so offsets do not matter.
    """
    a, b = ties.a[at], ties.b[at]
    both = (seen.acked_ns[a] != NEVER) & (seen.acked_ns[b] != NEVER)
    a, b = a[both], b[both]
    if not len(a):
        return 0.0
    wait_ns = _wire_ns(seen, a, b)
    if min((seen.acked_ns - seen.last_ns)[each].min() for each in (a, b)) < 0:  # stamps are late
        return float(sum(densest(wait_ns))) / 2
    return float(median_of(wait_ns))


def _ahead(common: Common, seen: Sightings, ties: Ties, pair: int, ends: list[list[int]]) -> float:
    """Time to go from the first capture of a pair to the second and back, ns; negative if the second
    one is nearer to the first end; 0 if not known."""
    at = np.flatnonzero(ties.pair == pair)
    flow = seen.flow[ties.a[at]]
    from_first, from_second = (np.isin(common.flows["src"], end) for end in ends)
    to_first, to_second = (np.isin(common.flows["dst"], end) for end in ends)
    there = _nearer(seen, ties, at[(from_first & to_second)[flow]])
    back = -_nearer(seen, ties, at[(from_second & to_first)[flow]])
    return (there + back) / 2 if there and back else there + back


def _decide_local(captures: Sequence[CaptureTables], common: Common, seen: Sightings, ties: Ties) -> None:
    """Settle what the endpoints of one capture leave open, by ACK times and by packets seen twice."""
    count = len(captures)
    pairs = [divmod(int(pair), count) for pair in distinct(ties.pair)]

    def ahead_ns(x: int, y: int, ends: list[list[int]]) -> float:
        return _ahead(common, seen, ties, x * count + y, ends)

    answers = {
        c: Answers(captures[c], common.endpoint_rows[c]).times(sets) for c, sets in common.undecided.items()
    }
    for capture, sets in list(common.undecided.items()):
        if len(sets) == 2:
            # By other capture the time there and back, positive if this one is nearer to the first end.
            way = {y: ahead_ns(x, y, sets) for x, y in pairs if x == capture}
            way |= {x: -ahead_ns(x, y, sets) for x, y in pairs if y == capture}
            _settle(common, capture, way, answers)
    _move_apart(common, pairs, ahead_ns)


def _move_apart(
    common: Common,
    pairs: Sequence[tuple[int, int]],
    ahead_ns: Callable[[int, int, list[list[int]]], float],
) -> None:
    """Of two captures at one end the farther one sees it through a switch."""
    for x, y in pairs:
        both = sorted(set(common.local[x]) & set(common.local[y]))
        if both:
            rest = [e for e in range(len(common.endpoints)) if e not in both]
            ahead = ahead_ns(x, y, [both, rest])
            farther = y if ahead > 0 else x
            if ahead:
                common.local[farther] = [e for e in common.local[farther] if e not in both]


def _settle(
    common: Common, capture: int, way: dict[int, float], answers: dict[int, list[int] | None]
) -> None:
    """Note at which of two ends a capture sits, if that is known by now.

    ``way``: time to each other capture and back, positive if this one is nearer to the first end.
    """
    sides = {0 if ahead > 0 else 1 for ahead in way.values() if ahead}
    side = _side(capture, list(way), sides, answers) if len(sides) < 2 else None
    if side is not None:
        common.local[capture] = common.undecided[capture][side]
    if side is not None or len(sides) == 2:  # between others: a switch
        common.undecided.pop(capture)


def _side(
    capture: int, others: list[int], sides: set[int], answers: dict[int, list[int] | None]
) -> int | None:
    """At which of two ends a capture sits: 0, 1, or None where it may as well be a switch.

    ``sides`` is the end it is nearer to than other captures. Its own ACK times must not say otherwise, nor
    that its end is far off: then it answers later than the other end answers the capture there, by more
    than half the way between the two captures.
    """
    times = answers[capture]
    alone = nearer_end(times)
    if not sides:
        return alone
    (side,) = sides
    if alone is not None:
        return side if alone == side else None
    for other in others:
        theirs = answers.get(other)
        if times and theirs and nearer_end(theirs) == 1 - side:
            between = (theirs[side] - times[side] + times[1 - side] - theirs[1 - side]) / 2
            if times[side] - theirs[1 - side] > between / 2:
                return None
    return side


def _samples(common: Common, seen: Sightings, ties: Ties) -> list[Samples]:
    """For each pair of captures the packets both saw, with the way they went."""
    captures = len(seen.starts) - 1
    near = common.near().astype(np.int64)
    order = np.argsort(ties.pair, kind="stable")
    samples = []
    for pair, rows in runs(ties.pair[order]):
        x, y = divmod(pair, captures)
        at = order[rows]
        flow = seen.flow[ties.a[at]]
        way = np.sign(near[x] - near[y])  # by flow: 1 from x to y, -1 back, 0 not known
        for unknown in distinct(flow[way[flow] == 0]):
            way[unknown] = np.sign(_nearer(seen, ties, at[flow == unknown]))
        at, flow = at[way[flow] != 0], flow[way[flow] != 0]
        a, b, forward = ties.a[at], ties.b[at], way[flow] > 0
        acked = (seen.acked_ns[a] != NEVER) & (seen.acked_ns[b] != NEVER)
        prompt = _prompt(seen, a[acked], b[acked], forward[acked])
        acked = np.flatnonzero(acked)[prompt]
        if not prompt.all():
            a, b, forward, acked = a[acked], b[acked], forward[acked], np.arange(len(acked))
        ended = seen.whole[a] & seen.whole[b]
        x_ns, y_ns = (
            np.concatenate([seen.first_ns[each], seen.last_ns[each[ended]], seen.acked_ns[each[acked]]])
            for each in (a, b)
        )
        if len(x_ns):
            ways = np.concatenate([forward, forward[ended], ~forward[acked]])
            samples.append(Samples(x, y, x_ns, y_ns, ways))
    return samples


def _prompt(
    seen: Sightings, a: Ints, b: Ints, forward: np.typing.NDArray[np.bool_]
) -> np.typing.NDArray[np.bool_]:
    """Which messages show no late stamp that makes their way, or their ACK's, seem shorter than it was.

    There and back they then take less time on the wire: by how much longer the sender waits for the ACK than
    the receiver. Where for some no time at all is left, by more than two clocks drift apart in so long a
    wait, stamps are late, or a clock was set during these waits; but that is at one moment, late stamps are
    at many. Where they are late those count that take about as long as the first that lie closer together
    than these. Where no time is left for any, none is surer than others: all count, and the clocks that they
    contradict are told to be so.
    """
    wire_ns = np.where(forward, _wire_ns(seen, a, b), -_wire_ns(seen, a, b))
    waits = [np.sort([seen.last_ns[each], seen.acked_ns[each]], axis=0) for each in (a, b)]
    early = wire_ns < -MAX_DRIFT * (waits[0][1] - waits[0][0])
    late = all(at_many_moments(first[early], last[early]) for first, last in waits)
    if not late or not (wire_ns >= 0).any():
        return np.ones(len(wire_ns), bool)
    ordered = np.sort(wire_ns[wire_ns >= 0])
    apart_ns = float(np.quantile(-wire_ns[early], 0.9)) / int(early.sum())
    close = ordered[FEWEST:] - ordered[:-FEWEST] < CLOSER * FEWEST * apart_ns
    at = int(np.argmax(close)) if close.any() else 0
    most = ordered[min(at + max(len(ordered) // 20, FEWEST), len(ordered) - 1)]
    return np.asarray((wire_ns >= ordered[at]) & (wire_ns <= most), np.bool_)


def at_many_moments(first_ns: Ints, last_ns: Ints) -> bool:
    """Whether it takes ``MOMENTS`` moments or more for each of these times to hold one."""
    for _ in range(MOMENTS - 1):
        if not len(last_ns):
            return False
        beyond = first_ns > last_ns.min()
        first_ns, last_ns = first_ns[beyond], last_ns[beyond]
    return len(last_ns) > 0


def _wire_ns(seen: Sightings, a: Ints, b: Ints) -> Ints:
    """How much longer messages waited for their ACKs where sighting ``a`` is than at ``b``, ns.

    Since their last packet, or, where that may be missing, their first one.
    """
    whole = seen.whole[a] & seen.whole[b]
    mine, other = (seen.acked_ns[at] - np.where(whole, seen.last_ns[at], seen.first_ns[at]) for at in (a, b))
    return np.asarray(mine - other, np.int64)


def _stamps(seen: Sightings, capture: int) -> Ints:
    """All stamps of a capture's messages, sorted."""
    rows = seen.of(capture)
    times = np.concatenate([seen.first_ns[rows], seen.last_ns[rows], seen.acked_ns[rows]])
    return distinct(times[times != NEVER])


def _to_reference(seen: Sightings, found: Clocks) -> None:
    for capture, place in enumerate(found.maps):
        if place is not None and (place.offset_ns or place.drift or place.later):
            rows = seen.of(capture)
            for times in (seen.first_ns, seen.last_ns, seen.acked_ns):
                times[rows] = place.to_reference(times[rows])


def _own_transfers(tables: CaptureTables, common: Common) -> Rows:
    """The transfers of the only capture, whose clock is the reference."""
    from dpuflow.kernels import match

    first = np.ascontiguousarray(tables.messages["first_ns"])
    transfers = TRANSFER.zeros(len(first))
    flows = common.flows
    match.single(
        tables.messages, np.argsort(first, kind="stable"), first, common.flow_rows[0].astype(np.int64),
        common.near()[0].astype(np.uint8), number_connections(flows).astype(np.uint32),
        np.ascontiguousarray(flows["src"]), np.ascontiguousarray(flows["dst"]), transfers,
    )  # fmt: skip
    return transfers


class _OfFlows(NamedTuple):
    """Of each common flow: how near to its sender each capture is (captures x flows), how far apart two
    sightings of one message may be, ns, and its connection."""

    near: np.typing.NDArray[np.uint8]
    slack: Ints
    connection: np.typing.NDArray[np.uint32]


def _transfers(
    captures: Sequence[CaptureTables],
    common: Common,
    seen: Sightings,
    order: Ints,
    each_flow: _OfFlows,
    island: Sequence[int],
) -> Rows:
    """The transfers that the captures of an island saw; ``order`` sorts the keys of all captures, stable."""
    from dpuflow.kernels import match

    if len(island) < len(captures):
        seen = seen.within(island)
        order = np.argsort(seen.key, kind="stable") if len(island) > 1 else order[:0]
    near = each_flow.near[seen.capture, seen.flow]
    roles = np.concatenate([captures[c].messages["role"] for c in island])
    kept = ~superseded_bursts(roles, common, seen, near)
    owner = np.full(len(seen.flow), -1, np.int64)
    gives = np.zeros(len(seen.flow), np.uint8)
    if len(island) == 1:  # nothing to match
        rows = np.flatnonzero(kept)
        owner[rows] = np.arange(len(rows))
        gives[rows] = match.SENDER | match.RECEIVER | match.HEADER
        sent, shared = seen.first_ns[rows], seen.flags[rows] & np.uint8(match.SHARED)
        made = len(rows)
    else:
        key = complete_keys(common, seen, kept)
        if key is not seen.key:
            order = np.argsort(key, kind="stable")
        order = order[kept[order]]
        sent, shared = np.zeros(len(order), np.int64), np.zeros(len(order), np.uint8)
        flags = seen.flags | ((roles == Role.BURST) * np.uint8(match.UNFRAMED))
        made = match.group(
            order, key, seen.capture, seen.first_ns, seen.acked_ns, seen.span, near, flags,
            seen.flow, each_flow.slack, owner, gives, sent, shared,
        )  # fmt: skip
    in_time = np.argsort(sent[:made], kind="stable")
    place = np.empty(made + 1, np.int64)
    place[in_time] = np.arange(made)
    place[made] = -1  # what owner -1 picks
    row = place[owner]
    transfers = TRANSFER.zeros(made)
    transfers["flags"] = shared[:made][in_time]
    flow = np.zeros(made, np.int64)
    flow[row[row >= 0]] = seen.flow[row >= 0]
    transfers["connection"] = each_flow.connection[flow]
    transfers["src"], transfers["dst"] = common.flows["src"][flow], common.flows["dst"][flow]
    for number, capture in enumerate(island):
        part = seen.of(number)
        match.fold(
            captures[capture].messages, capture, seen.first_ns[part], seen.last_ns[part], seen.acked_ns[part],
            row[part], gives[part], near[part], transfers,
        )  # fmt: skip
    return transfers


def _in_causal_order(transfers: Rows, slack_ns: int, asked: Bools) -> Rows:
    """The rows with no stamp later than one of what came of it, in order of ``sent_ns``.

    ``slack_ns``: what clocks of two captures may differ by; ``asked`` as of ``_asked_again``.
    """
    sent, arrived, end = (transfers[name] for name in ("sent_ns", "arrived_ns", "arrived_end_ns"))
    transfers["taken_ns"] = not_after(transfers["taken_ns"], transfers["acked_ns"], slack_ns)
    _date_lossy(transfers, asked)
    transfers["arrived_end_ns"] = not_after(end, transfers["taken_ns"])
    transfers["arrived_ns"] = not_after(arrived, end)
    transfers["sent_end_ns"] = not_after(transfers["sent_end_ns"], transfers["acked_ns"])
    apart = transfers["capture"] != transfers["arrival_capture"]
    slack = np.where(apart, slack_ns, 0)
    transfers["sent_end_ns"] = np.minimum(transfers["sent_end_ns"], end + slack)
    transfers["sent_ns"] = np.minimum(np.minimum(sent, arrived + slack), transfers["sent_end_ns"])
    # What its sender sent before on the same connection left no later.
    line = 2 * transfers["connection"].astype(np.int64) + (transfers["src"] > transfers["dst"])
    order = np.flatnonzero((transfers["seen"] & Seen.AT_SENDER) != 0)
    order = order[order_within(order, line[order])]
    line = line[order]
    swapped = (line[1:] == line[:-1]) & (sent[order[1:]] < sent[order[:-1]])
    for each in distinct(line[1:][swapped]):
        mine = order[np.searchsorted(line, each) : np.searchsorted(line, each, "right")]
        place = np.arange(len(mine))
        sent[mine] = np.minimum.accumulate((sent[mine] - place)[::-1])[::-1] + place
    order = np.argsort(sent, kind="stable")
    return transfers if np.array_equal(order, np.arange(len(order))) else transfers[order]


def _asked_again(captures: Sequence[CaptureTables], common: Common) -> Bools:
    """By line (``2 * connection + (src > dst)``) whether its receiver sent a NAK: it missed packets."""
    flows, connection = common.flows, number_connections(common.flows).astype(np.int64)
    answered = 2 * connection + (flows["dst"] > flows["src"])  # a NAK goes the other way
    asked = np.zeros(2 * int(connection.max(initial=0)) + 2, bool)
    for tables, rows in zip(captures, common.flow_rows, strict=True):
        asked[answered[rows[tables.flows["nak"] > 0]]] = True
    return asked


def _date_lossy(transfers: Rows, asked: Bools) -> None:
    """Let messages of lossy lines (``asked``) that were retransmitted end when they were acknowledged.

    A reliable connection takes nothing behind a loss, and acknowledges a message's last packet at once
    (InfiniBand volume 1, 9.7.5): what was lost behind the tap was seen there all the same. Where no NAK was
    seen the sender may have been impatient alone. Where the receiver was not captured the ACK itself may have
    been lost; so its data was there at the latest.
    """
    rows = np.flatnonzero(transfers["retransmitted"])
    rows = rows[is_in(transfers["wire"][rows], RELIABLE)]
    of = {
        name: transfers[name][rows] for name in ("connection", "src", "dst", "seen", "taken_ns", "acked_ns")
    }
    there = np.where((of["seen"] & Seen.AT_RECEIVER) != 0, of["taken_ns"], of["acked_ns"])
    line = 2 * of["connection"].astype(np.int64) + (of["src"] > of["dst"])
    again = asked[line] & (there != NEVER)
    rows = rows[again]
    transfers["arrived_end_ns"][rows] = np.maximum(transfers["arrived_end_ns"][rows], there[again])


def _extent(captures: Sequence[CaptureTables], found: Clocks, island: Sequence[int]) -> tuple[int, int]:
    """First and last packet of an island's captures on its reference clock; 0, 0 without packets."""
    times = [
        place.to_reference(np.array([captures[c].info.first_ns, captures[c].info.last_ns], np.int64))
        for c in island
        if (place := found.maps[c]) is not None and captures[c].info.first_ns is not None
    ]
    return (min(int(t[0]) for t in times), max(int(t[1]) for t in times)) if times else (0, 0)
