"""How long messages took, and medians by class: EXCHANGE or TRANSFER rows in, plain columns out."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, inner, kernel, prefetch_row, u1, void
from dpuflow.schema.rows import EXCHANGE, TRANSFER, Wire

NEVER = np.int64(-(1 << 63))
TOOK, OP, BYTES, SRC, DST = range(5)  # columns of `durations`
FROM, UNDER_WAY, CARRIED, AGAIN, SENDER = range(5)  # columns of `under_way`
AHEAD = 16  # rows that are asked for from memory while others are worked on
FEWEST_PACKETS = 4  # a message of fewer has no duration to speak of

_W_TAGGED_DONE = int(Wire.TAGGED_DONE)
_I8, _EXCHANGES = i8[::1], from_dtype(EXCHANGE.dtype)[::1]
_TRANSFERS = from_dtype(TRANSFER.dtype)[::1]
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)  # in plain Python numbers do not end at 64 bits


@inlined
def gcd(a, b):  # type: ignore[no-untyped-def]
    """The greatest common divisor; of differences, so either may be negative."""
    a, b = abs(a), abs(b)
    while b:
        a, b = b, a % b
    return a


@kernel(i8(_EXCHANGES, u1[::1], i8[:, ::1], _I8))
def durations(exchanges, part, out, grain):  # type: ignore[no-untyped-def]
    """Pick the exchanges marked in ``part`` whose data spans several packets; returns how many.

    Out, columns of TOOK (the longer one of the times it took to send and to receive, ns; to send, where the
    sender says, at its leisure, when all has come), OP, BYTES, SRC, DST; ``grain[0]``: what all their
    durations are multiples of, 0 where all are 0.
    """
    n = np.int64(0)
    common = np.int64(0)
    for i in range(exchanges.shape[0]):
        if not part[i]:
            continue
        e = exchanges[i]
        if e.packets < FEWEST_PACKETS or e.data_ns == NEVER or e.arrived_end_ns == NEVER:
            continue
        sending = e.data_end_ns - e.data_ns
        receiving = np.int64(0) if e.wire == _W_TAGGED_DONE else e.arrived_end_ns - e.arrived_ns
        out[TOOK, n] = max(max(sending, receiving), 0)
        out[OP, n] = e.op
        out[BYTES, n] = np.int64(e.bytes)
        out[SRC, n] = e.src
        out[DST, n] = e.dst
        n += 1
        if common != 1:
            common = gcd(gcd(common, sending), receiving)
            if e.offer_ns != NEVER:
                common = gcd(common, e.data_ns - e.offer_ns)
    grain[0] = common
    return n


@kernel(void(_TRANSFERS, _I8, i8[:, ::1]))
def under_way(transfers, rows, out):  # type: ignore[no-untyped-def]
    """Columns of some rows: when a message was first seen, the longer one of the times it took to send and
    to arrive (ns), its bytes, packets sent again, its sender."""
    for i in range(rows.shape[0]):
        if i + AHEAD < rows.shape[0]:
            prefetch_row(transfers, rows[i + AHEAD])  # type: ignore[call-arg]
        t = transfers[rows[i]]
        out[FROM, i] = min(t.sent_ns, t.arrived_ns)
        out[UNDER_WAY, i] = max(t.sent_end_ns - t.sent_ns, t.arrived_end_ns - t.arrived_ns)
        out[CARRIED, i] = np.int64(t.bytes)
        out[AGAIN, i] = t.retransmitted
        out[SENDER, i] = t.src


@kernel(i8(_I8, _I8, _I8, _I8))
def classes(first, second, slots, of):  # type: ignore[no-untyped-def]
    """Number pairs of values in order of appearance; returns how many different ones there are.

    ``slots`` (-1) is a hash table whose length is a power of two and at least twice that of ``first``;
    it holds where each pair was met first.
    """
    count = np.int64(0)
    mask = slots.shape[0] - 1
    for i in range(first.shape[0]):
        mixed = (np.uint64(first[i]) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(second[i])) & _WORD
        mixed = mixed * np.uint64(0xD6E8FEB86659FD93) & _WORD
        slot = np.int64(mixed >> np.uint64(32)) & mask
        while True:
            other = slots[slot]
            if other < 0:
                slots[slot] = i
                of[i] = count
                count += 1
                break
            if first[other] == first[i] and second[other] == second[i]:
                of[i] = of[other]
                break
            slot = (slot + 1) & mask
    return count


@inner
def select(values, low, high, place):  # type: ignore[no-untyped-def]
    """Put the value that belongs at ``place`` of sorted ``values[low:high]`` there (Hoare's quickselect)."""
    high -= 1
    while low < high:
        pivot = values[(low + high) >> 1]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            return


@kernel(void(_I8, _I8, _I8, _I8, _I8))
def medians(values, of, at, room, out):  # type: ignore[no-untyped-def]
    """The lower median of each class's values.

    ``of`` is each value's class; ``at`` where each class's values start if sorted by class, and is moved
    on; ``room`` is scratch as long as ``values``.
    """
    for i in range(values.shape[0]):
        k = of[i]
        room[at[k]] = values[i]
        at[k] += 1
    low = np.int64(0)
    for k in range(out.shape[0]):
        high = at[k]
        if high > low:
            middle = low + (high - low - 1) // 2
            select(room, low, high, middle)
            out[k] = room[middle]
        low = high
