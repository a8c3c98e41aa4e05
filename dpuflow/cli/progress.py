"""A line on standard error that says how far long work has come; silent where that is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_FIRST_AFTER_S = 0.5  # quick work shows nothing
_EVERY_S = 0.1


class ProgressLine:
    """Call with (stage, done, total); total 0 is "not known". The line is wiped at the end.

    What long stages are is shown by a thread: they say only that they begin.
    """

    def __init__(
        self, enabled: bool = True, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next_s = clock() + _FIRST_AFTER_S
        self._shown = 0
        self._enabled = enabled and self._stream.isatty()
        self._lock = threading.Lock()
        self._waiting: tuple[str, int, int] | None = None
        self._ended = threading.Event()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far ``stage`` is, at most ten times a second."""
        if not self._enabled:
            return
        with self._lock:
            if self._clock() < self._next_s:
                self._waiting = (stage, done, total)
                return
            self._show(stage, done, total)

    def _look(self) -> None:
        """Show what was told too early to be shown."""
        while not self._ended.wait(_FIRST_AFTER_S):
            with self._lock:
                if self._waiting is not None and not self._ended.is_set():
                    self._show(*self._waiting)

    def _show(self, stage: str, done: int, total: int) -> None:
        self._waiting = None
        self._next_s = self._clock() + _EVERY_S
        if total > 0:
            share = min(done / total, 1.0)
            filled = int(share * 30)
            text = f"{stage} [{'#' * filled}{'.' * (30 - filled)}] {share:4.0%}"
        else:
            text = f"{stage} {done:,}"
        self._stream.write(f"\r{text:<{self._shown}}")
        self._stream.flush()
        self._shown = len(text)

    def __enter__(self) -> ProgressLine:
        if self._enabled:
            threading.Thread(target=self._look, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            if self._shown:
                self._stream.write(f"\r{'':<{self._shown}}\r")
                self._stream.flush()
