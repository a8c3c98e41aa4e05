"""Bytes of one TCP stream in order -> messages by their headers, or bursts where there are none.

A framing is entered, and found again when lost, only where a segment starts with a header: libraries
write header by header, and CHAIN headers, each where the one before says, settle it.

A burst is what an application wrote at once, as far as TCP shows it: it ends with a pushed segment that
is not full, for a sender with more to send fills its segments; every place sees that alike. But for
senders that are in the middle of a write, a burst is also over when the opposite side sends data, or
after a silence longer than RFC 6298 would wait for an ACK with the round trips seen from here to both
sides (``idle_limit``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpuflow.framing import GLOO_HELLO, HEADER_BYTES, NCCL_SIZE
from dpuflow.kernels import framing as fk
from dpuflow.kernels._jit import inner, le64
from dpuflow.kernels.tagging import decode_ofi, decode_ucx
from dpuflow.kernels.tcp_state import (
    BURST,
    CHAIN,
    FIRST_RTO_NS,
    FRAMED,
    FROM_SYN,
    FULL_PUSH,
    LOST,
    MAX_PIECES,
    NO_PUSH,
    PUSHED,
    ROWS,
    SMALLEST_FULL,
    WRITING,
)
from dpuflow.schema import rows as schema

_GAP = int(schema.MessageFlag.GAP)
_HIDDEN = int(schema.MessageFlag.HIDDEN)
_ENDS_AFTER = int(schema.MessageFlag.ENDS_AFTER)
_GLOO, _OB1 = int(schema.Framing.GLOO), int(schema.Framing.OB1)
_NCCL = int(schema.Framing.NCCL)
_UCX, _OFI = int(schema.Framing.UCX), int(schema.Framing.OFI)
_GRANT = int(schema.Role.GRANT)
_BURST_ROLE, _BURST_WIRE = int(schema.Role.BURST), int(schema.Wire.TCP_BURST)
_NEVER = schema.NEVER
_ALL_BITS = np.int64(-1)


@inner
def open_message(st: Any, seq: Any, time_ns: Any, frame: Any) -> Any:
    st.start, st.end, st.mask = seq, -1, 0
    st.first_ns, st.last_ns = time_ns, time_ns
    st.first_frame, st.last_frame = frame, frame
    st.packets = st.retransmitted = st.ecn = st.flags = 0


@inner
def time_round_trip(st: Any, row: Any) -> Any:
    """Let an acknowledged message count towards the smallest round trip (Karn: if sent only once)."""
    rtt = row.acked_ns - row.last_ns
    if row.retransmitted == 0 and rtt >= 0 and (st.rtt_min < 0 or rtt < st.rtt_min):
        st.rtt_min = rtt


@inner
def close_message(f: Any, st: Any, header: Any, rows: Any, links: Any, counts: Any, piece: Any) -> Any:
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
    elif st.framing == _NCCL:
        fk.decode_nccl(row, link, header, np.int64(f) * HEADER_BYTES, st.mask)
    elif st.framing == _UCX:
        decode_ucx(row, link, header, np.int64(f) * HEADER_BYTES, st.mask)
        if row.role == _GRANT:
            st.granted = row.announces
    elif st.framing == _OFI:
        decode_ofi(row, link, header, np.int64(f) * HEADER_BYTES, st.mask)
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
def give_up_trial(st: Any, rows: Any, links: Any) -> Any:
    """The framing on trial proved wrong: its messages were bytes like any other."""
    k = st.last_row
    while k != st.trial and k >= 0:
        row = rows[k]
        row.role, row.wire, row.op = _BURST_ROLE, _BURST_WIRE, 0
        if row.flags & _ENDS_AFTER:  # what its header promised never came
            row.seq_end = st.next
            row.flags &= ~_ENDS_AFTER
        row.bytes, row.announces, row.flags = row.seq_end - row.seq, 0, row.flags & ~_HIDDEN
        row.context, row.tag, row.sub = 0, 0, 0
        links[k].known, links[k].piece = 0, 0
        k = links[k].prev
    st.framing, st.chain, st.mode, st.start = 0, 0, BURST, -1


@inner
def accept_header(st: Any) -> Any:
    st.chain += 1
    st.pieces = 0
    st.mode = FRAMED


@inner
def lose_framing(st: Any, rows: Any, links: Any, plausible: Any) -> Any:
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
def idle_limit(st: Any, peer_srtt: Any, peer_rttvar: Any) -> Any:
    """Silence after which a burst is over: what RFC 6298 takes for a lost segment, both legs together."""
    limit = st.srtt + 4 * st.rttvar + peer_srtt + 4 * peer_rttvar
    return limit if limit > 0 else FIRST_RTO_NS


@inner
def find_header(st: Any, seq: Any, end: Any, data: Any, at: Any, seen: Any) -> Any:
    """Enter a framing, or the one lost before, where this segment starts with a header of it."""
    if st.barred:
        return False
    framing = fk.recognise(data, at, seen, end - seq)
    hello = 0
    if framing == 0 and st.framing == 0 and st.state == FROM_SYN and seq == st.first and seen >= GLOO_HELLO:
        # A Gloo initiator sends its rank before its first preamble.
        rest = fk.recognise(data, at + GLOO_HELLO, seen - GLOO_HELLO, end - seq - GLOO_HELLO)
        follows = end - seq == GLOO_HELLO or rest == _GLOO
        if follows and 0 <= le64(data, at) < 1 << 20:
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
def consume(
    f: Any, st: Any, peer_srtt: Any, peer_rttvar: Any, seq: Any, end: Any, data: Any, at: Any, seen: Any,
    time_ns: Any, frame: Any, ecn: Any, flags: Any, header: Any, rows: Any, links: Any, counts: Any,
) -> Any:  # fmt: skip
    """Take the bytes from ``st.next`` to ``end`` of a segment that starts at or before ``st.next``."""
    skip = st.next - seq
    pos = st.next
    at += skip
    seen = seen - skip if seen > skip else 0
    if pos < end and st.mode != FRAMED:
        visible = flags & _GAP == 0 and seen >= NCCL_SIZE
        if st.mode == BURST and st.start >= 0:
            # A burst ends at silence, and before a header.
            silent = st.push != WRITING and time_ns - st.last_ns > idle_limit(st, peer_srtt, peer_rttvar)
            if silent or (visible and not st.barred and fk.recognise(data, at, seen, end - pos) != 0):
                st.end = pos
                close_message(f, st, header, rows, links, counts, 0)
        if visible and st.start < 0 and find_header(st, pos, end, data, at, seen):
            hello_end = st.end
            open_message(st, pos, time_ns, frame)
            st.end = hello_end
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
                if n > 0:
                    st.mask |= (_ALL_BITS if n == HEADER_BYTES else (np.int64(1) << n) - 1) << begin
                if st.end < 0:
                    prefix = n if begin == 0 else 0
                    while begin > 0 and prefix < HEADER_BYTES and (st.mask >> prefix) & 1:
                        prefix += 1
                    length = fk.header_length(st.framing, header, base, prefix, st.allowed)
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
def note_push(
    f: Any, st: Any, length: Any, push: Any, header: Any, rows: Any, links: Any, counts: Any
) -> Any:
    """A segment of ``length`` bytes was taken: end the burst where the sender's write ends.

    What did not fit a socket's buffer is pushed as well, but in full segments: more may follow.
    """
    if not push:
        st.push = WRITING if st.push != NO_PUSH else NO_PUSH
        if length >= SMALLEST_FULL and (st.full == 0 or length < st.full):
            st.full = length
        return
    if st.full != 0 and length % st.full == 0:
        st.push = FULL_PUSH
        return
    st.push = PUSHED
    if st.mode == BURST and st.start >= 0:
        st.end = st.next
        close_message(f, st, header, rows, links, counts, 0)


@inner
def cut(f: Any, st: Any, header: Any, rows: Any, links: Any, counts: Any) -> Any:
    """The stream ends here: what is in progress stays unfinished."""
    if st.start < 0:
        return
    unread = st.mode == FRAMED and st.end < 0
    if st.mode != FRAMED or unread:
        st.end = st.next
    if st.mode == FRAMED:
        st.flags |= _ENDS_AFTER | (_HIDDEN if unread else 0)
    close_message(f, st, header, rows, links, counts, unread)
