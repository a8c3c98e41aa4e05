"""Each rank's place among its peers, and what chance does: who stands high, and who takes turns in it.

In: how much longer than its peers each rank worked (``excess``). Out: its standing in each collective, and
for any of its collectives the chance that a rank that is like all others stands as high; and the ranks that
took turns, each working longer whenever as many units (steps, else collectives) had gone by as there are
ranks. Nothing is assumed of how long work takes or scatters: of ranks that are alike each place is as likely
as any (Friedman, 1937), and single turns may be within the noise.
"""

from __future__ import annotations

from math import erfc, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import percentile
from dpuflow.entries import BEYOND
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.persistence import CHANCE, FEWEST, USUAL_SHARE, is_material

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dpuflow.entries import Tail

TILTS: Final = 2.0 ** np.arange(-4, 6)
"""Exponents at which Chernoff's bound is tried: the best of them is a bound as any other."""


class Standing(NamedTuple):
    """Per row of Entries; of ranks that are alike ``place`` is 0 on average."""

    place: NDArray[np.float64]  # -1/2: worked shortest of its collective's ranks, 1/2: longest
    ranks: NDArray[np.int64]  # that are compared there; below 2 nothing is said of the row

    def chance(self, rows: NDArray[np.int64]) -> float:
        """How often a rank like all others would stand as high in these rows, or higher."""
        rows = rows[self.ranks[rows] >= 2]
        return _beyond(float(self.place[rows].sum()), self.ranks[rows])


def standing_of(collective: NDArray[np.int64], excess_ns: NDArray[np.int64]) -> Standing:
    """The standing of each row by ``excess_ns`` among those of its collective; NEVER: not compared."""
    place, ranks = np.zeros(len(collective)), np.zeros(len(collective), np.int64)
    known = np.flatnonzero(excess_ns != NEVER)
    if not len(known):
        return Standing(place, ranks)
    order = known[np.lexsort((excess_ns[known], collective[known]))]
    of, value = collective[order], excess_ns[order]
    fresh = np.r_[True, of[1:] != of[:-1]]
    first = np.flatnonzero(fresh)
    count = np.diff(np.r_[first, len(order)])
    begin, many = np.repeat(first, count), np.repeat(count, count)
    # Of equal ones each stands in their middle.
    heads = np.flatnonzero(fresh | np.r_[True, value[1:] != value[:-1]])
    equal = np.diff(np.r_[heads, len(order)])
    middle = np.repeat(heads + (equal - 1) / 2, equal)
    place[order] = (middle - begin) / np.maximum(many - 1, 1) - 0.5
    ranks[order] = many
    return Standing(place, ranks)


def _beyond(total: float, ranks: NDArray[np.int64]) -> float:
    """The chance that places drawn at random among so many ranks sum up to ``total`` or more.

    By the normal distribution, from half a step below: places come in steps.
    """
    if not len(ranks):
        return 1.0
    variance = float(((ranks + 1) / (12 * (ranks - 1))).sum())
    return 0.5 * erfc((total - 0.5 / float(ranks.max() - 1)) / sqrt(2 * variance))


OCCASIONS: Final = (2, 20)
"""So often a host may stall before a collective, at the least and at the most: as it takes up the last input
and hands on the first message; and its work lets it be interrupted again and again."""


class Incidents(NamedTuple):
    """Of one rank's acts; 0 where there is none."""

    open_ns: NDArray[np.int64]  # not explained by as few stalls as there must be: no reason to clear
    sure_ns: NDArray[np.int64]  # explained by nothing: neither by as many stalls as may be, nor by chance


def incidents_of(
    units: Mapping[int, NDArray[np.int64]],
    amounts_ns: Mapping[int, NDArray[np.int64]],
    acts: float,
    stalls: Tail | None,
) -> dict[int, Incidents]:
    """What of each rank's amounts, by its acts, neither chance nor its host's stalls explain.

    Nothing explains those of ranks that stand out among their peers by units (``_standing_out``). Those of
    others count, rank by rank or all together, from a length on, if the chance that hosts stall so often, so
    long, is below ``BEYOND``: as often as hand-overs show (``stalls``). Where the capture shows none, all is
    open. ``amounts_ns`` is 0 within the noise; each is what a rank was late by once, in the unit that
    ``units`` tells, or in so many ``acts``. A step of many collectives holds several stalls, and their sum
    is none of them.
    """
    nothing = np.zeros(0, np.int64)
    rank = np.repeat(list(units), [len(each) for each in units.values()]).astype(np.int64)
    unit, amount = (np.concatenate([nothing, *each.values()]) for each in (units, amounts_ns))
    pairs, first = np.unique(np.stack([rank, unit]), axis=1, return_inverse=True)
    summed = np.zeros(pairs.shape[1], np.int64)
    np.add.at(summed, first.ravel(), amount)
    apart = _standing_out(pairs[1], pairs[0], summed)
    others = amount[~np.isin(rank, list(apart))]
    found = {}
    for each, mine in amounts_ns.items():
        least = [0.0, 0.0 if each in apart else np.inf]
        if stalls is not None and each not in apart:
            least = [
                min(_least_ns(some, times * acts, stalls, surely=few) for some in (mine, others))
                for times, few in zip(OCCASIONS, (True, False), strict=True)
            ]
        found[each] = Incidents(*(np.where(mine >= ns, mine, 0) for ns in least))
    return found


def _standing_out(unit: NDArray[np.int64], rank: NDArray[np.int64], amount_ns: NDArray[np.int64]) -> set[int]:
    """The ranks whose incidents are more, or larger, than chance deals out to one of them.

    Of ranks that are alike each has any of a unit's amounts as likely as any other, whatever their
    distribution. No amount counts for more than the rank's third largest (``persistence.habit_ns``). The one
    that stands out most is set aside, and the others are asked again; all share the level ``CHANCE``.
    """
    found: set[int] = set()
    left, ranks = np.ones(len(rank), bool), len(np.unique(rank))
    while True:
        late = np.unique(rank[left & (amount_ns > 0)]).tolist()
        chance = {each: _dealt(unit[left], rank[left] == each, amount_ns[left]) for each in late}
        first = min(late, key=chance.__getitem__, default=None)
        if first is None or ranks * chance[first] >= CHANCE:
            return found
        found.add(first)
        left &= rank != first


def _dealt(unit: NDArray[np.int64], mine: NDArray[np.bool_], amount_ns: NDArray[np.int64]) -> float:
    """How often dealing each unit's amounts to its ranks anew gives one of them as much as ``mine``, at most.

    Chernoff's bound.
    """
    own = np.sort(amount_ns[mine])
    if len(own) < FEWEST or own[-FEWEST] <= 0:
        return 1.0
    share = np.minimum(amount_ns / own[-FEWEST], 1.0)
    _, of = np.unique(unit, return_inverse=True)
    ranks = np.bincount(of)
    took_part = np.bincount(of[mine], minlength=len(ranks)) > 0
    total = float(share[mine].sum())
    mean = [(np.bincount(of, np.exp(tilt * share)) / ranks)[took_part] for tilt in TILTS]
    return float(np.exp(min(np.log(m).sum() - t * total for m, t in zip(mean, TILTS, strict=True))))


def _least_ns(amount_ns: NDArray[np.int64], occasions: float, stalls: Tail, *, surely: bool) -> float:
    """From which of these amounts on there are more of them than stalls make in as many acts.

    ``surely``: than they make at the least, as few of them are seen.
    """
    amounts, total = np.sort(amount_ns[amount_ns > 0]), len(amount_ns)
    once = stalls.share_beyond(amounts, surely=surely)
    chance = _chance(len(amounts) - np.arange(len(amounts)), total, 1 - (1 - once) ** occasions)
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
