"""A result in a notebook: the page's first screen and its figures, each in a frame of its own.

In: an ``Analysis``. Out: HTML that a notebook shows. A frame keeps the page's style from the notebook's,
and the page's policy (nothing is loaded) holds within it.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from dpuflow.reports.columns import entry_columns
from dpuflow.reports.html.heat import heat_map
from dpuflow.reports.html.page import document
from dpuflow.reports.html.page import first_screen as first
from dpuflow.reports.html.timeline import timeline
from dpuflow.reports.html.traffic import circle
from dpuflow.reports.names import Names
from dpuflow.reports.tidy import tidied

if TYPE_CHECKING:
    from dpuflow.results import Analysis


@dataclass(frozen=True)
class Figure:
    """What a notebook shows of ``page``, a document of its own."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" width="100%" height="{self.height}" style="border:0"'
            f' srcdoc="{escape(self.page)}"></iframe>'
        )


def first_screen(result: Analysis) -> str:
    """The first screen of the page as HTML."""
    result = tidied(result)
    return Figure(document(result, first(result, entry_columns(result), Names(result))), 640)._repr_html_()


class Figures:
    """The figures of one result."""

    def __init__(self, result: Analysis) -> None:
        self._result = tidied(result)
        self._names = Names(self._result)

    def timeline(self) -> Figure:
        """Of all ranks' time, which share was waited, for whom, and which moved data."""
        drawn = timeline(self._result, entry_columns(self._result), self._names)
        return Figure(document(self._result, drawn), 260)

    def lateness(self) -> Figure:
        """How late each rank was, rank by step; below it the worst stretch in time."""
        drawn = heat_map(self._result, entry_columns(self._result), self._names)
        return Figure(document(self._result, drawn), 760)

    def ring(self, collective: int | None = None) -> Figure:
        """Who sends to whom: of the ranks of ``collective``, else of all, or of the busiest group."""
        drawn = circle(self._result, self._names, collective)
        return Figure(document(self._result, drawn or "Too few or too many endpoints to draw."), 460)
