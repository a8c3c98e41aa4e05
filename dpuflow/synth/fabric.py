"""NICs, links and switch queues: reliable connections that carry messages as bursts of packets.

A NIC serves its queue pairs in turn, some packets at a time; a burst then waits for the switch port
towards its receiver, where it may be marked, or stop the senders (``receiving`` has what comes back). The
tables of ``trace`` keep what was on the wire and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.synth.flows import BEHIND_NS, BURST, Flow, Posted
from dpuflow.synth.receiving import Receiving
from dpuflow.synth.stream import Stream
from dpuflow.synth.trace import ATOMIC, READ, RESPONSE

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
        flow = Flow(len(self.flows), src, dst, arrived, completed, self.rules.mtu, False)
        if self.rules.packet_ns is not None:
            flow.burst = 1
        self.flows.append(flow)
        return flow

    def stream(
        self, src: Port, dst: Port, arrived: Callable[[Flow], None], completed: Callable[[Flow], None]
    ) -> Stream:
        """A new TCP stream, likewise."""
        flow = Stream(len(self.flows), src, dst, arrived, completed, self)
        if self.rules.packet_ns is not None:
            flow.burst = 1
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
        flow.queue.append(Posted(row, flow.end_psn, packets, last, counts, va, atomic=kind == ATOMIC))
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
        if psn > flow.expected_psn:  # one before it was lost
            self._complain(flow, self.engine.now)
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
        self.post(back, RESPONSE, size, 0, 0, flow.received)

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
        if not port.waiting:
            port.busy = False
            return
        now = self.engine.now
        if now < port.paused_until:
            port.busy = True
            self.engine.at(port.paused_until, self._serve, port)
            return
        flow = port.waiting.popleft()
        if flow.idle():  # acknowledged in the meantime
            flow.waits = False
            self._serve(port)
            return
        if flow.not_before > now and not self._turn(port, flow):
            return
        if flow.not_before > now:
            flow = port.waiting.popleft()
        if isinstance(flow, Stream):
            picked = flow.pick()
            if picked is None:
                flow.waits = False
                self._serve(port)
                return
            message = flow.message_at(picked[0])
            first, count = picked[0] - message.psn, picked[1]
        else:
            message = flow.queue[flow.place]
            if flow.asked is not None:
                flow.next_psn = max(flow.next_psn, message.psn)
            first = flow.next_psn - message.psn
            if message.read:
                self._request(port, flow, message)
                return
            count = min(flow.burst, message.packets - first)
        ends = first + count == message.packets
        full = (flow.mtu if message.packets > 1 else message.last_bytes) + flow.overhead
        last = (message.last_bytes if ends else flow.mtu) + flow.overhead
        step_bytes, total_bytes = last if count == 1 else full, full * (count - 1) + last
        start = now
        took = total_bytes * port.up_ns
        if self.rules.packet_ns is not None:
            took = max(took, self.rules.packet_ns())
        end = start + took
        if flow.rate is not None:
            flow.not_before = start + total_bytes * port.up_ns / flow.rate.now
        if isinstance(flow, Stream):
            flow.went(first + message.psn, count)
        else:
            flow.next_psn += count
            if ends:
                flow.place += 1
        if flow.idle():
            flow.waits = False
        else:
            port.waiting.append(flow)
        arrival = start + self.rules.latency_ns(port, flow.dst)
        self.engine.at(arrival, self._queue, flow, message, first, count, start, end, step_bytes, total_bytes)
        port.busy = True
        self.engine.at(end, self._serve, port)

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
        sent = message._replace(row=row)
        if self.loses(port, flow.dst, now):
            self._log(flow, sent, 0, 1, now, end - now, end, -1, 0, -1)
        else:
            self._log(flow, sent, 0, 1, now, end - now, end, arrival, done_ns - arrival, done_ns)
            self.engine.at(done_ns, self._answer, flow, message, psn, wanted)
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

    def _queue(
        self, flow: Flow, message: Posted, first: int, count: int,
        start: float, end: float, step_bytes: int, total_bytes: int,
    ) -> None:  # fmt: skip
        """A burst reaches the switch port towards its receiver."""
        port, now = flow.dst, self.engine.now
        rules = self.rules
        losses = self._lossy(flow.src, port)
        lost = count if losses is None else losses.first_lost(count)
        held_ns = max(0.0, port.held_until - now)
        queued = (port.free_at - now - held_ns) / port.down_ns
        marked = 0
        if queued > 0:
            if queued > rules.queue_bytes:
                lost = 0
            if rules.pause is not None and queued > rules.pause[0]:
                self._pause(flow.src, now + held_ns + (queued - rules.pause[1]) * port.down_ns)
            if rules.marking is not None and not flow.stream:
                marked = rules.marking.marks(queued, count, rules.random)
        if rules.down is not None and (rules.down(flow.src, now) or rules.down(port, now)):
            lost = 0
        up_ns, down_ns = flow.src.up_ns, port.down_ns
        step_ns = step_bytes * max(up_ns, down_ns)
        if lost == count:
            begin = max(now, port.free_at)
            # What comes slower than the port takes it keeps the port busy for its bytes alone.
            port.free_at = begin + total_bytes * down_ns
            done = max(port.free_at, now + (end - start))
            begin, step_ns, done = self._taken_up(port, begin, step_ns, done, count)
            self._log(
                flow, message, first, count, start, step_bytes * up_ns, end, begin, step_ns, done, marked
            )
            if marked:
                self._notify(flow, done)
            self._deliver(flow, message, first, count, done, start)
            return
        # Cut at the lost packet: what came before it, itself, what follows.
        at = start
        if lost:
            part = step_bytes * lost
            self._part(flow, message, first, lost, at, at + part * up_ns, step_bytes, part, now)
            at += part * up_ns
        one = total_bytes - step_bytes * (count - 1) if lost == count - 1 else step_bytes
        self._log(flow, message, first + lost, 1, at, one * up_ns, at + one * up_ns, -1, 0, -1)
        if not flow.stream:  # which has timers of its own
            self._watch(flow.asked or flow)
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
        port.free_at = begin + total_bytes * port.down_ns
        done = max(port.free_at, arrival + (end - start))
        step_ns = step_bytes * max(flow.src.up_ns, port.down_ns)
        begin, step_ns, done = self._taken_up(port, begin, step_ns, done, count)
        self._log(flow, message, first, count, start, step_bytes * flow.src.up_ns, end, begin, step_ns, done)
        self._deliver(flow, message, first, count, done, start)

    def _taken_up(
        self, port: Port, begin: float, step_ns: float, done: float, count: int
    ) -> tuple[float, float, float]:
        """When packets that are there from ``begin`` to ``done`` are seen: by software in its next turn."""
        if self.rules.turn_ns is None:
            return begin, step_ns, done
        last = self.taken_up(port, done) + (count - 1) * BEHIND_NS
        port.taken += count - 1
        return last - count * BEHIND_NS, BEHIND_NS, last

    def _deliver(
        self, flow: Flow, message: Posted, first: int, count: int, done: float, start: float
    ) -> None:
        if isinstance(flow, Stream):
            flow.receive(message, first, count, done, start)
        else:
            self._receive(flow, message, first, count, done)

    def _log(
        self, flow: Flow, message: Posted, first: int, count: int,
        tx: float, tx_step: float, tx_end: float, rx: float, rx_step: float, rx_end: float, marked: int = 0,
    ) -> None:  # fmt: skip
        self.trace.bursts.add(
            flow.number, message.row, first, count, int(tx), int(tx_step * 1000), int(tx_end),
            int(rx), int(rx_step * 1000), int(rx_end), marked,
        )  # fmt: skip

    def _pause(self, port: Port, until: float) -> None:
        """The switch stops a NIC (IEEE 802.1Qbb); what is on its way still arrives."""
        if until <= port.paused_until:
            return
        self.trace.pauses.add(port.number, int(self.engine.now), int(until))
        port.paused_until = until


def _nobody(flow: Flow) -> None:
    """Nobody is told of what arrives, or is done."""
