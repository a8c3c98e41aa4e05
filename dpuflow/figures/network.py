"""Exchanges in, what the network charges for a message out: by pair of endpoints and size, as measured.

What a scheduler can ask that places requests or caches: not what links are said to carry but what messages
of that size had of late. A message's time is from its first packet at the sender to its last at the receiver,
both stamped there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import Picked
from dpuflow.results.figures import NetworkCost
from dpuflow.schema.rows import NEVER, Seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.schema.tables import Rows

MOST: Final = 20_000
"""Rows: of more pairs and sizes those that carried most."""


def list_network_cost(exchanges: Rows) -> Iterator[NetworkCost]:
    """One row a pair and size (rounded up to a power of two), in order of pair and size."""
    known = (exchanges["data_ns"] != NEVER) & (exchanges["arrived_end_ns"] != NEVER)
    known &= (exchanges["bytes"] > 0) & (exchanges["seen"] == (Seen.AT_SENDER | Seen.AT_RECEIVER))
    rows = Picked(exchanges, np.flatnonzero(known))
    if not len(rows):
        return
    took = rows["arrived_end_ns"] - rows["data_ns"]
    nbytes = rows["bytes"].astype(np.int64)
    size = np.ceil(np.log2(nbytes)).astype(np.int64)
    pair = rows["src"].astype(np.int64) << 32 | rows["dst"].astype(np.int64)
    order = np.lexsort((took, size, pair))
    size, pair = size[order], pair[order]
    starts = np.flatnonzero(np.r_[True, (size[1:] != size[:-1]) | (pair[1:] != pair[:-1])])
    counts = np.diff(np.r_[starts, len(order)])
    carried = np.add.reduceat(nbytes[order], starts)
    last = np.maximum.reduceat(rows["arrived_end_ns"][order], starts)
    middle, tail = (took[order][starts + (share * (counts - 1)).astype(np.int64)] for share in (0.5, 0.99))
    for n in np.sort(np.argsort(-carried, kind="stable")[:MOST]).tolist():
        median = int(middle[n])
        yield NetworkCost(
            src=int(pair[starts[n]] >> 32),
            dst=int(pair[starts[n]] & 0xFFFFFFFF),
            bytes_up_to=1 << int(size[starts[n]]),
            count=int(counts[n]),
            p50_ns=median,
            p99_ns=int(tail[n]),
            bits_per_s=round(8e9 * float(carried[n]) / int(counts[n]) / median, 1) if median > 0 else None,
            last_ns=int(last[n]),
        )
