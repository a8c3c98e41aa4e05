"""Flows and endpoints: keys to row numbers, in order of first appearance, by open addressing.

A flow's slot is one cache line: two key words of 64 bits (the second -1 where it is empty), packets
(64 bits), flow, src and dst (32 bits each). The key of IPv4 packets is both addresses as they lie in
the header, so that the usual packet needs a single look-up; others look up their endpoints first.
Tables never fill: the caller keeps them at most half full (``has_room``).
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inner, le64, put32, put64
from dpuflow.kernels.columns import S_ENDPOINTS, S_FLOWS

SLOT_BITS = 6  # a slot is 64 bytes
K1 = 0
K2 = 8
SLOT_PACKETS = 16
SLOT_FLOW = 24
SLOT_SRC = 28
SLOT_DST = 32

_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)


@inner
def hash_of(first, second):  # type: ignore[no-untyped-def]
    """32 well mixed bits of two words."""
    h = np.uint64(first) + np.uint64(second) * _B
    h ^= h >> _HALF
    return np.int64((h * _A) >> _HALF)


@inner
def find_slot(slots, k1, k2):  # type: ignore[no-untyped-def]
    """Offset of the slot that holds the key, or of the empty one where it belongs."""
    mask = len(slots) - 1
    at = (hash_of(k1, k2) << SLOT_BITS) & mask
    while le64(slots, at + K2) != -1 and (le64(slots, at + K1) != k1 or le64(slots, at + K2) != k2):
        at = (at + (1 << SLOT_BITS)) & mask
    return at


@inner
def has_room(s, flows, endpoints, slots):  # type: ignore[no-untyped-def]
    """Whether one more flow between two new endpoints fits."""
    return (
        s[S_FLOWS] < len(flows)
        and s[S_ENDPOINTS] + 2 <= len(endpoints)
        and 2 * (s[S_FLOWS] + 1) << SLOT_BITS <= len(slots)
    )


@inner
def endpoint_of(s, endpoints, index, hi, lo, mac):  # type: ignore[no-untyped-def]
    """The row of an address (two halves, bit patterns in int64), added if new."""
    mask = len(index) - 1
    high, low = np.uint64(hi), np.uint64(lo)
    at = hash_of(hi, lo) & mask
    while index[at] >= 0:
        row = np.int64(index[at])
        if endpoints[row].addr_lo == low and endpoints[row].addr_hi == high:
            return row
        at = (at + 1) & mask
    row = s[S_ENDPOINTS]
    s[S_ENDPOINTS] = row + 1
    index[at] = row
    endpoints[row].addr_hi = high
    endpoints[row].addr_lo = low
    endpoints[row].mac = np.uint64(mac)
    return row


@inner
def new_flow(s, slots, at, flows, k1, k2, src, dst, dest_qp, sport, dport, transport):  # type: ignore[no-untyped-def]
    """Fill the empty slot ``at`` and the next FLOW row."""
    row = s[S_FLOWS]
    s[S_FLOWS] = row + 1
    put64(slots, at + K1, k1)
    put64(slots, at + K2, k2)
    put64(slots, at + SLOT_PACKETS, 0)
    put32(slots, at + SLOT_FLOW, row)
    put32(slots, at + SLOT_SRC, src)
    put32(slots, at + SLOT_DST, dst)
    flows[row].src = src
    flows[row].dst = dst
    flows[row].dest_qp = dest_qp
    flows[row].sport = sport
    flows[row].dport = dport
    flows[row].transport = transport
