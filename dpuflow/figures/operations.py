"""Collectives of the result in, a row a class of operations out: how long they take, and whether that is the
transfer or who comes late.

Bus bandwidth is as nccl-tests have it: what a link carries if the algorithm were the best one, so that it can
be held to the link's rate whatever the operation and the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import median_of, percentile
from dpuflow.results.figures import Attribution, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from dpuflow.results import Analysis, Collective
    from dpuflow.results.tokens import OpToken

    Floats = NDArray[np.float64]
    Key = tuple[int, str, str, str | None, int | None]

BUS: Final[dict[OpToken, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1.0,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
"""By operation and ranks: how often a link carries ``bytes`` (nccl-tests, doc/PERFORMANCE.md); of all_gather
``bytes`` is one rank's share."""
FEWEST: Final = 8
"""Collectives of a class that it takes to say what dominates."""
HALF: Final = 0.5
THIRD: Final = 1 / 3
"""Neither dominates where each surely makes up a third."""
SURELY: Final = 1.96


def list_operations(result: Analysis) -> Iterator[Operation]:
    """One row for each group, operation, algorithm, protocol and size; the largest part of the time first."""
    for (group, _, _, _, size), mine in classes_of(result.collectives):
        took = np.array([each.end_ns - each.start_ns for each in mine], np.float64)
        after = np.array([ns for each in mine if (ns := after_last(each)) is not None], np.float64)
        alone = float(median_of(after)) if len(after) else None
        ranks, bus = len(result.groups[group].endpoints), None
        if size and alone and ranks > 1 and mine[0].op in BUS:
            bus = 8e9 * size * BUS[mine[0].op](ranks) / alone
        yield Operation(
            group=group,
            op=mine[0].op,
            algorithm=mine[0].algorithm,
            protocol=mine[0].protocol,
            bytes=size,
            count=len(mine),
            wire_bytes=sum(each.wire_bytes for each in mine),
            p50_ns=round(float(median_of(took))),
            p99_ns=round(float(percentile(took, 99))),
            after_last_ns=None if alone is None else round(alone),
            bus_bits_per_s=bus,
        )


def list_attribution(result: Analysis) -> Iterator[Attribution]:
    """One row for each class of operations of which the ranks' entries are known."""
    for (group, op, _, _, size), mine in classes_of(result.collectives):
        if op == "send_recv":
            continue
        pairs = [(each.end_ns - each.start_ns, skew) for each in mine if (skew := _skew(each)) is not None]
        if not pairs:
            continue
        took, skew = np.array(pairs, np.float64).T
        share, error = ratio_of(skew, took)
        low, high = max(share - SURELY * error, 0.0), min(share + SURELY * error, 1.0)
        least = skew <= percentile(skew, 25)
        yield Attribution(
            group=group,
            op=mine[0].op,
            bytes=size,
            count=len(pairs),
            zero_skew_ns=round(float(median_of((took - skew)[least]))),
            skew_share=share,
            low_share=low,
            high_share=high,
            verdict=word_of(low, high) if len(pairs) >= FEWEST else "inconclusive",
        )


def ratio_of(part: Floats, whole: Floats) -> tuple[float, float]:
    """The sum of ``part`` over that of ``whole``, and the standard error of that ratio."""
    total = max(float(whole.sum()), 1.0)
    share = float(part.sum()) / total
    rest = part - share * whole
    return share, float(np.sqrt((rest * rest).sum() * len(part) / max(len(part) - 1, 1))) / total


def word_of(low: float, high: float) -> str:
    """What dominates, of skew and transfer, where skew's share lies surely between two shares."""
    if low >= THIRD and high <= 1 - THIRD:
        return "mixed"
    if low > HALF:
        return "arrival_skew_dominated"
    return "transfer_dominated" if high < HALF else "inconclusive"


def classes_of(collectives: Iterable[Collective]) -> list[tuple[Key, list[Collective]]]:
    """Whole collectives by group, operation, algorithm, protocol and size; those that took longest first."""
    found: dict[Key, list[Collective]] = defaultdict(list)
    for each in collectives:
        if each.complete:
            found[each.group, each.op, each.algorithm, each.protocol, each.bytes].append(each)
    return sorted(found.items(), key=lambda pair: -sum(each.end_ns - each.start_ns for each in pair[1]))


def _skew(each: Collective) -> int | None:
    """How much later the last rank came than the first; None where not everybody's entry is known."""
    late = [rank.lateness_ns for rank in each.ranks if rank.bound == "exact" and rank.lateness_ns is not None]
    return max(late) if len(late) == len(each.ranks) > 1 else None


def after_last(each: Collective) -> int | None:
    """From the last rank's entry to the end; None where that entry is not known."""
    skew = _skew(each)
    if skew is None:
        return None
    first = min(rank.enter_ns for rank in each.ranks if rank.enter_ns is not None)
    return each.end_ns - first - skew
