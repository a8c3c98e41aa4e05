"""One direction of a TCP connection, as Linux sends and receives it: windows, losses found and sent again.

Segments are numbered like packets of other flows; acknowledgments tell bytes. Everything that comes in order
is acknowledged once a burst (receive offload hands it up in one piece), each segment that comes out of order
at once (RFC 5681), with what is there beyond the hole (SACK, RFC 2018; duplicates too, RFC 2883). The sender
takes a segment for lost when one sent later is there (RACK, RFC 8985): at once when three are, or while it
recovers, else after a quarter of the round trip. What nobody tells is found by a probe of the last segment
after two round trips (RFC 8985, 7) and at last by the retransmission timeout (RFC 6298). Learning how far
segments overtake, delayed acknowledgments and pacing are left out; connections are older than captures.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import SEGMENT_ACK, STREAM
from dpuflow.synth.flows import Flow
from dpuflow.synth.tcp_window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Burst, Port, Posted

SEGMENT: Final = 1448
"""Bytes of one segment: Ethernet's 1500 without headers and the option for time stamps (RFC 7323)."""
SCALE: Final = 8
"""Window scale: windows are told in units of 256 bytes."""
REPLY_NS: Final = 10.0
"""Between two acknowledgments, at least."""
BLOCKS: Final = 3
"""Ranges that an acknowledgment can tell beside a time stamp."""
DUPLICATES: Final = 3
"""Segments beyond a hole that prove it a loss at once."""
LEAST_RTO_NS: Final = 200e6
FIRST_RTO_NS: Final = 1e9
PROBE_NS: Final = 2e6
"""Linux: TCP_RTO_MIN, TCP_TIMEOUT_INIT, TCP_TIMEOUT_MIN."""

Block = tuple[int, int, int, int]
"""What is there beyond a hole: segments from, to; bytes from, to."""


class Stream(Flow):
    """A flow that is a TCP stream: both what its sender and what its receiver know."""

    stream = True

    def __init__(
        self,
        number: int,
        src: Port,
        dst: Port,
        arrived: Callable[[Flow], None],
        completed: Callable[[Flow], None],
        host: Fabric,
    ) -> None:
        super().__init__(number, src, dst, arrived, completed, SEGMENT)
        self._host, self._engine, self._rules = host, host.engine, host.rules
        self.congestion = Window()
        self._sacked: set[int] = set()
        self._lost: dict[int, None] = {}  # in order, not yet sent again
        self._again: dict[int, float] = {}  # sent again and not yet there: when
        self._sent: deque[tuple[int, float]] = deque()  # not yet acknowledged: up to which segment, when
        self._checked = 0  # up to which segment holes have been taken for lost
        self._newest = -1.0  # when the latest of what is there was sent
        self._last_ns = 0.0  # when anything was sent
        self._rtt_ns = self._spread_ns = 0.0
        self._least_ns = float("inf")  # of all round trips
        self._held = False  # by the congestion window
        self._backoff = 0
        self._probed = self._probing = False
        self._deadline: float | None = None
        self._for_probe = False  # what the timer is for; else the timeout
        self._ticks_at = float("inf")
        self._kept: list[Block] = []  # at the receiver, latest first
        self._ends: list[int] = []  # of messages among those: their last segment
        self._echo_ns = 0.0  # when what was last acknowledged in order was sent
        self._persists = False

    # -- sender ------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether nothing waits to be sent, first or again."""
        return self.next_psn >= self.end_psn and not self._lost and not self._probing

    def in_flight(self) -> int:
        """Segments that are on their way as far as the sender knows."""
        return self.next_psn - self.acked_psn - len(self._sacked) - len(self._lost)

    def pick(self) -> tuple[Posted, int, int] | None:
        """As for every flow; one that was lost, or a probe, goes alone."""
        if self._probing:
            return self._alone(self.next_psn - 1)
        room = int(self.congestion.size - self.in_flight())
        if self._lost:
            return self._alone(next(iter(self._lost))) if room >= 1 else None
        if self.next_psn >= self.end_psn:
            return None
        if not self.in_flight() and self._rtt_ns:
            self.congestion.rest((self._engine.now - self._last_ns) / self._timeout_ns())
            room = int(self.congestion.size)
        self._held = room < self.end_psn - self.next_psn
        if room < 1:
            return None
        message = self.queue[self.place]
        first = self.next_psn - message.psn
        return message, first, min(self.burst, message.packets - first, room)

    def _alone(self, psn: int) -> tuple[Posted, int, int]:
        """A segment that was sent before, within its message."""
        message = next(message for message in self.queue if psn < message.psn + message.packets)
        return message, psn - message.psn, 1

    def went(self, psn: int, count: int) -> None:
        """What was picked is on its way."""
        now = self._last_ns = self._engine.now
        self._probing = False
        if self.congestion.until is not None:
            self.congestion.again(count)
        if psn < self.next_psn:
            self._lost.pop(psn, None)
            self._again[psn] = now
            return
        message = self.queue[self.place]
        self.next_psn += count
        if self.next_psn == message.psn + message.packets:
            self.place += 1
        self._sent.append((self.next_psn, now))
        if self._rules.may_lose and (self._deadline is None or self._for_probe):
            self._arm()

    def _acked(self, upto: int, blocks: tuple[Block, ...]) -> None:
        """An acknowledgment is there."""
        now, before = self._engine.now, self.acked_psn
        newest = -1.0
        delivered = 0
        if upto > before:
            newest = self._advance(upto)
            delivered = upto - before
            gone = {psn for psn in self._sacked if psn < upto} if self._sacked else set()
            delivered -= len(gone)
            self._sacked -= gone
            self._backoff, self._probed = 0, False
        for first, end, _, _ in blocks:
            if end > upto:
                more, sent = self._note(max(first, upto), end)
                delivered += more
                newest = max(newest, sent)
        if newest >= 0:
            self._measure(now - newest)
            self._newest = max(self._newest, newest)
        if self._sacked or self._again:
            self._find_lost(0.0 if self._certain() else self._least_ns / 4)
        window = self.congestion
        if window.until is not None and upto >= window.until:
            window.recovered()
        if window.until is not None:
            window.reduce(delivered, self.in_flight())
        elif delivered and self._held:
            window.grow(delivered, now, self._rtt_ns)
        if self._rules.may_lose and (upto > before or (self._for_probe and not self._may_probe())):
            self._arm()
        if not self.idle():
            self._host.wake(self)

    def _advance(self, upto: int) -> float:
        """Everything before segment ``upto`` is there; returns when the latest of it was sent."""
        newest = -1.0
        sent = self._sent
        while sent and sent[0][0] <= upto:
            newest = sent.popleft()[1]
        if sent and newest < 0:
            newest = sent[0][1]  # part of a burst
        if self._again or self._lost:
            for psn in [psn for psn in self._again if psn < upto]:
                newest = max(newest, self._again.pop(psn))
            for psn in [psn for psn in self._lost if psn < upto]:
                del self._lost[psn]
        self.acked_psn = upto
        while self.queue and self.queue[0].psn + self.queue[0].packets <= upto:
            message = self.queue.popleft()
            self.place -= 1
            if message.counts:
                self.completed(self)
        return newest

    def _note(self, first: int, end: int) -> tuple[int, float]:
        """Segments that the receiver has beyond a hole: how many are new, when the latest was sent."""
        newest, count = -1.0, 0
        for psn in range(end - 1, first - 1, -1):
            if psn in self._sacked:
                break
            if psn not in self._again:
                self._sacked.add(psn)
                self._lost.pop(psn, None)
                newest = max(newest, self._sent_ns(psn))
                count += 1
        for psn in [psn for psn in self._again if first <= psn < end]:
            newest = max(newest, self._again.pop(psn))
            self._lost.pop(psn, None)
            if psn not in self._sacked:
                self._sacked.add(psn)
                count += 1
        return count, newest

    def _sent_ns(self, psn: int) -> float:
        """When a segment was sent first."""
        return next((when for end, when in self._sent if psn < end), self._engine.now)

    def _certain(self) -> bool:
        return self.congestion.until is not None or len(self._sacked) >= DUPLICATES

    def _find_lost(self, patience_ns: float) -> None:
        """Holes below what was sent earlier than the latest that is there."""
        limit = self._newest - patience_ns
        place = max(self._checked, self.acked_psn)
        top = max(self._sacked, default=self.acked_psn)
        waits = False
        for end, when in self._sent:
            if end <= place:
                continue
            if place >= top or when > limit:
                waits = place < top
                break
            for psn in range(place, min(end, top)):
                if psn not in self._sacked and psn not in self._again:
                    self._lost[psn] = None
            place = min(end, top)
        self._checked = place
        for psn in [psn for psn, when in self._again.items() if when < limit]:
            del self._again[psn]
            self._lost[psn] = None
        if patience_ns and waits:
            self._engine.at(self._engine.now + patience_ns, self._lose_patience)
        if self._lost and self.congestion.until is None:
            self.congestion.lose(self.next_psn, self.next_psn - self.acked_psn)

    def _lose_patience(self) -> None:
        if self._sacked:
            self._find_lost(0.0)
            if self.congestion.until is not None:
                self.congestion.reduce(0, self.in_flight())
            self._host.wake(self)

    # -- timers ------------------------------------------------------------------------------

    def _measure(self, rtt_ns: float) -> None:
        """RFC 6298."""
        self._least_ns = min(self._least_ns, rtt_ns)
        if not self._rtt_ns:
            self._rtt_ns, self._spread_ns = rtt_ns, rtt_ns / 2
            return
        self._spread_ns += (abs(rtt_ns - self._rtt_ns) - self._spread_ns) / 4
        self._rtt_ns += (rtt_ns - self._rtt_ns) / 8

    def _timeout_ns(self) -> float:
        if not self._rtt_ns:
            return FIRST_RTO_NS
        return self._rtt_ns + max(4 * self._spread_ns, LEAST_RTO_NS)

    def _arm(self) -> None:
        """Set the timer anew: for a probe, or for the timeout."""
        if self.next_psn == self.acked_psn:
            self._deadline = None
            return
        timeout = self._timeout_ns() * 2**self._backoff
        self._for_probe = self._may_probe()
        if self._for_probe:
            alone = self.next_psn - self.acked_psn == 1
            timeout = min(timeout, 2 * self._rtt_ns + (LEAST_RTO_NS if alone else PROBE_NS))
        self._deadline = self._engine.now + timeout
        self._tick_at(self._deadline)

    def _may_probe(self) -> bool:
        return not (self._probed or self._sacked or self._backoff) and self.congestion.until is None

    def _tick_at(self, when: float) -> None:
        if when < self._ticks_at:
            self._ticks_at = when
            self._engine.at(when, self._tick)

    def _tick(self) -> None:
        now = self._engine.now
        if now < self._ticks_at:
            return
        self._ticks_at = float("inf")
        if self._deadline is None:
            return
        if now < self._deadline:
            self._tick_at(self._deadline)
            return
        if self._for_probe:
            self._probed = self._probing = True
        else:
            self._backoff += 1
            self._again.clear()
            self._checked = self.next_psn
            there = range(self.acked_psn, self.next_psn)
            self._lost = dict.fromkeys(psn for psn in there if psn not in self._sacked)
            self.congestion.time_out(self.next_psn)
        self._arm()
        self._host.wake(self)

    # -- receiver ----------------------------------------------------------------------------

    def receive(self, burst: Burst, done: float) -> None:
        """A burst is at the receiver at ``done``."""
        message, count, psn, end = burst.message, burst.packets, burst.psn, burst.end_psn
        size = (message.packets - 1) * self.mtu + message.last_bytes
        begin_byte = message.begins + burst.first * self.mtu
        end_byte = message.begins + (size if burst.ends else (burst.first + count) * self.mtu)
        if end <= self.expected_psn or any(a <= psn and end <= b for a, b, _, _ in self._kept):
            self._acknowledge(done, (psn, end, begin_byte, end_byte))
            return
        if burst.ends and message.counts:
            self._ends.append(end)
        if psn > self.expected_psn:
            step_ns = (self.mtu + self.overhead) * max(self.src.up_ns, self.dst.down_ns)
            for i in range(count):
                after = end_byte if i + 1 == count else begin_byte + (i + 1) * self.mtu
                self._keep((psn + i, psn + i + 1, begin_byte + i * self.mtu, after))
                self._acknowledge(done - (count - 1 - i) * step_ns)
            return
        self.expected_psn, self.bytes_in, self._echo_ns = end, end_byte, burst.start
        for block in [block for block in self._kept if block[0] <= end]:
            self._kept.remove(block)
            self.expected_psn, self.bytes_in = max((end, end_byte), (block[1], block[3]))
        self._acknowledge(done)
        if self._ends:
            whole = [psn for psn in self._ends if psn <= self.expected_psn]
            self._ends = [psn for psn in self._ends if psn > self.expected_psn]
            for _ in whole:
                self._engine.at(done, self.arrived, self)

    def _keep(self, new: Block) -> None:
        """A segment beyond a hole, together with its neighbours that are there."""
        for block in [b for b in self._kept if b[1] == new[0] or b[0] == new[1]]:
            self._kept.remove(block)
            new = (
                min(block[0], new[0]), max(block[1], new[1]), min(block[2], new[2]), max(block[3], new[3])
            )  # fmt: skip
        self._kept.insert(0, new)

    def _acknowledge(self, done: float, again: Block | None = None) -> None:
        """Of what is there at ``done``; ``again`` had been there before."""
        blocks = tuple(([again] if again else []) + self._kept)[:BLOCKS]
        self._tell(done + self._rules.ack_ns(), blocks)

    def _tell(self, when: float, blocks: tuple[Block, ...], then: Callable[[], None] | None = None) -> bool:
        """Send an acknowledgment; returns whether it will come."""
        when = max(when, self.replied_ns + REPLY_NS)  # in order
        self.replied_ns = when
        assert self.window is not None
        told = min(0xFFFF, self.window() >> SCALE)
        edges = [edge for block in blocks for edge in block[2:]]
        row = self._host.trace.acks.add(int(self._echo_ns), *edges, *(0,) * (2 * BLOCKS - len(edges)))
        add = self._host.trace.replies.add
        if self._host.loses(self.dst, self.src, when):
            add(self.number, SEGMENT_ACK, int(when), -1, self.bytes_in, row, told)
            return False
        arrival = max(when + self._rules.latency_ns(self.dst, self.src), self.src.free_at)
        arrival = self._host.taken_up(self.src, arrival)
        add(self.number, SEGMENT_ACK, int(when), int(arrival), self.bytes_in, row, told)
        if then is None:
            self._engine.at(arrival, self._acked, self.expected_psn, blocks)
        else:
            self._engine.at(arrival, then)
        return True

    # -- windows -----------------------------------------------------------------------------

    def update(self, then: Callable[[], None]) -> None:
        """The receiver has read, its window is open again; ``then``: the sender knows it."""
        if not self._tell(self._engine.now, (), then) and not self._persists:
            self._persists = True
            self._engine.at(self._engine.now + self._timeout_ns(), self._persist, then, 1)

    def _persist(self, then: Callable[[], None], doubled: int) -> None:
        """Ask for the window by a segment without data before what is acknowledged (RFC 9293, 3.8.6.1)."""
        now = self._engine.now
        if self.next_psn != self.acked_psn or not self.idle():
            self._persists = False
            return
        messages, bursts = self._host.trace.messages, self._host.trace.bursts
        row = messages.add(self.number, STREAM, 0, self.next_psn, max(0, self.bytes_in - 1), 0, 0, 0, 0, 0)
        size_ns = self.overhead * self.src.up_ns
        lost = self._host.loses(self.src, self.dst, now)
        came = now + self._rules.latency_ns(self.src, self.dst)
        rx, done = (-1, -1) if lost else (int(came), int(came + size_ns))
        bursts.add(self.number, row, 0, 1, int(now), 0, int(now + size_ns), rx, 0, done, 0)
        if lost or not self._tell(came + size_ns + self._rules.ack_ns(), (), then):
            self._engine.at(now + self._timeout_ns() * 2**doubled, self._persist, then, doubled + 1)
        else:
            self._persists = False
