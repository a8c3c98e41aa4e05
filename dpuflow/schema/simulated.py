"""Tables of a simulated world: the simulator (``synth``) fills them, kernels (``kernels.simulated``) read.

All cells are 64-bit integers, times are ns from the start of the world. One row of MESSAGES is what a work
request put on the wire, one of BURSTS some packets of it sent in a row, one of REPLIES a single packet that
a NIC made itself; EVENTS and PACKETS are what a vantage point sees of these.
"""

from __future__ import annotations

from typing import Final

MESSAGES: Final = (
    "flow",
    "kind",  # CTS, WRITE, WRITE_IMM, SEND, ATOMIC, READ, RESPONSE, LENGTH, STREAM
    "bytes",
    "psn",  # of its first packet, not yet modulo 2^24
    "va",  # of a TCP stream: bytes before it
    "rkey",
    "value",  # immediate as on the wire, big endian; of a CTS its number from 1; of a RESPONSE its MSN; of an
    # ATOMIC what it adds
    "target",  # of a CTS: where the data shall go; of a write: what it holds, as a number
    "room",  # of a CTS: how much may come
    "key",  # of a CTS: the key for it
)
BURSTS: Final = (
    "flow",
    "message",  # row of MESSAGES
    "first",  # packet within the message
    "count",
    "tx_ns",  # start of the first packet at the sender's port
    "tx_step_ps",  # from packet to packet
    "tx_end_ns",
    "rx_ns",  # the same at the receiver's port
    "rx_step_ps",
    "rx_end_ns",  # -1: lost on the way
    "marked",  # so many of its packets carry an ECN mark, the last ones
)
REPLIES: Final = (
    "flow",  # that it answers; it travels the other way
    "kind",  # ACK, CNP, ATOMIC_ACK, SEGMENT_ACK: its ``psn`` counts bytes, its ``msn`` is the window
    "tx_ns",
    "rx_ns",  # -1: lost on the way
    "psn",
    "syndrome",
    "msn",
)
ACKS: Final = ("echo_ns", "left0", "right0", "left1", "right1", "left2", "right2")
"""Of a SEGMENT_ACK, whose ``syndrome`` is a row here: when what it answers was sent, ranges of bytes that are
there beyond a hole (0, 0: none).
"""
ENTRIES: Final = ("message", "target", "room", "key", "tag")
"""Of clear-to-send entries for several messages each, and of the sizes written behind these (``room``)."""
PAUSES: Final = ("port", "from_ns", "until_ns")
CTS, WRITE, WRITE_IMM, SEND, ATOMIC, READ, RESPONSE, LENGTH, STREAM = range(9)
ACK, CNP, ATOMIC_ACK, SEGMENT_ACK = range(9, 13)
DATA_CODE: Final = 0x100
ACK_CODE: Final = 0x101
"""What packets' ``code`` says of TCP's segments: beyond all operation codes of RoCE. So many ranges are told
by an acknowledgment as its code is beyond ACK_CODE.
"""
EVENTS: Final = (
    "start",  # ns, of the first packet at the vantage point's port
    "sent",  # ns, when it left its sender
    "step_ps",  # from packet to packet
    "end",  # ns, of the last packet
    "count",  # packets
    "first",  # packet within the message
    "row",  # of MESSAGES, of replies that of REPLIES
    "flow",
    "identity",  # of the first packet's IP header
    "marked",  # so many of its packets carry an ECN mark, the last ones
    "reply",  # 1: a row of REPLIES
    "received",  # as in PACKETS
)
PACKETS: Final = (
    "code",  # operation code; or, of TCP's segments, DATA_CODE, or ACK_CODE and so on
    "flow",
    "back",  # 1: a reply, against the flow's direction
    "received",  # 1: at its receiver's port, 0: at its sender's, 2: in the switch
    "psn",
    "payload",  # bytes
    "message",  # row of MESSAGES, -1 for replies
    "syndrome",
    "msn",
    "ask",  # the AckReq bit
    "marked",
    "identity",  # of its IP header
)
