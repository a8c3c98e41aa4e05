"""How long before its first message a rank may have entered: what lower and upper bounds leave room for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dpuflow.entries import AT_LEAST, AT_MOST, Rule, claim, relate
from dpuflow.entries.margins import room
from dpuflow.entries.reactions import law_of, tail_ns
from dpuflow.entries.rows import blank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.entries import Entries

COUNT, RANKS, WORK = 40, 3, 10_000
QUICK = 100
STALLS = np.r_[np.full(95, QUICK), np.full(5, 20_000)]
"""Hand-overs in mid-operation: one in twenty stalls."""
WORST = tail_ns(STALLS) - QUICK
FAR = 200_000


def group(late: dict[int, int]) -> Entries:
    """Collectives of three ranks that work alike; rank 2 enters ``late``, by number; 1 may have waited."""
    rows = np.arange(COUNT * RANKS)
    number, rank = rows // RANKS, rows % RANKS
    left = 1_000_000 * (number + 1)
    enter = left + WORK
    for each, ns in late.items():
        enter[each * RANKS + 2] += ns
    entries = blank(number, rank, np.arange(COUNT + 1) * RANKS)
    rule = np.where(rank == 1, int(Rule.CREDIT), int(Rule.FREE_STEP))
    spread = np.full(len(rows), 500)
    return replace(
        entries, enter_ns=enter, since_ns=left, rule=rule, whole=np.ones(len(rows), bool),
        margins=replace(entries.margins, spread_ns=spread, wide_ns=spread),
        reactions=entries.reactions._replace(waited=(np.zeros(len(STALLS), np.int64), STALLS)),
    )  # fmt: skip


def roomy(entries: Entries, room_ns: NDArray[np.int64]) -> Entries:
    return replace(entries, margins=replace(entries.margins, room_ns=room_ns))


def rooms(entries: Entries) -> NDArray[np.int64]:
    """What ``weigh`` makes of it."""
    of_row = np.zeros(len(entries.rule), np.int64)
    return room(entries, entries.since_ns, law_of(entries, of_row), of_row)


def test_a_stall_before_the_first_message_looks_like_a_late_rank() -> None:
    """Of 15 us, less than stalls take, nothing is left to claim; of 200 us what is beyond them."""
    entries = group({5: 15_000, 9: FAR, 20: FAR, 30: FAR})
    entries = roomy(entries, rooms(entries))
    likely = relate(entries)
    claimed = claim(entries, likely, np.zeros(COUNT, bool))
    late = np.array([5, 9]) * RANKS + 2
    assert (likely.bound[late] == AT_LEAST).all()
    assert claimed.bound[late].tolist() == [AT_MOST, AT_LEAST]
    assert claimed.lateness_ns[late[1]] == pytest.approx(FAR - WORST, abs=2)


def test_nobody_does_less_work_than_was_ever_seen() -> None:
    """A rank that enters 3 us late after as much work as any: not all of a stall fits before its message."""
    entries = group(dict.fromkeys(range(0, COUNT, 4), 3_000))
    found = rooms(entries)
    assert found[RANKS * 4 + 2] == 3_000
    assert (found[entries.endpoint != 2] == 0).all()


def test_the_largest_claim_stays_the_largest() -> None:
    entries = group({9: 60_000})
    at = 9 * RANKS
    enter = entries.enter_ns.copy()
    enter[at] += 50_000  # rank 0 is late, too, but less
    rooms_ns = np.zeros(len(enter), np.int64)
    rooms_ns[at + 2] = 30_000
    entries = roomy(replace(entries, enter_ns=enter), rooms_ns)
    claimed = claim(entries, relate(entries), np.zeros(COUNT, bool))
    assert claimed.bound[at] == claimed.bound[at + 2] == AT_LEAST
    assert claimed.lateness_ns[at] < claimed.lateness_ns[at + 2] == 30_000


def test_an_upper_bound_leaves_room_for_the_others_hand_over() -> None:
    entries = group({})
    at = 9 * RANKS
    enter = entries.enter_ns.copy()
    enter[at : at + RANKS] += (20_000, 30_000, 25_000)
    rooms_ns = np.zeros(len(enter), np.int64)
    rooms_ns[at] = 20_000
    since = np.where(entries.endpoint == 1, enter, entries.since_ns)
    entries = roomy(replace(entries, enter_ns=enter, since_ns=since), rooms_ns)
    likely = relate(entries)
    claimed = claim(entries, likely, np.zeros(COUNT, bool))
    assert likely.bound[at + 1] == claimed.bound[at + 1] == AT_MOST
    assert claimed.lateness_ns[at + 1] - likely.lateness_ns[at + 1] == 20_000


def test_nothing_to_claim() -> None:
    none = np.zeros(0, np.int64)
    entries = blank(none, none, np.zeros(1, np.int64))
    assert not len(claim(entries, relate(entries), np.zeros(0, bool)).lateness_ns)
