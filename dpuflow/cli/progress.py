"""A line on standard error that says how far long work has come; silent where that is no terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_FIRST_AFTER_S = 0.5  # quick work shows nothing
_EVERY_S = 0.1


class ProgressLine:
    """Call with (stage, done, total); total 0 is "not known". The line is wiped at the end."""

    def __init__(
        self, enabled: bool = True, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next_s = clock() + _FIRST_AFTER_S
        self._shown = 0
        self._enabled = enabled and self._stream.isatty()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far ``stage`` is, at most ten times a second."""
        if not self._enabled or self._clock() < self._next_s:
            return
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write(f"\r{'':<{self._shown}}\r")
            self._stream.flush()
