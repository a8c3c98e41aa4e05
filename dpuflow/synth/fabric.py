"""NICs, links and switch queues: reliable connections that carry messages as bursts of packets.

A NIC serves its queue pairs in turn, some packets at a time; a burst then waits for the switch port
towards its receiver, where it may be marked, or stop the senders (``receiving`` has what comes back). The
tables of ``trace`` keep what was on the wire and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.schema.simulated import ATOMIC, READ, RESPONSE
from dpuflow.synth.flows import BEHIND_NS, BURST, LOST, Arrival, Burst, Flow, Posted, WorkRequest
from dpuflow.synth.receiving import Receiving
from dpuflow.synth.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.flows import Port


class Fabric(Receiving):
    """The network."""

    def connect(
        self,
        src: Port,
        dst: Port,
        arrived: Callable[[Flow], None],
        completed: Callable[[Flow], None],
    ) -> Flow:
        """A new flow. ``arrived`` and ``completed`` are called for each message that counts."""
        flow = Flow(len(self.flows), src, dst, arrived, completed, self.rules.mtu)
        self._add(flow)
        return flow

    def stream(
        self, src: Port, dst: Port, arrived: Callable[[Flow], None], completed: Callable[[Flow], None]
    ) -> Stream:
        """A new TCP stream, likewise."""
        flow = Stream(len(self.flows), src, dst, arrived, completed, self)
        self._add(flow)
        return flow

    def _add(self, flow: Flow) -> None:
        if self.rules.packet_ns is not None or self.rules.delay_ns is not None:
            flow.burst = 1
        self.flows.append(flow)

    def post(self, flow: Flow, asked: WorkRequest) -> None:
        """Put a message into the send queue, as a verbs consumer would."""
        packets = max(1, -(-asked.size // flow.mtu))
        row = self.trace.messages.add(flow.number, asked.kind, asked.size, flow.end_psn, *asked[2:-1])
        last = asked.size - (packets - 1) * flow.mtu
        atomic = asked.kind == ATOMIC
        flow.queue.append(Posted(row, flow.end_psn, packets, last, asked.counts, asked.va, atomic=atomic))
        if flow.answer is not None:
            flow.answer.skips[flow.end_psn] = flow.end_psn + packets
        flow.end_psn += packets
        self.wake(flow)

    def answers(self, flow: Flow) -> Flow:
        """The way back for what READs on ``flow`` bring: its packets have the requests' PSNs."""
        back = self.connect(flow.dst, flow.src, _nobody, _nobody)
        back.asked, flow.answer = flow, back
        return back

    def read(self, flow: Flow, size: int, va: int, rkey: int) -> None:
        """Post an RDMA READ: one packet that takes the PSNs of its response."""
        packets = max(1, -(-size // flow.mtu))
        row = self.trace.messages.add(flow.number, READ, size, flow.end_psn, va, rkey, 0, 0, 0, 0)
        flow.queue.append(Posted(row, flow.end_psn, packets, 16, True, va, read=size, rkey=rkey))
        flow.end_psn += packets
        self.wake(flow)

    def _answer(self, flow: Flow, message: Posted, psn: int, size: int) -> None:
        """The responder's NIC has a READ request for ``size`` bytes whose answer begins with ``psn``."""
        back = flow.answer
        assert back is not None
        if psn > flow.expected_psn:
            now = self.engine.now
            if self.rules.delay_ns is None:  # one before it was lost
                self._complain(flow, now)
            else:
                self._set_aside(flow, psn, now, lambda _: self._answer(flow, message, psn, size))
            return
        if psn + max(1, -(-size // flow.mtu)) > flow.expected_psn:
            flow.received += 1
            flow.expected_psn = message.psn + message.packets
            flow.nak_sent = False
        if psn < back.end_psn:  # asked for again: what was under way is forgotten
            back.queue.clear()
            back.place = 0
            back.next_psn = back.end_psn = psn
        back.end_psn = psn  # between them lie the PSNs of other messages
        self.post(back, WorkRequest(RESPONSE, size, value=flow.received))
        self._catch_up(flow, self.engine.now)

    def _answered(self, back: Flow, end: int) -> None:
        """A response, up to PSN ``end``, is whole: the request is done, and nobody acknowledges it."""
        back.acked_psn = max(back.acked_psn, end)
        while back.queue and back.queue[0].psn + back.queue[0].packets <= back.acked_psn:
            back.queue.popleft()
            back.place = max(0, back.place - 1)
        assert back.asked is not None
        self._acked(back.asked, end - 1)

    def hold(self, port: Port, ns: float) -> None:
        """What goes to the port stands still for so long: its NIC pauses the switch."""
        now = self.engine.now
        port.held_until = max(port.held_until, now) + ns
        port.free_at = max(port.free_at, now) + ns

    def share(self, port: Port, ns_per_byte: float, until_ns: float) -> None:
        """Other jobs' frames come to the switch's queue towards the port, one every so many ns a byte.

        Their senders are stopped (PFC) as all others are; without it what finds the queue full is lost.
        They do not answer to marks (assumed).
        """
        now, rules = self.engine.now, self.rules
        if now >= until_ns:
            return
        size = rules.mtu * BURST
        queued = (port.free_at - now - max(0.0, port.held_until - now)) / port.down_ns
        if rules.pause is not None and queued > rules.pause[0]:
            free = now + (queued - rules.pause[1]) * port.down_ns + max(0.0, port.held_until - now)
            self.engine.at(free, self.share, port, ns_per_byte, until_ns)
            return
        if queued <= rules.queue_bytes:
            port.free_at = max(port.free_at, now) + size * port.down_ns
        self.engine.at(now + size * ns_per_byte, self.share, port, ns_per_byte, until_ns)

    def wake(self, flow: Flow) -> None:
        """The flow has something to send."""
        if not flow.waits:
            flow.waits = True
            flow.src.waiting.append(flow)
        if not flow.src.busy:
            self._serve(flow.src)

    def _serve(self, port: Port) -> None:
        """Send the next burst of the next queue pair."""
        flow = self._next(port)
        if flow is None:
            return
        picked = flow.pick()
        if picked is None:
            flow.waits = False
            self._serve(port)
            return
        message, first, count = picked
        if message.read:
            self._request(port, flow, message)
            return
        burst = self._burst(flow, message, first, count)
        if flow.rate is not None:
            flow.not_before = burst.start + burst.total_bytes * port.up_ns / flow.rate.now
        flow.went(burst.psn, count)
        if flow.idle():
            flow.waits = False
        else:
            port.waiting.append(flow)
        way_ns = self.rules.latency_ns(port, flow.dst)
        if self.rules.delay_ns is not None:
            way_ns += self.rules.delay_ns(flow)
        self.engine.at(burst.start + way_ns, self._queue, flow, burst)
        port.busy = True
        self.engine.at(burst.end, self._serve, port)

    def _next(self, port: Port) -> Flow | None:
        """The queue pair whose turn it is; None if none may send now: ``_serve`` comes again."""
        now = self.engine.now
        while port.waiting:
            if now < port.paused_until:
                port.busy = True
                self.engine.at(port.paused_until, self._serve, port)
                return None
            flow = port.waiting.popleft()
            if flow.idle():  # acknowledged in the meantime
                flow.waits = False
                continue
            if flow.not_before <= now:
                return flow
            return port.waiting.popleft() if self._turn(port, flow) else None
        port.busy = False
        return None

    def _burst(self, flow: Flow, message: Posted, first: int, count: int) -> Burst:
        """Packets of a message that leave now, one after the other."""
        full = (flow.mtu if message.packets > 1 else message.last_bytes) + flow.overhead
        last = (message.last_bytes if first + count == message.packets else flow.mtu) + flow.overhead
        step_bytes, total_bytes = last if count == 1 else full, full * (count - 1) + last
        took = total_bytes * flow.src.up_ns
        if self.rules.packet_ns is not None:
            took = max(took, self.rules.packet_ns())
        now = self.engine.now
        return Burst(message, first, count, now, now + took, step_bytes, total_bytes)

    def _request(self, port: Port, flow: Flow, message: Posted) -> None:
        """Send a READ request: for all of it, or from where its answer was lost."""
        now, size = self.engine.now, message.last_bytes + flow.overhead
        psn, wanted, row = flow.next_psn, message.read, message.row
        if psn > message.psn:
            done = (psn - message.psn) * flow.mtu
            wanted -= done
            rkey, va = message.rkey, message.begins + done
            row = self.trace.messages.add(flow.number, READ, wanted, psn, va, rkey, 0, 0, 0, 0)
        end = now + size * port.up_ns
        flow.next_psn = message.psn + message.packets
        flow.place += 1
        if flow.next_psn < flow.end_psn:
            port.waiting.append(flow)
        else:
            flow.waits = False
        arrival = max(now + self.rules.latency_ns(port, flow.dst), flow.dst.free_at)
        done_ns = arrival + size * flow.dst.down_ns
        sent = Burst(message._replace(row=row), 0, 1, now, end, size, size)
        if self.loses(port, flow.dst, now):
            self._log(flow, sent, LOST)
        else:
            self._log(flow, sent, Arrival(arrival, done_ns - arrival, done_ns))
            self.engine.at(done_ns + flow.dst.answer_ns, self._answer, flow, message, psn, wanted)
        if self.rules.may_lose:
            self._watch(flow)
        port.busy = True
        self.engine.at(end, self._serve, port)

    def _turn(self, port: Port, flow: Flow) -> bool:
        """Put ``flow``, which waits for its rate, back; whether one that need not is at the front now."""
        port.waiting.append(flow)
        now = self.engine.now
        for _ in range(len(port.waiting)):
            other = port.waiting[0]
            if other.not_before <= now and not other.idle():
                return True
            port.waiting.rotate(-1)
        port.busy = True
        self.engine.at(
            min(other.not_before for other in port.waiting if other.not_before > now), self._serve, port
        )
        return False

    def _queue(self, flow: Flow, burst: Burst) -> None:
        """A burst reaches the switch port towards its receiver."""
        lost, marked = self._in_switch(flow, burst)
        if lost == burst.packets:
            self._forward(flow, burst, marked)
            return
        before, missing, after = burst.cut(lost, flow.src.up_ns)
        if before.packets:
            self._forward(flow, before)
        self._log(flow, missing, LOST)
        if not flow.stream:  # which has timers of its own
            self._watch(flow.asked or flow)
        if after.packets:
            self._queue(flow, after)

    def _in_switch(self, flow: Flow, burst: Burst) -> tuple[int, int]:
        """Which packet of a burst is the first that is lost (its count: none), and how many get marks."""
        port, now, rules = flow.dst, self.engine.now, self.rules
        losses = rules.losses(flow.src, port)
        lost = burst.packets if losses is None else losses.first_lost(burst.packets)
        marked = 0
        if port.free_at > now:
            held_ns = max(0.0, port.held_until - now)
            queued = (port.free_at - now - held_ns) / port.down_ns
        else:
            held_ns = queued = 0.0
        if queued > 0:
            if queued > rules.queue_bytes:
                lost = 0
            if rules.pause is not None and queued > rules.pause[0]:
                self._pause(flow.src, now + held_ns + (queued - rules.pause[1]) * port.down_ns)
            if rules.marking is not None and not flow.stream:
                marked = rules.marking.marks(queued, burst.packets, rules.random)
        if rules.down is not None and (rules.down(flow.src, now) or rules.down(port, now)):
            lost = 0
        return lost, marked

    def _forward(self, flow: Flow, burst: Burst, marked: int = 0) -> None:
        """The switch hands a burst on, behind what waits for the receiver's port."""
        port, now = flow.dst, self.engine.now
        begin = now if now > port.free_at else port.free_at
        # What comes slower than the port takes it keeps the port busy for its bytes alone.
        port.free_at = begin + burst.total_bytes * port.down_ns
        done = max(port.free_at, now + (burst.end - burst.start))
        step_ns = burst.step_bytes * max(flow.src.up_ns, port.down_ns)
        if self.rules.turn_ns is not None:  # seen by software in its next turn
            done = self.taken_up(port, done) + (burst.packets - 1) * BEHIND_NS
            port.taken += burst.packets - 1
            begin, step_ns = done - burst.packets * BEHIND_NS, BEHIND_NS
        self._log(flow, burst, Arrival(begin, step_ns, done), marked)
        if marked:
            self._notify(flow, done)
        if isinstance(flow, Stream):
            flow.receive(burst, done)
        else:
            self._receive(flow, burst, done)

    def _log(self, flow: Flow, burst: Burst, came: Arrival, marked: int = 0) -> None:
        self.trace.bursts.add(
            flow.number, burst.message.row, burst.first, burst.packets,
            int(burst.start), int(burst.step_bytes * flow.src.up_ns * 1000), int(burst.end),
            int(came.begin), int(came.step_ns * 1000), int(came.end), marked,
        )  # fmt: skip

    def _pause(self, port: Port, until: float) -> None:
        """The switch stops a NIC (IEEE 802.1Qbb); what is on its way still arrives."""
        if until <= port.paused_until:
            return
        self.trace.pauses.add(port.number, int(self.engine.now), int(until))
        port.paused_until = until


def _nobody(flow: Flow) -> None:
    """Nobody is told of what arrives, or is done."""
