"""Collectives of RoCE traffic that no header names: told from who sends how much to whom, and when.

NCCL spreads a collective over channels, each with connections of its own that carry data one way.
A channel is cut like any unnumbered stream (``sequenced``), with the operation unknown as well; then
the channels' collectives of the same turn are put together.

NCCL's sends and receives go over connections of their own, whose clear-to-send entries announce the chunk
of point-to-point buffers: each transfer is a send_recv, or, where every rank of some sends to every other
in one call, a part of an all_to_all. ``parts`` cuts each connection's messages and joins what goes side by
side, ``calls`` tells calls of all with all. Lines along a ring are a collective's, and left to what reads
these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import connected, in_a_row, least_connected
from dpuflow.arrays.ordering import classes, distinct, median_of, numbered, order_within, spans
from dpuflow.arrays.stretches import Covered
from dpuflow.matching.calls import all_to_all, at_all, calls_over_rails, cliques, even, is_call, rounds, stars
from dpuflow.matching.credited import connections_of, credited_instances
from dpuflow.matching.model import MOST, RARE, TWICE, Instance, InstanceView
from dpuflow.matching.parts import UNITS, Parts, by_message, common_cuts, lines_of, transfers_of
from dpuflow.matching.sequenced import cut_streams
from dpuflow.matching.streams import Streams
from dpuflow.schedules.graph import dependencies
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Job
    from dpuflow.matching.parts import Transfers
    from dpuflow.matching.streams import Columns, Edge
    from dpuflow.schema.tables import Rows


def structured_instances(job: Job, rows: Ints) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE. Messages that fit no algorithm are left out."""
    exchanges, columns = job.exchanges, job.columns
    found: list[Instance] = []
    if job.announced is not None:
        found, rows = p2p_instances(job, rows, job.announced)
    if not len(rows):
        return found
    dealt, at, end = connections_of(exchanges, rows)
    if job.announced is not None:
        credited, told = credited_instances(job, (dealt, at, end), job.announced)
        found, at, end = found + credited, at[~told], end[~told]
    channels: list[list[Instance]] = []
    for streams in _channels(exchanges, dealt, at, end):
        if len(streams.edges) < 2:
            continue  # one way between two endpoints is no collective
        jobs = [_read(job, part) for part in _one_after_the_other(columns, streams)]
        channels += jobs if len(jobs) > 1 and min(map(len, jobs)) > 1 else [_read(job, streams)]
    return found + _merged([each for each in channels if each], exchanges, columns)


def _read(job: Job, streams: Streams) -> list[Instance]:
    """The collectives of a channel; none where they leave too much of it over, but for what a job ends in."""
    # NCCL's clear-to-send entries count from 1.
    whole = bool((job.exchanges["sub"][streams.rows[streams.at]] == 1).all())
    messages = streams.count
    cut = cut_streams(job, streams, Op.UNKNOWN, settled=whole)
    named = [i for i in cut if i.algorithm is not None and _is_evident(i)]
    told = sum(len(i.rows) for i in named)
    # One rank's last operation may be larger than the others': all that they sent of both is left.
    ended = len(cut[-1].rows) if cut and cut[-1].algorithm is None else 0
    return named if told >= max(MOST * (messages - ended), TWICE * ended) else []


def _one_after_the_other(columns: Columns, streams: Streams) -> list[Streams]:
    """A channel's connections by job: the next job's were first used after the last use of those before.

    So may be the steps of a single operation: what comes of it must be several on each side.
    """
    count = streams.end - streams.at
    rows, first = streams.rows[spans(streams.at, count)], np.cumsum(count) - count
    begins = np.minimum.reduceat(columns.starts[rows], first)
    ends = np.maximum.reduceat(columns.arrivals[rows], first)
    order = np.argsort(begins, kind="stable")
    until = np.maximum.accumulate(ends[order])
    parts = np.split(order, np.flatnonzero(begins[order][1:] > until[:-1]) + 1)
    if len(parts) < 2 or min(len(part) for part in parts) < 2:
        return []
    return [
        Streams([streams.edges[k] for k in part], streams.rows, streams.at[part], streams.end[part])
        for part in (np.sort(part) for part in parts)
    ]


def _is_evident(instance: Instance) -> bool:
    """Two ranks that each send once may as well be asking and answering."""
    assert instance.algorithm is not None
    return len(instance.order) > 2 or bool(dependencies(instance.algorithm, 2))


def may_be_sends(columns: Columns, exchanges: Rows, instances: Sequence[Instance]) -> bool:
    """Whether ``instances`` of two ranks may be sends, which one makes and the other answers: neither needs
    the other's messages there, and yet one nearly never sends before it has got something, if at all."""
    if not instances or any(i.algorithm is None or _is_evident(i) for i in instances):
        return False
    answers = [answered(columns, exchanges, instance) for instance in instances]
    often = Counter(end for each in answers for end in each)
    return max(often.values(), default=0) >= MOST * len(instances) or all(answers)


def answered(columns: Columns, exchanges: Rows, instance: Instance) -> dict[int, int]:
    """Ranks that sent nothing before they had got something: for how long after that, 0 if nothing at all."""
    src, dst = (exchanges[end][instance.rows] for end in ("src", "dst"))
    found = {}
    for end in instance.order:
        mine, came = columns.starts[instance.rows[src == end]], columns.arrivals[instance.rows[dst == end]]
        if not len(mine):
            found[end] = 0
        elif len(came) and mine.min() > came.min():
            found[end] = int(mine.min() - came.min())
    return found


def without_answers(columns: Columns, exchanges: Rows, instances: Sequence[Instance]) -> list[Instance]:
    """``instances`` of two ranks, where one of them may answer the other, of which nothing is dated then.

    Where neither needs the other's messages both would send when they come. Who nearly always sends as soon
    as it has got something, long before it would go on, may hand on a sum: a tree of two looks like that. Who
    comes as long after that as ever, however long after its own last act, works on what it got.
    """
    if len(instances) < TWICE or any(i.algorithm is None or _is_evident(i) for i in instances):
        return list(instances)
    order = sorted(instances, key=lambda i: int(columns.starts[i.rows].min()))
    begin, end = (
        np.array([int(of(times[i.rows])) for i in order])
        for of, times in ((np.min, columns.starts), (np.max, columns.arrivals))
    )
    answers = [answered(columns, exchanges, instance) for instance in order]
    for rank in order[0].order:
        gaps = np.array([each.get(rank, 0) for each in answers])
        if np.count_nonzero(gaps) < MOST * len(order):
            continue
        told = gaps[1:] > 0
        ways = [exchanges["src"][i.rows] == rank for i in order]
        sent = np.array(
            [int(columns.starts[i.rows[out]].min(initial=FAR)) for i, out in zip(order, ways, strict=True)]
        )
        came = np.array(
            [
                int(columns.arrivals[i.rows[~out]].max(initial=NEVER))
                for i, out in zip(order, ways, strict=True)
            ]
        )
        at_once = median_of(gaps[gaps > 0]) <= RARE * median_of(begin[1:] - end[:-1])
        if at_once or TWICE * _scatter((sent - came)[1:][told]) < _scatter((sent[1:] - end[:-1])[told]):
            return [
                replace(i, alike=(*i.alike, Op.ALL_REDUCE),
                        view=replace(i.view, blind=i.view.blind | {i.order.index(rank)}))
                for i in instances
            ]  # fmt: skip
    return list(instances)


def _scatter(values: Ints) -> float:
    """Median distance from the median, ns; 0 of no values."""
    return float(median_of(np.abs(values - median_of(values)))) if len(values) else 0.0


def _channels(exchanges: Rows, dealt: Ints, at: Ints, end: Ints) -> list[Streams]:
    """Connections ``dealt[at:end]`` by channel: the k-th of each pair of endpoints that are connected.

    Connections of different pairs that make one channel are told by their order of first use.
    """
    if not len(at):
        return []
    first = dealt[at]
    src, dst = (exchanges[end][first].astype(np.int64) for end in ("src", "dst"))
    pair = numbered(src, dst)
    by_pair = order_within(np.arange(len(pair)), pair)
    begins = np.r_[True, np.diff(pair[by_pair]) != 0]
    level = np.empty(len(pair), np.int64)  # how many connections of its pair come before each
    level[by_pair] = np.arange(len(pair)) - np.maximum.accumulate(np.where(begins, np.arange(len(pair)), 0))
    nodes, of = np.unique(np.r_[level << 32 | src, level << 32 | dst], return_inverse=True)
    channel = least_connected(of[: len(pair)], of[len(pair) :], len(nodes))[of[: len(pair)]]
    found = []
    for members in sorted(classes(channel), key=lambda members: int(members[0])):
        which = members[np.argsort(pair[members], kind="stable")]
        edges = list(zip(src[which].tolist(), dst[which].tolist(), strict=True))
        found.append(Streams(edges, dealt, at[which], end[which]))
    return found


def _merged(channels: Sequence[list[Instance]], exchanges: Rows, columns: Columns) -> list[Instance]:
    """Collectives of several channels that are one: the same ranks, operation and time of their data.

    Clear-to-send entries do not count: a channel that an operation leaves out has those of the next one
    out while it still runs.
    """
    waiting = [(lane, i) for lane, channel in enumerate(channels) for i in channel]
    begins = [int(columns.starts[i.rows].min()) for _, i in waiting]
    merged: list[dict[int, Instance]] = []  # by channel
    last: dict[tuple[object, ...], tuple[dict[int, Instance], int]] = {}  # with when it ends
    for number in np.argsort(begins, kind="stable").tolist():
        lane, instance = waiting[number]
        key = (frozenset(instance.order), instance.op)
        end = int(np.maximum(columns.arrivals[instance.rows], exchanges["data_end_ns"][instance.rows]).max())
        parts, until = last.get(key, ({}, NEVER))
        if begins[number] < until and lane not in parts:
            parts[lane], end = instance, max(until, end)
        else:
            parts = {lane: instance}
            merged.append(parts)
        last[key] = parts, end
    return [_together(list(parts.values())) for parts in merged]


def _together(parts: Sequence[Instance]) -> Instance:
    """One collective of those of several channels, the first one first."""
    first, sizes = parts[0], [i.size for i in parts if i.size is not None]
    if len(parts) == 1:
        return first
    return replace(
        first,
        rows=np.sort(np.concatenate([i.rows for i in parts])),
        size=sum(sizes) if len(sizes) == len(parts) else None,
        complete=all(i.complete for i in parts),
        confidence=min(i.confidence for i in parts),
    )


def p2p_instances(job: Job, rows: Ints, announced: Ints) -> tuple[list[Instance], Ints]:
    """The transfers and all_to_alls among ``rows``, and the rows that are not of point-to-point connections;
    ``announced`` as in ``Job``."""
    asked = np.ones(len(job.exchanges), np.int64) if job.asked is None else np.maximum(job.asked, 1)
    by = _own_lines(job, rows, announced, asked)
    if not by:
        return [], rows
    every = _transfers(by)
    found, every = calls_over_rails(job, every, asked) if job.near is None else ([], every)
    calls, left = _told_apart(job, every, by)
    for members in calls:
        found += [all_to_all(job, members, turn) for turn in range(len(members[0].rows))]
    found += _sends(job, left, lambda edge: _may_hand_over(edge, len(by[edge]), job.nodes))
    return found, np.setdiff1d(rows, np.concatenate([lane.rows for lanes in by.values() for lane in lanes]))


def uneven_calls(job: Job, lines: Sequence[tuple[Edge, Ints]]) -> tuple[list[Instance], Ints]:
    """The all_to_alls among ways of connections that nothing announces (NCCL's sockets), and their rows.

    Sends of as many bytes each time look like a ring's messages, but where they go to everybody; of unlike
    bytes no other operation has parts on one connection.
    """
    by: dict[Edge, list[Parts]] = {}
    even: dict[Edge, list[Parts]] = {}
    for edge, part in _unannounced(job, lines):
        if part.sizes.all() and part.cut_by_rule():
            if len({size for _, size in part.signatures()}) > TWICE:
                by.setdefault(edge, []).append(part)
            elif not np.isin(part.sizes, UNITS).any():  # each message ends a part
                even.setdefault(edge, []).append(part)
    # One connection each way between any two, and nothing else, carries sends to everybody.
    ends = len({end for edge in even for end in edge})
    if not by and ends > 2 and len(even) == len(lines) == ends * (ends - 1):
        by = even
    found: list[Instance] = []
    for group in connected(by, lambda edge: edge):
        own = {edge: by[edge] for edge in group}
        calls, left = _told_apart(job, _transfers(own), own)
        if not left:
            found += [all_to_all(job, each, turn) for each in calls for turn in range(len(each[0].rows))]
    return found, np.concatenate([np.zeros(0, np.int64), *(instance.rows for instance in found)])


def single_sends(job: Job, lines: Sequence[tuple[Edge, Ints]]) -> list[Instance]:
    """What ways of connections that nothing announces (NCCL's sockets) carry, each transfer by itself."""
    by: dict[Edge, list[Parts]] = {}
    for edge, part in _unannounced(job, lines):
        by.setdefault(edge, []).append(part)
    return _sends(job, _transfers(by), lambda _: False)


def _unannounced(job: Job, lines: Sequence[tuple[Edge, Ints]]) -> Iterator[tuple[Edge, Parts]]:
    """The parts of each line whose messages no entry announces: each is a group of its own."""
    none = np.zeros(len(job.exchanges), np.int64)
    return _parts_of(job, lines, np.concatenate([rows for _, rows in lines]), (none + 1, none))


def _parts_of(
    job: Job, lines: Sequence[tuple[Edge, Ints]], rows: Ints, entries: tuple[Ints, Ints]
) -> Iterator[tuple[Edge, Parts]]:
    """The parts of each line; ``rows``: all that the endpoints sent, ``entries``: for how many messages each
    exchange's was, and how many bytes it announced."""
    beside = Counter(edge for edge, _ in lines)
    rows = rows[job.columns.starts[rows] != NEVER]
    sent = np.stack([job.columns.starts[rows], job.exchanges["data_end_ns"][rows]])
    src = job.exchanges["src"][rows]
    sending = {end: Covered(sent[:, src == end]) for end in {src for src, _ in beside}}
    for edge, line in lines:
        own = (entries[0][line], entries[1][line])
        yield edge, Parts(job, edge, line, own, beside[edge], sending[edge[0]])


def _transfers(by: Mapping[Edge, Sequence[Parts]]) -> list[Transfers]:
    """What lines carry, cut into parts by each other's example."""
    known = Counter(each for lanes in by.values() for lane in lanes for each in lane.signatures())
    for lanes in by.values():
        for lane in lanes:
            if not lane.registered:
                lane.cut(known)
            lane.close(known)
    _cut_alike(by, known)
    return [each for lanes in by.values() for each in transfers_of(lanes)]


def _cut_alike(by: Mapping[Edge, Sequence[Parts]], known: Counter[tuple[int, int]]) -> None:
    """Cut all ways where most are, if all send to all, and each has something between any two cuts.

    Of calls of all with all nobody begins one before it is through with the one before. What a stall or a
    late stamp has one way look like, the others tell. Of several connections of a way one has all parts.
    """
    for group in connected(by, lambda edge: edge):
        ends = {end for edge in group for end in edge}
        lanes = [lane for edge in group for lane in by[edge]]
        if (
            len(ends) < 3
            or len(group) < len(ends) * (len(ends) - 1)
            or any(each.registered for each in lanes)
        ):
            continue
        busiest = [max(by[edge], key=lambda lane: len(lane.begins)) for edge in group]
        for early in (False, True):
            times = common_cuts(busiest, early=early)
            cuts = [lane.cut_at(times[lane.edge[0]]) for lane in lanes] if times else []
            told = zip(cuts, lanes, strict=False)
            if cuts and all((np.diff(cut) > 0).all() for cut, lane in told if lane in busiest):
                for lane, cut in zip(lanes, cuts, strict=True):
                    lane.begins, lane.turns = distinct(cut), np.flatnonzero(np.diff(cut))
                    lane.close(known)
                break


def _own_lines(job: Job, rows: Ints, announced: Ints, asked: Ints) -> dict[Edge, list[Parts]]:
    """The lines of point-to-point connections, by sender and receiver; ``asked``: messages of each entry."""
    lines = lines_of(job, rows, announced)
    if not lines:
        return {}
    by: dict[Edge, list[Parts]] = {}
    for edge, part in _parts_of(job, lines, rows, (asked, announced)):
        by.setdefault(edge, []).append(part)
    by = {
        edge: lanes
        for edge, lanes in by.items()
        if all(lane.registered or lane.cut_by_rule() for lane in lanes)
    }
    return _without_rings(by, job.near)


def _told_apart(
    job: Job, every: Sequence[Transfers], by: Mapping[Edge, Sequence[Parts]]
) -> tuple[list[list[Transfers]], list[Transfers]]:
    """Transfers that are all-to-all calls, by communicator, and the others; ``by``: the lines of each sender
    and receiver."""
    calls: list[list[Transfers]] = []
    left: list[Transfers] = []
    for together in connected(every, attrgetter("edge")):
        single = _single(together, by)
        members, cut = even(single) if single else ([], [])
        if members and is_call(members, job.near):
            calls.append(members)
            left += cut
            continue
        begun = all(each.begun for each in together)
        members, cut = even(together) if begun else at_all(together)
        whole = bool(members) and is_call(members, job.near)
        calls += [members] if whole else []
        left += cut if whole else together
    for clique in cliques(left):
        if is_call(clique, job.near):
            calls.append(clique)
            called = {id(each) for each in clique}
            left = [each for each in left if id(each) not in called]
    return calls, left


def _single(together: Sequence[Transfers], by: Mapping[Edge, Sequence[Parts]]) -> list[Transfers]:
    """``together``, were each message a transfer; none where that is so already, or cannot be.

    Of messages alone nothing may show where a transfer ends. Chunks of one are sent as slots are free: where
    everyone has the k-th of all before sending the next, they are none.
    """
    edges = dict.fromkeys(each.edge for each in together)
    if len(edges) <= 2 or not any(len(rows) > len(by[each.edge]) for each in together for rows in each.rows):
        return []
    found = [each for edge in edges if (each := by_message(by[edge])) is not None]
    return found if len(found) == len(edges) else []


def _sends(job: Job, every: Sequence[Transfers], handed: Callable[[Edge], bool]) -> list[Instance]:
    """Gathers and scatters, rounds among neighbours, and the other transfers each by itself; ``handed``: as
    of ``_sent``."""
    found: list[Instance] = []
    for together in connected(every, attrgetter("edge")):
        # What another GPU may have handed over is no doing of the adapter that sends it.
        own = not any(handed(each.edge) for each in together)
        exchanged, left = stars(job, together) if own else ([], together)
        if not exchanged and own:
            exchanged, left = rounds(job, together)
        found += exchanged
        for each in left:
            found += _sent(job, each, handed=handed(each.edge))
    return found


def _sent(job: Job, each: Transfers, *, handed: bool) -> list[Instance]:
    """Transfers from one endpoint to another. What it sends was there when it called; unless it was another
    GPU's that ``handed`` it over."""
    view = InstanceView(job.near, free=frozenset(() if handed else (0,)), inside=handed)
    return [
        Instance(
            own, Op.SEND_RECV, list(each.edge), size=int(size), complete=bool(whole), view=view
        )
        for own, size, whole in zip(each.rows, each.size, each.whole, strict=True)
    ]  # fmt: skip


def _may_hand_over(edge: Edge, lanes: int, nodes: Ints) -> bool:
    """Whether an adapter may send for all GPUs of its node, to the one on its rail of another (PXN).

    It then has connections for each of them (src/transport/net.cc sendSetup).
    """
    mates = int((nodes == nodes[edge[0]]).sum())
    return 1 < mates <= lanes and nodes[edge[0]] != nodes[edge[1]]


def _without_rings(by: dict[Edge, list[Parts]], near: frozenset[int] | None) -> dict[Edge, list[Parts]]:
    """Lines without those that pass data on around a ring of three or more, which are a collective's.

    Of a ring that was captured at some of its ranks (``near``) only their lines are seen.
    """
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for src, dst in by:
        after.setdefault(src, []).append(dst)
        before.setdefault(dst, []).append(src)
    ring: set[Edge] = set()
    alone = {src: dst[0] for src, dst in after.items() if len(dst) == 1 == len(before[dst[0]])}
    for start in alone:
        order, closed = in_a_row(start, alone)
        if len(order) > 2 and closed:
            ring.update(zip(order, [*order[1:], start], strict=True))
    for end in near or ():
        if len(before.get(end, ())) == 1 == len(after.get(end, ())) and before[end] != after[end]:
            edges = (before[end][0], end), (end, after[end][0])
            if _sends_unasked(by[edges[0]], by[edges[1]]):
                ring.update(edges)
    return {edge: lanes for edge, lanes in by.items() if edge not in ring}


def _sends_unasked(inward: Sequence[Parts], outward: Sequence[Parts]) -> bool:
    """Whether an endpoint that gets as much as it sends does not wait for its input, as a stage would.

    In a ring each rank's first message needs no input, so the k-th often leaves before the k-th has come.
    """
    came = np.sort(np.concatenate([lane.arrivals for lane in inward]))
    left = np.sort(np.concatenate([lane.starts for lane in outward]))
    return len(came) == len(left) and bool((left > came).mean() < MOST)
