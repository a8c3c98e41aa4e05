"""EXCHANGE rows in, collectives out: what belongs together, and what operation and algorithm it is.

Message structure decides, never idle gaps: tags where the library counts its collectives
(``tagged``), counts, sizes and order where it does not (``sequenced``; RoCE: ``structured``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import distinct, is_in
from dpuflow.matching.model import MOST, Instance, Job
from dpuflow.matching.recognise import mark_at_once
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, Op, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from numpy.typing import NDArray

    from dpuflow.arrays import Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.schema.tables import Rows

__all__ = ["Instance", "Job", "build_collectives", "count_untold"]


FEWEST_WHOLE: Final = 4
"""Collectives from which on it is known who the ranks of a job are."""
FEW_RANKS: Final = 3
"""All trees of so many ranks look alike: a path. NCCL's double tree over more has edges of its own."""


def build_collectives(job: Job) -> list[Instance]:
    """Group exchanges into collectives, in order of their start."""
    from dpuflow.matching.calls import put_instances, rounds_of, without_pages
    from dpuflow.matching.enclosing import without_enclosing
    from dpuflow.matching.program import composed, read_unnamed
    from dpuflow.matching.repeated import repeated_instances
    from dpuflow.matching.sequenced import cut_streams, scan_instances, scan_rows, sequenced_instances
    from dpuflow.matching.sockets import socket_instances
    from dpuflow.matching.streams import edge_streams, sessions
    from dpuflow.matching.structured import structured_instances
    from dpuflow.matching.tagged import nonblocking_rows, tagged_instances

    exchanges = job.exchanges
    EXCHANGE.check(exchanges)
    op, wire = np.ascontiguousarray(exchanges["op"]), np.ascontiguousarray(exchanges["wire"])
    told = (op != Op.UNKNOWN) & (op != Op.SEND_RECV)
    gloo = told & (wire >= Wire.GLOO_DATA) & (wire <= Wire.GLOO_RECV_READY)
    instances: list[Instance] = []
    for rows in sessions(exchanges, np.flatnonzero(gloo)):
        instances.extend(tagged_instances(job.of(rows), rows))
    for communicator in _communicators(exchanges, np.flatnonzero(told & ~gloo)):
        for rows in sessions(exchanges, communicator):
            read = sequenced_instances(job.of(rows), rows)
            instances.extend(composed(exchanges, read))
    for unnamed in _unnamed(exchanges, op, wire):
        own = job.of(unnamed)
        cut = cut_streams(own, edge_streams(exchanges, unnamed), Op.UNKNOWN)
        if own.near is None and _told(cut) < MOST * len(unnamed):
            cut = read_unnamed(own, unnamed)
        instances.extend(cut if _told(cut) >= MOST * len(unnamed) else repeated_instances(own, unnamed))
    for communicator in _communicators(exchanges, nonblocking_rows(exchanges)):
        for rows in sessions(exchanges, communicator):
            instances.extend(tagged_instances(job.of(rows), rows))
    for communicator in _communicators(exchanges, scan_rows(exchanges)):
        for rows in sessions(exchanges, communicator):
            instances.extend(scan_instances(job.of(rows), rows))
    # SENDs are left out: they carry a library's own protocol beside the data.
    written = (wire == Wire.ROCE_WRITE) | (wire == Wire.ROCE_WRITE_IMM)
    written &= exchanges["data_ns"] != NEVER
    puts, rest = put_instances(job, np.flatnonzero(written & ~told))
    instances.extend(puts)
    rest = without_pages(exchanges, rest)
    instances.extend(structured_instances(job.of(rest), rest))
    sent = np.flatnonzero((wire == Wire.NCCL_DATA) & (exchanges["data_ns"] != NEVER))
    streamed, unread = socket_instances(job, sent)
    instances.extend(streamed)
    bursts = _among_ranks(exchanges, np.flatnonzero(wire == Wire.TCP_BURST), instances)
    instances.extend(repeated_instances(job, distinct(np.concatenate([bursts, unread]))))
    for communicator in _communicators(exchanges, np.flatnonzero(op == Op.SEND_RECV)):
        rounds, alone = rounds_of(job, communicator)
        instances.extend([*rounds, *_send_recv(exchanges, alone)])
    instances = without_enclosing(job, instances)
    _tell_views(job, instances)
    instances.sort(key=lambda instance: int(instance.rows[0]))
    return instances


def _among_ranks(exchanges: Rows, bursts: Ints, instances: Sequence[Instance]) -> Ints:
    """``bursts`` but those between a rank of whole collectives and an endpoint that is in none of them, nor
    speaks with another such one: so clients speak with a service, over and over again, too."""
    whole = Counter(end for instance in instances if instance.complete for end in instance.order)
    ranks = [end for end, count in whole.items() if count >= FEWEST_WHOLE]
    src, dst = (is_in(exchanges[end][bursts], ranks) for end in ("src", "dst"))
    others = bursts[~src & ~dst]
    peers = distinct([exchanges["src"][others], exchanges["dst"][others]])
    theirs = is_in(np.where(src, exchanges["dst"][bursts], exchanges["src"][bursts]), peers)
    among: Ints = bursts[(src == dst) | theirs]
    return among


def _tell_views(job: Job, instances: list[Instance]) -> None:
    """Tell each collective which of its ranks were captured, and whether it is whole."""
    if job.near is not None:
        for instance in instances:
            if instance.placement.seats or not job.near.issuperset(instance.order):
                instance.view = replace(instance.view, near=job.near)
        mark_at_once(job, instances, job.near)
    if job.but_one is not None:
        for instance in instances:
            if _may_go_on(instance, job.but_one):
                instance.view = replace(instance.view, near=job.but_one)
    for instance in instances:
        if instance.algorithm is None and instance.op != Op.SEND_RECV and _ends_before(job, instance):
            instance.complete = False


def _ends_before(job: Job, instance: Instance) -> bool:
    """Whether the capture of one of its ranks had ended before: nobody knows what of it is missing then."""
    if job.until is None:
        return False
    until, began = job.until[instance.order], job.exchanges["data_ns"][instance.rows].min()
    return bool(((until != NEVER) & (until < began)).any())


def _may_go_on(instance: Instance, own: Set[int]) -> bool:
    """Whether the tree or chain may go on behind a rank that has no capture (all but ``own``): of three ranks
    or fewer any edges make one."""
    known = instance.algorithm
    tree = known is not None and (known.rooted or known.name == "tree")
    return tree and len(instance.order) <= FEW_RANKS and not own >= set(instance.order)


def count_untold(transfers: Rows | Picked, exchanges: Rows, instances: list[Instance]) -> int:
    """Data messages that are part of no collective."""
    role, wire = transfers["role"], transfers["wire"]
    data = (role == Role.DATA) | (role == Role.BURST)
    part = np.zeros(len(exchanges), bool)
    for instance in instances:
        part[instance.rows] = True
    unnamed = np.flatnonzero((exchanges["data"] != NONE32) & (exchanges["op"] == Op.UNKNOWN))
    # RoCE's are all in exchanges, several in one where NCCL made one of them. Of a put (``flagged``) ``tag``
    # is how many messages it was.
    roce = (wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM)
    kind, told = exchanges["wire"][unnamed], part[unnamed]
    over_roce = (kind >= Wire.ROCE_SEND) & (kind <= Wire.ROCE_SEND_IMM)
    rows, kind = unnamed[over_roce & ~told], kind[over_roce & ~told]
    puts = exchanges["tag"][rows]
    put = (kind == Wire.ROCE_WRITE) & (puts > 1)
    put &= exchanges["grant"][rows] == NONE32  # else it is a message of NCCL without its end
    left = int(np.where(put, puts, 1).sum())
    # One transfer of TCP may have come in several frames; they all count as told.
    frames = data & ~roce & (transfers["op"] == Op.UNKNOWN)
    return left + int(frames.sum()) - int((told & ~over_roce).sum())


def _unnamed(exchanges: Rows, op: NDArray[np.uint8], wire: NDArray[np.uint8]) -> list[Ints]:
    """Messages of connections that a library frames, but whose tags were not captured: what is connected."""
    tagged = np.flatnonzero((wire == Wire.TAGGED) | (wire == Wire.TAGGED_DONE))
    named = distinct(exchanges["connection"][tagged[op[tagged] != Op.UNKNOWN]])
    mine = tagged[~np.isin(exchanges["connection"][tagged], named)]
    return _communicators(exchanges, mine) if len(mine) else []


def _told(instances: Sequence[Instance]) -> int:
    """Messages of whole collectives."""
    return sum(len(instance.rows) for instance in instances if instance.complete)


def _communicators(exchanges: Rows, rows: Ints) -> list[Ints]:
    """``rows`` by communicator: those with one context whose endpoints are connected.

    Communicators that were split from one parent share the context number, not the endpoints.
    """
    found: list[Ints] = []
    for context in distinct(exchanges["context"][rows]):
        mine = rows[exchanges["context"][rows] == context]
        src, dst = exchanges["src"][mine].astype(np.int64), exchanges["dst"][mine].astype(np.int64)
        pairs = np.unique(np.stack([src, dst], axis=1), axis=0).tolist()
        label = np.zeros(max(src.max(), dst.max()) + 1, np.int64)
        for number, edges in enumerate(connected(pairs, lambda pair: pair)):
            label[distinct(edges)] = number
        found.extend(mine[label[src] == number] for number in range(label.max() + 1))
    return found


def _send_recv(exchanges: Rows, rows: Ints) -> list[Instance]:
    """Each transfer outside any collective, as a collective of two."""
    picked = exchanges[rows]
    return [
        Instance(np.array([row]), Op.SEND_RECV, [src, dst], None, [], None, size)
        for row, src, dst, size in zip(
            rows, picked["src"].tolist(), picked["dst"].tolist(), picked["bytes"].tolist(), strict=True
        )
    ]
