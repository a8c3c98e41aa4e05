"""Sightings of one message at several vantage points: which belong together, and their sum.

In: sightings in order of their key. Out: the transfer each belongs to, what it gives to it, TRANSFER rows;
columns of these.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inner, kernel, u1, u2, u4, void
from dpuflow.schema.rows import MESSAGE, TRANSFER, Wire

SENDER, RECEIVER, HEADER = 1, 2, 4  # what a sighting gives to its transfer, as bits
NEVER = np.int64(-(1 << 63))
ROCE_WRITE, ROCE_WRITE_IMM = int(Wire.ROCE_WRITE), int(Wire.ROCE_WRITE_IMM)
PARTIAL = 1 | 2  # MessageFlag STARTS_BEFORE, ENDS_AFTER
GAP, HIDDEN = 4, 8  # MessageFlag
UNFRAMED = 128  # not in MessageFlag: a burst, whose header nobody looked for
BLIND = HIDDEN | UNFRAMED
SHARED = PARTIAL | HIDDEN  # flags of a transfer only where all its sightings have them

_I8, _U4, _U2, _U1 = i8[::1], u4[::1], u2[::1], u1[::1]
_MESSAGES, _TRANSFERS = from_dtype(MESSAGE.dtype)[::1], from_dtype(TRANSFER.dtype)[::1]


@inner
def _choose(order, start, stop, first, near, flags, transfer, owner, gives, sent, shared):  # type: ignore[no-untyped-def]
    """Choose the sightings nearest sender and receiver (whole ones first), and one with its header."""
    sender = order[start]
    receiver = sender
    header = sender
    best = np.int64(-100)
    worst = np.int64(100)
    both = np.int64(255)
    for p in range(start, stop):
        x = order[p]
        owner[x] = transfer
        gives[x] = 0
        both &= np.int64(flags[x])
        cut = np.int64(10) if (flags[x] & PARTIAL) != 0 else np.int64(0)
        rank = np.int64(near[x])
        if rank - cut > best:  # the earliest of equals
            best = rank - cut
            sender = x
        if rank + cut <= worst:  # the latest of equals
            worst = rank + cut
            receiver = x
    header = sender
    if (flags[sender] & (BLIND | GAP)) != 0:  # a capture that saw all of it knows best
        for p in range(start, stop):
            x = order[p]
            if (flags[x] & BLIND) == 0 and ((flags[x] & GAP) == 0 or (flags[header] & BLIND) != 0):
                header = x
    gives[sender] |= np.uint8(SENDER)
    gives[receiver] |= np.uint8(RECEIVER)
    gives[header] |= np.uint8(HEADER)
    sent[transfer] = first[sender]
    shared[transfer] = np.uint8(both & (SHARED | GAP))


@kernel(i8(_I8, _I8, _U2, _I8, _I8, _I8, _U1, _U1, _I8, _I8, _I8, _U1, _I8, _U1))
def group(order, key, capture, first, acked, span, near, flags, flow, slack, owner, gives, sent, shared):  # type: ignore[no-untyped-def]
    """Part the sightings of each key into transfers; return their number.

    A transfer has each capture at most once. A sighting opens a new one where its capture has one
    already, where its span (sequence numbers covered) differs though no capture missed any of it, or where it
    comes more than the ``slack`` of its ``flow`` after the first was acknowledged: it came round again.
    In: ``order`` sorts ``key``; ``near`` is 2 at the sender, 0 at the receiver, else 1. Times in ns.
    Out: ``owner`` transfer of each sighting, ``gives`` SENDER, RECEIVER, HEADER bits, ``sent`` and
    ``shared`` (flags) of each transfer. ``order`` is put in order of time within each key.
    """
    n = order.shape[0]
    made = 0
    i = 0
    while i < n:
        k = key[order[i]]
        j = i + 1
        while j < n and key[order[j]] == k:
            x = order[j]
            p = j
            while p > i and first[order[p - 1]] > first[x]:
                order[p] = order[p - 1]
                p -= 1
            order[p] = x
            j += 1
        opened = i
        while opened < j:
            limit = acked[order[opened]]
            end = opened + 1
            while end < j:
                x = order[end]
                fits = True
                if limit != NEVER and first[x] > limit + slack[flow[x]]:
                    fits = False
                p = opened
                while fits and p < end:
                    y = order[p]
                    if capture[y] == capture[x]:
                        fits = False
                    if span[y] != span[x] and ((flags[x] | flags[y]) & (PARTIAL | GAP)) == 0:
                        fits = False
                    p += 1
                if not fits:
                    break
                if acked[x] != NEVER and (limit == NEVER or acked[x] < limit):
                    limit = acked[x]
                end += 1
            _choose(order, opened, end, first, near, flags, made, owner, gives, sent, shared)
            made += 1
            opened = end
        i = j
    return made


@kernel(i8(_MESSAGES, i8, _I8, _I8, _I8, _I8, _U1, _U1, _TRANSFERS))
def fold(messages, capture, first, last, acked, row, gives, near, out):  # type: ignore[no-untyped-def]
    """Add the messages of one capture to the transfers ``row`` that they belong to (negative: none).

    ``first``, ``last``, ``acked``: their times on the reference clock. Flags of ``out`` that all
    sightings must share are there beforehand.
    """
    for i in range(messages.shape[0]):
        if row[i] < 0:
            continue
        m = messages[i]
        t = out[row[i]]
        if (gives[i] & SENDER) != 0:
            t.sent_ns = first[i]
            t.sent_end_ns = last[i]
            t.acked_ns = acked[i]
            t.seq = m.seq
            t.packets = m.packets
            t.capture = np.uint16(capture)
            t.message = np.uint32(i)
            if near[i] == 2:
                t.seen |= np.uint8(1)
        if (gives[i] & RECEIVER) != 0:
            t.arrived_ns = first[i]
            t.arrived_end_ns = last[i]
            t.taken_ns = acked[i] if near[i] == 0 else NEVER
            t.arrival_capture = np.uint16(capture)
            t.arrival_message = np.uint32(i)
            if near[i] == 0:
                t.seen |= np.uint8(2)
        if (gives[i] & HEADER) != 0:
            t.bytes = m.bytes
            t.announces = m.announces
            t.va = m.va
            t.context = m.context
            t.tag = m.tag
            t.sub = m.sub
            t.wire = m.wire
            t.role = m.role
            t.op = m.op
        t.retransmitted = max(t.retransmitted, m.retransmitted)
        t.ecn_marked = max(t.ecn_marked, m.ecn_marked)
        # What a capture missed of a write is dated by the others (``join.missed``).
        write = m.wire == ROCE_WRITE or m.wire == ROCE_WRITE_IMM
        t.flags |= np.uint8(m.flags & ~np.uint8(SHARED if write else SHARED | GAP))
    return messages.shape[0]


@kernel(i8(_MESSAGES, _I8, _I8, _I8, _U1, _U4, _U4, _U4, _TRANSFERS))
def single(messages, order, first, rows, near, connection, src, dst, out):  # type: ignore[no-untyped-def]
    """Transfers of the only capture: each message is one, in ``order`` of its first packet.

    ``rows``: the common flow of each flow; ``near`` (as in ``group``), ``connection``, ``src`` and ``dst``
    of the common flows; ``first`` the messages' first packets. The capture's clock is the reference.
    """
    for k in range(order.shape[0]):
        i = order[k]
        m = messages[i]
        t = out[k]
        flow = rows[m.flow]
        t.sent_ns = first[i]
        t.sent_end_ns = m.last_ns
        t.arrived_ns = first[i]
        t.arrived_end_ns = m.last_ns
        t.acked_ns = m.acked_ns
        t.taken_ns = m.acked_ns if near[flow] == 0 else NEVER
        t.bytes = m.bytes
        t.announces = m.announces
        t.va = m.va
        t.seq = m.seq
        t.connection = connection[flow]
        t.src = src[flow]
        t.dst = dst[flow]
        t.context = m.context
        t.tag = m.tag
        t.sub = m.sub
        t.packets = m.packets
        t.retransmitted = m.retransmitted
        t.ecn_marked = m.ecn_marked
        t.capture = np.uint16(0)
        t.arrival_capture = np.uint16(0)
        t.message = np.uint32(i)
        t.arrival_message = np.uint32(i)
        t.wire = m.wire
        t.role = m.role
        t.op = m.op
        t.flags = m.flags
        t.seen = np.uint8(1) if near[flow] == 2 else np.uint8(2) if near[flow] == 0 else np.uint8(0)
    return order.shape[0]


NUMBERS = ("connection", "src", "dst", "retransmitted", "ecn_marked")
KINDS = ("wire", "role", "op", "flags", "seen")


@kernel(void(_TRANSFERS, u4[:, ::1], u1[:, ::1]))
def narrow(transfers, numbers, kinds):  # type: ignore[no-untyped-def]
    """Copy the columns NUMBERS and KINDS of all rows, in one pass over them."""
    for i in range(transfers.shape[0]):
        t = transfers[i]
        numbers[0, i] = t.connection
        numbers[1, i] = t.src
        numbers[2, i] = t.dst
        numbers[3, i] = t.retransmitted
        numbers[4, i] = t.ecn_marked
        kinds[0, i] = t.wire
        kinds[1, i] = t.role
        kinds[2, i] = t.op
        kinds[3, i] = t.flags
        kinds[4, i] = t.seen
