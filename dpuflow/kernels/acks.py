"""Which request an ACK answers: at once where the opposite flow is known, else kept and scored.

In: response PSNs of one flow. Out: ``acked_ns`` of the opposite flow's messages, or an entry in the
log and, for each flow that might be the opposite one, whether the ACK contradicts or confirms it.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, inner, kernel, void
from dpuflow.kernels.lanes import LANE, LINK, LOGGED, RIPE, acknowledge, signed24
from dpuflow.schema.rows import FLOW, MESSAGE

OUTSTANDING = 1 << 16  # more PSNs than any sender leaves unacknowledged
LOOK_BACK = 128  # message ends compared with an ACK, from the newest back

PEER = np.dtype(
    [
        ("datagram_ns", "i8"),  # the last datagram: its time, PSN, source QP and message row
        ("scores", "i8"),  # where its scores start, one for each candidate
        ("peer", "i4"),  # the opposite flow, -1 unknown
        ("candidates", "i4"),  # where the flows of the other direction start in `members`,
        ("candidates_end", "i4"),  # and end
        ("acks", "i4"),  # ACKs scored
        ("log_head", "i4"),
        ("log_tail", "i4"),
        ("datagram_psn", "i4"),
        ("datagram_qp", "i4"),
        ("datagram_row", "i4"),
    ],
    align=True,
)
LOG = np.dtype([("time_ns", "i8"), ("psn", "u4"), ("next", "i4")], align=True)


@inner
def score(lanes, rows, links, peers, members, conflicts, echoes, flow, psn):  # type: ignore[no-untyped-def]
    """Compare one ACK with what each candidate has sent so far.

    It contradicts a candidate that has not sent this PSN yet, or sent it too long ago; it echoes one
    where the PSN is the newest one or the end of one of the newest messages.
    """
    start = np.int64(peers[flow].candidates)
    base = peers[flow].scores
    for k in range(np.int64(peers[flow].candidates_end) - start):
        other = np.int64(members[start + k])
        if peers[other].peer >= 0:
            continue
        lane = 2 * other
        top = lanes[lane].top
        back = signed24(top - 1 - psn)
        if top >= 0 and back < 0 and -1 - back < lanes[lane].soft:
            echoes[base + k] += 1  # the answer to a READ whose PSNs are not known exactly
            continue
        if top < 0 or back < 0 or back > OUTSTANDING or top - 1 - back < lanes[lane].start:
            conflicts[base + k] += 1
            continue
        end = top - back
        hit = back == 0
        row = np.int64(lanes[lane].tail)
        for _ in range(LOOK_BACK):
            if hit or row < 0 or np.int64(rows[row].seq_end) < end:
                break
            hit = np.int64(rows[row].seq_end) == end
            row = np.int64(links[row].prev)
        if hit:
            echoes[base + k] += 1


@inlined
def ask_again(lanes, lane, psn):  # type: ignore[no-untyped-def]
    """Packets of the lane from ``psn`` on must come again: its receiver said so, or READ anew from there."""
    top = lanes[lane].top
    if top >= 0:
        lanes[lane].asked = top + signed24(psn - top)


@inlined
def on_ack(  # type: ignore[no-untyped-def]
    lanes,
    holes,
    rows,
    links,
    flows,
    peers,
    members,
    conflicts,
    echoes,
    log,
    counts,
    flow,
    psn,
    time_ns,
    plain,
):
    """``flow`` carried an acknowledgment up to and including ``psn``; only ``plain`` ones are scored."""
    other = np.int64(peers[flow].peer)
    if other >= 0:
        top = lanes[2 * other].top
        if top >= 0:
            end = top + signed24(psn - (top - 1))
            acknowledge(lanes, 2 * other, holes, rows, links, flows, other, end, time_ns)
        return
    at = counts[LOGGED]
    counts[LOGGED] = at + 1
    log[at].time_ns = time_ns
    log[at].psn = psn
    log[at].next = -1
    if peers[flow].log_tail >= 0:
        log[peers[flow].log_tail].next = at
    else:
        peers[flow].log_head = at
    peers[flow].log_tail = at
    if plain:
        acks = np.int64(peers[flow].acks) + 1
        peers[flow].acks = acks
        score(lanes, rows, links, peers, members, conflicts, echoes, flow, psn)
        if acks >= 8 and acks & (acks - 1) == 0:
            counts[RIPE] = flow + 1


@inner
def apply(lanes, holes, rows, links, flows, peers, log, flow, other):  # type: ignore[no-untyped-def]
    """Apply the logged ACKs of ``flow`` to ``other``."""
    lane = 2 * other
    if lanes[lane].top < 0 or peers[flow].log_head < 0:
        return
    last = lanes[lane].acked - 1
    if last < 0:
        last = lanes[lane].start - 1
    at = np.int64(peers[flow].log_head)
    while at >= 0:
        psn = np.int64(log[at].psn)
        last = max(last, last + signed24(psn - last))
        acknowledge(lanes, lane, holes, rows, links, flows, other, last + 1, log[at].time_ns)
        at = np.int64(log[at].next)
    peers[flow].log_head = -1
    peers[flow].log_tail = -1


@kernel(
    void(
        from_dtype(LANE)[::1],
        i8[:, :, ::1],
        from_dtype(MESSAGE.dtype)[::1],
        from_dtype(LINK)[::1],
        from_dtype(FLOW.dtype)[::1],
        from_dtype(PEER)[::1],
        from_dtype(LOG)[::1],
        i8[:, ::1],
    )
)
def replay(lanes, holes, rows, links, flows, peers, log, pairs):  # type: ignore[no-untyped-def]
    """Apply the logged ACKs of flows to their opposites, now that they are known to belong together.

    CNPs were counted on the flow that carried them, and belong to the one that they slow down.
    """
    for k in range(pairs.shape[0]):
        a, b = pairs[k, 0], pairs[k, 1]
        apply(lanes, holes, rows, links, flows, peers, log, a, b)
        if a != b:
            apply(lanes, holes, rows, links, flows, peers, log, b, a)
            flows[a].cnp, flows[b].cnp = flows[b].cnp, flows[a].cnp
