"""Steps and what losses held up in, what loss recovery takes of the slowest steps out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.arrays.stretches import covered_between
from dpuflow.results.figures import LossTax
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.verdicts.steps import Steps

    Ints = NDArray[np.int64]

FEWEST: Final = 8
"""Steps, or else a tail is one of them."""


def list_loss_tax(steps: Sequence[Steps], entries: Entries, held: Ints) -> Iterator[LossTax]:
    """One row a job some of whose steps losses held up; ``held``: from when to when, two rows."""
    for each in steps:
        ends = np.sort(entries.leave_ns[each.ends])
        ends = ends[ends != NEVER]
        took = np.diff(ends)
        lost = covered_between(ends, held)
        if len(took) < FEWEST or not lost.any():
            continue
        # No step gets shorter than those without loss usually are.
        usual = float(median_of(took[lost == 0])) if (lost == 0).any() else float(took.min())
        without = took - np.minimum(lost, np.maximum(took - usual, 0))
        p99, less = (float(np.percentile(values, 99)) for values in (took, without))
        yield LossTax(
            endpoints=each.endpoints,
            steps=len(took),
            held_steps=int((lost > 0).sum()),
            p99_ns=round(p99),
            p99_without_ns=round(less),
            tail_share=1 - less / p99 if p99 > 0 else 0.0,
            step_share=float(1 - without.sum() / max(took.sum(), 1)),
        )
