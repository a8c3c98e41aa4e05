"""Collectives of libraries whose every message names its collective (Gloo's slot: prefix and tag).

The tag counts up per communicator, so it is unique only among the connections of one. A cell is
what one connection carried under one tag; cells of one collective share the tag, meet in endpoints
and follow each other with nothing else of those connections in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import median_of
from dpuflow.framing import MPI_NONBLOCKING
from dpuflow.matching.model import Instance, placed
from dpuflow.matching.recognise import Match, matches, whole_size
from dpuflow.matching.shared_addresses import Processes, shares_addresses
from dpuflow.schedules.algorithms import GLOO, NONBLOCKING
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Job
    from dpuflow.schema.tables import Rows

RING_OPS = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER)


class Cell(NamedTuple):
    """What one connection carried under one tag."""

    connection: int
    op: int
    tag: int
    start_ns: int
    end_ns: int
    rows: Ints
    ends: tuple[int, int]  # the two endpoints
    forward: bool  # data flowed from ends[0] to ends[1]
    backward: bool

    @property
    def arcs(self) -> list[tuple[int, int]]:
        """(src, dst) of the ways that data flowed."""
        ways = (self.ends, self.forward), (self.ends[::-1], self.backward)
        return [arc for arc, used in ways if used]


def tagged_instances(job: Job, rows: Ints) -> list[Instance]:
    """The collectives among ``rows`` of EXCHANGE, all of which carry a counting tag."""
    exchanges, near = job.exchanges, job.near
    cells = _cells(exchanges, rows)
    starts: dict[int, list[int]] = {}
    by_tag: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        starts.setdefault(cell.connection, []).append(cell.start_ns)
        by_tag.setdefault((cell.op, cell.tag), []).append(cell)
    components = [
        # Tags of non-blocking collectives do not come again: each is of one call.
        part
        for (op, _), tagged in by_tag.items()
        for part in _components(tagged, None if op == Op.UNKNOWN else starts)
    ]
    if near is not None:
        habits = _habits(exchanges, components, near)
        return [found for part in components for found in _of_component(job, part, habits)]
    mixed = [_shared(job, part) for part in components]
    crowd = [cell.rows for part, shared in zip(components, mixed, strict=True) if shared for cell in part]
    processes = Processes(job, np.sort(np.concatenate(crowd))) if crowd else None
    apart: list[Instance] = []
    instances: list[Instance] = []
    for part, shared in zip(components, mixed, strict=True):
        if shared and processes is not None:
            apart.append(_of_processes(exchanges, part, processes))
        else:
            instances += _of_component(job, part, None)
    _keep_alike(exchanges, [*apart, *instances])
    return [*apart, *instances]


def _of_component(job: Job, cells: list[Cell], habits: Habits | None) -> list[Instance]:
    """The collective of cells that belong together, or those that took turns with equal tags."""
    op = Op(cells[0].op)
    found = [_instance(job, part, op, habits) for part in (_rings(cells) if op in RING_OPS else [cells])]
    rings = all(i.algorithm and i.algorithm.name == "ring" for i in found)
    # Two ranks' ring is what two exchange in many another algorithm.
    if len(found) > 1 and (not rings or max(len(i.order) for i in found) == 2):
        whole = _instance(job, cells, op, habits)
        return [whole] if whole.complete and (not rings or len(whole.order) > 2) else found
    return found


def nonblocking_rows(exchanges: Rows) -> Ints:
    """The rows of EXCHANGE of Open MPI's non-blocking collectives: a tag for each call, no operation."""
    wire, tag = exchanges["wire"], exchanges["tag"].astype(np.int32)
    ob1 = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (exchanges["op"] == Op.UNKNOWN)
    rows = np.flatnonzero(ob1 & (tag <= MPI_NONBLOCKING))
    # They count down: a tag that stands alone is something else's.
    call = (exchanges["context"][rows].astype(np.int64) << 32) + exchanges["tag"][rows]
    return rows[np.isin(call - 1, call) | np.isin(call + 1, call)]


def _keep_alike(exchanges: Rows, instances: Sequence[Instance]) -> None:
    """Collectives of no known algorithm are whole where several have the same messages on the same edges.

    What is in a job again and again lacks nothing: its messages date its entries.
    """
    alike: dict[object, list[Instance]] = {}
    for instance in instances:
        if instance.algorithm is None and not instance.complete:
            edges = _edges(exchanges[instance.rows])
            counts = frozenset((edge, count) for edge, (count, _) in edges.items())
            alike.setdefault((instance.op, counts), []).append(instance)
    for several in alike.values():
        for instance in several if len(several) > 1 else ():
            instance.complete = True


def _cells(exchanges: Rows, rows: Ints) -> list[Cell]:
    """Cells in order of their start."""
    if not len(rows):
        return []
    picked = exchanges[rows]
    key = (picked["connection"].astype(np.int64) << 32) | picked["tag"]
    order = np.lexsort((picked["op"], key))
    key, op = key[order], picked["op"][order]
    bounds = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (op[1:] != op[:-1]), True])
    starts, ends = span(picked)
    cells = []
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        inside = order[low:high]
        src = picked["src"][inside]
        first, second = sorted((int(src[0]), int(picked["dst"][inside[0]])))
        cells.append(
            Cell(
                int(key[low] >> 32),
                int(op[low]),
                int(key[low] & 0xFFFFFFFF),
                int(starts[inside].min()),
                int(ends[inside].max()),
                rows[np.sort(inside)],
                (first, second),
                bool((src == first).any()),
                bool((src == second).any()),
            )
        )
    cells.sort(key=lambda cell: cell.start_ns)
    return cells


def span(exchanges: Rows) -> tuple[Ints, Ints]:
    """First and last sign of each exchange, ns."""
    from dpuflow.kernels import streams

    first, last = np.empty((2, len(exchanges)), np.int64)
    streams.spans(exchanges, first, last)
    return first, last


def _components(cells: list[Cell], starts: dict[int, list[int]] | None) -> list[list[Cell]]:
    """Cells of one tag (in order of time), joined where they meet in an endpoint and in time; without
    ``starts`` (of all cells, by connection) whatever the time."""
    meets = [[number] for number in range(len(cells))]
    latest: dict[int, int] = {}  # endpoint -> its cell that ends last so far
    for i, cell in enumerate(cells):
        for end in cell.ends:
            before = latest.get(end)
            close = before is not None and (starts is None or _adjacent(cells[before], cell, starts))
            if close and before is not None:
                meets[i].append(before)
            if not close or before is None or cells[before].end_ns < cell.end_ns:
                latest[end] = i
    return [[cells[i] for i in some] for some in connected(range(len(cells)), meets.__getitem__)]


def _adjacent(a: Cell, b: Cell, starts: dict[int, list[int]]) -> bool:
    """Whether nothing else began on the two connections between cells ``a`` and ``b``."""
    if a.connection == b.connection:
        return False  # the same tag again on the same connection: the counter has wrapped
    low, high = min(a.end_ns, b.end_ns), max(a.start_ns, b.start_ns)
    if high <= low:
        return True
    for connection in (a.connection, b.connection):
        times = starts[connection]
        at = bisect_right(times, low)
        if at < len(times) and times[at] < high:
            return False
    return True


def _rings(cells: list[Cell]) -> list[list[Cell]]:
    """Split cells of a ring operation where two communicators took turns with equal tags.

    In a ring every rank sends to one neighbour and receives from one. Two ranks exchange on one
    connection in both directions and need nobody else.
    """
    arcs = [arc for cell in cells for arc in cell.arcs]
    if all(max(Counter(ends).values()) <= 1 for ends in zip(*arcs, strict=True)):
        return [cells]
    parts = [[cell] for cell in cells if len(cell.arcs) > 1]
    single = [cell for cell in cells if len(cell.arcs) == 1]
    while single:
        ring = [single.pop(0)]
        begin, end = ring[0].arcs[0]
        while end != begin:  # another ring may go through the same rank
            follow = [place for place, cell in enumerate(single) if cell.arcs[0][0] == end]
            if not follow:
                break
            ring.append(single.pop(max(follow, key=lambda place: _overlap(single[place], ring[-1]))))
            end = ring[-1].arcs[0][1]
        parts.append(ring)
    return parts


def _overlap(a: Cell, b: Cell) -> int:
    """How long two cells were open together, ns; negative: the gap between them."""
    return min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)


def _instance(job: Job, cells: list[Cell], op: Op, habits: Habits | None) -> Instance:
    rows = np.sort(np.concatenate([cell.rows for cell in cells]))
    picked = job.exchanges[rows]
    endpoints = job.ordered(end for cell in cells for end in cell.ends)
    edges = _edges(picked)
    unasked = None if habits is None else habits.get(_shape(op, edges))
    known = NONBLOCKING if op == Op.UNKNOWN else GLOO
    found = matches(edges, endpoints, op, job.near, unasked, known)
    if not found:
        return Instance(rows, op, endpoints, complete=False, confidence=0.5)
    return placed(_told(rows, op, found, picked["bytes"].tolist()), job.near)


def _told(rows: Ints, op: Op, found: Sequence[Match], sizes: list[int]) -> Instance:
    """The collective that the first of ``found`` is; ``sizes`` of its messages."""
    best = found[0]
    names = (m.algorithm.name for m in found[1:] if m.algorithm.name != best.algorithm.name)
    return Instance(
        rows,
        best.algorithm.op if op == Op.UNKNOWN else op,
        list(best.order),
        best.algorithm,
        list(dict.fromkeys(names)),
        best.root if best.algorithm.rooted else None,
        None if best.size is None else whole_size(best.size, sizes),
        alike=tuple(dict.fromkeys(m.algorithm.op for m in found if m.algorithm.op != best.algorithm.op)),
    )


def _shared(job: Job, cells: Sequence[Cell]) -> bool:
    """Whether processes share addresses: one collective used several connections between two endpoints."""
    if job.ends is None:
        return False
    pairs = Counter(cell.ends for cell in cells)
    return max(pairs.values()) > 1 or shares_addresses(job, np.concatenate([cell.rows for cell in cells]))


def _of_processes(exchanges: Rows, cells: Sequence[Cell], processes: Processes) -> Instance:
    """The collective of ``cells``, whose processes share addresses."""
    rows, op = np.sort(np.concatenate([cell.rows for cell in cells])), Op(cells[0].op)
    found: list[Match] = []
    if processes.told(rows):
        found = processes.matches(processes.edges(exchanges, rows), op)
    if not found:
        return processes.instance(Instance(rows, op, [], confidence=0.7))
    return processes.instance(_told(rows, op, found, exchanges["bytes"][rows].tolist()))


def _edges(picked: Rows) -> dict[tuple[int, int], tuple[int, int]]:
    """(src, dst) -> messages and bytes."""
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    for src, dst, size in zip(
        picked["src"].tolist(), picked["dst"].tolist(), picked["bytes"].tolist(), strict=True
    ):
        count, total = edges.get((src, dst), (0, 0))
        edges[src, dst] = (count + 1, total + size)
    return edges


Shape = tuple[Op, frozenset[tuple[tuple[int, int], tuple[int, int]]]]
Habits = dict[Shape, dict[int, int]]
"""For collectives of one operation, edges and bytes: by how many each captured rank's sends (offers, or
data without one) were usually ahead of the data that had reached it, at most."""


def _shape(op: Op, edges: dict[tuple[int, int], tuple[int, int]]) -> Shape:
    return op, frozenset(edges.items())


def _habits(exchanges: Rows, components: Sequence[Sequence[Cell]], near: frozenset[int]) -> Habits:
    """How far captured ranks run ahead of their inputs, by the median over collectives of one shape."""
    counts: dict[Shape, dict[int, list[int]]] = {}
    for component in components:
        op = Op(component[0].op)
        for cells in _rings(list(component)) if op in RING_OPS else [component]:
            picked = exchanges[np.concatenate([cell.rows for cell in cells])]
            began = np.where(picked["offer_ns"] != NEVER, picked["offer_ns"], picked["data_ns"])
            of = counts.setdefault(_shape(op, _edges(picked)), {})
            for end in near & {end for cell in cells for end in cell.ends}:
                heard = picked["arrived_end_ns"][(picked["dst"] == end) & (picked["arrived_end_ns"] != NEVER)]
                mine = np.sort(began[(picked["src"] == end) & (began != NEVER)])
                ahead = np.arange(1, len(mine) + 1) - np.searchsorted(np.sort(heard), mine)
                of.setdefault(end, []).append(int(ahead.max(initial=0)))
    return {
        shape: {end: round(float(median_of(numbers))) for end, numbers in of.items()}
        for shape, of in counts.items()
    }
