"""Two ranks that send each other one message: who comes late, or who answers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dpuflow.matching import Instance, Job
from dpuflow.matching.structured import without_answers
from dpuflow.schedules.nccl import pat
from dpuflow.schema.rows import EXCHANGE, Op


@pytest.mark.parametrize(
    ("by", "blind"),
    [("input", {1}), ("clock", set())],  # as long after what it got as ever; after its own last act
)
def test_who_works_on_what_it_got_is_not_late(by: str, blind: set[int]) -> None:
    """A server gathers and sends back; or the second rank always works 1 ms longer."""
    draw, exchanges, now = random.Random(3), EXCHANGE.zeros(48), 0
    for turn in range(24):
        first = now + 8_000_000 + draw.randrange(200_000)
        then = first + 50_000 if by == "input" else now + 8_100_000
        for row, src, at in ((0, 0, first), (1, 1, then + 1_000_000 + draw.randrange(20_000))):
            row += 2 * turn
            exchanges["src"][row], exchanges["dst"][row], exchanges["bytes"][row] = src, 1 - src, 4096
            exchanges["offer_ns"][row] = exchanges["grant_ns"][row] = np.iinfo(np.int64).min
            exchanges["data_ns"][row], exchanges["data_end_ns"][row] = at, at + 30_000
            exchanges["arrived_ns"][row] = exchanges["arrived_end_ns"][row] = at + 50_000
            now = at + 50_000
    job = Job(exchanges, np.arange(2))
    op = Op.ALL_GATHER
    made = [Instance(np.array([k, k + 1]), op, [0, 1], pat(op, 2), size=4096) for k in range(0, 48, 2)]
    found = without_answers(job.columns, exchanges, made)
    assert {each.view.blind for each in found} == {frozenset(blind)}
