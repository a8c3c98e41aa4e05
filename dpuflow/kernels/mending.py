"""Late packets that fill a hole: given to the message they belong to, or to a new one.

In: a packet whose PSN had been skipped. Out: MESSAGE rows and the open message, mended. A hole may have
hidden where one message ended and the next began; then what had been taken for one is split.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inlined, inner
from dpuflow.kernels.lanes import (
    GAP,
    HAS_FIRST,
    HAS_LAST,
    NEVER,
    REORDERED,
    ROWS,
    SIZED,
    add_packet,
    blank,
    close_message,
    find,
    link,
    open_message,
)
from dpuflow.wire import FIRST, LAST


@inner
def skipped(lanes, lane, holes, low, high):  # type: ignore[no-untyped-def]
    """PSNs between ``low`` and ``high`` that are in holes."""
    total = np.int64(0)
    for k in range(np.int64(lanes[lane].holes)):
        total += max(np.int64(0), min(high, holes[lane, k, 1]) - max(low, holes[lane, k, 0]))
    return total


@inlined
def within_packets(behind, packets):  # type: ignore[no-untyped-def]
    """How many of a message's packets lie behind an end; of holes that are forgotten too many are counted."""
    return min(max(behind, 0), packets)


@inner
def split_open(  # type: ignore[no-untyped-def]
    lanes, lane, holes, flow, psn, place, wire, payload, imm, time_ns, frame, rows, links, flows, counts
):
    """Close the part of the open message before an end that came late; the part behind it stays open.

    A FIRST begins the part behind, a LAST ends the part before, an ONLY belongs to neither. When the part
    behind began was not noted: its first packet gets the time of its last one so far.
    """
    low = psn + 1 if place == LAST else psn
    high = psn if place == FIRST else psn + 1
    behind = lanes[lane].top - high - skipped(lanes, lane, holes, high, lanes[lane].top)
    if place == FIRST:
        behind -= 1  # itself
    behind = within_packets(behind, np.int64(lanes[lane].packets))
    before = lanes[lane].packets - behind
    mtu = np.int64(lanes[lane].mtu)
    if mtu == 0 or place == FIRST:
        mtu = payload
    total, last_ns, last_frame = lanes[lane].bytes, lanes[lane].last_ns, lanes[lane].last_frame
    open_wire = lanes[lane].wire
    lanes[lane].packets = before
    lanes[lane].bytes = min(before * mtu, total)
    rest = total - lanes[lane].bytes
    lanes[lane].flags |= REORDERED
    if place == LAST:
        lanes[lane].packets += 1
        lanes[lane].bytes += payload
        lanes[lane].status |= HAS_LAST
        lanes[lane].wire = wire
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame
    row = close_message(lanes, lane, flow, low, rows, links, flows, counts)
    if place == LAST and imm >= 0:
        rows[row].tag = imm
    status = HAS_FIRST if place == FIRST else 0
    open_message(lanes, lane, high, last_ns, last_frame, open_wire, status, REORDERED)
    lanes[lane].packets = behind
    lanes[lane].bytes = rest
    lanes[lane].last_ns = last_ns
    lanes[lane].last_frame = last_frame
    if place == FIRST:
        lanes[lane].packets += 1
        lanes[lane].bytes += payload
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame


@inner
def split_row(lanes, lane, holes, flow, row, psn, place, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """Part a written message at an end that came late, which itself is counted afterwards."""
    low = psn + 1 if place == LAST else psn
    high = psn if place == FIRST else psn + 1
    end = np.int64(rows[row].seq_end)
    new = counts[ROWS]
    counts[ROWS] = new + 1
    rows[new] = rows[row]
    behind = end - high - skipped(lanes, lane, holes, high, end)
    if place == FIRST:
        behind -= 1
    behind = within_packets(behind, np.int64(rows[row].packets))
    before = np.int64(rows[row].packets) - behind
    size = min(before * np.int64(lanes[lane].mtu), np.int64(rows[row].bytes))
    rows[new].seq = high
    rows[new].packets = behind
    rows[new].bytes = np.int64(rows[row].bytes) - size
    rows[new].first_ns = rows[row].last_ns
    rows[new].first_frame = rows[row].last_frame
    rows[new].retransmitted = 0
    rows[new].ecn_marked = 0
    rows[new].flags = rows[new].flags | REORDERED | GAP
    links[new].status = links[row].status & HAS_LAST
    rows[row].seq_end = low
    rows[row].packets = before
    rows[row].bytes = size
    rows[row].tag = 0
    rows[row].flags = rows[row].flags | REORDERED | GAP
    links[row].status = links[row].status & HAS_FIRST
    link(lanes, lane, rows, links, new)
    flows[flow].messages += 1
    if place == FIRST | LAST:
        return  # the caller finds no message that holds it
    if place == LAST:
        links[row].status |= HAS_LAST


@inner
def goes_on(lanes, lane, holes, row, rows, psn):  # type: ignore[no-untyped-def]
    """Whether a READ's answer that begins anew goes on one that was cut: the packet before was seen, no end.

    A requester that lost a packet asks for the rest of its READ from there on (9.7.5.2).
    """
    if skipped(lanes, lane, holes, psn - 1, psn) != 0:
        return False
    if lanes[lane].open and psn > lanes[lane].seq:
        return True
    return row >= 0 and np.int64(rows[row].seq) < psn and psn < np.int64(rows[row].seq_end)


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

    ``length`` is the RETH's, -1 without; ``imm`` -1 without. A FIRST or MIDDLE packet joins the message
    after it that lacks its beginning, a MIDDLE or LAST one the message before it that lacks its end.
    """
    if lane & 1 and place & FIRST:
        row = find(lanes, lane, rows, links, psn)
        if goes_on(lanes, lane, holes, row, rows, psn):
            place &= LAST
    lead = place & LAST == 0  # more packets follow
    if lanes[lane].open and psn > lanes[lane].seq and place and lanes[lane].status & SIZED == 0:
        split_open(
            lanes,
            lane,
            holes,
            flow,
            psn,
            place,
            wire,
            payload,
            imm,
            time_ns,
            frame,
            rows,
            links,
            flows,
            counts,
        )
        if length >= 0 and place == FIRST:
            lanes[lane].bytes = length
            lanes[lane].va = va
            lanes[lane].status |= SIZED
        if place != FIRST | LAST:
            return
    elif lanes[lane].open and psn > lanes[lane].seq:
        lanes[lane].packets += 1
        lanes[lane].ecn += ce
        lanes[lane].flags |= REORDERED
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame
        if lanes[lane].status & SIZED == 0:
            lanes[lane].bytes += payload
        return
    row = find(lanes, lane, rows, links, psn)
    if row >= 0 and psn < np.int64(rows[row].seq_end):
        ends = place & FIRST or (place & LAST and psn + 1 < np.int64(rows[row].seq_end))
        if ends and psn > np.int64(rows[row].seq) and links[row].status & SIZED == 0:
            split_row(lanes, lane, holes, flow, row, psn, place, rows, links, flows, counts)
            row = find(lanes, lane, rows, links, psn)
    if row >= 0 and psn < np.int64(rows[row].seq_end):
        if place & FIRST and length >= 0 and links[row].status & HAS_FIRST == 0:
            rows[row].bytes = length
            rows[row].va = va
            links[row].status |= SIZED
        add_packet(rows, links, row, place, wire, payload, imm, ce, time_ns, frame, counts)
        return
    lacks_end = row >= 0 and links[row].status & HAS_LAST == 0 and place & FIRST == 0
    if lacks_end and (place & LAST or psn == np.int64(rows[row].seq_end)):
        rows[row].seq_end = psn + 1
        if psn >= lanes[lane].acked:  # what was acknowledged was not its end
            rows[row].acked_ns = NEVER
            head = np.int64(lanes[lane].head)
            if head < 0 or rows[head].seq > rows[row].seq:
                lanes[lane].head = row
        add_packet(rows, links, row, place, wire, payload, imm, ce, time_ns, frame, counts)
        return
    after = np.int64(links[row].next) if row >= 0 else np.int64(-1)
    if row < 0:
        after = np.int64(lanes[lane].tail)
        while after >= 0 and links[after].prev >= 0:
            after = np.int64(links[after].prev)
    if lead and after >= 0:
        if links[after].status & HAS_FIRST == 0:
            rows[after].seq = psn
            if length >= 0:
                rows[after].bytes = length
                rows[after].va = va
                links[after].status |= SIZED
            add_packet(rows, links, after, place, wire, payload, imm, ce, time_ns, frame, counts)
            return
    elif lead and lanes[lane].open and lanes[lane].status & HAS_FIRST == 0:
        lanes[lane].seq = psn
        lanes[lane].packets += 1
        lanes[lane].ecn += ce
        lanes[lane].flags |= REORDERED
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame
        if place & FIRST:
            lanes[lane].status |= HAS_FIRST
        if length >= 0:
            lanes[lane].bytes = length
            lanes[lane].va = va
            lanes[lane].status |= SIZED
        elif lanes[lane].status & SIZED == 0:
            lanes[lane].bytes += payload
        return
    new = counts[ROWS]
    counts[ROWS] = new + 1
    blank(rows, new, flow, psn, psn + 1, time_ns, frame, wire)
    rows[new].bytes = length if length >= 0 else payload
    rows[new].va = va
    rows[new].tag = max(imm, 0)
    rows[new].ecn_marked = ce
    rows[new].flags = REORDERED if place == FIRST | LAST else REORDERED | GAP
    status = SIZED if length >= 0 else 0
    status |= HAS_FIRST if place & FIRST else 0
    status |= HAS_LAST if place & LAST else 0
    links[new].status = status
    link(lanes, lane, rows, links, new)
    flows[flow].messages += 1
