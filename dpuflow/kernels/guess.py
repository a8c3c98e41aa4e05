"""Where a record starts in the middle of a file, so that two threads can parse at once.

A guess: the first offset from which a chain of plausible record headers follows. Whether it is right
shows when the walk over the bytes before lands on it.
"""

from __future__ import annotations

from dpuflow.kernels import columns as c
from dpuflow.kernels._jit import i8, inner, kernel, u1
from dpuflow.kernels.bytes import u32

CHAIN = 32  # headers that must follow one another
_DAY = 86_400
_ENHANCED = 6


@inner
def _next(data, at, end, pcapng, swapped, header, per_second, second):  # type: ignore[no-untyped-def]
    """Where the record after the one at ``at`` starts; -1 if there is none at ``at``."""
    if pcapng:
        size = u32(data, at + 4, swapped)
        if u32(data, at, swapped) != _ENHANCED or size < 32 or size & 3 or size > c.MAX_RECORD:
            return -1
        if at + size <= end and u32(data, at + size - 4, swapped) != size:
            return -1
        return at + size
    captured, length = u32(data, at + 8, swapped), u32(data, at + 12, swapped)
    if captured > c.MAX_CAPTURED or captured > length or length > c.MAX_RECORD:
        return -1
    if abs(u32(data, at, swapped) - second) > _DAY or u32(data, at + 4, swapped) >= per_second:
        return -1
    return at + header + captured


@kernel(i8(u1[::1], i8, i8, i8[::1], i8, i8))
def find_record(data, first, limit, form, per_second, second):  # type: ignore[no-untyped-def]
    """Offset from ``first`` and before ``limit`` where records seem to start; -1 if none.

    ``second``: the time of some record not far away; ``per_second``: ticks of the stamps' fraction.
    """
    pcapng, swapped, header = form[c.F_PCAPNG] != 0, form[c.F_SWAPPED] != 0, form[c.F_HEADER]
    end = len(data)
    for start in range(first, limit, 4 if pcapng else 1):
        at, links = start, 0
        while links < CHAIN and at >= 0 and at + 32 <= end:
            at = _next(data, at, end, pcapng, swapped, header, per_second, second)
            links += 1
        if at >= 0 and links > 0:
            return start
    return -1
