"""EXCHANGE rows in, collectives out: what belongs together, and what operation and algorithm it is.

Message structure decides, never idle gaps: tags where the library counts its collectives
(``tagged``), counts, sizes and order where it does not (``sequenced``; RoCE: ``structured``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.buffers import DEFAULT
from dpuflow.matching.model import Instance
from dpuflow.matching.partial import mark_at_once
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, Op, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.identity.processes import Ends
    from dpuflow.matching.buffers import Buffer
    from dpuflow.schema.tables import Rows

__all__ = ["Instance", "build_collectives", "count_untold"]


def build_collectives(
    exchanges: Rows,
    position: NDArray[np.int64],
    near: frozenset[int] | None = None,
    announced: NDArray[np.int64] | None = None,
    nodes: NDArray[np.int64] | None = None,
    until: NDArray[np.int64] | None = None,
    buffers: Mapping[int, Buffer] = DEFAULT,
    asked: NDArray[np.int64] | None = None,
    ends: Ends | None = None,
) -> list[Instance]:
    """Group exchanges into collectives, in order of their start.

    ``position`` gives for each endpoint its place in the default numbering of ranks (a rank named
    by the library or a rank map, else the order of addresses). ``near``: the endpoints all of whose
    messages were captured, None for everyone.
    ``announced``, ``nodes``, ``until``, ``buffers`` and ``asked``: see ``structured_instances``.
    ``ends``: who is at both ends of each connection, where processes may share addresses.
    """
    from dpuflow.matching.calls import rounds_of_everyone
    from dpuflow.matching.composed import composed
    from dpuflow.matching.credited import EXPLAINED
    from dpuflow.matching.puts import put_instances, without_pages
    from dpuflow.matching.repeated import repeated_instances
    from dpuflow.matching.scans import scan_instances, scan_rows
    from dpuflow.matching.sequenced import cut_streams, sequenced_instances
    from dpuflow.matching.sessions import sessions
    from dpuflow.matching.sockets import socket_instances
    from dpuflow.matching.streams import columns_of, edge_streams
    from dpuflow.matching.structured import structured_instances
    from dpuflow.matching.tagged import tagged_instances

    EXCHANGE.check(exchanges)
    op, wire = np.ascontiguousarray(exchanges["op"]), np.ascontiguousarray(exchanges["wire"])
    told = (op != Op.UNKNOWN) & (op != Op.SEND_RECV)
    gloo = told & (wire >= Wire.GLOO_DATA) & (wire <= Wire.GLOO_RECV_READY)
    instances: list[Instance] = []
    for rows in sessions(exchanges, np.flatnonzero(gloo)):
        instances.extend(tagged_instances(exchanges, rows, position, near, ends))
    for communicator in _communicators(exchanges, np.flatnonzero(told & ~gloo)):
        for rows in sessions(exchanges, communicator):
            read = sequenced_instances(exchanges, rows, position, near, ends)
            instances.extend(composed(exchanges, read))
    for unnamed in _unnamed(exchanges, op, wire):
        cut = cut_streams(
            columns_of(exchanges), edge_streams(exchanges, unnamed), Op.UNKNOWN, position, near=near
        )
        whole = sum(len(instance.rows) for instance in cut if instance.complete)
        understood = whole >= EXPLAINED * len(unnamed)
        instances.extend(cut if understood else repeated_instances(exchanges, unnamed, position))
    for communicator in _communicators(exchanges, scan_rows(exchanges)):
        for rows in sessions(exchanges, communicator):
            instances.extend(scan_instances(exchanges, rows, position, near))
    # SENDs are left out: they carry a library's own protocol beside the data.
    written = (wire == Wire.ROCE_WRITE) | (wire == Wire.ROCE_WRITE_IMM)
    written &= exchanges["data_ns"] != NEVER
    puts, rest = put_instances(exchanges, np.flatnonzero(written & ~told), position, near)
    instances.extend(puts)
    rest = without_pages(exchanges, rest)
    instances.extend(
        structured_instances(exchanges, rest, position, near, announced, nodes, until, buffers, asked)
    )
    places = np.arange(len(position)) if nodes is None else nodes
    sent = np.flatnonzero((wire == Wire.NCCL_DATA) & (exchanges["data_ns"] != NEVER))
    streamed, unread = socket_instances(exchanges, sent, position, near, places)
    instances.extend(streamed)
    bursts = np.union1d(np.flatnonzero(wire == Wire.TCP_BURST), unread)
    instances.extend(repeated_instances(exchanges, bursts, position))
    for communicator in _communicators(exchanges, np.flatnonzero(op == Op.SEND_RECV)):
        rounds, alone = rounds_of_everyone(exchanges, communicator, position)
        instances.extend([*rounds, *_send_recv(exchanges, alone)])
    if near is not None:
        for instance in instances:
            instance.near = near
        mark_at_once(exchanges, instances, near)
    instances.sort(key=lambda instance: int(instance.rows[0]))
    return instances


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


def _unnamed(exchanges: Rows, op: NDArray[np.uint8], wire: NDArray[np.uint8]) -> list[NDArray[np.int64]]:
    """Messages of connections that a library frames, but whose tags were not captured: what is connected."""
    tagged = np.flatnonzero((wire == Wire.TAGGED) | (wire == Wire.TAGGED_DONE))
    named = np.unique(exchanges["connection"][tagged[op[tagged] != Op.UNKNOWN]])
    mine = tagged[~np.isin(exchanges["connection"][tagged], named)]
    return _communicators(exchanges, mine) if len(mine) else []


def _communicators(exchanges: Rows, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """``rows`` by communicator: those with one context whose endpoints are connected.

    Communicators that were split from one parent share the context number, not the endpoints.
    """
    found: list[NDArray[np.int64]] = []
    for context in np.unique(exchanges["context"][rows]):
        mine = rows[exchanges["context"][rows] == context]
        src, dst = exchanges["src"][mine].astype(np.int64), exchanges["dst"][mine].astype(np.int64)
        pairs = np.unique(np.stack([src, dst], axis=1), axis=0).tolist()
        label = np.zeros(max(src.max(), dst.max()) + 1, np.int64)
        for number, edges in enumerate(connected(pairs, lambda pair: pair)):
            label[np.unique(edges)] = number
        found.extend(mine[label[src] == number] for number in range(label.max() + 1))
    return found


def _send_recv(exchanges: Rows, rows: NDArray[np.int64]) -> list[Instance]:
    """Each transfer outside any collective, as a collective of two."""
    picked = exchanges[rows]
    return [
        Instance(np.array([row]), Op.SEND_RECV, [src, dst], None, [], None, size)
        for row, src, dst, size in zip(
            rows, picked["src"].tolist(), picked["dst"].tolist(), picked["bytes"].tolist(), strict=True
        )
    ]
