"""Collectives in, the job's steps out: the pattern that its sequence of collectives repeats.

A training step or a generated token is the same sequence of operations again and again. Each
endpoint's own sequence is searched, as it entered them: groups that take turns do not fall into the
same order everywhere. Where all collectives are alike, the longer pause that recurs at even
distances tells the steps apart (a token's work between the last layer and the first of the next); else
where their sizes change: what is batched does so from step to step, never within one.
"""

from __future__ import annotations

from math import erfc, exp, lgamma, log, log1p, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import distinct, key_numbers, median_of, percentile
from dpuflow.entries import previous_row
from dpuflow.matching.model import MOST
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance

REPEATS = 3
"""A pattern is what comes at least this often."""
COVERED = 0.8
"""Share of an operation's occurrences that a pattern must hold, for every operation that recurs."""
LONGEST = 512
"""Repetitions of the shortest pattern that one step may have: more layers than any model in use."""
STEADY = 6
"""Repetitions it takes to know steps by their pauses; of few collectives each it takes more (``SELDOM``)."""
SELDOM = 1e-3
"""How often chance may make pauses that are all alike look like steps, at any distance and place tried."""
SURELY = 0.01
"""How often chance may make pauses at a shorter distance look longer."""
SAMPLE = 8192
"""Repetitions that are looked at for longer pauses; later ones continue the pattern."""


class Steps(NamedTuple):
    """The steps of one job; ``ends`` are rows of Entries: ``reference``'s last collective of each step."""

    endpoints: list[int]
    reference: int  # the endpoint whose sequence they were told from
    period: int  # collectives and transfers of ``reference`` in a step
    by_pause: bool  # told by their pauses, or by what they batch: all their collectives are alike
    ends: Ints


def find_steps(instances: Sequence[Instance], entries: Entries, group: Ints) -> tuple[list[Steps], Ints]:
    """The steps of each job, and for each row of Entries the step of its own endpoint (-1: in none).

    A job is what groups connect; one without a repeating pattern has no steps. ``group`` numbers each
    collective's group.
    """
    step = np.full(len(entries.endpoint), -1, np.int64)
    found = []
    coarse, fine = _classes(instances, group)
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    pause = _pauses(entries)
    for members in jobs(instances):
        best: tuple[int, Steps] | None = None
        for endpoint in members:
            rows = own_rows(entries, endpoint)
            if len(rows) < REPEATS:
                continue
            which = entries.collective[rows]
            one = _steps_of(fine[which], pause[rows], tied[which])
            if one is None or one[:2] == (1, False):
                by_size = _steps_of(coarse[which], pause[rows], tied[which], fine[which])
                one = by_size if one is None or (by_size is not None and by_size[1]) else one
            if one is None:
                one = _steps_between(fine[which], pause[rows], tied[which])
            if one is None:
                continue
            period, by_pause, numbers = one
            step[rows] = numbers
            last = np.flatnonzero((numbers >= 0) & (np.r_[numbers[1:], -1] != numbers))
            covered = int((numbers >= 0).sum())
            if best is None or covered > best[0]:
                best = (covered, Steps(members, endpoint, period, by_pause, rows[last]))
        if best is not None:
            found.append(best[1])
    return found, step


def lengths(steps: Steps, entries: Entries) -> tuple[Ints, Ints]:
    """Numbers of the steps whose end, and that of the step before, are known; how long each took, ns."""
    ends_ns = entries.leave_ns[steps.ends]
    known = ends_ns != NEVER
    numbers = 1 + np.flatnonzero(known[1:] & known[:-1])
    return numbers, ends_ns[numbers] - ends_ns[numbers - 1]


def jobs(instances: Sequence[Instance]) -> list[list[int]]:
    """Endpoints that collectives or transfers connect, in order of the smallest."""
    groups = connected({tuple(i.order) for i in instances}, lambda order: order)
    return sorted(sorted({end for order in orders for end in order}) for orders in groups)


def places_in_steps(step: Ints, endpoint: Ints) -> Ints:
    """Each row's place in its endpoint's ``step``, in order of collectives; -1 outside of steps.

    The same work comes at the same place of each step.
    """
    order = np.lexsort((step, endpoint))  # stable: rows stay in order of collectives
    keys = np.stack([endpoint[order], step[order]])
    new = np.r_[True, (np.diff(keys, axis=1) != 0).any(axis=0)][: len(order)]
    number = np.arange(len(order))
    place = np.empty(len(order), np.int64)
    place[order] = number - np.maximum.accumulate(np.where(new, number, 0))
    return np.where(step >= 0, place, -1)


def own_rows(entries: Entries, endpoint: int) -> Ints:
    """Rows of Entries of one endpoint, in the order in which it entered."""
    rows = entries.of[endpoint]
    when = np.where(entries.enter_ns[rows] != NEVER, entries.enter_ns[rows], entries.leave_ns[rows])
    return np.asarray(rows[np.lexsort((entries.collective[rows], when))], np.int64)


def _classes(instances: Sequence[Instance], group: Ints) -> tuple[Ints, Ints]:
    """For each collective what it is: the operation on its group, and the same with its size."""
    coarse = [
        (i.op, g, tuple(i.order) if i.op == Op.SEND_RECV else i.root)
        for i, g in zip(instances, group.tolist(), strict=True)
    ]
    fine = ((*key, i.size) for key, i in zip(coarse, instances, strict=True))
    return key_numbers(coarse), key_numbers(fine)


def _pauses(entries: Entries) -> Floats:
    """Per row the time from its rank's last leaving to its entry: the median over the collective's ranks.

    The median, so that one rank's lateness makes no pause. 0 where a rank had not left.
    """
    before = previous_row(entries)
    known = (before >= 0) & (entries.enter_ns != NEVER) & (entries.leave_ns[before] != NEVER)
    own = np.where(known, entries.enter_ns - np.where(known, entries.leave_ns[before], 0), 0)
    own = np.maximum(own, 0).astype(np.float64)
    count = np.diff(entries.offsets)
    order = np.lexsort((own, entries.collective))
    middle = order[entries.offsets[:-1] + (count - 1) // 2] if len(count) else order
    return np.repeat(own[middle], count)


def _steps_of(
    classes: Ints, pause: Floats, tied: Bools, sizes: Ints | None = None
) -> tuple[int, bool, Ints] | None:
    """Period, whether pauses told it, and each place's step (-1 outside), for one endpoint's sequence.

    ``sizes``: classes that differ by size, too, of what may change from step to step.
    """
    found = _pattern(classes)
    if found is None:
        return None
    period, covered = found
    places = np.flatnonzero(covered)
    by_pause = False
    numbers = np.full(len(classes), -1, np.int64)
    phase = _phase(places, pause, tied, period)
    longer = _recurring(pause[places][phase::period])
    if longer is None and sizes is not None and period == 1:
        longer = _between_changes(sizes[places])
    if longer is not None:
        phase, period, by_pause = phase + longer[1] * period, longer[0] * period, True
    # Whole steps only, and none over a hole in the pattern.
    run = np.cumsum(np.r_[0, np.diff(places) != 1])
    number = -1
    for each in distinct(run):
        mine = places[run == each]
        begin = (phase - (int(mine[0]) - int(places[0]))) % period
        whole = (len(mine) - begin) // period
        if whole > 0:
            taken = mine[begin : begin + whole * period]
            numbers[taken] = number + 1 + np.arange(len(taken)) // period
            number += whole
    return (period, by_pause, numbers) if number + 1 >= REPEATS else None


def _steps_between(classes: Ints, pause: Floats, tied: Bools) -> tuple[int, bool, Ints] | None:
    """The steps of the collectives alone, where transfers between them come in no fixed order.

    What comes before a step's collectives, since those of the step before, belongs to it.
    """
    at = np.flatnonzero(tied)
    found = _steps_of(classes[at], pause[at], tied[at]) if 0 < len(at) < len(tied) else None
    if found is None:
        return None
    _, by_pause, of_tied = found
    following = np.searchsorted(at, np.arange(len(classes)), "left")
    numbers = np.where(following < len(at), of_tied[np.minimum(following, len(at) - 1)], -1)
    numbers[: at[0]] = -1  # how long before the first it began is not known
    counts = np.bincount(numbers[numbers >= 0])
    return int(median_of(counts)), by_pause, numbers


def _pattern(classes: Ints) -> tuple[int, Bools] | None:
    """The period that explains most of a sequence, and the places that follow it."""
    best: tuple[int, Bools] | None = None
    for period in sorted(_candidates(classes)):
        covered = _covered(classes, period)
        if best is None or covered.sum() > best[1].sum():
            best = (period, covered)
    if best is None or not best[1].any():
        return None
    # What recurs within the pattern's span must be part of it.
    at = np.flatnonzero(best[1])
    span, inside = classes[at[0] : at[-1] + 1], best[1][at[0] : at[-1] + 1]
    total = np.bincount(span)
    held = np.bincount(span, inside, len(total))
    return best if bool((held[total >= REPEATS] >= COVERED * total[total >= REPEATS]).all()) else None


def _candidates(classes: Ints) -> set[int]:
    """Distances at which some operation comes again and again."""
    total = np.bincount(classes)
    found: set[int] = set()
    for each in np.argsort(total, kind="stable").tolist():
        if total[each] < REPEATS or len(found) >= 8:
            continue
        at = np.flatnonzero(classes == each)
        for ahead in range(1, min(len(at) // REPEATS, LONGEST) + 1):
            distances, times = np.unique(at[ahead:] - at[:-ahead], return_counts=True)
            if times.max() >= MOST * times.sum():
                found.add(int(distances[np.argmax(times)]))
                break
    return found


def _covered(classes: Ints, period: int) -> Bools:
    """Places within stretches that repeat themselves ``period`` later, at least REPEATS times over."""
    out = np.zeros(len(classes), bool)
    same = classes[:-period] == classes[period:]
    edges = np.flatnonzero(np.diff(np.r_[False, same, False].astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if end - start >= (REPEATS - 1) * period:
            out[start : end + period] = True
    return out


def _phase(places: Ints, pause: Floats, tied: Bools, period: int) -> int:
    """Where in the pattern a step begins: after the longest pause.

    Among transfers of a pipeline a collective is where its stages meet: there it begins after the
    last of those that follow one another.
    """
    whole = len(places) // period * period
    if period == 1 or whole == 0:
        return 0
    meets = tied[places[:period]]
    if meets.any() and not meets.all():
        after = np.flatnonzero(~meets & np.roll(meets, 1))
        return int(after[0])
    return int(np.argmax(np.median(pause[places[:whole]].reshape(-1, period), axis=0)))


def _recurring(pause: Floats) -> tuple[int, int] | None:
    """The distance at which longer pauses recur, and where the first is; None where none stand out.

    Of the pauses at that distance four in five are longer than nine in ten of all others, and pauses in
    random order would seldom have so many of the long ones at one place.
    """
    pause, tried = pause[:SAMPLE], 0
    for period in range(2, min(len(pause) // STEADY, LONGEST) + 1):
        folded = pause[: len(pause) // period * period].reshape(-1, period)
        place = int(np.argmax(np.median(folded, axis=0)))
        mine, others = folded[1:, place], np.delete(folded, place, axis=1).ravel()
        tried += 2 * period
        # Long ones are those beyond most others; or those as long as the shortest here.
        limits = (np.nextafter(percentile(others, 90), np.inf), mine.min())
        if percentile(mine, 20) >= limits[0]:
            chances = (
                _drawn(hits, len(mine), hits + int((others >= limit).sum()), len(mine) + len(others))
                for limit in limits
                for hits in (int((mine >= limit).sum()),)
            )
            if tried * min(chances) < SELDOM:
                return None if _of_shorter(pause, period, place) else (period, place)
    return None


def _of_shorter(pause: Floats, period: int, place: int) -> bool:
    """Whether pauses are longer at a divisor's distance, too, though not by enough to tell: then the period
    may be several of that."""
    at = np.arange(len(pause))
    parts = [part for part in range(2, period) if period % part == 0]
    for part in parts:
        between = pause[(at % part == place % part) & (at % period != place)]
        others = np.sort(pause[at % part != place % part])
        # The rank-sum test, by its normal limit.
        above = np.searchsorted(others, between).mean() / len(others) - 0.5
        spread = sqrt((1 / len(between) + 1 / len(others)) / 12)
        if erfc(above / spread / sqrt(2)) / 2 * len(parts) < SURELY:
            return True
    return False


def _between_changes(sizes: Ints) -> tuple[int, int] | None:
    """The longest distance of which nearly all distances between changes of size are multiples, and where the
    first of them is; None where chance may have made it.

    What is batched changes from step to step, never within one.
    """
    at = np.flatnonzero(np.diff(sizes)) + 1
    apart = np.diff(at)
    for period in range(min(LONGEST, len(sizes) // REPEATS), 1, -1):
        whole = int((apart % period == 0).sum())
        if whole >= MOST * len(apart) and _often(whole, len(apart), 1 / period) * LONGEST < SELDOM:
            return period, int(np.bincount(at % period).argmax())
    return None


def _often(least: int, draws: int, share: float) -> float:
    """The chance that ``least`` of ``draws`` or more come true, each with the chance ``share``."""
    ways = (lgamma(draws + 1) - lgamma(k + 1) - lgamma(draws - k + 1) for k in range(least, draws + 1))
    logs = (w + k * log(share) + (draws - k) * log1p(-share) for k, w in enumerate(ways, least))
    return sum(map(exp, logs))


def _drawn(least: int, draws: int, marked: int, total: int) -> float:
    """The chance that of ``draws`` out of ``total`` at least ``least`` are ``marked`` ones."""

    def ways(of: int, taken: int) -> float:
        return lgamma(of + 1) - lgamma(taken + 1) - lgamma(of - taken + 1)

    every = ways(total, draws)
    return sum(
        exp(ways(marked, k) + ways(total - marked, draws - k) - every)
        for k in range(max(least, draws + marked - total), min(draws, marked) + 1)
    )
