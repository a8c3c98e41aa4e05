"""Pipelines in, each stage against the others out: who works longer, and whether that is a habit.

Only like is compared: the forward work of the stages that send forward, the backward work of those
that send back. In 1F1B an end stage's messages follow from both, so there the sum is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.persistence import (
    LATE_SHARE,
    MATERIAL_SHARE,
    QUARTER_IN_SIGMAS,
    SIGMAS,
    beside_habits,
    is_habit,
    is_material,
    is_seldom,
    onset_of,
    usual_excess,
)
from dpuflow.verdicts.pipelines import BACKWARD, FORWARD
from dpuflow.verdicts.receivers import AT_ONCE
from dpuflow.verdicts.significance import incidents_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.entries import Entries, Tail
    from dpuflow.verdicts.pipelines import Pipeline, Work
    from dpuflow.verdicts.significance import Incidents

UNEQUAL = 0.1
"""How much longer than its peers a stage may work by design, in shares of their work."""


@dataclass
class Stage:
    """One stage of a pipeline, compared with ``peers``. Tokens are those of the result format.

    ``excess_ns``: how much longer it works than its peers in a step (without steps: for a message), in
    the median; ``detectable_ns``: by how much more it would be named; ``incidents_ns``: of each step that
    tells, by how much it worked longer beyond chance. ``sooner_ns``: by how much each of its sends (rows of
    Entries) would come sooner after its input if it worked like its peers; for late stages alone.
    """

    endpoint: int
    verdict: str = "unknown"
    steadiness: str | None = None
    since_ns: int | None = None
    onset: int | None = None  # the unit of ``since_ns``
    excess_ns: int = 0
    detectable_ns: int | None = None
    peers: list[int] = field(default_factory=list)
    incidents_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sooner_ns: dict[int, int] = field(default_factory=dict)


def compare_stages(
    pipeline: Pipeline, entries: Entries, span_ns: int, stalls: Tail | None = None
) -> list[Stage]:
    """Each stage's verdict, in order; ``unknown`` where none of the others can be compared with it.

    ``stalls``: how long hand-overs stall.
    """
    found = [Stage(endpoint) for endpoint in pipeline.stages]
    units = _units(pipeline)
    own, excess = np.zeros((2, len(found), len(units)))
    shares: list[dict[int, float]] = [{} for _ in found]  # of its work, by way: what its peers do not need
    apart = np.zeros(len(found))  # how far a stage's peers are from one another
    together = [(FORWARD, BACKWARD)] if pipeline.schedule == "1f1b" else [(FORWARD,), (BACKWARD,)]
    for ways in together:
        table = _table(pipeline, ways, units)
        places = np.flatnonzero(np.isfinite(table).any(axis=1)).tolist()
        for place in places:
            others = [p for p in places if p != place]
            if not others:
                continue
            # Like is compared with like in the same unit, where that tells, else with what is usual.
            usual, habit = _median(table[others]), _median(table[others].T)
            usual = np.where(np.isfinite(usual), usual, np.median(habit))
            own[place] += table[place]
            excess[place] += table[place] - usual
            apart[place] += np.ptp(habit)
            found[place].peers = sorted({*found[place].peers, *(pipeline.stages[o] for o in others)})
            more = float(np.nanmedian(table[place] - usual))
            share = max(more / max(float(np.nanmedian(table[place])), 1.0), 0.0)
            shares[place] |= dict.fromkeys(ways, share)
    told = [place for place, stage in enumerate(found) if stage.peers]
    sends = pipeline.microbatches or 1
    known = np.isfinite(excess)
    sigma = sends * float(np.median([_scatter(excess[p][known[p]]) for p in told])) if told else 0.0
    begin_ns = _begins(pipeline, entries, units)
    judged = [place for place in told if 2 * known[place].sum() >= len(units)]
    # In 1F1B what a message follows from changes within a step.
    apart_told = pipeline.schedule != "1f1b"
    once = np.array([_beyond_usual(row, units) * apart_told for row in pipeline.work])
    amounts: dict[int, NDArray[np.int64]] = {}
    designs: dict[int, float] = {}
    for place in told:
        if place not in judged:
            found[place].peers = []  # most of what it did is not told
            continue
        usual_ns = float(np.median((own[place] - excess[place])[known[place]]))
        unequal = UNEQUAL * sends * usual_ns
        # One peer does not tell how far apart stages are by design: only its own past can.
        alone = len(found[place].peers) < 2
        designs[place] = np.inf if alone else max(SIGMAS * sends * float(apart[place]), unequal)
        others = np.median(np.delete(once, place, axis=0), axis=0)
        once_more = np.where(once[place] - others > SIGMAS * sigma, once[place] - others, 0.0)
        worked, longer = (sends * each[place][known[place]] for each in (own, excess))
        amounts[place] = np.maximum(
            _amounts(worked, longer, SIGMAS * sigma, unequal, designs[place]),
            once_more[known[place]].astype(np.int64),
        )
    numbers = {place: np.flatnonzero(known[place]) for place in amounts}
    found_ns = incidents_of(numbers, amounts, 2 * sends, stalls)
    # Stages that are late in turn are so by habit together.
    often = is_habit(beside_habits((each.sure_ns for each in found_ns.values()), span_ns), span_ns)
    for place in judged:
        least_ns = max(sigma, designs[place])
        excess_ns = sends * excess[place][known[place]]
        _judge(found[place], excess_ns, found_ns[place], sigma, least_ns, often, span_ns)
        onset = found[place].onset
        found[place].since_ns = int(begin_ns[known[place]][onset]) if onset is not None else None
        if found[place].verdict == "late":
            found[place].sooner_ns = _sooner(pipeline.work[place], shares[place])
    return found


def idle_shares(pipeline: Pipeline, entries: Entries) -> list[float | None]:
    """The bubble: per stage the share of a step in which it works for no message, in the median.

    None for the ends, some of whose work no packet shows, and where the steps are not told.
    """
    units = _units(pipeline)
    length = np.diff(_begins(pipeline, entries, units)).astype(np.float64)
    shares: list[float | None] = []
    for row in pipeline.work:
        works = [work for work in row if work is not None]
        if len(works) < 2 or not len(length) or pipeline.microbatches is None:
            shares.append(None)
            continue
        busy = np.zeros(len(units))
        for work in works:
            known = (work.own_ns != NEVER) & (work.unit >= 0)
            place = np.searchsorted(units, work.unit[known])
            busy += np.bincount(place, work.own_ns[known], len(units))
        idle = float(np.median(1 - busy[:-1] / np.maximum(length, 1)))
        shares.append(round(min(max(idle, 0.0), 1.0), 6))
    return shares


def typical_ns(work: Work | None) -> int | None:
    """What a stage works for one message, in the median; None where nothing tells."""
    told = work.own_ns[work.own_ns != NEVER] if work is not None else np.zeros(0, np.int64)
    return int(np.median(told)) if len(told) else None


def _units(pipeline: Pipeline) -> NDArray[np.int64]:
    numbers = [work.unit for row in pipeline.work for work in row if work is not None]
    every = np.unique(np.concatenate(numbers)) if numbers else np.zeros(0, np.int64)
    return every[every >= 0]


def _table(pipeline: Pipeline, ways: tuple[int, ...], units: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean work for one message by stage and unit; NaN where nothing tells.

    What is not told of a send that its receiver held up is no more than until then: it tells where that is no
    longer than usual.
    """
    table = np.full((len(pipeline.stages), len(units)), np.nan)
    usual = {way: _usual(pipeline, way) for way in ways}
    for place, row in enumerate(pipeline.work):
        parts = [_mean(work, units, usual[way][place]) for way in ways if (work := row[way]) is not None]
        if parts:
            table[place] = np.sum(parts, axis=0)
    return table


def _usual(pipeline: Pipeline, way: int) -> list[float]:
    """What each stage works for one message that way, in the median of what is told; else the quickest's."""
    told = [typical_ns(row[way]) for row in pipeline.work]
    least = min((each for each in told if each is not None), default=0)
    return [float(least if each is None else each) for each in told]


def _median(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Down the columns, of what is told; NaN where nothing is."""
    some = np.isfinite(table).any(axis=0)
    out = np.full(table.shape[1], np.nan)
    if some.any():
        out[some] = np.nanmedian(table[:, some], axis=0)
    return out


def _mean(work: Work, units: NDArray[np.int64], usual_ns: float) -> NDArray[np.float64]:
    """What the stage worked for one message, on average, in each unit; NaN where nothing tells."""
    short = (work.most_ns != NEVER) & (work.most_ns <= (1 + AT_ONCE) * usual_ns)
    own = np.where(short, np.minimum(work.most_ns, round(usual_ns)), work.own_ns)
    known = (own != NEVER) & (work.unit >= 0)
    place = np.searchsorted(units, work.unit[known])
    number = np.bincount(place, minlength=len(units))
    total = np.bincount(place, own[known], len(units))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _scatter(values: NDArray[np.float64]) -> float:
    """One standard deviation, by the steps from one unit to the next: a level that changes is no scatter."""
    if len(values) < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(values)))) / (QUARTER_IN_SIGMAS * 2**0.5)


def _beyond_usual(row: list[Work | None], units: NDArray[np.int64]) -> NDArray[np.float64]:
    """By unit how much longer than usual the stage worked for single messages, where it did by far.

    Who is late once in a step is so before one of its microbatches; how its layers compare with its peers'
    does not matter there.
    """
    total = np.zeros(len(units))
    for work in row:
        usual = typical_ns(work)
        if work is not None and usual is not None:
            late = (work.own_ns > (1 + UNEQUAL) * usual) & (work.unit >= 0)
            place = np.searchsorted(units, work.unit[late])
            total += np.bincount(place, work.own_ns[late] - usual, len(units))
    return total


def _begins(pipeline: Pipeline, entries: Entries, units: NDArray[np.int64]) -> NDArray[np.int64]:
    """When each unit began: the first send of any stage."""
    first = np.full(len(units), np.iinfo(np.int64).max)
    for row in pipeline.work:
        for work in row:
            if work is not None:
                inside = work.unit >= 0
                place = np.searchsorted(units, work.unit[inside])
                np.minimum.at(first, place, entries.enter_ns[work.rows[inside]])
    return first


def _amounts(
    own_ns: NDArray[np.float64],
    excess_ns: NDArray[np.float64],
    noise_ns: float,
    unequal_ns: float,
    design_ns: float,
) -> NDArray[np.int64]:
    """How much longer the stage worked in each unit than its peers, or than it does as a rule both by itself
    and beside its peers; 0 within what noise, or a design, explains."""
    past = np.minimum(own_ns - np.median(own_ns), excess_ns - np.median(excess_ns))
    late = np.where(excess_ns > max(noise_ns, design_ns), excess_ns, 0.0)
    return np.maximum(late, np.where(past > max(noise_ns, unequal_ns), past, 0.0)).astype(np.int64)


def _judge(
    stage: Stage,
    excess_ns: NDArray[np.float64],
    incidents: Incidents,
    sigma_ns: float,
    least_ns: float,
    often: bool,
    span_ns: int,
) -> None:
    """Set verdict, steadiness and onset from how much longer the stage worked in each unit.

    ``sigma_ns`` is the scatter of a unit, ``least_ns`` what that and a design explain. ``often``: the
    pipeline's stages together are late by habit.
    """
    stage.verdict, stage.excess_ns = "on_time", round(float(np.median(excess_ns)))
    if np.isfinite(least_ns):
        stage.detectable_ns = round(
            max(SIGMAS * sigma_ns, least_ns, MATERIAL_SHARE * span_ns / max(len(excess_ns), 1))
        )
    whole_ns = excess_ns.astype(np.int64)
    usual = usual_excess(whole_ns, whole_ns)
    usual = usual if usual > least_ns else 0
    onset = onset_of(whole_ns, sigma_ns)
    rise = 0 if onset is None else round(float(np.median(whole_ns[onset:]) - np.median(whole_ns[:onset])))
    begun = onset is not None and is_material(rise * (len(whole_ns) - onset), span_ns)
    stage.incidents_ns = sure_ns = incidents.sure_ns
    habit = is_habit(sure_ns, span_ns) or (often and is_material(int(sure_ns.sum()), span_ns))
    if not habit and not begun and not is_material(usual * len(excess_ns), span_ns):
        if not is_seldom(incidents.open_ns, span_ns):
            stage.verdict = "unknown"
        return
    stage.verdict, stage.steadiness = "intermittent", "transient"
    if usual or begun or (sure_ns > 0).mean() >= LATE_SHARE:
        stage.verdict, stage.steadiness, stage.onset = "late", "persistent", onset


def _sooner(row: list[Work | None], shares: dict[int, float]) -> dict[int, int]:
    """That share, by way, of the work for each message."""
    return {
        int(at): round(shares[way] * int(own))
        for way, work in enumerate(row)
        if work is not None and shares.get(way, 0.0) > 0
        for at, own in zip(work.rows, work.own_ns, strict=True)
        if own != NEVER
    }
