"""Results that are kept between calls, as collectives repeat: all of them together within one bound of bytes.

``functools.lru_cache`` counts entries, but four thousand schedules are a megabyte for four ranks and a
gigabyte for a hundred. So what each result takes is measured, whoever made it, and what was used the longest
ago goes first; small results, which free little, are passed over some times before they go.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import wraps
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES: Final = 24 << 20
"""Of all results together: the schedules of some sizes of groups, each by all algorithms."""
ENTRY_BYTES: Final = 250
"""What keeping a result takes beside it and its arguments: a key, a place in the order."""
SMALL: Final = 1 << 16
"""A result is passed over as often as it fits into so many bytes,"""
MOST_PASSES: Final = 16
"""but no more than so often: one sweep over large schedules evicts no small results."""
_TURN: Final = "turn"  # stands in the order where the last turn was; results have tuples for keys
MEASURED: Final = 16
"""Members of a collection that are measured; the others are taken to be like them."""


class Store:
    """Results by function and arguments. ``most`` bytes are kept; a larger one alone until the next."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most, self.taken = most, 0
        self._held: OrderedDict[Hashable, tuple[Any, int, int]] = OrderedDict()
        self._lock = Lock()

    def remembered(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, asked once for the same arguments while its result is kept. They must be hashable."""
        held, use = self._held, self._held.move_to_end

        @wraps(function)
        def made(*args: P.args, **more: P.kwargs) -> R:
            key = (made, args, *more.items()) if more else (made, args)
            try:
                use(key)
                return held[key][0]  # type: ignore[no-any-return]
            except KeyError:
                result = function(*args, **more)
                self._keep(key, result)
                return result

        return made

    def _keep(self, key: Hashable, result: object) -> None:
        size = ENTRY_BYTES + size_of(key[1:]) + size_of(result)  # type: ignore[index]
        with self._lock:
            if key in self._held:  # made in another thread, or by what it called
                return
            while self._held and self.taken + size > self.most:
                oldest, (old, freed, passes) = self._held.popitem(last=False)
                if passes:
                    self._held[oldest] = old, freed, passes - 1
                else:
                    self.taken -= freed
            self._held[key] = result, size, min(SMALL // size, MOST_PASSES)
            self.taken += size

    def turn(self) -> None:
        """Forget what was not used since the turn before: of one odd job much may be kept for nothing."""
        with self._lock:
            while _TURN in self._held:
                self.taken -= self._held.popitem(last=False)[1][1]
            self._held[_TURN] = None, 0, 0

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._held.clear()
            self.taken = 0


STORE: Final = Store()
remembered: Final = STORE.remembered


def size_of(value: object) -> int:
    """The bytes that ``value`` and what it holds take, near enough; what is shared counts for each holder.

    An object that is no collection says by its ``__sizeof__`` what it takes; an ``Algorithm`` is shared.
    """
    if value.__class__ is int and -6 < value < 257:  # CPython has one of each
        return 0
    own = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return own if value.base is None else own + value.nbytes
    if isinstance(value, dict):
        return own + _all(value.keys(), len(value)) + _all(value.values(), len(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        return own + _all(value, len(value))
    return own


def _all(members: Iterable[object], count: int) -> int:
    measured = sum(size_of(each) for each in islice(members, MEASURED))
    return measured * count // MEASURED if count > MEASURED else measured
