"""NCCL's arithmetic: how an operation's bytes become channels, chunks, slices and messages.

Sources (NCCL 2.30): src/init.cc computeBuffSizes, src/enqueue.cc calcCollChunking and
scheduleCollTasksToPlan, src/device/{all_reduce,all_gather,reduce_scatter,broadcast,prims_simple,prims_ll,
prims_ll128}.h, src/include/collectives.h.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dpuflow.wire.nccl import NCCL_STEPS

ELEMENT: Final = 4
"""Bytes of the data type: float."""
KIB: Final = 1024
P2P_CHUNK: Final = 128 * KIB


class Protocol(NamedTuple):
    """One of NCCL's protocols."""

    name: str
    number: int
    slot: int  # bytes of a staging slot on the wire
    data: int  # bytes of data in one
    chunk_steps: int  # of ring all_reduce, all_gather, reduce_scatter
    slice_steps: int
    share: int  # all_reduce: bytes below which no further channel is used (scheduleCollTasksToPlan)
    threads: int
    threshold: int  # bytes a thread and channel (comm.h)

    def wire(self, size: int) -> int:
        """Bytes on the wire of ``size`` bytes of data."""
        if self.name == "ll":
            return 16 * -(-size // 8)
        if self.name == "ll128":
            return 2048 * -(-size // 1920)
        return size


PROTOCOLS: Final = {
    "simple": Protocol("simple", 2, 512 * KIB, 512 * KIB, 4, 2, 16 * KIB, 512, 64),
    "ll": Protocol("ll", 0, 64 * KIB, 32 * KIB, 1, 1, 4 * KIB, 512, 8),
    "ll128": Protocol("ll128", 1, 614_400, 576_000, 1, 1, 16 * KIB, 640, 8),
}


def protocols(simple: int, ll: int, ll128: int) -> dict[str, Protocol]:
    """Those with buffers of so many bytes (computeBuffSizes)."""
    slots = {"simple": simple // NCCL_STEPS, "ll": ll // NCCL_STEPS, "ll128": ll128 // NCCL_STEPS}
    # Of LL's slot half is data, of LL128's fifteen sixteenths, in whole grains.
    data = {"simple": slots["simple"], "ll": slots["ll"] // 2, "ll128": slots["ll128"] // 2048 * 1920}
    return {name: each._replace(slot=slots[name], data=data[name]) for name, each in PROTOCOLS.items()}


def round_up(value: int, unit: int) -> int:
    """The next multiple."""
    return -(-value // unit) * unit


def channels_for(protocol: Protocol, size: int, ranks: int, most: int, ring: bool) -> int:
    """Channels that NCCL uses for ``size`` bytes, at most ``most`` (topoGetAlgoInfo)."""
    threshold = protocol.threshold * (ranks if ring and protocol.name == "ll" else 1)
    count = most
    while count > 1 and size < count * protocol.threads * threshold:
        count -= 1
    return count


def deal(size: int, channels: int, cell: int) -> list[int]:
    """``size`` bytes over at most ``channels`` channels in whole cells; the last gets what is left."""
    cell = round_up(cell, 16)
    cells = -(-size // cell)
    each = min(cells, -(-max(cell, -(-size // channels)) // cell))
    shares: list[int] = []
    while size > 0 and len(shares) < channels:
        share = size if len(shares) == channels - 1 else min(size, each * cell)
        shares.append(share)
        size -= share
    return shares


def slices(chunk: int, protocol: Protocol, chunk_steps: int, slice_steps: int) -> tuple[int, ...]:
    """The slices of one chunk, bytes of data; all are sent, empty ones too (prims_simple.h genericOp)."""
    if protocol.name != "simple":
        return (chunk,)
    per_chunk = chunk_steps // slice_steps
    elements = chunk // ELEMENT
    size = max(-(-elements // (16 * per_chunk)) * 16, protocol.slot * slice_steps // ELEMENT // 32)
    found = []
    for _ in range(per_chunk):
        found.append(min(size, elements) * ELEMENT)
        elements -= min(size, elements)
    return tuple(found)


def ring_chunks(size: int, ranks: int, protocol: Protocol) -> list[list[int]]:
    """For each loop of a ring all_reduce over ``size`` bytes of one channel: the chunk of each position."""
    unit = protocol.data * protocol.chunk_steps
    loops = []
    at = 0
    while at < size:
        left = size - at
        chunk = min(unit, round_up(-(-(left // ELEMENT) // ranks) * ELEMENT, 16))
        loops.append([max(0, min(chunk, left - i * chunk)) for i in range(ranks)])
        at += ranks * unit
    return loops


def block_chunks(size: int, protocol: Protocol, chunk_steps: int) -> list[int]:
    """The chunks of a block that goes round whole (all_gather, reduce_scatter, broadcast, reduce, tree)."""
    unit = protocol.data * chunk_steps
    return [min(unit, size - at) for at in range(0, size, unit)]


def p2p_parts(size: int, channels: int) -> list[int]:
    """A send to one peer over at most ``channels`` channels: parts of about 128 KiB, at least 64 KiB."""
    count = 1
    while 2 * count <= channels and size > count * P2P_CHUNK and size // (2 * count) >= P2P_CHUNK // 2:
        count *= 2
    part = max(4096, round_up(-(-size // count), 4096))
    return [min(part, size - at) for at in range(0, size, part)] or [0]


def p2p_chunks(size: int, most: int = P2P_CHUNK) -> list[int]:
    """The messages of one part of a send to one peer (addP2pToPlan), of ``most`` bytes at most."""
    unit = min(most, 32 * KIB if size < 128 * KIB else 64 * KIB if size < 1024 * KIB else P2P_CHUNK)
    return [min(unit, size - at) for at in range(0, size, unit)] or [0]
