"""Numbers, words and columns as people read them, shared by reports. Plain ASCII: any terminal shows it."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

WIDTH = 100
UNKNOWN = "-"

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_BYTE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(value_ns: float | None) -> str:
    """A time span with three significant digits: ``9.82 ms``."""
    if value_ns is None:
        return UNKNOWN
    if value_ns < 0:
        return "-" + duration(-value_ns)
    for scale, unit in _TIME_UNITS:
        if value_ns >= scale * 0.9995:
            return f"{three_digits(value_ns / scale)} {unit}"
    return "0 ns"


def three_digits(value: float) -> str:
    """Three significant digits, as 9.82, 98.2, 982, 1,982; fewer where it is whole."""
    if value == int(value):
        return f"{int(value):,}"
    if value < 9.995:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def size(value: int | None) -> str:
    """Bytes in binary units where they are that large: ``256 KiB``."""
    if value is None:
        return UNKNOWN
    for scale, unit in _BYTE_UNITS:
        if value >= scale:
            return f"{value // scale:,} {unit}" if value % scale == 0 else f"{value / scale:,.1f} {unit}"
    return f"{value} B"


def percent(share: float | None) -> str:
    """A share of one, whole percents; what is not quite nothing or all is not shown as such."""
    if share is None:
        return UNKNOWN
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{share:.0%}".replace("%", " %")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(items: Sequence[str], most: int = 6, word: str = "and") -> str:
    """``a, b and c``; past ``most`` the rest as a number."""
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} {word} {len(items) - most + 1} more"
    return f" {word} ".join(filter(None, [", ".join(items[:-1]), items[-1]])) if items else "none"


def wrap(text: str, indent: str = "", hanging: str | None = None, width: int = WIDTH) -> str:
    """A paragraph within ``width``; words longer than a line (filters) are left whole."""
    return textwrap.fill(
        text,
        width,
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
