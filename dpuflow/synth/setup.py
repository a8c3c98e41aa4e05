"""The sockets by which NCCL sets a job up before its first operation: bootstrap, net_ib's, data sockets.

What is played: rank 0's node is the bootstrap's root, to which each rank of the job's first communicator
tells its number, and which answers with the next rank's address; around the ring that they then make all
ranks' addresses and ncclPeerInfo travel. Smaller communicators are split from it (ncclCommSplit): a ring of
their own, without the root. Then each connection over the network is set up, one after the other for each
sender. Sockets within a node are not on the wire. All go by the first NIC of their nodes
(NCCL_SOCKET_IFNAME), as NCCL's sockets use one interface for all. Layouts: ``dpuflow.wire.nccl``.

Left out: proxies' and RAS's sockets, which are inside nodes or to other services; the later all-gathers of
topologies and the point-to-point messages of the bootstrap, whose contents no one reads; connections made
when first used (NCCL_RUNTIME_CONNECT) are made here, too. Times between messages are assumed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from dpuflow.synth.conversations import Conversation, Say, Side
from dpuflow.synth.seeds import stream
from dpuflow.synth.segments import TICK_NS
from dpuflow.synth.sockets import Socket
from dpuflow.wire import nccl as nw

if TYPE_CHECKING:
    from ipaddress import IPv4Address
    from random import Random

    from dpuflow.synth.conversations import Frame
    from dpuflow.synth.flows import Port
    from dpuflow.synth.pooled import Pool
    from dpuflow.synth.transport import Connection
    from dpuflow.synth.world import Played

EPHEMERAL: Final = 32768
PORTS: Final = 28000
THINK_NS: Final = 60_000.0
"""Mean time from one word to the next: a thread that polls (assumed)."""
CREATE_NS: Final = 400_000.0
"""Mean time to make a connection's queue pairs and register its memory (assumed)."""
QUIET_NS: Final = 5_000_000.0
"""From the last word to the job's first operation, at least (assumed)."""
ECE: Final = (0x15B3, 0x30000002, 0)
"""Vendor, options and mask as a ConnectX tells them; the receiver takes or refuses them."""


def before_the_job(played: Played) -> list[Frame]:
    """All frames, ending QUIET_NS before the world begins; none if the scenario has them not captured."""
    if not played.scenario.nccl.setup:
        return []
    frames = _play(played, 0.0)
    last = max((frame.rx_ns for frame in frames), default=0)
    # Time stamps count whole ticks. How long all takes is known now.
    return _play(played, -float(-int(-(last + QUIET_NS) // TICK_NS) * TICK_NS))


def _play(played: Played, begin_ns: float) -> list[Frame]:
    """All frames, the first one not before ``begin_ns``."""
    play = _Setup(played, begin_ns)
    for number, ranks in enumerate(played.communicators):
        play.bootstrap(number, ranks)
    for number, connection in enumerate(played.connections):
        play.exchange(number, connection)
    for link in played.links:
        if isinstance(link, Socket):
            play.data_socket(link)
    return play.frames


def layout_of(version: str, table: tuple[nw.Exchange, ...] = nw.EXCHANGES) -> nw.Exchange:
    """The exchange that a version of NCCL writes."""
    return [each for each in table if _order(each.since) <= _order(version)][-1]


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class _Setup:
    """Collects the frames of conversations, each rank's in turn, from ``begin_ns`` on."""

    def __init__(self, played: Played, begin_ns: float) -> None:
        self._played, self._network = played, played.network
        self._seed = played.scenario.seed
        self._version = played.scenario.nccl.version
        self.frames: list[Frame] = []
        self._begin_ns = begin_ns
        self._now: dict[int, float] = {}  # by rank: when it is done with what it did so far
        cluster = played.scenario.cluster
        self._share = len(played.network.nics) // cluster.nodes
        self._gpus = cluster.gpus_per_node

    def _port(self, rank: int) -> Port:
        """The interface that the rank's sockets use."""
        return self._network.nics[rank // self._gpus * self._share]

    def _ip(self, rank: int) -> IPv4Address:
        return self._network.addresses[self._port(rank).number].ip

    def _begin(self, sides: tuple[Side, Side], at_ns: float) -> Conversation | None:
        """A connection; None within a node."""
        if sides[0].port.node == sides[1].port.node:
            return None
        return Conversation(self._network, *sides, at_ns)

    def _keep(self, talk: Conversation, ranks: tuple[int, ...]) -> None:
        """The conversation is over; the ranks go on from there."""
        self.frames += talk.frames
        for rank in ranks:
            self._now[rank] = max(self._now.get(rank, self._begin_ns), talk.now)

    def _talk(
        self, ranks: tuple[int, ...], sides: tuple[Side, Side], says: list[Say], close: bool, at_ns: float
    ) -> float:
        """A whole conversation from ``at_ns`` on; says when it is over."""
        talk = self._begin(sides, at_ns)
        if talk is None:
            return at_ns + THINK_NS
        for say in says:
            talk.say(say)
        if close:
            talk.close()
        self._keep(talk, ranks)
        return talk.now

    # -- bootstrap ---------------------------------------------------------------------------

    def bootstrap(self, number: int, ranks: tuple[int, ...]) -> None:
        """Of one communicator; the first one has a root, others are split from it."""
        random = stream(self._seed, "bootstrap", number)
        magic = random.getrandbits(64)
        ports = {rank: [random.randrange(EPHEMERAL, 61000) for _ in range(4)] for rank in ranks}
        count = len(ranks)
        begin = max((self._now.get(rank, self._begin_ns) for rank in ranks), default=self._begin_ns)
        if number == 0:
            hello = [each for each in nw.HELLOS if _order(each.since) <= _order(self._version)][-1]
            root = random.randrange(EPHEMERAL, 61000)
            told = []
            for place, rank in enumerate(ranks):
                says = [
                    *_shake(magic, nw.BOOTSTRAP, random),
                    *_framed(self._hello(hello, place, rank, count, ports[rank]), True, random),
                ]
                sides = Side.drawn(self._port(rank), random), Side.drawn(self._port(ranks[0]), random, root)
                told.append(self._talk((rank,), sides, says, True, begin + random.uniform(0, 2e6)))
            answered = max(told, default=begin)
            for place, rank in enumerate(ranks):
                after = ranks[(place + 1) % count]
                word = self._address(after, ports[after][1]).ljust(hello.answer, b"\0")
                says = [*_shake(magic, nw.BOOTSTRAP, random), *_framed(word, True, random)]
                sides = (
                    Side.drawn(self._port(ranks[0]), random),
                    Side.drawn(self._port(rank), random, ports[rank][0]),
                )
                at = answered + random.uniform(0, 1e6)
                begin = max(begin, self._talk((rank,), sides, says, True, at))
        self._ring(magic, ranks, ports, begin, random)

    def _hello(self, layout: nw.Hello, place: int, rank: int, count: int, ports: list[int]) -> bytes:
        """What a rank tells the root."""
        word = bytearray(layout.size)
        numbers = (place, count) if layout.root_address_at == 8 else (place, count, 0, 1, 0)
        head = struct.pack(f"<{len(numbers)}i", *numbers)[: layout.root_address_at]
        word[: len(head)] = head
        for at, port in ((layout.root_address_at, ports[0]), (layout.ring_address_at, ports[1])):
            word[at : at + nw.ADDRESS_BYTES] = self._address(rank, port)
        return bytes(word)

    def _address(self, rank: int, port: int) -> bytes:
        """A socket address as NCCL keeps it."""
        made = struct.pack("<H", nw.FAMILY_IPV4) + struct.pack(">H", port) + self._ip(rank).packed
        return made.ljust(nw.ADDRESS_BYTES, b"\0")

    def _ring(
        self, magic: int, ranks: tuple[int, ...], ports: dict[int, list[int]], begin: float, random: Random
    ) -> None:
        """The all-gathers around the ring; each rank's word passes every socket but one."""
        gather = [each for each in nw.GATHERS if _order(each.since) <= _order(self._version)][-1]
        last = len(gather.parts) - 1
        parts = [
            [
                self._peer_info(size, place, rank, random)
                if number == last
                else self._word(number, size, rank, ports[rank], random)
                for place, rank in enumerate(ranks)
            ]
            for number, size in enumerate(gather.parts)
        ]
        talks: list[Conversation | None] = []
        for rank, after in zip(ranks, (*ranks[1:], *ranks[:1]), strict=True):
            own = Side.drawn(self._port(rank), random)
            other = Side.drawn(self._port(after), random, ports[after][1])
            talk = self._begin((own, other), begin + random.uniform(0, 1e6))
            if talk is not None:
                for say in _shake(magic, nw.BOOTSTRAP, random):
                    talk.say(say)
            talks.append(talk)
        done = max((talk.now for talk in talks if talk is not None), default=begin)
        for part in parts:
            done = _all_gather(talks, part, done, gather.both_ways, random)
        for place, talk in enumerate(talks):
            if talk is not None:
                self._keep(talk, (ranks[place], ranks[(place + 1) % len(ranks)]))

    def _peer_info(self, size: int, place: int, rank: int, random: Random) -> bytes:
        """A rank's ncclPeerInfo."""
        device = rank % self._gpus
        # A host's number is the same in all communicators.
        host = stream(self._seed, "host", rank // self._gpus).getrandbits(64)
        word = struct.pack("<iiiiQQ", place, device, device, 1, host, random.getrandbits(64))
        return word + struct.pack("<QQ", 0x1A, (0x1B + device) << 12).ljust(size - len(word), b"\0")

    def _word(self, number: int, size: int, rank: int, ports: list[int], random: Random) -> bytes:
        """What a rank puts into the all-gathers before that: addresses, or what none reads."""
        if size < nw.ADDRESS_BYTES:
            return random.getrandbits(8 * size).to_bytes(size, "little")
        word = self._address(rank, ports[2 + number % 2])
        if size >= 2 * nw.ADDRESS_BYTES + 8:
            word += self._address(rank, ports[3]) + struct.pack("<Q", random.getrandbits(64))
        if size > 64:
            word += self._address(rank, 0) + struct.pack(
                "<iii", 4000 + rank, rank % self._gpus, rank % self._gpus
            )
        return word.ljust(size, b"\0")[:size]

    # -- net_ib ------------------------------------------------------------------------------

    def exchange(self, number: int, link: Connection | Pool) -> None:
        """Of one connection: the data's sender connects."""
        random = stream(self._seed, "exchange", number)
        layout = layout_of(self._version)
        src, dst = link.src.rank, link.dst.rank
        sides = Side.drawn(self._port(src), random), Side.drawn(self._port(dst), random)
        words = [self._metadata(layout, link, sender, random) for sender in (True, False)]
        says = list(_shake(nw.MAGIC, nw.NET_IB, random))
        if layout.props:
            nics = self._network.nics
            for sender, flow in ((True, link.data[0]), (False, link.data[0])):
                port = flow.src if sender else flow.dst
                device = port.number - nics[port.node * self._share].number
                says.append(
                    Say(sender, struct.pack("<ii", 1, device).ljust(layout.props, b"\0"), _think(random))
                )
        says.append(Say(True, words[0], random.expovariate(1.0) * CREATE_NS))
        says.append(Say(False, words[1], random.expovariate(1.0) * CREATE_NS))
        says.append(Say(True, struct.pack("<i", 1), _think(random)))
        begin = max(self._now.get(src, self._begin_ns), self._now.get(dst, self._begin_ns)) + _think(random)
        self._talk((src, dst), sides, says, False, begin)

    def _metadata(self, layout: nw.Exchange, link: Connection | Pool, sender: bool, random: Random) -> bytes:
        """What one side tells of its queue pairs, its port and its memory."""
        word = bytearray(layout.size)
        ends = self._played.ends

        def put(at: int, form: str, *values: int) -> None:
            if at >= 0:
                struct.pack_into(f"<{form}", word, at, *values)

        for place, flow in enumerate(link.data):
            pair = ends[flow.number].reply_pair if sender else ends[flow.number].queue_pair
            at = layout.pair_at + place * layout.pair_bytes
            put(at, "I", pair)
            if layout.device_bytes:
                put(at + 4, "IIIi", *ECE, 1)
                put(at + nw.DEVICE_AT, "i", 0)
        flow = link.data[0]
        own = flow.src if sender else flow.dst
        put(layout.mtu_at, "I", self._played.scenario.cluster.mtu.bit_length() - 8)
        put(layout.link_at, "B", nw.ETHERNET)
        gid = bytes(10) + b"\xff\xff" + self._network.addresses[own.number].ip.packed
        word[layout.gid_at : layout.gid_at + 16] = gid
        if sender:
            put(layout.rkey_at, "I", link.fifo_rkey)
            put(layout.address_at, "Q", link.fifo_va)
        else:
            put(layout.rkey_at, "I", random.randrange(0x1000, 0x200000))
            put(layout.address_at, "Q", 0x7F00_0000_0000 + random.randrange(1 << 26) * 4096)
        put(layout.count_at, "i", 1)
        put(layout.class_at, "i", self._played.scenario.nccl.traffic_class)
        if layout.name_at >= 0:
            name = f"mlx5_{own.number - self._network.nics[own.node * self._share].number}".encode()
            word[layout.name_at : layout.name_at + len(name)] = name
        put(4 if layout.device_bytes == 0 else layout.gid_at - 12, "B", 1)  # port number
        return bytes(word)

    # -- net_socket --------------------------------------------------------------------------

    def data_socket(self, link: Socket) -> None:
        """The first bytes of a data connection: what follows is the job's own stream."""
        random = stream(self._seed, "socket", link.flow.number)
        ends = self._played.ends[link.flow.number]
        sides = []
        # The stream's numbers follow on from here (``frames``).
        for port, pair, sent in (
            (link.flow.src, ends.reply_pair, nw.HANDSHAKE + 1),
            (link.flow.dst, ends.queue_pair, 0),
        ):
            begins = pair * 2654435761
            clock = begins * 40503 >> 8
            sides.append(
                Side(port, EPHEMERAL + pair % PORTS, begins - sent, clock, random.randrange(1 << 16))
            )
        says = [*_shake(nw.MAGIC, nw.NET_SOCKET, random), Say(True, b"\0", _think(random))]
        ranks = link.src.rank, link.dst.rank
        begin = max(self._now.get(rank, self._begin_ns) for rank in ranks) + _think(random)
        self._talk(ranks, (sides[0], sides[1]), says, False, begin)


def _all_gather(
    talks: list[Conversation | None], words: list[bytes], begin: float, both_ways: bool, random: Random
) -> float:
    """Each rank's word goes round the ring, by conversations of neighbours; says when that is done."""
    count = len(talks)
    came, back = [begin] * count, [begin] * count
    steps = count // 2 if both_ways else count - 1
    for step in range(steps):
        # A rank passes on what it was told in the step before.
        last = step == steps - 1 and count % 2 == 0
        told, heard = list(came), list(back)
        for place, talk in enumerate(talks):
            after = (place + 1) % count
            if talk is None:
                told[after], heard[place] = came[place] + THINK_NS, back[after] + THINK_NS
                continue
            size, word = _framed(words[(place - step) % count], True, random)
            talk.say(size, came[place])
            told[after] = talk.say(word)
            if both_ways and not last:
                size, word = _framed(words[(place + 1 + step) % count], False, random)
                talk.say(size, back[after])
                heard[place] = talk.say(word)
        came, back = told, heard
    return max(*came, *back)


def _think(random: Random) -> float:
    return random.expovariate(1.0) * THINK_NS


def _shake(magic: int, kind: int, random: Random) -> list[Say]:
    """What the connecting side sends first, in two writes."""
    return [Say(True, struct.pack("<Q", magic), _think(random)), Say(True, struct.pack("<i", kind), 2e3)]


def _framed(word: bytes, client: bool, random: Random) -> list[Say]:
    """A message of the bootstrap: its length, then itself."""
    return [Say(client, struct.pack("<i", len(word)), _think(random)), Say(client, word, 2e3)]
