"""What collectives are cut from: columns of EXCHANGE rows, and rows dealt out by edge.

In: EXCHANGE rows. Out: plain columns of what cutting looks at, and a stable order by key.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, kernel, u1, u4, void
from dpuflow.schema.rows import EXCHANGE

NEVER = np.int64(-(1 << 63))
FAR = np.int64((1 << 63) - 1)

_I8 = i8[::1]
_EXCHANGES = from_dtype(EXCHANGE.dtype)[::1]


@kernel(void(_EXCHANGES, _I8, _I8, _I8))
def columns(exchanges, sizes, starts, arrivals):  # type: ignore[no-untyped-def]
    """Each exchange's bytes, the sender's first act and the arrival of its end, ns or NEVER."""
    for i in range(exchanges.shape[0]):
        e = exchanges[i]
        sizes[i] = np.int64(e.bytes)
        starts[i] = e.data_ns if e.offer_ns == NEVER else e.offer_ns
        arrivals[i] = e.arrived_end_ns


@inlined
def earlier(low, time_ns):  # type: ignore[no-untyped-def]
    """The smaller one of ``low`` and a time that may be NEVER."""
    return low if time_ns == NEVER else min(low, time_ns)


@kernel(void(_EXCHANGES, _I8, _I8))
def spans(exchanges, first, last):  # type: ignore[no-untyped-def]
    """First (far future without any) and last sign of each exchange, ns."""
    for i in range(exchanges.shape[0]):
        e = exchanges[i]
        low = earlier(earlier(earlier(FAR, e.offer_ns), e.grant_ns), e.data_ns)
        first[i] = earlier(earlier(earlier(low, e.data_end_ns), e.arrived_end_ns), e.grant_arrived_ns)
        high = max(max(e.offer_ns, e.grant_ns), max(e.data_ns, e.data_end_ns))
        last[i] = max(high, max(e.arrived_end_ns, e.grant_arrived_ns))


@kernel(i8(_EXCHANGES, _I8, _I8))
def directions(exchanges, rows, key):  # type: ignore[no-untyped-def]
    """Write each row's ``key``, twice its connection, plus 1 one way; returns the largest, -1 for none."""
    largest = np.int64(-1)
    for i in range(rows.shape[0]):
        e = exchanges[rows[i]]
        key[i] = 2 * np.int64(e.connection) + (np.int64(1) if e.src > e.dst else np.int64(0))
        largest = max(largest, key[i])
    return largest


@kernel(i8(_EXCHANGES, _I8, _I8, _I8, _I8, u4[::1]))
def deal(exchanges, rows, key, at, out, last):  # type: ignore[no-untyped-def]
    """Put ``rows`` into ``out`` by key, those of one key in the order they come.

    ``at`` (one longer than there are keys) is where each key's rows are to start and is moved on;
    ``last`` (0) has one element a key. Returns 1 if ``order`` rises within each key, else 0.
    """
    rising = np.int64(1)
    for i in range(rows.shape[0]):
        k = key[i]
        number = exchanges[rows[i]].order
        if number < last[k]:
            rising = np.int64(0)
        last[k] = number
        out[at[k]] = rows[i]
        at[k] += 1
    return rising


TIMES = ("offer_ns", "offer_arrived_ns", "grant_ns", "grant_arrived_ns", "data_ns", "data_end_ns",
         "arrived_ns", "arrived_end_ns", "acked_ns", "taken_ns")  # fmt: skip
NUMBERS = ("src", "dst", "connection", "order", "offer", "grant", "data", "packets", "retransmitted")
KINDS = ("wire", "flags", "seen")


@kernel(void(_EXCHANGES, _I8, i8[:, ::1], u4[:, ::1], u1[:, ::1]))
def pick(exchanges, rows, times, numbers, kinds):  # type: ignore[no-untyped-def]
    """Copy the columns TIMES, NUMBERS and KINDS of some rows, all in one pass over them."""
    for i in range(rows.shape[0]):
        e = exchanges[rows[i]]
        times[0, i] = e.offer_ns
        times[1, i] = e.offer_arrived_ns
        times[2, i] = e.grant_ns
        times[3, i] = e.grant_arrived_ns
        times[4, i] = e.data_ns
        times[5, i] = e.data_end_ns
        times[6, i] = e.arrived_ns
        times[7, i] = e.arrived_end_ns
        times[8, i] = e.acked_ns
        times[9, i] = e.taken_ns
        numbers[0, i] = e.src
        numbers[1, i] = e.dst
        numbers[2, i] = e.connection
        numbers[3, i] = e.order
        numbers[4, i] = e.offer
        numbers[5, i] = e.grant
        numbers[6, i] = e.data
        numbers[7, i] = e.packets
        numbers[8, i] = e.retransmitted
        kinds[0, i] = e.wire
        kinds[1, i] = e.flags
        kinds[2, i] = e.seen
