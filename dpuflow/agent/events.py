"""The event stream: what the board tells, as server-sent events (WHATWG HTML, section 9.2).

In: a board's events. Out: any number of HTTP clients, each at its own pace. Events are encoded once, numbered
and kept in one bounded buffer, from which every client reads at its own place: a slow one, or one that
comes back with Last-Event-ID, goes on where it was, and is told how many events it missed where the buffer
has moved on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.agent.models import notice, to_json, window_row
from dpuflow.quantities import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from dpuflow.agent.board import Board, Event

HEARTBEAT_S: Final = 15.0  # proxies close what is silent for 30 to 60 s
STUCK_S: Final = 60.0  # a client that takes nothing for so long is let go
_BATCH: Final = 64  # events handed to the socket at a time
_RETRY_MS: Final = 3000

EVENT_KINDS: Final = ("window", "finding_opened", "finding_changed", "finding_closed", "health")


class _Kept(NamedTuple):
    number: int
    kind: str
    text: bytes


class Stream:
    """The buffer, the thread that fills it, and the clients that wait for more.

    ``run`` names this run of the agent: ids of another one mean nothing here.
    """

    def __init__(self, board: Board, run: str, sender: str, size: int, health: Callable[[], object]) -> None:
        self.missed = 0
        self.heard = time.monotonic()  # when the agent last reported its health
        self._board = board
        self._run = run
        self._sender = sender
        self._health = health
        self._kept: deque[_Kept] = deque(maxlen=size)
        self._last = 0  # number of the newest event
        self._lost = 0  # by the subscription itself
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._closed = False
        self._subscription = board.subscribe()
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """How many are listening."""
        return len(self._waiting)

    @property
    def lost(self) -> int:
        """Events that this thread itself was too slow for."""
        return self._subscription.missed

    def close(self) -> None:
        """End the stream of every client."""
        self._subscription.close()
        self._thread.join(5)
        self._closed = True
        self._wake()

    def _follow(self) -> None:
        for event in self._subscription:
            try:
                self._keep(event)
            except Exception:  # one bad event must not end the stream
                self._board.count_error("events")

    def _keep(self, event: Event) -> None:
        if event.window is not None:
            body = to_json(window_row(event.window))
        elif event.finding is not None:
            body = to_json(notice(event.kind, event.time_ns, event.finding, self._sender))  # type: ignore[arg-type]
        else:
            self.heard = time.monotonic()
            body = to_json(self._health())
        with self._lock:
            # What the queue in front of this buffer lost takes numbers, too, so that clients are told of it.
            lost = self._subscription.missed
            self._last += 1 + lost - self._lost
            self._lost = lost
            head = f"id: {self._run}-{self._last}\nevent: {event.kind}\ndata: "
            self._kept.append(_Kept(self._last, event.kind, head.encode() + body + b"\n\n"))
        self._wake()

    def _wake(self) -> None:
        for event, loop in list(self._waiting.items()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(event.set)

    def place(self, last_id: str | None) -> tuple[int, int | None]:
        """Where a client goes on: (number of the last event it has, how many it missed; None: unknown).

        Without an id it gets what comes from now on.
        """
        with self._lock:
            if last_id is None:
                return self._last, 0
            run, _, number = last_id.rpartition("-")
            has = whole_number(number)
            if run != self._run or has is None or has > self._last:
                oldest = self._kept[0].number - 1 if self._kept else self._last
                return oldest, None
            return has, 0

    def after(self, number: int, kinds: frozenset[str]) -> tuple[list[bytes], int, int]:
        """Events after ``number``: (texts of those of ``kinds``, number of the last, how many are gone)."""
        with self._lock:
            gone = 0
            texts = []
            for kept in self._from(number):
                gone += kept.number - number - 1
                number = kept.number
                if kept.kind in kinds:
                    texts.append(kept.text)
                if len(texts) == _BATCH:
                    break
            self.missed += gone
            return texts, number, gone

    def _from(self, number: int) -> list[_Kept]:
        newer = []
        for kept in reversed(self._kept):
            if kept.number <= number:
                break
            newer.append(kept)
        return newer[::-1]

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, last_id: str | None, kinds: frozenset[str]
    ) -> None:
        """One client, until it goes or the stream is closed."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # nginx would hold events back
        ]
        at, unknown = self.place(last_id)
        ready = asyncio.Event()
        self._waiting[ready] = asyncio.get_running_loop()
        gone = asyncio.ensure_future(_until_gone(receive, ready))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            first = f"retry: {_RETRY_MS}\n\n".encode()
            if unknown is None:
                first += _missed(None)
            await _give(send, first)
            while not (self._closed or gone.done()):
                ready.clear()
                texts, at, missing = self.after(at, kinds)
                if missing:
                    texts.insert(0, _missed(missing))
                if texts:
                    await _give(send, b"".join(texts))
                    continue
                try:
                    await asyncio.wait_for(ready.wait(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    await _give(send, b": heartbeat\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (asyncio.TimeoutError, OSError):
            pass  # it takes nothing, or is gone: closing the connection is all there is to do
        finally:
            del self._waiting[ready]
            gone.cancel()


def _missed(count: int | None) -> bytes:
    """Tells a client that it missed events; ``count`` is None where an id of another run says nothing."""
    return b"event: missed\ndata: " + to_json({"missed": count}) + b"\n\n"


async def _give(send: Send, body: bytes) -> None:
    await asyncio.wait_for(send({"type": "http.response.body", "body": body, "more_body": True}), STUCK_S)


async def _until_gone(receive: Receive, ready: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ready.set()
