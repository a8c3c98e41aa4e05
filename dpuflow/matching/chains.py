"""NCCL's broadcast and reduce: chunks of one size, but for the last one, that go along a path of nodes.

In: what was seen of one operation. Out: a layout, or None where its lanes are no chain. A reduce goes along
it as a broadcast does, from the last rank to the root: that what ranks pass on is changed tells it
(``contents``). A ring's first messages wait for nothing, those of a chain for what came.
NCCL 2.30 src/device/broadcast.h, reduce.h.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching.branches import chunked, waits
from dpuflow.matching.contents import AGREE, unchanged
from dpuflow.matching.lanes import Layout
from dpuflow.schedules.nccl import BROADCAST_CHAIN, REDUCE_CHAIN
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from dpuflow.matching.lanes import View


def chain(view: View) -> Layout | None:
    """The path of nodes; each channel reaches and leaves them at GPUs of its own.

    Where the root is not the first of its node that a channel comes to, the path ends in its node again.
    """
    several = len(set(map(view.node, view.members))) < len(view.members)
    order = _path(view, back=several) if chunked(view.lanes) else None
    if order is None or not all(_passes(view, node, late=several) for node in order[1:-1]):
        return None
    passed = unchanged((view.into[node], view.out[node]) for node in order[1:-1])
    kinds = [lane.kind for lane in view.out[order[0]]]
    op, algorithm = (Op.REDUCE, REDUCE_CHAIN) if passed is False else (Op.BROADCAST, BROADCAST_CHAIN)
    ends = sorted(view.members, key=lambda end: order.index(view.node(end)), reverse=op == Op.REDUCE)
    return Layout(
        op,
        algorithm,
        ends,
        sum(size for _, size in kinds),
        None if several else 0,  # which of its node's GPUs is the root shows in no packet
        (Op.REDUCE,) if passed is None else (),
        ranks=len(ends) if several else 0,
        inside=several,
        tails=len(kinds),
    )


def _path(view: View, *, back: bool) -> list[int] | None:
    """The nodes in a row, with as many lanes of the same bytes from each to the next; None without a path.

    ``back``: some lanes may lead from the last node to the first one.
    """
    after = {node: view.node(lanes[0].dst) for node, lanes in view.out.items()}
    if len({(view.node(lane.src), view.node(lane.dst)) for lane in view.lanes}) > len(after):
        return None
    heads = [node for node in after if node not in view.into]
    if not heads and back:
        heads = [min(after, key=lambda node: int(np.median([x.starts[:, 0].min() for x in view.out[node]])))]
    if len(heads) != 1:
        return None
    order = heads
    while order[-1] in after and after[order[-1]] not in order:
        order.append(after[order[-1]])
    kinds = Counter(lane.kind for lane in view.out[order[0]])
    rest = Counter(lane.kind for lane in view.out.get(order[-1], ()))
    if len(order) != len(after.keys() | view.into.keys()) or len(order) < 2 or not rest <= kinds:
        return None
    if after.get(order[-1], order[0]) != order[0]:
        return None
    if any(Counter(lane.kind for lane in view.out[node]) != kinds for node in order[:-1]):
        return None
    return order


def _passes(view: View, node: int, *, late: bool) -> bool:
    """Whether what leaves the node in the middle had come before, as far as captures tell."""
    into, out = view.into[node], view.out[node]
    if late:  # which channels are the same is not known
        came = np.min([lane.arrivals[:, 0] for lane in into], axis=0)
        return bool((np.min([lane.starts[:, 0] for lane in out], axis=0) > came).mean() >= AGREE)

    if view.whole or not view.is_captured(out[0].src):
        return True
    like = ([goes for goes in out if goes.kind == came.kind] for came in into)
    return all(
        not mine or any(waits(goes, came) for goes in mine) for came, mine in zip(into, like, strict=True)
    )
