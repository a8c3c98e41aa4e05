"""Flows and endpoints: keys to row numbers, in order of first appearance, by open addressing.

A flow's slot is 32 bytes, half a cache line, which is all that the usual packet looks at: the first key
word; tag (3 bits), flow (29) and second key word (32); source and destination; packets. The tag tells
what the key is made of; an empty slot has tag 7. The key of IPv4 packets is both addresses as they lie
in the header, so that the usual packet needs a single look-up; others look up their endpoints first.
``ends`` has 16 bytes a flow: source, destination, and packets, those counted in the slot left out;
``keys`` its two key words. Tables never fill: see ``has_room``.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import inlined, inner, le64, put32, put64
from dpuflow.kernels.columns import DST, S_ENDPOINTS, S_FLOWS, SRC

SLOT_BITS = 5  # a slot is 32 bytes
SLOT_FLOW = 8
SLOT_ENDS = 16
SLOT_PACKETS = 24
MAX_FLOWS = (1 << 29) - 1
TAG_SHIFT = 61
TCP_TAG = 1  # bits of the tag
IPV6_TAG = 2
EMPTY = -1

ENDS_BITS = 4
END_SRC = 0
END_DST = 4
END_PACKETS = 8

_KEY = -1 ^ (MAX_FLOWS << 32)
_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)


@inlined
def hash_of(first, second):  # type: ignore[no-untyped-def]
    """32 well mixed bits of two words, the bits of the second that may hold a flow left out."""
    h = (np.uint64(first) + np.uint64(second & _KEY) * _B) & _WORD
    h ^= h >> _HALF
    return np.int64(((h * _A) & _WORD) >> _HALF)


@inlined
def holds(slots, at, k1, k2):  # type: ignore[no-untyped-def]
    """Whether the slot at offset ``at`` holds the key; ``k2`` has the tag in its place."""
    return le64(slots, at) == k1 and (le64(slots, at + SLOT_FLOW) ^ k2) & _KEY == 0


@inlined
def flow_in(slots, at):  # type: ignore[no-untyped-def]
    """The flow of a slot."""
    return (le64(slots, at + SLOT_FLOW) >> 32) & MAX_FLOWS


@inner
def find_slot(slots, k1, k2):  # type: ignore[no-untyped-def]
    """Offset of the slot that holds the key, or of the empty one where it belongs."""
    mask = len(slots) - 1
    at = (hash_of(k1, k2) << SLOT_BITS) & mask
    while le64(slots, at + SLOT_FLOW) != EMPTY and not holds(slots, at, k1, k2):
        at = (at + (1 << SLOT_BITS)) & mask
    return at


@inner
def has_room(s, flows, endpoints):  # type: ignore[no-untyped-def]
    """Whether one more flow between two new endpoints fits; there are several slots a flow."""
    return s[S_FLOWS] < len(flows) and s[S_ENDPOINTS] + 2 <= len(endpoints)


@inner
def endpoint_of(s, endpoints, index, hi, lo, mac):  # type: ignore[no-untyped-def]
    """The row of an address (two halves, bit patterns in int64), added if new."""
    mask = len(index) - 1
    high, low = np.uint64(hi), np.uint64(lo)
    at = hash_of(hi, lo ^ (lo >> 32)) & mask
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


@inlined
def known_endpoint(endpoints, index, hi, lo):  # type: ignore[no-untyped-def]
    """The row of an address, -1 if it is new."""
    mask = len(index) - 1
    high, low = np.uint64(hi), np.uint64(lo)
    at = hash_of(hi, lo ^ (lo >> 32)) & mask
    row = np.int64(index[at])
    while row >= 0 and (endpoints[row].addr_lo != low or endpoints[row].addr_hi != high):
        at = (at + 1) & mask
        row = np.int64(index[at])
    return row


@inner
def new_flow(s, slots, at, flows, ends, keys, k1, k2, src, dst, dest_qp, sport, dport, transport):  # type: ignore[no-untyped-def]
    """Fill the empty slot ``at`` and the next FLOW row; returns the row."""
    row = s[S_FLOWS]
    s[S_FLOWS] = row + 1
    put64(slots, at, k1)
    put64(slots, at + SLOT_FLOW, k2 | (row << 32))
    put64(slots, at + SLOT_ENDS, src | (dst << 32))
    put64(slots, at + SLOT_PACKETS, 0)
    put32(ends, (row << ENDS_BITS) + END_SRC, src)
    put32(ends, (row << ENDS_BITS) + END_DST, dst)
    put64(ends, (row << ENDS_BITS) + END_PACKETS, 0)
    keys[row, 0] = k1
    keys[row, 1] = k2
    flows[row].src = src
    flows[row].dst = dst
    flows[row].dest_qp = dest_qp
    flows[row].sport = sport
    flows[row].dport = dport
    flows[row].transport = transport
    return row


@inlined
def counted(slots, at):  # type: ignore[no-untyped-def]
    """Count a packet of the slot's flow; its source and, in the upper half, its destination."""
    put64(slots, at + SLOT_PACKETS, le64(slots, at + SLOT_PACKETS) + 1)
    return le64(slots, at + SLOT_ENDS)


@inlined
def ends_of(ends, flow, i, block):  # type: ignore[no-untyped-def]
    """Count a packet of the flow; its source and destination to row ``i``."""
    at = flow << ENDS_BITS
    put64(ends, at + END_PACKETS, le64(ends, at + END_PACKETS) + 1)
    both = le64(ends, at + END_SRC)
    put32(block, SRC + 4 * i, both)
    put32(block, DST + 4 * i, both >> 32)
