"""Paragraphs, columns and colour of reports. Plain ASCII: any terminal shows it."""

from __future__ import annotations

import os
import shutil
import textwrap
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

WIDTH: Final = 100
NARROWEST, WIDEST = 60, 200
_width: ContextVar[int] = ContextVar("width", default=WIDTH)


def width() -> int:
    """How wide lines may be."""
    return _width.get()


@contextmanager
def lines_of(columns: int | None) -> Iterator[None]:
    """Have lines as wide as ``columns``, within reason; None: 100."""
    token = _width.set(WIDTH if columns is None else min(max(columns, NARROWEST), WIDEST))
    try:
        yield
    finally:
        _width.reset(token)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Have paragraphs in one line each: what shows them breaks lines itself."""
    token = _width.set(1 << 30)
    try:
        yield
    finally:
        _width.reset(token)


def columns_of(stream: TextIO) -> int | None:
    """How wide the terminal is; None where ``stream`` is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if stream.isatty() else None


def wrap(text: str, indent: str = "", hanging: str | None = None) -> str:
    """A paragraph in lines of ``width()``; words longer than a line are left whole."""
    return textwrap.fill(
        text,
        width(),
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table; the columns of ``left`` are flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return [line(header), *map(line, rows)]


@dataclass(frozen=True)
class Paint:
    """Colour where ``enabled``, else the text as it is."""

    enabled: bool

    @classmethod
    def suits(cls, stream: TextIO) -> Paint:
        """Colour on a terminal, unless NO_COLOR is set or the terminal is dumb."""
        return cls(stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def __call__(self, text: str, style: str) -> str:
        """``text`` in ``style``: bad, warn, good, bold or dim."""
        codes = {"bad": "1;31", "warn": "1;33", "good": "1;32", "bold": "1", "dim": "2"}
        return f"\033[{codes[style]}m{text}\033[0m" if self.enabled else text
