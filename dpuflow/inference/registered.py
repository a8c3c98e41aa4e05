"""Exchanges in, which rows of Entries granted for buffers that the application had registered, out.

A clear-to-send entry for NCCL's own buffers is posted by the host, ahead of the kernel; one for registered
buffers only when the receiver's kernel has started (net.cc, regBufferReady): it says nothing of the host.
NCCL's own buffers have eight slots (NCCL_STEPS, device.h) whose addresses come again and again; data in
registered buffers walks these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.lateness.passing import SLOTS
from dpuflow.schema import NONE32, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness import Entries
    from dpuflow.tables import Rows

MOST: Final = 0.5
"""Of a connection's messages: so many at least come where the eighth before them came, in slots."""


def registered_rows(
    exchanges: Rows, transfers: Rows, instances: Sequence[Instance], entries: Entries
) -> NDArray[np.bool_]:
    """Rows of ranks that take part in a collective by what they granted for registered buffers."""
    found = np.zeros(len(entries.endpoint), bool)
    way = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
    walking = _walking(exchanges, transfers, way)
    if not walking.any():
        return found
    mine = walking[way]
    for number, instance in enumerate(instances):
        rows = instance.rows[mine[instance.rows]]
        if len(rows):
            at = slice(*entries.offsets[number : number + 2].tolist())
            found[at] = np.isin(entries.endpoint[at], exchanges["dst"][rows])
    return found


def _walking(exchanges: Rows, transfers: Rows, way: NDArray[np.int64]) -> NDArray[np.bool_]:
    """By way of a connection: whether its data goes to more than eight places, not in turn."""
    wire = exchanges["wire"]
    paid = (wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.ROCE_WRITE)
    rows = np.flatnonzero(paid & (exchanges["grant"] != NONE32) & (exchanges["data"] != NONE32))
    count = int(way.max(initial=-1)) + 1
    if len(rows) <= SLOTS:
        return np.zeros(count, bool)
    rows = rows[np.lexsort((exchanges["order"][rows], way[rows]))]
    of, address = way[rows], transfers["va"][exchanges["data"][rows]]
    pairs = of[SLOTS:] == of[:-SLOTS]
    again = pairs & (address[SLOTS:] == address[:-SLOTS])
    compared = np.bincount(of[SLOTS:], pairs, count)
    walking = (compared > 0) & (np.bincount(of[SLOTS:], again, count) < MOST * compared)
    for each in np.flatnonzero(walking).tolist():
        walking[each] = len(np.unique(address[of == each])) > SLOTS
    return np.asarray(walking, np.bool_)
