"""Transfers that are calls of all with all: NCCL's, and rounds that no library names.

In: transfers. Out: those that belong to communicators whose ranks all send to each other in one call, and the
all_to_all of each call. The sends and receives of one call run in one kernel: who has not sent its own has
consumed nothing either (NCCL 2.30, src/enqueue.cc addP2pToPlan, src/device/sendrecv.h).

Over nodes of several GPUs sends leave by the NICs on the receivers' rails (PXN): each NIC receives for its
own GPU, and sends for all of its node, one connection a channel and receiver (src/graph/search.cc
ncclTopoGetNetDev, src/transport/net.cc sendSetup). So a call leads from every node to every NIC of the
others. That a transfer is of several senders is told by entries for several messages (``bunches``).

Other libraries' rounds (isend and irecv of a mixture of experts) have as many messages on every edge, and no
rank begins one before it is through with the one before. Gathers and scatters made of sends are told by one
transfer as large between the root and each other (``stars``).

Puts into each other's memory, unasked, are calls, too: experts' dispatch and combine (DeepEP's way).
In: EXCHANGE rows that are puts (``flagged``), one each way and turn. Out: collectives. What makes a turn of
all ways one collective is not their time but that nobody puts again before it has the flags of all who put to
it: a kernel that combines, or dispatches the next layer's tokens, needs what came. How much goes each way may
differ; an all_gather or reduce_scatter of as much for everybody, put directly, would look the same, and so
would a doubling of two ranks.

Pages that only ever go one way are no collective: a plain WRITE tells its receiver nothing (IBA volume 1,
9.4.3), so one that takes part in a collective has an immediate, was asked for, has a flag or a SEND behind
it, or its receiver is seen to go on by what it WRITEs itself. They hand on caches (``verdicts.bulk`` makes
transfers of them).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import median_of
from dpuflow.matching.model import MOST, RARE, TWICE, Instance, InstanceView, Placement
from dpuflow.matching.parts import Transfers
from dpuflow.matching.streams import edge_streams
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.matching.model import Job
    from dpuflow.matching.streams import Edge
    from dpuflow.schema.tables import Rows


_LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


_STARS: Final = {
    op: next(a for a in ALGORITHMS if a.op == op and a.name == "linear") for op in (Op.GATHER, Op.SCATTER)
}


def cliques(every: Sequence[Transfers]) -> list[list[Transfers]]:
    """Transfers by the endpoints that they connect and by equal numbers of calls and bytes.

    Communicators that exchange all with all do so equally often on all their edges; a pipeline's edges that
    touch them need not.
    """
    classes: dict[int, list[Transfers]] = {}
    for each in every:
        classes.setdefault(len(each.rows), []).append(each)
    return [clique for members in classes.values() for clique in connected(members, attrgetter("edge"))]


def at_all(members: Sequence[Transfers]) -> tuple[list[Transfers], list[Transfers]]:
    """Of edges seen from mid-job on, the transfers while all edges are seen; and the others, cut off.

    From one time to another at which none was under way.
    """
    first, last = max(int(e.start_ns[0]) for e in members), min(int(e.end_ns[-1]) for e in members)
    start, end = (
        np.concatenate(times) for times in zip(*((e.start_ns, e.end_ns) for e in members), strict=True)
    )
    order = np.argsort(start)
    quiet = start[order][1:][start[order][1:] > np.maximum.accumulate(end[order])[:-1]]
    quiet = quiet[(quiet >= first) & (quiet <= last)]
    if len(quiet) < 2:
        return [], []
    kept, cut = [], []
    for each in members:
        low, high = np.searchsorted(each.start_ns, [quiet[0], quiet[-1]]).tolist()
        kept.append(each.part(low, high))
        cut += [each.part(0, low), each.part(high, len(each.rows))]
    for part in cut:
        part.whole[:] = False
    return (kept, cut) if all(each.rows for each in kept) else ([], [])


def even(members: Sequence[Transfers]) -> tuple[list[Transfers], list[Transfers]]:
    """What all edges have, and the transfers of those that have one more: of a call that the captures' ends
    cut off, or that stopped half done. Where some have more than that all of them, and none."""
    least = min(len(each.rows) for each in members)
    if max(len(each.rows) for each in members) > least + 1:
        return list(members), []
    first = median_of([each.start_ns[0] for each in members if len(each.rows) == least])
    kept, cut = [], []
    for each in members:
        more = len(each.rows) - least
        low = int(np.argmin(np.abs(each.start_ns[: more + 1] - first)))
        kept.append(each.part(low, low + least))
        if more:
            cut.append(each.part(0, 1) if low else each.part(least, least + 1))
            cut[-1].whole[:] = False
    return kept, cut


def is_call(members: Sequence[Transfers], near: frozenset[int] | None) -> bool:
    """Whether the k-th transfers of all edges are one call of all with all, for every k."""
    return in_turns(members, near) and (len(members) > 2 or not _answers(members[0], members[1]))


def in_turns(members: Sequence[Transfers], near: frozenset[int] | None, home: Ints | None = None) -> bool:
    """Whether all send to all equally often, and nobody again before it has all of the turn before.

    ``home``: the node of each endpoint, where one sends for all of its node; None: each for itself.
    """
    own = np.arange(1 + max(max(each.edge) for each in members)) if home is None else home
    ends = sorted({end for each in members for end in each.edge})
    asked = {
        (int(own[a]), b)
        for a in ends
        for b in ends
        if own[a] != own[b] and (near is None or a in near or b in near)
    }
    ways = [(int(own[each.edge[0]]), each.edge[1]) for each in members]
    if len(ways) != len(asked) or set(ways) != asked or len({len(each.rows) for each in members}) > 1:
        return False
    for place in {src for src, _ in ways} if len(members[0].rows) > 1 else ():
        sent = np.min([each.start_ns[1:] for each in members if own[each.edge[0]] == place], axis=0)
        came = np.max([each.end_ns[:-1] for each in members if own[each.edge[1]] == place], axis=0)
        if (sent >= came).mean() < MOST:
            return False
    return True


def _answers(one: Transfers, other: Transfers) -> bool:
    """Whether of two endpoints one mostly answers the other: it sends when it has consumed what came.

    In one call nothing is consumed before the own kernel runs, however late that is: the next entry for the
    other's data then comes with the own first message, not with the arrival.
    """
    for asks, answers in ((one, other), (other, one)):
        after = answers.start_ns > asks.end_ns
        if after.mean() < MOST:
            continue
        known = after & (asks.next_ns != NEVER)
        waited, ahead = (asks.next_ns - asks.end_ns)[known], (answers.start_ns - asks.next_ns)[known]
        if not known.any() or (waited < ahead).mean() >= 0.5:
            return True
    return False


def all_to_all(
    job: Job, members: Sequence[Transfers], turn: int, senders: Sequence[int] | None = None
) -> Instance:
    """The call of these transfers; ``senders``: of how many GPUs each is, None: of that at its endpoint."""
    rows = np.sort(np.concatenate([each.rows[turn] for each in members]))
    ends = job.ordered(end for each in members for end in each.edge)
    whole = all(bool(each.whole[turn]) for each in members)
    parts: set[float | None] = {int(each.size[turn]) for each in members}
    view, placement = InstanceView(job.near), Placement()
    if senders is not None:
        nodes = job.nodes[ends]
        # Where all GPUs of a node send, each sends an equal part of what a NIC receives from the node.
        parts = {
            int(each.size[turn]) / count if count == (nodes == job.nodes[each.edge[0]]).sum() else None
            for each, count in zip(members, senders, strict=True)
        }
        view, placement = InstanceView(inside=True), Placement(len(ends), nodes=tuple(nodes.tolist()))
    part = parts.pop() if len(parts) == 1 else None
    size = None if part is None else round(part * len(ends))
    names = ["pairwise"] if len(ends) == 2 else []
    return Instance(
        rows, Op.ALL_TO_ALL, ends, _LINEAR, names, size=size, complete=whole, view=view, placement=placement
    )


def calls_over_rails(
    job: Job, every: Sequence[Transfers], asked: Ints
) -> tuple[list[Instance], list[Transfers]]:
    """The all_to_alls among ``every``, and the transfers that are of none; ``asked``: messages of entries."""
    nodes = job.nodes
    found: list[Instance] = []
    left: list[Transfers] = []
    for members in connected(every, lambda each: [(len(each.rows), int(nodes[end])) for end in each.edge]):
        # Of how many GPUs the transfers are, as far as entries tell.
        senders = [int(asked[np.concatenate(each.rows)].max()) for each in members]
        if min(senders) < 2 or not in_turns(members, None, nodes):
            left += members
            continue
        found += [all_to_all(job, members, turn, senders) for turn in range(len(members[0].rows))]
    return found, left


FEWEST: Final = 3
"""Two ranks that answer each other are everyone, too."""


def stars(job: Job, lanes: Sequence[Transfers]) -> tuple[list[Instance], list[Transfers]]:
    """The gathers and scatters that connected ``lanes`` carry, and what is left of them.

    NCCL makes these of sends and receives (in PyTorch; src/enqueue.cc addP2pToPlan): all others send the root
    as much, or it sends them, at a time; in order of time on each edge. They are taken one after the other,
    the more compact one of what the first transfer left may belong to.
    """
    ends = job.ordered(end for each in lanes for end in each.edge)
    ways = {each.edge: each for each in lanes}
    rooted = max(max(Counter(one[side] for one in ways).values()) for side in (0, 1)) == len(ends) - 1
    known = all((each.start_ns != NEVER).all() for each in lanes)
    if len(ways) < len(lanes) or len(ends) <= FEWEST or not rooted or not known:
        return [], list(lanes)
    begins = sorted((int(ns), each.edge, k) for each in lanes for k, ns in enumerate(each.start_ns.tolist()))
    at = dict.fromkeys(ways, 0)
    found: list[Instance] = []
    left: list[Transfers] = []
    spans: list[tuple[float, int]] = []
    for _, edge, k in begins:
        if k < at[edge]:
            continue
        each = min(filter(None, (_star(ways, at, ends, edge, op) for op in _STARS)), default=None)
        if each is None:
            at[edge] = k + 1
            left.append(ways[edge].part(k, k + 1))
            continue
        _, op, own = each
        starts = [int(ways[one].start_ns[at[one]]) for one in own]
        spans.append((float(median_of(starts)), min(starts)))
        rows = np.sort(np.concatenate([ways[one].rows[at[one]] for one in own]))
        whole = all(bool(ways[one].whole[at[one]]) for one in own)
        size, root = int(ways[edge].size[k]), ends.index(edge[0 if op == Op.SCATTER else 1])
        found.append(Instance(rows, op, list(ends), _STARS[op], root=root, size=size, complete=whole,
                              confidence=MOST, view=InstanceView(job.near)))  # fmt: skip
        for one in own:
            at[one] += 1
    # What all send to all leaves at one time, whoever it is for.
    apart = sum(middle <= begin for (middle, _), (_, begin) in pairwise(spans))
    mine = sum(len(each.rows) for each in lanes)
    if len(found) < TWICE or len(left) > RARE * mine or apart < MOST * (len(found) - 1):
        return [], list(lanes)
    return found, left


def _star(
    ways: Mapping[Edge, Transfers], at: Mapping[Edge, int], ends: Sequence[int], edge: Edge, op: Op
) -> tuple[int, Op, list[Edge]] | None:
    """The next transfers of a gather or scatter that ``edge`` is of, with the time from the first to the
    last; None where not all others have one as large."""
    root = edge[0] if op == Op.SCATTER else edge[1]
    own = [(root, end) if op == Op.SCATTER else (end, root) for end in ends if end != root]
    if any(one not in ways or at[one] == len(ways[one].rows) for one in own):
        return None
    starts = [int(ways[one].start_ns[at[one]]) for one in own]
    alike = len({int(ways[one].size[at[one]]) for one in own}) == 1
    return (max(starts) - min(starts), op, own) if alike else None


def rounds_of(job: Job, rows: Ints) -> tuple[list[Instance], Ints]:
    """The rounds among ``rows`` of one communicator, each a message, and the rows that are in none."""
    found, _ = rounds(job, _transfers(job, rows))
    taken = np.concatenate([rows[:0], *(instance.rows for instance in found)])
    return found, np.setdiff1d(rows, taken)


def rounds(job: Job, lanes: Sequence[Transfers]) -> tuple[list[Instance], list[Transfers]]:
    """The rounds that connected ``lanes`` carry, if each edge has exactly one, and what is left of them.

    Of all with all, or of a ring, a grid, any neighbours: as many transfers on each edge in every round, no
    rank begins one before it is through with the one before, and most are seen to send before they get. That
    tells a round from a pipeline's transfers, whose stages wait for what comes; who never is may be late as a
    rule.
    """
    if len({each.edge for each in lanes}) < len(lanes):
        return [], list(lanes)
    src, dst = np.array([each.edge for each in lanes]).T
    ends = job.ordered([*src.tolist(), *dst.tolist()])
    everyone = len(lanes) == len(ends) * (len(ends) - 1)
    count = min(len(lane.rows) for lane in lanes)
    per = [round(len(lane.rows) / count) for lane in lanes]
    # The captures' ends may cut a round or two.
    cut = any(count * some < MOST * len(lane.rows) for some, lane in zip(per, lanes, strict=True))
    if len(ends) < FEWEST or cut or (everyone and max(per) > 1) or set(src.tolist()) != set(dst.tolist()):
        return [], list(lanes)
    count = min(len(lane.rows) // some for some, lane in zip(per, lanes, strict=True))
    parts = [lane.part(0, count * some) for some, lane in zip(per, lanes, strict=True)]
    starts, arrivals = (
        np.concatenate([times.reshape(count, -1) for times in each], axis=1)
        for each in ([part.start_ns for part in parts], [part.end_ns for part in parts])
    )
    sent, got = ([np.repeat(of == end, per) for end in ends] for of in (src, dst))
    if not count or not _are_apart(starts, arrivals, sent, got, everyone):
        return [], list(lanes)
    op, algorithm = (Op.ALL_TO_ALL, _LINEAR) if everyone else (Op.UNKNOWN, None)
    view = InstanceView(job.near, free=frozenset(() if everyone else range(len(ends))))
    found = []
    for turn in range(count):
        every = [
            part.rows[turn * some + k] for part, some in zip(parts, per, strict=True) for k in range(some)
        ]
        rows = np.concatenate(every)
        rows = rows[np.argsort(job.columns.starts[rows], kind="stable")]
        whole = all(
            part.whole[turn * some : (turn + 1) * some].all() for part, some in zip(parts, per, strict=True)
        )
        found.append(Instance(rows, op, list(ends), algorithm, confidence=0.9, complete=whole, view=view))
    rest = [lane.part(count * some, len(lane.rows)) for some, lane in zip(per, lanes, strict=True)]
    return found, [each for each in rest if each.rows]


def _are_apart(
    starts: Ints, arrivals: Ints, sent: Sequence[Bools], got: Sequence[Bools], everyone: bool
) -> bool:
    """Whether ranks are through with a round before the next, and most were seen to send before they get.

    ``starts`` and ``arrivals`` are (rounds, messages), ``sent`` and ``got`` per rank which of these are its.
    """
    apart, early = np.ones(len(starts) - 1, bool), 0
    for sends, gets in zip(sent, got, strict=True):
        first = starts[:, sends].min(axis=1)
        apart &= starts[:, sends].max(axis=1)[:-1] <= first[1:]
        if not everyone:
            apart &= arrivals[:, gets].max(axis=1)[:-1] <= first[1:]
            early += int((first < arrivals[:, gets].min(axis=1)).sum() >= TWICE)
    shown = everyone or 2 * early > len(sent)
    return shown and bool(apart.sum() >= MOST * len(apart))


_DOUBLING: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_REDUCE and a.name == "recursive_doubling")
_CUT: Final = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP


def put_instances(job: Job, rows: Ints) -> tuple[list[Instance], Ints]:
    """The all_to_alls among ``rows``, and the rows that belong to none."""
    exchanges = job.exchanges
    put = rows[(exchanges["wire"][rows] == Wire.ROCE_WRITE) & (exchanges["tag"][rows] > 1)]
    if not len(put):
        return [], rows
    found: list[Instance] = []
    for together in connected(_transfers(job, put), attrgetter("edge")):
        members, _ = even(together)
        if in_turns(members, job.near):
            found += [_made(job, members, turn) for turn in range(len(members[0].rows))]
    taken = np.concatenate([instance.rows for instance in found]) if found else rows[:0]
    return found, np.setdiff1d(rows, taken, assume_unique=True)


def _transfers(job: Job, rows: Ints) -> list[Transfers]:
    """Messages by (sender, receiver), in order, each a transfer."""
    exchanges, (_, starts, arrivals, _) = job.exchanges, job.columns
    return [
        Transfers(
            edge,
            list(mine[:, None]),
            starts[mine],
            arrivals[mine],
            exchanges["bytes"][mine].astype(np.int64),
            (exchanges["flags"][mine] & _CUT) == 0,
            np.full(len(mine), NEVER),
            False,
        )
        for edge, mine in edge_streams(exchanges, rows).left()
    ]


def _made(job: Job, members: Sequence[Transfers], turn: int) -> Instance:
    """The collective of a turn, with the operations that would look the same."""
    made = all_to_all(job, members, turn)
    others = () if made.size is None else (Op.ALL_GATHER, Op.REDUCE_SCATTER)
    # Two that always put as much to each other make what one step of a doubling is.
    if len(members) > 2 or (members[0].size != members[1].size).any():
        return replace(made, alike=others)
    size = int(members[0].size[turn])
    return replace(
        made,
        op=Op.ALL_REDUCE,
        algorithm=_DOUBLING,
        alternatives=[],
        size=size,
        alike=(Op.ALL_TO_ALL, *others),
    )


LEAST: Final = 512
"""Bytes: NCCL's clear-to-send writes are no larger (eight entries of 64), and no pages even where nothing
else shows what they are."""


def unannounced(exchanges: Rows, rows: Ints) -> Ints:
    """``rows``, WRITEs and READs, but those on connections with immediates, or with a SEND for each of them:
    there a library asks before it moves data (rendezvous)."""
    wire = np.ascontiguousarray(exchanges["wire"])
    connection = exchanges["connection"].astype(np.int64)
    size = int(connection.max()) + 1
    sends = np.isin(wire, (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)) & (exchanges["data_ns"] != NEVER)
    told = np.bincount(connection[sends], minlength=size) >= np.bincount(connection[rows], minlength=size)
    told |= np.bincount(connection, wire == Wire.ROCE_WRITE_IMM, size) > 0
    return rows[~told[connection[rows]]]


def without_pages(exchanges: Rows, rows: Ints) -> Ints:
    """``rows`` without unannounced WRITEs from endpoints that get none such to endpoints that send none."""
    plain = rows[exchanges["wire"][rows] == Wire.ROCE_WRITE]
    plain = plain[(exchanges["grant"][plain] == NONE32) & (exchanges["tag"][plain] == 0)]
    plain = plain[exchanges["op"][plain] == Op.UNKNOWN]
    if not len(plain):
        return rows
    plain = unannounced(exchanges, plain)
    plain = plain[exchanges["bytes"][plain] > LEAST]
    one_way = ~np.isin(exchanges["src"][plain], exchanges["dst"][plain])
    one_way &= ~np.isin(exchanges["dst"][plain], exchanges["src"][plain])
    return np.setdiff1d(rows, plain[one_way], assume_unique=True)
