"""The agent's outlets (metrics, HTTP API, probes, webhooks) in a process without any capability.

In: the board's events, the configuration. Out: a process that has a board like this one's. What goes to it is
pickled; what it answers is JSON, which can do nothing here, whoever has taken it over. If it ends, another
one is begun; where none can be begun at all, outlets are served from this process, and the log says so.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from dpuflow.agent import usage
from dpuflow.errors import DpuflowError, MissingError, OptionError

if TYPE_CHECKING:
    from dpuflow.agent.board import Board, Event
    from dpuflow.agent.config import Config
    from dpuflow.agent.log import Log

START_S: Final = 120.0  # a machine that has just booted is slow
AGAIN_S: Final = 5.0
ENDS_S: Final = 10.0
_ERRORS: Final = {kind.__name__: kind for kind in (OptionError, MissingError, DpuflowError)}
_CODE: Final = "import sys; sys.path[:] = {path!r}; from dpuflow.agent.inside import main; main({fd})"
_SIZE: Final = struct.Struct(">I")


def send(channel: socket.socket, data: bytes) -> None:
    """One message. Raises OSError."""
    channel.sendall(_SIZE.pack(len(data)) + data)


def receive(channel: socket.socket) -> bytes | None:
    """The next message; None at the end. Raises OSError."""
    size = _exactly(channel, _SIZE.size)
    return None if size is None else _exactly(channel, _SIZE.unpack(size)[0])


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def wanted(config: Config) -> bool:
    """Whether there is anything to serve or send."""
    return config.api.listen != "off" or config.api.health != "off" or bool(config.webhooks)


class Outside:
    """The process, and the thread that tells it what happens."""

    def __init__(self, board: Board, config: Config, log: Log) -> None:
        """Begin. Raises OptionError, MissingError, DpuflowError, OSError."""
        self._board, self._config, self._log = board, config, log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._past_s = self._last_s = 0.0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.places: dict[str, tuple[str, int]] = {}
        """Where API and probes listen: "api", "health"."""
        if wanted(config):
            self._begin()
        self._subscription = board.subscribe()
        self._thread = threading.Thread(target=self._relay, name="outlets", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process's number, None while there is none."""
        return None if self._process is None else self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds that it has used, and those before it."""
        process = self._process
        if process is not None:
            with suppress(OSError):  # it is gone
                # clock_getcpuclockid(3): a process's clock by its number
                self._last_s = time.clock_gettime((~process.pid << 3) | 2)
        return self._past_s + self._last_s

    def reload(self, config: Config) -> None:
        """Go on by another configuration. Raises DpuflowError; then the one before goes on."""
        with self._lock:
            before, self._config = self._config, config
            try:
                if self._channel is None:
                    if wanted(config):
                        self._begin()
                else:
                    self._ask(("reload", config))
            except (DpuflowError, OSError) as error:
                self._config = before
                if isinstance(error, DpuflowError):
                    raise
                raise DpuflowError(f"the process of the API did not answer: {error.strerror}") from None

    def close(self) -> None:
        """End it, once it has told what it was given."""
        self._closing.set()
        self._subscription.close()
        self._thread.join(ENDS_S)
        with self._lock:
            self._end()

    def _begin(self) -> None:
        """Start the process and wait until it serves."""
        mine, its = socket.socketpair()
        code = _CODE.format(path=sys.path, fd=its.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
            )
        except OSError:
            mine.close()
            raise
        finally:
            its.close()
        self._channel = mine
        usage.beside.add(self._process.pid)
        mine.settimeout(START_S)
        try:
            self._ask(("start", (self._config, os.getpid())))
        except BaseException:
            self._end()
            raise

    def _ask(self, what: tuple[str, Any]) -> None:
        """Have something done. Raises what went wrong there, OSError where no answer comes."""
        assert self._channel is not None
        send(self._channel, pickle.dumps(what))
        answer = receive(self._channel)
        if answer is None:
            raise OSError(0, "it has ended")
        told = json.loads(answer)
        if told["error"] is not None:
            raise _ERRORS.get(told["kind"], DpuflowError)(str(told["error"]))
        self.places = {str(name): (str(host), int(port)) for name, (host, port) in told["places"].items()}

    def _end(self) -> None:
        """Close the channel, which ends the process."""
        process, self._process = self._process, None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if process is None:
            return
        self._past_s, self._last_s = self._past_s + self._last_s, 0.0
        usage.beside.discard(process.pid)
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _relay(self) -> None:
        """Tell it of each event; begin it anew should it have ended."""
        again_s = 0.0
        for event in self._subscription:
            with self._lock:
                if self._channel is None and wanted(self._config) and time.monotonic() >= again_s:
                    again_s = time.monotonic() + AGAIN_S
                    with suppress(DpuflowError, OSError):
                        self._begin()
                        self._log.info("api_restarted", "the process of API and metrics was restarted")
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if self._channel is None:
            return
        try:
            send(self._channel, pickle.dumps(("event", event)))
        except OSError:
            if not self._closing.is_set():
                self._board.count_error("api")
                self._log.error("api_ended", "the process of API and metrics has ended; starting another")
            self._end()
