"""From the link header to the transport header: link types, VLANs, IP, tunnels.

Every length is checked against the captured bytes before it is read. The innermost packet counts:
its addresses, ports and lengths fill the row. Of the outer packets two things are kept. A CE mark
on the outer header of VXLAN or Geneve is passed to an ECN-capable inner one, as the tunnel's end
would do (RFC 6040); a mirror's own header (GRE, ERSPAN) tells nothing about the mirrored packet.
And an ERSPAN III header that carries absolute time (IEEE 1588 granularity, seconds in the platform
sub-header) replaces the stamp, since it was taken where the packet passed; relative ticks of 100 us
or 100 ns have no common zero with the capture's clock and are not used.

IEEE 802.3, 802.1Q; RFC 791, 8200, 768, 7348 (VXLAN), 8926 (Geneve), 2784 and 2890 (GRE);
draft-foschiano-erspan-03; LINKTYPE_LINUX_SLL and SLL2 of www.tcpdump.org.
"""

from __future__ import annotations

from dpuflow.kernels._jit import be16, be32, be64, inner, le32, le64
from dpuflow.kernels.bytes import mac
from dpuflow.schema.rows import NEVER, Direction, Kind
from dpuflow.wire import headers as wire

# -- what is known of the packet so far (int64 array) -------------------------------------------
P_AT = 0  # where the transport header starts
P_END = 1  # where the transport's bytes end by the IP header's length
P_CAPTURED = 2  # where the captured bytes end
P_PROTOCOL = 3  # IP protocol; ROCE_V1 or MAC_CONTROL below for what has no IP
P_FAMILY = 4  # 4 or 6
P_SRC_HI = 5
P_SRC_LO = 6
P_DST_HI = 7
P_DST_LO = 8
P_KEY = 9  # IPv4: source and destination as they lie in the header
P_SRC_MAC = 10
P_DST_MAC = 11
P_TOS = 12
P_DIRECTION = 13
P_STAMP = 14  # absolute stamp of a mirror, else NEVER
P_FRAGMENT = 15  # 1: first fragment, the transport goes on elsewhere
P_OUTER_CE = 16
P_WIRE_END = 17  # where the packet ended on the wire
P_ETHERTYPE = 18
P_SIZE = 24

ROCE_V1 = -1
MAC_CONTROL = -2

_MAX_LAYERS = 16  # tags, tunnels and extension headers: more is no real packet
_TOO_DEEP = int(Kind.UNSUPPORTED_TUNNEL)

_OK = int(Kind.NONE)
_CUT_LINK = int(Kind.CUT_LINK)
_CUT_IP = int(Kind.CUT_IP)
_CUT_TRANSPORT = int(Kind.CUT_TRANSPORT)
_BAD_IP = int(Kind.MALFORMED_IP)
_BAD_TRANSPORT = int(Kind.MALFORMED_TRANSPORT)
_OTHER_ETHERTYPE = int(Kind.OTHER_ETHERTYPE)
_OTHER_PROTOCOL = int(Kind.OTHER_IP_PROTOCOL)
_FRAGMENT = int(Kind.FRAGMENT)
_BAD_TUNNEL = int(Kind.UNSUPPORTED_TUNNEL)
_BAD_ROCE = int(Kind.MALFORMED_ROCE)
_BAD_LINK = int(Kind.UNSUPPORTED_LINK_TYPE)
_INBOUND = int(Direction.INBOUND)
_OUTBOUND = int(Direction.OUTBOUND)

_ANY_IP = -1  # no EtherType: the version nibble tells
_ETHERNET = -2  # an Ethernet header follows
_PROTOCOL = -3  # an IP payload follows

_ECN_CE = 3


@inner
def walk(data, at, captured, wire_end, link, p):  # type: ignore[no-untyped-def]
    """Fill ``p`` up to the transport header; a Kind: NONE, or why it was given up."""
    p[P_CAPTURED] = captured
    p[P_WIRE_END] = wire_end
    p[P_SRC_MAC] = 0
    p[P_DST_MAC] = 0
    p[P_STAMP] = NEVER
    p[P_FRAGMENT] = 0
    p[P_OUTER_CE] = 0
    p[P_AT] = at
    kind = _link(data, at, captured, link, p)
    layers = 0
    while kind == _OK:
        layers += 1
        if layers > _MAX_LAYERS:
            return _TOO_DEEP
        following = p[P_ETHERTYPE]
        at = p[P_AT]
        if following == wire.ETHERTYPE_IPV4:
            kind = _ipv4(data, at, captured, p)
        elif following == wire.ETHERTYPE_IPV6:
            kind = _ipv6(data, at, captured, p)
        elif following == _ETHERNET:
            kind = _ethernet(data, at, captured, p)
        elif following == _ANY_IP:
            kind = _any_ip(data, at, captured, p)
        elif following == _PROTOCOL:
            protocol = p[P_PROTOCOL]
            if protocol == wire.IPPROTO_UDP:
                kind = _udp_tunnel(data, at, captured, p)
                if p[P_ETHERTYPE] == _PROTOCOL:
                    return kind  # no tunnel: UDP itself is wanted
            elif protocol == wire.IPPROTO_GRE:
                kind = _gre(data, at, captured, p)
            elif protocol == 4:  # IPv4 in IP (RFC 2003)
                p[P_ETHERTYPE] = wire.ETHERTYPE_IPV4
            elif protocol == 41:  # IPv6 in IP (RFC 4213)
                p[P_ETHERTYPE] = wire.ETHERTYPE_IPV6
            elif protocol == wire.IPPROTO_TCP:
                return _OK
            else:
                return _OTHER_PROTOCOL
            if p[P_FRAGMENT] == 1 and kind == _OK:
                return _FRAGMENT  # the first piece of a tunnel's packet: the inner one is not whole
        elif following in (wire.ETHERTYPE_VLAN, wire.ETHERTYPE_QINQ, wire.ETHERTYPE_QINQ_OLD):
            if at + 4 > captured:
                return _CUT_LINK
            p[P_ETHERTYPE] = be16(data, at + 2)
            p[P_AT] = at + 4
        elif following == wire.ETHERTYPE_ROCE_V1:
            return _grh(data, at, captured, p)
        elif following == wire.ETHERTYPE_MAC_CONTROL:
            p[P_PROTOCOL] = MAC_CONTROL
            return _OK
        elif following in (0x8847, 0x8848, 0x8864, 0x894F):  # MPLS, PPPoE session, NSH
            return _BAD_TUNNEL
        else:
            return _OTHER_ETHERTYPE
    return kind


@inner
def _ethernet(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 14 > captured:
        return _CUT_LINK
    p[P_DST_MAC] = mac(data, at)
    p[P_SRC_MAC] = mac(data, at + 6)
    p[P_ETHERTYPE] = be16(data, at + 12)
    p[P_AT] = at + 14
    return _OK


@inner
def _link(data, at, captured, link, p):  # type: ignore[no-untyped-def]
    if link == wire.LINKTYPE_ETHERNET:
        return _ethernet(data, at, captured, p)
    if link in (wire.LINKTYPE_RAW, wire.LINKTYPE_RAW_OPENBSD):
        p[P_ETHERTYPE] = _ANY_IP
        return _OK
    if link == wire.LINKTYPE_IPV4:
        p[P_ETHERTYPE] = wire.ETHERTYPE_IPV4
        return _OK
    if link == wire.LINKTYPE_IPV6:
        p[P_ETHERTYPE] = wire.ETHERTYPE_IPV6
        return _OK
    if link in (wire.LINKTYPE_NULL, wire.LINKTYPE_LOOP):
        if at + 4 > captured:
            return _CUT_LINK
        family = le32(data, at)  # the writer's byte order, which the file does not tell
        if family > 0xFFFF:
            family = be32(data, at)
        p[P_AT] = at + 4
        if family == 2:
            p[P_ETHERTYPE] = wire.ETHERTYPE_IPV4
        elif family in (10, 23, 24, 28, 30):  # AF_INET6 of Linux, Windows and the BSDs
            p[P_ETHERTYPE] = wire.ETHERTYPE_IPV6
        else:
            return _OTHER_ETHERTYPE
        return _OK
    if link == wire.LINKTYPE_LINUX_SLL:
        if at + 16 > captured:
            return _CUT_LINK
        _cooked(p, be16(data, at), be16(data, at + 4), mac(data, at + 6))
        p[P_ETHERTYPE] = be16(data, at + 14)
        p[P_AT] = at + 16
        return _OK
    if link == wire.LINKTYPE_LINUX_SLL2:
        if at + 20 > captured:
            return _CUT_LINK
        _cooked(p, be16(data, at + 10) >> 8, be16(data, at + 10) & 255, mac(data, at + 12))
        p[P_ETHERTYPE] = be16(data, at)
        p[P_AT] = at + 20
        return _OK
    return _BAD_LINK


@inner
def _cooked(p, packet_type, address_bytes, address):  # type: ignore[no-untyped-def]
    """Sender's address and direction of a Linux cooked header."""
    if address_bytes == 6:
        p[P_SRC_MAC] = address
    if packet_type == 4:
        p[P_DIRECTION] = _OUTBOUND
    elif packet_type <= 2:
        p[P_DIRECTION] = _INBOUND


@inner
def _any_ip(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 2 > captured:
        return _CUT_IP
    version = be16(data, at) >> 12
    if version == 4:
        p[P_ETHERTYPE] = wire.ETHERTYPE_IPV4
    elif version == 6:
        p[P_ETHERTYPE] = wire.ETHERTYPE_IPV6
    else:
        return _BAD_IP
    return _OK


@inner
def _ipv4(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 20 > captured:
        return _CUT_IP
    first = be16(data, at)
    header = ((first >> 8) & 15) * 4
    total = be16(data, at + 2)
    if first >> 12 != 4 or header < 20:
        return _BAD_IP
    end = at + total
    if total == 0:  # segmentation offload: the kernel had not filled it in yet
        end = p[P_WIRE_END]
    if end < at + header or end - at > wire.MAX_OFFLOADED:
        return _BAD_IP
    if at + header > captured:
        return _CUT_IP
    p[P_FAMILY] = 4
    p[P_TOS] = first & 255
    p[P_SRC_HI] = 0
    p[P_SRC_LO] = be32(data, at + 12) | 0xFFFF00000000
    p[P_DST_HI] = 0
    p[P_DST_LO] = be32(data, at + 16) | 0xFFFF00000000
    p[P_KEY] = le64(data, at + 12)
    p[P_PROTOCOL] = be16(data, at + 8) & 255
    p[P_END] = end
    fragment = be16(data, at + 6)
    if fragment & 0x1FFF:
        return _FRAGMENT
    p[P_FRAGMENT] = (fragment >> 13) & 1
    p[P_ETHERTYPE] = _PROTOCOL
    p[P_AT] = at + header
    return _OK


@inner
def _ipv6(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 40 > captured:
        return _CUT_IP
    first = be16(data, at)
    if first >> 12 != 6:
        return _BAD_IP
    length = be16(data, at + 4)
    end = at + 40 + length
    if length == 0:  # jumbogram or segmentation offload
        end = p[P_WIRE_END]
        if end - at > wire.MAX_OFFLOADED:
            return _BAD_IP
    p[P_FAMILY] = 6
    p[P_TOS] = (first >> 4) & 255
    p[P_SRC_HI] = be64(data, at + 8)
    p[P_SRC_LO] = be64(data, at + 16)
    p[P_DST_HI] = be64(data, at + 24)
    p[P_DST_LO] = be64(data, at + 32)
    p[P_KEY] = 0
    p[P_END] = end
    p[P_FRAGMENT] = 0
    following = be16(data, at + 6) >> 8
    at += 40
    for _ in range(_MAX_LAYERS):
        if following not in (0, 43, 44, 51, 60, 135, 139, 140):
            p[P_PROTOCOL] = following
            p[P_ETHERTYPE] = _PROTOCOL
            p[P_AT] = at
            return _OK
        if at + 8 > end:
            return _BAD_IP
        if at + 8 > captured:
            return _CUT_IP
        first = be16(data, at)
        size = ((first & 255) + 1) * 8
        if following == 44:
            size = 8
            offset = be16(data, at + 2)
            if offset & 0xFFF8:
                return _FRAGMENT
            p[P_FRAGMENT] = offset & 1
        elif following == 51:  # AH counts in units of four bytes
            size = ((first & 255) + 2) * 4
        following = first >> 8
        at += size
    return _BAD_IP


@inner
def _grh(data, at, captured, p):  # type: ignore[no-untyped-def]
    """RoCEv1: a global route header, of IPv6's form, then the BTH (IBA annex A16)."""
    if at + 40 > captured:
        return _CUT_IP
    first = be16(data, at)
    if first >> 12 != 6 or be16(data, at + 6) >> 8 != 0x1B:
        return _BAD_ROCE
    p[P_FAMILY] = 6
    p[P_TOS] = (first >> 4) & 255
    p[P_SRC_HI] = be64(data, at + 8)
    p[P_SRC_LO] = be64(data, at + 16)
    p[P_DST_HI] = be64(data, at + 24)
    p[P_DST_LO] = be64(data, at + 32)
    p[P_END] = at + 40 + be16(data, at + 4)
    p[P_AT] = at + 40
    p[P_PROTOCOL] = ROCE_V1
    return _OK


@inner
def _udp_tunnel(data, at, captured, p):  # type: ignore[no-untyped-def]
    """Step into VXLAN or Geneve; leaves P_ETHERTYPE alone where the datagram is neither."""
    if at + 8 > p[P_END]:
        return _BAD_TRANSPORT
    if at + 8 > captured:
        return _CUT_TRANSPORT
    port = be16(data, at + 2)
    if port not in (wire.VXLAN_PORT, wire.GENEVE_PORT):
        return _OK
    at += 8
    p[P_ETHERTYPE] = _ETHERNET
    if at + 8 > captured:
        return _CUT_TRANSPORT
    p[P_OUTER_CE] |= 1 if p[P_TOS] & 3 == _ECN_CE else 0
    if port == wire.VXLAN_PORT:
        p[P_AT] = at + 8
        return _OK
    first = be16(data, at)
    if first >> 14 != 0:
        return _BAD_TUNNEL
    inner_type = be16(data, at + 2)
    p[P_AT] = at + 8 + ((first >> 8) & 63) * 4
    return _inside(inner_type, p)


@inner
def _inside(inner_type, p):  # type: ignore[no-untyped-def]
    """What a tunnel's protocol field announces."""
    if inner_type == wire.ETHERTYPE_TEB:
        p[P_ETHERTYPE] = _ETHERNET
    elif inner_type in (wire.ETHERTYPE_IPV4, wire.ETHERTYPE_IPV6):
        p[P_ETHERTYPE] = inner_type
    else:
        return _BAD_TUNNEL
    return _OK


@inner
def _gre(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 4 > p[P_END]:
        return _BAD_TRANSPORT
    if at + 4 > captured:
        return _CUT_TRANSPORT
    flags = be16(data, at)
    inner_type = be16(data, at + 2)
    if flags & 7 or flags & 0x4000:  # version 1 is PPTP; routing is long gone
        return _BAD_TUNNEL
    at += 4 + (4 if flags & 0x8000 else 0) + (4 if flags & 0x2000 else 0) + (4 if flags & 0x1000 else 0)
    if inner_type == wire.ETHERTYPE_ERSPAN_II:
        p[P_ETHERTYPE] = _ETHERNET
        p[P_AT] = at
        if flags & 0x1000:  # type II; type I has neither sequence number nor header
            if at + 8 > captured:
                return _CUT_TRANSPORT
            p[P_AT] = at + 8
        return _OK
    if inner_type == wire.ETHERTYPE_ERSPAN_III:
        return _erspan3(data, at, captured, p)
    p[P_AT] = at
    return _inside(inner_type, p)


@inner
def _erspan3(data, at, captured, p):  # type: ignore[no-untyped-def]
    if at + 12 > captured:
        return _CUT_TRANSPORT
    if be16(data, at) >> 12 != 2:
        return _BAD_TUNNEL
    bits = be16(data, at + 10)
    sub_header = bits & 1
    if sub_header == 1 and at + 20 > captured:
        return _CUT_TRANSPORT
    frame_type = (bits >> 10) & 31
    if frame_type == 0:
        p[P_ETHERTYPE] = _ETHERNET
    elif frame_type == 2:
        p[P_ETHERTYPE] = _ANY_IP
    else:
        return _BAD_TUNNEL
    if sub_header == 1 and (bits >> 1) & 3 == 2:
        platform = be32(data, at + 12) >> 26
        fraction = be32(data, at + 4)
        if platform in (5, 6) and fraction < 1_000_000_000:
            p[P_STAMP] = be32(data, at + 16) * 1_000_000_000 + fraction
    p[P_AT] = at + 12 + 8 * sub_header
    return _OK
