"""Exchanges of messages without keys: the i-th grant of a direction pays for its i-th data message.

In: TRANSFER rows in order of time. Out: EXCHANGE rows in order of their first sign.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inner, kernel
from dpuflow.schema import EXCHANGE, TRANSFER

NEVER = np.int64(-(1 << 63))
NONE32 = np.uint32(0xFFFFFFFF)
GRANT = 2  # Role
WRITE, WRITE_IMM = 2, 3  # Wire

_I8 = i8[::1]
_TRANSFERS, _EXCHANGES = from_dtype(TRANSFER.dtype)[::1], from_dtype(EXCHANGE.dtype)[::1]


@inner
def _open(t, e, turn):  # type: ignore[no-untyped-def]
    """What both ends of an exchange share, from whichever message came first."""
    e.offer_ns = NEVER
    e.offer_arrived_ns = NEVER
    e.grant_ns = NEVER
    e.grant_arrived_ns = NEVER
    e.data_ns = NEVER
    e.data_end_ns = NEVER
    e.arrived_ns = NEVER
    e.arrived_end_ns = NEVER
    e.acked_ns = NEVER
    e.taken_ns = NEVER
    e.connection = t.connection
    e.context = t.context
    e.tag = t.tag
    e.order = np.uint32(turn)
    e.offer = NONE32
    e.grant = NONE32
    e.data = NONE32
    e.wire = t.wire
    e.seen = np.uint8(255)


@kernel(i8(_TRANSFERS, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _EXCHANGES))
def pay(transfers, part, head, tail, latest, turns, granted, written, after, out):  # type: ignore[no-untyped-def]
    """Make exchanges of the rows ``part``; returns their number.

    ``head``, ``tail``, ``latest`` (-1) and ``turns``, ``granted``, ``written`` (0) have two elements a
    connection, one a direction: the queue of exchanges that wait for their other half, the one whose WRITE
    came last, how many there were, and how many clear-to-send entries and messages of data. ``after`` links
    the queues. With adaptive routing NCCL's data goes as a WRITE and an empty
    WRITE WITH IMM behind it (transport/net_ib, ncclIbMultiSend): these are one exchange.
    """
    count = np.int64(0)
    for p in range(part.shape[0]):
        row = part[p]
        t = transfers[row]
        grant = t.role == GRANT
        # A connection has two ends, so one bit tells its direction; grants go against the data.
        key = 2 * np.int64(t.connection) + (np.int64(1) if (t.src > t.dst) != grant else np.int64(0))
        if grant:
            granted[key] += np.int64(1) if t.announces > 0 else np.int64(0)
        elif t.wire == WRITE or t.wire == WRITE_IMM:
            written[key] += 1
        if not grant and t.wire == WRITE_IMM and t.bytes == 0 and latest[key] >= 0:
            written[key] -= 1
            e = out[latest[key]]
            latest[key] = -1
            e.wire = t.wire
            e.tag = t.tag
            e.data_end_ns = t.sent_end_ns
            e.arrived_end_ns = t.arrived_end_ns
            e.acked_ns = t.acked_ns
            e.taken_ns = t.taken_ns
            e.packets += t.packets
            e.flags |= t.flags
            e.retransmitted += t.retransmitted
            e.ecn_marked += t.ecn_marked
            continue
        waiting = head[key]
        if waiting >= 0 and (out[waiting].grant == NONE32) == grant:
            number = waiting
            head[key] = after[waiting]
        else:
            number = count
            count += 1
            _open(t, out[number], turns[key])
            turns[key] += 1
            after[number] = -1
            if head[key] < 0:
                head[key] = number
            else:
                after[tail[key]] = number
            tail[key] = number
        e = out[number]
        e.flags |= t.flags
        e.seen &= t.seen
        e.retransmitted += t.retransmitted
        e.ecn_marked += t.ecn_marked
        if grant:
            e.src = t.dst
            e.dst = t.src
            e.grant_ns = t.sent_ns
            e.grant_arrived_ns = t.arrived_end_ns
            e.sub = t.sub  # a clear-to-send entry's index
            e.grant = np.uint32(row)
        else:
            e.src = t.src
            e.dst = t.dst
            e.context = t.sub  # a sample of its bytes
            e.data_ns = t.sent_ns
            e.data_end_ns = t.sent_end_ns
            e.arrived_ns = t.arrived_ns
            e.arrived_end_ns = t.arrived_end_ns
            e.acked_ns = t.acked_ns
            e.taken_ns = t.taken_ns
            e.bytes = t.bytes
            e.packets = t.packets
            e.wire = t.wire
            e.data = np.uint32(row)
            latest[key] = number if t.wire == WRITE else np.int64(-1)
    return count
