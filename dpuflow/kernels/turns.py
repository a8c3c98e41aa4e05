"""Exchanges of messages without keys: the i-th grant of a direction pays for its i-th data message.

In: TRANSFER rows in order of time. Out: EXCHANGE rows in order of their first sign. Where a capture begins in
mid-job, grants for the first data came before it: how many, the addresses tell that grants announce and data
is written to (``early``).
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, inner, kernel, void
from dpuflow.schema.rows import EXCHANGE, TRANSFER

NEVER = np.int64(-(1 << 63))
NONE32 = np.uint32(0xFFFFFFFF)
GRANT = 2  # Role
WRITE, WRITE_IMM = 2, 3  # Wire

REQUESTS = 32
"""Entries that may be out before their data: a connection's requests (NCCL_NET_MAX_REQUESTS, nccl_net.h)."""
LOOKED = 8 * REQUESTS
"""Messages of a direction that are looked at."""
ENTRIES, DATA = range(2)  # places in ``looked``; behind them stands the last one's place
GRANTED, WRITTEN, FIRST = range(3)  # places in ``facts``

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


@inlined
def direction(t):  # type: ignore[no-untyped-def]
    """Twice the connection, plus a bit for the way its data goes: grants go against it."""
    return 2 * np.int64(t.connection) + (np.int64(1) if (t.src > t.dst) != (t.role == GRANT) else np.int64(0))


@inlined
def is_entry(t):  # type: ignore[no-untyped-def]
    """Whether a message is a clear-to-send entry."""
    return t.role == GRANT and t.wire == WRITE


@inlined
def is_tail(t, before, transfers):  # type: ignore[no-untyped-def]
    """Whether a message of data is the empty WRITE WITH IMMEDIATE that ends the one ``before`` (-1: none)."""
    return t.wire == WRITE_IMM and t.bytes == 0 and before >= 0 and transfers[before].wire == WRITE


@inner
def _borne_out(transfers, looked, line, before, shift):  # type: ignore[no-untyped-def]
    """How many more of a line's data the entry ``shift`` places before theirs may pay for than it may not.

    The entry announces where the data went, as far as it was captured; it was there before the data left, and
    came when what had been written there before (``before``: which data, or -1) had arrived. Each two times
    are of one node.
    """
    more = np.int64(0)
    for j in range(shift, LOOKED):
        if looked[line, DATA, j] < 0 or looked[line, ENTRIES, j - shift] < 0:
            break
        d, g = transfers[looked[line, DATA, j]], transfers[looked[line, ENTRIES, j - shift]]
        fits = g.arrived_end_ns <= d.sent_ns
        if g.va != 0 and d.va != 0:
            fits &= g.va <= d.va and (d.va == g.va or d.va < g.va + g.announces)
        if fits and before[j] >= 0:
            fits = transfers[looked[line, DATA, before[j]]].arrived_end_ns <= g.sent_ns
        more += 1 if fits else -1
    return more


@inner
def _unpaid(transfers, looked, line, before):  # type: ignore[no-untyped-def]
    """How many of a line's first data were paid for by entries before its first one. ``before`` is room."""
    count = np.int64(0)
    for j in range(LOOKED):
        before[j] = -1
        if looked[line, DATA, j] < 0:
            break
        count += 1
        for i in range(j - 1, -1, -1):
            if transfers[looked[line, DATA, i]].va == transfers[looked[line, DATA, j]].va:
                before[j] = i
                break
    best, most = np.int64(0), np.int64(0)
    for shift in range(min(REQUESTS, count) + 1):
        more = _borne_out(transfers, looked, line, before, shift)
        if more > most:
            best, most = np.int64(shift), more
    return best


@kernel(void(_TRANSFERS, _I8, _I8, i8[:, ::1]))
def survey(transfers, part, latest, facts):  # type: ignore[no-untyped-def]
    """How many entries and messages of data each direction has (two a connection), the first entry's number.

    Out: ``facts`` (0): GRANTED, WRITTEN and FIRST of each; ``latest`` (-1) is room.
    """
    for p in range(part.shape[0]):
        t = transfers[part[p]]
        key = direction(t)
        if is_entry(t):
            if facts[GRANTED, key] == 0:
                facts[FIRST, key] = t.sub
            facts[GRANTED, key] += 1
        elif t.role != GRANT and (t.wire == WRITE or t.wire == WRITE_IMM):
            facts[WRITTEN, key] += 0 if is_tail(t, latest[key], transfers) else 1
            latest[key] = part[p]


@kernel(void(_TRANSFERS, _I8, _I8, _I8, i8[:, :, ::1], _I8, _I8))
def early(transfers, part, line, latest, looked, before, unpaid):  # type: ignore[no-untyped-def]
    """How many messages of data came before those that the entries in ``part`` pay for, by direction.

    ``line``: number of each direction that is looked at, -1 for others. Out: ``unpaid`` (0) of these. Room:
    ``latest`` (-1), of each direction; ``looked`` (-1), of each line LOOKED entries and data; ``before``.
    """
    for p in range(part.shape[0]):
        t = transfers[part[p]]
        key = direction(t)
        k = line[key]
        if k < 0:
            continue
        kind = ENTRIES if is_entry(t) else DATA
        if kind == DATA:
            if t.role == GRANT or (t.wire != WRITE and t.wire != WRITE_IMM):
                continue
            tail = is_tail(t, latest[key], transfers)
            latest[key] = part[p]
            if tail:
                continue
        at = looked[k, kind, LOOKED]
        if at + 1 < LOOKED:
            looked[k, kind, at + 1] = part[p]
            looked[k, kind, LOOKED] = at + 1
    for key in range(line.shape[0]):
        if line[key] >= 0:
            unpaid[key] = _unpaid(transfers, looked, line[key], before)


@kernel(i8(_TRANSFERS, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _EXCHANGES))
def pay(  # type: ignore[no-untyped-def]
    transfers, part, unpaid, first, begun, head, tail, latest, turns, after, out
):
    """Make exchanges of the rows ``part``; returns their number.

    ``unpaid``, ``first``: of ``early``, ``survey``; such messages (``begun``, 0) get their entry's number.

    ``head``, ``tail``, ``latest`` (-1) and ``turns`` (as ``unpaid``) have two elements a connection, one a
    direction: the queue of exchanges that wait for their other half, the one whose WRITE came last, and how
    many there were. ``after`` links the queues. With adaptive routing NCCL's data goes as a WRITE and an
    empty WRITE WITH IMM behind it (transport/net_ib, ncclIbMultiSend): these are one exchange.
    """
    count = np.int64(0)
    for p in range(part.shape[0]):
        row = part[p]
        t = transfers[row]
        grant = t.role == GRANT
        key = direction(t)
        if not grant and t.wire == WRITE_IMM and t.bytes == 0 and latest[key] >= 0:
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
        if begun[key] < unpaid[key] and not grant and (t.wire == WRITE or t.wire == WRITE_IMM):
            number = count
            count += 1
            _open(t, out[number], begun[key])
            out[number].sub = np.uint32(max(first[key] - unpaid[key] + begun[key], 0))
            begun[key] += 1
        elif waiting >= 0 and (out[waiting].grant == NONE32) == grant:
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
        # A grant's sender is the data's receiver.
        e.seen &= np.uint8((t.seen & 1) << 1 | t.seen >> 1 & 1) if grant else t.seen
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
