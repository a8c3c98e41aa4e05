"""How fast data really moved between each pair of endpoints, and which links are slow.

A message's pace is the time from its first to its last packet over its bytes: the sender had the
data and the credit, so what stretches a message is the path. Measured at both ends, the longer of
the two counts: a shaper shows before the tap at one end and behind it at the other. Messages are
compared with their like only (same operation, same size), for libraries send different kinds of
messages in different ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness import Entries
    from dpuflow.tables import Rows

SLOW_FACTOR = 3.0
"""A link whose messages usually take this many times as long as their like is slow."""
FEWEST = 8
"""Messages it takes to speak of a link's pace."""


@dataclass
class Links:
    """One row per (src, dst) that carried data, as parallel arrays."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    pace_ns: NDArray[np.float64]  # median time per byte
    stretch: NDArray[np.float64]  # median of the messages' time over that of their like
    lost_ns: NDArray[np.float64]  # time beyond that of their like, all messages together
    messages: NDArray[np.int64]
    slow: NDArray[np.bool_]


def measure_links(exchanges: Rows, instances: Sequence[Instance]) -> Links:
    """Pace of each link from the exchanges that are part of a collective and span several packets."""
    rows = np.concatenate([i.rows for i in instances]) if instances else np.zeros(0, np.int64)
    picked = exchanges[np.sort(rows)]
    several = (picked["packets"] >= 4) & (picked["data_ns"] != NEVER) & (picked["arrived_end_ns"] != NEVER)
    picked = picked[several]
    sending = picked["data_end_ns"] - picked["data_ns"]
    receiving = picked["arrived_end_ns"] - picked["arrived_ns"]
    took = np.maximum(sending, receiving).astype(np.float64)
    like = _medians(took, picked["op"], picked["bytes"])
    stretch = took / np.maximum(like + _grain(picked), 1.0)

    key = (picked["src"].astype(np.int64) << 32) | picked["dst"]
    order = np.lexsort((stretch, key))
    starts = np.flatnonzero(np.r_[True, key[order][1:] != key[order][:-1]]) if len(key) else order
    count = np.diff(np.r_[starts, len(key)])
    middle = order[starts + (count - 1) // 2]
    links = key[order[starts]]
    lost = np.add.reduceat((took - like)[order], starts) if len(key) else np.zeros(0)
    return Links(
        links >> 32,
        links & 0xFFFFFFFF,
        took[middle] / np.maximum(picked["bytes"][middle].astype(np.float64), 1),
        stretch[middle],
        lost,
        count,
        (count >= FEWEST) & (stretch[middle] >= SLOW_FACTOR),
    )


def _grain(picked: Rows) -> int:
    """The resolution of the stamps, ns: what all durations are multiples of. Shorter ones are not known."""
    offered = picked[picked["offer_ns"] != NEVER]
    spans = (
        picked["data_end_ns"] - picked["data_ns"],
        picked["arrived_end_ns"] - picked["arrived_ns"],
        offered["data_ns"] - offered["offer_ns"],
    )
    return int(np.gcd.reduce(np.concatenate(spans))) if len(picked) else 1


def _medians(values: NDArray[np.float64], *classes: NDArray[np.generic]) -> NDArray[np.float64]:
    """For each value the lower median of its class."""
    if not len(values):
        return values
    order = np.lexsort((values, *classes))
    new = np.zeros(len(order), bool)
    new[0] = True
    for column in classes:
        new[1:] |= column[order][1:] != column[order][:-1]
    starts = np.flatnonzero(new)
    count = np.diff(np.r_[starts, len(order)])
    out = np.empty(len(order))
    out[order] = np.repeat(values[order][starts + (count - 1) // 2], count)
    return out


def slow_rows(links: Links, entries: Entries) -> NDArray[np.bool_]:
    """Rows of Entries whose endpoint received or sent over a slow link in some collective."""
    touched = np.unique(np.concatenate([links.src[links.slow], links.dst[links.slow]]))
    return np.isin(entries.endpoint, touched)
