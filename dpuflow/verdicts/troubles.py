"""Exchanges, links and causes in; the rows of Entries whose group had to wait for the network out.

A packet that is sent again need not hold anything up: hosts that acknowledge late make their peers repeat
what has arrived. What counts is how long messages with repeated packets were under way beyond the usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.causes import NETWORK
from dpuflow.verdicts.habits import is_material

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.causes import Causes


def waiting_rows(
    exchanges: Rows,
    instances: Sequence[Instance],
    entries: Entries,
    causes: Causes,
    slow: NDArray[np.bool_],
    group: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Rows of groups that the network held up for long enough to speak of, or made late on a slow link.

    ``slow`` marks rows whose endpoint has a slow link; ``group`` numbers each collective's group.
    """
    of_row = group[entries.collective]
    late = causes.cause == NETWORK
    found = np.unique(of_row[late & slow]).tolist()
    part: dict[int, list[NDArray[np.int64]]] = {}
    if troubled(exchanges).any():
        for instance, each in zip(instances, group.tolist(), strict=True):
            part.setdefault(each, []).append(np.asarray(instance.rows, np.int64))
    seen = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    for each, rows in part.items():
        mine = seen & (of_row == each)
        span = int(entries.leave_ns[mine].max()) - int(entries.enter_ns[mine].min()) if mine.any() else 0
        if is_material(held_ns(exchanges[np.concatenate(rows)]), span):
            found.append(each)
    return np.isin(of_row, found)


def troubled(exchanges: Rows) -> NDArray[np.bool_]:
    """Messages of which packets were sent again, or marked by a queue that they had to wait in."""
    return np.asarray((exchanges["retransmitted"] > 0) | (exchanges["ecn_marked"] > 0), np.bool_)


def held_ns(exchanges: Rows) -> int:
    """For how long such messages (``troubled``) were under way beyond the usual time for a byte.

    Time that several cover counts once.
    """
    known = (exchanges["data_ns"] != NEVER) & (exchanges["arrived_end_ns"] != NEVER)
    rows = exchanges[known & (exchanges["packets"] > 0)]
    again = troubled(rows)
    if not again.any():
        return 0
    took = rows["arrived_end_ns"] - rows["data_ns"]
    pace = took / np.maximum(rows["bytes"].astype(np.float64), 1)
    usual = float(np.median(pace[~again])) if not again.all() else float(pace.min())
    end = rows["arrived_end_ns"][again]
    begin = end - np.maximum(took - usual * rows["bytes"], 0).astype(np.int64)[again]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    before = np.maximum.accumulate(np.concatenate([begin[:1], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())
