"""Hash tables of flows and endpoints: made again at another size, and one merged into another."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels import columns as c
from dpuflow.kernels._jit import from_dtype, i4, i8, inner, kernel, le32, le64, put32, put64, u1, void
from dpuflow.kernels.intern import (
    EMPTY,
    IPV6_TAG,
    SLOT_BITS,
    TAG_SHIFT,
    endpoint_of,
    ends_of,
    find_slot,
    flow_in,
    has_room,
    hash_of,
    new_flow,
)
from dpuflow.schema.rows import ENDPOINT, FLOW, NONE32


@kernel(void(u1[::1], u1[::1]))
def refill_slots(old, new):  # type: ignore[no-untyped-def]
    """Put every flow of ``old`` into the empty slots ``new``."""
    for at in range(0, len(old), 1 << SLOT_BITS):
        if le64(old, at + 8) != EMPTY:
            to = find_slot(new, le64(old, at), le64(old, at + 8))
            put64(new, to, le64(old, at))
            for part in range(8, 1 << SLOT_BITS, 8):
                put64(new, to + part, le64(old, at + part))


@kernel(void(from_dtype(ENDPOINT.dtype)[::1], i8, i4[::1]))
def refill_index(endpoints, count, index):  # type: ignore[no-untyped-def]
    """Put the first ``count`` endpoints into the empty ``index``."""
    mask = len(index) - 1
    for row in range(count):
        low = np.int64(endpoints[row].addr_lo)
        at = hash_of(np.int64(endpoints[row].addr_hi), low ^ (low >> 32)) & mask
        while index[at] >= 0:
            at = (at + 1) & mask
        index[at] = row


_FLOWS = from_dtype(FLOW.dtype)[::1]
_ENDPOINTS = from_dtype(ENDPOINT.dtype)[::1]


@inner
def _adopt(its, its_flows, its_keys, its_endpoints, s, slots, flows, ends, keys, endpoints, index):  # type: ignore[no-untyped-def]
    """The reader's flow for a thread's one."""
    row = its_flows[its]
    a, b = its_endpoints[row.src], its_endpoints[row.dst]
    k1, k2 = its_keys[its, 0], its_keys[its, 1]
    src, dst = np.int64(0), np.int64(0)
    by_number = (k2 >> TAG_SHIFT) & IPV6_TAG
    if by_number:
        src = endpoint_of(s, endpoints, index, np.int64(a.addr_hi), np.int64(a.addr_lo), np.int64(a.mac))
        dst = endpoint_of(s, endpoints, index, np.int64(b.addr_hi), np.int64(b.addr_lo), np.int64(b.mac))
        k1 = src | (dst << 32)
    at = find_slot(slots, k1, k2)
    if le64(slots, at + 8) != EMPTY:
        return flow_in(slots, at)
    if not by_number:
        src = endpoint_of(s, endpoints, index, np.int64(a.addr_hi), np.int64(a.addr_lo), np.int64(a.mac))
        dst = endpoint_of(s, endpoints, index, np.int64(b.addr_hi), np.int64(b.addr_lo), np.int64(b.mac))
    return new_flow(
        s, slots, at, flows, ends, keys, k1, k2, src, dst, row.dest_qp, row.sport, row.dport, row.transport
    )


@kernel(
    i8(
        u1[::1], i8, i8, i8[::1], _FLOWS, i8[:, ::1], _ENDPOINTS,  # a thread's block, rows, first; its tables
        i8[::1], u1[::1], _FLOWS, u1[::1], i8[:, ::1], _ENDPOINTS, i4[::1],  # the reader's tables
    )
)  # fmt: skip
def adopt(  # type: ignore[no-untyped-def]
    block, rows, first, known, its_flows, its_keys, its_endpoints,
    s, slots, flows, ends, keys, endpoints, index,
):  # fmt: skip
    """Give a thread's rows the reader's flows and endpoints; rows done, fewer if there is no room.

    ``known`` holds the reader's flow for each of the thread's flows, -1 where it has none yet.
    """
    for i in range(first, rows):
        its = le32(block, c.FLOW + 4 * i)
        if its == NONE32:
            continue
        flow = known[its]
        if flow < 0:
            if not has_room(s, flows, endpoints):
                return i
            flow = _adopt(
                its, its_flows, its_keys, its_endpoints, s, slots, flows, ends, keys, endpoints, index
            )
            known[its] = flow
        put32(block, c.FLOW + 4 * i, flow)
        ends_of(ends, flow, i, block)
    return rows
