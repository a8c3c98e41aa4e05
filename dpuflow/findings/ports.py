"""Messages in, how long each receiver's were held on the way out: from the sender's last packet to the
receiver's.

Both stamps are there where both ends are captured. What a pair's quick messages take is the path; what others
take beyond that they stood in a queue, or before a port that was paused. Less than the clocks may be wrong by
tells nothing, and a port that meanwhile carries, at its own pace, what is wanted there anyway costs nothing.
Every path has some of the rest, so a receiver is told of only where it has far more than the others at the
same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.stretches import covered_between, covered_ns
from dpuflow.findings.case import SMALL_SHARE
from dpuflow.schema.rows import Seen, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.findings.case import Case

    Ints = NDArray[np.int64]

FEWEST: Final = 8
"""Messages of a pair that it takes to say what is usual."""
PACKETS: Final = 3
"""Packets of a message that it takes to tell a port's pace."""
TIMES: Final = 3
"""So many times as long as the other receivers' messages: as of links (``verdicts.links``)."""


class Held(NamedTuple):
    """Of one receiver: the messages, for how long each was held, and from when to when any was."""

    rows: Ints
    late_ns: Ints
    ns: int


def held_on_the_way(case: Case) -> dict[int, Held]:
    """By receiver; of those whose messages were held for a hundredth of the time and three times as long as
    the middle one of the others'."""
    receivers = np.unique(case.joined.flows["dst"]).tolist()
    every = {end: held for end in receivers if (held := _held(case, end)) is not None}
    found = {}
    for end, held in every.items():
        others = [other.ns for each, other in every.items() if each != end]
        if others and held.ns > max(TIMES * float(np.median(others)), SMALL_SHARE * case.span_ns):
            found[end] = held
    return found


def _held(case: Case, receiver: int) -> Held | None:
    rows = case.received[receiver]
    part = case.joined.transfers[rows]
    both = ((part["seen"] & Seen.AT_SENDER) != 0) & ((part["seen"] & Seen.AT_RECEIVER) != 0)
    both &= (part["wire"] >= Wire.ROCE_SEND) & (part["wire"] <= Wire.ROCE_SEND_IMM)
    both &= part["retransmitted"] == 0
    rows, part = rows[both], part[both]
    late, known = held_ns(part["arrived_end_ns"] - part["sent_end_ns"], part["src"].astype(np.int64))
    errors = np.array([clock.error_ns or 0 for clock in case.joined.clocks], np.int64)
    late[late <= errors[part["capture"]] + errors[part["arrival_capture"]]] = 0
    rows, late, end = rows[known], late[known], part["arrived_end_ns"][known]
    if not len(rows):
        return None
    stretches = np.stack([end - late, end])
    return Held(
        rows, late, max(covered_ns(stretches) - carried_ns(case, case.received[receiver], stretches), 0)
    )


def held_ns(took: Ints, pair: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """By how much each message took longer than the quickest quarter of its pair's; where that is known."""
    order = np.lexsort((took, pair))
    starts = np.flatnonzero(np.r_[True, pair[order][1:] != pair[order][:-1]][: len(pair)])
    counts = np.diff(np.r_[starts, len(pair)])
    usual, several = np.zeros((2, len(pair)), np.int64)
    usual[order] = np.repeat(took[order][starts + counts // 4], counts)
    several[order] = np.repeat(counts, counts)
    known: NDArray[np.bool_] = several >= FEWEST
    return np.where(known, np.maximum(took - usual, 0), 0), known


def carried_ns(case: Case, rows: Ints, held: Ints) -> int:
    """What all that came to a port while messages were held takes at its own pace: a queue of what is wanted
    there anyway costs nothing."""
    part = case.joined.transfers[rows]
    long = part["packets"] >= PACKETS
    if not long.any():
        return 0
    took = (part["arrived_end_ns"] - part["arrived_ns"])[long]
    pace = float(np.percentile(took / np.maximum(part["bytes"][long], 1), 10))
    part = part[np.argsort(part["arrived_end_ns"], kind="stable")]
    covered = covered_between(np.r_[case.joined.start_ns, part["arrived_end_ns"]], held) > 0
    return round(pace * float(part["bytes"][covered].sum()))
