"""How long a hand-over may take at the worst: what bounds rest on, beyond what errors cover.

In: entries with the reactions that the capture shows. Out: a time a row that 999 in 1000 hand-overs of its
hosts stay below, and bounds that leave room for it. ``error_ns`` is half of a 95 % interval; a bound is a promise,
and of a host that stalls now and then one message in twenty comes later than any such interval.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.lateness.handover import FEWEST, hands_over
from dpuflow.lateness.relative import AT_LEAST, AT_MOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness.entries import Entries
    from dpuflow.lateness.passing import Times
    from dpuflow.lateness.relative import Relative
    from dpuflow.tables import Rows

BEYOND: Final = 0.001
"""Share of hand-overs that may take longer than a bound allows for."""
_LEVEL: Final = 95
"""Percentile from which on values are the tail: where errors end."""


def tail_ns(values: NDArray[np.int64]) -> float:
    """What all but ``BEYOND`` of such values stay below; NaN of too few.

    Peaks over a threshold: beyond a high one excesses of a distribution without a heavier tail than the
    exponential one become exponential (Pickands, 1975), so their mean tells how far it reaches.
    """
    if len(values) < FEWEST:
        return float("nan")
    high = float(np.percentile(values, _LEVEL))
    excess = float((values[values > high] - high).mean()) if (values > high).any() else 0.0
    return high + excess * float(np.log((1 - _LEVEL / 100) / BEYOND))


def tails(entries: Entries, of_row: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per row what a hand-over of its group (``of_row``) takes at the worst, ns; NaN where nothing tells.

    Of sends that had waited for an input; where data streams and no send is seen to wait, of slots given
    back, and where operations fit in the slots, of first entries of the next one: by the middle rank, for one
    that is slow at that is a fault of its own. A group that shows too little has that of all.
    """
    groups = np.unique(of_row)
    sources = [
        {each: tail_ns(entries.waited_ns[of_row[entries.waited] == each]) for each in groups.tolist()},
        *({each: _middle_tail(entries, of_row == each, times) for each in groups.tolist()} for times in
          (entries.taken, entries.between)),
    ]  # fmt: skip
    out = np.full(len(entries.endpoint), tail_ns(entries.waited_ns))
    for each in groups.tolist():
        told = [source[each] for source in sources if not np.isnan(source[each])]
        if told:
            out[of_row == each] = told[0]
    return out


def worst_ns(
    entries: Entries, exchanges: Rows, instances: Sequence[Instance], of_row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Per row what to allow for, whole ns: ``tails`` where a thread sends that the caller has to wake up.

    NCCL's proxy, Gloo's threads, whatever sends where nothing names the library. Elsewhere (Open MPI) the caller
    itself sends, an entry wakes nobody up, and reactions say nothing of it; 0 there.
    """
    wires = exchanges["wire"]
    handed = [len(i.rows) > 0 and hands_over(int(wires[i.rows[0]])) for i in instances]
    found = np.nan_to_num(tails(entries, of_row), nan=0.0).round().astype(np.int64)
    return np.where(np.array(handed, bool)[entries.collective], found, 0) if len(found) else found


def _middle_tail(entries: Entries, mine: NDArray[np.bool_], times: Times) -> float:
    """The tail of ``times`` on the middle one of the ranks that have rows ``mine``; NaN without."""
    rows, ns = times
    ns, ends = ns[mine[rows]], entries.endpoint[rows[mine[rows]]]
    found = [tail_ns(ns[ends == end]) for end in np.unique(ends)]
    known = sorted(value for value in found if not np.isnan(value))
    return known[(len(known) - 1) // 2] if known else float("nan")


def with_room(relative: Relative, entries: Entries) -> Relative:
    """``relative`` with bounds that hold as often as bounds should: by what hand-overs take at the worst.

    A lower bound lies as far below as the rank's own first message may have been kept, an upper one above as
    the first message of the earliest rank may have been; errors hold already what they hold.
    """
    more = np.maximum(entries.tail_ns - np.maximum(entries.spread_ns, 0), 0)
    least, most = relative.bound == AT_LEAST, relative.bound == AT_MOST
    lateness = np.where(least, np.maximum(relative.lateness_ns - more, 0), relative.lateness_ns)
    return replace(relative, lateness_ns=np.where(most, lateness + more, lateness))
