"""Late packets that fill a hole: given to the message they belong to, or to a new one.

In: a packet whose PSN had been skipped. Out: MESSAGE rows and the open message, mended. A hole may have
hidden where one message ended and the next began; then what had been taken for one is split.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inlined, inner
from dpuflow.kernels.lanes import (
    GAP,
    GRANT,
    HAS_FIRST,
    HAS_LAST,
    NEVER,
    REORDERED,
    ROWS,
    SIZED,
    STARTS_BEFORE,
    WIRE_SEND,
    WIRE_SEND_IMM,
    WIRE_WRITE,
    WIRE_WRITE_IMM,
    add_packet,
    blank,
    close_message,
    drop_hole,
    find,
    link,
    open_message,
)
from dpuflow.wire.headers import FIRST, LAST


@inner
def skipped(lanes, lane, holes, low, high):  # type: ignore[no-untyped-def]
    """PSNs between ``low`` and ``high`` that are in holes."""
    total = np.int64(0)
    for k in range(np.int64(lanes[lane].holes)):
        total += max(np.int64(0), min(high, holes[lane, k, 1]) - max(low, holes[lane, k, 0]))
    return total


@inlined
def first_bytes(lanes, lane, first, packets, total):  # type: ignore[no-untyped-def]
    """Bytes of the ``first`` of ``packets``, none of which ends a message; all have ``total``."""
    mtu = np.int64(lanes[lane].mtu)
    if mtu == 0:
        mtu = total // max(packets, 1)
    return min(first * mtu, total)


@inner
def part_open(lanes, lane, holes, flow, low, high, late, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """Close the open message at PSN ``low``; what came from ``high`` on stays open. Returns the closed row.

    ``late``: PSNs from ``high`` on that have just come and are counted by the caller. When the part behind
    began was not noted: its first packet gets the time of the last one so far.
    """
    packets, total = np.int64(lanes[lane].packets), np.int64(lanes[lane].bytes)
    behind = lanes[lane].top - high - skipped(lanes, lane, holes, high, lanes[lane].top) - late
    behind = min(max(behind, 0), packets)  # of holes that are forgotten too many are counted
    last_ns, last_frame, wire = lanes[lane].last_ns, lanes[lane].last_frame, lanes[lane].wire
    lanes[lane].packets = packets - behind
    lanes[lane].bytes = first_bytes(lanes, lane, packets - behind, packets, total)
    rest = total - lanes[lane].bytes
    lanes[lane].flags |= REORDERED
    row = close_message(lanes, lane, flow, low, rows, links, flows, counts)
    open_message(lanes, lane, high, last_ns, last_frame, wire, 0, REORDERED)
    lanes[lane].packets = behind
    lanes[lane].bytes = rest
    lanes[lane].last_ns = last_ns
    lanes[lane].last_frame = last_frame
    return row


@inner
def part_row(lanes, lane, holes, flow, row, low, high, late, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """End a written message at PSN ``low``; what it had from ``high`` on becomes another."""
    end = np.int64(rows[row].seq_end)
    if high >= end:  # nothing is left behind it
        rows[row].seq_end = low
        return
    new = counts[ROWS]
    counts[ROWS] = new + 1
    rows[new] = rows[row]
    packets, total = np.int64(rows[row].packets), np.int64(rows[row].bytes)
    behind = min(max(end - high - skipped(lanes, lane, holes, high, end) - late, 0), packets)
    size = first_bytes(lanes, lane, packets - behind, packets, total)
    acked_ns = rows[row].acked_ns
    rows[new].seq = high
    rows[new].packets = behind
    rows[new].bytes = total - size
    rows[new].first_ns = rows[row].last_ns
    rows[new].first_frame = rows[row].last_frame
    rows[new].sub = rows[new].rkey = 0
    rows[new].retransmitted = 0
    rows[new].ecn_marked = 0
    rows[new].flags = rows[new].flags | REORDERED | GAP
    links[new].status = links[row].status & HAS_LAST
    rows[row].seq_end = low
    rows[row].packets = packets - behind
    rows[row].bytes = size
    rows[row].tag = 0
    rows[row].wire = unended(np.int64(rows[row].wire))
    rows[row].flags = rows[row].flags | REORDERED | GAP
    links[row].status = links[row].status & HAS_FIRST
    link(lanes, lane, rows, links, new)
    if acked_ns != NEVER:
        rows[new].acked_ns = acked_ns
    flows[flow].messages += 1


@inlined
def unended(wire):  # type: ignore[no-untyped-def]
    """The wire of a message whose end is not known: only that tells of an immediate."""
    if wire == WIRE_WRITE_IMM:
        return WIRE_WRITE
    return WIRE_SEND if wire == WIRE_SEND_IMM else wire


@inner
def size_open(lanes, lane, holes, flow, length, va, rkey, sample, mtu, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """The open message's FIRST, now counted, tells its length: what came behind its end is another."""
    expected = (length + mtu - 1) // mtu
    end = np.int64(lanes[lane].seq) + expected
    if lanes[lane].top > end:
        row = part_open(lanes, lane, holes, flow, end, end, 0, rows, links, flows, counts)
        told(rows, links, row, length, va, rkey, sample)
        return
    lanes[lane].bytes = length
    lanes[lane].va = va
    lanes[lane].rkey = rkey
    lanes[lane].sample = sample
    lanes[lane].status |= SIZED
    lanes[lane].expected = expected
    if lanes[lane].wire == WIRE_WRITE:
        lanes[lane].until = end


@inlined
def lengthen(lanes, lane, rows, row, end):  # type: ignore[no-untyped-def]
    """Let a row that lacks its end go on up to PSN ``end``."""
    rows[row].seq_end = end
    if end > lanes[lane].acked:  # what was acknowledged was not its end
        rows[row].acked_ns = NEVER
        head = np.int64(lanes[lane].head)
        if head < 0 or rows[head].seq > rows[row].seq:
            lanes[lane].head = row


@inner
def size_row(lanes, lane, holes, flow, row, length, va, rkey, sample, mtu, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """The same of a message that is written already."""
    end = np.int64(rows[row].seq) + (length + mtu - 1) // mtu
    if end < np.int64(rows[row].seq_end):
        part_row(lanes, lane, holes, flow, row, end, end, 0, rows, links, flows, counts)
    elif links[row].status & HAS_LAST == 0:
        after = np.int64(links[row].next)
        begin = np.int64(rows[after].seq) if after >= 0 else lanes[lane].top
        if after < 0 and lanes[lane].open:
            begin = lanes[lane].seq
        lengthen(lanes, lane, rows, row, min(end, begin))
    told(rows, links, row, length, va, rkey, sample)


@inlined
def told(rows, links, row, length, va, rkey, sample):  # type: ignore[no-untyped-def]
    """What a message's RETH says of it."""
    rows[row].bytes = length
    rows[row].va = va
    rows[row].rkey = rkey
    rows[row].sub = sample
    links[row].status |= SIZED


@inner
def goes_on(lanes, lane, holes, row, rows, links, psn):  # type: ignore[no-untyped-def]
    """Whether a READ's answer that begins anew goes on one that was cut: the packet before was seen, no end.

    A requester that lost a packet asks for the rest of its READ from there on (9.7.5.2).
    """
    if skipped(lanes, lane, holes, psn - 1, psn) != 0:
        return False
    if lanes[lane].open and psn > lanes[lane].seq:
        return True
    if row < 0 or np.int64(rows[row].seq) >= psn:
        return False
    end = np.int64(rows[row].seq_end)
    return psn < end or (psn == end and links[row].status & HAS_LAST == 0)


@inlined
def join_open(lanes, lane, payload, ce, time_ns, frame):  # type: ignore[no-untyped-def]
    """Count a late packet of the open message."""
    lanes[lane].packets += 1
    lanes[lane].ecn += ce
    lanes[lane].flags |= REORDERED
    lanes[lane].last_ns = time_ns
    lanes[lane].last_frame = frame
    if lanes[lane].status & SIZED == 0:
        lanes[lane].bytes += payload


@inner
def mend(  # type: ignore[no-untyped-def]
    lanes,
    lane,
    holes,
    flow,
    psn,
    place,
    wire,
    payload,
    length,
    va,
    rkey,
    sample,
    imm,
    ce,
    time_ns,
    frame,
    rows,
    links,
    flows,
    counts,
):
    """Give a packet that fills a hole to the message it belongs to, or to a new one.

    ``length`` is the RETH's, -1 without; ``imm`` -1 without; ``sample`` of its first bytes. A FIRST or MIDDLE
    packet joins the message after it that lacks its beginning, a MIDDLE or LAST one the message before it
    that lacks its end. Returns the row of a message that it makes up alone, else -1.
    """
    if lane & 1 and place & FIRST:
        row = find(lanes, lane, rows, links, psn)
        if goes_on(lanes, lane, holes, row, rows, links, psn):
            place &= LAST
    begins, ends = place & FIRST != 0, place & LAST != 0
    sized = begins and not ends and length > 0 and payload > 0  # it tells where its message ends
    end = psn + (length + payload - 1) // payload if sized else psn + 1
    if begins and not ends and payload > 0:
        lanes[lane].mtu = payload

    # An end that comes late parts what had been taken for one message.
    if lanes[lane].open and psn >= lanes[lane].seq and lanes[lane].status & SIZED == 0 and place:
        if psn == lanes[lane].seq:
            lanes[lane].seq += 1 if ends else 0
        elif begins:
            late, behind = (0, psn + 1) if ends else (1, psn)
            part_open(lanes, lane, holes, flow, psn, behind, late, rows, links, flows, counts)
        else:
            part_open(lanes, lane, holes, flow, psn + 1, psn + 1, 0, rows, links, flows, counts)

    if lanes[lane].open and psn >= lanes[lane].seq:
        join_open(lanes, lane, payload, ce, time_ns, frame)
        if begins and psn == lanes[lane].seq:
            lanes[lane].status |= HAS_FIRST
            lanes[lane].flags &= ~STARTS_BEFORE
            lanes[lane].wire = wire
        if sized and psn == lanes[lane].seq:
            size_open(lanes, lane, holes, flow, length, va, rkey, sample, payload, rows, links, flows, counts)
        return np.int64(-1)

    row = find(lanes, lane, rows, links, psn)
    if row >= 0 and psn < np.int64(rows[row].seq_end) and links[row].status & SIZED == 0:
        more = psn + 1 < np.int64(rows[row].seq_end)
        if psn == np.int64(rows[row].seq):
            if ends and more and links[row].status & HAS_FIRST == 0:
                rows[row].seq = psn + 1
                lanes[lane].high = max(lanes[lane].high, psn + 1)
                row = np.int64(links[row].prev)
        elif begins:
            late, behind = (0, psn + 1) if ends else (1, psn)
            part_row(lanes, lane, holes, flow, row, psn, behind, late, rows, links, flows, counts)
            row = find(lanes, lane, rows, links, psn)
        elif ends and more:
            part_row(lanes, lane, holes, flow, row, psn + 1, psn + 1, 0, rows, links, flows, counts)
    if row >= 0 and psn < np.int64(rows[row].seq_end):
        add_packet(rows, links, row, place, wire, payload, imm, ce, time_ns, frame, counts)
        if begins and ends and length >= 0 and np.int64(rows[row].seq_end) - np.int64(rows[row].seq) == 1:
            told(rows, links, row, length, va, rkey, sample)
        if sized and np.int64(rows[row].seq) == psn and links[row].status & SIZED == 0:
            size_row(
                lanes, lane, holes, flow, row, length, va, rkey, sample, payload, rows, links, flows, counts
            )
        return np.int64(-1)

    after = np.int64(links[row].next) if row >= 0 else np.int64(-1)
    if row < 0:
        after = np.int64(lanes[lane].tail)
        while after >= 0 and links[after].prev >= 0:
            after = np.int64(links[after].prev)
    if after >= 0:
        begin = np.int64(rows[after].seq)
        headless = links[after].status & HAS_FIRST == 0
    else:
        begin = np.int64(lanes[lane].seq) if lanes[lane].open else lanes[lane].top
        headless = lanes[lane].open and lanes[lane].status & HAS_FIRST == 0
    # What its RETH has told the length of goes no further than that.
    lacks_end = row >= 0 and links[row].status & (HAS_LAST | SIZED) == 0 and not begins
    if lacks_end and (ends or not headless or psn == np.int64(rows[row].seq_end)):
        lengthen(lanes, lane, rows, row, psn + 1)
        add_packet(rows, links, row, place, wire, payload, imm, ce, time_ns, frame, counts)
        return np.int64(-1)
    if headless and not ends and (begin < end or not sized):
        if after >= 0:
            rows[after].seq = psn
            add_packet(rows, links, after, place, wire, payload, imm, ce, time_ns, frame, counts)
            if sized:
                size_row(
                    lanes,
                    lane,
                    holes,
                    flow,
                    after,
                    length,
                    va,
                    rkey,
                    sample,
                    payload,
                    rows,
                    links,
                    flows,
                    counts,
                )
            return np.int64(-1)
        lanes[lane].seq = psn
        join_open(lanes, lane, payload, ce, time_ns, frame)
        if begins:
            lanes[lane].status |= HAS_FIRST
            lanes[lane].flags &= ~STARTS_BEFORE
        if sized:
            size_open(lanes, lane, holes, flow, length, va, rkey, sample, payload, rows, links, flows, counts)
        return np.int64(-1)
    new = counts[ROWS]
    counts[ROWS] = new + 1
    blank(rows, new, flow, psn, min(end, begin), time_ns, frame, wire)
    rows[new].bytes = length if length >= 0 else payload
    rows[new].va = va
    rows[new].rkey = rkey
    rows[new].sub = sample
    rows[new].tag = max(imm, 0)
    rows[new].ecn_marked = ce
    rows[new].flags = REORDERED if begins and ends else REORDERED | GAP
    status = SIZED if length >= 0 else 0
    status |= HAS_FIRST if begins else 0
    status |= HAS_LAST if ends else 0
    links[new].status = status
    link(lanes, lane, rows, links, new)
    flows[flow].messages += 1
    return new if begins and ends else np.int64(-1)


@inner
def late_request(lanes, lane, holes, rows, row, span, length):  # type: ignore[no-untyped-def]
    """Make a READ request of a late ``row``: the ``span`` PSNs of its answer (0: not known) were no hole."""
    low = np.int64(rows[row].seq) + 1
    high = low
    k = np.int64(0)
    while k < lanes[lane].holes:
        begin, end = holes[lane, k, 0], holes[lane, k, 1]
        if begin == low and span > 1:  # its own place was cut off this hole
            high = min(low + span - 1, end)
            if high == end:
                drop_hole(lanes, lane, holes, k)
            else:
                holes[lane, k, 0] = high
            break
        k += 1
    rows[row].seq_end = high
    rows[row].bytes = 0
    rows[row].role = GRANT
    rows[row].announces = max(length, 0)
    rows[row].flags = 0
