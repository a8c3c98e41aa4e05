"""Verdicts and what they rest on in, how often verdicts like these are right out.

A factor for each thing that can make a verdict wrong: what was read of the collectives, times that are
bounded only, errors of the clocks, incidents beside an on-time verdict, packets that the capture lost. The
levels are those measured on twins of captures with known truth (docs/accuracy.md).
"""

from __future__ import annotations

from dataclasses import replace
from math import erfc, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.entries import EXACT
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.charges import INTERVAL_IN_SIGMAS
from dpuflow.verdicts.habits import MATERIAL_SHARE, habit_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries, Relative
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import CaptureInfo
    from dpuflow.verdicts.coverage import Coverage
    from dpuflow.verdicts.judgement import Judgement
    from dpuflow.verdicts.own import Own

MOST: Final = 0.99
"""No verdict is surer: one in a hundred is what chance may do (``habits.CHANCE``)."""
EVEN: Final = 0.5
"""Where half of the times show lateness that matters, or incidents cost just what is worth a verdict."""
SHOWN: Final = 0.75
"""From this share of times on nothing that matters was ever hidden by the others."""
BOUNDED: Final = 2 / 3
"""So often were ranks guilty whose lateness is known by lower bounds only: these show where it is large."""
STAGES: Final = 0.9
"""A stage that differs from its peers may do so by design."""


def with_confidence(
    judgements: Sequence[Judgement],
    told: Mapping[int, Coverage],
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    own: Own,
    captures: Sequence[CaptureInfo],
    worked_ns: int,
    staged: frozenset[int] = frozenset(),
) -> list[Judgement]:
    """Judgements with their confidence; None where nothing is claimed, or only that messages came late.

    ``staged``: endpoints that were compared with other stages of their pipelines.
    """
    reading = np.array([each.confidence for each in instances], np.float64)[entries.collective]
    kept = kept_share(captures)
    in_turn = any(each.steadiness == "rotating" for each in judgements)
    out = []
    for each in judgements:
        rows = np.flatnonzero(entries.endpoint == each.endpoint)
        sure = None
        if each.verdict == "on_time":
            amount = own.amount_ns[rows]
            # One or two incidents are nobody's habit; beside others late in turn they may be its turn.
            cost_ns = int(amount.sum()) if in_turn else habit_ns(amount)
            cost = cost_ns / max(MATERIAL_SHARE * worked_ns, 1.0)
            sure = STAGES if each.endpoint in staged else _clear(told.get(each.endpoint), cost)
        elif each.late and each.cause != "unknown":
            late = rows[own.amount_ns[rows] > 0]
            late = late if len(late) else np.array(sorted(each.usual_ns), np.int64)
            sure = STAGES if not len(late) else _guilty(late, reading, relative, each)
        out.append(replace(each, confidence=None if sure is None else round(kept * sure, 3)))
    return out


def kept_share(captures: Sequence[CaptureInfo]) -> float:
    """Of the packets that the captures should hold, the share that they say they do."""
    packets, lost = sum(c.packets for c in captures), sum(c.lost_packets or 0 for c in captures)
    return packets / (packets + lost) if packets else 1.0


def _clear(told: Coverage | None, cost: float) -> float:
    """Of who is called on time; ``cost``: of its incidents, in shares of what is worth a verdict."""
    if told is None:
        return STAGES
    seen = max(1 - 2 * max(SHOWN - told.shown, 0.0), EVEN)
    # What costs half of what makes a verdict is nobody's habit; what costs as much may well be.
    return MOST * min(seen, max(1.5 - cost, EVEN))


def _guilty(
    late: NDArray[np.int64], reading: NDArray[np.float64], relative: Relative, judgement: Judgement
) -> float:
    """Of who is called late in these rows."""
    exact = relative.bound[late] == EXACT
    bounded = 0.0 if judgement.verdict == "late" else 1 - float(exact.mean())
    known = relative.lateness_ns[late] != NEVER
    errors = relative.error_ns[late][known & exact]
    errors = errors[errors > 0]
    clocks = 1.0
    if len(errors):
        usual = float(np.median(relative.lateness_ns[late][known]))
        clocks = 0.5 * erfc(-INTERVAL_IN_SIGMAS * usual / float(np.median(errors)) / sqrt(2))
    return MOST * float(reading[late].mean()) * (1 - bounded * (1 - BOUNDED)) * clocks
