"""Numbers on the page: the reader sees three digits, the page holds the result's own number and its place.

``<data value="10085788" data-at="lateness/2/late_ns">10.1 ms</data>``: a test looks every one up in the JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.quantities import UNKNOWN, duration, percent, size
from dpuflow.reports.html.markup import Markup, tag

if TYPE_CHECKING:
    from collections.abc import Callable


def told(value: float | None, at: str, words: Callable[[float], str] = duration, before: str = "") -> Markup:
    """A number of the result: ``at`` is its place in the JSON, ``words`` what people read."""
    if value is None:
        return tag("span", UNKNOWN, class_="quiet")
    exact = round(value, 6) if isinstance(value, float) else value
    return tag("data", f"{before}{words(value)}", value=exact, data_at=at, title=_exact(exact, at))


def _exact(value: float, at: str) -> str | None:
    return f"{value:,} ns" if at.endswith("_ns") else None


def whole(value: float) -> str:
    """``1,234``."""
    return f"{value:,.0f}"


def share(value: float) -> str:
    """``93 %``."""
    return percent(value)


def in_bytes(value: float) -> str:
    """``256 KiB``."""
    return size(int(value))


def apart(value: float) -> str:
    """``+-514 us``."""
    return f"\u00b1{duration(value)}"


def position(value: float) -> str:
    """A place in per cent of a picture's width, as SVG has it."""
    return f"{max(min(value, 1.0), 0.0) * 100:.3f}".rstrip("0").rstrip(".") + "%"
