"""What the eBPF programs and user space share: ring records, counters and settings, declared once.

``schema_c`` prints them as the C header that the programs include. Little endian, natural alignment,
largest fields first, padding named.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Final

from dpuflow.schema.rows import SCHEMA_ID, Record, make_record
from dpuflow.wire import headers as wire

MAX_HOSTS: Final = 8
MAX_PORTS: Final = 8
MAX_QPS: Final = 16
MAX_VLANS: Final = 8
RUN_PACKETS: Final = 64  # a longer run is several: folding 64 to 1 leaves 1/64 of the work
RUN_NS: Final = 1_000_000  # a run that has lasted longer ends with the next packet
RUN_HEAD: Final = 104  # bytes of headers that a run keeps: all that the programs read
MAX_FLOWS: Final = 1 << 16  # flows whose packets are folded at a time; those of more go on unfolded
MAX_SNAPLEN: Final = 262_144  # as libpcap; the largest size class of the programs is smaller

SIZE_CLASSES: Final = (64, 128, 256, 1024, 4096, 16384, 65536, MAX_SNAPLEN)
"""Bytes of packet that a ring record has room for: the kernel wants constants, and an ACK of 62 bytes
should not take the room of a jumbo frame."""


# Each CPU's own ring, which it alone writes: a cell of one mapped array. Position of the writer, of the
# reader (on another cache line), and the ring, which goes on behind its end as far as one record may reach.
CELL_HEAD: Final = 0
CELL_TAIL: Final = 64
CELL_DATA: Final = 128
CELL_RECORD: Final = 152  # the longest record there: 128 bytes of a packet, or a run
MAX_CELL: Final = 1 << 28  # far enough below what the verifier takes as an offset


class RingKind(IntEnum):
    """What a ring record is."""

    PACKET = 0
    RUN = 1  # RING_RUN follows, and headers instead of a packet's bytes


class Protocol(IntEnum):
    """Bits of settings.protocols: what is captured."""

    ROCE_V2 = 1
    ROCE_V1 = 2
    TCP = 4
    PAUSE = 8  # MAC control frames
    OTHER = 16  # everything else


RING_PACKET: Final = make_record(
    "ring_packet",
    "What stands before a packet's bytes in the ring.",
    ("time_ns", "u8", "ns", "the kernel's monotonic clock plus settings.clock_ns"),
    ("wire_len", "u4", "B", "length on the wire, VLAN tag included"),
    ("captured", "u4", "B", "bytes that follow"),
    ("flow_hash", "u4", "", "hash of addresses and QP or ports, 0 for neither RoCE nor TCP"),
    ("iface", "u1", "", "number of the interface, settings.iface"),
    ("direction", "u1", "", "Direction"),
    ("ends", "u1", "", "1 where the packet ends a RoCE message"),
    ("kind", "u1", "", "RingKind"),
)

RING_RUN: Final = make_record(
    "ring_run",
    "What follows RING_PACKET where that stands for a run of MIDDLE packets with consecutive PSNs, and stands"
    " before the headers of a packet of the same flow; time_ns and wire_len are the last packet's.",
    ("first_ns", "u8", "ns", "the first packet's time_ns"),
    ("psn", "u4", "", "the first packet's PSN"),
    ("count", "u4", "packets", "packets in the run"),
    ("marked", "u4", "packets", "those of them that were marked CE"),
    ("opcode", "u1", "", "their BTH opcode"),
    ("bth_at", "u1", "B", "where the BTH stands in the headers"),
    ("ip_at", "u1", "B", "where the IP header stands"),
    ("reserved", "u1", "", "0"),
)

COUNTERS: Final = make_record(
    "counters",
    "What became of each packet that an interface handed over, one such row per CPU; their sum was seen,"
    " the last one apart.",
    ("captured", "u8", "packets", "put into the ring"),
    ("folded", "u8", "packets", "counted into a run in the ring, in messages mode"),
    ("not_wanted", "u8", "packets", "left out by the filters"),
    ("sampled_out", "u8", "packets", "left out by sampling"),
    ("fragment", "u8", "packets", "later IP fragments, whose ports and QP are elsewhere; left out"),
    ("cut", "u8", "packets", "too short for the headers they claim to have; left out"),
    ("ring_full", "u8", "packets", "lost: the ring had no room"),
    ("unreadable", "u8", "packets", "lost: the kernel would not give their bytes"),
    ("no_stamp", "u8", "packets", "of them all: the NIC should have stamped them, and the kernel did"),
)

BESIDE: Final = ("no_stamp",)
"""Counters that tell more of packets which another one counts."""

COUNTER_NAMES: Final = ("seen", *(field.name for field in COUNTERS.fields))
"""As user space has them."""

LOSSES: Final = ("ring_full", "unreadable")
"""The counters of packets that were wanted and are missing from the capture."""

SETTINGS: Final = make_record(
    "settings",
    "Read-only constants of a loaded program; the verifier removes the code that they rule out.",
    ("clock_ns", "u8", "ns", "added to the monotonic clock: wall time at the start of the capture"),
    ("host_hi", f"({MAX_HOSTS},)u8", "", "hosts to capture, upper half as in ENDPOINT"),
    ("host_lo", f"({MAX_HOSTS},)u8", "", "hosts to capture, lower half"),
    ("schema", "u4", "", "the layout's number: a program made for another one is refused"),
    ("snaplen", "u4", "B", "bytes to keep of a packet"),
    ("protocols", "u4", "", "Protocol bits"),
    ("hosts", "u4", "", "how many hosts are listed; 0: all"),
    ("ports", "u4", "", "how many TCP ports are listed; 0: all"),
    ("qps", "u4", "", "how many QPs are listed; 0: all"),
    ("vlans", "u4", "", "how many VLANs are listed; 0: all"),
    ("sample", "u4", "", "of 2^32 pairs of hosts, those whose hash is below are left out; 0: none, ever"),
    ("qp", f"({MAX_QPS},)u4", "", "destination QPs to capture"),
    ("port", f"({MAX_PORTS},)u2", "", "TCP ports to capture, either end"),
    ("vlan", f"({MAX_VLANS},)u2", "", "outer VLAN ids to capture"),
    ("iface", "u4", "", "number of the interface in records"),
    ("cell_mask", "u4", "B", "size of each CPU's own ring minus 1; 0: the kernel's ring buffer alone"),
    ("ordered", "u4", "", "1 where the processor does not reorder stores: a plain one publishes a record"),
    ("atomic", "u4", "", "1 where the kernel has atomic operations that give back what was there"),
    ("hardware", "u4", "", "1 where the NIC stamps what comes, with the clock of PHC"),
    ("reserved", "u4", "", "0"),
)

SAMPLING: Final = make_record(
    "sampling",
    "Which pairs of hosts are left out; user space changes it while packets pass.",
    ("below", "u4", "", "of 2^32 pairs of hosts, those whose hash is below"),
    ("reserved", "u4", "", "0"),
)
PHC: Final = make_record(
    "phc",
    "How the NIC's clock stands to the kernel's monotonic one, two times, of which one is being written.",
    ("which", "u8", "", "0 or 1: the half to use"),
    *(
        row
        for half in (0, 1)
        for row in (
            (f"nic_{half}", "u8", "ns", "the NIC's clock when both were read"),
            (f"time_{half}", "u8", "ns", "the monotonic clock then"),
            (f"rate_{half}", "u8", "2^-32", "how much faster that one runs, signed"),
        )
    ),
)
WALL: Final = make_record(
    "wall",
    "How the wall clock stands to the kernel's monotonic one; user space writes it when somebody sets it.",
    ("real_ns", "u8", "ns", "CLOCK_REALTIME minus the monotonic clock; 0: stamps in wall time are not taken"),
)
PHC_SPAN_NS: Final = 1 << 36  # a stamp further from the reading than a minute is none of this clock

RECORDS: Final[tuple[Record, ...]] = (RING_PACKET, RING_RUN, COUNTERS, SETTINGS, SAMPLING, PHC, WALL)


def layout_number() -> int:
    """One number for the layout of all records here, which changes with any of them."""
    layout = [
        SCHEMA_ID,
        *(f"{record.name} {field.name} {field.type}" for record in RECORDS for field in record.fields),
    ]
    return zlib.crc32("\n".join(layout).encode())


def message_parts() -> tuple[int, int]:
    """Bits as in ``message_ends``: operations that carry data, and those of them that are MIDDLE."""
    carries = (wire.OP_SEND, wire.OP_WRITE, wire.OP_READ_RESPONSE)
    data = {code: op for code, op in wire.OPCODES.items() if code < 32 and op.operation in carries}
    middle = [code for code, op in data.items() if op.place == wire.MIDDLE]
    return sum(1 << code for code in data), sum(1 << code for code in middle)


def message_ends() -> int:
    """A bit for each operation, the low five bits of an opcode, that ends a message which carries data."""
    carries = (wire.OP_SEND, wire.OP_WRITE, wire.OP_READ_RESPONSE)
    return sum(
        1 << code
        for code, opcode in wire.OPCODES.items()
        if code < 32 and opcode.place & wire.LAST and opcode.operation in carries
    )
