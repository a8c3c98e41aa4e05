"""The halves of collectives that go round twice: EXCHANGE rows in, times out."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, kernel, u1, void
from dpuflow.schema.rows import EXCHANGE

NEVER = np.int64(-(1 << 63))
FAR = np.int64((1 << 63) - 1)

_I8, _EXCHANGES = i8[::1], from_dtype(EXCHANGE.dtype)[::1]


@kernel(void(_EXCHANGES, _I8, _I8, u1[::1], _I8, _I8, i8[:, ::1]))
def halves(exchanges, rows, offsets, asked, whole, done, out):  # type: ignore[no-untyped-def]
    """First and last sign of the first and of the second half of every edge's bytes, by collective.

    ``rows[offsets[c]:offsets[c + 1]]`` are collective c's exchanges; only those ``asked`` for are looked
    at. ``whole`` and ``done`` (0) are scratch, one element for each connection and direction. Out: start
    and end of the first half, then of the second one; FAR and NEVER where nothing of it was seen.
    """
    for c in range(offsets.shape[0] - 1):
        out[c, 0] = FAR
        out[c, 1] = NEVER
        out[c, 2] = FAR
        out[c, 3] = NEVER
        if not asked[c]:
            continue
        for k in range(offsets[c], offsets[c + 1]):
            e = exchanges[rows[k]]
            whole[2 * np.int64(e.connection) + (e.src > e.dst)] += np.int64(e.bytes)
        for k in range(offsets[c], offsets[c + 1]):
            e = exchanges[rows[k]]
            key = 2 * np.int64(e.connection) + (e.src > e.dst)
            done[key] += np.int64(e.bytes)
            half = 0 if 2 * done[key] <= whole[key] else 2
            begin = e.data_ns if e.offer_ns == NEVER else e.offer_ns
            if begin != NEVER and e.arrived_end_ns != NEVER:
                out[c, half] = min(out[c, half], begin)
                out[c, half + 1] = max(out[c, half + 1], e.arrived_end_ns)
        for k in range(offsets[c], offsets[c + 1]):
            e = exchanges[rows[k]]
            key = 2 * np.int64(e.connection) + (e.src > e.dst)
            whole[key] = 0
            done[key] = 0
