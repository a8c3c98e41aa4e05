"""What is beyond noise, chance and cost: the statistics that verdicts rest on.

In: how much longer than its peers a rank worked, unit by unit (a step, else a collective). Out: whether that
is a habit, from when on, and how often chance would make it. Nothing is assumed of how long work takes or
scatters: of ranks that are alike each place among them is as likely as any (Friedman, 1937), and each may
have any of a unit's amounts.
"""

from __future__ import annotations

from math import erfc, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, is_in, median_of, percentile
from dpuflow.entries.rows import BEYOND, ONE_SIDED, QUARTER_IN_SIGMAS
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries import Tail


LATE_SHARE = 2 / 3
"""Late in at least two of three units: an endpoint is `late`, less often `intermittent`."""
FEWEST = 3
"""Less often than this is an incident, not a habit of the endpoint."""
USUAL_SHARE = 0.8
"""An endpoint that works longer than its peers in this share of units does so as a rule."""
MATERIAL_SHARE = 0.01
"""An endpoint that costs its group less than this share of its time (``pauses``) is not worth a verdict."""
CRITICAL_SHARE = 0.10
"""What takes a tenth of the job's time or more is critical, below that a warning; an all-clear must exclude
what is critical."""
SIGMAS = 3.0
"""How many standard deviations of the noise make a rank late in one collective, or a stage in a unit.
Lateness counts from the earliest rank, so entries pass it more often than one normal value in 700 would."""
RARELY = 0.1
"""Who is late in this share of its units or more is late now and then; less often, by incidents."""
CHANCE_OF_ONE = 0.05
"""What chance may do to one interval, as to all that are given: 95 % hold."""
FEWEST_GAPS = 5
"""Distances between late units that it takes to call them even."""
CHANCE = 0.01
"""What chance may do in a whole capture: the level of a test, shared by all ranks and places it asks."""
RARE = 1e-3
"""What chance may do to where something is said to begin: 99.9 % confidence, at any place that is tried."""
MEAN_IN_SIGMAS = 0.8
"""Mean distance from the middle of a normal distribution, in standard deviations."""


def scatter_of_steps(values: Floats) -> float:
    """One standard deviation, by the steps from one value to the next: a level that changes is no scatter."""
    if len(values) < 2:
        return 0.0
    return float(median_of(np.abs(np.diff(values)))) / (QUARTER_IN_SIGMAS * 2**0.5)


def is_habit(amount_ns: Ints, span_ns: int) -> bool:
    """Whether a rank's own lateness (0 where it was not late) came often enough, and to enough.

    One or two incidents, however long, make no habit: each unit counts for no more than the third worst.
    """
    return is_material(habit_ns(amount_ns), span_ns)


def habit_ns(amount_ns: Ints) -> int:
    """What its own lateness costs a rank's group, each unit counting no more than the third worst."""
    third = np.sort(amount_ns)[-FEWEST] if len(amount_ns) >= FEWEST else 0
    return int(np.minimum(amount_ns, third).sum())


def in_rhythm(late: Bools) -> bool:
    """Whether late units come at an even distance, one more or one less now and then.

    Of independent events few lie as far apart as the middle pair: the distances are geometric. Not where they
    come in every unit.
    """
    gaps = np.diff(np.flatnonzero(late))
    middle = float(median_of(gaps)) if len(gaps) >= FEWEST_GAPS else 0.0
    return middle >= 2 and float((np.abs(gaps - middle) <= middle / 4).mean()) >= USUAL_SHARE


def is_material(amount_ns: int, span_ns: int) -> bool:
    """Whether lateness of ``amount_ns`` in all costs a job of ``span_ns`` enough to speak of."""
    return amount_ns > 0 and amount_ns >= MATERIAL_SHARE * span_ns


def is_seldom(amount_ns: Ints, span_ns: int) -> bool:
    """Whether what a rank costs is incidents, no habit that was seen too shortly.

    Of the worst units, without which the others cost nothing to speak of, there are so few that a rank that
    is late in ``RARELY`` of all would hardly (once in twenty times) have shown no more.
    """
    worst, total = np.cumsum(-np.sort(-amount_ns)), len(amount_ns)
    left = np.concatenate([worst[-1:], worst[-1:] - worst])
    hits = next(k for k, ns in enumerate([*left.tolist(), 0]) if not is_material(ns, span_ns))
    if not hits or hits >= RARELY * total:
        return not hits
    return 1 - at_least(hits + 1, total, RARELY) < CHANCE_OF_ONE


def at_least(hits: int, of: int, rate: float) -> float:
    """The chance of so many hits or more among independent events (binomial)."""
    k = np.arange(of)
    terms = np.cumsum(np.r_[of * np.log1p(-rate), np.log((of - k) / (k + 1)) + np.log(rate / (1 - rate))])
    return float(np.exp(terms[hits:]).sum())


def usual_excess(excess_ns: Ints, later_ns: Ints) -> int:
    """By how much a rank is late as a rule because it works longer, ns a time; 0 where it does not.

    ``excess_ns`` is how much longer than its peers it worked, ``later_ns`` what of it made it late. Whether
    that is more than noise or chance is asked apart: of places among peers (``chance``), or of its
    size.
    """
    if len(excess_ns) < FEWEST or percentile(excess_ns, 100 * (1 - USUAL_SHARE)) <= 0:
        return 0
    return max(round(float(median_of(later_ns))), 0)


def onset_of(excess_ns: Ints, sigma_ns: float, ranks: int = 1) -> int | None:
    """Where a rank began to work longer: the unit that best separates low from high excess, or None.

    The likelihood-ratio change point of the median of Laplace-distributed values: it finds the place by
    the amounts. It must hold for how often as well: the same ratio for the share of units that exceed
    their peers by more than half of what is usual after the cut (a Bernoulli sequence). The first must
    beat "no change" by the modified Bayesian information criterion (Zhang and Siegmund, 2007), the second
    by log n for each of the ``ranks`` that are late now and then; with at most one of three such units before
    the cut, and two of three after it, or longer work as a rule (``usual_excess``), and that half beyond the
    noise.
    ``sigma_ns``, one standard deviation of the noise, is the least scatter that is taken for real. At
    least ``least`` units before it show no such excess: late from the start has no onset.
    """
    n = len(excess_ns)
    if n < 2 * FEWEST:
        return None
    values = excess_ns.astype(np.float64)
    floor = max(MEAN_IN_SIGMAS * sigma_ns, 1e-9) * n
    alone = max(_scatter(values), floor)
    cuts = np.arange(FEWEST, n - FEWEST + 1)
    apart = np.array([_scatter(values[:k]) + _scatter(values[k:]) for k in cuts])
    price = 1.5 * np.log(n) - (np.log(cuts / n) + np.log(1 - cuts / n)) / 2
    at = int(np.argmin(apart))
    best, gain = int(cuts[at]), n * np.log(alone / max(apart[at], floor)) - price[at]
    half = float(median_of(values[best:])) / 2
    more = values > half
    apart_by = [_likelihood(int(each.sum()), len(each)) for each in (more[:best], more[best:], more)]
    often = float(apart_by[0] + apart_by[1] - apart_by[2] - np.log(n * ranks))
    rises = gain > 0 and often > 0 and half > sigma_ns
    rises &= more[:best].mean() <= 1 - LATE_SHARE and (~more[:best]).sum() >= FEWEST
    after = excess_ns[best:]
    rises &= more[best:].mean() >= LATE_SHARE or usual_excess(after, after) > sigma_ns
    return best if rises else None


def turn_of(hits: Bools, allowed: Bools | None = None) -> int | None:
    """From which one on ``hits`` come more often, at one of them; None where no place is sure.

    The place that parts a Bernoulli sequence best, among those ``allowed`` (one a hit), at 99.9 % confidence
    over all that are tried.
    """
    at, n = np.flatnonzero(hits), len(hits)
    total = len(at)
    if not total:
        return None
    before = np.arange(total)  # hits before each of them
    apart = _likelihood(before, at) + _likelihood(total - before, n - at) - _likelihood(total, n)
    rises = before * (n - at) < (total - before) * at
    apart[~(rises if allowed is None else rises & allowed)] = 0.0
    if apart.max() <= np.log(n / RARE):
        return None
    return int(at[np.argmax(apart)])


def _likelihood(hits: Ints | int, of: Ints | int) -> Floats:
    """The log-likelihood of so many hits among independent events, at their own rate."""
    count, whole = np.asarray(hits, np.float64), np.asarray(of, np.float64)
    rate = np.minimum(
        np.maximum(count / np.maximum(whole, 1), 1e-12), 1 - 1e-12
    )  # np.clip takes twice as long
    return np.asarray(count * np.log(rate) + (whole - count) * np.log(1 - rate), np.float64)


def _scatter(values: Floats) -> float:
    return float(np.abs(values - median_of(values)).sum())


TILTS: Final = 2.0 ** np.arange(-4, 6)
"""Exponents at which Chernoff's bound is tried: the best of them is a bound as any other."""


class Standing(NamedTuple):
    """Per row of Entries; of ranks that are alike ``place`` is 0 on average."""

    place: Floats  # -1/2: worked shortest of its collective's ranks, 1/2: longest
    ranks: Ints  # that are compared there; below 2 nothing is said of the row

    def chance(self, rows: Ints) -> float:
        """How often a rank like all others would stand as high in these rows, or higher."""
        rows = rows[self.ranks[rows] >= 2]
        return _beyond(float(self.place[rows].sum()), self.ranks[rows])


def standing_of(collective: Ints, excess_ns: Ints) -> Standing:
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


def _beyond(total: float, ranks: Ints) -> float:
    """The chance that places drawn at random among so many ranks sum up to ``total`` or more.

    By the normal distribution, from half a step below: places come in steps.
    """
    if not len(ranks):
        return 1.0
    variance = float(((ranks + 1) / (12 * (ranks - 1))).sum())
    return 0.5 * erfc((total - 0.5 / float(ranks.max() - 1)) / sqrt(2 * variance))


OCCASIONS: Final = (2, 20)
"""So often a host may stall before a collective, at the least and at the most: as it takes up the last input
and hands on the first message; and its work lets it be interrupted again and again. Long ones come no more
often than shorter ones allow (``_occasions``)."""


class Incidents(NamedTuple):
    """Of one rank's acts; 0 where there is none."""

    open_ns: Ints  # not explained by as few stalls as there must be: no reason to clear
    sure_ns: Ints  # explained by nothing: neither by as many stalls as may be, nor by chance


def incidents_of(
    units: Mapping[int, Ints],
    amounts_ns: Mapping[int, Ints],
    stalls: Tail | None,
    *,
    staged: bool = False,
    span_ns: int = 0,
) -> dict[int, Incidents]:
    """What of each rank's amounts, by its acts, neither chance nor its host's stalls explain.

    Nothing explains those of ranks that stand out among their peers by units (``_standing_out``). Those of
    others count, rank by rank or all together, from a length on, if the chance that hosts stall so often, so
    long, is below ``BEYOND``: as often as hand-overs show (``stalls``). Where the capture shows none, all is
    open; of a job of ``span_ns`` whose GPUs send (0: of no such job) it counts if all together are critical.
    ``amounts_ns`` is 0 within the noise; each is what a rank was late by once, in the unit that ``units``
    tells. A step of many collectives holds several stalls, and their sum is none of them. ``staged``: some
    are acts of pipeline stages, which work and wait in ways of their own: shorter incidents of these do not
    bound how often hosts stall.
    """
    nothing = np.zeros(0, np.int64)
    rank = np.repeat(list(units), [len(each) for each in units.values()]).astype(np.int64)
    unit, amount = (np.concatenate([nothing, *each.values()]) for each in (units, amounts_ns))
    pairs, first = np.unique(np.stack([rank, unit]), axis=1, return_inverse=True)
    summed = np.zeros(pairs.shape[1], np.int64)
    np.add.at(summed, first.ravel(), amount)
    apart = _standing_out(pairs[1], pairs[0], summed)
    others = amount[~is_in(rank, list(apart))]
    critical = 0 < CRITICAL_SHARE * span_ns <= others.sum()
    found = {}
    asked: list[tuple[Ints, Floats] | None] = []  # as few stalls as there must be, as many as may be
    if stalls is not None:
        asked = [None, _occasions(amount[:0] if staged else others, stalls)]
    together = [_least_ns(others, stalls, often) for often in asked] if stalls is not None else []
    for each, mine in amounts_ns.items():
        least = [0.0, 0.0 if each in apart or (stalls is None and critical) else np.inf]
        if stalls is not None and each not in apart:
            alone = [_least_ns(mine, stalls, often) for often in asked]
            least = list(map(min, alone, together))
        found[each] = Incidents(*(np.where(mine >= ns, mine, 0) for ns in least))
    return found


def _standing_out(unit: Ints, rank: Ints, amount_ns: Ints) -> set[int]:
    """The ranks whose incidents are more, or larger, than chance deals out to one of them.

    Of ranks that are alike each has any of a unit's amounts as likely as any other, whatever their
    distribution. No amount counts for more than the rank's third largest (``chance.habit_ns``). The one
    that stands out most is set aside, and the others are asked again; all share the level ``CHANCE``.
    """
    found: set[int] = set()
    left, ranks = np.ones(len(rank), bool), len(distinct(rank))
    while True:
        late = distinct(rank[left & (amount_ns > 0)]).tolist()
        chance = {each: _dealt(unit[left], rank[left] == each, amount_ns[left]) for each in late}
        first = min(late, key=chance.__getitem__, default=None)
        if first is None or ranks * chance[first] >= CHANCE:
            return found
        found.add(first)
        left &= rank != first


def _dealt(unit: Ints, mine: Bools, amount_ns: Ints) -> float:
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


def _least_ns(amount_ns: Ints, stalls: Tail, often: tuple[Ints, Floats] | None) -> float:
    """From which of these amounts on there are more of them than stalls make in as many acts.

    At the least, as few of them are seen; or, given how ``often`` they may be (``_occasions``), at the most.
    """
    amounts, total = np.sort(amount_ns[amount_ns > 0]), len(amount_ns)
    if not len(amounts):
        return np.inf
    once = stalls.share_beyond(amounts, surely=often is None)
    times = OCCASIONS[0] if often is None else often[1][np.searchsorted(often[0], amounts, "left")]
    chance = _chance(len(amounts) - np.arange(len(amounts)), total, 1 - (1 - once) ** times)
    sure = np.flatnonzero(chance < BEYOND)
    return float(amounts[sure[0]]) if len(sure) else np.inf


def _occasions(amount_ns: Ints, stalls: Tail) -> tuple[Ints, Floats]:
    """How often hosts stall before a collective for as long as some amounts (ascending) or longer, at the
    most: up to each of these, and beyond them all.

    Stalls of shorter lengths would show as often: whatever made the incidents of all ranks (``amount_ns``, 0
    within the noise), from no length on are there more stalls than these (95 %, Wilson 1927).
    """
    amounts, some = np.sort(amount_ns[amount_ns > 0]), ONE_SIDED**2 / max(len(amount_ns), 1)
    share = (len(amounts) - np.arange(len(amounts))) / max(len(amount_ns), 1)
    upper = (share + some / 2 + np.sqrt(some * (share * (1 - share) + some / 4))) / (1 + some)
    once = np.clip(stalls.share_beyond(amounts, surely=True), 1e-12, 1 - 1e-12)
    most = np.log1p(-np.minimum(upper, 1 - 1e-12)) / np.log1p(-once)
    return amounts, np.minimum.accumulate(np.r_[float(OCCASIONS[1]), most])


def _chance(least: Ints, total: int, share: Floats) -> Floats:
    """Of ``total`` independent events of probability ``share``, the chance of ``least`` or more, at the most.

    Chernoff's bound, by the relative entropy of the two shares.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = least / total
        apart = seen * np.log(seen / share)
        apart += np.where(seen < 1, (1 - seen) * np.log((1 - seen) / (1 - share)), 0.0)
        return np.where(seen > share, np.exp(-total * apart), 1.0)
