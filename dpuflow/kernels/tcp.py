"""TCP headers of a block -> byte streams in order -> messages (RFC 9293; framing from kernels.framing).

One ``STREAM`` row per flow follows the sequence numbers; segments beyond a hole wait in ``HELD``
slots with their stamps and first bytes. Completed messages are appended to the caller's rows.
"""

from __future__ import annotations

import numpy as np

from dpuflow import schema
from dpuflow.framing import GLOO_HELLO, HEADER_BYTES
from dpuflow.kernels import framing as fk
from dpuflow.kernels._jit import from_dtype, i4, i8, inner, kernel, le64, types, u1, u2, u4

STREAM = np.dtype(
    [
        ("next", "i8"),  # extended sequence number expected next
        ("first", "i8"),  # of the first byte of the stream, or of what was seen of it
        ("start", "i8"),  # message in progress: first byte, end (-1: not known), then its facts
        ("end", "i8"),
        ("first_ns", "i8"),
        ("last_ns", "i8"),
        ("delivered_ns", "i8"),  # when the bytes up to ``next`` had all come
        ("mask", "i8"),  # header bytes seen, one bit each
        ("max_ack", "i8"),  # of this stream's bytes, by the opposite flow
        ("max_ack_ns", "i8"),
        ("beyond", "i8"),  # first ACK beyond ``next`` since ``next`` was last reached, 0: none
        ("beyond_ns", "i8"),
        ("rtt_min", "i8"),
        ("timed", "i8"),  # RFC 6298: sequence being timed, 0: none; since; smoothed, variation
        ("timed_ns", "i8"),
        ("srtt", "i8"),
        ("rttvar", "i8"),
        ("held_bytes", "i8"),
        ("fin", "i8"),  # sequence number of the FIN, 0: none yet
        ("window", "i4"),  # last announced by this flow, -1: none yet
        ("peer", "i4"),
        ("held", "i4"),  # first slot, -1: none
        ("held_tail", "i4"),
        ("held_count", "i4"),
        ("first_frame", "i4"),
        ("last_frame", "i4"),
        ("delivered_frame", "i4"),
        ("packets", "i4"),
        ("retransmitted", "i4"),  # of the message in progress
        ("ecn", "i4"),
        ("flags", "i4"),
        ("last_row", "i4"),  # newest message of the flow, -1: none
        ("unacked", "i4"),  # oldest message not yet acknowledged, -1: none
        ("trial", "i4"),  # last_row when a framing was put on trial
        ("chain", "i4"),  # plausible headers in a row since
        ("pieces", "i4"),  # segments in a row whose framing was lost
        ("total_retransmitted", "i4"),
        ("total_out_of_order", "i4"),
        ("total_missing", "i4"),
        ("total_zero_window", "i4"),
        ("state", "u1"),
        ("framing", "u1"),
        ("mode", "u1"),
        ("whole", "u1"),  # 1: its SYN was seen
    ],
    align=True,
)

LINK = np.dtype(
    [
        ("request", "i8"),  # ob1: the sender's request, 0: not seen
        ("fragment", "i8"),  # ob1: the receiver's fragment
        ("address", "i8"),  # ob1: where the put writes
        ("prev", "i4"),  # message before and after it on its flow, -1: none
        ("next", "i4"),
        ("known", "u1"),
        ("piece", "u1"),  # 1: not a message but bytes between two known headers
    ],
    align=True,
)

HELD = np.dtype(
    [
        ("seq", "i8"),
        ("end", "i8"),
        ("time_ns", "i8"),
        ("frame", "i4"),
        ("next", "i4"),
        ("seen", "i4"),
        ("ecn", "u1"),
        ("probe", "u1"),
    ],
    align=True,
)

# STREAM.state
NEW, MIDDLE, FROM_SYN, CLOSED = 0, 1, 2, 3
# STREAM.mode: what the bytes at ``next`` are taken for
BURST, FRAMED, LOST = 0, 1, 2

# What the kernel returns beside the next TCP row: all done, or what to enlarge.
DONE, MORE_ROWS, MORE_SLOTS, WIDER_SLOTS = 0, 1, 2, 3

# Indices of ``counts``.
ROWS, FREE_SLOT, SLOTS_USED = 0, 1, 2

REORDER = 3  # segments beyond a hole before it counts (RFC 5681's three duplicate ACKs)
MAX_HELD = 1024  # segments held per flow; beyond it the hole is given up
MAX_HELD_ALONE = 64  # the same where the opposite direction was never seen
MAX_WIDTH = 9216  # captured bytes of a held segment that are kept: a jumbo frame's
MAX_PIECES = 1024  # rows kept of a stretch whose framing is lost
MIN_MESSAGE = 16  # bytes of the shortest message: what a segment can complete is bounded by it
CHAIN = 3  # plausible headers, one at the end of the other, that settle a framing
FIRST_RTO_NS = 1_000_000_000  # RFC 6298 section 2.1
_TWO_32 = 1 << 32
_WINDOW = 1 << 30  # largest window there is (RFC 7323): older segments are no retransmissions

_GAP = int(schema.MessageFlag.GAP)
_HIDDEN = int(schema.MessageFlag.HIDDEN)
_REORDERED = int(schema.MessageFlag.REORDERED)
_STARTS_BEFORE = int(schema.MessageFlag.STARTS_BEFORE)
_ENDS_AFTER = int(schema.MessageFlag.ENDS_AFTER)
_GLOO, _OB1 = int(schema.Framing.GLOO), int(schema.Framing.OB1)
_BURST_ROLE, _BURST_WIRE = int(schema.Role.BURST), int(schema.Wire.TCP_BURST)
_SYN, _FIN, _RST, _ACK = 2, 1, 4, 16
_NEVER = schema.NEVER


@inner
def extend(near, low):
    """The extended sequence number with the low 32 bits ``low`` nearest to ``near``."""
    delta = (low - near) & 0xFFFFFFFF
    if delta >= _TWO_32 - _WINDOW:
        return near + delta - _TWO_32
    return near + delta


@inner
def open_message(st, seq, time_ns, frame):
    st.start, st.end, st.mask = seq, -1, 0
    st.first_ns, st.last_ns = time_ns, time_ns
    st.first_frame, st.last_frame = frame, frame
    st.packets = st.retransmitted = st.ecn = st.flags = 0


@inner
def time_round_trip(st, row):
    """Let an acknowledged message count towards the smallest round trip (Karn: if sent only once)."""
    rtt = row.acked_ns - row.last_ns
    if row.retransmitted == 0 and rtt >= 0 and (st.rtt_min < 0 or rtt < st.rtt_min):
        st.rtt_min = rtt


@inner
def close_message(f, st, header, rows, links, counts, piece):
    """Append the message in progress, which ends at ``st.end``."""
    k = counts[ROWS]
    counts[ROWS] = k + 1
    row, link = rows[k], links[k]
    row.first_ns, row.last_ns, row.acked_ns = st.first_ns, st.last_ns, _NEVER
    row.seq, row.seq_end, row.flow = st.start, st.end, f
    row.bytes, row.announces, row.va = 0, 0, 0
    row.packets, row.retransmitted, row.ecn_marked = st.packets, st.retransmitted, st.ecn
    row.context, row.tag, row.sub = 0, 0, 0
    row.first_frame, row.last_frame = st.first_frame, st.last_frame
    row.wire, row.role, row.op, row.flags = 0, 0, 0, st.flags
    link.request, link.fragment, link.address = 0, 0, 0
    link.prev, link.next, link.known, link.piece = st.last_row, -1, 0, piece
    if piece or st.mode == BURST:
        row.wire, row.role, row.bytes = _BURST_WIRE, _BURST_ROLE, st.end - st.start
    elif st.framing == _GLOO:
        fk.decode_gloo(row, link, header, np.int64(f) * HEADER_BYTES, st.mask)
    else:
        fk.decode_ob1(row, link, header, np.int64(f) * HEADER_BYTES, st.mask)
    if st.last_row >= 0:
        links[st.last_row].next = k
    st.last_row = k
    if st.max_ack >= st.end:
        first = st.beyond != 0 and st.beyond >= st.end
        row.acked_ns = st.beyond_ns if first else st.max_ack_ns
        if st.max_ack == st.end:
            time_round_trip(st, row)
    elif st.unacked < 0:
        st.unacked = k
    st.start = -1


@inner
def give_up_trial(st, rows, links):
    """The framing on trial proved wrong: its messages were bytes like any other."""
    k = st.last_row
    while k != st.trial and k >= 0:
        row = rows[k]
        row.role, row.wire, row.op = _BURST_ROLE, _BURST_WIRE, 0
        row.bytes, row.announces, row.flags = row.seq_end - row.seq, 0, row.flags & ~_HIDDEN
        row.context, row.tag, row.sub = 0, 0, 0
        links[k].known, links[k].piece = 0, 0
        k = links[k].prev
    st.framing, st.chain, st.mode, st.start = 0, 0, BURST, -1


@inner
def accept_header(st):
    st.chain += 1
    st.pieces = 0
    st.mode = FRAMED


@inner
def lose_framing(st, rows, links, plausible):
    """The next header cannot be read: the bytes from here on are pieces until one is seen again."""
    if not plausible and st.chain < CHAIN:
        start, first_ns, frame = st.start, st.first_ns, st.first_frame
        packets, ecn, flags = st.packets, st.ecn, st.flags
        give_up_trial(st, rows, links)
        open_message(st, start, first_ns, frame)
        st.packets, st.ecn, st.flags = packets, ecn, flags
        return
    st.mode = LOST
    st.flags |= _HIDDEN


@inner
def idle_limit(st, peer_srtt, peer_rttvar):
    """Silence after which a burst is over: what RFC 6298 takes for a lost segment, both legs together."""
    limit = st.srtt + 4 * st.rttvar + peer_srtt + 4 * peer_rttvar
    return limit if limit > 0 else FIRST_RTO_NS


@inner
def find_header(st, seq, end, data, at, seen):
    """Enter a framing, or the one lost before, where this segment starts with a header of it."""
    framing = fk.recognise(data, at, seen)
    hello = 0
    if framing == 0 and st.framing == 0 and st.state == FROM_SYN and seq == st.first:
        # A Gloo initiator sends its rank before its first preamble.
        if seen >= GLOO_HELLO and 0 <= le64(data, at) < 1 << 20:
            if end - seq == GLOO_HELLO or fk.recognise(data, at + GLOO_HELLO, seen - GLOO_HELLO) == _GLOO:
                framing, hello = _GLOO, GLOO_HELLO
    if framing == 0 or (st.framing != 0 and framing != st.framing):
        return False
    if st.framing == 0:
        st.framing, st.trial, st.chain = framing, st.last_row, 0
        if framing == _OB1 and fk.ob1_is_hello(data, at, seen):
            st.chain = CHAIN
    st.pieces = 0
    st.mode = FRAMED
    st.end = -1
    if hello:
        st.end = seq + hello
    return True


@inner
def consume(f, st, peer_srtt, peer_rttvar, seq, end, data, at, seen, time_ns, frame, ecn, flags,
            header, rows, links, counts):  # fmt: skip
    """Take the bytes from ``st.next`` to ``end`` of a segment that starts at or before ``st.next``."""
    skip = st.next - seq
    pos = st.next
    at += skip
    seen = seen - skip if seen > skip else 0
    if pos < end and st.mode != FRAMED:
        if st.mode == BURST and st.start >= 0:
            if time_ns - st.last_ns > idle_limit(st, peer_srtt, peer_rttvar):
                st.end = pos
                close_message(f, st, header, rows, links, counts, 0)
        if flags & _GAP == 0 and seen >= 8:
            open_burst = st.start
            if open_burst >= 0 and st.mode == BURST:
                # The burst so far belongs before the header, if there is one.
                if fk.recognise(data, at, seen) != 0:
                    st.end = pos
                    close_message(f, st, header, rows, links, counts, 0)
            if st.start < 0:
                save = st.end
                if find_header(st, pos, end, data, at, seen):
                    hello_end = st.end
                    open_message(st, pos, time_ns, frame)
                    st.end = hello_end if hello_end > pos else -1
                else:
                    st.end = save
    counted = False
    while pos < end:
        if st.start < 0:
            open_message(st, pos, time_ns, frame)
            counted = False
        if not counted:
            if flags & _GAP == 0:
                st.packets += 1
                st.ecn += ecn
            st.flags |= flags
            counted = True
        st.last_ns = time_ns
        st.last_frame = frame
        if st.mode == FRAMED:
            begin = pos - st.start
            if begin < HEADER_BYTES:
                base = np.int64(f) * HEADER_BYTES
                n = min(HEADER_BYTES - begin, end - pos, seen)
                if st.end >= 0 and n > st.end - pos:
                    n = st.end - pos
                for i in range(n):
                    header[base + begin + i] = data[at + i]
                    st.mask |= np.int64(1) << (begin + i)
                if st.end < 0:
                    prefix = 0
                    while prefix < HEADER_BYTES and (st.mask >> prefix) & 1:
                        prefix += 1
                    length = fk.header_length(st.framing, header, base, prefix)
                    if length > 0:
                        st.end = st.start + length
                        accept_header(st)
                    elif length < 0:
                        lose_framing(st, rows, links, False)
                    elif prefix < begin + min(end - pos, HEADER_BYTES - begin):
                        lose_framing(st, rows, links, True)
        if st.mode != FRAMED:
            pos = end
            if st.mode == LOST:
                merge = st.pieces >= MAX_PIECES and st.last_row >= 0
                if merge:
                    row = rows[st.last_row]
                    row.seq_end, row.last_ns, row.last_frame = end, time_ns, frame
                    row.bytes = row.seq_end - row.seq
                    row.packets += st.packets
                    row.ecn_marked += st.ecn
                    row.flags |= st.flags
                    st.start = -1
                else:
                    st.pieces += 1
                    st.flags |= _HIDDEN
                    st.end = end
                    close_message(f, st, header, rows, links, counts, 1)
        elif st.end < 0 or st.end > end:
            pos = end
        else:
            step = st.end - pos
            pos = st.end
            at += step
            seen = seen - step if seen > step else 0
            close_message(f, st, header, rows, links, counts, 0)
    if end > st.next:
        st.next = end


@inner
def hold(st, seq, end, data, at, seen, time_ns, frame, ecn, probe, held, held_data, width, counts):
    """Keep a segment beyond a hole, sorted by its start; the free slot is known to exist."""
    slot = counts[FREE_SLOT]
    counts[FREE_SLOT] = held[slot].next
    counts[SLOTS_USED] += 1
    h = held[slot]
    h.seq, h.end, h.time_ns, h.frame = seq, end, time_ns, frame
    h.seen, h.ecn, h.probe = min(seen, width), ecn, probe
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
    st.held_bytes += end - seq


@inner
def count_retransmission(st, seq, rows, links):
    """Charge a segment sent again to the message that its first byte belongs to."""
    st.total_retransmitted += 1
    st.timed = 0
    if st.start >= 0 and seq >= st.start:
        st.retransmitted += 1
        return
    k = st.last_row
    while k >= 0 and np.int64(rows[k].seq) > seq:
        k = links[k].prev
    if k >= 0:
        rows[k].retransmitted += 1


@inner
def deliver(st, since, rows, links):
    """Messages that ended at or after ``since`` were delivered only when the hole before them was filled."""
    k = st.last_row
    while k >= 0 and np.int64(rows[k].seq_end) > since and rows[k].last_ns < st.delivered_ns:
        rows[k].last_ns, rows[k].last_frame = st.delivered_ns, st.delivered_frame
        k = links[k].prev


@inner
def drain(f, st, peer_srtt, peer_rttvar, force, held, held_data, width, header, rows, links, counts):
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
            consume(f, st, peer_srtt, peer_rttvar, st.next, np.int64(h.seq), held_data, 0, 0, np.int64(h.time_ns),
                    np.int64(h.frame), 0, _GAP, header, rows, links, counts)  # fmt: skip
            force = False
        elif h.time_ns < st.delivered_ns:
            st.total_out_of_order += 1
            flags = _REORDERED
        if h.end > st.next:
            late = h.time_ns < st.delivered_ns
            consume(f, st, peer_srtt, peer_rttvar, np.int64(h.seq), np.int64(h.end), held_data,
                    np.int64(slot) * width, np.int64(h.seen), np.int64(h.time_ns), np.int64(h.frame),
                    np.int64(h.ecn), flags, header, rows, links, counts)  # fmt: skip
            if late:
                deliver(st, np.int64(h.seq), rows, links)
        elif not h.probe:
            count_retransmission(st, np.int64(h.seq), rows, links)
        st.held = h.next
        if st.held < 0:
            st.held_tail = -1
        st.held_count -= 1
        st.held_bytes -= h.end - h.seq
        h.next = counts[FREE_SLOT]
        counts[FREE_SLOT] = slot
        counts[SLOTS_USED] -= 1


@inner
def acknowledge(st, ack, time_ns, rows, links):
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
def cut(f, st, header, rows, links, counts):
    """The stream ends here: what is in progress stays unfinished."""
    if st.start < 0:
        return
    unread = st.mode == FRAMED and st.end < 0
    if st.mode != FRAMED or unread:
        st.end = st.next
    if st.mode == FRAMED:
        st.flags |= _ENDS_AFTER | (_HIDDEN if unread else 0)
    close_message(f, st, header, rows, links, counts, unread)


@inner
def restart(f, st, seq, state, header, rows, links, counts):
    """A stream begins: with a SYN, or in its middle. Whatever was before is over."""
    cut(f, st, header, rows, links, counts)
    st.next = st.first = seq
    st.start, st.state, st.framing, st.chain, st.mode = -1, state, 0, 0, BURST
    st.max_ack = st.beyond = st.timed = st.fin = 0
    st.whole = state == FROM_SYN
    st.pieces, st.window, st.unacked, st.last_row, st.trial = 0, -1, -1, -1, -1


_BYTES, _COUNTS = u1[::1], i8[::1]
_STREAMS, _LINKS, _HELD = from_dtype(STREAM)[::1], from_dtype(LINK)[::1], from_dtype(HELD)[::1]
_ROWS, _TCP = from_dtype(schema.MESSAGE.dtype)[::1], from_dtype(schema.TCP.dtype)[::1]
_PACKETS = types.Tuple((i8[::1], u4[::1], u4[::1], u4[::1], u4[::1], u2[::1], u1[::1], _BYTES))


@kernel(types.UniTuple(i8, 2)(i8, _PACKETS, _TCP, _STREAMS, _BYTES, _ROWS, _LINKS, _HELD, _BYTES, i8, _COUNTS))
def follow(first, packets, tcp, streams, header, rows, links, held, held_data, width, counts):
    """Work through the TCP rows from ``first``; returns the row to go on with and what to enlarge."""
    time_ns, frames, flow, payload, data_at, data_len, tos, data = packets
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
        need = (length + st.held_bytes) // MIN_MESSAGE + st.held_count + 16
        if st.peer >= 0:
            need += streams[st.peer].held_bytes // MIN_MESSAGE + streams[st.peer].held_count
        if len(rows) - counts[ROWS] < need:
            return i, MORE_ROWS
        if counts[FREE_SLOT] < 0:
            return i, MORE_SLOTS
        seq = extend(st.next, np.int64(t.seq))
        if st.state == NEW:
            seq = _TWO_32 + np.int64(t.seq)
            restart(f, st, seq, MIDDLE, header, rows, links, counts)
        if tcp_flags & _SYN:
            if st.state != FROM_SYN or seq + 1 != st.first:
                seq = _TWO_32 + np.int64(t.seq)
                restart(f, st, seq + 1, FROM_SYN, header, rows, links, counts)
            seq += 1
        end = seq + length
        if seq > st.next and width < min(seen, MAX_WIDTH):
            return i, WIDER_SLOTS
        peer_srtt = peer_rttvar = np.int64(0)
        if st.peer >= 0:
            ps = streams[st.peer]
            peer_srtt, peer_rttvar = ps.srtt, ps.rttvar
            if tcp_flags & _ACK and ps.state != NEW:
                acknowledge(ps, extend(ps.next, np.int64(t.ack)), now, rows, links)
                if ps.held >= 0 and ps.max_ack >= held[ps.held].seq and (
                    ps.held_count >= REORDER or held[ps.held].probe):
                    drain(st.peer, ps, st.srtt, st.rttvar, not held[ps.held].probe, held, held_data, width,
                          header, rows, links, counts)  # fmt: skip
            if length > 0 and ps.mode == BURST and ps.start >= 0:
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
            ecn = np.int64(1) if tos[p] & 3 == 3 else np.int64(0)
            if alive:
                continue
            if seq < st.next:
                count_retransmission(st, seq, rows, links)
            if probe or seq > st.next:
                hold(st, seq, end, data, at, seen, now, frame, ecn, probe, held, held_data, width, counts)
                alone = st.peer < 0 or streams[st.peer].state == NEW
                acked = st.max_ack >= held[st.held].seq and st.held_count >= REORDER
                if not probe and (acked or st.held_count >= (MAX_HELD_ALONE if alone else MAX_HELD)):
                    drain(f, st, peer_srtt, peer_rttvar, True, held, held_data, width, header, rows, links, counts)
            elif end > st.next:
                consume(f, st, peer_srtt, peer_rttvar, seq, end, data, at, seen, now, frame, ecn, 0,
                        header, rows, links, counts)  # fmt: skip
                st.delivered_ns, st.delivered_frame = now, frame
                if st.timed == 0:
                    st.timed, st.timed_ns = end, now
                if st.beyond != 0 and st.next >= st.beyond:
                    st.beyond = 0
                if st.held >= 0:
                    drain(f, st, peer_srtt, peer_rttvar, False, held, held_data, width, header, rows, links, counts)
        if tcp_flags & _FIN:
            st.fin = end
        if st.fin == st.next and st.state != CLOSED:
            st.next += 1
            st.state = CLOSED
    return len(tcp), DONE


@kernel(types.void(_STREAMS, _BYTES, _ROWS, _LINKS, _HELD, _BYTES, i8, _COUNTS))
def end_all(streams, header, rows, links, held, held_data, width, counts):
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


@kernel(types.void(_STREAMS, _ROWS, _LINKS))
def settle(streams, rows, links):
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
