"""NCCL's socket transport over TCP: one connection each way of a channel, sizes and payloads in one stream.

The sender writes the size of a message (int32) and its payload as soon as the GPU has made it; there is no
clear-to-send. A receiver that has not posted its receive leaves the bytes in its socket buffer, and the
window closes (src/transport/net_socket.cc with NCCL_SOCKET_NTHREADS 0). Connections are older than captures.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import LENGTH, STREAM
from dpuflow.synth.flows import WorkRequest
from dpuflow.synth.transport import Grain, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow
    from dpuflow.synth.gpu import Gpu

WINDOW: Final = 4 << 20
"""Bytes of a receiver's socket buffer (assumed; the window scale is agreed before the capture)."""


class Socket(Link):
    """Carries messages from ``src`` to ``dst``."""

    def __init__(self, src: Gpu, dst: Gpu, engine: Engine, fabric: Fabric) -> None:
        super().__init__(src, dst)
        self._engine, self._fabric = engine, fabric
        self.flow = fabric.stream(src.port, dst.port, self._came, self._went)
        self.flow.window = self.window_now
        self._asked: deque[tuple[int, int]] = deque()  # operations: their last message, messages read ahead
        self._ends: deque[int] = deque()  # operations of the sender: their last message
        self._sizes: deque[tuple[int, int]] = deque()  # produced, not yet written, with what they hold
        self._under_way: deque[int] = deque()  # bytes of messages written, not yet read
        self._bytes = 0  # of those
        self._written = self._received = self._read = 0
        self._stream = 0
        self._at = 0.0

    def window_now(self) -> int:
        """What the receiver advertises."""
        unread = sum(list(self._under_way)[: self._received - self._read])
        return max(0, WINDOW - unread)

    # -- receiver ----------------------------------------------------------------------------

    def expect(self, messages: int, grain: Grain) -> None:
        last = self._asked[-1][0] if self._asked else self.taken
        self._asked.append((last + messages, grain.depth))
        self._fetch()

    def _came(self, flow: Flow) -> None:
        self._received += 1
        self._fetch()

    def _fetch(self) -> None:
        """The proxy reads what has come, as far as receives are posted."""
        while self._asked and self.taken >= self._asked[0][0]:
            self._asked.popleft()
        if not self._asked:
            return
        last, depth = self._asked[0]
        before = self._read
        while self._read < min(self._received, last, self.taken + depth):
            self._read += 1
            self._bytes -= self._under_way.popleft()
            self._engine.at(self.dst.proxy.act(0.0, self.dst.poll_ns()), self._bring_one)
        if self._read > before and self._sizes and self._written == self._received:
            # All that was written is here: the sender waits for the window.
            self.flow.update(self._send)

    def _bring_one(self) -> None:
        self.arrived += 1
        self._bring()

    def take(self) -> None:
        self.taken += 1
        self._fetch()

    # -- sender ------------------------------------------------------------------------------

    def announce(self, messages: int) -> None:
        self._ends.append((self._ends[-1] if self._ends else self.freed) + messages)
        self._send()

    def watch(self, tell: Callable[[float], None]) -> None:
        self._note(tell, self._engine.now)

    def publish(self, size: int, content: int) -> None:
        self.produced += 1
        self._sizes.append((size, content))
        self._send()

    def _send(self) -> None:
        while self._ends and self.freed >= self._ends[0]:
            self._ends.popleft()
        last = self._ends[0] if self._ends else 0
        while self._written < min(self.produced, last) and (
            not self._under_way or self._bytes + self._sizes[0][0] + 4 <= WINDOW
        ):
            size, content = self._sizes.popleft()
            self._written += 1
            self._handed(self._written, self._engine.now)
            self._under_way.append(size + 4)
            self._bytes += size + 4
            self._at = self.src.proxy.act(self._at, self.src.handover_ns())
            self._engine.at(self._at, self._write, size, content)

    def _write(self, size: int, content: int) -> None:
        """The size by itself (Nagle's algorithm is off), then the payload."""
        self._fabric.post(self.flow, WorkRequest(LENGTH, 4, self._stream, value=size, counts=not size))
        if size:
            self._fabric.post(self.flow, WorkRequest(STREAM, size, self._stream + 4, target=content))
        self._stream += size + 4

    def ignore(self, flow: Flow) -> None:
        """The way back carries ACKs alone."""

    def _went(self, flow: Flow) -> None:
        self.freed += 1
        self._send()
        self._give()
