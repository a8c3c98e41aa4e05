"""What ranks answer for in, the same without what stalls of busy hosts explain out.

A thread that hands messages over stalls now and then, and a rank whose first message it kept looks late. How
often hosts take how long shows wherever a message or a slot waited for them in mid-operation. Incidents of a
rank count where it has more of that length than such stalls make it have by chance. So it is for NCCL, and
for all others while the network is in trouble, for who waits comes back when its host finds the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import classes
from dpuflow.entries import BEYOND, Entries, Tail, hand_overs
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching import Instance
    from dpuflow.verdicts.own import Own

HAND_OVERS: Final = 2
"""Between leaving a collective and entering the next: the last input is taken up, the first message sent."""


def without_stalls(
    own: Own,
    instances: Sequence[Instance],
    entries: Entries,
    group: NDArray[np.int64],
    waiting: NDArray[np.bool_],
) -> Own:
    """``own`` with amounts only where stalls do not explain them; ``group`` numbers each collective's group.

    A rank's amounts from a length on count if the chance that its hosts stall so often, so long, is below
    ``BEYOND``; of groups that wait for the network (rows ``waiting``, see ``troubles``) also if that is so of
    all ranks' amounts together. Where the capture shows no hand-over there is nothing to explain them by.
    """
    amount = own.amount_ns.copy()
    of_row = group[entries.collective]
    waiting = waiting & (entries.tail_ns <= 0)
    late = (amount > 0) & ((entries.tail_ns > 0) | waiting)
    stalls = hand_overs(entries, instances, of_row)
    if not len(stalls):
        return own
    beyond = Tail(stalls - np.median(stalls))
    together = np.full(len(amount), np.inf)
    for mine in classes(of_row) if (late & waiting).any() else []:
        alike = mine[waiting[mine] & (own.excess_ns[mine] != NEVER)]
        together[mine] = _least_ns(np.sort(amount[alike][amount[alike] > 0]), len(alike), beyond)
    for mine in classes(of_row, entries.endpoint):
        if late[mine].any():
            rows = mine[amount[mine] > 0]
            total = int((own.excess_ns[mine] != NEVER).sum())
            least = min(_least_ns(np.sort(amount[rows]), total, beyond), float(together[mine[0]]))
            amount[rows[amount[rows] < least]] = 0
    return replace(own, amount_ns=amount)


def _least_ns(amounts: NDArray[np.int64], total: int, stalls: Tail) -> float:
    """From which of ``amounts``, in order, on there are more of them than stalls make in ``total``."""
    once = stalls.share_beyond(amounts)
    chance = _chance(len(amounts) - np.arange(len(amounts)), total, 1 - (1 - once) ** HAND_OVERS)
    sure = np.flatnonzero(chance < BEYOND)
    return float(amounts[sure[0]]) if len(sure) else float("inf")


def _chance(least: NDArray[np.int64], total: int, share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of ``total`` independent events of probability ``share``, the chance of ``least`` or more, at the most.

    Chernoff's bound, by the relative entropy of the two shares.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = least / total
        apart = seen * np.log(seen / share)
        apart += np.where(seen < 1, (1 - seen) * np.log((1 - seen) / (1 - share)), 0.0)
        return np.where(seen > share, np.exp(-total * apart), 1.0)
