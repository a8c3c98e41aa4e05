"""Steps and what losses held up in, what loss recovery takes of the slowest steps out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.results import LossTax
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
        lost = overlap_ns(ends, held)
        if len(took) < FEWEST or not lost.any():
            continue
        # No step gets shorter than those without loss usually are.
        usual = float(np.median(took[lost == 0])) if (lost == 0).any() else float(took.min())
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


def overlap_ns(ends: Ints, held: Ints) -> Ints:
    """Of each span between two ``ends`` how much the stretches (from, to) cover, together."""
    if not held.shape[1]:
        return np.zeros(max(len(ends) - 1, 0), np.int64)
    begin, end = held[:, np.argsort(held[0], kind="stable")]
    end = np.maximum.accumulate(end)
    begin = np.maximum(begin, np.r_[begin[:1], end[:-1]])  # what is covered already counts once
    passed = np.r_[0, np.cumsum(np.maximum(end - begin, 0))]
    at = np.searchsorted(begin, ends, side="right")
    last = np.maximum(at - 1, 0)
    beyond = (
        np.where(at > 0, np.maximum(end[last] - ends, 0), 0) if len(end) else np.zeros(len(ends), np.int64)
    )
    covered: Ints = np.diff(passed[at] - beyond)
    return covered
