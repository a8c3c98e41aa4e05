"""What slots NCCL's receivers announce: the protocol, and whether a ring of Simple, by bytes and addresses.

In: clear-to-send entries. Out: for each number of bytes announced what it is. A slot is an eighth of the
protocol's buffer (src/init.cc computeBuffSizes), two of them for rings of Simple (src/include/collectives.h:
slices of two steps), so that these go round four addresses and all others round eight (NCCL_STEPS). Where
buffers have their default sizes (4 MiB for Simple, LL 512 KiB, LL128 4.7 MiB) the bytes alone tell. Where
NCCL_BUFFSIZE says otherwise the addresses do: what goes round four is a ring of Simple, half as much Simple's
single step. Where no ring of Simple is seen, what goes round eight is taken for such steps, unless it is as
large as slots of LL or LL128 are by default (NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE are in none of NCCL's
documentation). Programs of their own over net_ib (its tests) have other slots, and go round them otherwise.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schema.rows import NONE32, Wire
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

LOOKED: Final = 4 * NCCL_STEPS
"""Entries of a connection that are looked at."""


class Buffer(NamedTuple):
    """``slices``: messages of a ring's chunk, 0 where no ring has such slots."""

    protocol: str
    slices: int


RING: Final = Buffer("simple", 2)
STEP: Final = Buffer("simple", 0)
LINES_OF_8: Final = Buffer("ll", 1)
LINES_OF_120: Final = Buffer("ll128", 1)
DEFAULT: Final[Mapping[int, Buffer]] = MappingProxyType(
    {1 << 20: RING, 1 << 19: STEP, 65_536: LINES_OF_8, 614_400: LINES_OF_120}
)
"""Slots of NCCL's default buffers."""
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
    if set(np.unique(room).tolist()) <= {65_536, 614_400}:
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


def _rounds(
    transfers: Rows, exchanges: Rows, rows: NDArray[np.int64], room: NDArray[np.int64]
) -> tuple[set[int], set[int]]:
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
    for size in np.unique(room[begins]).tolist():
        mine = room[begins] == size
        if 2 * half[mine].sum() > mine.sum():
            four.add(size)
        elif 2 * whole[mine].sum() > mine.sum():
            eight.add(size)
    return four, eight
