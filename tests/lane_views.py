"""Views of lanes, for tests of what they make together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching import Job
from dpuflow.matching.lanes import Lane, View
from dpuflow.schema.rows import EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def view(
    lanes: Sequence[Lane],
    near: Collection[int] | None = None,
    among: int = 0,
    nodes: Sequence[int] | None = None,
) -> View:
    """What captured ranks ``near`` (None: all) saw; ``nodes``: None where each is a node."""
    ends = sorted({end for lane in lanes for end in lane[:2]})
    captured = None if near is None else frozenset(near)
    places = None if nodes is None else np.array(nodes)
    return View(Job(EXCHANGE.zeros(0), np.arange(max(ends) + 1), captured, places), lanes, ends, among)
