"""What a receiver's NIC answers, and what the sender's makes of it: ACKs, NAKs, CNPs, timeouts.

Retransmission is go-back-N after a NAK or a timeout (IBA volume 1, 9.7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import ACK, ATOMIC_ACK, CNP
from dpuflow.synth.congestion import CNP_NS, TIMER_NS, Rate
from dpuflow.synth.flows import BEHIND_NS, Due

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.flows import Burst, Flow, Port, Posted, Rules
    from dpuflow.synth.trace import Trace

NAK_SEQUENCE: Final = 0x60
ACK_NO_LIMIT: Final = 0x1F
REPLY_NS: Final = 10.0
"""Between two replies of one queue pair, at least."""
STARVED_NS: Final = 1.5e6
"""By how much later such ACKs are, on average: in the real captures some 15 packets of 0.1 ms come again."""
REWIND_NS: Final = 2_000.0
"""From a NAK to the first packet sent again (assumed)."""


class Receiving(ABC):
    """The receiving half of the network; ``Fabric`` is the sending one."""

    def __init__(self, engine: Engine, trace: Trace, rules: Rules) -> None:
        self.engine, self.trace, self.rules = engine, trace, rules
        self.flows: list[Flow] = []

    @abstractmethod
    def wake(self, flow: Flow) -> None:
        """The flow has something to send."""

    @abstractmethod
    def _answered(self, back: Flow, end: int) -> None:
        """A response, up to PSN ``end``, is whole."""

    def _receive(self, flow: Flow, burst: Burst, done: float) -> None:
        """The receiver's NIC has the burst at ``done``: in order, ahead of a hole, or once more."""
        message = burst.message
        psn = message.psn + burst.first
        end = psn + burst.packets
        ends = end == message.psn + message.packets
        while flow.expected_psn in flow.skips:
            flow.expected_psn = flow.skips[flow.expected_psn]
        if psn > flow.expected_psn:
            if self.rules.delay_ns is None:
                self._lacks(flow, done)
            else:
                self._set_aside(flow, psn, done, lambda when: self._receive(flow, burst, when))
            return
        if end <= flow.expected_psn:
            if ends:
                # An atomic's answer is kept and given again; for all else one ACK of everything will do.
                psn = message.psn if message.atomic else flow.expected_psn - 1
                kind = ATOMIC_ACK if message.atomic else ACK
                self._reply(flow, done + self.rules.ack_ns(), psn, kind=kind)
            return
        flow.expected_psn = end
        flow.nak_sent = False
        every = self.rules.ack_packets
        if ends:
            self._take(flow, message, done)
        elif every and flow.asked is None and end // every > psn // every:
            self._reply(flow, done + self.rules.ack_ns(), end // every * every - 1)
        self._catch_up(flow, done)

    def _set_aside(self, flow: Flow, psn: int, done: float, then: Callable[[float], None]) -> None:
        """What came at ``done`` before its turn is in its place already; ``then`` counts it when due."""
        if not flow.ahead:
            self.engine.at(done + self.rules.patience_ns, self._lose_patience, flow, flow.expected_psn)
        flow.ahead[psn] = then

    def _catch_up(self, flow: Flow, done: float) -> None:
        """Count what had come before its turn, now that it is due."""
        if flow.catching_up:
            return
        flow.catching_up = True
        while flow.ahead:
            while flow.expected_psn in flow.skips:
                flow.expected_psn = flow.skips[flow.expected_psn]
            then = flow.ahead.pop(flow.expected_psn, None)
            if then is None:
                self.engine.at(done + self.rules.patience_ns, self._lose_patience, flow, flow.expected_psn)
                break
            then(done)
        flow.catching_up = False

    def _lose_patience(self, flow: Flow, psn: int) -> None:
        """What should have come long since is lost."""
        if flow.expected_psn == psn and flow.ahead:
            self._lacks(flow, self.engine.now)

    def _lacks(self, flow: Flow, done: float) -> None:
        """Packets are missing: ask for them."""
        if flow.asked is None:
            self._complain(flow, done)
        elif not flow.nak_sent:  # a hole in what was asked for: ask again from there
            flow.nak_sent = True
            self.engine.at(done + REWIND_NS, self._again, flow.asked, flow.expected_psn)

    def _take(self, flow: Flow, message: Posted, done: float) -> None:
        """A message is whole at ``done``: tell who waits for it, and answer."""
        end = message.psn + message.packets
        flow.received += 1
        if flow.asked is not None:  # a response needs no ACK; others may be in the queue behind it
            self.engine.at(done, self._answered, flow, end)
            return
        if message.counts:
            self.engine.at(done, flow.arrived, flow)
        if message.atomic:
            self._reply(flow, done + self.rules.ack_ns(), end - 1, kind=ATOMIC_ACK)
            return
        if self.rules.repeat_share and self.rules.random.random() < self.rules.repeat_share:
            # A host that is starved of time: its ACK is so late that the sender begins again.
            self.engine.at(done, self._again, flow, message.psn)
            done += self.rules.random.expovariate(1.0 / STARVED_NS)
        self._acknowledge(flow, end - 1, done)

    def _complain(self, flow: Flow, done: float) -> None:
        """A NAK, once for each hole."""
        if not flow.nak_sent:
            flow.nak_sent = True
            self._reply(flow, done + self.rules.ack_ns(), flow.expected_psn, NAK_SEQUENCE)

    def _acknowledge(self, flow: Flow, psn: int, done: float) -> None:
        """Of a message that is whole at ``done``: an ACK of its own, or the one that is due anyway."""
        answers = flow.answer
        if answers is not None and answers.queue and answers.queue[0].psn < psn:
            # In order: behind the answers to the READs before it.
            self.engine.at(done + REPLY_NS * 100, self._acknowledge, flow, psn, done + REPLY_NS * 100)
            return
        due = flow.due
        if due is not None and due.at_ns > done and due.messages < self.rules.coalesce:
            due.psn, due.received = psn, flow.received
            due.messages += 1
            return
        when = done + self.rules.ack_ns()
        if self.rules.coalesce == 1:
            self._reply(flow, when, psn)
            return
        flow.due = Due(when, psn, flow.received)
        self.engine.at(when, self._reply_due, flow, flow.due)

    def taken_up(self, port: Port, arrival: float) -> float:
        """When software takes up what is there at ``arrival``: in its next turn, behind what it took then."""
        draw = self.rules.turn_ns
        if draw is None:
            return arrival
        turns = port.turns
        latest = turns[-1] if turns else 0.0
        while latest < arrival or not turns:
            latest += draw()
            turns.append(latest)
        turn = turns[bisect_left(turns, arrival)]
        if turn != port.turn:
            port.turn, port.taken = turn, 0
        port.taken += 1
        return turn + port.taken * BEHIND_NS

    def _reply_due(self, flow: Flow, due: Due) -> None:
        if due.psn > flow.told_psn:  # else an ACK within a later message has said so
            self._reply(flow, due.at_ns, due.psn, received=due.received)

    def loses(self, src: Port, dst: Port, when: float) -> bool:
        """Whether a single frame sent now, at ``when``, is lost."""
        losses, down = self.rules.losses(src, dst), self.rules.down
        lost = losses is not None and losses.first_lost(1) == 0
        return lost or (down is not None and (down(src, when) or down(dst, when)))

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
        syndrome: int = ACK_NO_LIMIT,
        received: int = -1,
        kind: int = ACK,
    ) -> None:
        """An ACK or NAK leaves the receiver at ``when``; it passes the NIC's queue, not the switch's."""
        when = max(when, flow.replied_ns + REPLY_NS)  # in order
        flow.replied_ns = when
        # A NAK names the packet that is missing: what came before it is acknowledged.
        flow.told_psn = max(flow.told_psn, psn if syndrome == ACK_NO_LIMIT else psn - 1)
        msn = flow.received if received < 0 else received
        if self.loses(flow.dst, flow.src, when):
            self.trace.replies.add(flow.number, kind, int(when), -1, psn, syndrome, msn)
            self._watch(flow)
            return
        arrival = max(when + self.rules.latency_ns(flow.dst, flow.src), flow.src.free_at)
        arrival = self.taken_up(flow.src, arrival)
        self.trace.replies.add(flow.number, kind, int(when), int(arrival), psn, syndrome, msn)
        self.engine.at(arrival, self._acked if syndrome == ACK_NO_LIMIT else self._rewind, flow, psn)

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
        if flow.answer is None:  # else READs before it are done only when their answers are there
            self._acked(flow, psn - 1)
        self.engine.at(self.engine.now + REWIND_NS, self._again, flow, psn)

    def _again(self, flow: Flow, psn: int) -> None:
        if psn < flow.acked_psn or psn >= flow.next_psn:
            return
        flow.next_psn = psn
        flow.place = self._place(flow, psn)
        self.wake(flow)

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
            if flow.answer is not None:
                flow.answer.nak_sent = False
                acked = max(acked, flow.answer.expected_psn)
            self._again(flow, acked)
        self._watch(flow)
