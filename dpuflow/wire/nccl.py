"""NCCL's slots, and its TCP sockets as tables: the handshake, what net_ib's sides tell each other, bootstrap.

Who connects sends twelve bytes first: a magic number and the kind of socket. Over the sockets of net_ib each
side then tells its queue pairs, addresses and keys in one structure, whose layout changes with NCCL's
version. Over those of the bootstrap messages follow, each after its length (int32). All integers are in the
hosts' own order, little endian on today's.

Sources: NVIDIA/nccl at the tags v2.18.6-1 to v2.30.7-1: src/misc/socket.cc (socketFinalizeConnect),
src/transport/net_ib.cc, later net_ib/connect.{h,cc} and common.h (ncclIbConnectionMetadata, ncclIbDevInfo),
src/bootstrap.cc (extInfo, ringAllInfo, socketRingAllGather), src/include/transport.h (ncclPeerInfo),
src/include/ras.h (rasRankInit).
"""

from __future__ import annotations

from typing import Final, NamedTuple

NCCL_STEPS: Final = 8
"""Slots of a staging buffer (src/include/device.h): what a rank's sends may be ahead of the network by."""
MAGIC: Final = 0x564AB9F2FC4B9D6C
"""First eight bytes on sockets of net_socket, net_ib and RAS; a communicator's bootstrap and proxies have
one of their own, drawn at random."""
HANDSHAKE: Final = 12
TYPE_AT: Final = 8
BOOTSTRAP: Final = 1
PROXY: Final = 2
NET_SOCKET: Final = 3
NET_IB: Final = 4
RAS: Final = 5


class Exchange(NamedTuple):
    """What each side of a net_ib connection sends after the handshake, by the first version that does so.

    Lengths and offsets in bytes; offsets from the start of the metadata. ``devices_at`` is where the first
    device's description starts, -1 in versions without several, whose single device is described by the
    other offsets alone.
    """

    since: str
    props: int  # the list of devices before the metadata, 0: none
    slots: int  # devices it has room for
    size: int  # of the metadata
    pair_at: int  # first queue pair number
    pair_bytes: int  # from one to the next
    gid_at: int  # of the first device
    rkey_at: int
    mtu_at: int  # as in ibv_mtu: 128 << it bytes
    link_at: int  # its link layer, a byte
    device_bytes: int  # from device to device, 0: one alone
    address_at: int  # sender: of its table of clear-to-send entries; receiver: of its completion records
    count_at: int  # how many devices, -1: one
    class_at: int  # traffic class, -1: not told
    name_at: int  # text, -1: not told

    @property
    def client_bytes(self) -> int:
        """All that the connecting side (the data's sender) sends; its last word (int32) says: ready."""
        return HANDSHAKE + self.props + self.size + 4

    @property
    def server_bytes(self) -> int:
        """All that the other side sends."""
        return self.props + self.size


PAIRS: Final = 128
"""Queue pairs that the metadata has room for (NCCL_IB_MAX_QPS)."""
DEVICE_AT: Final = 20
"""Of each queue pair of 24 bytes: its device's number; between are the vendor's options."""
ETHERNET: Final = 2
"""The link layer of RoCE (IBV_LINK_LAYER_ETHERNET)."""

EXCHANGES: Final = (
    Exchange("2.18", 0, 0, 552, 8, 4, 520, 540, 536, 5, 0, 544, -1, -1, -1),
    Exchange("2.19", 0, 0, 2600, 8, 4, 2568, 2588, 2584, 5, 0, 2592, -1, -1, -1),
    Exchange("2.20", 0, 2, 3336, 0, 24, 3088, 3104, 3080, 3084, 56, 3320, 3328, -1, 3184),
    Exchange("2.24", 20, 4, 3576, 0, 24, 3088, 3104, 3080, 3084, 56, 3560, 3568, -1, 3296),
    Exchange("2.26", 20, 4, 3584, 0, 24, 3088, 3104, 3080, 3084, 56, 3560, 3568, 3572, 3296),
    Exchange("2.27", 20, 4, 3648, 0, 24, 3088, 3104, 3080, 3084, 56, 3624, 3632, 3636, 3296),
    Exchange("2.29.7", 20, 4, 3744, 0, 24, 3184, 3200, 3176, 3180, 56, 3720, 3728, 3732, 3392),
    Exchange("2.30", 37, 8, 4576, 0, 24, 3472, 3488, 3464, 3468, 56, 4552, 4560, 4564, 3904),
)

ADDRESS_BYTES: Final = 28
"""ncclSocketAddress: room for a struct sockaddr_in6; family (host order), port (big endian), address."""
FAMILY_IPV4: Final = 2
FAMILY_IPV6: Final = 10


class Hello(NamedTuple):
    """What a rank tells the bootstrap's root, by its length: rank and number of ranks stand first."""

    since: str
    size: int
    root_address_at: int  # where the root shall answer
    ring_address_at: int  # where the rank before it shall connect
    answer: int  # length of the root's answer: the next rank's address first


HELLOS: Final = (
    Hello("2.18", 64, 8, 36, 28),
    Hello("2.23", 172, 16, 44, 128),
    Hello("2.29", 176, 20, 48, 128),
)


class Gather(NamedTuple):
    """All-gathers around the bootstrap's ring: lengths of a rank's parts, in order, and how they travel."""

    since: str
    parts: tuple[int, ...]  # each begins with the rank's address; the last one with its rank (ncclPeerInfo)
    both_ways: bool  # from the next to the one before, too: half of the steps


GATHERS: Final = (
    Gather("2.18", (28, 28, 64), False),
    Gather("2.19", (28, 28, 8, 64), False),
    Gather("2.21", (28, 28, 8, 96), False),
    Gather("2.22", (28, 28, 8, 104), False),
    Gather("2.23", (64, 104), False),
    Gather("2.24", (104, 104), False),
    Gather("2.27", (120, 120), False),
    Gather("2.28.7", (120, 120), True),
    Gather("2.29", (120, 128), True),
    Gather("2.30", (120, 144), True),
)
PEER_RANK_AT: Final = 0
PEER_HOST_AT: Final = 16
"""Of ncclPeerInfo: the rank, and a hash of its host (u64)."""
PEER_LEAST: Final = 64
"""No version's is shorter."""
