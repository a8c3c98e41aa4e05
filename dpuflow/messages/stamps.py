"""Times that cannot be: rows of one capture in, those whose stamps lie within a year of most of them out.

A damaged record or a clock that was never set gives stamps of 1970 or 2106 among today's. Here they are set
aside and named, once, so that later stages may subtract times without a thought for overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.schema.tables import CaptureTables, Rows

_NOT_SEEN: Final = (1 << 63) - 1
YEAR_NS: Final = 366 * 86_400 * 1_000_000_000
"""No capture is longer; float64 still tells times so far apart to 4 ns."""
LEAST_NS: Final = -(1 << 61)
MOST_NS: Final = 1 << 62
"""From 1896 to 2116: stamps of any two captures can be subtracted. Files of 32 bits hold no others."""


def set_aside(tables: CaptureTables, saved: bool = False) -> CaptureTables:
    """``tables``, less messages that were stamped more than a year from the median one.

    ``saved``: of a column file, whose info may say other times than its rows.
    """
    info, messages = tables.info, tables.messages
    first_ns, last_ns = info.first_ns, info.last_ns
    if saved or first_ns is None or last_ns is None:
        first_ns, last_ns = _span(tables)
    if last_ns - first_ns <= YEAR_NS and first_ns >= LEAST_NS and last_ns <= MOST_NS:
        return tables
    stamps = messages["last_ns"] if len(messages) else np.array([last_ns])
    middle_ns = int(np.partition(stamps, len(stamps) // 2)[len(stamps) // 2])
    middle_ns = min(max(middle_ns, LEAST_NS), MOST_NS)
    low, high = max(middle_ns - YEAR_NS, LEAST_NS), min(middle_ns + YEAR_NS, MOST_NS)
    near = [(row >= low) & (row <= high) for row in (messages["first_ns"], messages["last_ns"])]
    kept = messages[near[0] & near[1]]
    for times, least_ns, most_ns in ((kept["acked_ns"], low, high), (tables.flows["rtt_min_ns"], 0, YEAR_NS)):
        times[(times < least_ns) | (times > most_ns)] = NEVER
    tables.messages = kept
    for name in ("first_ns", "last_ns"):
        seen = tables.flows[name] != NEVER
        np.clip(tables.flows[name], low, high, out=tables.flows[name], where=seen)
    setups = tables.setups
    tables.setups = setups[(setups["time_ns"] >= low) & (setups["time_ns"] <= high)]
    info.first_ns = int(kept["first_ns"].min()) if len(kept) else min(max(first_ns, low), high)
    info.last_ns = int(kept["last_ns"].max()) if len(kept) else max(min(last_ns, high), info.first_ns)
    info.warnings.append(
        f"{info.files[0] if info.files else info.vantage}: packets are stamped more than a year apart;"
        f" {len(messages) - len(kept)} of {len(messages)} messages far from the others were set aside"
    )
    return tables


def near(tables: CaptureTables) -> bool:
    """Whether messages' times are what ``set_aside`` leaves: all stages subtract them and rely on it."""
    rows = tables.messages
    if not len(rows):
        return True
    times = [int(edge) for name in ("first_ns", "last_ns") for edge in (rows[name].min(), rows[name].max())]
    return min(times) >= LEAST_NS and max(times) <= MOST_NS and max(times) - min(times) <= 2 * YEAR_NS


def restamp(messages: Rows, flows: Rows, wrong: Sequence[tuple[int, int, int]]) -> None:
    """Right the times of what packets with wrong stamps began, ended and acknowledged.

    ``wrong``: (frame, its stamp, the right one).
    """
    for frame, stamp_ns, right_ns in wrong:
        for end in ("first", "last"):
            rows = (messages[f"{end}_frame"] == frame) & (messages[f"{end}_ns"] == stamp_ns)
            messages[f"{end}_ns"][rows] = right_ns
            flows[f"{end}_ns"][flows[f"{end}_ns"] == stamp_ns] = right_ns
        messages["acked_ns"][messages["acked_ns"] == stamp_ns] = right_ns


def _span(tables: CaptureTables) -> tuple[int, int]:
    """The first and the last time that anything in the tables has."""
    info = tables.info
    times = [time for time in (info.first_ns, info.last_ns) if time is not None]
    for rows, names in (
        (tables.messages, ("first_ns", "last_ns", "acked_ns")),
        (tables.flows, ("first_ns", "last_ns")),
        (tables.setups, ("time_ns",)),
    ):
        for name in names:
            least = int(rows[name].min(initial=_NOT_SEEN))
            if least == NEVER and (rows is tables.flows or name == "acked_ns"):
                least = int(rows[name].min(initial=_NOT_SEEN, where=rows[name] != NEVER))
            if least != _NOT_SEEN:
                times += [least, int(rows[name].max())]
    return min(times, default=0), max(times, default=0)
