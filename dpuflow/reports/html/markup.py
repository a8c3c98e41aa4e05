"""HTML and SVG that cannot be broken out of: every text and attribute is escaped where it is put in.

In: names of elements, attributes, texts. Out: ``Markup``. What is no ``Markup`` is escaped and cleaned.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, Final

from dpuflow.reports.tidy import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VOID = {"meta", "link", "br", "hr", "rect", "line", "circle", "path", "use", "col"}
"""Elements without content. Those of SVG need the slash, and HTML's may have it."""
_NUMBER: Final = re.compile(r"[\d,]+|[<>]?[\d.,]+ (%|B|[KMG]iB)|-")
"""Numbers that are plain text; the result's own are ``<data>`` (``figures.told``)."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def put(value: object) -> str:
    """``value`` as it may stand between tags."""
    return value if isinstance(value, Markup) else escape(clean(str(value)), quote=False)


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. ``class_`` is class, ``data_at`` is data-at; None and False leave an attribute out."""
    said = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        said.append(f" {key}" if value is True else f' {key}="{escape(clean(str(value), 1 << 30))}"')
    if name in VOID:
        return Markup(f"<{name}{''.join(said)}/>")
    return Markup(f"<{name}{''.join(said)}>{''.join(map(put, children))}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after the other."""
    return Markup(escape(between).join(map(put, parts)))


def figure(title: str, said: str, *children: object, key: str | None = None) -> Markup:
    """A part of the page with its heading and a sentence that says how to read it."""
    head = [
        tag("h2", title),
        tag("p", said, class_="said") if said else Markup(""),
    ]
    return tag("section", *head, *children, id=key, aria_label=title)


def grid(headings: Iterable[object], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """A table that scrolls by itself where it is too wide; columns of nothing but numbers are flush right."""
    heads, lines = list(headings), [list(row) for row in rows]
    kinds = [
        "n" if all(_is_number(row[i]) for row in lines) else "t" if i == len(heads) - 1 else None
        for i in range(len(heads))
    ]
    head = [tag("th", text, scope="col", class_=kind) for text, kind in zip(heads, kinds, strict=True)]
    body = [
        tag("tr", tag("th", row[0], scope="row"),
            *[tag("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)])
        for row in lines
    ]  # fmt: skip
    table = tag("table", tag("caption", caption, class_="quiet"), tag("thead", tag("tr", *head)),
                tag("tbody", *body))  # fmt: skip
    return tag("div", table, class_="wide", tabindex="0", role="region", aria_label=caption)


def _is_number(cell: object) -> bool:
    return "<data" in str(cell) or "-</span>" in str(cell) or bool(_NUMBER.fullmatch(str(cell)))
