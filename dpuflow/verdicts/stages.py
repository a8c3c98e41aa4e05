"""Pipelines in, each stage against the others out: who works longer, and whether that is a habit.

Only like is compared: the forward work of the stages that send forward, the backward work of those
that send back. In 1F1B an end stage's messages follow from both, so there the sum is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

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
    beside = _beside_peers(pipeline, units)
    known = np.isfinite(beside.excess)
    told = [place for place, peers in enumerate(beside.peers) if peers]
    judged = [place for place in told if 2 * known[place].sum() >= len(units)]  # most of what it did is told
    if not judged:
        return found
    sends = pipeline.microbatches or 1
    sigma = sends * float(np.median([_scatter(beside.excess[p][known[p]]) for p in told]))
    # In 1F1B what a message follows from changes within a step.
    apart_told = pipeline.schedule != "1f1b"
    once = np.array([_beyond_usual(row, units) * apart_told for row in pipeline.work])
    designs = {place: _design_ns(beside, place, sends) for place in judged}
    amounts: dict[int, NDArray[np.int64]] = {}
    for place, (design, unequal) in designs.items():
        once_more = once[place] - np.median(np.delete(once, place, axis=0), axis=0)
        once_more[once_more <= SIGMAS * sigma] = 0
        worked, longer = (sends * each[place][known[place]] for each in (beside.own, beside.excess))
        amounts[place] = np.maximum(
            _amounts(worked, longer, SIGMAS * sigma, unequal, design),
            once_more[known[place]].astype(np.int64),
        )
    numbers = {place: np.flatnonzero(known[place]) for place in judged}
    found_ns = incidents_of(numbers, amounts, 2 * sends, stalls)
    # Stages that are late in turn are so by habit together.
    often = is_habit(beside_habits((each.sure_ns for each in found_ns.values()), span_ns), span_ns)
    begin_ns = _begins(pipeline, entries, units)
    for place in judged:
        stage, least_ns = found[place], max(sigma, designs[place][0])
        stage.peers = sorted(pipeline.stages[peer] for peer in beside.peers[place])
        excess_ns = sends * beside.excess[place][known[place]]
        _judge(stage, excess_ns, found_ns[place], sigma, least_ns, often, span_ns)
        if stage.onset is not None:
            stage.since_ns = int(begin_ns[known[place]][stage.onset])
        if stage.verdict == "late":
            stage.sooner_ns = _sooner(pipeline.work[place], beside.shares[place])
    return found


class _Beside(NamedTuple):
    """Stages beside their peers; tables are (stages, units), ns for one message."""

    own: NDArray[np.float64]
    excess: NDArray[np.float64]  # beyond what its peers work
    apart: NDArray[np.float64]  # how far each stage's peers are from one another
    peers: list[set[int]]  # places of those that it can be compared with
    shares: list[dict[int, float]]  # of its work, by way: what its peers do not need


def _beside_peers(pipeline: Pipeline, units: NDArray[np.int64]) -> _Beside:
    count = len(pipeline.stages)
    own, excess = np.zeros((2, count, len(units)))
    beside = _Beside(own, excess, np.zeros(count), [set() for _ in range(count)], [{} for _ in range(count)])
    together = [(FORWARD, BACKWARD)] if pipeline.schedule == "1f1b" else [(FORWARD,), (BACKWARD,)]
    for ways in together:
        table = _table(pipeline, ways, units)
        places = np.flatnonzero(np.isfinite(table).any(axis=1)).tolist()
        for place in places if len(places) > 1 else []:
            others = [other for other in places if other != place]
            # Like is compared with like in the same unit, where that tells, else with what is usual.
            usual, habit = _median(table[others]), _median(table[others].T)
            usual = np.where(np.isfinite(usual), usual, np.median(habit))
            own[place] += table[place]
            excess[place] += table[place] - usual
            beside.apart[place] += np.ptp(habit)
            beside.peers[place].update(others)
            more = float(np.nanmedian(table[place] - usual))
            share = max(more / max(float(np.nanmedian(table[place])), 1.0), 0.0)
            beside.shares[place] |= dict.fromkeys(ways, share)
    return beside


def _design_ns(beside: _Beside, place: int, sends: int) -> tuple[float, float]:
    """How much longer than its peers a stage may work in a step by design, and than by itself as a rule."""
    known = np.isfinite(beside.excess[place])
    unequal = UNEQUAL * sends * float(np.median((beside.own[place] - beside.excess[place])[known]))
    # One peer does not tell how far apart stages are by design: only its own past can.
    alone = len(beside.peers[place]) < 2
    return np.inf if alone else max(SIGMAS * sends * float(beside.apart[place]), unequal), unequal


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
