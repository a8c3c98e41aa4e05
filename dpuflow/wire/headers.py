"""Wire formats as tables: EtherTypes, link types, RoCE opcodes and header lengths.

Sources: InfiniBand Architecture Specification 1.7 volume 1 chapter 9 and annexes A16, A17
(opcodes, BTH, extended headers, RoCE), the pcap and pcapng Internet-Drafts (link types).
Adding an opcode is adding one line to ``OPCODES``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

ROCE_V2_PORT: Final = 4791
VXLAN_PORT: Final = 4789
GENEVE_PORT: Final = 6081

MAX_OFFLOADED: Final = 8 * 0xFFFF
"""Bytes of the largest packet that segmentation offload shows: BIG TCP (Linux netdevice.h, GSO_MAX_SIZE)."""
ETHERTYPE_IPV4: Final = 0x0800
ETHERTYPE_IPV6: Final = 0x86DD
ETHERTYPE_ARP: Final = 0x0806
ETHERTYPE_VLAN: Final = 0x8100
ETHERTYPE_QINQ: Final = 0x88A8
ETHERTYPE_QINQ_OLD: Final = 0x9100
ETHERTYPE_ROCE_V1: Final = 0x8915
ETHERTYPE_MAC_CONTROL: Final = 0x8808
ETHERTYPE_ERSPAN_II: Final = 0x88BE
ETHERTYPE_ERSPAN_III: Final = 0x22EB
ETHERTYPE_TEB: Final = 0x6558  # transparent Ethernet bridging, inside GRE and Geneve

IPPROTO_TCP: Final = 6
IPPROTO_UDP: Final = 17
IPPROTO_GRE: Final = 47

# Link types (www.tcpdump.org/linktypes.html): those dpuflow reads.
LINKTYPE_NULL: Final = 0
LINKTYPE_ETHERNET: Final = 1
LINKTYPE_RAW: Final = 101
LINKTYPE_RAW_OPENBSD: Final = 12  # DLT_RAW written by some systems
LINKTYPE_LOOP: Final = 108
LINKTYPE_LINUX_SLL: Final = 113
LINKTYPE_IPV4: Final = 228
LINKTYPE_IPV6: Final = 229
LINKTYPE_LINUX_SLL2: Final = 276

LINK_TYPES: Final[dict[int, str]] = {
    LINKTYPE_NULL: "null",
    LINKTYPE_ETHERNET: "ethernet",
    LINKTYPE_RAW: "raw",
    LINKTYPE_RAW_OPENBSD: "raw",
    LINKTYPE_LOOP: "loop",
    LINKTYPE_LINUX_SLL: "linux_sll",
    LINKTYPE_IPV4: "ipv4",
    LINKTYPE_IPV6: "ipv6",
    LINKTYPE_LINUX_SLL2: "linux_sll2",
}
OTHER_LINK_TYPES: Final[dict[int, str]] = {
    6: "token_ring", 9: "ppp", 10: "fddi", 50: "ppp_hdlc", 51: "pppoe", 105: "ieee802_11", 122: "ip_over_fc",
    127: "ieee802_11_radiotap", 138: "apple_ip_over_ieee1394", 187: "bluetooth_hci_h4", 189: "usb_linux",
    192: "ppi", 197: "erf", 220: "usb_linux_mmapped", 224: "fc_2", 227: "can_socketcan", 239: "nflog",
    242: "ipoib", 247: "infiniband", 249: "usbpcap", 253: "netlink", 258: "pktap", 264: "rds",
}  # fmt: skip
"""Names of link types that are not read (tcpdump.org's list): what a report calls them."""

BTH_BYTES: Final = 12
GRH_BYTES: Final = 40
ICRC_BYTES: Final = 4
PSN_BITS: Final = 24
PSN_MASK: Final = 0xFFFFFF

# Extended transport headers: bytes each adds after the BTH, in wire order.
RDETH: Final = 1 << 0
DETH: Final = 1 << 1
XRCETH: Final = 1 << 2
RETH: Final = 1 << 3
ATOMIC: Final = 1 << 4
AETH: Final = 1 << 5
ATOMIC_ACK: Final = 1 << 6
IMM: Final = 1 << 7
IETH: Final = 1 << 8
FETH: Final = 1 << 9
CNP_PAD: Final = 1 << 10

HEADER_BYTES: Final[dict[int, int]] = {
    RDETH: 4, DETH: 8, XRCETH: 4, FETH: 4, RETH: 16, ATOMIC: 28,
    AETH: 4, ATOMIC_ACK: 8, IMM: 4, IETH: 4, CNP_PAD: 16,
}  # fmt: skip

# Place of a packet in its message.
FIRST: Final = 1
MIDDLE: Final = 2
LAST: Final = 4
ONLY: Final = FIRST | LAST

# Operations, the same for all transports.
OP_NONE: Final = 0
OP_SEND: Final = 1
OP_WRITE: Final = 2
OP_READ_REQUEST: Final = 3
OP_READ_RESPONSE: Final = 4
OP_ACK: Final = 5
OP_ATOMIC: Final = 6
OP_ATOMIC_ACK: Final = 7
OP_CNP: Final = 8
OP_FLUSH: Final = 9
OP_ATOMIC_WRITE: Final = 10
OP_RESYNC: Final = 11

TRANSPORTS: Final[dict[str, int]] = {"RC": 0x00, "UC": 0x20, "RD": 0x40, "UD": 0x60, "XRC": 0xA0}
CNP_OPCODE: Final = 0x81


class Opcode(NamedTuple):
    """One BTH opcode: what it is and which headers follow the BTH."""

    code: int
    name: str
    transport: str
    operation: int
    place: int
    headers: int


# Low five bits -> (name, operation, place, headers). IBA volume 1, table 38.
_OPERATIONS: Final = {
    0x00: ("SEND_FIRST", OP_SEND, FIRST, 0),
    0x01: ("SEND_MIDDLE", OP_SEND, MIDDLE, 0),
    0x02: ("SEND_LAST", OP_SEND, LAST, 0),
    0x03: ("SEND_LAST_IMM", OP_SEND, LAST, IMM),
    0x04: ("SEND_ONLY", OP_SEND, ONLY, 0),
    0x05: ("SEND_ONLY_IMM", OP_SEND, ONLY, IMM),
    0x06: ("WRITE_FIRST", OP_WRITE, FIRST, RETH),
    0x07: ("WRITE_MIDDLE", OP_WRITE, MIDDLE, 0),
    0x08: ("WRITE_LAST", OP_WRITE, LAST, 0),
    0x09: ("WRITE_LAST_IMM", OP_WRITE, LAST, IMM),
    0x0A: ("WRITE_ONLY", OP_WRITE, ONLY, RETH),
    0x0B: ("WRITE_ONLY_IMM", OP_WRITE, ONLY, RETH | IMM),
    0x0C: ("READ_REQUEST", OP_READ_REQUEST, ONLY, RETH),
    0x0D: ("READ_RESPONSE_FIRST", OP_READ_RESPONSE, FIRST, AETH),
    0x0E: ("READ_RESPONSE_MIDDLE", OP_READ_RESPONSE, MIDDLE, 0),
    0x0F: ("READ_RESPONSE_LAST", OP_READ_RESPONSE, LAST, AETH),
    0x10: ("READ_RESPONSE_ONLY", OP_READ_RESPONSE, ONLY, AETH),
    0x11: ("ACKNOWLEDGE", OP_ACK, ONLY, AETH),
    0x12: ("ATOMIC_ACKNOWLEDGE", OP_ATOMIC_ACK, ONLY, AETH | ATOMIC_ACK),
    0x13: ("COMPARE_SWAP", OP_ATOMIC, ONLY, ATOMIC),
    0x14: ("FETCH_ADD", OP_ATOMIC, ONLY, ATOMIC),
    0x15: ("RESYNC", OP_RESYNC, ONLY, 0),
    0x16: ("SEND_LAST_INVALIDATE", OP_SEND, LAST, IETH),
    0x17: ("SEND_ONLY_INVALIDATE", OP_SEND, ONLY, IETH),
    0x1C: ("FLUSH", OP_FLUSH, ONLY, FETH | RETH),
    0x1D: ("ATOMIC_WRITE", OP_ATOMIC_WRITE, ONLY, RETH),
}

_RELIABLE_ONLY: Final = frozenset({0x0C, 0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12, 0x13, 0x14, 0x1C, 0x1D})
_RESPONSES: Final = frozenset({0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12})


def _opcodes() -> dict[int, Opcode]:
    table: dict[int, Opcode] = {}
    for transport, base in TRANSPORTS.items():
        for low, (name, operation, place, headers) in _OPERATIONS.items():
            if transport == "UC" and (low in _RELIABLE_ONLY or low >= 0x15):
                continue
            if transport == "UD" and low not in (0x04, 0x05):
                continue
            if low == 0x15 and transport != "RD":
                continue
            if transport == "RD":
                if low >= 0x16:
                    continue
                headers |= RDETH | (0 if low in _RESPONSES else DETH)
            if transport == "UD":
                headers |= DETH
            if transport == "XRC" and low not in _RESPONSES:
                headers |= XRCETH
            code = base | low
            table[code] = Opcode(code, f"{transport}_{name}", transport, operation, place, headers)
    table[CNP_OPCODE] = Opcode(CNP_OPCODE, "CNP", "CNP", OP_CNP, ONLY, CNP_PAD)
    return table


OPCODES: Final[dict[int, Opcode]] = _opcodes()

# AETH syndrome, top three bits (IBA volume 1, 9.7.5.1.1).
SYNDROME_ACK: Final = 0
SYNDROME_RNR: Final = 1
SYNDROME_NAK: Final = 3
NAK_CODES: Final[dict[int, str]] = {
    0x60: "psn_sequence_error",
    0x61: "invalid_request",
    0x62: "remote_access_error",
    0x63: "remote_operational_error",
    0x64: "invalid_rd_request",
}
