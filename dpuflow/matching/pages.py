"""What is no collective because nobody could know that it is there: pages that only ever go one way.

In: EXCHANGE rows. Out: those left for collectives. A plain WRITE tells its receiver nothing (IBA volume 1,
9.4.3), so one that takes part in a collective has an immediate, was asked for, has a flag or a SEND behind
it, or its receiver is seen to go on by what it WRITEs itself. Several endpoints that put pages into one that
never writes back look like a reduce of each page, or one that serves several like a broadcast; they hand on
caches (``verdicts.bulk`` makes transfers of them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

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
