"""Orders within classes: columns in, permutations or extremes out."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import i8, inner, kernel, void

NEVER = np.int64(-(1 << 63))

_I8 = i8[::1]
RUN = 8  # values put in order by insertion before they are merged


@inner
def merge_sort(keys, order, room, low, high):  # type: ignore[no-untyped-def]
    """Put ``order[low:high]`` in order of its keys; equal ones keep theirs. ``room`` is scratch."""
    for start in range(low, high, RUN):
        for i in range(start + 1, min(start + RUN, high)):
            moved = order[i]
            key = keys[moved]
            j = i
            while j > start and keys[order[j - 1]] > key:
                order[j] = order[j - 1]
                j -= 1
            order[j] = moved
    width = np.int64(RUN)
    while width < high - low:
        for start in range(low, high - width, 2 * width):
            middle, end = start + width, min(start + 2 * width, high)
            if keys[order[middle - 1]] <= keys[order[middle]]:
                continue  # in order already
            for i in range(start, middle):
                room[i] = order[i]
            i, j, k = start, middle, start
            while i < middle and j < end:
                if keys[order[j]] < keys[room[i]]:
                    order[k] = order[j]
                    j += 1
                else:
                    order[k] = room[i]
                    i += 1
                k += 1
            while i < middle:
                order[k] = room[i]
                i += 1
                k += 1
        width *= 2


@kernel(void(_I8, _I8, _I8, _I8, _I8))
def within(keys, of, at, room, order):  # type: ignore[no-untyped-def]
    """Write what sorts by class, then by key; equal ones keep their order.

    ``of`` is each element's class, ``at`` where each class starts in the order, which is moved on;
    ``room`` is scratch as long as ``keys``.
    """
    for i in range(keys.shape[0]):
        order[at[of[i]]] = i
        at[of[i]] += 1
    low = np.int64(0)
    for k in range(at.shape[0]):
        merge_sort(keys, order, room, low, at[k])
        low = at[k]


@kernel(void(_I8, _I8, _I8, _I8))
def earliest(times, of, best, where):  # type: ignore[no-untyped-def]
    """For each class the first one of its earliest times that are not NEVER, and which it is.

    ``best`` and ``where`` keep what they hold where a class has none; ``best`` starts with the far future.
    """
    for i in range(times.shape[0]):
        k = of[i]
        if times[i] != NEVER and times[i] < best[k]:
            best[k] = times[i]
            where[k] = i
