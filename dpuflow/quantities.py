"""Quantities as people read them: one text for one number, wherever it stands.

In: numbers of a result. Out: text for reports, findings, the agent's log and its notices. Plain ASCII.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.results import Endpoint, Lateness, Pipeline

UNKNOWN = "-"

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_BYTE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


MOST_DIGITS = 18  # a number of so many fits into 64 bits


def whole_number(text: str) -> int | None:
    """The number that a few ASCII digits say; None for any other text, whatever Python takes for digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def duration(value_ns: float | None) -> str:
    """A time span with three significant digits: ``9.82 ms``."""
    if value_ns is None:
        return UNKNOWN
    if value_ns < 0:
        return "-" + duration(-value_ns)
    for scale, unit in _TIME_UNITS:
        if value_ns >= scale * 0.9995:
            return f"{three_digits(value_ns / scale)} {unit}"
    return "0 ns"


def three_digits(value: float) -> str:
    """Three significant digits, as 9.82, 98.2, 982, 1,982; fewer where it is whole."""
    if value == int(value):
        return f"{int(value):,}"
    if value < 9.995:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def size(value: int | None) -> str:
    """Bytes in binary units where they are that large: ``256 KiB``."""
    if value is None:
        return UNKNOWN
    for scale, unit in _BYTE_UNITS:
        if value >= scale:
            return f"{value // scale:,} {unit}" if value % scale == 0 else f"{value / scale:,.1f} {unit}"
    return f"{value} B"


def percent(share: float | None) -> str:
    """A share of one, whole percents; what is not quite nothing or all is not shown as such."""
    if share is None:
        return UNKNOWN
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{share:.0%}".replace("%", " %")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 rank``, ``4 ranks``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(items: Sequence[str], most: int = 6, word: str = "and") -> str:
    """``a, b and c``; past ``most`` the rest as a number."""
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} {word} {len(items) - most + 1} more"
    return f" {word} ".join(filter(None, [", ".join(items[:-1]), items[-1]])) if items else "none"


def often(times: int) -> str:
    """``once``, ``twice``, ``three times``, ``12 times``: in words beside the number of a rank."""
    words = ("", "once", "twice", "three", "four", "five", "six", "seven", "eight", "nine")
    word = words[times] if 0 < times < len(words) else f"{times:,}"
    return word if times in (1, 2) else f"{word} times"


def sentence(text: str) -> str:
    """``text`` with a capital if it begins with an article; names of endpoints stay as they are."""
    return f"A{text[1:]}" if text.startswith("a ") else text


def rank_seconds(wait_ns: float) -> str:
    """Rank-nanoseconds in rank-seconds: ``0.735 rank-seconds``."""
    seconds = wait_ns / 1e9
    return f"{seconds:,.3g} rank-seconds" if seconds < 1000 else f"{seconds:,.0f} rank-seconds"


def late_by(row: Lateness) -> str:
    """By how much an endpoint is late when it is: ``10.1 ms``, ``at least 9 ms`` where that is a bound."""
    at_least = "at least " if row.late_bound == "at_least" else ""
    return f"{at_least}{duration(row.late_ns)}"


def late_in(row: Lateness) -> str:
    """In how many of its collectives an endpoint was late: ``26 of 27``."""
    return f"{round((row.late_share or 0) * row.collectives):,} of {row.collectives:,}"


def entry_times(exact: int, at_least: int, at_most: int, unknown: int) -> str:
    """How well they are known: ``all 9 entry times are exact``, ``26 entry times: 25 exact, 1 unknown``."""
    kinds = ((exact, "exact"), (at_least, "lower bound"), (at_most, "upper bound"), (unknown, "unknown"))
    parts = [
        (number, what + ("s" if "bound" in what and number > 1 else "")) for number, what in kinds if number
    ]
    total = exact + at_least + at_most + unknown
    if len(parts) == 1 and total > 1:
        return f"all {total:,} entry times are {parts[0][1]}"
    return f"{count(total, 'entry time')}: " + ", ".join(f"{number:,} {what}" for number, what in parts)


def name_of(endpoint: Endpoint) -> str:
    """``rank 2 (10.0.0.3, node2 GPU 0)``, ``10.0.0.3 (node2)``, or the address alone."""
    if endpoint.rank is not None:
        details = ", ".join(filter(None, [endpoint.address, endpoint.label]))
        return f"rank {endpoint.rank} ({details})"
    return f"{endpoint.address} ({endpoint.label})" if endpoint.label else endpoint.address


def node_name(members: Sequence[Endpoint]) -> str:
    """Endpoints of one node: ``node1 (ranks 4 to 7)``, ``one node (10.0.0.3 and 3 more)``."""
    first = members[0]
    ranks = sorted(each.rank for each in members if each.rank is not None)
    if len(ranks) < len(members):
        those = f"{first.address} and {len(members) - 1} more"
    elif ranks[-1] - ranks[0] == len(ranks) - 1 > 1:
        those = f"ranks {ranks[0]} to {ranks[-1]}"
    else:
        those = f"ranks {listed([str(rank) for rank in ranks], len(ranks))}"
    return f"{first.host or 'one node'} ({those})"


def in_steps(pipeline: Pipeline, endpoint: int) -> str:
    """In how many steps a stage worked longer, and by how much; empty where in none."""
    place = pipeline.stages.index(endpoint)
    longer = pipeline.late_step_ns[place] if place < len(pipeline.late_step_ns) else None
    if longer is None:
        return ""
    times = f"{pipeline.late_steps[place]} of {pipeline.steps} steps"
    return f"worked longer in {times}, by {duration(longer)} (median)"
