"""One HTTP connection, as uvicorn has it, with an end to clients that are slow.

In: a connection. Out: it is closed when no whole request has come in time, and when its answer is taken too
slowly; its door is told while it is answered. How many there may be is the door's.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from dpuflow.agent.answers import problem
from dpuflow.agent.door import discard, in_kernel
from dpuflow.agent.turns import SHARE, SPENT, WAIT_S

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from dpuflow.agent.door import Door

REQUEST_S: Final = 2.5
"""A request's head is a packet or two; checked this often, so a client has 2.5 to 5 s for it."""
LEAST_TAKEN: Final = 16 << 10
"""Bytes of answers that a client takes in each REQUEST_S, or else all that was there at its beginning: 52
kbit/s, less than any link that a scraper sits behind."""
_ACKED: Final = slice(120, 128)
"""Of struct tcp_info (linux/tcp.h): tcpi_bytes_acked, what the client's kernel has taken in all."""
HANDSHAKE_S: Final = 5.0
"""For TLS, before there is a connection here."""


class Connection(H11Protocol):
    """uvicorn's own ends what is idle after a request; this one also what never sends a whole one."""

    _check: asyncio.TimerHandle | None = None
    _seen: object = None
    _taken = _made = 0  # bytes of answers: taken at the last look, and there by then
    _number = -1

    def __init__(self, *args: Any, door: Door, **more: Any) -> None:
        """As uvicorn makes it; it came through ``door``."""
        super().__init__(*args, **more)
        self._door = door
        self._application, self.app = self.app, self._in_turn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._number = transport.get_extra_info("socket").fileno()
        self._check = self.loop.call_later(REQUEST_S, self._look)

    def data_received(self, data: bytes) -> None:
        """Take in a piece, once its CPU may be spent."""
        if self._door.share is not None:
            self._door.share.look()
        super().data_received(data)

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request when it is its address's turn; who waits may have to make room for others."""
        turns, share = self._door.turns, self._door.share
        if share is not None and share.owes():
            await problem(429, SPENT, {"Retry-After": "10"})(scope, receive, send)
            return
        wait_s = turns.wait(self.client[0], self.loop.time()) if turns and self.client else 0.0
        if wait_s != 0:
            self._door.idle(self._number)
            await asyncio.sleep(WAIT_S if wait_s is None else wait_s)
            if self._number == -1:  # it has gone
                return
            self._door.busy(self._number)
        if wait_s is None:
            refused = problem(429, "more requests than one address may make", {"Retry-After": "2"})
            await refused(scope, receive, send)
            return
        scope[SHARE] = share
        await self._application(scope, receive, send)

    def connection_lost(self, exc: Exception | None) -> None:
        """End watching."""
        self._number = -1  # it is another one's soon
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take in what was received; a whole head of a request is answered."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._door.busy(self._number)

    def on_response_complete(self) -> None:
        """Wait for the next request, or answer one that is there."""
        if self.transport.get_write_buffer_size():
            self._door.unread(self._number)
        else:
            self._door.idle(self._number)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not take what is there."""
        super().pause_writing()
        self._door.unread(self._number)

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._door.busy(self._number)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; where the one before is being answered, that one is the last."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _look(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        between = self.cycle is not None and self.timeout_keep_alive_task is not None
        unsent, taken = self.transport.get_write_buffer_size(), self._bytes_taken()
        slow = taken < self._made and taken - self._taken < LEAST_TAKEN
        if slow:
            discard(self.transport.get_extra_info("socket"))
        if (not busy and not between and self.cycle is self._seen) or slow:
            self.transport.abort()
            return
        if not busy and not unsent:
            self._door.idle(self._number)
        self._seen, self._taken = self.cycle, taken
        self._made = taken + unsent + in_kernel(self.transport.get_extra_info("socket"))
        self._check = self.loop.call_later(REQUEST_S, self._look)

    def _bytes_taken(self) -> int:
        """How much the client's kernel has taken since it connected."""
        told = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(told[_ACKED], sys.byteorder)
