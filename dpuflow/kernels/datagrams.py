"""Unreliable datagrams: each packet is a message."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inner
from dpuflow.kernels.lanes import HAS_FIRST, HAS_LAST, ROWS, blank

CONTROL = 4  # Role
WIRE_DATAGRAM, WIRE_CM = 7, 8  # Wire
REPEAT_NS = 100_000  # a datagram seen twice by the tap comes again within this time


@inner
def datagram(peers, flow, psn, src_qp, cm, payload, imm, ce, time_ns, frame, rows, links, flows, counts):  # type: ignore[no-untyped-def]
    """One UD packet is one message. PSNs count per source QP, which several may share this flow."""
    last = peers[flow]
    again = last.datagram_row >= 0 and last.datagram_psn == psn and last.datagram_qp == src_qp
    again = again and time_ns - last.datagram_ns < REPEAT_NS
    peers[flow].datagram_psn = psn
    peers[flow].datagram_qp = src_qp
    peers[flow].datagram_ns = time_ns
    if again:
        flows[flow].retransmitted += 1
        rows[last.datagram_row].retransmitted += 1
        return np.int64(-1)
    row = counts[ROWS]
    counts[ROWS] = row + 1
    blank(rows, row, flow, psn, psn + 1, time_ns, frame, WIRE_CM if cm else WIRE_DATAGRAM)
    rows[row].bytes = payload
    rows[row].sub = src_qp
    rows[row].tag = max(imm, 0)
    rows[row].role = CONTROL if cm else 0
    rows[row].ecn_marked = ce
    links[row].status = HAS_FIRST | HAS_LAST
    links[row].next = -1
    links[row].prev = -1
    links[row].lane = 0
    peers[flow].datagram_row = row
    flows[flow].messages += 1
    return row
