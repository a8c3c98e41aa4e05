"""The smallest lateness that is told rightly: true and told lateness of ranks in, a time out."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Pair = tuple[int, int | None]
    """True lateness of a rank in one collective, and what was told, ns; None: no exact value."""

STEPS_US: Final = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))
RIGHT: Final = 0.99
FEWEST: Final = 30
"""Late ranks, and others, that it takes to speak of 99 in 100."""
LEFT_OUT: Final = 0.3
"""As in scoring: ranks within this share of a threshold are neither late nor on time."""


def smallest_ns(pairs: Sequence[Pair]) -> int | None:
    """The least of 1, 2, 5, 10, ... us at which "later than that" has 99 % precision and recall.

    Of the next step as well, so that no single lucky one counts. None where no step has.
    """
    good = [_holds(pairs, step * 1000) for step in STEPS_US]
    for (step, now), (_, then) in pairwise(zip(STEPS_US, good, strict=True)):
        if now and then is not False:
            return step * 1000
    return None


def _holds(pairs: Sequence[Pair], limit_ns: int) -> bool | None:
    """Whether precision and recall are as asked at one threshold; None where too few ranks are late."""
    hits = missed = false = early = 0
    for true, told in pairs:
        if abs(true - limit_ns) <= LEFT_OUT * limit_ns:
            continue
        late, said = true > limit_ns, told is not None and told > limit_ns
        hits += late and said
        missed += late and not said
        false += said and not late
        early += not late and true > 0  # the first of all is never called late
    if hits + missed < FEWEST or early < FEWEST:
        return None
    return hits >= RIGHT * (hits + missed) and hits >= RIGHT * (hits + false)
