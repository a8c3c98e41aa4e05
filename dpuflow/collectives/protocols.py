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

LINES: Final = {65_536: (16, 8), 614_400: (2048, 1920)}
"""Capacity announced -> bytes of a line on the wire, of data in it: LL, LL128 (prims_ll.h, prims_ll128.h)."""


def without_flags(instances: Sequence[Instance], exchanges: Rows, transfers: Rows) -> list[Instance]:
    """Instances with the size of the data. LL128's lines may not be full: theirs is the most that fits."""
    out = []
    for instance in instances:
        rows = instance.rows
        if instance.size and len(rows) and exchanges["wire"][rows[0]] == Wire.ROCE_WRITE_IMM:
            grants = exchanges["grant"][rows]
            announced = transfers["announces"][grants[grants != NONE32]]
            line, data = LINES.get(int(announced.max(initial=0)), (1, 1))
            lines = (announced == announced.max(initial=0)).all()
            if line > 1 and lines and not (exchanges["bytes"][rows] % np.uint64(line)).any():
                instance = replace(instance, size=instance.size * data // line)
        out.append(instance)
    return out
