"""The first screen and the findings: what the reader came for.

In: the result. Out: the verdict in the terminal's words, the three worst findings with their cost, and all
findings with packets, filters and other explanations.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from dpuflow import __version__
from dpuflow.quantities import count, duration
from dpuflow.reports.headline import STUCK
from dpuflow.reports.html.figures import share, told
from dpuflow.reports.html.markup import Markup, figure, join, tag
from dpuflow.reports.layout import Paint, unwrapped
from dpuflow.reports.text import by_severity, cost_words, part_head
from dpuflow.reports.tidy import clean
from dpuflow.reports.verdict import verdict_lines

if TYPE_CHECKING:
    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Finding

WORST: Final = 3
MOST_FINDINGS: Final = 100
MOST_EVIDENCE: Final = 4
MOST_DETAILS: Final = 14
LONGEST_UNSEEN: Final = 300
LONG_TITLE: Final = 60
"""Characters from which on a headline is set smaller."""
THROUGHOUT: Final = 0.95
"""What lasts for this share of the job is there from beginning to end."""


def verdict(result: Analysis, names: Names) -> Markup:
    """Headline, what the terminal says below it, and what was not seen."""
    with unwrapped():
        headline, *details = list(verdict_lines(result, names, Paint(True)))
    style, headline = _style(headline)
    said = [tag("li", *_keyed(line.strip())) for line in details[:MOST_DETAILS]]
    title = tag("h1", headline, class_="long" if len(headline) > LONG_TITLE else None)
    return tag("div", title, tag("ul", *said, tag("li", *_unseen(result))), class_=f"answer {style}")


def _style(line: str) -> tuple[str, str]:
    """The terminal's colour of a line as a class, and the line without it."""
    style = (
        {"1;31": "bad", "1;33": "warn", "1;32": "good"}.get(line[2 : line.find("m")], "")
        if "\033" in line
        else ""
    )
    return style, line.removesuffix("\033[0m").split("m", 1)[-1] if style else line


def _keyed(line: str) -> list[object]:
    """``cost: the others waited ...``: the word before the colon stands out."""
    head, colon, rest = line.partition(": ")
    return [tag("b", head), f": {rest}"] if colon and len(head) < 24 else [line]


def about(result: Analysis) -> str:
    """One line: when, how long, how much."""
    parts = ["dpuflow " + __version__]
    if result.start_ns is not None and result.end_ns is not None:
        when = datetime.fromtimestamp(result.start_ns // 10**9, timezone.utc)
        parts += [f"{when:%Y-%m-%d %H:%M:%S} UTC", duration(result.end_ns - result.start_ns)]
    parts.append(count(len(result.captures), "capture"))
    parts.append(count(sum(each.packets for each in result.captures), "packet"))
    calls = sum(each.op != "send_recv" for each in result.collectives)
    parts.append(f"{count(calls, 'collective')} of {count(len(result.lateness), 'endpoint')}")
    return " \u00b7 ".join(parts)


def worst_findings(result: Analysis) -> Markup:
    """Three lines with a link each."""
    found = by_severity(result.findings)
    if not found:
        return tag("div", tag("h2", "Findings"), tag("p", "None.", class_="quiet"), class_="worst")
    items = [
        tag("li", tag("a", _name(each), href=f"#finding-{each.id}"), " ", _badge(each), _cost(result, each),
            ", ", told(each.confidence, f"findings/{each.id}/confidence", share), " sure",
            _when(result, each), tag("span", each.summary, class_="brief"))
        for each in found[:WORST]
    ]  # fmt: skip
    left = len(found) - len(items)
    more = tag("p", tag("a", f"and {left:,} more", href="#findings")) if left > 0 else ""
    return tag("div", tag("h2", "Worst findings"), tag("ol", *items), more, class_="worst")


def _unseen(result: Analysis) -> list[object]:
    """What these captures cannot show, in brief: as much of a verdict as its grounds."""
    said = [clean(each, LONGEST_UNSEEN) for each in result.limits[:1]]
    left = len(result.limits) - len(said)
    dark = sum(each.state == "not_judged" for each in result.judged)
    more = [f"{left:,} more"] if left else []
    more += [f"{count(dark, 'condition')} not judged"] if dark else []
    link = tag("a", ", ".join(more) or "What was looked for", href="#limits")
    known = said or ["the captures have no gap that dpuflow knows of."]
    return [tag("b", "not seen"), ": ", *known, " ", link]


def findings(result: Analysis, names: Names) -> Markup:
    """All of them, the critical ones first."""
    found = by_severity(result.findings)
    if not found:
        return figure("Findings", "None.", key="findings")
    left = len(found) - MOST_FINDINGS
    said = f"{count(left, 'finding')} less severe are in the JSON only." if left > 0 else ""
    return figure(
        "Findings", said, *[_card(result, each, names) for each in found[:MOST_FINDINGS]], key="findings"
    )


def _name(each: Finding) -> str:
    return each.condition.replace("_", " ")


def _badge(each: Finding) -> Markup:
    return tag("span", each.severity, class_=f"badge {each.severity}")


def _cost(result: Analysis, each: Finding) -> Markup | str:
    """What it took: the finding's own figure, else the wait that its endpoint caused."""
    words, said = cost_words(each.condition)
    if each.cost_ns is not None:
        return join([" ", told(each.cost_ns, f"findings/{each.id}/cost_ns", words), f" {said}"])
    for place, row in enumerate(result.lateness):
        if each.condition == "straggler" and each.endpoints == [row.endpoint] and row.caused_wait_ns:
            at = f"lateness/{place}/caused_wait_ns"
            return join([" ", told(row.caused_wait_ns, at, words), f" {said}"])
    return ""


def _when(result: Analysis, each: Finding) -> str:
    """``, from 120 ms to 400 ms``, as the axis of the time line counts; nothing where there is none."""
    islands = {clock.island for clock in result.clocks if clock.island is not None}
    if each.start_ns is None or each.end_ns is None or not result.collectives or len(islands) > 1:
        return ""
    first = min(call.start_ns for call in result.collectives)
    last = max(call.end_ns for call in result.collectives)
    begin, end = (min(max(at, first), last) - first for at in (each.start_ns, each.end_ns))
    if each.condition in STUCK:
        return f", since {duration(begin)}"
    if end - begin > THROUGHOUT * (last - first):
        return ", throughout"
    return f", from {duration(begin)} to {duration(end)}"


def _card(result: Analysis, each: Finding, names: Names) -> Markup:
    at = f"findings/{each.id}"
    sure = tag("span", told(each.confidence, f"{at}/confidence", share), " sure", class_="brief")
    head = tag("h3", _name(each), " ", _badge(each), _cost(result, each), " ", sure)
    parts: list[object] = [head, tag("p", each.summary)]
    if each.advice:
        parts.append(tag("p", tag("b", "What to do: "), each.advice))
    if each.alternatives:
        parts.append(tag("p", tag("b", "Other explanations: "), "; ".join(each.alternatives)))
    for part in each.consists_of:
        parts.append(tag("p", tag("b", f"With it: {part_head(part)}. "), part.summary, class_="quiet"))
        parts += [tag("div", tag("code", shown.filter), class_="filter") for shown in part.evidence[:1]]
    for evidence in each.evidence[:MOST_EVIDENCE]:
        button = tag("button", "Copy filter", type="button", data_copy=evidence.filter, hidden=True)
        parts.append(tag("p", names.where(evidence), class_="quiet"))
        parts.append(tag("div", tag("code", evidence.filter), button, class_="filter"))
    left = len(each.evidence) - MOST_EVIDENCE
    parts.append(tag("p", f"and {left:,} more places, in the JSON", class_="quiet") if left > 0 else "")
    return tag("article", *parts, id=f"finding-{each.id}", class_=f"card {each.severity}")
