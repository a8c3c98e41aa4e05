"""RoCE packets of one block to messages, one pass.

In: PACKET columns and sparse headers. Out: MESSAGE rows, FLOW counters, the state of open messages.
InfiniBand volume 1, chapter 9 (opcodes, PSN, RETH, AETH); annex A17 for CNP.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import (
    from_dtype,
    i4,
    i8,
    inlined,
    inner,
    kernel,
    prefetch,
    prefetch_row,
    u1,
    u2,
    u4,
)
from dpuflow.kernels.acks import LOG, PEER, ask_again, on_ack
from dpuflow.kernels.datagrams import datagram
from dpuflow.kernels.grants import CTS_MAX, CTS_UNIT, SAMPLED, keep_words, sample_of
from dpuflow.kernels.lanes import (
    FULL,
    GAP,
    GRANT,
    HAS_FIRST,
    HAS_LAST,
    LANE,
    LINK,
    MADS,
    PSNS,
    RIPE,
    SENDS,
    SIZED,
    START,
    STARTS_BEFORE,
    WIRE_READ,
    WIRE_SEND,
    WIRE_SEND_IMM,
    WIRE_WRITE,
    WIRE_WRITE_IMM,
    add_hole,
    begins_earlier,
    close_message,
    count_rest,
    fill_hole,
    give_up,
    open_message,
    repeat,
    signed24,
)
from dpuflow.kernels.mending import late_request, mend
from dpuflow.schema import rows as schema
from dpuflow.wire.headers import (
    FIRST,
    LAST,
    ONLY,
    OP_ACK,
    OP_ATOMIC,
    OP_ATOMIC_ACK,
    OP_ATOMIC_WRITE,
    OP_CNP,
    OP_READ_REQUEST,
    OP_READ_RESPONSE,
    OP_SEND,
    OP_WRITE,
    SYNDROME_ACK,
    SYNDROME_NAK,
    SYNDROME_RNR,
)

NONE32 = 0xFFFFFFFF
ROCE_V2, ROCE_V1 = 1, 2  # Kind
WIRE_UNKNOWN, WIRE_ATOMIC = 0, 5  # Wire
CE = 3  # ECN field: congestion experienced (RFC 3168)

# An opcode's entry in the table: operation in bits 0 to 3, place in bits 4 to 6, then:
PLACE_SHIFT = 4
HAS_IMM, DATAGRAM = 1 << 8, 1 << 9

WRITE_MIDDLE = 7  # opcode: most packets
ACKNOWLEDGE = 17  # opcode: two packets a message
FLOW_BYTES = 2 * LANE.itemsize  # two lanes
AHEAD = 10  # packets: their flows are asked for from memory while these are worked on,
NEAR = 5  # and then the flows that they acknowledge
SMALLEST_MTU = 256
CM_QP = 1


@inlined
def wire_of(operation, imm):  # type: ignore[no-untyped-def]
    """Wire of a SEND or WRITE."""
    if operation == OP_SEND:
        return WIRE_SEND_IMM if imm else WIRE_SEND
    if operation == OP_WRITE:
        return WIRE_WRITE_IMM if imm else WIRE_WRITE
    if operation in (OP_READ_RESPONSE, OP_READ_REQUEST):
        return WIRE_READ
    if operation in (OP_ATOMIC, OP_ATOMIC_WRITE):
        return WIRE_ATOMIC
    return WIRE_UNKNOWN


@inlined
def same_message(open_wire, wire):  # type: ignore[no-untyped-def]
    """Whether a packet of ``wire`` may go on one of ``open_wire``; only its end tells of an immediate."""
    if wire == WIRE_WRITE_IMM:
        wire = WIRE_WRITE
    elif wire == WIRE_SEND_IMM:
        wire = WIRE_SEND
    return open_wire == wire


@inlined
def read_span(lanes, peers, flow, length):  # type: ignore[no-untyped-def]
    """PSNs that the answer to a READ takes; 0 while the MTU is not known."""
    mtu = np.int64(lanes[2 * flow].mtu)
    other = np.int64(peers[flow].peer)
    if mtu == 0 and other >= 0:
        mtu = np.int64(lanes[2 * other + 1].mtu)
    if mtu == 0:
        return 0
    return max(1, (length + mtu - 1) // mtu)


@inlined
def may_be_entry(operation, place, payload, imm, captured):  # type: ignore[no-untyped-def]
    """Whether a packet may hold NCCL's clear-to-send entries, and enough of it was captured to tell."""
    small = 0 < payload <= CTS_MAX and payload % CTS_UNIT == 0
    return operation == OP_WRITE and place == ONLY and small and imm < 0 and captured >= 12


@inlined
def ask_for(rows, row):  # type: ignore[no-untyped-def]
    """Have the first line of a row fetched into the cache."""
    prefetch_row(rows, row)  # type: ignore[call-arg]


@inner
def first_of(headers, packet):  # type: ignore[no-untyped-def]
    """The first sparse header of ``packet`` or a later one."""
    low, high = np.int64(0), np.int64(len(headers))
    while low < high:
        middle = (low + high) // 2
        if headers[middle].packet < packet:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(
    i8(
        i8,
        u4[::1],
        i8[::1],
        u4[::1],
        u4[::1],
        u4[::1],
        u4[::1],
        u4[::1],
        u2[::1],
        u1[::1],
        u1[::1],
        u1[::1],
        u1[::1],
        u1[::1],
        from_dtype(schema.RETH.dtype)[::1],
        from_dtype(schema.AETH.dtype)[::1],
        from_dtype(schema.IMM.dtype)[::1],
        from_dtype(schema.DETH.dtype)[::1],
        from_dtype(schema.ATOMIC.dtype)[::1],
        i8[::1],
        from_dtype(schema.FLOW.dtype)[::1],
        from_dtype(LANE)[::1],
        u1[::1],
        i8[:, :, ::1],
        from_dtype(PEER)[::1],
        i4[::1],
        i4[::1],
        i4[::1],
        from_dtype(LOG)[::1],
        from_dtype(schema.MESSAGE.dtype)[::1],
        from_dtype(LINK)[::1],
        u4[:, ::1],
        i8[::1],
        i8[::1],
    )
)
def scan(  # type: ignore[no-untyped-def]
    n,
    frames,
    times,
    flow_of,
    payloads,
    data_at,
    dest_qp,
    psns,
    data_len,
    opcodes,
    flag_bits,
    tos,
    kinds,
    data,
    reth,
    aeth,
    imms,
    deth,
    atomic,
    table,
    flows,
    lanes,
    lane_bytes,
    holes,
    peers,
    members,
    conflicts,
    echoes,
    log,
    rows,
    links,
    words,
    mads,
    counts,
):
    """Take in packets ``counts[START]`` to ``n`` of a block; returns where it stopped.

    It stops early after an ACK that makes ``counts[RIPE]`` (flow + 1) worth pairing, after a datagram
    to QP 1, whose packet and message row are then in ``mads``, and where ``counts[FULL]`` asks for room
    for more holes. ``counts`` says how far each output is filled; ``lane_bytes`` are the memory of
    ``lanes``. The caller provides room: two rows of ``rows`` and ``links`` and one of ``log`` and ``words``
    per packet, and lanes for each flow.
    """
    start = counts[START]
    i_reth, i_aeth, i_imm = first_of(reth, start), first_of(aeth, start), first_of(imms, start)
    i_deth, i_atomic = first_of(deth, start), first_of(atomic, start)
    for i in range(start, n):
        # Unsigned: an index that might be negative costs three moves in each of a dozen columns.
        k = np.uint64(i)
        if i + AHEAD < n:
            coming = np.uint64(flow_of[k + np.uint64(AHEAD)])
            if opcodes[k + np.uint64(AHEAD)] != WRITE_MIDDLE:
                ask_for(flows, coming)
                ask_for(peers, coming)
            ask_for(lanes, 2 * coming)
            # What another protocol's packet has in its column of opcodes means nothing.
            coming = np.uint64(flow_of[k + np.uint64(NEAR)])
            if opcodes[k + np.uint64(NEAR)] == ACKNOWLEDGE and coming < np.uint64(peers.shape[0]):
                asker = np.int64(peers[coming].peer)
                prefetch(lane_bytes, FLOW_BYTES * asker)
                prefetch(lane_bytes, FLOW_BYTES * asker + 64)
        kind = kinds[k]
        if flow_of[k] == NONE32 or (kind != ROCE_V2 and kind != ROCE_V1):
            continue
        code = table[np.uint64(opcodes[k])]
        time_ns = times[k]
        wire_psn = np.int64(psns[k])
        if code == OP_WRITE:  # most packets: a WRITE's MIDDLE that goes on as expected
            middle = 2 * np.uint64(flow_of[k])
            top = lanes[middle].top
            if top < lanes[middle].until and wire_psn == top & (PSNS - 1):
                lanes[middle].top = top + 1
                lanes[middle].packets += 1
                lanes[middle].more_packets += 1
                lanes[middle].more_bytes += np.int64(payloads[k])
                lanes[middle].last_ns = time_ns
                lanes[middle].last_frame = frames[k]
                if tos[k] & 3 == CE:
                    lanes[middle].ecn += 1
                    flows[np.uint64(flow_of[k])].ecn_marked += 1
                continue

        if counts[FULL] > 0:
            return i
        flow = np.int64(flow_of[k])
        operation = code & 15
        place = (code >> PLACE_SHIFT) & 7
        if operation == OP_SEND:
            counts[SENDS] += 1
        frame = np.int64(frames[k])
        payload = np.int64(payloads[k])
        ce = 1 if tos[k] & 3 == CE else 0
        if flows[flow].packets == 0:
            flows[flow].first_ns = time_ns
        count_rest(lanes, 2 * flow, flows, flow)
        flows[flow].packets += 1
        flows[flow].last_ns = time_ns
        flows[flow].bytes += np.uint64(payload)
        if ce:
            flows[flow].ecn_marked += 1

        if operation in (OP_ACK, OP_ATOMIC_ACK):
            while i_aeth < len(aeth) and aeth[i_aeth].packet < i:
                i_aeth += 1
            answer = SYNDROME_ACK
            if i_aeth < len(aeth) and aeth[i_aeth].packet == i:
                answer = (np.int64(aeth[i_aeth].syndrome) >> 5) & 3
            elif operation == OP_ACK:
                continue  # beyond the snap length: it may be a NAK
            covered = wire_psn
            if answer == SYNDROME_NAK:
                flows[flow].nak += 1
                covered = (wire_psn - 1) & (PSNS - 1)  # it asks for this one again
            elif answer == SYNDROME_RNR:
                flows[flow].rnr += 1
                covered = (wire_psn - 1) & (PSNS - 1)
            on_ack(
                lanes, holes, rows, links, flows, peers, members, conflicts, echoes, log, counts,
                flow, covered, time_ns, answer == SYNDROME_ACK,
            )  # fmt: skip
            if answer in (SYNDROME_NAK, SYNDROME_RNR) and peers[flow].peer >= 0:
                ask_again(lanes, 2 * np.int64(peers[flow].peer), wire_psn)
            if counts[RIPE] != 0:
                return i + 1
            continue
        if operation == OP_CNP:
            slowed = np.int64(peers[flow].peer)
            flows[slowed if slowed >= 0 else flow].cnp += 1
            continue

        imm = np.int64(-1)
        if code & HAS_IMM:
            while i_imm < len(imms) and imms[i_imm].packet < i:
                i_imm += 1
            if i_imm < len(imms) and imms[i_imm].packet == i:
                imm = np.int64(imms[i_imm].value)
        if code & DATAGRAM:
            while i_deth < len(deth) and deth[i_deth].packet < i:
                i_deth += 1
            src_qp = np.int64(0)
            if i_deth < len(deth) and deth[i_deth].packet == i:
                src_qp = np.int64(deth[i_deth].src_qp)
            cm = dest_qp[i] == CM_QP
            row = datagram(
                peers, flow, wire_psn, src_qp, cm, payload, imm, ce, time_ns, frame,
                rows, links, flows, counts,
            )  # fmt: skip
            if cm and row >= 0:
                mads[0] = i
                mads[1] = row
                counts[MADS] = 1
                return i + 1
            continue
        if place == 0 and operation == 0:
            continue

        length = np.int64(-1)
        va, rkey = np.uint64(0), np.uint32(0)
        starts_write = place & FIRST != 0 and (operation in (OP_WRITE, OP_ATOMIC_WRITE))
        if starts_write or operation == OP_READ_REQUEST:
            while i_reth < len(reth) and reth[i_reth].packet < i:
                i_reth += 1
            if i_reth < len(reth) and reth[i_reth].packet == i:
                length = np.int64(reth[i_reth].dma_len)
                va, rkey = reth[i_reth].va, reth[i_reth].rkey
        elif operation == OP_ATOMIC:
            length = np.int64(8)
            while i_atomic < len(atomic) and atomic[i_atomic].packet < i:
                i_atomic += 1
            if i_atomic < len(atomic) and atomic[i_atomic].packet == i:
                va, rkey = atomic[i_atomic].va, atomic[i_atomic].rkey
        wire = wire_of(operation, code & HAS_IMM != 0)

        lane = 2 * flow
        if operation == OP_READ_RESPONSE:
            lane += 1
            if place & ONLY:  # a MIDDLE acknowledges nothing that its FIRST did not
                covered = wire_psn if place & LAST else (wire_psn - 1) & (PSNS - 1)
                on_ack(
                    lanes, holes, rows, links, flows, peers, members, conflicts, echoes, log, counts,
                    flow, covered, time_ns, place & LAST != 0,
                )  # fmt: skip

        top = lanes[lane].top
        if top < 0:
            top = wire_psn + PSNS
            lanes[lane].start = top
        ahead = signed24(wire_psn - top)
        psn = top + ahead
        began = lanes[lane].top < 0
        if ahead < 0:
            late = psn >= lanes[lane].start and fill_hole(lanes, lane, holes, psn, flows, flow, counts)
            if late or begins_earlier(lanes, lane, holes, psn, flows, flow, counts):
                flows[flow].out_of_order += 1
                sample = np.uint32(0)
                if operation == OP_WRITE and place & FIRST and data_len[k] >= SAMPLED:
                    sample = sample_of(data, np.int64(data_at[k]))
                row = mend(
                    lanes, lane, holes, flow, psn, place, wire, payload, length, np.int64(va), rkey, sample,
                    imm, ce, time_ns, frame, rows, links, flows, counts,
                )  # fmt: skip
                if row >= 0 and operation == OP_READ_REQUEST:
                    late_request(lanes, lane, holes, rows, row, read_span(lanes, peers, flow, length), length)
                elif row >= 0 and may_be_entry(operation, place, payload, imm, data_len[k]):
                    keep_words(data, np.int64(data_at[k]), np.int64(data_len[k]), words, counts, row)
            else:
                repeat(lanes, lane, flow, psn, time_ns, frame, rows, links, flows, counts)
                if operation == OP_READ_REQUEST and peers[flow].peer >= 0:
                    ask_again(lanes, 2 * np.int64(peers[flow].peer) + 1, wire_psn)
            continue
        if ahead > 0:
            low = top
            if lane & 1:
                if place & FIRST and lanes[lane].open == 0:
                    low = psn  # other operations took the PSNs between two answers
            else:
                if lanes[lane].soft > 0:
                    low = min(top + lanes[lane].soft, psn)
                    tail = np.int64(lanes[lane].tail)
                    read = tail >= 0 and rows[tail].wire == WIRE_READ
                    if read and np.int64(rows[tail].seq_end) == top:
                        rows[tail].seq_end = low
            add_hole(lanes, lane, holes, low, psn, flows, flow, counts)
        lanes[lane].soft = 0

        if place & FIRST:
            if lanes[lane].open:
                if lane & 1 and ahead == 0:
                    place &= LAST  # a READ asked for again from here: the answer goes on
                else:
                    give_up(lanes, lane, flow, psn, rows, links, flows, counts)
        elif lanes[lane].open:
            overrun = lanes[lane].expected > 0 and psn >= lanes[lane].seq + lanes[lane].expected
            if overrun or not same_message(lanes[lane].wire, wire):
                give_up(lanes, lane, flow, psn, rows, links, flows, counts)
        if lanes[lane].open == 0:
            if place & FIRST:
                open_message(lanes, lane, psn, time_ns, frame, wire, HAS_FIRST, 0)
                if operation == OP_WRITE and data_len[k] >= SAMPLED:
                    lanes[lane].sample = sample_of(data, np.int64(data_at[k]))
                if length >= 0:
                    lanes[lane].bytes = length
                    lanes[lane].va = np.int64(va)
                    lanes[lane].rkey = rkey
                    lanes[lane].status = HAS_FIRST | SIZED
                if place & LAST == 0 and payload > 0:
                    lanes[lane].mtu = payload
                    if length >= 0:
                        lanes[lane].expected = (length + payload - 1) // payload
                        if wire == WIRE_WRITE:
                            lanes[lane].until = psn + lanes[lane].expected
            else:
                open_message(lanes, lane, psn, time_ns, frame, wire, 0, STARTS_BEFORE if began else GAP)
        lanes[lane].packets += 1
        lanes[lane].last_ns = time_ns
        lanes[lane].last_frame = frame
        lanes[lane].ecn += ce
        if lanes[lane].status & SIZED == 0:
            lanes[lane].bytes += payload
        top = psn + 1
        if place & LAST:
            lanes[lane].status |= HAS_LAST
            lanes[lane].wire = wire
            end = top
            if operation == OP_READ_REQUEST:
                span = read_span(lanes, peers, flow, length)
                end = psn + max(span, 1)
                lanes[lane].bytes = 0
                if span == 0:
                    lanes[lane].soft = max(1, (length + SMALLEST_MTU - 1) // SMALLEST_MTU) - 1
                top = end
            row = close_message(lanes, lane, flow, end, rows, links, flows, counts)
            if imm >= 0:
                rows[row].tag = imm
            if operation == OP_READ_REQUEST:
                rows[row].role = GRANT
                rows[row].announces = max(length, 0)
                rows[row].flags = 0
            elif may_be_entry(operation, place, payload, imm, data_len[k]):
                keep_words(data, np.int64(data_at[k]), np.int64(data_len[k]), words, counts, row)
        lanes[lane].top = top
        if lane & 1 and counts[RIPE] != 0:
            return i + 1
    return n
