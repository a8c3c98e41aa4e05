"""Rings of NCCL's net_ib, cut where its clear-to-send entries say that an operation begins.

In: the streams of one channel and what each message's clear-to-send entry announced. Out: collectives, or
None where the channel carries something else. Two facts of NCCL's transport carry this, no pause and no
guess of sizes (NCCL 2.30, src/proxy.cc ProxyAppend, src/transport/net.cc recvProxyProgress,
src/enqueue.cc calcCollChunking, src/device/all_reduce.h):

- A connection takes up an operation when the one before it is done there. So the entry for an operation's
  first message comes after the last message before it has arrived. Within an operation entries run ahead by
  the slots of the buffer.
- A ring goes round in loops. In each a rank's chunk fills the slots that are announced, but for the last
  loop: what is left is cut into equal chunks, rounded up (16 bytes), so that the last chunks are shorter,
  or empty. All ranks send the same chunk with the same sizes. Empty slices are sent as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.collectives.model import Instance, placed
from dpuflow.collectives.schedules import ALGORITHMS
from dpuflow.collectives.streams import HOLE
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.collectives.schedules import Algorithm
    from dpuflow.collectives.sending import Send
    from dpuflow.collectives.streams import Columns, Streams
    from dpuflow.tables import Rows

EXPLAINED = 0.9
"""What leaves more than a tenth of a channel's messages over has not understood it."""


class Protocol(NamedTuple):
    """How a chunk becomes messages: so many a chunk, each at most ``slot`` bytes."""

    name: str
    slices: int
    slot: int


PROTOCOLS: Final = {
    protocol.slot: protocol
    for protocol in (Protocol("simple", 2, 1 << 20), Protocol("ll", 1, 65_536), Protocol("ll128", 1, 614_400))
}
"""By what a clear-to-send entry of a ring announces (src/init.cc computeBuffSizes; Simple: two steps of an
eighth of 4 MiB). Other sizes of buffers say nothing of the protocol."""


@dataclass
class _Ring:
    """A channel whose connections make one ring: messages by position of their sender and number."""

    order: list[int]  # endpoints along the ring
    rows: NDArray[np.int64]  # (ranks, messages)
    sizes: NDArray[np.int64]
    begins: NDArray[np.int64]  # numbers at which an operation may begin, the end as the last
    protocol: Protocol


def cut_rings(
    exchanges: Rows,
    columns: Columns,
    streams: Streams,
    announced: NDArray[np.int64],
    position: NDArray[np.int64],
    near: frozenset[int] | None,
) -> list[Instance] | None:
    """The collectives of one channel, where it is a ring of NCCL whose clear-to-send entries were seen.

    ``announced``: bytes that the entry of each row of ``exchanges`` allowed, 0 where it was not seen;
    ``position`` and ``near`` as in ``structured``.
    """
    ring = _ring(exchanges, columns, streams, announced, position)
    if ring is None:
        return None
    found: list[Instance] = []
    at, last = 0, len(ring.begins) - 1
    while at < last:
        # A receiver that is slow everywhere at once may look like a beginning: then the parts fit nothing.
        for end in range(at + 1, last + 1):
            instance = _collective(ring, int(ring.begins[at]), int(ring.begins[end]), columns)
            if instance is not None:
                found.append(placed(instance, near))
                break
        at = end if instance is not None else at + 1
    told = sum(len(instance.rows) for instance in found)
    once = len(ring.order) == 2 and ring.protocol.slices == 1
    if once and any(i.op == Op.ALL_GATHER for i in found) and _answers(columns, ring):
        return None  # a tree of two ranks sends one message each way as well
    return found if found and told >= EXPLAINED * streams.count else None


def _ring(
    exchanges: Rows,
    columns: Columns,
    streams: Streams,
    announced: NDArray[np.int64],
    position: NDArray[np.int64],
) -> _Ring | None:
    after = dict(streams.edges)
    n = len(streams.edges)
    start = min(after, key=lambda end: int(position[end]))
    order = [start]
    while (end := after.get(order[-1])) is not None and end not in order:
        order.append(end)
    if n < 2 or len(after) != n or len(order) != n or end != start:
        return None
    parts = [rows for _, rows in streams.left()]
    if len(parts) != n or any((rows == HOLE).any() for rows in parts):
        return None
    number = dict(zip(streams.edges, range(n), strict=True))
    parts = [parts[number[edge]] for edge in zip(order, [*order[1:], start], strict=True)]
    # The entries are counted from 1 on every connection; all of a ring carry the same messages.
    indices = [exchanges["sub"][rows].astype(np.int64) for rows in parts]
    if any(index[0] < 1 or (np.diff(index) != 1).any() for index in indices):
        return None
    first, stop = max(int(index[0]) for index in indices), min(int(index[-1]) + 1 for index in indices)
    if stop <= first:
        return None
    rows = np.stack(
        [
            part[first - int(index[0]) : stop - int(index[0])]
            for part, index in zip(parts, indices, strict=True)
        ]
    )
    slots = np.unique(announced[rows])
    protocol = PROTOCOLS.get(int(slots[-1]))
    if protocol is None or slots[0] not in (0, protocol.slot):
        return None
    begins = _begins(exchanges, rows)
    ends_alike = all(int(index[-1]) + 1 == stop for index in indices)
    places = np.flatnonzero(begins)
    if first > 1 and len(places) and places[0] == 0:
        places = places[1:]  # the capture began within an operation
    if ends_alike:
        places = np.r_[places, stop - first]
    return _Ring(order, rows, columns.sizes[rows], places, protocol)


def _answers(columns: Columns, ring: _Ring) -> bool:
    """Whether one of two ranks always waits for the other's data."""
    starts, arrivals = columns.starts[ring.rows], columns.arrivals[ring.rows]
    first = ring.begins[ring.begins < ring.rows.shape[1]]
    waits = starts[:, first] > arrivals[::-1, first]
    return bool((waits.mean(axis=1) >= EXPLAINED).any())


def _begins(exchanges: Rows, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether an operation may begin with each number: on all connections the entry waited for what was."""
    granted, arrived = exchanges["grant_ns"][rows[:, 1:]], exchanges["arrived_end_ns"][rows[:, :-1]]
    unknown = (granted == NEVER) | (arrived == NEVER)
    waited = ((granted > arrived) | unknown).all(axis=0) & ~unknown.all(axis=0)
    return np.asarray(np.r_[True, waited], bool)


def _collective(ring: _Ring, begin: int, end: int, columns: Columns) -> Instance | None:
    """What the messages from ``begin`` up to ``end`` of every connection are, None if no one operation."""
    n, protocol = len(ring.order), ring.protocol
    sizes = ring.sizes[:, begin:end]
    per_round = (n - 1) * protocol.slices
    if sizes.shape[1] % per_round or sizes.max() > protocol.slot:
        return None
    rounds = sizes.shape[1] // per_round
    # (ranks, rounds of n - 1 chunks, chunks, slices)
    chunks = sizes.reshape(n, rounds, n - 1, protocol.slices)
    if protocol.slices == 2 and (chunks[..., 1] > chunks[..., 0]).any():
        return None
    reduced = _reduced(chunks, protocol) if rounds % 2 == 0 else None
    if reduced is not None:
        op, loops, buffer = Op.ALL_REDUCE, rounds // 2, reduced
    elif (gathered := _gathered(chunks, protocol)) is not None:
        op, loops, buffer = Op.ALL_GATHER, rounds, gathered
    else:
        return None
    rows = ring.rows[:, begin:end].ravel()
    rows = rows[np.argsort(columns.starts[rows], kind="stable")]
    return Instance(rows, op, list(ring.order), looped_ring(op, loops), size=buffer)


def _full(chunks: NDArray[np.int64], protocol: Protocol) -> bool:
    """Whether all loops but the last fill their slots."""
    return bool((chunks == protocol.slot).all())


def _reduced(chunks: NDArray[np.int64], protocol: Protocol) -> int | None:
    """The buffer as on the wire, bytes, if these are an all_reduce's chunks: twice round a loop."""
    n, rounds = chunks.shape[:2]
    loops = rounds // 2
    loop = chunks.reshape(n, loops, 2 * (n - 1), protocol.slices)
    if not _full(loop[:, :-1], protocol):
        return None
    # In step k rank p sends chunk p - 1 - k.
    label = (np.arange(n)[:, None] - 1 - np.arange(2 * (n - 1))) % n
    tail = np.full((n, protocol.slices), -1)
    tail[label] = loop[:, -1]
    if (tail[label] != loop[:, -1]).any() or not _rounded(tail.sum(axis=1)):
        return None
    full: int = (loops - 1) * n * protocol.slices * protocol.slot
    return full + int(tail.sum())


def _rounded(chunks: NDArray[np.int64]) -> bool:
    """Whether chunks, by ring position, are equal but for one shorter one and empty ones."""
    full = chunks == chunks.max()
    return bool(chunks.max() > 0 and (~full & (chunks > 0)).sum() <= 1)


def _gathered(chunks: NDArray[np.int64], protocol: Protocol) -> int | None:
    """One rank's block as on the wire, bytes, if these are an all_gather's chunks: all the same in a loop."""
    alike = (chunks == chunks[:1, :, :1]).all()
    if not alike or not _full(chunks[:, :-1], protocol) or not chunks[0, -1, 0, 0]:
        return None
    return int(chunks[0, :, 0].sum())


@lru_cache(maxsize=256)
def looped_ring(op: Op, loops: int) -> Algorithm:
    """The ring of ``op``, gone round for each of ``loops`` parts of the buffer, one after the other."""
    base = next(a for a in ALGORITHMS if a.op == op and a.name == "ring")
    if loops == 1:
        return base

    def sends(n: int, size: float, root: int) -> Iterator[Send]:
        steps = 1 + max(send.step for send in base.sends(n, size, root))
        for loop in range(loops):
            for send in base.sends(n, size / loops, root):
                yield send._replace(step=loop * steps + send.step)

    return replace(base, sends=sends)
