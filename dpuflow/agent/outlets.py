"""What the agent tells the world, started and ended together: metrics, HTTP server, webhooks.

In: a board and a configuration. Out: ``Outlets``; each part runs in threads of its own, and the failure of
one is counted in the health and ends nothing else.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpuflow.agent.access import check_files
from dpuflow.errors import MissingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.agent.board import Board
    from dpuflow.agent.config import Config
    from dpuflow.agent.metrics import Metrics
    from dpuflow.agent.server import Probes, Server


def start(board: Board, config: Config, agent: int | None = None) -> Outlets:
    """Start all that ``config`` asks for; ``agent``: the process that metrics tell of, if not this one.

    Raises OptionError where an address, a certificate or a secret cannot be used, and MissingError without
    the packages of the extra ``agent``.
    """
    with _packages():
        return Outlets(board, config, agent)


@contextmanager
def _packages() -> Iterator[None]:
    """A package that is missing is one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingError(
            f"the agent needs {error.name}: run pip install '.[agent]' in the dpuflow checkout"
        ) from None


class Outlets:
    """The running parts."""

    def __init__(self, board: Board, config: Config, agent: int | None = None) -> None:
        from dpuflow.agent import routes, webhook

        self._board = board
        self._sender = config.node or socket.gethostname()
        self._run = secrets.token_hex(4)  # tells cursors of this run from those of another
        self._config, self._agent = config, agent
        self.webhooks = webhook.start(board, config.webhooks, self._sender)
        self._context = routes.Context(board, self._run, self._sender, config, webhooks=self.webhooks.figures)
        self.metrics: Metrics | None = None
        self.server: Server | None = None
        self.probes: Probes | None = None
        try:
            self._serve(config)
        except BaseException:
            self.close()
            raise

    def reload(self, config: Config) -> None:
        """Take another configuration, and read the files that it names again.

        A changed ``api`` or ``metrics`` section starts both anew: counters begin at 0, streams break off.
        Raises OptionError where the new one cannot be used, MissingError without the packages that it needs;
        then the old one goes on.
        """
        check_files(config)
        with _packages():
            if config.webhooks:
                import urllib3  # noqa: F401  before anything has changed
            self._go_on(self._config, config)
        self._config = self._context.config = config

    def _go_on(self, before: Config, config: Config) -> None:
        if (before.api, before.metrics) != (config.api, config.metrics):
            self._stop_serving()
            try:
                self._serve(config)
            except BaseException:
                self._serve(before)
                raise
        elif self.server is not None:
            self.server.reload(config.api)
        self.webhooks.reload(config.webhooks)

    def close(self) -> None:
        """Stop all of it."""
        self._stop_serving()
        self.webhooks.close()

    def _serve(self, config: Config) -> None:
        from dpuflow.agent import metrics, routes

        context = self._context
        self.metrics = metrics.start(self._board, config.metrics, self._agent)
        self.metrics.add(self.webhooks)
        if config.api.health != "off":
            from dpuflow.agent.server import Probes

            self.probes = Probes(context, config.api.health)
        if config.api.listen == "off":
            return
        from dpuflow.agent import events, server

        context.stream = events.Stream(
            self._board,
            self._run,
            self._sender,
            config.api.events,
            lambda: routes.health(context, routes.Nothing()),
        )
        self.server = server.Server(context, self.metrics.registry, config.api)

    def _stop_serving(self) -> None:
        if self._context.stream is not None:
            self._context.stream.close()
        for serving in (self.server, self.probes):
            if serving is not None:
                serving.close()
        if self.metrics is not None:
            self.metrics.close()
        self.server = self.probes = self.metrics = self._context.stream = None
