"""NICs, links and switch queues: reliable connections that carry messages as bursts of packets.

A NIC serves its queue pairs in turn, some packets at a time; a burst then waits for the switch port
towards its receiver, where it may be marked, or stop the senders. Retransmission (go-back-N after a NAK or a
timeout) follows IBA volume 1, 9.7; the tables of ``trace`` keep what was on the wire and when.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.synth.congestion import CNP_NS, TIMER_NS, Rate
from dpuflow.synth.trace import ACK, CNP, READ, RESPONSE, SEGMENT_ACK

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.congestion import Marking
    from dpuflow.synth.engine import Engine
    from dpuflow.synth.losses import Losses
    from dpuflow.synth.trace import Trace

BURST: Final = 16
"""Packets a NIC sends of one queue pair before it turns to the next, at most (assumed)."""
TURN_NS: Final = 10_000.0
"""On slow links a turn is shorter: no more packets than pass in this time (assumed)."""
FRAMING_BYTES: Final = 24
"""On the wire around each frame: preamble, FCS, gap (IEEE 802.3)."""
HEADER_BYTES: Final = 58
"""Ethernet, IPv4, UDP, BTH and ICRC, around each packet's payload; RETH and the like are small beside it."""
NAK_SEQUENCE: Final = 0x60
ACK_NO_LIMIT: Final = 0x1F
SCALE: Final = 8
"""Window scale of TCP streams: windows are told in units of 256 bytes."""
REPLY_NS: Final = 10.0
"""Between two replies of one queue pair, at least."""
REWIND_NS: Final = 2_000.0
"""From a NAK to the first packet sent again (assumed)."""


class Port:
    """One NIC and its link to the switch. Rates are ns a byte."""

    def __init__(self, number: int, node: int, ns_per_byte: float) -> None:
        self.number, self.node = number, node
        self.up_ns = self.down_ns = ns_per_byte
        self.busy = False
        self.waiting: deque[Flow] = deque()
        self.paused_until = 0.0
        self.free_at = 0.0  # when the switch's queue towards this NIC will be empty


class Posted(NamedTuple):
    """A message in a send queue."""

    row: int  # of the MESSAGES table
    psn: int
    packets: int
    last_bytes: int  # of its last packet
    counts: bool  # whether its arrival and completion are told
    begins: int = 0  # of a stream: bytes before it
    read: int = 0  # bytes that a READ asks for


class Due:
    """An ACK that will leave at ``at_ns``."""

    def __init__(self, at_ns: float, psn: int, received: int) -> None:
        self.at_ns, self.psn, self.received = at_ns, psn, received
        self.messages = 1


class Flow:
    """The requester half of a queue pair: one direction of messages and, the other way, their ACKs."""

    def __init__(
        self,
        number: int,
        src: Port,
        dst: Port,
        arrived: Callable[[Flow], None],
        completed: Callable[[Flow], None],
        mtu: int,
        stream: bool,
    ) -> None:
        self.mtu, self.stream = mtu, stream
        packet_ns = (mtu + HEADER_BYTES + FRAMING_BYTES) * max(src.up_ns, dst.down_ns)
        self.burst = max(1, min(BURST, int(TURN_NS / packet_ns)))
        self.number, self.src, self.dst = number, src, dst
        self.arrived, self.completed = arrived, completed
        self.queue: deque[Posted] = deque()  # not yet acknowledged
        self.place = 0  # in ``queue``: what is being sent
        self.next_psn = self.end_psn = self.acked_psn = 0
        self.expected_psn = 0  # at the receiver
        self.received = 0  # messages: the MSN
        self.nak_sent = False
        self.window: Callable[[], int] | None = None  # of a stream: what the receiver advertises, bytes
        self.bytes_in = 0  # of a stream: received
        self.answer: Flow | None = None  # of READs: the responses' flow, and of that the requests'
        self.asked: Flow | None = None
        self.due: Due | None = None
        self.notified_ns = float("-inf")
        self.rate: Rate | None = None
        self.not_before = 0.0  # for its rate
        self.told_psn = -1  # up to where its replies acknowledge
        self.replied_ns = 0.0  # when its latest reply left
        self.watched = False  # whether its timer runs
        self.waits = False  # whether it stands in the port's queue


class Rules(NamedTuple):
    """How the network behaves. ``None`` switches a mechanism off."""

    mtu: int
    latency_ns: Callable[[Port, Port], float]
    losses: Callable[[Port, Port], Losses | None]
    down: Callable[[Port, float], bool] | None  # whether a port's link is down at a time
    ack_ns: Callable[[], float]
    ack_packets: int  # within a message, an ACK every so many; 0: none
    repeat_share: float  # of messages sent again for nothing
    coalesce: int
    timeout_ns: float
    queue_bytes: float  # of one switch port
    pause: tuple[float, float] | None  # PFC: queued bytes that stop the senders, and that let them go on
    marking: Marking | None
    random: Random


class Fabric:
    """The network."""

    def __init__(self, engine: Engine, trace: Trace, rules: Rules) -> None:
        self.engine, self.trace, self.rules = engine, trace, rules
        self.flows: list[Flow] = []

    def connect(
        self,
        src: Port,
        dst: Port,
        arrived: Callable[[Flow], None],
        completed: Callable[[Flow], None],
        segment: int = 0,
    ) -> Flow:
        """A new flow. ``arrived`` and ``completed`` are called for each message that counts.

        With ``segment`` it is a TCP stream, cut into so many bytes.
        """
        mtu = segment or self.rules.mtu
        flow = Flow(len(self.flows), src, dst, arrived, completed, mtu, bool(segment))
        self.flows.append(flow)
        return flow

    def post(
        self,
        flow: Flow,
        kind: int,
        size: int,
        va: int,
        rkey: int,
        value: int,
        target: int = 0,
        room: int = 0,
        key: int = 0,
        counts: bool = True,
    ) -> None:
        """Put a message into the send queue, as a verbs consumer would."""
        packets = max(1, -(-size // flow.mtu))
        row = self.trace.messages.add(
            flow.number, kind, size, flow.end_psn, va, rkey, value, target, room, key
        )
        last = size - (packets - 1) * flow.mtu
        flow.queue.append(Posted(row, flow.end_psn, packets, last, counts, va))
        flow.end_psn += packets
        self._wake(flow)

    def answers(self, flow: Flow) -> Flow:
        """The way back for what READs on ``flow`` bring: its packets have the requests' PSNs."""
        back = self.connect(flow.dst, flow.src, self._answered, self._answered)
        back.asked, flow.answer = flow, back
        return back

    def read(self, flow: Flow, size: int, va: int, rkey: int) -> None:
        """Post an RDMA READ: one packet that takes the PSNs of its response."""
        packets = max(1, -(-size // flow.mtu))
        row = self.trace.messages.add(flow.number, READ, size, flow.end_psn, va, rkey, 0, 0, 0, 0)
        flow.queue.append(Posted(row, flow.end_psn, packets, 16, True, read=size))
        flow.end_psn += packets
        self._wake(flow)

    def _answer(self, flow: Flow, message: Posted) -> None:
        """The responder's NIC has a READ request."""
        assert flow.answer is not None
        flow.received += 1
        self.post(flow.answer, RESPONSE, message.read, 0, 0, flow.received)

    def _answered(self, back: Flow) -> None:
        """A response is whole: the request is done, and nobody acknowledges it."""
        back.acked_psn = back.expected_psn
        while back.queue and back.queue[0].psn < back.acked_psn:
            back.queue.popleft()
            back.place -= 1
        assert back.asked is not None
        self._acked(back.asked, back.expected_psn - 1)

    def _wake(self, flow: Flow) -> None:
        if not flow.waits:
            flow.waits = True
            flow.src.waiting.append(flow)
        if not flow.src.busy:
            self._serve(flow.src)

    def _serve(self, port: Port) -> None:
        """Send the next burst of the next queue pair."""
        if not port.waiting:
            port.busy = False
            return
        now = self.engine.now
        if now < port.paused_until:
            port.busy = True
            self.engine.at(port.paused_until, self._serve, port)
            return
        flow = port.waiting.popleft()
        if flow.next_psn >= flow.end_psn:  # acknowledged in the meantime
            flow.waits = False
            self._serve(port)
            return
        if flow.not_before > now and not self._turn(port, flow):
            return
        if flow.not_before > now:
            flow = port.waiting.popleft()
        message = flow.queue[flow.place]
        first = flow.next_psn - message.psn
        if message.read:
            self._request(port, flow, message)
            return
        count = min(flow.burst, message.packets - first)
        ends = first + count == message.packets
        full = (flow.mtu if message.packets > 1 else message.last_bytes) + HEADER_BYTES + FRAMING_BYTES
        last = (message.last_bytes if ends else flow.mtu) + HEADER_BYTES + FRAMING_BYTES
        step_bytes, total_bytes = full, full * (count - 1) + last
        start = now
        end = start + total_bytes * port.up_ns
        if flow.rate is not None:
            flow.not_before = start + total_bytes * port.up_ns / flow.rate.now
        flow.next_psn += count
        if ends:
            flow.place += 1
        if flow.next_psn < flow.end_psn:
            port.waiting.append(flow)
        else:
            flow.waits = False
        arrival = start + self.rules.latency_ns(port, flow.dst)
        self.engine.at(arrival, self._queue, flow, message, first, count, start, end, step_bytes, total_bytes)
        port.busy = True
        self.engine.at(end, self._serve, port)

    def _request(self, port: Port, flow: Flow, message: Posted) -> None:
        """Send a READ request."""
        now, size = self.engine.now, message.last_bytes + HEADER_BYTES + FRAMING_BYTES
        end = now + size * port.up_ns
        flow.next_psn += message.packets
        flow.place += 1
        if flow.next_psn < flow.end_psn:
            port.waiting.append(flow)
        else:
            flow.waits = False
        arrival = max(now + self.rules.latency_ns(port, flow.dst), flow.dst.free_at)
        done = arrival + size * flow.dst.down_ns
        self._log(flow, message, 0, 1, now, end - now, end, arrival, done - arrival, done)
        flow.expected_psn = message.psn + message.packets
        self.engine.at(done, self._answer, flow, message)
        port.busy = True
        self.engine.at(end, self._serve, port)

    def _turn(self, port: Port, flow: Flow) -> bool:
        """Put ``flow``, which waits for its rate, back; whether one that need not is at the front now."""
        port.waiting.append(flow)
        now = self.engine.now
        for _ in range(len(port.waiting)):
            other = port.waiting[0]
            if other.not_before <= now and other.next_psn < other.end_psn:
                return True
            port.waiting.rotate(-1)
        port.busy = True
        self.engine.at(
            min(other.not_before for other in port.waiting if other.not_before > now), self._serve, port
        )
        return False

    def _queue(
        self, flow: Flow, message: Posted, first: int, count: int,
        start: float, end: float, step_bytes: int, total_bytes: int,
    ) -> None:  # fmt: skip
        """A burst reaches the switch port towards its receiver."""
        port, now = flow.dst, self.engine.now
        rules = self.rules
        losses = self._lossy(flow.src, port)
        lost = count if losses is None else losses.first_lost(count)
        queued = (port.free_at - now) / port.down_ns
        marked = 0
        if queued > 0:
            if queued > rules.queue_bytes:
                lost = 0
            if rules.pause is not None and queued > rules.pause[0]:
                self._pause(flow.src, now + (queued - rules.pause[1]) * port.down_ns)
            if rules.marking is not None and not flow.stream:
                marked = rules.marking.marks(queued, count, rules.random)
        if rules.down is not None and (rules.down(flow.src, now) or rules.down(port, now)):
            lost = 0
        up_ns, down_ns = flow.src.up_ns, port.down_ns
        step_ns = step_bytes * max(up_ns, down_ns)
        if lost == count:
            begin = max(now, port.free_at)
            done = max(begin + total_bytes * down_ns, now + (end - start))
            port.free_at = done
            self._log(
                flow, message, first, count, start, step_bytes * up_ns, end, begin, step_ns, done, marked
            )
            if marked:
                self._notify(flow, done)
            self._receive(flow, message, first, count, done)
            return
        # Cut at the lost packet: what came before it, itself, what follows.
        at = start
        if lost:
            part = step_bytes * lost
            self._part(flow, message, first, lost, at, at + part * up_ns, step_bytes, part, now)
            at += part * up_ns
        one = total_bytes - step_bytes * (count - 1) if lost == count - 1 else step_bytes
        self._log(flow, message, first + lost, 1, at, one * up_ns, at + one * up_ns, -1, 0, -1)
        self._watch(flow)
        if lost + 1 < count:
            rest = total_bytes - step_bytes * (lost + 1)
            later = at + one * up_ns
            self._queue(flow, message, first + lost + 1, count - lost - 1, later, end, step_bytes, rest)

    def _part(
        self, flow: Flow, message: Posted, first: int, count: int,
        start: float, end: float, step_bytes: int, total_bytes: int, arrival: float,
    ) -> None:  # fmt: skip
        port = flow.dst
        begin = max(arrival, port.free_at)
        done = max(begin + total_bytes * port.down_ns, arrival + (end - start))
        port.free_at = done
        step_ns = step_bytes * max(flow.src.up_ns, port.down_ns)
        self._log(flow, message, first, count, start, step_bytes * flow.src.up_ns, end, begin, step_ns, done)
        self._receive(flow, message, first, count, done)

    def _log(
        self, flow: Flow, message: Posted, first: int, count: int,
        tx: float, tx_step: float, tx_end: float, rx: float, rx_step: float, rx_end: float, marked: int = 0,
    ) -> None:  # fmt: skip
        self.trace.bursts.add(
            flow.number, message.row, first, count, int(tx), int(tx_step * 1000), int(tx_end),
            int(rx), int(rx_step * 1000), int(rx_end), marked,
        )  # fmt: skip

    def _receive(self, flow: Flow, message: Posted, first: int, count: int, done: float) -> None:
        """The receiver's NIC has the burst at ``done``: in order, ahead of a hole, or once more."""
        psn, end = message.psn + first, message.psn + first + count
        if psn > flow.expected_psn:
            if not flow.nak_sent:
                flow.nak_sent = True
                self._reply(flow, done + self.rules.ack_ns(), flow.expected_psn, NAK_SEQUENCE, self._rewind)
            return
        ends = first + count == message.packets
        if end <= flow.expected_psn:
            if ends:
                self._reply(
                    flow, done + self.rules.ack_ns(), flow.expected_psn - 1, ACK_NO_LIMIT, self._acked
                )
            return
        flow.expected_psn = end
        flow.nak_sent = False
        if flow.stream:
            self._acknowledge_bytes(flow, message, first + count, done)
        every = self.rules.ack_packets
        if every and not ends and not flow.stream and flow.asked is None and end // every > psn // every:
            self._reply(flow, done + self.rules.ack_ns(), end // every * every - 1, ACK_NO_LIMIT, self._acked)
        if ends:
            flow.received += 1
            if message.counts:
                self.engine.at(done, flow.arrived, flow)
            if flow.asked is not None or flow.stream:
                return  # a response needs no ACK
            self._acknowledge(flow, end - 1, done)
            if self.rules.repeat_share and self.rules.random.random() < self.rules.repeat_share:
                self.engine.at(done, self._again, flow, message.psn)

    def _acknowledge(self, flow: Flow, psn: int, done: float) -> None:
        """Of a message that is whole at ``done``: an ACK of its own, or the one that is due anyway."""
        due = flow.due
        if due is not None and due.at_ns > done and due.messages < self.rules.coalesce:
            due.psn, due.received = psn, flow.received
            due.messages += 1
            return
        when = done + self.rules.ack_ns()
        if self.rules.coalesce == 1:
            self._reply(flow, when, psn, ACK_NO_LIMIT, self._acked)
            return
        flow.due = Due(when, psn, flow.received)
        self.engine.at(when, self._reply_due, flow, flow.due)

    def _acknowledge_bytes(self, flow: Flow, message: Posted, packets: int, done: float) -> None:
        """TCP: one ACK for what came in a row, as receive offload hands it up."""
        size = packets * flow.mtu
        if packets == message.packets:
            size = (packets - 1) * flow.mtu + message.last_bytes
        flow.bytes_in = message.begins + size
        when = max(done + self.rules.ack_ns(), flow.replied_ns + REPLY_NS)
        flow.replied_ns = when
        arrival = max(when + self.rules.latency_ns(flow.dst, flow.src), flow.src.free_at)
        self._tell(flow, when, arrival)
        self.engine.at(arrival, self._acked, flow, message.psn + packets - 1)

    def update(self, flow: Flow) -> None:
        """TCP: the receiver has read, its window is open again."""
        now = max(self.engine.now, flow.replied_ns + REPLY_NS)
        flow.replied_ns = now
        self._tell(flow, now, now + self.rules.latency_ns(flow.dst, flow.src))

    def _tell(self, flow: Flow, when: float, arrival: float) -> None:
        assert flow.window is not None
        window = min(0xFFFF, flow.window() >> SCALE)
        self.trace.replies.add(flow.number, SEGMENT_ACK, int(when), int(arrival), flow.bytes_in, 0, window)

    def _reply_due(self, flow: Flow, due: Due) -> None:
        if due.psn > flow.told_psn:  # else an ACK within a later message has said so
            self._reply(flow, due.at_ns, due.psn, ACK_NO_LIMIT, self._acked, due.received)

    def _lossy(self, src: Port, dst: Port) -> Losses | None:
        return self.rules.losses(src, dst)

    def _pause(self, port: Port, until: float) -> None:
        """The switch stops a NIC (IEEE 802.1Qbb); what is on its way still arrives."""
        if until <= port.paused_until:
            return
        self.trace.pauses.add(port.number, int(self.engine.now), int(until))
        port.paused_until = until

    def _notify(self, flow: Flow, done: float) -> None:
        """The receiver's NIC has seen marks: a CNP to the sender, unless one went just before."""
        if done < flow.notified_ns + CNP_NS:
            return
        flow.notified_ns = done
        when = done + self.rules.ack_ns()
        arrival = when + self.rules.latency_ns(flow.dst, flow.src)
        self.trace.replies.add(flow.number, CNP, int(when), int(arrival), 0, 0, 0)
        self.engine.at(arrival, self._slow, flow)

    def _slow(self, flow: Flow) -> None:
        if flow.rate is None:
            flow.rate = Rate()
        flow.rate.cut()
        self.engine.at(self.engine.now + TIMER_NS, self._rise, flow, flow.rate.cuts)

    def _rise(self, flow: Flow, cuts: int) -> None:
        """A timer's step up, unless the rate was cut since: that set the timer anew."""
        assert flow.rate is not None
        if flow.rate.cuts == cuts and flow.rate.rise():
            self.engine.at(self.engine.now + TIMER_NS, self._rise, flow, cuts)

    def _reply(
        self,
        flow: Flow,
        when: float,
        psn: int,
        syndrome: int,
        then: Callable[[Flow, int], None],
        received: int = -1,
    ) -> None:
        """An ACK or NAK leaves the receiver at ``when``; it passes the NIC's queue, not the switch's."""
        when = max(when, flow.replied_ns + REPLY_NS)  # in order
        flow.replied_ns = when
        # A NAK names the packet that is missing: what came before it is acknowledged.
        flow.told_psn = max(flow.told_psn, psn if syndrome == ACK_NO_LIMIT else psn - 1)
        msn = flow.received if received < 0 else received
        losses = self._lossy(flow.dst, flow.src)
        lost = losses is not None and losses.first_lost(1) == 0
        down = self.rules.down
        if lost or (down is not None and (down(flow.src, when) or down(flow.dst, when))):
            self.trace.replies.add(flow.number, ACK, int(when), -1, psn, syndrome, msn)
            self._watch(flow)
            return
        arrival = max(when + self.rules.latency_ns(flow.dst, flow.src), flow.src.free_at)
        self.trace.replies.add(flow.number, ACK, int(when), int(arrival), psn, syndrome, msn)
        self.engine.at(arrival, then, flow, psn)

    def _acked(self, flow: Flow, psn: int) -> None:
        """The sender's NIC has an ACK of everything up to ``psn``."""
        if psn < flow.acked_psn:
            return
        flow.acked_psn = psn + 1
        while flow.queue and flow.queue[0].psn + flow.queue[0].packets <= flow.acked_psn:
            message = flow.queue.popleft()
            flow.place = max(0, flow.place - 1)
            if message.counts:
                flow.completed(flow)
        if flow.next_psn < flow.acked_psn:
            flow.next_psn = flow.acked_psn
            flow.place = self._place(flow, flow.next_psn)

    def _rewind(self, flow: Flow, psn: int) -> None:
        """A NAK arrived: everything from ``psn`` on is sent again."""
        self._acked(flow, psn - 1)
        self.engine.at(self.engine.now + REWIND_NS, self._again, flow, psn)

    def _again(self, flow: Flow, psn: int) -> None:
        if psn < flow.acked_psn or psn >= flow.next_psn:
            return
        flow.next_psn = psn
        flow.place = self._place(flow, psn)
        self._wake(flow)

    @staticmethod
    def _place(flow: Flow, psn: int) -> int:
        """Where in the send queue the message with ``psn`` stands; its end if all are before."""
        return next((i for i, m in enumerate(flow.queue) if psn < m.psn + m.packets), len(flow.queue))

    def _watch(self, flow: Flow) -> None:
        """Something of this flow was lost: it may take a timeout to notice."""
        if not flow.watched:
            flow.watched = True
            self.engine.at(self.engine.now + self.rules.timeout_ns, self._timeout, flow, flow.acked_psn)

    def _timeout(self, flow: Flow, acked: int) -> None:
        """Send again if nothing was acknowledged for the length of a timeout."""
        flow.watched = False
        if flow.next_psn == flow.acked_psn:
            return
        if flow.acked_psn == acked:
            flow.nak_sent = False
            self._again(flow, acked)
        self._watch(flow)
