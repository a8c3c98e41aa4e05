"""Times that cannot be: rows of one capture in, those whose stamps lie within a year of most of them out.

A damaged record or a clock that was never set gives stamps of 1970 or 2106 among today's. Here they are set
aside and named, once, so that later stages may subtract times without a thought for overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from dpuflow.schema.tables import CaptureTables

YEAR_NS: Final = 366 * 86_400 * 1_000_000_000
"""No capture is longer; float64 still tells times so far apart to 4 ns."""


def set_aside(tables: CaptureTables) -> CaptureTables:
    """``tables``, less messages that were stamped more than a year from the median one."""
    info, messages = tables.info, tables.messages
    if info.first_ns is None or info.last_ns is None or info.last_ns - info.first_ns <= YEAR_NS:
        return tables
    stamps = messages["last_ns"] if len(messages) else np.array([info.last_ns])
    middle_ns = int(np.partition(stamps, len(stamps) // 2)[len(stamps) // 2])
    low, high = max(middle_ns - YEAR_NS, NEVER + 1), min(middle_ns + YEAR_NS, -(NEVER + 1))
    near = [(row >= low) & (row <= high) for row in (messages["first_ns"], messages["last_ns"])]
    kept = messages[near[0] & near[1]]
    acked = kept["acked_ns"]
    acked[(acked != NEVER) & ((acked < low) | (acked > high))] = NEVER
    tables.messages = kept
    for name in ("first_ns", "last_ns"):
        np.clip(tables.flows[name], low, high, out=tables.flows[name])
    info.first_ns = int(kept["first_ns"].min()) if len(kept) else max(info.first_ns, low)
    info.last_ns = int(kept["last_ns"].max()) if len(kept) else min(info.last_ns, high)
    info.warnings.append(
        f"{info.files[0] if info.files else info.vantage}: packets are stamped more than a year apart;"
        f" {len(messages) - len(kept)} of {len(messages)} messages far from the others were set aside"
    )
    return tables
