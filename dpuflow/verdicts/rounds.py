"""Lateness that goes round: one rank after the other works longer, each in its turn.

In: how much longer than its peers each rank worked in each unit (a step, else a collective). Out: the ranks
that took turns. Single turns may be within the noise. That the same ranks worked longest whenever as
many units had gone by as there are ranks is told from chance by their places alone (``standing``).
"""

from __future__ import annotations

from math import erfc, sqrt
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import percentile
from dpuflow.verdicts.habits import CHANCE, USUAL_SHARE, is_material
from dpuflow.verdicts.standing import standing_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


def going_round(excess_ns: NDArray[np.int64], later_ns: NDArray[np.int64], span_ns: int) -> NDArray[np.bool_]:
    """Of each rank (column) whether it is one of several that work longer in turn; rows are units in order.

    ``excess_ns`` is how much longer than its peers it worked, ``later_ns`` what of it made it late,
    ``span_ns`` how long all of it took. A rank takes part if at its turn it works longer four times of five,
    and that costs its share of what counts; at least two must, at different turns.
    """
    units, ranks = excess_ns.shape
    none = np.zeros(ranks, bool)
    if ranks < 2 or units < 2 * ranks or _by_chance(excess_ns, ranks) >= CHANCE:
        return none
    turn = np.arange(units) % ranks
    own = np.full(ranks, -1)
    for rank in range(ranks):
        usual = [float(np.median(later_ns[turn == k, rank])) for k in range(ranks)]
        best = int(np.argmax(usual))
        mine = turn == best
        often = percentile(excess_ns[mine, rank], 100 * (1 - USUAL_SHARE)) > 0
        if often and is_material(round(usual[best] * int(mine.sum()) * ranks), span_ns):
            own[rank] = best
    return own >= 0 if len(np.unique(own[own >= 0])) > 1 else none


def _by_chance(excess_ns: NDArray[np.int64], period: int) -> float:
    """How often units in random order would be as alike ``period`` units later as these are.

    Alike are the places of the ranks, less each rank's mean place: who always works longer is no turn. Of
    units in random order the products of two have mean 0 and the variance that all units' places have.
    """
    units, ranks = excess_ns.shape
    of = np.repeat(np.arange(units), ranks)
    place = standing_of(of, excess_ns.ravel()).place.reshape(units, ranks)
    place -= place.mean(axis=0)
    total, pairs = 0.0, 0
    for turn in range(period):
        mine = place[turn::period]
        total += (float((mine.sum(axis=0) ** 2).sum()) - float((mine**2).sum())) / 2
        pairs += len(mine) * (len(mine) - 1) // 2
    variance = float((np.cov(place, rowvar=False, bias=True) ** 2).sum())
    return 0.5 * erfc(total / sqrt(2 * pairs * variance)) if pairs and variance > 0 else 1.0
