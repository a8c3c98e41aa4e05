"""The page put together: head with its policy, the first screen, and the parts below it."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from dpuflow.reports.columns import entry_columns
from dpuflow.reports.html import sections
from dpuflow.reports.html.heat import heat_map
from dpuflow.reports.html.markup import Markup, tag
from dpuflow.reports.html.opened import opened
from dpuflow.reports.html.timeline import timeline
from dpuflow.reports.html.told import about, findings, verdict, worst_findings
from dpuflow.reports.html.traffic import traffic
from dpuflow.reports.names import Names
from dpuflow.reports.output import replacing
from dpuflow.reports.tidy import tidied

if TYPE_CHECKING:
    from dpuflow.reports.columns import EntryColumns
    from dpuflow.results import Analysis


def write_html(result: Analysis, target: str) -> None:
    """Write the page to the file ``target``, ``-`` being standard output. Raises OSError."""
    text = page(result)
    with replacing(target) as file:
        file.write(text)


def page(result: Analysis) -> str:
    """The whole page."""
    result = tidied(result)
    names = Names(result)
    return document(result, *_body(result, names))


def document(result: Analysis, *parts: object) -> str:
    """A page of its own that has these parts."""
    style, script = _asset("page.css"), _asset("page.js")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"dpuflow: {_title(result)}"),
        tag("style", Markup(style)),
    ]
    body = [tag("main", *parts), tag("script", Markup(script))]
    return f"<!doctype html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def first_screen(result: Analysis, entries: EntryColumns, names: Names) -> Markup:
    """Verdict with what was not seen, time line, the worst findings."""
    line = timeline(result, entries, names)
    return tag(
        "header",
        tag("p", about(result), class_="about"),
        verdict(result, names),
        line,
        worst_findings(result),
    )


def _body(result: Analysis, names: Names) -> list[object]:
    entries = entry_columns(result)
    parts: list[object] = [
        sections.steps(result, names),
        sections.ranks(result, names),
        heat_map(result, entries, names),
        opened(result, names),
        sections.pipelines(result, names),
        sections.transfers(result, names),
        traffic(result, names),
        findings(result, names),
        sections.clocks(result),
        *sections.others(result, names),
        sections.limits(result),
    ]
    return [first_screen(result, entries, names), _contents(parts), *parts]


def _contents(parts: list[object]) -> Markup:
    """Links to the parts that are there."""
    titles = (("steps", "Steps"), ("ranks", "Ranks"), ("heat", "Rank by step"),
              ("collectives", "Collectives"),
              ("pipelines", "Pipelines"), ("transfers", "Transfers"), ("traffic", "Traffic"),
              ("findings", "Findings"), ("clocks", "Clocks"), ("limits", "What is not seen"))  # fmt: skip
    there = [(key, word) for key, word in titles if any(f'id="{key}"' in str(part)[:200] for part in parts)]
    return tag(
        "nav", *[tag("a", word, href=f"#{key}") for key, word in there], aria_label="Parts of this page"
    )


def _title(result: Analysis) -> str:
    late = [row.endpoint for row in result.lateness if row.verdict == "late"]
    return f"late: {Names(result).short(late[0])}" if late else "who was late"


def _asset(name: str) -> str:
    return files("dpuflow.reports.html").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing from anywhere, and of style and script only what is written here."""

    def hashed(text: str) -> str:
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(script)}; base-uri 'none';"
        " form-action 'none'"
    )
