"""Stamps in the order in which a capture kept them, in; where its clock was set back, out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISORDER_NS: Final = 1_000_000
"""Neighbours' stamps are swapped by up to the tail of what takes them, 0.2 ms; a clock set back by less than
this leaves hardly two meanings."""
LASTS: Final = 3
"""So many packets in a row must have earlier stamps: a single one may be mistaken."""


def set_back(time_ns: NDArray[np.int64]) -> list[tuple[int, int]]:
    """From which places on stamps fall behind earlier ones and stay behind, and by how much, ns."""
    found: list[tuple[int, int]] = []
    at = 0
    while True:
        latest = np.maximum.accumulate(time_ns[at:])
        fallen = np.flatnonzero(lasting(latest - time_ns[at:] > DISORDER_NS))
        if not len(fallen):
            return found
        at += int(fallen[0])
        found.append((at, int(latest[fallen[0]] - time_ns[at])))


def lasting(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where ``LASTS`` values in a row, from here on, are true; fewer at the end."""
    found: NDArray[np.bool_] = values.copy()
    for ahead in range(1, LASTS):
        found[:-ahead] &= values[ahead:]
    return found
