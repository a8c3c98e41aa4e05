"""What judging compares: each endpoint's sequence of steps, or of collectives where it has no steps.

In: rows of Entries with what each rank answers for itself (``excess``). Out: its units in order, and where in
them it is late as a rule, again and again, in turn with others, or from a time on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import erfc, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, distinct, key_numbers, median_of
from dpuflow.arrays.quantiles import middle_of_others
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.chance import (
    CHANCE,
    FEWEST,
    LATE_SHARE,
    RARE,
    SIGMAS,
    at_least,
    incidents_of,
    is_habit,
    is_material,
    onset_of,
    usual_excess,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Ints
    from dpuflow.entries import Entries, Tail
    from dpuflow.matching import Instance
    from dpuflow.verdicts.chance import Standing
    from dpuflow.verdicts.excess import Own


NOTHING: Final = np.zeros(0, np.int64)


class Units(NamedTuple):
    """One endpoint's sequence of steps, or of collectives where it has no steps."""

    rows: Ints  # of Entries, in order of time
    place: Ints  # of each row in its unit
    amount_ns: Ints  # of each unit: late by its own doing by this much; 0 within the noise
    sure_ns: Ints  # ... that is no chance (``without_chance``)
    open_ns: Ints  # of each unit: with what the network, or messages that nobody read, may excuse
    enter_ns: Ints  # of each row
    kind: Ints  # of each row: operation, size and group


def units_of(rows: Ints, entries: Entries, own: Own, step: Ints, kind: Ints) -> Units:
    """One endpoint's units, given its ``rows``, summed by step.

    ``kind`` as of ``kinds_of``. Where most belong to steps, what lies outside (start-up, the end) is no
    habit.
    """
    rows = rows[own.excess_ns[rows] != NEVER]
    rows = rows[np.argsort(entries.enter_ns[rows], kind="stable")]
    inside = step[rows] >= 0
    if 2 * inside.sum() > len(rows):
        rows = rows[inside]
        starts = np.flatnonzero(np.r_[True, np.diff(step[rows]) != 0])
    else:
        starts = np.arange(len(rows))
    if not len(rows):
        return Units(rows, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
    sigma = np.sqrt(np.add.reduceat(own.sigma_ns[rows] ** 2, starts))
    amount = np.add.reduceat(own.amount_ns[rows], starts)
    return Units(
        rows,
        np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)])),
        np.where(amount > SIGMAS / 2 * sigma, amount, 0),  # of many collectives some are late by chance
        amount,
        np.add.reduceat(own.open_ns[rows], starts),
        entries.enter_ns[rows],
        kind[entries.collective[rows]],
    )


def without_chance(
    units: Mapping[int, Units], own: Own, of: Ints, stalls: Tail | None, span_ns: int = 0
) -> dict[int, Units]:
    """The same less what chance and stalls explain (``incidents_of``); ``of`` is each row's unit, ``span_ns``
    as there."""
    starts = {e: np.flatnonzero(u.place == 0) for e, u in units.items()}
    amount = {}
    for e, u in units.items():
        lengths = np.diff(np.r_[starts[e], len(u.rows)])
        amount[e] = np.where(np.repeat(u.amount_ns > 0, lengths), own.amount_ns[u.rows], 0)
    turns = {e: of[u.rows] for e, u in units.items()}
    found = incidents_of(turns, amount, stalls, staged=bool(own.staged.any()), span_ns=span_ns)
    out = {}
    for e, u in units.items():
        left, sure = (np.add.reduceat(ns, starts[e]) if len(ns) else ns for ns in found[e])
        out[e] = u._replace(amount_ns=left, sure_ns=sure, open_ns=left + u.open_ns)
    return out


def kinds_of(instances: Sequence[Instance], group: Ints) -> Ints:
    """Numbers of each collective's operation, size and group."""
    return key_numbers((i.op, i.size, g) for i, g in zip(instances, group.tolist(), strict=True))


@dataclass
class World:
    """What a single endpoint is compared with."""

    whole_ns: int  # that incidents are weighed against: first entry to last leave
    span_ns: int  # ... stalls apart
    standing: Standing  # of all ranks among their peers
    tests: int  # ranks compared, at each place of their steps
    amount_ns: int  # by which all of them were late by their own doing
    often: frozenset[int] = frozenset()  # endpoints that were late by their own doing as a habit, at a cost
    among_ranks: bool = False  # all ranks together were late as a habit, whoever it was
    third_ns: int = 0  # ... and by how much in the third worst unit of any of them
    together: bool = False  # those that are not late as a habit by themselves were so, all of them together
    shares: dict[int, float] = field(default_factory=dict)  # of each endpoint's rows those beyond the noise
    ordered: list[float] = field(default_factory=list)  # these, ascending

    def rate_beside(self, endpoint: int) -> float:
        """How often the others of an endpoint are beyond the noise, the middle one of them; never is told by
        as many rows as there are."""
        least = 1 / (len(self.standing.ranks) + 2)
        if endpoint not in self.shares or len(self.shares) < 2:
            return least
        return min(max(middle_of_others(self.ordered, self.shares[endpoint]), least), 1 - least)


def world_of(
    units: Mapping[int, Units], standing: Standing, of: Ints, whole_ns: int, worked_ns: int
) -> World:
    """What all ``units`` together are like; ``of`` is the unit of each row of Entries.

    Beside a rank that is late more often than not, single incidents of others are nobody's habit. Where some
    of these others are late in most units, incidents are the rule, and weighed like one: without stalls.
    """
    none = np.zeros(0, np.int64)
    others = [u for u in units.values() if 2 * np.count_nonzero(u.amount_ns) <= len(u.amount_ns)]
    every = distinct(np.concatenate([none, *(of[u.rows] for u in units.values())]))
    late = distinct(np.concatenate([none, *(of[u.rows[u.place == 0]][u.sure_ns > 0] for u in others)]))
    if 2 * len(late) > len(every):
        whole_ns = worked_ns
    tests = sum(int(u.place.max(initial=-1)) + 1 for u in units.values())
    world = World(whole_ns, worked_ns, standing, tests, sum(int(u.amount_ns.sum()) for u in units.values()))
    if len(units) >= FEWEST:  # of two ranks one or two incidents each are none's habit
        amounts = np.concatenate([none, *(u.sure_ns for u in others)])
        world.among_ranks = is_habit(amounts, whole_ns)
        world.third_ns = int(np.sort(amounts)[-FEWEST]) if len(amounts) >= FEWEST else 0
    return world


def comes_again(units: Units, world: World) -> bool:
    """Whether the rank is late as a habit, or has its part in a habit of the whole group.

    What goes round may hit each rank twice only; once is no coming again.
    """
    total = int(np.minimum(units.sure_ns, world.third_ns).sum())
    twice = world.among_ranks and int(np.count_nonzero(units.sure_ns)) > 1
    return is_habit(units.sure_ns, world.whole_ns) or (twice and is_material(total, world.whole_ns))


def usual_rows(
    units: Units, own: Own, world: World, charged: bool, rate: float, since: int = 0
) -> dict[int, int]:
    """Rows at places in the step where the rank is regularly late because it works longer; and by how much.

    ``since``: from which of its rows on. The same work comes at the same place of every step. Who is beyond
    the noise in two of three of these rows is late, whoever else is, where others are so too seldom
    (``rate``, of ``World.rate_beside``) for chance; within the noise, who works longer more
    often than chance would make it, and was the last often enough to cost anything (``charged``). What makes
    the rank no later (it left its last collective sooner, say) does not count.
    """
    found: dict[int, int] = {}
    within: dict[int, int] = {}
    for at in classes(units.place[since:]):
        rows = units.rows[since:][at]
        if len(rows) < FEWEST:
            continue
        sigma = float(median_of(own.sigma_ns[rows]))
        late = int((own.amount_ns[rows] > 0).sum())
        often = late >= LATE_SHARE * len(rows)
        if often and world.tests * at_least(late, len(rows), rate) < CHANCE:
            usual = round(float(median_of(own.later_ns[rows])))
        elif charged and world.tests * world.standing.chance(rows) < CHANCE:
            usual = usual_excess(own.excess_ns[rows], own.later_ns[rows])
            # Hosts differ in when they react, which is no work.
            usual = usual if usual > float(median_of(own.apart_ns[rows])) else 0
        else:
            usual = 0
        if usual > sigma:
            found.update(dict.fromkeys(rows.tolist(), usual))
        elif usual > 0:
            within.update(dict.fromkeys(rows.tolist(), usual))
    # Within the noise of single ones only what costs enough is worth telling.
    return found | within if is_material(sum(within.values()), world.span_ns) else found


def stands_out(units: Units, own: Own, world: World) -> bool:
    """Whether the rank works longer than its peers at places of its steps, surely and in all by what matters,
    though not as a rule: in too few of these steps, or within what single ones scatter by."""
    total = 0
    for at in classes(units.place):
        rows = units.rows[at]
        if len(rows) >= FEWEST and world.tests * world.standing.chance(rows) < CHANCE:
            usual = float(median_of(own.later_ns[rows])) - float(median_of(own.apart_ns[rows]))
            total += round(max(usual, 0.0) * len(rows))
    return is_material(total, world.span_ns)


def grows_later(units: Units, own: Own, world: World) -> bool:
    """Whether the rank works longer in the later half of its units than in the earlier one, surely and by
    what matters there, though no single unit shows it beyond the noise.

    By the sum of ranks (Mann and Whitney, 1947), at 99.9 % confidence.
    """
    starts = np.flatnonzero(units.place == 0)
    longer = np.add.reduceat(own.excess_ns[units.rows], starts) if len(starts) else NOTHING
    half = len(longer) // 2
    if half < 2 * FEWEST:
        return False
    later, before = longer[-half:], np.sort(longer[:half])
    below = np.searchsorted(before, later, "left") + np.searchsorted(before, later, "right")
    above = float(below.sum()) / 2  # of equal ones half
    beyond = (above / half**2 - 0.5) / sqrt((2 * half + 1) / (12 * half**2))
    gain_ns = float(median_of(later)) - float(median_of(before))
    return 0.5 * erfc(beyond / sqrt(2)) < RARE and is_material(round(2 * half * gain_ns), world.span_ns)


def onset_row(units: Units, own: Own, ranks: int) -> int | None:
    """The row from which on the rank worked longer, None without an onset.

    Told at the place of the step where it was later than anywhere else, and from collectives of a kind
    to which it was ever late: others are no evidence that it was on time before. Where there are too few
    steps for that, from all of that kind.
    """
    amount = own.amount_ns[units.rows]
    if not amount.any():
        return None
    worst = np.argmax(np.bincount(units.place, amount))
    kind = np.isin(units.kind, units.kind[amount > 0])
    for alike in (np.flatnonzero(kind & (units.place == worst)), np.flatnonzero(kind)):
        rows = units.rows[alike]
        sigma = float(median_of(own.sigma_ns[rows])) if len(rows) else 0.0
        turned = onset_of(own.excess_ns[rows], sigma, ranks)
        if turned is not None:
            return int(alike[turned])
    return None
