"""What each verdict rests on: how many of a rank's times were told, what could have hidden, how sure it is.

In: entries, lateness, what ranks answer for, and the bytes that no collective was made of. Out: per endpoint
how many times were told exactly, bounded and not at all, and the smallest lateness a step that would have
been named with 95 % probability; verdicts with how often verdicts like these are right. A verdict stands
only where at least half of the times were told.

A time that is exact shows any lateness beyond the scatter of its group's work and its own error. One that is
bounded from above shows what is beyond the bound, for had the rank come later, it would be larger. One that
is not told shows nothing, nor does a collective that nobody recognised, of which the bytes alone are known.

Confidence has a factor for each thing that can make a verdict wrong: what was read of the collectives, times
that are bounded only, errors of the clocks, incidents beside an on-time verdict, packets that the capture
lost. The levels are those measured on twins of captures with known truth (docs/accuracy.md).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, erfc, sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, classes, distinct, median_of, numbered
from dpuflow.entries import AT_LEAST, AT_MOST, EXACT, ONE_SIDED, gpus_within
from dpuflow.entries.rows import INTERVAL_IN_SIGMAS
from dpuflow.schema.rows import NEVER, NONE32, Role
from dpuflow.verdicts.chance import CRITICAL_SHARE, FEWEST, MATERIAL_SHARE, habit_ns
from dpuflow.verdicts.pauses import TWICE
from dpuflow.verdicts.steps import places_in_steps
from dpuflow.verdicts.units import kinds_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import CaptureInfo, Joined, Rows
    from dpuflow.verdicts.bulk import Bulk
    from dpuflow.verdicts.excess import Evidence
    from dpuflow.verdicts.judgement import Judgement

HALF: Final = 0.5
"""Share of a rank's entry times that must be known for a verdict: which are known may depend on the lateness
itself."""
FIFTH_ERROR: Final = 2.35
"""Half of the one-sided 95 % interval of a normal sample's fifth percentile, times the root of its size, in
standard deviations: late as a rule is who works longer than its peers four times of five."""
SMALLEST: Final = 1e-3
"""Share of an endpoint's bytes that were recognised at the least, for counting what was not."""
HIDDEN: Final = 1 << 62
"""Stands for no lateness, however large, that would show."""


class Coverage(NamedTuple):
    """Of one endpoint; the three counts are of its collectives."""

    exact: int
    bounded: int
    untold: int  # among them those that its messages outside all collectives would have made
    detectable_ns: int | None  # smallest lateness a step that would have been named; None: none would
    step_ns: int  # how long a step takes, in the mean
    shown: float = 1.0  # share of its times in which lateness that matters would show
    staged: int = 0  # acts as a stage of a pipeline, beside its collectives

    @property
    def clears(self) -> bool:
        """Whether lateness that matters would have been named, so that naming none clears the rank."""
        return self.detectable_ns is not None and self.detectable_ns <= _mattering_ns(
            self.step_ns, self.staged
        )


def _mattering_ns(step_ns: int, staged: int) -> float:
    """The lateness a step that matters, ns: of stages as much again may be their design."""
    return (TWICE if staged else 1) * CRITICAL_SHARE * step_ns


def coverage_of(
    evidence: Evidence, tied: Bools, unread: Mapping[int, float], queued: Ints
) -> dict[int, Coverage]:
    """For each endpoint of ``tied`` rows what was told of it.

    ``unread`` as of ``unread_shares``, ``queued`` for how long first messages may have waited in their node
    (``queued_ns``): what hides there is no less than that.
    """
    instances, entries, relative = evidence.instances, evidence.entries, evidence.relative
    step, worked_ns, found = evidence.step, evidence.worked_ns, {}
    places = places_in_steps(step, entries.endpoint)
    # Behind an endpoint of several ranks others may be late, whenever its first message left.
    hides = [i.view.near is None and i.hides_ranks and not gpus_within(i) for i in instances]
    several = np.array(hides, bool)[entries.collective]
    acts = tied | evidence.own.staged
    for rows in classes(np.where(acts, entries.endpoint, -1) + 1):
        if not acts[rows[0]]:
            continue
        endpoint = int(entries.endpoint[rows[0]])
        bound = relative.bound[rows[tied[rows]]]
        exact = int((bound == EXACT).sum())
        bounded = int(((bound == AT_MOST) | (bound == AT_LEAST)).sum())
        # As many more as the bytes that nobody recognised would make, up to none recognised but these.
        total = round(len(rows) / max(1 - unread.get(endpoint, 0.0), SMALLEST))
        inside = step[rows][step[rows] >= 0]
        steps = len(distinct(inside)) if 2 * len(inside) > len(rows) else len(rows)
        hidden = _hidden_ns(rows, evidence, places[rows])
        hidden = np.where(several[rows], HIDDEN, hidden + queued[rows])
        # A slow stage is so for each microbatch.
        staged, often = len(rows) - len(bound), max((len(rows) - len(bound)) / max(steps, 1), 1.0)
        least = _detectable_ns(hidden, total, steps, worked_ns, often)
        least = _at_every_place(least, hidden, places[rows])
        step_ns = round(worked_ns / max(steps, 1))
        untold = total - staged - exact - bounded
        shown = int((hidden * often <= _mattering_ns(step_ns, staged)).sum()) / max(total, 1)
        found[endpoint] = Coverage(exact, bounded, untold, least, step_ns, shown, staged)
    return found


def _hidden_ns(rows: Ints, evidence: Evidence, place: Ints) -> Floats:
    """The largest lateness of one endpoint's ``rows`` that would not show in each; HIDDEN where any would.

    What is random in an entry's error is part of the scatter, and evens out; what clocks err by does not.
    """
    relative, own = evidence.relative, evidence.own
    bound, known = relative.bound[rows], own.excess_ns[rows] != NEVER
    shown = known & ((bound == EXACT) | (bound == AT_LEAST) | (own.usual & own.by_peers | own.staged)[rows])
    number = max(int(shown.sum()), 1)
    scatter = own.sigma_ns[rows] * (1 + FIFTH_ERROR / np.sqrt(number))
    for mine in classes(np.where(shown, place + 1, -1) + 1):
        if shown[mine[0]]:
            scatter[mine] = np.minimum(scatter[mine], _usual_at_most(own.excess_ns[rows[mine]]))
    scatter += np.where(own.staged[rows], own.design_ns[rows], evidence.entries.margins.clock_ns[rows])
    most = np.where((bound == AT_MOST) & ~own.staged[rows], relative.lateness_ns[rows], HIDDEN)
    told = (own.most_ns[rows] != NEVER) & own.by_peers[rows]
    worked = np.where(told, own.most_ns[rows] + scatter, HIDDEN)
    most = np.minimum(most, worked)
    return np.minimum(np.where(shown, scatter, most), float(HIDDEN))


def _usual_at_most(excess_ns: Ints) -> float:
    """The upper end of the 95 % interval of how much longer a rank usually worked; HIDDEN of too few times.

    By the sign test: were it usually longer, so many times would hardly have been below that.
    """
    number = len(excess_ns)
    at = ceil((number + ONE_SIDED * sqrt(number) + 1) / 2)  # half a step for continuity
    return max(float(np.partition(excess_ns, at - 1)[at - 1]), 0.0) if at <= number else float(HIDDEN)


def _detectable_ns(hidden_ns: Floats, total: int, steps: int, worked_ns: int, often: float) -> int | None:
    """What shows in at least half of ``total`` collectives, ``often`` a step, and costs enough to be named;
    None: nothing."""
    least = max(FEWEST, ceil(HALF * total))
    if least > len(hidden_ns):
        return None
    shows = float(np.partition(hidden_ns, least - 1)[least - 1])
    if shows >= HIDDEN:
        return None
    # Late once a step by this much in the steps that show it costs what is worth a verdict.
    told = max(steps * float((hidden_ns <= shows).sum()) / max(len(hidden_ns), 1), 1.0)
    return round(max(shows * often, MATERIAL_SHARE * worked_ns / told))


def _at_every_place(least_ns: int | None, hidden_ns: Floats, place: Ints) -> int | None:
    """``least_ns``, or what shows at least half of the times at each place in a step, if that is more.

    Work before one operation of a step makes a rank late there, and nowhere else: other operations, told as
    well as they may be, do not show it. Where nothing is ever told that is known (``untold``).
    """
    if least_ns is None:
        return None
    for mine in classes(place + 1):
        half = ceil(HALF * len(mine)) - 1
        shows = float(np.partition(hidden_ns[mine], half)[half])
        if place[mine[0]] >= 0 and len(mine) >= FEWEST and shows < HIDDEN:
            least_ns = max(least_ns, round(shows))
    return least_ns


def unread_shares(
    joined: Joined, exchanges: Rows, instances: Sequence[Instance], bulk: Sequence[Bulk]
) -> dict[int, float]:
    """Of each endpoint in collectives: what share of the bytes on the connections that carry these is part
    of nothing that was recognised. A message without data counts as one byte."""
    part = np.zeros(len(exchanges), bool)
    for kept in (instances, bulk):
        part[np.concatenate([np.zeros(0, np.int64), *(each.rows for each in kept)])] = True
    columns, count = joined.columns, len(joined.endpoints)
    read = Picked(exchanges, np.flatnonzero(part & (exchanges["data"] != NONE32)))
    carries = np.zeros(int(columns["connection"].max(initial=0)) + 1, bool)
    carries[columns["connection"][read["data"]]] = True
    data = (columns["role"] == Role.DATA) | (columns["role"] == Role.BURST)
    data &= carries[columns["connection"]]
    whole, told = np.zeros(count), np.zeros(count)
    for out, nbytes, ends in (
        (whole, columns["bytes"][data], [columns[end][data] for end in ("src", "dst")]),
        (told, read["bytes"], [read[end] for end in ("src", "dst")]),
    ):
        for end in ends:
            out += np.bincount(end, np.maximum(nbytes, 1), count)
    return {e: max(0.0, 1 - told[e] / whole[e]) for e in np.flatnonzero(whole).tolist()}


def doubt_untold(
    judgements: Sequence[Judgement], told: Mapping[int, Coverage], evidence: Evidence
) -> list[Judgement]:
    """Judgements, unknown where too few entry times are known to support them.

    Who is on time must have been seen so well that lateness that matters would have been named. Who is late
    must have been so in operations of which at least half of the times were told: where only those are that
    were late, the others may all have been on time.
    """
    entries, out = evidence.entries, []
    kind = kinds_of(evidence.instances, evidence.group)[entries.collective]
    alike = numbered(kind, places_in_steps(evidence.step, entries.endpoint) + 1)
    for each in judgements:
        seen = told.get(each.endpoint)
        each = replace(each, detectable_ns=seen.detectable_ns if seen else None)
        sure = seen is not None and (_mostly_told(each, seen, evidence, alike) if each.late else seen.clears)
        hidden = seen is not None and seen.detectable_ns is not None and not each.late
        out.append(each if sure else each.unknown("hidden" if hidden else "not_told"))
    return out


def _mostly_told(judgement: Judgement, told: Coverage, evidence: Evidence, alike: Ints) -> bool:
    """Whether at least half of a late rank's times say whether it was as late as that: of those in operations
    ``alike``, at the same place of their steps, as the ones in which it was."""
    relative, own = evidence.relative, evidence.own
    rows = evidence.entries.of[judgement.endpoint]
    amount, most = own.amount_ns[rows], own.most_ns[rows]
    usual = float(median_of(amount[amount > 0])) if (amount > 0).any() else 0.0
    usual = max([usual, *judgement.usual_ns.values()])
    bound = relative.bound[rows]
    says = (amount > 0) | (bound == EXACT) | (bound == AT_LEAST)
    says |= (bound == AT_MOST) & (relative.lateness_ns[rows] < usual)
    says |= own.usual[rows] | ((most != NEVER) & (most < usual))
    says |= own.staged[rows] & (own.excess_ns[rows] != NEVER)
    at = np.isin(alike[rows], alike[rows][(amount > 0) | np.isin(rows, list(judgement.usual_ns))])
    # Messages that nobody recognised may have been of any.
    unread = (told.exact + told.bounded + told.untold + told.staged) / max(len(rows), 1)
    return bool(says[at].sum() >= HALF * max(unread, 1.0) * at.sum() > 0)


MOST: Final = 0.99
"""No verdict is surer: one in a hundred is what chance may do (``chance.CHANCE``)."""
EVEN: Final = 0.5
"""Where half of the times show lateness that matters, or incidents cost just what is worth a verdict."""
CLEARED: Final = 2 / 3
"""A verdict that is wrong once in three times is none."""
SHOWN: Final = 0.75
"""From this share of times on nothing that matters was ever hidden by the others."""
BOUNDED: Final = 0.9
"""So often were ranks guilty whose lateness is known by lower bounds only: these show where it is large."""
MISREAD: Final = 0.25
"""What is missing of a reading, or speaks for another one, changes who is late once in four times."""
STAGES: Final = 0.9
"""A stage that differs from its peers may do so by design."""


def with_confidence(
    judgements: Sequence[Judgement],
    told: Mapping[int, Coverage],
    evidence: Evidence,
    captures: Sequence[CaptureInfo],
) -> list[Judgement]:
    """Judgements with their confidence; None where nothing is claimed, or only that messages came late."""
    entries, own = evidence.entries, evidence.own
    reading = np.array([each.confidence for each in evidence.instances], np.float64)[entries.collective]
    kept = kept_share(captures)
    in_turn = any(each.steadiness == "rotating" for each in judgements)
    ranks, out = max(len(judgements), 2), []
    for each in judgements:
        rows = entries.of[each.endpoint]
        sure = None
        if each.verdict == "on_time":
            amount = own.amount_ns[rows]
            # One or two incidents are nobody's habit; beside others late in turn they may be its turn.
            cost_ns = int(amount.sum()) if in_turn else habit_ns(amount)
            cost = cost_ns / max(MATERIAL_SHARE * evidence.worked_ns, 1.0)
            shown = _shows(told.get(each.endpoint), cost)
            # Of the ranks judged most are on time, whatever is seen of them: one is late (Bayes).
            sure = MOST * (ranks - 1) / (ranks - shown)
            if shown <= CLEARED:
                each, sure = each.unknown("incidents" if cost > CLEARED else "hidden"), None
        elif each.late and each.cause != "unknown":
            late = rows[own.amount_ns[rows] > 0]
            late = late if len(late) else np.array(sorted(each.usual_ns), np.int64)
            sure = STAGES if not len(late) else _guilty(late, reading, evidence, each)
        if sure is not None and own.design_ns[rows].any():
            sure = min(sure, STAGES)
        if sure is not None and kept * sure < CLEARED:
            each, sure = each.unknown("incidents" if each.late else "hidden"), None
        out.append(replace(each, confidence=None if sure is None else round(kept * sure, 3)))
    return out


def kept_share(captures: Sequence[CaptureInfo]) -> float:
    """Of the packets that the captures should hold, the share that they say they do."""
    packets, lost = sum(c.packets for c in captures), sum(c.lost_packets or 0 for c in captures)
    return packets / (packets + lost) if packets else 1.0


def _shows(told: Coverage | None, cost: float) -> float:
    """How often a rank like one that is called on time would have been named, were it late; ``cost``: of its
    incidents, in shares of what is worth a verdict."""
    if told is None:
        return STAGES
    seen = max(1 - 2 * max(SHOWN - told.shown, 0.0), EVEN)
    # What costs half of what makes a verdict is nobody's habit; what costs as much may well be.
    return min(seen, max(1.5 - cost, EVEN))


def _guilty(late: Ints, reading: Floats, evidence: Evidence, judgement: Judgement) -> float:
    """Of who is called late in these rows. Random errors of its times even out, those of clocks do not."""
    relative = evidence.relative
    exact = relative.bound[late] == EXACT
    bounded = 0.0 if judgement.verdict == "late" else 1 - float(exact.mean())
    known = relative.lateness_ns[late] != NEVER
    rows = late[known & exact & (relative.error_ns[late] > 0)]
    clocks = 1.0
    if len(rows):
        usual = float(median_of(relative.lateness_ns[late][known]))
        error = float(median_of(relative.error_ns[rows])) / sqrt(len(rows))
        error = max(error, float(median_of(evidence.entries.margins.clock_ns[rows])))
        clocks = 0.5 * erfc(-INTERVAL_IN_SIGMAS * usual / error / sqrt(2))
    misread = MISREAD * (1 - float(reading[late].mean()))
    return MOST * (1 - misread) * (1 - bounded * (1 - BOUNDED)) * clocks
