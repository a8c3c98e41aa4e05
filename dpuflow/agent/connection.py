"""One HTTP connection, as uvicorn has it, with an end to clients that are slow or too many.

In: a connection. Out: it is closed when no whole request has come in time, when its answer is not taken, and
at once where its address has as many as it may, so that nobody without a token can use up the connections
that are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

REQUEST_S: Final = 2.5
"""A request's head is a packet or two; checked this often, so a client has 2.5 to 5 s for it, and as long for
taking any of its answer."""
HANDSHAKE_S: Final = 5.0
"""For TLS, before there is a connection here."""
PER_ADDRESS: Final = 64
"""Connections of one address: of those allowed in all, others have the rest."""


class Connection(H11Protocol):
    """uvicorn's own ends what is idle after a request; this one also what never sends a whole one."""

    _check: asyncio.TimerHandle | None = None
    _seen: object = None
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch, unless its address has enough."""
        super().connection_made(transport)
        host = self.client[0] if self.client else None
        ends = [getattr(each, "client", None) for each in self.connections]
        same = sum(1 for end in ends if end and end[0] == host)
        if same > PER_ADDRESS:
            transport.abort()
            return
        self._check = self.loop.call_later(REQUEST_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """End watching."""
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; where the one before is being answered, that one is the last."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _look(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        between = self.cycle is not None and self.timeout_keep_alive_task is not None
        unsent = self.transport.get_write_buffer_size()
        if (not busy and not between and self.cycle is self._seen) or unsent == self._unsent > 0:
            self.transport.abort()
            return
        self._seen, self._unsent = self.cycle, unsent
        self._check = self.loop.call_later(REQUEST_S, self._look)
