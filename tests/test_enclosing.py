"""A reduce and a broadcast of two ranks against an all_reduce by their tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dpuflow.matching.enclosing import without_enclosing
from dpuflow.matching.model import Instance, Job
from dpuflow.schedules.nccl import tree_all_reduce
from dpuflow.schema.rows import Op

TREE = tree_all_reduce(((-1, 0),))


def job(down_after: int, turns: int = 4) -> tuple[Job, list[Instance]]:
    """Rank 1 sends up to 0, and 0 down to 1 so much later; 0 exchanges with 2 from 20 to 40 of each turn."""
    messages, instances = [], []
    for turn in range(turns):
        at = 1000 * turn
        rows = len(messages)
        messages += [(1, 0, at, at + 5), (0, 1, at + 5 + down_after, at + 10 + down_after)]
        messages += [(0, 2, at + 20, at + 30), (2, 0, at - 3, at + 40)]  # rank 2 had come before
        instances.append(Instance(np.arange(rows, rows + 2), Op.ALL_REDUCE, [0, 1], TREE, size=64))
        instances.append(Instance(np.arange(rows + 2, rows + 4), Op.ALL_REDUCE, [0, 2], None, size=64))
    src, dst, starts, arrivals = np.array(messages, np.int64).T
    columns = SimpleNamespace(starts=starts, arrivals=arrivals)
    return cast("Any", SimpleNamespace(exchanges={"src": src, "dst": dst}, columns=columns)), instances


def test_what_comes_down_after_something_else_is_an_operation_of_its_own() -> None:
    made = without_enclosing(*job(down_after=60))
    pairs = [i for i in made if set(i.order) == {0, 1}]
    assert [str(i.op) for i in pairs] == [str(Op.REDUCE), str(Op.BROADCAST)] * 4
    assert all(i.order == [0, 1] and i.root == 0 and len(i.rows) == 1 for i in pairs)
    assert len(made) == 12


def test_what_comes_down_at_once_is_a_tree_s() -> None:
    world, instances = job(down_after=3)
    assert without_enclosing(world, instances) == instances
