"""Records of the programs' rings to pcapng packet blocks, many in one call and in the order of their times.

Each CPU has a ring of its own, a cell of one mapped array (``schema.ring.CELL_HEAD`` and what follows); a
record there is as long as what it holds. What they have no room for is in the kernel's ring buffer, Linux
kernel/bpf/ringbuf.c. There a record starts with a 32-bit length, of which bit 31 says that it is still being
written and bit 30 that it was given up; the next one follows at a multiple of 8 bytes, and the ring's pages
are mapped twice in a row, so that no record is broken. Blocks: draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

from typing import Final

from dpuflow.kernels._jit import (
    acquire32,
    acquire64,
    copy32,
    i8,
    inlined,
    inner,
    kernel,
    le32,
    le64,
    prefetch,
    put16,
    put32,
    put64,
    release64,
    u1,
)
from dpuflow.schema import ring as schema_ring

_AT: Final = {name: place[1] for name, place in (schema_ring.RING_PACKET.dtype.fields or {}).items()}
_TIME, _WIRE, _CAPTURED = _AT["time_ns"], _AT["wire_len"], _AT["captured"]
_HASH, _IFACE, _DIRECTION, _ENDS = _AT["flow_hash"], _AT["iface"], _AT["direction"], _AT["ends"]
_KIND: Final = _AT["kind"]
_DATA: Final = schema_ring.RING_PACKET.dtype.itemsize
# Two words in _move_plain: lengths; hash, interface, direction, ends and kind.
assert [_AT[name] - _WIRE for name in ("captured", "flow_hash", "iface")] == [4, 8, 12]
assert [_AT[name] - _IFACE for name in ("direction", "ends", "kind")] == [1, 2, 3]
_RUN: Final = {name: _DATA + place[1] for name, place in (schema_ring.RING_RUN.dtype.fields or {}).items()}
_FIRST, _PSN, _COUNT, _MARKED = _RUN["first_ns"], _RUN["psn"], _RUN["count"], _RUN["marked"]
_OPCODE, _BTH_AT, _IP_AT = _RUN["opcode"], _RUN["bth_at"], _RUN["ip_at"]
_RUN_DATA: Final = _DATA + schema_ring.RING_RUN.dtype.itemsize

_HEAD, _TAIL, _CELL = schema_ring.CELL_HEAD, schema_ring.CELL_TAIL, schema_ring.CELL_DATA
CELL_SLACK: Final = schema_ring.CELL_RECORD  # bytes that a cell's ring goes on behind its end

_IS_PACKET, _IS_RUN = int(schema_ring.RingKind.PACKET), int(schema_ring.RingKind.RUN)

_BUSY: Final = 1 << 31
_GIVEN_UP: Final = 1 << 30
_LENGTH: Final = _GIVEN_UP - 1
_NEVER: Final = (1 << 63) - 1

BLOCK_BYTES: Final = 44  # of an enhanced packet block with its flags, besides the packet
SLACK: Final = 64  # bytes that a copy may write beyond a packet

# -- state (int64 array) ------------------------------------------------------------------------
D_PACKETS: Final = 0
D_BYTES: Final = 1  # on the wire
D_ENDS: Final = 2  # RoCE messages that ended
D_LAST: Final = 3  # stamp of the last packet
D_FLOWS: Final = 4  # bytes of ``seen`` that are set
D_LEFT: Final = 5  # packets that may still be taken
D_MISDATED: Final = 6  # packets whose stamp could not be, and was put right
D_IFACES: Final = 8  # packets of each interface
D_SIZE: Final = D_IFACES + 256


@inlined
def write_packet(out, at, data, start, captured, wire, time, iface, direction):  # type: ignore[no-untyped-def]
    """An enhanced packet block at ``at``; where the next one goes."""
    padded = captured + 3 & ~3
    size = BLOCK_BYTES + padded
    put64(out, at, size << 32 | 6)
    put64(out, at + 8, time >> 32 << 32 | iface)
    put64(out, at + 16, captured << 32 | time & 0xFFFFFFFF)
    put32(out, at + 24, wire)
    if start + captured + 32 <= len(data):
        for k in range(0, captured, 32):
            copy32(out, at + 28 + k, data, start + k)
    else:  # at the very end of a mapping
        for k in range(captured):
            out[at + 28 + k] = data[start + k]
    put32(out, at + 28 + captured, 0)
    end = at + 28 + padded
    put64(out, end, direction << 32 | 4 << 16 | 2)
    put64(out, end + 8, size << 32)
    return at + size


@inlined
def _put_be16(out, at, value):  # type: ignore[no-untyped-def]
    put16(out, at, (value & 0xFF) << 8 | value >> 8 & 0xFF)


@inner
def write_run(out, at, data, record, last):  # type: ignore[no-untyped-def]
    """The packets of a run, headers alone, times spread evenly until ``last``; where the next block goes.

    The headers are those of a packet of the same flow. What tells its packets apart is written anew: IP (or
    GRH) and UDP lengths, ECN, and of the BTH opcode, pad, AckReq and PSN.
    """
    first = min(max(le64(data, record + _FIRST), last - 2 * schema_ring.RUN_NS), last)
    count, marked = le32(data, record + _COUNT), le32(data, record + _MARKED)
    wire, captured, psn = (
        le32(data, record + _WIRE),
        le32(data, record + _CAPTURED),
        le32(data, record + _PSN),
    )
    bth_at, ip_at = i8(data[record + _BTH_AT]), i8(data[record + _IP_AT])
    iface, direction = i8(data[record + _IFACE]), i8(data[record + _DIRECTION])
    fourth = data[record + _RUN_DATA + ip_at] >> 4 == 4
    udp = fourth or bth_at != ip_at + 40  # RoCEv1 has the BTH right behind the GRH
    for k in range(count):
        time = first + (last - first) * k // max(count - 1, 1)
        packet = at + 28
        at = write_packet(out, at, data, record + _RUN_DATA, captured, wire, time, iface, direction)
        ip, bth = packet + ip_at, packet + bth_at
        ecn = i8(out[ip + 1]) >> (0 if fourth else 4) & 3
        if k < marked:
            ecn = 3
        elif ecn == 3:
            ecn = 2  # the packet whose headers these are was marked, this one was not
        if fourth:
            _put_be16(out, ip + 2, wire - ip_at)
            out[ip + 1] = out[ip + 1] & 0xFC | ecn
        else:
            _put_be16(out, ip + 4, wire - ip_at - 40)
            out[ip + 1] = out[ip + 1] & 0xCF | ecn << 4
        if udp:
            _put_be16(out, bth - 4, wire - bth_at + 8)
        out[bth] = data[record + _OPCODE]
        out[bth + 1] = out[bth + 1] & 0x4F
        put32(out, bth + 8, 0)
        following = psn + k
        out[bth + 9] = following >> 16 & 0xFF
        _put_be16(out, bth + 10, following)
    return at


@inlined
def _move(data, record, time, out, at, room, state, seen):  # type: ignore[no-untyped-def]
    """One record, stamped ``time``, to ``out`` at ``at``, with its counts; where the next block goes, -1 if
    it does not fit."""
    captured, count, run = le32(data, record + _CAPTURED), 1, data[record + _KIND] == _IS_RUN
    if run:
        count = le32(data, record + _COUNT)
    if at + count * (BLOCK_BYTES + captured + 3) > room:
        return -1
    wire, iface = le32(data, record + _WIRE), i8(data[record + _IFACE])
    if time != le64(data, record + _TIME):
        state[D_MISDATED] += count
    if run:
        at = write_run(out, at, data, record, time)
    else:
        direction = i8(data[record + _DIRECTION])
        at = write_packet(out, at, data, record + _DATA, captured, wire, time, iface, direction)
    state[D_IFACES + iface] += count
    state[D_PACKETS] += count
    state[D_LEFT] -= count
    state[D_BYTES] += count * wire
    state[D_ENDS] += data[record + _ENDS]
    state[D_LAST] = time
    flow = le32(data, record + _HASH)
    if flow and not seen[flow >> 16]:
        seen[flow >> 16] = 1
        state[D_FLOWS] += 1
    return at


@inlined
def _cell_length(cells, record):  # type: ignore[no-untyped-def]
    """Bytes that a record takes in a cell."""
    if cells[record + _KIND] == _IS_RUN:
        return _RUN_DATA + schema_ring.RUN_HEAD + 7 & ~7
    return _DATA + le32(cells, record + _CAPTURED) + 7 & ~7


@inlined
def _behind_given_up(producer, first, size, here, end):  # type: ignore[no-untyped-def]
    """Where the next record stands that was not given up, or ``end``."""
    while here < end:
        header = acquire32(producer, first + (here & size - 1))
        if header & _BUSY or not header & _GIVEN_UP:
            break
        here += (header & _LENGTH) + 15 & ~7
    return here


@inlined
def _time_of(data, record, earliest, now, instead):  # type: ignore[no-untyped-def]
    """The stamp of a record; ``instead`` where it is not between ``earliest`` and ``now``: somebody has set
    the clock in that moment, and one that is to come would hold up all that follows."""
    time = le64(data, record + _TIME)
    return time if earliest <= time <= now else instead


@inlined
def _time_of_next(producer, first, size, here, end, earliest, now, instead):  # type: ignore[no-untyped-def]
    """The stamp of the record at ``here``; _NEVER where there is none that is finished."""
    if here >= end or acquire32(producer, first + (here & size - 1)) & _BUSY:
        return _NEVER
    return _time_of(producer, first + (here & size - 1) + 8, earliest, now, instead)


@inner
def _move_plain(cells, base, mark, mask, latest, earliest, out, at, state, seen):  # type: ignore[no-untyped-def]
    """What ``_move`` does, for the packets at the front of one cell: as many as are plain, stamped between
    ``earliest`` and ``latest``, and fit. Moves the cell's mark; where the next block goes.

    All that most packets need is in registers here, which is a third of the time.
    """
    room, left, tail, head = len(out) - SLACK, state[D_LEFT], mark[0], mark[1]
    packets, octets, ends, known = 0, 0, 0, 0
    while tail < head and packets < left:
        record = base + (tail & mask)
        time = le64(cells, record + _TIME)
        lengths, words = le64(cells, record + _WIRE), le64(cells, record + _HASH)
        captured, wire = lengths >> 32, lengths & 0xFFFFFFFF
        size = BLOCK_BYTES + (captured + 3 & ~3)
        if time > latest or time < earliest or words >> 56 != _IS_PACKET or at + size > room:
            break
        prefetch(cells, record + 8 * CELL_SLACK)
        prefetch(cells, record + 8 * CELL_SLACK + 64)
        prefetch(cells, record + 8 * CELL_SLACK + 128)
        iface, flow = words >> 32 & 0xFF, words & 0xFFFFFFFF
        put64(out, at, size << 32 | 6)
        put64(out, at + 8, time >> 32 << 32 | iface)
        put64(out, at + 16, captured << 32 | time & 0xFFFFFFFF)
        put32(out, at + 24, wire)
        copy32(out, at + 28, cells, record + _DATA)
        copy32(out, at + 60, cells, record + _DATA + 32)
        if captured > 64:
            copy32(out, at + 92, cells, record + _DATA + 64)
            copy32(out, at + 124, cells, record + _DATA + 96)
        put32(out, at + 28 + captured, 0)
        put64(out, at + size - 16, (words >> 40 & 0xFF) << 32 | 4 << 16 | 2)
        put64(out, at + size - 8, size << 32)
        at += size
        tail += _DATA + captured + 7 & ~7
        state[D_IFACES + iface] += 1
        state[D_LAST] = time
        packets += 1
        octets += wire
        ends += words >> 48 & 0xFF
        if flow != known:
            known = flow
            if flow and not seen[flow >> 16]:
                seen[flow >> 16] = 1
                state[D_FLOWS] += 1
    mark[0] = tail
    state[D_PACKETS] += packets
    state[D_LEFT] -= packets
    state[D_BYTES] += octets
    state[D_ENDS] += ends
    return at


@kernel(i8(u1[::1], u1[::1], i8, i8[:, ::1]))
def positions(producer, cells, stride, marks):  # type: ignore[no-untyped-def]
    """How far the programs have written: of each cell into its row of ``marks``; of the kernel's ring.

    A clock that is read after this is later than the stamp of whatever lies before these positions.
    """
    for k in range(len(marks)):
        marks[k, 1] = acquire64(cells, k * stride + _HEAD)
    # Last, so that whatever a program put here before it put something into its cell is seen.
    return acquire64(producer, 0)


@kernel(i8(u1[::1], u1[::1], i8, u1[::1], i8, i8, i8[:, ::1], i8, i8, i8, i8, u1[::1], i8, i8[::1], u1[::1]))
def drain(  # type: ignore[no-untyped-def]
    consumer, producer, size, cells, stride, cell_size, marks, end, limit, earliest, now, out, at, state, seen
):
    """Move records older than ``limit`` to ``out`` from ``at`` on; where they end.

    ``consumer`` is the kernel ring's page with the reader's position; ``producer`` the page with the
    writer's, and after it the ring of ``size`` bytes, twice. ``cells``: ``len(marks)`` cells, one each
    ``stride`` bytes, with rings of ``cell_size``; ``marks`` and ``end`` are from ``positions``. Within
    a ring order stays; between rings the older record goes first. Stamps before ``earliest`` and after
    ``now`` cannot be: such records get the last time before ``limit``, and are counted. ``out`` has SLACK
    bytes more than it is to hold. ``seen``: one byte for each value of the upper 16 bits of a flow's hash.
    """
    room, count, instead = len(out) - SLACK, len(marks), min(limit - 1, now)
    for k in range(count):
        marks[k, 0], marks[k, 2] = le64(cells, k * stride + _TAIL), _NEVER
        if marks[k, 0] < marks[k, 1]:
            record = k * stride + _CELL + (marks[k, 0] & cell_size - 1)
            marks[k, 2] = _time_of(cells, record, earliest, now, instead)
    first = len(consumer)
    here = _behind_given_up(producer, first, size, le64(consumer, 0), end)
    kept, full = _time_of_next(producer, first, size, here, end, earliest, now, instead), False
    while state[D_LEFT] > 0 and not full:
        which, oldest, next_oldest = -1, kept, limit
        for k in range(count):
            time = marks[k, 2]
            if time < oldest:
                which, oldest, next_oldest = k, time, min(oldest, next_oldest)
            elif time < next_oldest:
                next_oldest = time
        if oldest >= limit:
            break
        if which < 0:
            while kept <= next_oldest and kept < limit and state[D_LEFT] > 0:
                record = first + (here & size - 1)
                length = acquire32(producer, record) & _LENGTH
                prefetch(producer, record + 8 * length)
                moved = _move(producer, record + 8, kept, out, at, room, state, seen)
                if moved < 0:
                    full = True
                    break
                at = moved
                here = _behind_given_up(producer, first, size, here + (length + 15 & ~7), end)
                kept = _time_of_next(producer, first, size, here, end, earliest, now, instead)
        else:
            base, head, time = which * stride + _CELL, marks[which, 1], _NEVER
            latest = min(next_oldest, limit - 1, now)
            at = _move_plain(cells, base, marks[which], cell_size - 1, latest, earliest, out, at, state, seen)
            tail = marks[which, 0]
            if tail < head:
                time = _time_of(cells, base + (tail & cell_size - 1), earliest, now, instead)
            while time <= next_oldest and time < limit and state[D_LEFT] > 0:
                record = base + (tail & cell_size - 1)
                prefetch(cells, record + 8 * CELL_SLACK)
                prefetch(cells, record + 8 * CELL_SLACK + 64)
                prefetch(cells, record + 8 * CELL_SLACK + 128)
                length = _cell_length(cells, record)
                moved = _move(cells, record, time, out, at, room, state, seen)
                if moved < 0:
                    full = True
                    break
                at = moved
                tail, time = tail + length, _NEVER
                if tail < head:
                    time = _time_of(cells, base + (tail & cell_size - 1), earliest, now, instead)
            marks[which, 0], marks[which, 2] = tail, time
    for k in range(count):
        release64(cells, k * stride + _TAIL, marks[k, 0])
    release64(consumer, 0, here)
    return at
