"""Turns: which operations of several sets of connections may be one, by when each rank sent.

In: sets of connections in lockstep (``pipes``). A rank carries out the operations of a communicator one after
the other, on all connections: so at every rank all first messages of a turn come before those of the next,
and nothing of the next begins before the rank is through with this one. What NCCL has put into the slots of a
connection may leave later than that (src/include/device.h, NCCL_STEPS).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.pipes import Lockstep

STAGED: Final = NCCL_STEPS
"""Messages of a connection that may leave when their rank is through with the operation."""
_FAR: Final = np.iinfo(np.int64).max

Part = tuple[int, int, int]
"""The number of a set, and from the how-manieth of its operations to the how-manieth."""
Turn = tuple[Part, ...]
"""For each set that takes part its part."""


class Sends:
    """When ranks sent on each of several sets, by its operations.

    ``at[k]`` is the number of set ``k``'s next operation; ``left`` are sets that have one, ``chosen`` some of
    them.
    """

    def __init__(self, sets: Sequence[Lockstep], starts: NDArray[np.int64]) -> None:
        self._count = [len(each) for each in sets]
        ends = sorted({end for each in sets for pipe in each.pipes for end in pipe[:2]})
        place = {end: number for number, end in enumerate(ends)}
        # Of each set: (operations, ranks); far in the future and NEVER of ranks that do not send on it.
        self._first, self._last, self._filled = (
            [np.full((len(each), len(ends)), fill) for each in sets] for fill in (_FAR, NEVER, NEVER)
        )
        self._half: list[NDArray[np.int64]] = []  # of each operation: half of its messages had left somewhere
        for number, each in enumerate(sets):
            begin, end = each.bounds[:-1], each.bounds[1:]
            first, last, filled, half = (
                starts[each.rows[:, at]]
                for at in (begin, end - 1, np.maximum(end - 1 - STAGED, begin), (begin + end) // 2)
            )
            first = np.where(first == NEVER, _FAR, first)
            self._half.append(half.min(axis=0))
            for row, pipe in enumerate(each.pipes):
                column = place[pipe.src]
                for times, found, outer in (
                    (self._first[number], first[row], np.minimum),
                    (self._last[number], last[row], np.maximum),
                    (self._filled[number], filled[row], np.maximum),
                ):
                    outer(times[:, column], found, out=times[:, column])
        self._begun = [first.min(axis=1) for first in self._first]

    def left(self, at: Sequence[int]) -> list[int]:
        """Sets that have operations left, in order of when the next one begins."""
        left = [number for number, here in enumerate(at) if here < self._count[number]]
        return sorted(left, key=lambda number: int(self._begun[number][at[number]]))

    def is_even(self) -> bool:
        """Whether all sets have as many operations, each one's first messages before those of the next."""
        if len(set(self._count)) != 1:
            return False
        every = np.stack(self._first)
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
        return len(every) == 1 or bool((latest[:-1] <= every.min(axis=0)[1:]).all())

    def is_next(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether no rank sent on other sets, or again on these, before it had begun on all of ``chosen``."""
        every = np.stack([self._first[number][at[number]] for number in chosen])
        latest = np.where(every == _FAR, NEVER, every).max(axis=0)
        later = [self._first[number][at[number]] for number in left if number not in chosen]
        later += [self._first[n][at[n] + 1] for n in chosen if at[n] + 1 < self._count[n]]
        return all(bool((when >= latest).all()) for when in later)

    def is_over(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether no rank sent on other sets before its last message on ``chosen``."""
        return self._is_through(self._last, chosen, at, left)

    def is_apart(self, chosen: Sequence[int], at: Sequence[int], left: Sequence[int]) -> bool:
        """Whether nothing begins on other sets within the operation on ``chosen``: it would be a part of it.

        That is before the rank was through with it, but for what lay in its slots; or anywhere before any
        connection was half through, for no rank ends an operation before all others have begun it.
        """
        half = min(int(self._half[number][at[number]]) for number in chosen)
        others = [int(self._begun[number][at[number]]) for number in left if number not in chosen]
        return min(others, default=half) >= half and self._is_through(self._filled, chosen, at, left)

    def _is_through(
        self,
        times: list[NDArray[np.int64]],
        chosen: Sequence[int],
        at: Sequence[int],
        left: Sequence[int],
    ) -> bool:
        every = np.stack([times[number][at[number]] for number in chosen]).max(axis=0)
        later = [self._first[number][at[number]] for number in left if number not in chosen]
        return all(bool((when >= every).all()) for when in later)
