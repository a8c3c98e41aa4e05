"""Blocks of AF_PACKET's ring to pcapng packet blocks, filtered as the eBPF programs do.

The ring: TPACKET_V3, linux/if_packet.h and Documentation/networking/packet_mmap.rst. ``judge`` is
bpf/parse.h in Python, and a test holds them against each other.
"""

from __future__ import annotations

from typing import Final

from dpuflow.kernels import ring
from dpuflow.kernels._jit import (
    be16,
    be32,
    be64,
    i8,
    inlined,
    inner,
    kernel,
    le16,
    le32,
    le64,
    put16,
    put32,
    put64,
    u1,
)
from dpuflow.schema import ring as schema_ring
from dpuflow.schema.ring import Protocol
from dpuflow.schema.rows import Direction
from dpuflow.wire import headers as wire

# struct tpacket_block_desc
STATUS: Final = 8
_PACKETS: Final = 12
_FIRST: Final = 16
BLOCK_HEADER: Final = 48

# struct tpacket3_hdr, and behind it struct sockaddr_ll
_NEXT: Final = 0
_SECONDS: Final = 4
_NANOSECONDS: Final = 8
_CAPTURED: Final = 12
_LENGTH: Final = 16
_STATUS: Final = 20
_MAC: Final = 24
_TAG: Final = 32
_TPID: Final = 36
_PACKET_TYPE: Final = 58
_VLAN_VALID: Final = 1 << 4
_TPID_VALID: Final = 1 << 6
_OUTGOING: Final = 4

# -- filter (int64 array): how many of each, then the values ---------------------------------------
P_PROTOCOLS: Final = 0
P_SNAPLEN: Final = 1
P_SAMPLE: Final = 2
P_HOSTS: Final = 3
P_QPS: Final = 4
P_PORTS: Final = 5
P_VLANS: Final = 6
P_HOST: Final = 8  # pairs of words
P_QP: Final = P_HOST + 2 * schema_ring.MAX_HOSTS
P_PORT: Final = P_QP + schema_ring.MAX_QPS
P_VLAN: Final = P_PORT + schema_ring.MAX_PORTS
P_SIZE: Final = P_VLAN + schema_ring.MAX_VLANS

WANTED: Final = 0
NOT_WANTED: Final = 1
SAMPLED_OUT: Final = 2
FRAGMENT: Final = 3
CUT: Final = 4
VERDICTS: Final = ("captured", "not_wanted", "sampled_out", "fragment", "cut")

_MESSAGE_ENDS: Final = schema_ring.message_ends()
_OTHER: Final = int(Protocol.OTHER)
_PAUSE: Final = int(Protocol.PAUSE)
_TCP: Final = int(Protocol.TCP)
_ROCE_V1: Final = int(Protocol.ROCE_V1)
_ROCE_V2: Final = int(Protocol.ROCE_V2)
_INBOUND: Final = int(Direction.INBOUND)
_OUTBOUND: Final = int(Direction.OUTBOUND)
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number
_MAPPED: Final = 0xFFFF << 32
_HEAD: Final = 104
_TAGGED: Final = 0x10000
_LATER_FRAGMENT: Final = 256


@inlined
def _mixed(value):  # type: ignore[no-untyped-def]
    return ((value ^ (value >> 29 & (1 << 35) - 1)) * _FACTOR) >> 32 & 0xFFFFFFFF


@inlined
def _swapped(value):  # type: ignore[no-untyped-def]
    return (value & 0xFF) << 8 | value >> 8 & 0xFF


@inlined
def _listed(value, count, first, wanted):  # type: ignore[no-untyped-def]
    for k in range(count):  # noqa: SIM110 (kernels have no generators)
        if wanted[first + k] == value:
            return True
    return False


@inlined
def _host_listed(high, low, wanted):  # type: ignore[no-untyped-def]
    for k in range(wanted[P_HOSTS]):
        if wanted[P_HOST + 2 * k] == high and wanted[P_HOST + 2 * k + 1] == low:
            return True
    return False


@inlined
def _unless_other(verdict, wanted):  # type: ignore[no-untyped-def]
    return WANTED if wanted[P_PROTOCOLS] & _OTHER else verdict


@inner
def judge(data, at, captured, tagged, wanted, found):  # type: ignore[no-untyped-def]
    """What is to become of the packet at ``at``; ``found`` gets the flow's hash and whether a message ends.

    ``tagged``: the VLAN tag that the kernel took out, plus 1 << 16; 0 without one.
    """
    found[0] = found[1] = 0
    if captured < 14:
        return CUT
    end = at + min(captured, _HEAD)
    start = at
    kind = be16(data, at + 12)
    at += 14
    for _ in range(2):
        if kind != wire.ETHERTYPE_VLAN and kind != wire.ETHERTYPE_QINQ:
            break
        if end < at + 4:
            return CUT
        if not tagged:
            tagged = be16(data, at) | _TAGGED
        kind = be16(data, at + 2)
        at += 4
    if wanted[P_VLANS] and not (
        tagged & _TAGGED and _listed(tagged & 0xFFF, wanted[P_VLANS], P_VLAN, wanted)
    ):
        return NOT_WANTED
    protocols = wanted[P_PROTOCOLS]
    if kind == wire.ETHERTYPE_MAC_CONTROL:
        return WANTED if protocols & _PAUSE else _unless_other(NOT_WANTED, wanted)
    src_high = dst_high = 0
    if kind == wire.ETHERTYPE_IPV4:
        if end < at + 20:
            return _unless_other(CUT, wanted)
        following = at + (data[at] & 15) * 4
        protocol = _LATER_FRAGMENT if be16(data, at + 6) & 0x1FFF else i8(data[at + 9])
        src_low, dst_low = _MAPPED | be32(data, at + 12), _MAPPED | be32(data, at + 16)
    elif kind == wire.ETHERTYPE_IPV6 or kind == wire.ETHERTYPE_ROCE_V1:
        if end < at + 40:
            return _unless_other(CUT, wanted)
        following = at + 40
        protocol = _LATER_FRAGMENT if data[at + 6] == 44 else i8(data[at + 6])
        src_high, src_low = be64(data, at + 8), be64(data, at + 16)
        dst_high, dst_low = be64(data, at + 24), be64(data, at + 32)
    else:
        return _unless_other(NOT_WANTED, wanted)
    if wanted[P_HOSTS] and not (
        _host_listed(src_high, src_low, wanted) or _host_listed(dst_high, dst_low, wanted)
    ):
        return NOT_WANTED
    hosts = (src_high ^ dst_high) * 31 + (src_low ^ dst_low)
    sampled_out = wanted[P_SAMPLE] and _mixed(hosts) < wanted[P_SAMPLE]
    if kind == wire.ETHERTYPE_ROCE_V1:
        if not protocols & _ROCE_V1:
            return _unless_other(NOT_WANTED, wanted)
    else:
        if protocol == _LATER_FRAGMENT:
            return _unless_other(FRAGMENT, wanted)
        if protocol != wire.IPPROTO_TCP and protocol != wire.IPPROTO_UDP:
            return _unless_other(NOT_WANTED, wanted)
        if following - start > _HEAD - 8 or end < following + 8:
            return _unless_other(CUT, wanted)
        if protocol == wire.IPPROTO_TCP:
            if not protocols & _TCP:
                return _unless_other(NOT_WANTED, wanted)
            if wanted[P_PORTS] and not (
                _listed(be16(data, following), wanted[P_PORTS], P_PORT, wanted)
                or _listed(be16(data, following + 2), wanted[P_PORTS], P_PORT, wanted)
            ):
                return NOT_WANTED
            found[0] = _mixed(hosts + be32(data, following)) | 1
            return SAMPLED_OUT if sampled_out else WANTED
        if be16(data, following + 2) != wire.ROCE_V2_PORT or not protocols & _ROCE_V2:
            return _unless_other(NOT_WANTED, wanted)
        following += 8
    if following - start > _HEAD - wire.BTH_BYTES or end < following + wire.BTH_BYTES:
        return _unless_other(CUT, wanted)
    qp = be32(data, following + 4) & 0xFFFFFF
    if wanted[P_QPS] and not _listed(qp, wanted[P_QPS], P_QP, wanted):
        return NOT_WANTED
    opcode = i8(data[following])
    found[0] = _mixed(hosts + qp) | 1
    found[1] = 0 if opcode == wire.CNP_OPCODE else _MESSAGE_ENDS >> (opcode & 31) & 1
    return SAMPLED_OUT if sampled_out else WANTED


@kernel(i8(u1[::1], i8, i8, i8, i8[::1], i8[::1]))
def judge_one(data, at, captured, tagged, wanted, found):  # type: ignore[no-untyped-def]
    """``judge`` for one packet, for tests and for those who want to know what a filter takes."""
    return judge(data, at, captured, tagged, wanted, found)


@kernel(i8(u1[::1], i8, i8, i8[::1], u1[::1], i8, i8[::1], i8[::1], u1[::1], i8[::1]))
def drain_block(area, block, iface, wanted, out, at, state, counts, seen, found):  # type: ignore[no-untyped-def]
    """Move the packets of the ring's block at ``block`` to ``out`` from ``at`` on; where they end.

    ``out`` has room for all of them: a packet's block is no longer than its place in the ring. ``counts``:
    one number for each of VERDICTS. The rest as for ``ring.drain``.
    """
    place = block + le32(area, block + _FIRST)
    for _ in range(le32(area, block + _PACKETS)):
        data = place + le16(area, place + _MAC)
        captured, length = le32(area, place + _CAPTURED), le32(area, place + _LENGTH)
        status = le32(area, place + _STATUS)
        tag = 0
        if status & _VLAN_VALID:
            tag = _TAGGED | le32(area, place + _TAG) & 0xFFFF
        verdict = judge(area, data, captured, tag, wanted, found)
        if verdict == WANTED and state[ring.D_LEFT] <= 0:
            break
        counts[verdict] += 1
        if verdict == WANTED:
            time = le32(area, place + _SECONDS) * 1_000_000_000 + le32(area, place + _NANOSECONDS)
            direction = _OUTBOUND if area[place + _PACKET_TYPE] == _OUTGOING else _INBOUND
            if tag:
                # The tag goes back where it was, into the room before the packet that its header leaves.
                put64(area, data - 4, le64(area, data))
                put32(area, data + 4, le32(area, data + 8))
                tpid = le16(area, place + _TPID) if status & _TPID_VALID else wire.ETHERTYPE_VLAN
                put16(area, data + 8, _swapped(tpid))
                put16(area, data + 10, _swapped(tag & 0xFFFF))
                data -= 4
                captured += 4
                length += 4
            captured = min(captured, wanted[P_SNAPLEN])
            at = ring.write_packet(out, at, area, data, captured, length, time, iface, direction)
            state[ring.D_PACKETS] += 1
            state[ring.D_LEFT] -= 1
            state[ring.D_IFACES + iface] += 1
            state[ring.D_BYTES] += length
            state[ring.D_ENDS] += found[1]
            state[ring.D_LAST] = time
            if found[0] and not seen[found[0] >> 16]:
                seen[found[0] >> 16] = 1
                state[ring.D_FLOWS] += 1
        place += le32(area, place + _NEXT)
    return at
