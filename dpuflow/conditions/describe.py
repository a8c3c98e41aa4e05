"""The table as text for docs/runbook.md (``python -m dpuflow.conditions.describe`` writes it there)."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.conditions import TABLE
from dpuflow.conditions.row import DIRECT, FAMILIES, NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.conditions.row import Condition

MARK: Final = "<!-- rows: python -m dpuflow.conditions.describe -->"
"""What follows in docs/runbook.md is made from the table."""
WIDTH: Final = 100
"""Columns of a page."""


def runbook() -> str:
    """Markdown: an overview, then a section a condition, family by family."""
    lines = [*_overview(), *(line for family in FAMILIES for line in _family(family))]
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _wrapped(line: str) -> str:
    """A paragraph or an item at the pages' width; tables and headings as they are."""
    if len(line) <= WIDTH or line.startswith(("|", "#")):
        return line
    hanging = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, WIDTH, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _overview() -> Iterator[str]:
    yield from ("| condition | observability | today |", "| --- | --- | --- |")
    for family in FAMILIES:
        for row in _of(family):
            yield f"| [`{row.name}`](#{row.name}) | {row.observability} | {_today(row)} |"
    yield ""


def _family(family: str) -> Iterator[str]:
    yield from (f"## {family}", "")
    for row in _of(family):
        yield from (f"### {row.name}", "", row.shows, "")
        yield f"- Seen: {_seen(row)}"
        if not row.judged:
            yield f"- What to do: {row.advice}"
            yield ""
            continue
        if row.told_as:
            yield f"- Told as `{row.told_as}`, with this among what else it may be; not there without that."
        if row.needs:
            yield f"- Needs: {', '.join(each.replace('_', ' ') for each in row.needs)}; else `not_judged`."
        yield f"- Held to: {row.threshold}"
        yield f"- Cost: {row.cost}"
        yield f"- What to do: {row.advice}"
        if row.alternatives:
            yield f"- What else it may be: {'; '.join(row.alternatives)}."
        if row.explains:
            yield f"- Lists as its own effects: {', '.join(row.explains)}."
        yield ""


def _seen(row: Condition) -> str:
    if row.observability == NONE:
        return f"not at all: {row.why}. The result says `not_judged`."
    if row.observability == DIRECT:
        return "directly" + (f"; {row.why}." if row.why else ".")
    return f"as a shadow: {row.why}."


def _today(row: Condition) -> str:
    if not row.judged:
        return "not judged: cannot be seen"
    return f"told as `{row.told_as}`" if row.told_as else "judged"


def _of(family: str) -> list[Condition]:
    return [row for row in TABLE.values() if row.family == family]


def main() -> None:
    """Write the page anew, what stands before ``MARK`` as it is."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/runbook.md")
    before = page.read_text(encoding="utf-8").split(MARK)[0]
    page.write_text(f"{before}{MARK}\n{runbook()}", encoding="utf-8")


if __name__ == "__main__":
    main()
