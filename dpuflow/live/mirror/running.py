"""How long a mirror stands: until a signal, or as long as a command runs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from dpuflow.errors import MissingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end a process wait while the block runs, so that what was set up is undone first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait() -> None:
    """Until SIGINT, SIGTERM or SIGHUP, which must be held."""
    signal.sigwait(_SIGNALS)


def run_command(command: tuple[str, ...]) -> int:
    """Run it; its exit status, or 128 and the signal that ended it. Signals are for it to end on.

    Raises MissingError.
    """
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is not None and number != signal.SIGINT:  # which the terminal gives to both
            child.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        child = subprocess.Popen(command)
        status = child.wait()
    except OSError as error:
        raise MissingError(f"{command[0]}: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
