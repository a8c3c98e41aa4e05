"""Every record dpuflow passes from one stage to the next, declared once, field by field.

Kernels, files, the eBPF header and the docs are made from these tables. Times are integer nanoseconds;
``NEVER``: nobody saw it. Records are little endian, in natural alignment, largest fields first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

SCHEMA_ID: Final = "dpuflow.records/1"
ANALYSIS_ID: Final = "dpuflow.analysis/1"

NEVER: Final = -(1 << 63)  # a time that was not seen
NONE32: Final = 0xFFFFFFFF  # no such row

_QUICK: Final = frozenset(
    ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "bitwise_and")
)


class Code(IntEnum):
    """What a number in a column stands for.

    NumPy takes such a member for an int64, so that a column of bytes becomes one of these before they are
    compared, in ten times the time. Here it is handed over as a plain number, which takes the column's type.
    """

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        from numpy import int64

        number = int if ufunc.__name__ in _QUICK else int64
        own = (number(each) if isinstance(each, Code) else each for each in inputs)
        return getattr(ufunc, method)(*own, **options)


@dataclass(frozen=True)
class Field:
    """One column: its name, NumPy type, unit ("" where it has none) and meaning."""

    name: str
    type: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Record:
    """A named list of fields; ``dtype`` is the row, ``columns`` the same as separate arrays."""

    name: str
    meaning: str
    fields: tuple[Field, ...]

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """The row as a structured dtype in natural alignment."""
        import numpy as np  # late: the agent's API takes names from here, and 8 MiB less without

        return np.dtype([(f.name, f.type) for f in self.fields], align=True)

    def zeros(self, rows: int) -> NDArray[np.void]:
        """``rows`` rows, all zero."""
        import numpy as np

        return np.zeros(rows, self.dtype)

    def columns(self, rows: int) -> dict[str, NDArray[np.generic]]:
        """Separate arrays of ``rows`` elements, one a field."""
        import numpy as np

        return {f.name: np.zeros(rows, f.type) for f in self.fields}

    def check(self, array: NDArray[np.void]) -> None:
        """Assert that ``array`` holds rows of this record."""
        expected: DTypeLike = self.dtype
        assert array.dtype == expected, f"{self.name} rows expected, got {array.dtype}"


def make_record(name: str, meaning: str, *fields: tuple[str, str, str, str]) -> Record:
    """A record from its name, its meaning and (name, type, unit, meaning) of each field."""
    return Record(name, meaning, tuple(Field(*f) for f in fields))


class Kind(Code):
    """What a captured packet is: carried on (below 64), or the reason it was skipped."""

    NONE = 0
    ROCE_V2 = 1
    ROCE_V1 = 2
    TCP = 3
    PAUSE = 4
    # -- skipped: carries nothing dpuflow reads -------------------------------------------
    OTHER_ETHERTYPE = 64  # ARP, LLDP and the like
    OTHER_IP_PROTOCOL = 65
    OTHER_UDP = 66
    FRAGMENT = 67  # a later IP fragment: its transport header is elsewhere
    # -- skipped: not supported -----------------------------------------------------------
    UNSUPPORTED_LINK_TYPE = 80
    UNSUPPORTED_OPCODE = 81
    UNSUPPORTED_BTH_VERSION = 82
    UNSUPPORTED_TUNNEL = 83
    # -- skipped: the snap length cut the header off --------------------------------------
    CUT_LINK = 96
    CUT_IP = 97
    CUT_TRANSPORT = 98  # TCP, UDP, GRE or a tunnel's header
    CUT_BTH = 99
    # -- skipped: contradicts itself ------------------------------------------------------
    MALFORMED_IP = 112
    MALFORMED_TRANSPORT = 113
    MALFORMED_ROCE = 114  # lengths leave no room for the headers the opcode needs


FIRST_SKIP: Final = 64
"""Kinds from here on are reasons for skipping; see ``Kind``."""


class Direction(Code):
    """Which way a packet crossed the vantage point's interface, where the file tells."""

    UNKNOWN = 0
    INBOUND = 1
    OUTBOUND = 2


class BthFlag(Code):
    """Bits of PACKET.flags for RoCE packets."""

    ACK_REQ = 1
    BECN = 2
    FECN = 4
    SOLICITED = 8
    MIG_REQ = 16
    PAD_SHIFT = 5  # bits 5 and 6: pad count
    EXTENSION_CUT = 128  # an extended header lies beyond the snap length


class TcpFlag(Code):
    """Bits of TCP.flags, as on the wire (RFC 9293 section 3.1)."""

    FIN = 1
    SYN = 2
    RST = 4
    PSH = 8
    ACK = 16
    URG = 32
    ECE = 64
    CWR = 128


class Transport(Code):
    """What carries a flow."""

    ROCE = 1
    TCP = 2


class Role(Code):
    """What a message is to the transfer it belongs to, whatever library sent it."""

    DATA = 0  # carries the payload of a transfer
    OFFER = 1  # sender: data is ready (Gloo SEND_READY, ob1 RNDV, UCX RTS)
    GRANT = 2  # receiver: send now (Gloo RECV_READY, ob1 PUT request, NCCL CTS, UCX RTR)
    DONE = 3  # sender: all was sent (ob1 FIN); receiver: all was read (UCX ATS, rxm)
    CONTROL = 4  # set-up, not part of any transfer (hello, CM MADs)
    BURST = 5  # TCP bytes whose framing is not known


class Wire(Code):
    """The form of a message on the wire."""

    UNKNOWN = 0
    ROCE_SEND = 1
    ROCE_WRITE = 2
    ROCE_WRITE_IMM = 3
    ROCE_READ = 4
    ROCE_ATOMIC = 5
    ROCE_SEND_IMM = 6
    ROCE_DATAGRAM = 7
    ROCE_CM = 8
    GLOO_HELLO = 16
    GLOO_DATA = 17
    GLOO_SEND_READY = 18
    GLOO_RECV_READY = 19
    OB1_HELLO = 32
    OB1_MATCH = 33
    OB1_RNDV = 34
    OB1_PUT_REQUEST = 35
    OB1_PUT = 36
    OB1_FIN = 37
    OB1_OTHER = 38
    NCCL_HELLO = 48
    NCCL_DATA = 49
    NCCL_SETUP = 50  # whatever NCCL's processes exchange before: bootstrap, proxies, net_ib's queue pairs
    TAGGED = 56  # UCX or libfabric over TCP: what an MPI library's tags name
    TAGGED_OTHER = 57  # the same two libraries' own traffic
    TAGGED_DONE = 58  # says that all data has come; exchanges: the sender waited to know
    TCP_BURST = 64


class Op(Code):
    """Operations, tokens of the result format (``token``)."""

    UNKNOWN = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    REDUCE = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    BARRIER = 7
    GATHER = 8
    SCATTER = 9
    SEND_RECV = 10

    @property
    def token(self) -> str:
        """The name in results."""
        return self.name.lower()


class MessageFlag(Code):
    """Bits of MESSAGE.flags and TRANSFER.flags."""

    STARTS_BEFORE = 1  # its beginning lies before the capture
    ENDS_AFTER = 2  # its end lies after the capture
    GAP = 4  # packets of it are missing from the capture
    HIDDEN = 8  # its header was not seen whole (beyond the snap length): fields are inferred
    REORDERED = 16  # packets of it came out of order
    OPENING = 32  # the first on a connection whose beginning was captured (libraries that tag messages)
    HOLDS_SENDER = 64  # the call that sends it returns when it is acknowledged (libfabric)


PACKET: Final = make_record(
    "packet",
    "One row per record of a capture, in order of time within a block; ``frame`` tells the file order.",
    ("time_ns", "i8", "ns", "time stamp on the capture's own clock, since the epoch"),
    ("flow", "u4", "row", "row of the FLOW table, NONE32 where skipped or no flow (pause frames)"),
    ("src", "u4", "row", "row of the ENDPOINT table"),
    ("dst", "u4", "row", "row of the ENDPOINT table"),
    ("wire_len", "u4", "B", "length on the wire, as the record states it"),
    ("payload", "u4", "B", "transport payload on the wire, without pad and ICRC, from the headers"),
    ("data_at", "u4", "B", "where the captured transport payload starts in the block's bytes"),
    ("dest_qp", "u4", "", "BTH destination QP; 0 for TCP"),
    ("psn", "u4", "", "BTH packet sequence number; 0 for TCP"),
    ("frame", "u4", "row", "number of the record in the capture, from 0, over all of its files"),
    ("sport", "u2", "", "UDP or TCP source port"),
    ("dport", "u2", "", "UDP or TCP destination port"),
    ("data_len", "u2", "B", "captured bytes of the transport payload"),
    ("iface", "u2", "", "interface number within a pcapng section, else 0"),
    ("opcode", "u1", "", "BTH opcode; for TCP the TCP flags"),
    ("flags", "u1", "", "BthFlag bits; 0 for TCP"),
    ("tos", "u1", "", "IPv4 TOS or IPv6 traffic class: DSCP << 2 | ECN"),
    ("kind", "u1", "", "Kind"),
    ("direction", "u1", "", "Direction"),
)

RETH = make_record(
    "reth",
    "RDMA extended transport headers of a block, sparse, in packet order.",
    ("va", "u8", "B", "virtual address"),
    ("packet", "u4", "row", "row of the block"),
    ("dma_len", "u4", "B", "length of the whole message"),
    ("rkey", "u4", "", "remote key"),
)

AETH = make_record(
    "aeth",
    "ACK extended transport headers of a block, sparse, in packet order.",
    ("packet", "u4", "row", "row of the block"),
    ("msn", "u4", "", "message sequence number, 24 bit"),
    ("syndrome", "u4", "", "AETH syndrome, 8 bit"),
)

IMM = make_record(
    "imm",
    "Immediate data, and the rkey of IETH (invalidate), sparse, in packet order.",
    ("packet", "u4", "row", "row of the block"),
    ("value", "u4", "", "the four bytes, read big endian"),
)

DETH = make_record(
    "deth",
    "Datagram extended transport headers of a block, sparse, in packet order.",
    ("packet", "u4", "row", "row of the block"),
    ("qkey", "u4", "", "queue key"),
    ("src_qp", "u4", "", "source QP"),
)

ATOMIC = make_record(
    "atomic",
    "Atomic extended transport headers of a block, sparse, in packet order.",
    ("va", "u8", "B", "virtual address"),
    ("swap_add", "u8", "", "swap or add operand"),
    ("compare", "u8", "", "compare operand"),
    ("packet", "u4", "row", "row of the block"),
    ("rkey", "u4", "", "remote key"),
)

TCP = make_record(
    "tcp",
    "TCP headers of a block, sparse, in packet order (RFC 9293, RFC 7323, RFC 2018).",
    ("packet", "u4", "row", "row of the block"),
    ("seq", "u4", "", "sequence number"),
    ("ack", "u4", "", "acknowledgment number"),
    ("tsval", "u4", "", "timestamp value, 0 without the option"),
    ("tsecr", "u4", "", "timestamp echo reply, 0 without the option"),
    ("sack_left", "u4", "", "left edge of the first SACK block, 0 without the option"),
    ("sack_right", "u4", "", "right edge of the first SACK block"),
    ("window", "u2", "", "receive window as on the wire, before scaling"),
    ("flags", "u1", "", "TcpFlag bits"),
    ("wscale", "u1", "", "window scale option of a SYN, 255 without"),
)

PAUSE = make_record(
    "pause",
    "MAC control pause frames of a block (IEEE 802.3 annex 31B, 802.1Q priority flow control).",
    ("src_mac", "u8", "", "Ethernet address of the sender"),
    ("packet", "u4", "row", "row of the block"),
    ("opcode", "u2", "", "0x0001 pause, 0x0101 priority flow control"),
    ("classes", "u2", "", "enabled priorities, one bit each; 0 for plain pause"),
    ("quanta", "(8,)u2", "512 bit times", "pause time per priority; plain pause in the first"),
)

ENDPOINT = make_record(
    "endpoint",
    "An address seen in a capture.",
    ("addr_hi", "u8", "", "upper half of the IPv6 address or GID, big endian value"),
    ("addr_lo", "u8", "", "lower half; IPv4 a.b.c.d is ::ffff:a.b.c.d"),
    ("mac", "u8", "", "Ethernet address, 0 where not seen"),
    ("packets_out", "u8", "packets", "packets it sent"),
    ("packets_in", "u8", "packets", "packets sent to it"),
)

FLOW = make_record(
    "flow",
    "One direction of a conversation as one capture saw it.",
    ("packets", "u8", "packets", "packets seen"),
    ("bytes", "u8", "B", "transport payload on the wire, retransmissions included"),
    ("first_ns", "i8", "ns", "first packet"),
    ("last_ns", "i8", "ns", "last packet"),
    ("rtt_min_ns", "i8", "ns", "smallest time from a message's last packet to its ACK; NEVER if none"),
    ("src", "u4", "row", "row of the ENDPOINT table"),
    ("dst", "u4", "row", "row of the ENDPOINT table"),
    ("dest_qp", "u4", "", "RoCE destination QP"),
    ("peer", "u4", "row", "the opposite flow of the same connection, NONE32 if not known"),
    ("messages", "u4", "", "messages seen"),
    ("retransmitted", "u4", "packets", "packets whose bytes or PSN had been sent before"),
    ("out_of_order", "u4", "packets", "packets that came before one they should follow"),
    ("missing", "u4", "packets", "holes (RoCE: PSNs, TCP: segments) acknowledged yet not captured"),
    ("ecn_marked", "u4", "packets", "packets marked CE"),
    ("cnp", "u4", "packets", "congestion notification packets"),
    ("nak", "u4", "packets", "NAKs that this flow carried (they complain of the opposite one)"),
    ("rnr", "u4", "packets", "RNR NAKs that this flow carried"),
    ("zero_window", "u4", "packets", "TCP segments that announced a window of zero"),
    ("spurious", "u4", "packets", "of those retransmitted, what the receiver had already (TCP)"),
    ("sport", "u2", "", "source port (RoCE: of the first packet; it is no key)"),
    ("dport", "u2", "", "destination port"),
    ("transport", "u1", "", "Transport"),
    ("framing", "u1", "", "Framing of a TCP stream"),
    ("pairing", "u1", "", "Pairing: what the peer was told from"),
    ("closed", "u1", "", "1: its sender has ended it, by FIN or RST (TCP)"),
)


class Framing(Code):
    """How messages are told apart in a TCP byte stream."""

    UNKNOWN = 0
    GLOO = 1
    OB1 = 2
    NONE = 3  # looked, and it is none of them: bursts
    NCCL = 4
    UCX = 5
    OFI = 6  # libfabric


class Pairing(Code):
    """What a flow's opposite was told from."""

    UNKNOWN = 0
    PORTS = 1  # TCP: the 4-tuple
    HANDSHAKE = 2  # CM MADs or NCCL's own exchange
    ACKS = 3  # ACKs that echo PSNs
    ONLY = 4  # the only candidate between the two endpoints
    UDP_PORT = 5  # RoCE: both have the UDP source port that the kernel derives from the two QPs


MESSAGE = make_record(
    "message",
    "One application transfer on one flow as one capture saw it, in order of completion.",
    ("first_ns", "i8", "ns", "first packet of it, first time sent"),
    ("last_ns", "i8", "ns", "packet that completed it"),
    ("acked_ns", "i8", "ns", "first ACK that covers its end; NEVER if not seen"),
    ("seq", "u8", "", "extended sequence of its start; low 32 (TCP) or 24 (PSN) bits as on the wire"),
    ("seq_end", "u8", "", "extended sequence just after its end (same extension)"),
    ("bytes", "u8", "B", "payload it carries, without the library's own header"),
    ("announces", "u8", "B", "OFFER and GRANT: bytes of the data they speak of"),
    (
        "va",
        "u8",
        "B",
        "RoCE: virtual address of the RETH; NCCL's CTS: what it announces, 0: unseen; ob1: the request named",
    ),
    ("flow", "u4", "row", "row of the FLOW table"),
    ("packets", "u4", "packets", "packets, retransmissions apart"),
    ("retransmitted", "u4", "packets", "packets of it sent again that the receiver lacked"),
    ("ecn_marked", "u4", "packets", "packets of it marked CE"),
    ("context", "u4", "", "communicator the library names (ob1 context), else 0"),
    ("tag", "u4", "", "match key: Gloo slot tag, MPI tag, RoCE immediate"),
    (
        "sub",
        "u4",
        "",
        "position within the tag: Gloo delta, ob1 number, CTS index; RoCE, NCCL: first bytes; MPI on it: seq",
    ),
    ("rkey", "u4", "", "RoCE: remote key of the RETH; 0: not seen, or none"),
    ("first_frame", "u4", "row", "frame number of its first packet, from 0"),
    ("last_frame", "u4", "row", "frame number of the packet that completed it"),
    ("wire", "u1", "", "Wire"),
    ("role", "u1", "", "Role"),
    ("op", "u1", "", "Op that the library's own header names, else UNKNOWN"),
    ("flags", "u1", "", "MessageFlag bits"),
)

SETUP = make_record(
    "setup",
    "A queue pair of NCCL's net_ib as its two sides told each other over TCP, in order of time.",
    ("time_ns", "i8", "ns", "when the answer was complete, on the capture's own clock"),
    ("src_hi", "u8", "", "GID of the data's sender, upper half; where it was cut off, its socket's address"),
    ("src_lo", "u8", "", "lower half"),
    ("dst_hi", "u8", "", "the same of the receiver"),
    ("dst_lo", "u8", "", "lower half"),
    ("entries_va", "u8", "B", "where the receiver writes its clear-to-send entries; 0: cut off"),
    ("src_qp", "u4", "", "queue pair of the data's sender"),
    ("dst_qp", "u4", "", "queue pair of the receiver"),
    ("entries_rkey", "u4", "", "the key for that; 0: cut off"),
    ("connection", "u4", "", "number of the connection: its queue pairs have the same"),
    ("place", "u2", "", "which of its connection's queue pairs it is"),
    ("since", "u2", "", "first version of NCCL that tells it so: 230 for 2.30, 229 also for 2.29.7"),
    ("mtu", "u2", "B", "path MTU; 0: cut off"),
    ("addressed", "u1", "", "bits: 1 the sender's, 2 the receiver's GID was captured"),
)

MEMBER = make_record(
    "member",
    "A rank of an NCCL communicator as the bootstrap's sockets name it.",
    ("magic", "u8", "", "the communicator's number on these sockets"),
    ("addr_hi", "u8", "", "address of its sockets, upper half; 0 both: not captured"),
    ("addr_lo", "u8", "", "lower half"),
    ("host", "u8", "", "hash of its host, the same for all ranks there; 0: not captured"),
    ("rank", "u4", "", "its number"),
    ("ranks", "u4", "", "how many the communicator has"),
)

TRANSFER = make_record(
    "transfer",
    "One message as all vantage points together saw it, on the reference clock, in order of sent_ns.",
    ("sent_ns", "i8", "ns", "first packet, at the vantage point nearest the sender"),
    ("sent_end_ns", "i8", "ns", "last packet, same place"),
    ("arrived_ns", "i8", "ns", "first packet, at the vantage point nearest the receiver"),
    ("arrived_end_ns", "i8", "ns", "completed, same place"),
    ("acked_ns", "i8", "ns", "ACK of its end, at the vantage point nearest the sender; NEVER if none"),
    ("taken_ns", "i8", "ns", "the same as it left the receiver's own node; NEVER if that was not captured"),
    ("bytes", "u8", "B", "as in MESSAGE"),
    ("announces", "u8", "B", "as in MESSAGE"),
    ("va", "u8", "B", "as in MESSAGE"),
    ("seq", "u8", "", "as in MESSAGE"),
    ("connection", "u4", "", "number of the connection (a pair of flows), over all captures"),
    ("src", "u4", "row", "endpoint, over all captures"),
    ("dst", "u4", "row", "endpoint, over all captures"),
    ("context", "u4", "", "as in MESSAGE"),
    ("tag", "u4", "", "as in MESSAGE"),
    ("sub", "u4", "", "as in MESSAGE"),
    ("packets", "u4", "packets", "as in MESSAGE, at the sender"),
    ("retransmitted", "u4", "packets", "most that any vantage point saw"),
    ("ecn_marked", "u4", "packets", "most that any vantage point saw"),
    ("capture", "u2", "", "capture of the sighting nearest the sender"),
    ("arrival_capture", "u2", "", "capture of the sighting nearest the receiver"),
    ("message", "u4", "row", "its MESSAGE row in ``capture``"),
    ("arrival_message", "u4", "row", "its MESSAGE row in ``arrival_capture``"),
    ("wire", "u1", "", "Wire"),
    ("role", "u1", "", "Role"),
    ("op", "u1", "", "as in MESSAGE"),
    ("flags", "u1", "", "MessageFlag bits, of all sightings"),
    ("seen", "u1", "", "Seen bits: how near the sender and the receiver it was seen"),
)


class Seen(Code):
    """Bits of TRANSFER.seen."""

    AT_SENDER = 1  # sent_ns is the sender's own node's stamp
    AT_RECEIVER = 2  # arrived_ns is the receiver's own node's stamp


EXCHANGE: Final = make_record(
    "exchange",
    "One transfer of data from src to dst with the hand-shake around it, in order of its first sign.",
    ("offer_ns", "i8", "ns", "sender announced the data; NEVER if it does not or it was not seen"),
    ("offer_arrived_ns", "i8", "ns", "the same at the receiver"),
    ("grant_ns", "i8", "ns", "receiver allowed the data; NEVER if it does not or it was not seen"),
    ("grant_arrived_ns", "i8", "ns", "the same at the sender"),
    ("data_ns", "i8", "ns", "first packet of the data at the sender"),
    ("data_end_ns", "i8", "ns", "last packet of the data at the sender"),
    ("arrived_ns", "i8", "ns", "first packet of the data at the receiver"),
    ("arrived_end_ns", "i8", "ns", "last packet of the data at the receiver"),
    ("acked_ns", "i8", "ns", "ACK of the data's end, at the sender; NEVER if none"),
    ("taken_ns", "i8", "ns", "the receiver's host had it: its ACK left, or its word that it has read"),
    ("bytes", "u8", "B", "payload"),
    ("connection", "u4", "", "as in TRANSFER"),
    ("src", "u4", "row", "endpoint that sends the data"),
    ("dst", "u4", "row", "endpoint that receives it"),
    ("context", "u4", "", "as in MESSAGE; RoCE without framing, NCCL: ``sub`` of the data"),
    ("tag", "u4", "", "as in MESSAGE"),
    ("sub", "u4", "", "as in MESSAGE"),
    ("order", "u4", "", "its place among the exchanges of the same direction of the connection"),
    ("packets", "u4", "packets", "packets of the data"),
    ("retransmitted", "u4", "packets", "packets sent again, hand-shake included"),
    ("ecn_marked", "u4", "packets", "packets marked CE"),
    ("offer", "u4", "row", "TRANSFER row of the offer, NONE32 if none"),
    ("grant", "u4", "row", "TRANSFER row of the grant, NONE32 if none"),
    ("data", "u4", "row", "TRANSFER row of the (first) data, NONE32 if none"),
    ("wire", "u1", "", "Wire of the data; without data of the offer, without both of the grant"),
    ("op", "u1", "", "Op that the library names, else UNKNOWN"),
    ("flags", "u1", "", "MessageFlag bits, of all its messages"),
    ("seen", "u1", "", "Seen bits common to its messages, of the data's sender and receiver"),
)
