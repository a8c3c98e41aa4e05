"""Simulates a data-parallel job's RoCEv2 traffic as a switch's mirror port would record it.

64 ranks (8 hosts of 8 GPUs, one NIC a GPU) form 8 rings; each rank sends to its right neighbour
over 8 channels, one QP pair each. A ring all-reduce runs as NCCL's net_ib transport puts it on the
wire: clear-to-send writes, data as RDMA WRITE with immediate (two channels: WRITE, then an empty
WRITE with immediate, as adaptive routing makes it), coalesced ACKs, a few CE marks with their
CNPs, a few losses with NAK and go-back-N. One rank is late in every third collective. An event
queue keeps causes before effects, so memory does not grow with the number of packets.

In: a seed. Out: classic pcap records (nanoseconds), some MiB at a time. Formats: IBA volume 1
chapter 9 and annex A17; pcap Internet-Draft section 5. All in one file, because Numba's cache only
notices changes of the file that a function stands in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANKS: Final = 64
RING: Final = 8  # hosts, and so ranks in a ring
CHANNELS: Final = 8
CONNECTIONS: Final = RANKS * CHANNELS
LATE_RANK: Final = 21
MTU: Final = 4096
SLICES: Final = 4 * (RING - 1)  # messages an edge and channel carry: 2 (n - 1) chunks of 2 slices
CREDITS: Final = 4  # clear-to-send entries a receiver keeps posted
ADAPTIVE_FROM: Final = 6  # channels from here on send WRITE and an empty WRITE with immediate
MAX_FRAME: Final = 14 + 20 + 8 + 12 + 20 + MTU + 4
START_NS: Final = 1_750_000_000_000_000_000

# Slice bytes of the collectives in turn; the last is a small all-reduce on channel 0 alone,
# whose second slice is empty.
_SLICE_BYTES = np.array([163_840, 204_816, 131_072, 2_048], np.int64)
_SMALL = 3

# Events: kind << 58 | connection or rank << 48 | PSN << 24 | MSN.
_START, _SEND, _ACK, _ACK_END, _NAK, _CTS, _CTS_ACK, _CNP = range(8)

# State, one row a connection (column below) ...
_OUT_OP, _IN_OP, _ACTIVE, _SENT, _GRANTED, _POSTED, _RECEIVED, _CONSUMED = range(8)
_AT, _PSN, _LOST, _CTS_PSN, _CTS_MSN, _MSN, _ACKED, _MESSAGES = range(8, 16)
# ... and one a rank.
_OP, _REMAINING, _NIC_FREE = range(3)
# ... and one in all.
_HEAP, _LAST_NS, _DONE = range(3)

_OPTIONS = {"cache": True, "nogil": True}


def _crc_table() -> NDArray[np.uint32]:
    table = np.zeros(256, np.uint32)
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ (0xEDB88320 if c & 1 else 0)
        table[i] = c
    return table


_CRC = _crc_table()


@njit(**_OPTIONS)
def _random(rng):  # 31 random bits (xorshift64*)
    x = rng[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    rng[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33))


@njit(**_OPTIONS)
def _push(times, codes, size, t, code):
    i = size[_HEAP]
    size[_HEAP] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= t:
            break
        times[i] = times[parent]
        codes[i] = codes[parent]
        i = parent
    times[i] = t
    codes[i] = code


@njit(**_OPTIONS)
def _pop(times, codes, size):  # drops the earliest
    n = size[_HEAP] - 1
    size[_HEAP] = n
    t = times[n]
    code = codes[n]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and times[child + 1] < times[child]:
            child += 1
        if times[child] >= t:
            break
        times[i] = times[child]
        codes[i] = codes[child]
        i = child
    times[i] = t
    codes[i] = code


@njit(**_OPTIONS)
def _code(kind, who, psn, msn):
    return (kind << 58) | (who << 48) | ((psn & 0xFFFFFF) << 24) | (msn & 0xFFFFFF)


@njit(**_OPTIONS)
def _put(out, at, value, count):  # big endian
    for i in range(count):
        out[at + i] = np.uint8((value >> (8 * (count - 1 - i))) & 0xFF)


@njit(**_OPTIONS)
def _put_le(out, at, value, count):
    for i in range(count):
        out[at + i] = np.uint8((value >> (8 * i)) & 0xFF)


@njit(**_OPTIONS)
def _icrc(out, ip, end, crc_table):  # IBA annex A17.3.3: variant fields count as ones
    crc = np.uint32(0xDEBB20E3)  # after eight bytes of ones in place of the LRH
    for i in range(ip, end):
        k = i - ip
        b = out[i]
        if k == 1 or k == 8 or k == 10 or k == 11 or k == 26 or k == 27 or k == 32:
            b = np.uint8(0xFF)
        crc = (crc >> np.uint32(8)) ^ crc_table[(crc ^ np.uint32(b)) & np.uint32(0xFF)]
    return np.int64(crc ^ np.uint32(0xFFFFFFFF))


@njit(**_OPTIONS)
def _frame(out, base, one, t, snaplen, src, dst, sport, tos, opcode, becn, ack_req, qp, psn, ext, payload):
    """Record header to BTH; returns where the extended headers go (``ext`` bytes of them)."""
    t = max(t, one[_LAST_NS] + 1)
    one[_LAST_NS] = t
    wire = 58 + ext + payload
    _put_le(out, base, t // 1_000_000_000, 4)
    _put_le(out, base + 4, t % 1_000_000_000, 4)
    _put_le(out, base + 8, min(wire, snaplen), 4)
    _put_le(out, base + 12, wire, 4)
    at = base + 16
    _put(out, at, 0x0200_0A00_0000 | (dst & 7) << 16 | dst >> 3, 6)
    _put(out, at + 6, 0x0200_0A00_0000 | (src & 7) << 16 | src >> 3, 6)
    _put(out, at + 12, 0x0800, 2)
    ip = at + 14
    length = wire - 14
    ident = psn & 0xFFFF
    from_high = 0x0A00 | (src & 7)  # 10.<GPU>.0.<host + 1>
    to_high = 0x0A00 | (dst & 7)
    total = 0x4500 + tos + length + ident + 0x4000 + 0x4011
    total += from_high + (src >> 3) + 1 + to_high + (dst >> 3) + 1
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    _put(out, ip, 0x4500 | tos, 2)
    _put(out, ip + 2, length, 2)
    _put(out, ip + 4, ident, 2)
    _put(out, ip + 6, 0x4000, 2)
    _put(out, ip + 8, 0x4011, 2)
    _put(out, ip + 10, ~total & 0xFFFF, 2)
    _put(out, ip + 12, (from_high << 16) | ((src >> 3) + 1), 4)
    _put(out, ip + 16, (to_high << 16) | ((dst >> 3) + 1), 4)
    _put(out, ip + 20, sport, 2)
    _put(out, ip + 22, 4791, 2)
    _put(out, ip + 24, length - 20, 2)
    _put(out, ip + 26, 0, 2)
    _put(out, ip + 28, opcode, 1)
    _put(out, ip + 29, 0x40, 1)  # MigReq, no pad: NCCL's sizes are multiples of four
    _put(out, ip + 30, 0xFFFF, 2)
    _put(out, ip + 32, becn, 1)
    _put(out, ip + 33, qp, 3)
    _put(out, ip + 36, ack_req << 7, 1)
    _put(out, ip + 37, psn & 0xFFFFFF, 3)
    return ip + 40


@njit(**_OPTIONS)
def _close(out, base, at, payload, snaplen, rng, crc_table):
    """Payload that is captured, ICRC where the packet is whole; returns the record's end."""
    begin = base + 16
    room = snaplen - (at - begin)
    word = rng[0]
    for i in range(min(payload, max(room, 0))):
        out[at + i] = np.uint8((word >> np.uint64(8 * (i & 7))) & np.uint64(0xFF))
    return _seal(out, base, at + payload, snaplen, crc_table)


@njit(**_OPTIONS)
def _seal(out, base, at, snaplen, crc_table):
    begin = base + 16
    if at + 4 - begin <= snaplen:
        _put_le(out, at, _icrc(out, begin + 14, at, crc_table), 4)
        return at + 4
    return begin + min(snaplen, at + 4 - begin)


@njit(**_OPTIONS)
def _right(rank):
    return (rank + 8) % RANKS


@njit(**_OPTIONS)
def _left(rank):
    return (rank + RANKS - 8) % RANKS


@njit(**_OPTIONS)
def _next_op(op, channel):
    op += 1
    if channel > 0 and op % 4 == _SMALL:
        op += 1
    return op


@njit(**_OPTIONS)
def _slice(op, index):  # bytes of a collective's slice
    kind = op % 4
    return 0 if kind == _SMALL and index & 1 else _SLICE_BYTES[kind]


@njit(**_OPTIONS)
def _packets(op, index, channel):
    size = _slice(op, index)
    n = max(1, (size + MTU - 1) // MTU)
    return n + 1 if channel >= ADAPTIVE_FROM and size > 8192 else n


@njit(**_OPTIONS)
def _reserve(ranks, rank, t, packet_bytes):  # the NIC sends one packet at a time, 100 Gb/s
    t = max(t, ranks[rank, _NIC_FREE])
    ranks[rank, _NIC_FREE] = t + (packet_bytes + 24) * 8 // 100
    return t


@njit(**_OPTIONS)
def _try_send(conns, ranks, times, codes, one, rng, conn, t):
    """Start the connection's next message where data and credit are there."""
    rank, channel = conn >> 3, conn & 7
    op, index = conns[conn, _OUT_OP], conns[conn, _SENT]
    if conns[conn, _ACTIVE] or index >= SLICES or ranks[rank, _OP] < op or conns[conn, _GRANTED] <= index:
        return
    incoming = _left(rank) * CHANNELS + channel
    if index >= 2:  # it forwards what came in one chunk before
        if conns[incoming, _IN_OP] < op:
            return
        if conns[incoming, _IN_OP] == op and conns[incoming, _CONSUMED] < index - 1:
            return
    conns[conn, _ACTIVE] = 1
    conns[conn, _AT] = 0
    when = _reserve(ranks, rank, t + 1500 + _random(rng) % 600, MTU)
    _push(times, codes, one, when, _code(_SEND, conn, 0, 0))


@njit(**_OPTIONS)
def _finish(ranks, times, codes, one, rng, rank, t):
    """One more edge of the rank's collective is done; after the last it computes, then goes on."""
    ranks[rank, _REMAINING] -= 1
    if ranks[rank, _REMAINING] == 0:
        op = ranks[rank, _OP] + 1
        wait = 3_000_000 + _random(rng) % 200_000
        if rank == LATE_RANK and op % 3 == 1:
            wait += 4_000_000
        _push(times, codes, one, t + wait, _code(_START, rank, 0, 0))


@njit(**_OPTIONS)
def _grant(conns, times, codes, one, rng, conn, t):
    conns[conn, _POSTED] += 1
    _push(times, codes, one, t + 800 + _random(rng) % 400, _code(_CTS, conn, 0, 0))


@njit(**_OPTIONS)
def _consume(conns, ranks, times, codes, one, rng, conn, t):
    """The receiver's GPU takes one slice: a credit goes back, the next message may go out."""
    rank, channel = _right(conn >> 3), conn & 7
    conns[conn, _CONSUMED] += 1
    if conns[conn, _CONSUMED] == SLICES:
        conns[conn, _IN_OP] = _next_op(conns[conn, _IN_OP], channel)
        conns[conn, _CONSUMED] = conns[conn, _RECEIVED] = conns[conn, _POSTED] = 0
        for i in range(CREDITS):
            _grant(conns, times, codes, one, rng, conn, t + 500 * i)
        _finish(ranks, times, codes, one, rng, rank, t)
    elif conns[conn, _POSTED] < SLICES:
        _grant(conns, times, codes, one, rng, conn, t)
    _try_send(conns, ranks, times, codes, one, rng, rank * CHANNELS + channel, t)


@njit(**_OPTIONS)
def _data_packet(conns, one, rng, crc_table, out, base, conn, t, snaplen, qps, ports, mark):
    """The next packet of the connection's message; returns the record's end."""
    channel, op, index, k = conn & 7, conns[conn, _OUT_OP], conns[conn, _SENT], conns[conn, _AT]
    size = _slice(op, index)
    n = _packets(op, index, channel)
    adaptive = n > max(1, (size + MTU - 1) // MTU)
    pieces = n - 1 if adaptive else n
    reth = immediate = False
    dma = size
    if k == pieces:  # the empty message behind a plain one
        opcode, payload, dma, reth, immediate = 0x0B, 0, 0, True, True
    else:
        payload = min(MTU, size - k * MTU)
        if pieces == 1:
            opcode, reth, immediate = 0x0B, True, True
        elif k == 0:
            opcode, reth = 0x06, True
        elif k < pieces - 1:
            opcode = 0x07
        elif adaptive:
            opcode = 0x08
        else:
            opcode, immediate = 0x09, True
    ext = (16 if reth else 0) + (4 if immediate else 0)
    ack_req = 1 if k == n - 1 or k % 16 == 15 else 0
    rank = conn >> 3
    at = _frame(out, base, one, t, snaplen, rank, _right(rank), ports[conn], 0x6A | mark, opcode, 0,
                ack_req, qps[conn, 1], conns[conn, _PSN] + k, ext, payload)  # fmt: skip
    if reth:
        _put(out, at, 0x7F00_0000_0000 + (conn << 24) + ((conns[conn, _MESSAGES] & 3) << 20), 8)
        _put(out, at + 8, 0x20_0000 + conn, 4)
        _put(out, at + 12, dma, 4)
        at += 16
    if immediate:
        _put(out, at, size, 4)
        at += 4
    return _close(out, base, at, payload, snaplen, rng, crc_table)


@njit(**_OPTIONS)
def _cts_packet(conns, one, crc_table, out, base, conn, t, snaplen, qps, ports):
    """A clear-to-send entry as NCCL 2.30 writes it: address, size, keys, count, tag, index."""
    rank = conn >> 3
    index = conns[conn, _CTS_PSN]
    at = _frame(out, base, one, t, snaplen, _right(rank), rank, ports[conn], 0x6A, 0x0A, 0, 1,
                qps[conn, 0], index, 16, 64)  # fmt: skip
    _put(out, at, 0x7E00_0000_0000 + (conn << 20) + 512 * (index & 255), 8)
    _put(out, at + 8, 0x10_0000 + conn, 4)
    _put(out, at + 12, 64, 4)
    at += 16
    _put_le(out, at, 0x7F00_0000_0000 + (conn << 24) + ((index & 3) << 20), 8)
    _put_le(out, at + 8, 1 << 20, 8)
    for i in range(8):
        _put_le(out, at + 16 + 4 * i, 0x20_0000 + conn if i == 0 else 0, 4)
    _put_le(out, at + 48, 1, 4)
    _put_le(out, at + 52, rank, 4)
    _put_le(out, at + 56, index + 1, 8)
    conns[conn, _CTS_PSN] = index + 1
    return _seal(out, base, at + 64, snaplen, crc_table)


@njit(**_OPTIONS)
def _ack_packet(one, crc_table, out, base, src, dst, t, snaplen, qp, port, psn, syndrome, msn):
    at = _frame(out, base, one, t, snaplen, src, dst, port, 0x6A, 0x11, 0, 0, qp, psn, 4, 0)
    _put(out, at, (syndrome << 24) | (msn & 0xFFFFFF), 4)
    return _seal(out, base, at + 4, snaplen, crc_table)


@njit(**_OPTIONS)
def _run(conns, ranks, times, codes, one, rng, qps, ports, crc_table, out, snaplen, most):
    """Events in order of time until ``out`` is full or ``most`` packets are out; bytes written."""
    end = 0
    while one[_DONE] < most and end + 16 + MAX_FRAME <= len(out):
        t, code = times[0], codes[0]
        _pop(times, codes, one)
        kind, conn = code >> 58, (code >> 48) & 0x3FF
        psn, msn = (code >> 24) & 0xFFFFFF, code & 0xFFFFFF
        rank = conn >> 3
        if kind == _START:
            rank = conn
            ranks[rank, _OP] += 1
            op = ranks[rank, _OP]
            channels = 1 if op % 4 == _SMALL else CHANNELS
            ranks[rank, _REMAINING] = 2 * channels
            for channel in range(channels):
                incoming = _left(rank) * CHANNELS + channel
                while (
                    conns[incoming, _IN_OP] == op and conns[incoming, _CONSUMED] < conns[incoming, _RECEIVED]
                ):
                    _consume(conns, ranks, times, codes, one, rng, incoming, t)
                _try_send(conns, ranks, times, codes, one, rng, rank * CHANNELS + channel, t)
            continue
        one[_DONE] += 1
        if kind == _SEND:
            chance = _random(rng)
            mark = 1 if chance & 0x1FFF == 0 else 0
            end = _data_packet(conns, one, rng, crc_table, out, end, conn, t, snaplen, qps, ports, mark)
            if mark:
                _push(times, codes, one, t + 2000, _code(_CNP, conn, 0, 0))
            k = conns[conn, _AT]
            n = _packets(conns[conn, _OUT_OP], conns[conn, _SENT], conn & 7)
            sent_psn = conns[conn, _PSN] + k
            if conns[conn, _LOST] < 0 and k < n - 8 and chance >> 13 & 0xFFFF == 0:
                conns[conn, _LOST] = k  # beyond the mirror: only what follows tells
            if conns[conn, _LOST] >= 0:
                if k == conns[conn, _LOST] + 4:
                    conns[conn, _AT] = conns[conn, _LOST]
                    conns[conn, _LOST] = -1
                    missing = conns[conn, _PSN] + conns[conn, _AT]
                    _push(times, codes, one, t + 1000, _code(_NAK, conn, missing, conns[conn, _MSN]))
                    continue
            elif k % 16 == 15 and k < n - 1:
                _push(times, codes, one, t + 1200, _code(_ACK, conn, sent_psn, conns[conn, _MSN]))
            if k < n - 1:
                conns[conn, _AT] = k + 1
                when = _reserve(ranks, rank, t + 100, MTU + 74)
                _push(times, codes, one, when, _code(_SEND, conn, 0, 0))
            else:
                conns[conn, _MSN] += 2 if n > 1 and (conn & 7) >= ADAPTIVE_FROM else 1
                conns[conn, _PSN] += n
                conns[conn, _ACTIVE] = 0
                conns[conn, _SENT] += 1
                conns[conn, _MESSAGES] += 1
                _push(times, codes, one, t + 1200, _code(_ACK_END, conn, sent_psn, conns[conn, _MSN]))
                _try_send(conns, ranks, times, codes, one, rng, conn, t)
        elif kind in (_ACK, _ACK_END):
            end = _ack_packet(one, crc_table, out, end, _right(rank), rank, t, snaplen, qps[conn, 0],
                              ports[conn], psn, 0x1F, msn)  # fmt: skip
            if kind == _ACK:
                continue
            conns[conn, _ACKED] += 1
            conns[conn, _RECEIVED] += 1
            if conns[conn, _ACKED] == SLICES:
                conns[conn, _OUT_OP] = _next_op(conns[conn, _OUT_OP], conn & 7)
                conns[conn, _SENT] = conns[conn, _GRANTED] = conns[conn, _ACKED] = 0
                _finish(ranks, times, codes, one, rng, rank, t)
            if ranks[_right(rank), _OP] >= conns[conn, _IN_OP]:
                _consume(conns, ranks, times, codes, one, rng, conn, t)
        elif kind == _NAK:
            end = _ack_packet(one, crc_table, out, end, _right(rank), rank, t, snaplen, qps[conn, 0],
                              ports[conn], psn, 0x60, msn)  # fmt: skip
            when = _reserve(ranks, rank, t + 1000, MTU + 74)
            _push(times, codes, one, when, _code(_SEND, conn, 0, 0))
        elif kind == _CTS:
            last = conns[conn, _CTS_PSN]
            end = _cts_packet(conns, one, crc_table, out, end, conn, t, snaplen, qps, ports)
            if last % 4 == 3:
                _push(times, codes, one, t + 1000, _code(_CTS_ACK, conn, last, last + 1))
            conns[conn, _GRANTED] += 1
            _try_send(conns, ranks, times, codes, one, rng, conn, t)
        elif kind == _CTS_ACK:
            end = _ack_packet(one, crc_table, out, end, rank, _right(rank), t, snaplen, qps[conn, 1],
                              ports[conn], psn, 0x1F, msn)  # fmt: skip
        else:
            at = _frame(out, end, one, t, snaplen, _right(rank), rank, ports[conn], 0xC2, 0x81, 0x40, 0,
                        qps[conn, 0], 0, 16, 0)  # fmt: skip
            for i in range(16):
                out[at + i] = 0
            end = _seal(out, end, at + 16, snaplen, crc_table)
    return end


class Traffic:
    """The job's packets from its start on, the same for the same seed."""

    def __init__(self, seed: int = 1, snaplen: int = 96) -> None:
        """``snaplen``: bytes kept of a packet (at least 62); ``MAX_FRAME`` keeps all of it."""
        assert snaplen >= 62
        self.snaplen = snaplen
        self._rng = np.array([(seed * 2 + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1], np.uint64)
        self._times, self._codes = np.zeros((2, 1 << 16), np.int64)
        self._one = np.zeros(3, np.int64)
        self._conns = np.zeros((CONNECTIONS, 16), np.int64)
        self._conns[:, _LOST] = -1
        self._ranks = np.zeros((RANKS, 3), np.int64)
        self._ranks[:, _OP] = -1
        picks = np.random.default_rng(seed)
        first_qp = picks.integers(0x100, 0x4000, RANKS)
        rank, channel = np.divmod(np.arange(CONNECTIONS), CHANNELS)
        self._qps = np.stack(
            [first_qp[rank] + 2 * channel, first_qp[(rank + 8) % RANKS] + 2 * channel + 1], 1
        )
        self._ports = _udp_ports(self._qps[:, 0], self._qps[:, 1])
        for conn in range(CONNECTIONS):
            for i in range(CREDITS):
                _grant(self._conns, self._times, self._codes, self._one, self._rng, conn, START_NS + 500 * i)
        for rank_ in range(RANKS):
            when = START_NS + 1_000_000 + int(picks.integers(0, 200_000))
            _push(self._times, self._codes, self._one, when, _code(_START, rank_, 0, 0))

    @property
    def packets(self) -> int:
        """Packets written so far."""
        return int(self._one[_DONE])

    @property
    def messages(self) -> int:
        """Messages sent so far: data (the empty ones of adaptive routing too) and clear-to-send."""
        return int(self._conns[:, _MSN].sum() + self._conns[:, _CTS_PSN].sum())

    def write_into(self, out: NDArray[np.uint8], most: int) -> int:
        """Fill ``out`` with pcap records until it is full or ``most`` packets have been written in all.

        Returns the bytes used; 0 when ``most`` has been reached.
        """
        return int(_run(self._conns, self._ranks, self._times, self._codes, self._one, self._rng,
                        self._qps, self._ports, _CRC, out, self.snaplen, most))  # fmt: skip


def _udp_ports(local: NDArray[np.int64], remote: NDArray[np.int64]) -> NDArray[np.int64]:
    """UDP source ports as Linux derives them from both QPs (rdma_flow_label_to_udp_sport)."""
    v = local.astype(np.uint64) * remote.astype(np.uint64)
    v ^= v >> np.uint64(20)
    v ^= v >> np.uint64(40)
    label = (v & np.uint64(0xFFFFF)).astype(np.int64)
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14))
