"""The table as text for docs/runbook.md (``python -m dpuflow.conditions.describe`` writes it there)."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.conditions import TABLE
from dpuflow.conditions.row import DIRECT, FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.conditions.row import Condition

MARK: Final = "<!-- rows: python -m dpuflow.conditions.describe -->"
"""What follows in docs/runbook.md is made from the table."""
WIDTH: Final = 100
"""Columns of a page."""
NEEDED: Final = {
    "operations": "a recognised collective operation or pipeline",
    "pairs": "no pair of hosts left out by an agent short of CPU or memory",
    "requests": "clients' requests captured from beginning to end",
    "front_end": "a capture at a front end",
    "steps": "a job of more than six recognised steps",
    "nodes": "a node known to have several ranks, among other nodes",
    "reads": "bulk RDMA READs",
    "within": "rings through several GPUs each of three nodes or more",
    "transfers": "bulk one-sided transfers",
    "pipelines": "a recognised pipeline",
    "all_to_alls": "all_to_all operations",
    "roce": "RoCE traffic",
    "keys": "memory keys of RDMA WRITEs or READs (the first 16 bytes behind their BTH)",
    "replicas": "two groups that are alike and apart",
    "links": "more than two endpoints, to see a path that is always slow in both directions",
}
"""What ``Condition.needs`` names, in words (``findings.needs`` looks whether it is there)."""


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
    yield from ("| condition | seen | judged |", "| --- | --- | --- |")
    for family in FAMILIES:
        for row in _of(family):
            judged = f"as `{row.told_as}`" if row.told_as else "yes"
            yield f"| [`{row.name}`](#{row.name}) | {row.observability}ly | {judged} |"
    yield ""


def _family(family: str) -> Iterator[str]:
    yield from (f"## {family}", "")
    for row in _of(family):
        yield from (f"### {row.name}", "", row.shows, "", f"- Seen: {_seen(row)}")
        yield from _rule(row)
        yield f"- What to do: {row.advice}"
        yield from (f"- Look at: {command}." for command in row.commands)
        if row.alternatives:
            yield f"- What else it may be: {'; '.join(row.alternatives)}."
        if row.explains:
            others = (f"another {name}" if name == row.name else name for name in row.explains)
            yield f"- May be the cause, at the same endpoints, of: {', '.join(others)}."
        yield ""


def _rule(row: Condition) -> Iterator[str]:
    """What it is told as, needs, rests on and costs."""
    if row.told_as:
        yield f"- Reported as `{row.told_as}`, which lists this among what else it may be."
    if row.needs:
        needs = ", and ".join(NEEDED[each] for each in row.needs)
        yield f"- Needs {needs}; else the result says `not_judged`."
    yield f"- Reported when: {row.threshold}"
    yield f"- Cost: {row.cost}"


def _seen(row: Condition) -> str:
    if row.observability == DIRECT:
        return "directly" + (f"; {row.why}." if row.why else ".")
    return f"indirectly: {row.why}."


def _of(family: str) -> list[Condition]:
    return [row for row in TABLE.values() if row.family == family]


def main() -> None:
    """Write the page anew, what stands before ``MARK`` as it is."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/runbook.md")
    before = page.read_text(encoding="utf-8").split(MARK)[0]
    page.write_text(f"{before}{MARK}\n{runbook()}", encoding="utf-8")


if __name__ == "__main__":
    main()
