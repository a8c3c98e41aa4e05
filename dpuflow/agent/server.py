"""The agent's HTTP server: one address for metrics and API, TLS and token where configured.

In: a context, a registry, the ``api`` section. Out: a running server in a thread of its own, whose failure
is counted and ends nothing else. ``reload`` reads certificate, key and token again; connections go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dpuflow.agent import metricnames as names
from dpuflow.agent.access import Guard, make_tls, read_token
from dpuflow.agent.api import ROUTE, make_app, make_probes
from dpuflow.agent.capabilities import drop_all
from dpuflow.agent.connection import HANDSHAKE_S, Connection
from dpuflow.agent.door import AT_ONCE, BACKLOG, Door, listening
from dpuflow.agent.turns import Share, Turns

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dpuflow.agent.config import Api
    from dpuflow.agent.routes import Context

_log = logging.getLogger(__name__)

_THREADS: Final = 4  # handlers and scrapes at a time; each is short
_CONNECTIONS: Final = 256
_PROBES: Final = 128
API_TURNS: Final = (20.0, 100.0)
"""Requests a second of one address, and how many at once: pages that ask for all there is, every second."""
PROBE_TURNS: Final = (5.0, 20.0)
"""A kubelet asks three things, once a second at most."""
API_SHARE: Final = 0.15
"""Of limits.cpu, what listening at api.listen may take: a scrape takes 9 ms of CPU."""
API_SHARE_SHORT: Final = 0.05
"""The same while the capture leaves out pairs of hosts: a crowd cost 40 % of the packets that were kept."""
PROBE_SHARE: Final = 0.10
"""So that a probe beside a flood has its answer within a second where limits.cpu is 10 %."""
_GRACE_S: Final = 2
_KEEP_S: Final = 75  # scrapers that come every minute need not shake hands anew


class Server:
    """A running server; ``address`` is where (the port that was found, if 0 was asked for)."""

    def __init__(self, context: Context, registry: CollectorRegistry, settings: Api) -> None:
        """Listen and serve. Raises OptionError where address, certificate or token cannot be used."""
        self._context = context
        self._settings = settings
        self._counts: dict[tuple[str, str], int] = {}
        self._guard = Guard(make_app(context, registry), self._token(settings), settings.insecure)
        self._tls = self._context_of(settings)
        registry.register(self)
        share = Share(lambda: share_of(context) * context.config.limits.cpu)
        self.door = listening(settings.listen, "api.listen", _CONNECTIONS, Turns(*API_TURNS), share)
        self.address: tuple[str, int] = self.door.getsockname()[:2]
        self._running = Running(
            self._counted(self._guard), self.door, self._tls, lambda: context.board.count_error("api")
        )

    def reload(self, settings: Api) -> None:
        """Take token, certificate and key of ``settings``. Raises OptionError, and then changes nothing."""
        token = self._token(settings)
        if self._tls is not None and settings.tls_cert and settings.tls_key:
            make_tls(settings.tls_cert, settings.tls_key)  # whole, before the one in use is touched
            self._tls.load_cert_chain(settings.tls_cert, settings.tls_key)
        self._guard.token = token
        self._settings = settings

    def close(self) -> None:
        """Stop; requests under way may take a moment to finish."""
        self._running.close()

    def describe(self) -> Iterator[Family]:
        """Nothing, as with all collectors here."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Requests and listeners, for the registry."""
        requests = CounterMetricFamily(
            names.REQUESTS.name, names.REQUESTS.about, labels=names.REQUESTS.labels
        )
        for key, count in sorted(self._counts.items()):
            requests.add_metric(key, count)
        yield requests
        stream = self._context.stream
        if stream is not None:
            yield GaugeMetricFamily(names.CLIENTS.name, names.CLIENTS.about, stream.clients)
            yield CounterMetricFamily(names.EVENTS_MISSED.name, names.EVENTS_MISSED.about, stream.missed)

    @staticmethod
    def _token(settings: Api) -> bytes | None:
        return None if settings.token_file is None else read_token(settings.token_file, "api.token_file")

    @staticmethod
    def _context_of(settings: Api) -> ssl.SSLContext | None:
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return make_tls(settings.tls_cert, settings.tls_key)

    def _counted(self, app: ASGIApp) -> ASGIApp:
        """``app``, its answers counted by route and status; all that matches no route is one."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = scope.get(ROUTE, "other")
                    key = (route, str(message["status"]))
                    self._counts[key] = self._counts.get(key, 0) + 1
                    if message["status"] >= 500 and route not in ("/healthz", "/readyz"):
                        self._context.board.count_error("api")
                await send(message)

            await app(scope, receive, noting)

        return counted


def share_of(context: Context) -> float:
    """Of limits.cpu, what listening at api.listen may take now."""
    health = context.board.health()
    short = health.degraded is not None and health.fidelity == "sampled"
    return API_SHARE_SHORT if short else API_SHARE


class Running:
    """An application that is served in a thread of its own, which may do nothing beyond an ordinary user."""

    def __init__(
        self,
        app: ASGIApp,
        listener: Door,
        tls: ssl.SSLContext | None,
        failed: Callable[[], None],
        name: str = "http",
        keep_s: int = _KEEP_S,
    ) -> None:
        """Serve what comes to ``listener``; ``failed`` is called should it end of itself."""
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=partial(Connection, door=listener),  # type: ignore[arg-type]  # makes one as the class does
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            # Who was let in is answered; one that asks on at once has two tasks for a moment.
            limit_concurrency=2 * (listener.most + BACKLOG),
            backlog=AT_ONCE,
            timeout_keep_alive=keep_s,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        config.ssl = tls
        self._socket, self._failed = listener, failed
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def close(self) -> None:
        """Stop; requests under way may take a moment to finish."""
        self._server.should_exit = True
        self._thread.join(_GRACE_S + 3)
        self._socket.close()

    def _run(self) -> None:
        drop_all()
        try:
            asyncio.run(self._serve())
        except Exception:
            _log.exception("the HTTP server ended")
            self._failed()

    async def _serve(self) -> None:
        import anyio.to_thread

        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        loop = asyncio.get_running_loop()
        if self._server.config.ssl is not None:  # uvicorn leaves handshakes a minute
            patient = loop.create_server
            loop.create_server = partial(patient, ssl_handshake_timeout=HANDSHAKE_S)  # type: ignore[method-assign]
        await self._server.serve(sockets=[self._socket])


class Probes:
    """Health alone, on a listener of its own: no crowd at the API keeps a probe from its answer."""

    def __init__(self, context: Context, listen: str) -> None:
        """Listen and serve. Raises OptionError."""
        share = Share(lambda: PROBE_SHARE * context.config.limits.cpu)
        self.door = listening(listen, "api.health", _PROBES, Turns(*PROBE_TURNS), share)
        self.address: tuple[str, int] = self.door.getsockname()[:2]
        self._running = Running(
            make_probes(context), self.door, None, lambda: context.board.count_error("api"), "probes", 5,
        )  # fmt: skip

    def close(self) -> None:
        """Stop."""
        self._running.close()
