"""The process of the outlets: a board of its own, which follows the agent's, and whatever serves from it.

In: messages on a socket (``outside``). Out: JSON answers. It gives up all capabilities first, and ends with
the socket; signals that are meant for the agent do not end it before it has told what it was given.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from dpuflow.agent.board import Board
from dpuflow.agent.capabilities import renounce
from dpuflow.agent.log import FromLogging, Log
from dpuflow.agent.outside import receive, send
from dpuflow.agent.usage import TRIM_S, give_back, restrain_allocator
from dpuflow.errors import DpuflowError

if TYPE_CHECKING:
    from dpuflow.agent.config import Config
    from dpuflow.agent.outlets import Outlets


def main(fd: int) -> None:
    """Serve until the socket ``fd`` ends."""
    renounce()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    restrain_allocator()
    channel, board = socket.socket(fileno=fd), Board()
    parts: Outlets | None = None
    trimmed_s = time.monotonic()
    try:
        while (data := receive(channel)) is not None:
            kind, what = pickle.loads(data)
            if kind == "event":
                board.take(what)
                if time.monotonic() - trimmed_s >= TRIM_S:
                    trimmed_s = time.monotonic()
                    give_back()
                continue
            try:
                if parts is None:
                    parts = _started(board, *what)
                else:
                    parts.reload(what)
                answer: dict[str, Any] = {"error": None, "places": _places(parts)}
            except DpuflowError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            send(channel, json.dumps(answer).encode())
    except OSError:
        pass  # the agent is gone
    finally:
        if parts is not None:
            parts.close()
        board.close()
    os._exit(0)


def _started(board: Board, config: Config, agent: int) -> Outlets:
    from dpuflow.agent import outlets

    log = Log(config.log.level, config.log.format, journal="JOURNAL_STREAM" in os.environ)
    logging.basicConfig(level=logging.WARNING, handlers=[FromLogging(log)])
    return outlets.start(board, config, agent)


def _places(parts: Outlets) -> dict[str, tuple[str, int]]:
    named = {"api": parts.server, "health": parts.probes}
    return {name: each.address for name, each in named.items() if each is not None}
