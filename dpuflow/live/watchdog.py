"""A child process that removes clsact filters when its parent dies; links need none, as they die with it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.live.attach import Filter


def watch(filters: list[Filter]) -> Callable[[], None]:
    """Start the child for ``filters``; what tells it that they have been removed, and waits for its end."""
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        _wait_and_remove(filters, ours)
    os.close(ours)

    def dismiss() -> None:
        os.write(its, b"x")
        os.close(its)
        os.waitpid(child, 0)

    return dismiss


def _wait_and_remove(filters: list[Filter], pipe: int) -> None:
    """The child: hold nothing of the parent's but the pipe, whose end tells that the parent is gone."""
    try:
        os.setsid()  # Ctrl-C is for the parent
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 1024)
        if os.read(0, 1) == b"":
            for each in filters:
                each.remove()
    finally:
        os._exit(0)
