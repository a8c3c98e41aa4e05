"""One HTTP connection, as uvicorn has it, with an end to clients that connect and then say nothing.

In: a connection. Out: it is closed when no whole request has come in time, so that nobody without a token can
use up the connections that are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

REQUEST_S: Final = 10.0
"""A request's head is a packet or two; checked this often, so a client has 10 to 20 s for it."""


class Connection(H11Protocol):
    """uvicorn's own ends what is idle after a request; this one also what never sends a whole one."""

    _check: asyncio.TimerHandle | None = None
    _seen: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._check = self.loop.call_later(REQUEST_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """End watching."""
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        between = self.cycle is not None and self.timeout_keep_alive_task is not None
        if not busy and not between and self.cycle is self._seen:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._check = self.loop.call_later(REQUEST_S, self._look)
