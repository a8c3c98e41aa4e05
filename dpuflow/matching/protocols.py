"""Instances of NCCL's collectives in, the same with their protocol and the size of their data out.

NCCL's protocols LL and LL128 fill messages with lines of data and flags. Which one ran is told by the
capacity that clear-to-send entries announce: an eighth of the protocol's buffer, whose default size is a
constant of NCCL (init.cc computeBuffSizes); where buffers were configured otherwise ``buffers`` says what it
is. Where it cannot, sizes stay those on the wire.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.matching.buffers import DEFAULT
from dpuflow.schema.rows import NONE32, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.model import Instance
    from dpuflow.schema.tables import Rows

LL: Final = 65_536
LL128: Final = 614_400
"""Capacities announced: an eighth of the default buffers (NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE)."""
RING_SLOT: Final = 1 << 20
"""What an entry of a Simple ring announces by default: two steps, each an eighth of 4 MiB."""
STEP_SLOT: Final = 1 << 19
"""The same for all other collectives: one step."""
LINES: Final = {LL: 16, LL128: 2048}
"""Bytes of what is sent whole: two words with a flag each, a warp's lines (prims_ll.h, prims_ll128.h)."""
HELD: Final = {LL: 8, LL128: 1920}
"""Bytes of data in these."""


def without_flags(
    instances: Sequence[Instance],
    exchanges: Rows,
    transfers: Rows,
    buffers: Mapping[int, Buffer] = DEFAULT,
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
            alike = bool((announced == slot).all())
            protocol = buffers[slot].protocol if alike and slot in buffers else None
            if protocol == "simple":
                instance = replace(instance, protocol=protocol)
            elif protocol is not None:
                default = LL if protocol == "ll" else LL128
                if not (exchanges["bytes"][rows] % np.uint64(LINES[default])).any():
                    instance = _of_data(instance, default)
        out.append(instance)
    return out


def _of_data(instance: Instance, slot: int) -> Instance:
    """The same with bytes of data for those on the wire."""
    protocol = "ll" if slot == LL else "ll128"
    if not instance.size:
        return replace(instance, protocol=protocol)
    most = instance.size // LINES[slot] * HELD[slot]
    between = (max(most - instance.tails * (HELD[slot] - 1), 1), most) if instance.tails else None
    # LL's lines hold one element of the largest type: mostly they are full.
    return replace(instance, protocol=protocol, size=most if slot == LL else None, between=between)
