"""What NICs and links are made of: ports, send queues, the two ends of a connection, the network's rules."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.congestion import Marking, Rate
    from dpuflow.synth.losses import Losses

BURST: Final = 16
"""Packets a NIC sends of one queue pair before it turns to the next, at most (assumed)."""
BEHIND_NS: Final = 140.0
"""From packet to packet of those that software takes up at one time (Soft-RoCE's captures: 0.14 us)."""
TURN_NS: Final = 10_000.0
"""On slow links a turn is shorter: no more packets than pass in this time (assumed)."""
FRAMING_BYTES: Final = 24
"""On the wire around each frame: preamble, FCS, gap (IEEE 802.3)."""
HEADER_BYTES: Final = 58
"""Ethernet, IPv4, UDP, BTH and ICRC, around each packet's payload; RETH and the like are small beside it."""
STREAM_BYTES: Final = 66
"""Ethernet, IPv4, TCP and its option for time stamps."""


class Port:
    """One NIC and its link to the switch. Rates are ns a byte."""

    def __init__(self, number: int, node: int, ns_per_byte: float) -> None:
        self.number, self.node = number, node
        self.up_ns = self.down_ns = ns_per_byte
        self.busy = False
        self.waiting: deque[Flow] = deque()
        self.paused_until = 0.0
        self.free_at = 0.0  # when the switch's queue towards this NIC will be empty
        self.held_until = 0.0  # its NIC lets nothing come before
        self.answer_ns = 0.0  # from a READ's request to the first byte that the host's bus has brought
        self.turns: list[float] = []  # times at which software takes up what came, in order
        self.turn = -1.0  # the latest at which it took anything,
        self.taken = 0  # and how many packets then


class WorkRequest(NamedTuple):
    """What a verbs consumer posts: see trace.MESSAGES."""

    kind: int
    size: int
    va: int = 0
    rkey: int = 0
    value: int = 0
    target: int = 0
    room: int = 0
    key: int = 0
    counts: bool = True  # whether its arrival and completion are told


class Posted(NamedTuple):
    """A message in a send queue."""

    row: int  # of the MESSAGES table
    psn: int
    packets: int
    last_bytes: int  # of its last packet
    counts: bool  # whether its arrival and completion are told
    begins: int = 0  # of a stream: bytes before it; else the address
    read: int = 0  # bytes that a READ asks for
    rkey: int = 0  # of a READ
    atomic: bool = False  # its answer is its own


class Burst(NamedTuple):
    """Packets of one message that a NIC sends in one go."""

    message: Posted
    first: int  # packet within the message
    packets: int
    start: float  # at the sender's port
    end: float
    step_bytes: int  # from packet to packet; of a single one its own
    total_bytes: int

    @property
    def psn(self) -> int:
        """Of its first packet."""
        return self.message.psn + self.first

    @property
    def end_psn(self) -> int:
        """After its last packet."""
        return self.psn + self.packets

    @property
    def ends(self) -> bool:
        """Whether it has the message's last packet."""
        return self.first + self.packets == self.message.packets

    def cut(self, lost: int, up_ns: float) -> tuple[Burst, Burst, Burst]:
        """What is before packet ``lost``, that packet, and what follows; ``up_ns``: a byte sent."""
        before = self.step_bytes * lost
        alone = self.total_bytes - before if lost == self.packets - 1 else self.step_bytes
        at = self.start + before * up_ns
        after, rest = at + alone * up_ns, self.total_bytes - self.step_bytes * (lost + 1)
        return (
            self._replace(packets=lost, end=at, total_bytes=before),
            Burst(self.message, self.first + lost, 1, at, after, alone, alone),
            self._replace(
                first=self.first + lost + 1, packets=self.packets - lost - 1, start=after, total_bytes=rest
            ),
        )


class Arrival(NamedTuple):
    """When a burst is at the receiver's port."""

    begin: float
    step_ns: float
    end: float


LOST: Final = Arrival(-1, 0, -1)


class Due:
    """An ACK that will leave at ``at_ns``."""

    def __init__(self, at_ns: float, psn: int, received: int) -> None:
        self.at_ns, self.psn, self.received = at_ns, psn, received
        self.messages = 1


class Flow:
    """The requester half of a queue pair: one direction of messages and, the other way, their ACKs."""

    stream = False  # whether it is a TCP stream

    def __init__(
        self,
        number: int,
        src: Port,
        dst: Port,
        arrived: Callable[[Flow], None],
        completed: Callable[[Flow], None],
        mtu: int,
    ) -> None:
        self.mtu = mtu
        self.overhead = (STREAM_BYTES if self.stream else HEADER_BYTES) + FRAMING_BYTES
        packet_ns = (mtu + self.overhead) * max(src.up_ns, dst.down_ns)
        self.burst = max(1, min(BURST, int(TURN_NS / packet_ns)))
        self.number, self.src, self.dst = number, src, dst
        self.arrived, self.completed = arrived, completed
        self.queue: deque[Posted] = deque()  # not yet acknowledged
        self.place = 0  # in ``queue``: what is being sent
        self.next_psn = self.end_psn = self.acked_psn = 0
        self.expected_psn = 0  # at the receiver
        self.received = 0  # messages: the MSN
        self.nak_sent = False
        self.catching_up = False  # with what came before its turn
        self.window: Callable[[], int] | None = None  # of a stream: what the receiver advertises, bytes
        self.bytes_in = 0  # of a stream: received
        self.answer: Flow | None = None  # of READs: the responses' flow, and of that the requests'
        self.asked: Flow | None = None
        self.ahead: dict[int, Callable[[float], None]] = {}  # by PSN what came before its turn
        self.skips: dict[int, int] = {}  # of responses: PSNs of requests that have none, up to where
        self.due: Due | None = None
        self.notified_ns = float("-inf")
        self.rate: Rate | None = None
        self.not_before = 0.0  # for its rate
        self.told_psn = -1  # up to where its replies acknowledge
        self.replied_ns = 0.0  # when its latest reply left
        self.watched = False  # whether its timer runs
        self.waits = False  # whether it stands in the port's queue

    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return self.next_psn >= self.end_psn

    def pick(self) -> tuple[Posted, int, int] | None:
        """What to send now: a message, its first packet and how many in a row; None if nothing may go."""
        message = self.queue[self.place]
        if self.asked is not None:
            self.next_psn = max(self.next_psn, message.psn)
        first = self.next_psn - message.psn
        return message, first, min(self.burst, message.packets - first)

    def went(self, psn: int, count: int) -> None:
        """What was picked is on its way."""
        message = self.queue[self.place]
        self.next_psn += count
        if self.next_psn == message.psn + message.packets:
            self.place += 1


class Rules(NamedTuple):
    """How the network behaves. ``None`` switches a mechanism off."""

    mtu: int
    latency_ns: Callable[[Port, Port], float]
    losses: Callable[[Port, Port], Losses | None]
    may_lose: bool  # whether anything is ever lost
    down: Callable[[Port, float], bool] | None  # whether a port's link is down at a time
    ack_ns: Callable[[], float]
    ack_packets: int  # within a message, an ACK every so many; 0: none
    repeat_share: float  # of messages sent again for nothing
    coalesce: int
    timeout_ns: float
    queue_bytes: float  # of one switch port
    delay_ns: Callable[[Flow], float] | None  # what a packet takes longer than the latency
    patience_ns: float  # by when a packet that others overtook is there, or lost
    packet_ns: Callable[[], float] | None  # what software takes to send a packet
    turn_ns: Callable[[], float] | None  # from one time that software takes up what came to the next
    pause: tuple[float, float] | None  # PFC: queued bytes that stop the senders, and that let them go on
    marking: Marking | None
    random: Random
