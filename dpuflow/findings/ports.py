"""Messages in, how long each receiver's were held on the way, and by what, out: from the sender's last packet
to the receiver's.

Both stamps are there where both ends are captured. What a pair's quick messages take is the path; what others
take beyond that they stood in a queue, or before a port that was paused. Less than the clocks may be wrong by
tells nothing, and a port that meanwhile carries, at its own pace, what is wanted there anyway costs nothing.
Every path has some of the rest, so a receiver is told of only where it has far more than the others at the
same time.

A port that is paused lets nothing through, then all at once; one that other traffic shares lets something
through all the while; one that is slow is so whenever messages queue for it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct, percentile
from dpuflow.arrays.quantiles import middle_of_others
from dpuflow.arrays.stretches import covered_between, covered_ns
from dpuflow.entries.rows import QUARTER_IN_SIGMAS
from dpuflow.findings.case import SMALL_SHARE
from dpuflow.findings.onset import lasting
from dpuflow.schema.rows import Seen, Wire
from dpuflow.verdicts.chance import SIGMAS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

FEWEST: Final = 8
"""Messages that it takes to tell a port's pace."""
SEVERAL: Final = 30
"""Messages of a pair that it takes to say what is usual, and what is beyond three standard deviations: with
fewer some receiver stands out by chance, in a job of one step."""
PACKETS: Final = 3
"""Packets of a message that it takes to tell a port's pace."""
TIMES: Final = 3
"""So many times as long as the other receivers' messages: as of links (``verdicts.links``)."""


MOST: Final = 0.5
"""Of the time: most of it."""
ALL: Final = 0.9
"""Of messages that a queue holds, if it is that: it marks what waits in it."""


class Why(Enum):
    """What holds messages before a port."""

    PAUSED = "paused"
    SLOW = "slow"
    FULL = "full"


class Held(NamedTuple):
    """Of one receiver: the messages, for how long each was held; from when to when any was (two rows), for
    how long, less what the port carried meanwhile; and why."""

    rows: Ints
    late_ns: Ints
    stretches: Ints
    ns: int
    why: Why


def held_on_the_way(case: Case) -> dict[int, Held]:
    """By receiver; of those whose messages were held for a hundredth of the time and three times as long as
    the middle one of the others'."""
    if not _at_both(case.joined.columns).any():
        return {}
    ends = distinct(case.joined.flows["dst"]).tolist()  # some may be on another time line
    columns = case.joined.columns
    parts = {end: Picked(columns, rows) for end in ends if len(rows := case.received[end])}
    paces = {end: pace_ns(part) for end, part in parts.items()}
    known = sorted(pace for pace in paces.values() if pace > 0)
    usual = {end: middle_of_others(known, pace) for end, pace in paces.items() if pace > 0}
    slow = {end for end in usual if paces[end] > TIMES * usual[end]}
    every: dict[bool, dict[int, Held]] = {False: {}, True: {}}
    for end, part in parts.items():
        mine = np.flatnonzero(_at_both(part))
        # Credits alone are held for less than data is: such a port is none of the others.
        if len(mine) and (part["bytes"][mine] >= _data_bytes(part)).any():
            rows, seen = case.received[end][mine], Picked(part, mine)
            # What is beyond the scatter is asked of ports as quick as others, all that is late of slow ones.
            for surely, of in every.items():
                if not surely and not slow:
                    continue
                # What a slow port carries costs what it takes longer than at the others' pace.
                pace = usual[end] if end in slow else None
                one = _held(case, rows, seen, part, pace, surely=surely)
                if one is not None:
                    of[end] = one
    found = {}
    for surely, of in every.items():
        times = sorted(held.ns for held in of.values())
        for end, held in of.items():
            least = max(TIMES * middle_of_others(times, held.ns), SMALL_SHARE * case.span_ns([end]))
            if held.ns > least and (end in slow) != surely:
                found[end] = held._replace(why=Why.SLOW if end in slow else _why(case, end, held, paces[end]))
    return found


def _slower_since(case: Case, receiver: int, held: Held) -> float | None:
    """The pace of a port since messages are held there, where it is as much slower than it was before as slow
    ports are than others."""
    part = Picked(case.joined.columns, case.received[receiver])
    begin, _ = lasting(held.stretches, part["arrived_end_ns"], (case.joined.start_ns, case.joined.end_ns))
    since = part["arrived_end_ns"] >= begin
    later, before = pace_ns(part.where(since)), pace_ns(part.where(~since))
    return later if later > TIMES * before > 0 else None


def _at_both(part: Rows | Picked) -> NDArray[np.bool_]:
    """RoCE messages that both ends' captures hold, and that were sent once."""
    both = Seen.AT_SENDER | Seen.AT_RECEIVER
    seen: NDArray[np.bool_] = (part["seen"] & both) == both
    seen &= (part["wire"] >= Wire.ROCE_SEND) & (part["wire"] <= Wire.ROCE_SEND_IMM)
    seen &= part["retransmitted"] == 0
    return seen


def _why(case: Case, receiver: int, held: Held, pace: float) -> Why:
    """Of a port that is as quick as others."""
    marked = case.joined.columns["ecn_marked"][held.rows] > 0
    if held.late_ns[marked].sum() > ALL * held.late_ns.sum():
        return Why.FULL
    slower = _slower_since(case, receiver, held)
    part = Picked(case.joined.columns, case.received[receiver])
    part = part.where((part["seen"] & Seen.AT_RECEIVER) != 0)
    stood, together = stood_ns(held.stretches, passing(part, slower or pace))
    if stood > MOST * together:
        return Why.PAUSED
    return Why.SLOW if slower else Why.FULL


def pace_ns(part: Picked) -> float:
    """Time a byte that a port takes, of the quickest tenth: from a message's first packet to its last; where
    messages are too short, of those that had left when the one before them was there; 0 where too few did."""
    known = (part["seen"] == Seen.AT_SENDER | Seen.AT_RECEIVER) & (part["retransmitted"] == 0)
    known &= part["bytes"] > 0
    if not known.any():
        return 0.0
    # Credits are over before the next one is sent: the time between them is no port's, though they be all of
    # what was seen at both ends.
    data = _data_bytes(part)
    part = part.where(known)
    long = part.where(part["packets"] >= PACKETS)
    if len(long) >= FEWEST:
        return percentile((long["arrived_end_ns"] - long["arrived_ns"]) / long["bytes"], 10)
    part = Picked(part, np.argsort(part["arrived_end_ns"], kind="stable"))
    end, size = part["arrived_end_ns"], part["bytes"]
    queued = np.flatnonzero((part["sent_end_ns"][1:] < end[:-1]) & (size[1:] >= data)) + 1
    if len(queued) < FEWEST:
        return 0.0
    return percentile((end[queued] - end[queued - 1]) / size[queued], 10)


def _data_bytes(part: Picked) -> float:
    """From how many bytes on messages are data, by all that a port received."""
    size = part["bytes"][part["bytes"] > 0]
    return percentile(size, 90) / 2 if len(size) else np.inf


def passing(part: Picked, pace: float) -> Ints:
    """When something of messages came through a port, as far as their ends and its pace tell; two rows."""
    begin, end = part["arrived_ns"], part["arrived_end_ns"]
    took = np.minimum((pace * part["bytes"]).astype(np.int64), end - begin)
    return np.stack([np.r_[begin, end - took], np.r_[begin + took, end]])


def stood_ns(held: Ints, passed: Ints) -> tuple[int, int]:
    """Of each stretch of time that ``held`` cover without a gap the longest in which nothing passed, and the
    stretch itself; all of these together."""
    held, passed = joined_up(held), joined_up(passed)
    quiet = np.stack([np.r_[held[0, :1], passed[1]], np.r_[passed[0], held[1, -1:]]])
    stood = 0
    first = np.searchsorted(quiet[1], held[0], side="right")
    last = np.searchsorted(quiet[0], held[1], side="left")
    for number, (begin, end) in enumerate(held.T.tolist()):
        part = quiet[:, first[number] : last[number]]
        stood += int((np.minimum(part[1], end) - np.maximum(part[0], begin)).max(initial=0))
    return stood, int((held[1] - held[0]).sum())


def joined_up(stretches: Ints) -> Ints:
    """The same time, in stretches that do not touch, in order."""
    begin, end = stretches[:, np.argsort(stretches[0], kind="stable")]
    end = np.maximum.accumulate(end)
    fresh = np.flatnonzero(np.r_[True, begin[1:] > end[:-1]][: len(begin)])
    return np.stack([begin[fresh], end[np.r_[fresh[1:] - 1, len(end) - 1][: len(fresh)]]])


def _held(
    case: Case, rows: Ints, part: Picked, came: Picked, pace: float | None, *, surely: bool
) -> Held | None:
    """By how much a receiver's messages (``rows``, ``part``) were held; ``came`` is all that it received, for
    which its port should take that ``pace`` (None: its own)."""
    took, pair = part["arrived_end_ns"] - part["sent_end_ns"], part["src"].astype(np.int64)
    late, known = held_ns(took, pair, surely=surely)
    errors = np.array([clock.error_ns or 0 for clock in case.joined.clocks], np.int64)
    late[late <= errors[part["capture"]] + errors[part["arrival_capture"]]] = 0
    rows, late, end = rows[known], late[known], part["arrived_end_ns"][known]
    if not len(rows):
        return None
    kept = late > 0
    stretches = np.stack([end - late, end])[:, kept]
    took = covered_ns(stretches) - carried_ns(came, case.joined.start_ns, stretches, pace)
    return Held(rows[kept], late[kept], stretches, max(took, 0), Why.FULL)


def held_ns(took: Ints, pair: Ints, *, surely: bool) -> tuple[Ints, NDArray[np.bool_]]:
    """By how much each message took longer than the quickest quarter of its pair's; where that is known.

    ``surely``: only of those beyond what the scatter of their pair makes any take; where all queue, all are
    late, and that is not asked.
    """
    order = np.lexsort((took, pair))
    starts = np.flatnonzero(np.r_[True, pair[order][1:] != pair[order][:-1]][: len(pair)])
    counts = np.diff(np.r_[starts, len(pair)])
    usual, scatter, several = np.zeros((3, len(pair)), np.int64)
    quarter, middle = (took[order][starts + (counts * share) // 4] for share in (1, 2))
    usual[order] = np.repeat(quarter, counts)
    # Software takes any time.
    scatter[order] = np.repeat((1 + SIGMAS / QUARTER_IN_SIGMAS) * (middle - quarter), counts)
    several[order] = np.repeat(counts, counts)
    known: NDArray[np.bool_] = several >= SEVERAL
    late = took - usual
    return np.where(known & (late > (scatter if surely else 0)), late, 0), known


def carried_ns(part: Picked, start_ns: int, held: Ints, pace: float | None = None) -> int:
    """What all that came to a port since ``start_ns`` while messages were held takes at a ``pace`` (None: its
    own): a queue of what is wanted there anyway costs nothing."""
    if pace is None:
        long = part["packets"] >= PACKETS
        if not long.any():
            return 0
        took = (part["arrived_end_ns"] - part["arrived_ns"])[long]
        pace = float(np.percentile(took / np.maximum(part["bytes"][long], 1), 10))
    if not held.size:
        return 0
    part = Picked(part, np.argsort(part["arrived_end_ns"], kind="stable"))
    covered = covered_between(np.r_[start_ns, part["arrived_end_ns"]], held) > 0
    return round(pace * float(part["bytes"][covered].sum()))
