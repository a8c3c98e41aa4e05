"""Lateness of every rank in every collective in, one judgement an endpoint out.

An endpoint is judged on the collectives that tie ranks together (not on point-to-point transfers:
there a receiver that waits is no fault). What counts as late is measured against the group's own
noise, never against a fixed time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, is_in, median_of, percentile
from dpuflow.entries import AT_LEAST, EXACT
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.causes import CAUSES, COMPUTE, HOST, NONE, UNKNOWN
from dpuflow.verdicts.chance import (
    FEWEST,
    LATE_SHARE,
    in_rhythm,
    is_habit,
    is_material,
    is_seldom,
    standing_of,
)
from dpuflow.verdicts.excess import tied_rows
from dpuflow.verdicts.steps import jobs
from dpuflow.verdicts.units import (
    Units,
    World,
    comes_again,
    grows_later,
    kinds_of,
    onset_row,
    stands_out,
    units_of,
    usual_rows,
    without_chance,
    world_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.verdicts.excess import Evidence, Own

_OWN = (CAUSES[COMPUTE], CAUSES[HOST])
LATE: Final = ("late", "intermittent")
"""Verdicts that blame: late as a rule, and now and then."""
ECHO: Final = 0.25
"""Of a rank's lateness what may make another one seem late."""


class Amount(NamedTuple):
    """How late an endpoint was where it was late: median and most, ns, and what the median is."""

    median_ns: int | None = None
    most_ns: int | None = None
    bound: Literal["exact", "at_least"] | None = None


def amount_of(lateness_ns: Ints, lower: Bools, error_ns: Ints) -> Amount:
    """The amount of late entries, ``lower`` where a lower bound is all that is known; nothing where most of
    these are 0.

    The median is exact where it would move by no more than its error if these had been endlessly late.
    """
    median = float(median_of(lateness_ns)) if len(lateness_ns) else 0.0
    if median <= 0:
        return Amount()
    highest = float(median_of(np.where(lower, np.inf, lateness_ns)))
    error = float(median_of(error_ns[~lower])) if not lower.all() else 0.0
    bound: Literal["exact", "at_least"] = "exact" if highest <= median + error else "at_least"
    return Amount(int(median), int(lateness_ns.max()), bound)


@dataclass
class Judgement:
    """What is said of one endpoint; times in ns, shares of ``collectives``."""

    endpoint: int
    collectives: int
    late_share: float
    last_share: float
    median_ns: int
    p99_ns: int
    caused_wait_ns: int
    verdict: str
    cause: str
    steadiness: str | None
    since_ns: int | None
    # Rows of Entries at which it works longer than its peers as a rule, and by how much.
    usual_ns: dict[int, int] = field(default_factory=dict)
    # The smallest lateness a step that would have been named; None: none would (``coverage``).
    detectable_ns: int | None = None
    own_share: float = 0.0
    amount: Amount = field(default_factory=Amount)
    # How often verdicts that rest on as much are right (``coverage``); None: nothing is claimed.
    confidence: float | None = None
    # Why it is not judged (``unknown``).
    unjudged: str | None = None

    @property
    def late(self) -> bool:
        """Whether it is said to be late, always or now and then."""
        return self.verdict in LATE

    def unknown(self, why: str) -> Judgement:
        """The same where what was seen carries no verdict: it had "incidents", no habit and not nothing; it
        is "excused" by what may have kept it; its times are "not_told", lateness that matters is "hidden", or
        "unseen" ranks may have kept it.

        The first reason stands.
        """
        return replace(
            self, verdict="unknown", cause=CAUSES[UNKNOWN], steadiness=None, since_ns=None, usual_ns={},
            unjudged=self.unjudged or why,
        )  # fmt: skip


def judge(evidence: Evidence, stages: Sequence[int] = ()) -> list[Judgement]:
    """One judgement for each endpoint that took part in a collective, or in a pipeline (``stages``)."""
    evidence = _with_usual(evidence)
    entries, own, charges = evidence.entries, evidence.own, evidence.charges
    tied = tied_rows(evidence.instances, entries)
    usable = tied & (np.isin(evidence.relative.bound, (EXACT, AT_LEAST)) | own.usual)
    endpoints = sorted({*entries.endpoint[tied | own.staged].tolist(), *stages})
    told, counted = usable | own.staged, usable | (tied & own.unproved) | own.staged
    rows, compared = (
        {e: (mine := entries.of[e])[chosen[mine]] for e in endpoints} for chosen in (told, counted)
    )
    units, turn = _units(evidence, compared)
    among = np.where(own.beside >= 0, len(evidence.instances) + own.beside, entries.collective)
    standing = standing_of(among, np.where(counted, own.excess_ns, NEVER))
    world = world_of(units, standing, turn, _span_ns(entries), evidence.worked_ns)
    world.shares = {e: float((own.amount_ns[u.rows] > 0).mean()) for e, u in units.items() if len(u.rows)}
    world.ordered = sorted(world.shares.values())
    # Whose lateness the others hardly waited for is none of them.
    cost_ns = {e: round(charges.cost_ns[rows[e]].sum()) for e, u in units.items() if comes_again(u, world)}
    often = {e for e, ns in cost_ns.items() if is_material(ns, world.span_ns)}
    world.often = frozenset(often)
    others = [u.open_ns for e, u in units.items() if e not in often]
    world.together = bool(others) and not is_seldom(np.concatenate(others), world.whole_ns)
    found = [_judge_one(e, rows[e], rows[e][usable[rows[e]]], units[e], evidence, world) for e in endpoints]
    return _beside_the_main(found, own, rows)


def _beside_the_main(found: Sequence[Judgement], own: Own, rows: Mapping[int, Ints]) -> list[Judgement]:
    """Judgements, where nobody is late by less than an ECHO of what another one is.

    What a rank does longer than its peers counts from when it left what was before. That is off by some of
    how long another one kept them all.
    """
    amount = {
        each.endpoint: max(int(own.amount_ns[rows[each.endpoint]].sum()), sum(each.usual_ns.values()))
        for each in found
        if each.late
    }
    most = ECHO * max(amount.values(), default=0)
    return [
        each.unknown("incidents") if each.late and amount[each.endpoint] < most else each for each in found
    ]


def _units(evidence: Evidence, rows: Mapping[int, Ints]) -> tuple[dict[int, Units], Ints]:
    """Each endpoint's units, of its ``rows``, less what chance explains; and of each row of Entries its unit,
    numbered over the endpoints of a job."""
    instances, entries = evidence.instances, evidence.entries
    kind = kinds_of(instances, evidence.group)
    step = evidence.step
    if len(distinct(kind)) == 1:  # then pauses alone part steps, and lateness makes some
        step = np.full(len(step), -1)
    units = {e: units_of(mine, entries, evidence.own, step, kind) for e, mine in rows.items()}
    job = {e: number for number, members in enumerate(jobs(instances)) for e in members}
    jobs_of = np.array([job[e] for e in entries.endpoint.tolist()], np.int64)
    turn = np.where(step >= 0, step * len(job) + jobs_of, -1 - entries.collective)
    span_ns = evidence.worked_ns if evidence.by_gpus else 0
    return without_chance(units, evidence.own, turn, evidence.stalls, span_ns), turn


def _span_ns(entries: Entries) -> int:
    """From the first entry to the last leave."""
    seen = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    return int(entries.leave_ns[seen].max()) - int(entries.enter_ns[seen].min()) if seen.any() else 0


def _with_usual(evidence: Evidence) -> Evidence:
    """The same where what was compared with what peers usually need stands for lateness and its cost.

    By as much as a rank worked longer it kept peers that waited, whenever each of these had come.
    """
    own, relative, charges = evidence.own, evidence.relative, evidence.charges
    late_ns = np.where(own.usual, np.maximum(own.later_ns, 0), relative.lateness_ns)
    cost_ns = np.where(own.usual | own.staged, own.amount_ns, charges.cost_ns)
    return evidence._replace(
        relative=relative._replace(lateness_ns=late_ns), charges=charges._replace(cost_ns=cost_ns)
    )


def _main_cause(told: Ints, blamed: bool, partly: bool) -> int:
    """The cause that most late collectives have (``told``: how often each).

    Who is blamed was late of its own or its host's doing; who is not was not, whatever single
    collectives say. Where not all was captured (``partly``) that need not be known.
    """
    own = np.array([UNKNOWN, COMPUTE, HOST] if partly else [COMPUTE, HOST])
    if blamed:
        return int(own[np.argmax(told[own])])
    others = told.copy()
    others[own] = 0
    return int(np.argmax(others)) if others.any() else NONE


def _judge_one(
    endpoint: int, acts: Ints, rows: Ints, units: Units, evidence: Evidence, world: World
) -> Judgement:
    """The judgement of one endpoint, by its ``acts`` and, of these, ``rows`` that tell how late it was."""
    if not len(acts):
        nothing = Judgement(endpoint, 0, 0.0, 0.0, 0, 0, 0, "unknown", "unknown", None, None)
        return nothing.unknown("not_told")
    relative, charges, causes, own = evidence.relative, evidence.charges, evidence.causes, evidence.own
    # Beyond the noise of entries, or of its own doing beyond the noise of work: what the verdict counts.
    late = charges.late[rows] | (own.amount_ns[rows] > 0)
    # By how much is told as its entries tell it: no row of a result may claim more than these.
    claimed = relative if evidence.claimed is None else evidence.claimed
    lower = claimed.bound[rows] != EXACT
    lateness = np.where(is_in(claimed.bound[rows], (EXACT, AT_LEAST)), claimed.lateness_ns[rows], 0)
    said = _persistence_of(endpoint, acts, units, evidence, world)
    unproved = not len(units.rows) and bool(late.any())  # it comes late, nothing shows how long it worked
    if unproved:
        said = said._replace(verdict="unknown")
    excused = int(own.open_ns[units.rows].sum()) > int(own.amount_ns[units.rows].sum())
    why = "not_told" if unproved else "excused" if excused else "incidents"
    blamed = distinct(np.concatenate([rows[late], units.rows[own.amount_ns[units.rows] > 0]]))
    told = np.bincount(causes.cause[blamed], minlength=len(CAUSES))
    return Judgement(
        endpoint,
        collectives=len(rows),
        late_share=float(late.mean()) if len(rows) else 0.0,
        last_share=float(charges.last[rows].mean()) if len(rows) else 0.0,
        median_ns=int(median_of(lateness)) if len(rows) else 0,
        p99_ns=int(percentile(lateness, 99)) if len(rows) else 0,
        caused_wait_ns=int(charges.wait_ns[rows].sum()),
        verdict=said.verdict,
        cause=CAUSES[_main_cause(told, said.verdict in LATE, bool(causes.partly[rows].any()))],
        steadiness=said.steadiness,
        since_ns=said.since_ns,
        usual_ns=said.usual_ns,
        own_share=float((own.amount_ns[rows] > 0).mean()) if len(rows) else 0.0,
        amount=amount_of(lateness[late], lower[late], claimed.error_ns[rows[late]]),
        unjudged=why if said.verdict == "unknown" else None,
    )


class _Said(NamedTuple):
    """How steadily an endpoint is late; ``usual_ns`` as in Judgement."""

    verdict: str
    steadiness: str | None
    since_ns: int | None
    usual_ns: dict[int, int]


def _persistence_of(endpoint: int, rows: Ints, units: Units, evidence: Evidence, world: World) -> _Said:
    """Whether an endpoint is late as a rule, again and again, in turn, or not."""
    charges, own = evidence.charges, evidence.own
    # Who is always a little later than its peers yet never the last costs nobody anything.
    costs = is_material(round(charges.cost_ns[rows].sum()), world.span_ns)
    rate = world.rate_beside(endpoint)
    usual = usual_rows(units, own, world, costs, rate)
    # One rank's incidents alone are none; the same among several ranks go round.
    late_ranks = len(world.often)
    habit = endpoint in world.often and (late_ranks > 1 or is_habit(units.sure_ns, world.whole_ns))
    if not (habit or is_material(sum(usual.values()), world.span_ns)):
        return _Said(_on_time_or_unknown(units, own, world), None, None, usual)
    onset = onset_row(units, own, max(late_ranks, 1))
    begun = usual_rows(units, own, world, costs, rate, onset) if onset is not None else {}
    # Late once in every so many units, evenly; among several that are late none is the one.
    most = 1 / 2 if late_ranks <= 1 else LATE_SHARE
    again = int(units.amount_ns.sum()) > most * world.amount_ns and in_rhythm(units.amount_ns > 0)
    if again or is_material(max(sum(usual.values()), sum(begun.values())), world.span_ns):
        since = int(units.enter_ns[onset]) if onset is not None else None
        return _Said("late", "persistent", since, usual)
    if not charges.cost_ns[rows].any():  # nobody ever waited for it alone
        return _Said(_on_time_or_unknown(units, own, world), None, None, usual)
    return _Said("intermittent", "rotating" if late_ranks > 1 else "transient", None, usual)


def _on_time_or_unknown(units: Units, own: Own, world: World) -> str:
    """Unknown where it was late of its own doing, and seen too shortly to call that a habit or none; or again
    and again, at little cost by itself, where all such ranks together are late too often for incidents, for
    all that is known of chance; or works longer than its peers, or than it did before, within the noise."""
    beside = world.together and np.count_nonzero(units.open_ns) >= FEWEST
    seldom = is_seldom(units.open_ns, world.whole_ns) and not beside
    longer = stands_out(units, own, world) or grows_later(units, own, world)
    return "on_time" if seldom and not longer else "unknown"


def doubt(judgements: Sequence[Judgement], elsewhere: frozenset[int], far: frozenset[int]) -> list[Judgement]:
    """Judgements, in which no rank is accused that something not captured may have delayed.

    ``elsewhere``: ranks that others than those captured may have kept (``waits``). ``far``: ranks
    without a capture of their own. They may have waited for messages on links that nobody saw: late they are
    by what their peers saw of them, never by their own doing, and beside a captured rank that is to blame
    they may have waited for that one.
    """
    blamed = any(each.late and each.cause in _OWN and each.endpoint not in far for each in judgements)
    out = []
    for each in judgements:
        if each.late and (each.endpoint in elsewhere or (each.endpoint in far and blamed)):
            each = each.unknown("unseen")
        elif each.late and each.endpoint in far and each.cause in _OWN:
            each = replace(each, cause=CAUSES[UNKNOWN])
        out.append(each)
    return out


def sooner_ns(judgements: Sequence[Judgement], own: Own) -> Ints:
    """Per row of Entries by how much sooner its rank would have come if it worked like its peers."""
    sooner: Ints = own.amount_ns.copy()
    for judgement in judgements:
        for row, usual in judgement.usual_ns.items():
            if sooner[row] <= 0:
                sooner[row] = min(max(int(own.excess_ns[row]), 0), usual)
    return sooner
