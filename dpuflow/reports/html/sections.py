"""The parts of the page that are tables and bars: ranks, steps, pipelines, transfers, clocks, limits."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.quantities import count, duration, listed, percent, three_digits
from dpuflow.reports.html.figures import apart, in_bytes, position, share, told, whole
from dpuflow.reports.html.markup import Markup, figure, grid, join, tag
from dpuflow.reports.meanings import meaning_of
from dpuflow.reports.text import inherited, mostly_own, worst_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.reports.names import Names
    from dpuflow.results import Account, Analysis, Lateness, Pipeline

MOST_RANKS: Final = 200
AT_ONCE: Final = 16
MOST_ACCOUNTS: Final = 16
MOST_TRANSFERS: Final = 50
MOST_LISTED: Final = 100
SHOWN: Final = {
    "captures", "clocks", "endpoints", "flows", "groups", "collectives", "lateness", "edges", "what_if",
    "steps",    "accounts", "pipelines", "transfers", "findings", "judged", "limits", "start_ns", "end_ns",
}  # fmt: skip
"""Lists that have a section of their own; others are shown as plain tables."""


COLUMNS: Final = (
    "A rank is late by its own doing (own), or as its inputs were late (inherited), in so many of the"
    " collectives in which its lateness is known (of), by so much in the median; verdict and cause speak of"
    " the former. Entry times are"
    " exact (measured, with an error), bounded, or unknown. Detectable: the smallest lateness a step that"
    " would have been named."
)


def ranks(result: Analysis, names: Names) -> Markup:
    """A row for each endpoint, those late first, by the wait that they caused."""
    if not result.lateness:
        return figure("Ranks", "No rank's entry into a collective is known.", key="ranks")
    place = {id(row): number for number, row in enumerate(result.lateness)}
    rows = worst_first(result.lateness)
    most = max((row.caused_wait_ns or 0 for row in rows), default=0)
    cells = [_rank(row, f"lateness/{place[id(row)]}", names, most) for row in rows[:MOST_RANKS]]
    heads = ["endpoint", "verdict", "caused wait", "share of the largest", "own", "inherited",
             "arrived last", "of", "steadiness",
             "cause", "exact / bounded / unknown", "detectable", "confidence"]  # fmt: skip
    left = len(rows) - len(cells)
    said = COLUMNS
    said += f" {count(left, 'endpoint')} that caused less wait are in the JSON only." if left > 0 else ""
    first = grid(heads, cells[:AT_ONCE], caption="Ranks by caused wait")
    rest: object = ""
    if len(cells) > AT_ONCE:
        below = grid(heads, cells[AT_ONCE:], caption="Ranks that caused less wait")
        rest = tag("details", tag("summary", f"{len(cells) - AT_ONCE:,} more"), below)
    return figure("Ranks", said, first, rest, key="ranks")


def _rank(row: Lateness, at: str, names: Names, most: int) -> list[object]:
    bar = tag("svg", tag("rect", width=position((row.caused_wait_ns or 0) / max(most, 1)), height=10),
              class_="bar small", aria_hidden="true")  # fmt: skip
    before = ">=" if row.late_bound == "at_least" else ""
    own: list[object] = [told(row.own_share, f"{at}/own_share", share)]
    handed: list[object] = [percent(inherited(row))]
    if row.late_ns is not None:
        mine = own if mostly_own(row) else handed
        mine += [", ", told(row.late_ns, f"{at}/late_ns", before=before)]
    since = row.steadiness or "-"
    kinds = (("exact", row.told.exact), ("bounded", row.told.bounded), ("untold", row.told.untold))
    return [
        names.long(row.endpoint),
        tag("span", row.verdict.replace("_", " "), class_=f"verdict {row.verdict}"),
        told(row.caused_wait_ns, f"{at}/caused_wait_ns"), bar,
        join(own), join(handed), told(row.last_share, f"{at}/last_share", share),
        told(row.collectives, f"{at}/collectives", whole), since, row.cause,
        join([told(number, f"{at}/told/{kind}", whole) for kind, number in kinds], " / "),
        told(row.detectable_ns, f"{at}/detectable_ns"), told(row.confidence, f"{at}/confidence", share),
    ]  # fmt: skip


def steps(result: Analysis, names: Names) -> Markup | str:
    """What a step took, where its time went, and what it would take without a late rank."""
    if not result.steps and not result.accounts:
        return ""
    parts: list[object] = []
    for number, each in enumerate(result.accounts[:MOST_ACCOUNTS]):
        parts.append(_account(each, f"accounts/{number}", names))
    rows: list[list[object]] = []
    for number, row in enumerate(result.steps[:MOST_LISTED]):
        at = f"steps/{number}"
        rate = told(row.tokens_per_s, f"{at}/tokens_per_s", three_digits)
        line: list[object] = [
            row.kind or "step", told(row.count, f"{at}/count", whole),
            told(row.collectives, f"{at}/collectives", whole),
            told(row.step_ns, f"{at}/step_ns"), told(row.p99_ns, f"{at}/p99_ns"), rate,
        ]  # fmt: skip
        rows.append(line)
    heads = ["kind", "count", "operations", "median", "99th percentile", "tokens/s"]
    parts.append(grid(heads, rows, caption="Steps and tokens") if rows else "")
    rows = [
        [names.long(row.endpoint), told(row.step_ns, f"what_if/{n}/step_ns"),
         told(row.step_without_ns, f"what_if/{n}/step_without_ns")]
        for n, row in enumerate(result.what_if[:MOST_LISTED])
    ]  # fmt: skip
    parts.append(
        grid(["late rank", "a step takes", "without its lateness"], rows, caption="What if") if rows else ""
    )
    said = (
        "Of the median step: its time along the critical path, in the shares of the middle half of all steps."
    )
    return figure("Where a step's time goes", said, *parts, key="steps")


def _account(each: Account, at: str, names: Names) -> Markup:
    """A bar of the parts of a step, and the same as a list."""
    waited = {end: ns for end, ns in each.waited.items() if ns > 0}
    parts: list[tuple[str, str, int, str]] = []
    for end, ns in each.parts.work.items():
        parts.append(
            (f"work of {names.short(int(end))}", "work", ns - waited.get(end, 0), f"{at}/parts/work/{end}")
        )
        if end in waited:
            parts.append(
                (f"others waiting for {names.short(int(end))}", "w0", waited[end], f"{at}/waited/{end}")
            )
    for key, kind in (("library", "p1"), ("transfer", "moves"), ("network", "p2"), ("credit", "p3")):
        parts.append((key, kind, getattr(each.parts, key), f"{at}/parts/{key}"))
    parts += [
        (f"inside node {node}", "p4", ns, f"{at}/parts/in_node/{node}")
        for node, ns in each.parts.in_node.items()
    ]
    parts.append(("unexplained", "p5", each.parts.unexplained, f"{at}/parts/unexplained"))
    bars, left, total = [], 0, max(each.step_ns, 1)
    items = []
    for word, kind, ns, place in (part for part in parts if part[2] > 0):
        shape = {"x": position(left / total), "width": position(ns / total), "height": 22, "class_": kind}
        bars.append(tag("rect", **shape))
        left += ns
        less = kind == "work" and place.rsplit("/", 1)[1] in waited
        number: object = duration(ns) if less else told(ns, place)
        items.append(tag("li", tag("i", class_=f"key {kind}"), word, " ", number))
    head = ["A step of ", told(each.step_ns, f"{at}/step_ns"), ", group ", str(each.group), ": ",
            told(each.exposed_ns, f"{at}/exposed_ns"), " of it communication that no work hides"]  # fmt: skip
    band = tag("svg", *bars, class_="parts", aria_hidden="true")
    return tag("div", tag("p", *head), band, tag("ul", *items, class_="legend"), class_="account")


def pipelines(result: Analysis, names: Names) -> Markup | str:
    """Stages of each pipeline: what they work for a microbatch, and their bubble."""
    if not result.pipelines:
        return ""
    parts = [
        _pipeline(each, f"pipelines/{n}", names) for n, each in enumerate(result.pipelines[:MOST_LISTED])
    ]
    said = "What each stage works for one microbatch, and which share of the time it is idle (the bubble)."
    return figure("Pipelines", said, *parts, key="pipelines")


def _pipeline(each: Pipeline, at: str, names: Names) -> Markup:
    most = max((f or 0) + (b or 0) for f, b in zip(each.forward_ns, each.backward_ns, strict=True)) or 1
    rows = []
    for n, (stage, forward, backward) in enumerate(
        zip(each.stages, each.forward_ns, each.backward_ns, strict=True)
    ):
        idle, begin = each.idle_share[n], (forward or 0) / most
        bars = [tag("rect", x=0, width=position(begin), height=10, class_="work"),
                tag("rect", x=position(begin), width=position((backward or 0) / most), height=10,
                    class_="p1")]  # fmt: skip
        late = " (late)" if stage in each.late else ""
        rows.append([
            f"{n}: {names.short(stage)}{late}", told(forward, f"{at}/forward_ns/{n}"),
            told(backward, f"{at}/backward_ns/{n}"), tag("svg", *bars, class_="bar", aria_hidden="true"),
            told(idle, f"{at}/idle_share/{n}", share),
        ])  # fmt: skip
    words = f"{len(each.stages)} stages, {each.schedule or 'schedule not known'}"
    words += f", {count(each.microbatches, 'microbatch', 'microbatches')}" if each.microbatches else ""
    return grid(["stage", "forward", "backward", "both", "idle"], rows, caption=words)


def transfers(result: Analysis, names: Names) -> Markup | str:
    """Bulk one-sided transfers, those first for which a receiver waited longest."""
    if not result.transfers:
        return ""
    order = sorted(result.transfers, key=lambda each: -(each.wait_before_first_token_ns or 0))[
        :MOST_TRANSFERS
    ]
    rows = []
    for each in order:
        at = f"transfers/{each.id}"
        rows.append([
            f"{names.short(each.src)} to {names.short(each.dst)}", each.verb,
            told(each.bytes, f"{at}/bytes", in_bytes),
            told(each.pages, f"{at}/pages", whole), told(each.busy_ns, f"{at}/busy_ns"),
            told(each.wait_before_first_token_ns, f"{at}/wait_before_first_token_ns"),
            (each.likely or "-").replace("_", " "), each.path or "-",
        ])  # fmt: skip
    heads = ["transfer", "verb", "bytes", "pages", "under way", "receiver waited", "likely", "network"]
    left = len(result.transfers) - len(order)
    said = f"{count(left, 'transfer')} with less waiting are in the JSON only." if left else ""
    table = grid(heads, rows, caption="Bulk one-sided transfers")
    return figure("Transfers", said, table, key="transfers")


def clocks(result: Analysis) -> Markup | str:
    """Captures with what was lost, and how their clocks are tied."""
    if not result.captures:
        return ""
    tied = {clock.capture: number for number, clock in enumerate(result.clocks)}
    rows = []
    for each in result.captures[:MOST_LISTED]:
        at = f"captures/{each.id}"
        row: list[object] = [each.vantage, told(each.packets, f"{at}/packets", whole)]
        lost: object = told(each.lost_packets, f"{at}/lost_packets", whole)
        row.append("not said" if each.lost_packets is None else lost)
        number = tied.get(each.id)
        if number is None:
            row += ["-", "-", "-", "-"]
        else:
            clock, c = result.clocks[number], f"clocks/{number}"
            row += [told(clock.offset_ns, f"{c}/offset_ns"), told(clock.error_ns, f"{c}/error_ns", apart)]
            row += [clock.method, clock.why]
        rows.append(row)
    heads = ["capture", "packets", "lost", "clock offset", "error", "method", "why"]
    said = "How each capture's clock is tied to the reference, and how sure that is (95 %)."
    return figure(
        "Captures and clocks", said, grid(heads, rows, caption="Captures and their clocks"), key="clocks"
    )


def limits(result: Analysis) -> Markup:
    """What was not seen: as plain as what was."""
    sentences = result.limits or ["Nothing that dpuflow knows of is missing from these captures."]
    parts: list[object] = [tag("ul", *[tag("li", each) for each in sentences[: 5 * MOST_LISTED]])]
    for state, word in (("found", "Found"), ("not_found", "Looked for and not found")):
        names = [row.condition.replace("_", " ") for row in result.judged if row.state == state]
        parts.append(tag("p", tag("b", f"{word}: "), listed(names, len(names)), ".") if names else "")
    why: dict[tuple[str, bool], list[str]] = {}
    for row in result.judged:
        if row.reason:
            part = row.state != "not_judged"
            why.setdefault((row.reason, part), []).append(row.condition.replace("_", " "))
    if why:
        rows = [[listed(names, len(names)), "in part" if part else "all", reason]
                for (reason, part), names in why.items()]  # fmt: skip
        parts.append(grid(["condition", "not judged", "why not"], rows, caption="What could not be judged"))
    return figure("What these captures cannot show", "", *parts, key="limits")


def others(result: Analysis, names: Names) -> Iterator[Markup]:
    """Lists that have no section of their own, as plain tables."""
    for name in (each.name for each in fields(result)):
        rows = getattr(result, name)
        if name in SHOWN or not isinstance(rows, list) or not rows or not is_dataclass(rows[0]):
            continue
        keys = [each.name for each in fields(rows[0])]
        keys = [key for key in keys if any(getattr(row, key) not in (None, []) for row in rows)]
        heads = [tag("span", _heading(key), title=meaning_of(name, key)) for key in keys]
        cells = [
            [_plain(getattr(row, key), f"{name}/{number}/{key}", names, result.start_ns or 0) for key in keys]
            for number, row in enumerate(rows[:MOST_LISTED])
        ]
        left = len(rows) - len(cells)
        said = f"{left:,} more are in the JSON only." if left > 0 else ""
        title = TITLES.get(name, name.replace("_", " ").capitalize())
        yield figure(title, said, grid(heads, cells, caption=f"{title}, row by row"), key=name)


TITLES: Final = {
    "tax": "Communication overhead",
    "loss_tax": "Cost of losses",
    "all_reduce_what_if": "Other all_reduce algorithms",
    "network_cost": "Rate and delay by pair",
}
_ENDS: Final = ("src", "dst", "endpoint", "endpoints", "client", "server")


def _heading(key: str) -> str:
    """``p50_ns``: ``p50``; units stand with the numbers."""
    for unit in ("_ns", "_share", "_bits_per_s"):
        key = key.removesuffix(unit)
    return key.replace("_", " ")


def _plain(value: object, at: str, names: Names, start_ns: int) -> object:
    """A value as people read it, by its key: spans, shares, bytes, endpoints; times from the start on."""
    key = at.rsplit("/", 1)[1]
    if isinstance(value, list):
        return listed([names.short(each) if key in _ENDS else str(each) for each in value], 8)
    if key in _ENDS and isinstance(value, int):
        return names.short(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value).replace("_", " ")
    if key.endswith("_ns"):
        return told(value, at, lambda ns: f"at {duration(ns - start_ns)}" if ns >= EPOCH_NS else duration(ns))
    if key.endswith("bits_per_s"):
        return told(value, at, lambda rate: f"{three_digits(rate / 1e6)} Mbit/s")
    if key == "group":
        return told(value, at, lambda number: f"group {number}")
    if key.endswith("_share"):
        return told(value, at, share)
    if key.endswith("bytes") or key == "bytes_up_to":
        return told(value, at, in_bytes)
    return told(value, at, three_digits if isinstance(value, float) else whole)


EPOCH_NS: Final = 10**17
"""Times of day are beyond this, spans below: three years."""
