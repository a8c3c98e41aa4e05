"""Answers against the decode steps that bring their tokens: which step is whose, and what a loss delays."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.findings.answers import steps_of

STEP = 450
ENDS = np.cumsum(np.r_[0, np.full(11, STEP), 200_000, np.full(20, STEP)])
"""Ends of decode steps; nobody asked for a while after the twelfth."""


@pytest.mark.parametrize("behind", [0, 100, 500, 1_600])
@pytest.mark.parametrize("first", [2, 5])
def test_the_steps_of_an_answer_are_those_before_its_tokens(first: int, behind: int) -> None:
    """Its tokens leave ever later behind their steps, but all before the pause after the last of them."""
    own = ENDS[first : first + 10]
    times = own + np.minimum(behind, 1_000) + np.arange(len(own)) * 40
    assert steps_of(times, ENDS, STEP) == first


def test_other_ranks_end_a_step_a_little_later() -> None:
    assert steps_of(ENDS[3:9] - 20, ENDS, STEP) in (2, 3)


def test_tokens_before_all_steps_belong_to_none() -> None:
    assert steps_of(np.array([-10_000, -9_000]), ENDS, STEP) == -1
