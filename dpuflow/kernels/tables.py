"""Hash tables of flows and endpoints, made again at another size."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i4, i8, kernel, le64, put64, u1, void
from dpuflow.kernels.intern import EMPTY, SLOT_BITS, find_slot, hash_of
from dpuflow.schema import ENDPOINT


@kernel(void(u1[::1], u1[::1]))
def refill_slots(old, new):  # type: ignore[no-untyped-def]
    """Put every flow of ``old`` into the empty slots ``new``."""
    for at in range(0, len(old), 1 << SLOT_BITS):
        if le64(old, at + 8) != EMPTY:
            to = find_slot(new, le64(old, at), le64(old, at + 8))
            put64(new, to, le64(old, at))
            put64(new, to + 8, le64(old, at + 8))


@kernel(void(from_dtype(ENDPOINT.dtype)[::1], i8, i4[::1]))
def refill_index(endpoints, count, index):  # type: ignore[no-untyped-def]
    """Put the first ``count`` endpoints into the empty ``index``."""
    mask = len(index) - 1
    for row in range(count):
        low = np.int64(endpoints[row].addr_lo)
        at = hash_of(np.int64(endpoints[row].addr_hi), low ^ (low >> 32)) & mask
        while index[at] >= 0:
            at = (at + 1) & mask
        index[at] = row
