"""A cache bounded by the memory of what it keeps, for results whose size goes with the ranks of a group.

``functools.lru_cache`` counts entries: four thousand schedules are a megabyte for four ranks and a gigabyte
for a hundred, which a process that runs for weeks comes by in time.
"""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES: Final = 16 << 20
"""That one cache keeps: the schedules of some sizes of groups, each by all algorithms."""
MOST_ENTRIES: Final = 4096


def kept(size: Callable[[Any], int], most: int = MOST_BYTES) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember results, and begin anew once they take more than ``most``; ``size`` gives the bytes of one.

    One result may be larger than ``most``: it is kept until the next one. Arguments must be hashable.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        taken = 0

        @wraps(function)
        def made(*args: P.args, **more: P.kwargs) -> R:
            nonlocal taken
            result = function(*args, **more)
            own = size(result)
            taken += own
            if taken > most:
                remembered.cache_clear()
                taken = own
            return result

        remembered: Any = lru_cache(maxsize=MOST_ENTRIES)(made)
        return cast("Callable[P, R]", remembered)

    return decorate
