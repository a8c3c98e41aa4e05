"""Stretches of time in which something went wrong in, from when to when it did as a rule out.

What is wrong from some time on is told from then, not from the beginning of the captures: neither what was
seen before it, nor a single case long before, belongs to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.findings.case import SMALL_SHARE
from dpuflow.verdicts.chance import turn_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


def lasting(stretches: Ints, seen_ns: Ints, otherwise: tuple[int, int]) -> tuple[int, int]:
    """From when to when, ns; ``otherwise`` without a stretch.

    ``stretches``: two rows, from when to when each message was held; ``seen_ns``: when messages came that
    might have been, held ones or not.
    """
    held = stretches[:, stretches[1] > stretches[0]]
    if not held.size:
        return otherwise
    order = np.argsort(np.r_[held[1], seen_ns], kind="stable")
    when = np.r_[held[1], seen_ns][order]
    took = np.r_[held[1] - held[0], np.zeros(len(seen_ns), np.int64)][order]
    first = _turn(when, took)
    when, took = when[first:], took[first:]
    last = len(when) - _turn(-when[::-1], took[::-1])
    when, took = when[:last], took[:last]
    hits = took > 0
    return int((when - took)[hits].min()), int(when[hits].max())


def _turn(when_ns: Ints, took_ns: Ints) -> int:
    """From which one on messages are held more often, where that is sure and what was before cost nothing to
    speak of. Else the first."""
    hits = took_ns > 0
    so_far, at = np.cumsum(took_ns)[hits] - took_ns[hits], when_ns[hits]
    return turn_of(hits, so_far < SMALL_SHARE * (at - when_ns[0])) or 0
