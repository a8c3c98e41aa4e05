"""The screen as lines: what is seen, how it is looked at and how large the terminal is in, text out.

Nothing here knows of terminals, so tests compare screens as text. A line has a style by name; without colours
everything can still be told apart: verdicts are words, a bound's bar has another character, the row that is
chosen begins with ``>``.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.quantities import duration, percent
from dpuflow.reports.top.seen import late_words

if TYPE_CHECKING:
    from dpuflow.reports.top.seen import Rank, Seen

SORTS: Final = ("waited", "late by", "rank", "name")
KEYS: Final = "q quit  s sort  / filter  p pause  arrows choose  Enter open  c copy filter"
LEAST: Final = (40, 8)
"""Below so many columns and lines nothing sensible fits."""
MOST_FINDINGS: Final = 5
_VERDICTS: Final = {"late": "bad", "intermittent": "warn"}
_GRAVE: Final = {"critical": "bad", "warning": "warn"}


class Line(NamedTuple):
    """Text and a style: title, bad, warn, quiet or nothing."""

    text: str
    style: str = ""


@dataclass
class View:
    """How one looks: what the keys change."""

    sort: str = SORTS[0]
    filter: str = ""
    typing: bool = False
    paused: bool = False
    opened: bool = False
    chosen: int = 0
    ascii: bool = False
    note: str = ""

    def ranks(self, seen: Seen) -> list[Rank]:
        """Rows in their order, those only that the filter leaves."""
        wanted = self.filter.lower()
        rows = [each for each in seen.ranks if wanted in f"{each.name} {each.row.verdict}".lower()]
        keys = {
            "waited": lambda each: (-(each.row.caused_wait_ns or 0), each.name),
            "late by": lambda each: (-(each.late_ns or 0), each.name),
            "rank": lambda each: (each.end.rank is None, each.end.rank or 0, each.name),
            "name": lambda each: each.name,
        }
        return sorted(rows, key=keys[self.sort])

    def of(self, seen: Seen) -> Rank | None:
        """The row that is chosen."""
        rows = self.ranks(seen)
        self.chosen = max(0, min(self.chosen, len(rows) - 1))
        return rows[self.chosen] if rows else None

    def filter_to_copy(self, seen: Seen) -> str | None:
        """The Wireshark filter of the gravest finding that has one."""
        return next((e.filter for each, _ in seen.findings for e in each.evidence if e.filter), None)


def screen(seen: Seen, view: View, width: int, height: int) -> list[Line]:
    """``height`` lines of at most ``width`` characters."""
    if width < LEAST[0] or height < LEAST[1]:
        return [Line("too small"[:width])][:height]
    top = _head(seen, view, width)
    below = _opened(seen, view, width) if view.opened else _findings(seen, width)
    keys = f"/{view.filter}_" if view.typing else view.note or KEYS
    room = height - len(top) - 2
    below = below[: max(room // 2, 1)]
    table = _table(seen, view, width, max(room - len(below), 0))
    table += [Line("")] * (room - len(below) - len(table))
    lines = [*top, *table, *below]
    lines += [Line("")] * (height - 1 - len(lines))
    return [Line(text[:width], style) for text, style in [*lines[: height - 1], Line(keys, "quiet")]]


def _head(seen: Seen, view: View, width: int) -> list[Line]:
    said = ["dpuflow top", *(["PAUSED"] if view.paused else []), f"by {view.sort}"]
    said += [f"only {view.filter!r}"] if view.filter else []
    said += [f"last {duration(seen.span_ns)}"] if seen.span_ns else []
    said.append(seen.source)
    lines = [Line("  ".join(said), "title")]
    if seen.away is not None:
        lines += [Line(text, "bad") for text in wrap(seen.away, width)]
    lines += [Line(text, "quiet") for text in wrap(", ".join(seen.health), width)[:2]]
    lines += [Line(each) for each in seen.jobs[:2]]
    lines += [Line(text, "warn") for each in seen.waits()[:1] for text in wrap(each, width)[:2]]
    return [*lines, Line("")]


def _table(seen: Seen, view: View, width: int, room: int) -> list[Line]:
    """As many rows as fit, those about the chosen one."""
    rows = view.ranks(seen)
    chosen = view.of(seen)
    if not rows:
        return [Line("no rank is known yet" if not seen.ranks else "the filter leaves no rank")][:room]
    name = min(max(len(each.name) for each in rows), max(width - 52, 12))
    most = max(each.late_ns or 0 for each in rows)
    lines = [
        Line(f"  {'endpoint':<{name}}  {'verdict':<12} {'late by':>9} {'own':>5} {'waited':>8}", "quiet")
    ]
    first = max(0, min(view.chosen - (room - 1) // 2, len(rows) - (room - 1)))
    for each in rows[first : first + max(room - 1, 0)]:
        row = each.row
        late = ("" if each.measured or each.late_ns is None else ">=") + duration(each.late_ns)
        text = f"{'>' if each is chosen else ' '} {_fit(each.names, name):<{name}}"
        text += f"  {row.verdict.replace('_', ' '):<12} {late:>9} {percent(row.own_share):>5}"
        text += f" {duration(row.caused_wait_ns):>8}  "
        lines.append(
            Line(text + _bar(each, most, width - len(text), view.ascii), _VERDICTS.get(row.verdict, ""))
        )
    return lines[:room]


def _fit(names: tuple[str, ...], width: int) -> str:
    """The longest name that fits; where none does, both ends of the shortest, which tell names apart."""
    half = (width - 2) // 2
    short = names[-1]
    cut = short if len(short) <= width else f"{short[: width - 2 - half]}..{short[-half:]}"
    return next((each for each in names if len(each) <= width), cut)


def _bar(each: Rank, most: int, room: int, ascii_only: bool) -> str:
    """Full where it is a measurement, light where it is a bound."""
    length = round((each.late_ns or 0) / most * room) if most and room > 0 else 0
    full, light = ("#", "-") if ascii_only else ("\u2588", "\u2591")
    return (full if each.measured else light) * length


def _findings(seen: Seen, width: int) -> list[Line]:
    if not seen.findings:
        return [Line("no findings", "quiet")]
    lines = []
    for each, who in seen.findings[:MOST_FINDINGS]:
        said = f"{each.severity}: {each.condition.replace('_', ' ')} ({who}): {each.summary}"
        first, *more = wrap(said, width)
        lines.append(Line(first, _GRAVE.get(each.severity, "")))
        lines += [Line(f"  {text}", "quiet") for text in more[:1]]
    left = len(seen.findings) - MOST_FINDINGS
    return [*lines, *([Line(f"and {left} more findings", "quiet")] if left > 0 else [])]


def _opened(seen: Seen, view: View, width: int) -> list[Line]:
    """All that is known of the chosen rank."""
    chosen = view.of(seen)
    if chosen is None:
        return []
    row = chosen.row
    said = [
        f"{late_words(chosen)}; {row.verdict.replace('_', ' ')}, {row.steadiness or 'no habit'}",
        f"in {row.collectives:,} collectives: {row.told.exact:,} measured, {row.told.bounded:,} bounds,"
        f" {row.told.untold:,} unknown; the last in {percent(row.last_share)}",
        f"likely cause: {row.cause}",
    ]
    said[-1] += "" if row.confidence is None else f"; {percent(row.confidence)} sure"
    if row.detectable_ns is not None:
        said[-1] += f"; from {duration(row.detectable_ns)} a step on it would be named"
    for each, who in seen.findings:
        if chosen.name.split(" (")[0] in who.split(", "):
            said.append(f"{each.condition.replace('_', ' ')}: {each.advice}")
            said += [f"filter: {evidence.filter}" for evidence in each.evidence[:1]]
    return [Line(text) for each in said for text in wrap(each, width)]
