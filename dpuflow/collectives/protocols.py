"""Instances of NCCL's collectives in, the same with the size of their data out.

NCCL's protocols LL and LL128 fill messages with lines of data and flags. Which one ran is told by the
capacity that clear-to-send entries announce: an eighth of the protocol's buffer, whose default size is a
constant of NCCL (init.cc computeBuffSizes). Where buffers were configured otherwise, sizes stay those on
the wire.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema import NONE32, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.collectives.model import Instance
    from dpuflow.tables import Rows

LL: Final = 65_536
LL128: Final = 614_400
"""Capacities announced: an eighth of the default buffers (NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE)."""
LINES: Final = {LL: 16, LL128: 2048}
"""Bytes of what is sent whole: two words with a flag each, a warp's lines (prims_ll.h, prims_ll128.h)."""


def without_flags(instances: Sequence[Instance], exchanges: Rows, transfers: Rows) -> list[Instance]:
    """Instances with the size of their data: half of LL's; None for LL128, whose lines may not be full."""
    out = []
    for instance in instances:
        rows = instance.rows
        if instance.size and len(rows) and exchanges["wire"][rows[0]] == Wire.ROCE_WRITE_IMM:
            grants = exchanges["grant"][rows]
            announced = transfers["announces"][grants[grants != NONE32]]
            slot = int(announced.max(initial=0))
            lined = slot in LINES and (announced == slot).all()
            if lined and not (exchanges["bytes"][rows] % np.uint64(LINES[slot])).any():
                instance = replace(instance, size=instance.size // 2 if slot == LL else None)
        out.append(instance)
    return out
