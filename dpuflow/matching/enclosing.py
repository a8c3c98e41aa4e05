"""Two operations that look like one: told apart by what a rank did between them.

In: all instances of a job. Out: the same, where an all_reduce of two ranks by a tree is a reduce to one of
them and a broadcast from it, if that one took part in something else in between. A hierarchy reduces to one
rank of each node, exchanges among these, and broadcasts: one connection each way, as a tree's up and down.
But a rank carries out one operation after the other, and within a tree what comes up goes down at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching.model import HALF
from dpuflow.schedules.nccl import BROADCAST_CHAIN, REDUCE_CHAIN
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Instance, Job


def without_enclosing(job: Job, instances: Sequence[Instance]) -> list[Instance]:
    """The instances, with both operations in place of trees of two ranks that enclose others."""
    trees: dict[tuple[int, int], list[int]] = {}  # by root and leaf
    for number, instance in enumerate(instances):
        known = instance.algorithm is not None and instance.algorithm.name == "tree"
        if known and instance.op == Op.ALL_REDUCE and len(instance.order) == instance.rank_count == 2:
            first = instance.rows[np.argmin(job.columns.starts[instance.rows])]
            root = int(job.exchanges["dst"][first])
            (leaf,) = set(instance.order) - {root}
            trees.setdefault((root, leaf), []).append(number)
    split: set[int] = set()
    for (root, leaf), mine in trees.items():
        own = set(instances[mine[0]].order)
        others = [i for i in instances if root in i.order and set(i.order) != own and leaf not in i.order]
        if others and _enclosed(job, [instances[n] for n in mine], others, root) > HALF:
            split.update(mine)
    if not split:
        return list(instances)
    made: list[Instance] = []
    for number, instance in enumerate(instances):
        made += _apart(job, instance) if number in split else [instance]
    return made


def _spans(job: Job, instances: Iterable[Instance], end: int) -> tuple[Ints, Ints]:
    """When an endpoint first sent a message of each (what it gets may come before it calls), and when it last
    sent or got one."""
    begins, ends = [], []
    for instance in instances:
        rows = instance.rows
        sent, came = rows[job.exchanges["src"][rows] == end], rows[job.exchanges["dst"][rows] == end]
        times = [each for each in (job.columns.starts[sent], job.columns.arrivals[came]) if len(each)]
        begins.append(int(times[0].min()))
        ends.append(max(int(each.max()) for each in times))
    return np.array(begins, np.int64), np.array(ends, np.int64)


def _enclosed(job: Job, trees: Sequence[Instance], others: Sequence[Instance], root: int) -> float:
    """The share of trees between whose way up and down their root began and ended one of ``others``."""
    begins, ends = _spans(job, others, root)
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    count = 0
    for instance in trees:
        up, down = _ways(job, instance, root)
        at = int(np.searchsorted(begins, job.columns.arrivals[up].max()))
        count += at < len(ends) and bool(ends[at] <= job.columns.starts[down].min())
    return count / len(trees)


def _ways(job: Job, instance: Instance, root: int) -> tuple[Ints, Ints]:
    """What goes to the root, and what it sends."""
    to = job.exchanges["dst"][instance.rows] == root
    return instance.rows[to], instance.rows[~to]


def _apart(job: Job, instance: Instance) -> list[Instance]:
    """The reduce and the broadcast that a tree of two ranks is."""
    root = int(job.exchanges["dst"][instance.rows[np.argmin(job.columns.starts[instance.rows])]])
    order = [root, *(end for end in instance.order if end != root)]
    kinds = ((Op.REDUCE, REDUCE_CHAIN), (Op.BROADCAST, BROADCAST_CHAIN))
    return [
        replace(instance, rows=rows, op=op, order=list(order), algorithm=chain, alternatives=[], root=0)
        for rows, (op, chain) in zip(_ways(job, instance, root), kinds, strict=True)
    ]
