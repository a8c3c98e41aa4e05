"""Collectives in; a row for each (collective, rank), where exchanges begin and end among them, and which
received data each of their sends needs, out.

The dependency graph of every collective is laid over its exchanges: the schedule names the messages of each
edge in order (``schedules.graph``), and the k-th exchange seen on that edge is its k-th message. A message
that was cut into segments needs the same segment of its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import Picked, order_within, packed
from dpuflow.entries.channels import channels_of, started_ns
from dpuflow.matching.model import MOST
from dpuflow.schedules.graph import arcs
from dpuflow.schedules.remembered import remembered
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Bools, Ints
    from dpuflow.matching import Instance
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.tables import Rows

_TABLE = 32  # words a row that a table may take instead of a search


@dataclass
class Places:
    """``collective`` and ``endpoint`` are by row, ``offsets[i]:offsets[i + 1]`` the rows of collective i;
    ``of`` (its collective), ``sender`` and ``receiver`` (their rows) by exchange of ``needs``.
    """

    instances: Sequence[Instance]
    collective: Ints
    endpoint: Ints
    offsets: Ints
    needs: Needs
    sender: Ints
    receiver: Ints

    @property
    def picked(self) -> Picked:
        """The exchanges of all collectives."""
        return self.needs.picked

    @property
    def of(self) -> Ints:
        """The collective of each exchange."""
        return self.needs.collective

    @property
    def transfers(self) -> Bools:
        """Rows of transfers from one rank to another."""
        transfer = (i.op == Op.SEND_RECV for i in self.instances)
        return np.fromiter(transfer, bool, len(self.instances))[self.collective]

    def earliest_of_all(self, rows: Ints, times: Ints) -> tuple[Ints, Ints]:
        """The same of sends; where an adapter serves several ranks, of the one that came last."""
        best, where = self.earliest(rows, times)
        base = np.r_[0, np.cumsum([len(i.rows) for i in self.instances])]
        for number, instance in enumerate(self.instances):
            if instance.placement.parts is None:
                continue
            mine = np.arange(base[number], base[number + 1])
            mine = mine[times[mine] != NEVER]
            order = np.lexsort((times[mine], instance.placement.parts[mine - base[number]]))
            first = mine[order][
                np.r_[True, np.diff(instance.placement.parts[mine - base[number]][order]) != 0]
            ]
            for each in first[np.argsort(times[first], kind="stable")].tolist():
                best[rows[each]], where[rows[each]] = times[each], each
        return best, where

    def __len__(self) -> int:
        return len(self.endpoint)

    def earliest(self, rows: Ints, times: Ints) -> tuple[Ints, Ints]:
        """The earliest of each row's times (FAR without), and which of them it is (-1)."""
        from dpuflow.kernels import ordering

        best = np.full(len(self), FAR)
        where = np.full(len(self), -1, np.int64)
        ordering.earliest(times, rows, best, where)
        return best, where


def build_places(exchanges: Rows, instances: Sequence[Instance]) -> Places:
    """Rows for every rank of every collective, and the dependencies among its exchanges."""
    offsets = np.zeros(len(instances) + 1, np.int64)
    offsets[1:] = np.cumsum([len(instance.order) for instance in instances])
    collective = np.repeat(np.arange(len(instances)), np.diff(offsets))
    endpoint = np.fromiter((e for i in instances for e in i.order), np.int64, int(offsets[-1]))
    needs = build_needs(exchanges, instances)
    find = _Finder(collective, endpoint)
    sender = find(needs.collective, needs.picked["src"])
    receiver = find(needs.collective, needs.picked["dst"])
    return Places(instances, collective, endpoint, offsets, needs, sender, receiver)


class Apart(NamedTuple):
    """Rows of ``Places``, one a process, in order of rows; ``sender`` and ``receiver`` are by exchange."""

    row: Ints  # its row there
    sender: Ints
    receiver: Ints
    free: Bools  # its first message needs no input
    shares: Bools  # another process shares its address


def by_process(places: Places) -> Apart:
    """A row for each process where several share an endpoint, one for any other endpoint."""
    base = np.r_[0, np.cumsum([len(i.rows) for i in places.instances])]
    both = np.stack([places.sender, places.receiver])
    process = np.zeros_like(both)
    free: list[tuple[int, int]] = []
    more = [(row, 0) for row in np.setdiff1d(np.arange(len(places)), both).tolist()]
    for number, instance in enumerate(places.instances):
        first, mine = int(places.offsets[number]), slice(base[number], base[number + 1])
        if instance.placement.processes is None:
            free += [(first + row, 0) for row in instance.free_rows()]
            continue
        process[:, mine] = instance.placement.processes
        more += [(first + row, -1) for row in instance.view.blind]
        of = dict(
            zip(instance.placement.processes.ravel().tolist(), both[:, mine].ravel().tolist(), strict=True)
        )
        free += [(of[rank], rank) for rank in instance.view.free if rank in of]
    seen = np.stack([both.ravel(), process.ravel()], axis=1)
    pairs = np.concatenate([seen, np.array([*free, *more], np.int64).reshape(-1, 2)])
    rows, where = np.unique(pairs, axis=0, return_inverse=True)
    where = where.reshape(-1)
    unasked = np.zeros(len(rows), bool)
    unasked[where[len(seen) : len(seen) + len(free)]] = True
    sender, receiver = where[: len(seen)].reshape(2, -1)
    several = np.bincount(rows[:, 0], minlength=len(places)) > 1
    return Apart(rows[:, 0], sender, receiver, unasked, several[rows[:, 0]])


class _Finder:
    """Finds the row of (collective, endpoint)."""

    def __init__(self, collective: Ints, endpoint: Ints) -> None:
        self.width = int(endpoint.max(initial=0)) + 1
        key = collective * self.width + endpoint
        self.order = np.argsort(key)
        self.keys = key[self.order]
        self.rows: Ints | None = None
        if len(key) and self.keys[-1] < _TABLE * len(key):  # little room for what is quicker
            self.rows = np.zeros(int(self.keys[-1]) + 1, np.int64)
            self.rows[key] = np.arange(len(key))

    def __call__(self, collective: Ints, endpoint: NDArray[np.uint32]) -> Ints:
        key = collective * self.width + endpoint.astype(np.int64)
        if self.rows is not None:
            return self.rows[key]
        return np.asarray(self.order[np.searchsorted(self.keys, key)], np.int64)


class Needs(NamedTuple):
    """Parallel to ``rows``, the EXCHANGE rows of all collectives one after the other."""

    rows: Ints
    picked: Picked  # the columns of these rows
    collective: Ints  # of each row
    mapped: Bools  # the row's place in its algorithm is known
    split: Bools  # its collective uses several connections an edge, side by side
    send: Ints  # one element an arc: the place (in ``rows``) of the send ...
    input: Ints  # ... and of the input that it needs
    early_ns: Ints  # per collective: a tenth of its sends came more than this before their input


def build_needs(exchanges: Rows, instances: Sequence[Instance]) -> Needs:
    """The dependency graph of all collectives; one that does not show all its messages has no arcs."""
    counts = np.fromiter((len(i.rows) for i in instances), np.int64, len(instances))
    rows = np.concatenate([i.rows for i in instances]) if len(instances) else np.zeros(0, np.int64)
    of = np.repeat(np.arange(len(instances)), counts)
    base = np.r_[0, np.cumsum(counts)]
    picked = Picked.exchanges(exchanges, rows)
    # Each edge's messages in the order in which they were sent; grants may come in any order.
    order = order_within(started_ns(picked), of)
    columns = (picked["src"][order], picked["dst"][order], picked["connection"][order])
    edges = packed(*columns)
    by_edge = np.lexsort((*columns[::-1], of)) if edges is None else order_within(edges, of)
    order = order[by_edge]
    src, dst, line = (picked[name][order] for name in ("src", "dst", "connection"))
    split = np.zeros(len(instances), bool)  # an edge runs over several connections: their order is not known
    twice = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1]) & (of[1:] == of[:-1]) & (line[1:] != line[:-1])
    split[of[1:][twice]] = True
    mapped = np.zeros(len(rows), bool)
    alike: dict[tuple[Algorithm, tuple[int, ...], int, int], list[int]] = {}
    for number, instance in enumerate(instances):
        whole = not instance.view.blind and not instance.placement.seats
        if instance.algorithm is not None and whole and len(instance.rows):
            key = (instance.algorithm, tuple(instance.order), instance.root or 0, len(instance.rows))
            alike.setdefault(key, []).append(number)
    sends, inputs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for (algorithm, ranks, root, size), members in alike.items():
        whole = order[base[np.array(members)][:, None] + np.arange(size)]
        several = split[members]
        found = [whole[~several]]
        if several.any() and algorithm.name == "ring":
            found += channels_of(picked, whole[several], algorithm, ranks, instances[members[0]])
        for laid in found:
            plan = _plan(algorithm, len(ranks), root, laid.shape[1])
            if plan is None:
                continue
            # Sorted by endpoint, and by position in the plan: the same messages in another order of edges.
            edge = np.array(ranks)[plan.src] << 32 | np.array(ranks)[plan.dst]
            by_endpoint = np.argsort(edge, kind="stable")
            mine = picked["src"][laid].astype(np.int64) << 32 | picked["dst"][laid]
            where = np.empty_like(laid)
            where[:, by_endpoint] = laid
            where = where[(edge[by_endpoint] == mine).all(axis=1)]
            mapped[where.ravel()] = True
            sends.append(where[:, plan.send].ravel())
            inputs.append(where[:, plan.input].ravel())
    send, needed = np.concatenate(sends), np.concatenate(inputs)
    early = _early_ns(picked, send, needed, of, len(instances))
    # Their algorithm is another, or their messages come in another order.
    keep = early[of[send]] <= 0
    return Needs(rows, picked, of, mapped & (early[of] <= 0), split[of], send[keep], needed[keep], early)


def _early_ns(picked: Picked, send: Ints, needed: Ints, of: Ints, count: int) -> Ints:
    """For each collective how much too early the sends were that came before what they should need."""
    early = np.zeros(count, np.int64)
    start, arrived = started_ns(picked)[send], picked["arrived_end_ns"][needed]
    known = (start != NEVER) & (arrived != NEVER)
    lead, collective = (arrived - start)[known], of[send][known]
    order = order_within(-lead, collective)
    first = np.flatnonzero(np.r_[True, np.diff(collective[order]) != 0]) if len(order) else order
    size = np.diff(np.r_[first, len(order)])
    tenth = first + ((1 - MOST) * size).astype(np.int64)
    early[collective[order][first]] = np.maximum(lead[order][tenth], 0)
    return early


class _Plan(NamedTuple):
    """Messages of a schedule edge by edge, each edge's in order; arcs between them."""

    src: Ints
    dst: Ints
    send: Ints
    input: Ints


@remembered
def _plan(algorithm: Algorithm, n: int, root: int, size: int) -> _Plan | None:
    """The plan for ``size`` messages in all, None where that is no multiple of the schedule's."""
    every, sends, inputs = arcs(algorithm, n, root)
    whole = len(every.src)
    if whole == 0:  # a single rank that talks to itself
        return None
    cuts = size // whole
    if cuts * whole != size or (cuts > 1 and not algorithm.cuts):
        return None
    count, ends = np.bincount(every.edge) * cuts, np.array(every.edges, np.int64)
    order = np.lexsort((ends[:, 1], ends[:, 0]))
    start = np.empty_like(count)
    start[order] = np.cumsum(count[order]) - count[order]
    src, dst = np.repeat(ends[order], count[order], axis=0).T
    send, needed = (
        ((start[every.edge[rows]] + every.turn[rows] * cuts)[:, None] + np.arange(cuts)).ravel()
        for rows in (sends, inputs)
    )
    return _Plan(src, dst, send, needed)
