"""Rings that pass through nodes of several GPUs in, findings about nodes that pass on slowly out.

A ring goes through all GPUs of a node, one after the other: what leaves it in one step came into it as many
steps before. Data that came, and whose credit is there while nothing of its connection leaves, lies inside:
for as long as passing on takes anywhere, and beyond that because of that node. Whoever waits for input or for
credits waits for another one; a GPU that is late holds up the first steps, not all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, distinct, median_of
from dpuflow.entries.inputs import lines_of
from dpuflow.findings.case import SMALL_SHARE, Cost, NotJudgedError, make_finding
from dpuflow.quantities import duration, name_of, percent
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.matching import Instance
    from dpuflow.results import Finding
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

TIMES: Final = 2
"""So many times as long as at any other node."""
FEWEST: Final = 30
"""Messages of a node that it takes to say what is usual there."""
MOST: Final = 100
"""Operations that are looked at: so many of all, evenly."""
SIZES: Final = 64
"""Classes of messages' sizes, by powers of two: copying a larger one takes longer."""
QUICK: Final = 10
"""Percentile: what passing on takes where nothing lies."""


class _Passed(NamedTuple):
    """Of one node in one operation, message by message: when its data was there, when it might leave as to
    its credit and its connection, when it left, and the class of its size. ``share``: so much one
    counts; what leaves in the first steps came from inside, and of connections side by side one tells."""

    came: Ints
    free: Ints
    left: Ints
    size: Ints
    share: float


def find_throttled_nodes(case: Case) -> Iterator[Finding]:
    """One finding for each job one of whose nodes passes on what it takes in more slowly than all others."""
    rings = [instance for instance in case.instances if gpus_passed(instance)]
    looked_at = rings[:: len(rings) // MOST + 1]
    kinds: defaultdict[tuple[Op, int | None], list[dict[int, _Passed]]] = defaultdict(list)
    for ring in looked_at:
        kinds[ring.op, ring.size].append(_passed(case.exchanges[ring.rows], ring))
    lay: defaultdict[int, list[Ints]] = defaultdict(list)
    lost: defaultdict[int, float] = defaultdict(float)
    for several in kinds.values():
        pairs = [pair for of in several for pair in of.items()]
        quick = _quick(pairs)
        for node, passed in pairs:
            inside = np.maximum(passed.left - np.maximum(passed.came + quick[passed.size], passed.free), 0)
            lay[node].append(inside)
            lost[node] += float(inside.sum()) * passed.share * len(rings) / len(looked_at)
    links = case.inferred.links
    # What a slow link holds up shows at both its ends.
    held = set(np.r_[links.src[links.slow], links.dst[links.slow]].tolist())
    apart = {node for ring in looked_at for end, node in _nodes(ring).items() if end in held}
    usual = {node: float(median_of(np.concatenate(ns))) for node, ns in lay.items() if _enough(ns)}
    if len(usual) <= TIMES:
        raise NotJudgedError("fewer than three nodes show what they take in and pass on")
    most = max(usual, key=usual.__getitem__)
    others = [ns for node, ns in usual.items() if node != most]
    ends = sorted({end for ring in looked_at for end, node in _nodes(ring).items() if node == most})
    beyond = lost[most] - float(median_of([lost[node] for node in usual if node != most]))
    share = min(beyond / case.span_ns(ends), 1.0)
    if most in apart or usual[most] <= TIMES * max(others) or share < SMALL_SHARE:
        return
    ranks = len({end for ring in looked_at for end in ring.order})
    yield make_finding(
        "p2p_throttling",
        ends,
        (case.joined.start_ns, case.joined.end_ns),
        Cost(round(share * case.span_ns(ends) * ranks), share),
        0.7,
        f"Each message that passes through the node of {name_of(case.result.endpoints[most])} waits there for"
        f" {duration(round(usual[most]))} (median; other nodes: {duration(round(float(median_of(others))))}),"
        f" although its receiver has granted credit and its connection is idle: {percent(share)} of the time"
        " in all.",
    )


def gpus_passed(instance: Instance) -> int:
    """How many GPUs of each node a ring passes, of three nodes or more; 0 where it passes one, or none."""
    ring = instance.algorithm is not None and instance.algorithm.name == "ring" and instance.complete
    nodes = len(set(instance.placement.nodes))
    if not ring or nodes <= TIMES or instance.rank_count % nodes:
        return 0
    gpus = instance.rank_count // nodes
    return gpus if gpus > 1 else 0


def _quick(pairs: list[tuple[int, _Passed]]) -> NDArray[np.float64]:
    """By class of size what passing on takes where nothing lies: the median of what leaves when its data has
    come, at the quickest node; where nothing waits for its data the quickest tenth of all."""
    node = np.repeat([node for node, _ in pairs], [len(each.left) for _, each in pairs]).astype(np.int64)
    columns = [np.concatenate(each) for each in zip(*(each[:4] for _, each in pairs), strict=True)]
    quick = np.zeros(SIZES)
    if not columns:
        return quick
    came, free, left, size = columns
    for each in distinct(size).tolist():
        mine = np.flatnonzero(size == each)
        at_once = mine[came[mine] >= free[mine]]
        usual = [median_of((left - came)[at_once[at]]) for at in classes(node[at_once]) if len(at) >= FEWEST]
        quick[each] = min(usual, default=np.percentile((left - came)[mine], QUICK))
    return quick


def _enough(lay: list[Ints]) -> bool:
    return sum(map(len, lay)) >= FEWEST


def _nodes(instance: Instance) -> dict[int, int]:
    return dict(zip(instance.order, instance.placement.nodes, strict=True))


def _passed(rows: Rows, instance: Instance) -> dict[int, _Passed]:
    """By node; of those whose connections all show each step."""
    node_of, gpus = _nodes(instance), gpus_passed(instance)
    steps = (instance.rank_count - 1) * (2 if instance.op == Op.ALL_REDUCE else 1)
    slices = 2 if instance.slicing.protocol == "simple" else 1
    ahead = gpus * slices
    lanes = [at[np.argsort(rows["order"][at], kind="stable")] for at in classes(lines_of(rows))]
    may = rows["grant_arrived_ns"].copy()
    for at in lanes:
        may[at[1:]] = np.maximum(may[at[1:]], rows["data_end_ns"][at[:-1]])
    sizes = np.log2(np.maximum(rows["bytes"], 1)).astype(np.int64)
    found: defaultdict[int, list[Ints]] = defaultdict(list)
    count: Counter[int] = Counter()
    for length in {len(at) for at in lanes}:
        at = np.array([lane for lane in lanes if len(lane) == length])
        src, dst = (
            np.array([node_of[end] for end in rows[key][at[:, 0]].tolist()]) for key in ("src", "dst")
        )
        # Side by side they do the same: whichever goes on as which.
        out, into = (np.lexsort((rows["data_ns"][at[:, 0]], nodes)) for nodes in (src, dst))
        if length % (steps * slices) or (src[out] != dst[into]).any():
            continue
        steps_of = (len(at), -1, steps * slices)
        free, left, size = (
            column[at[out]].reshape(steps_of)[:, :, ahead:] for column in (may, rows["data_ns"], sizes)
        )
        came = rows["arrived_end_ns"][at[into]].reshape(steps_of)[:, :, :-ahead]
        known = (came != NEVER) & (left != NEVER)
        for node in distinct(src).tolist():
            mine = src[out] == node
            count[node] += int(mine.sum())
            found[node].append(np.stack([column[mine][known[mine]] for column in (came, free, left, size)]))
    told = {node: np.concatenate(parts, axis=1) for node, parts in found.items()}
    return {
        node: _Passed(
            part[0], part[1], part[2], part[3], (1 + ahead * count[node] / part.shape[1]) / count[node]
        )
        for node, part in told.items()
        if part.shape[1]
    }
