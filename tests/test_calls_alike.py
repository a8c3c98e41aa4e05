"""Cuts of calls of all with all by each other's example, and communicators over sockets that share ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dpuflow.matching.credited import Pipe
from dpuflow.matching.parts import Parts, common_cuts
from dpuflow.matching.sockets import _by_ways

NONE = np.zeros(0, np.int64)


def lane(src: int, dst: int, starts: list[int]) -> Parts:
    """A way of connections whose parts begin at these times and take 10."""
    begun = np.array(starts)
    return cast("Any", SimpleNamespace(edge=(src, dst), start_ns=begun, end_ns=begun + 10))


def test_a_call_begins_where_most_of_its_sender_s_ways_begin_a_part() -> None:
    calls = [1000 * k for k in range(6)]
    one = lane(0, 1, [at + 3 for at in calls])
    stalled = lane(0, 2, sorted([*calls, 2600]))  # a stall within the call looks like another one
    hidden = lane(0, 3, [at + 5 for at in calls if at != 3000])  # a late stamp hides where one ends
    found = common_cuts([one, stalled, hidden, *(lane(1, dst, calls) for dst in (0, 2, 3))])
    assert [len(found[rank]) for rank in (0, 1)] == [5, 5]
    assert (np.abs(found[0] - calls[1:]) < 500).all()


def test_senders_with_unlike_numbers_of_calls_have_none_in_common() -> None:
    assert not common_cuts([lane(0, 1, [0, 1000, 2000]), lane(1, 0, [0, 1000])])


def test_pairs_send_both_ways_and_rings_one() -> None:
    """Tensor parallel pairs, and rings of three over them for data."""
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)]
    rings = [(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)]
    pipes = [Pipe(src, dst, NONE, 1, NONE.astype(bool), NONE) for src, dst in [*pairs, *rings]]
    found = sorted(sorted(pipe[:2] for pipe in part) for part in _by_ways(pipes))
    assert found == sorted(
        [sorted(each) for each in (pairs[:2], pairs[2:4], pairs[4:], rings[:3], rings[3:])]
    )
