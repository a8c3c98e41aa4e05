"""What slots NCCL's receivers announce: the protocol, and whether a ring of Simple, by bytes and addresses.

In: clear-to-send entries. Out: for each number of bytes announced what it is. A slot is an eighth of the
protocol's buffer (src/init.cc computeBuffSizes), two of them for rings of Simple (src/include/collectives.h:
slices of two steps), so that these go round four addresses and all others round eight (NCCL_STEPS). Where
buffers have their default sizes (4 MiB for Simple, LL 512 KiB, LL128 4.7 MiB) the bytes alone tell. Where
NCCL_BUFFSIZE says otherwise the addresses do: what goes round four is a ring of Simple, half as much Simple's
single step. Where no ring of Simple is seen, what goes round eight is taken for such steps, unless it is as
large as slots of LL or LL128 are by default (NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE are in none of NCCL's
documentation). Programs of their own over net_ib (its tests) have other slots, and go round them otherwise.

Instances get their protocol and the size of their data from that: LL and LL128 fill messages with lines of
data and flags. Where it cannot be told, sizes stay those on the wire.

GPUs that share an adapter are told apart by the ranks that entries name: an entry's tag is the rank whose
data it asks for, whichever adapter sends it (src/transport/net.cc recvProxyProgress). It ends 94 to 126 bytes
into an IPv4 frame, by version: shorter records do not hold it.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.schema.rows import NONE32, Op, Wire
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Instance
    from dpuflow.schema.tables import Rows


LOOKED: Final = 4 * NCCL_STEPS
"""Entries of a connection that are looked at."""


class Buffer(NamedTuple):
    """``slices``: messages of a ring's chunk, 0 where no ring has such slots; ``line``: bytes that are sent
    whole, and ``held`` those of data in them (two words with a flag each, a warp's lines: prims_ll.h,
    prims_ll128.h), 0 without flags."""

    protocol: str
    slices: int
    line: int = 0
    held: int = 0

    def data(self, size: int) -> int:
        """The bytes of data at most in so many on the wire."""
        return size // self.line * self.held


RING: Final = Buffer("simple", 2)
STEP: Final = Buffer("simple", 0)
LINES_OF_8: Final = Buffer("ll", 1, 16, 8)
LINES_OF_120: Final = Buffer("ll128", 1, 2048, 1920)
RING_SLOT: Final = 1 << 20
"""What an entry of a Simple ring announces by default: two steps, each an eighth of 4 MiB."""
STEP_SLOT: Final = 1 << 19
"""The same for all other collectives: one step."""
LL: Final = 65_536
LL128: Final = 614_400
"""The same of these protocols' buffers (NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE)."""
DEFAULT: Final[Mapping[int, Buffer]] = MappingProxyType(
    {RING_SLOT: RING, STEP_SLOT: STEP, LL: LINES_OF_8, LL128: LINES_OF_120}
)
"""Slots of NCCL's default buffers."""
MOST_OF_LL: Final = 16_384
"""Bytes of data of a send by LL, at most: larger ones may have chunks of as many bytes as a slot of LL
(NCCL_P2P_LL_THRESHOLD, src/enqueue.cc)."""
CHUNKS: Final = (131_072, 262_144)
"""What entries of point-to-point buffers announce: NCCL_P2P_NET_CHUNKSIZE (src/init.cc computeBuffSizes),
twice as much on Arm with Blackwell."""


def buffers_of(transfers: Rows, exchanges: Rows) -> Mapping[int, Buffer]:
    """What each number of bytes is that was announced by entries for NCCL's messages."""
    rows = np.flatnonzero(
        (exchanges["wire"] == Wire.ROCE_WRITE_IMM)
        & (exchanges["grant"] != NONE32)
        & (exchanges["order"] < LOOKED)
    )
    room = transfers["announces"][exchanges["grant"][rows]].astype(np.int64)
    rows, room = rows[room > 0], room[room > 0]
    if set(distinct(room).tolist()) <= {LL, LL128}:
        return DEFAULT
    four, eight = _rounds(transfers, exchanges, rows, room)
    steps = {size // 2 for size in four} or {size for size in eight if size not in CHUNKS}
    # All of a job has one size of buffers.
    simple = {size for size, kind in DEFAULT.items() if kind.protocol == "simple"}
    if not four and not steps - (DEFAULT.keys() - {max(simple)}):
        return DEFAULT
    found = {size: kind for size, kind in DEFAULT.items() if kind.protocol != "simple"}
    found.update({2 * size: RING for size in steps if size not in found})
    found.update({size: STEP for size in steps if size not in found})
    return found


def _rounds(transfers: Rows, exchanges: Rows, rows: Ints, room: Ints) -> tuple[set[int], set[int]]:
    """Bytes announced whose addresses mostly come round after four slots in a row, and after eight."""
    line = 2 * exchanges["connection"][rows].astype(np.int64)
    line += exchanges["src"][rows] > exchanges["dst"][rows]
    va = transfers["va"][exchanges["grant"][rows]]
    known = va > 0
    line, va, room = line[known], va[known], room[known]
    order = np.lexsort((va, room, line))
    line, va, room = line[order], va[order], room[order]
    begins = np.flatnonzero(np.r_[True, (line[1:] != line[:-1]) | (room[1:] != room[:-1])][: len(line)])
    if not len(begins):
        return set(), set()
    other = np.r_[True, va[1:] != va[:-1]]
    other[begins] = True
    ends = np.r_[begins[1:], len(line)]
    count, places = ends - begins, np.add.reduceat(other, begins)
    in_row = va[ends - 1] - va[begins] == ((places - 1) * room[begins]).astype(np.uint64)
    half = (count > NCCL_STEPS // 2) & (places == NCCL_STEPS // 2) & in_row
    whole = (count > NCCL_STEPS) & (places == NCCL_STEPS) & in_row
    four, eight = set(), set()
    for size in distinct(room[begins]).tolist():
        mine = room[begins] == size
        if 2 * half[mine].sum() > mine.sum():
            four.add(size)
        elif 2 * whole[mine].sum() > mine.sum():
            eight.add(size)
    return four, eight


def without_flags(
    instances: Sequence[Instance], exchanges: Rows, transfers: Rows, buffers: Mapping[int, Buffer] = DEFAULT
) -> list[Instance]:
    """Instances with NCCL's protocol and the size of their data.

    It is half of LL's on the wire, if the last lines are full (8 bytes). LL128's lines hold 1920 bytes each,
    and the last ones are seldom full: there ``size`` is None. ``between`` says what it can be.
    """
    out = []
    for instance in instances:
        rows = instance.rows
        if len(rows) and exchanges["wire"][rows[0]] == Wire.ROCE_WRITE_IMM:
            grants = exchanges["grant"][rows]
            announced = transfers["announces"][grants[grants != NONE32]]
            slot = int(announced.max(initial=0))
            kind = buffers.get(slot) if (announced == slot).all() else None
            if kind == LINES_OF_8 and _sent_bytes(instance) > 2 * MOST_OF_LL:
                kind = STEP
            if kind and not (kind.line and (exchanges["bytes"][rows] % np.uint64(kind.line)).any()):
                instance = _of_data(instance, kind)
        out.append(instance)
    return out


def _sent_bytes(instance: Instance) -> int:
    """How many bytes one rank sends another on the wire by a send of its own; 0 where it does not."""
    ranks = len(instance.order) if instance.op == Op.ALL_TO_ALL else 1
    sends = instance.op in (Op.SEND_RECV, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL)
    return (instance.size or 0) // ranks if sends else 0


def _of_data(instance: Instance, kind: Buffer) -> Instance:
    """The same with the protocol, and bytes of data for those on the wire."""
    slicing = replace(instance.slicing, protocol=kind.protocol)
    if not kind.line or not instance.size:
        return replace(instance, slicing=slicing)
    most, tails = kind.data(instance.size), slicing.tails
    between = (max(most - tails * (kind.held - 1), 1), most) if tails else None
    # LL's lines hold one element of the largest type: mostly they are full.
    size = most if kind == LINES_OF_8 else None
    return replace(instance, slicing=replace(slicing, between=between), size=size)


def sharing_told_apart(instances: Sequence[Instance], exchanges: Rows, transfers: Rows) -> list[Instance]:
    """Collectives of more ranks than endpoints, with ``parts`` where every rank sent something of its own."""
    hidden = [
        i.view.near is None and i.placement.ranks > len(i.order) and not i.view.inside for i in instances
    ]
    if not any(hidden):
        return list(instances)
    return [
        replace(instance, placement=replace(instance.placement, parts=_parts(instance, exchanges, transfers)))
        if several
        else instance
        for instance, several in zip(instances, hidden, strict=True)
    ]


def _parts(instance: Instance, exchanges: Rows, transfers: Rows) -> Ints | None:
    """The rank behind each message, None where not every rank of every endpoint is among them."""
    grants = exchanges["grant"][instance.rows]
    if (grants == NONE32).any():
        return None
    rank: Ints = transfers["tag"][grants].astype(np.int64)
    src = exchanges["src"][instance.rows].astype(np.int64)
    pairs = np.unique(np.stack([src, rank], axis=1), axis=0)
    # A rank is behind one adapter; and all of them are seen. Without a tag all would be rank 0.
    if len(pairs) != instance.placement.ranks or len(distinct(pairs[:, 1])) != instance.placement.ranks:
        return None
    return rank
