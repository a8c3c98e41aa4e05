"""Collectives one by one, the worst first: when each rank entered, how sure that is, and why it is said.

In: the result. Out: a section with a fold for each of at most ``MOST_OPENED`` collectives, of each the
``MOST_RANKS`` latest ranks; what is left out is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.quantities import count, duration, size
from dpuflow.reports.html.figures import apart, position, told
from dpuflow.reports.html.markup import Markup, figure, grid, join, tag

if TYPE_CHECKING:
    from dpuflow.reports.names import Names
    from dpuflow.results import Analysis, Collective, RankEntry

MOST_OPENED: Final = 200
AT_ONCE: Final = 8
MOST_RANKS: Final = 12
BOUND_WORDS: Final = {"exact": "", "at_most": "\u2264 ", "at_least": "\u2265 ", "unobservable": ""}


def worst_collectives(result: Analysis) -> list[Collective]:
    """Those in which some rank was latest, the largest lateness first; upper bounds count for nothing."""
    return sorted(
        (each for each in result.collectives if each.ranks), key=lambda each: (-worst_ns(each), each.id)
    )[:MOST_OPENED]


def worst_ns(collective: Collective) -> int:
    """The largest lateness that is certain; -1 where the captures hold it only in part."""
    if not collective.complete:
        return -1
    known = (entry.lateness_ns or 0 for entry in collective.ranks if entry.bound in ("exact", "at_least"))
    return max(known, default=0)


def opened(result: Analysis, names: Names) -> Markup:
    """The section."""
    chosen = worst_collectives(result)
    if not chosen:
        return figure("Collectives", "None were found.", key="collectives")
    left = len(result.collectives) - len(chosen)
    said = "The worst first. A bar reaches from entry to exit, with the 95 % interval of its beginning."
    said += f" {count(left, 'collective')} with less lateness are in the JSON only." if left else ""
    said += "".join(f" Packets cannot be opened: {each}." for each in names.unopenable())
    folds = [_fold(each, names, place == 0) for place, each in enumerate(chosen)]
    more = len(folds) - AT_ONCE
    rest = [tag("summary", f"{more:,} more"), *folds[AT_ONCE:]]
    below = tag("details", *rest, class_="more") if more > 0 else ""
    return figure("Collectives", said, *folds[:AT_ONCE], below, key="collectives")


def _fold(each: Collective, names: Names, is_open: bool) -> Markup:
    at = f"collectives/{each.id}"
    latest = max(each.ranks, key=_lateness_order)
    head = [tag("b", f"{each.op} {each.id}"), f" {each.algorithm}" if each.algorithm != "unknown" else ""]
    head += [" of ", told(each.bytes, f"{at}/bytes", lambda value: size(int(value)))] if each.bytes else []
    if worst_ns(each) > 0:
        number = each.ranks.index(latest)
        head += [f", {names.short(latest.endpoint)} late by ", BOUND_WORDS[latest.bound]]
        head += [told(latest.lateness_ns, f"{at}/ranks/{number}/lateness_ns")]
    head += [", only partly captured"] if not each.complete else []
    return tag("details", tag("summary", *head), _ranks(each, names), open=is_open)


def _lateness_order(entry: RankEntry) -> tuple[bool, int]:
    return entry.bound in ("exact", "at_least"), entry.lateness_ns or 0


def _ranks(each: Collective, names: Names) -> Markup:
    at = f"collectives/{each.id}/ranks"
    order = sorted(range(len(each.ranks)), key=lambda place: _lateness_order(each.ranks[place]), reverse=True)
    rows = []
    for place in order[:MOST_RANKS]:
        entry = each.ranks[place]
        late: object = join([
            BOUND_WORDS[entry.bound], told(entry.lateness_ns, f"{at}/{place}/lateness_ns"), " ",
            told(entry.error_ns, f"{at}/{place}/error_ns", apart) if entry.error_ns is not None else "",
        ])  # fmt: skip
        rows.append([
            names.short(entry.endpoint), _bar(each, entry), late, entry.bound.replace("_", " "), entry.cause,
            entry.why,
        ])  # fmt: skip
    caption = f"{each.op} {each.id}, {duration(each.end_ns - each.start_ns)} long"
    heads = ["rank", "entry to exit", "lateness", "bound", "cause", "why"]
    table = grid(heads, rows, caption=caption)
    left = len(order) - MOST_RANKS
    more = tag("p", f"and {count(left, 'rank')} that entered earlier", class_="quiet") if left > 0 else ""
    return join([_phases(each), table, more])


def _phases(each: Collective) -> Markup | str:
    if not each.phases:
        return ""
    words = [f"{phase.name} {duration(phase.end_ns - phase.start_ns)}" for phase in each.phases]
    return tag("p", f"phases: {', '.join(words)}", class_="quiet")


def _bar(each: Collective, entry: RankEntry) -> Markup:
    """From enter to leave; a bound's open end is dashed."""
    begin, span = each.start_ns, max(each.end_ns - each.start_ns, 1)
    if entry.enter_ns is None:
        return tag(
            "svg",
            tag("line", x1="0", x2="100%", y1=7, y2=7, class_="unseen"),
            class_="bar",
            aria_hidden="true",
        )
    left = (entry.enter_ns - begin) / span
    right = ((each.end_ns if entry.leave_ns is None else entry.leave_ns) - begin) / span
    width = max(min(right, 1) - max(left, 0), 0)
    parts = [
        tag("rect", x=position(left), y=2, width=position(width), height=10, class_=f"stay {entry.bound}")
    ]
    mark = min(max(left, 0.005), 0.995)
    parts.append(tag("line", x1=position(mark), x2=position(mark), y1=1, y2=13, class_="enter"))
    if entry.error_ns:
        half = entry.error_ns / span
        parts.append(
            tag("line", x1=position(left - half), x2=position(left + half), y1=7, y2=7, class_="error")
        )
    if entry.bound == "at_most":
        parts.append(tag("line", x1="0", x2=position(left), y1=7, y2=7, class_="open"))
    elif entry.bound == "at_least":
        parts.append(tag("line", x1=position(left), x2=position(right), y1=7, y2=7, class_="open"))
    return tag("svg", *parts, class_="bar", aria_hidden="true")
