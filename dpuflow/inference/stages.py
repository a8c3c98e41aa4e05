"""Pipelines in, each stage against the others out: who works longer, and whether that is a habit.

Only like is compared: the forward work of the stages that send forward, the backward work of those
that send back. In 1F1B an end stage's messages follow from both, so there the sum is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.inference.habits import (
    LATE_SHARE,
    MATERIAL_SHARE,
    QUARTER_IN_SIGMAS,
    SIGMAS,
    is_habit,
    is_material,
    onset_of,
    usual_excess,
)
from dpuflow.inference.pipelines import BACKWARD, FORWARD
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.inference.pipelines import Pipeline, Work
    from dpuflow.lateness import Entries

ALONE = 0.1
"""How much longer than its only comparable peer a stage must work, in shares of that peer's work: one
peer does not tell how far apart stages are by design."""


@dataclass
class Stage:
    """One stage of a pipeline, compared with ``peers``. Tokens are those of the result format.

    ``excess_ns``: how much longer it works than its peers in a step (without steps: for a message), in
    the median; ``detectable_ns``: by how much more it would be named. ``sooner_ns``: by how much each of its
    sends (rows of Entries) would come sooner after its input if it worked like its peers; for late stages
    alone.
    """

    endpoint: int
    verdict: str = "unknown"
    steadiness: str | None = None
    since_ns: int | None = None
    excess_ns: int = 0
    detectable_ns: int | None = None
    peers: list[int] = field(default_factory=list)
    sooner_ns: dict[int, int] = field(default_factory=dict)


def compare_stages(pipeline: Pipeline, entries: Entries, span_ns: int) -> list[Stage]:
    """Each stage's verdict, in order; ``unknown`` where none of the others can be compared with it."""
    found = [Stage(endpoint) for endpoint in pipeline.stages]
    units = _units(pipeline)
    own, excess = np.zeros((2, len(found), len(units)))
    shares: list[dict[int, float]] = [{} for _ in found]  # of its work, by way: what its peers do not need
    apart = np.zeros(len(found))  # how far a stage's peers are from one another
    together = [(FORWARD, BACKWARD)] if pipeline.schedule == "1f1b" else [(FORWARD,), (BACKWARD,)]
    for ways in together:
        table, places, good = _table(pipeline, ways, units)
        if len(places) < 2 or not good.any():
            continue
        for place in places:
            others = [p for p in places if p != place]
            usual = np.median(table[others], axis=0)
            distances = np.abs(np.median((table[others] - usual)[:, good], axis=1))
            own[place][good] += table[place][good]
            excess[place][good] += (table[place] - usual)[good]
            apart[place] += distances.max()
            found[place].peers = sorted({*found[place].peers, *(pipeline.stages[o] for o in others)})
            more = float(np.median((table[place] - usual)[good]))
            share = max(more / max(float(np.median(table[place][good])), 1.0), 0.0)
            shares[place] |= dict.fromkeys(ways, share)
    told = [place for place, stage in enumerate(found) if stage.peers]
    sends = pipeline.microbatches or 1
    sigma = sends * float(np.median([_scatter(excess[place]) for place in told])) if told else 0.0
    begin_ns = _begins(pipeline, entries, units)
    for place in told:
        design = SIGMAS * sends * float(apart[place])
        if len(found[place].peers) == 1:
            design = max(design, ALONE * sends * float(np.median(own[place] - excess[place])))
        _judge(found[place], sends * excess[place], sigma, design, begin_ns, span_ns)
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


def _table(
    pipeline: Pipeline, ways: tuple[int, ...], units: NDArray[np.int64]
) -> tuple[NDArray[np.float64], list[int], NDArray[np.bool_]]:
    """Mean work for one message by stage and unit, the stages seen, and the units where all are."""
    table = np.full((len(pipeline.stages), len(units)), np.nan)
    for place, row in enumerate(pipeline.work):
        parts = [_mean(work, units) for way in ways if (work := row[way]) is not None]
        if parts:
            table[place] = np.sum(parts, axis=0)
    places = np.flatnonzero(np.isfinite(table).any(axis=1)).tolist()
    return table, places, np.isfinite(table[places]).all(axis=0)


def _mean(work: Work, units: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the stage worked for one message, on average, in each unit; NaN where nothing tells."""
    known = (work.own_ns != NEVER) & (work.unit >= 0)
    place = np.searchsorted(units, work.unit[known])
    number = np.bincount(place, minlength=len(units))
    total = np.bincount(place, work.own_ns[known], len(units))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)


def _scatter(values: NDArray[np.float64]) -> float:
    """One standard deviation, by the steps from one unit to the next: a level that changes is no scatter."""
    if len(values) < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(values)))) / (QUARTER_IN_SIGMAS * 2**0.5)


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


def _judge(
    stage: Stage,
    excess_ns: NDArray[np.float64],
    sigma_ns: float,
    design_ns: float,
    begin_ns: NDArray[np.int64],
    span_ns: int,
) -> None:
    """Set verdict, steadiness and onset from how much longer the stage worked in each unit.

    ``sigma_ns`` is the scatter of a unit, ``design_ns`` how far apart stages may well be by design.
    """
    stage.verdict, stage.excess_ns = "on_time", round(float(np.median(excess_ns)))
    beyond = max(SIGMAS * sigma_ns, design_ns)
    stage.detectable_ns = round(max(beyond, MATERIAL_SHARE * span_ns / max(len(excess_ns), 1)))
    amount = np.where(excess_ns > beyond, excess_ns, 0).astype(np.int64)
    whole_ns = excess_ns.astype(np.int64)
    usual = usual_excess(whole_ns, whole_ns, max(sigma_ns, design_ns))
    if not is_habit(amount, span_ns) and not is_material(usual * len(excess_ns), span_ns):
        return
    stage.verdict, stage.steadiness = "intermittent", "transient"
    onset = onset_of(whole_ns, sigma_ns)
    if usual or (amount[onset or 0 :] > 0).mean() >= LATE_SHARE:
        stage.verdict, stage.steadiness = "late", "persistent"
        stage.since_ns = int(begin_ns[onset]) if onset is not None else None


def _sooner(row: list[Work | None], shares: dict[int, float]) -> dict[int, int]:
    """That share, by way, of the work for each message."""
    return {
        int(at): round(shares[way] * int(own))
        for way, work in enumerate(row)
        if work is not None and shares.get(way, 0.0) > 0
        for at, own in zip(work.rows, work.own_ns, strict=True)
        if own != NEVER
    }
