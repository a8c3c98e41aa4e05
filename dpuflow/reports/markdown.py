"""The verdict for tickets and pull requests: GitHub's Markdown, at most 60 lines.

In: an ``Analysis``. Out: the headline, what the terminal says below it, the table of endpoints, the worst
findings and how much is not shown. Every name is escaped: nothing of a capture becomes markup.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from dpuflow.quantities import count, percent
from dpuflow.reports.layout import Paint, unwrapped
from dpuflow.reports.names import Names
from dpuflow.reports.output import replacing
from dpuflow.reports.text import HEADINGS, by_severity, cost_words, figures_of, part_head, worst_first
from dpuflow.reports.tidy import clean, tidied
from dpuflow.reports.verdict import verdict_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.results import Analysis, Finding

MOST_LINES: Final = 60
MOST_VERDICT: Final = 16
MOST_ROWS: Final = 10
MOST_FINDINGS: Final = 5
MOST_PARTS: Final = 2
MOST_LIMITS: Final = 4
_MARKUP: Final = re.compile(r"([\\`*_{}\[\]<>#|~!&$@]|(?<=\w)://)")


def write_markdown(result: Analysis, target: str) -> None:
    """Write the summary to the file ``target``, ``-`` being standard output. Raises OSError."""
    with replacing(target) as file:
        file.write("\n".join(markdown_lines(result)) + "\n")


def markdown_lines(result: Analysis) -> list[str]:
    """The summary, line by line."""
    result = tidied(result)
    names = Names(result)
    with unwrapped():
        headline, *details = list(verdict_lines(result, names, Paint(False)))
    lines = [f"**{escaped(headline)}**", ""]
    lines += [f"- {escaped(clean(line.strip()))}" for line in details[:MOST_VERDICT]]
    if result.lateness:
        lines += ["", *_table(result, names)]
    if result.findings:
        lines += ["", "**Findings**", "", *_findings(result)]
    if result.limits:
        lines += ["", "**What these captures cannot show**", ""]
        lines += [f"- {escaped(sentence)}" for sentence in result.limits[:MOST_LIMITS]]
        if len(result.limits) > MOST_LIMITS:
            lines.append(f"- and {len(result.limits) - MOST_LIMITS} more, in the JSON")
    assert len(lines) <= MOST_LINES
    return lines


def escaped(text: str) -> str:
    """``text`` that Markdown shows as it is: no markup, no mention, no link."""
    return _MARKUP.sub(lambda match: "".join(f"\\{sign}" for sign in match[0]), text)


def _table(result: Analysis, names: Names) -> Iterator[str]:
    rows = worst_first(result.lateness)
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"| {' | '.join(['---', '---', *['---:'] * (len(HEADINGS) - 2)])} |"
    for row in rows[:MOST_ROWS]:
        cells = [names.long(row.endpoint), *figures_of(row)]
        yield f"| {' | '.join(map(escaped, cells))} |"
    if len(rows) > MOST_ROWS:
        yield ""
        yield f"and {count(len(rows) - MOST_ROWS, 'endpoint')} more, in the JSON"


def _findings(result: Analysis) -> Iterator[str]:
    found = by_severity(result.findings)
    for each in found[:MOST_FINDINGS]:
        head = f"{each.severity}: {each.condition} ({percent(each.confidence)} sure{_cost(each)})"
        yield f"- **{escaped(head)}** {escaped(each.summary)}"
        if each.evidence:
            yield f"  `{each.evidence[0].filter.replace('`', '')}`"
        for part in each.consists_of[:MOST_PARTS]:
            yield f"  with it: **{escaped(part_head(part))}** {escaped(part.summary)}"
    if len(found) > MOST_FINDINGS:
        yield f"- and {len(found) - MOST_FINDINGS} more, in the JSON"


def _cost(finding: Finding) -> str:
    words, what = cost_words(finding.condition)
    return "" if finding.cost_ns is None else f", {words(finding.cost_ns)} {what}"
