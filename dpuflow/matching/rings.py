"""NCCL's rings, however much of them was seen: which operation, how many ranks, how many bytes.

In: what was seen of one operation. Out: a layout, or None where its lanes are no ring. A ring goes round in
loops. In each a rank's chunk fills the slots that are announced, but for the last loop: what is left is cut
into equal chunks, rounded up (16 bytes), so that the last ones are shorter, or empty; these are sent as well.

- On the wire are the hops from node to node: a node's GPUs are passed over NVLink, whether each has a NIC or
  they share one. Each hop passes all chunks of the buffer, so one hop tells the bytes. In step k rank p sends
  chunk p - k; how many steps a loop has tells how many ranks there are: n - 1, or twice as many (all_reduce).
- What comes to a node leaves it as many steps later as it has GPUs, changed where any of them reduces it and
  the same where all pass it on (``lanes``): in an all_reduce of n ranks each reduces in n - 1 steps, then
  passes on in n - 2; in an all_gather it always passes on, in a reduce_scatter never.
- Where only some nodes were captured hops make rows, whose first and last rank has no capture; which hops of
  such nodes with several GPUs follow each other is not known.

What that leaves open stays open. NCCL 2.30 src/enqueue.cc (calcCollChunking), src/graph/connect.cc
(connectRings), src/device/all_reduce.h, all_gather.h, reduce_scatter.h.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import in_a_row
from dpuflow.matching.lanes import Layout, grouped, passed_on
from dpuflow.matching.model import MOST
from dpuflow.schedules.nccl import looped_ring, seen_hops
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.matching.lanes import Lane, Passed, View
    from dpuflow.schedules.algorithms import Algorithm


MOST_GPUS: Final = 16
"""GPUs of a node, at most."""

Row = list["Lane"]
"""Lanes in a row: each leaves the node that the one before leads to."""


class Fit(NamedTuple):
    """A way to read a ring: an operation of so many ranks, so many of them on a node."""

    op: Op
    ranks: int
    gpus: int
    loops: int
    size: int  # bytes of the buffer as on the wire


FEW_NODES: Final = 3
"""So many are fully connected by two rings, one the other way round."""


class _Hops(NamedTuple):
    """What was seen of rings side by side: the rows of each, and what its numbers may be.

    ``sides``: lanes that carry the whole buffer together, by the numbers of their rings.
    """

    rings: list[list[Row]]
    ranks: dict[int, list[int]]  # how many ranks there may be, and how many of them on a node
    sides: list[list[int]]
    closed: bool


def ring(view: View) -> Layout | None:
    """The ring that the lanes go round as. Each channel is one of its own through the same nodes."""
    return _read_as(_round(view), view) if view.kind.slices else None


def open_ring(view: View) -> Layout | None:
    """The ring of which the lanes are hops at captured nodes."""
    return _read_as(_open(view), view) if view.kind.slices else None


def _read_as(hops: _Hops | None, view: View) -> Layout | None:
    fits = [] if hops is None else list(_fits(hops, view.kind.slices, view.lanes[0].slot))
    if hops is None or not fits:
        return None
    fits, held = _by_content(fits, view, closed=hops.closed)
    if not fits:
        return None
    if hops.closed:  # a NIC for each GPU is the rule
        fits = [fit for fit in fits if fit.gpus == fits[0].gpus]
    return (_whole if hops.closed else _in_part)(fits, view, hops)._replace(held=held)


# -- what goes round -----------------------------------------------------------------------------


def _open(view: View) -> _Hops | None:
    most = max(len(lane.sizes) for lane in view.lanes) // view.kind.slices + 1
    if view.shared:
        sides, gpus = _single(view), range(_usual(view), MOST_GPUS + 1)
        rings, seen = [[[lane]] for lane in view.lanes], len(view.members)
    else:
        rings, gpus = _rows(view), range(1, 2)
        sides, seen = [list(range(len(rings)))], sum(len(row) + 1 for row in rings[0]) if rings else 0
    if not rings or not sides:
        return None
    ranks = [n for n in range(max(seen, 3), most + 1) if view.among in (0, n)]
    may = {n: [count for count in gpus if n % count == 0 and n > count] for n in ranks}
    return _Hops(rings, may, sides, closed=False)


def _round(view: View) -> _Hops | None:
    cycles = _cycles(view)
    if not cycles or _all_with_all(view):
        return None
    count = len(cycles[0])
    numbers = range(_usual(view), MOST_GPUS + 1)
    may = {count * each: [each] for each in numbers if view.among in (0, count * each)}
    return _Hops([[cycle] for cycle in cycles], may, [list(range(len(cycles)))], closed=True)


def _all_with_all(view: View) -> bool:
    """Whether all of several nodes send to all others: so do an all_to_all's, and rings of no topology."""
    pairs = {(view.node(lane.src), view.node(lane.dst)) for lane in view.lanes}
    nodes = len({node for pair in pairs for node in pair})
    return nodes > FEW_NODES and len(pairs) == nodes * (nodes - 1)


def _usual(view: View) -> int:
    """How many GPUs of a node were seen, at most."""
    return max(map(len, grouped(view.members, view.node).values()))


def _cycles(view: View) -> list[Row]:
    """The lanes of each channel along its ring of nodes from the first one on; none without rings."""
    nodes = list(dict.fromkeys(map(view.node, view.members)))
    n = len(nodes)
    place = {node: number for number, node in enumerate(nodes)}
    if n < 2 or any(len(view.out.get(node, ())) * n != len(view.lanes) for node in nodes):
        return []

    def ahead(lane: Lane) -> int:
        return (place[view.node(lane.dst)] - place[view.node(lane.src)]) % n

    # Channels may go round differently: the next node first, then those further on.
    left = {node: sorted(view.out[node], key=ahead) for node in nodes}
    cycles: list[Row] = []
    while left[nodes[0]]:
        cycle = _cycle(view, left, nodes[0])
        if not cycle:
            return []
        cycles.append(cycle)
    return cycles


def _cycle(view: View, left: dict[int, list[Lane]], first: int) -> Row:
    """A ring of lanes that are ``left`` of each node, taken out of them; empty where there is none."""
    cycle: Row = []
    at, seen = first, {first}
    while len(cycle) < len(left):
        back = len(cycle) == len(left) - 1
        for lane in left[at]:
            alike = not cycle or len(lane.sizes) == len(cycle[0].sizes)
            if alike and (back or view.node(lane.dst) not in seen):
                break
        else:
            return []
        left[at] = [each for each in left[at] if each is not lane]
        cycle.append(lane)
        at = view.node(lane.dst)
        seen.add(at)
    return cycle if at == first else []


def _rows(view: View) -> list[list[Row]]:
    """For each channel its rows; none where lanes make no open ring, or channels are not alike."""
    after = _after(view)
    lanes = grouped(view.lanes, lambda lane: lane[:2])
    if not after or len({tuple(len(lane.sizes) for lane in mine) for mine in lanes.values()}) > 1:
        return []
    heads = sorted(set(view.members) - set(after.values()), key=view.members.index)
    rows = [in_a_row(head, after)[0] for head in heads]
    if sum(map(len, rows)) < len(view.members) or not (len(rows) == 1 or meet(view.lanes, rows)):
        return []
    count = len(next(iter(lanes.values())))
    return [[[lanes[pair][k] for pair in pairwise(row)] for row in rows] for k in range(count)]


def _after(view: View) -> dict[int, int]:
    """To whom each rank of an open ring sends; empty unless every captured rank sends and receives."""
    pairs = {lane[:2] for lane in view.lanes}
    after, before = dict(pairs), {dst: src for src, dst in pairs}
    inner = {end for end in view.members if view.is_captured(end)}
    one_each = len(after) == len(before) == len(pairs)
    through = bool(inner) and inner <= after.keys() & before.keys()
    return after if one_each and through and all(inner & set(pair) for pair in pairs) else {}


def _single(view: View) -> list[list[int]]:
    """The lanes into each captured node, and those out of it, by number; none where not all are as many."""
    if any(view.node(lane.src) == view.node(lane.dst) for lane in view.lanes):
        return []
    if not all(view.is_captured(lane.src) or view.is_captured(lane.dst) for lane in view.lanes):
        return []
    sides: dict[tuple[int, bool], list[int]] = {}
    for number, lane in enumerate(view.lanes):
        for end in lane[:2]:
            if view.is_captured(end):
                sides.setdefault((view.node(end), end == lane.src), []).append(number)
    whole = all((node, not leaves) in sides for node, leaves in sides)
    return list(sides.values()) if whole and len(set(map(len, sides.values()))) == 1 else []


def meet(lanes: Iterable[Lane], parts: Iterable[Iterable[int]]) -> bool:
    """Whether no part ends before all others have begun, as no rank leaves before all have entered."""
    begins, ends = [], []
    for part in map(set, parts):
        mine = [lane for lane in lanes if lane.src in part]
        begins.append(np.min([lane.starts[:, 0] for lane in mine], axis=0))
        arrived = np.array([lane.arrivals[:, -1] for lane in mine])
        ends.append(np.where(arrived == NEVER, FAR, arrived).max(axis=0))
    return bool((np.max(begins, axis=0) < np.min(ends, axis=0)).all())


# -- sizes -------------------------------------------------------------------------------------


def _fits(hops: _Hops, slices: int, slot: int) -> Iterator[Fit]:
    """All that the sizes of the messages can be."""
    rings = [[np.stack([lane.sizes for lane in row]) for row in rows] for rows in hops.rings]
    if any(row.max(initial=0) > slot for rows in rings for row in rows):
        return
    for ranks, numbers in hops.ranks.items():
        stride = numbers[0] if hops.closed and numbers else 1
        told = [dict(_read(rows, ranks, stride, slices, slot)) for rows in rings]
        for op in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER):
            loops, size = _together([each.get(op) for each in told], hops.sides)
            if size is not None:
                yield from (Fit(op, ranks, gpus, loops, size) for gpus in numbers)


def _together(
    told: Sequence[tuple[int, int] | None], sides: Iterable[Sequence[int]]
) -> tuple[int, int | None]:
    """Loops and bytes of rings that carry a buffer together; None where ``sides`` differ in that."""
    rings = [each for each in told if each is not None]
    if len(rings) < len(told):
        return 0, None
    sizes = {sum(rings[number][1] for number in side) for side in sides}
    return max(loops for loops, _ in rings), sizes.pop() if len(sizes) == 1 else None


def _read(
    rows: Sequence[Ints], ranks: int, stride: int, slices: int, slot: int
) -> Iterator[tuple[Op, tuple[int, int]]]:
    """Loops and bytes of one ring by operation. ``rows`` are (lanes in a row, messages), each lane's place in
    the ring ``stride`` behind that of the one before."""
    count = rows[0].shape[1]
    rounds, rest = divmod(count, (ranks - 1) * slices)
    if rest or not rounds:
        return
    chunks = np.concatenate(rows).reshape(-1, rounds, ranks - 1, slices)
    if slices == 2 and _torn(chunks, slot).any():
        return
    full = bool((chunks[:, :-1] == slot).all())
    if full and (chunks == chunks[:1, :, :1]).all() and chunks[0, -1, 0, 0]:  # a loop's chunks are alike
        size = int(chunks[0, :, 0].sum())
        yield Op.ALL_GATHER, (rounds, size)
        yield Op.REDUCE_SCATTER, (rounds, ranks * size)
    loops, rest = divmod(rounds, 2)
    if rest or not all((row[:, : count - count // loops] == slot).all() for row in rows):
        return
    lasts = {_buffer(row[:, count - count // loops :], ranks, stride, slices) for row in rows}
    last = lasts.pop()
    if last is not None and not lasts:
        yield Op.ALL_REDUCE, (loops, (loops - 1) * ranks * slices * slot + last)


def _torn(chunks: Ints, slot: int) -> Bools:
    """Of chunks of two slices those that NCCL does not cut so: the first one is half, or a 32nd of a slot if
    that is more (src/device/prims_simple.h genericOp)."""
    first, second = chunks[..., 0], chunks[..., 1]
    torn: Bools = (second > first) | ((second > 0) & (first < slot // 32))
    return torn


def _buffer(last: Ints, ranks: int, stride: int, slices: int) -> int | None:
    """Bytes of all chunks of an all_reduce's last loop, (lanes in a row, messages); None where they are not
    those: equal but for a shorter one and empty ones, each a step later on the next hop."""
    steps = last.reshape(len(last), 2 * (ranks - 1), slices)
    number = (stride * np.arange(len(last))[:, None] - np.arange(2 * (ranks - 1))) % ranks
    chunks = np.zeros((ranks, slices), np.int64)
    chunks[number] = steps
    whole = chunks.sum(axis=1)
    short = (whole != whole.max()) & (whole > 0)
    return None if (chunks[number] != steps).any() or not whole.max() or short.sum() > 1 else int(whole.sum())


# -- content -----------------------------------------------------------------------------------


def _by_content(fits: list[Fit], view: View, *, closed: bool) -> tuple[list[Fit], int]:
    """Those of ``fits`` that agree best with what nodes pass on, all where none does and hops go round; and
    how many messages show it."""
    slices = view.kind.slices
    hops = [
        (into, view.out[node])
        for node, into in view.into.items()
        if node in view.out and (not view.shared or view.is_captured(into[0].dst))
    ]
    passed = {gpus: passed_on(hops, gpus * slices) for gpus in {fit.gpus for fit in fits}}
    told = [(fit, score) for fit in fits if (score := _agreement(fit, passed[fit.gpus], slices)) is not None]
    best = max((score for _, score in told), default=None)
    if best is None:
        return (fits if closed else []), 0
    return [fit for fit, score in told if score == best], best[0]


def _agreement(fit: Fit, passed: Mapping[int, Passed], slices: int) -> tuple[int, int] | None:
    """Messages that nodes pass on as they should, and those that are as they should be; None where too many
    are not."""
    held = kept = reduced = changed = 0
    for length, (known, same) in passed.items():
        through = passes(fit, length, slices)
        kept, held = kept + int(known[through].sum()), held + int(same[through].sum())
        changed += int(known[~through].sum())
        reduced += int((known - same)[~through].sum())
    return (held, held + reduced) if held >= MOST * kept and reduced >= MOST * changed else None


def passes(fit: Fit, length: int, slices: int) -> Bools:
    """For each message that leaves a node whether all of its GPUs pass it on unchanged."""
    d = fit.ranks - 1
    steps = length // slices
    if fit.op == Op.ALL_REDUCE:
        each = np.arange(steps) % (2 * d) > d
    else:
        each = (np.arange(steps) % d > 0) & (fit.op == Op.ALL_GATHER)
    through = each.copy()
    for behind in range(1, fit.gpus):
        through[behind:] &= each[:-behind]
    return np.repeat(through, slices)


# -- what it is said to be -----------------------------------------------------------------------


def _whole(fits: list[Fit], view: View, hops: _Hops) -> Layout:
    """A ring of which all hops between nodes were seen."""
    fit, rings = fits[0], hops.rings
    alone = not view.shared and fit.gpus == 1
    return Layout(
        fit.op,
        looped_ring(fit.op, fit.loops),
        [lane.src for lane in rings[0][0]] if alone else view.members,
        fit.size,
        alike=tuple(other.op for other in fits[1:]),
        ranks=0 if alone else max(fit.ranks, len(view.members)),
        tails=_tails(fit, hops),
        among=fit.ranks,
    )


def _in_part(fits: list[Fit], view: View, hops: _Hops) -> Layout:
    """A ring of which some hops were seen, given all ways to read it."""
    ops, numbers = sorted({fit.op for fit in fits}), {fit.ranks for fit in fits}
    sizes = {fit.size for fit in fits}
    ranks = numbers.pop() if len(numbers) == 1 else 0
    found = Layout(
        ops[0] if len(ops) == 1 else Op.UNKNOWN,
        looped_ring(ops[0], max(fit.loops for fit in fits)),
        view.members,
        sizes.pop() if len(sizes) == 1 else None,
        alike=tuple(ops) if len(ops) > 1 else (),
        ranks=max(ranks, len(view.members)) if view.shared else 0,
        tails=0 if view.shared else max(_tails(fit, hops) for fit in fits),
        among=ranks,
    )
    if not view.shared:
        found = found._replace(order=[end for row in hops.rings[0] for end in _ends(row)])
        if len(ops) == 1 and _follow(hops.rings[0], ranks):
            return found._replace(order=found.order + [-1 - n for n in range(len(found.order), ranks)])
    return found._replace(algorithm=_hops_seen(found, fits, view))


def _ends(row: Row) -> list[int]:
    return [row[0].src, *(lane.dst for lane in row)]


def _follow(rows: list[Row], ranks: int) -> bool:
    """Whether the places of all rows in a ring of so many ranks (0: not known) are known."""
    whole = len(rows) == 2 and sum(len(_ends(row)) for row in rows) == ranks
    return bool(ranks) and (len(rows) == 1 or whole)


def _hops_seen(found: Layout, fits: list[Fit], view: View) -> Algorithm:
    """How far rows are apart is not known, so only what goes along them is laid out."""
    place = {end: number for number, end in enumerate(found.order)}
    edges = tuple(sorted({(place[lane.src], place[lane.dst]) for lane in view.lanes}))
    steps = max((2 if fit.op == Op.ALL_REDUCE else 1) * fit.loops * (fit.ranks - 1) for fit in fits)
    return seen_hops(found.op, edges, steps)


def _tails(fit: Fit, hops: _Hops) -> int:
    """How many parts of the buffer may end within a slot."""
    return len(hops.rings) * (1 if fit.op == Op.ALL_GATHER else fit.ranks)
