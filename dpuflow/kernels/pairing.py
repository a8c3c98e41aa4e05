"""Which of the flows between two endpoints are each other's opposites, told from what their ACKs said.

In: flows by direction, and for each its candidates' scores. Out: pairs, and what told them.
InfiniBand volume 1, 9.7.5 (ACK).
"""

from __future__ import annotations

import math

import numpy as np

from dpuflow.kernels._jit import from_dtype, i4, i8, inlined, inner, kernel, u1, void
from dpuflow.kernels.acks import PEER
from dpuflow.kernels.intern import hash_of
from dpuflow.schema.rows import FLOW

ENOUGH_ACKS = 8  # before a capture's end, fewer decide nothing
SIGMAS = 3  # standard deviations by which the true one contradicts less than others
BY_ACKS, BY_ONLY, BY_PORT = 3, 4, 5  # Pairing

OPEN, FITS, PORT = 1, 2, 4  # of a cell, a pair of flows: not contradicted, echoed, the kernel's port
START, END, ENDS, OPPOSITE, WAY = range(5)  # columns of a direction
FLOWS, PLACES, LEAST, RIVALS, CLAIMS, TAKEN, LINES = range(7)  # lines of ``ours`` and ``theirs``


@inner
def slot_of(slots, runs, ends):  # type: ignore[no-untyped-def]
    """The slot of a direction, or the empty one where it belongs."""
    at = hash_of(ends, np.int64(0)) & (len(slots) - 1)
    while slots[at] >= 0 and runs[slots[at], ENDS] != ends:
        at = (at + 1) & (len(slots) - 1)
    return at


@kernel(i8(i4[::1], i8[:, ::1], i8))
def way_of(slots, runs, ends):  # type: ignore[no-untyped-def]
    """The direction between two endpoints, -1 if there is none."""
    return np.int64(slots[slot_of(slots, runs, ends)])


@kernel(void(i4[::1], i8[:, ::1]))
def refill(slots, runs):  # type: ignore[no-untyped-def]
    """Put all directions into the empty ``slots``, a power of two."""
    for way in range(len(runs)):
        slots[slot_of(slots, runs, runs[way, ENDS])] = way


@kernel(i8(from_dtype(FLOW.dtype)[::1], i8[::1], i4[::1], i8[:, ::1], i8, i8[::1]))
def enter(flows, rows, slots, runs, count, ways):  # type: ignore[no-untyped-def]
    """The direction of each flow of ``rows``; new ones are added to ``count``, returned, as flows come."""
    for i in range(len(rows)):
        src, dst = np.int64(flows[rows[i]].src), np.int64(flows[rows[i]].dst)
        at = slot_of(slots, runs, src << 32 | dst)
        if slots[at] < 0:
            slots[at] = count
            runs[count, ENDS] = src << 32 | dst
            other = np.int64(slots[slot_of(slots, runs, dst << 32 | src)])
            runs[count, OPPOSITE] = other
            if other >= 0:
                runs[other, OPPOSITE] = count
            count += 1
        ways[i] = slots[at]
    return count


@inlined
def said(scores, peers, a, place_a, b, place_b):  # type: ignore[no-untyped-def]
    """Scores of two flows for one another; ``place_a``: a's place in its direction."""
    total = np.int64(0)
    if peers[a].candidates_end > peers[a].candidates:
        total += scores[peers[a].scores + place_b]
    if peers[b].candidates_end > peers[b].candidates:
        total += scores[peers[b].scores + place_a]
    return total


@inlined
def udp_port(qp, other_qp):  # type: ignore[no-untyped-def]
    """The kernel's UDP source port for a connection with flow label 0 (rdma_flow_label_to_udp_sport)."""
    v = qp * other_qp
    v ^= v >> 20
    v ^= v >> 40
    label = v & 0xFFFFF
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14))


@inner
def gather(members, start, end, peers, lines):  # type: ignore[no-untyped-def]
    """Enter a direction's flows that have no peer yet, with their places; returns how many."""
    n = 0
    for k in range(start, end):
        flow = np.int64(members[k])
        if peers[flow].peer < 0:
            lines[FLOWS, n], lines[PLACES, n] = flow, k - start
            lines[LEAST, n], lines[TAKEN, n] = np.int64(1) << 40, 0
            n += 1
    return n


@inner
def compare(conflicts, echoes, peers, flows, last, cells, ours, n, theirs, m):  # type: ignore[no-untyped-def]
    """Say of each pair whether it is contradicted too often, fits, or has the kernel's source port.

    A capture that begins in mid traffic, or lost packets, contradict the true one now and then. Stamps that
    are late may put ACKs before what they acknowledge, as often as they contradict the best for either flow.
    """
    for i in range(n):
        for j in range(m):
            a, b = ours[FLOWS, i], theirs[FLOWS, j]
            contradicted = said(conflicts, peers, a, ours[PLACES, i], b, theirs[PLACES, j])
            ours[LEAST, i] = min(ours[LEAST, i], contradicted)
            theirs[LEAST, j] = min(theirs[LEAST, j], contradicted)
    for i in range(n):
        for j in range(m):
            a, b = ours[FLOWS, i], theirs[FLOWS, j]
            acks = np.int64(peers[a].acks) + np.int64(peers[b].acks)
            least = min(ours[LEAST, i], theirs[LEAST, j])
            chance = np.int64(np.float64(least) + SIGMAS * math.sqrt(np.float64(least)))
            chance = min(max(chance, acks // 16), acks // 2)
            cell = 0
            contradicted = said(conflicts, peers, a, ours[PLACES, i], b, theirs[PLACES, j])
            if contradicted <= max(chance, 0 if last else 1):
                cell |= OPEN
            echoed = said(echoes, peers, a, ours[PLACES, i], b, theirs[PLACES, j])
            if cell and acks >= (1 if last else ENOUGH_ACKS) and 2 * echoed >= acks:
                cell |= FITS
            if cell and (acks >= 2 or last) and flows[a].sport == flows[b].sport:
                port = udp_port(np.int64(flows[a].dest_qp), np.int64(flows[b].dest_qp))
                if port == np.int64(flows[a].sport):
                    cell |= PORT
            cells[i * m + j] = cell


@inlined
def claims(cell, fits, mine, i, other, j):  # type: ignore[no-untyped-def]
    """Whether a pair fits and every rival of one of the two is excluded."""
    free = mine[TAKEN, i] == 0 and other[TAKEN, j] == 0
    return free and cell & fits != 0 and (mine[RIVALS, i] == 1 or other[RIVALS, j] == 1)


@inlined
def pair(peers, flows, a, b, how, found, count):  # type: ignore[no-untyped-def]
    """Set both flows' opposites and what told them; returns how many pairs there are then."""
    peers[a].peer, peers[b].peer = b, a
    flows[a].peer, flows[b].peer = b, a
    flows[a].pairing = flows[b].pairing = how
    found[count, 0], found[count, 1] = a, b
    return count + 1


@inner
def clear_cut(  # type: ignore[no-untyped-def]
    cells, left, fits, peers, flows, ours, n, theirs, m, found, count, how
):
    """Add pairs that fit where every rival of one of the two is excluded; returns how many there are then.

    A pair found excludes both from all others, which may leave another with a single one.
    """
    before = np.int64(-1)
    while before < count:
        before = count
        for i in range(n):
            ours[RIVALS, i] = ours[CLAIMS, i] = 0
        for j in range(m):
            theirs[RIVALS, j] = theirs[CLAIMS, j] = 0
        for i in range(n):
            for j in range(m):
                if ours[TAKEN, i] == 0 and theirs[TAKEN, j] == 0 and cells[i * m + j] & left:
                    ours[RIVALS, i] += 1
                    theirs[RIVALS, j] += 1
        for i in range(n):
            for j in range(m):
                if claims(cells[i * m + j], fits, ours, i, theirs, j):
                    ours[CLAIMS, i] += 1
                    theirs[CLAIMS, j] += 1
        for i in range(n):
            for j in range(m):
                alone = ours[CLAIMS, i] == 1 and theirs[CLAIMS, j] == 1  # two claims on one: neither
                if alone and claims(cells[i * m + j], fits, ours, i, theirs, j):
                    count = pair(peers, flows, ours[FLOWS, i], theirs[FLOWS, j], how, found, count)
                    ours[TAKEN, i] = theirs[TAKEN, j] = 1
    return count


@inner
def the_only(cells, peers, flows, ours, n, theirs, m, found, count):  # type: ignore[no-untyped-def]
    """Add the two flows that alone are left, if nothing contradicts them."""
    a = b = np.int64(-1)
    for i in range(n):
        if ours[TAKEN, i] == 0:
            a = i if a == -1 else np.int64(-2)
    for j in range(m):
        if theirs[TAKEN, j] == 0:
            b = j if b == -1 else np.int64(-2)
    if a >= 0 and b >= 0 and cells[a * m + b] & OPEN:
        count = pair(peers, flows, ours[FLOWS, a], theirs[FLOWS, b], BY_ONLY, found, count)
    return count


@kernel(
    i8(
        i8[:, ::1],
        i8[:, ::1],
        i4[::1],
        i4[::1],
        i4[::1],
        from_dtype(PEER)[::1],
        from_dtype(FLOW.dtype)[::1],
        i8,
        u1[::1],
        i8[:, ::1],
        i8[:, ::1],
        i8[:, ::1],
    )
)
def decide(  # type: ignore[no-untyped-def]
    sides, runs, members, conflicts, echoes, peers, flows, last, cells, ours, theirs, found
):
    """Pair flows of ``sides``, two directions each: FLOW.peer, FLOW.pairing, PEER.peer, and ``found``.

    ``runs``: where each direction's flows lie in ``members``. ``last``: at the capture's end, when a few ACKs
    or being the only candidate must do. ``cells``, ``ours`` and ``theirs`` are room to work in.
    """
    count = np.int64(0)
    for k in range(sides.shape[0]):
        way, back = sides[k, 0], sides[k, 1]
        n = gather(members, runs[way, START], runs[way, END], peers, ours)
        m = gather(members, runs[back, START], runs[back, END], peers, theirs)
        if n == 0 or m == 0:
            continue
        compare(conflicts, echoes, peers, flows, last, cells, ours, n, theirs, m)
        count = clear_cut(cells, OPEN, FITS, peers, flows, ours, n, theirs, m, found, count, BY_ACKS)
        count = clear_cut(cells, PORT, PORT, peers, flows, ours, n, theirs, m, found, count, BY_PORT)
        if last and way != back:
            count = the_only(cells, peers, flows, ours, n, theirs, m, found, count)
    return count
