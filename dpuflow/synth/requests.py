"""North-south traffic: clients ask for completions over TCP, and a front end streams the tokens back.

A session is one connection, as HTTP/2 keeps it: a prompt in one burst, then as many small messages as there
are tokens, one at a time, then a pause. What travels is arbitrary bytes, as TLS would have it. Connections
are older than captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.schema.simulated import STREAM
from dpuflow.synth.flows import WorkRequest

if TYPE_CHECKING:
    from random import Random

    from dpuflow.synth.engine import Engine
    from dpuflow.synth.fabric import Fabric
    from dpuflow.synth.flows import Flow, Port
    from dpuflow.synth.scenario import Clients

SERVICE: Final = 8000
"""The front end's TCP port."""
WINDOW: Final = 1 << 22
"""Bytes that either side takes at once: its application reads as they come (assumed)."""


@dataclass
class Request:
    """One request and its answer. Times are ns, None before they are known."""

    client: int
    session: int
    prompt: int
    sent_ns: float
    arrived_ns: float | None = None
    first_ns: float | None = None  # first token sent
    last_ns: float | None = None  # last token there
    tokens: int = 0


class Session:
    """One connection."""

    def __init__(
        self,
        place: tuple[int, int],
        ends: tuple[Port, Port],
        settings: Clients,
        engine: Engine,
        fabric: Fabric,
        random: Random,
    ) -> None:
        self._client, self._number = place
        self._settings, self._engine, self._fabric, self._random = settings, engine, fabric, random
        client, server = ends
        self.up = fabric.stream(client, server, self._asked, self._ignore)
        self.down = fabric.stream(server, client, self._got, self._ignore)
        self.up.window = self.down.window = lambda: WINDOW
        self.requests: list[Request] = []
        self._sent = {self.up.number: 0, self.down.number: 0}  # bytes
        self._left = 0  # tokens that have not arrived

    def start(self) -> None:
        """Wait for a while, then ask; all at once where clients come together."""
        settings = self._settings
        think = settings.think_us * 1e3
        wait = think if settings.together else self._random.expovariate(1.0) * think
        self._engine.at(self._engine.now + wait, self._ask)

    def _ask(self) -> None:
        settings = self._settings
        size = max(1, round(settings.prompt_bytes * self._random.uniform(0.5, 1.5)))
        self.requests.append(Request(self._client, self._number, size, self._engine.now))
        self._send(self.up, size)

    def _asked(self, flow: Flow) -> None:
        """The prompt is there: the first token comes after a prefill."""
        request = self.requests[-1]
        request.arrived_ns = self._engine.now
        most = self._settings.tokens
        request.tokens = self._left = self._random.randint(max(1, most // 2), most)
        self._engine.at(self._engine.now + self._settings.first_token_us * 1e3, self._token, request.tokens)

    def _token(self, left: int) -> None:
        request = self.requests[-1]
        if request.first_ns is None:
            request.first_ns = self._engine.now
        self._send(self.down, self._settings.token_bytes)
        if left > 1:
            wait = self._settings.token_us * 1e3 * self._random.uniform(0.9, 1.1)
            self._engine.at(self._engine.now + wait, self._token, left - 1)

    def _got(self, flow: Flow) -> None:
        self._left -= 1
        if self._left:
            return
        self.requests[-1].last_ns = self._engine.now
        if len(self.requests) < self._settings.requests:
            self.start()

    def _send(self, flow: Flow, size: int) -> None:
        self._fabric.post(flow, WorkRequest(STREAM, size, self._sent[flow.number]))
        self._sent[flow.number] += size

    def _ignore(self, flow: Flow) -> None:
        """Nobody waits for acknowledgments."""
