"""Operations that Open MPI's tags do not name as they were called: made of two others, or without a name.

Its linear and non-overlapping all_reduce is a reduce and a broadcast, its linear all_gather a gather and a
broadcast, its non-overlapping reduce_scatter a reduce and a scatter, each with the tags of its parts. What
tells them is that the second part always follows the first: same root, matching bytes, and the root goes on
as soon as it has its last input, as from one step of an algorithm to the next.

The list of operations has no word for prefix operations (MPI_Scan, MPI_Exscan), so they are ``unknown``. Open
MPI passes partial results from each rank to the next (ompi/mca/coll/base: linear): on the wire that is a
chain, in which each sends what needs its input. What is of another shape is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.framing import MPI_SCAN_TAGS
from dpuflow.matching.levels import MOST, TWICE
from dpuflow.matching.sequenced import cut_streams
from dpuflow.matching.streams import edge_streams, numbered_streams
from dpuflow.schedules.algorithms import Algorithm
from dpuflow.schedules.graph import schedule
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance, Job
    from dpuflow.schedules.trees import Send
    from dpuflow.schema.tables import Rows


PARTS = {
    (Op.REDUCE, Op.BROADCAST): Op.ALL_REDUCE,
    (Op.GATHER, Op.BROADCAST): Op.ALL_GATHER,
    (Op.REDUCE, Op.SCATTER): Op.REDUCE_SCATTER,
}
"""First and second part, and what they make."""


def composed(exchanges: Rows, instances: Sequence[Instance]) -> list[Instance]:
    """``instances`` of one communicator with pairs that are one operation put together."""
    order = sorted(range(len(instances)), key=lambda i: int(instances[i].rows[0]))
    chain = [instances[i] for i in order]
    for (first, second), op in PARTS.items():
        heads = [k for k, instance in enumerate(chain) if instance.op == first]
        pairs = [k for k in heads if k + 1 < len(chain) and _fits(chain[k], chain[k + 1], second)]
        at_once = sum(_goes_on(exchanges, chain[k], chain[k + 1]) for k in pairs)
        if len(pairs) < max(TWICE, MOST * len(heads)) or 2 * at_once < len(pairs):
            continue
        for k in reversed(pairs):
            chain[k : k + 2] = [_joined(chain[k], chain[k + 1], op)]
    return chain


def _fits(a: Instance, b: Instance, second: Op) -> bool:
    """Whether ``b`` takes from the root what ``a`` brought there."""
    if b.op != second or a.order != b.order or a.root is None or a.root != b.root:
        return False
    if a.algorithm is None or b.algorithm is None or a.size is None or b.size is None or a.placement.ranks:
        return False
    n = len(a.order)
    return a.size * (n if a.op == Op.GATHER else 1) == b.size * (n if second == Op.SCATTER else 1)


def _goes_on(exchanges: Rows, a: Instance, b: Instance) -> bool:
    """Whether the root began ``b`` as soon as it had the last input of ``a``.

    A message's way is what a host's reaction is measured by: three times that is more than noise.
    """
    both = exchanges[np.concatenate([a.rows, b.rows])]
    began = np.where(both["offer_ns"] != NEVER, both["offer_ns"], both["data_ns"])
    there = both["arrived_end_ns"]
    known = (began != NEVER) & (there != NEVER)
    part = np.arange(len(both)) < len(a.rows)
    root = a.order[a.root or 0]
    heard, sent = there[part & known & (both["dst"] == root)], began[~part & known & (both["src"] == root)]
    if not len(heard) or not len(sent):
        return False
    return bool(int(sent.min()) - int(heard.max()) <= 3 * float(np.median((there - began)[known])))


def _joined(a: Instance, b: Instance, op: Op) -> Instance:
    assert a.algorithm is not None
    assert b.algorithm is not None
    algorithm = one_after_the_other(a.algorithm, b.algorithm, op)
    return replace(
        a,
        rows=np.sort(np.concatenate([a.rows, b.rows])),
        op=op,
        algorithm=algorithm,
        alternatives=[],
        complete=a.complete and b.complete,
        confidence=min(a.confidence, b.confidence),
    )


@lru_cache(maxsize=256)
def one_after_the_other(a: Algorithm, b: Algorithm, op: Op) -> Algorithm:
    """The schedule of ``a``, then that of ``b``, with the root of both, for a buffer as ``a`` counts it."""

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        last = 0
        for send in schedule(a, n, root):
            last = max(last, send.step)
            yield send._replace(size=send.size * size)
        share = size * n if a.op == Op.GATHER else size / n if b.op == Op.SCATTER else size
        for send in schedule(b, n, root):
            yield send._replace(step=send.step + last + 1, size=send.size * share)

    name = a.name if a.name == b.name else "unknown"
    return Algorithm(op, name, sends, rooted=True)


def scan_rows(exchanges: Rows) -> NDArray[np.int64]:
    """The rows of EXCHANGE that carry a prefix operation's tag."""
    wire = exchanges["wire"]
    ob1 = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (exchanges["op"] == Op.UNKNOWN)
    tags = np.array([tag % (1 << 32) for tag in MPI_SCAN_TAGS], np.uint32)
    return np.flatnonzero(ob1 & np.isin(exchanges["tag"], tags)) if ob1.any() else np.zeros(0, np.int64)


def scan_instances(job: Job, rows: NDArray[np.int64]) -> list[Instance]:
    """The prefix operations among ``rows`` of one communicator; the rest as ``sequenced_instances``."""
    exchanges = job.exchanges
    return [
        replace(instance, op=Op.UNKNOWN, alternatives=[])
        for streams in numbered_streams(exchanges, edge_streams(exchanges, rows)).values()
        for instance in cut_streams(job, streams, Op.BROADCAST)
        if instance.algorithm is not None and (instance.algorithm.name == "chain" or len(instance.order) == 2)
    ]
