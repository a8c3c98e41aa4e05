"""A listening socket that has room for whoever comes, whatever crowd stands before it.

In: connections. Out: no more of them at a time than may be, of one address and of all. To make room the one
that has been idle for the longest is closed, else the one that has kept an answer waiting to be taken for the
longest, so that clients who ask nothing, or read nothing, keep nobody out; only where all are being answered
is the new one refused. Handshakes of TLS count from their first packet on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import socket
import struct
import sys
import termios
import time
from typing import Any, Final

from dpuflow.agent.turns import Share, Turns
from dpuflow.errors import OptionError

BACKLOG: Final = 128
"""Connections that the kernel holds for us."""
AT_ONCE: Final = 16
"""So many are accepted in one go, before those that are there are heard."""
PER_ADDRESS: Final = 64
"""Connections of one address; others have the rest."""
COLLECTED: Final = 64
"""So many connections may be garbage: a handshake that failed leaves a cycle with 0.3 MB of buffers behind
(asyncio's SSLProtocol and its exception), and there are too few objects in it for Python to look soon."""

MUCH: Final = 64 << 10
"""Bytes of answers that the kernel may still deliver when a connection was ended to make room."""

_Held = dict[int, tuple[socket.socket, str]]
"""Connections by descriptor, and their other end."""


class Door(socket.socket):
    """Listens on ``address``; ``most`` connections at a time, which have ``turns`` and a ``share``."""

    def __init__(
        self, address: tuple[str, int], most: int, turns: Turns | None = None, share: Share | None = None
    ) -> None:
        """Bind and listen. Raises OSError. Without ``turns`` and ``share`` nobody has to wait."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        # With the protocol named, asyncio turns Nagle's algorithm off: 40 ms less a second answer.
        super().__init__(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
        self.most, self.turns, self.share, self._since = most, turns, share, 0
        self._callers = None if turns is None else Turns(turns.rate, turns.burst)
        self._idle: _Held = {}  # the longest idle first
        self._unread: _Held = {}  # an answer is there, and its client takes it by and by
        self._busy: _Held = {}
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            self.listen(BACKLOG)
        except OSError:
            self.close()
            raise

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """As many as ``BACKLOG`` may wait, however few are accepted in one go."""
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError where it is not let in."""
        if self.share is not None:
            self.share.look()
        made, address = super().accept()
        callers = self._callers
        if callers is not None and callers.wait(str(address[0]), time.monotonic(), 0.0) is None:
            discard(made)
            made.close()
            raise ConnectionAbortedError("more connections than one address may make")
        self._since += 1
        if self._since >= COLLECTED:
            self._since = 0
            gc.collect()
        host = str(address[0])
        of_host = held = 0
        for part in (self._idle, self._unread, self._busy):
            for number in [number for number, (each, _) in part.items() if each.fileno() == -1]:
                del part[number]
            held += len(part)
            of_host += sum(end == host for _, end in part.values())
        if not (self._end(host) if of_host >= PER_ADDRESS else held < self.most or self._end()):
            made.close()
            raise ConnectionAbortedError("as many connections are being answered as may be")
        self._idle[made.fileno()] = made, host
        return made, address

    def unbound(self) -> None:
        """From now on nobody has to wait."""
        self.turns = self.share = self._callers = None

    def busy(self, number: int) -> None:
        """The connection with this descriptor is being answered."""
        self._move(number, self._busy)

    def unread(self, number: int) -> None:
        """Its answer waits for the client to take it."""
        self._move(number, self._unread)

    def idle(self, number: int) -> None:
        """It has been answered."""
        self._move(number, self._idle)

    def _move(self, number: int, to: _Held) -> None:
        for held in (self._idle, self._unread, self._busy):
            if number in held and held is not to:
                to[number] = held.pop(number)
                return

    def _end(self, host: str | None = None) -> bool:
        """End the first one that may be, of ``host``: its owner sees the end of its data and closes it."""
        for held in (self._idle, self._unread):
            for number, (each, end) in held.items():
                if host in (None, end):
                    del held[number]
                    if held is self._unread or in_kernel(each) > MUCH:
                        discard(each)
                    with contextlib.suppress(OSError):  # it is gone already
                        each.shutdown(socket.SHUT_RDWR)
                    return True
        return False


def in_kernel(connection: socket.socket) -> int:
    """How many bytes the kernel here holds for the other end (tcp(7), SIOCOUTQ)."""
    try:
        told = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it is gone already
        return 0
    return int.from_bytes(told, sys.byteorder)


def discard(connection: socket.socket) -> None:
    """Have the kernel drop what it holds for the other end once this one is closed, instead of waiting."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def listening(address: str, option: str, most: int, turns: Turns, share: Share) -> Door:
    """A door at ADDRESS:PORT for ``most`` connections. Raises OptionError, which names the option."""
    try:
        return Door(_place(address), most, turns, share)
    except OSError as error:
        raise OptionError(f"{option}: {address}: {error.strerror}") from None


def check_addresses(addresses: dict[str, str], held: bool) -> None:
    """Try to listen at each ADDRESS:PORT, by option. ``held``: an agent that runs may have them already.

    Raises OptionError.
    """
    with contextlib.ExitStack() as tried:
        for option, address in addresses.items():
            try:
                tried.enter_context(Door(_place(address), 1))
            except OSError as error:
                if held and error.errno == errno.EADDRINUSE:
                    continue
                raise OptionError(f"{option}: {address}: {error.strerror}") from None


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
