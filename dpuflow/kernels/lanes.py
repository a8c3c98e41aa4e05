"""Messages of one PSN space: opened, closed, mended by late packets, acknowledged.

A flow has two lanes: its own requests (lane 2 f) and its READ responses (2 f + 1), which are numbered
by the opposite flow. In: extended PSNs of single packets. Out: MESSAGE rows, in order of completion as
far as packets come in order, and the counters of FLOW. InfiniBand volume 1, 9.7 (reliable service).
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inlined, inner
from dpuflow.wire.headers import FIRST, LAST

NEVER = np.int64(-(1 << 63))
HOLES = 7  # open holes remembered per lane at first; of older ones only how many PSNs they have
FIRST_APART = HOLES  # how far the first packets may be out of order
PSNS = np.int64(1 << 24)
HALF = np.int64(1 << 23)

HAS_FIRST, HAS_LAST, SIZED = 1, 2, 4  # status of a message: ends seen, length told by its RETH
STARTS_BEFORE, ENDS_AFTER, GAP, HIDDEN, REORDERED = 1, 2, 4, 8, 16  # MessageFlag
WIRE_SEND, WIRE_WRITE, WIRE_WRITE_IMM, WIRE_READ, WIRE_SEND_IMM = 1, 2, 3, 4, 6  # Wire
GRANT = 2  # Role

# 192 bytes. The first cache line is all that a packet in the middle of a message needs, the second one
# what ends a message or acknowledges it.
LANE = np.dtype(
    [
        ("top", "i8"),  # next PSN expected, extended; -1 before the first packet
        ("until", "i8"),  # the open message is a WRITE of known length that ends before this PSN; else 0
        ("more_bytes", "i8"),  # not yet counted in FLOW: payload
        ("last_ns", "i8"),  # the last packet of the open message
        ("seq", "i8"),  # from here to `first_frame`: the open message
        ("packets", "i4"),
        ("last_frame", "u4"),
        ("ecn", "i4"),
        ("more_packets", "i4"),  # not yet counted in FLOW: packets
        ("open", "u1"),
        ("wire", "u1"),
        ("flags", "u1"),
        ("status", "u1"),
        ("first_frame", "u4"),
        ("bytes", "i8"),  # the open message again
        ("first_ns", "i8"),
        ("va", "i8"),
        ("high", "i8"),  # no message in the list starts later; -1 before the first one
        ("acked", "i8"),  # PSNs before this one are acknowledged; -1 none seen
        ("acked_ns", "i8"),  # since then
        ("head", "i4"),  # oldest message not acknowledged, -1 none
        ("tail", "i4"),  # last message in PSN order, -1 none
        ("holes", "i2"),  # how many there are, the older ones apart
        ("older", "i2"),  # 1: there are older ones
        ("soft", "i4"),  # so many PSNs from `top` on a READ request may have taken
        ("expected", "i8"),  # packets of the open message, from RETH length and MTU; 0 not known
        ("start", "i8"),  # first PSN seen
        ("retransmitted", "i4"),  # of the open message
        ("mtu", "i4"),  # payload of the last FIRST packet
        ("cursor", "i4"),  # message that the last repeated packet belonged to
        ("sample", "u4"),  # of the first bytes of the open message; 0 where they were not captured
        (
            "asked",
            "i8",
        ),  # from this PSN on the receiver asked for all again, and has not acknowledged it; 0 none
        ("rkey", "u4"),  # of the open message
        ("spare", "i4", 5),
    ],
    align=True,
)
LINK = np.dtype([("next", "i4"), ("prev", "i4"), ("status", "u1"), ("lane", "u1")], align=True)
"""Beside each MESSAGE row: its neighbours in PSN order in its lane."""

ROWS, DISORDERED, LOGGED, RIPE, MADS, WORDS, SENDS, START, FULL, N_COUNTS = range(10)  # places in `counts`


@inlined
def signed24(difference):  # type: ignore[no-untyped-def]
    """A difference of PSNs as the nearest signed one (IBTA volume 1, 9.7.2)."""
    return ((difference + HALF) & (PSNS - 1)) - HALF


@inlined
def link(lanes, lane, rows, links, row):  # type: ignore[no-untyped-def]
    """Put a new row into its lane's list, which is in PSN order."""
    seq = np.int64(rows[row].seq)
    after = np.int64(-1)
    before = np.int64(lanes[lane].tail)
    if seq < lanes[lane].high:  # else it comes last, and nobody needs to read the row before it
        while before >= 0 and np.int64(rows[before].seq) > seq:
            after = before
            before = np.int64(links[before].prev)
    else:
        lanes[lane].high = seq
    links[row].prev = before
    links[row].next = after
    links[row].lane = lane & 1
    if before >= 0:
        links[before].next = row
    if after >= 0:
        links[after].prev = row
    else:
        lanes[lane].tail = row
    if np.int64(rows[row].seq_end) <= lanes[lane].acked:
        rows[row].acked_ns = lanes[lane].acked_ns  # its end was not captured, or not in order
    elif lanes[lane].head == after:
        lanes[lane].head = row


@inner
def find(lanes, lane, rows, links, psn):  # type: ignore[no-untyped-def]
    """The last row of the lane that starts at or before ``psn``; -1 if none does."""
    row = np.int64(lanes[lane].cursor)
    if row < 0:
        row = np.int64(lanes[lane].tail)
    while row >= 0 and np.int64(rows[row].seq) > psn:
        row = np.int64(links[row].prev)
    while row >= 0:
        after = np.int64(links[row].next)
        if after < 0 or np.int64(rows[after].seq) > psn:
            break
        row = after
    if row >= 0:
        lanes[lane].cursor = row
    return row


@inlined
def blank(rows, row, flow, seq, seq_end, time_ns, frame, wire):  # type: ignore[no-untyped-def]
    """Fill a new row with what every message has."""
    rows[row].first_ns = time_ns
    rows[row].last_ns = time_ns
    rows[row].acked_ns = NEVER
    rows[row].seq = seq
    rows[row].seq_end = seq_end
    rows[row].bytes = 0
    rows[row].announces = 0
    rows[row].va = 0
    rows[row].flow = flow
    rows[row].packets = 1
    rows[row].retransmitted = 0
    rows[row].ecn_marked = 0
    rows[row].context = 0
    rows[row].tag = 0
    rows[row].sub = 0
    rows[row].rkey = 0
    rows[row].first_frame = frame
    rows[row].last_frame = frame
    rows[row].wire = wire
    rows[row].role = 0
    rows[row].op = 0
    rows[row].flags = 0


@inlined
def open_message(lanes, lane, psn, time_ns, frame, wire, status, flags):  # type: ignore[no-untyped-def]
    """Begin a message at ``psn``; its length may be set by the caller."""
    lanes[lane].open = 1
    lanes[lane].seq = psn
    lanes[lane].first_ns = time_ns
    lanes[lane].first_frame = frame
    lanes[lane].packets = 0
    lanes[lane].bytes = 0
    lanes[lane].va = 0
    lanes[lane].rkey = 0
    lanes[lane].retransmitted = 0
    lanes[lane].ecn = 0
    lanes[lane].expected = 0
    lanes[lane].until = 0
    lanes[lane].sample = 0
    lanes[lane].wire = wire
    lanes[lane].status = status
    lanes[lane].flags = flags


@inlined
def close_message(lanes, lane, flow, seq_end, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """Write the open message as a row and return the row's number."""
    row = counts[ROWS]
    counts[ROWS] = row + 1
    first_ns, frame = lanes[lane].first_ns, lanes[lane].first_frame
    blank(rows, row, flow, lanes[lane].seq, seq_end, first_ns, frame, lanes[lane].wire)
    rows[row].last_ns = lanes[lane].last_ns
    rows[row].last_frame = lanes[lane].last_frame
    rows[row].bytes = lanes[lane].bytes
    rows[row].va = lanes[lane].va
    rows[row].rkey = lanes[lane].rkey
    rows[row].packets = lanes[lane].packets
    rows[row].retransmitted = lanes[lane].retransmitted
    rows[row].ecn_marked = lanes[lane].ecn
    rows[row].sub = lanes[lane].sample
    status, flags = np.int64(lanes[lane].status), np.int64(lanes[lane].flags) & ~GAP
    ends = status & HAS_LAST and (status & HAS_FIRST or flags & STARTS_BEFORE)
    if not ends or seq_end - lanes[lane].seq != lanes[lane].packets:
        flags |= GAP
    rows[row].flags = flags
    links[row].status = lanes[lane].status
    link(lanes, lane, rows, links, row)
    lanes[lane].open = 0
    lanes[lane].until = 0
    flows[flow].messages += 1
    return row


@inlined
def count_rest(lanes, lane, flows, flow):  # type: ignore[no-untyped-def]
    """Count in FLOW what was taken in without it."""
    flows[flow].packets += np.uint64(lanes[lane].more_packets)
    flows[flow].bytes += np.uint64(lanes[lane].more_bytes)
    lanes[lane].more_packets = 0
    lanes[lane].more_bytes = 0


@inner
def give_up(lanes, lane, flow, before, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """Close an open message whose end was not seen, knowing that another one starts by ``before``."""
    end = np.int64(lanes[lane].seq) + lanes[lane].expected
    if lanes[lane].expected == 0 or end > before:
        end = max(np.int64(lanes[lane].seq) + lanes[lane].packets, lanes[lane].top)
        end = min(end, before)
    close_message(lanes, lane, flow, end, rows, links, flows, counts)


@inlined
def older_at(holes):  # type: ignore[no-untyped-def]
    """Place of the older ones among the holes: PSNs, and where the last ends."""
    return np.int64(holes.shape[1]) - 1


@inner
def add_hole(lanes, lane, holes, low, high, flows, flow, counts):  # type: ignore[no-untyped-def]
    """Remember that PSNs ``low`` to ``high`` were skipped; those acknowledged already are missing.

    Where there is room for none more, ``counts[FULL]`` asks for it, unless that was refused (below 0).
    """
    acked = lanes[lane].acked
    if low < acked:
        cut = min(acked, high)
        flows[flow].missing += cut - low
        low = cut
    if low >= high:
        return
    n = np.int64(lanes[lane].holes)
    older = older_at(holes)
    if n == older:
        lanes[lane].older = 1
        holes[lane, older, 0] += holes[lane, 0, 1] - holes[lane, 0, 0]
        holes[lane, older, 1] = max(holes[lane, older, 1], holes[lane, 0, 1])
        for k in range(older - 1):
            holes[lane, k, 0] = holes[lane, k + 1, 0]
            holes[lane, k, 1] = holes[lane, k + 1, 1]
        n -= 1
    holes[lane, n, 0] = low
    holes[lane, n, 1] = high
    lanes[lane].holes = n + 1
    if n + 1 == older and counts[FULL] == 0:
        counts[FULL] = 1


@inner
def drop_hole(lanes, lane, holes, k):  # type: ignore[no-untyped-def]
    """Forget hole ``k``."""
    n = np.int64(lanes[lane].holes) - 1
    for j in range(k, n):
        holes[lane, j, 0] = holes[lane, j + 1, 0]
        holes[lane, j, 1] = holes[lane, j + 1, 1]
    lanes[lane].holes = n


@inner
def fill_hole(lanes, lane, holes, psn, flows, flow, counts):  # type: ignore[no-untyped-def]
    """Whether ``psn`` had been skipped; then it no longer counts as skipped."""
    for k in range(np.int64(lanes[lane].holes)):
        low, high = holes[lane, k, 0], holes[lane, k, 1]
        if psn < low or psn >= high:
            continue
        if high - low == 1:
            drop_hole(lanes, lane, holes, k)
        elif psn == low:
            holes[lane, k, 0] = psn + 1
        elif psn == high - 1:
            holes[lane, k, 1] = psn
        else:
            holes[lane, k, 1] = psn
            add_hole(lanes, lane, holes, psn + 1, high, flows, flow, counts)
        return True
    return fill_older(lanes, lane, holes, psn)


@inlined
def fill_older(lanes, lane, holes, psn):  # type: ignore[no-untyped-def]
    """Whether ``psn`` lies among the older holes and is no repetition: where packets take many paths.

    Nobody asked for it again, and as ACKs are seen (and NAKs would be), so many PSNs have not come yet.
    """
    older = older_at(holes)
    if not lanes[lane].older or psn >= holes[lane, older, 1] or psn < lanes[lane].acked:
        return False
    if lanes[lane].acked < 0 or lanes[lane].asked > 0:
        return False
    holes[lane, older, 0] -= 1
    if holes[lane, older, 0] == 0:
        lanes[lane].older = 0
    return True


@inner
def begins_earlier(lanes, lane, holes, psn, flows, flow, counts):  # type: ignore[no-untyped-def]
    """Whether ``psn`` lies before the first one seen, not yet acknowledged: the first packets were swapped.

    What lies between is a hole then.
    """
    first = lanes[lane].start
    if psn >= first or first - psn > FIRST_APART or lanes[lane].acked > psn:
        return False
    add_hole(lanes, lane, holes, psn + 1, first, flows, flow, counts)
    lanes[lane].start = psn
    return True


@inlined
def acknowledge(lanes, lane, holes, rows, links, flows, flow, end, time_ns):  # type: ignore[no-untyped-def]
    """An ACK at ``time_ns`` covers all PSNs of the lane before ``end``."""
    if end <= lanes[lane].acked:
        return
    lanes[lane].acked = end
    lanes[lane].acked_ns = time_ns
    if end > lanes[lane].asked:
        lanes[lane].asked = 0
    row = np.int64(lanes[lane].head)
    while row >= 0 and np.int64(rows[row].seq_end) <= end:
        if rows[row].acked_ns == NEVER:
            rows[row].acked_ns = time_ns
            # Karn's rule: no sample from a message that was sent twice. A READ's answer is no plain ACK.
            whole = rows[row].retransmitted == 0 and rows[row].flags & GAP == 0
            whole = whole and rows[row].wire != WIRE_READ
            if whole and np.int64(rows[row].seq_end) == end:
                rtt = time_ns - rows[row].last_ns
                if rtt >= 0 and (flows[flow].rtt_min_ns == NEVER or rtt < flows[flow].rtt_min_ns):
                    flows[flow].rtt_min_ns = rtt
        row = np.int64(links[row].next)
    lanes[lane].head = row
    older = older_at(holes)
    if lanes[lane].older and end >= holes[lane, older, 1]:
        flows[flow].missing += holes[lane, older, 0]
        holes[lane, older, 0] = 0
        lanes[lane].older = 0
    k = np.int64(0)
    while k < lanes[lane].holes:
        low, high = holes[lane, k, 0], holes[lane, k, 1]
        if high <= end:
            flows[flow].missing += high - low
            drop_hole(lanes, lane, holes, k)
            continue
        if low < end:
            flows[flow].missing += end - low
            holes[lane, k, 0] = end
        k += 1


@inner
def touch(rows, row, time_ns, frame, counts):  # type: ignore[no-untyped-def]
    """A late packet of a message not yet acknowledged: it is what completed it."""
    if rows[row].acked_ns == NEVER:
        rows[row].last_ns = time_ns
        rows[row].last_frame = frame
        counts[DISORDERED] = 1


@inner
def add_packet(rows, links, row, place, wire, payload, imm, ce, time_ns, frame, counts):  # type: ignore[no-untyped-def]
    """Count a late packet that had been missing from a message that is written already."""
    rows[row].packets += 1
    rows[row].ecn_marked += ce
    if links[row].status & SIZED == 0:
        rows[row].bytes = np.int64(rows[row].bytes) + payload
    status = np.int64(links[row].status)
    if place & FIRST:
        status |= HAS_FIRST
        rows[row].flags = rows[row].flags & ~STARTS_BEFORE
    if place & LAST:
        status |= HAS_LAST
        if imm >= 0:
            rows[row].tag = imm
            rows[row].wire = wire
    links[row].status = status
    flags = np.int64(rows[row].flags) | REORDERED
    whole = status & HAS_LAST and (status & HAS_FIRST or flags & STARTS_BEFORE)
    if whole and np.int64(rows[row].seq_end) - np.int64(rows[row].seq) == rows[row].packets:
        flags &= ~GAP
    rows[row].flags = flags
    touch(rows, row, time_ns, frame, counts)


@inner
def repeat(lanes, lane, flow, psn, time_ns, frame, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """Count a packet whose PSN had been sent before.

    It completes its message only if the receiver had asked for it: by a NAK, as it takes nothing behind a
    loss or while it is not ready (InfiniBand volume 1, 9.7.5). Else it came in vain: its sender had waited
    for an ACK that came late.
    """
    flows[flow].retransmitted += 1
    if lanes[lane].open and psn >= lanes[lane].seq:
        lanes[lane].retransmitted += 1
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame
        return
    row = find(lanes, lane, rows, links, psn)
    if row >= 0 and psn < np.int64(rows[row].seq_end):
        rows[row].retransmitted += 1
        if 0 < lanes[lane].asked <= psn:
            touch(rows, row, time_ns, frame, counts)
