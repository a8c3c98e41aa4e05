"""Message headers of collective libraries inside TCP byte streams, as tables.

Gloo: the 48-byte preamble of gloo/transport/tcp/pair.h (six little-endian u64) and the slot
prefixes of gloo/types.h. Open MPI: the TCP BTL's headers (opal/mca/btl/tcp/btl_tcp_hdr.h) and
those of pml ob1 (ompi/mca/pml/ob1/pml_ob1_hdr.h), the tags of ompi/mca/coll/base/coll_tags.h.
UCX's tcp transport (src/uct/tcp/tcp.h: an active message's id and length) with UCP's headers behind it
(src/ucp/tag/eager.h, src/ucp/rndv/rndv.h); libfabric's tcp provider (prov/tcp/src/xnet_proto.h), below
rxm where that is used (prov/rxm/src/rxm.h). What their tags mean is told in ``messages.matchbits``.
NCCL's sockets: a size before each message (NCCL 2.30, src/transport/net_socket.cc, src/misc/socket.cc).
All write native byte order, which is little endian on today's hosts.
"""

from __future__ import annotations

from typing import Final

from dpuflow.schema.rows import Op

# -- Gloo -------------------------------------------------------------------------------------
GLOO_PREAMBLE: Final = 48
GLOO_HELLO: Final = 8  # the initiator's rank, u64, first bytes of its stream

# Offsets of the u64 fields of the preamble.
GLOO_NBYTES: Final = 0  # preamble and payload together
GLOO_OPCODE: Final = 8
GLOO_SLOT: Final = 16
GLOO_OFFSET: Final = 24
GLOO_LENGTH: Final = 32  # READY: of the data to come
GLOO_ROFFSET: Final = 40

GLOO_SEND_BUFFER: Final = 0  # to a registered buffer (legacy algorithms)
GLOO_SEND_UNBOUND: Final = 1
GLOO_NOTIFY_SEND: Final = 2
GLOO_NOTIFY_RECV: Final = 3

# Slot = prefix << 56 | tag << 24 | delta.
GLOO_PREFIX: Final[dict[int, Op]] = {
    0: Op.SEND_RECV,
    1: Op.GATHER,
    2: Op.ALL_GATHER,
    3: Op.REDUCE,
    4: Op.ALL_REDUCE,
    5: Op.SCATTER,
    6: Op.BROADCAST,
    7: Op.BARRIER,
    8: Op.ALL_TO_ALL,
}

# -- Open MPI: TCP BTL, ob1 -------------------------------------------------------------------
OB1_HELLO: Final = 24  # u32 job, u32 rank, text of 16 bytes; both sides
OB1_MAGIC: Final = b"OPAL-TCP-BTL"
OB1_MAGIC_AT: Final = 8

BTL_HEADER: Final = 8  # u8 tag, u8 type, u16 count, u32 size
BTL_DESCRIPTOR: Final = 16  # u64 address, u64 length: `count` of them follow the header of a put
BTL_SEND: Final = 1
BTL_PUT: Final = 2
BTL_TAG_PUT: Final = 0x20

OB1_MATCH: Final = 0x41
OB1_RNDV: Final = 0x42
OB1_RGET: Final = 0x43
OB1_ACK: Final = 0x44
OB1_FRAG: Final = 0x46
OB1_PUT: Final = 0x48
OB1_FIN: Final = 0x49
OB1_LAST: Final = 0x4A

# Type -> bytes of its ob1 header (without the BTL's eight); sizes below it are implausible.
OB1_BYTES: Final[dict[int, int]] = {
    OB1_MATCH: 14,
    OB1_RNDV: 32,
    OB1_RGET: 32,  # a rendezvous header and the source's keys
    OB1_ACK: 32,
    0x45: 8,  # NACK
    OB1_FRAG: 32,
    0x47: 32,  # GET
    OB1_PUT: 56,
    OB1_FIN: 24,
    OB1_LAST: 8,  # CID
}

# Offsets from the start of the BTL header.
OB1_CONTEXT: Final = 10  # u16; MATCH, RNDV and RGET
OB1_SOURCE: Final = 12  # i32
OB1_TAG: Final = 16  # i32
OB1_SEQ: Final = 20  # u16
OB1_LENGTH: Final = 24  # u64; RNDV, RGET: of the whole message
OB1_REQUEST: Final = 32  # u64; RNDV, RGET: the sender's request
OB1_ACK_REQUEST: Final = 16  # u64; ACK, PUT request: the sender's request it answers
OB1_FRAG_REQUEST: Final = 24  # u64; FRAG: the sender's request
OB1_PUT_FRAGMENT: Final = 24  # u64; PUT request: the receiver's fragment, named again by the FIN
OB1_PUT_ADDRESS: Final = 48  # u64; PUT request: where to write, named again by the put's descriptor
OB1_PUT_LENGTH: Final = 56  # u64
OB1_FIN_LENGTH: Final = 16  # i64
OB1_FIN_FRAGMENT: Final = 24  # u64
BTL_PUT_ADDRESS: Final = 8  # u64, first descriptor
BTL_PUT_LENGTH: Final = 16  # u64

# coll_tags.h of Open MPI 4.1: tags of blocking collectives. Tags from 0 on are the user's.
MPI_TAG: Final[dict[int, Op]] = {
    -10: Op.ALL_GATHER,
    -11: Op.ALL_GATHER,
    -12: Op.ALL_REDUCE,
    -13: Op.ALL_TO_ALL,
    -14: Op.ALL_TO_ALL,
    -15: Op.ALL_TO_ALL,
    -16: Op.BARRIER,
    -17: Op.BROADCAST,
    -19: Op.GATHER,
    -20: Op.GATHER,
    -21: Op.REDUCE,
    -22: Op.REDUCE_SCATTER,
    -23: Op.REDUCE_SCATTER,
    -25: Op.SCATTER,
    -26: Op.SCATTER,
}

# -- UCX: tcp -----------------------------------------------------------------------------------
UCX_MAGIC: Final = 0xCAFEBABE12345678  # first bytes of the connecting side
UCX_HELLO: Final = 8
UCX_HEADER: Final = 5  # u8 id, u32 bytes that follow
UCX_MOST: Final = 1 << 24  # a segment of a message is no longer (UCX_TCP_RX_SEG_SIZE, 64 KiB by default)
UCX_WIREUP, UCX_ONLY, UCX_FIRST, UCX_MIDDLE = 1, 2, 3, 4
UCX_SYNC_ONLY, UCX_SYNC_FIRST, UCX_SYNC_ACK = 6, 7, 8
UCX_RTS, UCX_ATS, UCX_RTR, UCX_DATA, UCX_ATP = 9, 10, 11, 12, 16
UCX_PUT: Final = 33  # u64 address, u64 length, u32 number; then the data, which its length leaves out

# Id -> the least bytes that follow its header.
UCX_LEAST: Final[dict[int, int]] = {
    UCX_WIREUP: 2,
    UCX_ONLY: 8,
    UCX_FIRST: 24,
    UCX_MIDDLE: 16,
    UCX_SYNC_ONLY: 24,
    UCX_SYNC_FIRST: 40,
    UCX_SYNC_ACK: 9,
    UCX_RTS: 40,
    UCX_ATS: 9,
    UCX_RTR: 32,
    UCX_DATA: 16,
    14: 8,
    UCX_ATP: 9,
    32: 4,  # connection manager
    UCX_PUT: 20,
    34: 4,  # puts that have come
}

# Offsets from the start of the frame; all u64.
UCX_TAG: Final = 5  # ONLY, FIRST, SYNC, RTS
UCX_TOTAL: Final = 13  # FIRST: bytes of the whole message
UCX_REPLY: Final = 5  # ATS, RTR: the sender's request; DATA, ATP: the receiver's
UCX_OFFSET: Final = 13  # DATA: its place in the message
UCX_RTS_REQUEST: Final = 21
UCX_RTS_BYTES: Final = 37
UCX_RTR_REQUEST: Final = 13  # the receiver's
UCX_RTR_ADDRESS: Final = 21
UCX_RTR_BYTES: Final = 29
UCX_PUT_ADDRESS: Final = 5
UCX_PUT_BYTES: Final = 13
UCX_MIDDLE_BYTES: Final = 16  # of UCP's header in MIDDLE and DATA

# -- libfabric: tcp -----------------------------------------------------------------------------
OFI_VERSION: Final = 3
OFI_BASE: Final = 16  # u8 version, u8 operation, u16 flags, u8, u8, u8 bytes of header, u8, u64 all bytes
OFI_FLAGS: Final = 2
OFI_MARK: Final = 4
OFI_HEADER: Final = 6
OFI_SIZE: Final = 8
OFI_MSG, OFI_TAG, OFI_READ, OFI_READ_DATA, OFI_WRITE, OFI_RTS, OFI_CTS, OFI_DATA = range(8)
OFI_SOURCE: Final = 1  # flag: the sender's rank (u64) comes before the tag
OFI_DELIVERED: Final = 4  # flag: the sender waits for an acknowledgment
OFI_ACK: Final = 2  # mark of what says that a message has come
OFI_HELLO: Final = 32  # ofi_ctrl_hdr (include/ofi_proto.h): u8 version, u8 type, u16 bytes behind it
OFI_HELLO_MOST: Final = 256
OFI_READ_BYTES: Final = 24

RXM_HEADER: Final = 64  # behind libfabric's base header: u8 version, u8 type, ...
RXM_VERSION: Final = 4
RXM_IDENT: Final = 16  # u64
RXM_BYTES: Final = 40  # u64
RXM_EAGER, RXM_SEGMENT, RXM_OFFER, RXM_READ, RXM_GRANT, RXM_LAST = 0, 1, 2, 3, 7, 8

MPI_SCAN_TAGS: Final = (-18, -24)  # MPI_Exscan, MPI_Scan: operations that have no name here
MPI_NONBLOCKING: Final = -27  # tags of non-blocking collectives count down from here, one a call

# -- NCCL: net_socket -------------------------------------------------------------------------
NCCL_SIZE: Final = 4  # i32: bytes of the message that follows
NCCL_HELLO: Final = 13  # u64 magic, i32 type 3, u8 index of the socket; the connecting side's first bytes
NCCL_MAGIC: Final = 0x564AB9F2FC4B9D6C
NCCL_TYPE: Final = 3
NCCL_MOST: Final = 1 << 24  # a step of staging buffers (NCCL_BUFFSIZE / 8) is hardly ever longer

HEADER_BYTES: Final = 64  # the longest header that is looked into; one bit each in a 64-bit mask
