"""All_to_alls that peers put into each other's memory, unasked: experts' dispatch and combine (DeepEP's way).

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

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.levels import MOST
from dpuflow.matching.model import Instance, InstanceView
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.matching.model import Job
    from dpuflow.matching.streams import Edge
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


_DOUBLING: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_REDUCE and a.name == "recursive_doubling")
_LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


def put_instances(job: Job, rows: Ints) -> tuple[list[Instance], Ints]:
    """The all_to_alls among ``rows``, and the rows of none."""
    exchanges = job.exchanges
    put = rows[(exchanges["wire"][rows] == Wire.ROCE_WRITE) & (exchanges["tag"][rows] > 1)]
    if not len(put):
        return [], rows
    found: list[Instance] = []
    for ways in _cliques(_ways(exchanges, put), job.near):
        turns = _turns(exchanges, ways)
        if turns is not None:
            found += _made(job, ways, turns)
    taken = np.concatenate([instance.rows for instance in found]) if found else rows[:0]
    return found, np.setdiff1d(rows, taken, assume_unique=True)


def _ways(exchanges: Rows, rows: Ints) -> dict[Edge, Ints]:
    """Puts by (sender, receiver), in order."""
    order = np.lexsort((exchanges["order"][rows], exchanges["dst"][rows], exchanges["src"][rows]))
    rows = rows[order]
    src, dst = exchanges["src"][rows].astype(np.int64), exchanges["dst"][rows].astype(np.int64)
    cut = np.flatnonzero((np.diff(src) != 0) | (np.diff(dst) != 0)) + 1
    return {
        (int(src[p]), int(dst[p])): part for part, p in zip(np.split(rows, cut), np.r_[0, cut], strict=True)
    }


def _cliques(ways: dict[Edge, Ints], near: frozenset[int] | None) -> Iterator[dict[Edge, Ints]]:
    """Endpoints that are connected, where all that could be seen put to each other."""
    for group in connected(ways, lambda edge: edge):
        members = sorted({end for edge in group for end in edge})
        wanted = {
            (a, b) for a in members for b in members if a != b and (near is None or a in near or b in near)
        }
        if wanted <= ways.keys():
            yield {edge: part for edge, part in ways.items() if edge[0] in members}


def _turns(exchanges: Rows, ways: dict[Edge, Ints]) -> Ints | None:
    """Rows by (way, turn), None where the ways do not go in turns. A capture's edge may cut one turn off."""
    counts = {len(part) for part in ways.values()}
    least = min(counts)
    if max(counts) > least + 1 or not least:
        return None
    even = [part for part in ways.values() if len(part) == least]
    first = np.median([exchanges["data_ns"][part[0]] for part in even])
    chosen = []
    for part in ways.values():
        begin = exchanges["data_ns"][part[: len(part) - least + 1]]
        chosen.append(part[int(np.argmin(np.abs(begin - first))) :][:least])
    turns = np.array(chosen)
    src = np.array([edge[0] for edge in ways])
    dst = np.array([edge[1] for edge in ways])
    begins, ends = exchanges["data_ns"][turns], exchanges["arrived_end_ns"][turns]
    if least == 1:
        return turns
    kept = []
    for end in np.unique(src).tolist():
        into = ends[dst == end]
        if not len(into):
            continue
        ready = np.where(into == NEVER, NEVER, into).max(axis=0)[:-1]
        kept.append((begins[src == end].min(axis=0)[1:] >= ready).mean())
    return turns if kept and np.mean(kept) >= MOST else None


def _made(job: Job, ways: dict[Edge, Ints], turns: Ints) -> Iterator[Instance]:
    exchanges, members = job.exchanges, job.ordered(end for edge in ways for end in edge)
    n = len(members)
    cut = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP
    # Two that always put as much to each other make what one step of a doubling is.
    steps = n == 2 and bool((exchanges["bytes"][turns[0]] == exchanges["bytes"][turns[-1]]).all())
    for rows in turns.T:
        sizes = exchanges["bytes"][rows].astype(np.int64)
        even = bool((sizes == sizes[0]).all())
        whole = not bool((exchanges["flags"][rows] & cut).any())
        yield Instance(
            rows[np.argsort(exchanges["data_ns"][rows], kind="stable")],
            Op.ALL_REDUCE if steps else Op.ALL_TO_ALL,
            list(members),
            _DOUBLING if steps else _LINEAR,
            size=int(sizes[0]) * (1 if steps else n) if even else None,
            complete=whole,
            view=InstanceView(job.near),
            alike=_same_packets(even, steps),
        )


def _same_packets(even: bool, steps: bool) -> tuple[Op, ...]:
    """Operations that would look the same."""
    others = (Op.ALL_GATHER, Op.REDUCE_SCATTER) if even else ()
    return (Op.ALL_TO_ALL, *others) if steps else others


LEAST: Final = 512
"""Bytes: NCCL's clear-to-send writes are no larger (eight entries of 64)."""


def without_pages(exchanges: Rows, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``rows`` without unannounced WRITEs from who is never written to like that to who never writes so."""
    plain = rows[exchanges["wire"][rows] == Wire.ROCE_WRITE]
    plain = plain[(exchanges["grant"][plain] == NONE32) & (exchanges["tag"][plain] == 0)]
    plain = plain[exchanges["op"][plain] == Op.UNKNOWN]
    if not len(plain):
        return rows
    wire = np.ascontiguousarray(exchanges["wire"])
    connection = exchanges["connection"].astype(np.int64)
    size = int(connection.max()) + 1
    sends = np.isin(wire, (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)) & (exchanges["data_ns"] != NEVER)
    told = np.bincount(connection[sends], minlength=size) >= np.bincount(connection[plain], minlength=size)
    told |= np.bincount(connection, wire == Wire.ROCE_WRITE_IMM, size) > 0
    plain = plain[~told[connection[plain]] & (exchanges["bytes"][plain] > LEAST)]
    one_way = ~np.isin(exchanges["src"][plain], exchanges["dst"][plain])
    one_way &= ~np.isin(exchanges["dst"][plain], exchanges["src"][plain])
    return np.setdiff1d(rows, plain[one_way], assume_unique=True)
