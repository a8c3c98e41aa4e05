"""TCP headers of a block -> byte streams in order -> messages (RFC 9293; what bytes mean: ``stream``).

One STREAM row per flow follows the sequence numbers; segments beyond a hole wait in HELD slots
with their stamps and first bytes. Completed messages are appended to the caller's rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inner, kernel, u1, u2, u4, void
from dpuflow.kernels.stream import close_message, consume, cut, give_up_trial, note_push, time_round_trip
from dpuflow.kernels.tcp_state import (
    BURST,
    CHAIN,
    CLOSED,
    DONE,
    FREE_SLOT,
    FROM_SYN,
    HEADERS,
    HELD,
    LINK,
    MAX_HELD,
    MAX_HELD_ALONE,
    MAX_UNACKED,
    MAX_WIDTH,
    MIDDLE,
    MIN_MESSAGE,
    MORE_ROWS,
    MORE_SLOTS,
    NEW,
    NO_PUSH,
    PER_SEGMENT,
    REORDER,
    ROWS,
    SLOTS_USED,
    STREAM,
    WANT,
    WIDER_SLOTS,
    WRITING,
)
from dpuflow.schema import rows as schema

_TWO_32 = 1 << 32
_WINDOW = 1 << 30  # largest window there is (RFC 7323): older segments are no retransmissions
_GAP = int(schema.MessageFlag.GAP)
_REORDERED = int(schema.MessageFlag.REORDERED)
_SYN, _FIN, _RST, _PSH, _ACK = 2, 1, 4, 8, 16


@inner
def extend(near: Any, low: Any) -> Any:
    """The extended sequence number with the low 32 bits ``low`` nearest to ``near``."""
    delta = (low - near) & 0xFFFFFFFF
    if delta >= _TWO_32 - _WINDOW:
        return near + delta - _TWO_32
    return near + delta


@inner
def hold(
    st: Any,
    seq: Any,
    end: Any,
    data: Any,
    at: Any,
    seen: Any,
    time_ns: Any,
    frame: Any,
    ecn: Any,
    probe: Any,
    push: Any,
    held: Any,
    held_data: Any,
    width: Any,
    counts: Any,
) -> Any:
    """Keep a segment beyond a hole, sorted by its start; the free slot is known to exist."""
    slot = counts[FREE_SLOT]
    counts[FREE_SLOT] = held[slot].next
    counts[SLOTS_USED] += 1
    h = held[slot]
    h.seq, h.end, h.time_ns, h.frame = seq, end, time_ns, frame
    h.seen, h.ecn, h.probe, h.push = min(seen, width), ecn, probe, push
    base = np.int64(slot) * width
    for i in range(h.seen):
        held_data[base + i] = data[at + i]
    before = st.held_tail
    if before < 0 or held[before].seq > seq:
        before = -1
        k = st.held
        while k >= 0 and held[k].seq <= seq:
            before = k
            k = held[k].next
    if before < 0:
        h.next = st.held
        st.held = slot
    else:
        h.next = held[before].next
        held[before].next = slot
    if h.next < 0:
        st.held_tail = slot
    st.held_count += 1
    st.held_seen += h.seen


@inner
def count_retransmission(st: Any, seq: Any, end: Any, rows: Any, links: Any) -> Any:
    """Charge a segment sent again to the message that its first byte belongs to.

    Not one whose bytes had all been acknowledged: the receiver lacked nothing.
    """
    st.total_retransmitted += 1
    st.timed = 0
    if end <= st.max_ack:
        st.total_spurious += 1
        st.unechoed += 1
        return
    charge(st, seq, 1, rows, links)


@inner
def charge(st: Any, seq: Any, change: Any, rows: Any, links: Any) -> Any:
    """Add ``change`` to the retransmissions of the message that byte ``seq`` belongs to.

    Of the last ``MAX_UNACKED`` only: a sender holds no more, and a stream played again would cost a walk over
    all of its messages for each segment.
    """
    if st.start >= 0 and seq >= st.start:
        st.retransmitted = max(st.retransmitted + change, 0)
        return
    k, left = st.last_row, MAX_UNACKED
    while k >= 0 and left > 0 and np.int64(rows[k].seq) > seq:
        k = links[k].prev
        left -= 1
    if k >= 0 and left > 0 and (change > 0 or rows[k].retransmitted > 0):
        rows[k].retransmitted += change


@inner
def came_twice(st: Any, left: Any, rows: Any, links: Any) -> Any:
    """The receiver reports bytes from ``left`` on as duplicate (D-SACK, RFC 2883): a needless repeat."""
    if st.unechoed > 0:
        st.unechoed -= 1
    elif st.total_spurious < st.total_retransmitted:
        st.total_spurious += 1
        charge(st, left, -1, rows, links)


@inner
def deliver(st: Any, since: Any, rows: Any, links: Any) -> Any:
    """Messages that ended at or after ``since`` were delivered only when the hole before them was filled."""
    k = st.last_row
    while k >= 0 and np.int64(rows[k].seq_end) > since and rows[k].last_ns < st.delivered_ns:
        rows[k].last_ns, rows[k].last_frame = st.delivered_ns, st.delivered_frame
        k = links[k].prev


@inner
def drain(
    f: Any,
    st: Any,
    peer_srtt: Any,
    peer_rttvar: Any,
    force: Any,
    held: Any,
    held_data: Any,
    width: Any,
    header: Any,
    rows: Any,
    links: Any,
    counts: Any,
) -> Any:
    """Take held segments that are in order now; ``force``: give up the hole before the first, too."""
    while st.held >= 0:
        slot = st.held
        h = held[slot]
        if h.probe and not force and h.seq == st.next and st.max_ack <= st.next:
            return
        flags = 0
        if h.seq > st.next:
            if not force:
                return
            # Bytes that were delivered but not captured: they count, with the time of what follows.
            st.total_missing += 1
            consume(f, st, peer_srtt, peer_rttvar, st.next, np.int64(h.seq), held_data, 0, 0,
                    np.int64(h.time_ns), np.int64(h.frame), 0, _GAP, header, rows, links, counts)  # fmt: skip
            force = False
        elif h.time_ns < st.delivered_ns:
            st.total_out_of_order += 1
            flags = _REORDERED
        if h.end > st.next:
            late = h.time_ns < st.delivered_ns
            consume(f, st, peer_srtt, peer_rttvar, np.int64(h.seq), np.int64(h.end), held_data,
                    np.int64(slot) * width, np.int64(h.seen), np.int64(h.time_ns), np.int64(h.frame),
                    np.int64(h.ecn), flags, header, rows, links, counts)  # fmt: skip
            note_push(f, st, np.int64(h.end - h.seq), h.push != 0, header, rows, links, counts)
            if late:
                deliver(st, np.int64(h.seq), rows, links)
        elif not h.probe:
            count_retransmission(st, np.int64(h.seq), np.int64(h.end), rows, links)
        st.held = h.next
        if st.held < 0:
            st.held_tail = -1
        st.held_count -= 1
        st.held_seen -= h.seen
        h.next = counts[FREE_SLOT]
        counts[FREE_SLOT] = slot
        counts[SLOTS_USED] -= 1


@inner
def acknowledge(st: Any, ack: Any, time_ns: Any, rows: Any, links: Any) -> Any:
    """The opposite flow acknowledged this stream's bytes up to ``ack``."""
    if ack <= st.max_ack:
        return
    st.max_ack, st.max_ack_ns = ack, time_ns
    if ack > st.next and st.beyond == 0:
        st.beyond, st.beyond_ns = ack, time_ns
    if st.timed != 0 and ack >= st.timed:
        sample = time_ns - st.timed_ns
        if sample >= 0:
            if st.srtt == 0:
                st.srtt, st.rttvar = sample, sample // 2
            else:
                st.rttvar += (abs(st.srtt - sample) - st.rttvar) // 4
                st.srtt += (sample - st.srtt) // 8
        st.timed = 0
    k = st.unacked
    while k >= 0 and np.int64(rows[k].seq_end) <= ack:
        row = rows[k]
        row.acked_ns = time_ns
        time_round_trip(st, row)
        k = links[k].next
    st.unacked = k


@inner
def restart(f: Any, st: Any, seq: Any, state: Any, header: Any, rows: Any, links: Any, counts: Any) -> Any:
    """A stream begins: with a SYN, or in its middle. Whatever was before is over."""
    cut(f, st, header, rows, links, counts)
    st.next = st.first = seq
    st.start, st.state, st.framing, st.chain, st.mode = -1, state, 0, 0, BURST
    st.max_ack = st.beyond = st.timed = st.fin = st.granted = 0
    st.whole, st.push, st.full, st.closed = state == FROM_SYN, NO_PUSH, 0, 0
    st.pieces, st.window, st.unacked, st.last_row, st.trial = 0, -1, -1, -1, -1


_BYTES, _COUNTS = u1[::1], i8[::1]
_STREAMS, _LINKS, _HELD = from_dtype(STREAM)[::1], from_dtype(LINK)[::1], from_dtype(HELD)[::1]
_ROWS, _TCP = from_dtype(schema.MESSAGE.dtype)[::1], from_dtype(schema.TCP.dtype)[::1]
_COLUMNS = (i8[::1], u4[::1], u4[::1], u4[::1], u4[::1], u2[::1], u1[::1], _BYTES)


@kernel(i8(i8, *_COLUMNS, _TCP, _STREAMS, _BYTES, _ROWS, _LINKS, _HELD, _BYTES, i8, _COUNTS))
def follow(
    first: Any,
    time_ns: Any,
    frames: Any,
    flow: Any,
    payload: Any,
    data_at: Any,
    data_len: Any,
    tos: Any,
    data: Any,
    tcp: Any,
    streams: Any,
    header: Any,
    rows: Any,
    links: Any,
    held: Any,
    held_data: Any,
    width: Any,
    counts: Any,
) -> Any:
    """Work through the TCP rows from ``first``; returns the row to go on with.

    ``counts[WANT]`` says what to enlarge before.
    """
    for i in range(first, len(tcp)):
        t = tcp[i]
        p = np.int64(t.packet)
        if flow[p] == schema.NONE32:
            continue
        f = np.int64(flow[p])
        st = streams[f]
        now, length = np.int64(time_ns[p]), np.int64(payload[p])
        at, seen = np.int64(data_at[p]), min(np.int64(data_len[p]), length)
        tcp_flags = np.int64(t.flags)
        frame = np.int64(frames[p])
        need = (seen + st.held_seen) // MIN_MESSAGE + PER_SEGMENT * (st.held_count + 2)
        if st.peer >= 0:
            need += streams[st.peer].held_seen // MIN_MESSAGE + PER_SEGMENT * (
                streams[st.peer].held_count + 1
            )
        if len(rows) - counts[ROWS] < need:
            counts[WANT] = MORE_ROWS
            return i
        if counts[FREE_SLOT] < 0:
            counts[WANT] = MORE_SLOTS
            return i
        seq = extend(st.next, np.int64(t.seq))
        if st.state == NEW:
            seq = _TWO_32 + np.int64(t.seq)
            restart(f, st, seq, MIDDLE, header, rows, links, counts)
        if tcp_flags & (_FIN | _RST):
            st.closed = 1
        if tcp_flags & _SYN:
            if st.state != FROM_SYN or seq + 1 != st.first:
                seq = _TWO_32 + np.int64(t.seq)
                restart(f, st, seq + 1, FROM_SYN, header, rows, links, counts)
            seq += 1
        end = seq + length
        if seq > st.next and width < min(seen, MAX_WIDTH):
            counts[WANT] = WIDER_SLOTS
            return i
        ecn = np.int64(1) if tos[p] & 3 == 3 else np.int64(0)
        if st.total_packets == 0:
            st.opened_ns = now
        st.seen_ns = now
        st.total_packets += 1
        st.total_bytes += length
        st.total_seen += HEADERS + seen
        st.total_ecn += ecn
        peer_srtt = peer_rttvar = np.int64(0)
        if st.peer >= 0:
            ps = streams[st.peer]
            peer_srtt, peer_rttvar = ps.srtt, ps.rttvar
            st.allowed = ps.granted
            if tcp_flags & _ACK and ps.state != NEW:
                ack = extend(ps.next, np.int64(t.ack))
                acknowledge(ps, ack, now, rows, links)
                # A first SACK block below the ACK is a D-SACK (RFC 2883 section 4).
                if t.sack_left != t.sack_right and extend(ps.next, np.int64(t.sack_right)) <= ack:
                    came_twice(ps, extend(ps.next, np.int64(t.sack_left)), rows, links)
                if (
                    ps.held >= 0
                    and ps.max_ack >= held[ps.held].seq
                    and (ps.held_count >= REORDER or held[ps.held].probe)
                ):
                    drain(st.peer, ps, st.srtt, st.rttvar, not held[ps.held].probe, held, held_data, width,
                          header, rows, links, counts)  # fmt: skip
            if length > 0 and ps.mode == BURST and ps.start >= 0 and ps.push < WRITING:
                ps.end = ps.next
                close_message(st.peer, ps, header, rows, links, counts, 0)
        if tcp_flags & (_SYN | _RST | _FIN) == 0:
            st.window = t.window
            if t.window == 0:
                st.total_zero_window += 1
        if tcp_flags & _RST:
            continue
        if length > 0:
            alive = length == 1 and seq == st.next - 1
            probe = length == 1 and seq == st.next and st.peer >= 0 and streams[st.peer].window == 0
            if alive:
                continue
            if seq < st.next:
                count_retransmission(st, seq, end, rows, links)
            if probe or seq > st.next:
                hold(st, seq, end, data, at, seen, now, frame, ecn, probe, tcp_flags & _PSH, held, held_data,
                     width, counts)  # fmt: skip
                alone = st.peer < 0 or streams[st.peer].state == NEW
                acked = st.max_ack >= held[st.held].seq and st.held_count >= REORDER
                if not probe and (acked or st.held_count >= (MAX_HELD_ALONE if alone else MAX_HELD)):
                    drain(f, st, peer_srtt, peer_rttvar, True, held, held_data, width,
                          header, rows, links, counts)  # fmt: skip
            elif end > st.next:
                consume(f, st, peer_srtt, peer_rttvar, seq, end, data, at, seen, now, frame, ecn, 0,
                        header, rows, links, counts)  # fmt: skip
                note_push(f, st, length, tcp_flags & _PSH != 0, header, rows, links, counts)
                st.delivered_ns, st.delivered_frame = now, frame
                if st.timed == 0:
                    st.timed, st.timed_ns = end, now
                if st.beyond != 0 and st.next >= st.beyond:
                    st.beyond = 0
                if st.held >= 0:
                    drain(f, st, peer_srtt, peer_rttvar, False, held, held_data, width,
                          header, rows, links, counts)  # fmt: skip
        if tcp_flags & _FIN:
            st.fin = end
        if st.fin == st.next and st.state != CLOSED:
            st.next += 1
            st.state = CLOSED
    counts[WANT] = DONE
    return len(tcp)


@kernel(void(_STREAMS, _BYTES, _ROWS, _LINKS, _HELD, _BYTES, i8, _COUNTS))
def end_all(
    streams: Any, header: Any, rows: Any, links: Any, held: Any, held_data: Any, width: Any, counts: Any
) -> Any:
    """The capture is over: give up what is held back, close what is in progress. ``rows`` has room."""
    for f in range(len(streams)):
        st = streams[f]
        if st.state == NEW:
            continue
        srtt = rttvar = np.int64(0)
        if st.peer >= 0:
            srtt, rttvar = streams[st.peer].srtt, streams[st.peer].rttvar
        while st.held >= 0:
            drain(f, st, srtt, rttvar, True, held, held_data, width, header, rows, links, counts)
        # One byte beyond the last is a FIN's.
        if st.max_ack > st.next + 1:
            st.total_missing += 1
            if st.start >= 0:
                st.flags |= _GAP
        cut(f, st, header, rows, links, counts)


@kernel(void(_STREAMS, _ROWS, _LINKS))
def settle(streams: Any, rows: Any, links: Any) -> Any:
    """Give up the framings for which both directions together show too few headers."""
    for f in range(len(streams)):
        st = streams[f]
        if st.framing == 0 or st.chain >= CHAIN:
            continue
        chain = st.chain
        if st.peer >= 0 and streams[st.peer].framing == st.framing:
            chain += streams[st.peer].chain
        if chain < CHAIN:
            give_up_trial(st, rows, links)
