"""What the TCP kernels keep: one STREAM row a flow, HELD slots, LINK rows beside the messages; limits."""

from __future__ import annotations

import numpy as np

from dpuflow.framing import NCCL_SIZE

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
        ("held_seen", "i8"),  # captured bytes of the segments held
        ("fin", "i8"),  # sequence number of the FIN, 0: none yet
        ("granted", "i8"),  # bytes that this flow last allowed the opposite one to send (UCX), 0: none
        ("allowed", "i8"),  # the opposite flow's ``granted``
        ("total_packets", "i8"),  # of the flow, and its payload as sent, repeats included
        ("total_bytes", "i8"),
        ("opened_ns", "i8"),  # first and last packet of the flow
        ("seen_ns", "i8"),
        ("total_seen", "i8"),  # captured bytes, headers included as they are at least
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
        ("total_spurious", "i4"),  # of those retransmitted, what the receiver had already
        ("unechoed", "i4"),  # of these, told by their ACKs; a D-SACK of each is still to come
        ("total_ecn", "i4"),
        ("full", "i4"),  # payload of a full segment: the smallest sent without PSH, 0: none yet
        ("state", "u1"),
        ("framing", "u1"),
        ("mode", "u1"),
        ("whole", "u1"),  # 1: its SYN was seen
        ("push", "u1"),  # whether the sender marks where its writes end
        ("closed", "u1"),  # 1: a FIN or RST was seen
        ("barred", "u1"),  # 1: it told more messages than can be kept; its bytes are bursts from there on
    ],
    align=True,
)

LINK = np.dtype(
    [
        (
            "request",
            "i8",
        ),  # ob1: the sender's request, 0: not seen; UCX, libfabric: the tag, or the receiver's
        ("fragment", "i8"),  # ob1: the receiver's fragment; UCX, libfabric: the offer or grant that it names
        ("address", "i8"),  # ob1, UCX: where the put writes; libfabric: the source rank
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
        ("push", "u1"),
    ],
    align=True,
)

# LINK.known: what of a header was seen
KNOWN_KIND = 1  # which message it is
KNOWN_MATCH = 2  # context, tag, sub
KNOWN_LENGTH = 4  # announced length, or the request it names
KNOWN_ALL = 7

# STREAM.state
NEW, MIDDLE, FROM_SYN, CLOSED = 0, 1, 2, 3
# STREAM.mode: what the bytes at ``next`` are taken for
BURST, FRAMED, LOST = 0, 1, 2

# STREAM.push: no PSH was seen yet; the last segment had one, had none, had one and was full
# (RFC 9293 section 3.9.1.2)
NO_PUSH, PUSHED, WRITING, FULL_PUSH = 0, 1, 2, 3
SMALLEST_FULL = 536  # RFC 9293 section 3.7.1: what a full segment holds at least

# ``counts[WANT]``: all done, or what to enlarge.
DONE, MORE_ROWS, MORE_SLOTS, WIDER_SLOTS = 0, 1, 2, 3

# Indices of ``counts``.
ROWS, FREE_SLOT, SLOTS_USED, WANT = 0, 1, 2, 3

REORDER = 3  # segments beyond a hole before it counts (RFC 5681's three duplicate ACKs)
MAX_HELD = 1024  # segments held per flow; beyond it the hole is given up
MAX_UNACKED = 8192  # messages of a flow that a repeated segment is looked for in
MAX_HELD_ALONE = 64  # the same where the opposite direction was never seen
MAX_WIDTH = 9216  # captured bytes of a held segment that are kept: a jumbo frame's
MAX_PIECES = 1024  # rows kept of a stretch whose framing is lost
MIN_MESSAGE = NCCL_SIZE
"""Bytes of the shortest message: a segment completes no more of them than its captured bytes can begin."""
PER_SEGMENT = 4
"""Rows beyond these that a segment may close: what was in progress, the hole before it, itself, its end."""
HEADERS = 54  # bytes of Ethernet, IPv4 and TCP
CHAIN = 3  # plausible headers, one at the end of the other, that settle a framing
FIRST_RTO_NS = 1_000_000_000  # RFC 6298 section 2.1
