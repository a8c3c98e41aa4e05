"""A rank's own lateness, unit by unit (a step, else a collective), in; whether that is a habit, out.

Amounts are nanoseconds by which the rank worked longer than its peers in a unit of its sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

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
"""Distances between late units that can be told to be even."""
CHANCE = 0.01
"""What chance may do in a whole capture: the level of a test, shared by all ranks and places it asks."""
QUARTER_IN_SIGMAS = 0.6745
"""Median to quartile of a normal distribution, in standard deviations."""
MEAN_IN_SIGMAS = 0.8
"""Mean distance from the middle of a normal distribution, in standard deviations."""


def is_habit(amount_ns: NDArray[np.int64], span_ns: int) -> bool:
    """Whether a rank's own lateness (0 where it was not late) came often enough, and to enough.

    One or two incidents, however long, make no habit: each unit counts for no more than the third worst.
    """
    return is_material(habit_ns(amount_ns), span_ns)


def habit_ns(amount_ns: NDArray[np.int64]) -> int:
    """What its own lateness costs a rank's group, each unit counting no more than the third worst."""
    third = np.sort(amount_ns)[-FEWEST] if len(amount_ns) >= FEWEST else 0
    return int(np.minimum(amount_ns, third).sum())


def beside_habits(amounts_ns: Iterable[NDArray[np.int64]], span_ns: int) -> NDArray[np.int64]:
    """The units of all ranks but those whose own lateness is a habit by itself, in one row.

    Beside one that is late again and again, single incidents of others are nobody's habit.
    """
    alone = [each for each in amounts_ns if not is_habit(each, span_ns)]
    return np.concatenate([*alone, np.zeros(0, np.int64)])


def in_rhythm(late: NDArray[np.bool_]) -> bool:
    """Whether late units come at an even distance, one more or one less now and then.

    Of independent events few lie as far apart as the middle pair: the distances are geometric. Not where they
    come in every unit.
    """
    gaps = np.diff(np.flatnonzero(late))
    middle = float(np.median(gaps)) if len(gaps) >= FEWEST_GAPS else 0.0
    return middle >= 2 and float((np.abs(gaps - middle) <= middle / 4).mean()) >= USUAL_SHARE


def is_material(amount_ns: int, span_ns: int) -> bool:
    """Whether lateness of ``amount_ns`` in all costs a job of ``span_ns`` enough to speak of."""
    return amount_ns > 0 and amount_ns >= MATERIAL_SHARE * span_ns


def is_seldom(amount_ns: NDArray[np.int64], span_ns: int) -> bool:
    """Whether what a rank costs is incidents, no habit that was seen too shortly.

    Of the worst units, without which the others cost nothing to speak of, there are so few that a rank that
    is late in ``RARELY`` of all would hardly (once in twenty times) have shown no more.
    """
    worst, total = np.cumsum(-np.sort(-amount_ns)), len(amount_ns)
    left = np.concatenate([worst[-1:], worst[-1:] - worst])
    hits = next(k for k, ns in enumerate([*left.tolist(), 0]) if not is_material(ns, span_ns))
    if not hits or hits >= RARELY * total:
        return not hits
    k = np.arange(hits)
    terms = np.cumsum(np.log((total - k) / (k + 1)) + np.log(RARELY / (1 - RARELY)))
    return float(np.exp(total * np.log(1 - RARELY) + np.r_[0.0, terms]).sum()) < CHANCE_OF_ONE


def usual_excess(excess_ns: NDArray[np.int64], later_ns: NDArray[np.int64]) -> int:
    """By how much a rank is late as a rule because it works longer, ns a time; 0 where it does not.

    ``excess_ns`` is how much longer than its peers it worked, ``later_ns`` what of it made it late. Whether
    that is more than noise or chance is asked apart: of places among peers (``significance``), or of its
    size.
    """
    if len(excess_ns) < FEWEST or percentile(excess_ns, 100 * (1 - USUAL_SHARE)) <= 0:
        return 0
    return max(round(float(np.median(later_ns))), 0)


def onset_of(excess_ns: NDArray[np.int64], sigma_ns: float, ranks: int = 1) -> int | None:
    """Where a rank began to work longer: the unit that best parts little from much excess, or None.

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
    half = float(np.median(values[best:])) / 2
    more = values > half
    often = _binomial(more[:best]) + _binomial(more[best:]) - _binomial(more) - np.log(n * ranks)
    rises = gain > 0 and often > 0 and half > sigma_ns
    rises &= more[:best].mean() <= 1 - LATE_SHARE and (~more[:best]).sum() >= FEWEST
    after = excess_ns[best:]
    rises &= more[best:].mean() >= LATE_SHARE or usual_excess(after, after) > sigma_ns
    return best if rises else None


def _binomial(hits: NDArray[np.bool_]) -> float:
    """The log-likelihood of a run of independent events at their own rate."""
    rate = np.clip(hits.mean(), 1e-9, 1 - 1e-9)
    return float(hits.sum() * np.log(rate) + (~hits).sum() * np.log(1 - rate))


def _scatter(values: NDArray[np.float64]) -> float:
    return float(np.abs(values - np.median(values)).sum())
