"""How fast data really moved between each pair of endpoints, and which links are slow.

A link's pace is the time from the first to the last packet of a data message over its bytes: the
sender had the data and the credit, so what stretches a message is the path. Measured at both ends,
the longer of the two counts: a shaper shows before the tap at one end and behind it at the other.
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
"""A link at a third of its peers' pace or less is slow."""
FEWEST = 8
"""Messages it takes to speak of a link's pace."""


@dataclass
class Links:
    """One row per (src, dst) that carried data, as parallel arrays."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    pace_ns: NDArray[np.float64]  # median time per byte
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
    pace = np.maximum(sending, receiving) / np.maximum(picked["bytes"].astype(np.float64), 1)
    key = (picked["src"].astype(np.int64) << 32) | picked["dst"]
    order = np.lexsort((pace, key))
    key, pace = key[order], pace[order]
    starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
    count = np.diff(np.r_[starts, len(key)])
    median = pace[starts + (count - 1) // 2]
    enough = count >= FEWEST
    slow = np.zeros(len(starts), bool)
    if enough.sum() >= 3:
        usual = np.sort(median[enough])[(int(enough.sum()) - 1) // 2]
        slow = enough & (median >= SLOW_FACTOR * usual)
    links = key[starts] if len(starts) else starts
    return Links(links >> 32, links & 0xFFFFFFFF, median, count, slow)


def slow_rows(links: Links, entries: Entries) -> NDArray[np.bool_]:
    """Rows of Entries whose endpoint received or sent over a slow link in some collective."""
    touched = np.unique(np.concatenate([links.src[links.slow], links.dst[links.slow]]))
    return np.isin(entries.endpoint, touched)
